//! The index of a data file: where each item lies, built in one streaming pass and kept in a cache folder.
//!
//! An index file is 24-byte records (offset, length, line; little endian), then a JSON footer, then the
//! footer's length and a magic word. It is valid for one path, size and modification time; a compressed
//! source has its decompressed bytes beside the index. Both are written beside their name and renamed, so
//! several processes may open the same file at once.

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::scan::{Fault, Layout, Scanner, Span};
use crate::source::{self, Beside, Compression};

const MAGIC: &[u8; 8] = b"TERCIOQ1";
const RECORD: u64 = 24;
const MAX_FOOTER: u64 = 1 << 20;

/// What a file looked like: enough to notice that it was replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    bytes: u64,
    modified_ns: u128,
}

impl Stamp {
    fn of(file: &File) -> std::io::Result<Stamp> {
        let meta = file.metadata()?;
        // a time before 1970 is as good a mark as any other
        let modified_ns = meta.modified()?.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        Ok(Stamp { bytes: meta.len(), modified_ns })
    }
}

#[derive(Serialize, Deserialize)]
struct Footer {
    source: String,
    stamp: Stamp,
    items: u64,
    /// SHA-256 of the decompressed content.
    sha256: String,
    content_bytes: u64,
    records_sha256: String,
    fault: Option<(u64, String)>,
    /// Fewest and most fields of a row.
    #[serde(default)]
    fields: Option<(u64, u64)>,
}

/// An open data file with its index.
pub(crate) struct Indexed {
    data: File,
    data_stamp: Stamp,
    records: File,
    pub items: usize,
    pub sha256: String,
    pub fault: Option<Fault>,
    /// Fewest and most fields of a row, where the file has rows.
    pub fields: Option<(u64, u64)>,
}

impl Indexed {
    /// Opens a file of this layout, building the index (and the decompressed copy) where the cache has none that fits.
    pub fn open(path: &Path, kind: (Layout, Compression), cache_dir: &Path) -> Result<Indexed, DataError> {
        Self::open_within(path, kind, cache_dir, None)
    }

