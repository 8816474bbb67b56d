//! One optimizer update: shards to gradients along the fixed tree, over groups and then ranks, clipping, the optimizer.

use std::ops::Range;
use std::time::Duration;

use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::memory::{OutOfMemory, caught};
use tercio_engine::{Arena, Buckets, Device, Draw};

use crate::accumulate::{GroupSum, group_of};
use crate::error::TrainError;
use crate::layer_norms::{LayerNorms, gradient_squares, layers, norms};
use crate::objective::{Objective, ShardSize, Shown};
use crate::optimizer::Optimizer;
use crate::options::{BatchPlan, OptimOptions};
use crate::ranks::RankDevice;
use crate::ranks::deal::own_shards;
use crate::ranks::exchange::Exchange;
use crate::ranks::message::{After, Before, FirstPass, strongest};
use crate::ranks::parts::Parts;
use crate::ranks::spans::{Kind, Spans};
use crate::run::StopReason;
use crate::shortage::{Part, Shortage};

/// Parameters and everything that an update changes.
pub struct TrainState<D: Device> {
    /// Updates done.
    pub step: u64,
    /// The values.
    pub parameters: Arena<D>,
    /// Adam's first moments: all of them, or those of this rank's parts where the ranks share them out ([`Parts`]); of
    /// Adafactor nothing.
    pub first: Arena<D>,
    /// Adam's second moments, likewise; Adafactor's statistics ([`crate::optimizer::moments`]).
    pub second: Arena<D>,
}

/// What an update was.
#[derive(Clone, Copy, Debug, Default)]
pub struct UpdateOutcome {
    /// The loss, averaged over the update.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// The learning rate.
    pub lr: f64,
    /// Size of all shards of all ranks.
    pub size: ShardSize,
    /// Shards that this rank computed.
    pub own_shards: usize,
}

/// How an update ended, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub enum Update {
    /// It was applied.
    Done(UpdateOutcome),
    /// A rank had seen this signal before it began; nothing is changed.
    Stopped(StopReason),
    /// A rank gave it up; nothing is changed.
    Dropped,
}

/// What may keep an update from its end.
#[derive(Clone, Copy)]
pub struct Watch<'w> {
    /// The signal that this rank has seen, asked before the update begins.
    pub signal: &'w (dyn Fn() -> Option<StopReason> + Sync),
    /// What the longest save took so far, as far as this rank knows.
    pub save: Duration,
    /// Whether to give the update up, asked before each shard with the share (0 to 1) of this rank's shards that are left.
    pub give_up: &'w (dyn Fn(f64) -> bool + Sync),
}

/// Runs updates of one objective.
pub struct Stepper<'a, D: Device, O> {
    device: D,
    objective: &'a O,
    plan: BatchPlan,
    optimizer: Optimizer,
    seed: u64,
    sum: GroupSum<D>,
    world: World,
    parts: Parts,
    spans: Spans,
    save: Duration,
    layers: Vec<(String, Range<usize>)>,
    stats_freq: u64,
    norms: Vec<LayerNorms>,
}

