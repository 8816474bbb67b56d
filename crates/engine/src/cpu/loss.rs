//! Cross-entropy over a block of logits, and the greatest of each row.

use rayon::prelude::*;

use super::lanes::{Isa, kernel};
use super::math;

kernel! {
    /// log of the sum of exponentials.
    fn log_sum_row(x: &[f32]) -> f32 {
        let m = math::max(x);
        let sum = math::sum(x.len(), |i, s| s + math::exp::<F>(x[i] - m));
        m + libm::logf(sum)
    }
}
kernel! {
    fn softmax_row(x: &mut [f32], log_sum: f32, scale: f32) {
        for v in x {
            *v = scale * math::exp::<F>(*v - log_sum);
        }
    }
}

pub(super) fn cross_entropy(
    isa: Isa,
    logits: &[f32],
    labels: &[u32],
    losses: &mut [f32],
    log_sum: &mut [f32],
) {
    if labels.is_empty() {
        return;
    }
    let classes = logits.len() / labels.len();
    let out = losses.par_iter_mut().zip(log_sum.par_iter_mut());
    out.zip(logits.par_chunks(classes)).zip(labels.par_iter()).for_each(|(((loss, l), x), &label)| {
        *l = log_sum_row(isa, x);
        *loss = *l - x[label as usize];
    });
}

pub(super) fn cross_entropy_backward(
    isa: Isa,
    logits: &mut [f32],
    labels: &[u32],
    log_sum: &[f32],
    scale: f32,
) {
    if labels.is_empty() {
        return;
    }
    let classes = logits.len() / labels.len();
    logits.par_chunks_mut(classes).zip(labels.par_iter().zip(log_sum)).for_each(|(x, (&label, &l))| {
        softmax_row(isa, x, l, scale);
        x[label as usize] -= scale;
    });
}

kernel! {
    fn sum_row(x: &[f32]) -> f32 {
        math::sum(x.len(), |i, s| s + x[i])
    }
}
kernel! {
    fn shift_row(x: &mut [f32], by: f32) {
        for v in x {
            *v -= by;
        }
    }
}

pub(super) fn smooth(isa: Isa, logits: &[f32], labels: &[u32], smoothing: f32, losses: &mut [f32]) {
    if labels.is_empty() {
        return;
    }
    let classes = logits.len() / labels.len();
    losses.par_iter_mut().zip(logits.par_chunks(classes)).zip(labels.par_iter()).for_each(
        |((loss, x), &label)| *loss += smoothing * (x[label as usize] - sum_row(isa, x) / classes as f32),
    );
}

pub(super) fn smooth_backward(isa: Isa, gradient: &mut [f32], labels: &[u32], amount: f32) {
    if labels.is_empty() {
        return;
    }
    let classes = gradient.len() / labels.len();
    gradient.par_chunks_mut(classes).zip(labels.par_iter()).for_each(|(x, &label)| {
        shift_row(isa, x, amount / classes as f32);
        x[label as usize] += amount;
    });
}

pub(super) fn argmax(x: &[f32], width: usize) -> Vec<u32> {
    x.par_chunks(width.max(1))
        .map(|row| {
            let first = (0, f32::NEG_INFINITY);
            row.iter().enumerate().fold(first, |best, (i, &v)| if v > best.1 { (i, v) } else { best }).0
                as u32
        })
        .collect()
}

pub(super) fn top_k(x: &[f32], width: usize, k: usize) -> Vec<(u32, f64)> {
    let rows: Vec<_> = x.par_chunks(width.max(1)).map(|row| top_of_row(row, k)).collect();
    rows.concat()
}

fn top_of_row(row: &[f32], k: usize) -> Vec<(u32, f64)> {
    let before = |a: f32, b: f32| a > b || (b.is_nan() && !a.is_nan());
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(k.min(row.len()) + 1);
    for (i, &v) in row.iter().enumerate() {
        // Nearly all elements end here: those that follow later in the row lose against equals.
        if best.len() >= k && best.last().is_none_or(|last| !before(v, last.1)) {
            continue;
        }
        let at = best.partition_point(|b| !before(v, b.1));
        best.insert(at, (i as u32, v));
        best.truncate(k);
    }
    best.into_iter().map(|(i, v)| (i, f64::from(v))).collect()
}
