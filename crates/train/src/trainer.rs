//! The one training loop: update, log, evaluate, save, and end when told to, for any objective and any number of ranks.
//!
//! All ranks go through it in step: what they do next rests on numbers that all have. Rank 0 alone keeps records.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tercio_comm::{CommError, World};
use tercio_data::Batches;

use crate::average::Average;
use crate::error::TrainError;
use crate::grace::Grace;
use crate::objective::{Evaluation, Objective};
use crate::options::{BatchPlan, DataOptions, LastBatch, OptimOptions, TaskOptions, TrainOptions};
use crate::ranks::RankDevice;
use crate::ranks::message::agree_on_signal;
use crate::ranks::parts::Parts;
use crate::ranks::report::Report;
use crate::records::Records;
use crate::run::{CheckpointStore, Lease, Signals, StopReason};
use crate::schedule::{PlateauOptions, learning_rate};
use crate::state::{self, Best, Counters};
use crate::step::{Stepper, TrainState, Update, Watch};

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
    /// Updates between norms of every layer; 0: none.
    pub stats_freq: u64,
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
    /// Whether a trace of every rank's time is kept in the run's folder.
    pub trace_ranks: bool,
    /// Whether every epoch has an order of its own; else examples come as the file has them.
    pub shuffle: bool,
    /// Lets the rate fall when evaluations get no better.
    pub plateau: Option<PlateauOptions>,
    /// Whether the run's folder gets a `loss.tsv`, as flair writes it.
    pub loss_table: bool,
    /// Decay of a running average of the parameters, kept beside them.
    pub average: Option<f64>,
    /// The model that stands for the run (its link `model`) is the last one, and not the best.
    pub last_is_model: bool,
}

impl LoopOptions {
    /// From the flags of a trainer.
    pub fn new(
        data: &DataOptions,
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
            stats_freq: data.stats_freq,
            keep_last: data.keep_last,
            early_stop: data.early_stop,
            last_batch: data.last_batch,
            grace_seconds: DEFAULT_GRACE_SECONDS,
            progress,
            trace_ranks: false,
            shuffle: true,
            plateau: None,
            loss_table: false,
            average: None,
            last_is_model: false,
        })
    }
    /// From all settings of a training.
    pub fn of<T: TaskOptions>(options: &TrainOptions<T>, progress: bool) -> Result<Self, TrainError> {
        let settings = LoopOptions::new(&options.data, &options.optim, options.run.seed, progress)?;
        let (grace_seconds, trace_ranks) = (options.run.grace_seconds, options.run.ranks.trace_ranks);
        Ok(LoopOptions { grace_seconds, trace_ranks, ..settings })
    }
    /// Which examples belong to which update.
    pub fn batches(&self, examples: usize) -> Result<Batches, TrainError> {
        let drop_last = self.last_batch == LastBatch::Drop;
        Ok(Batches::new(examples, self.batch.global, drop_last, self.seed, self.shuffle)?)
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

struct Loop<'a, D: RankDevice, O> {
    world: &'a World,
    parts: &'a Parts,
    device: &'a D,
    objective: &'a O,
    options: &'a LoopOptions,
    counters: Counters,
    /// Rank 0's.
    records: Option<Records<'a>>,
    /// Rank 0's, where one is wanted.
    average: Option<Average<D>>,
    signals: Option<&'a Signals>,
    grace: Grace,
    saved: Option<u64>,
}

/// Trains from `state` (step 0, or a checkpoint's with its `counters`) to the last update, an early stop or a signal; one
/// rank alone.
///
/// # Errors
/// As [`train_among`].
pub fn train<D: RankDevice, O: Objective<D>>(
    device: &D,
    objective: &O,
    options: &LoopOptions,
    folder: &RunFolder,
    state: &mut TrainState<D>,
    counters: Option<Counters>,
    signals: Option<&Signals>,
) -> Result<RunOutcome, TrainError> {
    let world = World::alone();
    let parts = Parts::new::<D>(&world, objective.layout(), false);
    train_among(&world, &parts, device, objective, options, Some(folder), state, counters, signals)
}

