//! A root that injects a given gradient: `loss = sum(x * gradient)`. Tests use it to probe one operation;
//! a second pass over stored embeddings uses it to continue a loss that was computed elsewhere.

use crate::device::Device;
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct Inject<D: Device> {
    x: usize,
    gradient: Tensor<D>,
}

impl<'p, D: Device> Tape<'p, D> {
    /// Records the root and returns `sum(x * gradient)`.
    pub fn inject(&mut self, x: &Var<D>, gradient: Tensor<D>) -> f64 {
        assert_eq!((x.tensor.rows, x.tensor.columns), (gradient.rows, gradient.columns));
        let value = self.device.dot(x.tensor.view(), gradient.view());
        let x = x.id;
        self.push(|| Box::new(Inject { x, gradient }));
        value
    }
}

impl<'p, D: Device> Node<'p, D> for Inject<D> {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, _: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        gradients.add(self.x, self.gradient);
    }
}
