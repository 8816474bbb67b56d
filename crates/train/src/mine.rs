//! Hard negatives: passages that a retriever ranks high and that do not answer the question.
//!
//! Candidates come ranked, from a file with `ctxs`, from a run, or from an exact search over vectors. A candidate is a
//! negative if its rank lies within a window, it is no known positive, it does not hold an answer, and its score is far
//! enough below the positive's.

use std::collections::HashSet;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value, json};
use tercio_data::has_answer::{AnswerMatcher, AnswerMode, words};
use tercio_data::retrieval::{Relevance, RetrievalExample, RetrievalExamples};
use tercio_data::{DataError, Passage, draw};

use crate::error::TrainError;
use crate::replace::{ReplacedFile, refuse_source};

mod candidates;
mod search;

pub use candidates::{Candidates, Collection, id_text, same_ids};
pub use search::exact_search;

/// Keeps these draws apart from others with the same seed.
const TAG: u64 = 0x6d69_6e65;

/// What is taken for a negative.
#[derive(Clone, Debug, PartialEq)]
pub struct MineRules {
    /// First rank of the window, from 1.
    pub first_rank: usize,
    /// Last rank of the window.
    pub last_rank: usize,
    /// Negatives of each question at most.
    pub negatives: usize,
    /// Positives of each question at most, where the candidates with an answer are taken for them.
    pub positives: usize,
    /// A negative's score is at least this far below the positive's.
    pub margin: Option<f64>,
    /// The same as a share of the positive's score.
    pub relative_margin: Option<f64>,
    /// How answers are looked for in candidates; `None`: not at all.
    pub answers: Option<AnswerMode>,
    /// Draw the negatives from the window by this seed; `None`: the best ranked.
    pub seed: Option<u64>,
}

/// The form of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MineForm {
    /// DPR's: `{question, answers, positive_ctxs, negative_ctxs, hard_negative_ctxs}`.
    #[default]
    Dpr,
    /// `{query, positive, negatives}`, passages as objects.
    Triples,
}

/// What mining found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MineReport {
    /// The file that was written.
    pub output: String,
    /// Questions read.
    pub questions: u64,
    /// Questions written.
    pub written: u64,
    /// Their negatives.
    pub negatives: u64,
    /// Questions left out: no passage is known to be positive, and no candidate holds an answer.
    pub without_positive: u64,
    /// Questions left out: no candidate is a negative.
    pub without_negative: u64,
    /// Candidates within the window that are known positives.
    pub known_positive: u64,
    /// Candidates within the window that hold an answer.
    pub with_answer: u64,
    /// Candidates within the window whose score is too near the positive's.
    pub within_margin: u64,
    /// Questions to which the margin could not be applied: no positive is among the candidates.
    pub without_score: u64,
}

/// Positives and negatives of one question.
#[derive(Clone, Debug, PartialEq)]
pub struct Mined {
    /// At least one.
    pub positives: Vec<Passage>,
    /// At least one.
    pub negatives: Vec<Passage>,
}

impl MineRules {
    /// Refuses rules that make no sense.
    ///
    /// # Errors
    /// A sentence.
    pub fn check(&self) -> Result<(), String> {
        if self.first_rank == 0 || self.last_rank < self.first_rank {
            return Err(format!(
                "expected a window of ranks from 1 on, found {} to {}; set --first_rank and --last_rank",
                self.first_rank, self.last_rank
            ));
        }
        for (name, margin) in [("margin", self.margin), ("relative_margin", self.relative_margin)] {
            if let Some(margin) = margin.filter(|m| !(m.is_finite() && *m >= 0.0)) {
                return Err(format!("--{name} {margin}: expected a number of 0 or more"));
            }
        }
        if self.negatives == 0 || self.positives == 0 {
            return Err("--negatives and --positives must be at least 1".into());
        }
        Ok(())
    }

    /// Chooses among the candidates of a question, which are ranked best first. `None` where there is no positive or no
    /// negative; counts go to `report`.
    ///
    /// # Errors
    /// An answer that is no regular expression, where answers are ones.
    pub fn choose(
        &self,
        example: &RetrievalExample,
        candidates: &[Passage],
        report: &mut MineReport,
    ) -> Result<Option<Mined>, DataError> {
        report.questions += 1;
        let matcher = self.matcher(example)?;
        let holds = |p: &Passage| matcher.as_ref().is_some_and(|m| m.found_in(&p.text));
        let judged: Vec<Passage> = example.of(Relevance::Positive).map(|p| p.passage.clone()).collect();
        let known = Known::new(&judged);
        let mut positives = judged.clone();
        if positives.is_empty() {
            positives = candidates.iter().filter(|p| holds(p)).take(self.positives).cloned().collect();
        }
        if positives.is_empty() {
            report.without_positive += 1;
            return Ok(None);
        }
        let is_positive = Known::new(&positives);
        let best = candidates.iter().find(|p| is_positive.has(p)).and_then(|p| p.score);
        let asks_margin = self.margin.is_some() || self.relative_margin.is_some();
        report.without_score += u64::from(asks_margin && best.is_none());
        let mut negatives = Vec::new();
        for candidate in candidates.iter().take(self.last_rank).skip(self.first_rank - 1) {
            if known.has(candidate) {
                report.known_positive += 1;
            } else if holds(candidate) {
                report.with_answer += 1;
            } else if !self.is_far(candidate.score, best) {
                report.within_margin += 1;
            } else {
                negatives.push(candidate.clone());
            }
        }
        if let Some(seed) = self.seed {
            let key =
                |p: &Passage| draw::keyed(&[TAG, seed, example.place.row as u64, p.file_position as u64]);
            negatives.sort_by_key(key);
        }
        negatives.truncate(self.negatives);
        if negatives.is_empty() {
            report.without_negative += 1;
            return Ok(None);
        }
        report.written += 1;
        report.negatives += negatives.len() as u64;
        Ok(Some(Mined { positives, negatives }))
    }

