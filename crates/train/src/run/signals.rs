//! Announced ends: signals become a flag that the training loop reads at update boundaries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::error::RunError;

/// Exit code of a run that saved because of a signal and did not requeue itself (`EX_TEMPFAIL`: start it again).
pub const EXIT_SAVED_NOT_REQUEUED: u8 = 75;

/// Exit code after Ctrl-C, be it in order or at once (the second one): 128 + 2, as shells count.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Why a run was asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// Somebody pressed Ctrl-C.
    Interrupt,
    /// The system or the scheduler ends the job.
    Terminate,
    /// SIGUSR1: Slurm's usual warning before the time limit.
    User1,
    /// SIGUSR2.
    User2,
    /// No signal: a later attempt has taken the run over, and this one ends without a save.
    Superseded,
}

impl StopReason {
    /// The signal's name, or what else it was.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::User1 => "SIGUSR1",
            Self::User2 => "SIGUSR2",
            Self::Superseded => "a later attempt",
        }
    }

    /// Exit code of a run that saved and ended: it asks a scheduler to start the job again, but not after Ctrl-C, which is
    /// somebody's wish.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => EXIT_INTERRUPTED,
            Self::Terminate | Self::User1 | Self::User2 => EXIT_SAVED_NOT_REQUEUED,
            Self::Superseded => 1,
        }
    }
}

const WATCHED: [(i32, StopReason); 4] = [
    (SIGINT, StopReason::Interrupt),
    (SIGTERM, StopReason::Terminate),
    (SIGUSR1, StopReason::User1),
    (SIGUSR2, StopReason::User2),
];

/// The watched signals of this process. Handlers stay for its life; a dropped value only stops listening.
#[derive(Debug)]
pub struct Signals {
    seen: [(StopReason, Arc<AtomicBool>); 4],
}

impl Signals {
    /// Watches SIGINT, SIGTERM, SIGUSR1 and SIGUSR2. Only a program, never a library, should call it.
    ///
    /// # Errors
    /// When the system refuses a handler.
    pub fn install() -> Result<Self, RunError> {
        let seen = WATCHED.map(|(_, reason)| (reason, Arc::new(AtomicBool::new(false))));
        for ((signal, _), (reason, flag)) in WATCHED.into_iter().zip(&seen) {
            let refused = |error: std::io::Error| RunError::Setup {
                what: format!("the handler of {}", reason.name()),
                problem: error.to_string(),
            };
            if *reason == StopReason::Interrupt {
                // Asked before the flag is set, so it acts from the second Ctrl-C on.
                let code = EXIT_INTERRUPTED.into();
                signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(flag))
                    .map_err(refused)?;
            }
            signal_hook::flag::register(signal, Arc::clone(flag)).map_err(refused)?;
        }
        Ok(Self { seen })
    }

    /// The signal that came, if any; with several, Ctrl-C before SIGTERM before the others.
    pub fn requested(&self) -> Option<StopReason> {
        self.seen.iter().find(|(_, flag)| flag.load(Ordering::Relaxed)).map(|(reason, _)| *reason)
    }
}
