//! The file that is being downloaded, on disk: its bytes so far, and what the server said of them.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::DownloadError;

/// What tells one version of a remote file from another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Version {
    /// The address.
    pub url: String,
    /// A strong entity tag.
    pub etag: Option<String>,
    /// Time of the last change, as the server writes it.
    pub modified: Option<String>,
    /// Bytes in all.
    pub total: Option<u64>,
}

impl Version {
    /// What a request for the rest may be made conditional on; without it a resumed file could be made of two.
    pub fn condition(&self) -> Option<&str> {
        self.etag.as_deref().or(self.modified.as_deref())
    }
}

/// The part, locked while it is open.
pub(super) struct Part {
    file: File,
    path: PathBuf,
    notes: PathBuf,
    /// Bytes on disk.
    pub done: u64,
    /// What they are of.
    pub version: Version,
}

impl Part {
    /// Opens or begins the part of `folder/name`.
    pub fn open(folder: &Path, name: &str) -> Result<Part, DownloadError> {
        let path = folder.join(format!(".{name}.part"));
        let notes = folder.join(format!(".{name}.part.json"));
        let io = |source| DownloadError::Io { path: path.clone(), action: "open the file", source };
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .is_err_and(|e| e == rustix::io::Errno::WOULDBLOCK)
        {
            let what = format!("{}: another process downloads it; wait for its end", path.display());
            return Err(DownloadError::Unusable(what));
        }
        let version: Version =
            fs::read(&notes).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let done = file.metadata().map_err(io)?.len();
        Ok(Part { file, path, notes, done, version })
    }

    /// Whether another holder finished or replaced the file between our opening and locking it.
    pub fn is_current(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        match (self.file.metadata(), fs::metadata(&self.path)) {
            (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
            _ => false,
        }
    }

    /// The folder it is in.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Begins again, with a file of this version.
    pub fn restart(&mut self, version: Version) -> Result<(), DownloadError> {
        let path = self.path.clone();
        let io = |source| DownloadError::Io { path: path.clone(), action: "write the file", source };
        // A device has no length.
        match self.file.set_len(0) {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
            other => other.map_err(io)?,
        }
        self.done = 0;
        self.version = version;
        let notes = serde_json::to_vec(&self.version).expect("JSON of strings and numbers");
        fs::write(&self.notes, notes).map_err(|source| DownloadError::Io {
            path: self.notes.clone(),
            action: "write the file",
            source,
        })
    }

    /// Adds bytes at the end.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), DownloadError> {
        let written = self.file.seek(SeekFrom::Start(self.done)).and_then(|_| self.file.write_all(bytes));
        written.map_err(|source| DownloadError::Io {
            path: self.path.clone(),
            action: "write the file",
            source,
        })?;
        self.done += bytes.len() as u64;
        Ok(())
    }

    /// SHA-256 of all bytes, which are synced first.
    pub fn sha256(&mut self) -> Result<String, DownloadError> {
        let summed =
            self.file.sync_all().and_then(|()| self.file.rewind()).and_then(|()| sha256(&mut self.file));
        summed.map_err(|source| DownloadError::Io {
            path: self.path.clone(),
            action: "read the file",
            source,
        })
    }

    /// Gives the file its name.
    pub fn keep(self, target: &Path) -> Result<(), DownloadError> {
        let io = |source| DownloadError::Io {
            path: target.to_owned(),
            action: "rename the finished file to it",
            source,
        };
        fs::rename(&self.path, target).map_err(io)?;
        let _ = fs::remove_file(&self.notes);
        if let Some(folder) = target.parent().and_then(|folder| File::open(folder).ok()) {
            // Not every file system can sync folders; those that cannot order such entries themselves.
            let _ = folder.sync_all();
        }
        Ok(())
    }

    /// Removes it.
    pub fn discard(self) {
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_file(&self.notes);
    }
}

/// SHA-256 of what is left of a reader.
pub(super) fn sha256(source: &mut impl Read) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match source.read(&mut buffer) {
            Ok(0) => return Ok(crate::index::hex(&hash.finalize())),
            Ok(n) => hash.update(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
