//! What a search writes: FiD's JSON, the same as JSON lines, or a TREC run.
//!
//! A question is rendered by itself ([`Format::render`]), so that many threads or ranks can do it, and the bytes go into a
//! [`ResultsFile`] in the order of the questions. Nothing but the question at work is in memory; the file gets its name at the end.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tercio_data::has_answer::AnswerMatcher;
use tercio_data::replace::{JsonList, ReplacedFile};
use tercio_data::{DataError, Passages};

use crate::{Hit, SearchError};

/// The form of a file of results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// FiD's: one list of the questions as they were, with `ctxs`: `[{id, title, text, score, hasanswer}]`.
    #[default]
    Fid,
    /// The same, a question a line.
    Jsonl,
    /// `query Q0 document rank score tag`, a line a passage. A question for which nothing was found has no line.
    Trec,
}

/// A passage that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundPassage {
    /// Its name in the collection.
    pub id: String,
    /// Its title; may be empty.
    pub title: String,
    /// Its text.
    pub text: String,
    /// Greater is better. Finite.
    pub score: f32,
    /// Whether an answer of the question stands in its text; `None` where there are no answers to look for.
    pub has_answer: Option<bool>,
}

/// A question with what was found for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The question as its file has it: `id`, `question`, `answers` and whatever else stands there. Old `ctxs` are replaced.
    pub question: Map<String, Value>,
    /// Best first.
    pub passages: Vec<FoundPassage>,
}

/// Reads what was found from the collection. `answers` are looked for in the texts, where the question has any.
///
/// # Errors
/// A row that the collection does not have, or cannot be read.
pub fn found_passages(
    collection: &Passages,
    hits: &[Hit],
    answers: Option<&AnswerMatcher>,
) -> Result<Vec<FoundPassage>, DataError> {
    let read = |hit: &Hit| {
        // A row beyond all is one that the collection refuses by its number.
        let passage = collection.get(usize::try_from(hit.row).unwrap_or(usize::MAX))?;
        let has_answer = answers.map(|answers| answers.found_in(&passage.text));
        Ok(FoundPassage {
            id: passage.id,
            title: passage.title,
            text: passage.text,
            score: hit.score,
            has_answer,
        })
    };
    hits.iter().map(read).collect()
}

/// A score with the digits that a 32-bit number needs, and no more.
pub fn shortest(score: f32) -> f64 {
    // The shortest decimal that is this number; as the nearest 64-bit number it is printed with the same digits.
    score.to_string().parse().unwrap_or(f64::from(score))
}

impl Format {
    /// One question as this form has it; `tag` names the system in a TREC run.
    ///
    /// In a run the scores fall strictly from line to line, as 32-bit numbers: a passage whose score is not below the one before it gets
    /// the next smaller number. So every program finds the ranks that were given, whatever it does with ties; trec_eval would
    /// order them by name, backwards.
    ///
    /// # Errors
    /// A score that is no number; a question without an id, or ids with spaces in them, where a run is written.
    pub fn render(self, found: &Found, tag: &str) -> Result<Vec<u8>, SearchError> {
        if let Some(passage) = found.passages.iter().find(|p| !p.score.is_finite()) {
            let what =
                format!("the passage {:?} has the score {}, which is no number", passage.id, passage.score);
            return Err(SearchError::Unusable(what));
        }
        match self {
            Format::Fid => Ok(JsonList::bytes(&with_passages(found))),
            Format::Jsonl => Ok((Value::Object(with_passages(found)).to_string() + "\n").into_bytes()),
            Format::Trec => run_lines(found, tag),
        }
    }

    /// The form that a file's name promises: `.json`, `.jsonl`, or `.trec`, `.run` and `.txt` for a run.
    pub fn of_name(path: &Path) -> Option<Format> {
        let ending = path.extension()?.to_str()?.to_ascii_lowercase();
        match ending.as_str() {
            "json" => Some(Format::Fid),
            "jsonl" => Some(Format::Jsonl),
            "trec" | "run" | "txt" => Some(Format::Trec),
            _ => None,
        }
    }
}

fn with_passages(found: &Found) -> Map<String, Value> {
    let ctxs = found.passages.iter().map(|p| {
        let mut ctx = json!({"id": p.id, "title": p.title, "text": p.text, "score": shortest(p.score)});
        if let Some(has_answer) = p.has_answer {
            ctx["hasanswer"] = has_answer.into();
        }
        ctx
    });
    let mut item = found.question.clone();
    item.insert("ctxs".into(), ctxs.collect());
    item
}

