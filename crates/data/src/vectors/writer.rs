//! Writing a set of vectors: who goes on has the same settings, and a finished shard is never written again.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::{
    MANIFEST, SETTINGS, ShardEntry, VectorSettings, VectorsManifest, bytes_of, check_size, entry_name, names,
    read_json,
};
use crate::error::DataError;
use crate::index::hex;
use crate::leftovers::remove_leftovers;
use crate::replace::sync_folder;
use crate::source::Beside;

/// A folder that vectors are being written into.
#[derive(Debug)]
pub struct VectorsFolder {
    dir: PathBuf,
    settings: VectorSettings,
}

impl VectorsFolder {
    /// Opens a folder to write into; makes it where it is not there, else compares its settings with these.
    ///
    /// # Errors
    /// Other settings than those it was begun with, by name; settings that make no sense; files that cannot be written.
    pub fn open(dir: &Path, settings: VectorSettings) -> Result<VectorsFolder, DataError> {
        settings.check().map_err(DataError::Setting)?;
        fs::create_dir_all(dir).map_err(DataError::io(dir, "create the folder"))?;
        let path = dir.join(SETTINGS);
        if !path.exists() {
            let beside = Beside::create(&path)?;
            write_json(&beside, &settings, &path)?;
            // Whoever comes second compares.
            beside.keep_new()?;
            sync(dir)?;
        }
        let found: VectorSettings = read_json(&path)?.ok_or_else(|| {
            DataError::file(
                &path,
                "it was there a moment ago and is gone; start again when nothing else works here",
            )
        })?;
        if let Some(difference) = settings.difference(&found) {
            return Err(DataError::file(
                dir,
                format!(
                    "expected to go on with the vectors that are here, found {difference}; name another folder"
                ),
            ));
        }
        Ok(VectorsFolder { dir: dir.to_owned(), settings })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What is written here.
    pub fn settings(&self) -> &VectorSettings {
        &self.settings
    }

    /// A shard that is finished: its entry and its files are there, of the size that they must have.
    ///
    /// # Errors
    /// An entry whose files are not there or of another size; an entry of another set.
    pub fn finished(&self, number: u64) -> Result<Option<ShardEntry>, DataError> {
        let path = self.dir.join(entry_name(number));
        let Some(entry) = read_json::<ShardEntry>(&path)? else { return Ok(None) };
        entry.check(&self.settings, number).map_err(|what| DataError::file(&path, what))?;
        let bytes = bytes_of(&self.settings, entry.count)
            .ok_or_else(|| DataError::file(&path, "its size is beyond any file's; embed again"))?;
        check_size(&self.dir.join(&entry.vectors), bytes)?;
        let ids = self.dir.join(&entry.ids);
        fs::metadata(&ids).map_err(DataError::io(&ids, "open the file"))?;
        Ok(Some(entry))
    }

    /// Begins shard `number`; what a killed process left of it goes.
    ///
    /// # Errors
    /// Files that cannot be written; a number that the set does not have.
    pub fn shard(&self, number: u64) -> Result<ShardWriter<'_>, DataError> {
        if number >= self.settings.shards() {
            return Err(DataError::Setting(format!(
                "{}: has {} shards, shard {number} was asked for",
                self.dir.display(),
                self.settings.shards()
            )));
        }
        let (vectors, ids) = names(number);
        for name in [&vectors, &ids] {
            remove_leftovers(&self.dir.join(name), Duration::ZERO, is_beside);
        }
        Ok(ShardWriter {
            folder: self,
            number,
            count: 0,
            vectors: Sum::create(&self.dir.join(vectors))?,
            ids: Sum::create(&self.dir.join(ids))?,
            row: Vec::new(),
        })
    }

    /// Writes the manifest if all shards are finished; tells how many are.
    ///
    /// # Errors
    /// As [`VectorsFolder::finished`]; a manifest that cannot be written.
    pub fn complete(&self) -> Result<u64, DataError> {
        let shards = self.settings.shards();
        let mut entries = Vec::new();
        for number in 0..shards {
            entries.extend(self.finished(number)?);
        }
        let finished = entries.len() as u64;
        if finished == shards {
            let path = self.dir.join(MANIFEST);
            let manifest = VectorsManifest { settings: self.settings.clone(), shards: entries };
            let beside = Beside::create(&path)?;
            write_json(&beside, &manifest, &path)?;
            beside.keep()?;
            sync(&self.dir)?;
        }
        Ok(finished)
    }
}

/// A shard that is being written, row by row. Dropped before [`ShardWriter::finish`] it leaves nothing behind.
pub struct ShardWriter<'a> {
    folder: &'a VectorsFolder,
    number: u64,
    count: u64,
    vectors: Sum,
    ids: Sum,
    row: Vec<u8>,
}

