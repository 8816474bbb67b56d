//! Documents of several vectors for the tests of late interaction.

#![allow(dead_code)]

use tercio_data::TokenVectors;
use tercio_data::draw::keyed;
use tercio_data::multi_vectors::TokensInMemory;

/// A number of -1..1 that depends on its key only.
pub fn number(key: &[u64]) -> f32 {
    (keyed(key) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Vectors of length 1 around some centres.
pub fn tokens(seed: u64, count: usize, dimension: usize, centres: u64) -> Vec<f32> {
    let mut all = Vec::with_capacity(count * dimension);
    for t in 0..count as u64 {
        let centre = keyed(&[seed, t, 1]) % centres;
        let row: Vec<f32> =
            (0..dimension as u64).map(|d| number(&[7, centre, d]) + 0.5 * number(&[seed, t, d, 2])).collect();
        let norm = row.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-9);
        all.extend(row.iter().map(|v| v / norm));
    }
    all
}

/// Documents of `lengths` vectors each; the id of document n is `d` and `first + n`.
pub fn documents(
    seed: u64,
    first: usize,
    lengths: &[usize],
    dimension: usize,
    centres: u64,
) -> TokensInMemory {
    let mut all = TokensInMemory::new(dimension);
    for (n, &length) in lengths.iter().enumerate() {
        let of = keyed(&[seed, (first + n) as u64]);
        all.push(&format!("d{}", first + n), &tokens(of, length, dimension, centres)).unwrap();
    }
    all
}

/// All vectors of a document.
pub fn document(vectors: &dyn TokenVectors, n: u64) -> Vec<f32> {
    let mut out = vec![0.0; (vectors.start(n + 1) - vectors.start(n)) as usize * vectors.dimension()];
    vectors.read(vectors.start(n), &mut out).unwrap();
    out
}

/// Lengths of 0 to `most`, different ones.
pub fn lengths(seed: u64, count: usize, most: usize) -> Vec<usize> {
    (0..count as u64).map(|d| (keyed(&[seed, d, 9]) % (most as u64 + 1)) as usize).collect()
}
