//! Elementwise kernels: sums, dropout, residuals, embedding rows, activations.

use rayon::prelude::*;

use super::BLOCK;
use super::lanes::{Isa, fma, kernel};
use super::math;
use crate::device::Activation;
use crate::random::{Dropout, hash32};

pub(super) fn fill(x: &mut [f32], value: f32) {
    x.par_chunks_mut(BLOCK * 4).for_each(|c| c.fill(value));
}
pub(super) fn copy(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    x.par_chunks_mut(BLOCK * 4).zip(y.par_chunks(BLOCK * 4)).for_each(|(a, b)| a.copy_from_slice(b));
}

kernel! {
    fn add_block(x: &mut [f32], y: &[f32]) {
        for (a, b) in x.iter_mut().zip(y) {
            *a += *b;
        }
    }
}
pub(super) fn add(isa: Isa, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    x.par_chunks_mut(BLOCK).zip(y.par_chunks(BLOCK)).for_each(|(a, b)| add_block(isa, a, b));
}

kernel! {
    fn scale_block(x: &mut [f32], factor: f32) {
        for a in x {
            *a *= factor;
        }
    }
}
pub(super) fn scale(isa: Isa, x: &mut [f32], factor: f32) {
    x.par_chunks_mut(BLOCK).for_each(|a| scale_block(isa, a, factor));
}

kernel! {
    fn dot_block(x: &[f32], y: &[f32]) -> f64 {
        let mut lanes = [0f64; 16];
        let ((a, ra), (b, rb)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
        for (a, b) in a.iter().zip(b) {
            for i in 0..16 {
                lanes[i] += a[i] as f64 * b[i] as f64;
            }
        }
        for (i, (a, b)) in ra.iter().zip(rb).enumerate() {
            lanes[i] += *a as f64 * *b as f64;
        }
        let mut sum = 0.0;
        for v in lanes {
            sum += v;
        }
        sum
    }
}
/// Exact products summed in f64 over fixed blocks.
pub(super) fn dot_blocks(isa: Isa, x: &[f32], y: &[f32]) -> Vec<f64> {
    assert_eq!(x.len(), y.len());
    x.par_chunks(BLOCK).zip(y.par_chunks(BLOCK)).map(|(a, b)| dot_block(isa, a, b)).collect()
}

/// Rows of a block, so that a block holds about `BLOCK` elements.
fn block_rows(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

pub(super) fn gather(table: &[f32], width: usize, ids: &[u32], rows: &mut [f32]) {
    assert_eq!(rows.len(), ids.len() * width);
    rows.par_chunks_mut(width * 64).zip(ids.par_chunks(64)).for_each(|(rows, ids)| {
        for (row, &id) in rows.chunks_exact_mut(width).zip(ids) {
            row.copy_from_slice(&table[id as usize * width..][..width]);
        }
    });
}

/// Rows one after the other, as an accumulation.
pub(super) fn gather_add(isa: Isa, table: &[f32], width: usize, ids: &[u32], rows: &mut [f32]) {
    assert_eq!(rows.len(), ids.len() * width);
    rows.par_chunks_mut(width * 64).zip(ids.par_chunks(64)).for_each(|(rows, ids)| {
        for (row, &id) in rows.chunks_exact_mut(width).zip(ids) {
            add_block(isa, row, &table[id as usize * width..][..width]);
        }
    });
}

/// A matrix that tasks write by columns.
#[derive(Clone, Copy)]
pub(super) struct Columns(pub *mut f32);
// SAFETY: each task adds to its own columns.
unsafe impl Send for Columns {}
unsafe impl Sync for Columns {}
impl Columns {
    /// SAFETY: within the table, and no one else holds these elements.
    pub(super) unsafe fn at<'a>(self, offset: usize, len: usize) -> &'a mut [f32] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), len) }
    }
}

/// Rows in order, columns in parallel: the order of sums does not depend on threads.
pub(super) fn scatter_add(isa: Isa, rows: &[f32], width: usize, ids: &[u32], table: &mut [f32]) {
    assert_eq!(rows.len(), ids.len() * width);
    assert!(ids.iter().all(|&i| (i as usize + 1) * width <= table.len()));
    let table = Columns(table.as_mut_ptr());
    let step = 64.min(width);
    (0..width.div_ceil(step)).into_par_iter().for_each(|c| {
        let (from, len) = (c * step, step.min(width - c * step));
        for (i, &id) in ids.iter().enumerate() {
            // SAFETY: within the table (asserted), and these columns are this task's.
            let sum = unsafe { table.at(id as usize * width + from, len) };
            add_block(isa, sum, &rows[i * width + from..][..len]);
        }
    });
}

