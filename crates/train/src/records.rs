//! What rank 0 keeps of a run: metrics, TensorBoard's files, the log's lines, checkpoints and their links.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tercio_comm::World;

use crate::average::Average;
use crate::error::TrainError;
use crate::layer_norms::LayerNorms;
use crate::objective::{Evaluation, Objective};
use crate::ranks::RankDevice;
use crate::ranks::parts::Parts;
use crate::ranks::report::{RankReport, Report};
use crate::run::{
    FoundCheckpoint, LossTable, MetricsWriter, Progress, StopReason, TensorboardWriter, memory,
};
use crate::state::{self, Best, Counters, StoredState};
use crate::step::{TrainState, UpdateOutcome};
use crate::trainer::{LoopOptions, RunFolder, RunOutcome};

/// The records of a run under way.
pub struct Records<'a> {
    folder: &'a RunFolder,
    options: &'a LoopOptions,
    metrics: MetricsWriter,
    tensorboard: TensorboardWriter,
    progress: Progress,
    /// flair's table, where the task has one.
    losses: Option<LossTable>,
    figures: Vec<(&'static str, f64)>,
    checkpoint: Option<PathBuf>,
}

impl<'a> Records<'a> {
    /// Opens the files in the run's folder at `step`; an epoch has `epoch` updates. `due`: the evaluation of this step is still to come.
    ///
    /// # Errors
    /// A file that cannot be read or written; so for all that follow.
    pub fn open(
        folder: &'a RunFolder,
        options: &'a LoopOptions,
        epoch: u64,
        step: u64,
        resumed: bool,
        due: bool,
    ) -> Result<Self, TrainError> {
        let losses = options.loss_table.then(|| LossTable::open(&folder.dir, epoch, step, due));
        Ok(Records {
            losses: losses.transpose()?,
            folder,
            options,
            metrics: MetricsWriter::open(&folder.dir, step)?,
            tensorboard: TensorboardWriter::open(&folder.dir, resumed.then_some(step))?,
            progress: Progress::start(step, options.optim.total_steps, options.progress),
            figures: Vec::new(),
            checkpoint: None,
        })
    }

    /// Moves the bar.
    pub fn progress(&mut self, step: u64, o: &UpdateOutcome) {
        self.progress.update(step, o.loss, o.size.tokens, padding_saved(o));
    }

    /// A logged update; `all` is what the ranks reported.
    pub fn update(
        &mut self,
        step: u64,
        o: &UpdateOutcome,
        counters: &Counters,
        report: &Report,
        all: &[RankReport],
    ) -> Result<(), TrainError> {
        let loss = counters.loss_sum / counters.loss_updates.max(1) as f64;
        let rate = report.tokens_per_second();
        let mut fields = json!({
            "loss": loss,
            "lr": o.lr,
            "gradient_norm": o.gradient_norm,
            "tokens": o.size.tokens,
            "tokens_per_second": rate.round(),
            "padding_saved": (padding_saved(o) * 1e4).round() / 1e4,
            "memory": memory::resident(),
            "ranks": all.len(),
            "shards": all.iter().map(|r| r.shards).collect::<Vec<_>>(),
        });
        let shared = RankReport::summary(all);
        if let Some(s) = &shared {
            fields["exposed_communication"] = ((s.exposed * 1e4).round() / 1e4).into();
            fields["slowest_rank"] = s.slowest.into();
            fields["slowest_by"] = ((s.by * 1e4).round() / 1e4).into();
        }
        self.metrics.update(step, object(fields))?;
        let scalars = [("Training", loss), ("lr", o.lr), ("gradient_norm", o.gradient_norm)];
        self.tensorboard.scalars(step, &scalars)?;
        let ranks = shared.map_or(String::new(), |s| {
            format!(
                " |{} ranks, {:.1}% exposed communication, rank {} slowest by {:.0}%",
                all.len(),
                100.0 * s.exposed,
                s.slowest,
                100.0 * s.by
            )
        });
        tracing::info!(
            "{step} / {} |train: {} |lr: {:.2e} |norm: {:.2} |{rate:.0} tokens/s{ranks}",
            self.options.optim.total_steps,
            readable(loss),
            o.lr,
            o.gradient_norm,
        );
        RankReport::trace(all, &self.folder.dir)
    }

    /// Norms of the layers, where there are any.
    pub fn layers(&mut self, step: u64, norms: &[LayerNorms]) -> Result<(), TrainError> {
        if norms.is_empty() {
            return Ok(());
        }
        let kinds: [(&str, fn(&LayerNorms) -> f64); 2] =
            [("gradient_norm", |n| n.gradient), ("parameter_norm", |n| n.values)];
        let mut fields = Map::new();
        for (kind, of) in kinds {
            let of_kind: Map<_, _> = norms.iter().map(|n| (n.layer.clone(), Value::from(of(n)))).collect();
            fields.insert(kind.into(), of_kind.into());
            let tags: Vec<String> = norms.iter().map(|n| format!("{kind}/{}", n.layer)).collect();
            let scalars: Vec<(&str, f64)> =
                tags.iter().map(String::as_str).zip(norms.iter().map(of)).collect();
            self.tensorboard.scalars(step, &scalars)?;
        }
        Ok(self.metrics.event("layers", step, fields)?)
    }

