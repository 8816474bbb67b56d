//! Cross-entropy over a block of logits, and argmax.

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

pub(super) fn argmax(x: &[f32], width: usize) -> Vec<u32> {
    x.par_chunks(width.max(1))
        .map(|row| {
            let first = (0, f32::NEG_INFINITY);
            row.iter().enumerate().fold(first, |best, (i, &v)| if v > best.1 { (i, v) } else { best }).0
                as u32
        })
        .collect()
}
