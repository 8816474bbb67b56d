//! The errors of a run's folder: each says which file, what was found, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use super::config::Difference;

/// What can go wrong with the files of a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// An operation of the file system failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: a verb phrase such as `read`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The disk (or the quota) is full.
    #[error("{}", disk_full(path, *needed, *free))]
    DiskFull {
        /// The file or folder that did not fit.
        path: PathBuf,
        /// Bytes that it takes, where that is known.
        needed: Option<u64>,
        /// Bytes that are free there, where the system tells.
        free: Option<u64>,
    },
    /// Another living process trains in this run folder.
    #[error(
        "run folder {} is in use by pid {pid} on host {host} since {since}: wait for it, end it, or choose another run name",
        dir.display()
    )]
    InUse {
        /// The run folder.
        dir: PathBuf,
        /// Process that holds it; 0 where it could not be told.
        pid: u32,
        /// Its host.
        host: String,
        /// When it took the folder, UTC.
        since: String,
    },
    /// A file of a run or checkpoint does not say what it should.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was expected, what was found, what to do.
        problem: String,
    },
    /// A file of a checkpoint has other bytes than the ones that were written.
    #[error("checkpoint file {} is damaged: {problem}; {advice}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What differs.
        problem: String,
        /// How to go on.
        advice: String,
    },
    /// The run was started with settings that may not change on resume.
    #[error("{}", super::config::refusal(dir, differences))]
    ConfigDiffers {
        /// The run folder.
        dir: PathBuf,
        /// Every setting that differs and may not.
        differences: Vec<Difference>,
    },
    /// Logging or signal handling could not be set up.
    #[error("cannot set up {what}: {problem}")]
    Setup {
        /// Logging, or the handler of a signal.
        what: String,
        /// The cause.
        problem: String,
    },
}

impl RunError {
    /// The error for a failed file operation; a full disk or quota gets its own message, with the bytes that are free.
    ///
    /// `needed` is the size of what was being written, where the caller knows it.
    pub fn from_io(action: &'static str, path: &Path, needed: Option<u64>, source: io::Error) -> Self {
        let full = matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        if full {
            let free = super::files::free_bytes(path);
            return Self::DiskFull { path: path.to_path_buf(), needed, free };
        }
        Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn malformed(path: &Path, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_path_buf(), problem: problem.into() }
    }
}

fn disk_full(path: &Path, needed: Option<u64>, free: Option<u64>) -> String {
    let needed = needed.map_or(String::new(), |bytes| format!(", {bytes} bytes are needed"));
    let free = free.map_or(String::new(), |bytes| format!(", {bytes} bytes are free"));
    format!(
        "disk is full at {}{needed}{free}: free some space or keep fewer checkpoints; earlier checkpoints are untouched",
        path.display()
    )
}

/// Attaches an action and a path to the errors of file operations.
pub(crate) trait Context<T> {
    /// Names what was tried, and on which path.
    fn context(self, action: &'static str, path: &Path) -> Result<T, RunError>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, action: &'static str, path: &Path) -> Result<T, RunError> {
        self.map_err(|source| RunError::from_io(action, path, None, source))
    }
}
