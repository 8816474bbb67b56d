//! The tape: runs fused operations forward, remembers what their backward needs, and runs it in reverse.
//!
//! A tape lives for one shard. With `recording` off it keeps nothing: inference and recomputed blocks.
//! Losses are roots: they carry their weight themselves and receive no gradient.

use std::ops::Range;
use std::rc::Rc;

use crate::device::{Device, Matrix};
use crate::params::{Arena, Param};
use crate::random::{self, Dropout};
use crate::tensor::Tensor;

/// A value on the tape.
pub struct Var<D: Device> {
    pub(crate) id: usize,
    /// The value.
    pub tensor: Rc<Tensor<D>>,
}

impl<D: Device> Clone for Var<D> {
    fn clone(&self) -> Self {
        Var { id: self.id, tensor: self.tensor.clone() }
    }
}

/// What keys the dropout of a pass: the same numbers give the same bits anywhere. `None` on the tape: no dropout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The run's seed.
    pub seed: u64,
    /// Number of the update.
    pub update: u64,
    /// Number of the shard within the update.
    pub shard: u64,
}

/// Stretches of the gradients, and who wants to know when a backward pass is done with them.
pub struct Buckets<'b, D: Device> {
    /// The stretches, in the order in which they are told.
    pub ranges: &'b [Range<usize>],
    /// Called once for each, with its number and the gradients: nothing will be added to that stretch any more. In order:
    /// one that is ready early is told after those before it.
    pub ready: &'b mut dyn FnMut(usize, &mut Arena<D>),
}

/// Who is told of parameters that a node has added to.
trait Watch<D: Device> {
    fn written(&mut self, p: Param);
    fn tell(&mut self, gradients: &mut Arena<D>);
}

/// Counts the writers of each bucket that are still to run.
struct Countdown<'b, D: Device> {
    buckets: Buckets<'b, D>,
    writers: Vec<usize>,
    told: usize,
}

impl<D: Device> Countdown<'_, D> {
    fn touched(&self, p: Param) -> impl Iterator<Item = usize> {
        let touches = move |r: &Range<usize>| p.start < r.end && r.start < p.start + p.len();
        self.buckets.ranges.iter().enumerate().filter(move |(_, r)| touches(r)).map(|(i, _)| i)
    }
}

impl<D: Device> Watch<D> for Countdown<'_, D> {
    fn written(&mut self, p: Param) {
        let touched: Vec<usize> = self.touched(p).collect();
        touched.into_iter().for_each(|i| self.writers[i] -= 1);
    }
    fn tell(&mut self, gradients: &mut Arena<D>) {
        while self.writers.get(self.told) == Some(&0) {
            (self.buckets.ready)(self.told, gradients);
            self.told += 1;
        }
    }
}

/// Gradients while the tape runs backward: one slot a value, and the arena of parameter gradients.
pub struct Gradients<'g, D: Device> {
    device: D,
    slots: Vec<Option<Tensor<D>>>,
    /// Gradients of the parameters, added to.
    pub parameters: &'g mut Arena<D>,
    watch: Option<&'g mut (dyn Watch<D> + 'g)>,
}

impl<D: Device> Gradients<'_, D> {
    /// Takes the gradient of a value out; `None` when nothing depends on it.
    pub fn take(&mut self, id: usize) -> Option<Tensor<D>> {
        self.slots[id].take()
    }
    /// Adds a gradient to a value's, by moving it where it is the first.
    pub fn add(&mut self, id: usize, gradient: Tensor<D>) {
        match &mut self.slots[id] {
            Some(sum) => self.device.add(sum.view_mut(), gradient.view()),
            slot => *slot = Some(gradient),
        }
    }
    /// Adds the product `a b` to a value's gradient; where it is the first nothing is filled or read.
    pub fn add_product(&mut self, id: usize, a: Matrix<'_, D>, b: Matrix<'_, D>) {
        let slot = &mut self.slots[id];
        let is_sum = slot.is_some();
        let sum = slot.get_or_insert_with(|| Tensor::scratch(&self.device, a.rows, b.columns));
        self.device.product(a, b, sum.view_mut(), is_sum);
    }
    /// The slot of a value to add into, zero if it was empty.
    pub fn sum(&mut self, id: usize, rows: usize, columns: usize) -> &mut Tensor<D> {
        self.slots[id].get_or_insert_with(|| Tensor::zeros(&self.device, rows, columns))
    }
}

