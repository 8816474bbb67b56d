//! What moves bytes between ranks: an ordered, reliable stream to and from every peer, never blocking.
//!
//! The collectives drive all sends and receives of a step from one loop, so that no order of them can lock; a carrier
//! only says how many bytes went now.

#[cfg(target_os = "linux")]
pub mod local;
#[cfg(target_os = "linux")]
pub mod mixed;
#[cfg(feature = "mpi")]
pub mod mpi;
pub(crate) mod tcp;

use std::time::{Duration, Instant};

use crate::error::CommError;

/// A way of bytes to and from the other ranks. One file below `carrier` each: `local`, `tcp`, `mpi`.
pub trait Carrier: Send {
    /// Its name, for logs: `local`, `tcp`, `mpi`.
    fn name(&self) -> &'static str;
    /// Sends as much of `bytes` to `peer` as goes without waiting; returns how much that was.
    ///
    /// # Errors
    /// [`CommError::Lost`] when the peer is gone.
    fn try_send(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, CommError>;
    /// Receives what is there from `peer` into `bytes`, without waiting; returns how much that was.
    ///
    /// # Errors
    /// [`CommError::Lost`] when the peer is gone.
    fn try_recv(&mut self, peer: usize, bytes: &mut [u8]) -> Result<usize, CommError>;
    /// Sleeps until something may go to one of `send` or come from one of `recv`, or `most` has passed. May return early.
    ///
    /// # Errors
    /// When the operating system refuses.
    fn wait(&mut self, send: &[usize], recv: &[usize], most: Duration) -> Result<(), CommError>;
    /// Says that the run ends with an error: dropping the carrier waits for nobody. A carrier that is dropped without it may
    /// wait for the other ranks to drop theirs.
    fn abandon(&mut self) {}
}

/// What a carrier is opened with; every file below `carrier` has an `open(&Opening, ...)`, called on all ranks at the same
/// time.
#[derive(Clone, Debug)]
pub struct Opening {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Ranks on this rank's host.
    pub local_size: usize,
    /// The ranks that this one talks to, ascending (see [`partners`]); no others are asked for later.
    pub partners: Vec<usize>,
    /// Hosts by rank.
    pub hosts: Vec<String>,
    /// The secret of the run.
    pub secret: String,
    /// Drawn by rank 0 for this start alone: what is named after it belongs to no other start, dead or alive.
    pub start: String,
    /// When opening has to be done.
    pub deadline: Instant,
}

/// Asked every now and then while a rank waits for others to open theirs: an error ends the wait.
pub type Alive<'a> = &'a dyn Fn() -> Result<(), CommError>;

/// Opens the carrier through MPI.
#[cfg(feature = "mpi")]
pub(crate) fn open_mpi(opening: &Opening) -> Result<Box<dyn Carrier>, CommError> {
    mpi::open(opening)
}

/// Says that there is none.
#[cfg(not(feature = "mpi"))]
pub(crate) fn open_mpi(_: &Opening) -> Result<Box<dyn Carrier>, CommError> {
    Err(CommError::Place(
        "this tercio was built without MPI: build it with the cargo feature `mpi`, or choose the backend auto".into(),
    ))
}

/// The ranks that `rank` of `size` ever talks to, ascending: one for each bit of its number, and, where `size` is no power
/// of two, the rank that stands in for those above the greatest one.
pub fn partners(rank: usize, size: usize) -> Vec<usize> {
    let power = power_below(size);
    if rank >= power {
        return vec![rank - power];
    }
    let bits = power.trailing_zeros();
    let mut all: Vec<usize> = (0..bits).map(|k| rank ^ (1 << k)).collect();
    if rank + power < size {
        all.push(rank + power);
    }
    all.sort_unstable();
    all
}

/// The greatest power of two that is not above `size`.
pub(crate) fn power_below(size: usize) -> usize {
    1 << (usize::BITS - 1 - size.max(1).leading_zeros())
}
