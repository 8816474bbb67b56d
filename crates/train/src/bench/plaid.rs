//! Late interaction's index: built, searched one by one and in a batch, and compared with exact MaxSim, on the arrays that
//! `bench/peer_plaid.py --write` makes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use tercio_data::TokenVectors;
use tercio_data::multi_vectors::{TokenArray, whole_numbers};
use tercio_engine::{Cpu, memory};
use tercio_search::Hit;
use tercio_search::manifest::Collection;
use tercio_search::max_sim::MaxSim;
use tercio_search::plaid::{PlaidIndex, PlaidOptions, PlaidSearch};

use super::rounded;
use crate::error::TrainError;
use crate::scratch::ScratchFolder;

/// Results of a query.
const DEPTH: usize = 10;

/// A benchmark's settings.
#[derive(Clone, Debug)]
pub struct PlaidBenchOptions {
    /// Folder of `documents.npy` (documents x tokens x dimension), `queries.npy` (likewise) and `exact_top10.npy` (where it is there).
    pub vectors: PathBuf,
    /// How the index is built.
    pub build: PlaidOptions,
    /// Lists for every token; 0: as a search has it.
    pub probes: usize,
    /// Documents that are scored; 0: as a search has it.
    pub candidates: usize,
    /// How often all queries are asked; the best time counts.
    pub rounds: usize,
    /// Whether exact MaxSim is timed as well; its memory is that of all vectors.
    pub exact: bool,
}

/// What was measured. Names are those of the peer's script where it has them.
#[derive(Clone, Debug, Serialize)]
pub struct PlaidBenchReport {
    /// This program's version.
    pub tercio: &'static str,
    /// Documents.
    pub documents: u64,
    /// Vectors of a document.
    pub tokens: u64,
    /// Bits of a residual's number.
    pub nbits: usize,
    /// Centroids.
    pub centroids: usize,
    /// Threads.
    pub threads: usize,
    /// Seconds of the build, reading the vectors from disk included.
    pub build_seconds: f64,
    /// Bytes of the index's files.
    pub index_bytes: u64,
    /// All queries at once.
    pub queries_per_second_batch: f64,
    /// One by one.
    pub queries_per_second_single: f64,
    /// Share of the exact search's best ten that were found.
    pub recall_at_10: f64,
    /// The same among this program's exact results, where the file of the peer's is not there or they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact: Option<ExactReport>,
    /// Largest resident size while building, 10^6 kB of 1024 bytes as the peer has it.
    pub build_peak_rss_gb: f64,
    /// The same while searching.
    pub search_peak_rss_gb: f64,
    /// Number format and kernels of the device.
    pub arithmetic: String,
}

/// Exact MaxSim.
#[derive(Clone, Debug, Serialize)]
pub struct ExactReport {
    /// All queries at once.
    pub queries_per_second_batch: f64,
    /// One by one.
    pub queries_per_second_single: f64,
    /// Share of the peer's best ten among its results, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agrees_with_peer: Option<f64>,
    /// Largest resident size.
    pub peak_rss_gb: f64,
}

/// Builds an index in a folder that goes again, and asks it.
///
/// # Errors
/// Arrays that are not there or do not go together.
pub fn bench_plaid(device: &Cpu, options: &PlaidBenchOptions) -> Result<PlaidBenchReport, TrainError> {
    let o = options;
    let documents = TokenArray::open(&o.vectors.join("documents.npy"))?;
    let asked = TokenArray::open(&o.vectors.join("queries.npy"))?;
    if asked.dimension() != documents.dimension() {
        let what = format!(
            "{}: vectors of documents have {} numbers, of queries {}",
            o.vectors.display(),
            documents.dimension(),
            asked.dimension()
        );
        return Err(TrainError::Unusable(what));
    }
    let mut values = vec![0.0; asked.tokens() as usize * asked.dimension()];
    asked.read(0, &mut values)?;
    let queries: Vec<&[f32]> = values.chunks((asked.length() as usize * asked.dimension()).max(1)).collect();
    let peers = peers_best(&o.vectors.join("exact_top10.npy"), queries.len())?;
    let folder = ScratchFolder::new()?;
    let dir = folder.path().join("index");
    let collection = Collection { path: o.vectors.clone(), fingerprint: None, count: documents.documents() };
    memory::reset_peak();
    let start = Instant::now();
    let report = PlaidIndex::build(device, &documents, collection, &dir, &o.build, &|| false, &mut |_| {})?;
    let build_seconds = start.elapsed().as_secs_f64();
    let build_peak = peak();
    memory::reset_peak();
    let index = PlaidIndex::open(&dir)?;
    let how = PlaidSearch { depth: DEPTH, probes: o.probes, candidates: o.candidates, only: None };
    let search = |queries: &[&[f32]]| index.search(device, queries, how, &|| false);
    let (batch, single, found) = timed(o.rounds, &queries, |queries| Ok(search(queries)?))?;
    let search_peak = peak();
    let (mut exact, mut want) = (None, peers.clone());
    if o.exact || peers.is_none() {
        memory::reset_peak();
        let all = MaxSim::load(device, &documents, &|| false)?;
        let (batch, single, best) =
            timed(o.rounds, &queries, |queries| Ok(all.search(device, queries, DEPTH, &|| false)?))?;
        let best: Vec<Vec<u64>> = best.iter().map(|hits| hits.iter().map(|hit| hit.row).collect()).collect();
        exact = Some(ExactReport {
            queries_per_second_batch: rounded(queries.len() as f64 / batch, 1),
            queries_per_second_single: rounded(queries.len() as f64 / single, 1),
            agrees_with_peer: peers.map(|peers| rounded(share(&best, &peers), 4)),
            peak_rss_gb: peak(),
        });
        want = want.or(Some(best));
    }
    let found: Vec<Vec<u64>> = found.iter().map(|hits| hits.iter().map(|hit| hit.row).collect()).collect();
    Ok(PlaidBenchReport {
        tercio: env!("CARGO_PKG_VERSION"),
        documents: documents.documents(),
        tokens: documents.length(),
        nbits: report.settings.bits,
        centroids: report.settings.centroids,
        threads: device.threads(),
        build_seconds: rounded(build_seconds, 2),
        index_bytes: report.manifest.bytes(),
        queries_per_second_batch: rounded(queries.len() as f64 / batch, 1),
        queries_per_second_single: rounded(queries.len() as f64 / single, 1),
        recall_at_10: rounded(want.map_or(0.0, |want| share(&found, &want)), 4),
        exact,
        build_peak_rss_gb: build_peak,
        search_peak_rss_gb: search_peak,
        arithmetic: tercio_engine::Device::arithmetic(device),
    })
}