    fn open_within(
        path: &Path,
        (layout, compression): (Layout, Compression),
        cache_dir: &Path,
        limit: Option<u64>,
    ) -> Result<Indexed, DataError> {
        // asked before opening: opening a pipe would wait for its writer
        let meta = fs::metadata(path).map_err(DataError::io(path, "open the file"))?;
        if !meta.is_file() {
            return Err(DataError::file(
                path,
                "expected a regular file, found a folder or a device; name a file",
            ));
        }
        if meta.len() == 0 {
            return Err(DataError::file(path, "expected data, found an empty file; get the file again"));
        }
        let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
        let stamp = Stamp::of(&file).map_err(DataError::io(path, "read the file"))?;
        let full = fs::canonicalize(path).map_err(DataError::io(path, "find the file"))?;
        fs::create_dir_all(cache_dir).map_err(DataError::io(cache_dir, "create the cache folder"))?;
        let names = Names::new(&full, layout, &stamp, cache_dir);

        if let Some(found) = names.load(&full, &stamp, compression, path)? {
            return Ok(found);
        }
        names.remove_older();

        let mut input =
            source::reader(file.try_clone().map_err(DataError::io(path, "read the file"))?, compression)
                .map_err(|e| source::unpack_error(path, compression, e))?;
        let mut copy = match compression {
            Compression::None => None,
            _ => Some(Beside::create(&names.data)?),
        };
        let limit = match limit {
            Some(limit) => limit,
            None => source::writable_bytes(cache_dir)?,
        };
        let index = Beside::create(&names.index)?;
        let mut out = BufWriter::new(&index.file);
        let mut records_hash = Sha256::new();
        let mut content_hash = Sha256::new();
        let mut scanner = Scanner::new(layout);
        let mut content_bytes = 0u64;
        let mut chunk = vec![0u8; 1 << 18];
        loop {
            let n = match input.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(source::unpack_error(path, compression, e)),
            };
            content_bytes += n as u64;
            content_hash.update(&chunk[..n]);
            if let Some(copy) = &mut copy {
                if content_bytes > limit {
                    return Err(DataError::file(
                        path,
                        format!(
                            "its decompressed content is larger than the {limit} bytes that {} may take; free some space or choose another cache folder",
                            cache_dir.display()
                        ),
                    ));
                }
                copy.file
                    .write_all(&chunk[..n])
                    .map_err(DataError::io(&names.data, "write the decompressed copy"))?;
            }
            scanner
                .feed(&chunk[..n], |span| write_record(&mut out, &mut records_hash, span))
                .map_err(DataError::io(&names.index, "write the index"))?;
        }
        let (last, items, fault, fields) = scanner.finish();
        if let Some(span) = last {
            write_record(&mut out, &mut records_hash, span)
                .map_err(DataError::io(&names.index, "write the index"))?;
        }
        let after = Stamp::of(&file).map_err(DataError::io(path, "read the file"))?;
        if after != stamp {
            return Err(DataError::file(
                path,
                "the file changed while it was read; start again once it is complete",
            ));
        }
        let footer = Footer {
            source: full.to_string_lossy().into_owned(),
            stamp: stamp.clone(),
            items,
            sha256: hex(&content_hash.finalize()),
            content_bytes,
            records_sha256: hex(&records_hash.finalize()),
            fault: fault.map(|f| (f.line, f.message)),
            fields,
        };
        let json = serde_json::to_vec(&footer)
            .map_err(|e| DataError::io(&names.index, "write the index")(e.into()))?;
        out.write_all(&json)
            .and_then(|()| out.write_all(&(json.len() as u64).to_le_bytes()))
            .and_then(|()| out.write_all(MAGIC))
            .and_then(|()| out.flush())
            .map_err(DataError::io(&names.index, "write the index"))?;
        drop(out);
        if let Some(copy) = copy {
            copy.keep()?;
        }
        index.keep()?;
        names.load(&full, &stamp, compression, path)?.ok_or_else(|| {
            DataError::file(
                &names.index,
                "the index just written cannot be read back; look at the disk of the cache folder",
            )
        })
    }

    /// Where the items of a range lie, which must be within the file's.
    pub fn spans(&self, range: std::ops::Range<usize>, path: &Path) -> Result<Vec<Span>, DataError> {
        let mut bytes = vec![0u8; range.len() * RECORD as usize];
        self.records
            .read_exact_at(&mut bytes, range.start as u64 * RECORD)
            .map_err(DataError::io(path, "read the index of the file"))?;
        let word = |words: &[u8], k: usize| u64::from_le_bytes(std::array::from_fn(|j| words[k * 8 + j]));
        let span = |r: &[u8]| Span { offset: word(r, 0), length: word(r, 1), line: word(r, 2) };
        Ok(bytes.chunks_exact(RECORD as usize).map(span).collect())
    }

    /// Where item `i` lies.
    pub fn span(&self, i: usize, path: &Path) -> Result<Span, DataError> {
        Ok(self.spans(i..i + 1, path)?[0])
    }

    /// The bytes of an item, or of several that lie one after the other.
    pub fn read(&self, span: Span, path: &Path) -> Result<Vec<u8>, DataError> {
        let now = Stamp::of(&self.data).map_err(DataError::io(path, "read the file"))?;
        if now != self.data_stamp {
            return Err(DataError::file(
                path,
                "the file changed while it was in use; start again with the file you want",
            ));
        }
        let mut bytes = vec![0u8; span.length as usize];
        self.data.read_exact_at(&mut bytes, span.offset).map_err(DataError::io(path, "read the file"))?;
        Ok(bytes)
    }
}

fn write_record(out: &mut impl Write, hash: &mut Sha256, span: Span) -> std::io::Result<()> {
    let mut bytes = [0u8; RECORD as usize];
    for (k, word) in [span.offset, span.length, span.line].into_iter().enumerate() {
        bytes[k * 8..k * 8 + 8].copy_from_slice(&word.to_le_bytes());
    }
    hash.update(bytes);
    out.write_all(&bytes)
}

/// Two lower-case hexadecimal digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

struct Names {
    family: String,
    data_family: String,
    index: PathBuf,
    data: PathBuf,
}

impl Names {
    fn new(full: &Path, layout: Layout, stamp: &Stamp, cache_dir: &Path) -> Names {
        let digest = |bytes: &[u8]| hex(&Sha256::digest(bytes)[..8]);
        let mut named = full.as_os_str().as_encoded_bytes().to_vec();
        let data_family = digest(&named);
        // The name of a JSON file says its layout; of rows of fields there are several, with an index each.
        match layout {
            Layout::List | Layout::Lines => {}
            Layout::Rows => named.extend_from_slice(b"\0rows"),
            Layout::Records(b'\t') => named.extend_from_slice(b"\0records"),
            Layout::Records(separator) => {
                named.extend_from_slice(&[b"\0records".as_slice(), &[separator]].concat())
            }
        }
        let family = digest(&named);
        let state = digest(format!("{} {}", stamp.bytes, stamp.modified_ns).as_bytes());
        let index = cache_dir.join(format!("{family}-{state}.index"));
        let data = cache_dir.join(format!("{data_family}-{state}.data"));
        Names { family, data_family, index, data }
    }

