//! Questions of a search, from whatever file they come in:
//!
//! - `.json`, `.jsonl` (also `.gz`, `.zst`): FiD's `{id, question, answers, ...}`, BEIR's `{_id, text}`, or `{id, query}`;
//! - `.tsv` (likewise): DPR's `question TAB ['answer', ...]` with the quotes of CSV, or `id TAB question` as it stands.

use std::path::Path;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tercio_data::convert::dpr_questions;
use tercio_data::{Questions, RetrievalExamples};

use crate::error::TrainError;
use crate::run::hex;
use crate::scratch::ScratchFolder;

/// One question of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    /// Its id; the row where the file has none.
    pub id: String,
    /// What is asked.
    pub text: String,
    /// All that the file says of it, with `question` among the keys.
    pub item: Map<String, Value>,
}

impl Query {
    /// A question by itself.
    pub fn of_text(row: usize, text: &str) -> Query {
        let item = json!({"id": row.to_string(), "question": text});
        Query {
            id: row.to_string(),
            text: text.to_owned(),
            item: item.as_object().cloned().unwrap_or_default(),
        }
    }
}

/// Questions, read one by one where they come from a file of JSON.
pub enum Queries {
    /// A file of objects.
    File(Questions),
    /// Those that are in memory.
    List(Vec<Query>),
}

impl Queries {
    /// Opens a file; its index, or a copy in another form, goes into `cache_dir`.
    ///
    /// # Errors
    /// A name that promises none of the forms, a file that cannot be read, a line of another form.
    pub fn open(path: &Path, cache_dir: &Path) -> Result<Queries, TrainError> {
        if !is_tsv(path) {
            return Ok(Queries::File(Questions::open(path, cache_dir)?));
        }
        let lines = RetrievalExamples::open(path, cache_dir)?;
        if !is_dprs(&line_of(&lines, 0)?) {
            return Queries::list(&lines);
        }
        // Read as soon as it is open, so that its name may go.
        let scratch = ScratchFolder::new()?;
        let copy = scratch.path().join("questions.jsonl");
        dpr_questions(path, &copy)?;
        let questions = Questions::open(&copy, scratch.path())?;
        let all: Result<Vec<_>, TrainError> =
            (0..questions.len()).map(|i| query(questions.get_raw(i)?, i, path)).collect();
        Ok(Queries::List(all?))
    }

    /// The texts of a command line.
    pub fn of_texts<S: AsRef<str>>(texts: &[S]) -> Queries {
        Queries::List(texts.iter().enumerate().map(|(i, text)| Query::of_text(i, text.as_ref())).collect())
    }

    fn list(lines: &RetrievalExamples) -> Result<Queries, TrainError> {
        let mut list: Vec<Query> = Vec::new();
        let mut ids = std::collections::HashSet::new();
        for i in 0..lines.len() {
            let line = line_of(lines, i)?;
            let wrong = |expected: &str, found: String| {
                let path = lines.path().display();
                TrainError::Unusable(format!("{path}, item {i}: expected {expected}, found {found}"))
            };
            let Some((id, text)) = line.split_once('\t').filter(|(id, _)| !id.is_empty()) else {
                let expected = "an id, a tab and a question (or DPR's question, tab and ['answer'])";
                return Err(wrong(expected, format!("{:?}", line.chars().take(60).collect::<String>())));
            };
            if !ids.insert(id.to_owned()) {
                return Err(wrong("an id of its own for every question", format!("{id:?} again")));
            }
            let item = json!({"id": id, "question": text}).as_object().cloned().unwrap_or_default();
            list.push(Query { id: id.to_owned(), text: text.to_owned(), item });
        }
        Ok(Queries::List(list))
    }

    /// SHA-256 of what the file says, in hexadecimal digits.
    pub fn fingerprint(&self) -> String {
        match self {
            Queries::File(questions) => questions.fingerprint().to_owned(),
            Queries::List(list) => {
                let items: Vec<_> = list.iter().map(|query| &query.item).collect();
                hex(&Sha256::digest(serde_json::to_vec(&items).expect("plain JSON")))
            }
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Queries::File(questions) => questions.len(),
            Queries::List(list) => list.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses an id that two questions have, as a TREC run cannot tell them apart. False where `stop` ended it before all were compared.
    ///
    /// # Errors
    /// Naming both items; an item without a question.
    pub fn check_ids(&self, stop: &(dyn Fn() -> bool + Sync)) -> Result<bool, TrainError> {
        let mut seen = std::collections::HashMap::with_capacity(self.len());
        for i in 0..self.len() {
            if stop() {
                return Ok(false);
            }
            let id = self.get(i)?.id;
            if let Some(first) = seen.get(&id) {
                let of = match self {
                    Queries::File(questions) => format!("{}, item {i}", questions.path().display()),
                    Queries::List(_) => format!("question {i}"),
                };
                return Err(TrainError::Unusable(format!(
                    "{of}: expected an id of its own for every question of a run, found {id:?} again, the id of item {first}; \
                     change it, or write JSON"
                )));
            }
            seen.insert(id, i);
        }
        Ok(true)
    }

    /// Question `i`.
    ///
    /// # Errors
    /// An item without a question, with its line.
    pub fn get(&self, i: usize) -> Result<Query, TrainError> {
        match self {
            Queries::File(questions) => query(questions.get_raw(i)?, i, questions.path()),
            Queries::List(list) => list
                .get(i)
                .cloned()
                .ok_or_else(|| TrainError::Unusable(format!("question {i} of {} was asked for", list.len()))),
        }
    }
}

fn query(mut item: Map<String, Value>, row: usize, path: &Path) -> Result<Query, TrainError> {
    let wrong = |expected: &str, found: String| -> TrainError {
        TrainError::Unusable(format!("{}, item {row}: expected {expected}, found {found}", path.display()))
    };
    let has = |key: &&&str| item.get(**key).is_some_and(|v| !v.is_null());
    let text = ["question", "query", "text"].iter().find(has).map(|key| (*key, &item[*key]));
    let text = match text {
        Some((_, Value::String(text))) => text.clone(),
        Some((key, other)) => return Err(wrong(&format!("a string in `{key}`"), other.to_string())),
        None => {
            let keys: Vec<&str> = item.keys().take(8).map(String::as_str).collect();
            return Err(wrong(
                "a question in `question`, `query` or `text`",
                format!("the keys {}", keys.join(", ")),
            ));
        }
    };
    let id = match ["id", "_id", "query_id"].iter().find(has).map(|key| &item[*key]) {
        None => row.to_string(),
        Some(Value::String(id)) => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        Some(other) => return Err(wrong("a string or a number as id", other.to_string())),
    };
    if !item.contains_key("question") {
        item.insert("question".into(), Value::from(text.clone()));
    }
    Ok(Query { id, text, item })
}

fn is_tsv(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_ascii_lowercase();
    name.trim_end_matches(".gz").trim_end_matches(".zst").ends_with(".tsv")
}

/// Whether a line has a list of answers behind its question, or names the columns so.
fn is_dprs(line: &str) -> bool {
    let answers = line.rsplit_once('\t').map_or("", |(_, answers)| answers);
    answers.trim_start_matches('"').starts_with('[') || answers == "answers"
}

/// Line `i` of a file, as it stands.
fn line_of(lines: &RetrievalExamples, i: usize) -> Result<String, TrainError> {
    let text = String::from_utf8(lines.raw(i)?).map_err(|_| {
        TrainError::Unusable(format!("{}, item {i}: expected UTF-8 text", lines.path().display()))
    })?;
    let text = if i == 0 { text.trim_start_matches('\u{feff}') } else { &text };
    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
}
