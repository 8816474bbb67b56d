//! What every index folder says of itself: `manifest.json`, written last, so that a folder without it is not finished.
//!
//! An index is a few files and this manifest, which names them with sizes and SHA-256. Files are never changed: a new
//! version of an index (after an append) has new files under new names, then the manifest is replaced in one rename, then the files that
//! it no longer names go. Whoever is killed in between leaves the old version or the new one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tercio_data::Passages;
use tercio_data::replace::ReplacedFile;

use crate::error::SearchError;

/// The format that this version writes; others are refused.
pub const FORMAT: u32 = 1;
/// Name of the manifest in its folder.
pub const MANIFEST: &str = "manifest.json";
/// Locked by whoever writes into the folder.
const LOCK: &str = ".lock";
/// A larger manifest is not read.
const MAX_BYTES: u64 = 64 << 20;

/// What an index is, what it was made of, and what its files must be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the layout, [`FORMAT`].
    pub format: u32,
    /// `bm25`, `flat` or `compressed`.
    pub kind: String,
    /// How often the index was written: 1, and 1 more with every append.
    pub version: u64,
    /// The passages that were indexed.
    pub collection: Collection,
    /// What the kind of index wants to remember: analyzer, model, measured recall.
    pub settings: serde_json::Value,
    /// All files of the index.
    pub files: Vec<FileEntry>,
}

/// The collection of an index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collection {
    /// The file of passages as it was named, made absolute.
    pub path: PathBuf,
    /// SHA-256 of its decompressed content, in hexadecimal digits; `None` where it is not known (imported vectors).
    pub fingerprint: Option<String>,
    /// Its passages.
    pub count: u64,
}

impl Collection {
    /// Of an open file of passages.
    pub fn of(passages: &Passages) -> Collection {
        let path = passages.path();
        Collection {
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            fingerprint: Some(passages.fingerprint().to_owned()),
            count: passages.len() as u64,
        }
    }

    /// Refuses a file of passages that is not the one that was indexed.
    ///
    /// # Errors
    /// Another count or another content.
    pub fn check(&self, index: &Path, passages: &Passages) -> Result<(), SearchError> {
        let found = Collection::of(passages);
        let same = match &self.fingerprint {
            Some(print) => Some(print) == found.fingerprint.as_ref(),
            None => true,
        };
        if same && self.count == found.count {
            return Ok(());
        }
        let shown = |c: &Collection| match &c.fingerprint {
            Some(print) => {
                format!("{} passages (content {})", c.count, print.get(..12).unwrap_or(print))
            }
            None => format!("{} passages", c.count),
        };
        Err(SearchError::file(
            passages.path(),
            format!(
                "it is not the collection of the index {}: that has {}, this {}; index it again, or with --append where passages \
                 were only added at its end",
                index.display(),
                shown(self),
                shown(&found)
            ),
        ))
    }
}

/// A file of an index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its content, in hexadecimal digits.
    pub sha256: String,
}

impl Manifest {
    /// Reads the manifest of a folder and compares the sizes of the files it names.
    ///
    /// # Errors
    /// A folder that is not there or not finished, a manifest of another format, a file that is missing or of another size.
    pub fn read(dir: &Path) -> Result<Manifest, SearchError> {
        let path = dir.join(MANIFEST);
        let Some(manifest) = Manifest::read_if_there(dir)? else {
            return Err(match dir.is_dir() {
                true => SearchError::file(
                    dir,
                    format!("has no {MANIFEST}: no index was finished here; make one with `tercio index`"),
                ),
                false => SearchError::file(dir, "expected the folder of an index, found none of this name"),
            });
        };
        for file in &manifest.files {
            let path = dir.join(&file.name);
            let found =
                fs::metadata(&path).map_err(SearchError::io(&path, "open the file of an index"))?.len();
            if found != file.bytes {
                return Err(SearchError::file(
                    &path,
                    format!(
                        "expected {} bytes, found {found}; the file was cut or replaced: index again",
                        file.bytes
                    ),
                ));
            }
        }
        if manifest.version == 0 {
            return Err(SearchError::file(&path, "expected a `version` of 1 or more, found 0; index again"));
        }
        Ok(manifest)
    }

