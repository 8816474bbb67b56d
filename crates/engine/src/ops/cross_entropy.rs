//! Cross-entropy over a vocabulary, `loss = weight * sum_i (log sum_c exp(z_ic) - z_i,label)`, `z = factor * x W^T`.
//! With label smoothing `e` the label's target is `1 - e` and `e` is spread over all classes (Szegedy et al., 2016, as PyTorch's
//! `CrossEntropyLoss(label_smoothing=e)` has it): `z_i,label` becomes `(1 - e) z_i,label + e mean_c(z_ic)`.
//! The logits exist for [`BLOCK`] rows at a time only, in forward and again in backward; the blocks are fixed,
//! so the sums do not depend on memory or threads.

use std::rc::Rc;

use crate::device::Device;
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

/// Rows whose logits are held at once.
pub const BLOCK: usize = 64;

struct CrossEntropy<D: Device> {
    x: Var<D>,
    weight: Param,
    labels: Rc<[u32]>,
    factor: f64,
    scale: f64,
    smoothing: f64,
    log_sum: Tensor<D>,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `factor * x weight^T` for rows `[start, end)` of `x`: their logits.
    pub fn logits(&self, x: &Var<D>, weight: Param, factor: f64, start: usize, end: usize) -> Tensor<D> {
        let mut z = Tensor::scratch(&self.device, end - start, weight.rows);
        let rows = crate::device::Matrix::new(x.tensor.rows_view(start, end), end - start, x.tensor.columns);
        self.device.product(rows, self.parameters.matrix(weight).t(), z.view_mut(), false);
        if factor != 1.0 {
            self.device.scale(z.view_mut(), factor);
        }
        z
    }
    /// Records the loss as a root with the given weight, and returns the unweighted loss of every row.
    /// `weight` is the vocabulary matrix `[classes, columns]`; every label must be below `classes`.
    pub fn cross_entropy(
        &mut self,
        x: &Var<D>,
        weight: Param,
        factor: f64,
        labels: &[u32],
        scale: f64,
    ) -> Vec<f64> {
        self.cross_entropy_smoothed(x, weight, factor, labels, scale, 0.0)
    }
    /// As [`Tape::cross_entropy`], with label smoothing of at least 0 and less than 1.
    pub fn cross_entropy_smoothed(
        &mut self,
        x: &Var<D>,
        weight: Param,
        factor: f64,
        labels: &[u32],
        scale: f64,
        smoothing: f64,
    ) -> Vec<f64> {
        assert_eq!(x.tensor.rows, labels.len());
        assert!(labels.iter().all(|&l| (l as usize) < weight.rows), "a label is beyond the vocabulary");
        let device = self.device.clone();
        let mut losses = Tensor::scratch(&device, labels.len(), 1);
        let mut log_sum = Tensor::scratch(&device, labels.len(), 1);
        for start in (0..labels.len()).step_by(BLOCK) {
            let end = (start + BLOCK).min(labels.len());
            let z = self.logits(x, weight, factor, start, end);
            device.cross_entropy(
                z.view(),
                &labels[start..end],
                losses.rows_view_mut(start, end),
                log_sum.rows_view_mut(start, end),
            );
            if smoothing != 0.0 {
                let losses = losses.rows_view_mut(start, end);
                device.smooth_losses(z.view(), &labels[start..end], smoothing, losses);
            }
        }
        self.push(|| {
            let (x, labels) = (x.clone(), labels.into());
            Box::new(CrossEntropy { x, weight, labels, factor, scale, smoothing, log_sum })
        });
        device.read_f64(losses.view())
    }
}

impl<'p, D: Device> Node<'p, D> for CrossEntropy<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.weight);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let (device, x) = (&tape.device, &self.x.tensor);
        let mut dx = Tensor::scratch(device, x.rows, x.columns);
        for start in (0..x.rows).step_by(BLOCK) {
            let end = (start + BLOCK).min(x.rows);
            let mut z = tape.logits(&self.x, self.weight, self.factor, start, end);
            let labels = &self.labels[start..end];
            device.cross_entropy_backward(
                z.view_mut(),
                labels,
                self.log_sum.rows_view(start, end),
                self.scale * self.factor,
            );
            if self.smoothing != 0.0 {
                device.smooth_gradient(z.view_mut(), labels, self.scale * self.factor * self.smoothing);
            }
            let rows = crate::device::Matrix::new(x.rows_view(start, end), end - start, x.columns);
            device.product(z.matrix().t(), rows, gradients.parameters.view_mut(self.weight), true);
            device.product(
                z.matrix(),
                tape.parameters.matrix(self.weight),
                dx.rows_view_mut(start, end),
                false,
            );
        }
        gradients.add(self.x.id, dx);
    }
}