impl ShardWriter<'_> {
    /// Adds the next row.
    ///
    /// # Errors
    /// A vector of another dimension, with numbers that are none or too large for the format, named by its id; a full disk.
    pub fn push(&mut self, id: &str, vector: &[f32]) -> Result<(), DataError> {
        let settings = &self.folder.settings;
        self.row.clear();
        let encoded = match vector.len() == settings.dimension {
            true => settings.dtype.encode(vector, &mut self.row),
            false => Err(format!("the vector has {} numbers, not {}", vector.len(), settings.dimension)),
        };
        encoded.map_err(|what| {
            DataError::Text(format!(
                "{}: passage {id:?} cannot be stored: {what}",
                self.folder.dir.join(names(self.number).0).display()
            ))
        })?;
        self.vectors.write(&self.row)?;
        let mut line = serde_json::to_vec(id).map_err(|e| DataError::Text(e.to_string()))?;
        line.push(b'\n');
        self.ids.write(&line)?;
        self.count += 1;
        Ok(())
    }

    /// Syncs the files, gives them their names, and marks the shard as finished. `arithmetic` says with what instructions
    /// it was computed.
    ///
    /// # Errors
    /// Another number of rows than the shard has; files that cannot be written.
    pub fn finish(self, arithmetic: &str) -> Result<ShardEntry, DataError> {
        let ShardWriter { folder, number, count, vectors, ids, .. } = self;
        let rows = folder.settings.rows_of(number);
        if count != rows.end - rows.start {
            return Err(DataError::Setting(format!(
                "{}: shard {number} has {} rows, {count} were written",
                folder.dir.display(),
                rows.end - rows.start
            )));
        }
        let (vectors_name, ids_name) = names(number);
        let entry = ShardEntry {
            number,
            first: rows.start,
            count,
            vectors_sha256: vectors.keep()?,
            ids_sha256: ids.keep()?,
            vectors: vectors_name,
            ids: ids_name,
            arithmetic: arithmetic.to_owned(),
        };
        sync(&folder.dir)?;
        // Only now: this file says that the others are whole.
        let path = folder.dir.join(entry_name(number));
        let beside = Beside::create(&path)?;
        write_json(&beside, &entry, &path)?;
        beside.keep()?;
        sync(&folder.dir)?;
        Ok(entry)
    }
}

/// A file and the checksum of what was written to it.
pub(crate) struct Sum {
    beside: Beside,
    out: BufWriter<File>,
    sum: Sha256,
    path: PathBuf,
}

impl Sum {
    pub(crate) fn create(path: &Path) -> Result<Sum, DataError> {
        let beside = Self::locked(path)?;
        let file = beside.file.try_clone().map_err(DataError::io(path, "create the file"))?;
        Ok(Sum {
            beside,
            out: BufWriter::with_capacity(1 << 18, file),
            sum: Sha256::new(),
            path: path.to_owned(),
        })
    }

    /// A file with a lock that is held as long as it is written, so that others see that its writer lives. One who clears up between
    /// making the file and locking it takes it for a dead one's; then there is another.
    fn locked(path: &Path) -> Result<Beside, DataError> {
        loop {
            let beside = Beside::create(path)?;
            match flock(&beside.file, FlockOperation::NonBlockingLockExclusive) {
                // Its name may be another file's as soon as it is removed, so who removes it is the one who holds the lock.
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    beside.leave();
                    continue;
                }
                // Not every file system has locks; where it has none, nobody clears up either.
                Err(_) => return Ok(beside),
                Ok(()) => {}
            }
            let stat = rustix::fs::fstat(&beside.file)
                .map_err(|e| DataError::io(path, "create the file")(e.into()))?;
            if stat.st_nlink > 0 {
                return Ok(beside);
            }
            beside.leave();
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.sum.update(bytes);
        self.out.write_all(bytes).map_err(DataError::io(&self.path, "write the file"))
    }

    pub(crate) fn keep(mut self) -> Result<String, DataError> {
        self.out.flush().map_err(DataError::io(&self.path, "write the file"))?;
        self.beside.keep()?;
        Ok(hex(&self.sum.finalize()))
    }
}

pub(crate) fn write_json(
    beside: &Beside,
    value: &impl serde::Serialize,
    path: &Path,
) -> Result<(), DataError> {
    let mut out = BufWriter::new(&beside.file);
    serde_json::to_writer_pretty(&mut out, value)
        .map_err(io::Error::from)
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush())
        .map_err(DataError::io(path, "write the file"))
}

/// Makes the entries of a folder durable.
pub(crate) fn sync(dir: &Path) -> Result<(), DataError> {
    sync_folder(dir).map_err(DataError::io(dir, "sync the folder"))
}

/// Whether `.NAME.` and this is a name of [`Beside`]: process and attempt.
pub(crate) fn is_beside(tail: &str) -> bool {
    let number = |text: &str| text.parse::<u32>().is_ok();
    let own = tail.strip_suffix(".tmp").and_then(|rest| rest.split_once('.'));
    own.is_some_and(|(process, attempt)| number(process) && number(attempt))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn the_dead_are_removed_and_the_living_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("shard-00000.vectors");
        let of = |name: &str| dir.path().join(name);
        let dead = of(".shard-00000.vectors.12.0.tmp");
        let others = [
            of(".shard-00000.vectors.x.0.tmp"),
            of(".shard-00000.vectors.12.0"),
            of(".shard-00000.ids.12.0.tmp"),
        ];
        for path in others.iter().chain([&dead]) {
            fs::write(path, "x").unwrap();
        }
        remove_leftovers(&target, Duration::ZERO, is_beside);
        assert!(!dead.exists() && others.iter().all(|path| path.exists()));

        // One process begins shards while another clears up: no file of a living one goes.
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    remove_leftovers(&target, Duration::ZERO, is_beside);
                }
            });
            let lost = (0..300).filter(|_| {
                let mut file = Sum::create(&target).unwrap();
                file.write(b"1").unwrap();
                file.keep().is_err()
            });
            let lost = lost.count();
            end.store(true, Ordering::Relaxed);
            assert_eq!(lost, 0);
        });
    }
}
