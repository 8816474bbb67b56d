//! From token rows to sequence rows: means over spans, rows of unit length; and rotary positions.

use rayon::prelude::*;

use super::attention_rows::{add_row, scale_row};
use super::elementwise::Columns;
use super::lanes::{Isa, fma, kernel};
use super::math;
use crate::device::{Rotary, Span};

/// Rows of a block.
const ROWS: usize = 32;
/// Columns of a task that goes through rows in order.
const STRIPE: usize = 64;

/// Columns in parallel, rows in order.
fn stripes(width: usize, each: impl Fn(usize, usize) + Sync) {
    (0..width.div_ceil(STRIPE)).into_par_iter().for_each(|c| {
        let from = c * STRIPE;
        each(from, STRIPE.min(width - from));
    });
}

kernel! {
    /// `y += x * factor`
    fn add_scaled(y: &mut [f32], x: &[f32], factor: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = fma::<F>(*x, factor, *y);
        }
    }
}

fn check(rows: usize, spans: &[Span]) {
    let within = |s: &Span| s.start <= s.end && s.end as usize <= rows;
    assert!(spans.iter().all(within), "a span is beyond its tensor");
}

pub(super) fn means(isa: Isa, x: &[f32], width: usize, spans: &[Span], y: &mut [f32]) {
    check(x.len() / width, spans);
    assert_eq!(y.len(), spans.len() * width);
    let y = Columns(y.as_mut_ptr());
    stripes(width, |from, len| {
        for (s, span) in spans.iter().enumerate() {
            // SAFETY: row s is within y (asserted), and these columns are this task's.
            let mean = unsafe { y.at(s * width + from, len) };
            mean.fill(0.0);
            for row in span.start as usize..span.end as usize {
                add_row(isa, mean, &x[row * width + from..][..len]);
            }
            scale_row(isa, mean, 1.0 / span.len().max(1) as f32);
        }
    });
}

pub(super) fn means_backward(isa: Isa, dy: &[f32], width: usize, spans: &[Span], dx: &mut [f32]) {
    check(dx.len() / width, spans);
    assert_eq!(dy.len(), spans.len() * width);
    let dx = Columns(dx.as_mut_ptr());
    stripes(width, |from, len| {
        for (s, span) in spans.iter().enumerate() {
            let factor = 1.0 / span.len().max(1) as f32;
            for row in span.start as usize..span.end as usize {
                // SAFETY: the row is within dx (checked), and these columns are this task's.
                let d = unsafe { dx.at(row * width + from, len) };
                add_scaled(isa, d, &dy[s * width + from..][..len], factor);
            }
        }
    });
}

#[inline(always)]
fn length<const F: bool>(x: &[f32]) -> f32 {
    math::sum(x.len(), |i, s| fma::<F>(x[i], x[i], s)).sqrt()
}

kernel! {
    fn unit_row(x: &[f32], least: f32, y: &mut [f32]) {
        let l = length::<F>(x);
        let inverse = 1.0 / if l > least { l } else { least };
        for (x, y) in x.iter().zip(y) {
            *y = *x * inverse;
        }
    }
}
kernel! {
    /// With y = x / |x|: `dx += (dy - y (y dy)) / |x|`; below the least length y is x times a constant.
    fn unit_row_backward(x: &[f32], least: f32, dy: &[f32], dx: &mut [f32]) {
        let l = length::<F>(x);
        let long = l > least;
        let inverse = 1.0 / if long { l } else { least };
        let along = math::sum(x.len(), |i, s| fma::<F>(x[i] * inverse, dy[i], s));
        let along = if long { along * inverse } else { 0.0 };
        for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
            *dx = fma::<F>(inverse, fma::<F>(-*x, along, *dy), *dx);
        }
    }
}

pub(super) fn normalize(isa: Isa, x: &[f32], width: usize, least: f32, y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    y.par_chunks_mut(ROWS * width).zip(x.par_chunks(ROWS * width)).for_each(|(y, x)| {
        y.chunks_exact_mut(width).zip(x.chunks_exact(width)).for_each(|(y, x)| unit_row(isa, x, least, y));
    });
}

pub(super) fn normalize_backward(isa: Isa, x: &[f32], width: usize, least: f32, dy: &[f32], dx: &mut [f32]) {
    assert!(x.len() == dx.len() && x.len() == dy.len());
    let inputs = x.par_chunks(ROWS * width).zip(dy.par_chunks(ROWS * width));
    dx.par_chunks_mut(ROWS * width).zip(inputs).for_each(|(dx, (x, dy))| {
        let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dy.chunks_exact(width));
        rows.for_each(|((dx, x), dy)| unit_row_backward(isa, x, least, dy, dx));
    });
}

kernel! {
    /// Turns the pairs (i, half + i) of every head of `x`.
    fn rotate_row(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let sin = &sin[..half];
        for head in x.chunks_exact_mut(2 * half) {
            let (a, b) = head.split_at_mut(half);
            for i in 0..half {
                let (p, q) = (a[i], b[i]);
                a[i] = fma::<F>(p, cos[i], -(q * sin[i]));
                b[i] = fma::<F>(q, cos[i], p * sin[i]);
            }
        }
    }
}

pub(super) fn rotate(
    isa: Isa,
    x: &mut [f32],
    stride: usize,
    columns: usize,
    rotary: &Rotary,
    positions: &[u32],
    back: bool,
) {
    let half = rotary.half;
    assert!(columns <= stride && columns.is_multiple_of(2 * half));
    assert_eq!(x.len(), positions.len() * stride);
    let most = positions.iter().max().map_or(0, |&p| p as usize + 1);
    assert!(most <= rotary.positions, "a position has no angle");
    x.par_chunks_mut(ROWS * stride).zip(positions.par_chunks(ROWS)).for_each(|(x, positions)| {
        let (mut cos, mut sin) = (vec![0f32; half], vec![0f32; half]);
        for (x, &p) in x.chunks_exact_mut(stride).zip(positions) {
            let at = p as usize * half;
            for i in 0..half {
                cos[i] = rotary.cos[at + i] as f32;
                let s = rotary.sin[at + i] as f32;
                sin[i] = if back { -s } else { s };
            }
            rotate_row(isa, &mut x[..columns], &cos, &sin);
        }
    });
}
