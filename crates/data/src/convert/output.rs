//! The file of a conversion: `.json` (one list, an item a line) or `.jsonl`, written beside and renamed when it is whole.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::scan::Layout;
use crate::source::{Compression, kind};

pub(super) struct Output {
    out: BufWriter<File>,
    temporary: PathBuf,
    target: PathBuf,
    layout: Layout,
    /// Items so far.
    pub items: u64,
    kept: bool,
}

impl Output {
    /// Begins the file; its folder is made. A file that is there is replaced at the end.
    pub fn create(target: &Path) -> Result<Output, DataError> {
        let (layout, compression) = kind(target)?;
        if compression != Compression::None {
            return Err(DataError::file(
                target,
                "expected a name that ends in .json or .jsonl, found a compressed one",
            ));
        }
        let folder = target.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(DataError::io(folder, "create the folder"))?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let temporary = folder.join(format!(".{name}.{}.tmp", std::process::id()));
        let file = File::create(&temporary).map_err(DataError::io(&temporary, "create the file"))?;
        let out = BufWriter::with_capacity(1 << 18, file);
        Ok(Output { out, temporary, target: target.to_owned(), layout, items: 0, kept: false })
    }

    /// The name it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Adds an item.
    pub fn item(&mut self, item: Map<String, Value>) -> Result<(), DataError> {
        let before: &[u8] = match (self.layout, self.items) {
            (Layout::List, 0) => b"[\n",
            (Layout::List, _) => b",\n",
            (_, 0) => b"",
            (_, _) => b"\n",
        };
        self.items += 1;
        let mut write = || {
            self.out.write_all(before)?;
            serde_json::to_writer(&mut self.out, &item).map_err(std::io::Error::from)
        };
        write().map_err(DataError::io(&self.target, "write the file"))
    }

    /// Ends and syncs the file, and gives it its name.
    pub fn finish(mut self) -> Result<u64, DataError> {
        let after: &[u8] = match (self.layout, self.items) {
            (Layout::List, 0) => b"[\n]\n",
            (Layout::List, _) => b"\n]\n",
            (_, 0) => b"",
            (_, _) => b"\n",
        };
        let end = self
            .out
            .write_all(after)
            .and_then(|()| self.out.flush())
            .and_then(|()| self.out.get_ref().sync_all());
        end.and_then(|()| fs::rename(&self.temporary, &self.target))
            .map_err(DataError::io(&self.target, "write the file"))?;
        self.kept = true;
        Ok(self.items)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.kept {
            // nothing more can be done for a file that was not wanted
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
