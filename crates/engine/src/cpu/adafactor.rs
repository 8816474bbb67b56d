//! Adafactor over one parameter: two passes over the gradient, statistics by row and column, one pass over the values.
//!
//! Sums of a row are the fixed tree of [`math::sum`], sums of columns and of the whole run over fixed blocks of rows and then
//! over the blocks in their order, so the bits depend on no thread.

use rayon::prelude::*;

use super::BLOCK;
use super::lanes::{Isa, fma, kernel};
use super::math;
use crate::device::AdafactorStep;

/// Rows whose squares are added to one partial sum of the columns.
const ROWS: usize = 256;

kernel! {
    /// Sum of `(g * scale)^2` of a row, and `sums[j] += (g[j] * scale)^2`.
    fn squares(g: &[f32], scale: f32, sums: &mut [f32]) -> f32 {
        for (g, s) in g.iter().zip(sums) {
            let g = *g * scale;
            *s = fma::<F>(g, g, *s);
        }
        math::sum(g.len(), |i, s| { let g = g[i] * scale; fma::<F>(g, g, s) })
    }
}
kernel! {
    /// Sum of `(g * column)^2` of a row.
    fn scaled_squares(g: &[f32], column: &[f32]) -> f32 {
        math::sum(g.len(), |i, s| { let u = g[i] * column[i]; fma::<F>(u, u, s) })
    }
}
kernel! {
    /// `p = p * decay - factor * g * column`
    fn subtract(p: &mut [f32], g: &[f32], column: &[f32], factor: f32, decay: f32) {
        for ((p, g), c) in p.iter_mut().zip(g).zip(column) {
            *p = fma::<F>(-factor, *g * *c, *p * decay);
        }
    }
}
kernel! {
    /// `v = v * beta + (1 - beta) * ((g * scale)^2 + eps)`, `root = scale / sqrt(v)`
    fn moments(v: &mut [f32], g: &[f32], root: &mut [f32], c: [f32; 4]) {
        let [beta, rest, scale, eps] = c;
        for ((v, g), r) in v.iter_mut().zip(g).zip(root) {
            let g = *g * scale;
            *v = fma::<F>(*v, beta, rest * fma::<F>(g, g, eps));
            *r = scale / v.sqrt();
        }
    }
}

/// Mean of squares to root of the mean, from sums in f64.
fn rms(sums: &[f64], len: usize) -> f64 {
    (sums.iter().sum::<f64>() / len.max(1) as f64).sqrt()
}

/// A matrix `[rows, columns]` with statistics `[rows]` and, behind them, `[columns]`.
pub(super) fn matrix(
    isa: Isa,
    p: &mut [f32],
    g: &[f32],
    columns: usize,
    stats: &mut [f32],
    s: &AdafactorStep,
) {
    let rows = p.len() / columns;
    assert!(p.len() == g.len() && p.len() == rows * columns && stats.len() == rows + columns);
    let size = rms(&super::elementwise::dot_blocks(isa, p, p), p.len());
    let (beta, scale) = (s.beta2(), s.gradient_scale as f32);
    let (of_rows, of_columns) = stats.split_at_mut(rows);
    let partial: Vec<Vec<f32>> = of_rows
        .par_chunks_mut(ROWS)
        .zip(g.par_chunks(ROWS * columns))
        .map(|(of_rows, g)| {
            let mut sums = vec![0f32; columns];
            for (row, g) in of_rows.iter_mut().zip(g.chunks_exact(columns)) {
                let mean = squares(isa, g, scale, &mut sums) as f64 / columns as f64 + s.eps;
                *row = (beta * *row as f64 + (1.0 - beta) * mean) as f32;
            }
            sums
        })
        .collect();
    of_columns.par_chunks_mut(64).enumerate().for_each(|(block, of_columns)| {
        for (i, column) in of_columns.iter_mut().enumerate() {
            let sum: f64 = partial.iter().map(|sums| sums[block * 64 + i] as f64).sum();
            let mean = sum / rows as f64 + s.eps;
            *column = (beta * *column as f64 + (1.0 - beta) * mean) as f32;
        }
    });
    let mean_row = of_rows.iter().map(|&r| r as f64).sum::<f64>() / rows.max(1) as f64;
    let row = |i: usize| (mean_row / of_rows[i] as f64).sqrt() as f32;
    let column: Vec<f32> = of_columns.iter().map(|&c| scale / c.sqrt()).collect();
    let sums: Vec<f64> = (0..rows.div_ceil(ROWS))
        .into_par_iter()
        .map(|block| {
            let of_row = |i: usize| {
                let r = row(i) as f64;
                scaled_squares(isa, &g[i * columns..][..columns], &column) as f64 * r * r
            };
            (block * ROWS..((block + 1) * ROWS).min(rows)).map(of_row).sum()
        })
        .collect();
    let (factor, decay) = s.factors(size, rms(&sums, p.len()));
    p.par_chunks_mut(columns).zip(g.par_chunks(columns)).enumerate().with_min_len(16).for_each(
        |(i, (p, g))| {
            subtract(isa, p, g, &column, factor as f32 * row(i), decay as f32);
        },
    );
}

/// A vector with one statistic an element.
pub(super) fn vector(isa: Isa, p: &mut [f32], g: &[f32], stats: &mut [f32], s: &AdafactorStep) {
    assert!(p.len() == g.len() && p.len() == stats.len());
    let size = rms(&super::elementwise::dot_blocks(isa, p, p), p.len());
    let beta = s.beta2();
    let constants = [beta as f32, (1.0 - beta) as f32, s.gradient_scale as f32, s.eps as f32];
    let mut root = vec![0f32; p.len()];
    let blocks = stats.par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK)).zip(root.par_chunks_mut(BLOCK));
    let sums: Vec<f64> = blocks
        .map(|((v, g), root)| {
            moments(isa, v, g, root, constants);
            scaled_squares(isa, g, root) as f64
        })
        .collect();
    let (factor, decay) = s.factors(size, rms(&sums, p.len()));
    let blocks = p.par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK)).zip(root.par_chunks(BLOCK));
    blocks.for_each(|((p, g), root)| subtract(isa, p, g, root, factor as f32, decay as f32));
}
