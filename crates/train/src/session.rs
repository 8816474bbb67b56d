//! A training from its settings to its outcome, on all ranks: folder, lease, model and data are opened, and the loop runs.

use tercio_comm::World;

use crate::error::TrainError;
use crate::objective::Objective;
use crate::on_device;
use crate::options::TrainOptions;
use crate::ranks::device::{faults, open_device_to_train};
use crate::ranks::setup::open_run_among;
use crate::ranks::{RankDevice, deal, start};
use crate::run::{Signals, log_to, note_failure};
use crate::setup::{self, AnyTask, Task};
use crate::shortage::guarded;
use crate::trainer::{self, LoopOptions, RunFolder, RunOutcome};

/// Trains the run of `options`, or goes on with it. `threads` are those of this rank; 0: all cores, shared out to the ranks of a host.
/// Rank 0 draws a bar of progress where `progress` says so and there is a terminal.
///
/// # Errors
/// Settings, a model or data that cannot be used, another run in the folder; what ends a training; a rank was lost or failed.
pub fn train_run<T: AnyTask>(
    options: &TrainOptions<T>,
    world: &World,
    threads: usize,
    progress: bool,
    signals: &Signals,
) -> Result<RunOutcome, TrainError> {
    start::compare_settings(world, &setup::config_table(options)?)?;
    let device = open_device_to_train(world, threads, options.compute.get(), &options.device)?;
    let outcome = on_device!(&device, |device| train_run_on(options, world, device, progress, signals));
    if let Err(error @ (TrainError::Device(_) | TrainError::OutOfMemory(_))) = &outcome {
        // Before the device is given back, which may wait for the others: they are not to wait for this rank.
        world.fail(&error.to_string());
    }
    outcome
}

/// As [`train_run`], on a device of the caller's, which is of the same kind on all ranks.
///
/// # Errors
/// As [`train_run`].
pub fn train_run_on<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    world: &World,
    device: &D,
    progress: bool,
    signals: &Signals,
) -> Result<RunOutcome, TrainError> {
    // A device that waited for a rank which is gone knows less of it than the ranks do.
    let lost = |error| match (&error, world.check()) {
        (TrainError::Device(_), Err(known)) => TrainError::Ranks(known),
        _ => error,
    };
    if !world.is_main() {
        return faults(|| go(options, world, device, None, false, signals)).map_err(lost);
    }
    let folder = setup::open_folder(options)?;
    log_to(&folder.dir)?;
    // A fault of the device is an error here already, so that it is noted in the folder.
    let outcome = faults(|| go(options, world, device, Some(&folder), progress, signals)).map_err(lost);
    if world.size() == 1 {
        return outcome.inspect_err(|error| note_failure(&error.to_string()));
    }
    outcome
}

fn go<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    world: &World,
    device: &D,
    folder: Option<&RunFolder>,
    progress: bool,
    signals: &Signals,
) -> Result<RunOutcome, TrainError> {
    let mut settings = LoopOptions::of(options, progress)?;
    for note in options.notes().into_iter().chain(deal::notes(world.size(), &settings.batch)) {
        tracing::info!("{note}");
    }
    let open = || device.run(|| open_run_among(world, options, folder, device));
    let less = ["--optim adafactor", "--shard optimizer on several ranks", "a smaller model"];
    let (mut run, parts) = guarded("while model and optimizer were set up", &less, open)?;
    let (objective, counters) = (&run.objective, run.counters.take());
    let settled = options.model.settle(&mut settings, Objective::<D>::examples(objective));
    settled.map_err(TrainError::Options)?;
    let state = &mut run.state;
    let outcome = trainer::train_among(
        world,
        &parts,
        device,
        objective,
        &settings,
        folder,
        state,
        counters,
        Some(signals),
    )?;
    if outcome.stopped.is_none() {
        let interrupted = || signals.requested().is_some();
        let conclude =
            || T::conclude(options, world, device, objective, &state.parameters, folder, &interrupted);
        match device.run(conclude) {
            // The same command does it again, and nothing else.
            Err(TrainError::Interrupted) => tracing::warn!("the run's last measurement was interrupted"),
            other => other?,
        }
    }
    Ok(outcome)
}
