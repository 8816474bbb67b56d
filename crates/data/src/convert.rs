//! From the files that others publish to questions as Tercio and Fusion-in-Decoder read them: the original NQ and TriviaQA
//! dumps, and DPR's JSON and TSV. Everything streams; memory does not grow with passages or questions of a file, but for
//! the places of the passages that are used.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::DataError;

mod distillation;
mod dpr;
mod original;
mod output;
pub(crate) mod tsv;

pub use distillation::distillation_lists;
pub use dpr::{dpr_json, dpr_passages, dpr_questions};
pub use original::{Dump, convert_dump};

/// What a conversion wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Converted {
    /// The file.
    pub path: String,
    /// Questions (or passages, where those are what is converted).
    pub items: u64,
    /// Passages of the questions.
    pub passages: u64,
}

fn converted(path: &Path, items: u64, passages: u64) -> Converted {
    Converted { path: path.display().to_string(), items, passages }
}

/// One passage of a question, with the keys that Fusion-in-Decoder has.
fn passage(id: &str, title: &str, text: &str) -> Map<String, Value> {
    let value = json!({"id": id, "title": title, "text": text});
    value.as_object().cloned().unwrap_or_default()
}

/// A fault of a line.
fn at_line(path: &Path, line: u64, what: impl std::fmt::Display) -> DataError {
    DataError::file(path, format!("line {line}: {what}"))
}
