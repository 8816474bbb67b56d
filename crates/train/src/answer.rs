//! Answers to questions that come line by line, from a pipe as from a file: each is read, answered and handed on before
//! the next is waited for; and answers over a collection, whose passages are searched first.

use std::io::{BufRead, Read};
use std::path::Path;

use tercio_data::questions::MAX_ITEM_BYTES;
use tercio_data::{Passage, Place, Question};
use tercio_engine::Device;

use crate::error::TrainError;
use crate::evaluate::scores_in_file_order;
use crate::find::Finder;
use crate::predict::{Prediction, Predictor};

/// Reads one JSON object a line (empty lines are passed over), answers `predictor.batch` questions at a time and hands
/// each with its prediction to `take`. `name` stands for the source in messages. The questions before a bad line are
/// answered before its error is returned.
///
/// # Errors
/// A line that is no question, with its number; a source that cannot be read; what `take` returns.
pub fn answer_lines<D: Device>(
    predictor: &Predictor<'_, D>,
    mut source: impl BufRead,
    name: &Path,
    mut take: impl FnMut(&Question, Prediction) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let (mut line, mut row) = (0, 0);
    let mut ended = None;
    while ended.is_none() {
        let mut batch = Vec::new();
        while batch.len() < predictor.batch.max(1) {
            match next_question(&mut source, name, &mut line, row) {
                Ok(Some(question)) => {
                    batch.push(question);
                    row += 1;
                }
                Ok(None) => {
                    ended = Some(Ok(()));
                    break;
                }
                Err(e) => {
                    ended = Some(Err(e));
                    break;
                }
            }
        }
        if batch.is_empty() {
            continue;
        }
        let predictions = predictor.device.run(|| predictor.answer(&batch))?;
        for (question, prediction) in batch.iter().zip(predictions) {
            take(question, prediction)?;
        }
        predictor.device.trim();
    }
    ended.unwrap_or(Ok(()))
}

fn next_question(
    source: &mut impl BufRead,
    name: &Path,
    line: &mut u64,
    row: usize,
) -> Result<Option<Question>, TrainError> {
    let Some((bytes, place)) = next_line(source, name, line, row)? else { return Ok(None) };
    Ok(Some(Question::from_json(&bytes, &place)?))
}

/// The next line that is not empty, without a byte order mark, and its place; `line` counts all.
pub(crate) fn next_line(
    source: &mut impl BufRead,
    name: &Path,
    line: &mut u64,
    row: usize,
) -> Result<Option<(Vec<u8>, Place)>, TrainError> {
    loop {
        *line += 1;
        let place = Place::new(name, row, *line);
        let mut bytes = Vec::new();
        let mut limited = source.by_ref().take(MAX_ITEM_BYTES + 1);
        let read = limited
            .read_until(b'\n', &mut bytes)
            .map_err(|source| TrainError::Read { path: name.display().to_string(), source })?;
        if read == 0 {
            return Ok(None);
        }
        if read as u64 > MAX_ITEM_BYTES {
            let expected = format!("a line of at most {MAX_ITEM_BYTES} bytes");
            return Err(place.error(expected, "more", "look for a missing line end").into());
        }
        // A byte order mark is no content.
        if *line == 1 && bytes.starts_with(b"\xEF\xBB\xBF") {
            bytes.drain(..3);
        }
        if !bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Some((bytes, place)));
        }
    }
}

/// A question asked by hand, with passages written as `title|text` (or a text alone), read in their order.
pub fn question_of(question: &str, passages: &[String]) -> Question {
    let passage = |(i, written): (usize, &String)| {
        let (title, text) = written.split_once('|').unwrap_or(("", written));
        tercio_data::Passage {
            id: i.to_string(),
            title: title.trim().to_owned(),
            text: text.trim().to_owned(),
            score: None,
            file_position: i,
        }
    };
    Question {
        id: 0.into(),
        question: question.to_owned(),
        target: None,
        answers: Vec::new(),
        ctxs: passages.iter().enumerate().map(passage).collect(),
        place: Place::new(Path::new("--question"), 0, 1),
    }
}

/// A passage that an answer rests on.
#[derive(Clone, Debug, PartialEq)]
pub struct Support {
    /// The passage; its own score is the one that it was found by.
    pub passage: Passage,
    /// What the reader's cross-attention gave it: a greater one, more of the answer.
    pub score: f32,
}

/// An answer with what it rests on.
#[derive(Clone, Debug, PartialEq)]
pub struct SupportedAnswer {
    /// The question as it was read, with its passages as they were found.
    pub question: Question,
    /// What the reader says.
    pub prediction: Prediction,
    /// The passages that it read, by its scores, best first; of equal ones the one that was found first. None where nothing was found.
    pub support: Vec<Support>,
}

/// Searches the collection of `finder` for `depth` passages, and answers with those that the predictor reads of them (its `scores` must
/// be on). Where nothing is found the reader answers by heart.
///
/// # Errors
/// What search and reader find wrong; scores that are no numbers.
pub fn ask<D: Device>(
    predictor: &Predictor<'_, D>,
    finder: &Finder,
    question: &str,
    depth: usize,
) -> Result<SupportedAnswer, TrainError> {
    let hits = finder.search(&[question], depth, &|| false)?.pop().unwrap_or_default();
    let mut asked = question_of(question, &[]);
    for (at, hit) in hits.iter().enumerate() {
        let passage = finder.passages().get(hit.row as usize)?;
        asked.ctxs.push(Passage { score: Some(hit.score.into()), file_position: at, ..passage });
    }
    let prediction = predictor.device.run(|| predictor.answer(std::slice::from_ref(&asked)))?.pop();
    let prediction = prediction.expect("one answer to one question");
    let scores = scores_in_file_order(&asked, &prediction)?.unwrap_or_default();
    let read = asked.ctxs.iter().zip(scores);
    let mut support: Vec<Support> = read
        .filter_map(|(passage, score)| Some(Support { passage: passage.clone(), score: score? }))
        .collect();
    support.sort_by(|a, b| b.score.total_cmp(&a.score)); // stable: equal scores stay in the order of the search
    predictor.device.trim();
    Ok(SupportedAnswer { question: asked, prediction, support })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_and_empty_ones_passed_over() {
        let text = b"\n{\"question\": \"a\"}\n  \r\n{\"question\": \"b\"}" as &[u8];
        let mut source = text;
        let (mut line, name) = (0, Path::new("<stdin>"));
        let mut next = |row| next_question(&mut source, name, &mut line, row);
        let a = next(0).unwrap().unwrap();
        let b = next(1).unwrap().unwrap();
        assert_eq!((a.question.as_str(), a.place.line, b.place.line), ("a", 2, 4));
        assert_eq!(b.id, 1);
        assert!(next(2).unwrap().is_none());
        let mut source = b"\xEF\xBB\xBF{\"question\": \"c\"}" as &[u8];
        let c = next_question(&mut source, name, &mut 0, 0).unwrap().unwrap();
        assert_eq!(c.question, "c");
        let mut source = b"{\"question\": 1}" as &[u8];
        let error = next_question(&mut source, name, &mut 6, 0).unwrap_err();
        assert!(error.to_string().starts_with("<stdin>, line 7 "), "{error}");
    }

    #[test]
    fn passages_by_hand() {
        let q = question_of("who?", &["Fox | a | b".into(), "no title".into()]);
        let parts: Vec<_> = q.ctxs.iter().map(|c| (c.title.as_str(), c.text.as_str())).collect();
        assert_eq!(parts, [("Fox", "a | b"), ("", "no title")]);
    }
}
