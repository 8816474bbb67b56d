//! The tape: runs fused operations forward, remembers what their backward needs, and runs it in reverse.
//!
//! A tape lives for one shard. With `recording` off it keeps nothing: inference and recomputed blocks.
//! Losses are roots: they carry their weight themselves and receive no gradient.

use std::rc::Rc;

use crate::device::Device;
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

/// Gradients while the tape runs backward: one slot a value, and the arena of parameter gradients.
pub struct Gradients<'g, D: Device> {
    device: D,
    slots: Vec<Option<Tensor<D>>>,
    /// Gradients of the parameters, added to.
    pub parameters: &'g mut Arena<D>,
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
    /// The slot of a value to add into, zero if it was empty.
    pub fn sum(&mut self, id: usize, rows: usize, columns: usize) -> &mut Tensor<D> {
        self.slots[id].get_or_insert_with(|| Tensor::zeros(&self.device, rows, columns))
    }
}

/// The backward of one operation.
pub(crate) trait Node<'p, D: Device> {
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
    draw: Option<Draw>,
}

impl<'p, D: Device> Tape<'p, D> {
    /// A tape that records for a backward pass; dropout is keyed by `draw`.
    pub fn recording(device: &D, parameters: &'p Arena<D>, draw: Option<Draw>) -> Self {
        Tape { device: device.clone(), parameters, nodes: Vec::new(), values: 0, recording: true, draw }
    }
    /// A tape that keeps nothing and drops nothing out: inference.
    pub fn inference(device: &D, parameters: &'p Arena<D>) -> Self {
        Tape { recording: false, ..Self::recording(device, parameters, None) }
    }
    /// Dropout of a site (a number that names the place in the model); none in inference or for `p == 0`.
    pub fn dropout(&self, site: u64, p: f64) -> Option<Dropout> {
        let d = self.draw?;
        Dropout::new(random::key(&[d.seed, d.update, d.shard, site]), p)
    }
    /// Puts a tensor on the tape as an input.
    pub fn input(&mut self, tensor: Tensor<D>) -> Var<D> {
        let id = self.values;
        self.values += 1;
        Var { id, tensor: Rc::new(tensor) }
    }
    pub(crate) fn push(&mut self, node: impl FnOnce() -> Box<dyn Node<'p, D> + 'p>) {
        if self.recording {
            let node = node();
            self.nodes.push(node);
        }
    }
    /// Runs backward from the recorded losses; adds to `parameters`. Gradients of `inputs` come back
    /// (zero where nothing depends on one).
    pub fn backward(mut self, parameters: &mut Arena<D>, inputs: &[&Var<D>]) -> Vec<Tensor<D>> {
        let slots = (0..self.values).map(|_| None).collect();
        let mut g = Gradients { device: self.device.clone(), slots, parameters };
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
            node.backward(self, gradients);
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
            draw: self.draw,
        };
        let inner: Vec<Var<D>> = owned.iter().map(|v| plain.share(v)).collect();
        let result = block(&mut plain, &inner);
        drop(inner);
        let id = self.values;
        self.values += 1;
        let y = Var { id, tensor: result.tensor };
        let draw = self.draw;
        self.push(|| Box::new(Recompute { inputs: owned, output: id, block: Box::new(block), draw }));
        y
    }
    fn share(&mut self, v: &Var<D>) -> Var<D> {
        let id = self.values;
        self.values += 1;
        Var { id, tensor: v.tensor.clone() }
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
    draw: Option<Draw>,
}

impl<'p, D: Device> Node<'p, D> for Recompute<'p, D> {
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
        let mut g = Gradients { device: tape.device.clone(), slots, parameters: gradients.parameters };
        again.run_backward(&mut g);
        let found: Vec<_> = inner.iter().map(|v| g.take(v.id)).collect();
        for (outer, d) in self.inputs.iter().zip(found) {
            if let Some(d) = d {
                gradients.add(outer.id, d);
            }
        }
    }
}
