//! A folder that is written beside its final name and appears wholly or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::weights::{Result, WeightsError};

/// The folder while it is written; it goes unless it is kept.
#[derive(Debug)]
pub(crate) struct NewFolder {
    path: PathBuf,
    target: PathBuf,
}

impl NewFolder {
    /// Begins the folder `target`, which may be there already if it is empty.
    pub fn create(target: &Path) -> Result<Self> {
        let taken = match fs::read_dir(target) {
            Ok(mut entries) => entries.next().is_some(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => fs::symlink_metadata(target).is_ok(),
            Err(_) => true,
        };
        let name = target.file_name().filter(|_| !taken).ok_or_else(|| {
            let what = "expected the name of a folder that is not there yet, or is empty; name another, or remove it";
            WeightsError::invalid(target, what)
        })?;
        if let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(|e| WeightsError::io(parent, "create the folder", e))?;
        }
        let name = name.to_string_lossy();
        for attempt in 0..10_000u32 {
            let path = target.with_file_name(format!(".{name}.{}-{attempt}.tmp", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(NewFolder { path, target: target.to_owned() }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(WeightsError::io(&path, "create the folder", e)),
            }
        }
        Err(WeightsError::invalid(target, "found 10000 left-over temporary folders beside it; remove them"))
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes and syncs a small file of the folder.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        let written = File::create(&path).and_then(|mut file| {
            io::Write::write_all(&mut file, bytes)?;
            file.sync_all()
        });
        written.map_err(|e| WeightsError::io(&path, "write", e))
    }

    /// Gives the folder its name. A folder that came there meanwhile and has something in it stays.
    pub fn keep(self) -> Result<()> {
        let error = |e| WeightsError::io(&self.target, "rename the finished folder to it", e);
        if let Ok(folder) = File::open(&self.path) {
            // Not every file system can sync folders; those that cannot order such entries themselves.
            let _ = folder.sync_all();
        }
        fs::rename(&self.path, &self.target).map_err(error)
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After a rename nothing is there.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_appears_wholly_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a/model");
        let count = || fs::read_dir(dir.path().join("a")).unwrap().count();
        let folder = NewFolder::create(&target).unwrap();
        folder.write("config.json", b"{}").unwrap();
        drop(folder);
        assert_eq!(count(), 0);
        fs::create_dir(&target).unwrap();
        let folder = NewFolder::create(&target).unwrap();
        folder.write("config.json", b"{}").unwrap();
        folder.keep().unwrap();
        assert_eq!((count(), fs::read(target.join("config.json")).unwrap()), (1, b"{}".to_vec()));
        for taken in [target.clone(), target.join("config.json"), dir.path().join("..")] {
            assert!(NewFolder::create(&taken).unwrap_err().to_string().contains("not there yet"));
        }
    }
}
