//! The folder of an index while it is written: one process at a time, new files under new names, the manifest last.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};
use tercio_data::hex;
use tercio_data::replace::{ReplacedFile, sync_folder};

use super::{Collection, FORMAT, FileEntry, MANIFEST, Manifest};
use crate::error::SearchError;

/// Locked by whoever writes into the folder.
const LOCK: &str = ".lock";
/// What files of an index hold, as their names say: of a compressed one whole, of BM25 behind a segment's name.
const PARTS: [&str; 11] = [
    "centroids",
    "codebooks",
    "counts",
    "rows",
    "codes",
    "buckets",
    "lengths",
    "residuals",
    "members",
    "ids",
    "deleted",
];
const SEGMENT_PARTS: [&str; 3] = [".postings", ".terms", ".lengths"];

/// Whether a file has a name that [`IndexFolder::create`] gives: `v`, a version, and what the file holds. While it is written, a dot
/// stands before that, and behind it what [`ReplacedFile`] adds.
fn is_of_index(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let name = match name.strip_prefix('.').map(|hidden| hidden.rsplit_once('.')) {
        None => name,
        Some(Some((name, _))) => name,
        Some(None) => return false,
    };
    let Some((version, part)) = name.strip_prefix('v').and_then(|rest| rest.split_once('-')) else {
        return false;
    };
    let segment = SEGMENT_PARTS.iter().find_map(|end| part.strip_suffix(end));
    let of_segment = |s: &str| s == "all" || number(s.strip_prefix("run-").unwrap_or(s));
    number(version) && (PARTS.contains(&part) || segment.is_some_and(of_segment))
}

/// Refuses a folder without an index in which somebody has files of another kind.
fn refuse_strangers(dir: &Path) -> Result<(), SearchError> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(SearchError::io(dir, "read the folder"))?,
    };
    for entry in entries {
        let entry = entry.map_err(SearchError::io(dir, "read the folder"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|t| t.is_file());
        if !name.starts_with('.') && !(is_file && (is_of_index(&name) || name == MANIFEST)) {
            return Err(SearchError::file(
                dir,
                format!("expected an empty folder or an index, found {name:?}; name another folder"),
            ));
        }
    }
    Ok(())
}

/// A folder that one process writes an index into.
#[derive(Debug)]
pub struct IndexFolder {
    dir: PathBuf,
    /// Locked as long as this lives, where the file system has locks.
    _lock: File,
    version: u64,
    earlier: Option<Manifest>,
}

