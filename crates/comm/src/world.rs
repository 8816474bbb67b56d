//! The ranks of a run and what they do together. Alone, everything works and costs nothing.
//!
//! Sums run along one binary tree over the ranks, nearest first: (0+1)+(2+3), then the fours, whatever the carrier.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::collective::line::Turn;
use crate::collective::{broadcast, gather, parts, reduce};
use crate::control::message::host_name;
use crate::error::CommError;
use crate::frame::Kind;
use crate::join;
use crate::number::{Number, bytes_of, bytes_of_mut};
use crate::place::Place;
use crate::ranks::Ranks;
use crate::reduction::{self, Cost, Leave, Reduction};
use crate::settings::Settings;

struct Inner {
    place: Place,
    hosts: Arc<Vec<String>>,
    ranks: Option<Ranks>,
}

/// A rank's handle on its run. Clones are the same rank. Dropping the last one says goodbye to the others.
///
/// Every rank calls the same collectives in the same order; calls of several threads of one rank have to be in an order by
/// other means. Alone, everything works and costs nothing.
#[derive(Clone)]
pub struct World {
    inner: Arc<Inner>,
}

/// Rows gathered from all ranks, and the way back for their gradients ([`World::all_gather_with_gradients`]).
pub struct Gathered<T> {
    /// All ranks' values, in the order of ranks.
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
        World::of(Place::alone(), Arc::new(vec![host_name()]), None)
    }
    fn of(place: Place, hosts: Arc<Vec<String>>, ranks: Option<Ranks>) -> World {
        World { inner: Arc::new(Inner { place, hosts, ranks }) }
    }
    /// Joins the other ranks of `place`: returns when all are here and can talk.
    ///
    /// # Errors
    /// The ranks did not find each other within [`Settings::join_timeout`]; they are not of one run (secret, version,
    /// number of ranks, a rank twice); the meeting port is taken; the backend does not work here.
    pub fn join(place: &Place, settings: &Settings) -> Result<World, CommError> {
        World::join_unless(place, settings, &|| false)
    }
    /// As [`World::join`], unless `asked_to_end` says so before all are there: for a process whose signals do not end it by
    /// themselves. Asked about ten times a second; the other ranks are told.
    ///
    /// # Errors
    /// [`CommError::Stopped`] then; as [`World::join`].
    pub fn join_unless(
        place: &Place,
        settings: &Settings,
        asked_to_end: &dyn Fn() -> bool,
    ) -> Result<World, CommError> {
        if place.world_size == 1 {
            return Ok(World::of(place.clone(), Arc::new(vec![host_name()]), None));
        }
        let joined = join::join(place, settings, asked_to_end)?;
        let hosts = joined.hosts.clone();
        Ok(World::of(place.clone(), hosts, Some(Ranks::new(joined)?)))
    }
    /// Finds this process's place in its environment (launcher, torchrun, Slurm, MPI) and joins the ranks there; alone where
    /// there are none, which is said once in the log. The one call that a program needs.
    ///
    /// # Errors
    /// As [`Place::from_env`] and [`World::join`].
    pub fn from_env(settings: &Settings) -> Result<World, CommError> {
        let place = Place::from_env(crate::place::Flags::default())?;
        if place.world_size == 1 {
            tracing::info!("this process is alone: nobody started it as one of several ranks");
        }
        World::join(&place, settings)
    }
    fn ranks(&self) -> Option<&Ranks> {
        self.inner.ranks.as_ref()
    }
    pub(crate) fn waited(&self, time: std::time::Duration) {
        if let Some(ranks) = self.ranks() {
            ranks.costs.wait(time);
        }
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
    /// Number of this rank on its host.
    pub fn local_rank(&self) -> usize {
        self.inner.place.local_rank
    }
    /// Names of the hosts, by rank.
    pub fn hosts(&self) -> Vec<String> {
        self.inner.hosts.to_vec()
    }
    /// Where this process stands.
    pub fn place(&self) -> &Place {
        &self.inner.place
    }
    /// Name of the carrier: `local`, `tcp`, `local+tcp`, `mpi`; `none` when alone.
    pub fn backend(&self) -> &'static str {
        self.ranks().map_or("none", |ranks| ranks.backend)
    }
    /// What all collectives since the start cost this rank; those under way not wholly.
    pub fn costs(&self) -> Cost {
        self.ranks().map_or(Cost::default(), |ranks| ranks.costs.read())
    }
    /// Tells the ranks' common log of losses which update is at work; `0` before the first.
    pub fn at_update(&self, update: u64) {
        if let Some(ranks) = self.ranks() {
            ranks.control.board.update.store(update, Ordering::Relaxed);
        }
    }
    /// Tells all other ranks that this one ends with an error; they end too, naming it. Returns when they know, after two
    /// seconds at most, so that the process may end then. Nothing happens where the run is over already.
    pub fn fail(&self, what: &str) {
        if let Some(ranks) = self.ranks() {
            ranks.control.fail(what);
        }
    }
    /// Whether all is well, as far as this rank knows; for between collectives. Cheap.
    ///
    /// # Errors
    /// A rank was lost or failed: what every collective would say.
    pub fn check(&self) -> Result<(), CommError> {
        self.ranks().map_or(Ok(()), |ranks| ranks.control.board.check())
    }

    /// Runs one collective in its turn; `alone` gives the result of a world of one.
    fn run<R>(
        &self,
        alone: impl FnOnce() -> R,
        collective: impl FnOnce(&mut Turn<'_>) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let Some(ranks) = self.ranks() else { return Ok(alone()) };
        let since = Instant::now();
        let result = ranks.line.turn(ranks.line.number()).and_then(|mut turn| collective(&mut turn));
        ranks.costs.wait(since.elapsed());
        if let Err(e) = &result {
            // Whatever it was, the others would wait for this rank.
            ranks.control.fail(&e.to_string());
        }
        result
    }
    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// A rank was lost or failed, hangs, or is not in step; so for all that follow. Every rank gets an error then.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.run(|| (), |link| gather::barrier(link))
    }
    /// Every rank gets `root`'s bytes (of any length; what the others pass is dropped).
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn broadcast_bytes(&self, root: usize, own: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let Some(_) = self.ranks() else { return Ok(own) };
        self.run(Vec::new, |link| broadcast::broadcast_bytes(link, root, own))
    }
    /// Every rank's `data` becomes `root`'s; as long on all ranks.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn broadcast<T: Number>(&self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        self.run(|| (), |link| broadcast::broadcast(link, root, bytes_of_mut(data)))
    }
    /// All ranks' bytes, in the order of ranks, on rank 0; empty elsewhere.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn gather_bytes(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        let Some(_) = self.ranks() else { return Ok(vec![own]) };
        self.run(Vec::new, |link| gather::gather(link, own))
    }
    /// All ranks' bytes, in the order of ranks, on every rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_gather_bytes(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        let Some(_) = self.ranks() else { return Ok(vec![own]) };
        self.run(Vec::new, |link| gather::all_gather(link, own))
    }
    /// All ranks' values, in the order of ranks and of any lengths, on every rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_gather<T: Number>(&self, own: &[T]) -> Result<Vec<Vec<T>>, CommError> {
        let Some(_) = self.ranks() else { return Ok(vec![own.to_vec()]) };
        let all = self.all_gather_bytes(bytes_of(own).to_vec())?;
        all.iter()
            .enumerate()
            .map(|(rank, bytes)| {
                if bytes.len() % size_of::<T>() != 0 {
                    return Err(CommError::Protocol(format!("rank {rank} gathers numbers of another width")));
                }
                let mut values = vec![T::default(); bytes.len() / size_of::<T>()];
                bytes_of_mut(&mut values).copy_from_slice(bytes);
                Ok(values)
            })
            .collect()
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
    /// The sum of all ranks' `data`, on every rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    pub fn all_reduce<T: Number>(&self, data: &mut [T]) -> Result<(), CommError> {
        let whole = 0..data.len();
        self.run(|| (), |link| reduce::reduce(link, data, &whole, 1, Leave::Everywhere, true))
    }
    /// Starts to sum `data[..len]` over the ranks by `buckets`, declared in the order in which they get ready: a bucket
    /// is on its way as soon as [`Reduction::ready`] was said of it, while the caller works on others. The same buckets
    /// on every rank. `present`: whether this rank has anything to add; if not, the contents of its `data` do not matter,
    /// and its sibling's sum passes through bit for bit. When no rank is present, the sum is 0.
    ///
    /// # Safety
    /// `data[..len]` stays where it is until [`Reduction::finish`] returned or the `Reduction` was dropped (not forgotten),
    /// and nobody reads or writes bucket `i` between `ready(i)` and then.
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
        check_buckets(buckets, len)?;
        // SAFETY: the caller's promise.
        unsafe { reduction::start(self.ranks(), self.clone(), data, buckets, leave, grain, present) }
    }
    /// The parts of `bucket` (a range of the buffer) that each rank owns after a reduction with [`Leave::Owned`], by
    /// rank; cuts lie at multiples of `grain` elements of the buffer. Empty for ranks above the greatest power of two.
    pub fn own_parts(&self, bucket: Range<usize>, grain: usize) -> Vec<Range<usize>> {
        (0..self.size()).map(|rank| parts::part_of(rank, self.size(), &bucket, grain)).collect()
    }
    /// Every rank gets the parts of `buckets` that the others own ([`World::own_parts`]): the second half of an
    /// all-reduce, for parameters that each rank renewed in its own parts.
    ///
    /// # Errors
    /// As [`World::start_reduction`].
    pub fn all_gather_parts<T: Number>(
        &self,
        data: &mut [T],
        buckets: &[Range<usize>],
        grain: usize,
    ) -> Result<(), CommError> {
        check_buckets(buckets, data.len())?;
        self.run(
            || (),
            |link| {
                buckets.iter().try_for_each(|bucket| {
                    parts::gather_parts(link, Kind::Parts, &mut data[bucket.clone()], bucket, grain)
                })
            },
        )
    }
}

/// Buckets lie in a buffer of `len` elements and do not overlap.
fn check_buckets(buckets: &[Range<usize>], len: usize) -> Result<(), CommError> {
    let mut sorted: Vec<&Range<usize>> = buckets.iter().collect();
    sorted.sort_by_key(|bucket| (bucket.start, bucket.end));
    let mut end = 0;
    for bucket in sorted {
        let overlaps = !bucket.is_empty() && bucket.start < end;
        if bucket.start > bucket.end || bucket.end > len || overlaps {
            return Err(CommError::Protocol(format!(
                "the bucket {}..{} does not lie within the {len} elements of the buffer, or overlaps another",
                bucket.start, bucket.end
            )));
        }
        end = end.max(bucket.end);
    }
    Ok(())
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(ranks) = &self.ranks
            && std::thread::panicking()
        {
            ranks.control.fail("it panicked");
        }
    }
}
