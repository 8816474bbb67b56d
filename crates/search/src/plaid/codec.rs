//! Learning the buckets of residuals, and their file.

use std::fs;
use std::path::Path;

use tercio_engine::cpu::late::Buckets;

use crate::error::SearchError;
use crate::manifest::{FileEntry, IndexFolder};

/// Rounds of Lloyd's method.
const ROUNDS: usize = 50;

/// Buckets of the numbers of some residuals. They begin as PLAID has them (Santhanam et al. 2022): cut-offs are the quantiles i / 2^bits,
/// weights the quantiles (i + 1/2) / 2^bits. Then Lloyd's method ("Least squares quantization in PCM", 1982) moves them to where the mean square
/// of what is lost is least: a cut-off halfway between weights, a weight in the mean of its bucket. That finds more at as many bits.
///
/// # Errors
/// Bits other than 1, 2, 4 or 8.
pub(super) fn learn(bits: usize, mut numbers: Vec<f32>) -> Result<Buckets, SearchError> {
    check_bits(bits)?;
    let count = 1usize << bits;
    numbers.sort_unstable_by(f32::total_cmp);
    if numbers.is_empty() {
        numbers.push(0.0);
    }
    let n = numbers.len();
    let quantile = |share: f64| numbers[((share * n as f64) as usize).min(n - 1)];
    let mut weights: Vec<f32> = (0..count).map(|i| quantile((i as f64 + 0.5) / count as f64)).collect();
    let mut cutoffs: Vec<f32> = (1..count).map(|i| quantile(i as f64 / count as f64)).collect();
    let mut sums = vec![0f64];
    sums.extend(numbers.iter().scan(0f64, |sum, v| {
        *sum += f64::from(*v);
        Some(*sum)
    }));
    for _ in 0..ROUNDS {
        // What is above a cut-off is beyond it, as `Buckets` counts.
        let place = |cutoff: &f32| numbers.partition_point(|v| v <= cutoff);
        let ends: Vec<usize> = [0].into_iter().chain(cutoffs.iter().map(place)).chain([n]).collect();
        for (weight, ends) in weights.iter_mut().zip(ends.windows(2)) {
            if ends[1] > ends[0] {
                *weight = ((sums[ends[1]] - sums[ends[0]]) / (ends[1] - ends[0]) as f64) as f32;
            }
        }
        // The weight of an empty bucket stays; it may lie beyond its neighbours' by now.
        weights.sort_unstable_by(f32::total_cmp);
        let moved: Vec<f32> = weights.windows(2).map(|pair| pair[0] + (pair[1] - pair[0]) / 2.0).collect();
        if moved == cutoffs {
            break;
        }
        cutoffs = moved;
    }
    Buckets::new(bits, cutoffs, weights)
        .ok_or_else(|| SearchError::Unusable("the vectors' residuals are beyond the range of f32".into()))
}

/// Refuses a number of bits that a byte does not hold a whole number of.
pub(super) fn check_bits(bits: usize) -> Result<(), SearchError> {
    match [1, 2, 4, 8].contains(&bits) {
        true => Ok(()),
        false => Err(SearchError::Unusable(format!("{bits} bits of a number: expected 1, 2, 4 or 8"))),
    }
}

/// Writes cut-offs, then weights.
pub(super) fn write(folder: &IndexFolder, buckets: &Buckets) -> Result<FileEntry, SearchError> {
    let mut file = folder.create("buckets")?;
    for v in buckets.cutoffs().iter().chain(buckets.weights()) {
        file.write(&v.to_le_bytes())?;
    }
    file.finish()
}

/// Reads them.
///
/// # Errors
/// A file that holds something else.
pub(super) fn read(path: &Path, bits: usize) -> Result<Buckets, SearchError> {
    check_bits(bits)?;
    let bytes = fs::read(path).map_err(SearchError::io(path, "read the file of an index"))?;
    let numbers: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let cutoffs = (1usize << bits) - 1;
    let whole = bytes.len() == (2 * cutoffs + 1) * 4;
    whole.then(|| Buckets::new(bits, numbers[..cutoffs].to_vec(), numbers[cutoffs..].to_vec())).flatten().ok_or_else(
        || {
            let what = format!(
                "expected {cutoffs} ascending cut-offs and {} weights, found {} bytes of something else; index again",
                cutoffs + 1,
                bytes.len()
            );
            SearchError::file(path, what)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_lose_less_than_quantiles_do() {
        // A bell: sums of draws.
        let draw = |i: u64, k: u64| (tercio_data::draw::keyed(&[i, k]) >> 40) as f32 / (1 << 24) as f32 - 0.5;
        let numbers: Vec<f32> = (0..20_000).map(|i| (0..6).map(|k| draw(i, k)).sum()).collect();
        let lost = |cutoffs: &[f32], weights: &[f32]| -> f64 {
            let of = |v: &f32| f64::from(v - weights[cutoffs.iter().filter(|c| v > c).count()]).powi(2);
            numbers.iter().map(of).sum::<f64>()
        };
        let mut sorted = numbers.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        for bits in [1, 2, 4, 8] {
            let count = 1 << bits;
            let quantile = |share: f64| sorted[(share * 20_000.0) as usize];
            let cutoffs: Vec<f32> = (1..count).map(|i| quantile(f64::from(i) / f64::from(count))).collect();
            let weights: Vec<f32> =
                (0..count).map(|i| quantile((f64::from(i) + 0.5) / f64::from(count))).collect();
            let learnt = learn(bits as usize, numbers.clone()).unwrap();
            let (ours, plain) = (lost(learnt.cutoffs(), learnt.weights()), lost(&cutoffs, &weights));
            // In one bit a normal distribution loses .363 of its variance at best, .378 at its quantiles; more bits gain more.
            assert!(ours < 0.97 * plain, "{bits}: {ours} {plain}");
        }
        assert!(learn(3, numbers).unwrap_err().to_string().contains("1, 2, 4 or 8"));
    }

    #[test]
    fn few_or_equal_numbers_are_no_trouble() {
        for numbers in [vec![], vec![0.25], vec![0.5; 100], vec![-1.0, 1.0]] {
            for bits in [1, 2, 4, 8] {
                let buckets = learn(bits, numbers.clone()).unwrap();
                for v in &numbers {
                    let bucket = buckets.cutoffs().iter().filter(|c| *v > **c).count();
                    assert!((buckets.weights()[bucket] - v).abs() < 1e-6, "{numbers:?} {bits}");
                }
            }
        }
    }
}
