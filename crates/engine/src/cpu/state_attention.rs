//! Cross-attention over hidden states without forming keys and values: the part between the weights of the heads.
//!
//! A row is one query of one head, already multiplied with that head's key weights; all rows of a question meet its
//! states in one product. A task is a question; rows go in fixed blocks, so memory is bounded and the order of sums fixed.

use std::cell::RefCell;

use rayon::prelude::*;

use super::attention_rows::{Bias, dot_row, drop_row, scale_row, slope_row, softmax_row, weights_row};
use super::lanes::Arithmetic;
use super::product::{Operand, product, product_raw};
use crate::device::{AttentionShape, Span};

/// Rows (queries times heads) whose weights exist at once, about.
const ROWS: usize = 512;

/// Memory of which tasks touch disjoint parts.
#[derive(Clone, Copy)]
struct Shared(*mut f32);
// SAFETY: every task writes its own question's rows, or its own head's columns.
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}
impl Shared {
    fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// `rows x columns` elements from `start`, rows `stride` apart.
fn operand(x: &[f32], start: usize, rows: usize, columns: usize, stride: usize) -> Operand {
    assert!(rows == 0 || start + (rows - 1) * stride + columns <= x.len(), "an operand is beyond its memory");
    Operand { data: x[start.min(x.len())..].as_ptr(), rows, columns, row: stride, column: 1 }
}

/// `y_h = x_h W_h`: `[rows, heads * dim]` to `[rows, heads * width]`.
pub(super) fn expand(how: Arithmetic, x: &[f32], weight: &[f32], heads: usize, width: usize, y: &mut [f32]) {
    let dim = weight.len() / width / heads;
    let rows = x.len() / (heads * dim);
    assert_eq!(y.len(), rows * heads * width);
    let y = Shared(y.as_mut_ptr());
    (0..heads).into_par_iter().for_each(|h| {
        let (a, b) = (
            operand(x, h * dim, rows, dim, heads * dim),
            operand(weight, h * dim * width, dim, width, width),
        );
        // SAFETY: this head's columns of `y`.
        unsafe { product_raw(how, a, b, y.at(h * width), heads * width, false) }
    });
}

/// `y_h = x_h W_h^T`: `[rows, heads * width]` to `[rows, heads * dim]`.
pub(super) fn reduce(how: Arithmetic, x: &[f32], weight: &[f32], heads: usize, width: usize, y: &mut [f32]) {
    let dim = weight.len() / width / heads;
    let rows = x.len() / (heads * width);
    assert_eq!(y.len(), rows * heads * dim);
    let y = Shared(y.as_mut_ptr());
    (0..heads).into_par_iter().for_each(|h| {
        let a = operand(x, h * width, rows, width, heads * width);
        let b = operand(weight, h * dim * width, dim, width, width).t();
        // SAFETY: this head's columns of `y`.
        unsafe { product_raw(how, a, b, y.at(h * dim), heads * dim, false) }
    });
}

/// `dW_h += x_h^T c_h`.
pub(super) fn weight_gradient(
    how: Arithmetic,
    x: &[f32],
    c: &[f32],
    heads: usize,
    width: usize,
    dweight: &mut [f32],
) {
    let dim = dweight.len() / width / heads;
    let rows = x.len() / (heads * dim);
    assert_eq!(c.len(), rows * heads * width);
    dweight.par_chunks_mut(dim * width).enumerate().for_each(|(h, dw)| {
        let a = operand(x, h * dim, rows, dim, heads * dim).t();
        product(how, a, operand(c, h * width, rows, width, heads * width), dw, width, true);
    });
}

fn check(shape: &AttentionShape, width: usize, u: &[f32], states: &[f32]) {
    assert_eq!(shape.queries.len(), shape.keys.len());
    assert!(!shape.causal && shape.window.is_none(), "attention over states sees all keys");
    let within = |spans: &[Span], row: usize, len: usize| {
        let mut last = 0;
        spans.iter().all(|s| {
            let fine = s.start >= last && s.start <= s.end && s.end as usize * row <= len;
            last = s.end;
            fine
        })
    };
    assert!(
        within(&shape.queries, shape.heads * width, u.len()),
        "query spans overlap or are beyond the tensor"
    );
    assert!(within(&shape.keys, width, states.len()), "key spans overlap or are beyond the tensor");
}

thread_local! {
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Queries of a block.
fn block(heads: usize) -> usize {
    (ROWS / heads).max(1)
}

/// `c = dropout(softmax(scale u states^T + bias)) states` for every row of every question.
pub(super) fn forward(
    how: Arithmetic,
    u: &[f32],
    states: &[f32],
    width: usize,
    bias: Option<&[f32]>,
    shape: &AttentionShape,
    c: &mut [f32],
    log_sum: &mut [f32],
) {
    check(shape, width, u, states);
    let heads = shape.heads;
    assert!(c.len() == u.len() && log_sum.len() * width == u.len());
    let (c, log_sum) = (Shared(c.as_mut_ptr()), Shared(log_sum.as_mut_ptr()));
    (0..shape.queries.len()).into_par_iter().for_each(|question| {
        let (qs, ks) = (shape.queries[question], shape.keys[question]);
        let n = ks.len();
        let biases: Vec<Bias<'_>> = (0..heads).map(|h| Bias::new(shape, bias, question, h)).collect();
        let keys = operand(states, ks.start as usize * width, n, width, width);
        let (mut s, other) = SCRATCH.take();
        for i0 in (0..qs.len()).step_by(block(heads)) {
            let rows = block(heads).min(qs.len() - i0) * heads;
            let first = (qs.start as usize + i0) * heads;
            s.resize(s.len().max(rows * n), 0.0);
            product(how, operand(u, first * width, rows, width, width), keys.t(), &mut s, n, false);
            for (r, row) in s.chunks_exact_mut(n.max(1)).take(rows).enumerate() {
                biases[r % heads].apply(how.isa, i0 + r / heads, shape.scale as f32, row);
                // SAFETY: this question's rows.
                unsafe { *log_sum.at(first + r) = softmax_row(how.isa, row) };
                if let Some(d) = shape.dropout {
                    drop_row(how.isa, row, d.row(first + r), d.threshold, d.scale);
                }
            }
            // SAFETY: as above.
            unsafe { product_raw(how, operand(&s, 0, rows, n, n), keys, c.at(first * width), width, false) };
        }
        SCRATCH.set((s, other));
    });
}

/// Backward of [`forward`]: `du = ...`, `dstates += ...`, `dbias += ...`.
pub(super) fn backward(
    how: Arithmetic,
    u: &[f32],
    states: &[f32],
    width: usize,
    bias: Option<&[f32]>,
    shape: &AttentionShape,
    c: &[f32],
    log_sum: &[f32],
    dc: &[f32],
    du: &mut [f32],
    dstates: &mut [f32],
    dbias: Option<&mut [f32]>,
) {
    check(shape, width, u, states);
    let heads = shape.heads;
    assert!(
        c.len() == u.len() && dc.len() == u.len() && du.len() == u.len() && dstates.len() == states.len()
    );
    let (du, dstates) = (Shared(du.as_mut_ptr()), Shared(dstates.as_mut_ptr()));
    let columns: Vec<Vec<Vec<f32>>> = (0..shape.queries.len())
        .into_par_iter()
        .map(|question| {
            let (qs, ks) = (shape.queries[question], shape.keys[question]);
            let n = ks.len();
            let mut biases: Vec<Bias<'_>> = (0..heads).map(|h| Bias::new(shape, bias, question, h)).collect();
            let keys = operand(states, ks.start as usize * width, n, width, width);
            let dkeys = dstates.at(ks.start as usize * width);
            let (mut p, mut dp) = SCRATCH.take();
            for i0 in (0..qs.len()).step_by(block(heads)) {
                let rows = block(heads).min(qs.len() - i0) * heads;
                let first = (qs.start as usize + i0) * heads;
                p.resize(p.len().max(rows * n), 0.0);
                dp.resize(dp.len().max(rows * n), 0.0);
                let own = |x| operand(x, first * width, rows, width, width);
                product(how, own(u), keys.t(), &mut p, n, false);
                product(how, own(dc), keys.t(), &mut dp, n, false);
                let pairs = p.chunks_exact_mut(n.max(1)).zip(dp.chunks_exact_mut(n.max(1)));
                for (r, (p, dp)) in pairs.take(rows).enumerate() {
                    let at = (first + r) * width;
                    let bias = &mut biases[r % heads];
                    bias.apply(how.isa, i0 + r / heads, shape.scale as f32, p);
                    weights_row(how.isa, p, log_sum[first + r]);
                    let delta = dot_row(how.isa, &c[at..at + width], &dc[at..at + width]);
                    let key = shape.dropout.map(|d| (d.row(first + r), d));
                    if let Some((key, d)) = key {
                        drop_row(how.isa, dp, key, d.threshold, d.scale);
                    }
                    slope_row(how.isa, p, dp, delta);
                    bias.collect(how.isa, i0 + r / heads, dp);
                    scale_row(how.isa, dp, shape.scale as f32);
                    if let Some((key, d)) = key {
                        drop_row(how.isa, p, key, d.threshold, d.scale);
                    }
                }
                let (weights, slopes) = (operand(&p, 0, rows, n, n), operand(&dp, 0, rows, n, n));
                // SAFETY: this question's rows; spans of keys do not overlap.
                unsafe {
                    product_raw(how, weights.t(), own(dc), dkeys, width, true);
                    product_raw(how, slopes.t(), own(u), dkeys, width, true);
                    product_raw(how, slopes, keys, du.at(first * width), width, false);
                }
            }
            SCRATCH.set((p, dp));
            biases.iter().map(Bias::column).collect()
        })
        .collect();
    let Some(dbias) = dbias else { return };
    for question in &columns {
        for (head, column) in question.iter().enumerate() {
            for (bucket, v) in column.iter().enumerate() {
                dbias[bucket * heads + head] += v;
            }
        }
    }
}
