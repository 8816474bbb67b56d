//! The forms in which documents with labels come, each from the bytes of one to a [`Document`].

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::documents::Document;
use crate::convert::tsv;
use crate::error::DataError;
use crate::question::{ID_KEYS, Place, kind, parse_object, take, utf8};

/// What a label of FastText's lines begins with.
pub const LABEL_PREFIX: &str = "__label__";
/// Names of the column of labels where nobody says otherwise.
const LABEL_COLUMNS: [&str; 3] = ["label", "labels", "class"];

/// Where text and labels are in a table, or in the objects of JSON and Parquet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Columns of the text, joined by a space.
    pub text: Vec<String>,
    /// Columns of labels, each with one (JSON: or a list); none: `label`, `labels` or `class`, whichever is there.
    pub labels: Vec<String>,
    /// Whether the first row of a table names its columns; where it does not, columns are numbers from 0.
    pub header: bool,
    /// A value in a column of labels that stands for none, besides an empty one.
    pub no_label: Option<String>,
}

impl Default for Columns {
    fn default() -> Columns {
        Columns { text: vec!["text".into()], labels: Vec::new(), header: true, no_label: None }
    }
}

/// How a file's items become documents.
pub(super) enum Form {
    FastText,
    Table(Table),
    Json,
}

impl Form {
    /// Rows before the first document.
    pub fn header(&self) -> usize {
        if let Form::Table(Table { header: true, .. }) = self { 1 } else { 0 }
    }
}

/// Where the fields of a row are.
pub(super) struct Table {
    pub separator: u8,
    header: bool,
    /// Fields of a row; 0 while the columns are not known.
    count: usize,
    text: Vec<usize>,
    labels: Vec<usize>,
    no_label: Option<String>,
}

impl Table {
    /// A table whose columns are to be named before a row is read.
    pub fn unnamed(separator: u8) -> Table {
        let (text, labels) = (Vec::new(), Vec::new());
        Table { separator, header: true, count: 0, text, labels, no_label: None }
    }

    /// The columns as the first row has them.
    pub fn of(separator: u8, columns: &Columns, first: &[u8], place: &Place) -> Result<Table, DataError> {
        let names = split(separator, first, place)?;
        let count = names.len();
        let at = |wanted: &str| {
            let found = match columns.header {
                true => names.iter().position(|name| name.trim() == wanted),
                false => wanted.parse().ok().filter(|&k: &usize| k < count),
            };
            found.ok_or_else(|| {
                let (expected, hint) = match columns.header {
                    true => (format!("a column named {wanted:?}"), "name the columns of text and labels"),
                    false => (
                        format!("a column {wanted:?} among numbers from 0"),
                        "give the numbers of the columns of text and labels",
                    ),
                };
                let shown: Vec<&str> = names.iter().take(12).map(|n| n.trim()).collect();
                place.error(expected, format!("{count} columns: {}", shown.join(", ")), hint)
            })
        };
        let text = columns.text.iter().map(|name| at(name)).collect::<Result<_, _>>()?;
        let labels = match columns.labels.is_empty() {
            false => columns.labels.iter().map(|name| at(name)).collect::<Result<_, _>>()?,
            true => LABEL_COLUMNS.iter().find_map(|name| at(name).ok()).into_iter().collect(),
        };
        let (header, no_label) = (columns.header, columns.no_label.clone());
        Ok(Table { separator, header, count, text, labels, no_label })
    }
}

fn split(separator: u8, bytes: &[u8], place: &Place) -> Result<Vec<String>, DataError> {
    let bytes = without_mark(bytes, place);
    utf8(bytes, place)?;
    // Quotes and separators are ASCII, so what is between them is UTF-8, too.
    Ok(tsv::split(bytes, separator).into_iter().map(|f| String::from_utf8(f).unwrap_or_default()).collect())
}

/// A byte order mark is no content.
fn without_mark<'a>(bytes: &'a [u8], place: &Place) -> &'a [u8] {
    let mark: &[u8] = if place.line == 1 { b"\xEF\xBB\xBF" } else { b"" };
    bytes.strip_prefix(mark).unwrap_or(bytes)
}

