//! The end of a sub-layer: `y = residual + dropout(x W^T)`.

use crate::device::Device;
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct LinearResidual<D: Device> {
    x: Var<D>,
    weight: Param,
    residual: usize,
    dropout: Option<Dropout>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `residual + dropout(x weight^T)`: `[rows, weight.rows]`.
    pub fn linear_residual(
        &mut self,
        x: &Var<D>,
        weight: Param,
        residual: &Var<D>,
        dropout: Option<Dropout>,
    ) -> Var<D> {
        let device = self.device.clone();
        let mut y = Tensor::scratch(&device, x.tensor.rows, weight.rows);
        device.product(x.tensor.matrix(), self.parameters.matrix(weight).t(), y.view_mut(), false);
        device.residual(y.view_mut(), residual.tensor.view(), weight.rows, dropout);
        let y = self.input(y);
        let output = y.id;
        let residual = residual.id;
        self.push(|| Box::new(LinearResidual { x: x.clone(), weight, residual, dropout, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for LinearResidual<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.weight);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let (device, x) = (&tape.device, &self.x.tensor);
        let dropped = self.dropout.map(|d| {
            let mut t = dy.duplicate(device);
            device.dropout(t.view_mut(), dy.columns, d);
            t
        });
        let d = dropped.as_ref().unwrap_or(&dy);
        device.product(d.matrix().t(), x.matrix(), gradients.parameters.view_mut(self.weight), true);
        gradients.add_product(self.x.id, d.matrix(), tape.parameters.matrix(self.weight));
        gradients.add(self.residual, dy);
    }
}