    /// The cached index if it is whole and fits; `None` means that it must be built.
    fn load(
        &self,
        full: &Path,
        stamp: &Stamp,
        compression: Compression,
        path: &Path,
    ) -> Result<Option<Indexed>, DataError> {
        let Ok(records) = File::open(&self.index) else {
            return Ok(None);
        };
        let Some(footer) = read_footer(&records) else {
            return Ok(None);
        };
        if footer.source != full.to_string_lossy() || footer.stamp != *stamp {
            return Ok(None);
        }
        let (data, named) = match compression {
            Compression::None => (File::open(full), full),
            _ => (File::open(&self.data), self.data.as_path()),
        };
        let Ok(data) = data else { return Ok(None) };
        let data_stamp = Stamp::of(&data).map_err(DataError::io(named, "read the file"))?;
        if data_stamp.bytes != footer.content_bytes {
            return Ok(None);
        }
        let items = usize::try_from(footer.items)
            .map_err(|_| DataError::file(path, "holds more items than this machine can count"))?;
        let fault = footer.fault.map(|(line, message)| Fault { line, message });
        let (sha256, fields) = (footer.sha256, footer.fields);
        Ok(Some(Indexed { data, data_stamp, records, items, sha256, fault, fields }))
    }

    /// Indexes and copies of earlier states of the same file are of no use any more.
    fn remove_older(&self) {
        let Some(entries) = self.index.parent().and_then(|dir| fs::read_dir(dir).ok()) else {
            return;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let ours = entry.file_name().to_str().is_some_and(|n| {
                (n.starts_with(&self.family) && n.ends_with(".index"))
                    || (n.starts_with(&self.data_family) && n.ends_with(".data"))
            });
            if ours && path != self.index && path != self.data {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// The footer of an index whose length and checksum are right.
fn read_footer(file: &File) -> Option<Footer> {
    let total = file.metadata().ok()?.len();
    let mut tail = [0u8; 16];
    file.read_exact_at(&mut tail, total.checked_sub(16)?).ok()?;
    if tail[8..] != *MAGIC {
        return None;
    }
    let length = u64::from_le_bytes(std::array::from_fn(|j| tail[j]));
    let records = total.checked_sub(16)?.checked_sub(length).filter(|_| length <= MAX_FOOTER)?;
    let mut json = vec![0u8; length as usize];
    file.read_exact_at(&mut json, records).ok()?;
    let footer: Footer = serde_json::from_slice(&json).ok()?;
    if footer.items.checked_mul(RECORD)? != records {
        return None;
    }
    let mut hash = Sha256::new();
    let mut chunk = vec![0u8; 1 << 16];
    let mut at = 0;
    while at < records {
        let n = chunk.len().min((records - at) as usize);
        file.read_exact_at(&mut chunk[..n], at).ok()?;
        hash.update(&chunk[..n]);
        at += n as u64;
    }
    (hex(&hash.finalize()) == footer.records_sha256).then_some(footer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gz(dir: &Path, text: &[u8]) -> PathBuf {
        let path = dir.join("q.jsonl.gz");
        let mut out =
            flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        out.write_all(text).unwrap();
        out.finish().unwrap();
        path
    }

    #[test]
    fn a_bomb_stops_at_the_limit_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = gz(dir.path(), &vec![b' '; 8 << 20]);
        assert!(fs::metadata(&path).unwrap().len() < 100_000);
        let cache = dir.path().join("cache");
        let kind = source::kind(&path).unwrap();
        let error = Indexed::open_within(&path, kind, &cache, Some(1 << 20)).err().unwrap().to_string();
        assert!(
            error.contains("q.jsonl.gz")
                && error.contains("1048576 bytes")
                && error.contains("free some space"),
            "{error}"
        );
        assert_eq!(fs::read_dir(&cache).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_index_is_built_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = gz(dir.path(), b"{\"question\": \"a\"}\n{\"question\": \"b\"}\n");
        let cache = dir.path().join("cache");
        let kind = source::kind(&path).unwrap();
        let first = Indexed::open(&path, kind, &cache).unwrap();
        let index = fs::read_dir(&cache)
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.extension().unwrap() == "index")
            .unwrap();
        let whole = fs::read(&index).unwrap();
        for at in [0, 30, whole.len() - 20, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&index, &bytes).unwrap();
            let again = Indexed::open(&path, kind, &cache).unwrap();
            assert_eq!((again.items, &again.sha256), (2, &first.sha256));
            assert_eq!(again.span(1, &path).unwrap(), first.span(1, &path).unwrap());
        }
        fs::write(&index, &whole[..10]).unwrap();
        assert_eq!(Indexed::open(&path, kind, &cache).unwrap().items, 2);
    }
}
