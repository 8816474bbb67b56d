//! Packed attention. A task is one head of one sequence; queries go in fixed blocks of [`QUERIES`] rows, so memory stays
//! small for long sequences and the order of every sum is fixed.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::Cpu;
use super::attention_rows::{Bias, dot_row, drop_row, scale_row, slope_row, softmax_row, weights_row};
use super::lanes::Arithmetic;
use super::product::{Operand, product_raw};
use crate::device::{AttentionShape, Heads, HeadsMut};

/// Query rows whose weights exist at once.
const QUERIES: usize = 128;

/// Rows of a packed tensor of which one head's columns are used.
#[derive(Clone, Copy)]
struct Rows {
    data: *const f32,
    stride: usize,
}
/// The same, writable; tasks write disjoint columns or rows.
#[derive(Clone, Copy)]
struct RowsMut {
    data: *mut f32,
    stride: usize,
}
// SAFETY: inputs are only read; every task writes its own head's columns of its own sequence's rows.
unsafe impl Send for Rows {}
unsafe impl Sync for Rows {}
unsafe impl Send for RowsMut {}
unsafe impl Sync for RowsMut {}

impl Rows {
    fn operand(self, first: usize, rows: usize, column: usize, width: usize) -> Operand {
        let data = self.data.wrapping_add(first * self.stride + column);
        Operand { data, rows, columns: width, row: self.stride, column: 1 }
    }
    unsafe fn row<'a>(self, row: usize, column: usize, width: usize) -> &'a [f32] {
        unsafe { std::slice::from_raw_parts(self.data.add(row * self.stride + column), width) }
    }
}
impl RowsMut {
    fn at(self, row: usize, column: usize) -> *mut f32 {
        self.data.wrapping_add(row * self.stride + column)
    }
}

fn scratch(data: &[f32], rows: usize, columns: usize) -> Operand {
    assert!(data.len() >= rows * columns);
    Operand { data: data.as_ptr(), rows, columns, row: columns, column: 1 }
}

fn check(len: usize, stride: usize, spans: &[crate::device::Span]) {
    let within = |s: &crate::device::Span| s.start <= s.end && s.end as usize * stride <= len;
    assert!(spans.iter().all(within), "a span is beyond its tensor");
}

/// Tasks write the rows of their spans without locks, so no row may belong to two of them.
fn assert_disjoint(spans: &[crate::device::Span]) {
    let mut sorted: Vec<_> = spans.iter().filter(|s| !s.is_empty()).collect();
    sorted.sort_by_key(|s| s.start);
    assert!(sorted.windows(2).all(|w| w[0].end <= w[1].start), "two sequences share a row");
}

