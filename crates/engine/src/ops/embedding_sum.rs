//! The sum of rows of several tables, `y[i] = sum_t table_t[ids_t[i]]`: BERT's words, token types and positions.

use std::rc::Rc;

use crate::device::Device;
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct EmbeddingSum {
    tables: Vec<(Param, Rc<[u32]>, Option<u32>)>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `[rows, columns of each table]`; there is at least one table, and each has an id a row, below its number of rows. The row of
    /// a table's last entry, where there is one, gets no gradient (PyTorch's `padding_idx`).
    pub fn embedding_sum(&mut self, tables: &[(Param, &[u32], Option<u32>)]) -> Var<D> {
        let (width, rows) = (tables[0].0.columns, tables[0].1.len());
        let mut y = Tensor::scratch(&self.device, rows, width);
        for (i, (table, ids, _)) in tables.iter().enumerate() {
            assert!(ids.iter().all(|&i| (i as usize) < table.rows), "an id is beyond its embedding table");
            assert!(table.columns == width && ids.len() == rows, "tables of a sum have equal sizes");
            let values = self.parameter(*table);
            match i {
                0 => self.device.gather(values, width, ids, y.view_mut()),
                _ => self.device.gather_add(values, width, ids, y.view_mut()),
            }
        }
        let y = self.input(y);
        let output = y.id;
        self.push(|| {
            let tables =
                tables.iter().map(|(table, ids, frozen)| (*table, Rc::from(*ids), *frozen)).collect();
            Box::new(EmbeddingSum { tables, output })
        });
        y
    }
}

impl<'p, D: Device> Node<'p, D> for EmbeddingSum {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        self.tables.iter().for_each(|(table, ..)| each(*table));
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        for (table, ids, frozen) in &self.tables {
            // Stretches between frozen rows, in order.
            let mut start = 0;
            for run in ids.split(|id| Some(*id) == *frozen) {
                let (end, sum) = (start + run.len(), gradients.parameters.view_mut(*table));
                if !run.is_empty() {
                    tape.device.scatter_add(dy.rows_view(start, end), table.columns, run, sum);
                }
                start = end + 1;
            }
        }
    }
}