kernel! {
    fn dropout_row(x: &mut [f32], key: (u32, u32), threshold: u32, scale: f32) {
        for (i, a) in x.iter_mut().enumerate() {
            let f = if hash32(key, i as u32) < threshold { 0.0 } else { scale };
            *a *= f;
        }
    }
}
pub(super) fn dropout(isa: Isa, x: &mut [f32], width: usize, d: Dropout) {
    let rows = block_rows(width);
    x.par_chunks_mut(rows * width).enumerate().for_each(|(block, x)| {
        for (i, row) in x.chunks_exact_mut(width).enumerate() {
            dropout_row(isa, row, d.row(block * rows + i), d.threshold, d.scale);
        }
    });
}

kernel! {
    fn residual_row(x: &mut [f32], residual: &[f32], key: (u32, u32), threshold: u32, scale: f32) {
        for (i, (a, r)) in x.iter_mut().zip(residual).enumerate() {
            let f = if hash32(key, i as u32) < threshold { 0.0 } else { scale };
            *a = fma::<F>(*a, f, *r);
        }
    }
}
pub(super) fn residual(isa: Isa, x: &mut [f32], residual: &[f32], width: usize, d: Option<Dropout>) {
    let Some(d) = d else { return add(isa, x, residual) };
    assert_eq!(x.len(), residual.len());
    let rows = block_rows(width);
    x.par_chunks_mut(rows * width).zip(residual.par_chunks(rows * width)).enumerate().for_each(
        |(block, (x, r))| {
            for (i, (row, r)) in x.chunks_exact_mut(width).zip(r.chunks_exact(width)).enumerate() {
                residual_row(isa, row, r, d.row(block * rows + i), d.threshold, d.scale);
            }
        },
    );
}

const GELU_A: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_B: f32 = 0.044_715;

/// Value and derivative.
#[inline(always)]
fn gelu_tanh<const F: bool>(x: f32) -> (f32, f32) {
    let u = GELU_A * fma::<F>(GELU_B * x * x, x, x);
    let t = math::tanh::<F>(u);
    let du = GELU_A * fma::<F>(3.0 * GELU_B * x, x, 1.0);
    let value = 0.5 * x * (1.0 + t);
    (value, fma::<F>(0.5 * x * fma::<F>(-t, t, 1.0), du, 0.5 * (1.0 + t)))
}
#[inline(always)]
fn gelu_erf<const F: bool>(x: f32) -> (f32, f32) {
    let (e, g) = math::erf_and_gauss::<F>(x * std::f32::consts::FRAC_1_SQRT_2);
    (0.5 * x * (1.0 + e), fma::<F>(x * 0.398_942_3, g, 0.5 * (1.0 + e)))
}
#[inline(always)]
fn silu<const F: bool>(x: f32) -> (f32, f32) {
    let s = 1.0 / (1.0 + math::exp::<F>(-x));
    (x * s, s * fma::<F>(x, 1.0 - s, 1.0))
}
#[inline(always)]
fn tanh<const F: bool>(x: f32) -> (f32, f32) {
    let t = math::tanh::<F>(x);
    (t, fma::<F>(-t, t, 1.0))
}
#[inline(always)]
fn relu<const F: bool>(x: f32) -> (f32, f32) {
    if x > 0.0 { (x, 1.0) } else { (0.0, 0.0) }
}

/// Value and derivative of every element of a row, into `value` and `slope`; and the value alone.
macro_rules! both {
    ($name:ident, $values:ident, $f:ident) => {
        kernel! {
            fn $values(u: &[f32], value: &mut [f32]) {
                for (u, v) in u.iter().zip(value) {
                    *v = $f::<F>(*u).0;
                }
            }
        }
        kernel! {
            fn $name(u: &[f32], value: &mut [f32], slope: &mut [f32]) {
                for ((u, v), s) in u.iter().zip(value).zip(slope) {
                    (*v, *s) = $f::<F>(*u);
                }
            }
        }
    };
}
both!(gelu_tanh_row, gelu_tanh_values, gelu_tanh);
both!(gelu_erf_row, gelu_erf_values, gelu_erf);
both!(silu_row, silu_values, silu);
both!(tanh_row, tanh_values, tanh);
both!(relu_row, relu_values, relu);

