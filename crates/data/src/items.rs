//! The items of a data file, read one by one in any order: what questions, examples of retrieval and passages share.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::DataError;
use crate::index::Indexed;
use crate::question::Place;
use crate::scan::Layout;
use crate::source::Compression;

/// Longest item that is read, in bytes; more is taken for a broken file.
pub(crate) const MAX_ITEM_BYTES: u64 = 256 << 20;

/// An open file and its index. Shared between threads freely: reading takes no lock and moves no file position.
pub(crate) struct Items {
    pub path: Arc<PathBuf>,
    indexed: Indexed,
}

impl Items {
    /// Opens a file even if it has a fault as a whole; its good items can be read.
    pub fn open(path: &Path, kind: (Layout, Compression), cache_dir: &Path) -> Result<Items, DataError> {
        Ok(Items { path: Arc::new(path.to_path_buf()), indexed: Indexed::open(path, kind, cache_dir)? })
    }

    /// The file's fault as a whole; a file without items has one, too. `what` the items are, in words.
    pub fn fault(&self, what: &str) -> Option<DataError> {
        if let Some(fault) = &self.indexed.fault {
            return Some(DataError::file(&self.path, format!("line {}: {}", fault.line, fault.message)));
        }
        (self.len() == 0).then(|| {
            DataError::file(
                &self.path,
                format!("expected {what}, found none in the file; get the file again"),
            )
        })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.indexed.items
    }

    /// Whether the file is whole and all its rows have as many fields.
    pub fn is_even(&self) -> bool {
        self.indexed.fault.is_none() && self.indexed.fields.is_some_and(|(least, most)| least == most)
    }

    /// SHA-256 of the decompressed content, as 64 hexadecimal digits.
    pub fn fingerprint(&self) -> &str {
        &self.indexed.sha256
    }

    /// The bytes of item `i` as they stand, and where they stand.
    pub fn bytes(&self, i: usize) -> Result<(Vec<u8>, Place), DataError> {
        if i >= self.len() {
            return Err(DataError::Setting(format!(
                "{}: has {} items, item {i} was asked for",
                self.path.display(),
                self.len()
            )));
        }
        let span = self.indexed.span(i, &self.path)?;
        let place = Place { path: Arc::clone(&self.path), row: i, line: span.line };
        if span.length > MAX_ITEM_BYTES {
            let expected = format!("an item of at most {MAX_ITEM_BYTES} bytes");
            return Err(place.error(
                expected,
                format!("{} bytes", span.length),
                "look for a missing line end or bracket",
            ));
        }
        Ok((self.indexed.read(span, &self.path)?, place))
    }
}
