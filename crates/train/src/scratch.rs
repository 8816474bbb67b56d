//! A folder for files that only this process needs, such as the index of a data file; it goes when it is dropped, or with
//! the next one that is made here where its process was killed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::error::TrainError;
use crate::run::random_hex;

/// A folder of our own below the system's folder for temporary files (`TMPDIR`), removed on drop.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    /// Locked as long as the process lives.
    _lock: Option<File>,
}

/// A folder that is younger may belong to a process that has not locked it yet.
const YOUNG: Duration = Duration::from_secs(60);

impl ScratchFolder {
    /// Creates it, readable by this user only.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn new() -> Result<Self, TrainError> {
        Self::new_in(&std::env::temp_dir(), YOUNG)
    }
    fn new_in(place: &Path, young: Duration) -> Result<Self, TrainError> {
        use std::os::unix::fs::DirBuilderExt;
        remove_dead(place, young);
        let path = place.join(format!("tercio-{}-{}", std::process::id(), random_hex(4)));
        // Not recursive: a name that somebody took before us is an error, not a folder to write into.
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|source| TrainError::Write { path: path.display().to_string(), source })?;
        let lock = File::open(&path).ok();
        if let Some(lock) = &lock {
            let _ = rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive);
        }
        Ok(ScratchFolder { path, _lock: lock })
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

/// Removes what killed processes of this user left: folders of our names that nobody has locked.
fn remove_dead(place: &Path, young: Duration) {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(place) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_ours = path.file_name().and_then(|n| n.to_str()).is_some_and(is_name);
        let Some(meta) = std::fs::symlink_metadata(&path).ok().filter(|m| is_ours && m.is_dir()) else {
            continue;
        };
        let is_old = meta.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= young));
        if !is_old || meta.uid() != rustix::process::geteuid().as_raw() {
            continue;
        }
        let Ok(lock) = File::open(&path) else { continue };
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

/// `tercio-PID-RANDOM`.
fn is_name(name: &str) -> bool {
    let parts = name.strip_prefix("tercio-").and_then(|rest| rest.split_once('-'));
    parts.is_some_and(|(pid, random)| {
        pid.parse::<u32>().is_ok() && random.len() == 8 && random.bytes().all(|b| b.is_ascii_hexdigit())
    })
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

    #[test]
    fn what_killed_processes_left_goes_with_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join(name);
        for name in ["tercio-1-0123abcd", "tercio-1-other", "tercio-x-0123abcd"] {
            std::fs::create_dir(of(name)).unwrap();
            std::fs::write(of(name).join("file"), "x").unwrap();
        }
        let living = ScratchFolder::new_in(dir.path(), YOUNG).unwrap();
        assert!(of("tercio-1-0123abcd").exists(), "it is young");
        let next = ScratchFolder::new_in(dir.path(), Duration::ZERO).unwrap();
        assert!(!of("tercio-1-0123abcd").exists());
        assert!(living.path().exists() && next.path().exists(), "these live");
        assert!(of("tercio-1-other").exists() && of("tercio-x-0123abcd").exists(), "these are not ours");
    }
}
