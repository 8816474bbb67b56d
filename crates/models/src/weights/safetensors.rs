//! The safetensors file: `u64` length, JSON header, raw numbers. Read with every range checked, written streamed.
//!
//! The header is read here and not by the safetensors crate because that one wants the whole file in memory or mapped,
//! and its errors do not name the tensor. The crate is the oracle of the tests.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess};

use super::error::{Result, WeightsError};
use super::file::{DataFile, Dtype};
use super::index::{Keyed, UniqueMap};
use super::{Entry, checked_numel};

/// Headers of the largest real models are far below this.
const MAX_HEADER: u64 = 32 << 20;

#[derive(Deserialize)]
struct TensorHeader {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// `None` for `__metadata__`, which is no tensor.
impl Keyed for Option<TensorHeader> {
    fn next<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> std::result::Result<Self, A::Error> {
        if key == "__metadata__" {
            map.next_value::<IgnoredAny>().map(|_| None)
        } else {
            map.next_value().map(Some)
        }
    }
}

/// Reads the header. Every tensor's range lies inside the file and fits its shape; the ranges cover the data without
/// gap or overlap, as the format demands.
pub(super) fn open(path: &Path) -> Result<(DataFile, Vec<Entry>)> {
    let file = DataFile::open(path)?;
    let invalid = |what: String| WeightsError::invalid(path, what);
    if file.len < 8 {
        return Err(invalid(format!(
            "expected a safetensors file, found only {} bytes; it is cut off",
            file.len
        )));
    }
    file.refuse_pointer_files()?;
    let mut length = [0; 8];
    file.read_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > file.len - 8 {
        return Err(invalid(format!(
            "the header claims {length} bytes, but only {} follow; the file is cut off or not safetensors",
            file.len - 8
        )));
    }
    if length > MAX_HEADER {
        return Err(invalid(format!("expected a header of at most {MAX_HEADER} bytes, found {length}")));
    }
    let mut header = vec![0; length as usize];
    file.read_at(8, &mut header)?;
    let header: UniqueMap<Option<TensorHeader>> = serde_json::from_slice(&header)
        .map_err(|e| invalid(format!("the header is not what safetensors has: {e}")))?;
    let (data_start, data_len) = (8 + length, file.len - 8 - length);
    let (mut entries, mut ranges) = (Vec::new(), Vec::new());
    for (name, value) in header.0 {
        let Some(TensorHeader { dtype, shape, data_offsets: (start, end) }) = value else {
            continue;
        };
        let error = |what: String| WeightsError::tensor(path, &name, what);
        if start > end || end > data_len {
            return Err(error(format!(
                "its bytes {start}..{end} are not inside the {data_len} bytes of the file"
            )));
        }
        let dtype = Dtype::from_safetensors(&dtype);
        let numel = checked_numel(&shape).ok_or_else(|| error(format!("its shape {shape:?} overflows")))?;
        if let Some(size) = dtype.size()
            && (numel as u64).checked_mul(size as u64) != Some(end - start)
        {
            let what = format!("shape {shape:?} of {} does not fit its {} bytes", dtype.name(), end - start);
            return Err(error(what));
        }
        ranges.push((start, end, entries.len()));
        let offset = data_start + start;
        entries.push(Entry {
            stored_name: name,
            dtype,
            shape,
            numel,
            source: 0,
            offset,
            strides: None,
            member: None,
        });
    }
    ranges.sort_unstable();
    let mut covered = 0;
    for (start, end, i) in ranges {
        if start != covered {
            let what =
                format!("its bytes start at {start}, expected {covered}: ranges overlap or leave a gap");
            return Err(WeightsError::tensor(path, &entries[i].stored_name, what));
        }
        covered = end;
    }
    if covered != data_len {
        return Err(invalid(format!("the tensors end at byte {covered} of {data_len}; the file is damaged")));
    }
    Ok((file, entries))
}

/// Writes f32 tensors as one safetensors file, in the given order, and syncs it. `metadata` goes to `__metadata__`
/// (Hugging Face tools want `("format", "pt")`). The same input gives the same bytes. Shards are not written: one file
/// takes any size. The file is written in place; a caller that must not leave half a file writes beside and renames.
///
/// # Errors
/// [`WeightsError::Io`] (a full disk), or two tensors of one name, or numbers that do not fit a shape.
pub fn save_safetensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a [usize], &'a [f32])>,
    metadata: &[(&str, &str)],
) -> Result<()> {
    let tensors: Vec<_> = tensors.into_iter().collect();
    for (name, shape, data) in &tensors {
        if checked_numel(shape) != Some(data.len()) {
            let what = format!("expected as many numbers as shape {shape:?} has, found {}", data.len());
            return Err(WeightsError::tensor(path, name, what));
        }
    }
    let heads = tensors.iter().map(|(name, shape, _)| (*name, *shape));
    let mut writer = SafetensorsWriter::create(path, heads, metadata)?;
    for (_, _, data) in &tensors {
        writer.append(data)?;
    }
    writer.finish()
}

