//! Which buckets of a reduction are ready, between who computes them and who sums them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state of a reduction's buckets.
pub(crate) struct Flags {
    ready: Mutex<Vec<bool>>,
    changed: Condvar,
    given_up: AtomicBool,
}

impl Flags {
    pub(crate) fn new(buckets: usize) -> Flags {
        Flags {
            ready: Mutex::new(vec![false; buckets]),
            changed: Condvar::new(),
            given_up: AtomicBool::new(false),
        }
    }
    fn lock(&self) -> MutexGuard<'_, Vec<bool>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn set(&self, index: usize) {
        self.lock()[index] = true;
        self.changed.notify_all();
    }
    pub(crate) fn set_all(&self) {
        self.lock().fill(true);
        self.changed.notify_all();
    }
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.set_all();
    }
    pub(crate) fn given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
    /// Waits until bucket `index` is ready, at most `most`; whether it is.
    pub(crate) fn wait(&self, index: usize, most: Duration) -> bool {
        let ready = self.lock();
        if ready[index] {
            return true;
        }
        self.changed.wait_timeout(ready, most).unwrap_or_else(PoisonError::into_inner).0[index]
    }
}
