//! Folders of vectors for the tests of dense search.

use std::path::Path;

use tercio_data::Vectors;
use tercio_data::draw::keyed;
use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, VectorsFolder};

/// A number of -1..1 that depends on its key only.
pub fn number(key: &[u64]) -> f32 {
    (keyed(key) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// `count` rows of `dimension` numbers around `clusters` centres, one after the other.
pub fn clustered(seed: u64, count: usize, dimension: usize, clusters: u64) -> Vec<f32> {
    let mut rows = Vec::with_capacity(count * dimension);
    for r in 0..count as u64 {
        let centre = keyed(&[seed, r, 1]) % clusters;
        rows.extend((0..dimension as u64).map(|d| number(&[7, centre, d]) + 0.7 * number(&[seed, r, d, 2])));
    }
    rows
}

/// Settings of a set.
pub fn settings(count: usize, dimension: usize, dtype: VectorDtype, per_shard: u64) -> VectorSettings {
    VectorSettings {
        format: FORMAT,
        model: "a model".into(),
        model_fingerprint: Some("12".repeat(32)),
        dimension,
        dtype,
        precision: "f32".into(),
        pooling: "mean".into(),
        normalized: false,
        template: "{text}".into(),
        maxlength: 16,
        batch_tokens: 100,
        batch_texts: 10,
        window: 10,
        source: "passages.tsv".into(),
        source_fingerprint: Some("34".repeat(32)),
        count: count as u64,
        per_shard,
    }
}

/// Writes a set.
pub fn write(dir: &Path, rows: &[f32], settings: VectorSettings) -> Vectors {
    let dimension = settings.dimension;
    let folder = VectorsFolder::open(dir, settings.clone()).unwrap();
    for number in 0..settings.shards() {
        let mut shard = folder.shard(number).unwrap();
        for r in settings.rows_of(number) {
            shard.push(&r.to_string(), &rows[r as usize * dimension..][..dimension]).unwrap();
        }
        shard.finish("f32").unwrap();
    }
    folder.complete().unwrap();
    Vectors::open(dir).unwrap()
}
