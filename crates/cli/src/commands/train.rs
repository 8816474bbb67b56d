//! `tercio train TASK`: trains a model, or goes on with the run of this name. One command for every task.

use std::process::ExitCode;

use clap::Args;
use tercio_comm::{Place, World};
use tercio_train::objective::Objective;
use tercio_train::options::TrainOptions;
use tercio_train::plan::{self, Plan};
use tercio_train::ranks::device::open_device;
use tercio_train::ranks::options::{Requeue, Shard};
use tercio_train::ranks::{RankDevice, requeue};
use tercio_train::run::{Signals, StopReason};
use tercio_train::scratch::ScratchFolder;
use tercio_train::session::train_run;
use tercio_train::setup::{self, AnyTask, Task};
use tercio_train::trainer::{LoopOptions, RunOutcome};
use tercio_train::{TrainError, on_device};

use super::common::{self, line};

/// Flags of `tercio train TASK`.
#[derive(Args)]
pub struct Train<T: Args> {
    #[command(flatten)]
    options: TrainOptions<T>,
    /// Print the outcome as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

impl<T: AnyTask> Train<T> {
    /// Trains.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let options = self.options;
        options.check().map_err(TrainError::Options)?;
        let place = common::place(options.run.place_flags())?;
        let threads = common::threads_of_rank(options.run.threads)?;
        common::start_log(&place, self.quiet)?;
        if options.run.dry_run {
            return dry_run(&options, &place, self.json);
        }
        // Before the run's folder is opened: whatever comes from now on ends the run in order.
        let signals = Signals::install()?;
        let ranks = &options.run.ranks;
        let world = match common::join_with_signals(&place, &ranks.link, ranks.requeue, &signals)? {
            Ok(world) => world,
            Err(code) => return Ok(code),
        };
        let trained = train_run(&options, &world, threads, !self.quiet, &signals);
        let outcome = match common::end(&world, trained)? {
            Ok(outcome) => outcome,
            Err(code) => return Ok(code),
        };
        if self.json && world.is_main() {
            line(&json(&outcome).to_string())?;
        }
        let Some(reason) = outcome.stopped else { return Ok(ExitCode::SUCCESS) };
        let requeued = reason != StopReason::Interrupt
            && ranks.requeue == Requeue::Auto
            && requeue::requeue_among(&world);
        Ok(if requeued { ExitCode::SUCCESS } else { reason.exit_code().into() })
    }
}

/// Prints the plan; the run's folder is read where there is one, and never changed.
fn dry_run<T: AnyTask>(options: &TrainOptions<T>, place: &Place, json: bool) -> anyhow::Result<ExitCode> {
    if place.rank > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let threads = match options.run.threads {
        0 => (common::threads(0)? / place.local_size).max(1),
        n => common::threads(n)?,
    };
    let device = open_device(&World::alone(), threads, options.compute.get(), &options.device)?;
    for note in options.notes() {
        tracing::info!("{note}");
    }
    let plan = on_device!(&device, |device| plan_on(options, place, device))?;
    if json {
        line(&serde_json::to_string(&plan)?)?;
    } else {
        line(&plan.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn plan_on<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    place: &Place,
    device: &D,
) -> Result<Plan, TrainError> {
    let scratch = ScratchFolder::new()?;
    let mut settings = LoopOptions::of(options, false)?;
    let found = setup::look_for_checkpoint(options)?;
    let mut run = device.run(|| setup::open_run_from(options, found, scratch.path(), device))?;
    let examples = Objective::<D>::examples(&run.objective);
    options.model.settle(&mut settings, examples).map_err(TrainError::Options)?;
    let dir = setup::run_dir(options);
    let ranks = (place.world_size, options.run.ranks.shard == Shard::Optimizer);
    plan::plan_among(ranks, device, &run.objective, &settings, &dir, &mut run.state)
}

fn json(o: &RunOutcome) -> serde_json::Value {
    let figures: serde_json::Map<_, _> =
        o.figures.iter().map(|(n, v)| (n.to_string(), (*v).into())).collect();
    serde_json::json!({
        "step": o.step,
        "stopped": o.stopped.map(|r| r.name()),
        "best": o.best,
        "evaluation": figures,
        "checkpoint": o.checkpoint,
    })
}