pub(super) fn table_row(table: &Table, bytes: &[u8], place: Place) -> Result<Document, DataError> {
    let fields = split(table.separator, bytes, &place)?;
    if table.count == 0 {
        let found = format!("the columns {}", fields.join(", "));
        return Err(place.error("a column named \"text\"", found, "name the columns of text and labels"));
    }
    if fields.len() != table.count {
        let found = if fields.len() == 1 { "1 field".into() } else { format!("{} fields", fields.len()) };
        let hint = "a field with a separator or a quote needs quotes around it, and its own quotes doubled";
        return Err(place.error(format!("{} fields, as in the first row", table.count), found, hint));
    }
    let texts: Vec<&str> = table.text.iter().map(|&k| fields[k].trim()).collect();
    let text = texts.join(" ").trim().to_owned();
    let labels = table.labels.iter().map(|&k| fields[k].trim().to_owned());
    let labels = labels.filter(|label| !label.is_empty() && Some(label) != table.no_label.as_ref());
    Ok(document(Value::from(place.row), text, labels.collect(), place))
}

/// FastText's form: labels first, each with its prefix, then the text.
pub(super) fn line(bytes: &[u8], place: Place) -> Result<Document, DataError> {
    let mut rest = utf8(without_mark(bytes, &place), &place)?.trim();
    let mut labels = Vec::new();
    while let Some(after) = rest.strip_prefix(LABEL_PREFIX) {
        let (label, text) = after.split_at(after.find(char::is_whitespace).unwrap_or(after.len()));
        if label.is_empty() {
            let found = format!("{LABEL_PREFIX} alone");
            return Err(place.error(format!("the name of a label behind {LABEL_PREFIX}"), found, ""));
        }
        labels.push(label.to_owned());
        rest = text.trim_start();
    }
    Ok(document(Value::from(place.row), rest.to_owned(), labels, place))
}

/// An object with a text and a label or a list of them.
pub(super) fn json(columns: &Columns, bytes: &[u8], place: Place) -> Result<Document, DataError> {
    let mut map = parse_object(bytes, &place)?;
    let mut id = Value::from(place.row);
    if let Some(value) = ID_KEYS.iter().find_map(|key| take(&mut map, key)) {
        if !matches!(value, Value::String(_) | Value::Number(_)) {
            return Err(place.error("a string or a number in `id`", kind(&value), ""));
        }
        id = value;
    }
    let labels = labels(columns, &mut map, &place)?;
    let mut texts = Vec::new();
    for key in &columns.text {
        match take(&mut map, key) {
            Some(Value::String(text)) => texts.push(text.trim().to_owned()),
            Some(other) => return Err(place.error(format!("a string in `{key}`"), kind(&other), "")),
            None => {
                let keys: Vec<&str> = map.keys().take(8).map(String::as_str).collect();
                let found = if keys.is_empty() { "none".into() } else { format!("only {}", keys.join(", ")) };
                return Err(place.error(format!("a string in `{key}`"), found, "name the key of the text"));
            }
        }
    }
    Ok(document(id, texts.join(" ").trim().to_owned(), labels, place))
}

fn labels(columns: &Columns, map: &mut Map<String, Value>, place: &Place) -> Result<Vec<String>, DataError> {
    let given: Vec<&str> = columns.labels.iter().map(String::as_str).collect();
    let there = || LABEL_COLUMNS.into_iter().find(|key| map.get(*key).is_some_and(|v| !v.is_null()));
    let keys = if given.is_empty() { there().into_iter().collect() } else { given };
    let mut labels = Vec::new();
    for key in keys {
        let values = match take(map, key) {
            None => continue,
            Some(Value::Array(list)) => list,
            Some(one) => vec![one],
        };
        for value in values {
            let label = match value {
                Value::String(text) => text.trim().to_owned(),
                Value::Number(n) if !n.is_f64() => n.to_string(),
                Value::Bool(b) => b.to_string(),
                other => {
                    let expected = format!("a string or a whole number (or a list of them) in `{key}`");
                    return Err(place.error(expected, kind(&other), ""));
                }
            };
            if !label.is_empty() && Some(&label) != columns.no_label.as_ref() {
                labels.push(label);
            }
        }
    }
    Ok(labels)
}

/// A document with each label once.
fn document(id: Value, text: String, named: Vec<String>, place: Place) -> Document {
    let total = named.len();
    let mut seen = HashSet::with_capacity(total);
    let labels: Vec<String> = named.into_iter().filter(|label| seen.insert(label.clone())).collect();
    Document { id, text, repeated: total - labels.len(), labels, place }
}
