//! Unpacks the files of a model out of a `.tar` or `.tar.gz` that nobody vouches for.
//!
//! Nothing is written under a name that the archive chose: a file of use goes to `FOLDER/NUMBER/NAME`, with a name from our
//! own list. Links, devices, paths that lead out, and archives that unpack to far more than they hold are refused.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::{Archive, Entry, EntryType};

/// Why an archive was refused or could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The operating system refused to open, read or write.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// It is no archive, cut off, damaged, or made to do harm.
    #[error("{}: {what}", path.display())]
    Refused {
        /// The archive.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
}

/// What an archive held.
#[derive(Debug)]
pub(super) struct Unpacked {
    /// The model's files.
    pub folder: PathBuf,
    /// Files that were not unpacked.
    pub left_out: Vec<String>,
}

/// Weights hardly compress; the archive of a model that unpacks to more than this many times its size is a trap.
const MOST_GROWTH: u64 = 32;
/// So much may come out of any archive: small models compress well.
const SMALL: u64 = 64 << 20;
const MOST_ENTRIES: usize = 10_000;
const MOST_FOLDERS: usize = 100;
/// Longest description of an entry (long names, times) that is skipped.
const MOST_EXTENSION: u64 = 1 << 20;

/// Unpacks the files that `is_of_use` says yes to into folders below `into`, and gives the one that has a `config.json`.
pub(super) fn unpack(
    path: &Path,
    into: &Path,
    is_of_use: fn(&str) -> bool,
) -> Result<Unpacked, ArchiveError> {
    let refused = |what: String| ArchiveError::Refused { path: path.to_owned(), what };
    let io = |action| move |source| ArchiveError::Io { path: path.to_owned(), action, source };
    let mut file = File::open(path).map_err(io("open it"))?;
    let length = file.metadata().map_err(io("open it"))?.len();
    let mut magic = [0; 2];
    let zipped = match file.read_exact(&mut magic) {
        Ok(()) => magic == [0x1f, 0x8b],
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(refused(format!("expected a .tar or .tar.gz of a model, found {length} bytes")));
        }
        Err(e) => return Err(io("read it")(e)),
    };
    io::Seek::rewind(&mut file).map_err(io("read it"))?;
    let limit = SMALL.saturating_add(length.saturating_mul(MOST_GROWTH));
    let file = BufReader::with_capacity(1 << 18, file);
    let plain: Box<dyn Read> = if zipped { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut archive = Archive::new(Limited { inner: plain, left: limit });
    let mut place = Places { into, folders: BTreeMap::new(), left_out: Vec::new(), is_of_use };
    let broken = |e: io::Error| match e.get_ref().and_then(|e| e.downcast_ref::<Bomb>()) {
        Some(_) => refused(format!(
            "it unpacks to more than {limit} bytes, {MOST_GROWTH} times its size and {SMALL}; refused as no archive of a model"
        )),
        None => refused(format!(
            "expected a .tar or .tar.gz of a model, found that it is cut off or damaged ({e}); get it again"
        )),
    };
    // Raw: names and sizes are what the header says, and no extension is read into memory.
    for (n, entry) in archive.entries().map_err(broken)?.raw(true).enumerate() {
        if n >= MOST_ENTRIES {
            return Err(refused(format!(
                "expected at most {MOST_ENTRIES} entries; refused as no archive of a model"
            )));
        }
        let mut entry = entry.map_err(broken)?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let parts = parts(&name).ok_or_else(|| {
            refused(format!("entry {name:?} would leave the folder that it is unpacked into; refused"))
        })?;
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => {
                if let Some(target) = place.target(&parts).map_err(&refused)? {
                    write(&mut entry, &target, path, &broken)?;
                }
            }
            EntryType::Directory => {}
            EntryType::GNULongName
            | EntryType::GNULongLink
            | EntryType::XHeader
            | EntryType::XGlobalHeader
                if entry.size() <= MOST_EXTENSION => {}
            other => {
                return Err(refused(format!(
                    "entry {name:?} is {}, expected files and folders only; refused",
                    kind(other)
                )));
            }
        }
    }
    place.finish().map_err(refused)
}

