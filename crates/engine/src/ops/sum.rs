//! The sum of two tensors of one size: a residual around a layer whose end is an activation.

use crate::device::Device;
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};

struct Sum {
    a: usize,
    b: usize,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `a + b`, element by element.
    pub fn sum(&mut self, a: &Var<D>, b: &Var<D>) -> Var<D> {
        assert_eq!((a.tensor.rows, a.tensor.columns), (b.tensor.rows, b.tensor.columns));
        let mut y = a.tensor.duplicate(&self.device);
        self.device.add(y.view_mut(), b.tensor.view());
        let (y, a, b) = (self.input(y), a.id, b.id);
        let output = y.id;
        self.push(|| Box::new(Sum { a, b, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Sum {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        gradients.add(self.a, dy.duplicate(&tape.device));
        gradients.add(self.b, dy);
    }
}
