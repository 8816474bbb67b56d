//! Writing vectors of tokens: who goes on has the same settings, and a finished shard is never written again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{KIND, MANIFEST, Manifest, MultiShardEntry, SETTINGS, Settings, name};
use crate::error::DataError;
use crate::leftovers::remove_leftovers;
use crate::source::Beside;
use crate::vectors::writer::{Sum, is_beside, sync, write_json};
use crate::vectors::{VectorSettings, bytes_of, check_size, read_json};

/// A folder that vectors of tokens are being written into.
#[derive(Debug)]
pub struct MultiVectorsFolder {
    dir: PathBuf,
    settings: Settings,
}

impl MultiVectorsFolder {
    /// Opens a folder to write into; makes it where it is not there, else compares its settings with these. `count` and `per_shard` are
    /// numbers of documents.
    ///
    /// # Errors
    /// Other settings than those it was begun with, by name; settings that make no sense; files that cannot be written.
    pub fn open(dir: &Path, settings: VectorSettings) -> Result<MultiVectorsFolder, DataError> {
        settings.check().map_err(DataError::Setting)?;
        let settings = Settings { kind: KIND.into(), of: settings };
        fs::create_dir_all(dir).map_err(DataError::io(dir, "create the folder"))?;
        let path = dir.join(SETTINGS);
        if !path.exists() {
            let beside = Beside::create(&path)?;
            write_json(&beside, &settings, &path)?;
            // Whoever comes second compares.
            beside.keep_new()?;
            sync(dir)?;
        }
        // Settings of single vectors have no kind: that is another folder, not a broken one.
        let found: serde_json::Value = read_json(&path)?.unwrap_or_default();
        if found.get("kind").and_then(serde_json::Value::as_str) != Some(KIND) {
            let what = "expected settings of vectors of tokens, found others; name another folder";
            return Err(DataError::file(&path, what));
        }
        let found: Settings = serde_json::from_value(found).map_err(|e| {
            DataError::file(&path, format!("expected settings of vectors, found others ({e})"))
        })?;
        if let Some(difference) = settings.of.difference(&found.of) {
            return Err(DataError::file(
                dir,
                format!(
                    "expected to go on with the vectors that are here, found {difference}; name another folder"
                ),
            ));
        }
        Ok(MultiVectorsFolder { dir: dir.to_owned(), settings })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What is written here.
    pub fn settings(&self) -> &VectorSettings {
        &self.settings.of
    }

    /// A shard that is finished: its entry and its files are there, of the size that they must have.
    ///
    /// # Errors
    /// An entry whose files are not there or of another size; an entry of another set.
    pub fn finished(&self, number: u64) -> Result<Option<MultiShardEntry>, DataError> {
        let path = self.dir.join(name(number, "json"));
        let Some(entry) = read_json::<MultiShardEntry>(&path)? else { return Ok(None) };
        entry.check(&self.settings.of, number).map_err(|what| DataError::file(&path, what))?;
        check_files(&self.dir, &self.settings.of, &entry)?;
        Ok(Some(entry))
    }

    /// Begins shard `number`; what a killed process left of it goes.
    ///
    /// # Errors
    /// Files that cannot be written; a number that the set does not have.
    pub fn shard(&self, number: u64) -> Result<MultiShardWriter<'_>, DataError> {
        if number >= self.settings.of.shards() {
            return Err(DataError::Setting(format!(
                "{}: has {} shards, shard {number} was asked for",
                self.dir.display(),
                self.settings.of.shards()
            )));
        }
        let file = |part| {
            let path = self.dir.join(name(number, part));
            remove_leftovers(&path, Duration::ZERO, is_beside);
            Sum::create(&path)
        };
        Ok(MultiShardWriter {
            folder: self,
            number,
            count: 0,
            tokens: 0,
            vectors: file("tokens")?,
            lengths: file("lengths")?,
            ids: file("ids")?,
            bytes: Vec::new(),
        })
    }

