//! Collectives one after the other, in the order in which they were asked for.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::link::{DROPPED, Link};
use crate::control::Verdict;
use crate::error::CommError;

/// Who is next. A reduction takes its number when it starts, so that nothing asked for later overtakes it.
pub(crate) struct Line {
    next: AtomicU64,
    state: Mutex<State>,
    moved: Condvar,
}

struct State {
    serving: u64,
    link: Link,
}

/// The link, for as long as one collective takes.
pub(crate) struct Turn<'a> {
    line: &'a Line,
    state: MutexGuard<'a, State>,
}

impl Line {
    pub(crate) fn new(link: Link) -> Line {
        Line { next: AtomicU64::new(0), state: Mutex::new(State { serving: 0, link }), moved: Condvar::new() }
    }

    /// The last use of the line. Where the run ended with an error, the carrier waits for nobody when it goes.
    pub(crate) fn close(&self) {
        let link = &mut self.state.lock().unwrap_or_else(PoisonError::into_inner).link;
        if link.broken {
            link.control.fail(DROPPED);
        }
        if link.control.board.check().is_err() {
            link.carrier.abandon();
        }
    }

    /// A number in the line.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until it is the turn of `number`.
    ///
    /// # Errors
    /// The run is over; what was before did not come to an end in time.
    pub(crate) fn turn(&self, number: u64) -> Result<Turn<'_>, CommError> {
        let since = Instant::now();
        // A panic within a collective leaves streams out of step; the others notice, or the process ends.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            state.link.control.board.check()?;
            if state.link.broken {
                state.link.control.fail(DROPPED);
                continue;
            }
            if state.serving == number {
                return Ok(Turn { line: self, state });
            }
            if since.elapsed() > state.link.timeout {
                let verdict = Verdict::Timeout(format!(
                    "rank {} waited {} s for its own earlier reduction, of which not all buckets were said to be ready",
                    state.link.rank,
                    state.link.timeout.as_secs_f64()
                ));
                let error = verdict.error();
                state.link.control.end(verdict, &error.to_string());
                return Err(error);
            }
            state = self
                .moved
                .wait_timeout(state, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Deref for Turn<'_> {
    type Target = Link;
    fn deref(&self) -> &Link {
        &self.state.link
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Link {
        &mut self.state.link
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.state.serving += 1;
        self.line.moved.notify_all();
    }
}
