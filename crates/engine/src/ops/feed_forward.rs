//! The middle of a feed-forward layer: `y = dropout(act(u))`, or gated (Shazeer, 2020): `y = dropout(act(a) * b)`, u = [a | b].

use crate::device::{Activation, Device};
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct FeedForward<D: Device> {
    u: usize,
    /// What the derivative is computed from: the input, or the output where that says as much and is kept anyway.
    from: Var<D>,
    width: usize,
    kind: Activation,
    gated: bool,
    dropout: Option<Dropout>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `[rows, width]`, where `u` has rows of `width`, or of `2 * width` when gated.
    pub fn activation(
        &mut self,
        u: &Var<D>,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
    ) -> Var<D> {
        let width = if gated { u.tensor.columns / 2 } else { u.tensor.columns };
        let mut y = Tensor::scratch(&self.device, u.tensor.rows, width);
        self.device.activation(u.tensor.view(), width, kind, gated, dropout, y.view_mut());
        let y = self.input(y);
        let output = y.id;
        // relu: an output is positive exactly where the input was and was not dropped.
        let from = if kind == Activation::Relu && !gated { y.clone() } else { u.clone() };
        let u = u.id;
        self.push(|| Box::new(FeedForward { u, from, width, kind, gated, dropout, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for FeedForward<D> {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let u = &self.from.tensor;
        let mut du = Tensor::scratch(&tape.device, u.rows, u.columns);
        tape.device.activation_backward(
            u.view(),
            self.width,
            self.kind,
            self.gated,
            self.dropout,
            dy.view(),
            du.view_mut(),
        );
        gradients.add(self.u, du);
    }
}
