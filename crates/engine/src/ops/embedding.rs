//! Embedding: rows of a table, `y[i] = dropout(table[ids[i]])`; the gradient adds rows in order.

use std::rc::Rc;

use crate::device::Device;
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct Embedding {
    table: Param,
    ids: Rc<[u32]>,
    dropout: Option<Dropout>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `[ids.len(), table.columns]`; every id must be below `table.rows`.
    pub fn embedding(&mut self, table: Param, ids: &[u32], dropout: Option<Dropout>) -> Var<D> {
        assert!(ids.iter().all(|&i| (i as usize) < table.rows), "a token id is beyond the embedding table");
        let device = self.device.clone();
        let mut y = Tensor::scratch(&device, ids.len(), table.columns);
        device.gather(self.parameter(table), table.columns, ids, y.view_mut());
        if let Some(d) = dropout {
            device.dropout(y.view_mut(), table.columns, d);
        }
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(Embedding { table, ids: ids.into(), dropout, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Embedding {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.table);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(mut dy) = gradients.take(self.output) else {
            return;
        };
        if let Some(d) = self.dropout {
            tape.device.dropout(dy.view_mut(), self.table.columns, d);
        }
        let table = gradients.parameters.view_mut(self.table);
        tape.device.scatter_add(dy.view(), self.table.columns, &self.ids, table);
    }
}
