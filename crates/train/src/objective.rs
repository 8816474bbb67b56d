//! What the training loop needs to know of a task: how an update's examples become shards, a shard's loss and
//! gradient, and a measure to choose the best checkpoint by. One objective, one file below `objectives`.

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{Arena, Buckets, Device, Draw, Layout};

use crate::error::TrainError;

/// What a shard added to its update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShardOutcome {
    /// Its part of the update's loss.
    pub loss: f64,
}

/// How large a shard is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardSize {
    /// Tokens that are computed.
    pub tokens: u64,
    /// Tokens that a padded system would compute.
    pub padded_tokens: u64,
    /// What the update's loss is a mean over: target tokens, questions.
    pub count: u64,
    /// Inputs: passages of a reader.
    pub inputs: u64,
    /// Inputs as long as the length limit: those that lost their end to it, and the few that just fit.
    pub truncated: u64,
}

impl ShardSize {
    /// Adds another shard's size.
    pub fn add(&mut self, other: ShardSize) {
        self.tokens += other.tokens;
        self.padded_tokens += other.padded_tokens;
        self.count += other.count;
        self.inputs += other.inputs;
        self.truncated += other.truncated;
    }
}

/// What a shard shows to all ranks before any gradient of its update is computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shown {
    /// Whole numbers, in an order of the task's own.
    pub counts: Vec<u64>,
    /// Vectors, one after the other.
    pub values: Vec<f64>,
}

/// The outcome of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Greater is better; the best checkpoint has the greatest.
    pub score: f64,
    /// All figures, for the logs, by name.
    pub figures: Vec<(&'static str, f64)>,
    /// The figures as a person reads them.
    pub text: String,
}

impl Evaluation {
    /// A figure by its name.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|(of, _)| *of == name).map(|(_, value)| *value)
    }
    /// Of figures that are shares of 1, read in percent.
    pub fn of_shares(score: f64, figures: Vec<(&'static str, f64)>) -> Evaluation {
        let shown: Vec<String> = figures.iter().map(|(name, v)| format!("{name} {:.2}", 100.0 * v)).collect();
        Evaluation { score, figures, text: shown.join(", ") }
    }
}

/// A task to train for.
pub trait Objective<D: Device>: Sync {
    /// One micro-batch, encoded.
    type Shard: Send + Sync;

    /// The model's parameters.
    fn layout(&self) -> &Layout;
    /// Number of training examples.
    fn examples(&self) -> usize;
    /// Encodes an update's examples and cuts them into shards of `micro` examples.
    fn shards(&self, update: &UpdateExamples, micro: usize) -> Result<Vec<Self::Shard>, TrainError>;
    /// Size of a shard.
    fn size(&self, shard: &Self::Shard) -> ShardSize;
    /// Whether an update begins with a pass over all its shards: [`Objective::first_pass`] on each, then
    /// [`Objective::settle`].
    fn has_first_pass(&self) -> bool {
        false
    }
    /// Computes what has to be known of a shard before any gradient, keeps in it what is its own matter, and gives what all
    /// others have to see. The draws of `draw` are those of the shard's gradient.
    ///
    /// # Errors
    /// What cannot be computed.
    fn first_pass(
        &self,
        _device: &D,
        _parameters: &Arena<D>,
        _shard: &mut Self::Shard,
        _draw: Draw,
    ) -> Result<Shown, TrainError> {
        Ok(Shown::default())
    }
    /// Makes `shards`, which are the update's shards `own`, ready for their gradients, now that all shards' `shown` is
    /// here, in their order. The same bits for a shard whoever has it: what an owner adds up over others' shards it adds in
    /// their order.
    ///
    /// # Errors
    /// A rank was lost.
    fn settle(
        &self,
        _world: &World,
        _shown: &[Shown],
        _own: Range<usize>,
        _shards: &mut [Self::Shard],
    ) -> Result<(), TrainError> {
        Ok(())
    }
    /// Adds the shard's gradient of `weight` times its summed loss to `gradients`, and tells `buckets` when it is done with
    /// stretches of them.
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &Self::Shard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome;
    /// As [`Objective::gradient_with`], telling nobody.
    fn gradient(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &Self::Shard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
    ) -> ShardOutcome {
        self.gradient_with(device, parameters, shard, draw, weight, gradients, None)
    }
    /// Flags of the task that would make a shard's activations smaller, as they would be given.
    fn smaller_shards(&self) -> Vec<String> {
        Vec::new()
    }
    /// Measures the parameters on held-out data, by all ranks; rank 0 gets the outcome, the others `None`, as it gets where
    /// there is no such data.
    ///
    /// # Errors
    /// [`TrainError::Interrupted`], on all ranks, soon after `interrupted` says so on one.
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError>;
    /// As [`Objective::evaluate_among`], by one rank.
    ///
    /// # Errors
    /// Likewise.
    fn evaluate(
        &self,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        self.evaluate_among(&World::alone(), device, parameters, interrupted)
    }
    /// Writes the model, ready for use, into a folder.
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError>;
    /// What the data is, for the checkpoint: fingerprints that must be the same when the run goes on.
    fn fingerprint(&self) -> Map<String, Value>;
}

/// An update's shards: its rows are encoded in parallel, and every `micro` of them, in order, become one.
///
/// # Errors
/// What `encode` says of a row, or `shard` of some.
pub fn shards_of<E: Send, S>(
    update: &UpdateExamples,
    micro: usize,
    encode: impl Fn(usize) -> Result<E, TrainError> + Sync,
    shard: impl Fn(Vec<E>) -> Result<S, TrainError>,
) -> Result<Vec<S>, TrainError> {
    let mut encoded: Vec<E> = update.rows.par_iter().map(|&row| encode(row)).collect::<Result<_, _>>()?;
    let mut shards = Vec::new();
    while !encoded.is_empty() {
        let rest = encoded.split_off(micro.min(encoded.len()));
        shards.push(shard(std::mem::replace(&mut encoded, rest))?);
    }
    Ok(shards)
}
