//! The sum of a long buffer by buckets, while the caller still computes the later ones.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use crate::collective::flags::Flags;
use crate::collective::line::Line;
use crate::collective::link::DROPPED;
use crate::collective::reduce;
use crate::error::CommError;
use crate::number::Number;
use crate::ranks::Ranks;
use crate::world::World;

/// What a [`Reduction`] leaves where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The whole sum on every rank (all-reduce).
    Everywhere,
    /// Each rank's own part of every bucket ([`crate::World::own_parts`]) on that rank only (reduce-scatter); the rest of
    /// the bucket holds partial sums of no use.
    Owned,
}

/// What collectives cost this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Seconds that the caller waited.
    pub waited: f64,
    /// Seconds that bytes were on their way, or waited for.
    pub busy: f64,
    /// Bytes sent by this rank.
    pub sent: u64,
}

/// A reduction under way, made by [`World::start_reduction`].
#[must_use = "a reduction that is dropped before `finish` ends the run"]
pub struct Reduction {
    world: World,
    buckets: usize,
    way: Way,
}

enum Way {
    /// A world of one: what is to be done at the end, if anything.
    Alone(Option<Box<dyn FnOnce() + Send>>),
    Ranks {
        flags: Arc<Flags>,
        done: Receiver<Result<Cost, CommError>>,
    },
    Finished,
}

/// A pointer that may go to the thread of reductions: [`World::start_reduction`]'s contract covers it.
struct Buffer<T>(*mut T);
// SAFETY: a Number may be used from any thread, and the contract lets nobody else touch what is used.
unsafe impl<T: Number> Send for Buffer<T> {}

impl<T: Number> Buffer<T> {
    /// # Safety
    /// The range lies in the buffer, and nobody else uses it while the slice lives.
    unsafe fn slice<'a>(&self, range: &Range<usize>) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

/// Starts a reduction; the buckets were checked.
///
/// # Safety
/// As [`World::start_reduction`].
pub(crate) unsafe fn start<T: Number>(
    ranks: Option<&Ranks>,
    world: World,
    data: *mut T,
    buckets: &[Range<usize>],
    leave: Leave,
    grain: usize,
    present: bool,
) -> Result<Reduction, CommError> {
    let buffer = Buffer(data);
    let count = buckets.len();
    let buckets = buckets.to_vec();
    let Some(ranks) = ranks else {
        let zero: Option<Box<dyn FnOnce() + Send>> = match present {
            true => None,
            // SAFETY: run by `finish`, when all buckets are this side's.
            false => Some(Box::new(move || {
                let buffer = buffer;
                buckets.iter().for_each(|bucket| unsafe { buffer.slice(bucket) }.fill(T::default()));
            })),
        };
        return Ok(Reduction { world, buckets: count, way: Way::Alone(zero) });
    };
    ranks.control.board.check()?;
    let flags = Arc::new(Flags::new(count));
    let (answer, done) = sync_channel(1);
    let (line, costs, number) = (ranks.line.clone(), ranks.costs.clone(), ranks.line.number());
    let shared = flags.clone();
    ranks.send(Box::new(move || {
        let buffer = buffer;
        let before = costs.read();
        let result = sum(&line, number, &shared, &buffer, &buckets, leave, grain, present);
        let after = costs.read();
        // Nobody listens only where the process ends.
        let _ = answer.send(result.map(|()| Cost {
            waited: 0.0,
            busy: after.busy - before.busy,
            sent: after.sent - before.sent,
        }));
    }));
    Ok(Reduction { world, buckets: count, way: Way::Ranks { flags, done } })
}

fn sum<T: Number>(
    line: &Line,
    number: u64,
    flags: &Arc<Flags>,
    buffer: &Buffer<T>,
    buckets: &[Range<usize>],
    leave: Leave,
    grain: usize,
    present: bool,
) -> Result<(), CommError> {
    let mut link = line.turn(number)?;
    if !flags.begin() {
        link.broken = true;
        return Err(CommError::Protocol(DROPPED.into()));
    }
    link.flags = Some(flags.clone());
    let mut result = Ok(());
    'buckets: for (index, bucket) in buckets.iter().enumerate() {
        while !flags.wait(index, Duration::from_millis(100)) {
            if let Err(e) = link.control.board.check() {
                result = Err(e);
                break 'buckets;
            }
        }
        // SAFETY: the bucket is ready, so it is this thread's until the reduction is finished. (One that is given up counts as
        // ready, and is not touched: the first step sees that.)
        let data = unsafe { buffer.slice(bucket) };
        result = reduce::reduce(&mut link, data, bucket, grain, leave, present);
        if result.is_err() {
            break;
        }
    }
    link.flags = None;
    result
}

impl Reduction {
    /// Says that this rank's part of bucket `index` is final. Every bucket, also on a rank that contributes nothing;
    /// in any order, but they are summed in the order in which they were declared.
    ///
    /// # Panics
    /// When there is no such bucket.
    pub fn ready(&self, index: usize) {
        assert!(index < self.buckets, "bucket {index} of {}", self.buckets);
        if let Way::Ranks { flags, .. } = &self.way {
            flags.set(index);
        }
    }
    /// Waits until all buckets are summed. Buckets that were not said to be ready count as ready now.
    ///
    /// # Errors
    /// A rank was lost or failed, hangs, or is not in step.
    pub fn finish(mut self) -> Result<Cost, CommError> {
        match std::mem::replace(&mut self.way, Way::Finished) {
            Way::Alone(zero) => {
                if let Some(zero) = zero {
                    zero();
                }
                Ok(Cost::default())
            }
            Way::Ranks { flags, done } => {
                let since = Instant::now();
                flags.set_all();
                let result = done.recv().unwrap_or_else(|_| {
                    Err(CommError::Protocol("the thread of reductions ended before its work".into()))
                });
                let waited = since.elapsed();
                self.world.waited(waited);
                result.map(|cost| Cost { waited: waited.as_secs_f64(), ..cost })
            }
            Way::Finished => Ok(Cost::default()),
        }
    }
}

impl Drop for Reduction {
    /// Without `finish`, the buffer is let go at once, and the run ends with this rank's next call ([`World::fail`] with a
    /// reason, best): the other ranks' sums cannot be had any more.
    fn drop(&mut self) {
        if let Way::Ranks { flags, done } = std::mem::replace(&mut self.way, Way::Finished)
            && flags.give_up()
        {
            // Whatever it says, the thread does not touch the buffer any more.
            let _ = done.recv();
        }
    }
}
