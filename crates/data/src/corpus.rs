//! Corpora for text classifiers: documents with labels in train, dev and test, and the labels of train.
//!
//! ```text
//! let train = Documents::open(path, cache)?.with_columns(columns)?;      one file or folder, read in any order
//! let corpus = Corpus::new(train, dev, test, &settings, &mut on_fault)?; good lines only; a missing dev or test is cut from train
//! corpus.train.len(), corpus.train.get(i)?                               a document: its text, labels, place
//! corpus.labels.id("sport")                                              the number of a label
//! ```
//!
//! Which documents belong to which part is a pure function of the files and the settings, so it is the same on all ranks and after a
//! restart. Memory is a bit or two a document.

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::index::hex;
use crate::labels::Labels;

mod cut;
mod documents;
mod files;
mod folder;
mod formats;
mod report;
mod rows;
mod split;

use cut::Purpose;
use rows::Rows;

pub use documents::{Document, Documents};
pub use files::CorpusFiles;
pub use formats::{Columns, LABEL_PREFIX};
pub use report::{CorpusReport, LabelCount, check_corpus};
pub use split::{Split, Survey};

/// Share of train that becomes test, and share of the rest that becomes dev, where they are missing: flair's.
pub const MISSING_SHARE: f64 = 0.1;

/// What becomes of documents in dev and test with a label that train does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownLabels {
    /// They are an error, which names the first one.
    #[default]
    Refuse,
    /// They stay and are counted ([`Corpus::unknown`]): no prediction of such a label can be right.
    Count,
}

/// Which parts something is done to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// To train.
    pub train: bool,
    /// To dev.
    pub dev: bool,
    /// To test.
    pub test: bool,
}

/// How a corpus is made of its files.
#[derive(Clone, Debug, PartialEq)]
pub struct CorpusSettings {
    /// Whether a document may have several labels; else one that has is a fault.
    pub multi_label: bool,
    /// Leave faulty documents out instead of ending with the first.
    pub skip_bad: bool,
    /// See [`UnknownLabels`].
    pub unknown_labels: UnknownLabels,
    /// Of cuts and of downsampling.
    pub seed: u64,
    /// Cut a missing dev from train.
    pub cut_dev: bool,
    /// Cut a missing test from train (first; dev is cut from what is left).
    pub cut_test: bool,
    /// Keep this share of the documents, in (0, 1], chosen at random, in their order.
    pub downsample: Option<f64>,
    /// The parts of which only that share is kept.
    pub downsampled: Parts,
    /// Whether cuts and downsampling take the same share of every label (a document's first one), rounded.
    pub stratified: bool,
}

impl Default for CorpusSettings {
    /// One label a document, no fault forgiven, missing parts cut as flair does with seed 0, nothing downsampled.
    fn default() -> CorpusSettings {
        CorpusSettings {
            multi_label: false,
            skip_bad: false,
            unknown_labels: UnknownLabels::Refuse,
            seed: 0,
            cut_dev: true,
            cut_test: true,
            downsample: None,
            downsampled: Parts { train: true, dev: true, test: true },
            stratified: false,
        }
    }
}

/// Documents in train, dev and test, and the labels of train.
#[derive(Debug)]
pub struct Corpus {
    /// What is learnt from; not empty.
    pub train: Split,
    /// What choices rest on; never empty.
    pub dev: Option<Split>,
    /// What is measured at the end; never empty.
    pub test: Option<Split>,
    /// The labels of train, in the order of their first appearance, with their counts there.
    pub labels: Labels,
    /// Faulty documents that were left out, of all files.
    pub bad: u64,
    /// Documents that name a label twice; it counts once.
    pub repeated: u64,
    /// Documents of dev and test with a label that train does not have.
    pub unknown: u64,
}

impl Corpus {
    /// As [`Corpus::new`], of files and folders with one kind of columns.
    ///
    /// # Errors
    /// Likewise, and as [`Documents::open`].
    pub fn open(
        files: &CorpusFiles,
        columns: &Columns,
        settings: &CorpusSettings,
        cache_dir: &Path,
        on_fault: &mut dyn FnMut(&DataError),
    ) -> Result<Corpus, DataError> {
        let open = |path: &PathBuf| Documents::open(path, cache_dir)?.with_columns(columns.clone());
        let (dev, test) = (files.dev.as_ref().map(open), files.test.as_ref().map(open));
        Corpus::new(open(&files.train)?, dev.transpose()?, test.transpose()?, settings, on_fault)
    }

