//! Which buckets of a reduction are ready, between who computes them and who sums them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state of a reduction's buckets.
pub(crate) struct Flags {
    state: Mutex<State>,
    changed: Condvar,
    given_up: AtomicBool,
}

struct State {
    ready: Vec<bool>,
    /// Its turn came, and it was not given up before.
    begun: bool,
}

impl Flags {
    pub(crate) fn new(buckets: usize) -> Flags {
        let state = State { ready: vec![false; buckets], begun: false };
        Flags { state: Mutex::new(state), changed: Condvar::new(), given_up: AtomicBool::new(false) }
    }
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn set(&self, index: usize) {
        self.lock().ready[index] = true;
        self.changed.notify_all();
    }
    pub(crate) fn set_all(&self) {
        self.lock().ready.fill(true);
        self.changed.notify_all();
    }
    /// Begins; false if it was given up.
    pub(crate) fn begin(&self) -> bool {
        let mut state = self.lock();
        state.begun = !self.given_up();
        state.begun
    }
    /// Gives it up; whether it had begun.
    pub(crate) fn give_up(&self) -> bool {
        let mut state = self.lock();
        self.given_up.store(true, Ordering::Release);
        state.ready.fill(true);
        self.changed.notify_all();
        state.begun
    }
    pub(crate) fn given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
    /// Waits until bucket `index` is ready, at most `most`; whether it is.
    pub(crate) fn wait(&self, index: usize, most: Duration) -> bool {
        let state = self.lock();
        if state.ready[index] {
            return true;
        }
        self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0.ready[index]
    }
}
