//! What goes wrong with an index or a search.

use std::io;
use std::path::{Path, PathBuf};

use tercio_data::DataError;

/// Errors of indexes, searches and rankings; each says what was expected and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// A file could not be read or written.
    #[error("{}: cannot {what}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as in "open the file".
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// A file holds something else than an index has.
    #[error("{}: {what}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, what was expected, what to do.
        what: String,
    },
    /// Something was asked for that does not go together.
    #[error("{0}")]
    Unusable(String),
    /// The search was told to stop.
    #[error("stopped before the end")]
    Stopped,
    /// An error of the data.
    #[error(transparent)]
    Data(#[from] DataError),
}

impl SearchError {
    /// For `map_err`: what was tried with a file.
    pub fn io<'a>(path: &'a Path, what: &'static str) -> impl FnOnce(io::Error) -> SearchError + 'a {
        move |source| SearchError::Io { path: path.to_owned(), what, source }
    }

    /// A file that holds something wrong.
    pub fn file(path: &Path, what: impl Into<String>) -> SearchError {
        SearchError::File { path: path.to_owned(), what: what.into() }
    }
}
