//! A file of an index as memory, read-only.
//!
//! Why a map here, where the rest of Tercio reads with positioned reads: a query touches some hundred places in lists of
//! megabytes, and a system call for each of them costs more than all of its arithmetic. What speaks against maps is that a file
//! that shrinks ends the process. Files of an index are written once under a name of their own, and no version of an index
//! changes or shortens them (`manifest.rs`); their sizes are compared when they are opened.
//!
//! A version that is replaced loses its files. On a local disk who has them mapped keeps them; on a network file system (NFS) a file
//! that another machine removes is gone for all, and the process that reads it ends with a bus error. So an index on such a file system
//! is not to be replaced or appended to while other machines search it: write the new version into another folder.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::SearchError;

/// The content of a file.
pub struct Mapped {
    /// Null if the file is empty.
    start: *mut std::ffi::c_void,
    len: usize,
}

// SAFETY: the memory is read only and stays until the value is dropped.
unsafe impl Send for Mapped {}
// SAFETY: likewise.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps a file that has to have `bytes` bytes.
    pub fn open(path: &Path, bytes: u64) -> Result<Mapped, SearchError> {
        let file = File::open(path).map_err(SearchError::io(path, "open the file of an index"))?;
        let found = file.metadata().map_err(SearchError::io(path, "read the file"))?.len();
        let len = usize::try_from(bytes).ok().filter(|_| found == bytes).ok_or_else(|| {
            let what =
                format!("expected {bytes} bytes, found {found}; the file was cut or replaced: index again");
            SearchError::file(path, what)
        })?;
        if len == 0 {
            return Ok(Mapped { start: std::ptr::null_mut(), len });
        }
        // SAFETY: a new map of a file that is open, at an address that the system chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let start = start.map_err(|e| SearchError::io(path, "map the file into memory")(e.into()))?;
        Ok(Mapped { start, len })
    }
}

impl Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self.len {
            0 => &[],
            // SAFETY: `len` bytes were mapped from `start` on, readable, for as long as `self` lives. Nobody writes to them: see above.
            len => unsafe { std::slice::from_raw_parts(self.start.cast(), len) },
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: mapped in `open`, and no slice of it outlives `self`.
            let _ = unsafe { munmap(self.start, self.len) };
        }
    }
}
