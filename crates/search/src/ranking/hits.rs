//! Hits by answer: how often one of the first k passages of a question holds an answer, as FiD and DPR count.
//!
//! The passages are FiD's `ctxs`, ranked as the file has them, whatever their scores; their texts are searched, not their titles
//! (`tercio_data::has_answer`). Hits at k: questions one of whose first k passages holds one of the answers, over all questions. A question
//! without passages or without answers is a miss, as it is for FiD; how many there are is told.

use rayon::prelude::*;
use tercio_data::has_answer::{AnswerMatcher, AnswerMode, words};
use tercio_data::{DataError, Question, Questions};

use super::Figures;
use crate::SearchError;

/// Questions that are read at a time.
const WINDOW: usize = 1024;

/// What counting hits gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hits {
    /// A question's id, and the rank (from 1) of its first passage that holds an answer.
    pub first: Vec<(String, Option<usize>)>,
    /// Most passages of a question.
    pub depth: usize,
    /// Questions with fewer passages than that.
    pub fewer: u64,
    /// Questions without answers.
    pub without_answers: u64,
    /// Questions with an answer that stands in every text: one without a word, or a pattern that matches nothing at all.
    pub with_empty_answers: u64,
}

struct OfQuestion {
    id: String,
    first: Option<usize>,
    passages: usize,
    has_answers: bool,
    has_empty: bool,
}

/// Counts the hits of a file. `stop` is asked now and then.
///
/// # Errors
/// A bad item; an answer that is no regular expression, where answers are ones; no question has a passage; being stopped.
pub fn count(questions: &Questions, mode: AnswerMode, stop: &dyn Fn() -> bool) -> Result<Hits, SearchError> {
    let mut hits = Hits::default();
    let mut passages = Vec::new();
    for start in (0..questions.len()).step_by(WINDOW) {
        if stop() {
            return Err(SearchError::Stopped);
        }
        let rows = start..questions.len().min(start + WINDOW);
        let read = |row| of_question(&questions.get(row)?, mode);
        // In order, so that of several faults the first is told.
        let found: Vec<Result<OfQuestion, DataError>> = rows.into_par_iter().map(read).collect();
        for question in found {
            let question = question?;
            hits.without_answers += u64::from(!question.has_answers);
            hits.with_empty_answers += u64::from(question.has_empty);
            passages.push(question.passages);
            hits.first.push((question.id, question.first));
        }
    }
    hits.depth = passages.iter().copied().max().unwrap_or(0);
    hits.fewer = passages.iter().filter(|&&n| n < hits.depth).count() as u64;
    if hits.depth == 0 {
        let what = "no question has passages in `ctxs`; `tercio search` writes them";
        return Err(SearchError::file(questions.path(), what));
    }
    Ok(hits)
}

fn of_question(question: &Question, mode: AnswerMode) -> Result<OfQuestion, DataError> {
    let matcher = AnswerMatcher::new(&question.answers, mode)
        .map_err(|e| question.place.error("answers to look for", e.to_string(), ""))?;
    // In memory they are sorted by score.
    let mut in_file_order: Vec<_> = question.ctxs.iter().collect();
    in_file_order.sort_by_key(|passage| passage.file_position);
    Ok(OfQuestion {
        id: question.id_text(),
        first: in_file_order.iter().position(|p| matcher.found_in(&p.text)).map(|place| place + 1),
        passages: question.ctxs.len(),
        has_answers: !question.answers.is_empty(),
        has_empty: match mode {
            AnswerMode::Words => question.answers.iter().any(|answer| words(answer).is_empty()),
            AnswerMode::Regex => matcher.found_in(""),
        },
    })
}

impl Hits {
    /// How many questions have a hit among their first k passages, for k from 1 to [`Hits::depth`]: what FiD's
    /// `evaluate_retrieved_passages` prints, and, over the number of questions, its accuracies.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.depth];
        for rank in self.first.iter().filter_map(|(_, rank)| *rank) {
            counts[rank - 1] += 1;
        }
        (1..counts.len()).for_each(|k| counts[k] += counts[k - 1]);
        counts
    }

    /// `hits@k` of every question, 1 or 0, for the given depths.
    pub fn figures(&self, depths: &[usize]) -> Figures {
        let values = |rank: &Option<usize>| {
            depths.iter().map(|&k| f64::from(u8::from(rank.is_some_and(|rank| rank <= k)))).collect()
        };
        Figures {
            names: depths.iter().map(|k| format!("hits@{k}")).collect(),
            queries: self.first.iter().map(|(id, rank)| (id.clone(), values(rank))).collect(),
        }
    }
}
