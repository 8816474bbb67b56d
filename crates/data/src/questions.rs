//! A file of questions, read item by item in any order; memory does not grow with the file.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::items::{self, Items};
use crate::question::{Place, Question, parse_object};
use crate::source;

/// Longest item that is read, in bytes; more is taken for a broken file.
pub const MAX_ITEM_BYTES: u64 = items::MAX_ITEM_BYTES;

/// An open file of questions: FiD's `.json` (one list) or `.jsonl`, also `.gz` or `.zst`.
///
/// Shared between threads freely: reading takes no lock and moves no file position.
pub struct Questions {
    items: Items,
}

impl std::fmt::Debug for Questions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Questions").field("path", &self.path()).field("len", &self.len()).finish()
    }
}

impl Questions {
    /// Opens a file. The first time one streaming pass finds the items and writes an index into `cache_dir`
    /// (created if it is not there), with a decompressed copy if the file is compressed; later the index is used
    /// as long as the file keeps its path, size and modification time.
    ///
    /// # Errors
    /// If the file cannot be read, is empty, holds no items, was cut short, or the cache cannot be written.
    /// A fault inside one item shows when that item is read.
    pub fn open(path: &Path, cache_dir: &Path) -> Result<Questions, DataError> {
        let questions = Questions::open_faulty(path, cache_dir)?;
        match questions.fault() {
            Some(fault) => Err(fault),
            None => Ok(questions),
        }
    }

    /// Opens a file even if it has a fault as a whole; its good items can be read.
    pub(crate) fn open_faulty(path: &Path, cache_dir: &Path) -> Result<Questions, DataError> {
        Ok(Questions { items: Items::open(path, source::kind(path)?, cache_dir)? })
    }

    /// The file's fault as a whole.
    pub(crate) fn fault(&self) -> Option<DataError> {
        self.items.fault("questions")
    }

    /// How many items the file has.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the file has no items; never so after [`Questions::open`].
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

    /// Reads item `i`.
    ///
    /// # Errors
    /// If `i` is not below `len()`, the file changed since it was opened, or the item is not a good question.
    pub fn get(&self, i: usize) -> Result<Question, DataError> {
        let (bytes, place) = self.bytes(i)?;
        Question::from_json(&bytes, &place)
    }

    /// Reads item `i` as it stands, all keys kept in their order, for writing it again; see [`Questions::get`].
    ///
    /// Its `ctxs` are in file order; [`crate::Passage::file_position`] connects them with a sorted [`Question`].
    pub fn get_raw(&self, i: usize) -> Result<Map<String, Value>, DataError> {
        let (bytes, place) = self.bytes(i)?;
        parse_object(&bytes, &place)
    }

    /// The bytes of item `i` as they stand.
    pub(crate) fn bytes(&self, i: usize) -> Result<(Vec<u8>, Place), DataError> {
        self.items.bytes(i)
    }
}
