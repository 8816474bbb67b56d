//! Files of results that appear under their names whole or not at all: written beside, synced, renamed. What a killed process
//! left beside one goes with the next file of that name.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use serde_json::{Map, Value};

use crate::error::DataError;
use crate::leftovers::remove_leftovers;

/// A file that is being written; dropped without [`ReplacedFile::finish`] it leaves nothing behind.
#[derive(Debug)]
pub struct ReplacedFile {
    target: PathBuf,
    temporary: PathBuf,
    out: Option<BufWriter<File>>,
}

/// A file that was changed later may belong to a process that has not locked it yet.
const YOUNG: Duration = Duration::from_secs(60);
/// What is tried with it.
const WRITE: &str = "write the file";

impl ReplacedFile {
    /// Starts a file that will be `path`, whose folder is created. What stands at `path` stays until the end.
    ///
    /// # Errors
    /// When it cannot be written there, or `path` is a folder, a pipe or a device, which a rename would replace.
    pub fn create(path: &Path) -> Result<Self, DataError> {
        let wrong = |source: io::Error| DataError::io(path, WRITE)(source);
        // A link keeps pointing to the file that is written.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if fs::metadata(&target).is_ok_and(|m| !m.is_file()) {
            let what = "expected a file or a free name, found a folder, a pipe or a device";
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        if target.file_name().is_none() {
            let what = "expected the name of a file";
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        if let Some(folder) = target.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(wrong)?;
        }
        remove_leftovers(&target, YOUNG, is_beside);
        let (temporary, file) = beside(&target).map_err(wrong)?;
        // Tells the living from the dead, as long as it is open.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        Ok(ReplacedFile { target, temporary, out: Some(BufWriter::new(file)) })
    }

    /// The path that it will have, links followed.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// When the disk is full, and the like.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let out = self.out.as_mut().expect("open until it is finished");
        out.write_all(bytes).map_err(DataError::io(&self.target, WRITE))
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// As [`ReplacedFile::write`]; then nothing is left behind.
    pub fn finish(mut self) -> Result<PathBuf, DataError> {
        let out = self.out.take().expect("open until it is finished");
        let done = out
            .into_inner()
            .map_err(io::IntoInnerError::into_error)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&self.temporary, &self.target));
        match done {
            Ok(()) => Ok(self.target.clone()),
            Err(source) => {
                let _ = fs::remove_file(&self.temporary);
                Err(DataError::io(&self.target, WRITE)(source))
            }
        }
    }
}

impl Drop for ReplacedFile {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// A new file in the folder of `target` that no other writer uses: dotted, with our process and eight hexadecimal digits.
fn beside(target: &Path) -> io::Result<(PathBuf, File)> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    for attempt in 0..10_000u32 {
        let path = target.with_file_name(format!(".{name}.{}-{attempt:08x}", std::process::id()));
        match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            // Of another process of this number: an earlier one's, or one on another machine.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(e),
        }
    }
    Err(io::Error::other("10000 unfinished files lie beside it; remove them"))
}