    /// What finds the answers; `None` where they are not looked for. Answers without a word stand in every passage, and say
    /// nothing here.
    fn matcher(&self, example: &RetrievalExample) -> Result<Option<AnswerMatcher>, DataError> {
        let Some(mode) = self.answers else { return Ok(None) };
        let telling = |answer: &&String| mode == AnswerMode::Regex || !words(answer).is_empty();
        let answers: Vec<&String> = example.answers.iter().filter(telling).collect();
        if answers.is_empty() {
            return Ok(None);
        }
        let at = |e: DataError| example.place.error("answers to look for", e.to_string(), "");
        AnswerMatcher::new(&answers, mode).map(Some).map_err(at)
    }

    /// Whether a score is far enough below the positive's, where both are known.
    fn is_far(&self, score: Option<f64>, positive: Option<f64>) -> bool {
        let (Some(score), Some(positive)) = (score, positive) else { return true };
        self.margin.is_none_or(|m| score <= positive - m)
            && self.relative_margin.is_none_or(|m| score <= positive - m * positive.abs())
    }
}

/// Passages by id, or by title and text where they have none.
struct Known<'a> {
    ids: HashSet<&'a str>,
    texts: HashSet<(&'a str, &'a str)>,
}

impl<'a> Known<'a> {
    fn new(passages: &'a [Passage]) -> Known<'a> {
        Known {
            ids: passages.iter().map(|p| p.id.as_str()).filter(|id| !id.is_empty()).collect(),
            texts: passages.iter().map(|p| (p.title.as_str(), p.text.as_str())).collect(),
        }
    }

    fn has(&self, passage: &Passage) -> bool {
        self.ids.contains(passage.id.as_str())
            || self.texts.contains(&(passage.title.as_str(), passage.text.as_str()))
    }
}

/// Mines a whole file: writes the questions that have both, in their order, as JSON lines.
///
/// # Errors
/// A bad item, candidates that cannot be had, files that cannot be written.
pub fn mine(
    examples: &RetrievalExamples,
    candidates: &Candidates,
    rules: &MineRules,
    form: MineForm,
    output: &Path,
    stop: &dyn Fn() -> bool,
) -> Result<MineReport, TrainError> {
    rules.check().map_err(TrainError::Options)?;
    refuse_source(output, examples.path())?;
    let mut file = ReplacedFile::create(output)?;
    let mut report = MineReport { output: output.display().to_string(), ..MineReport::default() };
    for row in 0..examples.len() {
        if stop() {
            return Err(TrainError::Stopped);
        }
        let example = examples.get(row)?;
        let ranked = candidates.of(&example, row, rules.last_rank)?;
        if let Some(mined) = rules.choose(&example, &ranked, &mut report)? {
            let line = line(&example, &mined, form);
            file.write((Value::Object(line).to_string() + "\n").as_bytes())?;
        }
    }
    if report.written == 0 {
        return Err(TrainError::Unusable(format!(
            "{}: none of {} questions has both a positive and a negative ({} without a positive, {} without a negative); \
             nothing was written: look at the window of ranks and at the answers",
            examples.path().display(),
            report.questions,
            report.without_positive,
            report.without_negative
        )));
    }
    file.finish()?;
    Ok(report)
}

fn line(example: &RetrievalExample, mined: &Mined, form: MineForm) -> Map<String, Value> {
    let list = |passages: &[Passage]| -> Value { passages.iter().map(object).collect() };
    let (positives, negatives) = (list(&mined.positives), list(&mined.negatives));
    let line = match form {
        MineForm::Dpr => json!({
            "id": example.id, "question": example.question, "answers": example.answers, "positive_ctxs": positives,
            "negative_ctxs": [], "hard_negative_ctxs": negatives,
        }),
        MineForm::Triples => {
            json!({"id": example.id, "query": example.question, "positive": positives, "negatives": negatives})
        }
    };
    line.as_object().cloned().unwrap_or_default()
}

fn object(p: &Passage) -> Value {
    let mut object = json!({"id": p.id, "title": p.title, "text": p.text});
    if let Some(score) = p.score {
        object["score"] = json!(score);
    }
    object
}
