//! The ranks of a run and what they do together. Alone, everything works and costs nothing.
//!
//! Sums run along one binary tree over the ranks, nearest first: (0+1)+(2+3), then the fours, whatever the carrier.

use std::ops::Range;
use std::sync::Arc;

use crate::error::CommError;
use crate::number::Number;
use crate::place::Place;
use crate::reduction::{Cost, Leave, Reduction};
use crate::settings::Settings;

struct Inner {
    place: Place,
}

/// A rank's handle on its run. Clones are the same rank.
#[derive(Clone)]
pub struct World {
    inner: Arc<Inner>,
}

/// Rows gathered from all ranks, and the way back for their gradients ([`World::all_gather_with_gradients`]).
pub struct Gathered<T> {
    /// All ranks' rows, in the order of ranks.
    pub rows: Vec<T>,
    /// Where each rank's values lie in `rows`.
    pub parts: Vec<Range<usize>>,
    world: World,
}

impl<T: Number> Gathered<T> {
    /// The gradient of this rank's own values: the sum over all ranks of their `gradients` (one for each value of
    /// `rows`), along the tree of every sum. What PyTorch's differentiable all-gather does.
    ///
    /// # Errors
    /// As [`World::barrier`]; when `gradients` is not as long as `rows`.
    pub fn backward(&self, mut gradients: Vec<T>) -> Result<Vec<T>, CommError> {
        if gradients.len() != self.rows.len() {
            return Err(CommError::Protocol(format!(
                "the gradient of gathered rows has {} values where {} were gathered",
                gradients.len(),
                self.rows.len()
            )));
        }
        self.world.all_reduce(&mut gradients)?;
        Ok(gradients[self.parts[self.world.rank()].clone()].to_vec())
    }
}

impl World {
    /// A world of one.
    pub fn alone() -> World {
        World { inner: Arc::new(Inner { place: Place::alone() }) }
    }
    /// Joins the other ranks of `place`: returns when all are here and can talk.
    ///
    /// # Errors
    /// The ranks did not find each other within [`Settings::join_timeout`]; they are not of one run (secret, version,
    /// number of ranks, a rank twice); the meeting port is taken; the backend does not work here.
    pub fn join(place: &Place, _settings: &Settings) -> Result<World, CommError> {
        if place.world_size == 1 {
            return Ok(World { inner: Arc::new(Inner { place: place.clone() }) });
        }
        Err(CommError::Rendezvous("several ranks do not work yet".into()))
    }
    /// This rank.
    pub fn rank(&self) -> usize {
        self.inner.place.rank
    }
    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.inner.place.world_size
    }
    /// Number of this rank on its host.
    pub fn local_rank(&self) -> usize {
        self.inner.place.local_rank
    }
    /// Names of the hosts, by rank.
    pub fn hosts(&self) -> Vec<String> {
        vec![String::new(); self.size()]
    }
    /// Name of the carrier: `local`, `tcp`, `mpi`; `none` when alone.
    pub fn backend(&self) -> &'static str {
        "none"
    }
    /// What all collectives since the start cost.
    pub fn costs(&self) -> Cost {
        Cost::default()
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
    /// Starts to sum `data[..len]` over the ranks by `buckets`, declared in the order in which they get ready: a bucket
    /// is on its way as soon as [`Reduction::ready`] was said of it, while the caller works on others. The same buckets
    /// on every rank. `present`: whether this rank has anything to add; if not, the contents of its `data` do not matter,
    /// and its sibling's sum passes through bit for bit. When no rank is present, the sum is 0.
    ///
    /// # Safety
    /// `data[..len]` stays where it is until [`Reduction::finish`] returned or the `Reduction` was dropped, and nobody
    /// reads or writes bucket `i` between `ready(i)` and then.
    ///
    /// # Errors
    /// When a bucket does not lie in `data[..len]`, or buckets overlap; as [`World::barrier`].
    pub unsafe fn start_reduction<T: Number>(
        &self,
        data: *mut T,
        len: usize,
        buckets: &[Range<usize>],
        leave: Leave,
        grain: usize,
        present: bool,
    ) -> Result<Reduction, CommError> {
        let _ = (data, len, leave, grain, present);
        Ok(Reduction::alone(buckets.len()))
    }
    /// Every rank gets the parts of `buckets` that the others own ([`World::own_parts`]): the second half of an
    /// all-reduce, for parameters that each rank renewed in its own parts.
    ///
    /// # Errors
    /// As [`World::start_reduction`].
    pub fn all_gather_parts<T: Number>(
        &self,
        _data: &mut [T],
        _buckets: &[Range<usize>],
        _grain: usize,
    ) -> Result<(), CommError> {
        Ok(())
    }
    /// All ranks' values, in the order of ranks, with a way back for their gradients.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_gather_with_gradients<T: Number>(&self, own: &[T]) -> Result<Gathered<T>, CommError> {
        let mut rows = Vec::new();
        let mut parts = Vec::new();
        for of_rank in self.all_gather(own)? {
            parts.push(rows.len()..rows.len() + of_rank.len());
            rows.extend_from_slice(&of_rank);
        }
        Ok(Gathered { rows, parts, world: self.clone() })
    }
}