/// Whether `.NAME.` and this is a name of [`beside`].
fn is_beside(tail: &str) -> bool {
    tail.split_once('-').is_some_and(|(pid, random)| {
        pid.parse::<u32>().is_ok() && random.len() == 8 && random.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// Makes what was created, renamed or removed in a folder durable.
///
/// # Errors
/// The system's.
pub fn sync_folder(dir: &Path) -> io::Result<()> {
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        // Some network file systems have no fsync for folders; they order such entries themselves.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other,
    }
}

/// Refuses to put results into the very file that they are made from, by whatever path or link it is named.
///
/// # Errors
/// It is that file.
pub fn refuse_source(path: &Path, source: &Path) -> Result<(), DataError> {
    use std::os::unix::fs::MetadataExt;
    let (Ok(place), Ok(read)) = (fs::metadata(path), fs::metadata(source)) else {
        return Ok(());
    };
    if (place.dev(), place.ino()) != (read.dev(), read.ino()) {
        return Ok(());
    }
    Err(DataError::file(
        path,
        format!(
            "the results would replace the file that they are made from ({}); name another",
            source.display()
        ),
    ))
}

/// A JSON list that is written item by item, with an indent of 4 as FiD writes it.
#[derive(Debug)]
pub struct JsonList {
    file: ReplacedFile,
    items: u64,
}

impl JsonList {
    /// Starts the list, as [`ReplacedFile::create`].
    ///
    /// # Errors
    /// Likewise.
    pub fn create(path: &Path) -> Result<JsonList, DataError> {
        Ok(JsonList { file: ReplacedFile::create(path)?, items: 0 })
    }

    /// The path that it will have, links followed.
    pub fn target(&self) -> &Path {
        self.file.target()
    }

    /// An item as [`JsonList::push_bytes`] takes it.
    pub fn bytes(item: &Map<String, Value>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut serializer =
            serde_json::Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b"    "));
        item.serialize(&mut serializer).expect("parsed JSON can be written to memory");
        bytes
    }

    /// Adds an item.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn push(&mut self, item: &Map<String, Value>) -> Result<(), DataError> {
        self.push_bytes(&Self::bytes(item))
    }

    /// Adds an item that is JSON already, its lines as [`JsonList::bytes`] lays them out.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn push_bytes(&mut self, item: &[u8]) -> Result<(), DataError> {
        self.file.write(if self.items == 0 { b"[" } else { b"," as &[u8] })?;
        // A line end within a text is escaped, so every line here is one of the layout.
        for line in item.split(|&b| b == b'\n') {
            self.file.write(b"\n    ")?;
            self.file.write(line)?;
        }
        self.items += 1;
        Ok(())
    }

    /// Ends the list and gives the file its name.
    ///
    /// # Errors
    /// As [`ReplacedFile::finish`].
    pub fn finish(mut self) -> Result<PathBuf, DataError> {
        self.file.write(if self.items == 0 { b"[]\n" } else { b"\n]\n" as &[u8] })?;
        self.file.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_is_known_by_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let [source, link, other] = ["q.jsonl", "link.jsonl", "other.jsonl"].map(|n| dir.path().join(n));
        fs::write(&source, "x").unwrap();
        refuse_source(&other, &source).unwrap();
        fs::write(&other, "x").unwrap();
        refuse_source(&other, &source).unwrap();
        std::os::unix::fs::symlink(&source, &link).unwrap();
        for name in [&source, &link, &dir.path().join("./q.jsonl")] {
            let error = refuse_source(name, &source).unwrap_err().to_string();
            assert!(error.contains("would replace the file"), "{error}");
        }
    }

    #[test]
    fn it_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/results.txt");
        let mut file = ReplacedFile::create(&path).unwrap();
        file.write(b"one\n").unwrap();
        assert!(!path.exists());
        drop(file);
        let folder = path.parent().unwrap();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "a dropped file leaves nothing");
        fs::write(&path, "old").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut file = ReplacedFile::create(&link).unwrap();
        file.write(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        file.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
        for wrong in [dir.path(), Path::new("/dev/null")] {
            let error = ReplacedFile::create(wrong).unwrap_err().to_string();
            assert!(error.contains("a folder, a pipe or a device"), "{error}");
        }
    }

    #[test]
    fn what_killed_processes_left_goes_with_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join(name);
        let dead = of(".r.txt.12-0123abcd");
        let others = [of(".r.txt.12-other"), of(".other.txt.12-0123abcd"), of(".r.txt.x-0123abcd")];
        for path in others.iter().chain([&dead]) {
            fs::write(path, "x").unwrap();
        }
        let living = ReplacedFile::create(&of("r.txt")).unwrap();
        assert!(dead.exists(), "it is young");
        remove_leftovers(&of("r.txt"), Duration::ZERO, is_beside);
        assert!(!dead.exists() && living.temporary.exists());
        assert!(others.iter().all(|path| path.exists()), "these are not ours");
        living.finish().unwrap();
        assert!(of("r.txt").exists());
    }
}
