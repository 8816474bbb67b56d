//! The sum of a long buffer by buckets, while the caller still computes the later ones.

use crate::error::CommError;

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
    /// Seconds that the caller waited for it.
    pub waited: f64,
    /// Seconds that bytes were on their way.
    pub busy: f64,
    /// Bytes sent by this rank.
    pub sent: u64,
}

/// A reduction under way, made by [`crate::World::start_reduction`].
#[must_use = "a reduction that is dropped before `finish` ends the run"]
pub struct Reduction {
    buckets: usize,
}

impl Reduction {
    pub(crate) fn alone(buckets: usize) -> Reduction {
        Reduction { buckets }
    }
    /// Says that this rank's part of bucket `index` is final. Every bucket, also on a rank that contributes nothing;
    /// in any order, but they are summed in the order in which they were declared.
    ///
    /// # Panics
    /// When there is no such bucket.
    pub fn ready(&self, index: usize) {
        assert!(index < self.buckets, "bucket {index} of {}", self.buckets);
    }
    /// Waits until all buckets are summed. Buckets that were not said to be ready count as ready now.
    ///
    /// # Errors
    /// A rank was lost or failed, or the ranks are not in step.
    pub fn finish(self) -> Result<Cost, CommError> {
        Ok(Cost::default())
    }
}
