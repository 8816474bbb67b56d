//! Optimizer steps, line by line as their sources have them.

use crate::device::{AdafactorStep, AdamStep};

/// PyTorch's `AdamW` with one tensor, line by line.
pub(super) fn adam(p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64], s: AdamStep) {
    assert!(p.len() == g.len() && p.len() == m.len() && p.len() == v.len());
    let correction1 = 1.0 - libm::pow(s.beta1, s.step as f64);
    let correction2 = 1.0 - libm::pow(s.beta2, s.step as f64);
    for i in 0..p.len() {
        let g = g[i] * s.gradient_scale;
        p[i] *= 1.0 - s.lr * s.weight_decay;
        m[i] += (1.0 - s.beta1) * (g - m[i]);
        v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
        let denominator = libm::sqrt(v[i]) / libm::sqrt(correction2) + s.eps;
        p[i] -= s.lr / correction1 * m[i] / denominator;
    }
}

/// Hugging Face's `Adafactor` without first moment, line by line.
pub(super) fn adafactor(
    p: &mut [f64],
    g: &[f64],
    columns: Option<usize>,
    stats: &mut [f64],
    s: AdafactorStep,
) {
    let rms = |x: &[f64]| libm::sqrt(x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64);
    let lr = s.lr * s.parameter_eps.map_or(1.0, |least| f64::max(least, rms(p)));
    let beta = 1.0 - libm::pow(s.step as f64, s.decay_rate);
    let g: Vec<f64> = g.iter().map(|g| g * s.gradient_scale).collect();
    let squares: Vec<f64> = g.iter().map(|g| g * g + s.eps).collect();
    let running = |old: f64, new: f64| beta * old + (1.0 - beta) * new;
    let mut update = g;
    match columns {
        Some(columns) => {
            let rows = p.len() / columns;
            assert_eq!(stats.len(), rows + columns);
            for i in 0..rows {
                let mean = (0..columns).map(|j| squares[i * columns + j]).sum::<f64>() / columns as f64;
                stats[i] = running(stats[i], mean);
            }
            for j in 0..columns {
                let mean = (0..rows).map(|i| squares[i * columns + j]).sum::<f64>() / rows as f64;
                stats[rows + j] = running(stats[rows + j], mean);
            }
            let mean_row = stats[..rows].iter().sum::<f64>() / rows as f64;
            for (at, update) in update.iter_mut().enumerate() {
                let (i, j) = (at / columns, at % columns);
                *update *= 1.0 / libm::sqrt(stats[i] / mean_row) / libm::sqrt(stats[rows + j]);
            }
        }
        None => {
            assert_eq!(stats.len(), p.len());
            for i in 0..p.len() {
                stats[i] = running(stats[i], squares[i]);
                update[i] /= libm::sqrt(stats[i]);
            }
        }
    }
    let clip = f64::max(1.0, rms(&update) / s.clip_threshold);
    for (p, update) in p.iter_mut().zip(&update) {
        *p -= s.weight_decay * lr * *p;
        *p -= lr * update / clip;
    }
}
