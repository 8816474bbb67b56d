//! Linear layer without bias, `y = x W^T`: the keys and values of cross-attention.

use crate::device::Device;
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct Linear<D: Device> {
    x: Var<D>,
    weight: Param,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `x weight^T`: `[rows, weight.rows]`.
    pub fn linear(&mut self, x: &Var<D>, weight: Param) -> Var<D> {
        let mut y = Tensor::scratch(&self.device, x.tensor.rows, weight.rows);
        self.device.product(x.tensor.matrix(), self.parameters.matrix(weight).t(), y.view_mut(), false);
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(Linear { x: x.clone(), weight, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Linear<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.weight);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let x = &self.x.tensor;
        tape.device.product(dy.matrix().t(), x.matrix(), gradients.parameters.view_mut(self.weight), true);
        gradients.add_product(self.x.id, dy.matrix(), tape.parameters.matrix(self.weight));
    }
}