impl<'a, D: RankDevice, O: Objective<D>> Stepper<'a, D, O> {
    /// A stepper with fixed settings, of one rank.
    pub fn new(device: &D, objective: &'a O, plan: BatchPlan, optim: &OptimOptions, seed: u64) -> Self {
        let world = World::alone();
        let parts = Parts::new::<D>(&world, objective.layout(), false);
        Self::among(world, parts, device, objective, plan, optim, seed)
    }
    /// A stepper of one of several ranks.
    pub fn among(
        world: World,
        parts: Parts,
        device: &D,
        objective: &'a O,
        plan: BatchPlan,
        optim: &OptimOptions,
        seed: u64,
    ) -> Self {
        Stepper {
            device: device.clone(),
            objective,
            plan,
            optimizer: Optimizer::new(optim, objective.layout()),
            seed,
            sum: GroupSum::new(device),
            world,
            parts,
            spans: Spans::default(),
            save: Duration::ZERO,
            layers: layers(objective.layout()),
            stats_freq: 0,
            norms: Vec::new(),
        }
    }
    /// Multiplies the schedule's rate from the next update on.
    pub fn set_rate_factor(&mut self, factor: f64) {
        self.optimizer.rate_factor = factor;
    }
    /// Measures the norms of every layer at each multiple of `updates`; 0: never.
    pub fn set_stats_freq(&mut self, updates: u64) {
        self.stats_freq = updates;
    }
    /// The norms of every layer at the last update, where it was one to measure at.
    pub fn layer_norms(&self) -> &[LayerNorms] {
        &self.norms
    }
    /// What the longest save of any rank took, as told at the begin of the last update.
    pub fn longest_save(&self) -> Duration {
        self.save
    }
    /// Where the time of the last update went on this rank.
    pub fn spans(&self) -> &Spans {
        &self.spans
    }
    /// Runs the next update on the given examples. On an error nothing is changed.
    ///
    /// # Errors
    /// Examples that cannot be read, a loss or gradient that is no number, another rank that was lost.
    pub fn update(
        &mut self,
        state: &mut TrainState<D>,
        examples: &UpdateExamples,
    ) -> Result<UpdateOutcome, TrainError> {
        match self.update_unless(
            state,
            examples,
            Watch { signal: &|| None, save: Duration::ZERO, give_up: &|_| false },
        )? {
            Update::Done(outcome) => Ok(outcome),
            Update::Stopped(_) | Update::Dropped => Err(TrainError::Interrupted),
        }
    }
    /// As [`Stepper::update`], unless a rank is told to end before it has begun, or gives up on the way.
    ///
    /// # Errors
    /// As [`Stepper::update`].
    pub fn update_unless(
        &mut self,
        state: &mut TrainState<D>,
        examples: &UpdateExamples,
        watch: Watch<'_>,
    ) -> Result<Update, TrainError> {
        let device = self.device.clone();
        let update = || device.run(|| self.update_here(state, examples, watch));
        match caught(update) {
            Ok(outcome) => outcome,
            Err(out) => Err(TrainError::OutOfMemory(Box::new(self.shortage(out, state)))),
        }
    }

    /// What took the memory in an update, and which flags take less.
    fn shortage(&self, out: OutOfMemory, state: &TrainState<D>) -> Shortage {
        let bytes = |elements: usize| (elements * size_of::<D::Element>()) as u64;
        let parameters = bytes(state.parameters.len());
        let (sums, kept) = (self.sum.arenas(), bytes(state.first.len() + state.second.len()));
        let part = |name, bytes, flags: &[(bool, &str)]| {
            let flags = flags.iter().filter(|f| f.0).map(|f| f.1.to_owned()).collect();
            Part { name, bytes, note: String::new(), flags }
        };
        let is_adam = kept > 0 && !state.first.is_empty();
        let shares = is_adam && self.world.size() > 1 && !self.parts.is_split();
        let moments = [(shares, "--shard optimizer"), (is_adam, "--optim adafactor")];
        let gradients = Part {
            note: if sums > 1 { format!("{sums} sums") } else { String::new() },
            ..part("gradients", parameters * sums as u64, &[(self.plan.groups > 1, "--bit_groups 1")])
        };
        let mut activations = part("activations", 0, &[]);
        if self.plan.micro > 1 {
            activations.flags.push(format!("--micro_batch_size below {}", self.plan.micro));
        }
        activations.flags.extend(self.objective.smaller_shards());
        let known = vec![part("parameters", parameters, &[]), part("moments", kept, &moments), gradients];
        Shortage::new(format!("in update {}", state.step + 1), out, known, activations)
    }