impl IndexFolder {
    /// Takes a folder, made where it is not there, to write the next version of an index. What a killed process left in it goes.
    ///
    /// # Errors
    /// Another process is at work here; a folder with files that are no index; one that cannot be written.
    pub fn open(dir: &Path) -> Result<IndexFolder, SearchError> {
        // Before a lock is left in it.
        if Manifest::read_if_there(dir)?.is_none() {
            refuse_strangers(dir)?;
        }
        fs::create_dir_all(dir).map_err(SearchError::io(dir, "create the folder"))?;
        let path = dir.join(LOCK);
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(SearchError::io(&path, "write the file"))?;
        if let Err(rustix::io::Errno::WOULDBLOCK) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            return Err(SearchError::file(
                dir,
                "another process writes an index here; wait for it, or name another folder",
            ));
        }
        let earlier = Manifest::read_if_there(dir)?;
        let version = earlier.as_ref().map_or(0, |m| m.version).checked_add(1).ok_or_else(|| {
            let what =
                format!("expected a version below {}, found that; index into another folder", u64::MAX);
            SearchError::file(&dir.join(MANIFEST), what)
        })?;
        if earlier.is_none() {
            refuse_strangers(dir)?;
        }
        let folder = IndexFolder { dir: dir.to_owned(), _lock: lock, version, earlier };
        folder.clear(folder.earlier.as_ref())?;
        Ok(folder)
    }

    /// Takes the folder of an index to add to it: the folder, and its manifest as it is as long as nobody else writes here.
    ///
    /// # Errors
    /// As [`IndexFolder::open`] and [`Manifest::read`]; no index, and then nothing is left there.
    pub fn open_earlier(dir: &Path) -> Result<(IndexFolder, Manifest), SearchError> {
        let none =
            || SearchError::file(dir, "expected an index to append to, found none; leave --append out");
        if Manifest::read_if_there(dir)?.is_none() {
            return Err(none());
        }
        let folder = IndexFolder::open(dir)?;
        if folder.earlier.is_none() {
            return Err(none());
        }
        // Sizes are compared now, and not after all the work.
        let earlier = Manifest::read(dir)?;
        Ok((folder, earlier))
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The index that stands here.
    pub fn earlier(&self) -> Option<&Manifest> {
        self.earlier.as_ref()
    }

    /// The version that will be written.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// A name for a file of the new version, which no other version has: `part` says what it holds.
    pub fn name(&self, part: &str) -> String {
        format!("v{}-{part}", self.version)
    }

    /// Begins a file of the new version.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(&self, part: &str) -> Result<IndexFile, SearchError> {
        let name = self.name(part);
        let out = ReplacedFile::create(&self.dir.join(&name))?;
        Ok(IndexFile { name, out, sum: Sha256::new(), bytes: 0 })
    }

    /// Makes the new version the index of this folder: its files must stand. Files that it does not name go.
    ///
    /// # Errors
    /// When the manifest cannot be written; the old version stands then.
    pub fn commit(
        mut self,
        kind: &str,
        collection: Collection,
        settings: serde_json::Value,
        files: Vec<FileEntry>,
    ) -> Result<Manifest, SearchError> {
        let kind = kind.to_owned();
        let manifest = Manifest { format: FORMAT, kind, version: self.version, collection, settings, files };
        // Their names must be durable before the manifest's is.
        sync(&self.dir)?;
        let mut out = ReplacedFile::create(&self.dir.join(MANIFEST))?;
        let json = serde_json::to_vec_pretty(&manifest).map_err(|e| SearchError::Unusable(e.to_string()))?;
        out.write(&json)?;
        out.write(b"\n")?;
        out.finish()?;
        // From now on the new files are those that stay, whatever fails below.
        self.earlier = Some(manifest.clone());
        sync(&self.dir)?;
        self.clear(Some(&manifest))?;
        Ok(manifest)
    }

    /// Removes files of other versions than this manifest's, known by their names ([`is_of_index`]). Others are somebody's.
    fn clear(&self, manifest: Option<&Manifest>) -> Result<(), SearchError> {
        let entries = fs::read_dir(&self.dir).map_err(SearchError::io(&self.dir, "read the folder"))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_file = entry.file_type().is_ok_and(|t| t.is_file());
            let is_named = manifest.is_some_and(|m| m.files.iter().any(|f| f.name == name));
            if is_file && is_of_index(&name) && !is_named {
                let path = entry.path();
                fs::remove_file(&path)
                    .map_err(SearchError::io(&path, "remove the file of an unfinished or older index"))?;
            }
        }
        Ok(())
    }
}

impl Drop for IndexFolder {
    fn drop(&mut self) {
        // Of a version that was not committed nothing stays; what cannot be removed now goes with the next one.
        let _ = self.clear(self.earlier.as_ref());
    }
}

/// A file of an index that is being written.
pub struct IndexFile {
    name: String,
    out: ReplacedFile,
    sum: Sha256,
    bytes: u64,
}

impl IndexFile {
    /// Bytes written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// A full disk, and the like.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), SearchError> {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(self.out.write(bytes)?)
    }

    /// Syncs the file, gives it its name, and says what the manifest has to say of it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(self) -> Result<FileEntry, SearchError> {
        self.out.finish()?;
        Ok(FileEntry { name: self.name, bytes: self.bytes, sha256: hex(&self.sum.finalize()) })
    }
}

/// Makes the names in a folder durable.
fn sync(dir: &Path) -> Result<(), SearchError> {
    sync_folder(dir).map_err(SearchError::io(dir, "sync the folder"))
}
