//! The tokenizer's files of a model folder: each read with a bound, and kept byte for byte for the models that are saved.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::DataError;
use crate::spiece;

pub(super) const JSON: &str = "tokenizer.json";
pub(super) const SPIECE: &str = "spiece.model";
/// XLM-RoBERTa's pieces.
pub(super) const XLM_ROBERTA: &str = "sentencepiece.bpe.model";
/// BERT's word pieces.
pub(super) const WORD_PIECES: &str = "vocab.txt";
/// RoBERTa's byte pairs, which need [`MERGES`].
pub(super) const BYTE_PAIRS: &str = "vocab.json";
pub(super) const MERGES: &str = "merges.txt";
pub(super) const CONFIG: &str = "tokenizer_config.json";
pub(super) const SPECIAL_MAP: &str = "special_tokens_map.json";

/// Every file, and the most bytes that are read of it.
const LIMITS: [(&str, u64); 8] = [
    (JSON, 256 << 20),
    (SPIECE, spiece::MAX_BYTES),
    (XLM_ROBERTA, spiece::MAX_BYTES),
    (WORD_PIECES, 64 << 20),
    (BYTE_PAIRS, 64 << 20),
    (MERGES, 64 << 20),
    (CONFIG, 64 << 20),
    (SPECIAL_MAP, 64 << 20),
];

/// Files by name, in a fixed order.
pub(super) struct Files {
    dir: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Files {
    /// Reads those that are there.
    pub fn read(dir: &Path) -> Result<Files, DataError> {
        let mut files = Vec::new();
        for (name, limit) in LIMITS {
            if let Some(bytes) = read(&dir.join(name), limit)? {
                files.push((name, bytes));
            }
        }
        Ok(Files { dir: dir.to_owned(), files })
    }

    /// The bytes of a file that is there.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|f| f.0 == name).map(|f| f.1.as_slice())
    }

    /// The path of a file, there or not.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// What a JSON file holds; null where it is not there.
    pub fn json(&self, name: &str) -> Result<Value, DataError> {
        let Some(bytes) = self.get(name) else { return Ok(Value::Null) };
        serde_json::from_slice(bytes).map_err(|e| {
            let what = format!("expected JSON, found an error ({e}); get the file again");
            DataError::file(&self.path(name), what)
        })
    }

    /// Puts a file first, in the place of one of that name.
    pub fn set(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.files.retain(|f| f.0 != name);
        self.files.insert(0, (name, bytes));
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (*name, bytes.as_slice()))
    }
}

/// A file's bytes, if it is there and not larger than `limit`.
pub(super) fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, DataError> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() => {}
        Ok(_) => {
            return Err(DataError::file(path, "expected a regular file, found a folder or a device"));
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(DataError::io(path, "open the file")(e)),
    }
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(DataError::io(path, "read the file"))?;
    if bytes.len() as u64 > limit {
        return Err(DataError::file(
            path,
            format!("expected at most {limit} bytes, found more; this is not a tokenizer's file"),
        ));
    }
    Ok(Some(bytes))
}
