//! Computed permutations and the batches of updates: any element at any time, in constant memory.
//!
//! A permutation is a balanced Feistel network over the smallest even number of bits that holds the range,
//! with SplitMix64 as its round function; values outside the range walk on along their cycle until they fall
//! inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

use crate::draw::{keyed, splitmix64};
use crate::error::DataError;

const ROUNDS: usize = 6;
const EPOCH_TAG: u64 = 0x6570_6F63_6873; // keeps these draws apart from others with the same seed

/// A permutation of `0..n` chosen by a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` that `key` chooses; memory and time do not grow with `n`.
    pub fn new(n: usize, key: u64) -> Permutation {
        let n = n as u64;
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        // very small networks mix badly, a wider one only walks a little longer
        let half_bits = bits.div_ceil(2).max(4);
        let mut keys = [0; ROUNDS];
        for (round, k) in keys.iter_mut().enumerate() {
            *k = keyed(&[key, round as u64]);
        }
        Permutation { n, half_bits, keys }
    }

    /// How many elements are permuted.
    pub fn len(&self) -> usize {
        self.n as usize
    }

    /// Whether there is nothing to permute.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The element at position `i`.
    ///
    /// # Panics
    /// If `i` is not below `len()`.
    pub fn get(&self, i: usize) -> usize {
        assert!((i as u64) < self.n, "position {i} of a permutation of {}", self.n);
        let mask = (1u64 << self.half_bits) - 1;
        let mut x = i as u64;
        loop {
            let (mut left, mut right) = (x >> self.half_bits, x & mask);
            for key in self.keys {
                (left, right) = (right, left ^ (splitmix64(right ^ key) & mask));
            }
            x = (left << self.half_bits) | right;
            if x < self.n {
                return x as usize;
            }
        }
    }
}

/// The order of `n` examples in an epoch.
pub fn epoch_permutation(seed: u64, epoch: u64, n: usize) -> Permutation {
    Permutation::new(n, keyed(&[EPOCH_TAG, seed, epoch]))
}

/// The examples of one update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateExamples {
    /// The epoch, from 0; all examples of an update belong to one epoch.
    pub epoch: u64,
    /// Row numbers in the data file, in the update's order.
    pub rows: Vec<usize>,
}

/// Which examples belong to which update: a pure function of (seed, update), whatever the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    len: usize,
    global_batch: usize,
    drop_last: bool,
    seed: u64,
    shuffle: bool,
}

impl Batches {
    /// Cuts epochs of `len` examples into updates of `global_batch` examples.
    ///
    /// The examples left at an epoch's end are dropped (`drop_last`) or make a short update. `shuffle` takes
    /// each epoch in the order of [`epoch_permutation`], else in file order.
    ///
    /// # Errors
    /// If there are no examples, the batch is 0, or `drop_last` would leave no update at all.
    pub fn new(
        len: usize,
        global_batch: usize,
        drop_last: bool,
        seed: u64,
        shuffle: bool,
    ) -> Result<Batches, DataError> {
        if global_batch == 0 {
            return Err(DataError::Setting(
                "expected a global batch of 1 or more, found 0; set --global_batch_size".into(),
            ));
        }
        if len == 0 {
            return Err(DataError::Setting(
                "expected training examples, found none; look at the training file".into(),
            ));
        }
        if drop_last && len < global_batch {
            return Err(DataError::Setting(format!(
                "the training file has {len} examples, fewer than one batch of {global_batch}, and short batches are dropped: no update would ever run; \
                 set --global_batch_size to {len} or less, keep the short last batch (--last_batch keep), or use a larger file"
            )));
        }
        Ok(Batches { len, global_batch, drop_last, seed, shuffle })
    }

    /// Updates in one epoch; 1 or more.
    pub fn updates_per_epoch(&self) -> u64 {
        let updates =
            if self.drop_last { self.len / self.global_batch } else { self.len.div_ceil(self.global_batch) };
        updates as u64
    }

    /// The examples of update `u`, counted from 0.
    pub fn batch(&self, u: u64) -> UpdateExamples {
        let epoch = u / self.updates_per_epoch();
        let first = (u % self.updates_per_epoch()) as usize * self.global_batch;
        let last = first.saturating_add(self.global_batch).min(self.len);
        let rows = if self.shuffle {
            let order = epoch_permutation(self.seed, epoch, self.len);
            (first..last).map(|i| order.get(i)).collect()
        } else {
            (first..last).collect()
        };
        UpdateExamples { epoch, rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_bijection(n: usize, key: u64) -> bool {
        let p = Permutation::new(n, key);
        let mut seen = vec![false; n];
        (0..n).for_each(|i| seen[p.get(i)] = true);
        seen.into_iter().all(|s| s)
    }

    #[test]
    fn every_small_range_is_permuted() {
        for n in 0..600 {
            assert!(is_bijection(n, n as u64 * 77), "n = {n}");
        }
        for n in [4095, 4096, 4097, 65537] {
            assert!(is_bijection(n, 3), "n = {n}");
        }
    }

    #[test]
    fn positions_are_spread_evenly() {
        // over many keys every element comes to every place about equally often
        let n = 5;
        let mut counts = [[0u32; 5]; 5];
        for key in 0..5000 {
            let p = Permutation::new(n, key);
            for (i, row) in counts.iter_mut().enumerate() {
                row[p.get(i)] += 1;
            }
        }
        assert!(counts.iter().flatten().all(|&c| (850..1150).contains(&c)), "{counts:?}");
    }

    proptest! {
        #[test]
        fn a_permutation_of_any_size_stays_inside_and_is_injective(n in 1usize..1 << 40, key: u64, a: u64, b: u64) {
            let p = Permutation::new(n, key);
            let (a, b) = ((a % n as u64) as usize, (b % n as u64) as usize);
            prop_assert!(p.get(a) < n);
            prop_assert_eq!(a == b, p.get(a) == p.get(b));
        }

        #[test]
        fn an_epoch_takes_each_example_once(len in 1usize..80, batch in 1usize..20, seed: u64, epoch in 0u64..5) {
            let batches = Batches::new(len, batch, false, seed, true).unwrap();
            let per = batches.updates_per_epoch();
            let mut rows = Vec::new();
            for u in epoch * per..(epoch + 1) * per {
                let update = batches.batch(u);
                prop_assert_eq!(update.epoch, epoch);
                rows.extend(update.rows);
            }
            rows.sort_unstable();
            prop_assert_eq!(rows, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn short_batches_are_dropped_or_kept() {
        let dropped = Batches::new(10, 4, true, 1, false).unwrap();
        assert_eq!(dropped.updates_per_epoch(), 2);
        assert_eq!(dropped.batch(3), UpdateExamples { epoch: 1, rows: vec![4, 5, 6, 7] });
        let kept = Batches::new(10, 4, false, 1, false).unwrap();
        assert_eq!(kept.batch(5), UpdateExamples { epoch: 1, rows: vec![8, 9] });
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order = |seed, epoch| -> Vec<usize> {
            (0..50).map(|i| epoch_permutation(seed, epoch, 50).get(i)).collect()
        };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(2, 9), order(2, 9));
    }

    #[test]
    fn too_few_examples_are_refused() {
        let error = Batches::new(5, 8, true, 0, true).unwrap_err().to_string();
        assert!(error.starts_with("the training file has 5 examples, fewer than one batch of 8"), "{error}");
        assert_eq!(Batches::new(5, 8, false, 0, true).unwrap().batch(0).rows.len(), 5);
        assert!(Batches::new(0, 8, false, 0, true).is_err() && Batches::new(5, 0, false, 0, true).is_err());
    }
}
