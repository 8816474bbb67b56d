//! Downloads that survive cut connections: resumed where they broke, checked, and under their name only when whole.
//!
//! A file is written as `.NAME.part`, with what the server said of it in `.NAME.part.json`. It goes on from there (`Range`
//! with `If-Range`), whatever ended the process before. When all bytes are there, their SHA-256 is compared where it is
//! known, stored beside as `NAME.sha256` (the format of `sha256sum`), and the file is renamed.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

mod http;
mod part;
mod proxy;
pub mod sources;
mod unpack;

pub use http::{download, read_checksums};
pub use unpack::{gunzip, unpack};

/// One file to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its address, `http://` or `https://`.
    pub url: String,
    /// The name to give it.
    pub name: String,
    /// Its SHA-256 as 64 hexadecimal digits, where it is known.
    pub sha256: Option<String>,
}

/// How patient a download is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Attempts that bring no new byte before it gives up.
    pub attempts: u32,
    /// Wait before the second of them; it doubles, up to a minute.
    pub first_wait: Duration,
    /// Time without a byte after which a connection counts as dead.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { attempts: 8, first_wait: Duration::from_secs(1), silence: Duration::from_secs(60) }
    }
}

/// What happens, for people to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DownloadEvent<'a> {
    /// Bytes that are there, of how many if the server says.
    Progress {
        /// The file.
        name: &'a str,
        /// Bytes on disk.
        done: u64,
        /// Bytes in all.
        total: Option<u64>,
    },
    /// Something that is worth a line.
    Note(String),
}

/// What was downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downloaded {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256.
    pub sha256: String,
    /// Whether it was there before.
    pub was_there: bool,
}

/// Why a file could not be downloaded.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The operating system refused to read or write.
    #[error("{}: cannot {action}: {source}{}", path.display(), disk_hint(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// There is less room than the file needs.
    #[error("{}: the download needs {needed} more bytes, and the disk has {free}; free some space, or choose another folder", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes that are missing.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The server will not give the file.
    #[error("{url}: the server answered {status}; check the address, or name another server with --mirror")]
    Status {
        /// The address.
        url: String,
        /// The answer's code and words.
        status: String,
    },
    /// It broke off again and again.
    #[error(
        "{url}: gave up after {attempts} attempts without a new byte, {done} bytes are kept and the next call goes on from there; the last reason: {reason}"
    )]
    GaveUp {
        /// The address.
        url: String,
        /// Attempts.
        attempts: u32,
        /// Bytes on disk.
        done: u64,
        /// What went wrong last.
        reason: Sentence,
    },
    /// The bytes are not those that were announced.
    #[error("{}: expected the SHA-256 {expected}, found {found}; the file from {url} is damaged or another one, and was not kept", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The address.
        url: String,
        /// What was announced.
        expected: String,
        /// What it is.
        found: String,
    },
    /// An address, a name, a list of checksums or an archive that cannot be used.
    #[error("{0}")]
    Unusable(String),
}

/// The end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence(pub String);

impl fmt::Display for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn disk_hint(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::StorageFull => "; free some space, and the next call goes on from there",
        std::io::ErrorKind::PermissionDenied => "; check the permissions",
        _ => "",
    }
}
