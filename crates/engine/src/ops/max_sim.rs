//! MaxSim (Khattab and Zaharia, 2020): `score(q, d) = sum over rows i of q of max over rows j of d of x_i . y_j`, of chosen pairs.
//!
//! Or XTR's score, for which only the greatest products of a query's row with all documents count ([`MaxSimShape::retrieved`]).
//!
//! The similarities are never held together (XTR's: those of a query are): forward goes document by document and keeps, for every pair and row of its query, which row
//! was the best one; that is all the backward needs, for the derivative reaches no other. Of equal rows the first is the best one.

use std::rc::Rc;

use crate::device::{Device, MaxSimShape, MaxSimSide};
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct MaxSim<D: Device> {
    queries: Var<D>,
    documents: Var<D>,
    shape: Rc<MaxSimShape>,
    best: Vec<u32>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// The scores of the pairs of `shape`, `[pairs, 1]`. `queries` and `documents` are rows of one width, and may be the same tensor. A row
    /// that stands in no document's span has no part: that is how masks exclude tokens. A document without rows scores
    /// [`crate::device::EMPTY_DOCUMENT`] for every row of the query, or 0 where it has a floor.
    pub fn max_sim(&mut self, queries: &Var<D>, documents: &Var<D>, shape: &Rc<MaxSimShape>) -> Var<D> {
        let width = queries.tensor.columns;
        assert_eq!(documents.tensor.columns, width, "rows of two widths");
        let (device, mut scores) = (&self.device, Tensor::scratch(&self.device, shape.pairs.len(), 1));
        let (q, d) = (queries.tensor.view(), documents.tensor.view());
        let best = device.max_sim(q, d, width, shape, scores.view_mut());
        let scores = self.input(scores);
        let output = scores.id;
        let (queries, documents, shape) = (queries.clone(), documents.clone(), shape.clone());
        self.push(|| Box::new(MaxSim { queries, documents, shape, best, output }));
        scores
    }
}

impl<'p, D: Device> Node<'p, D> for MaxSim<D> {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(slopes) = gradients.take(self.output) else {
            return;
        };
        let (q, d) = (&self.queries, &self.documents);
        for (own, other, side) in [(q, d, MaxSimSide::Queries), (d, q, MaxSimSide::Documents)] {
            let (rows, width) = (own.tensor.rows, own.tensor.columns);
            let sum = gradients.sum(own.id, rows, width);
            let (others, slopes) = (other.tensor.view(), slopes.view());
            tape.device.max_sim_backward(
                others,
                width,
                &self.shape,
                &self.best,
                slopes,
                side,
                sum.view_mut(),
            );
        }
    }
}
