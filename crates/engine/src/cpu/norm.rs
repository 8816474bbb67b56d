//! RMSNorm, forward and backward; the weight's gradient is summed over fixed blocks of rows, the blocks in order.

use rayon::prelude::*;

use super::lanes::{Isa, fma, kernel};
use super::math;

/// Rows of a block.
const ROWS: usize = 32;

kernel! {
    fn forward_row(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let r = rstd::<F>(x, eps);
        for ((x, w), y) in x.iter().zip(weight).zip(y) {
            *y = *x * r * *w;
        }
    }
}

#[inline(always)]
fn rstd<const F: bool>(x: &[f32], eps: f32) -> f32 {
    let squares = math::sum(x.len(), |i, s| fma::<F>(x[i], x[i], s));
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

pub(super) fn forward(isa: Isa, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    let width = weight.len();
    y.par_chunks_mut(ROWS * width).zip(x.par_chunks(ROWS * width)).for_each(|(y, x)| {
        for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            forward_row(isa, x, weight, eps, y);
        }
    });
}

kernel! {
    /// With h = x r and t = dy w: dx += r (t - h mean(t h)), dweight += dy h.
    fn backward_row(x: &[f32], weight: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dweight: &mut [f32]) {
        let r = rstd::<F>(x, eps);
        let n = x.len();
        let (weight, dy, dx, dweight) = (&weight[..n], &dy[..n], &mut dx[..n], &mut dweight[..n]);
        let mean = math::sum(n, |i, s| fma::<F>(dy[i] * weight[i], x[i] * r, s)) / n as f32;
        for i in 0..n {
            let h = x[i] * r;
            dx[i] = fma::<F>(r, fma::<F>(-h, mean, dy[i] * weight[i]), dx[i]);
            dweight[i] = fma::<F>(dy[i], h, dweight[i]);
        }
    }
}
kernel! {
    fn sum_into(total: &mut [f32], part: &[f32]) {
        for (t, p) in total.iter_mut().zip(part) {
            *t += *p;
        }
    }
}

pub(super) fn backward(
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    assert!(x.len() == dx.len() && x.len() == dy.len());
    let width = weight.len();
    let inputs = x.par_chunks(ROWS * width).zip(dy.par_chunks(ROWS * width));
    let parts: Vec<Vec<f32>> = dx
        .par_chunks_mut(ROWS * width)
        .zip(inputs)
        .map(|(dx, (x, dy))| {
            let mut part = vec![0f32; width];
            let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dy.chunks_exact(width));
            for ((dx, x), dy) in rows {
                backward_row(isa, x, weight, eps, dy, dx, &mut part);
            }
            part
        })
        .collect();
    for part in &parts {
        sum_into(isa, dweight, part);
    }
}