    fn update_here(
        &mut self,
        state: &mut TrainState<D>,
        examples: &UpdateExamples,
        watch: Watch<'_>,
    ) -> Result<Update, TrainError> {
        let mut spans = Spans::default();
        self.world.at_update(state.step + 1);
        let count = examples.rows.len().div_ceil(self.plan.micro);
        let own = own_shards(self.world.rank(), self.world.size(), &self.plan, count);
        // One that is told to end has nothing to prepare.
        let signal = (watch.signal)();
        let own = if signal.is_some() { 0..0 } else { own };
        let mut shards = spans.of(Kind::Data, || self.encode(examples, own.clone()))?;
        let sizes = shards.iter().map(|s| self.objective.size(s)).collect();
        let before = Before { signal, save: watch.save.as_nanos() as u64, sizes };
        let all = spans.of(Kind::Waiting, || before.exchange(&self.world))?;
        let save = all.iter().map(|m| m.save).max().unwrap_or(0);
        self.save = Duration::from_nanos(save);
        if let Some(reason) = strongest(&all) {
            return Ok(Update::Stopped(reason));
        }
        let mut size = ShardSize::default();
        all.iter().flat_map(|m| &m.sizes).for_each(|s| size.add(*s));
        let weight = 1.0 / size.count.max(1) as f64;

        if self.objective.has_first_pass()
            && self.first_pass(state, &mut shards, own.start, watch, &mut spans)?
        {
            return Ok(Update::Dropped);
        }
        let computed = self.gradients(state, &shards, own.start, weight, watch, &mut spans)?;
        let (gradients, after) = (computed.gradients, computed.after);
        let all = spans.of(Kind::Waiting, || after.exchange(&self.world))?;
        if all.iter().any(|m| m.dropped) {
            self.sum.recycle(gradients);
            return Ok(Update::Dropped);
        }
        // Added in the order of shards, not a sum of each rank's sum.
        let mut loss = 0.0;
        all.iter().flat_map(|m| &m.losses).for_each(|l| loss += l);
        let not_finite =
            |what| TrainError::NotFinite { update: state.step + 1, what, rows: examples.rows.clone() };
        if !loss.is_finite() {
            return Err(not_finite("loss"));
        }
        let norm = || self.parts.square_sum(&self.world, &self.device, &gradients);
        let gradient_norm = spans.of(Kind::Optimizer, norm)?.sqrt();
        if !gradient_norm.is_finite() {
            return Err(not_finite("gradient"));
        }
        let (device, parts) = (&self.device, &self.parts);
        self.norms.clear();
        let measured = self.stats_freq > 0 && (state.step + 1).is_multiple_of(self.stats_freq);
        let squares = match measured {
            true => gradient_squares(&self.world, parts, device, &self.layers, &gradients)?,
            false => Vec::new(),
        };
        let apply = || self.optimizer.apply(device, parts, state, &gradients, gradient_norm);
        let lr = spans.of(Kind::Optimizer, apply);
        if self.parts.is_split() {
            let (buckets, grain) = (&self.parts.buckets, D::BLOCK);
            let gather = |parameters: &mut [_]| self.world.all_gather_parts(parameters, buckets, grain);
            let all = state.parameters.all_mut();
            spans.of(Kind::Waiting, || self.device.change(all, gather))?;
        }
        self.norms = norms(&self.device, &self.layers, &squares, &state.parameters);
        state.step += 1;
        self.sum.recycle(gradients);
        self.device.trim();
        self.spans = spans;
        Ok(Update::Done(UpdateOutcome { loss, gradient_norm, lr, size, own_shards: computed.shards }))
    }

    /// Encodes this rank's shards of an update, and no others.
    fn encode(&self, examples: &UpdateExamples, own: Range<usize>) -> Result<Vec<O::Shard>, TrainError> {
        if own.is_empty() {
            return Ok(Vec::new());
        }
        let micro = self.plan.micro;
        let end = (own.end * micro).min(examples.rows.len());
        let rows = examples.rows[own.start * micro..end].to_vec();
        self.objective.shards(&UpdateExamples { epoch: examples.epoch, rows }, micro)
    }

    /// The pass over all shards before any gradient; whether a rank gave the update up in it.
    fn first_pass(
        &self,
        state: &TrainState<D>,
        shards: &mut [O::Shard],
        first: usize,
        watch: Watch<'_>,
        spans: &mut Spans,
    ) -> Result<bool, TrainError> {
        let mut seen = FirstPass::default();
        let count = shards.len();
        for (i, shard) in shards.iter_mut().enumerate() {
            // The backward pass is twice a forward one, and a forward pass is still to come with it.
            if (watch.give_up)(1.0 - i as f64 / (4 * count) as f64) {
                seen.dropped = true;
                break;
            }
            let draw = Draw { seed: self.seed, update: state.step, shard: (first + i) as u64 };
            let pass = || self.objective.first_pass(&self.device, &state.parameters, shard, draw);
            seen.shown.push(spans.of(Kind::Compute, pass)?);
        }
        let all = spans.of(Kind::Waiting, || seen.exchange(&self.world))?;
        if all.iter().any(|m| m.dropped) {
            return Ok(true);
        }
        let shown: Vec<Shown> = all.into_iter().flat_map(|m| m.shown).collect();
        let own = first..first + count;
        let settle = || self.objective.settle(&self.world, &shown, own, shards);
        spans.of(Kind::Compute, settle)?;
        Ok(false)
    }

