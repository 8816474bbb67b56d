//! Precision, recall, F1, accuracy, confusion and calibration of classifiers, from gold and predicted labels alone.
//!
//! A [`ClassificationTally`] counts; all its counts are whole numbers, so parts that several ranks counted add up to the same whole
//! in any order. A [`ClassificationReport`] is what follows from the counts.
//!
//! The rules are flair's, which are scikit-learn's with `zero_division=0`:
//!
//! - a label takes part if a document has it or it was predicted; labels come by how often that is, most frequent first, of equal ones in
//!   the order of the classifier's;
//! - precision tp / predicted, recall tp / gold, F1 2 tp / (predicted + gold); each is 0 where it would divide by 0;
//! - micro: of the sums of all labels; macro: the mean over labels; weighted: the mean weighted by gold documents; samples (where a document
//!   has several labels): the mean over documents;
//! - accuracy: the share of documents whose predicted labels are exactly the gold ones, none and none included;
//! - without any label everything is 0.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::labels::Labels;

mod calibration;
mod confusion;
mod text;

pub use calibration::{Calibration, CalibrationReport, ReliabilityBin};
pub use confusion::{Confused, Confusion};

/// Stands for "no label" in the confusion matrix.
const NONE: u32 = u32::MAX;

/// Counts of gold and predicted labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassificationTally {
    /// The classifier's labels, then those of documents that it does not know.
    labels: Labels,
    known: usize,
    /// Of each label.
    counts: Vec<Counts>,
    documents: u64,
    /// Documents whose labels are exactly the predicted ones.
    exact: u64,
    /// Documents with a label that the classifier does not know.
    unknown: u64,
    /// Whether a document has several labels, gold or predicted.
    several: bool,
    /// Documents by (hits, gold, predicted): what the mean over documents needs.
    shapes: BTreeMap<(u32, u32, u32), u64>,
    /// Documents by (gold, predicted), as long as none has several.
    pairs: BTreeMap<(u32, u32), u64>,
    calibration: Calibration,
}

/// Counts of a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counts {
    hits: u64,
    gold: u64,
    predicted: u64,
}

/// A tally as it goes from rank to rank.
#[derive(Serialize, Deserialize)]
struct Sent {
    names: Vec<String>,
    known: usize,
    counts: Vec<Counts>,
    documents: u64,
    exact: u64,
    unknown: u64,
    several: bool,
    shapes: Vec<((u32, u32, u32), u64)>,
    pairs: Vec<((u32, u32), u64)>,
    calibration: Calibration,
}

impl ClassificationTally {
    /// No documents yet, of a classifier with these labels.
    pub fn new(labels: &Labels) -> ClassificationTally {
        let known = labels.len();
        ClassificationTally {
            labels: labels.clone(),
            known,
            counts: vec![Counts::default(); known],
            ..ClassificationTally::default()
        }
    }

    /// Counts a document: its labels, each once, known or not, and the numbers of the predicted ones, each once and known.
    ///
    /// # Errors
    /// More labels than [`crate::labels::MOST_LABELS`]; a predicted number that the classifier does not have.
    pub fn add(&mut self, gold: &[String], predicted: &[u32]) -> Result<(), DataError> {
        if let Some(id) = predicted.iter().find(|&&id| id as usize >= self.known) {
            return Err(DataError::Setting(format!("label {id} of {} was predicted", self.known)));
        }
        let gold = gold.iter().map(|name| self.labels.count(name)).collect::<Result<Vec<u32>, _>>()?;
        self.counts.resize(self.labels.len(), Counts::default());
        let mut hits = 0;
        for &id in &gold {
            let hit = predicted.contains(&id);
            hits += u32::from(hit);
            self.counts[id as usize].gold += 1;
            self.counts[id as usize].hits += u64::from(hit);
        }
        predicted.iter().for_each(|&id| self.counts[id as usize].predicted += 1);
        let (g, p) = (gold.len() as u32, predicted.len() as u32);
        self.documents += 1;
        self.exact += u64::from(hits == g && hits == p);
        self.unknown += u64::from(gold.iter().any(|&id| id as usize >= self.known));
        *self.shapes.entry((hits, g, p)).or_default() += 1;
        self.several |= g > 1 || p > 1;
        if self.several {
            // A document with several labels has no place in a matrix of pairs, and a matrix of the others would mislead.
            self.pairs.clear();
        } else {
            let one = |ids: &[u32]| ids.first().copied().unwrap_or(NONE);
            *self.pairs.entry((one(&gold), one(predicted))).or_default() += 1;
        }
        Ok(())
    }

