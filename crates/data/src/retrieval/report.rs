//! What a file of training data for retrievers holds, and every bad item of it.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::{Relevance, RetrievalExamples};
use crate::check::{Counts, Spread, of};
use crate::error::DataError;

/// What [`check_retrieval`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RetrievalReport {
    /// The file as it was named.
    pub path: String,
    /// SHA-256 of the decompressed content.
    pub fingerprint: String,
    /// Items in the file, good or bad.
    pub items: u64,
    /// Items without a fault, the ones that the counts below are of.
    pub good: u64,
    /// Faults: bad items, and the file's own.
    pub bad: u64,
    /// Positive passages per good item.
    pub positives: Spread,
    /// Hard negatives per good item.
    pub hard_negatives: Spread,
    /// Other negatives per good item.
    pub negatives: Spread,
    /// Passages of which nothing is said, per good item.
    pub unknown: Spread,
    /// Good items with a positive passage: contrastive training can use them.
    pub with_positive: u64,
    /// Good items all of whose passages have a score: distillation can use them.
    pub with_scores: u64,
}

/// Reads a whole file and reports; every fault goes to `on_fault` as it is found, none ends the check.
///
/// # Errors
/// If the file cannot be read at all (not there, empty, damaged compression).
pub fn check_retrieval(
    path: &Path,
    cache_dir: &Path,
    on_fault: &mut dyn FnMut(&DataError),
) -> Result<RetrievalReport, DataError> {
    let examples = RetrievalExamples::open_faulty(path, cache_dir)?;
    let kinds = [Relevance::Positive, Relevance::HardNegative, Relevance::Negative, Relevance::Unknown];
    let mut counts: [Counts; 4] = Default::default();
    let (mut good, mut bad, mut with_positive, mut with_scores) = (0, 0, 0, 0);
    for i in 0..examples.len() {
        let example = match examples.get(i) {
            Ok(example) => example,
            Err(e @ DataError::Item { .. }) => {
                bad += 1;
                on_fault(&e);
                continue;
            }
            // the disk failed or the file changed: what follows would mean nothing
            Err(e) => return Err(e),
        };
        good += 1;
        for (counts, kind) in counts.iter_mut().zip(kinds) {
            counts.add(example.of(kind).count() as u64);
        }
        with_positive += u64::from(example.of(Relevance::Positive).next().is_some());
        with_scores += u64::from(example.scored(usize::MAX).is_ok());
    }
    if let Some(e) = examples.items.fault("examples of retrieval") {
        bad += 1;
        on_fault(&e);
    }
    let [positives, hard_negatives, negatives, unknown] = counts.map(|c| c.spread());
    Ok(RetrievalReport {
        path: path.display().to_string(),
        fingerprint: examples.fingerprint().to_owned(),
        items: examples.len() as u64,
        good,
        bad,
        positives,
        hard_negatives,
        negatives,
        unknown,
        with_positive,
        with_scores,
    })
}

impl fmt::Display for RetrievalReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} items, {} faults", self.path, self.items, self.bad)?;
        writeln!(f, "  content sha256     {}", self.fingerprint)?;
        for (what, spread) in [
            ("positives", &self.positives),
            ("hard negatives", &self.hard_negatives),
            ("other negatives", &self.negatives),
            ("not judged", &self.unknown),
        ] {
            let Spread { min, mean, max } = spread;
            writeln!(f, "  {what:<18} min {min}, mean {mean:.1}, max {max} passages per item")?;
        }
        writeln!(f, "  with a positive    {} (contrastive training)", of(self.with_positive, self.good))?;
        writeln!(f, "  with scores        {} (distillation)", of(self.with_scores, self.good))
    }
}
