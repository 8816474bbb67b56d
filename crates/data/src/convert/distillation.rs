//! Lists of documents with a teacher's scores, by ids, as distillation of ColBERT models is published: PyLate's rows of `query_id`,
//! `document_ids` and `scores`, beside files of queries and of documents; and the lines `[query, [document, score], ...]` of ColBERT's own
//! 64-way lists for MS MARCO.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::output::Output;
use super::{Converted, converted, passage};
use crate::error::DataError;
use crate::lines::each_line;
use crate::passages::Passages;
use crate::questions::Questions;

/// Turns `lists` into questions whose passages are the first `most` documents of each list with their scores. `queries` and `documents`
/// are collections of texts by id ([`Passages`]). Memory grows with the ids of both.
///
/// # Errors
/// A file that cannot be read or written; an id twice in a collection; a list of another form, or one that names an id that is not there.
pub fn distillation_lists(
    lists: &Path,
    (queries, documents): (&Path, &Path),
    cache_dir: &Path,
    most: usize,
    output: &Path,
) -> Result<Converted, DataError> {
    let (queries, documents) = (Texts::open(queries, cache_dir)?, Texts::open(documents, cache_dir)?);
    let mut out = Output::create(output)?;
    let mut passages = 0;
    let mut each = |row: &Value| -> Result<(), String> {
        let (query, list) = list_of(row)?;
        let question = queries.get(&query, "query")?;
        let mut ctxs = Vec::new();
        for (id, score) in list.into_iter().take(most) {
            let (title, text) = documents.get(&id, "document")?;
            let mut ctx = passage(&id, &title, &text);
            ctx.insert("score".into(), score.into());
            ctxs.push(Value::Object(ctx));
        }
        passages += ctxs.len() as u64;
        let item = json!({"id": query, "question": question.1, "answers": [], "ctxs": ctxs});
        let item: Map<String, Value> = item.as_object().cloned().unwrap_or_default();
        out.item(item).map_err(|e| e.to_string())
    };
    if lists.extension().is_some_and(|ending| ending == "parquet") {
        let rows = Questions::open(lists, cache_dir)?;
        for i in 0..rows.len() {
            let row = Value::Object(rows.get_raw(i)?);
            each(&row).map_err(|what| DataError::file(lists, format!("row {}: {what}", i + 1)))?;
        }
    } else {
        each_line(lists, &mut |_, line| {
            let row = serde_json::from_str(line).map_err(|e| format!("expected JSON on every line: {e}"))?;
            each(&row)
        })?;
    }
    if out.items == 0 {
        return Err(DataError::file(lists, "expected lists of documents with scores, found none"));
    }
    Ok(converted(output, out.finish()?, passages))
}

/// A collection by its ids.
struct Texts {
    passages: Passages,
    rows: HashMap<String, usize>,
}

impl Texts {
    fn open(path: &Path, cache_dir: &Path) -> Result<Texts, DataError> {
        let passages = Passages::open(path, cache_dir)?;
        let mut rows = HashMap::with_capacity(passages.len());
        for i in 0..passages.len() {
            let (passage, line) = passages.get_placed(i)?;
            if rows.insert(passage.id.clone(), i).is_some() {
                let what = format!("line {line}: expected an id of its own, found {:?} again", passage.id);
                return Err(DataError::file(path, what));
            }
        }
        Ok(Texts { passages, rows })
    }
    /// Title and text of an id.
    fn get(&self, id: &str, what: &str) -> Result<(String, String), String> {
        let path = self.passages.path().display();
        let row = self.rows.get(id).ok_or_else(|| {
            format!("the {what} {id:?} is not in {path}; get the files of one release, or leave the list out")
        })?;
        let passage = self.passages.get(*row).map_err(|e| e.to_string())?;
        Ok((passage.title, passage.text))
    }
}

/// A list's query, and its documents with their scores.
fn list_of(row: &Value) -> Result<(String, Vec<(String, f64)>), String> {
    let expected = "expected `query_id`, `document_ids` and `scores`, or [query, [document, score], ...]";
    match row {
        Value::Object(map) => {
            let list = |key: &str| match map.get(key) {
                Some(Value::Array(list)) => Ok(list.clone()),
                // PyLate's sets have lists as texts too.
                Some(Value::String(text)) => serde_json::from_str(&text.replace('\'', "\""))
                    .map_err(|e| format!("`{key}`: expected a list, found a text that is none: {e}")),
                _ => Err(format!("`{key}`: {expected}")),
            };
            let (ids, scores) = (list("document_ids")?, list("scores")?);
            if ids.len() != scores.len() {
                return Err(format!(
                    "expected as many `scores` as `document_ids`, found {} and {}",
                    scores.len(),
                    ids.len()
                ));
            }
            let pairs = ids.iter().zip(&scores).map(|(i, s)| Ok((id(i)?, score(s)?)));
            Ok((id(map.get("query_id").unwrap_or(&Value::Null))?, pairs.collect::<Result<_, String>>()?))
        }
        Value::Array(list) => {
            let (query, rest) = list.split_first().ok_or(expected)?;
            // Some files have the pairs in one list more.
            let pairs = match rest {
                [Value::Array(inner)] if inner.first().is_some_and(Value::is_array) => inner,
                rest => rest,
            };
            let pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
                Some([document, value]) => Ok((id(document)?, score(value)?)),
                _ => Err(format!("{expected}, found {pair}")),
            };
            Ok((id(query)?, pairs.iter().map(pair).collect::<Result<_, String>>()?))
        }
        other => Err(format!("{expected}, found {other}")),
    }
}

fn id(value: &Value) -> Result<String, String> {
    match value {
        Value::String(id) => Ok(id.clone()),
        Value::Number(id) => Ok(id.to_string()),
        other => Err(format!("expected an id, found {other}")),
    }
}

fn score(value: &Value) -> Result<f64, String> {
    let score = value.as_f64().filter(|s| s.is_finite());
    score.ok_or_else(|| format!("expected a finite score, found {value}"))
}
