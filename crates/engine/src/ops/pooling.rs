//! From token rows to one row a sequence: means of spans, single rows; and rows of unit length.

use std::rc::Rc;

use crate::device::{Device, Span};
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct Means {
    x: usize,
    rows: usize,
    spans: Rc<[Span]>,
    output: usize,
}

struct Rows {
    x: usize,
    rows: usize,
    picked: Rc<[u32]>,
    output: usize,
}

struct Normalize<D: Device> {
    x: Var<D>,
    least: f64,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// The mean of each span's rows, `[spans, columns]`; zero for an empty span.
    pub fn span_means(&mut self, x: &Var<D>, spans: &[Span]) -> Var<D> {
        let (rows, width) = (x.tensor.rows, x.tensor.columns);
        let mut y = Tensor::scratch(&self.device, spans.len(), width);
        self.device.span_means(x.tensor.view(), width, spans, y.view_mut());
        let (x, y) = (x.id, self.input(y));
        let output = y.id;
        self.push(|| Box::new(Means { x, rows, spans: spans.into(), output }));
        y
    }
    /// The rows `picked`, in that order: `[picked.len(), columns]`. Each must be below the number of rows.
    pub fn rows(&mut self, x: &Var<D>, picked: &[u32]) -> Var<D> {
        let (rows, width) = (x.tensor.rows, x.tensor.columns);
        assert!(picked.iter().all(|&r| (r as usize) < rows), "a row is beyond its tensor");
        let mut y = Tensor::scratch(&self.device, picked.len(), width);
        self.device.gather(x.tensor.view(), width, picked, y.view_mut());
        let (x, y) = (x.id, self.input(y));
        let output = y.id;
        self.push(|| Box::new(Rows { x, rows, picked: picked.into(), output }));
        y
    }
    /// Every row over its length, or over `least` where it is shorter.
    pub fn normalize(&mut self, x: &Var<D>, least: f64) -> Var<D> {
        let mut y = Tensor::scratch(&self.device, x.tensor.rows, x.tensor.columns);
        self.device.normalize(x.tensor.view(), x.tensor.columns, least, y.view_mut());
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(Normalize { x: x.clone(), least, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Means {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let dx = gradients.sum(self.x, self.rows, dy.columns);
        tape.device.span_means_backward(dy.view(), dy.columns, &self.spans, dx.view_mut());
    }
}

impl<'p, D: Device> Node<'p, D> for Rows {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let dx = gradients.sum(self.x, self.rows, dy.columns);
        tape.device.scatter_add(dy.view(), dy.columns, &self.picked, dx.view_mut());
    }
}

impl<'p, D: Device> Node<'p, D> for Normalize<D> {
    fn writes(&self, _: &mut dyn FnMut(Param)) {}
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let x = &self.x.tensor;
        let dx = gradients.sum(self.x.id, x.rows, x.columns);
        tape.device.normalize_backward(x.view(), x.columns, self.least, dy.view(), dx.view_mut());
    }
}