fn peak() -> f64 {
    rounded(memory::peak_resident().map_or(0.0, |b| b as f64 / 1024.0 / 1e6), 2)
}

/// The best times of all queries together and of one after the other, after a round that is not timed; what was found.
fn timed(
    rounds: usize,
    queries: &[&[f32]],
    search: impl Fn(&[&[f32]]) -> Result<Vec<Vec<Hit>>, TrainError>,
) -> Result<(f64, f64, Vec<Vec<Hit>>), TrainError> {
    let (mut batch, mut single) = (f64::INFINITY, f64::INFINITY);
    let mut found = Vec::new();
    for round in 0..=rounds {
        let start = Instant::now();
        found = search(queries)?;
        let all = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for query in queries {
            search(&[query])?;
        }
        let one = start.elapsed().as_secs_f64();
        if round > 0 {
            (batch, single) = (batch.min(all), single.min(one));
        }
    }
    Ok((batch.max(1e-9), single.max(1e-9), found))
}

/// The rows that the peer found, if its file is there.
fn peers_best(path: &Path, queries: usize) -> Result<Option<Vec<Vec<u64>>>, TrainError> {
    if !path.exists() {
        return Ok(None);
    }
    let (shape, rows) = whole_numbers(path)?;
    match shape[..] {
        [count, depth] if count == queries as u64 && depth > 0 => {
            let of = |rows: &[i64]| rows.iter().map(|row| *row as u64).collect();
            Ok(Some(rows.chunks(depth as usize).map(of).collect()))
        }
        _ => Err(TrainError::Unusable(format!(
            "{}: expected the best documents of {queries} queries, found an array of shape {shape:?}",
            path.display()
        ))),
    }
}

/// The share of what was wanted that was found.
fn share(found: &[Vec<u64>], want: &[Vec<u64>]) -> f64 {
    let all: usize = want.iter().map(Vec::len).sum();
    let both =
        found.iter().zip(want).map(|(found, want)| want.iter().filter(|row| found.contains(row)).count());
    both.sum::<usize>() as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, kind: &str, shape: &str, bytes: &[u8]) {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let mut all = b"\x93NUMPY\x01\x00".to_vec();
        all.extend((header.len() as u16).to_le_bytes());
        all.extend(header.as_bytes());
        all.extend(bytes);
        std::fs::write(path, all).unwrap();
    }

    #[test]
    fn the_peers_arrays_are_read_and_what_is_found_is_compared_with_them() {
        let dir = tempfile::tempdir().unwrap();
        let number = |i: u64| tercio_data::draw::keyed(&[i]) as f32 / u64::MAX as f32 - 0.5;
        let numbers = |count: u64| -> Vec<u8> { (0..count).flat_map(|i| number(i).to_le_bytes()).collect() };
        write(&dir.path().join("documents.npy"), "<f4", "(40, 6, 8)", &numbers(40 * 6 * 8));
        // Documents ask for themselves.
        write(&dir.path().join("queries.npy"), "<f4", "(3, 6, 8)", &numbers(3 * 6 * 8));
        let options = PlaidBenchOptions {
            vectors: dir.path().to_owned(),
            build: PlaidOptions { bits: 8, ..PlaidOptions::default() },
            probes: 0,
            candidates: 0,
            rounds: 1,
            exact: false,
        };
        let device = Cpu::new(1).unwrap();
        let alone = bench_plaid(&device, &options).unwrap();
        assert!(alone.recall_at_10 > 0.9 && alone.exact.unwrap().agrees_with_peer.is_none());
        // A peer that found the documents themselves, and nine that are not there.
        let rows: Vec<u8> = (0..3i64)
            .flat_map(|q| (0..10).map(move |i| if i == 0 { q } else { -i }))
            .flat_map(i64::to_le_bytes)
            .collect();
        write(&dir.path().join("exact_top10.npy"), "<i8", "(3, 10)", &rows);
        let found = bench_plaid(&device, &PlaidBenchOptions { exact: true, ..options.clone() }).unwrap();
        assert_eq!((found.recall_at_10, found.exact.unwrap().agrees_with_peer), (0.1, Some(0.1)));
        write(&dir.path().join("exact_top10.npy"), "<i8", "(2, 10)", &rows[..160]);
        assert!(bench_plaid(&device, &options).unwrap_err().to_string().contains("3 queries"));
    }
}
