//! What an index finds of what an exact search finds, measured when it is built.

use std::collections::HashSet;

use tercio_data::Vectors;
use tercio_engine::Cpu;

use super::build::{CompressedOptions, pick, spread};
use super::{CompressedIndex, CompressedSearch, Recall};
use crate::error::SearchError;
use crate::flat::{FlatIndex, Metric};
use crate::top::Hit;

/// Held rows that recall is measured with, where no queries are given.
const HELD: usize = 200;
/// Keeps these draws apart from others with the same seed.
const HOLD: u64 = 0x686f_6c64;

/// Measures recall against the exact search, and sets how many lists a query looks into: as few of those measured as give 95 of
/// 100 at the best ten with re-scoring, or the most that were measured.
pub(super) fn measure(
    cpu: &Cpu,
    vectors: &Vectors,
    index: &mut CompressedIndex,
    options: &CompressedOptions,
    drawn: &[usize],
    stop: &dyn Fn() -> bool,
) -> Result<(), SearchError> {
    let rows = vectors.len() as usize;
    let in_sample: HashSet<usize> = drawn.iter().copied().collect();
    let (queries, own) = match &options.queries {
        Some(queries) => (queries.clone(), Vec::new()),
        None => {
            let mut held = spread(options.seed, HOLD, rows, HELD.min(rows));
            if rows >= 2 * (drawn.len() + HELD) {
                held.retain(|row| !in_sample.contains(row));
            }
            (pick(vectors, Metric::Inner, &held)?, held)
        }
    };
    let is_own = |q: usize, hit: &Hit| own.get(q).is_some_and(|&row| row as u64 == hit.row);
    // One more than asked for, where a row finds itself.
    let more = usize::from(!own.is_empty());
    let depths = [10, 100];
    let flat = FlatIndex::of(Vectors::open(vectors.dir())?, index.settings.metric);
    let exact = flat.search(cpu, &queries, depths[1] + more, stop, &mut |_| {})?;
    let lists = index.settings.lists;
    let mut chosen = None;
    for share in [128, 64, 32, 16, 8] {
        let probes = lists.div_ceil(share);
        for rescore in [0, 200] {
            let how = CompressedSearch { depth: depths[1] + more, probes, rescore };
            let found = index.search(cpu, &queries, how, stop)?;
            for depth in depths {
                let (mut hits, mut all) = (0usize, 0usize);
                for (q, (exact, found)) in exact.iter().zip(&found).enumerate() {
                    let first = |hits: &[Hit]| -> HashSet<u64> {
                        hits.iter().filter(|h| !is_own(q, h)).take(depth).map(|h| h.row).collect()
                    };
                    let (exact, found) = (first(exact), first(found));
                    all += exact.len();
                    hits += exact.intersection(&found).count();
                }
                let recall = if all == 0 { 1.0 } else { hits as f64 / all as f64 };
                index.settings.recall.push(Recall { depth, probes, rescore, recall });
                if depth == depths[0] && rescore > 0 && recall >= 0.95 && chosen.is_none() {
                    chosen = Some(probes);
                }
            }
        }
    }
    index.settings.probes = chosen.unwrap_or(lists.div_ceil(8));
    index.settings.recall_queries = match own.len() {
        0 => "given queries".into(),
        n => format!("{n} rows of the vectors"),
    };
    Ok(())
}
