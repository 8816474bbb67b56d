//! Opens a data file by its suffix: `.json` or `.jsonl` (`.tsv` for some), as it is or with `.gz` or `.zst` behind; or
//! `.parquet`, whose lines of JSON are made as those of a compressed file are.
//!
//! Also the small file helpers of the cache: names that do not clash, written beside and renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::error::DataError;
use crate::scan::Layout;

/// How the bytes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
    /// Not a compression, but handled like one: rows of Parquet become lines of JSON. Needs the feature `parquet`.
    Parquet,
}

/// The compression that a file's name promises.
pub(crate) fn compression(path: &Path) -> Compression {
    match path.extension().and_then(|e| e.to_str()) {
        Some(e) if e.eq_ignore_ascii_case("gz") => Compression::Gzip,
        Some(e) if e.eq_ignore_ascii_case("zst") => Compression::Zstd,
        _ => Compression::None,
    }
}

/// The layout and the compression that the name of a file of questions promises.
pub(crate) fn kind(path: &Path) -> Result<(Layout, Compression), DataError> {
    let what = ".json (one list) or .jsonl (one question per line)";
    kind_among(path, &[(".json", Layout::List), (".jsonl", Layout::Lines)], what)
}

/// The layout and the compression that a file's name promises, by the endings that are known of its kind of file; `what`
/// tells them.
pub(crate) fn kind_among(
    path: &Path,
    endings: &[(&str, Layout)],
    what: &str,
) -> Result<(Layout, Compression), DataError> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_ascii_lowercase();
    if name.ends_with(".parquet") {
        if cfg!(feature = "parquet") {
            return Ok((Layout::Lines, Compression::Parquet));
        }
        let message = "this build does not read Parquet; build it with `--features parquet`, or write the rows as .jsonl";
        return Err(DataError::file(path, message));
    }
    let compression = compression(path);
    let stem = match compression {
        Compression::None | Compression::Parquet => name.as_str(),
        Compression::Gzip => name.trim_end_matches(".gz"),
        Compression::Zstd => name.trim_end_matches(".zst"),
    };
    match endings.iter().find(|(ending, _)| stem.ends_with(ending)) {
        Some(&(_, layout)) => Ok((layout, compression)),
        None => Err(DataError::file(
            path,
            format!(
                "expected a name that ends in {what}, with .gz or .zst behind if compressed; rename the file"
            ),
        )),
    }
}

/// A reader of the decompressed bytes.
pub(crate) fn reader(file: File, compression: Compression) -> io::Result<Box<dyn Read>> {
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => {
            Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file)))
        }
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::new(file)?),
        #[cfg(feature = "parquet")]
        Compression::Parquet => crate::columns::lines(file)?,
        #[cfg(not(feature = "parquet"))]
        Compression::Parquet => return Err(io::ErrorKind::Unsupported.into()),
    })
}

/// Explains an error of a decompressor.
pub(crate) fn unpack_error(path: &Path, compression: Compression, error: io::Error) -> DataError {
    let name = match compression {
        Compression::None => return DataError::io(path, "read the file")(error),
        Compression::Gzip => "gzip",
        Compression::Zstd => "zstd",
        Compression::Parquet => "Parquet",
    };
    match error.kind() {
        io::ErrorKind::UnexpectedEof => DataError::file(
            path,
            format!("the {name} data ends too early; the file was cut short, get it again"),
        ),
        io::ErrorKind::Unsupported => DataError::file(path, error.to_string()),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::Other => DataError::file(
            path,
            format!("expected {name} data, found something else or damage ({error}); get the file again"),
        ),
        _ => DataError::io(path, "decompress the file")(error),
    }
}

/// Bytes that may be written into a folder before its disk becomes too full: what is free, less a tenth or 1 GiB.
pub(crate) fn writable_bytes(dir: &Path) -> Result<u64, DataError> {
    let stat =
        rustix::fs::statvfs(dir).map_err(|e| DataError::io(dir, "ask for the free space")(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    Ok(free - (free / 10).min(1 << 30))
}

/// A file that is written beside its final name and vanishes unless it is kept.
#[derive(Debug)]
pub(crate) struct Beside {
    pub file: File,
    path: PathBuf,
    target: PathBuf,
    kept: bool,
}

impl Beside {
    pub fn create(target: &Path) -> Result<Beside, DataError> {
        let name = target.file_name().and_then(|n| n.to_str()).unwrap_or("file");
        for attempt in 0..10_000u32 {
            let path = target.with_file_name(format!(".{name}.{}.{attempt}.tmp", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    return Ok(Beside { file, path, target: target.to_path_buf(), kept: false });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(DataError::io(&path, "create the file")(e)),
            }
        }
        Err(DataError::file(target, "found 10000 left-over temporary files beside it; remove them"))
    }

    /// Syncs the file and gives it its final name.
    pub fn keep(mut self) -> Result<(), DataError> {
        self.file.sync_all().map_err(DataError::io(&self.path, "write the file"))?;
        fs::rename(&self.path, &self.target).map_err(DataError::io(&self.target, "rename the file"))?;
        self.kept = true;
        Ok(())
    }

    /// Gives the file up without removing its name.
    pub fn leave(mut self) {
        self.kept = true;
    }

    /// As [`Beside::keep`], but a file that has the name already stays.
    pub fn keep_new(self) -> Result<(), DataError> {
        self.file.sync_all().map_err(DataError::io(&self.path, "write the file"))?;
        match fs::hard_link(&self.path, &self.target) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // Not every file system has links.
            Err(_) => self.keep(),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.kept {
            // nothing more can be done for a file that was not wanted
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_decide() {
        use Compression::{Gzip, None, Zstd};
        for (name, layout, compression) in [
            ("a.json", Layout::List, None),
            ("a.JSONL", Layout::Lines, None),
            ("a.b.jsonl.gz", Layout::Lines, Gzip),
            ("a.json.zst", Layout::List, Zstd),
        ] {
            assert_eq!(kind(Path::new(name)).unwrap(), (layout, compression));
        }
        for name in ["a.tsv", "json", "a.gz", "a.json.bz2"] {
            assert!(kind(Path::new(name)).unwrap_err().to_string().contains(".jsonl"));
        }
    }

    #[test]
    fn beside_leaves_nothing_unless_kept() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("x.index");
        drop(Beside::create(&target).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        Beside::create(&target).unwrap().keep().unwrap();
        assert!(target.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
