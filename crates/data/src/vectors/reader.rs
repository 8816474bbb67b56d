//! Reading a complete set of vectors: positioned reads, so that memory does not grow with the set.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{
    MANIFEST, SETTINGS, ShardEntry, VectorDtype, VectorSettings, VectorsManifest, bytes_of, check_size,
    read_json,
};
use crate::error::DataError;
use crate::index::hex;

/// Longest line of a file of ids.
const MAX_ID_LINE: u64 = 1 << 20;

/// A complete set of vectors.
#[derive(Debug)]
pub struct Vectors {
    dir: PathBuf,
    manifest: VectorsManifest,
}

impl Vectors {
    /// Opens a folder that `tercio embed` has finished. Files are looked at (names, sizes), not read.
    ///
    /// # Errors
    /// A set that is not complete, another format, a manifest that contradicts itself or the files.
    pub fn open(dir: &Path) -> Result<Vectors, DataError> {
        let path = dir.join(MANIFEST);
        let Some(manifest) = read_json::<VectorsManifest>(&path)? else {
            let begun = dir.join(SETTINGS).exists();
            let what = if begun {
                "the vectors here are not complete (there is no manifest.json yet); run `tercio embed` again, it goes on"
            } else {
                "expected a folder of vectors with a manifest.json, found none; make one with `tercio embed`"
            };
            return Err(DataError::file(dir, what));
        };
        let fault = |what: String| DataError::file(&path, what);
        manifest.settings.check().map_err(fault)?;
        if manifest.shards.len() as u64 != manifest.settings.shards() {
            return Err(fault(format!(
                "expected {} shards of {} vectors, found {}; embed again",
                manifest.settings.shards(),
                manifest.settings.count,
                manifest.shards.len()
            )));
        }
        for (number, entry) in manifest.shards.iter().enumerate() {
            entry.check(&manifest.settings, number as u64).map_err(fault)?;
            let bytes = bytes_of(&manifest.settings, entry.count)
                .ok_or_else(|| fault(format!("shard {number} is larger than any file; embed again")))?;
            check_size(&dir.join(&entry.vectors), bytes)?;
            let ids = dir.join(&entry.ids);
            fs::metadata(&ids).map_err(DataError::io(&ids, "open the file"))?;
        }
        Ok(Vectors { dir: dir.to_owned(), manifest })
    }

    /// What the vectors are made of and how.
    pub fn settings(&self) -> &VectorSettings {
        &self.manifest.settings
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// How many vectors there are.
    pub fn len(&self) -> u64 {
        self.manifest.settings.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Numbers of a vector.
    pub fn dimension(&self) -> usize {
        self.manifest.settings.dimension
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.manifest.shards.len()
    }

    /// SHA-256 over the checksums of all shards' vectors, in hexadecimal digits: equal rows give equal fingerprints.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        self.manifest.shards.iter().for_each(|shard| sum.update(shard.vectors_sha256.as_bytes()));
        hex(&sum.finalize())
    }

    /// Opens a shard.
    ///
    /// # Errors
    /// A shard that is not there, or cannot be opened.
    pub fn shard(&self, number: usize) -> Result<VectorShard, DataError> {
        let entry = self.manifest.shards.get(number).ok_or_else(|| {
            DataError::Setting(format!(
                "{}: has {} shards, shard {number} was asked for",
                self.dir.display(),
                self.shards()
            ))
        })?;
        let path = self.dir.join(&entry.vectors);
        let file = File::open(&path).map_err(DataError::io(&path, "open the file"))?;
        Ok(VectorShard {
            file,
            path,
            ids: self.dir.join(&entry.ids),
            entry: entry.clone(),
            dtype: self.manifest.settings.dtype,
            dimension: self.dimension(),
        })
    }

    /// Reads all files and compares their checksums.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn verify(&self) -> Result<(), DataError> {
        self.verify_until(&|| false).map(|_| ())
    }

    /// As [`Vectors::verify`]; false where `stop` ended it before all were compared.
    ///
    /// # Errors
    /// Likewise.
    pub fn verify_until(&self, stop: &dyn Fn() -> bool) -> Result<bool, DataError> {
        let mut chunk = vec![0; 1 << 20];
        for entry in &self.manifest.shards {
            for (name, expected) in [(&entry.vectors, &entry.vectors_sha256), (&entry.ids, &entry.ids_sha256)]
            {
                let path = self.dir.join(name);
                let mut file = File::open(&path).map_err(DataError::io(&path, "open the file"))?;
                let mut sum = Sha256::new();
                loop {
                    if stop() {
                        return Ok(false);
                    }
                    match file.read(&mut chunk).map_err(DataError::io(&path, "read the file"))? {
                        0 => break,
                        n => sum.update(&chunk[..n]),
                    }
                }
                let found = hex(&sum.finalize());
                if found != *expected {
                    let what = format!(
                        "expected the SHA-256 {expected}, found {found}; the file was damaged: remove manifest.json, the \
                         shard's .json and this file, and embed again"
                    );
                    return Err(DataError::file(&path, what));
                }
            }
        }
        Ok(true)
    }
}

