//! Fewer vectors a document: tokens of like vectors become one, their mean (Clavié, Chaffin and Adams, 2024: "Reducing the Footprint of
//! Multi-Vector Retrieval with Minimal Performance Impact via Token Pooling").
//!
//! Clusters are those of Ward's method on the distances `1 - x . y`, merged as SciPy's `linkage` does it (nearest neighbour chains;
//! Müllner, 2011) and cut as its `fcluster` with `maxclust`, which is how PyLate pools.

/// Most vectors of a document that are clustered: the distances of all pairs are in memory together, and the work grows with their number.
pub const MOST_TOKENS: usize = 1 << 14;

/// Bytes of the distances between `rows` vectors of which `keep` are not clustered; 0 where all of them stay as they are.
pub fn bytes(rows: usize, factor: usize, keep: usize) -> u64 {
    let n = rows.saturating_sub(keep) as u64;
    if factor > 1 && n > 1 { n.saturating_mul(n).saturating_mul(8) } else { 0 }
}

/// Pools the vectors of a document, rows of `width` numbers: the first `keep` stay as they are, the others become a `factor`th of their
/// number, at least one. First the kept ones, then the clusters in the order of their first tokens. With `unit` the means are divided by
/// their lengths; PyLate leaves them as they are.
pub fn pool(vectors: &[f32], width: usize, factor: usize, keep: usize, unit: bool) -> Vec<f32> {
    let rows = vectors.len() / width.max(1);
    let keep = keep.min(rows);
    let (kept, rest) = vectors.split_at(keep * width);
    let n = rows - keep;
    let target = (n / factor.max(1)).max(1);
    if n <= target {
        return vectors.to_vec();
    }
    let labels = clusters(rest, width, target);
    let count = labels.iter().max().map_or(0, |&l| l + 1);
    let (mut sums, mut sizes) = (vec![0f64; count * width], vec![0usize; count]);
    for (row, &label) in rest.chunks_exact(width).zip(&labels) {
        sizes[label] += 1;
        sums[label * width..].iter_mut().zip(row).for_each(|(s, &v)| *s += f64::from(v));
    }
    let mut pooled = kept.to_vec();
    for (sum, size) in sums.chunks_exact(width).zip(sizes) {
        let length = libm::sqrt(sum.iter().map(|v| v * v).sum());
        let divisor = if unit && length > 0.0 { length } else { size as f64 };
        pooled.extend(sum.iter().map(|v| (v / divisor) as f32));
    }
    pooled
}

/// The cluster of each row, numbered by their first rows: `target` of them, or fewer where merges are equally far.
fn clusters(vectors: &[f32], width: usize, target: usize) -> Vec<usize> {
    let n = vectors.len() / width;
    let row = |i: usize| &vectors[i * width..(i + 1) * width];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let mut distances = vec![0f64; n * n];
    for i in 0..n {
        for j in 0..i {
            let d = 1.0 - dot(row(i), row(j));
            (distances[i * n + j], distances[j * n + i]) = (d, d);
        }
    }
    let mut merges = ward(&mut distances, n);
    merges.sort_by(|a, b| a.2.total_cmp(&b.2));
    // All merges up to the height at which no more than `target` clusters are left.
    let height = merges[n - target - 1].2;
    let mut parents: Vec<usize> = (0..n).collect();
    for &(a, b, _) in merges.iter().take_while(|m| m.2 <= height) {
        let (a, b) = (root(&mut parents, a), root(&mut parents, b));
        parents[a.max(b)] = a.min(b);
    }
    let mut numbers = vec![usize::MAX; n];
    let mut next = 0;
    let mut number = |at: usize| {
        if numbers[at] == usize::MAX {
            numbers[at] = next;
            next += 1;
        }
        numbers[at]
    };
    (0..n).map(|i| number(root(&mut parents, i))).collect()
}

fn root(parents: &mut [usize], mut at: usize) -> usize {
    while parents[at] != at {
        parents[at] = parents[parents[at]];
        at = parents[at];
    }
    at
}

