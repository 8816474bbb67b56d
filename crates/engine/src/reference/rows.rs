//! Row kernels of the reference: norm, activations, cross-entropy.

use crate::device::Activation;

/// `1 / sqrt(mean(x^2) + eps)`
fn inverse_root(x: &[f64], eps: f64) -> f64 {
    let squares: f64 = x.iter().map(|v| v * v).sum();
    1.0 / libm::sqrt(squares / x.len() as f64 + eps)
}

pub(super) fn rms_norm(x: &[f64], weight: &[f64], eps: f64, y: &mut [f64]) {
    assert_eq!(x.len(), y.len());
    let width = weight.len();
    for (x, y) in x.chunks(width).zip(y.chunks_mut(width)) {
        let r = inverse_root(x, eps);
        for j in 0..width {
            y[j] = x[j] * r * weight[j];
        }
    }
}

/// `y_j = w_j x_j r` with `dr/dx_k = -r^3 x_k / n`, so `dx_k = r w_k dy_k - r^3 x_k / n * sum_j dy_j w_j x_j`.
pub(super) fn rms_norm_backward(
    x: &[f64],
    weight: &[f64],
    eps: f64,
    dy: &[f64],
    dx: &mut [f64],
    dweight: &mut [f64],
) {
    assert!(x.len() == dy.len() && x.len() == dx.len());
    let width = weight.len();
    for ((x, dy), dx) in x.chunks(width).zip(dy.chunks(width)).zip(dx.chunks_mut(width)) {
        let r = inverse_root(x, eps);
        let along: f64 = (0..width).map(|j| dy[j] * weight[j] * x[j]).sum();
        for k in 0..width {
            dx[k] += r * weight[k] * dy[k] - r * r * r * x[k] / width as f64 * along;
            dweight[k] += dy[k] * x[k] * r;
        }
    }
}

pub(super) fn activation(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Relu => x.max(0.0),
        Activation::GeluTanh => 0.5 * x * (1.0 + libm::tanh(gelu_inner(x))),
        Activation::GeluErf => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        Activation::Silu => x / (1.0 + libm::exp(-x)),
        Activation::Tanh => libm::tanh(x),
    }
}

/// `sqrt(2 / pi) (x + 0.044715 x^3)`
fn gelu_inner(x: f64) -> f64 {
    libm::sqrt(2.0 / std::f64::consts::PI) * (x + 0.044715 * x * x * x)
}

pub(super) fn activation_slope(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Relu => {
            if x > 0.0 {
                1.0
            } else {
                0.0
            }
        }
        Activation::GeluTanh => {
            let t = libm::tanh(gelu_inner(x));
            let inner_slope = libm::sqrt(2.0 / std::f64::consts::PI) * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope
        }
        Activation::GeluErf => {
            let density = libm::exp(-x * x / 2.0) / libm::sqrt(2.0 * std::f64::consts::PI);
            0.5 * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)) + x * density
        }
        Activation::Silu => {
            let s = 1.0 / (1.0 + libm::exp(-x));
            s + x * s * (1.0 - s)
        }
        Activation::Tanh => {
            let t = libm::tanh(x);
            1.0 - t * t
        }
    }
}

/// log of the sum of exponentials; minus infinity for no element.
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let greatest = x.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
    if x.is_empty() {
        return greatest;
    }
    greatest + libm::log(x.iter().map(|v| libm::exp(v - greatest)).sum())
}

pub(super) fn cross_entropy(logits: &[f64], labels: &[u32], losses: &mut [f64], log_sum: &mut [f64]) {
    let classes = logits.len() / labels.len().max(1);
    for (i, &label) in labels.iter().enumerate() {
        let row = &logits[i * classes..(i + 1) * classes];
        log_sum[i] = log_sum_exp(row);
        losses[i] = log_sum[i] - row[label as usize];
    }
}

pub(super) fn cross_entropy_backward(logits: &mut [f64], labels: &[u32], log_sum: &[f64], scale: f64) {
    let classes = logits.len() / labels.len().max(1);
    for (i, &label) in labels.iter().enumerate() {
        for c in 0..classes {
            let z = &mut logits[i * classes + c];
            let hot = if c == label as usize { 1.0 } else { 0.0 };
            *z = scale * (libm::exp(*z - log_sum[i]) - hot);
        }
    }
}

pub(super) fn smooth(logits: &[f64], labels: &[u32], smoothing: f64, losses: &mut [f64]) {
    let classes = logits.len() / labels.len().max(1);
    for (i, &label) in labels.iter().enumerate() {
        let row = &logits[i * classes..(i + 1) * classes];
        losses[i] += smoothing * (row[label as usize] - row.iter().sum::<f64>() / classes as f64);
    }
}

pub(super) fn smooth_backward(gradient: &mut [f64], labels: &[u32], amount: f64) {
    let classes = gradient.len() / labels.len().max(1);
    for (i, &label) in labels.iter().enumerate() {
        let row = &mut gradient[i * classes..(i + 1) * classes];
        row.iter_mut().for_each(|z| *z -= amount / classes as f64);
        row[label as usize] += amount;
    }
}

/// Every row sorted whole, its first `k` kept.
pub(super) fn top_k(x: &[f64], width: usize, k: usize) -> Vec<(u32, f64)> {
    let top = |row: &[f64]| {
        let mut sorted: Vec<(u32, f64)> = (0..).zip(row.iter().copied()).collect();
        // Stable, so that equals stay in their order.
        sorted.sort_by(|a, b| match (a.1.is_nan(), b.1.is_nan()) {
            (false, false) => b.1.partial_cmp(&a.1).expect("both are numbers"),
            (a, b) => a.cmp(&b),
        });
        sorted.truncate(k);
        sorted
    };
    x.chunks(width.max(1)).flat_map(top).collect()
}
