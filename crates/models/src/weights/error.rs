//! What can be wrong with a file of weights, said for people.

use std::path::{Path, PathBuf};

/// Why weights could not be read or written. Every message names the file, and the tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The operating system refused to open, read or write.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done, as in "read the header".
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is not what its name promises, is cut off, or is damaged.
    #[error("{}: {what}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// One tensor of a file cannot be used.
    #[error("{}: tensor `{name}`: {what}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// What was expected and what was found.
        what: String,
    },
    /// A pickle asks for something other than a tensor. Such a file may run any program when Python opens it.
    #[error(
        "{}: byte {position} of the pickle: `{global}` is not a tensor; the file may run code; refused \
         (save the weights again as model.safetensors where you trust them)",
        path.display()
    )]
    Refused {
        /// The file.
        path: PathBuf,
        /// The Python object that the file names.
        global: String,
        /// Offset in the pickle, bytes.
        position: usize,
    },
    /// A tensor that the model needs is not there.
    #[error("{}: there is no tensor `{name}` among the {count} in it", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// The name that was looked for.
        name: String,
        /// How many tensors there are.
        count: usize,
    },
    /// No folder and no cached hub model goes by this name.
    #[error("{0}")]
    Folder(String),
}

impl WeightsError {
    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        let path = path.to_owned();
        Self::Io { path, action, source }
    }

    pub(crate) fn invalid(path: &Path, what: impl Into<String>) -> Self {
        Self::Invalid { path: path.to_owned(), what: what.into() }
    }

    pub(crate) fn tensor(path: &Path, name: &str, what: impl Into<String>) -> Self {
        Self::Tensor { path: path.to_owned(), name: name.to_owned(), what: what.into() }
    }
}

/// Result with a [`WeightsError`].
pub type Result<T> = std::result::Result<T, WeightsError>;
