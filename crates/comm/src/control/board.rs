//! What a rank's threads know of the run: whether it is over and why, and what the ranks told each other while joining.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::message::Message;
use crate::error::CommError;

/// Why the run is over.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// A rank was lost.
    Lost { rank: usize, host: String, update: u64, what: String },
    /// A rank failed, by its own word.
    Failed { rank: usize, host: String, update: u64, what: String },
    /// The ranks did not find each other.
    Rendezvous(String),
    /// This rank saw something that must not be.
    Protocol(String),
    /// This rank waited too long.
    Timeout(String),
}

impl Verdict {
    /// As an error.
    pub(crate) fn error(&self) -> CommError {
        match self.clone() {
            Verdict::Lost { rank, host, update, what } => {
                CommError::Lost { rank, host, when: when(update), what }
            }
            Verdict::Failed { rank, host, update, what } => {
                CommError::Failed { rank, host, when: when(update), what }
            }
            Verdict::Rendezvous(what) => CommError::Rendezvous(what),
            Verdict::Protocol(what) => CommError::Protocol(what),
            Verdict::Timeout(what) => CommError::Timeout(what),
        }
    }
    /// As a message to the others; `own`, `host` and `update` say whose verdict it is where it names nobody.
    pub(crate) fn message(&self, own: usize, host: &str, update: u64) -> Message {
        let (failed, rank, host, update, what) = match self {
            Verdict::Lost { rank, host, update, what } => (false, *rank, host.as_str(), *update, what),
            Verdict::Failed { rank, host, update, what } => (true, *rank, host.as_str(), *update, what),
            Verdict::Rendezvous(what) | Verdict::Protocol(what) | Verdict::Timeout(what) => {
                (true, own, host, update, what)
            }
        };
        Message::Verdict { failed, rank: rank as u32, host: host.into(), update, what: what.clone() }
    }
    /// From a message to rank `own`.
    pub(crate) fn from_message(
        own: usize,
        failed: bool,
        rank: u32,
        host: String,
        update: u64,
        mut what: String,
    ) -> Verdict {
        let rank = rank as usize;
        if rank == own && !failed {
            what += "; this is that rank: it was stopped or its host slept, the others gave it up, and it has to end";
        }
        match failed {
            true => Verdict::Failed { rank, host, update, what },
            false => Verdict::Lost { rank, host, update, what },
        }
    }
}

fn when(update: u64) -> String {
    if update == 0 { "before the first update".into() } else { format!("at update {update}") }
}

#[derive(Default)]
struct State {
    verdict: Option<Verdict>,
    results: BTreeMap<u32, Vec<Vec<u8>>>,
    /// All who can be told know that the run is over.
    told: bool,
    /// Rank 0's host, once known.
    main: String,
    /// Ranks that ended well.
    left: Vec<usize>,
}

/// Shared between the control thread and everyone who waits.
#[derive(Default)]
pub(crate) struct Board {
    over: AtomicBool,
    /// The update at work.
    pub update: AtomicU64,
    /// The last collective that this rank came to.
    pub sequence: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

impl Board {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// This rank's sign of life.
    pub(super) fn beat(&self) -> Message {
        Message::Beat {
            update: self.update.load(Ordering::Relaxed),
            sequence: self.sequence.load(Ordering::Relaxed),
        }
    }
    /// Waits until `done` gives something, at most until `deadline`.
    fn until<R>(&self, deadline: Instant, mut done: impl FnMut(&mut State) -> Option<R>) -> Option<R> {
        let mut state = self.state();
        loop {
            if let Some(result) = done(&mut state) {
                return Some(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error that ends the run, if there is one. Cheap.
    ///
    /// # Errors
    /// That.
    pub(crate) fn check(&self) -> Result<(), CommError> {
        match self.over.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(self
                .verdict()
                .map_or_else(|| CommError::Protocol("the run is over".into()), |v| v.error())),
        }
    }
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        self.state().verdict.clone()
    }
    /// Ends the run with `verdict`, unless it is over; whether it was this one.
    pub(crate) fn end(&self, verdict: Verdict) -> bool {
        let mut state = self.state();
        let first = state.verdict.is_none();
        if first {
            state.verdict = Some(verdict);
            self.over.store(true, Ordering::Release);
            self.changed.notify_all();
        }
        first
    }
    /// Waits for a verdict, at most `most`.
    pub(crate) fn await_verdict(&self, most: Duration) -> Option<Verdict> {
        self.until(Instant::now() + most, |state| state.verdict.clone())
    }

    /// Rank 0's host.
    pub(crate) fn host_of_main(&self) -> String {
        let state = self.state();
        if state.main.is_empty() { "unknown".into() } else { state.main.clone() }
    }
    pub(crate) fn set_host_of_main(&self, host: &str) {
        self.state().main = host.into();
    }

    pub(crate) fn tell(&self) {
        self.state().told = true;
        self.changed.notify_all();
    }
    /// Waits until all who can be told know that the run is over.
    pub(crate) fn await_told(&self, most: Duration) {
        self.until(Instant::now() + most, |state| state.told.then_some(()));
    }

    pub(crate) fn leave(&self, rank: usize) {
        let mut state = self.state();
        if !state.left.contains(&rank) {
            state.left.push(rank);
        }
        self.changed.notify_all();
    }
    /// Whether `rank` ended well.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.state().left.contains(&rank)
    }

    pub(crate) fn put_result(&self, step: u32, all: Vec<Vec<u8>>) {
        self.state().results.insert(step, all);
        self.changed.notify_all();
    }
    /// All ranks' bytes of exchange `step`; nothing when `deadline` passed first.
    ///
    /// # Errors
    /// The run is over.
    pub(crate) fn await_result(
        &self,
        step: u32,
        deadline: Instant,
    ) -> Result<Option<Vec<Vec<u8>>>, CommError> {
        self.until(deadline, |state| {
            if let Some(all) = state.results.remove(&step) {
                return Some(Ok(all));
            }
            state.verdict.as_ref().map(|v| Err(v.error()))
        })
        .transpose()
    }
}
