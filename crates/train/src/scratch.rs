//! A folder for files that only this process needs, such as the index of a data file; it goes when it is dropped.

use std::path::{Path, PathBuf};

use crate::error::TrainError;
use crate::run::random_hex;

/// A folder of our own below the system's folder for temporary files (`TMPDIR`), removed on drop.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
}

impl ScratchFolder {
    /// Creates it, readable by this user only.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn new() -> Result<Self, TrainError> {
        use std::os::unix::fs::DirBuilderExt;
        let path = std::env::temp_dir().join(format!("tercio-{}-{}", std::process::id(), random_hex(4)));
        // Not recursive: a name that somebody took before us is an error, not a folder to write into.
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|source| TrainError::Write { path: path.display().to_string(), source })?;
        Ok(ScratchFolder { path })
    }
    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_with_its_owner() {
        let (a, b) = (ScratchFolder::new().unwrap(), ScratchFolder::new().unwrap());
        assert_ne!(a.path(), b.path());
        let path = a.path().to_owned();
        std::fs::write(path.join("index"), "x").unwrap();
        drop(a);
        assert!(!path.exists() && b.path().is_dir());
    }
}
