//! One question with its answers and passages, read from FiD's JSON.
//!
//! A key that is missing and a key that is `null` mean the same. Unknown keys are ignored here;
//! [`crate::Questions::get_raw`] keeps them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::draw;
use crate::error::DataError;

const TARGET_TAG: u64 = 0x7461_7267_6574; // keeps these draws apart from others with the same seed

/// Where an item came from, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file as the user named it.
    pub path: Arc<PathBuf>,
    /// Row number of the item in the file, from 0.
    pub row: usize,
    /// Line on which the item starts, from 1.
    pub line: u64,
}

impl Place {
    /// A place; `path` may be a made-up name such as `<stdin>`.
    pub fn new(path: &Path, row: usize, line: u64) -> Place {
        Place { path: Arc::new(path.to_path_buf()), row, line }
    }

    /// An error of this item.
    pub fn error(
        &self,
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: impl Into<String>,
    ) -> DataError {
        self.error_at(self.line, expected.into(), found.into(), hint.into())
    }

    pub(crate) fn error_at(&self, line: u64, expected: String, found: String, hint: String) -> DataError {
        DataError::Item {
            path: self.path.to_path_buf(),
            row: self.row,
            line,
            item_line: self.line,
            expected,
            found,
            hint,
        }
    }
}

/// One passage.
#[derive(Clone, Debug, PartialEq)]
pub struct Passage {
    /// Its name in the collection; a numeric id is written in digits, a missing one is empty.
    pub id: String,
    /// Title of the page it was cut from; empty if missing.
    pub title: String,
    /// Its text.
    pub text: String,
    /// Retrieval or reader score, finite; higher is better.
    pub score: Option<f64>,
    /// Position in the item's `ctxs` as the file has them (sorting by score moves passages).
    pub file_position: usize,
}

/// One question of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The `id` as the file has it (a string or a number); the row number where there is none.
    pub id: Value,
    /// The question itself.
    pub question: String,
    /// The answer to train on, if the file fixes one.
    pub target: Option<String>,
    /// All accepted answers; may be empty.
    pub answers: Vec<String>,
    /// The passages, best score first if all have a score, else in file order.
    pub ctxs: Vec<Passage>,
    /// Where it came from.
    pub place: Place,
}

impl Question {
    /// Reads one question from the bytes of its JSON object.
    ///
    /// # Errors
    /// If the bytes are not UTF-8 or not JSON, or a field is not what it must be: [`DataError::Item`].
    pub fn from_json(bytes: &[u8], place: &Place) -> Result<Question, DataError> {
        Question::from_map(parse_object(bytes, place)?, place)
    }

    /// Reads one question from a parsed object; see [`Question::from_json`].
    pub fn from_map(mut map: Map<String, Value>, place: &Place) -> Result<Question, DataError> {
        let id = match take(&mut map, "id") {
            None => Value::from(place.row),
            Some(id @ (Value::String(_) | Value::Number(_))) => id,
            Some(other) => return Err(place.error("a string or a number in `id`", kind(&other), "")),
        };
        let question = match take(&mut map, "question") {
            Some(Value::String(text)) => text,
            Some(other) => return Err(place.error("a string in `question`", kind(&other), "")),
            None => return Err(place.error("an object with a string `question`", "none", "")),
        };
        let target = match take(&mut map, "target") {
            None => None,
            Some(Value::String(text)) => Some(text),
            Some(other) => return Err(place.error("a string in `target`", kind(&other), "")),
        };
        let mut answers = Vec::new();
        match take(&mut map, "answers") {
            None => {}
            Some(Value::Array(list)) => {
                for (k, answer) in list.into_iter().enumerate() {
                    match answer {
                        Value::String(text) => answers.push(text),
                        other => {
                            let hint = "write numbers in quotes";
                            return Err(place.error(
                                format!("a string in `answers[{k}]`"),
                                kind(&other),
                                hint,
                            ));
                        }
                    }
                }
            }
            Some(other) => {
                let hint = "put a single answer into a list: [\"...\"]";
                return Err(place.error("a list of strings in `answers`", kind(&other), hint));
            }
        }
        let mut ctxs = Vec::new();
        match take(&mut map, "ctxs") {
            None => {}
            Some(Value::Array(list)) => {
                ctxs.reserve(list.len());
                for (k, ctx) in list.into_iter().enumerate() {
                    ctxs.push(passage(ctx, "ctxs", k, place)?);
                }
            }
            Some(other) => return Err(place.error("a list of passages in `ctxs`", kind(&other), "")),
        }
        let mut question = Question { id, question, target, answers, ctxs, place: place.clone() };
        question.sort_by_score();
        Ok(question)
    }

