//! `tercio data check`: what a questions file holds, how it fits a reader's settings, and every bad item.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::question::{Question, Scores};
use crate::questions::Questions;
use crate::reader::ReaderEncoding;
use crate::tokenizer::Tokenizer;

/// Smallest, mean and largest of a count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Smallest.
    pub min: u64,
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: u64,
}

/// Distribution of lengths in tokens, before anything is cut.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Lengths {
    /// How many sequences.
    pub sequences: u64,
    /// Mean length.
    pub mean: f64,
    /// Median (smallest length that half of the sequences do not exceed).
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Longest.
    pub max: u64,
    /// Share of sequences longer than the limit, in 0..=1.
    pub truncated_share: f64,
}

/// What the encoder and the decoder would get.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenReport {
    /// The settings that were applied.
    pub encoding: ReaderEncoding,
    /// Encoder sequences ("question + title + passage"), `</s>` counted where it is added.
    pub passages: Lengths,
    /// Targets and answers (each of them), with `</s>`; `None` if the file has none.
    pub targets: Option<Lengths>,
    /// Encoder tokens after truncation.
    pub tokens: u64,
    /// Share of padding if every sequence were padded to `text_maxlength`, in 0..=1.
    pub padding_share: f64,
}

/// What [`check`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
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
    /// Passages per good item.
    pub ctxs: Spread,
    /// Good items without passages.
    pub without_ctxs: u64,
    /// Good items with fewer passages than `n_context`.
    pub fewer_ctxs_than_n_context: u64,
    /// Good items with a `target`.
    pub with_target: u64,
    /// Good items with a non-empty list of answers.
    pub with_answers: u64,
    /// Good items with neither: they can be answered, not trained on or scored.
    pub without_target_and_answers: u64,
    /// Good items all of whose passages have a score.
    pub with_scores: u64,
    /// Good items some but not all of whose passages have a score; they keep their file order.
    pub with_some_scores: u64,
    /// Passages without a title.
    pub passages_without_title: u64,
    /// Good items whose id appeared before in the file.
    pub duplicate_ids: u64,
    /// Lengths in tokens, if a tokenizer was given.
    pub tokens: Option<TokenReport>,
}

/// Reads a whole file and reports; every fault goes to `on_fault` as it is found, none ends the check.
///
/// `cache_dir` is where the index goes, see [`Questions::open`]. Memory grows by 8 bytes an item, to find ids used twice.
///
/// # Errors
/// If the file cannot be read at all (not there, empty, damaged compression), or the settings make no sense.
pub fn check(
    path: &Path,
    cache_dir: &Path,
    tokenizer: Option<&Tokenizer>,
    encoding: &ReaderEncoding,
    on_fault: &mut dyn FnMut(&DataError),
) -> Result<CheckReport, DataError> {
    encoding.validate()?;
    let questions = Questions::open_faulty(path, cache_dir)?;
    let mut report = CheckReport {
        path: path.display().to_string(),
        fingerprint: questions.fingerprint().to_string(),
        items: questions.len() as u64,
        good: 0,
        bad: 0,
        ctxs: Spread::default(),
        without_ctxs: 0,
        fewer_ctxs_than_n_context: 0,
        with_target: 0,
        with_answers: 0,
        without_target_and_answers: 0,
        with_scores: 0,
        with_some_scores: 0,
        passages_without_title: 0,
        duplicate_ids: 0,
        tokens: None,
    };
    let mut ids = Vec::new();
    let mut ctxs = Counts::default();
    let mut passages = Counts::default();
    let mut targets = Counts::default();
    let mut fault = |e: &DataError| {
        report.bad += 1;
        on_fault(e);
    };
    for i in 0..questions.len() {
        let question = match questions.get(i) {
            Ok(question) => question,
            Err(e @ DataError::Item { .. }) => {
                fault(&e);
                continue;
            }
            // the disk failed or the file changed: what follows would mean nothing
            Err(e) => return Err(e),
        };
        if let Some(tokenizer) = tokenizer
            && let Err(e) = count_tokens(&question, tokenizer, encoding, &mut passages, &mut targets)
        {
            fault(&e);
            continue;
        }
        ids.push(id_hash(&question));
        let n = question.ctxs.len() as u64;
        ctxs.add(n);
        report.without_ctxs += u64::from(n == 0);
        report.fewer_ctxs_than_n_context += u64::from(n < encoding.n_context as u64);
        report.with_target += u64::from(question.target.is_some());
        report.with_answers += u64::from(!question.answers.is_empty());
        report.without_target_and_answers +=
            u64::from(question.target.is_none() && question.answers.is_empty());
        report.with_scores += u64::from(question.scores() == Scores::All);
        report.with_some_scores += u64::from(question.scores() == Scores::Some);
        report.passages_without_title += question.ctxs.iter().filter(|c| c.title.is_empty()).count() as u64;
    }
    if let Some(e) = questions.fault() {
        fault(&e);
    }
    report.good = ids.len() as u64;
    ids.sort_unstable();
    report.duplicate_ids = ids.windows(2).filter(|w| w[0] == w[1]).count() as u64;
    report.ctxs = ctxs.spread();
    if tokenizer.is_some() {
        let limit = encoding.text_maxlength as u64;
        let tokens = passages.sum_capped(limit);
        let places = passages.count().saturating_mul(limit);
        let target_limit = encoding.answer_maxlength.filter(|&n| n > 0).map_or(u64::MAX, |n| n as u64);
        report.tokens = Some(TokenReport {
            encoding: *encoding,
            passages: passages.lengths(limit),
            targets: (targets.count() > 0).then(|| targets.lengths(target_limit)),
            tokens,
            padding_share: if places == 0 { 0.0 } else { 1.0 - tokens as f64 / places as f64 },
        });
    }
    Ok(report)
}

