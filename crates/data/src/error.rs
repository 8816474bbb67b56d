//! The one error type of the crate: each message says where, what was expected, what was found and what to do.

use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong with data files, tokenizers and settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused an operation on a file.
    #[error("{}: cannot {action}: {source}{}", path.display(), disk_hint(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb phrase ("read the file").
        action: &'static str,
        /// The reason given by the system.
        source: io::Error,
    },
    /// One item of a data file is not what a question must be.
    #[error("{}, line {line}{}: expected {expected}, found {found}{}", path.display(), item(*row, *line, *item_line), advice(hint))]
    Item {
        /// The data file as the user named it.
        path: PathBuf,
        /// Row number of the item, from 0.
        row: usize,
        /// Line of the fault, from 1.
        line: u64,
        /// Line on which the item starts, from 1.
        item_line: u64,
        /// What should have been there.
        expected: String,
        /// What was there.
        found: String,
        /// What to do; may be empty.
        hint: String,
    },
    /// A whole file cannot be used.
    #[error("{}: {message}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What was expected, what was found, what to do.
        message: String,
    },
    /// Text that cannot be tokenized or ids that cannot be turned into text.
    #[error("{0}")]
    Text(String),
    /// A setting that makes no sense or does not fit the data.
    #[error("{0}")]
    Setting(String),
}

impl DataError {
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DataError {
        let path = path.to_path_buf();
        move |source| DataError::Io { path, action, source }
    }

    pub(crate) fn file(path: &Path, message: impl Into<String>) -> DataError {
        DataError::File { path: path.to_path_buf(), message: message.into() }
    }
}

fn item(row: usize, line: u64, item_line: u64) -> String {
    if line == item_line {
        format!(" (item {row})")
    } else {
        format!(" (item {row}, which starts on line {item_line})")
    }
}

fn advice(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("; {hint}") }
}

fn disk_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => "; free some space or choose another cache folder",
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::PermissionDenied => "; check the permissions",
        _ => "",
    }
}
