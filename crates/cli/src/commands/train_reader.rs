//! `tercio train reader`: trains a Fusion-in-Decoder reader, or goes on with the run of this name.

use std::process::ExitCode;

use clap::Args;
use tercio_engine::{Cpu, Device};
use tercio_train::options::ReaderOptions;
use tercio_train::run::{Signals, Verbosity, init_logging, log_to, note_failure};
use tercio_train::scratch::ScratchFolder;
use tercio_train::trainer::{LoopOptions, RunFolder, RunOutcome};
use tercio_train::{TrainError, plan, setup, trainer};

use super::common::{self, line};

/// Flags of `tercio train reader`.
#[derive(Args)]
pub struct TrainReader {
    #[command(flatten)]
    options: ReaderOptions,
    /// Print the outcome as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

impl TrainReader {
    /// Trains.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let options = self.options;
        options.check().map_err(TrainError::Options)?;
        let device = Cpu::new(common::threads(options.run.threads)?)?;
        let verbosity = match self.quiet {
            true => Verbosity::Quiet,
            false => Verbosity::Normal,
        };
        init_logging(None, verbosity)?;
        if options.run.dry_run {
            return dry_run(&options, &device, self.json);
        }
        // Before the run's folder is opened: whatever comes from now on ends the run in order.
        let signals = Signals::install()?;
        let folder = setup::open_folder(&options)?;
        log_to(&folder.dir)?;
        let outcome = go(&options, &device, &folder, !self.quiet, &signals)
            .inspect_err(|error| note_failure(&error.to_string()))?;
        if self.json {
            line(&json(&outcome).to_string())?;
        }
        Ok(outcome.stopped.map_or(ExitCode::SUCCESS, |reason| reason.exit_code().into()))
    }
}

fn go(
    options: &ReaderOptions,
    device: &Cpu,
    folder: &RunFolder,
    progress: bool,
    signals: &Signals,
) -> Result<RunOutcome, TrainError> {
    for note in options.notes() {
        tracing::info!("{note}");
    }
    let mut run = device.run(|| setup::open_reader(options, folder, device))?;
    let settings = loop_options(options, progress)?;
    trainer::train(
        device,
        &run.objective,
        &settings,
        folder,
        &mut run.state,
        run.counters.take(),
        Some(signals),
    )
}

fn loop_options(options: &ReaderOptions, progress: bool) -> Result<LoopOptions, TrainError> {
    let settings = LoopOptions::new(&options.data, &options.optim, options.run.seed, progress)?;
    Ok(LoopOptions { grace_seconds: options.run.grace_seconds, ..settings })
}

/// Prints the plan; the run's folder is read where there is one, and never changed.
fn dry_run(options: &ReaderOptions, device: &Cpu, json: bool) -> anyhow::Result<ExitCode> {
    for note in options.notes() {
        tracing::info!("{note}");
    }
    let scratch = ScratchFolder::new()?;
    let settings = loop_options(options, false)?;
    let found = setup::look_for_checkpoint(options)?;
    let mut run = device.run(|| setup::open_reader_from(options, found, scratch.path(), device))?;
    let dir = setup::run_dir(options);
    let plan = plan::plan(device, &run.objective, &settings, &dir, &mut run.state)?;
    if json {
        line(&serde_json::to_string(&plan)?)?;
    } else {
        line(&plan.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
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