    /// As [`Manifest::read`], `None` where there is no manifest, and without a look at the other files.
    ///
    /// # Errors
    /// A manifest that cannot be read, or is of another format.
    pub fn read_if_there(dir: &Path) -> Result<Option<Manifest>, SearchError> {
        let path = dir.join(MANIFEST);
        let meta = match fs::metadata(&path) {
            Ok(meta) => meta,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(e) => return Err(SearchError::io(&path, "open the file")(e)),
        };
        if !meta.is_file() || meta.len() > MAX_BYTES {
            return Err(SearchError::file(
                &path,
                format!("expected a file of at most {MAX_BYTES} bytes, found something else"),
            ));
        }
        let bytes = fs::read(&path).map_err(SearchError::io(&path, "read the file"))?;
        let strange = |what: String| {
            SearchError::file(
                &path,
                format!("expected the manifest of an index, found another file ({what})"),
            )
        };
        // The format first: a later one may have other fields.
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| strange(e.to_string()))?;
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(format) if value.get("kind").is_some() && format != u64::from(FORMAT) => {
                return Err(SearchError::file(
                    &path,
                    format!(
                        "expected an index of format {FORMAT}, found format {format}; use the version of Tercio that wrote it, \
                         or index again"
                    ),
                ));
            }
            _ => {}
        }
        let manifest: Manifest = serde_json::from_value(value).map_err(|e| strange(e.to_string()))?;
        // A name leads nowhere else.
        if let Some(file) = manifest.files.iter().find(|f| !is_plain(&f.name)) {
            return Err(strange(format!("the name {:?} of a file is none", file.name)));
        }
        Ok(Some(manifest))
    }

    /// Refuses an index of another kind.
    ///
    /// # Errors
    /// Naming both kinds.
    pub fn expect_kind(&self, dir: &Path, kind: &str) -> Result<(), SearchError> {
        if self.kind == kind {
            return Ok(());
        }
        Err(SearchError::file(
            dir,
            format!("expected an index of kind {kind}, found one of kind {}", self.kind),
        ))
    }

    /// What the kind of index remembers.
    ///
    /// # Errors
    /// Settings of another shape.
    pub fn settings<T: serde::de::DeserializeOwned>(&self, dir: &Path) -> Result<T, SearchError> {
        serde_json::from_value(self.settings.clone()).map_err(|e| {
            SearchError::file(
                &dir.join(MANIFEST),
                format!(
                    "expected `settings` of an index of kind {}, found others ({e}); index again",
                    self.kind
                ),
            )
        })
    }

    /// SHA-256 of all that the manifest says but where things are: the same for indexes that find the same.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        let parts = [self.kind.clone(), self.collection.count.to_string(), self.settings.to_string()];
        for part in parts.iter().chain(self.files.iter().map(|f| &f.sha256)) {
            sum.update((part.len() as u64).to_le_bytes());
            sum.update(part);
        }
        hex(&sum.finalize())
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// Compares the checksums of all files.
    ///
    /// # Errors
    /// The first file that is not what it was, or [`SearchError::Stopped`].
    pub fn verify(&self, dir: &Path, stop: &dyn Fn() -> bool) -> Result<(), SearchError> {
        for file in &self.files {
            let path = dir.join(&file.name);
            let (_, found) = sum(&path, stop)?;
            if found != file.sha256 {
                return Err(SearchError::file(
                    &path,
                    format!(
                        "expected content of SHA-256 {}, found {found}; the file is damaged: index again",
                        file.sha256
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Size and SHA-256 of a file.
fn sum(path: &Path, stop: &dyn Fn() -> bool) -> Result<(u64, String), SearchError> {
    use std::io::Read;
    let mut file = File::open(path).map_err(SearchError::io(path, "open the file of an index"))?;
    let (mut sum, mut bytes, mut chunk) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        if stop() {
            return Err(SearchError::Stopped);
        }
        match file.read(&mut chunk).map_err(SearchError::io(path, "read the file"))? {
            0 => return Ok((bytes, hex(&sum.finalize()))),
            n => {
                sum.update(&chunk[..n]);
                bytes += n as u64;
            }
        }
    }
}

/// Hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && name != MANIFEST && !name.contains(['/', '\\', '\0'])
}

/// A folder that one process writes an index into.
#[derive(Debug)]
pub struct IndexFolder {
    dir: PathBuf,
    /// Locked as long as this lives; `None` where the file system has no locks.
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
        let version = earlier.as_ref().map_or(0, |m| m.version) + 1;
        let folder = IndexFolder { dir: dir.to_owned(), _lock: lock, version, earlier };
        folder.clear(folder.earlier.as_ref())?;
        Ok(folder)
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
        sync(&self.dir)?;
        // From now on the new files are those that stay.
        self.earlier = Some(manifest.clone());
        self.clear(Some(&manifest))?;
        Ok(manifest)
    }

    /// Removes files of other versions than this manifest's: their names begin with `v` and a number, or a dot and that. Others
    /// are somebody's, and make the folder no place for an index as long as there is none in it.
    fn clear(&self, manifest: Option<&Manifest>) -> Result<(), SearchError> {
        let entries = fs::read_dir(&self.dir).map_err(SearchError::io(&self.dir, "read the folder"))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let part = name.strip_prefix('.').unwrap_or(&name);
            let digits = part.strip_prefix('v').and_then(|rest| rest.split_once('-')).map(|(n, _)| n);
            let ours = digits.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
            let is_file = entry.file_type().is_ok_and(|t| t.is_file());
            if ours && is_file && manifest.is_none_or(|m| m.files.iter().all(|f| f.name != name)) {
                let path = entry.path();
                fs::remove_file(&path)
                    .map_err(SearchError::io(&path, "remove the file of an unfinished or older index"))?;
            } else if !ours && manifest.is_none() && !name.starts_with('.') {
                return Err(SearchError::file(
                    &self.dir,
                    format!("expected an empty folder or an index, found {name:?}; name another folder"),
                ));
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
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        // Some network file systems have no fsync for folders; they order such entries themselves.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other.map_err(SearchError::io(dir, "sync the folder")),
    }
}
