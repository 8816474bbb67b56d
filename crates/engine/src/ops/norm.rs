//! RMSNorm, `y = dropout(x / sqrt(mean(x^2) + eps) * weight)`, and the product that mostly follows it,
//! `y = rms_norm(x) W^T`, as one operation: the normalised rows are not kept but computed again in backward.

use crate::device::Device;
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct RmsNorm<D: Device> {
    x: Var<D>,
    weight: Param,
    eps: f64,
    dropout: Option<Dropout>,
    output: usize,
}

struct NormLinear<D: Device> {
    x: Var<D>,
    norm: Param,
    eps: f64,
    weight: Param,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// RMSNorm of every row, then dropout. Source: Zhang and Sennrich, 2019; T5 uses eps 1e-6.
    pub fn rms_norm(&mut self, x: &Var<D>, weight: Param, eps: f64, dropout: Option<Dropout>) -> Var<D> {
        let device = self.device.clone();
        let mut y = Tensor::scratch(&device, x.tensor.rows, x.tensor.columns);
        device.rms_norm(x.tensor.view(), self.parameter(weight), eps, y.view_mut());
        if let Some(d) = dropout {
            device.dropout(y.view_mut(), x.tensor.columns, d);
        }
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(RmsNorm { x: x.clone(), weight, eps, dropout, output }));
        y
    }
    /// `rms_norm(x) weight^T`: `[rows, weight.rows]`.
    pub fn norm_linear(&mut self, x: &Var<D>, norm: Param, eps: f64, weight: Param) -> Var<D> {
        let device = self.device.clone();
        let mut n = Tensor::scratch(&device, x.tensor.rows, x.tensor.columns);
        device.rms_norm(x.tensor.view(), self.parameter(norm), eps, n.view_mut());
        let mut y = Tensor::scratch(&device, x.tensor.rows, weight.rows);
        device.product(n.matrix(), self.parameters.matrix(weight).t(), y.view_mut(), false);
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(NormLinear { x: x.clone(), norm, eps, weight, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for RmsNorm<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.weight);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(mut dy) = gradients.take(self.output) else {
            return;
        };
        if let Some(d) = self.dropout {
            let width = dy.columns;
            tape.device.dropout(dy.view_mut(), width, d);
        }
        norm_backward(tape, gradients, &self.x, self.weight, self.eps, &dy);
    }
}

impl<'p, D: Device> Node<'p, D> for NormLinear<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.weight);
        each(self.norm);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let (device, x) = (&tape.device, &self.x.tensor);
        let mut n = Tensor::scratch(device, x.rows, x.columns);
        device.rms_norm(x.view(), tape.parameter(self.norm), self.eps, n.view_mut());
        device.product(dy.matrix().t(), n.matrix(), gradients.parameters.view_mut(self.weight), true);
        let mut dn = n;
        device.product(dy.matrix(), tape.parameters.matrix(self.weight), dn.view_mut(), false);
        drop(dy);
        norm_backward(tape, gradients, &self.x, self.norm, self.eps, &dn);
    }
}

fn norm_backward<'p, D: Device>(
    tape: &Tape<'p, D>,
    gradients: &mut Gradients<'_, D>,
    x: &Var<D>,
    weight: Param,
    eps: f64,
    dy: &Tensor<D>,
) {
    // The slot is taken out and put back so that values and parameters can be borrowed side by side.
    let mut dx =
        gradients.take(x.id).unwrap_or_else(|| Tensor::zeros(&tape.device, x.tensor.rows, x.tensor.columns));
    tape.device.rms_norm_backward(
        x.tensor.view(),
        tape.parameter(weight),
        eps,
        dy.view(),
        dx.view_mut(),
        gradients.parameters.view_mut(weight),
    );
    gradients.add(x.id, dx);
}
