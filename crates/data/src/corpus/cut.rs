//! Choosing some rows of a file at random: a pure function of seed and file, whatever the ranks, in memory that does not grow with
//! the number of rows chosen.
//!
//! Selection sampling (Knuth, The Art of Computer Programming, volume 2, 3.4.2, algorithm S): a row is chosen with
//! probability (still to choose) / (rows that are left), so exactly as many are chosen as were wanted, in file order, and every set of
//! that size is as likely. Draws are keyed by the row. With strata the same is done within each.

use super::rows::{Marked, Rows};
use crate::draw;

/// Keeps these draws apart from others with the same seed.
const CUT_TAG: u64 = 0x6375_7463_6f72_7075;

/// What is chosen, so that draws for one are not those for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Test = 1,
    Dev = 2,
    KeepTrain = 3,
    KeepDev = 4,
    KeepTest = 5,
}

/// How many rows a share of `n` is: rounded as Python rounds, a half to the even number.
pub(crate) fn share_of(n: usize, share: f64) -> usize {
    ((n as f64 * share).round_ties_even() as usize).min(n)
}

/// Rows of one stratum that are left, and how many of them are still to be chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quota {
    pub left: usize,
    pub wanted: usize,
}

/// Shares `wanted` out to strata of these sizes in proportion: each gets its whole part, what is left goes to the largest fractions, of
/// equal ones to the first.
pub(crate) fn quotas(sizes: &[usize], wanted: usize) -> Vec<Quota> {
    let total: u128 = sizes.iter().map(|&n| n as u128).sum();
    let part = |n: usize| (n as u128 * wanted as u128).checked_div(total).unwrap_or(0);
    let rest = |n: usize| (n as u128 * wanted as u128).checked_rem(total).unwrap_or(0);
    let mut out: Vec<Quota> = sizes.iter().map(|&n| Quota { left: n, wanted: part(n) as usize }).collect();
    let missing = wanted.saturating_sub(out.iter().map(|q| q.wanted).sum());
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&s| std::cmp::Reverse(rest(sizes[s]))); // stable
    order.into_iter().take(missing).for_each(|s| out[s].wanted += 1);
    out
}

/// Algorithm S, row by row.
pub(crate) struct Chooser {
    key: [u64; 3],
    quotas: Vec<Quota>,
    chosen: Marked,
    next: usize,
}

impl Chooser {
    pub fn new(seed: u64, purpose: Purpose, quotas: Vec<Quota>) -> Chooser {
        Chooser { key: [CUT_TAG, seed, purpose as u64], quotas, chosen: Marked::default(), next: 0 }
    }

    /// Row `row`, which comes after the last one, of this stratum.
    pub fn take(&mut self, row: usize, stratum: usize) {
        while self.next < row {
            self.chosen.push(false);
            self.next += 1;
        }
        let quota = &mut self.quotas[stratum];
        let [tag, seed, purpose] = self.key;
        let chosen =
            draw::index(&[tag, seed, purpose, row as u64], quota.left).is_some_and(|at| at < quota.wanted);
        quota.left = quota.left.saturating_sub(1);
        quota.wanted -= usize::from(chosen);
        self.chosen.push(chosen);
        self.next += 1;
    }

    /// The rows that were chosen, of a file of so many.
    pub fn finish(mut self, of_file: usize) -> Rows {
        (self.next..of_file).for_each(|_| self.chosen.push(false));
        Rows::of(self.chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(n: usize, wanted: usize, seed: u64) -> Vec<usize> {
        let mut chooser = Chooser::new(seed, Purpose::Test, vec![Quota { left: n, wanted }]);
        (0..n).for_each(|row| chooser.take(row, 0));
        let rows = chooser.finish(n);
        (0..rows.len()).map(|k| rows.get(k)).collect()
    }

    #[test]
    fn exactly_as_many_are_chosen_and_each_as_often() {
        let mut counts = [0; 20];
        for seed in 0..2000 {
            let rows = chosen(20, 5, seed);
            assert_eq!(rows.len(), 5);
            rows.iter().for_each(|&row| counts[row] += 1);
        }
        // 500 expected, standard deviation 19
        assert!(counts.iter().all(|&c| (400..600).contains(&c)), "{counts:?}");
        assert_eq!(chosen(1000, 100, 7), chosen(1000, 100, 7));
        assert_ne!(chosen(1000, 100, 7), chosen(1000, 100, 8));
        assert_eq!((chosen(3, 3, 1), chosen(3, 0, 1)), (vec![0, 1, 2], vec![]));
    }

    #[test]
    fn shares_are_rounded_as_python_does_and_strata_sum_up() {
        assert_eq!([25, 35, 4, 6, 5].map(|n| share_of(n, 0.1)), [2, 4, 0, 1, 0]);
        let wanted = |sizes: &[usize], m| quotas(sizes, m).iter().map(|q| q.wanted).collect::<Vec<_>>();
        assert_eq!(wanted(&[60, 30, 10], 10), [6, 3, 1]);
        assert_eq!(wanted(&[5, 5, 5], 4), [2, 1, 1]);
        assert_eq!(wanted(&[97, 2, 1], 10), [10, 0, 0]);
        assert_eq!(wanted(&[], 0), Vec::<usize>::new());
        assert_eq!(wanted(&[0, 3], 3), [0, 3]);
    }
}
