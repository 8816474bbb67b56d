//! The one training loop: update, log, evaluate, save, and end when told to, for any objective.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tercio_data::Batches;
use tercio_engine::Device;

use crate::error::TrainError;
use crate::grace::Grace;
use crate::objective::Objective;
use crate::options::{BatchPlan, LastBatch, OptimOptions, ReaderDataOptions};
use crate::run::{
    CheckpointStore, FoundCheckpoint, Lease, MetricsWriter, Progress, Signals, StopReason, TensorboardWriter,
    memory,
};
use crate::state::{self, Best, Counters, StoredState};
use crate::step::{Stepper, TrainState, UpdateOutcome};

/// Slurm's default `KillWait`: seconds between its SIGTERM and its SIGKILL. Source: slurm.conf(5).
pub const DEFAULT_GRACE_SECONDS: u64 = 30;

/// Settings of the loop.
#[derive(Clone, Debug)]
pub struct LoopOptions {
    /// Batch sizes.
    pub batch: BatchPlan,
    /// The optimizer.
    pub optim: OptimOptions,
    /// The run's seed.
    pub seed: u64,
    /// Updates between evaluations.
    pub eval_freq: u64,
    /// Updates between checkpoints.
    pub save_freq: u64,
    /// Updates between lines of the log.
    pub log_freq: u64,
    /// Checkpoints to keep; 0: all.
    pub keep_last: usize,
    /// Evaluations without gain before the end; 0: never.
    pub early_stop: u64,
    /// What becomes of an epoch's rest.
    pub last_batch: LastBatch,
    /// Seconds from a signal to the kill that follows.
    pub grace_seconds: u64,
    /// Whether a progress bar is wanted (drawn on a terminal only).
    pub progress: bool,
}

impl LoopOptions {
    /// From the flags of a trainer.
    pub fn new(
        data: &ReaderDataOptions,
        optim: &OptimOptions,
        seed: u64,
        progress: bool,
    ) -> Result<Self, TrainError> {
        Ok(LoopOptions {
            batch: data.batch_plan().map_err(TrainError::Options)?,
            optim: optim.clone(),
            seed,
            eval_freq: data.eval_freq,
            save_freq: data.save_freq,
            log_freq: data.log_freq,
            keep_last: data.keep_last,
            early_stop: data.early_stop,
            last_batch: data.last_batch,
            grace_seconds: DEFAULT_GRACE_SECONDS,
            progress,
        })
    }
    /// Which examples belong to which update.
    pub fn batches(&self, examples: usize) -> Result<Batches, TrainError> {
        let drop_last = self.last_batch == LastBatch::Drop;
        Ok(Batches::new(examples, self.batch.global, drop_last, self.seed, true)?)
    }
}

