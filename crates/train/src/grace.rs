//! The time between the announcement of an end and the end: whether the rest of an update, and a checkpoint, fit into it.
//!
//! Times decide only where a run pauses, never what it computes.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Watches an update for a signal that leaves too little time to finish it.
#[derive(Debug)]
pub struct Grace {
    limit: Duration,
    /// The longest update and the longest save so far: the next may be as long.
    update: Duration,
    save: Duration,
    watch: Mutex<Watch>,
}

#[derive(Debug)]
struct Watch {
    started: Instant,
    /// The last moment at which no signal had come.
    calm: Instant,
}

impl Grace {
    /// With this much time from a signal to the end.
    pub fn new(limit: Duration) -> Self {
        let now = Instant::now();
        let watch = Mutex::new(Watch { started: now, calm: now });
        Grace { limit, update: Duration::ZERO, save: Duration::ZERO, watch }
    }
    /// An update begins; no signal has come.
    pub fn begin(&mut self) {
        let now = Instant::now();
        *self.watch.get_mut().unwrap_or_else(PoisonError::into_inner) = Watch { started: now, calm: now };
    }
    /// The update is done.
    pub fn updated(&mut self) {
        let started = self.watch.get_mut().unwrap_or_else(PoisonError::into_inner).started;
        self.update = self.update.max(started.elapsed());
    }
    /// A checkpoint took so long.
    pub fn saved(&mut self, time: Duration) {
        self.save = self.save.max(time);
    }
    /// What the longest save took so far.
    pub fn save(&self) -> Duration {
        self.save
    }
    /// Whether an update of which the share `left` (0 to 1) is still to do must be given up: a signal has come, and the
    /// rest and a save would end after the limit.
    pub fn is_over(&self, left: f64, signalled: bool) -> bool {
        let now = Instant::now();
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        if !signalled {
            watch.calm = now;
            return false;
        }
        let waited = now.duration_since(watch.calm);
        // Without an earlier update to go by, this one's own pace tells.
        let whole = if self.update.is_zero() {
            now.duration_since(watch.started).as_secs_f64() / (1.0 - left).max(1e-3)
        } else {
            self.update.as_secs_f64()
        };
        waited.as_secs_f64() + whole * left + self.save.as_secs_f64() > self.limit.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_finished_and_what_does_not_is_given_up() {
        let mut grace = Grace::new(Duration::from_secs(30));
        (grace.update, grace.save) = (Duration::from_secs(40), Duration::from_secs(9));
        grace.begin();
        assert!(!grace.is_over(1.0, false), "no signal, no end");
        assert!(grace.is_over(0.6, true), "24 s and 9 s are more than 30 s");
        assert!(!grace.is_over(0.5, true), "20 s and 9 s fit");
        grace.saved(Duration::from_secs(11));
        assert!(grace.is_over(0.5, true));
    }

    #[test]
    fn the_first_update_is_judged_by_its_own_pace() {
        let mut grace = Grace::new(Duration::from_secs(30));
        grace.begin();
        grace.watch.get_mut().unwrap().started -= Duration::from_secs(10);
        assert!(!grace.is_over(0.7, true), "10 s for three tenths: 24 s are left");
        assert!(grace.is_over(0.8, true), "10 s for two tenths: 40 s are left");
    }
}
