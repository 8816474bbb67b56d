//! What retrievers are trained on: questions with passages of which some are known to be positive, negative, or scored.
//!
//! Read item by item in any order, as [`crate::Questions`] is, from four forms (`retrieval/formats.rs`): FiD's JSON with
//! `ctxs`, DPR's JSON, triples as JSON lines, and triples as fields between tabs.

use std::path::Path;

use serde_json::Value;

use crate::draw;
use crate::error::DataError;
use crate::items::Items;
use crate::question::{Passage, Place};
use crate::scan::Layout;
use crate::source;

mod formats;
mod report;
mod run_file;

pub use report::{RetrievalReport, check_retrieval};
pub use run_file::RunFile;

/// Keep these draws apart from others with the same seed.
const POSITIVE_TAG: u64 = 0x706f_7369_7469_7665;
const NEGATIVE_TAG: u64 = 0x6e65_6761_7469_7665;

/// What a file says of a passage's bearing on its question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Relevance {
    /// It answers the question.
    Positive,
    /// It does not, though a retriever found it.
    HardNegative,
    /// It does not.
    Negative,
    /// Nothing; it may have a score.
    Unknown,
}

/// A passage of an example.
#[derive(Clone, Debug, PartialEq)]
pub struct JudgedPassage {
    /// The passage; its score is a reader's or a teacher's, `None` in DPR's files, whose scores are of several kinds.
    pub passage: Passage,
    /// What is known of it.
    pub relevance: Relevance,
}

/// One question with its passages.
#[derive(Clone, Debug, PartialEq)]
pub struct RetrievalExample {
    /// The `id` as the file has it (a string or a number); the row number where there is none.
    pub id: Value,
    /// The question.
    pub question: String,
    /// Accepted answers; may be empty.
    pub answers: Vec<String>,
    /// The passages: of FiD's form best score first if all have a score (as [`crate::Question`] sorts them), else in file
    /// order; of the others positives, then hard negatives, then other negatives.
    pub passages: Vec<JudgedPassage>,
    /// Where it came from.
    pub place: Place,
}

/// How the passages of contrastive training are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContrastiveChoice {
    /// Hard negatives of each question; other negatives stand in where there are too few.
    pub hard_negatives: usize,
    /// Other negatives of each question, beside those.
    pub other_negatives: usize,
    /// Draw the positive passage anew every epoch; else it is the first.
    pub draw_positive: bool,
    /// Draw the negatives anew every epoch; else they are the first ones.
    pub draw_negatives: bool,
}

impl RetrievalExample {
    /// The passages of one kind, in their order.
    pub fn of(&self, relevance: Relevance) -> impl Iterator<Item = &JudgedPassage> {
        self.passages.iter().filter(move |p| p.relevance == relevance)
    }

    /// The first `n` passages with their scores, for distillation: as FiD takes them, best score first.
    ///
    /// # Errors
    /// If there is no passage, or one has no score.
    pub fn scored(&self, n: usize) -> Result<Vec<(&Passage, f64)>, DataError> {
        let first = &self.passages[..self.passages.len().min(n)];
        if first.is_empty() {
            let hint = "distillation needs passages with a reader's scores";
            return Err(self.place.error("a question with passages", "none", hint));
        }
        let all_have = self.passages.iter().all(|p| p.passage.score.is_some());
        first
            .iter()
            .map(|p| match p.passage.score.filter(|_| all_have) {
                Some(score) => Ok((&p.passage, score)),
                None => {
                    let lacking = self.passages.iter().find(|p| p.passage.score.is_none()).unwrap_or(p);
                    let hint = "write scores with `tercio eval reader --write_crossattention_scores`";
                    let found = format!("none in passage {}", lacking.passage.file_position);
                    Err(self.place.error("a `score` on every passage", found, hint))
                }
            })
            .collect()
    }