    /// The sum of the gradients of all ranks' shards (or of this rank's parts of it), and what this rank has to tell.
    fn gradients(
        &mut self,
        state: &TrainState<D>,
        shards: &[O::Shard],
        first: usize,
        weight: f64,
        watch: Watch<'_>,
        spans: &mut Spans,
    ) -> Result<Computed<D>, TrainError> {
        let mut after = After::default();
        let mut group: Option<(usize, Arena<D>)> = None;
        let of = |s: usize| group_of(s, self.plan.shards, self.plan.groups);
        for (i, shard) in shards.iter().enumerate() {
            if (watch.give_up)((shards.len() - i) as f64 / shards.len() as f64) {
                after.dropped = true;
                break;
            }
            let s = first + i;
            if group.as_ref().is_some_and(|(open, _)| *open != of(s))
                && let Some((_, done)) = group.take()
            {
                self.sum.push(done);
            }
            let (_, gradients) =
                group.get_or_insert_with(|| (of(s), self.sum.arena(self.objective.layout())));
            let draw = Draw { seed: self.seed, update: state.step, shard: s as u64 };
            if i + 1 < shards.len() {
                let gradient = || {
                    self.objective.gradient(&self.device, &state.parameters, shard, draw, weight, gradients)
                };
                after.losses.push(spans.of(Kind::Compute, gradient).loss);
                continue;
            }
            let (_, last) = group.take().expect("it was opened above");
            return self.last_shard(state, shard, draw, weight, last, after, spans);
        }
        // No shard, or one too many: nothing to add, but the others' sums pass through here.
        if let Some((_, open)) = group {
            self.sum.recycle(open);
        }
        self.sum.clear();
        let mut gradients = self.sum.arena(self.objective.layout());
        // SAFETY: the arena is not touched before `finish` returns, and not freed: it is dropped after the exchange on every way out.
        let exchange =
            unsafe { Exchange::begin(&self.world, &self.device, &self.parts, &mut gradients, false) }?;
        if self.device.sums() {
            (0..self.parts.buckets.len()).for_each(|i| exchange.ready(i, &mut gradients));
        }
        spans.of(Kind::Waiting, || exchange.finish(&mut gradients))?;
        let shards = after.losses.len();
        Ok(Computed { gradients, after, shards })
    }

    /// The last shard: as its backward is done with a stretch of the gradients, the sum over groups is finished there and
    /// goes to the other ranks.
    fn last_shard(
        &mut self,
        state: &TrainState<D>,
        shard: &O::Shard,
        draw: Draw,
        weight: f64,
        mut last: Arena<D>,
        mut after: After,
        spans: &mut Spans,
    ) -> Result<Computed<D>, TrainError> {
        let mut waiting = self.sum.waiting();
        let (sum, buckets) = (waiting.sum().unwrap_or(&mut last), &self.parts.buckets);
        // SAFETY: both arenas live until `finish` has returned (on every way out they are dropped after the exchange is).
        // A bucket is not touched after `ready`: backward is done with it, and it was added to all that wait before.
        let exchange = unsafe { Exchange::begin(&self.world, &self.device, &self.parts, sum, true) }?;
        let mut done = 0;
        let mut ready = |i: usize, gradients: &mut Arena<D>| {
            waiting.add(gradients, buckets[i].clone());
            exchange.ready(i, waiting.sum().unwrap_or(gradients));
            done = i + 1;
        };
        let told = Buckets { ranges: buckets, ready: &mut ready };
        let gradient = || {
            let (device, parameters) = (&self.device, &state.parameters);
            self.objective.gradient_with(device, parameters, shard, draw, weight, &mut last, Some(told))
        };
        after.losses.push(spans.of(Kind::Compute, gradient).loss);
        // What an objective did not tell of is ready now.
        for (i, bucket) in buckets.iter().enumerate().skip(done) {
            waiting.add(&last, bucket.clone());
            exchange.ready(i, waiting.sum().unwrap_or(&mut last));
        }
        spans.of(Kind::Waiting, || exchange.finish(waiting.sum().unwrap_or(&mut last)))?;
        let shards = after.losses.len();
        Ok(Computed { gradients: self.sum.settle(last, waiting), after, shards })
    }
}

struct Computed<D: Device> {
    gradients: Arena<D>,
    after: After,
    shards: usize,
}
