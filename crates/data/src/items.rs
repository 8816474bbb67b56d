//! The items of a data file, read one by one in any order: what questions, examples of retrieval and passages share.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::DataError;
use crate::index::Indexed;
use crate::question::Place;
use crate::scan::{Layout, Span};
use crate::source::Compression;

/// Longest item that is read, in bytes; more is taken for a broken file.
pub(crate) const MAX_ITEM_BYTES: u64 = 256 << 20;

/// Items whose places are looked up together, and bytes that are read together, where many are read in order.
const SPANS: usize = 4096;
const BLOCK_BYTES: u64 = 4 << 20;

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

    /// Gives every item of a range to `take`, in order, with its number, bytes and place: a few large reads instead of one an item.
    pub fn each(
        &self,
        range: Range<usize>,
        take: &mut dyn FnMut(usize, &[u8], Place) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut at = range.start;
        while at < range.end {
            let spans = self.indexed.spans(at..range.end.min(at + SPANS), &self.path)?;
            let mut rest = spans.as_slice();
            while let Some(first) = rest.first() {
                let reach = |s: &Span| (s.offset + s.length).saturating_sub(first.offset);
                let many = rest.iter().take_while(|s| reach(s) <= BLOCK_BYTES).count();
                if many < 2 {
                    let (bytes, place) = self.bytes(at)?;
                    take(at, &bytes, place)?;
                    (at, rest) = (at + 1, &rest[1..]);
                    continue;
                }
                let block = Span { length: reach(&rest[many - 1]), ..*first };
                let bytes = self.indexed.read(block, &self.path)?;
                for span in &rest[..many] {
                    let start = (span.offset - first.offset) as usize;
                    let place = Place { path: Arc::clone(&self.path), row: at, line: span.line };
                    take(at, &bytes[start..start + span.length as usize], place)?;
                    at += 1;
                }
                rest = &rest[many..];
            }
        }
        Ok(())
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