    /// Counts how sure a prediction was, in 0..=1, and whether it was right; see [`Calibration`].
    ///
    /// # Errors
    /// A confidence that is none.
    pub fn add_confidence(&mut self, confidence: f32, right: bool) -> Result<(), DataError> {
        self.calibration.add(confidence, right)
    }

    /// Documents so far.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// Adds what another counted of other documents, of a classifier with the same labels.
    ///
    /// # Errors
    /// Other labels.
    pub fn merge(&mut self, other: &ClassificationTally) -> Result<(), DataError> {
        if self.known != other.known
            || self.labels.names()[..self.known] != other.labels.names()[..self.known]
        {
            return Err(DataError::Setting(
                "two tallies of classifiers with different labels cannot be added".into(),
            ));
        }
        // Labels that the classifier does not know may have come in another order.
        let ids =
            other.labels.names().iter().map(|name| self.labels.count(name)).collect::<Result<Vec<_>, _>>()?;
        self.counts.resize(self.labels.len(), Counts::default());
        for (&id, more) in ids.iter().zip(&other.counts) {
            let counts = &mut self.counts[id as usize];
            counts.hits += more.hits;
            counts.gold += more.gold;
            counts.predicted += more.predicted;
        }
        self.documents += other.documents;
        self.exact += other.exact;
        self.unknown += other.unknown;
        self.several |= other.several;
        other.shapes.iter().for_each(|(shape, n)| *self.shapes.entry(*shape).or_default() += n);
        let id = |id: u32| ids.get(id as usize).copied().unwrap_or(NONE);
        for (&(gold, predicted), n) in &other.pairs {
            *self.pairs.entry((id(gold), id(predicted))).or_default() += n;
        }
        if self.several {
            self.pairs.clear();
        }
        self.calibration.merge(&other.calibration);
        Ok(())
    }

    /// The counts as bytes, for another rank.
    pub fn to_bytes(&self) -> Vec<u8> {
        let sent = Sent {
            names: self.labels.names().to_vec(),
            known: self.known,
            counts: self.counts.clone(),
            documents: self.documents,
            exact: self.exact,
            unknown: self.unknown,
            several: self.several,
            shapes: self.shapes.iter().map(|(k, v)| (*k, *v)).collect(),
            pairs: self.pairs.iter().map(|(k, v)| (*k, *v)).collect(),
            calibration: self.calibration.clone(),
        };
        serde_json::to_vec(&sent).expect("numbers and names are plain JSON")
    }

    /// What [`ClassificationTally::to_bytes`] wrote.
    ///
    /// # Errors
    /// Bytes that are no tally.
    pub fn from_bytes(bytes: &[u8]) -> Result<ClassificationTally, DataError> {
        let damaged =
            |what: &str| DataError::Setting(format!("expected counts of another rank, found {what}"));
        let sent: Sent = serde_json::from_slice(bytes).map_err(|e| damaged(&e.to_string()))?;
        let labels = Labels::from_names(sent.names)?;
        if labels.len() != sent.counts.len() || sent.known > labels.len() {
            return Err(damaged("counts of another number of labels"));
        }
        Ok(ClassificationTally {
            labels,
            known: sent.known,
            counts: sent.counts,
            documents: sent.documents,
            exact: sent.exact,
            unknown: sent.unknown,
            several: sent.several,
            shapes: sent.shapes.into_iter().collect(),
            pairs: sent.pairs.into_iter().collect(),
            calibration: sent.calibration,
        })
    }

