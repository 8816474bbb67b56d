//! Following a job: what is added to its output, and changes of its state.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A file that grows; it may not be there yet.
#[derive(Debug)]
pub struct Follow {
    path: PathBuf,
    at: u64,
}

impl Follow {
    /// Follows a file from its beginning.
    pub fn new(path: PathBuf) -> Follow {
        Follow { path, at: 0 }
    }

    /// Copies what was added since the last call; returns how many bytes that were. A file that was made shorter is read
    /// from its beginning.
    ///
    /// # Errors
    /// When it cannot be read, or `to` cannot be written. A file that is not there is no error.
    pub fn copy(&mut self, to: &mut impl Write) -> io::Result<u64> {
        let mut file = match File::open(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
            file => file?,
        };
        let length = file.metadata()?.len();
        if length < self.at {
            self.at = 0;
        }
        file.seek(SeekFrom::Start(self.at))?;
        let copied = io::copy(&mut file.take(length - self.at), to)?;
        self.at += copied;
        Ok(copied)
    }
}

/// The last line of a text file that is not empty, of its last 64 KiB; `None` where there is none.
///
/// # Errors
/// When it cannot be read.
pub fn last_line(path: &Path) -> io::Result<Option<String>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(64 << 10)))?;
    let mut bytes = Vec::new();
    file.take(64 << 10).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_file_is_copied_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let (mut follow, mut out) = (Follow::new(path.clone()), Vec::new());
        assert_eq!(follow.copy(&mut out).unwrap(), 0);
        std::fs::write(&path, "one\n").unwrap();
        follow.copy(&mut out).unwrap();
        std::fs::write(&path, "one\ntwo\n\n").unwrap();
        follow.copy(&mut out).unwrap();
        assert_eq!(follow.copy(&mut out).unwrap(), 0);
        assert_eq!(out, b"one\ntwo\n\n");
        assert_eq!(last_line(&path).unwrap().as_deref(), Some("two"));
        std::fs::write(&path, "new\n").unwrap();
        follow.copy(&mut out).unwrap();
        assert_eq!(out, b"one\ntwo\n\nnew\n");
    }
}
