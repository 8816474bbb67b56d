//! The loss of a text's logits and its gradient, in 64 bits: there are few logits, and they are read by the host anyway.

/// What is learnt from labels.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassificationLoss {
    /// Whether a text may have any number of labels.
    pub multi_label: bool,
    /// A weight for every label; `None`: all 1.
    pub weights: Option<Vec<f64>>,
    /// Share of the target that is spread over all labels.
    pub smoothing: f64,
}

impl ClassificationLoss {
    /// The loss of a text with these `logits` and the gold `labels`; adds `scale` times its gradient to `gradient`.
    ///
    /// One label: cross-entropy, with weights and smoothing as PyTorch's `cross_entropy` sums them:
    /// `sum_k a_k * -log softmax(z)_k`, `a_k = w_k ((1 - s) [k = y] + s / K)`. Several: the sum over labels of binary cross-entropy,
    /// `w_k (log(1 + exp z_k) - t_k z_k)` with `t_k = (1 - s) [k is gold] + s / 2`, as flair sums them (Hugging Face takes the mean).
    pub fn of(&self, logits: &[f64], labels: &[u32], scale: f64, gradient: &mut [f64]) -> f64 {
        let weight = |k: usize| self.weights.as_ref().map_or(1.0, |w| w[k]);
        let is_gold = |k: usize| f64::from(u8::from(labels.contains(&(k as u32))));
        let (count, s) = (logits.len(), self.smoothing);
        let mut loss = 0.0;
        if self.multi_label {
            for (k, (&z, g)) in logits.iter().zip(gradient).enumerate() {
                let target = (1.0 - s) * is_gold(k) + s / 2.0;
                // log(1 + exp z) without overflow.
                let tail = libm::exp(-libm::fabs(z));
                loss += weight(k) * (z.max(0.0) + libm::log1p(tail) - target * z);
                let sigmoid = if z >= 0.0 { 1.0 } else { tail } / (1.0 + tail);
                *g += scale * weight(k) * (sigmoid - target);
            }
            return loss;
        }
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut total = 0.0;
        logits.iter().for_each(|&z| total += libm::exp(z - most));
        let log_total = most + libm::log(total);
        let share = |k: usize| weight(k) * ((1.0 - s) * is_gold(k) + s / count as f64);
        let mut all = 0.0;
        (0..count).for_each(|k| all += share(k));
        for (k, (&z, g)) in logits.iter().zip(gradient).enumerate() {
            loss += share(k) * (log_total - z);
            *g += scale * (all * libm::exp(z - log_total) - share(k));
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradient against differences of the loss.
    fn check(loss: &ClassificationLoss, logits: &[f64], labels: &[u32]) -> f64 {
        let of = |z: &[f64]| loss.of(z, labels, 1.0, &mut vec![0.0; z.len()]);
        let mut gradient = vec![0.5; logits.len()];
        let value = loss.of(logits, labels, 3.0, &mut gradient);
        for (k, g) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut moved = logits.to_vec();
                moved[k] += by;
                of(&moved)
            };
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((0.5 + 3.0 * slope - g).abs() < 1e-7, "{loss:?} {k}");
        }
        value
    }

    #[test]
    fn gradients_are_slopes() {
        let logits = [0.3, -1.2, 2.0, 0.0];
        for weights in [None, Some(vec![2.0, 0.5, 1.0, 0.0])] {
            for smoothing in [0.0, 0.2] {
                for (multi_label, labels) in [(false, vec![2]), (true, vec![0, 3]), (true, vec![])] {
                    check(
                        &ClassificationLoss { multi_label, weights: weights.clone(), smoothing },
                        &logits,
                        &labels,
                    );
                }
            }
        }
    }

    #[test]
    fn values_are_those_of_pytorch() {
        // torch.nn.functional.cross_entropy(z, [1], reduction="sum"), with label_smoothing=0.1, with weight=[2, 0.5, 1]; and
        // binary_cross_entropy_with_logits(z, [1., 0., 1.], weight=[2, 0.5, 1], reduction="sum"); z = [1, -2, 0.5].
        let z = [1.0, -2.0, 0.5];
        let of = |multi_label, weights: Option<[f64; 3]>, smoothing, labels: &[u32]| {
            check(&ClassificationLoss { multi_label, weights: weights.map(Vec::from), smoothing }, &z, labels)
        };
        let near = |found: f64, want: f64| assert!((found - want).abs() < 1e-6, "{found}, not {want}");
        near(of(false, None, 0.0, &[1]), VALUES[0]);
        near(of(false, None, 0.1, &[1]), VALUES[1]);
        near(of(false, Some([2.0, 0.5, 1.0]), 0.1, &[1]), VALUES[2]);
        near(of(true, Some([2.0, 0.5, 1.0]), 0.0, &[0, 2]), VALUES[3]);
    }

    #[test]
    fn far_logits_are_numbers() {
        let one = ClassificationLoss { multi_label: false, weights: None, smoothing: 0.0 };
        assert_eq!(one.of(&[1000.0, -1000.0], &[1], 1.0, &mut [0.0; 2]), 2000.0);
        let many = ClassificationLoss { multi_label: true, ..one };
        assert_eq!(many.of(&[1000.0, -1000.0], &[1], 1.0, &mut [0.0; 2]), 2000.0);
    }

    const VALUES: [f64; 4] = [3.504596902, 3.321263569, 1.702604911, 1.164064365];
}
