//! What a file of documents with labels holds, and every faulty one.

use std::fmt;

use serde::Serialize;

use super::documents::is_of_item;
use super::split::judged;
use super::{Columns, Documents};
use crate::check::{Counts, Spread, of};
use crate::error::DataError;
use crate::labels::Labels;

/// Labels that the text of a report lists.
const LISTED: usize = 30;

/// How often a label occurs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LabelCount {
    /// Its name.
    pub label: String,
    /// Good documents that have it.
    pub documents: u64,
}

/// What [`check_corpus`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CorpusReport {
    /// The file or folder as it was named.
    pub path: String,
    /// SHA-256 of the decompressed content.
    pub fingerprint: String,
    /// Documents, good or faulty.
    pub documents: u64,
    /// Those without a fault, the ones that the counts below are of.
    pub good: u64,
    /// Faulty ones.
    pub bad: u64,
    /// Good documents with several labels: a classifier of theirs needs `--multi_label`.
    pub several: u64,
    /// Good documents that name a label twice; it counts once.
    pub repeated: u64,
    /// Characters of a text.
    pub characters: Spread,
    /// The labels, in the order of their first appearance.
    pub labels: Vec<LabelCount>,
}

/// Reads all documents and reports; every fault goes to `on_fault` as it is found, none ends the check. A document is good if it has a text and
/// at least one label.
///
/// # Errors
/// Columns that are not there; a file that cannot be read.
pub fn check_corpus(
    documents: Documents,
    columns: Columns,
    on_fault: &mut dyn FnMut(&DataError),
) -> Result<CorpusReport, DataError> {
    let documents = documents.with_columns(columns)?;
    let (mut labels, mut characters) = (Labels::new(), Counts::default());
    let (mut good, mut bad, mut several, mut repeated) = (0, 0, 0, 0);
    documents.each(&mut |_, document| {
        let document = match document.and_then(|document| judged(document, true)) {
            Ok(document) => document,
            Err(e) if is_of_item(&e) => {
                bad += 1;
                on_fault(&e);
                return Ok(());
            }
            // the disk failed or the file changed: what follows would mean nothing
            Err(e) => return Err(e),
        };
        good += 1;
        several += u64::from(document.labels.len() > 1);
        repeated += u64::from(document.repeated > 0);
        characters.add(document.text.chars().count() as u64);
        document.labels.iter().try_for_each(|label| labels.count(label).map(drop))
    })?;
    let counted = labels.names().iter().zip(labels.counts());
    Ok(CorpusReport {
        path: documents.path().display().to_string(),
        fingerprint: documents.fingerprint().to_owned(),
        documents: documents.len() as u64,
        good,
        bad,
        several,
        repeated,
        characters: characters.spread(),
        labels: counted.map(|(label, &documents)| LabelCount { label: label.clone(), documents }).collect(),
    })
}

impl fmt::Display for CorpusReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} documents, {} faults", self.path, self.documents, self.bad)?;
        writeln!(f, "  content sha256     {}", self.fingerprint)?;
        let Spread { min, mean, max } = self.characters;
        writeln!(f, "  characters         min {min}, mean {mean:.1}, max {max} per text")?;
        writeln!(f, "  several labels     {}", of(self.several, self.good))?;
        if self.repeated > 0 {
            writeln!(f, "  note: {} documents name a label twice, it counts once", self.repeated)?;
        }
        let mut most: Vec<&LabelCount> = self.labels.iter().collect();
        most.sort_by_key(|l| std::cmp::Reverse(l.documents)); // stable
        let share = |n: u64| 100.0 * n as f64 / self.good.max(1) as f64;
        writeln!(f, "  labels             {}", self.labels.len())?;
        for l in most.iter().take(LISTED) {
            let name = l.label.replace(|c: char| c.is_control(), " ");
            writeln!(f, "  {:>8}  {:>5.1} %  {name}", l.documents, share(l.documents))?;
        }
        match most.len().saturating_sub(LISTED) {
            0 => Ok(()),
            more => writeln!(f, "  and {more} more"),
        }
    }
}
