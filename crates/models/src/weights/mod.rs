//! Files of weights: safetensors and PyTorch archives, single or sharded, read tensor by tensor as f32.
//!
//! [`WeightsReader`] lists names and shapes when it opens and reads a tensor's numbers only when asked, so that a model
//! never needs its memory twice. Names of FiD's own checkpoints are translated by [`fid_layout`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

mod error;
pub mod fid_layout;
mod file;
mod index;
mod pickle;
mod safetensors;
mod torch;
mod torch_writer;

pub use error::{Result, WeightsError};
pub use file::Dtype;
#[cfg(feature = "hub")]
pub(crate) use index::shards;
pub use pickle::PickledVectors;
pub use safetensors::{SafetensorsWriter, save_safetensors};
pub use torch_writer::{TorchTensor, TorchWriter};

pub(crate) use file::DataFile;
use torch::ZipCheck;

/// Bytes read at once while numbers are turned into f32.
const CHUNK: usize = 256 * 1024;

/// Where a tensor's numbers lie. All of it was checked against the file's length.
#[derive(Debug, Clone)]
struct Entry {
    /// Name in the file; the key of the map may be another one.
    stored_name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    numel: usize,
    /// Index into the reader's sources.
    source: usize,
    /// Offset of the first element, bytes from the start of the file.
    offset: u64,
    /// Elements between neighbours of each axis, for views that are not row-major.
    strides: Option<Vec<usize>>,
    /// Member of the zip archive whose checksum covers the numbers.
    member: Option<usize>,
}

#[derive(Debug)]
struct Source {
    file: DataFile,
    zip: Option<ZipCheck>,
}

/// Named tensors of one model, in one file or several shards. Reads from any thread.
#[derive(Debug)]
pub struct WeightsReader {
    path: PathBuf,
    sources: Vec<Source>,
    entries: BTreeMap<String, Entry>,
}

