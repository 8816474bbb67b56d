//! What several commands share: checks of flags, and stdout whose reader may have gone.

use std::io::Write;
use std::process::ExitCode;

use tercio_comm::launch::EXIT_LOST;
use tercio_comm::place::{Flags, Starter};
use tercio_comm::{CommError, Place, World};
use tercio_data::Passages;
use tercio_train::TrainError;
use tercio_train::ranks::options::{LinkOptions, Requeue};
use tercio_train::ranks::requeue::requeue_among;
use tercio_train::run::signals::EXIT_INTERRUPTED;
use tercio_train::run::{Signals, StopReason, Verbosity, init_logging_of_rank, note_failure};

/// Most questions at a time that are believed to be meant.
pub const MOST_QUESTIONS: usize = 1 << 12;
/// Threads that are believed to be meant.
const MOST_THREADS: usize = 1024;

/// The number of threads to use for a flag's value: 0 is all cores.
///
/// # Errors
/// A number beyond any machine.
pub fn threads(flag: usize) -> Result<usize, TrainError> {
    match flag {
        0 => Ok(std::thread::available_parallelism().map_or(1, |n| n.get())),
        n if n <= MOST_THREADS => Ok(n),
        n => Err(TrainError::Options(format!("--threads {n}: expected 0 (all cores) to {MOST_THREADS}"))),
    }
}

/// As [`threads`], of one of several ranks: 0 stays 0, for the ranks to share out.
///
/// # Errors
/// A number beyond any machine.
pub fn threads_of_rank(flag: usize) -> Result<usize, TrainError> {
    if flag == 0 { Ok(0) } else { threads(flag) }
}

/// Where this process stands among others.
///
/// # Errors
/// An environment or flags that contradict themselves: a mistake of use.
pub fn place(flags: Flags) -> Result<Place, TrainError> {
    Place::from_env(flags).map_err(|e| TrainError::Options(e.to_string()))
}

/// `[rank 3] `, where nobody else puts it before the lines of this process.
fn prefix(place: &Place) -> String {
    match place.starter {
        _ if place.world_size == 1 => String::new(),
        Starter::Launch => String::new(),
        _ => format!("[rank {}] ", place.rank),
    }
}

/// Starts the log: rank 0 says what it has to, the others warn.
///
/// # Errors
/// It was started before.
pub fn start_log(place: &Place, quiet: bool) -> Result<(), TrainError> {
    let verbosity = if quiet { Verbosity::Quiet } else { Verbosity::Normal };
    Ok(init_logging_of_rank(place.rank, &prefix(place), verbosity)?)
}

/// Meets the other ranks, where there are any.
///
/// # Errors
/// They did not find each other.
pub fn join(place: &Place, link: &LinkOptions) -> Result<World, TrainError> {
    join_unless(place, link, &|| false)
}

/// As [`join`], of a command that waits for `signals` from now on: one that comes before all ranks are there ends it, as the
/// loss of another rank does. `Err` is the exit code then. Nothing was begun, so nothing is lost; after the warning before a
/// limit of time the job is queued again, as it is after a save. (SIGTERM also comes where Slurm ends the ranks that a failed
/// one has left.)
///
/// # Errors
/// They did not find each other.
pub fn join_with_signals(
    place: &Place,
    link: &LinkOptions,
    requeue: Requeue,
    signals: &Signals,
) -> Result<Result<World, ExitCode>, TrainError> {
    let error = match join_unless(place, link, &|| signals.requested().is_some()) {
        Err(TrainError::Ranks(CommError::Stopped(what))) => what,
        // As after the meeting ([`end`]): worth another start.
        Err(TrainError::Ranks(error @ (CommError::Lost { .. } | CommError::Failed { .. }))) => {
            eprintln!("{}tercio: {error}", prefix(place));
            return Ok(Err(EXIT_LOST.into()));
        }
        other => return other.map(Ok),
    };
    let reason = signals.requested().unwrap_or(StopReason::Terminate);
    tracing::warn!("{}: {error}", reason.name());
    let warned = matches!(reason, StopReason::User1 | StopReason::User2);
    let requeued = warned && place.rank == 0 && requeue == Requeue::Auto && requeue_among(&World::alone());
    Ok(Err(if requeued { ExitCode::SUCCESS } else { reason.exit_code().into() }))
}

fn join_unless(
    place: &Place,
    link: &LinkOptions,
    asked_to_end: &dyn Fn() -> bool,
) -> Result<World, TrainError> {
    let world = World::join_unless(place, &link.settings(), asked_to_end)?;
    if world.size() > 1 {
        let mut hosts = world.hosts();
        hosts.dedup();
        tracing::info!("{} ranks on {}, over {}", world.size(), hosts.join(", "), world.backend());
    }
    Ok(world)
}

/// The end of a command on several ranks: the others are told of an error of this one, and this one's error is said
/// here. `Err` is the exit code. A single rank's error is left to its caller.
///
/// # Errors
/// The error of a rank alone.
pub fn end<T>(world: &World, result: Result<T, TrainError>) -> anyhow::Result<Result<T, ExitCode>> {
    let error = match result {
        Ok(value) => return Ok(Ok(value)),
        Err(error) if world.size() == 1 => return Err(error.into()),
        Err(error) => error,
    };
    let say = || {
        if world.is_main() {
            note_failure(&error.to_string());
        }
        eprintln!("{}tercio: {error}", prefix(world.place()));
    };
    Ok(Err(match &error {
        TrainError::Ranks(CommError::Io { .. } | CommError::Place(_) | CommError::Rendezvous(_)) => {
            say();
            world.fail(&error.to_string());
            ExitCode::FAILURE
        }
        TrainError::Ranks(_) => {
            say();
            ExitCode::from(EXIT_LOST)
        }
        _ if error.is_common() => {
            if world.is_main() {
                say();
            }
            // So that nobody's end is taken for a loss by one who has not seen the error yet.
            let _ = world.barrier();
            match error {
                TrainError::Stopped => ExitCode::from(EXIT_INTERRUPTED),
                _ => ExitCode::FAILURE,
            }
        }
        _ => {
            say();
            world.fail(&error.to_string());
            ExitCode::FAILURE
        }
    }))
}

/// Refuses a flag below 1 or above its limit: what is beyond any use is a slip of the hand, and memory grows with it.
pub fn within(flags: &[(&str, usize, usize)]) -> Result<(), TrainError> {
    match flags.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
        Some((flag, value, most)) => {
            Err(TrainError::Options(format!("--{flag} {value}: expected 1 to {most}")))
        }
        None => Ok(()),
    }
}

/// What a person should know of a collection whose rows are read without quotes.
pub fn not_quoted(passages: &Passages) -> String {
    format!(
        "{}: read without quotes, since its rows have as many fields only so; quotes stay in the texts",
        passages.path().display()
    )
}

/// Writes a line to stdout at once.
///
/// # Errors
/// When stdout cannot take it, as after `| head`.
pub fn line(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Whether an error is only that nobody reads stdout any more.
pub fn reader_has_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
