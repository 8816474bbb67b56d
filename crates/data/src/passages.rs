//! A collection of passages, read one by one in any order; memory does not grow with the file.
//!
//! - `.tsv`: `id`, `text` and `title` between tabs, quoted as Python's csv module does it (DPR's `psgs_w100.tsv`); where its rows
//!   have as many fields only if a quote is a character like others, they are read so. A first row that begins with `id` names the
//!   columns; where there are only two they are `id` and `text` (MS MARCO's collection and queries).
//! - `.jsonl` (or one list in `.json`): `{id, title, text}`, or BEIR's `{_id, title, text}`.
//! - `.parquet`, with the feature of that name: columns of these names.

use std::path::Path;

use crate::convert::tsv::{fields, plain_fields};
use crate::error::DataError;
use crate::items::Items;
use crate::question::{ID_KEYS, Passage, Place, parse_object, passage_of};
use crate::scan::Layout;
use crate::source;

/// An open collection: `.tsv`, `.jsonl` or `.json`, also `.gz` or `.zst`.
///
/// Shared between threads freely: reading takes no lock and moves no file position.
pub struct Passages {
    items: Items,
    columns: Option<Columns>,
    quoted: bool,
}

/// Where the fields of a row are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Columns {
    id: usize,
    text: usize,
    title: Option<usize>,
    /// Fields that a row must have.
    count: usize,
    /// Rows of column names before the first passage.
    header: usize,
}

impl std::fmt::Debug for Passages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Passages").field("path", &self.path()).field("len", &self.len()).finish()
    }
}

impl Passages {
    /// Opens a file through its index in `cache_dir`, as [`crate::Questions::open`] does: one pass the first time, 24 bytes of
    /// index a passage, and a decompressed copy where the file is compressed.
    ///
    /// # Errors
    /// If the file cannot be read, is empty, holds no passages, was cut short, or the cache cannot be written.
    /// A fault inside one passage shows when it is read.
    pub fn open(path: &Path, cache_dir: &Path) -> Result<Passages, DataError> {
        let what = ".tsv (id, text, title between tabs), .jsonl (one passage per line) or .json (one list)";
        let endings = [(".json", Layout::List), (".jsonl", Layout::Lines), (".tsv", Layout::Records(b'\t'))];
        let kind = source::kind_among(path, &endings, what)?;
        let mut items = Items::open(path, kind, cache_dir)?;
        let mut quoted = kind.0 == Layout::Records(b'\t');
        if quoted && !items.is_even() {
            let plain = Items::open(path, (Layout::Rows, kind.1), cache_dir)?;
            if plain.is_even() {
                (items, quoted) = (plain, false);
            }
        }
        if let Some(fault) = items.fault("passages") {
            return Err(fault);
        }
        let columns = match kind.0 {
            Layout::Records(_) => Some(columns(&items, quoted)?),
            _ => None,
        };
        let passages = Passages { items, columns, quoted };
        if passages.is_empty() {
            return Err(DataError::file(path, "expected passages, found only the names of columns"));
        }
        Ok(passages)
    }

    /// How many passages the file has.
    pub fn len(&self) -> usize {
        self.items.len() - self.columns.map_or(0, |c| c.header)
    }

    /// Whether there are none; never so after [`Passages::open`].
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file as it was named when opened.
    pub fn path(&self) -> &Path {
        &self.items.path
    }

    /// SHA-256 of the decompressed content, as 64 hexadecimal digits.
    pub fn fingerprint(&self) -> &str {
        self.items.fingerprint()
    }

    /// Whether the fields of its rows are quoted; so, too, where it has no rows.
    pub fn is_quoted(&self) -> bool {
        self.quoted || self.columns.is_none()
    }

    /// Reads passage `i`; its `file_position` is `i`.
    ///
    /// # Errors
    /// If `i` is not below `len()`, the file changed since it was opened, or the passage is none: too few fields, no id, no
    /// text (an empty one is a text).
    pub fn get(&self, i: usize) -> Result<Passage, DataError> {
        self.get_placed(i).map(|(passage, _)| passage)
    }

    /// As [`Passages::get`], with the line on which the passage starts, from 1.
    ///
    /// # Errors
    /// Likewise.
    pub fn get_placed(&self, i: usize) -> Result<(Passage, u64), DataError> {
        let (bytes, place) = self.items.bytes(i.saturating_add(self.columns.map_or(0, |c| c.header)))?;
        // Numbered as the passages are, whatever precedes them in the file.
        let place = Place { row: i, ..place };
        let mut passage = match &self.columns {
            Some(columns) => row(&bytes, columns, self.quoted, &place)?,
            None => object(&bytes, &place)?,
        };
        passage.file_position = i;
        Ok((passage, place.line))
    }
}

/// The columns of a file of rows: as its first row names them, or DPR's.
fn columns(items: &Items, quoted: bool) -> Result<Columns, DataError> {
    let (bytes, place) = items.bytes(0)?;
    let first = split(&bytes, 0, quoted, &place)?;
    if first.len() == 2 && first[0] != "id" {
        return Ok(Columns { id: 0, text: 1, title: None, count: 2, header: 0 });
    }
    if first[0] != "id" {
        return Ok(Columns { id: 0, text: 1, title: Some(2), count: 3, header: 0 });
    }
    let at = |name: &str| first.iter().position(|field| field == name);
    match at("text") {
        Some(text) => Ok(Columns { id: 0, text, title: at("title"), count: first.len(), header: 1 }),
        None => {
            let hint = "name the columns id, text, title";
            Err(place.error("a column named text beside id", first.join(", "), hint))
        }
    }
}

fn row(bytes: &[u8], columns: &Columns, quoted: bool, place: &Place) -> Result<Passage, DataError> {
    let mut fields = split(bytes, place.row, quoted, place)?;
    if fields.len() != columns.count {
        let expected = format!("{} fields between tabs (id, text, title)", columns.count);
        let found = if fields.len() == 1 { "1 field".into() } else { format!("{} fields", fields.len()) };
        let hint = "a field with a tab or a quote needs quotes around it, and its own quotes doubled";
        return Err(place.error(expected, found, hint));
    }
    let mut field = |k: usize| std::mem::take(&mut fields[k]);
    let (id, text, title) = (field(columns.id), field(columns.text), columns.title.map(field));
    if id.is_empty() {
        return Err(place.error("an id in the first field", "none", "every passage needs an id of its own"));
    }
    Ok(Passage { id, title: title.unwrap_or_default(), text, score: None, file_position: 0 })
}

/// The fields of a row.
fn split(bytes: &[u8], row: usize, quoted: bool, place: &Place) -> Result<Vec<String>, DataError> {
    let mark: &[u8] = if row == 0 { b"\xEF\xBB\xBF" } else { b"" };
    let bytes = bytes.strip_prefix(mark).unwrap_or(bytes);
    if quoted { fields(&place.path, place.line, bytes) } else { plain_fields(&place.path, place.line, bytes) }
}

fn object(bytes: &[u8], place: &Place) -> Result<Passage, DataError> {
    let map = parse_object(bytes, place)?;
    let passage = passage_of(map, "", place)?;
    if passage.id.is_empty() {
        let expected =
            format!("a string or a number in one of {}", ID_KEYS.map(|k| format!("`{k}`")).join(", "));
        return Err(place.error(expected, "none", "every passage needs an id of its own"));
    }
    Ok(passage)
}
