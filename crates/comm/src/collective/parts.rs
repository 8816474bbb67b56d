//! Who owns which part of a bucket while sums go down the cube.

use std::ops::Range;

use super::stream::{Incoming, Outgoing, Sink};
use super::{Cube, link::Link};
use crate::error::CommError;
use crate::frame::Kind;
use crate::number::{Number, bytes_of, bytes_of_mut};

/// Halves of `range`: the cut lies at a multiple of `grain` (or an end), near the middle.
pub(crate) fn halves(range: &Range<usize>, grain: usize) -> (Range<usize>, Range<usize>) {
    let grain = grain.max(1);
    let middle = range.start + (range.end - range.start) / 2;
    // To the nearest multiple, as far as that is inside.
    let cut = (middle + grain / 2) / grain * grain;
    let cut = cut.clamp(range.start, range.end);
    (range.start..cut, cut..range.end)
}

/// The part of `bucket` that rank `rank` of `size` owns; empty outside of the cube.
pub(crate) fn part_of(rank: usize, size: usize, bucket: &Range<usize>, grain: usize) -> Range<usize> {
    let cube = Cube::new(rank, size);
    if cube.stand_in().is_some() {
        return bucket.end..bucket.end;
    }
    (0..cube.bits).fold(bucket.clone(), |part, k| {
        let (low, high) = halves(&part, grain);
        if cube.is_low(k) { low } else { high }
    })
}

/// The parts that a rank holds before each step down the cube, from the whole bucket to its own part, and the sibling's
/// half of each step.
pub(crate) fn way_down(
    cube: &Cube,
    bucket: &Range<usize>,
    grain: usize,
) -> Vec<(Range<usize>, Range<usize>)> {
    let mut part = bucket.clone();
    (0..cube.bits)
        .map(|k| {
            let (low, high) = halves(&part, grain);
            let (keep, give) = if cube.is_low(k) { (low, high) } else { (high, low) };
            part = keep.clone();
            (keep, give)
        })
        .collect()
}

/// Two ranges of a slice at once, which do not overlap.
pub(super) fn two<T>(data: &mut [T], a: Range<usize>, b: Range<usize>) -> (&mut [T], &mut [T]) {
    if a.start <= b.start {
        let (left, right) = data.split_at_mut(b.start.max(a.end));
        let shift = left.len();
        (&mut left[a], &mut right[b.start.max(shift) - shift..b.end.max(shift) - shift])
    } else {
        let (b, a) = two(data, b, a);
        (a, b)
    }
}

/// The way back up the cube: everyone owns its part of `bucket`, then all have the whole. `data` is the bucket alone, which
/// lies at `bucket` of the caller's buffer.
pub(crate) fn gather_parts<T: Number>(
    link: &mut Link,
    kind: Kind,
    data: &mut [T],
    bucket: &Range<usize>,
    grain: usize,
) -> Result<(), CommError> {
    let cube = Cube::of(link);
    let call = link.begin(kind);
    if let Some(to) = cube.stand_in() {
        return link.step(
            call,
            Cube::UNFOLD,
            &mut [],
            &mut [Incoming::new(to, Sink::Fill(bytes_of_mut(data)))],
        );
    }
    let near = |range: &Range<usize>| range.start - bucket.start..range.end - bucket.start;
    for (k, (keep, give)) in way_down(&cube, bucket, grain).iter().enumerate().rev() {
        let k = k as u16;
        let (own, other) = two(data, near(keep), near(give));
        link.step(
            call,
            Cube::back(k),
            &mut [Outgoing::new(cube.partner(k), bytes_of(own))],
            &mut [Incoming::new(cube.partner(k), Sink::Fill(bytes_of_mut(other)))],
        )?;
    }
    match cube.guest() {
        Some(guest) => link.step(call, Cube::UNFOLD, &mut [Outgoing::new(guest, bytes_of(data))], &mut []),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_bucket_once_and_cuts_lie_at_grains() {
        for size in [1, 2, 3, 4, 5, 8, 13] {
            for (bucket, grain) in
                [(0..1000, 1), (17..18, 4), (5..5, 4), (128..1000, 64), (100..161, 64), (3..9, 1000)]
            {
                let mut parts: Vec<_> = (0..size).map(|r| part_of(r, size, &bucket, grain)).collect();
                parts.retain(|p| !p.is_empty());
                parts.sort_by_key(|p| p.start);
                let mut at = bucket.start;
                for part in parts {
                    assert_eq!(part.start, at, "{size} ranks, {bucket:?}, grain {grain}");
                    assert!(part.start == bucket.start || part.start % grain == 0);
                    at = part.end;
                }
                assert_eq!(at, bucket.end);
            }
        }
    }

    #[test]
    fn parts_are_about_equal() {
        for rank in 0..8 {
            let part = part_of(rank, 8, &(0..8_000_003), 512);
            assert!(part.len().abs_diff(1_000_000) < 2048, "{part:?}");
        }
    }

    #[test]
    fn two_ranges_of_a_slice() {
        let mut data = [0, 1, 2, 3, 4];
        for (a, b) in [
            (0..2, 3..5),
            (3..5, 0..2),
            (2..2, 0..2),
            (0..2, 2..2),
            (0..0, 0..5),
            (5..5, 0..5),
            (0..5, 0..0),
            (0..5, 5..5),
        ] {
            let (x, y) = two(&mut data, a.clone(), b.clone());
            assert_eq!(x.to_vec(), a.collect::<Vec<_>>());
            assert_eq!(y.to_vec(), b.collect::<Vec<_>>());
        }
    }
}
