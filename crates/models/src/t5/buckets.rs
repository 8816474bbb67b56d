//! Which row of T5's relative bias table a distance reads.

use tercio_engine::RelativeBuckets;

/// T5's buckets: one each for near distances, logarithmically wider ones up to `max_distance`.
/// Bidirectional tables give half to keys after the query; others give bucket 0 to those.
pub(super) fn relative(bidirectional: bool, buckets: usize, max_distance: usize) -> RelativeBuckets {
    let zero = max_distance.max(buckets);
    let half = if bidirectional { buckets / 2 } else { buckets };
    let exact = half / 2;
    // In single precision like the library, so that a distance on a border falls to the same side.
    let log = |x: f32| libm::log(x as f64) as f32;
    let far = |n: usize| {
        let span = libm::log(max_distance as f64 / exact as f64) as f32;
        let position = log(n as f32 / exact as f32) / span * (half - exact) as f32;
        (exact + position as usize).min(half - 1)
    };
    let of = |distance: i64| {
        let n = if bidirectional { distance.unsigned_abs() } else { (-distance).max(0) as u64 } as usize;
        let base = if bidirectional && distance > 0 { half } else { 0 };
        base + if n < exact { n } else { far(n) }
    };
    let bucket = (-(zero as i64)..=zero as i64).map(|d| of(d) as u16).collect();
    RelativeBuckets { bucket, zero, buckets, key_positions: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the bucket changes with growing distance, as (distance, bucket).
    fn starts(b: &RelativeBuckets, of: impl Fn(&RelativeBuckets, usize) -> usize) -> Vec<(usize, usize)> {
        let all: Vec<usize> = (0..300).map(|d| of(b, d)).collect();
        (0..300).filter(|&d| d == 0 || all[d] != all[d - 1]).map(|d| (d, all[d])).collect()
    }

    #[test]
    fn buckets_are_those_of_the_library() {
        // From transformers 5.24: T5Attention._relative_position_bucket with 32 buckets, max distance 128.
        let b = relative(true, 32, 128);
        let after = [
            (0, 0),
            (1, 17),
            (2, 18),
            (3, 19),
            (4, 20),
            (5, 21),
            (6, 22),
            (7, 23),
            (8, 24),
            (12, 25),
            (16, 26),
            (23, 27),
            (32, 28),
            (46, 29),
            (64, 30),
            (91, 31),
        ];
        assert_eq!(starts(&b, |b, d| b.of(0, d)), after);
        let before = [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 4),
            (5, 5),
            (6, 6),
            (7, 7),
            (8, 8),
            (12, 9),
            (16, 10),
            (23, 11),
            (32, 12),
            (46, 13),
            (64, 14),
            (91, 15),
        ];
        assert_eq!(starts(&b, |b, d| b.of(d, 0)), before);
        let u = relative(false, 32, 128);
        let before = [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 4),
            (5, 5),
            (6, 6),
            (7, 7),
            (8, 8),
            (9, 9),
            (10, 10),
            (11, 11),
            (12, 12),
            (13, 13),
            (14, 14),
            (15, 15),
            (16, 16),
            (19, 17),
            (21, 18),
            (24, 19),
            (27, 20),
            (31, 21),
            (35, 22),
            (40, 23),
            (46, 24),
            (52, 25),
            (59, 26),
            (67, 27),
            (77, 28),
            (87, 29),
            (99, 30),
            (113, 31),
        ];
        assert_eq!(starts(&u, |b, d| b.of(d, 0)), before);
        assert_eq!(starts(&u, |b, d| b.of(0, d)), [(0, 0)]);
    }
}