fn inputs(x: Heads<'_, Cpu>, shape: &AttentionShape) -> (Rows, Rows, Rows) {
    let inner = shape.heads * shape.head_dim;
    assert_eq!(shape.queries.len(), shape.keys.len());
    assert!(shape.window.is_none() || shape.buckets.is_none(), "a window together with a bias is not known");
    assert_disjoint(&shape.queries);
    match x {
        Heads::Fused(x) => {
            let x = x.slice();
            check(x.len(), 3 * inner, &shape.queries);
            check(x.len(), 3 * inner, &shape.keys);
            let part = |i| Rows { data: x.as_ptr().wrapping_add(i * inner), stride: 3 * inner };
            (part(0), part(1), part(2))
        }
        Heads::Split { query, key_value } => {
            let (q, kv) = (query.slice(), key_value.slice());
            check(q.len(), inner, &shape.queries);
            check(kv.len(), 2 * inner, &shape.keys);
            let part = |i| Rows { data: kv.as_ptr().wrapping_add(i * inner), stride: 2 * inner };
            (Rows { data: q.as_ptr(), stride: inner }, part(0), part(1))
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// The keys that any of the query rows `i0..i0 + n` attends to: with a window, the others are not multiplied.
fn band(shape: &AttentionShape, i0: usize, n: usize, keys: usize) -> Range<usize> {
    match shape.window {
        Some(_) => shape.visible(i0, keys).start..shape.visible(i0 + n - 1, keys).end,
        None => 0..keys,
    }
}

/// The keys of one row as columns of its band.
fn within(seen: Range<usize>, band: &Range<usize>) -> Range<usize> {
    if seen.is_empty() { 0..0 } else { seen.start - band.start..seen.end - band.start }
}

pub(super) fn forward(
    how: Arithmetic,
    x: Heads<'_, Cpu>,
    bias: Option<&[f32]>,
    shape: &AttentionShape,
    y: &mut [f32],
    log_sum: &mut [f32],
) {
    let isa = how.isa;
    let (q, k, v) = inputs(x, shape);
    let (heads, dim) = (shape.heads, shape.head_dim);
    let rows = shape.queries.iter().map(|s| s.end as usize).max().unwrap_or(0);
    assert!(y.len() >= rows * heads * dim && log_sum.len() >= rows * heads);
    let y = RowsMut { data: y.as_mut_ptr(), stride: heads * dim };
    let log_sum = RowsMut { data: log_sum.as_mut_ptr(), stride: heads };
    (0..shape.queries.len() * heads).into_par_iter().for_each(|task| {
        let (sequence, head) = (task / heads, task % heads);
        let (qs, ks) = (shape.queries[sequence], shape.keys[sequence]);
        let (nq, nk, column) = (qs.len(), ks.len(), head * dim);
        let bias = Bias::new(shape, bias, sequence, head);
        let (mut s, other) = SCRATCH.take();
        s.resize(s.len().max(QUERIES.min(nq) * nk), 0.0);
        for i0 in (0..nq).step_by(QUERIES) {
            let n = QUERIES.min(nq - i0);
            let first = qs.start as usize + i0;
            let band = band(shape, i0, n, nk);
            let (first_key, nk) = (ks.start as usize + band.start, band.len());
            // SAFETY: operands lie within the spans checked in `inputs`; outputs are this task's own.
            unsafe {
                let keys = k.operand(first_key, nk, column, dim);
                product_raw(how, q.operand(first, n, column, dim), keys.t(), s.as_mut_ptr(), nk, false);
                for i in 0..n {
                    let row = &mut s[i * nk..(i + 1) * nk];
                    let seen = within(shape.visible(i0 + i, ks.len()), &band);
                    row[..seen.start].fill(0.0);
                    row[seen.end..].fill(0.0);
                    let row = &mut row[seen];
                    bias.apply(isa, i0 + i, shape.scale as f32, row);
                    *log_sum.at(first + i, head) = softmax_row(isa, row);
                    if let Some(d) = shape.dropout {
                        drop_row(isa, row, d.row((first + i) * heads + head), d.threshold, d.scale);
                    }
                }
                let values = v.operand(first_key, nk, column, dim);
                product_raw(how, scratch(&s, n, nk), values, y.at(first, column), y.stride, false);
            }
        }
        SCRATCH.set((s, other));
    });
}

fn outputs(dx: HeadsMut<'_, Cpu>, shape: &AttentionShape) -> (RowsMut, RowsMut, RowsMut) {
    let inner = shape.heads * shape.head_dim;
    match dx {
        HeadsMut::Fused(x) => {
            let x = x.slice();
            check(x.len(), 3 * inner, &shape.queries);
            check(x.len(), 3 * inner, &shape.keys);
            let x = x.as_mut_ptr();
            let part = |i| RowsMut { data: x.wrapping_add(i * inner), stride: 3 * inner };
            (part(0), part(1), part(2))
        }
        HeadsMut::Split { query, key_value } => {
            let (q, kv) = (query.slice(), key_value.slice());
            check(q.len(), inner, &shape.queries);
            check(kv.len(), 2 * inner, &shape.keys);
            let kv = kv.as_mut_ptr();
            let part = |i| RowsMut { data: kv.wrapping_add(i * inner), stride: 2 * inner };
            (RowsMut { data: q.as_mut_ptr(), stride: inner }, part(0), part(1))
        }
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward(
    how: Arithmetic,
    x: Heads<'_, Cpu>,
    bias: Option<&[f32]>,
    shape: &AttentionShape,
    y: &[f32],
    log_sum: &[f32],
    dy: &[f32],
    dx: HeadsMut<'_, Cpu>,
    dbias: Option<&mut [f32]>,
) {
    let isa = how.isa;
    let (q, k, v) = inputs(x, shape);
    let (heads, dim) = (shape.heads, shape.head_dim);
    let query_rows = shape.queries.iter().map(|s| s.end as usize).max().unwrap_or(0);
    let (values, sums) = (query_rows * heads * dim, query_rows * heads);
    assert!(y.len() >= values && dy.len() >= values && log_sum.len() >= sums, "an operand has too few rows");
    assert_disjoint(&shape.keys);
    let (dq, dk, dv) = outputs(dx, shape);
    let y = Rows { data: y.as_ptr(), stride: heads * dim };
    let dy = Rows { data: dy.as_ptr(), stride: heads * dim };
    let columns: Vec<Vec<f32>> = (0..shape.queries.len() * heads)
        .into_par_iter()
        .map(|task| {
            let (sequence, head) = (task / heads, task % heads);
            let (qs, ks) = (shape.queries[sequence], shape.keys[sequence]);
            let (nq, nk, column) = (qs.len(), ks.len(), head * dim);
            let mut bias = Bias::new(shape, bias, sequence, head);
            let (mut p, mut dp) = SCRATCH.take();
            let size = QUERIES.min(nq) * nk;
            p.resize(p.len().max(size), 0.0);
            dp.resize(dp.len().max(size), 0.0);
            // With a window no block of queries meets all keys.
            if nq == 0 || shape.window.is_some() {
                for j in ks.start as usize..ks.end as usize {
                    // SAFETY: this task's rows and columns.
                    unsafe {
                        std::slice::from_raw_parts_mut(dk.at(j, column), dim).fill(0.0);
                        std::slice::from_raw_parts_mut(dv.at(j, column), dim).fill(0.0);
                    }
                }
            }
            for i0 in (0..nq).step_by(QUERIES) {
                let n = QUERIES.min(nq - i0);
                let first = qs.start as usize + i0;
                let band = band(shape, i0, n, nk);
                let (first_key, nk) = (ks.start as usize + band.start, band.len());
                let add = i0 > 0 || shape.window.is_some();
                // SAFETY: as in `forward`.
                unsafe {
                    let keys = k.operand(first_key, nk, column, dim);
                    let values = v.operand(first_key, nk, column, dim);
                    let (tk, tv) = (dk.at(first_key, column), dv.at(first_key, column));
                    let queries = q.operand(first, n, column, dim);
                    let dys = dy.operand(first, n, column, dim);
                    product_raw(how, queries, keys.t(), p.as_mut_ptr(), nk, false);
                    product_raw(how, dys, values.t(), dp.as_mut_ptr(), nk, false);
                    for i in 0..n {
                        let seen = within(shape.visible(i0 + i, ks.len()), &band);
                        let (p, dp) = (&mut p[i * nk..(i + 1) * nk], &mut dp[i * nk..(i + 1) * nk]);
                        for row in [&mut *p, &mut *dp] {
                            row[..seen.start].fill(0.0);
                            row[seen.end..].fill(0.0);
                        }
                        let (p, dp) = (&mut p[seen.clone()], &mut dp[seen]);
                        bias.apply(isa, i0 + i, shape.scale as f32, p);
                        weights_row(isa, p, log_sum[(first + i) * heads + head]);
                        let (a, b) = (y.row(first + i, column, dim), dy.row(first + i, column, dim));
                        let delta = dot_row(isa, a, b);
                        let key = shape.dropout.map(|d| (d.row((first + i) * heads + head), d));
                        if let Some((key, d)) = key {
                            drop_row(isa, dp, key, d.threshold, d.scale);
                        }
                        slope_row(isa, p, dp, delta);
                        bias.collect(isa, i0 + i, dp);
                        scale_row(isa, dp, shape.scale as f32);
                        if let Some((key, d)) = key {
                            drop_row(isa, p, key, d.threshold, d.scale);
                        }
                    }
                    let (weights, slopes) = (scratch(&p, n, nk), scratch(&dp, n, nk));
                    product_raw(how, slopes, keys, dq.at(first, column), dq.stride, false);
                    product_raw(how, slopes.t(), queries, tk, dk.stride, add);
                    product_raw(how, weights.t(), dys, tv, dv.stride, add);
                }
            }
            SCRATCH.set((p, dp));
            bias.column()
        })
        .collect();
    let Some(dbias) = dbias else { return };
    for (task, column) in columns.iter().enumerate() {
        for (bucket, v) in column.iter().enumerate() {
            dbias[bucket * heads + task % heads] += v;
        }
    }
}
