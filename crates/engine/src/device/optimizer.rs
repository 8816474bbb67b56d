//! What the optimizers' kernels are told of one step.

/// One step of Adam or AdamW (Loshchilov and Hutter, 2019), in PyTorch's order of operations.
#[derive(Clone, Copy, Debug)]
pub struct AdamStep {
    /// Learning rate of this update.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay: parameters are multiplied by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// Number of this update, from 1 (bias correction).
    pub step: u64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f64,
}

/// One step of Adafactor (Shazeer and Stern, 2018) without a first moment, as Hugging Face's `Adafactor` takes it.
///
/// With `t` the number of the update, `b = 1 - t^decay_rate` and `u = g^2 + eps`: a matrix keeps the running means (factor
/// `b`) of `u` over each row, `R`, and over each column, `C`; the step is `x = g / sqrt(R / mean(R)) / sqrt(C)`. A vector keeps
/// the running mean `V` of `u`, and `x = g / sqrt(V)`. Then with `rms(x)` the root of the mean of squares and
/// `a = lr * max(parameter_eps, rms(p))` (or `a = lr`):
/// `p = p (1 - a weight_decay) - a x / max(1, rms(x) / clip_threshold)`.
#[derive(Clone, Copy, Debug)]
pub struct AdafactorStep {
    /// Learning rate of this update.
    pub lr: f64,
    /// Added to the square of every gradient.
    pub eps: f64,
    /// The least size of a parameter that the rate is scaled by; `None`: the rate is not scaled.
    pub parameter_eps: Option<f64>,
    /// Greatest root of the mean of squares of a parameter's step, before the rate.
    pub clip_threshold: f64,
    /// Exponent of the decay: negative.
    pub decay_rate: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub step: u64,
    /// Factor on the gradient (clipping of the global norm).
    pub gradient_scale: f64,
}

impl AdafactorStep {
    /// The decay of this update's running means.
    pub(crate) fn beta2(&self) -> f64 {
        1.0 - libm::pow(self.step as f64, self.decay_rate)
    }
    /// From the root of the mean of squares of the values and of the step: the factors on the step and on the values.
    pub(crate) fn factors(&self, values: f64, step: f64) -> (f64, f64) {
        let rate = self.lr * self.parameter_eps.map_or(1.0, |least| values.max(least));
        (rate / (step / self.clip_threshold).max(1.0), 1.0 - rate * self.weight_decay)
    }
}
