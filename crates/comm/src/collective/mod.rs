//! What ranks do together, over any carrier: every algorithm talks only to [`crate::carrier::partners`].
//!
//! With P the greatest power of two among R ranks, ranks below P form a hypercube: step k goes to rank ^ 2^k. Ranks from P
//! on hand what they have to rank - P before, and get the result from it after.

pub(crate) mod broadcast;
pub(crate) mod flags;
pub(crate) mod gather;
pub(crate) mod line;
pub(crate) mod link;
pub(crate) mod parts;
pub(crate) mod reduce;
mod stream;
#[cfg(test)]
mod tests;

use crate::carrier::power_below;
use link::Link;

/// A rank's place in the cube.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cube {
    pub rank: usize,
    pub size: usize,
    /// Ranks in the cube.
    pub power: usize,
    /// Its dimensions.
    pub bits: u16,
}

impl Cube {
    pub(crate) fn of(link: &Link) -> Cube {
        Cube::new(link.rank, link.size)
    }
    pub(crate) fn new(rank: usize, size: usize) -> Cube {
        let power = power_below(size);
        Cube { rank, size, power, bits: power.trailing_zeros() as u16 }
    }
    /// The rank of the cube that stands in for this one, if it is outside.
    pub(crate) fn stand_in(&self) -> Option<usize> {
        self.rank.checked_sub(self.power)
    }
    /// The rank outside of the cube that this one stands in for.
    pub(crate) fn guest(&self) -> Option<usize> {
        let guest = self.rank + self.power;
        (self.rank < self.power && guest < self.size).then_some(guest)
    }
    /// The partner of step `k`.
    pub(crate) fn partner(&self, k: u16) -> usize {
        self.rank ^ (1 << k)
    }
    /// Whether this rank is the lower one of step `k`.
    pub(crate) fn is_low(&self, k: u16) -> bool {
        self.rank >> k & 1 == 0
    }
    /// Number of the step that goes to the stand-in, before all others.
    pub(crate) const FOLD: u16 = u16::MAX;
    /// Number of the step that comes back from the stand-in, after all others.
    pub(crate) const UNFOLD: u16 = u16::MAX - 1;
    /// Number of step `k` on the way back.
    pub(crate) fn back(k: u16) -> u16 {
        1 << 8 | k
    }
}
