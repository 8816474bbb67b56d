//! Documents with labels, read one by one in any order; memory does not grow with the file.

use std::path::Path;

use super::folder::Folder;
use super::formats::{Columns, Form, Table, json, line, table_row};
use crate::error::DataError;
use crate::items::Items;
use crate::question::Place;
use crate::scan::Layout;
use crate::source;

/// One document.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Its `id` where a JSON file has one (a string or a number); in a folder label/file; else the row number.
    pub id: serde_json::Value,
    /// The text without white space around it; may be empty.
    pub text: String,
    /// Its labels, each once, in their order; may be none.
    pub labels: Vec<String>,
    /// Labels that were named again.
    pub repeated: usize,
    /// Where it came from.
    pub place: Place,
}

impl Document {
    /// A document from a line of text: FastText's form, or bare text.
    ///
    /// # Errors
    /// Bytes that are no UTF-8, a label without a name.
    pub fn from_line(bytes: &[u8], place: Place) -> Result<Document, DataError> {
        line(bytes, place)
    }

    /// A document from an object of JSON.
    ///
    /// # Errors
    /// Bytes that are none; text or labels that are not what [`Columns`] says.
    pub fn from_json(columns: &Columns, bytes: &[u8], place: Place) -> Result<Document, DataError> {
        json(columns, bytes, place)
    }
}

/// An open file of documents, or a folder of files per label:
///
/// - `.txt`, `.ft`, `.fasttext`: FastText's lines, `__label__NAME` once or more, then the text;
/// - `.csv`, `.tsv`: rows of fields, quoted as Python's csv module does it, with named columns ([`Columns`]);
/// - `.jsonl` (or one list in `.json`): objects with a text and a label or a list of labels;
/// - `.parquet`, with the feature of that name: likewise;
/// - a folder with a folder for each label, in which every file is a document.
///
/// Files also as `.gz` or `.zst`. Shared between threads freely: reading takes no lock and moves no file position.
pub struct Documents {
    source: Source,
    columns: Columns,
}

enum Source {
    File { items: Items, form: Form },
    Folder(Folder),
}

impl std::fmt::Debug for Documents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Documents").field("path", &self.path()).field("len", &self.len()).finish()
    }
}

impl Documents {
    /// Opens a file through its index in `cache_dir`, as [`crate::Questions::open`] does: one pass the first time, 24 bytes of index a
    /// document, and a decompressed copy where the file is compressed. The names of a folder are kept in memory. Columns are
    /// those of [`Columns::default`] until [`Documents::with_columns`].
    ///
    /// # Errors
    /// If the file cannot be read, is empty, holds no documents, was cut short, or the cache cannot be written.
    /// A fault inside one document shows when it is read.
    pub fn open(path: &Path, cache_dir: &Path) -> Result<Documents, DataError> {
        let columns = Columns::default();
        if path.is_dir() {
            return Ok(Documents { source: Source::Folder(Folder::open(path)?), columns });
        }
        let what = ".txt (FastText: __label__NAME, then the text), .csv, .tsv, .jsonl (one object per line) or .json (one list)";
        let endings = [
            (".txt", Layout::Rows),
            (".ft", Layout::Rows),
            (".fasttext", Layout::Rows),
            (".csv", Layout::Records(b',')),
            (".tsv", Layout::Records(b'\t')),
            (".jsonl", Layout::Lines),
            (".json", Layout::List),
        ];
        let kind = source::kind_among(path, &endings, what)?;
        let items = Items::open(path, kind, cache_dir)?;
        if let Some(fault) = items.fault("documents") {
            return Err(fault);
        }
        let form = match kind.0 {
            Layout::Rows => Form::FastText,
            Layout::Records(separator) => Form::Table(Table::unnamed(separator)),
            Layout::Lines | Layout::List => Form::Json,
        };
        let mut documents = Documents { source: Source::File { items, form }, columns };
        if matches!(documents.source, Source::File { form: Form::Table(_), .. })
            && let Ok(named) = documents.table(&documents.columns)
        {
            documents.set_table(named);
        }
        Ok(documents)
    }