/// The backward of one operation.
pub(crate) trait Node<'p, D: Device> {
    /// Names the parameters whose gradients [`Node::backward`] may add to; one that is named twice is named twice on every call.
    fn writes(&self, each: &mut dyn FnMut(Param));
    /// Whether backward will run the node's own tape, which tells of what it writes itself.
    fn runs_again(&self, _: &Gradients<'_, D>) -> bool {
        false
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>);
}

/// Records operations on the parameters `'p`.
pub struct Tape<'p, D: Device> {
    /// The device everything lies on.
    pub device: D,
    pub(crate) parameters: &'p Arena<D>,
    nodes: Vec<Box<dyn Node<'p, D> + 'p>>,
    values: usize,
    recording: bool,
    /// In the plain pass of a recomputed block: what its nodes would write.
    noted: Option<Vec<Param>>,
    draw: Option<Draw>,
}

impl<'p, D: Device> Tape<'p, D> {
    /// A tape that records for a backward pass; dropout is keyed by `draw`.
    pub fn recording(device: &D, parameters: &'p Arena<D>, draw: Option<Draw>) -> Self {
        let (device, nodes) = (device.clone(), Vec::new());
        Tape { device, parameters, nodes, values: 0, recording: true, noted: None, draw }
    }
    /// A tape that keeps nothing and drops nothing out: inference.
    pub fn inference(device: &D, parameters: &'p Arena<D>) -> Self {
        Tape { recording: false, ..Self::recording(device, parameters, None) }
    }
    /// A tape that keeps nothing, with the dropout of one that records: a first pass, whose values a second one has again.
    pub fn passing(device: &D, parameters: &'p Arena<D>, draw: Draw) -> Self {
        Tape { recording: false, ..Self::recording(device, parameters, Some(draw)) }
    }
    /// Dropout of a site (a number that names the place in the model); none in inference or for `p == 0`.
    pub fn dropout(&self, site: u64, p: f64) -> Option<Dropout> {
        let d = self.draw?;
        Dropout::new(random::key(&[d.seed, d.update, d.shard, site]), p)
    }
    /// Puts a tensor on the tape as an input.
    pub fn input(&mut self, tensor: Tensor<D>) -> Var<D> {
        Var { id: self.slot(), tensor: Rc::new(tensor) }
    }
    /// The number of a new value: its gradient has a place of its own.
    pub(crate) fn slot(&mut self) -> usize {
        self.values += 1;
        self.values - 1
    }
    pub(crate) fn push(&mut self, node: impl FnOnce() -> Box<dyn Node<'p, D> + 'p>) {
        if self.recording {
            let node = node();
            self.nodes.push(node);
        } else if let Some(noted) = &mut self.noted {
            node().writes(&mut |p| noted.push(p));
        }
    }
    /// Runs backward from the recorded losses; adds to `parameters`. Gradients of `inputs` come back
    /// (zero where nothing depends on one).
    pub fn backward(self, parameters: &mut Arena<D>, inputs: &[&Var<D>]) -> Vec<Tensor<D>> {
        self.run(parameters, inputs, None)
    }
    /// As [`Tape::backward`], with the same bits; tells when each bucket of `parameters` gets no more addends.
    pub fn backward_with(self, parameters: &mut Arena<D>, buckets: Buckets<'_, D>) {
        let mut writers = vec![0; buckets.ranges.len()];
        let mut watch = Countdown { buckets, writers: Vec::new(), told: 0 };
        for node in &self.nodes {
            node.writes(&mut |p| watch.touched(p).for_each(|i| writers[i] += 1));
        }
        watch.writers = writers;
        watch.tell(parameters);
        self.run(parameters, &[], Some(&mut watch));
    }
    fn run(
        mut self,
        parameters: &mut Arena<D>,
        inputs: &[&Var<D>],
        watch: Option<&mut dyn Watch<D>>,
    ) -> Vec<Tensor<D>> {
        let slots = (0..self.values).map(|_| None).collect();
        let mut g = Gradients { device: self.device.clone(), slots, parameters, watch: None };
        // Apart from the struct, so that the two lifetimes need not be one.
        if let Some(watch) = watch {
            g.watch = Some(watch);
        }
        self.run_backward(&mut g);
        inputs
            .iter()
            .map(|v| {
                g.take(v.id).unwrap_or_else(|| Tensor::zeros(&self.device, v.tensor.rows, v.tensor.columns))
            })
            .collect()
    }
    fn run_backward(&mut self, gradients: &mut Gradients<'_, D>) {
        while let Some(node) = self.nodes.pop() {
            if gradients.watch.is_none() {
                node.backward(self, gradients);
                continue;
            }
            // A block that runs again tells of its own nodes; one without a gradient does not run.
            let mut written = Vec::new();
            node.writes(&mut |p| written.push(p));
            let runs_again = node.runs_again(gradients);
            node.backward(self, gradients);
            if let Some(watch) = &mut gradients.watch {
                if !runs_again {
                    written.into_iter().for_each(|p| watch.written(p));
                }
                watch.tell(gradients.parameters);
            }
        }
    }

