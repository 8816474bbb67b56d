//! The ranks of a run and what they do together. Alone, everything works and costs nothing.
//!
//! Sums run along one binary tree over the ranks, nearest first: (0+1)+(2+3), then the fours, whatever the carrier.

use std::ops::Range;
use std::sync::Arc;

use crate::error::CommError;
use crate::place::Place;

/// A value that ranks add and exchange: `f32`, `f64`.
pub trait Number: Copy + Send + Sync + Default + std::ops::Add<Output = Self> + 'static {}
impl Number for f32 {}
impl Number for f64 {}

struct Inner {
    place: Place,
}

/// A rank's handle on its run. Clones are the same rank.
#[derive(Clone)]
pub struct World {
    inner: Arc<Inner>,
}

/// What a [`Reduction`] leaves where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The whole sum on every rank (all-reduce).
    Everywhere,
    /// Each rank's own part of every bucket ([`World::own_parts`]) on that rank only (reduce-scatter).
    Owned,
}

/// What a reduction cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Seconds that the caller waited for it.
    pub waited: f64,
    /// Seconds that bytes were on their way.
    pub busy: f64,
    /// Bytes sent by this rank.
    pub sent: u64,
}

impl World {
    /// A world of one.
    pub fn alone() -> World {
        World { inner: Arc::new(Inner { place: Place::alone() }) }
    }
    /// This rank.
    pub fn rank(&self) -> usize {
        self.inner.place.rank
    }
    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.inner.place.world_size
    }
    /// Whether this is rank 0.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }
    /// Tells the ranks' common log of losses which update is at work; `0` before the first.
    pub fn at_update(&self, _update: u64) {}
    /// Tells all other ranks that this one ends with an error; they end too, naming it.
    pub fn fail(&self, _what: &str) {}
    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// A rank was lost or failed; so for all that follow.
    pub fn barrier(&self) -> Result<(), CommError> {
        Ok(())
    }
    /// Every rank gets `root`'s bytes (of any length; what the others pass is dropped).
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn broadcast_bytes(&self, _root: usize, own: Vec<u8>) -> Result<Vec<u8>, CommError> {
        Ok(own)
    }
    /// Every rank's `data` becomes `root`'s; as long on all ranks.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn broadcast<T: Number>(&self, _root: usize, _data: &mut [T]) -> Result<(), CommError> {
        Ok(())
    }
    /// All ranks' bytes, in the order of ranks, on rank 0; empty elsewhere.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn gather_bytes(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![own])
    }
    /// All ranks' bytes, in the order of ranks, on every rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_gather_bytes(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![own])
    }
    /// All ranks' values, in the order of ranks and of any lengths, on every rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_gather<T: Number>(&self, own: &[T]) -> Result<Vec<Vec<T>>, CommError> {
        Ok(vec![own.to_vec()])
    }
    /// The sum of all ranks' `data`, on every rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_reduce<T: Number>(&self, _data: &mut [T]) -> Result<(), CommError> {
        Ok(())
    }
    /// The parts of `bucket` (a range of the buffer) that each rank owns after a reduction with [`Leave::Owned`], by
    /// rank; cuts lie at multiples of `grain` elements of the buffer.
    pub fn own_parts(&self, bucket: Range<usize>, _grain: usize) -> Vec<Range<usize>> {
        vec![bucket]
    }
}