    /// Moves the links to where an earlier process would have.
    pub fn mend(&mut self, step: u64, best: Option<Best>, gained: bool) -> Result<(), TrainError> {
        let RunFolder { store, lease, .. } = self.folder;
        let complete = store.list()?.complete;
        let of_step = |step: u64| -> Option<&FoundCheckpoint> {
            complete.iter().rev().find(|found| found.step == step)
        };
        let Some(current) = of_step(step) else {
            return Ok(());
        };
        store.set_latest(lease, &current.path)?;
        let best = if gained { Some(current) } else { best.and_then(|best| of_step(best.step)) };
        if let Some(best) = best {
            store.set_best_dev(lease, &best.path)?;
        }
        self.set_model()?;
        self.checkpoint = Some(current.path.clone());
        Ok(())
    }

    /// The loss of training since the last evaluation, at the rate `lr`, and the evaluation, where there was one.
    pub fn epoch(
        &mut self,
        step: u64,
        train_loss: f64,
        lr: f64,
        counters: &Counters,
        evaluation: Option<&Evaluation>,
    ) -> Result<(), TrainError> {
        let Some(losses) = &mut self.losses else { return Ok(()) };
        let bad = self.options.plateau.map(|_| counters.plateau.bad);
        let dev =
            evaluation.map(|e| ["loss", "precision", "recall", "f1", "accuracy"].map(|name| e.figure(name)));
        Ok(losses.row(step, bad, lr, train_loss, dev)?)
    }

    /// An evaluation.
    pub fn evaluation(&mut self, step: u64, e: Evaluation, gained: bool) -> Result<(), TrainError> {
        let fields = e.figures.iter().map(|(name, v)| (name.to_string(), Value::from(*v))).collect();
        self.metrics.event("eval", step, fields)?;
        self.tensorboard.scalars(step, &[("Evaluation", e.score)])?;
        tracing::info!(
            "{step} / {} |evaluation: {}{}",
            self.options.optim.total_steps,
            e.text,
            if gained { " (best so far)" } else { "" }
        );
        self.figures = e.figures;
        self.progress.pause_over();
        Ok(())
    }

    /// Writes a checkpoint of the parameters and the moments of all ranks, and moves the links.
    ///
    /// # Errors
    /// Parameters that are no numbers; a disk that is full; a file that cannot be written.
    pub fn save<D: RankDevice, O: Objective<D>>(
        &mut self,
        world: &World,
        parts: &Parts,
        device: &D,
        objective: &O,
        state: &TrainState<D>,
        average: Option<&Average<D>>,
        counters: &Counters,
    ) -> Result<(), TrainError> {
        let values = state.parameters.all();
        if !device.run(|| device.dot(values, values)).is_finite() {
            return Err(TrainError::NotFiniteParameters { update: state.step });
        }
        self.metrics.sync()?;
        let RunFolder { store, lease, .. } = self.folder;
        let writer = store.begin(state.step)?;
        let mut needed = state::checkpoint_bytes(self.options.optim.optim, objective.layout());
        needed += average.map_or(0, |_| objective.layout().len() as u64 * 4);
        writer.require_space(needed)?;
        let optim = self.options.optim.optim;
        state::save(world, parts, device, objective, optim, state, writer.path())
            .map_err(|error| error.or_disk_full(needed))?;
        if let Some(average) = average {
            let written = average.write(device, objective.layout(), writer.path());
            written.map_err(|error| error.or_disk_full(needed))?;
        }
        let stored = StoredState {
            counters: counters.clone(),
            data: objective.fingerprint(),
            arithmetic: device.arithmetic(),
        };
        let done = writer.commit(serde_json::to_value(stored).expect("counters are plain JSON"))?;
        store.set_latest(lease, &done.path)?;
        let mut protect = Vec::new();
        if let Some(best) = counters.best {
            protect.push(best.step);
            if best.step == state.step {
                store.set_best_dev(lease, &done.path)?;
            }
        }
        // Before the checkpoint that it leaves is removed.
        self.set_model()?;
        if self.options.keep_last > 0 {
            store.prune(lease, self.options.keep_last, &protect)?;
        }
        let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let fields = Map::from_iter([("path".into(), name(&done.path).into())]);
        self.metrics.event("checkpoint", state.step, fields)?;
        tracing::info!("saved {}", done.path.display());
        self.checkpoint = Some(done.path);
        self.progress.pause_over();
        Ok(())
    }

    /// The link to the checkpoint that stands for the run, where the task has one.
    fn set_model(&self) -> Result<(), TrainError> {
        if self.losses.is_some() {
            self.folder.store.set_model(&self.folder.lease, self.options.last_is_model)?;
        }
        Ok(())
    }

    /// The end of the run.
    pub fn end(
        mut self,
        step: u64,
        stopped: Option<StopReason>,
        best: Option<Best>,
    ) -> Result<RunOutcome, TrainError> {
        let reason = stopped.map_or("done", |r| r.name());
        if self.losses.is_some() {
            self.folder.store.link_model(&self.folder.lease, self.options.last_is_model)?;
        }
        self.metrics.event("end", step, Map::from_iter([("reason".into(), reason.into())]))?;
        self.metrics.sync()?;
        Ok(RunOutcome { step, stopped, best, figures: self.figures, checkpoint: self.checkpoint })
    }
}

/// A loss for the log: those of a distillation are small.
fn readable(loss: f64) -> String {
    if loss.abs() < 0.1 { format!("{loss:.6}") } else { format!("{loss:.3}") }
}

fn padding_saved(o: &UpdateOutcome) -> f64 {
    1.0 - o.size.tokens as f64 / o.size.padded_tokens.max(1) as f64
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