/// The parts of a path without `.`; `None` where it is absolute or goes up.
fn parts(name: &str) -> Option<Vec<&str>> {
    if name.starts_with(['/', '\\']) || name.contains('\0') {
        return None;
    }
    let parts: Vec<&str> = name.split(['/', '\\']).filter(|part| !part.is_empty() && *part != ".").collect();
    (!parts.contains(&"..")).then_some(parts)
}

fn kind(entry: EntryType) -> &'static str {
    match entry {
        EntryType::Symlink => "a symbolic link",
        EntryType::Link => "a hard link",
        EntryType::Char | EntryType::Block => "a device",
        EntryType::Fifo => "a pipe",
        EntryType::GNUSparse => "a file with holes",
        _ => "of a kind that no model needs",
    }
}

/// Where files go.
struct Places<'a> {
    into: &'a Path,
    /// Number and files of each folder of the archive.
    folders: BTreeMap<String, (usize, Vec<String>)>,
    left_out: Vec<String>,
    is_of_use: fn(&str) -> bool,
}

impl Places<'_> {
    /// The path of a file that is of use.
    fn target(&mut self, parts: &[&str]) -> Result<Option<PathBuf>, String> {
        let Some((name, folder)) = parts.split_last() else { return Ok(None) };
        if !(self.is_of_use)(name) {
            self.left_out.push(parts.join("/"));
            return Ok(None);
        }
        let (count, folder) = (self.folders.len(), folder.join("/"));
        let (number, files) = self.folders.entry(folder).or_insert((count, Vec::new()));
        if *number >= MOST_FOLDERS {
            return Err(format!("expected one model, found files of more than {MOST_FOLDERS}; refused"));
        }
        if files.iter().any(|file| file == name) {
            return Err(format!("expected every file once, found {:?} twice; refused", parts.join("/")));
        }
        files.push((*name).to_owned());
        Ok(Some(self.into.join(number.to_string()).join(name)))
    }

    fn finish(self) -> Result<Unpacked, String> {
        let has = |files: &[String]| files.iter().any(|f| f == "config.json");
        let models: Vec<_> = self.folders.iter().filter(|(_, (_, files))| has(files)).collect();
        match models[..] {
            [(_, (number, _))] => {
                Ok(Unpacked { folder: self.into.join(number.to_string()), left_out: self.left_out })
            }
            [] => Err("expected the folder of a model, found no config.json in the archive".into()),
            _ => {
                let names: Vec<String> =
                    models.iter().take(10).map(|(name, _)| format!("{name:?}")).collect();
                Err(format!(
                    "expected one model, found {} ({}); unpack it and name one of the folders",
                    models.len(),
                    names.join(", ")
                ))
            }
        }
    }
}

fn write(
    entry: &mut Entry<'_, Limited>,
    target: &Path,
    archive: &Path,
    broken: &dyn Fn(io::Error) -> ArchiveError,
) -> Result<(), ArchiveError> {
    let failed = |source| ArchiveError::Io { path: target.to_owned(), action: "unpack into it", source };
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let file = File::options().write(true).create_new(true).open(target).map_err(failed)?;
    let mut out = BufWriter::new(file);
    let (size, mut written) = (entry.size(), 0);
    let mut buffer = vec![0; 1 << 17];
    loop {
        let n = match entry.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(broken(e)),
        };
        out.write_all(&buffer[..n]).map_err(failed)?;
        written += n as u64;
    }
    if written != size {
        let what =
            format!("a file of {size} bytes ends after {written}; the archive is cut off, get it again");
        return Err(ArchiveError::Refused { path: archive.to_owned(), what });
    }
    out.flush().map_err(failed)
}

/// More came out than any model's archive holds.
#[derive(Debug, thiserror::Error)]
#[error("the archive unpacks to too much")]
struct Bomb;

/// Ends with [`Bomb`] where more comes than was allowed.
struct Limited {
    inner: Box<dyn Read>,
    left: u64,
}

impl Read for Limited {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| io::Error::other(Bomb))?;
        Ok(n)
    }
}