    /// The id as text: a string as it is, a number in digits.
    pub fn id_text(&self) -> String {
        plain(&self.id)
    }

    /// Whether all passages, some, or none have a score.
    pub fn scores(&self) -> Scores {
        match self.ctxs.iter().filter(|c| c.score.is_some()).count() {
            0 => Scores::None,
            n if n == self.ctxs.len() => Scores::All,
            _ => Scores::Some,
        }
    }

    /// Sorts the passages by score, highest first, equal ones in their order; if any passage lacks a score, all stay.
    pub fn sort_by_score(&mut self) {
        if self.scores() == Scores::All {
            let key = |p: &Passage| p.score.unwrap_or_default();
            // scores are finite, so all compare; 0 and -0 are equal here as they are in the file's own terms
            self.ctxs.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal));
        }
    }

    /// The answer to train on: `target` if the file has one, else one of `answers`, drawn evenly by
    /// (seed, epoch, row): [`draw::index`] of the words (tag, seed, epoch, row). `None` if there is neither.
    pub fn training_target(&self, seed: u64, epoch: u64) -> Option<&str> {
        if let Some(target) = &self.target {
            return Some(target);
        }
        let k = draw::index(&[TARGET_TAG, seed, epoch, self.place.row as u64], self.answers.len())?;
        self.answers.get(k).map(String::as_str)
    }
}

/// How many passages of an item have a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// No passage (or there are no passages).
    None,
    /// Some but not all: the passages keep their file order.
    Some,
    /// Every passage.
    All,
}

/// Parses an item's bytes as a JSON object.
pub(crate) fn parse_object(bytes: &[u8], place: &Place) -> Result<Map<String, Value>, DataError> {
    let line_at = |offset: usize| place.line + bytes[..offset].iter().filter(|&&b| b == b'\n').count() as u64;
    if let Err(e) = std::str::from_utf8(bytes) {
        let at = e.valid_up_to();
        let found = format!("the byte 0x{:02x} at byte {} of the item", bytes[at], at + 1);
        let hint = "convert the file to UTF-8".to_string();
        return Err(place.error_at(line_at(at), "UTF-8 text".into(), found, hint));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(place.error("a JSON object", kind(&other), "")),
        Err(e) => {
            let line = place.line + (e.line() as u64).saturating_sub(1);
            let text = e.to_string();
            let reason = text.split(" at line ").next().unwrap_or_default();
            let (expected, hint) = if names_no_number(bytes, &e) {
                ("a finite number", "JSON has no NaN or Infinity; write a number, null, or nothing")
            } else {
                ("a JSON object", "")
            };
            let found = format!("bad JSON at byte {} of the line ({reason})", e.column());
            Err(place.error_at(line, expected.into(), found, hint.into()))
        }
    }
}

/// Whether the parser stopped at one of Python's words for what is not a number.
fn names_no_number(bytes: &[u8], error: &serde_json::Error) -> bool {
    let start = bytes
        .split_inclusive(|&b| b == b'\n')
        .take(error.line().saturating_sub(1))
        .map(<[u8]>::len)
        .sum::<usize>();
    let at = start + error.column();
    let near = &bytes[at.saturating_sub(3).min(bytes.len())..(at + 9).min(bytes.len())];
    near.windows(3).any(|w| w == b"NaN" || w == b"Inf")
}

/// Keys under which the names of passages are found in the files of others: FiD's, DPR's, BEIR's, MS MARCO's and PyLate's.
pub(crate) const ID_KEYS: [&str; 7] =
    ["id", "_id", "passage_id", "psg_id", "docid", "document_id", "query_id"];

