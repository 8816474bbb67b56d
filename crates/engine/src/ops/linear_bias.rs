//! Linear layers with a bias: `y = n W^T + b` of rows or of their LayerNorm, and as the end of a sub-layer
//! `y = n + dropout(x W^T + b)`, where the residual `n` may be a LayerNorm too (post-norm, as in BERT).

use crate::device::Device;
use crate::ops::layer_norm::Normed;
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct Linear<D: Device> {
    x: Normed<D>,
    weight: Param,
    bias: Option<Param>,
    output: usize,
}

struct Residual<D: Device> {
    x: Var<D>,
    weight: Param,
    bias: Option<Param>,
    residual: usize,
    dropout: Option<Dropout>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `x weight^T + bias`: `[rows, weight.rows]`; `bias` holds `weight.rows` elements.
    pub fn linear_bias(&mut self, x: &Normed<D>, weight: Param, bias: Option<Param>) -> Var<D> {
        let value = x.value(self);
        let mut y = Tensor::scratch(&self.device, value.rows, weight.rows);
        self.device.product(value.matrix(), self.parameters.matrix(weight).t(), y.view_mut(), false);
        drop(value);
        if let Some(bias) = bias {
            assert_eq!(bias.len(), weight.rows);
            self.device.add_bias(y.view_mut(), self.parameter(bias));
        }
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(Linear { x: x.clone(), weight, bias, output }));
        y
    }
    /// `residual + dropout(x weight^T + bias)`: `[rows, weight.rows]`.
    pub fn linear_bias_residual(
        &mut self,
        x: &Var<D>,
        weight: Param,
        bias: Option<Param>,
        residual: &Normed<D>,
        dropout: Option<Dropout>,
    ) -> Var<D> {
        let y = self.sub_layer_end(&x.tensor, weight, bias, residual, dropout);
        let y = self.input(y);
        let (output, residual) = (y.id, residual.id);
        self.push(|| Box::new(Residual { x: x.clone(), weight, bias, residual, dropout, output }));
        y
    }
    pub(crate) fn sub_layer_end(
        &self,
        x: &Tensor<D>,
        weight: Param,
        bias: Option<Param>,
        residual: &Normed<D>,
        dropout: Option<Dropout>,
    ) -> Tensor<D> {
        let (device, width) = (&self.device, weight.rows);
        let mut y = Tensor::scratch(device, x.rows, width);
        device.product(x.matrix(), self.parameters.matrix(weight).t(), y.view_mut(), false);
        let (bias, norm) = (bias.map(|b| self.parameter(b)), residual.parameters(self));
        device.bias_residual(y.view_mut(), width, bias, residual.x.tensor.view(), norm, dropout);
        y
    }
}

/// The gradient of what went into the residual sum, `dropout(dy)`; its rows' sum is added to the bias. `None`: `dy` itself.
pub(crate) fn sub_layer_gradient<D: Device>(
    device: &D,
    dy: &Tensor<D>,
    bias: Option<Param>,
    dropout: Option<Dropout>,
    gradients: &mut Gradients<'_, D>,
) -> Option<Tensor<D>> {
    let bias = bias.map(|b| gradients.parameters.view_mut(b));
    let Some(dropout) = dropout else {
        if let Some(bias) = bias {
            device.sum_rows(dy.view(), bias);
        }
        return None;
    };
    let mut d = Tensor::scratch(device, dy.rows, dy.columns);
    device.bias_residual_backward(dy.view(), dy.columns, dropout, d.view_mut(), bias);
    Some(d)
}

impl<'p, D: Device> Node<'p, D> for Linear<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        [self.weight].into_iter().chain(self.bias).for_each(each);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let device = &tape.device;
        if let Some(bias) = self.bias {
            device.sum_rows(dy.view(), gradients.parameters.view_mut(bias));
        }
        let x = self.x.value(tape);
        device.product(dy.matrix().t(), x.matrix(), gradients.parameters.view_mut(self.weight), true);
        drop(x);
        gradients.add_product(self.x.id, dy.matrix(), tape.parameters.matrix(self.weight));
    }
}

impl<'p, D: Device> Node<'p, D> for Residual<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        [self.weight].into_iter().chain(self.bias).for_each(each);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let (device, x) = (&tape.device, &self.x.tensor);
        let dropped = sub_layer_gradient(device, &dy, self.bias, self.dropout, gradients);
        let d = dropped.as_ref().unwrap_or(&dy);
        device.product(d.matrix().t(), x.matrix(), gradients.parameters.view_mut(self.weight), true);
        gradients.add_product(self.x.id, d.matrix(), tape.parameters.matrix(self.weight));
        drop(dropped);
        gradients.add(self.residual, dy);
    }
}