/// As [`train`], on all ranks of `world`, each with its own part of the moments in `state`; `folder` is rank 0's.
///
/// # Errors
/// Data that cannot be read, a loss that is no number, files that cannot be written; another rank that was lost or failed.
pub fn train_among<D: RankDevice, O: Objective<D>>(
    world: &World,
    parts: &Parts,
    device: &D,
    objective: &O,
    options: &LoopOptions,
    folder: Option<&RunFolder>,
    state: &mut TrainState<D>,
    counters: Option<Counters>,
    signals: Option<&Signals>,
) -> Result<RunOutcome, TrainError> {
    let batches = options.batches(objective.examples())?;
    let total = options.optim.total_steps;
    let resumed = counters.is_some();
    let records = match folder {
        Some(folder) if world.is_main() => {
            let epoch = batches.updates_per_epoch();
            let due = counters.as_ref().is_some_and(|counters| counters.evaluation_due);
            Some(Records::open(folder, options, epoch, state.step, resumed, due)?)
        }
        _ => None,
    };
    let mut run = Loop {
        world,
        parts,
        device,
        objective,
        options,
        counters: counters.unwrap_or_default(),
        average: match (options.average, folder) {
            (Some(decay), Some(folder)) if world.is_main() => {
                Some(average_of(device, decay, objective, folder, state)?)
            }
            _ => None,
        },
        records,
        signals,
        grace: Grace::new(Duration::from_secs(options.grace_seconds)),
        saved: resumed.then_some(state.step),
    };
    if resumed {
        run.mend(state)?;
    }
    if state.step >= total {
        tracing::info!("update {} of {total} is done already: nothing is left to train", state.step);
    }
    let mut stepper = Stepper::among(
        world.clone(),
        parts.clone(),
        device,
        objective,
        options.batch,
        &options.optim,
        options.seed,
    );
    stepper.set_stats_freq(options.stats_freq);
    let mut stopped = None;
    let mut report = Report::new(options.trace_ranks);
    while state.step < total && !run.ends_early(state.step) {
        run.grace.begin();
        stepper.set_rate_factor(run.counters.plateau.rate);
        // An attempt that lives on after a requeue must not go on beside the new one.
        let taken = folder.and_then(|f| f.lease.taken_over());
        let superseded = taken.as_ref().map(|_| StopReason::Superseded);
        let signal = || superseded.or_else(|| signals.and_then(Signals::requested));
        let give_up = |left| run.grace.is_over(left, signal().is_some());
        let watch = Watch { signal: &signal, save: run.grace.save(), give_up: &give_up };
        let outcome = match stepper.update_unless(state, &batches.batch(state.step), watch)? {
            Update::Done(outcome) => outcome,
            Update::Stopped(StopReason::Superseded) => {
                let taken = taken.unwrap_or_else(|| "a later attempt holds the run's lease".into());
                return Err(TrainError::Superseded(taken, state.step + 1));
            }
            Update::Stopped(reason) => {
                tracing::warn!("{}: saving after update {} and ending", reason.name(), state.step);
                stopped = Some(reason);
                break;
            }
            Update::Dropped => {
                tracing::warn!(
                    "update {} is dropped: its end and a checkpoint would not fit into the {} s after a signal",
                    state.step + 1,
                    options.grace_seconds
                );
                continue; // The signal is still there: the next one stops before it begins.
            }
        };
        if let Some(average) = &mut run.average {
            device.run(|| average.update(device, &state.parameters, state.step));
        }
        run.grace.updated();
        run.grace.saved(stepper.longest_save());
        report.update(state.step, &outcome, stepper.spans());
        run.counters.loss_sum += outcome.loss;
        run.counters.loss_updates += 1;
        run.counters.input_loss += outcome.loss * outcome.size.count.max(1) as f64;
        run.counters.inputs += outcome.size.inputs;
        if let Some(records) = &mut run.records {
            records.progress(state.step, &outcome);
            records.layers(state.step, stepper.layer_norms())?;
        }
        if state.step.is_multiple_of(options.log_freq) || state.step == total {
            let all = report.gather(world)?;
            if let Some(records) = &mut run.records {
                records.update(state.step, &outcome, &run.counters, &report, &all)?;
            }
            run.counters.loss_sum = 0.0;
            run.counters.loss_updates = 0;
            report.begin();
        }
        let mut save = state.step.is_multiple_of(options.save_freq);
        if state.step.is_multiple_of(options.eval_freq) || state.step == total {
            let gained = run.evaluate(state)?;
            save |= gained;
            report.pause_over();
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
        stopped = agree_on_signal(world, signals.and_then(Signals::requested))?;
    }
    if let (Some(average), Some(folder), None) = (&run.average, folder, stopped) {
        average.save(device, objective, &folder.dir)?;
    }
    let best = run.counters.best;
    let outcome = match run.records {
        Some(records) => records.end(state.step, stopped, best)?,
        None => RunOutcome { step: state.step, stopped, best, figures: Vec::new(), checkpoint: None },
    };
    // Nobody is done before rank 0 has written everything.
    world.barrier()?;
    Ok(outcome)
}

impl<D: RankDevice, O: Objective<D>> Loop<'_, D, O> {
    /// Makes up for what the run's earlier process could not do after its last checkpoint: moves links, evaluates.
    fn mend(&mut self, state: &TrainState<D>) -> Result<(), TrainError> {
        let gained = self.counters.evaluation_due && self.evaluate(state)?;
        match &mut self.records {
            Some(records) => records.mend(state.step, self.counters.best, gained),
            None => Ok(()),
        }
    }

    fn ends_early(&self, step: u64) -> bool {
        let (patience, without) = (self.options.early_stop, self.counters.without_gain);
        if let Some(plateau) = &self.options.plateau {
            let lr = self.options.optim.lr * self.counters.plateau.rate;
            if lr < plateau.min_lr {
                tracing::info!("update {step}: the learning rate has fallen to {lr:.2e}: ending");
                return true;
            }
        }
        let ends = patience > 0 && without >= patience;
        if ends {
            tracing::info!("update {step}: no better score in {without} evaluations: ending early");
        }
        ends
    }

    /// Whether the score is the best so far.
    fn evaluate(&mut self, state: &TrainState<D>) -> Result<bool, TrainError> {
        let (world, device, objective) = (self.world, self.device, self.objective);
        let signals = self.signals;
        let interrupted = || signals.is_some_and(|s| s.requested().is_some());
        let measure = || objective.evaluate_among(world, device, &state.parameters, &interrupted);
        let evaluation = match device.run(measure) {
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
        let train_loss = self.counters.input_loss / self.counters.inputs.max(1) as f64;
        (self.counters.input_loss, self.counters.inputs) = (0.0, 0);
        let agreed = agree_on_score(world, evaluation.as_ref())?;
        let before = self.counters.plateau;
        if let Some(plateau) = &self.options.plateau {
            // Without held-out data the loss of training says whether it gets better.
            let (score, loss) = agreed.unwrap_or((-train_loss, None));
            if self.counters.plateau.evaluated(plateau, score, loss) {
                let lr = self.options.optim.lr * self.counters.plateau.rate;
                tracing::info!(
                    "update {}: no gain for too long: the learning rate falls to {lr:.2e}",
                    state.step
                );
            }
        }
        if let Some(records) = &mut self.records {
            let lr = learning_rate(&self.options.optim, state.step.saturating_sub(1)) * before.rate;
            records.epoch(state.step, train_loss, lr, &self.counters, evaluation.as_ref())?;
        }
        let Some((score, _)) = agreed else { return Ok(false) };
        let gained = self.counters.best.is_none_or(|b| score > b.score);
        if gained {
            self.counters.best = Some(Best { step: state.step, score });
            self.counters.without_gain = 0;
        } else {
            self.counters.without_gain += 1;
        }
        if let (Some(records), Some(evaluation)) = (&mut self.records, evaluation) {
            records.evaluation(state.step, evaluation, gained)?;
        }
        Ok(gained)
    }

    fn save(&mut self, state: &TrainState<D>) -> Result<(), TrainError> {
        let start = Instant::now();
        let (world, parts, device) = (self.world, self.parts, self.device);
        match &mut self.records {
            Some(records) => {
                let average = self.average.as_ref();
                records.save(world, parts, device, self.objective, state, average, &self.counters)?;
                self.grace.saved(start.elapsed());
            }
            None => state::give_moments(world, parts, device, state)?,
        }
        self.saved = Some(state.step);
        Ok(())
    }
}

/// The average at the start of a run, or that of the checkpoint it goes on from.
fn average_of<D: RankDevice, O: Objective<D>>(
    device: &D,
    decay: f64,
    objective: &O,
    folder: &RunFolder,
    state: &TrainState<D>,
) -> Result<Average<D>, TrainError> {
    match folder.store.latest_complete()?.filter(|found| found.step == state.step) {
        Some(found) => Average::read(device, decay, objective.layout(), &found.path),
        None => Ok(Average::start(device, decay, &state.parameters)),
    }
}

/// Rank 0's score, and its loss where it has one, on all ranks.
fn agree_on_score(world: &World, own: Option<&Evaluation>) -> Result<Option<(f64, Option<f64>)>, CommError> {
    let numbers = own.into_iter().flat_map(|e| [Some(e.score), e.figure("loss")]).flatten();
    let bytes = world.broadcast_bytes(0, numbers.flat_map(f64::to_le_bytes).collect())?;
    let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
    Ok(numbers.first().map(|&score| (score, numbers.get(1).copied())))
}