/// An open shard. Shared between threads freely: reading moves no file position.
#[derive(Debug)]
pub struct VectorShard {
    file: File,
    path: PathBuf,
    ids: PathBuf,
    entry: ShardEntry,
    dtype: VectorDtype,
    dimension: usize,
}

impl VectorShard {
    /// Its rows.
    pub fn len(&self) -> usize {
        self.entry.count as usize
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row of the whole set that is its first.
    pub fn first(&self) -> u64 {
        self.entry.first
    }

    /// Reads rows `start..start + out.len() / dimension` as f32; `out` holds whole rows.
    ///
    /// # Errors
    /// Rows that are not there, a file that cannot be read, numbers that are none.
    pub fn rows(&self, start: usize, out: &mut [f32]) -> Result<(), DataError> {
        let mut bytes = vec![0; out.len() * self.dtype.bytes()];
        self.stored(start, &mut bytes)?;
        self.decode(start, &bytes, out)
    }

    /// Reads the bytes of rows from `start` on as they are stored; `out` holds whole rows. What they say is not looked at.
    ///
    /// # Errors
    /// Rows that are not there, a file that cannot be read.
    pub fn stored(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        let row = self.dimension * self.dtype.bytes();
        let count = out.len() / row;
        if !out.len().is_multiple_of(row) || start.checked_add(count).is_none_or(|end| end > self.len()) {
            return Err(DataError::Setting(format!(
                "{}: has {} rows of {} numbers, {} bytes from row {start} were asked for",
                self.path.display(),
                self.len(),
                self.dimension,
                out.len()
            )));
        }
        self.file
            .read_exact_at(out, start as u64 * row as u64)
            .map_err(DataError::io(&self.path, "read the file"))
    }

    /// Numbers of the rows from `start` on that [`VectorShard::stored`] has read.
    ///
    /// # Errors
    /// Numbers that are none.
    pub fn decode(&self, start: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), DataError> {
        self.dtype.decode(bytes, out);
        refuse_no_numbers(&self.path, start, self.dimension, out)
    }

    /// Reads the ids of all rows.
    ///
    /// # Errors
    /// A file that has more or fewer ids than the shard has rows, or lines that are no JSON strings.
    pub fn ids(&self) -> Result<Vec<String>, DataError> {
        read_ids(&self.ids, self.len())
    }
}

/// Refuses numbers that are none in rows of a file, from row `start` on.
pub(crate) fn refuse_no_numbers(
    path: &Path,
    start: usize,
    dimension: usize,
    rows: &[f32],
) -> Result<(), DataError> {
    // Greatest exponents by words: the search for the place does not vectorise.
    if rows.iter().fold(0, |most, v| (v.to_bits() & 0x7fff_ffff).max(most)) < 0x7f80_0000 {
        return Ok(());
    }
    match rows.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(at) => Err(DataError::file(
            path,
            format!(
                "row {} has {} as number {}; the file was damaged, embed again",
                start + at / dimension,
                rows[at],
                at % dimension
            ),
        )),
    }
}

/// Reads the `count` ids of a file: a JSON string a line.
pub(crate) fn read_ids(path: &Path, count: usize) -> Result<Vec<String>, DataError> {
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    let mut source = BufReader::new(file);
    let mut ids = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = source
            .by_ref()
            .take(MAX_ID_LINE)
            .read_until(b'\n', &mut line)
            .map_err(DataError::io(path, "read the file"))?;
        if read == 0 {
            break;
        }
        let id: String = serde_json::from_slice(&line).map_err(|e| {
            let what =
                format!("line {}: expected a JSON string, found another ({e}); embed again", ids.len() + 1);
            DataError::file(path, what)
        })?;
        ids.push(id);
        if ids.len() > count {
            break;
        }
    }
    if ids.len() != count {
        let found = if ids.len() > count { "more".into() } else { ids.len().to_string() };
        return Err(DataError::file(path, format!("expected {} ids, found {found}; embed again", count)));
    }
    Ok(ids)
}
