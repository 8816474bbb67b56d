//! A tensor times a number.

use crate::device::Device;
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};

struct Scaled {
    x: usize,
    factor: f64,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `factor * x`.
    pub fn scaled(&mut self, x: &Var<D>, factor: f64) -> Var<D> {
        let mut y = x.tensor.duplicate(&self.device);
        self.device.scale(y.view_mut(), factor);
        let (x, y) = (x.id, self.input(y));
        let output = y.id;
        self.push(|| Box::new(Scaled { x, factor, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Scaled {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(mut dy) = gradients.take(self.output) else {
            return;
        };
        tape.device.scale(dy.view_mut(), self.factor);
        gradients.add(self.x, dy);
    }
}