fn activate(isa: Isa, kind: Activation, u: &[f32], value: &mut [f32], slope: &mut [f32]) {
    match kind {
        Activation::Relu => relu_row(isa, u, value, slope),
        Activation::GeluTanh => gelu_tanh_row(isa, u, value, slope),
        Activation::GeluErf => gelu_erf_row(isa, u, value, slope),
        Activation::Silu => silu_row(isa, u, value, slope),
        Activation::Tanh => tanh_row(isa, u, value, slope),
    }
}

/// `y = act(u)`, or gated `act(u[..width]) * u[width..]`.
pub(super) fn values(isa: Isa, kind: Activation, u: &[f32], width: usize, gated: bool, y: &mut [f32]) {
    let first = &u[..width];
    match kind {
        Activation::Relu => relu_values(isa, first, y),
        Activation::GeluTanh => gelu_tanh_values(isa, first, y),
        Activation::GeluErf => gelu_erf_values(isa, first, y),
        Activation::Silu => silu_values(isa, first, y),
        Activation::Tanh => tanh_values(isa, first, y),
    }
    if gated {
        multiply(isa, y, &u[width..]);
    }
}

kernel! {
    fn multiply(x: &mut [f32], y: &[f32]) {
        for (a, b) in x.iter_mut().zip(y) {
            *a *= *b;
        }
    }
}
kernel! {
    /// `a = slope * gate * d`, `b = value * d`
    fn gate_backward(value: &[f32], slope: &[f32], gate: &[f32], d: &[f32], a: &mut [f32], b: &mut [f32]) {
        for (((((v, s), g), d), a), b) in value.iter().zip(slope).zip(gate).zip(d).zip(a).zip(b) {
            *a = *s * *g * *d;
            *b = *v * *d;
        }
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn activation(
    isa: Isa,
    u: &[f32],
    width: usize,
    kind: Activation,
    gated: bool,
    d: Option<Dropout>,
    y: &mut [f32],
) {
    let stored = if gated { 2 * width } else { width };
    assert_eq!(u.len() / stored, y.len() / width);
    let rows = block_rows(stored);
    y.par_chunks_mut(rows * width).zip(u.par_chunks(rows * stored)).enumerate().for_each(
        |(block, (y, u))| {
            for (i, (y, u)) in y.chunks_exact_mut(width).zip(u.chunks_exact(stored)).enumerate() {
                values(isa, kind, u, width, gated, y);
                if let Some(d) = d {
                    dropout_row(isa, y, d.row(block * rows + i), d.threshold, d.scale);
                }
            }
        },
    );
}

/// One row of the backward: `key` is the row's dropout, `scratch` holds three rows of the width of `dy`.
pub(super) fn activate_backward(
    isa: Isa,
    kind: Activation,
    u: &[f32],
    gated: bool,
    key: Option<((u32, u32), Dropout)>,
    dy: &[f32],
    du: &mut [f32],
    scratch: &mut [f32],
) {
    let width = dy.len();
    let (value, rest) = scratch.split_at_mut(width);
    let (slope, dropped) = rest.split_at_mut(width);
    activate(isa, kind, &u[..width], value, slope);
    dropped.copy_from_slice(dy);
    if let Some((key, d)) = key {
        dropout_row(isa, dropped, key, d.threshold, d.scale);
    }
    if gated {
        let (a, b) = du.split_at_mut(width);
        gate_backward(isa, value, slope, &u[width..], dropped, a, b);
    } else {
        du.copy_from_slice(slope);
        multiply(isa, du, dropped);
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn activation_backward(
    isa: Isa,
    u: &[f32],
    width: usize,
    kind: Activation,
    gated: bool,
    d: Option<Dropout>,
    dy: &[f32],
    du: &mut [f32],
) {
    let stored = if gated { 2 * width } else { width };
    assert_eq!(u.len(), du.len());
    assert_eq!(u.len() / stored, dy.len() / width);
    let rows = block_rows(stored);
    let inputs = u.par_chunks(rows * stored).zip(dy.par_chunks(rows * width));
    du.par_chunks_mut(rows * stored).zip(inputs).enumerate().for_each(|(block, (du, (u, dy)))| {
        let mut scratch = vec![0f32; 3 * width];
        let per_row = du.chunks_exact_mut(stored).zip(u.chunks_exact(stored)).zip(dy.chunks_exact(width));
        for (i, ((du, u), dy)) in per_row.enumerate() {
            let key = d.map(|d| (d.row(block * rows + i), d));
            activate_backward(isa, kind, u, gated, key, dy, du, &mut scratch);
        }
    });
}
