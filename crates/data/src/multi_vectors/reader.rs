//! Reading a complete set of vectors of tokens: positioned reads, so that memory grows by 8 bytes a document only.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::writer::check_files;
use super::{KIND, MANIFEST, Manifest, MultiShardEntry, Origin, SETTINGS, TokenVectors, name};
use crate::error::DataError;
use crate::index::hex;
use crate::vectors::reader::{read_ids, refuse_no_numbers};
use crate::vectors::{VectorSettings, read_json};

/// A complete set of vectors of tokens.
#[derive(Debug)]
pub struct MultiVectors {
    dir: PathBuf,
    settings: VectorSettings,
    shards: Vec<MultiShardEntry>,
    /// Files of vectors, and how many vectors lie before each.
    files: Vec<(u64, PathBuf, File)>,
    /// Vectors before each document, and all.
    starts: Vec<u64>,
}

impl MultiVectors {
    /// Opens a folder that was finished. Lengths are read, vectors are not.
    ///
    /// # Errors
    /// A set that is not complete, another format or kind, a manifest that contradicts itself or the files.
    pub fn open(dir: &Path) -> Result<MultiVectors, DataError> {
        let path = dir.join(MANIFEST);
        let Some(found) = read_json::<serde_json::Value>(&path)? else {
            let what = match dir.join(SETTINGS).exists() {
                true => {
                    "the vectors here are not complete (there is no manifest.json yet); embed again, it goes on"
                }
                false => {
                    "expected a folder of vectors of tokens with a manifest.json, found none; make one with \
                     `tercio embed --multi-vector`"
                }
            };
            return Err(DataError::file(dir, what));
        };
        if found.get("kind").and_then(serde_json::Value::as_str) != Some(KIND) {
            let what = "expected vectors of tokens, found another manifest (one vector a text, or an index); make them with \
                        `tercio embed --multi-vector`";
            return Err(DataError::file(&path, what));
        }
        let fault = |what: String| DataError::file(&path, what);
        let manifest: Manifest = serde_json::from_value(found).map_err(|e| {
            fault(format!("expected a manifest of vectors of tokens, found another ({e}); embed again"))
        })?;
        let settings = manifest.settings.of;
        settings.check().map_err(fault)?;
        if manifest.shards.len() as u64 != settings.shards() {
            return Err(fault(format!(
                "expected {} shards of {} documents, found {}; embed again",
                settings.shards(),
                settings.count,
                manifest.shards.len()
            )));
        }
        let (mut files, mut starts) = (Vec::new(), vec![0u64]);
        for (number, entry) in manifest.shards.iter().enumerate() {
            entry.check(&settings, number as u64).map_err(fault)?;
            check_files(dir, &settings, entry)?;
            let vectors = dir.join(name(number as u64, "tokens"));
            let file = File::open(&vectors).map_err(DataError::io(&vectors, "open the file"))?;
            let before = starts[starts.len() - 1];
            files.push((before, vectors, file));
            let lengths = dir.join(name(number as u64, "lengths"));
            let bytes = std::fs::read(&lengths).map_err(DataError::io(&lengths, "read the file"))?;
            let mut at = before;
            for length in bytes.as_chunks::<4>().0 {
                at += u64::from(u32::from_le_bytes(*length));
                starts.push(at);
            }
            if at - before != entry.tokens || starts.len() as u64 != entry.first + entry.count + 1 {
                let what = format!(
                    "expected lengths of {} documents that sum to {} vectors, found {}; the file was damaged: embed again",
                    entry.count,
                    entry.tokens,
                    at - before
                );
                return Err(DataError::file(&lengths, what));
            }
        }
        Ok(MultiVectors { dir: dir.to_owned(), settings, shards: manifest.shards, files, starts })
    }