    /// Runs `block` without keeping its intermediate values, and again in the backward pass: memory for time
    /// (activation checkpointing; Chen et al., 2016). The bits are those of the block run plainly.
    pub fn recompute<F>(&mut self, inputs: &[&Var<D>], block: F) -> Var<D>
    where
        F: Fn(&mut Tape<'p, D>, &[Var<D>]) -> Var<D> + 'p,
    {
        let owned: Vec<Var<D>> = inputs.iter().map(|v| (*v).clone()).collect();
        if !self.recording {
            return block(self, &owned);
        }
        let mut plain = Tape {
            device: self.device.clone(),
            parameters: self.parameters,
            nodes: Vec::new(),
            values: 0,
            recording: false,
            noted: Some(Vec::new()),
            draw: self.draw,
        };
        let inner: Vec<Var<D>> = owned.iter().map(|v| plain.share(v)).collect();
        let result = block(&mut plain, &inner);
        drop(inner);
        let id = self.slot();
        let y = Var { id, tensor: result.tensor };
        let (draw, writes) = (self.draw, plain.noted.unwrap_or_default());
        self.push(|| Box::new(Recompute { inputs: owned, output: id, block: Box::new(block), writes, draw }));
        y
    }
    fn share(&mut self, v: &Var<D>) -> Var<D> {
        Var { id: self.slot(), tensor: v.tensor.clone() }
    }
    /// A parameter's values.
    pub fn parameter(&self, p: Param) -> crate::device::View<'p, D> {
        self.parameters.view(p)
    }
}

struct Recompute<'p, D: Device> {
    inputs: Vec<Var<D>>,
    output: usize,
    block: Box<dyn Fn(&mut Tape<'p, D>, &[Var<D>]) -> Var<D> + 'p>,
    writes: Vec<Param>,
    draw: Option<Draw>,
}

impl<'p, D: Device> Node<'p, D> for Recompute<'p, D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        self.writes.iter().for_each(|&p| each(p));
    }
    fn runs_again(&self, gradients: &Gradients<'_, D>) -> bool {
        gradients.slots[self.output].is_some()
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else {
            return;
        };
        let mut again = Tape::recording(&tape.device, tape.parameters, self.draw);
        let inner: Vec<Var<D>> = self.inputs.iter().map(|v| again.share(v)).collect();
        let y = (self.block)(&mut again, &inner);
        let mut slots: Vec<Option<Tensor<D>>> = (0..again.values).map(|_| None).collect();
        slots[y.id] = Some(dy);
        drop(y);
        let mut g =
            Gradients { device: tape.device.clone(), slots, parameters: gradients.parameters, watch: None };
        if let Some(watch) = &mut gradients.watch {
            g.watch = Some(&mut **watch);
        }
        again.run_backward(&mut g);
        let found: Vec<_> = inner.iter().map(|v| g.take(v.id)).collect();
        for (outer, d) in self.inputs.iter().zip(found) {
            if let Some(d) = d {
                gradients.add(outer.id, d);
            }
        }
    }
}
