//! MaxSim: a task is a document. Its rows meet those of its queries in one product after the other, each of which leaves a maximum a row.
//!
//! Products are in f32 whatever the precision of the model's, and on AMX by vectors: those sum in one order whatever is multiplied
//! together, so that a score is the same bits beside any others. XTR's scores (`xtr.rs`) take a query as a task.

use std::cell::RefCell;

use rayon::prelude::*;

use super::elementwise::Columns;
use super::lanes::{Arithmetic, Isa, Precision, fma, kernel};
use super::math;
use super::product::{Operand, product_raw};
use crate::device::{MaxSimShape, MaxSimSide, NO_ROW, Span};

mod xtr;

/// Query rows that meet a document at once, about.
const ROWS: usize = 512;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

kernel! {
    /// The greatest element and its place; of equals the first. NaN where there are only such.
    fn greatest(x: &[f32]) -> (f32, u32) {
        let most = math::max(x);
        match x.iter().position(|&v| v == most) {
            Some(at) => (most, at as u32),
            None => (x[0], 0),
        }
    }
}

kernel! {
    fn add_scaled(y: &mut [f32], x: &[f32], factor: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = fma::<F>(*x, factor, *y);
        }
    }
}

fn operand(x: &[f32], span: Span, width: usize) -> Operand {
    let rows = &x[span.start as usize * width..span.end as usize * width];
    Operand { data: rows.as_ptr(), rows: span.len(), columns: width, row: width, column: 1 }
}

/// Pairs of one document, cut where their queries' rows do not follow each other or are enough for a product.
fn runs<'a>(shape: &'a MaxSimShape, pairs: &'a [u32]) -> impl Iterator<Item = (Span, &'a [u32])> {
    let span = |pair: u32| shape.queries[shape.pairs[pair as usize].0 as usize];
    let mut rest = pairs;
    std::iter::from_fn(move || {
        let mut rows = span(*rest.first()?);
        let mut n = 1;
        while let Some(next) = rest.get(n).map(|&pair| span(pair)) {
            if next.start != rows.end || rows.len() + next.len() > ROWS {
                break;
            }
            rows.end = next.end;
            n += 1;
        }
        let (run, tail) = rest.split_at(n);
        rest = tail;
        Some((rows, run))
    })
}

pub(super) fn forward(
    isa: Isa,
    queries: &[f32],
    documents: &[f32],
    width: usize,
    shape: &MaxSimShape,
    scores: &mut [f32],
) -> Vec<u32> {
    shape.check(queries.len() / width, documents.len() / width);
    assert_eq!(scores.len(), shape.pairs.len());
    let how = Arithmetic { isa: if isa == Isa::Amx { Isa::Avx512 } else { isa }, precision: Precision::F32 };
    let places = shape.places();
    let mut best = vec![NO_ROW; places[shape.pairs.len()]];
    if shape.retrieved > 0 {
        xtr::forward(how, queries, documents, width, shape, (scores, &mut best));
        return best;
    }
    let (best_rows, sums) = (Cells(best.as_mut_ptr()), Cells(scores.as_mut_ptr()));
    let groups = shape.grouped(MaxSimSide::Documents);
    groups.par_iter().enumerate().for_each(|(document, pairs)| {
        let rows = shape.documents[document];
        let (columns, floor, none) = (rows.len(), shape.has_floor(document), shape.without_rows(document));
        let mut products = SCRATCH.take();
        for (query_rows, run) in runs(shape, pairs) {
            if columns > 0 {
                products.resize(products.len().max(query_rows.len() * columns), 0.0);
                let (a, b) = (operand(queries, query_rows, width), operand(documents, rows, width).t());
                // SAFETY: the operands are slices; `products` is this task's and large enough.
                unsafe { product_raw(how, a, b, products.as_mut_ptr(), columns, false) };
            }
            let mut at = 0;
            for &pair in run {
                let pair = pair as usize;
                let mut sum = 0f64;
                for i in 0..places[pair + 1] - places[pair] {
                    let (mut most, mut row) = (none, NO_ROW);
                    if columns > 0 {
                        let (value, place) = greatest(isa, &products[at * columns..(at + 1) * columns]);
                        if !(floor && value < 0.0) {
                            (most, row) = (f64::from(value), place);
                        }
                    }
                    sum += most;
                    // SAFETY: a pair is in one group, so its places are this task's.
                    unsafe { best_rows.set(places[pair] + i, row) };
                    at += 1;
                }
                // SAFETY: likewise.
                unsafe { sums.set(pair, sum as f32) };
            }
        }
        SCRATCH.set(products);
    });
    best
}

/// Memory of which tasks write disjoint elements.
struct Cells<T>(*mut T);
// SAFETY: every element is written by one task.
unsafe impl<T: Send> Send for Cells<T> {}
unsafe impl<T: Send> Sync for Cells<T> {}
impl<T> Cells<T> {
    /// SAFETY: within the memory, and no one else touches this element.
    unsafe fn set(&self, at: usize, value: T) {
        unsafe { self.0.add(at).write(value) }
    }
}

pub(super) fn backward(
    isa: Isa,
    others: &[f32],
    width: usize,
    shape: &MaxSimShape,
    best: &[u32],
    slopes: &[f32],
    side: MaxSimSide,
    d: &mut [f32],
) {
    let places = shape.places();
    assert_eq!((slopes.len(), best.len()), (shape.pairs.len(), places[shape.pairs.len()]));
    let (own, other) = (d.len() / width, others.len() / width);
    match side {
        MaxSimSide::Queries => shape.check(own, other),
        MaxSimSide::Documents => shape.check(other, own),
    }
    let d = Columns(d.as_mut_ptr());
    // A row belongs to one text, so what reaches it is added by one task, in the order of pairs.
    shape.grouped(side).par_iter().for_each(|pairs| {
        for &pair in pairs {
            let (q, document) = shape.pairs[pair as usize];
            let (q, document) = (shape.queries[q as usize], shape.documents[document as usize]);
            let rows = &best[places[pair as usize]..][..q.len()];
            let slope = (f64::from(slopes[pair as usize]) / shape.divisor(rows)) as f32;
            for (i, &row) in (q.start..q.end).zip(rows).filter(|(_, row)| **row != NO_ROW) {
                assert!((row as usize) < document.len(), "a best row is beyond its document");
                let (own, other) = match side {
                    MaxSimSide::Queries => (i, document.start + row),
                    MaxSimSide::Documents => (document.start + row, i),
                };
                // SAFETY: within a span that was checked; no other task has the rows of this text.
                let sum = unsafe { d.at(own as usize * width, width) };
                add_scaled(isa, sum, &others[other as usize * width..][..width], slope);
            }
        }
    });
}