/// Ward's merges of `n` points by nearest neighbour chains: a member of each of the two, and the height. Lance and Williams' formula
/// gives the distances of a merged cluster, which replaces the later one of the two.
fn ward(distances: &mut [f64], n: usize) -> Vec<(usize, usize, f64)> {
    let mut sizes = vec![1usize; n];
    let mut merges = Vec::with_capacity(n.saturating_sub(1));
    let mut chain: Vec<usize> = Vec::with_capacity(n);
    while merges.len() + 1 < n {
        if chain.is_empty() {
            chain.extend(sizes.iter().position(|&s| s > 0));
        }
        let (x, y, height) = loop {
            let x = chain[chain.len() - 1];
            // The one before is preferred, so that a chain ends among equals.
            let before = chain.len().checked_sub(2).map(|i| chain[i]);
            let (mut y, mut least) = match before {
                Some(before) => (before, distances[x * n + before]),
                None => (usize::MAX, f64::INFINITY),
            };
            for i in (0..n).filter(|&i| sizes[i] > 0 && i != x) {
                if distances[x * n + i] < least {
                    (y, least) = (i, distances[x * n + i]);
                }
            }
            if Some(y) == before || y == usize::MAX {
                break (x, y, least);
            }
            chain.push(y);
        };
        if y == usize::MAX {
            // Distances that are no numbers: what is left stays apart, at an infinite height.
            let left: Vec<usize> = (0..n).filter(|&i| sizes[i] > 0).collect();
            merges.extend(left.windows(2).map(|w| (w[0], w[1], f64::INFINITY)));
            break;
        }
        chain.truncate(chain.len() - 2);
        let (x, y) = (x.min(y), x.max(y));
        let (nx, ny) = (sizes[x] as f64, sizes[y] as f64);
        merges.push((x, y, height));
        sizes[y] += sizes[x];
        sizes[x] = 0;
        for i in (0..n).filter(|&i| sizes[i] > 0 && i != y) {
            let ni = sizes[i] as f64;
            let (a, b) = (distances[i * n + x], distances[i * n + y]);
            let square = ((ni + nx) * a * a + (ni + ny) * b * b - ni * height * height) / (nx + ny + ni);
            let d = libm::sqrt(square.max(0.0));
            (distances[i * n + y], distances[y * n + i]) = (d, d);
        }
    }
    merges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points on the unit circle.
    fn circle(angles: &[f64]) -> Vec<f32> {
        angles.iter().flat_map(|&a| [libm::cos(a) as f32, libm::sin(a) as f32]).collect()
    }

    #[test]
    fn like_vectors_become_one() {
        let x = circle(&[3.0, 0.0, 1.5, 0.02, 1.52, 0.01]);
        let pooled = pool(&x, 2, 2, 1, false);
        // The first is kept; 0, 0.02 and 0.01 are one cluster, 1.5 and 1.52 the other.
        assert_eq!(pooled.len(), 6);
        assert_eq!(pooled[..2], x[..2]);
        let mean = |i: &[usize], k: usize| i.iter().map(|&i| x[2 * i + k]).sum::<f32>() / i.len() as f32;
        for (row, members) in [(1, &[1, 3, 5][..]), (2, &[2, 4])] {
            for k in 0..2 {
                assert!((pooled[2 * row + k] - mean(members, k)).abs() < 1e-6);
            }
        }
        let unit = pool(&x, 2, 2, 1, true);
        assert!(unit.chunks(2).all(|v| (v[0] * v[0] + v[1] * v[1] - 1.0).abs() < 1e-6));
    }

    #[test]
    fn few_tokens_and_equal_ones_have_an_end() {
        let x = circle(&[0.1; 7]);
        assert_eq!(pool(&x, 2, 3, 1, false).len(), 4, "equal vectors are one cluster");
        assert_eq!(pool(&x, 2, 1, 1, false), x);
        assert_eq!(pool(&x[..2], 2, 4, 1, false), x[..2]);
        assert_eq!(pool(&x[..4], 2, 4, 1, false), x[..4]);
        assert_eq!(pool(&x[..6], 2, 100, 0, false).len(), 2);
        assert!(pool(&[], 2, 2, 1, false).is_empty());
        // Where no distance is a number all are equally far, as among equal vectors: one cluster.
        let bad = vec![f32::NAN; 10];
        assert_eq!(pool(&bad, 2, 2, 0, false).len(), 2);
    }

    #[test]
    fn what_distances_take() {
        assert_eq!([bytes(7, 2, 1), bytes(7, 1, 1), bytes(2, 2, 1), bytes(0, 2, 1)], [6 * 6 * 8, 0, 0, 0]);
        assert_eq!(bytes(MOST_TOKENS, 2, 0), 2 << 30);
    }
}
