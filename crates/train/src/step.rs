//! One optimizer update: shards to gradients along the fixed tree, clipping, Adam.

use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{AdamStep, Arena, Device, Draw};

use crate::accumulate::{GroupSum, group_of};
use crate::error::TrainError;
use crate::objective::{Objective, ShardSize};
use crate::options::{BatchPlan, Optim, OptimOptions};
use crate::schedule::learning_rate;

/// Parameters and everything that an update changes.
pub struct TrainState<D: Device> {
    /// Updates done.
    pub step: u64,
    /// The values.
    pub parameters: Arena<D>,
    /// Adam's first moments.
    pub first: Arena<D>,
    /// Adam's second moments.
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
    /// Size of all shards.
    pub size: ShardSize,
}

/// Runs updates of one objective.
pub struct Stepper<'a, D: Device, O> {
    device: D,
    objective: &'a O,
    plan: BatchPlan,
    optim: OptimOptions,
    seed: u64,
    sum: GroupSum<D>,
}

impl<'a, D: Device, O: Objective<D>> Stepper<'a, D, O> {
    /// A stepper with fixed settings.
    pub fn new(device: &D, objective: &'a O, plan: BatchPlan, optim: &OptimOptions, seed: u64) -> Self {
        Stepper {
            device: device.clone(),
            objective,
            plan,
            optim: optim.clone(),
            seed,
            sum: GroupSum::new(device),
        }
    }
    /// Runs the next update on the given examples. On an error nothing is changed.
    pub fn update(
        &mut self,
        state: &mut TrainState<D>,
        examples: &UpdateExamples,
    ) -> Result<UpdateOutcome, TrainError> {
        self.update_unless(state, examples, &|_| false)
    }
    /// As [`Stepper::update`]; before each shard `give_up` is asked with the share (0 to 1) of the shards that are left.
    ///
    /// # Errors
    /// [`TrainError::Interrupted`] when it says yes; nothing is changed then.
    pub fn update_unless(
        &mut self,
        state: &mut TrainState<D>,
        examples: &UpdateExamples,
        give_up: &(dyn Fn(f64) -> bool + Sync),
    ) -> Result<UpdateOutcome, TrainError> {
        let device = self.device.clone();
        device.run(|| self.update_here(state, examples, give_up))
    }

    fn update_here(
        &mut self,
        state: &mut TrainState<D>,
        examples: &UpdateExamples,
        give_up: &(dyn Fn(f64) -> bool + Sync),
    ) -> Result<UpdateOutcome, TrainError> {
        let shards = self.objective.shards(examples, self.plan.micro)?;
        let mut size = ShardSize::default();
        for shard in &shards {
            size.add(self.objective.size(shard));
        }
        let weight = 1.0 / size.count.max(1) as f64;
        let mut loss = 0.0;
        let mut group: Option<(usize, Arena<D>)> = None;
        for (s, shard) in shards.iter().enumerate() {
            if give_up((shards.len() - s) as f64 / shards.len() as f64) {
                // A later update must not meet what this one added.
                let sums = [group.take().map(|(_, open)| open), self.sum.finish()];
                sums.into_iter().flatten().for_each(|sum| self.sum.recycle(sum));
                return Err(TrainError::Interrupted);
            }
            let g = group_of(s, self.plan.shards, self.plan.groups);
            if group.as_ref().is_some_and(|(open, _)| *open != g)
                && let Some((_, done)) = group.take()
            {
                self.sum.push(done);
            }
            let (_, gradients) = group.get_or_insert_with(|| (g, self.sum.arena(self.objective.layout())));
            let draw = Draw { seed: self.seed, update: state.step, shard: s as u64 };
            let outcome =
                self.objective.gradient(&self.device, &state.parameters, shard, draw, weight, gradients);
            loss += outcome.loss;
        }
        if let Some((_, done)) = group {
            self.sum.push(done);
        }
        let gradients = self.sum.finish().expect("an update has at least one shard");
        let not_finite =
            |what| TrainError::NotFinite { update: state.step + 1, what, rows: examples.rows.clone() };
        if !loss.is_finite() {
            return Err(not_finite("loss"));
        }
        let gradient_norm = self.device.dot(gradients.all(), gradients.all()).sqrt();
        if !gradient_norm.is_finite() {
            return Err(not_finite("gradient"));
        }
        let o = &self.optim;
        let clip = if o.clip > 0.0 { (o.clip / (gradient_norm + 1e-6)).min(1.0) } else { 1.0 };
        let lr = learning_rate(o, state.step);
        let step = AdamStep {
            lr,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: if o.optim == Optim::Adamw { o.weight_decay } else { 0.0 },
            step: state.step + 1,
            gradient_scale: clip,
        };
        let (p, m, v) = (&mut state.parameters, &mut state.first, &mut state.second);
        self.device.adam(p.all_mut(), gradients.all(), m.all_mut(), v.all_mut(), step);
        state.step += 1;
        self.sum.recycle(gradients);
        self.device.trim();
        Ok(UpdateOutcome { loss, gradient_norm, lr, size })
    }
}
