//! What every index folder says of itself: `manifest.json`, written last, so that a folder without it is not finished.
//!
//! An index is a few files and this manifest, which names them with sizes and SHA-256. Files are never changed: a new
//! version of an index (after an append) has new files under new names, then the manifest is replaced in one rename, then the files that
//! it no longer names go. Whoever is killed in between leaves the old version or the new one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tercio_data::{Passages, hex};

use crate::error::SearchError;

mod folder;

pub use folder::{IndexFile, IndexFolder};

/// The format that this version writes; others are refused.
pub const FORMAT: u32 = 1;
/// Name of the manifest in its folder.
pub const MANIFEST: &str = "manifest.json";
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

    /// SHA-256 of all that the manifest says but where things are (paths, names of files): the same for copies of an index, and
    /// for those that other ranks see under another path.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        let (kind, count) = (self.kind.clone(), self.collection.count.to_string());
        let content = self.collection.fingerprint.clone().unwrap_or_default();
        let parts = [kind, count, content, without_places(&self.settings).to_string()];
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

/// Settings without what says where things are: the folder of vectors, paths of sources, names of segments' files.
fn without_places(settings: &serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match settings {
        Value::Object(fields) => {
            let kept =
                fields.iter().filter(|(name, _)| !["path", "vectors", "files"].contains(&name.as_str()));
            kept.map(|(name, value)| (name.clone(), without_places(value))).collect()
        }
        Value::Array(values) => values.iter().map(without_places).collect(),
        other => other.clone(),
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && name != MANIFEST && !name.contains(['/', '\\', '\0'])
}