    /// Makes a corpus of open documents, reading all of them once or twice. Faults that are left out go to `on_fault` as they are found.
    ///
    /// # Errors
    /// A faulty document (unless `skip_bad`); a label of dev or test that train does not have (unless it is to be counted); a
    /// train without documents, or with one label where each document has one; a share that is none; files that cannot be read.
    pub fn new(
        train: Documents,
        dev: Option<Documents>,
        test: Option<Documents>,
        settings: &CorpusSettings,
        on_fault: &mut dyn FnMut(&DataError),
    ) -> Result<Corpus, DataError> {
        if let Some(share) = settings.downsample.filter(|share| !(*share > 0.0 && *share <= 1.0)) {
            return Err(DataError::Setting(format!(
                "--downsample {share}: expected a share of the documents above 0, at most 1"
            )));
        }
        let mut survey =
            |documents| Split::survey(documents, settings.multi_label, settings.skip_bad, on_fault);
        let train = survey(train)?;
        let (dev, test) = (dev.map(&mut survey).transpose()?, test.map(&mut survey).transpose()?);
        let parts = [Some(&train), dev.as_ref(), test.as_ref()];
        let sum = |of: fn(&Survey) -> u64| parts.into_iter().flatten().map(of).sum();
        let (bad, repeated) = (sum(|s| s.bad), sum(|s| s.repeated));

        let (surveyed, all_labels) = (train.split.len(), train.labels);
        let [mut train, dev, test] = [Some(train.split), dev.map(|s| s.split), test.map(|s| s.split)];
        let mut part =
            |missing: Option<Split>, cut: bool, purpose: Purpose| -> Result<Option<Split>, DataError> {
                match (&mut train, missing) {
                    (_, Some(given)) => Ok(Some(given)),
                    (Some(train), None) if cut => {
                        let chosen = train.choose(MISSING_SHARE, settings, purpose)?;
                        Ok(Some(train.cut_off(chosen)))
                    }
                    _ => Ok(None),
                }
            };
        let test = part(test, settings.cut_test, Purpose::Test)?;
        let dev = part(dev, settings.cut_dev, Purpose::Dev)?;
        let mut kept = [train, dev, test];
        let of = settings.downsampled;
        let purposes = [Purpose::KeepTrain, Purpose::KeepDev, Purpose::KeepTest];
        for ((split, wanted), purpose) in kept.iter_mut().zip([of.train, of.dev, of.test]).zip(purposes) {
            if let (Some(split), Some(share)) = (split.as_mut(), settings.downsample.filter(|_| wanted)) {
                let chosen = split.choose(share, settings, purpose)?;
                split.rows = chosen;
            }
        }
        let [train, dev, test] = kept.map(|split| split.filter(|s| !s.is_empty()));
        let Some(train) = train else {
            return Err(DataError::Setting(format!(
                "no document is left to learn from, of {surveyed} good ones; give a larger train file or a larger --downsample"
            )));
        };
        let labels = if train.len() == surveyed { all_labels } else { train.labels()? };
        if labels.len() < 2 && !settings.multi_label {
            return Err(DataError::file(
                train.documents().path(),
                format!(
                    "expected documents of two labels or more, found only {:?} in {} documents to learn from; with --multi_label one label is enough",
                    labels.names().first().map_or("", String::as_str),
                    train.len()
                ),
            ));
        }
        let mut corpus = Corpus { train, dev, test, labels, bad, repeated, unknown: 0 };
        for part in [&corpus.dev, &corpus.test].into_iter().flatten() {
            corpus.unknown += part.unknown(&corpus.labels, settings.unknown_labels)?;
        }
        Ok(corpus)
    }

    /// SHA-256 of everything that decides what is learnt and measured: contents of the files, which documents are in which part, labels and
    /// their counts; 64 hexadecimal digits. Ranks with the same have the same corpus.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        for part in [Some(&self.train), self.dev.as_ref(), self.test.as_ref()] {
            sum.update([u8::from(part.is_some())]);
            if let Some(split) = part {
                sum.update(split.documents().fingerprint());
                split.rows.words().for_each(|word| sum.update(word.to_le_bytes()));
            }
        }
        sum.update(self.labels.fingerprint());
        self.labels.counts().iter().for_each(|count| sum.update(count.to_le_bytes()));
        hex(&sum.finalize())
    }
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |split: &Option<Split>| split.as_ref().map_or("no".into(), |s| s.len().to_string());
        write!(
            f,
            "{} documents in train, {} in dev, {} in test; {} labels",
            self.train.len(),
            count(&self.dev),
            count(&self.test),
            self.labels.len()
        )?;
        let most = self.labels.names().iter().zip(self.labels.counts()).take(20);
        let listed: Vec<String> = most.map(|(name, count)| format!("{name} {count}")).collect();
        let more = if self.labels.len() > listed.len() { ", ..." } else { "" };
        write!(f, " ({}{more})", listed.join(", "))?;
        for (count, what) in [
            (self.bad, "faulty documents are left out"),
            (self.repeated, "documents name a label twice, it counts once"),
            (self.unknown, "documents of dev and test have a label that train does not have"),
        ] {
            if count > 0 {
                write!(f, "; {count} {what}")?;
            }
        }
        Ok(())
    }
}
