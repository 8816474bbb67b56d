//! The rhythm of a control thread: when its next sign of life is due, and whether the process stood still.

use std::time::{Duration, Instant};

use crate::settings::Settings;

/// Time that a thread may be late without the process having stood still: a busy machine.
const LATE: Duration = Duration::from_secs(2);

/// A sign of life goes this often.
pub(super) fn beat_every(settings: &Settings) -> Duration {
    Duration::from_secs(1).min(settings.lost_after / 4).max(Duration::from_millis(10))
}

/// When the next sign of life is due, and when the thread looked last.
pub(super) struct Pulse {
    beat: Duration,
    next: Instant,
    looked: Instant,
}

impl Pulse {
    /// The first sign of life is due at once.
    pub(super) fn new(settings: &Settings) -> Pulse {
        Pulse { beat: beat_every(settings), next: Instant::now(), looked: Instant::now() }
    }
    /// Time until the next sign of life is due.
    pub(super) fn left(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }
    /// Called once in every round, after its sleep: how long the process stood still (stopped, or its host slept), where it
    /// did. The others' signs of life waited here then, not they.
    pub(super) fn stood_still(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let still = now.duration_since(self.looked);
        self.looked = now;
        (still > self.beat + LATE).then_some(still)
    }
    /// Whether a sign of life has to go now.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = now >= self.next;
        if due {
            self.next = now + self.beat;
        }
        due
    }
}
