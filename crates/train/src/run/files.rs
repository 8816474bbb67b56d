//! Steps on the file system that are done wholly or not at all: replace a file, swap a link, rename without replacing.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags};
use tercio_data::replace::sync_folder;

pub(crate) use tercio_comm::host_name;
pub(crate) use tercio_data::hex;

use super::error::{Context, RunError};

/// Writes `content` to `path` so that a reader sees the old file or the new one, never a part, whatever dies meanwhile.
///
/// # Errors
/// When the folder cannot be written or the disk is full; the old file is then untouched.
pub fn write_atomic(path: &Path, content: &[u8]) -> Result<(), RunError> {
    let temp = beside(path);
    let written = (|| {
        let mut file = File::create(&temp)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temp, path)
    })();
    if let Err(source) = written {
        let needed = u64::try_from(content.len()).ok();
        let error = RunError::from_io("write", path, needed, source);
        let _ = fs::remove_file(&temp);
        return Err(error);
    }
    sync_parent(path)
}

/// A name in the same folder that no other writer uses: dotted, with our process and a random part.
pub(crate) fn beside(path: &Path) -> std::path::PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}-{}", std::process::id(), random_hex(4)))
}

/// Removes what a killed process left of [`write_atomic`] and the like in a run folder. Only the lease's holder may call it:
/// the lease's own temporary files, which others write too, stay.
///
/// # Errors
/// When the folder cannot be listed or a file cannot be removed.
pub fn remove_temporary(run_dir: &Path) -> Result<(), RunError> {
    for entry in fs::read_dir(run_dir).context("list", run_dir)? {
        let path = entry.context("list", run_dir)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(".config.toml.") || name.starts_with(".metrics.jsonl.") {
            fs::remove_file(&path).context("remove", &path)?;
        }
    }
    Ok(())
}

/// Makes the bytes of a file durable.
pub(crate) fn sync_file(path: &Path) -> Result<(), RunError> {
    File::open(path).and_then(|file| file.sync_all()).context("sync", path)
}

/// Makes all files of a folder and of those below it durable, and their names.
fn sync_all(dir: &Path) -> Result<(), RunError> {
    for entry in fs::read_dir(dir).context("list", dir)? {
        let path = entry.context("list", dir)?.path();
        match path.is_dir() {
            true => sync_all(&path)?,
            false => sync_file(&path)?,
        }
    }
    sync_dir(dir)
}

/// Gives a folder that was written beside, `new`, the name `target`: after a power cut too, all of the old one or of the new one is
/// there, under that name or, where the two cannot be swapped in one step, beside it.
///
/// # Errors
/// When something cannot be synced, renamed or removed.
pub(crate) fn replace_folder(new: &Path, target: &Path) -> Result<(), RunError> {
    sync_all(new)?;
    if rename_new(new, target)? {
        return sync_parent(target);
    }
    let old = match rustix::fs::renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE) {
        Ok(()) => new.to_path_buf(),
        // Not every file system knows the flag.
        Err(_) => {
            let old = beside(target);
            fs::rename(target, &old).context("rename", target)?;
            fs::rename(new, target).context("rename", new)?;
            old
        }
    };
    sync_parent(target)?;
    fs::remove_dir_all(&old).context("remove", &old)
}

/// Makes the entries of a folder durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), RunError> {
    sync_folder(dir).context("sync", dir)
}

/// Makes the entry of `path` in its folder durable.
pub(crate) fn sync_parent(path: &Path) -> Result<(), RunError> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync_dir(Path::new(".")),
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}

/// Points the link `link` at `target` (relative to the link's folder), replacing an older link in one step.
pub(crate) fn swap_link(target: &Path, link: &Path) -> Result<(), RunError> {
    if let Ok(found) = fs::symlink_metadata(link)
        && !found.is_symlink()
    {
        return Err(RunError::malformed(link, "expected a link, found a file or folder; move it away"));
    }
    let temp = beside(link);
    std::os::unix::fs::symlink(target, &temp).context("make the link", &temp)?;
    if let Err(source) = fs::rename(&temp, link) {
        let _ = fs::remove_file(&temp);
        return Err(RunError::from_io("move the link", link, None, source));
    }
    sync_parent(link)
}

/// Renames a folder to a name that must not exist yet; `Ok(false)` when it does.
pub(crate) fn rename_new(from: &Path, to: &Path) -> Result<bool, RunError> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(true),
        Err(rustix::io::Errno::EXIST | rustix::io::Errno::NOTEMPTY) => return Ok(false),
        // Not every file system knows the flag. A plain rename never replaces a folder with something in it, so the
        // check below leaves no gap that could cost a checkpoint.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::NOTSUP) => {}
        Err(error) => return Err(RunError::from_io("rename", from, None, error.into())),
    }
    if fs::symlink_metadata(to).is_ok() {
        return Ok(false);
    }
    match fs::rename(from, to) {
        Ok(()) => Ok(true),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty) =>
        {
            Ok(false)
        }
        Err(error) => Err(RunError::from_io("rename", from, None, error)),
    }
}