    /// The passages of contrastive training: the positive one first, then hard negatives, then others. There may be fewer
    /// negatives than asked for. Draws are a function of (seed, epoch, row).
    ///
    /// # Errors
    /// If no passage is positive.
    pub fn contrastive(
        &self,
        choice: &ContrastiveChoice,
        seed: u64,
        epoch: u64,
    ) -> Result<Vec<&Passage>, DataError> {
        let of = |r| self.of(r).map(|p| &p.passage).collect::<Vec<_>>();
        let (positives, mut hard, mut other) =
            (of(Relevance::Positive), of(Relevance::HardNegative), of(Relevance::Negative));
        let row = self.place.row as u64;
        let at = match choice.draw_positive {
            true => draw::index(&[POSITIVE_TAG, seed, epoch, row], positives.len()),
            false => Some(0),
        };
        let Some(&positive) = at.and_then(|at| positives.get(at)) else {
            let hint = "contrastive training needs `positive_ctxs`, `positive`, or `hasanswer` on the passages; leave the \
                        item out, or distil a reader's scores";
            return Err(self.place.error("a positive passage", "none", hint));
        };
        if choice.draw_negatives {
            shuffle(&mut hard, &[NEGATIVE_TAG, seed, epoch, row, 0]);
            shuffle(&mut other, &[NEGATIVE_TAG, seed, epoch, row, 1]);
        }
        hard.truncate(choice.hard_negatives);
        let others = choice.other_negatives.saturating_add(choice.hard_negatives - hard.len());
        other.truncate(others);
        Ok([vec![positive], hard, other].concat())
    }
}

/// Puts a list into an order drawn by key: each element gets a number, and they are sorted by it.
fn shuffle<T: Copy>(list: &mut Vec<T>, key: &[u64]) {
    let mut keyed: Vec<(u64, usize)> =
        (0..list.len()).map(|i| (draw::keyed(&[key, &[i as u64]].concat()), i)).collect();
    keyed.sort_unstable();
    *list = keyed.into_iter().map(|(_, i)| list[i]).collect();
}

/// An open file of examples: `.json` (one list), `.jsonl` or `.tsv`, also `.gz` or `.zst`.
///
/// Shared between threads freely: reading takes no lock and moves no file position.
pub struct RetrievalExamples {
    items: Items,
    rows: bool,
}

impl std::fmt::Debug for RetrievalExamples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RetrievalExamples").field("path", &self.path()).field("len", &self.len()).finish()
    }
}

impl RetrievalExamples {
    /// Opens a file through its index in `cache_dir`, as [`crate::Questions::open`] does.
    ///
    /// # Errors
    /// If the file cannot be read, is empty, holds no items, was cut short, or the cache cannot be written.
    /// A fault inside one item shows when that item is read.
    pub fn open(path: &Path, cache_dir: &Path) -> Result<RetrievalExamples, DataError> {
        let examples = RetrievalExamples::open_faulty(path, cache_dir)?;
        match examples.items.fault("examples of retrieval") {
            Some(fault) => Err(fault),
            None => Ok(examples),
        }
    }

    fn open_faulty(path: &Path, cache_dir: &Path) -> Result<RetrievalExamples, DataError> {
        let what = ".json (one list), .jsonl (one example per line) or .tsv (query, positive, negatives between tabs)";
        let endings = [(".json", Layout::List), (".jsonl", Layout::Lines), (".tsv", Layout::Rows)];
        let kind = source::kind_among(path, &endings, what)?;
        Ok(RetrievalExamples { items: Items::open(path, kind, cache_dir)?, rows: kind.0 == Layout::Rows })
    }

    /// How many examples the file has.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the file has no examples; never so after [`RetrievalExamples::open`].
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file as it was named when opened.
    pub fn path(&self) -> &Path {
        &self.items.path
    }

    /// SHA-256 of the decompressed content, as 64 hexadecimal digits.
    pub fn fingerprint(&self) -> &str {
        self.items.fingerprint()
    }

    /// Reads example `i`.
    ///
    /// # Errors
    /// If `i` is not below `len()`, the file changed since it was opened, or the item is of none of the forms.
    pub fn get(&self, i: usize) -> Result<RetrievalExample, DataError> {
        let (bytes, place) = self.items.bytes(i)?;
        if self.rows { formats::row(&bytes, &place) } else { formats::object(&bytes, &place) }
    }

    /// The bytes of item `i` as the file has them, for comparing files.
    ///
    /// # Errors
    /// As [`RetrievalExamples::get`], but for the item's form.
    pub fn raw(&self, i: usize) -> Result<Vec<u8>, DataError> {
        Ok(self.items.bytes(i)?.0)
    }
}
