//! One step of a collective: messages to and from some ranks at once, cut into checked frames.
//!
//! All sends and receives of a step run in one loop that never blocks on any one of them, so no order can lock. Between waits
//! the loop looks whether the run is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::flags::Flags;
use super::stream::{Incoming, Outgoing};
use crate::carrier::Carrier;
use crate::control::{Control, Verdict};
use crate::error::CommError;
use crate::frame::Kind;

/// Longest sleep before the loop looks again whether the run is over.
const GLANCE: Duration = Duration::from_millis(100);
/// How long bytes of a rank that ended well may still be on their way.
const LATE_BYTES: Duration = Duration::from_secs(5);
/// What collectives cost, counted by whoever works.
#[derive(Default)]
pub(crate) struct Costs {
    pub waited_ns: AtomicU64,
    pub busy_ns: AtomicU64,
    pub sent: AtomicU64,
}

/// The data plane of one rank.
pub(crate) struct Link {
    pub rank: usize,
    pub size: usize,
    pub carrier: Box<dyn Carrier>,
    pub control: Arc<Control>,
    pub hosts: Arc<Vec<String>>,
    pub timeout: Duration,
    pub costs: Arc<Costs>,
    /// Room for a piece that is to be added; words, so that it is aligned for every number.
    pub staging: Vec<u64>,
    /// The reduction at work, for when it is given up.
    pub flags: Option<Arc<Flags>>,
    /// A reduction was given up in mid-stream: nothing can follow.
    pub broken: bool,
    sequence: u64,
}

/// What a rank did that gave a reduction up.
pub(crate) const DROPPED: &str = "it dropped a reduction before it was finished";

/// One collective under way.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(super) kind: Kind,
    pub(super) sequence: u64,
}

impl Link {
    pub(crate) fn new(
        rank: usize,
        carrier: Box<dyn Carrier>,
        control: Arc<Control>,
        hosts: Arc<Vec<String>>,
        timeout: Duration,
        costs: Arc<Costs>,
    ) -> Link {
        let size = hosts.len();
        Link {
            rank,
            size,
            carrier,
            control,
            hosts,
            timeout,
            costs,
            staging: Vec::new(),
            flags: None,
            broken: false,
            sequence: 0,
        }
    }

    /// Begins a collective; ranks count them alike.
    pub(crate) fn begin(&mut self, kind: Kind) -> Call {
        self.sequence += 1;
        self.control.board.sequence.store(self.sequence, Ordering::Relaxed);
        Call { kind, sequence: self.sequence }
    }

    /// Moves all of `out` and `into`, which name every peer once at most.
    ///
    /// # Errors
    /// The run is over, whoever ended it; this ends it for all.
    pub(crate) fn step(
        &mut self,
        call: Call,
        step: u16,
        out: &mut [Outgoing<'_>],
        into: &mut [Incoming<'_>],
    ) -> Result<(), CommError> {
        let started = Instant::now();
        let result = self.run(call, step, out, into);
        self.costs.busy_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result.map_err(|trouble| self.judge(call, trouble))
    }

    fn run(
        &mut self,
        call: Call,
        step: u16,
        out: &mut [Outgoing<'_>],
        into: &mut [Incoming<'_>],
    ) -> Result<(), Trouble> {
        let mut moved_at = Instant::now();
        let (mut send, mut recv) = (Vec::new(), Vec::new());
        loop {
            self.control.board.check().map_err(Trouble::Over)?;
            if self.flags.as_ref().is_some_and(|flags| flags.given_up()) {
                return Err(Trouble::GivenUp);
            }
            let mut moved = false;
            send.clear();
            recv.clear();
            for one in out.iter_mut().filter(|one| !one.done) {
                let sent = one.push(&mut *self.carrier, call, step)?;
                self.costs.sent.fetch_add(sent as u64, Ordering::Relaxed);
                moved |= sent > 0;
                if !one.done {
                    send.push(one.peer);
                }
            }
            for one in into.iter_mut().filter(|one| !one.done) {
                moved |= one.pull(&mut *self.carrier, call, step)?;
                if !one.done {
                    recv.push(one.peer);
                }
            }
            if send.is_empty() && recv.is_empty() {
                return Ok(());
            }
            if moved {
                moved_at = Instant::now();
                continue;
            }
            let idle = moved_at.elapsed();
            if idle > self.timeout {
                return Err(Trouble::Late(recv.first().or(send.first()).copied().unwrap_or(self.rank)));
            }
            if idle > LATE_BYTES
                && let Some(peer) = recv.iter().chain(&send).find(|peer| self.control.board.has_left(**peer))
            {
                return Err(Trouble::Lost(*peer, "it had ended, and this rank still waited for it".into()));
            }
            self.carrier.wait(&send, &recv, GLANCE.min(self.timeout)).map_err(Trouble::from_carrier)?;
        }
    }

    /// Ends the run for what was seen; the error that everyone will name.
    fn judge(&mut self, call: Call, trouble: Trouble) -> CommError {
        let at = format!("{} {}", call.kind.name(), call.sequence);
        let verdict = match trouble {
            Trouble::Over(error) => return error,
            Trouble::Lost(peer, what) => {
                let host = self.hosts.get(peer).map_or("unknown", String::as_str);
                return self.control.lost(peer, host, &what);
            }
            Trouble::Other(error) => Verdict::Protocol(error.to_string()),
            Trouble::Wrong(peer, what) => Verdict::Protocol(format!(
                "{} {what} (seen by {} in {at}): the run cannot go on; started again, it goes on from its last checkpoint",
                self.name(peer),
                self.name(self.rank)
            )),
            Trouble::Late(peer) => {
                let host = self.hosts.get(peer).map_or("unknown", String::as_str);
                let what = format!(
                    "{} waited {} s for {} in {at}",
                    self.name(self.rank),
                    self.timeout.as_secs_f64(),
                    self.name(peer)
                );
                return self.control.late(call.sequence, peer, host, &what);
            }
            Trouble::GivenUp => {
                // Not told to the others yet: whoever dropped it may have an error to tell that says more.
                self.broken = true;
                return CommError::Protocol(DROPPED.into());
            }
        };
        let error = verdict.error();
        self.control.end(verdict, &error.to_string());
        // Whoever was first is named by all.
        self.control.board.check().err().unwrap_or(error)
    }

    fn name(&self, rank: usize) -> String {
        format!("rank {rank} on host {}", self.hosts.get(rank).map_or("unknown", String::as_str))
    }
}

/// What stops a step.
pub(super) enum Trouble {
    Over(CommError),
    Lost(usize, String),
    Wrong(usize, String),
    Late(usize),
    GivenUp,
    Other(CommError),
}

impl Trouble {
    /// Carriers do not know hosts and updates; the control plane does.
    pub(super) fn from_carrier(error: CommError) -> Trouble {
        match error {
            CommError::Lost { rank, what, .. } => Trouble::Lost(rank, what),
            other => Trouble::Other(other),
        }
    }
}