/// The passage that is element `k` of the list under `key`.
pub(crate) fn passage(value: Value, key: &str, k: usize, place: &Place) -> Result<Passage, DataError> {
    let name = format!("{key}[{k}]");
    match value {
        Value::Object(map) => Ok(Passage { file_position: k, ..passage_of(map, &name, place)? }),
        other => Err(place.error(format!("an object in `{name}`"), kind(&other), "")),
    }
}

/// The passage that an object holds; `name` is what stands for the object in messages, empty where it is the item itself.
pub(crate) fn passage_of(
    mut map: Map<String, Value>,
    name: &str,
    place: &Place,
) -> Result<Passage, DataError> {
    let named =
        |field: &str| if name.is_empty() { format!("`{field}`") } else { format!("`{name}.{field}`") };
    let mut text = |field: &str| match take(&mut map, field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(id @ Value::Number(_)) if ID_KEYS.contains(&field) => Ok(Some(plain(&id))),
        Some(other) => Err(place.error(format!("a string in {}", named(field)), kind(&other), "")),
    };
    let mut id = None;
    for field in ID_KEYS {
        if id.is_none() {
            id = text(field)?;
        }
    }
    let title = text("title")?.unwrap_or_default();
    let Some(text) = text("text")? else {
        let expected = format!("a string in {}", named("text"));
        return Err(place.error(expected, "none", "every passage needs a text"));
    };
    let score = match take(&mut map, "score") {
        None => None,
        Some(value) => {
            let number = match &value {
                Value::Number(n) => n.as_f64(),
                Value::String(s) => s.trim().parse().ok(),
                _ => None,
            };
            let Some(score) = number.filter(|s: &f64| s.is_finite()) else {
                let found =
                    if let Value::String(s) = &value { format!("{:?}", clipped(s)) } else { kind(&value) };
                let hint = "write a number, or leave the score out of all passages of the item";
                return Err(place.error(format!("a finite number in {}", named("score")), found, hint));
            };
            Some(score)
        }
    };
    Ok(Passage { id: id.unwrap_or_default(), title, text, score, file_position: 0 })
}

/// Text of an item's bytes.
pub(crate) fn utf8<'a>(bytes: &'a [u8], place: &Place) -> Result<&'a str, DataError> {
    std::str::from_utf8(bytes).map_err(|e| {
        let at = e.valid_up_to();
        let found = format!("the byte 0x{:02x} at byte {} of the row", bytes[at], at + 1);
        place.error("UTF-8 text", found, "convert the file to UTF-8")
    })
}

pub(crate) fn take(map: &mut Map<String, Value>, key: &str) -> Option<Value> {
    map.get_mut(key).map(Value::take).filter(|v| !v.is_null())
}

fn plain(value: &Value) -> String {
    if let Value::String(text) = value { text.clone() } else { value.to_string() }
}

fn clipped(text: &str) -> String {
    text.chars().take(40).collect()
}