fn run_lines(found: &Found, tag: &str) -> Result<Vec<u8>, SearchError> {
    let query = match found.question.get("id") {
        Some(Value::String(id)) => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        _ => {
            return Err(SearchError::Unusable(
                "a run needs an `id` on every question; found one without".into(),
            ));
        }
    };
    let passages = found.passages.iter().map(|p| (p.id.as_str(), p.score));
    let mut out = Vec::new();
    write_ranking(&query, passages, tag, &mut out)?;
    Ok(out)
}

/// Appends the lines of one query of a TREC run, documents best first; see [`Format::render`].
///
/// # Errors
/// Names that are empty or have spaces in them, or a document twice, which the form cannot hold; a score that is no number.
pub fn write_ranking<'a>(
    query: &str,
    documents: impl IntoIterator<Item = (&'a str, f32)>,
    tag: &str,
    out: &mut Vec<u8>,
) -> Result<(), SearchError> {
    for (what, name) in [("query", query), ("tag", tag)] {
        one_word(what, name)?;
    }
    let mut seen = HashSet::new();
    let mut above = f32::INFINITY;
    for (i, (document, score)) in documents.into_iter().enumerate() {
        one_word("document", document)?;
        if !seen.insert(document) {
            return Err(SearchError::Unusable(format!(
                "query {query}: the document {document} was found twice, which a run cannot say: two passages have this id; give every \
                 passage an id of its own, or write JSON"
            )));
        }
        let score = if score < above { score } else { above.next_down() };
        if !score.is_finite() {
            let what = format!("query {query}: the document {document} has no finite score");
            return Err(SearchError::Unusable(what));
        }
        out.extend_from_slice(format!("{query} Q0 {document} {} {score} {tag}\n", i + 1).as_bytes());
        above = score;
    }
    Ok(())
}

/// White space ends a field of a run, and nothing can quote it.
fn one_word(what: &str, name: &str) -> Result<(), SearchError> {
    if !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Ok(());
    }
    Err(SearchError::Unusable(format!(
        "the {what} {name:?} cannot stand in a run, whose fields are words between spaces; write JSON, or change the name"
    )))
}

/// A file of results that is being written; dropped before [`ResultsFile::finish`] it leaves nothing behind.
#[derive(Debug)]
pub struct ResultsFile(Form);

#[derive(Debug)]
enum Form {
    List(JsonList),
    Lines(ReplacedFile),
}

impl ResultsFile {
    /// Starts a file that will be `path`, whose folder is created. What stands there stays until the end.
    ///
    /// # Errors
    /// When it cannot be written there; a name that promises another form: programs that read JSON decide by the name.
    pub fn create(path: &Path, format: Format) -> Result<ResultsFile, SearchError> {
        let wrong = match Format::of_name(path) {
            _ if is_packed(path) => Some("a name without .gz or .zst: nothing is compressed here"),
            Some(Format::Fid) if format != Format::Fid => {
                Some("another name than .json, which is that of FiD's list")
            }
            Some(Format::Jsonl) if format != Format::Jsonl => {
                Some("another name than .jsonl, which is that of JSON lines")
            }
            promised if format == Format::Fid && promised != Some(Format::Fid) => {
                Some("a name that ends in .json")
            }
            promised if format == Format::Jsonl && promised != Some(Format::Jsonl) => {
                Some("a name that ends in .jsonl")
            }
            _ => None,
        };
        if let Some(expected) = wrong {
            return Err(SearchError::file(path, format!("expected {expected}")));
        }
        Ok(ResultsFile(match format {
            Format::Fid => Form::List(JsonList::create(path)?),
            Format::Jsonl | Format::Trec => Form::Lines(ReplacedFile::create(path)?),
        }))
    }

    /// The path that it will have, links followed.
    pub fn target(&self) -> &Path {
        match &self.0 {
            Form::List(list) => list.target(),
            Form::Lines(lines) => lines.target(),
        }
    }

    /// Adds a question, as [`Format::render`] gave it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn push(&mut self, rendered: &[u8]) -> Result<(), SearchError> {
        match &mut self.0 {
            Form::List(list) => list.push_bytes(rendered)?,
            Form::Lines(lines) => lines.write(rendered)?,
        }
        Ok(())
    }

    /// Syncs the file and gives it its name.
    ///
    /// # Errors
    /// When that fails; nothing is left behind then.
    pub fn finish(self) -> Result<PathBuf, SearchError> {
        Ok(match self.0 {
            Form::List(list) => list.finish()?,
            Form::Lines(lines) => lines.finish()?,
        })
    }
}

fn is_packed(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gz") || e.eq_ignore_ascii_case("zst"))
}