/// A safetensors file that is written piece by piece: the numbers of all tensors, one after the other, need not be in
/// memory together. The bytes are those of [`save_safetensors`].
pub struct SafetensorsWriter {
    path: PathBuf,
    out: BufWriter<File>,
    left: u64,
}

impl SafetensorsWriter {
    /// Begins a file of f32 tensors of these names and shapes.
    ///
    /// # Errors
    /// As [`save_safetensors`].
    pub fn create<'a>(
        path: &Path,
        tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>,
        metadata: &[(&str, &str)],
    ) -> Result<Self> {
        let mut header = serde_json::Map::new();
        if !metadata.is_empty() {
            let pairs: serde_json::Map<_, _> =
                metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).into())).collect();
            header.insert("__metadata__".to_owned(), pairs.into());
        }
        let mut end = 0u64;
        for (name, shape) in tensors {
            let numel = checked_numel(shape).and_then(|n| (n as u64).checked_mul(4)?.checked_add(end));
            let start = end;
            end = numel
                .ok_or_else(|| WeightsError::tensor(path, name, format!("its shape {shape:?} overflows")))?;
            let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
            if header.insert(name.to_owned(), entry).is_some() {
                return Err(WeightsError::tensor(path, name, "it is to be written twice"));
            }
        }
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        // Spaces bring the data to a multiple of 8 bytes, as the format's own writer does.
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = File::create(path).map_err(|e| WeightsError::io(path, "create", e))?;
        let mut writer =
            SafetensorsWriter { path: path.to_owned(), out: BufWriter::new(file), left: end / 4 };
        writer.write(&(header.len() as u64).to_le_bytes())?;
        writer.write(&header)?;
        Ok(writer)
    }
    /// The next numbers, in the order of the tensors.
    ///
    /// # Errors
    /// [`WeightsError::Io`] (a full disk), or more numbers than the shapes have.
    pub fn append(&mut self, data: &[f32]) -> Result<()> {
        let left = self.left.checked_sub(data.len() as u64);
        self.left = left.ok_or_else(|| {
            let what = format!("{} numbers too many came", data.len() as u64 - self.left);
            WeightsError::io(&self.path, "write", std::io::Error::other(what))
        })?;
        let mut bytes = Vec::with_capacity(super::CHUNK);
        for part in data.chunks(super::CHUNK / 4) {
            bytes.clear();
            bytes.extend(part.iter().flat_map(|v| v.to_le_bytes()));
            self.write(&bytes)?;
        }
        Ok(())
    }
    /// Syncs the whole file.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::append`]; numbers are missing.
    pub fn finish(mut self) -> Result<()> {
        let done = match self.left {
            0 => self.out.flush().and_then(|()| self.out.get_ref().sync_all()),
            n => Err(std::io::Error::other(format!("{n} numbers are missing"))),
        };
        done.map_err(|e| WeightsError::io(&self.path, "write", e))
    }
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| WeightsError::io(&self.path, "write", e))
    }
}
