//! The part of an index that one of several ranks looks at: consecutive rows.
//!
//! Every index can be told its part. It then finds the best of these rows alone; the best of what all parts find
//! ([`merged`]) are the best of the index, the same bits as of one search of the whole.

use std::ops::Range;

use crate::top::{Hit, Top};

/// One of several parts of about equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    number: usize,
    of: usize,
}

impl Default for Part {
    fn default() -> Part {
        Part::WHOLE
    }
}

impl Part {
    /// All rows.
    pub const WHOLE: Part = Part { number: 0, of: 1 };

    /// Part `number` of `of`: that of a rank of a world. A number beyond the last counts as the last, of none as the whole.
    pub fn of(number: usize, of: usize) -> Part {
        let of = of.max(1);
        Part { number: number.min(of - 1), of }
    }

    /// Whether it is all rows.
    pub fn is_whole(self) -> bool {
        self.of == 1
    }

    /// Its rows of `total`; the parts one after the other are all rows.
    pub fn rows(self, total: u64) -> Range<u64> {
        // In 128 bits the product stays in range.
        let from = |number: usize| (u128::from(total) * number as u128 / self.of as u128) as u64;
        from(self.number)..from(self.number + 1)
    }
}

/// What of some rows lies among the `count` rows from `first` on, counted from there.
pub(crate) fn within(rows: &Range<u64>, first: u64, count: u64) -> Range<u64> {
    let place = |row: u64| row.saturating_sub(first).min(count);
    place(rows.start)..place(rows.end)
}

/// The best of several searches over different rows.
pub fn merged(parts: impl IntoIterator<Item = Vec<Hit>>, depth: usize) -> Vec<Hit> {
    let mut top = Top::new(depth);
    parts.into_iter().flatten().for_each(|hit| top.offer(hit.row, hit.score));
    top.into_sorted()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_rows_in_order_and_differ_by_one_at_most() {
        for total in [0, 1, 5, 64, 1000, u64::MAX] {
            for of in [1, 2, 3, 7, 64] {
                let parts: Vec<_> = (0..of).map(|n| Part::of(n, of).rows(total)).collect();
                assert_eq!((parts[0].start, parts[of - 1].end), (0, total));
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                let sizes = parts.iter().map(|p| p.end - p.start);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1, "{total} in {of}");
            }
        }
        assert_eq!(Part::of(3, 0), Part::WHOLE);
        assert!(Part::default().is_whole() && !Part::of(0, 2).is_whole());
    }
}