/// Bytes that an ordinary user may still write at `path` (or at the nearest folder above it that exists).
pub fn free_bytes(path: &Path) -> Option<u64> {
    let existing =
        path.ancestors().find(|above| above.exists()).filter(|above| !above.as_os_str().is_empty());
    let stat = rustix::fs::statvfs(existing.unwrap_or(Path::new("."))).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Reads a small text file, refusing one that is larger than `limit` bytes.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<String, RunError> {
    let mut text = Vec::new();
    // Asked before opening: opening a pipe would wait for its writer.
    if !fs::metadata(path).context("open", path)?.is_file() {
        return Err(RunError::malformed(path, "expected a file, found a folder, a pipe or a device"));
    }
    let file = File::open(path).context("open", path)?;
    file.take(limit.saturating_add(1)).read_to_end(&mut text).context("read", path)?;
    if text.len() as u64 > limit {
        return Err(RunError::malformed(path, format!("expected at most {limit} bytes, found more")));
    }
    String::from_utf8(text)
        .map_err(|_| RunError::malformed(path, "expected text in UTF-8, found other bytes"))
}

/// `2 * bytes` hexadecimal digits that no other process draws. They name things and reach no result.
pub(crate) fn random_hex(bytes: usize) -> String {
    let mut buffer = vec![0u8; bytes];
    if File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut buffer)).is_err() {
        // Without the device, the hasher's seed is the other randomness that std draws from the system.
        use std::hash::{BuildHasher, Hasher};
        for byte in &mut buffer {
            *byte = std::hash::RandomState::new().build_hasher().finish() as u8;
        }
    }
    hex(&buffer)
}

/// Seconds since 1970, UTC.
pub(crate) fn unix_time() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// Year, month, day, hour, minute, second in UTC.
///
/// Days to civil date: H. Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
pub(crate) fn utc(unix_seconds: u64) -> (u64, u64, u64, u64, u64, u64) {
    let (days, second) = (unix_seconds / 86_400 + 719_468, unix_seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day, second / 3_600, second / 60 % 60, second % 60)
}

/// A pipe without ends. No program is started for it: until its exec a child would hold the locks of other tests.
#[cfg(test)]
pub(crate) fn make_pipe(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utc_is_the_calendar() {
        assert_eq!(utc(0), (1970, 1, 1, 0, 0, 0));
        assert_eq!(utc(951_782_399), (2000, 2, 28, 23, 59, 59));
        assert_eq!(utc(951_782_400), (2000, 2, 29, 0, 0, 0));
        assert_eq!(utc(1_735_689_599), (2024, 12, 31, 23, 59, 59));
    }

    #[test]
    fn rename_new_never_replaces() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        assert!(!rename_new(&from, &to).unwrap(), "an empty folder would be replaced by a plain rename");
        fs::remove_dir(&to).unwrap();
        assert!(rename_new(&from, &to).unwrap());
        assert!(to.is_dir() && !from.exists());
    }

    #[test]
    fn a_folder_takes_the_place_of_an_older_one() {
        let dir = tempfile::tempdir().unwrap();
        let (new, target) = (dir.path().join(".model.tmp"), dir.path().join("model"));
        for content in ["first", "second"] {
            fs::create_dir_all(new.join("part")).unwrap();
            fs::write(new.join("part/weights"), content).unwrap();
            replace_folder(&new, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("part/weights")).unwrap(), content);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside");
        }
    }

    #[test]
    fn links_are_swapped_but_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("latest");
        swap_link(Path::new("step-1"), &link).unwrap();
        swap_link(Path::new("step-2"), &link).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("step-2"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary name stays");
        let file = dir.path().join("best_dev");
        fs::write(&file, "mine").unwrap();
        assert!(swap_link(Path::new("step-2"), &file).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    }

    #[test]
    fn a_full_disk_is_named() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            return;
        }
        let mut device = File::options().write(true).open(full).unwrap();
        let source = device.write_all(b"x").unwrap_err();
        let message = RunError::from_io("write", full, Some(1), source).to_string();
        assert!(message.starts_with("disk is full at /dev/full, 1 bytes are needed"), "{message}");
    }

    #[test]
    fn read_small_has_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_small(&path, 5).unwrap(), "12345");
        assert!(read_small(&path, 4).is_err());
        fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(read_small(&path, 4).unwrap_err().to_string().contains("UTF-8"));
        fs::remove_file(&path).unwrap();
        make_pipe(&path);
        assert!(read_small(&path, 4).unwrap_err().to_string().contains("a pipe"));
    }
}