    /// What the vectors are made of and how.
    pub fn settings(&self) -> &VectorSettings {
        &self.settings
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// SHA-256 over the checksums of all shards' vectors and lengths, in hexadecimal digits.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        for shard in &self.shards {
            sum.update(shard.tokens_sha256.as_bytes());
            sum.update(shard.lengths_sha256.as_bytes());
        }
        hex(&sum.finalize())
    }

    /// The vectors of one document.
    ///
    /// # Errors
    /// As [`TokenVectors::read`]; a document that is not there.
    pub fn document(&self, number: u64) -> Result<Vec<f32>, DataError> {
        if number >= self.documents() {
            return Err(DataError::Setting(format!(
                "{}: has {} documents, number {number} was asked for",
                self.dir.display(),
                self.documents()
            )));
        }
        let (start, end) = (self.start(number), self.start(number + 1));
        let mut out = vec![0.0; (end - start) as usize * self.dimension()];
        self.read(start, &mut out)?;
        Ok(out)
    }

    /// Reads all files and compares their checksums; false where `stop` ended it before all were compared.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn verify_until(&self, stop: &dyn Fn() -> bool) -> Result<bool, DataError> {
        let mut chunk = vec![0; 1 << 20];
        for shard in &self.shards {
            let files = [
                ("tokens", &shard.tokens_sha256),
                ("lengths", &shard.lengths_sha256),
                ("ids", &shard.ids_sha256),
            ];
            for (part, expected) in files {
                let path = self.dir.join(name(shard.number, part));
                let mut file = File::open(&path).map_err(DataError::io(&path, "open the file"))?;
                let mut sum = Sha256::new();
                loop {
                    if stop() {
                        return Ok(false);
                    }
                    match file.read(&mut chunk).map_err(DataError::io(&path, "read the file"))? {
                        0 => break,
                        n => sum.update(&chunk[..n]),
                    }
                }
                let found = hex(&sum.finalize());
                if found != *expected {
                    let what = format!(
                        "expected the SHA-256 {expected}, found {found}; the file was damaged: embed again"
                    );
                    return Err(DataError::file(&path, what));
                }
            }
        }
        Ok(true)
    }
}

impl TokenVectors for MultiVectors {
    fn dimension(&self) -> usize {
        self.settings.dimension
    }

    fn documents(&self) -> u64 {
        self.settings.count
    }

    fn start(&self, document: u64) -> u64 {
        self.starts[document as usize]
    }

    fn read(&self, first: u64, out: &mut [f32]) -> Result<(), DataError> {
        let (dimension, dtype) = (self.dimension(), self.settings.dtype);
        let row = dimension * dtype.bytes();
        let end = first.checked_add((out.len() / dimension) as u64);
        if !out.len().is_multiple_of(dimension) || end.is_none_or(|end| end > self.tokens()) {
            return Err(DataError::Setting(format!(
                "{}: has {} vectors of {dimension} numbers, {} numbers from vector {first} were asked for",
                self.dir.display(),
                self.tokens(),
                out.len()
            )));
        }
        let mut at = first;
        let mut rest = out;
        let mut shard = self.files.partition_point(|(before, ..)| *before <= first).saturating_sub(1);
        while !rest.is_empty() {
            let (before, path, file) = &self.files[shard];
            let after = self.files.get(shard + 1).map_or(self.tokens(), |(before, ..)| *before);
            let count = ((after - at) as usize).min(rest.len() / dimension);
            let (part, others) = rest.split_at_mut(count * dimension);
            let mut bytes = vec![0; count * row];
            file.read_exact_at(&mut bytes, (at - before) * row as u64)
                .map_err(DataError::io(path, "read the file"))?;
            dtype.decode(&bytes, part);
            refuse_no_numbers(path, (at - before) as usize, dimension, part)?;
            at += count as u64;
            shard += 1;
            rest = others;
        }
        Ok(())
    }

    fn ids(&self) -> Result<Vec<String>, DataError> {
        let mut ids = Vec::new();
        for shard in &self.shards {
            ids.extend(read_ids(&self.dir.join(name(shard.number, "ids")), shard.count as usize)?);
        }
        Ok(ids)
    }

    fn origin(&self) -> Origin {
        Origin {
            path: self.dir.display().to_string(),
            model: self.settings.model.clone(),
            model_fingerprint: self.settings.model_fingerprint.clone(),
            source_fingerprint: self.settings.source_fingerprint.clone(),
            vectors_fingerprint: Some(self.fingerprint()),
        }
    }
}
