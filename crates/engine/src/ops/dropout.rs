//! Dropout of rows by itself, where no neighbouring operation takes it along: `y = dropout(x)`; backward drops the same elements.

use crate::device::Device;
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};

struct Drop {
    x: usize,
    dropout: Dropout,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// Drops elements of `x` and scales the others; `x` itself where there is no dropout.
    pub fn dropped(&mut self, x: Var<D>, dropout: Option<Dropout>) -> Var<D> {
        let Some(dropout) = dropout else { return x };
        let mut y = x.tensor.duplicate(&self.device);
        let columns = y.columns;
        self.device.dropout(y.view_mut(), columns, dropout);
        let (x, y) = (x.id, self.input(y));
        let output = y.id;
        self.push(|| Box::new(Drop { x, dropout, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Drop {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(mut dy) = gradients.take(self.output) else {
            return;
        };
        let columns = dy.columns;
        tape.device.dropout(dy.view_mut(), columns, self.dropout);
        gradients.add(self.x, dy);
    }
}