/// Adds a question's lengths only once all of its texts were encoded.
fn count_tokens(
    question: &Question,
    tokenizer: &Tokenizer,
    encoding: &ReaderEncoding,
    passages: &mut Counts,
    targets: &mut Counts,
) -> Result<(), DataError> {
    let mut lengths = Vec::new();
    encoding.encode_counting(question, tokenizer, &mut |n| lengths.push(n as u64))?;
    let mut target_lengths = Vec::new();
    for text in question.target.iter().chain(&question.answers) {
        let ids = tokenizer
            .encode(text)
            .map_err(|e| question.place.error("an answer that can be tokenized", e.to_string(), ""))?;
        target_lengths.push(ids.len() as u64 + 1);
    }
    lengths.into_iter().for_each(|n| passages.add(n));
    target_lengths.into_iter().for_each(|n| targets.add(n));
    Ok(())
}

/// 64 bits of an id's hash: two different ids of one file agree by chance practically never.
fn id_hash(question: &Question) -> u64 {
    let digest = Sha256::digest(question.id.to_string().as_bytes());
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

/// How often each number occurred: exact percentiles in memory that grows with different numbers only.
#[derive(Default)]
pub(crate) struct Counts(BTreeMap<u64, u64>);

impl Counts {
    pub fn add(&mut self, n: u64) {
        *self.0.entry(n).or_default() += 1;
    }

    fn count(&self) -> u64 {
        self.0.values().sum()
    }

    fn sum_capped(&self, cap: u64) -> u64 {
        self.0.iter().map(|(n, times)| n.min(&cap) * times).sum()
    }

    fn mean(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.sum_capped(u64::MAX) as f64 / self.count() as f64 }
    }

    fn percentile(&self, percent: u64) -> u64 {
        let rank = (self.count() * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (n, times) in &self.0 {
            seen += times;
            if seen >= rank {
                return *n;
            }
        }
        0
    }

    fn max(&self) -> u64 {
        self.0.keys().next_back().copied().unwrap_or(0)
    }

    pub fn spread(&self) -> Spread {
        Spread { min: self.0.keys().next().copied().unwrap_or(0), mean: self.mean(), max: self.max() }
    }

    fn lengths(&self, limit: u64) -> Lengths {
        let sequences = self.count();
        let longer: u64 = self.0.iter().filter(|(n, _)| **n > limit).map(|(_, times)| times).sum();
        Lengths {
            sequences,
            mean: self.mean(),
            p50: self.percentile(50),
            p90: self.percentile(90),
            p99: self.percentile(99),
            max: self.max(),
            truncated_share: if sequences == 0 { 0.0 } else { longer as f64 / sequences as f64 },
        }
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let good = self.good;
        writeln!(f, "{}: {} items, {} faults", self.path, self.items, self.bad)?;
        writeln!(f, "  content sha256     {}", self.fingerprint)?;
        writeln!(
            f,
            "  passages per item  min {}, mean {:.1}, max {}",
            self.ctxs.min, self.ctxs.mean, self.ctxs.max
        )?;
        writeln!(f, "  with target        {}", of(self.with_target, good))?;
        writeln!(f, "  with answers       {}", of(self.with_answers, good))?;
        writeln!(f, "  with scores        {}", of(self.with_scores, good))?;
        for (count, what) in [
            (
                self.without_target_and_answers,
                "items have neither target nor answers: they can be answered, not trained on or scored",
            ),
            (self.without_ctxs, "items have no passages: the bare question is read"),
            (
                self.fewer_ctxs_than_n_context,
                "items have fewer passages than n_context: all they have are read",
            ),
            (self.with_some_scores, "items have a score on some passages only: they keep their file order"),
            (self.passages_without_title, "passages have no title"),
            (self.duplicate_ids, "items repeat an id"),
        ] {
            if count > 0 {
                writeln!(f, "  note: {count} {what}")?;
            }
        }
        let Some(tokens) = &self.tokens else { return Ok(()) };
        write_lengths(f, "passage tokens", &tokens.passages)?;
        if let Some(targets) = &tokens.targets {
            write_lengths(f, "answer tokens", targets)?;
        }
        writeln!(
            f,
            "  encoder tokens     {} (at most {} a passage, {} passages)",
            tokens.tokens, tokens.encoding.text_maxlength, tokens.encoding.n_context
        )?;
        writeln!(f, "  padding saved      {:.1} % of a padded system's places", 100.0 * tokens.padding_share)
    }
}

pub(crate) fn of(part: u64, whole: u64) -> String {
    if part == whole { "all".into() } else { format!("{part} of {whole}") }
}

fn write_lengths(f: &mut fmt::Formatter<'_>, what: &str, lengths: &Lengths) -> fmt::Result {
    let Lengths { mean, p50, p90, p99, max, truncated_share, .. } = lengths;
    writeln!(
        f,
        "  {what:<18} mean {mean:.1}, median {p50}, 90 % {p90}, 99 % {p99}, max {max}; {:.1} % are cut",
        100.0 * truncated_share
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact() {
        let mut counts = Counts::default();
        (1..=200).for_each(|n| counts.add(n));
        let lengths = counts.lengths(150);
        assert_eq!((lengths.p50, lengths.p90, lengths.p99, lengths.max), (100, 180, 198, 200));
        assert_eq!((lengths.mean, lengths.truncated_share), (100.5, 0.25));
        assert_eq!(counts.sum_capped(2), 399);
        assert_eq!(Counts::default().lengths(1).p99, 0);
    }
}