    /// The same documents with their text and labels in other columns. Columns mean nothing in FastText's lines and in a folder.
    ///
    /// # Errors
    /// A table without these columns, or with nothing but their names.
    pub fn with_columns(mut self, columns: Columns) -> Result<Documents, DataError> {
        if matches!(self.source, Source::File { form: Form::Table(_), .. }) {
            let table = self.table(&columns)?;
            self.set_table(table);
            if self.is_empty() {
                return Err(DataError::file(
                    self.path(),
                    "expected documents, found only the names of columns",
                ));
            }
        }
        self.columns = columns;
        Ok(self)
    }

    fn table(&self, columns: &Columns) -> Result<Table, DataError> {
        match &self.source {
            Source::File { items, form: Form::Table(table) } => {
                let (bytes, place) = items.bytes(0)?;
                Table::of(table.separator, columns, &bytes, &place)
            }
            _ => Err(DataError::file(self.path(), "expected rows of fields")),
        }
    }

    fn set_table(&mut self, table: Table) {
        if let Source::File { form, .. } = &mut self.source {
            *form = Form::Table(table);
        }
    }

    /// How many documents there are.
    pub fn len(&self) -> usize {
        match &self.source {
            Source::File { items, form } => items.len() - form.header(),
            Source::Folder(folder) => folder.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file or the folder as it was named when opened.
    pub fn path(&self) -> &Path {
        match &self.source {
            Source::File { items, .. } => &items.path,
            Source::Folder(folder) => folder.path(),
        }
    }

    /// SHA-256 of the decompressed content, as 64 hexadecimal digits; of a folder that of the names and contents of its files.
    pub fn fingerprint(&self) -> &str {
        match &self.source {
            Source::File { items, .. } => items.fingerprint(),
            Source::Folder(folder) => folder.fingerprint(),
        }
    }

    /// Reads document `i`.
    ///
    /// # Errors
    /// If `i` is not below `len()`, the file changed since it was opened, or the document is none: no UTF-8, no text, fields
    /// too many or too few. One without labels, or with an empty text, is read.
    pub fn get(&self, i: usize) -> Result<Document, DataError> {
        match &self.source {
            Source::File { items, form } => {
                let (bytes, place) = items.bytes(i.saturating_add(form.header()))?;
                self.parse(form, &bytes, Place { row: i, ..place })
            }
            Source::Folder(folder) => folder.get(i),
        }
    }

    /// Reads all documents in order, several at a time, and gives them to `take`, the faulty ones as their errors.
    ///
    /// # Errors
    /// If the file cannot be read or changed since it was opened; what `take` returns.
    pub fn each(
        &self,
        take: &mut dyn FnMut(usize, Result<Document, DataError>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        self.each_of(&|_| true, take)
    }

    /// As [`Documents::each`], of those rows that are wanted.
    pub(crate) fn each_of(
        &self,
        wanted: &dyn Fn(usize) -> bool,
        take: &mut dyn FnMut(usize, Result<Document, DataError>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match &self.source {
            Source::File { items, form } => {
                let header = form.header();
                items.each(header..items.len(), &mut |at, bytes, place| {
                    let row = at - header;
                    match wanted(row) {
                        true => take(row, self.parse(form, bytes, Place { row, ..place })),
                        false => Ok(()),
                    }
                })
            }
            Source::Folder(folder) => {
                (0..folder.len()).filter(|&i| wanted(i)).try_for_each(|i| match folder.get(i) {
                    Err(e) if !is_of_item(&e) => Err(e),
                    document => take(i, document),
                })
            }
        }
    }

    fn parse(&self, form: &Form, bytes: &[u8], place: Place) -> Result<Document, DataError> {
        match form {
            Form::FastText => line(bytes, place),
            Form::Table(table) => table_row(table, bytes, place),
            Form::Json => json(&self.columns, bytes, place),
        }
    }

    /// The bytes of document `i` as they stand, for comparing files; of a folder its label, name and text.
    ///
    /// # Errors
    /// As [`Documents::get`], but for the document's form.
    pub fn raw(&self, i: usize) -> Result<Vec<u8>, DataError> {
        match &self.source {
            Source::File { items, form } => Ok(items.bytes(i.saturating_add(form.header()))?.0),
            Source::Folder(folder) => folder.raw(i),
        }
    }
}

/// Whether an error is of one document only, so that the others may be of use.
pub(crate) fn is_of_item(error: &DataError) -> bool {
    matches!(error, DataError::Item { .. })
}
