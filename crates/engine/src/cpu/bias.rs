//! Biases: added to rows, within an activation, and their gradients: sums over fixed blocks of rows, the blocks in order.

use rayon::prelude::*;

use super::attention_rows::{add_row, drop_row};
use super::elementwise::{activate_backward, values};
use super::lanes::{Isa, kernel};
use crate::device::Activation;
use crate::random::Dropout;

/// Rows of a block.
const ROWS: usize = 32;

pub(super) fn add_bias(isa: Isa, x: &mut [f32], bias: &[f32]) {
    let width = bias.len();
    x.par_chunks_mut(ROWS * width).for_each(|x| {
        for row in x.chunks_exact_mut(width) {
            add_row(isa, row, bias);
        }
    });
}

/// `total += ` the parts, in order.
fn add_parts(isa: Isa, total: &mut [f32], parts: &[Vec<f32>]) {
    for part in parts {
        add_row(isa, total, part);
    }
}

pub(super) fn sum_rows(isa: Isa, x: &[f32], total: &mut [f32]) {
    let width = total.len();
    let part = |x: &[f32]| {
        let mut part = vec![0f32; width];
        x.chunks_exact(width).for_each(|row| add_row(isa, &mut part, row));
        part
    };
    let parts: Vec<Vec<f32>> = x.par_chunks(ROWS * width).map(part).collect();
    add_parts(isa, total, &parts);
}

pub(super) fn residual_backward(
    isa: Isa,
    dy: &[f32],
    width: usize,
    dropout: Dropout,
    d: &mut [f32],
    dbias: Option<&mut [f32]>,
) {
    assert_eq!(dy.len(), d.len());
    let wanted = dbias.is_some();
    let blocks = d.par_chunks_mut(ROWS * width).zip(dy.par_chunks(ROWS * width)).enumerate();
    let parts: Vec<Vec<f32>> = blocks
        .map(|(block, (d, dy))| {
            let mut part = vec![0f32; if wanted { width } else { 0 }];
            for (i, (d, dy)) in d.chunks_exact_mut(width).zip(dy.chunks_exact(width)).enumerate() {
                d.copy_from_slice(dy);
                drop_row(isa, d, dropout.row(block * ROWS + i), dropout.threshold, dropout.scale);
                if wanted {
                    add_row(isa, &mut part, d);
                }
            }
            part
        })
        .collect();
    if let Some(dbias) = dbias {
        add_parts(isa, dbias, &parts);
    }
}

kernel! {
    fn sum_of(x: &[f32], y: &[f32], sum: &mut [f32]) {
        for ((x, y), s) in x.iter().zip(y).zip(sum) {
            *s = *x + *y;
        }
    }
}

pub(super) fn activation(
    isa: Isa,
    u: &[f32],
    bias: &[f32],
    width: usize,
    kind: Activation,
    gated: bool,
    dropout: Option<Dropout>,
    y: &mut [f32],
) {
    let stored = bias.len();
    assert_eq!(stored, if gated { 2 * width } else { width });
    assert_eq!(u.len() / stored, y.len() / width);
    let blocks = y.par_chunks_mut(ROWS * width).zip(u.par_chunks(ROWS * stored)).enumerate();
    blocks.for_each(|(block, (y, u))| {
        let mut whole = vec![0f32; stored];
        for (i, (y, u)) in y.chunks_exact_mut(width).zip(u.chunks_exact(stored)).enumerate() {
            sum_of(isa, u, bias, &mut whole);
            values(isa, kind, &whole, width, gated, y);
            if let Some(d) = dropout {
                drop_row(isa, y, d.row(block * ROWS + i), d.threshold, d.scale);
            }
        }
    });
}

pub(super) fn activation_backward(
    isa: Isa,
    u: &[f32],
    bias: &[f32],
    width: usize,
    kind: Activation,
    gated: bool,
    dropout: Option<Dropout>,
    dy: &[f32],
    du: &mut [f32],
    dbias: &mut [f32],
) {
    let stored = bias.len();
    assert_eq!(stored, if gated { 2 * width } else { width });
    assert!(u.len() == du.len() && dbias.len() == stored && u.len() / stored == dy.len() / width);
    let inputs = u.par_chunks(ROWS * stored).zip(dy.par_chunks(ROWS * width));
    let blocks = du.par_chunks_mut(ROWS * stored).zip(inputs).enumerate();
    let parts: Vec<Vec<f32>> = blocks
        .map(|(block, (du, (u, dy)))| {
            let (mut part, mut whole, mut scratch) =
                (vec![0f32; stored], vec![0f32; stored], vec![0f32; 3 * width]);
            let rows = du.chunks_exact_mut(stored).zip(u.chunks_exact(stored)).zip(dy.chunks_exact(width));
            for (i, ((du, u), dy)) in rows.enumerate() {
                sum_of(isa, u, bias, &mut whole);
                let key = dropout.map(|d| (d.row(block * ROWS + i), d));
                activate_backward(isa, kind, &whole, gated, key, dy, du, &mut scratch);
                add_row(isa, &mut part, du);
            }
            part
        })
        .collect();
    add_parts(isa, dbias, &parts);
}
