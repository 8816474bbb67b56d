//! Unpacks downloaded archives of data: files go where their names say, below one folder, and nothing else is made.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::{Archive, EntryType};

use super::DownloadError;

/// Text compresses ten times; what unpacks to more than this many times its size is a trap.
const MOST_GROWTH: u64 = 200;
/// So much may come out of any archive.
const SMALL: u64 = 64 << 20;
const MOST_ENTRIES: usize = 10_000;

/// Unpacks a `.tar.gz` into `folder` and gives the paths of its files. Each appears when it is whole.
///
/// # Errors
/// An archive that is damaged, or holds links, devices, paths that lead out or far more than it should; a full disk.
pub fn unpack(archive: &Path, folder: &Path) -> Result<Vec<PathBuf>, DownloadError> {
    let refused = |what: String| DownloadError::Unusable(format!("{}: {what}", archive.display()));
    let broken = |e: io::Error| {
        refused(format!("expected a .tar.gz, found that it is cut off or damaged ({e}); get it again"))
    };
    let file = File::open(archive).map_err(|e| io_error(archive, "open the file", e))?;
    let length = file.metadata().map_err(|e| io_error(archive, "open the file", e))?.len();
    let mut left = SMALL.saturating_add(length.saturating_mul(MOST_GROWTH));
    let mut tar = Archive::new(MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file)));
    let mut written = Vec::new();
    for (n, entry) in tar.entries().map_err(broken)?.raw(true).enumerate() {
        let mut entry = entry.map_err(broken)?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let parts: Vec<&str> = name.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
        if name.starts_with('/') || name.contains(['\\', '\0']) || parts.contains(&"..") {
            return Err(refused(format!(
                "entry {name:?} would leave the folder that it is unpacked into; refused"
            )));
        }
        // What follows is read even where it is skipped.
        left = left.checked_sub(entry.size()).filter(|_| n < MOST_ENTRIES).ok_or_else(|| {
            refused(format!(
                "it unpacks to more than {MOST_GROWTH} times its size, or {MOST_ENTRIES} entries; refused"
            ))
        })?;
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous if !parts.is_empty() => {
                let target = parts.iter().fold(folder.to_owned(), |path, part| path.join(part));
                // A link that stands there already would lead out.
                let through_link = target.ancestors().take(parts.len()).any(Path::is_symlink);
                if through_link {
                    return Err(refused(format!(
                        "entry {name:?} would be written through a link; remove the link"
                    )));
                }
                let size = entry.size();
                let n = write_whole(&mut entry, &target, &broken)?;
                if n != size {
                    let _ = fs::remove_file(&target);
                    return Err(refused(format!(
                        "{name} has {n} of {size} bytes; the archive is cut off, get it again"
                    )));
                }
                written.push(target);
            }
            EntryType::Directory | EntryType::XHeader | EntryType::XGlobalHeader => {}
            _ => return Err(refused(format!("entry {name:?} is neither a file nor a folder; refused"))),
        }
    }
    if written.is_empty() {
        return Err(refused("expected files, found none; get it again".into()));
    }
    Ok(written)
}

/// Decompresses a `.gz` file to `target`, which appears when it is whole.
///
/// # Errors
/// Data that is damaged or no gzip; a full disk.
pub fn gunzip(path: &Path, target: &Path) -> Result<u64, DownloadError> {
    let file = File::open(path).map_err(|e| io_error(path, "open the file", e))?;
    let broken = |e: io::Error| {
        DownloadError::Unusable(format!(
            "{}: expected gzip data, found that it is cut off or damaged ({e}); get it again",
            path.display()
        ))
    };
    write_whole(&mut MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file)), target, &broken)
}

fn write_whole(
    source: &mut impl Read,
    target: &Path,
    broken: &dyn Fn(io::Error) -> DownloadError,
) -> Result<u64, DownloadError> {
    let folder = target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| io_error(folder, "create the folder", e))?;
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}.tmp", std::process::id()));
    let failed = |e| io_error(target, "write the file", e);
    let copied = (|| {
        let mut file = File::create(&temporary).map_err(failed)?;
        let mut buffer = vec![0; 1 << 18];
        let mut all = 0;
        loop {
            match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    file.write_all(&buffer[..n]).map_err(failed)?;
                    all += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(e)),
            }
        }
        file.sync_all().and_then(|()| fs::rename(&temporary, target)).map_err(failed)?;
        Ok(all)
    })();
    if copied.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    copied
}

fn io_error(path: &Path, action: &'static str, source: io::Error) -> DownloadError {
    DownloadError::Io { path: path.to_owned(), action, source }
}
