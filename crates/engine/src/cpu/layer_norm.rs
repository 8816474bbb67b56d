//! LayerNorm, forward and backward, and the end of a sub-layer that reads it: parameters' gradients are summed over fixed
//! blocks of rows, the blocks in order.

use std::borrow::Cow;

use rayon::prelude::*;

use super::attention_rows::add_row;
use super::lanes::{Isa, fma, kernel};
use super::math;
use crate::random::{Dropout, hash32};

/// Rows of a block.
const ROWS: usize = 32;

/// Mean, and one over the deviation.
#[inline(always)]
fn moments<const F: bool>(x: &[f32], eps: f32) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = math::sum(x.len(), |i, s| s + x[i]) / n;
    let squares = math::sum(x.len(), |i, s| {
        let d = x[i] - mean;
        fma::<F>(d, d, s)
    });
    (mean, 1.0 / (squares / n + eps).sqrt())
}

kernel! {
    fn forward_row(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
        let (mean, r) = moments::<F>(x, eps);
        for (((x, w), b), y) in x.iter().zip(weight).zip(bias).zip(y) {
            *y = fma::<F>((*x - mean) * r, *w, *b);
        }
    }
}

/// The parameters of a norm: weight and bias, zeros where there is none.
struct Norm<'a> {
    weight: &'a [f32],
    bias: Cow<'a, [f32]>,
    eps: f32,
}

impl<'a> Norm<'a> {
    fn new(norm: &'a [f32], width: usize, eps: f32) -> Self {
        assert!(norm.len() == width || norm.len() == 2 * width, "a norm has one or two parameters a column");
        let (weight, bias) = norm.split_at(width);
        Norm { weight, bias: or_zeros(Some(bias).filter(|b| !b.is_empty()), width), eps }
    }
}

fn or_zeros(x: Option<&[f32]>, width: usize) -> Cow<'_, [f32]> {
    x.map_or_else(|| vec![0.0; width].into(), Cow::from)
}

pub(super) fn forward(isa: Isa, x: &[f32], width: usize, norm: &[f32], eps: f32, y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    let norm = Norm::new(norm, width, eps);
    y.par_chunks_mut(ROWS * width).zip(x.par_chunks(ROWS * width)).for_each(|(y, x)| {
        for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            forward_row(isa, x, norm.weight, &norm.bias, norm.eps, y);
        }
    });
}

kernel! {
    /// With h = (x - mean) r and t = dy w: dx += r (t - mean(t) - h mean(t h)), dweight += dy h, dbias += dy.
    fn backward_row(
        x: &[f32], weight: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dweight: &mut [f32], dbias: &mut [f32],
    ) {
        let (mean, r) = moments::<F>(x, eps);
        let n = x.len();
        let (weight, dy, dx) = (&weight[..n], &dy[..n], &mut dx[..n]);
        let (dweight, dbias) = (&mut dweight[..n], &mut dbias[..n]);
        let along_one = math::sum(n, |i, s| s + dy[i] * weight[i]) / n as f32;
        let along = math::sum(n, |i, s| fma::<F>(dy[i] * weight[i], (x[i] - mean) * r, s)) / n as f32;
        for i in 0..n {
            let h = (x[i] - mean) * r;
            let t = dy[i] * weight[i] - along_one;
            dx[i] = fma::<F>(r, fma::<F>(-h, along, t), dx[i]);
            dweight[i] = fma::<F>(dy[i], h, dweight[i]);
            dbias[i] += dy[i];
        }
    }
}

pub(super) fn backward(
    isa: Isa,
    x: &[f32],
    width: usize,
    norm: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dnorm: &mut [f32],
) {
    assert!(x.len() == dx.len() && x.len() == dy.len() && norm.len() == dnorm.len());
    let weight = Norm::new(norm, width, eps).weight;
    let inputs = x.par_chunks(ROWS * width).zip(dy.par_chunks(ROWS * width));
    let parts: Vec<Vec<f32>> = dx
        .par_chunks_mut(ROWS * width)
        .zip(inputs)
        .map(|(dx, (x, dy))| {
            let mut part = vec![0f32; 2 * width];
            let (dweight, dbias) = part.split_at_mut(width);
            let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dy.chunks_exact(width));
            for ((dx, x), dy) in rows {
                backward_row(isa, x, weight, eps, dy, dx, dweight, dbias);
            }
            part
        })
        .collect();
    for part in &parts {
        add_row(isa, dnorm, &part[..norm.len()]);
    }
}

kernel! {
    /// `x = n + dropout(x + bias)`
    fn finish_row(x: &mut [f32], bias: &[f32], n: &[f32], key: (u32, u32), threshold: u32, scale: f32) {
        for (i, ((x, b), n)) in x.iter_mut().zip(bias).zip(n).enumerate() {
            let f = if hash32(key, i as u32) < threshold { 0.0 } else { scale };
            *x = fma::<F>(*x + *b, f, *n);
        }
    }
}
kernel! {
    /// `x = n + (x + bias)`
    fn finish_row_whole(x: &mut [f32], bias: &[f32], n: &[f32]) {
        for ((x, b), n) in x.iter_mut().zip(bias).zip(n) {
            *x = (*x + *b) + *n;
        }
    }
}

pub(super) fn bias_residual(
    isa: Isa,
    x: &mut [f32],
    width: usize,
    bias: Option<&[f32]>,
    residual: &[f32],
    norm: Option<(&[f32], f32)>,
    dropout: Option<Dropout>,
) {
    assert_eq!(x.len(), residual.len());
    let bias = or_zeros(bias, width);
    assert_eq!(bias.len(), width);
    let norm = norm.map(|(norm, eps)| Norm::new(norm, width, eps));
    let blocks = x.par_chunks_mut(ROWS * width).zip(residual.par_chunks(ROWS * width)).enumerate();
    blocks.for_each(|(block, (x, residual))| {
        let mut normed = vec![0f32; if norm.is_some() { width } else { 0 }];
        for (i, (x, s)) in x.chunks_exact_mut(width).zip(residual.chunks_exact(width)).enumerate() {
            let n = match &norm {
                Some(norm) => {
                    forward_row(isa, s, norm.weight, &norm.bias, norm.eps, &mut normed);
                    &normed
                }
                None => s,
            };
            match dropout {
                Some(d) => finish_row(isa, x, &bias, n, d.row(block * ROWS + i), d.threshold, d.scale),
                None => finish_row_whole(isa, x, &bias, n),
            }
        }
    });
}