    /// Writes the manifest if all shards are finished; tells how many are.
    ///
    /// # Errors
    /// As [`MultiVectorsFolder::finished`]; a manifest that cannot be written.
    pub fn complete(&self) -> Result<u64, DataError> {
        let shards = self.settings.of.shards();
        let mut entries = Vec::new();
        for number in 0..shards {
            entries.extend(self.finished(number)?);
        }
        let finished = entries.len() as u64;
        if finished == shards {
            let path = self.dir.join(MANIFEST);
            let beside = Beside::create(&path)?;
            write_json(&beside, &Manifest { settings: self.settings.clone(), shards: entries }, &path)?;
            beside.keep()?;
            sync(&self.dir)?;
        }
        Ok(finished)
    }
}

/// Compares the sizes of a shard's files.
pub(super) fn check_files(
    dir: &Path,
    settings: &VectorSettings,
    entry: &MultiShardEntry,
) -> Result<(), DataError> {
    let too_large =
        || DataError::file(dir, format!("shard {} is larger than any file; embed again", entry.number));
    let vectors = bytes_of(settings, entry.tokens).ok_or_else(too_large)?;
    let lengths = entry.count.checked_mul(4).ok_or_else(too_large)?;
    check_size(&dir.join(name(entry.number, "tokens")), vectors)?;
    check_size(&dir.join(name(entry.number, "lengths")), lengths)?;
    let ids = dir.join(name(entry.number, "ids"));
    fs::metadata(&ids).map_err(DataError::io(&ids, "open the file"))?;
    Ok(())
}

/// A shard that is being written, document by document. Dropped before [`MultiShardWriter::finish`] it leaves nothing behind.
pub struct MultiShardWriter<'a> {
    folder: &'a MultiVectorsFolder,
    number: u64,
    count: u64,
    tokens: u64,
    vectors: Sum,
    lengths: Sum,
    ids: Sum,
    bytes: Vec<u8>,
}

impl MultiShardWriter<'_> {
    /// Adds the next document: the vectors of its tokens, one after the other; there may be none.
    ///
    /// # Errors
    /// Numbers that are no whole vectors, are none or too large for the format, named by the document's id; a full disk.
    pub fn push(&mut self, id: &str, vectors: &[f32]) -> Result<(), DataError> {
        let settings = &self.folder.settings.of;
        let count = vectors.len() / settings.dimension;
        self.bytes.clear();
        let length = u32::try_from(count).ok().filter(|_| vectors.len().is_multiple_of(settings.dimension));
        let encoded = match length {
            Some(length) => settings.dtype.encode(vectors, &mut self.bytes).map(|()| length),
            None => Err(format!("{} numbers are no vectors of {}", vectors.len(), settings.dimension)),
        };
        let length = encoded.map_err(|what| {
            DataError::Text(format!(
                "{}: document {id:?} cannot be stored: {what}",
                self.folder.dir.join(name(self.number, "tokens")).display()
            ))
        })?;
        self.vectors.write(&self.bytes)?;
        self.lengths.write(&length.to_le_bytes())?;
        let mut line = serde_json::to_vec(id).map_err(|e| DataError::Text(e.to_string()))?;
        line.push(b'\n');
        self.ids.write(&line)?;
        self.count += 1;
        self.tokens += u64::from(length);
        Ok(())
    }

    /// Syncs the files, gives them their names, and marks the shard as finished. `arithmetic` says with what instructions
    /// it was computed.
    ///
    /// # Errors
    /// Another number of documents than the shard has; files that cannot be written.
    pub fn finish(self, arithmetic: &str) -> Result<MultiShardEntry, DataError> {
        let MultiShardWriter { folder, number, count, tokens, vectors, lengths, ids, .. } = self;
        let rows = folder.settings.of.rows_of(number);
        if count != rows.end - rows.start {
            return Err(DataError::Setting(format!(
                "{}: shard {number} has {} documents, {count} were written",
                folder.dir.display(),
                rows.end - rows.start
            )));
        }
        let entry = MultiShardEntry {
            number,
            first: rows.start,
            count,
            tokens,
            tokens_sha256: vectors.keep()?,
            lengths_sha256: lengths.keep()?,
            ids_sha256: ids.keep()?,
            arithmetic: arithmetic.to_owned(),
        };
        sync(&folder.dir)?;
        // Only now: this file says that the others are whole.
        let path = folder.dir.join(name(number, "json"));
        let beside = Beside::create(&path)?;
        write_json(&beside, &entry, &path)?;
        beside.keep()?;
        sync(&folder.dir)?;
        Ok(entry)
    }
}