/// A value's kind in words.
pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) => format!("the string {:?}", clipped(s)),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Question, DataError> {
        Question::from_json(text.as_bytes(), &Place::new(Path::new("q.jsonl"), 4, 9))
    }

    #[test]
    fn all_fields_are_read_and_sorted_by_score() {
        let q = read(
            r#"{"id": 7, "question": "q", "answers": ["a", "b"], "extra": [1], "ctxs": [
                {"id": "x", "title": "T", "text": "low", "score": "1.5"},
                {"id": 12, "text": "high", "score": 2, "hasanswer": true},
                {"title": null, "text": "equal", "score": 1.5}]}"#,
        )
        .unwrap();
        assert_eq!((q.id_text(), q.answers.len(), q.target.as_deref()), ("7".into(), 2, None));
        assert_eq!(q.ctxs.iter().map(|c| c.text.as_str()).collect::<Vec<_>>(), ["high", "low", "equal"]);
        assert_eq!(q.ctxs.iter().map(|c| c.file_position).collect::<Vec<_>>(), [1, 0, 2]);
        assert_eq!((q.ctxs[0].id.as_str(), q.ctxs[2].title.as_str()), ("12", ""));
    }

    #[test]
    fn a_missing_id_is_the_row_and_a_missing_score_keeps_the_order() {
        let q = read(r#"{"question": "q", "id": null, "ctxs": [{"text": "a", "score": 1}, {"text": "b", "score": null}, {"text": "c", "score": 9}]}"#).unwrap();
        assert_eq!(q.id, Value::from(4));
        assert_eq!(q.scores(), Scores::Some);
        assert_eq!(q.ctxs.iter().map(|c| c.text.as_str()).collect::<String>(), "abc");
    }

    #[test]
    fn every_fault_says_where_and_what() {
        for (text, parts) in [
            (r#"{"question": "q""#, &["line 9", "bad JSON", "EOF"][..]),
            (r#"[1]"#, &["expected a JSON object", "found a list"]),
            (r#"{"id": 1}"#, &["`question`", "found none"]),
            (r#"{"question": 3}"#, &["string in `question`", "the number 3"]),
            (r#"{"question": "q", "id": []}"#, &["`id`", "a list"]),
            (r#"{"question": "q", "answers": "a"}"#, &["`answers`", "[\"...\"]"]),
            (r#"{"question": "q", "answers": ["a", 2]}"#, &["`answers[1]`", "the number 2"]),
            (r#"{"question": "q", "target": ["a"]}"#, &["`target`"]),
            (r#"{"question": "q", "ctxs": {}}"#, &["`ctxs`", "an object"]),
            (r#"{"question": "q", "ctxs": ["p"]}"#, &["`ctxs[0]`", "the string \"p\""]),
            (r#"{"question": "q", "ctxs": [{"title": "t"}]}"#, &["`ctxs[0].text`", "found none"]),
            (r#"{"question": "q", "ctxs": [{"text": "t", "title": 1}]}"#, &["`ctxs[0].title`"]),
            (
                r#"{"question": "q", "ctxs": [{"text": "t", "score": "nan"}]}"#,
                &["finite number in `ctxs[0].score`", "\"nan\""],
            ),
            (
                r#"{"question": "q", "ctxs": [{"text": "t", "score": "high"}]}"#,
                &["`ctxs[0].score`", "\"high\""],
            ),
            (r#"{"question": "q", "ctxs": [{"text": "t", "score": []}]}"#, &["`ctxs[0].score`", "a list"]),
            (
                "{\"question\": \"q\", \"ctxs\":\n [{\"text\": \"t\", \"score\": NaN}]}",
                &["line 10 (item 4, which starts on line 9)", "finite number", "NaN"],
            ),
            (
                r#"{"question": "q", "ctxs": [{"text": "t", "score": -Infinity}]}"#,
                &["line 9", "finite number"],
            ),
            (r#"{"question": "q", "ctxs": [{"text": "t", "score": 1e999}]}"#, &["line 9", "out of range"]),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.starts_with("q.jsonl, line "), "{error}");
            for part in parts {
                assert!(error.contains(part), "{error} lacks {part}");
            }
        }
    }

    #[test]
    fn deep_nesting_and_bad_utf8_are_errors() {
        let deep = format!("{{\"question\": \"q\", \"x\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(read(&deep).unwrap_err().to_string().contains("recursion limit"));
        let place = Place::new(Path::new("q.json"), 0, 3);
        let error = Question::from_json(b"{\"question\":\n \"\xff\"}", &place).unwrap_err().to_string();
        assert!(
            error.contains("line 4 (item 0, which starts on line 3)") && error.contains("0xff"),
            "{error}"
        );
    }

    #[test]
    fn targets_are_fixed_or_drawn_by_key() {
        let q = read(r#"{"question": "q", "target": "t", "answers": ["a"]}"#).unwrap();
        assert_eq!(q.training_target(1, 2), Some("t"));
        let q = read(r#"{"question": "q", "answers": ["a", "b", "c"]}"#).unwrap();
        let draws: Vec<&str> = (0..40).map(|epoch| q.training_target(1, epoch).unwrap()).collect();
        assert_eq!(draws, (0..40).map(|epoch| q.training_target(1, epoch).unwrap()).collect::<Vec<_>>());
        assert!(["a", "b", "c"].iter().all(|a| draws.contains(a)));
        assert_ne!(draws, (0..40).map(|epoch| q.training_target(2, epoch).unwrap()).collect::<Vec<_>>());
        assert_eq!(read(r#"{"question": "q"}"#).unwrap().training_target(1, 1), None);
    }
}
