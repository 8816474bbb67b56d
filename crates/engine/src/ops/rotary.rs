//! Rotary positions (Su et al., 2021): queries and keys turned by the angles of their positions, in place. Its backward turns the
//! gradient back and needs no values.

use std::rc::Rc;

use crate::device::{Device, Rotary, Span};
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};

struct Turn {
    x: usize,
    rotary: Rc<Rotary>,
    positions: Rc<[u32]>,
    output: usize,
}

/// The position of every row within its span, from 0 on; 0 for a row of no span.
pub fn positions(spans: &[Span], rows: usize) -> Rc<[u32]> {
    let mut positions = vec![0; rows];
    for span in spans {
        let rows = &mut positions[span.start as usize..span.end as usize];
        rows.iter_mut().zip(0..).for_each(|(p, i)| *p = i);
    }
    positions.into()
}

impl<'p, D: Device> Tape<'p, D> {
    /// Turns query and key of `x`, `[rows, 3 * heads * head_dim]` (query, key, value), of which every head has `2 * rotary.half`
    /// columns. Where nobody else holds `x`, its memory is used.
    pub fn rotary(&mut self, x: Var<D>, rotary: &Rc<Rotary>, positions: &Rc<[u32]>) -> Var<D> {
        let Var { id: x, tensor } = x;
        let mut tensor = Rc::try_unwrap(tensor).unwrap_or_else(|shared| shared.duplicate(&self.device));
        let (columns, stride) = (tensor.columns / 3 * 2, tensor.columns);
        self.device.rotate(tensor.view_mut(), stride, columns, rotary, positions, false);
        let y = self.input(tensor);
        let output = y.id;
        self.push(|| {
            let (rotary, positions) = (rotary.clone(), positions.clone());
            Box::new(Turn { x, rotary, positions, output })
        });
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Turn {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(mut dy) = gradients.take(self.output) else {
            return;
        };
        let (columns, stride) = (dy.columns / 3 * 2, dy.columns);
        tape.device.rotate(dy.view_mut(), stride, columns, &self.rotary, &self.positions, true);
        gradients.add(self.x, dy);
    }
}