    /// What follows from the counts.
    pub fn report(&self) -> ClassificationReport {
        let mut order: Vec<usize> = (0..self.labels.len()).collect();
        let often = |i: usize| self.counts[i].gold + self.counts[i].predicted;
        order.retain(|&i| often(i) > 0);
        order.sort_by_key(|&i| std::cmp::Reverse(often(i))); // stable
        let labels: Vec<LabelScores> = order
            .iter()
            .map(|&i| LabelScores {
                label: self.labels.names()[i].clone(),
                known: i < self.known,
                predicted: self.counts[i].predicted,
                scores: scores(self.counts[i].hits, self.counts[i].gold, self.counts[i].predicted),
            })
            .collect();
        let sum = |of: fn(&Counts) -> u64| self.counts.iter().map(of).sum::<u64>();
        let support = sum(|c| c.gold);
        let mean = |weight: &dyn Fn(&Scores) -> f64| {
            let total: f64 = labels.iter().map(|l| weight(&l.scores)).sum();
            let of = |value: fn(&Scores) -> f64| {
                let sum: f64 = labels.iter().map(|l| weight(&l.scores) * value(&l.scores)).sum();
                if total > 0.0 { sum / total } else { 0.0 }
            };
            Scores { precision: of(|s| s.precision), recall: of(|s| s.recall), f1: of(|s| s.f1), support }
        };
        let pairs = self.pairs.iter().map(|(&(gold, predicted), &n)| (gold, predicted, n));
        ClassificationReport {
            documents: self.documents,
            unknown: self.unknown,
            multi_label: self.several,
            accuracy: ratio(self.exact, self.documents),
            micro: scores(sum(|c| c.hits), support, sum(|c| c.predicted)),
            macro_: mean(&|_| 1.0),
            weighted: mean(&|s| s.support as f64),
            samples: self.several.then(|| self.samples(support)),
            confusion: (!self.several).then(|| Confusion::of(&self.labels, &order, pairs)),
            labels,
            calibration: self.calibration.report(),
        }
    }

    /// The mean over documents, of the order of the shapes: the same whoever counted which document.
    fn samples(&self, support: u64) -> Scores {
        let of = |value: fn(&Scores) -> f64| {
            let each = self.shapes.iter().map(|(&(hits, gold, predicted), &n)| {
                n as f64 * value(&scores(hits.into(), gold.into(), predicted.into()))
            });
            each.sum::<f64>() / self.documents.max(1) as f64
        };
        Scores { precision: of(|s| s.precision), recall: of(|s| s.recall), f1: of(|s| s.f1), support }
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn scores(hits: u64, gold: u64, predicted: u64) -> Scores {
    Scores {
        precision: ratio(hits, predicted),
        recall: ratio(hits, gold),
        f1: ratio(2 * hits, gold + predicted),
        support: gold,
    }
}

/// Precision, recall and F1, in 0..=1, and the gold labels that they are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Scores {
    /// Share of the predicted labels that are right.
    pub precision: f64,
    /// Share of the gold labels that were predicted.
    pub recall: f64,
    /// Their harmonic mean.
    #[serde(rename = "f1-score")]
    pub f1: f64,
    /// Gold labels.
    pub support: u64,
}

/// The scores of a label.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabelScores {
    /// Its name.
    pub label: String,
    /// Whether the classifier has it.
    pub known: bool,
    /// How often it was predicted.
    pub predicted: u64,
    /// Its scores.
    #[serde(flatten)]
    pub scores: Scores,
}

/// What a classifier is worth on some documents; the rules are at the top of this module.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassificationReport {
    /// Documents.
    pub documents: u64,
    /// Those of them with a label that the classifier does not have.
    pub unknown: u64,
    /// Whether a document has several labels, gold or predicted.
    pub multi_label: bool,
    /// Share of documents whose predicted labels are exactly the gold ones.
    pub accuracy: f64,
    /// Of the sums of all labels.
    pub micro: Scores,
    /// The mean over labels.
    #[serde(rename = "macro")]
    pub macro_: Scores,
    /// The mean over labels, weighted by support.
    pub weighted: Scores,
    /// The mean over documents, where a document has several labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<Scores>,
    /// Each label that a document has or that was predicted, most frequent first.
    pub labels: Vec<LabelScores>,
    /// How often which label was taken for which, unless documents have several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Confusion>,
    /// How well confidences fit, where they were counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationReport>,
}

/// Names of the figures that a choice of model can rest on: see [`ClassificationReport::score`].
pub const SCORES: [&str; 13] = [
    "micro_f1",
    "macro_f1",
    "weighted_f1",
    "samples_f1",
    "accuracy",
    "micro_precision",
    "micro_recall",
    "macro_precision",
    "macro_recall",
    "weighted_precision",
    "weighted_recall",
    "samples_precision",
    "samples_recall",
];

impl ClassificationReport {
    /// One of [`SCORES`] by its name; greater is better. Samples without several labels are what micro is.
    pub fn score(&self, name: &str) -> Option<f64> {
        if name == "accuracy" {
            return Some(self.accuracy);
        }
        let (average, metric) = name.split_once('_')?;
        let scores = match average {
            "micro" => self.micro,
            "macro" => self.macro_,
            "weighted" => self.weighted,
            "samples" => self.samples.unwrap_or(self.micro),
            _ => return None,
        };
        match metric {
            "precision" => Some(scores.precision),
            "recall" => Some(scores.recall),
            "f1" => Some(scores.f1),
            _ => None,
        }
    }
}
