//! The forms in which examples of retrieval come.
//!
//! - FiD: `{question, answers, ctxs: [{id, title, text, score, hasanswer}]}`. A passage with `hasanswer` (or DPR's
//!   `has_answer`) is positive or a hard negative by it, one without is unknown. There may be no `ctxs`.
//! - DPR: `{question, answers, positive_ctxs, hard_negative_ctxs, negative_ctxs}`.
//! - Triples: `{query, positive, negatives}`; a passage is a text or `{id, title, text}`, `positive` may be a list,
//!   `negative` may stand for `negatives`, `question` for `query`. Their negatives count as hard ones.
//! - Rows: query, positive and one or more negatives between tabs, as they stand: a quote is a character like others.

use serde_json::{Map, Value};

use super::{JudgedPassage, Relevance, RetrievalExample};
use crate::error::DataError;
use crate::question::{Passage, Place, Question, kind, parse_object, passage, take, utf8};

/// An example from the bytes of its JSON object.
pub(super) fn object(bytes: &[u8], place: &Place) -> Result<RetrievalExample, DataError> {
    let map = parse_object(bytes, place)?;
    let has = |key: &str| map.get(key).is_some_and(|v| !v.is_null());
    if has("positive_ctxs") {
        dpr(map, place)
    } else if has("positive") {
        triple(map, place)
    } else if has("ctxs") || has("question") {
        fid(map, place)
    } else {
        let expected =
            "an object with `question` (and `ctxs` or `positive_ctxs`), or with `query` and `positive`";
        let keys: Vec<&str> = map.keys().take(8).map(String::as_str).collect();
        let found = if keys.is_empty() { "no key".into() } else { format!("the keys {}", keys.join(", ")) };
        Err(place.error(expected, found, "see the documentation for the forms of training data"))
    }
}

fn fid(map: Map<String, Value>, place: &Place) -> Result<RetrievalExample, DataError> {
    let mut judged = Vec::new();
    for (k, ctx) in map.get("ctxs").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let judgement = ["hasanswer", "has_answer"].map(|key| ctx.get(key).filter(|v| !v.is_null()));
        judged.push(match judgement.into_iter().flatten().next() {
            None => Relevance::Unknown,
            Some(Value::Bool(true)) => Relevance::Positive,
            Some(Value::Bool(false)) => Relevance::HardNegative,
            Some(other) => {
                return Err(place.error(format!("true or false in `ctxs[{k}].hasanswer`"), kind(other), ""));
            }
        });
    }
    let Question { id, question, answers, ctxs, place, .. } = Question::from_map(map, place)?;
    let passages = ctxs
        .into_iter()
        .map(|passage| JudgedPassage { relevance: judged[passage.file_position], passage })
        .collect();
    Ok(RetrievalExample { id, question, answers, passages, place })
}

fn dpr(mut map: Map<String, Value>, place: &Place) -> Result<RetrievalExample, DataError> {
    let mut passages = Vec::new();
    for (key, relevance) in [
        ("positive_ctxs", Relevance::Positive),
        ("hard_negative_ctxs", Relevance::HardNegative),
        ("negative_ctxs", Relevance::Negative),
    ] {
        match take(&mut map, key) {
            None => {}
            Some(Value::Array(list)) => {
                for (k, mut value) in list.into_iter().enumerate() {
                    // DPR's scores are of several kinds, 1000 for "gold" among them: no scale to sort by or learn from.
                    value.as_object_mut().map(|ctx| ctx.remove("score"));
                    passages.push(JudgedPassage { passage: passage(value, key, k, place)?, relevance });
                }
            }
            Some(other) => {
                return Err(place.error(format!("a list of passages in `{key}`"), kind(&other), ""));
            }
        }
    }
    rest(map, passages, place)
}

fn triple(mut map: Map<String, Value>, place: &Place) -> Result<RetrievalExample, DataError> {
    let mut passages = Vec::new();
    for (key, relevance) in [
        ("positive", Relevance::Positive),
        ("negatives", Relevance::HardNegative),
        ("negative", Relevance::HardNegative),
    ] {
        let list = match take(&mut map, key) {
            None => continue,
            Some(Value::Array(list)) => list,
            Some(one) => vec![one],
        };
        for (k, value) in list.into_iter().enumerate() {
            let passage = match value {
                Value::String(text) => bare(text, k),
                value @ Value::Object(_) => passage(value, key, k, place)?,
                other => {
                    let expected = format!("a text or an object with `text` in `{key}[{k}]`");
                    return Err(place.error(expected, kind(&other), ""));
                }
            };
            passages.push(JudgedPassage { passage, relevance });
        }
    }
    if let Some(query) = take(&mut map, "query") {
        map.insert("question".into(), query);
    }
    if !map.contains_key("question") {
        return Err(place.error("a string in `query`", "none", ""));
    }
    rest(map, passages, place)
}

/// Id, question and answers, as every file of questions has them.
fn rest(
    mut map: Map<String, Value>,
    mut passages: Vec<JudgedPassage>,
    place: &Place,
) -> Result<RetrievalExample, DataError> {
    map.remove("ctxs");
    for (k, p) in passages.iter_mut().enumerate() {
        p.passage.file_position = k;
    }
    let Question { id, question, answers, place, .. } = Question::from_map(map, place)?;
    Ok(RetrievalExample { id, question, answers, passages, place })
}

/// An example from a row of fields between tabs.
pub(super) fn row(bytes: &[u8], place: &Place) -> Result<RetrievalExample, DataError> {
    let text = utf8(bytes, place)?;
    let text = text.strip_suffix('\r').unwrap_or(text);
    let text = if place.row == 0 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
    let fields: Vec<&str> = text.split('\t').collect();
    if fields.len() < 3 {
        let expected = "3 or more fields between tabs (query, positive, negatives)";
        let found = if fields.len() == 1 { "1 field".into() } else { format!("{} fields", fields.len()) };
        return Err(place.error(expected, found, "write one example per line"));
    }
    if let Some(empty) = fields.iter().position(|f| f.trim().is_empty()) {
        let name = ["query", "positive"].get(empty).copied().unwrap_or("negative");
        return Err(place.error(format!("a text in field {} ({name})", empty + 1), "none", ""));
    }
    let passages = fields[1..]
        .iter()
        .enumerate()
        .map(|(k, &text)| JudgedPassage {
            passage: bare(text.to_owned(), k),
            relevance: if k == 0 { Relevance::Positive } else { Relevance::HardNegative },
        })
        .collect();
    Ok(RetrievalExample {
        id: place.row.into(),
        question: fields[0].to_owned(),
        answers: Vec::new(),
        passages,
        place: place.clone(),
    })
}

fn bare(text: String, k: usize) -> Passage {
    Passage { id: String::new(), title: String::new(), text, score: None, file_position: k }
}