/// Where a run's files are: its folder, the right to change it, its checkpoints.
pub struct RunFolder {
    /// The folder.
    pub dir: PathBuf,
    /// The lease.
    pub lease: Lease,
    /// The checkpoints.
    pub store: CheckpointStore,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOutcome {
    /// Updates done in all.
    pub step: u64,
    /// The signal that ended it, if one did; then the state is saved and the run can go on.
    pub stopped: Option<StopReason>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Figures of the last evaluation.
    pub figures: Vec<(&'static str, f64)>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
}

struct Loop<'a, D: Device, O> {
    device: &'a D,
    objective: &'a O,
    options: &'a LoopOptions,
    folder: &'a RunFolder,
    counters: Counters,
    metrics: MetricsWriter,
    tensorboard: TensorboardWriter,
    progress: Progress,
    signals: Option<&'a Signals>,
    grace: Grace,
    figures: Vec<(&'static str, f64)>,
    checkpoint: Option<PathBuf>,
    saved: Option<u64>,
}

/// Trains from `state` (step 0, or a checkpoint's with its `counters`) to the last update, an early stop or a signal.
pub fn train<D: Device, O: Objective<D>>(
    device: &D,
    objective: &O,
    options: &LoopOptions,
    folder: &RunFolder,
    state: &mut TrainState<D>,
    counters: Option<Counters>,
    signals: Option<&Signals>,
) -> Result<RunOutcome, TrainError> {
    let batches = options.batches(objective.examples())?;
    let total = options.optim.total_steps;
    let resumed = counters.is_some();
    let mut run = Loop {
        device,
        objective,
        options,
        folder,
        counters: counters.unwrap_or_default(),
        metrics: MetricsWriter::open(&folder.dir, state.step)?,
        tensorboard: TensorboardWriter::open(&folder.dir, resumed.then_some(state.step))?,
        progress: Progress::start(state.step, total, options.progress),
        signals,
        grace: Grace::new(Duration::from_secs(options.grace_seconds)),
        figures: Vec::new(),
        checkpoint: None,
        saved: resumed.then_some(state.step),
    };
    if resumed {
        run.mend(state)?;
    }
    if state.step >= total {
        tracing::info!("update {} of {total} is done already: nothing is left to train", state.step);
    }
    let mut stepper = Stepper::new(device, objective, options.batch, &options.optim, options.seed);
    let mut stopped = None;
    let mut since_log = (Instant::now(), 0u64);
    while state.step < total && !run.ends_early(state.step) {
        if let Some(reason) = signals.and_then(Signals::requested) {
            tracing::warn!("{}: saving after update {} and ending", reason.name(), state.step);
            stopped = Some(reason);
            break;
        }
        run.grace.begin();
        let give_up = |left| run.grace.is_over(left, signals.is_some_and(|s| s.requested().is_some()));
        let outcome = match stepper.update_unless(state, &batches.batch(state.step), &give_up) {
            Err(TrainError::Interrupted) => {
                tracing::warn!(
                    "update {} is dropped: its end and a checkpoint would not fit into the {} s after a signal",
                    state.step + 1,
                    options.grace_seconds
                );
                continue; // The signal is still there: the loop ends at its head.
            }
            other => other?,
        };
        run.grace.updated();
        since_log.1 += outcome.size.tokens;
        run.counters.loss_sum += outcome.loss;
        run.counters.loss_updates += 1;
        run.progress.update(state.step, outcome.loss, outcome.size.tokens, padding_saved(&outcome));
        if state.step.is_multiple_of(options.log_freq) || state.step == total {
            run.log_update(state.step, &outcome, &mut since_log)?;
        }
        let mut save = state.step.is_multiple_of(options.save_freq);
        if state.step.is_multiple_of(options.eval_freq) || state.step == total {
            let gained = run.evaluate(state)?;
            save |= gained;
            since_log = (Instant::now(), 0);
        }
        // A signal during the evaluation, an early stop: the end of the loop saves.
        if save {
            run.save(state)?;
        }
    }
    if run.saved != Some(state.step) && state.step > 0 {
        run.save(state)?;
    }
    if stopped.is_none() && run.counters.evaluation_due {
        // The signal came in the evaluation of the last update: the run is not done without it.
        stopped = signals.and_then(Signals::requested);
    }
    run.metrics.event(
        "end",
        state.step,
        Map::from_iter([("reason".into(), stopped.map_or("done".into(), |r| r.name().into()))]),
    )?;
    run.metrics.sync()?;
    Ok(run.outcome(state.step, stopped))
}

fn padding_saved(o: &UpdateOutcome) -> f64 {
    1.0 - o.size.tokens as f64 / o.size.padded_tokens.max(1) as f64
}

impl<D: Device, O: Objective<D>> Loop<'_, D, O> {
    fn outcome(self, step: u64, stopped: Option<StopReason>) -> RunOutcome {
        RunOutcome {
            step,
            stopped,
            best: self.counters.best,
            figures: self.figures,
            checkpoint: self.checkpoint,
        }
    }

    fn log_update(
        &mut self,
        step: u64,
        o: &UpdateOutcome,
        since: &mut (Instant, u64),
    ) -> Result<(), TrainError> {
        let loss = self.counters.loss_sum / self.counters.loss_updates.max(1) as f64;
        let rate = since.1 as f64 / since.0.elapsed().as_secs_f64().max(1e-9);
        let fields = json!({
            "loss": loss,
            "lr": o.lr,
            "gradient_norm": o.gradient_norm,
            "tokens": o.size.tokens,
            "tokens_per_second": rate.round(),
            "padding_saved": (padding_saved(o) * 1e4).round() / 1e4,
            "memory": memory::resident(),
        });
        self.metrics.update(step, object(fields))?;
        let scalars = [("Training", loss), ("lr", o.lr), ("gradient_norm", o.gradient_norm)];
        self.tensorboard.scalars(step, &scalars)?;
        tracing::info!(
            "{step} / {} |train: {loss:.3} |lr: {:.2e} |norm: {:.2} |{rate:.0} tokens/s",
            self.options.optim.total_steps,
            o.lr,
            o.gradient_norm,
        );
        self.counters.loss_sum = 0.0;
        self.counters.loss_updates = 0;
        *since = (Instant::now(), 0);
        Ok(())
    }

    /// Makes up for what the run's earlier process could not do after its last checkpoint: moves links, evaluates.
    fn mend(&mut self, state: &TrainState<D>) -> Result<(), TrainError> {
        let RunFolder { store, lease, .. } = self.folder;
        let complete = store.list()?.complete;
        let of_step = |step: u64| -> Option<&FoundCheckpoint> {
            complete.iter().rev().find(|found| found.step == step)
        };
        let Some(current) = of_step(state.step) else {
            return Ok(());
        };
        store.set_latest(lease, &current.path)?;
        if self.counters.evaluation_due && self.evaluate(state)? {
            store.set_best_dev(lease, &current.path)?;
        } else if let Some(best) = self.counters.best.and_then(|best| of_step(best.step)) {
            store.set_best_dev(lease, &best.path)?;
        }
        self.checkpoint = Some(current.path.clone());
        Ok(())
    }

    fn ends_early(&self, step: u64) -> bool {
        let (patience, without) = (self.options.early_stop, self.counters.without_gain);
        let ends = patience > 0 && without >= patience;
        if ends {
            tracing::info!("update {step}: no better score in {without} evaluations: ending early");
        }
        ends
    }

    /// Whether the score is the best so far.
    fn evaluate(&mut self, state: &TrainState<D>) -> Result<bool, TrainError> {
        let (device, objective) = (self.device, self.objective);
        let signals = self.signals;
        let interrupted = || signals.is_some_and(|s| s.requested().is_some());
        let evaluation = match device.run(|| objective.evaluate(device, &state.parameters, &interrupted)) {
            Err(TrainError::Interrupted) => {
                tracing::warn!(
                    "the evaluation after update {} was interrupted; it is made up for when the run goes on",
                    state.step
                );
                self.counters.evaluation_due = true;
                return Ok(false);
            }
            other => other?,
        };
        self.counters.evaluation_due = false;
        let Some(e) = evaluation else {
            return Ok(false);
        };
        let gained = self.counters.best.is_none_or(|b| e.score > b.score);
        if gained {
            self.counters.best = Some(Best { step: state.step, score: e.score });
            self.counters.without_gain = 0;
        } else {
            self.counters.without_gain += 1;
        }
        let fields = e.figures.iter().map(|(name, v)| (name.to_string(), Value::from(*v))).collect();
        self.metrics.event("eval", state.step, fields)?;
        self.tensorboard.scalars(state.step, &[("Evaluation", e.score)])?;
        let shown: Vec<String> =
            e.figures.iter().map(|(name, v)| format!("{name} {:.2}", 100.0 * v)).collect();
        tracing::info!(
            "{} / {} |evaluation: {}{}",
            state.step,
            self.options.optim.total_steps,
            shown.join(", "),
            if gained { " (best so far)" } else { "" }
        );
        self.figures = e.figures;
        self.progress.pause_over();
        Ok(gained)
    }

    fn save(&mut self, state: &TrainState<D>) -> Result<(), TrainError> {
        let start = Instant::now();
        let values = state.parameters.all();
        if !self.device.run(|| self.device.dot(values, values)).is_finite() {
            return Err(TrainError::NotFiniteParameters { update: state.step });
        }
        self.metrics.sync()?;
        let RunFolder { store, lease, .. } = self.folder;
        let writer = store.begin(state.step)?;
        let needed = state::checkpoint_bytes(self.objective.layout());
        writer.require_space(needed)?;
        state::save(self.device, self.objective, state, writer.path())
            .map_err(|error| error.or_disk_full(needed))?;
        let stored = StoredState {
            counters: self.counters.clone(),
            data: self.objective.fingerprint(),
            arithmetic: self.device.arithmetic(),
        };
        let done = writer.commit(serde_json::to_value(stored).expect("counters are plain JSON"))?;
        store.set_latest(lease, &done.path)?;
        let mut protect = Vec::new();
        if let Some(best) = self.counters.best {
            protect.push(best.step);
            if best.step == state.step {
                store.set_best_dev(lease, &done.path)?;
            }
        }
        if self.options.keep_last > 0 {
            store.prune(lease, self.options.keep_last, &protect)?;
        }
        let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let fields = Map::from_iter([("path".into(), name(&done.path).into())]);
        self.metrics.event("checkpoint", state.step, fields)?;
        tracing::info!("saved {}", done.path.display());
        self.saved = Some(state.step);
        self.grace.saved(start.elapsed());
        self.checkpoint = Some(done.path);
        self.progress.pause_over();
        Ok(())
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
