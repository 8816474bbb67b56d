//! What moves bytes between ranks: an ordered, reliable stream to and from every peer, never blocking.
//!
//! The collectives drive all sends and receives of a step from one loop, so that no order of them can lock; a carrier
//! only says how many bytes went now.

use std::time::Duration;

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
}