impl WeightsReader {
    /// Opens `*.safetensors`, a PyTorch archive (`pytorch_model.bin`, zip or the older layout), or an index of shards
    /// (`*.index.json`). Only headers are read.
    ///
    /// # Errors
    /// A missing, cut off, damaged or hostile file; see [`WeightsError`].
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut reader = Self { path: path.to_owned(), sources: Vec::new(), entries: BTreeMap::new() };
        if name.ends_with(".index.json") {
            index::open(path, &mut reader)?;
        } else {
            reader.add_file(path)?;
        }
        Ok(reader)
    }

    /// Adds one file's tensors. A name that is already there is an error.
    fn add_file(&mut self, path: &Path) -> Result<()> {
        let (source, entries) = match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => {
                let (file, entries) = safetensors::open(path)?;
                (Source { file, zip: None }, entries)
            }
            _ => torch::open(path)?,
        };
        let index = self.sources.len();
        self.sources.push(source);
        for mut entry in entries {
            entry.source = index;
            let name = entry.stored_name.clone();
            if let Some(other) = self.entries.get(&name) {
                let first = self.sources[other.source].file.path.display().to_string();
                return Err(WeightsError::tensor(
                    path,
                    &name,
                    format!("it is in {first} too; one of them must go"),
                ));
            }
            self.entries.insert(name, entry);
        }
        Ok(())
    }

    /// The file that was opened (the index, where there are shards).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names in ascending order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Gives every tensor the name that `rename` says; those without one go, and their old names come back.
    ///
    /// # Errors
    /// Two tensors of one name.
    pub(crate) fn rename(&mut self, rename: impl Fn(&str) -> Option<String>) -> Result<Vec<String>> {
        let mut gone = Vec::new();
        for (name, entry) in std::mem::take(&mut self.entries) {
            let Some(new) = rename(&name) else {
                gone.push(name);
                continue;
            };
            if let Some(other) = self.entries.insert(new.clone(), entry) {
                let what =
                    format!("`{}` is the same parameter, {new}; expected one of them", other.stored_name);
                return Err(WeightsError::tensor(&self.path, &name, what));
            }
        }
        Ok(gone)
    }

    /// Shape of a tensor.
    ///
    /// # Errors
    /// [`WeightsError::Missing`].
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.entry(name)?.shape)
    }

    /// Number format of a tensor in the file.
    ///
    /// # Errors
    /// [`WeightsError::Missing`].
    pub fn dtype(&self, name: &str) -> Result<&Dtype> {
        Ok(&self.entry(name)?.dtype)
    }

    /// Reads a tensor, row-major, into `out`.
    ///
    /// # Errors
    /// No such tensor, another number of elements than `out` has, a format that is not a float, a wrong checksum.
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let entry = self.entry(name)?;
        if out.len() != entry.numel {
            let what = format!("expected {} numbers, found shape {:?}", out.len(), entry.shape);
            return Err(self.error(entry, what));
        }
        self.verify(entry)?;
        match &entry.strides {
            None => self.read_range(entry, 0, out),
            Some(strides) => self.gather(entry, strides, out),
        }
    }

    /// Reads a tensor into new memory. Its size is bounded by twice the size of the file.
    ///
    /// # Errors
    /// As [`Self::read_f32`].
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.entry(name)?.numel];
        self.read_f32(name, &mut out)?;
        Ok(out)
    }

    /// Whether two tensors have the same shape and, as f32, the same bits. Tensors that share their storage are not read.
    ///
    /// # Errors
    /// As [`Self::read_f32`].
    pub fn same(&self, left: &str, right: &str) -> Result<bool> {
        let (a, b) = (self.entry(left)?, self.entry(right)?);
        if a.shape != b.shape {
            return Ok(false);
        }
        if a.source == b.source && a.offset == b.offset && a.strides == b.strides && a.dtype == b.dtype {
            return Ok(true);
        }
        let bits = |x: &[f32], y: &[f32]| x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits());
        if a.strides.is_some() || b.strides.is_some() {
            return Ok(bits(&self.read(left)?, &self.read(right)?));
        }
        self.verify(a)?;
        self.verify(b)?;
        let (mut x, mut y) = (vec![0.0; CHUNK.min(a.numel)], vec![0.0; CHUNK.min(a.numel)]);
        let mut first = 0;
        while first < a.numel {
            let n = CHUNK.min(a.numel - first);
            self.read_range(a, first, &mut x[..n])?;
            self.read_range(b, first, &mut y[..n])?;
            if !bits(&x[..n], &y[..n]) {
                return Ok(false);
            }
            first += n;
        }
        Ok(true)
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| WeightsError::Missing {
            path: self.path.clone(),
            name: name.to_owned(),
            count: self.entries.len(),
        })
    }

    fn error(&self, entry: &Entry, what: String) -> WeightsError {
        WeightsError::tensor(&self.sources[entry.source].file.path, &entry.stored_name, what)
    }

    /// Compares the archive member's checksum, once per member.
    fn verify(&self, entry: &Entry) -> Result<()> {
        match (&self.sources[entry.source].zip, entry.member) {
            (Some(zip), Some(member)) => zip.verify(member).map_err(|what| self.error(entry, what)),
            _ => Ok(()),
        }
    }

    fn element_size(&self, entry: &Entry) -> Result<usize> {
        // Formats without a known size are refused by `decode` with the same words.
        entry.dtype.decode(&[], &mut []).map_err(|what| self.error(entry, what))?;
        entry.dtype.size().ok_or_else(|| self.error(entry, "its element size is unknown".to_owned()))
    }

    /// Reads elements `first..first + out.len()` of a row-major tensor.
    fn read_range(&self, entry: &Entry, first: usize, out: &mut [f32]) -> Result<()> {
        let size = self.element_size(entry)?;
        let mut buffer = vec![0; CHUNK.min(out.len().saturating_mul(size))];
        let mut offset = entry.offset + first as u64 * size as u64;
        for part in out.chunks_mut(CHUNK / size) {
            let bytes = &mut buffer[..part.len() * size];
            self.sources[entry.source].file.read_at(offset, bytes)?;
            entry.dtype.decode(bytes, part).map_err(|what| self.error(entry, what))?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Reads a view whose elements are not row-major: its span of the storage first, then element by element.
    fn gather(&self, entry: &Entry, strides: &[usize], out: &mut [f32]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let size = self.element_size(entry)?;
        let last: usize = entry.shape.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum();
        let mut span = vec![0; (last + 1) * size];
        self.sources[entry.source].file.read_at(entry.offset, &mut span)?;
        let mut index = vec![0usize; entry.shape.len()];
        for value in out {
            let at = index.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>() * size;
            entry
                .dtype
                .decode(&span[at..at + size], std::slice::from_mut(value))
                .map_err(|what| self.error(entry, what))?;
            for (i, n) in index.iter_mut().zip(&entry.shape).rev() {
                *i += 1;
                if *i < *n {
                    break;
                }
                *i = 0;
            }
        }
        Ok(())
    }
}

/// Product of a shape, `None` when it does not fit.
fn checked_numel(shape: &[usize]) -> Option<usize> {
    // An axis of 0 makes the product 0 even where the others overflow together.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n))
}
