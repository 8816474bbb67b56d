//! `training.json`: the list of a checkpoint's files with sizes and SHA-256, and the trainer's own state. Written last.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{Context, RunError};

/// Name of the manifest in a checkpoint's folder.
pub const MANIFEST_NAME: &str = "training.json";

/// The only layout there is so far.
pub(crate) const FORMAT: u32 = 1;

/// A manifest lists some files and holds counters: more than this is not one of ours.
const MANIFEST_LIMIT: u64 = 16 << 20;

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path relative to the checkpoint's folder, with `/` between its parts.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of the content, lower-case hexadecimal.
    pub sha256: String,
}

/// What `training.json` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Layout of the folder.
    pub format: u32,
    /// Optimizer updates done when it was written.
    pub step: u64,
    /// Every other file of the folder, by name.
    pub files: Vec<FileEntry>,
    /// What the trainer stored: its counters, fingerprints of the data and the like.
    pub state: serde_json::Value,
}

impl Manifest {
    /// Lists and hashes every file below `dir`, making each durable on the way.
    pub(crate) fn of_folder(dir: &Path, step: u64, state: serde_json::Value) -> Result<Self, RunError> {
        let mut files = Vec::new();
        collect(dir, "", &mut files)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { format: FORMAT, step, files, state })
    }

    /// Reads the manifest of the checkpoint folder `dir`.
    ///
    /// # Errors
    /// When it is missing, is not JSON of the known layout, or names files outside of the folder.
    pub fn read(dir: &Path) -> Result<Self, RunError> {
        let path = dir.join(MANIFEST_NAME);
        let text = super::files::read_small(&path, MANIFEST_LIMIT)?;
        let manifest: Self = serde_json::from_str(&text).map_err(|error| {
            RunError::malformed(
                &path,
                format!("expected the manifest of a checkpoint, found a fault: {error}"),
            )
        })?;
        if manifest.format != FORMAT {
            let found = manifest.format;
            return Err(RunError::malformed(
                &path,
                format!(
                    "expected checkpoint format {FORMAT}, found {found}; it was written by another version"
                ),
            ));
        }
        for file in &manifest.files {
            let inside = Path::new(&file.name).components().all(|part| matches!(part, Component::Normal(_)));
            if !inside || file.name.is_empty() {
                return Err(RunError::malformed(
                    &path,
                    format!("expected names of files below the folder, found {:?}", file.name),
                ));
            }
        }
        Ok(manifest)
    }

    /// The layout of a checkpoint's folder, where its manifest names another than the one that is known here.
    pub(crate) fn foreign_format(dir: &Path) -> Option<u64> {
        let text = super::files::read_small(&dir.join(MANIFEST_NAME), MANIFEST_LIMIT).ok()?;
        let manifest: serde_json::Value = serde_json::from_str(&text).ok()?;
        manifest["format"].as_u64().filter(|&format| format != u64::from(FORMAT))
    }

    /// Bytes of all listed files; saturates, since sizes come from a file.
    pub fn total_size(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }

    /// The first reason why `dir` does not hold the listed files with the listed sizes.
    pub(crate) fn missing(&self, dir: &Path) -> Option<String> {
        self.files.iter().find_map(|file| match fs::metadata(dir.join(&file.name)) {
            Err(error) => Some(format!("{} cannot be found: {error}", file.name)),
            Ok(found) if !found.is_file() => Some(format!("{} is not a file", file.name)),
            Ok(found) if found.len() != file.size => {
                Some(format!("{} has {} bytes, expected {}", file.name, found.len(), file.size))
            }
            Ok(_) => None,
        })
    }

    /// Reads every file and compares its SHA-256; `advice` says in the error how to go on.
    pub(crate) fn verify_full(&self, dir: &Path, advice: &str) -> Result<(), RunError> {
        for file in &self.files {
            let path = dir.join(&file.name);
            let damaged = |problem: String| RunError::Damaged {
                path: path.clone(),
                problem,
                advice: advice.to_string(),
            };
            let (size, sha256) = hash(&path)?;
            if size != file.size {
                return Err(damaged(format!("expected {} bytes, found {size}", file.size)));
            }
            if sha256 != file.sha256 {
                return Err(damaged(format!("expected sha256 {}, found {sha256}", file.sha256)));
            }
        }
        Ok(())
    }
}

fn collect(dir: &Path, prefix: &str, files: &mut Vec<FileEntry>) -> Result<(), RunError> {
    for entry in fs::read_dir(dir).context("list", dir)? {
        let entry = entry.context("list", dir)?;
        let path = entry.path();
        let Some(part) = entry.file_name().to_str().map(str::to_string) else {
            return Err(RunError::malformed(&path, "expected a file name in UTF-8"));
        };
        let name = format!("{prefix}{part}");
        if name == MANIFEST_NAME {
            return Err(RunError::malformed(
                &path,
                "the manifest is written by the commit; use another name",
            ));
        }
        let kind = entry.file_type().context("look at", &path)?;
        if kind.is_dir() {
            collect(&path, &format!("{name}/"), files)?;
        } else if kind.is_file() {
            // The manifest vouches for these bytes after a power cut too.
            super::files::sync_file(&path)?;
            let (size, sha256) = hash(&path)?;
            files.push(FileEntry { name, size, sha256 });
        } else {
            return Err(RunError::malformed(&path, "expected a plain file or folder in a checkpoint"));
        }
    }
    super::files::sync_dir(dir)
}

/// Size and SHA-256 of a file.
fn hash(path: &Path) -> Result<(u64, String), RunError> {
    let mut file = File::open(path).context("open", path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut size = 0u64;
    loop {
        let read = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(RunError::from_io("read", path, None, error)),
        };
        hasher.update(&buffer[..read]);
        size += read as u64;
    }
    Ok((size, super::files::hex(&hasher.finalize())))
}
