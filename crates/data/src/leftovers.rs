//! Temporary files that killed processes left beside a file.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

/// Removes files called `.NAME.TAIL` beside `target` (`NAME` is its name) whose `TAIL` is a temporary file's by `is_tail`, that
/// nobody holds a lock on, and that were not changed for `young`: the time that a writer may need from making its file to
/// locking it. Writers that look whether their file is still there once they have locked it need none. What cannot be looked at or removed stays.
pub fn remove_leftovers(target: &Path, young: Duration, is_tail: impl Fn(&str) -> bool) {
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (Some(name), Ok(entries)) = (target.file_name(), fs::read_dir(folder)) else { return };
    let start = format!(".{}.", name.to_string_lossy());
    for path in entries.flatten().map(|entry| entry.path()) {
        let tail = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix(&start));
        if !tail.is_some_and(&is_tail) {
            continue;
        }
        let Some(meta) = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file) else { continue };
        let is_old =
            young.is_zero() || meta.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= young));
        if !is_old {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        // Locked from here on, so that its writer cannot be. The name may have gone to another file since it was opened.
        let place = |meta: &fs::Metadata| (meta.dev(), meta.ino());
        let opened = file.metadata().map(|m| place(&m)).ok();
        if opened.is_some() && opened == fs::symlink_metadata(&path).map(|m| place(&m)).ok() {
            let _ = fs::remove_file(&path);
        }
    }
}
