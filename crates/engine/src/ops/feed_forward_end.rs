//! The second half of a feed-forward layer in one operation: `y = n + dropout(hidden W^T + b)` with
//! `hidden = dropout(act(u + c))`, or gated `dropout(act(u1 + c1) * (u2 + c2))`. The hidden rows, the widest of a model, are not
//! kept: backward computes them again from `u`.

use crate::device::{Activation, Device};
use crate::ops::layer_norm::Normed;
use crate::ops::linear_bias::sub_layer_gradient;
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

/// How the hidden rows come from `u`.
#[derive(Clone, Copy, Debug)]
pub struct Hidden {
    /// Added to the rows of `u`.
    pub bias: Option<Param>,
    /// The nonlinearity.
    pub kind: Activation,
    /// Whether the second half of a row of `u` is a factor on the activation of the first.
    pub gated: bool,
    /// Dropout of the hidden rows.
    pub dropout: Option<Dropout>,
}

impl Hidden {
    fn value<D: Device>(&self, tape: &Tape<'_, D>, u: &Tensor<D>, width: usize) -> Tensor<D> {
        let Hidden { bias, kind, gated, dropout } = *self;
        let mut h = Tensor::scratch(&tape.device, u.rows, width);
        match bias {
            Some(bias) => {
                let bias = tape.parameter(bias);
                tape.device.bias_activation(u.view(), bias, width, kind, gated, dropout, h.view_mut());
            }
            None => tape.device.activation(u.view(), width, kind, gated, dropout, h.view_mut()),
        }
        h
    }
}

struct End<D: Device> {
    u: Var<D>,
    hidden: Hidden,
    weight: Param,
    bias: Option<Param>,
    residual: usize,
    dropout: Option<Dropout>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `residual + dropout(hidden(u) weight^T + bias)`: `[rows, weight.rows]`. `u` has rows of `weight.columns`, or of twice
    /// that when gated.
    pub fn feed_forward_end(
        &mut self,
        u: &Var<D>,
        hidden: Hidden,
        weight: Param,
        bias: Option<Param>,
        residual: &Normed<D>,
        dropout: Option<Dropout>,
    ) -> Var<D> {
        assert_eq!(u.tensor.columns, if hidden.gated { 2 * weight.columns } else { weight.columns });
        let h = hidden.value(self, &u.tensor, weight.columns);
        let y = self.sub_layer_end(&h, weight, bias, residual, dropout);
        drop(h);
        let y = self.input(y);
        let (output, residual) = (y.id, residual.id);
        self.push(|| Box::new(End { u: u.clone(), hidden, weight, bias, residual, dropout, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for End<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        [self.weight].into_iter().chain(self.bias).chain(self.hidden.bias).for_each(each);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let (device, u, width) = (&tape.device, &self.u.tensor, self.weight.columns);
        let dropped = sub_layer_gradient(device, &dy, self.bias, self.dropout, gradients);
        let d = dropped.as_ref().unwrap_or(&dy);
        let mut h = self.hidden.value(tape, u, width);
        device.product(d.matrix().t(), h.matrix(), gradients.parameters.view_mut(self.weight), true);
        device.product(d.matrix(), tape.parameters.matrix(self.weight), h.view_mut(), false);
        drop(dropped);
        gradients.add(self.residual, dy);
        let (dh, mut du) = (h, Tensor::scratch(device, u.rows, u.columns));
        let Hidden { bias, kind, gated, dropout } = self.hidden;
        match bias {
            Some(bias) => device.bias_activation_backward(
                u.view(),
                tape.parameter(bias),
                width,
                kind,
                gated,
                dropout,
                dh.view(),
                du.view_mut(),
                gradients.parameters.view_mut(bias),
            ),
            None => {
                let (u, dh) = (u.view(), dh.view());
                device.activation_backward(u, width, kind, gated, dropout, dh, du.view_mut());
            }
        }
        gradients.add(self.u.id, du);
    }
}
