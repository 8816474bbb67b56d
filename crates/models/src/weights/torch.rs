//! `pytorch_model.bin`: the zip archive that torch writes since 1.6, and the plain file that it wrote before.
//!
//! Both hold a pickle of a dict whose tensors point into raw storages. Only the pickle is read on opening; a tensor's
//! numbers are read from its storage when asked for, after the archive's checksum of that storage was compared once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use zip::{CompressionMethod, ZipArchive};

use super::error::{Result, WeightsError};
use super::file::{DataFile, Dtype};
use super::pickle::{MAX_PICKLE, Pickle, PickleError, TensorRef};
use super::{Entry, Source, checked_numel};

/// First pickle of the format before 1.6: 0x1950a86a20f9469cfc6c.
const LEGACY_MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
const LEGACY_PROTOCOL: i64 = 1001;

/// Opens either format.
pub(super) fn open(path: &Path) -> Result<(Source, Vec<Entry>)> {
    let file = DataFile::open(path)?;
    file.refuse_pointer_files()?;
    let head = file.head(2)?;
    if head == b"PK" {
        return open_zip(file);
    }
    if head.first() == Some(&0x80) {
        return open_legacy(file);
    }
    Err(WeightsError::invalid(
        path,
        "expected a PyTorch archive (zip, or the format before torch 1.6), found something else; \
         if it is a safetensors file, its name must end in .safetensors",
    ))
}

/// Where one storage lies.
struct Storage {
    offset: u64,
    bytes: u64,
    member: Option<usize>,
}

/// Compares checksums of archive members, each once.
pub(super) struct ZipCheck(Mutex<(ZipArchive<BufReader<File>>, BTreeSet<usize>)>);

impl std::fmt::Debug for ZipCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("ZipCheck")
    }
}

impl ZipCheck {
    /// Reads the member once to its end; the zip reader compares its checksum.
    pub fn verify(&self, member: usize) -> std::result::Result<(), String> {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (archive, verified) = &mut *guard;
        if !verified.contains(&member) {
            let mut data =
                archive.by_index(member).map_err(|e| format!("its part of the archive is damaged: {e}"))?;
            let expected = data.size();
            let read = io::copy(&mut data, &mut io::sink())
                .map_err(|e| format!("its part of the archive is damaged: {e}"))?;
            if read != expected {
                return Err(format!("its part of the archive has {read} bytes, expected {expected}"));
            }
            verified.insert(member);
        }
        Ok(())
    }
}

fn open_zip(file: DataFile) -> Result<(Source, Vec<Entry>)> {
    let path = &file.path;
    let invalid = |what: String| WeightsError::invalid(path, what);
    let damaged = |e| invalid(format!("the zip archive is damaged or cut off: {e}"));
    let handle = file.file.try_clone().map_err(|e| WeightsError::io(path, "open", e))?;
    let mut archive = ZipArchive::new(BufReader::new(handle)).map_err(damaged)?;
    let mut members = BTreeMap::new();
    for i in 0..archive.len() {
        let member = archive.by_index_raw(i).map_err(damaged)?;
        let name = member.name().map_err(damaged)?.into_owned();
        let (offset, size) = (member.data_start(), member.size());
        let stored = member.compression() == CompressionMethod::Stored && !member.encrypted();
        let inside = offset.and_then(|o| o.checked_add(size)).is_some_and(|end| end <= file.len);
        if !stored || !inside || member.compressed_size() != size {
            return Err(invalid(format!(
                "member `{name}` is compressed, encrypted or not inside the file; torch writes none of these"
            )));
        }
        members.insert(name, (i, offset.unwrap_or(0), size));
    }
    let pickles: Vec<&String> = members.keys().filter(|name| name.ends_with("/data.pkl")).collect();
    let [pickle_name] = pickles[..] else {
        let what = format!(
            "expected one `data.pkl` in the zip archive, found {}; not saved by torch",
            pickles.len()
        );
        return Err(invalid(what));
    };
    let prefix = pickle_name.trim_end_matches("data.pkl").to_owned();
    let mut small = |name: &str, limit: u64| -> Result<Option<Vec<u8>>> {
        let Some(&(i, _, size)) = members.get(&format!("{prefix}{name}")) else {
            return Ok(None);
        };
        if size > limit {
            return Err(invalid(format!("expected at most {limit} bytes in `{name}`, found {size}")));
        }
        let mut bytes = Vec::with_capacity(size as usize);
        let mut member = archive.by_index(i).map_err(damaged)?;
        member
            .read_to_end(&mut bytes)
            .map_err(|e| invalid(format!("`{name}` in the archive is damaged: {e}")))?;
        Ok(Some(bytes))
    };
    if small("byteorder", 16)?.is_some_and(|order| order != b"little") {
        return Err(invalid(
            "it was saved on a big-endian machine; expected little-endian numbers".to_owned(),
        ));
    }
    let bytes = small("data.pkl", MAX_PICKLE)?.unwrap_or_default();
    let pickle = Pickle::load(&bytes).map_err(|e| pickle_error(path, e))?;
    let entries = entries(path, &pickle, |key| {
        members.get(&format!("{prefix}data/{key}")).map(|&(i, offset, bytes)| Storage {
            offset,
            bytes,
            member: Some(i),
        })
    })?;
    let zip = Some(ZipCheck(Mutex::new((archive, BTreeSet::new()))));
    Ok((Source { file, zip }, entries))
}

/// Reads the older format: pickles of a magic number, a protocol number, facts on the system, the dict, and the list of
/// storage keys; then, per key, its number of elements and the numbers.
fn open_legacy(file: DataFile) -> Result<(Source, Vec<Entry>)> {
    let path = &file.path;
    let invalid = |what: String| WeightsError::invalid(path, what);
    let head = file.head(MAX_PICKLE)?;
    let mut at = 0;
    let mut next = || -> Result<Pickle> {
        let pickle = Pickle::load(&head[at..]).map_err(|e| pickle_error(path, shift(e, at)))?;
        at += pickle.consumed;
        Ok(pickle)
    };
    if next()?.as_long() != Some(&LEGACY_MAGIC) {
        return Err(invalid(
            "it is a pickle, but not one that torch.save wrote; save it with torch.save".to_owned(),
        ));
    }
    let protocol = next()?.as_int();
    if protocol != Some(LEGACY_PROTOCOL) {
        return Err(invalid(format!(
            "expected protocol {LEGACY_PROTOCOL} of torch.save, found {protocol:?}"
        )));
    }
    if next()?.dict_bool("little_endian") != Some(true) {
        return Err(invalid(
            "expected numbers of a little-endian machine; the archive does not say so".to_owned(),
        ));
    }
    let pickle = next()?;
    let keys = next()?;
    let keys = keys
        .as_strings()
        .ok_or_else(|| invalid("the list of storage keys is not a list of strings".to_owned()))?;
    let sizes: BTreeMap<&str, &Dtype> = pickle
        .tensors()
        .map_err(invalid)?
        .into_iter()
        .map(|(_, t)| (t.storage.key, &t.storage.dtype))
        .collect();
    let mut storages = BTreeMap::new();
    let mut offset = at as u64;
    for key in keys {
        let Some(size) = sizes.get(key).and_then(|dtype| dtype.size()) else {
            return Err(invalid(format!("storage {key} belongs to no tensor, so its size is unknown")));
        };
        if file.len - offset < 8 {
            return Err(invalid(format!("storage {key} is missing; the file is cut off")));
        }
        let mut numel = [0; 8];
        file.read_at(offset, &mut numel)?;
        let bytes = u64::from_le_bytes(numel).checked_mul(size as u64);
        let left = file.len - offset - 8;
        let Some(bytes) = bytes.filter(|&bytes| bytes <= left) else {
            return Err(invalid(format!(
                "storage {key} does not fit into the {left} bytes left; the file is cut off"
            )));
        };
        let storage = Storage { offset: offset + 8, bytes, member: None };
        if storages.insert(key, storage).is_some() {
            return Err(invalid(format!("storage {key} is there twice")));
        }
        offset += 8 + bytes;
    }
    if offset != file.len {
        return Err(invalid(format!("{} bytes follow the last storage; expected none", file.len - offset)));
    }
    let entries = entries(path, &pickle, |key| {
        storages.get(key).map(|s| Storage { offset: s.offset, bytes: s.bytes, member: None })
    })?;
    Ok((Source { file, zip: None }, entries))
}

fn shift(error: PickleError, by: usize) -> PickleError {
    match error {
        PickleError::Refused { global, position } => PickleError::Refused { global, position: position + by },
        PickleError::Invalid { what, position } => PickleError::Invalid { what, position: position + by },
    }
}

fn pickle_error(path: &Path, error: PickleError) -> WeightsError {
    match error {
        PickleError::Refused { global, position } => {
            WeightsError::Refused { path: path.to_owned(), global, position }
        }
        PickleError::Invalid { what, position } => {
            WeightsError::invalid(path, format!("byte {position} of the pickle: {what}"))
        }
    }
}

/// Checks every tensor's view against its storage.
fn entries(path: &Path, pickle: &Pickle, find: impl Fn(&str) -> Option<Storage>) -> Result<Vec<Entry>> {
    let tensors = pickle.tensors().map_err(|what| WeightsError::invalid(path, what))?;
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        entries.push(entry(name, tensor, &find).map_err(|what| WeightsError::tensor(path, name, what))?);
    }
    Ok(entries)
}

fn entry(
    name: &str,
    tensor: &TensorRef,
    find: impl Fn(&str) -> Option<Storage>,
) -> std::result::Result<Entry, String> {
    let TensorRef { storage, offset, shape, strides } = tensor;
    let found = find(storage.key).ok_or_else(|| format!("its storage {} is not in the file", storage.key))?;
    let size = storage.dtype.size().ok_or("its element size is unknown")?;
    if (storage.numel as u64).checked_mul(size as u64) != Some(found.bytes) {
        let (numel, bytes) = (storage.numel, found.bytes);
        return Err(format!(
            "its storage should have {numel} elements of {size} bytes, but has {bytes} bytes"
        ));
    }
    let outside = || {
        format!(
            "shape {shape:?}, strides {strides:?}, offset {offset} leave its storage of {}",
            storage.numel
        )
    };
    let numel = checked_numel(shape).ok_or_else(outside)?;
    let mut last = *offset;
    if numel == 0 {
        last = last.saturating_sub(1);
    } else {
        for (&n, &stride) in shape.iter().zip(strides) {
            last = (n - 1).checked_mul(stride).and_then(|span| last.checked_add(span)).ok_or_else(outside)?;
        }
    }
    // An expanded view (stride 0) can claim more elements than the file has: nothing may be allocated on its word.
    if numel > storage.numel || (last >= storage.numel && (numel, *offset) != (0, 0)) {
        return Err(outside());
    }
    let (mut expected, mut row_major) = (1, true);
    // Without elements there is no order, and the product of the other axes may overflow.
    for (&n, &stride) in shape.iter().zip(strides).rev().take_while(|_| numel > 0) {
        row_major &= n == 1 || stride == expected;
        expected *= n;
    }
    Ok(Entry {
        stored_name: name.to_owned(),
        dtype: storage.dtype.clone(),
        shape: shape.clone(),
        numel,
        source: 0,
        offset: found.offset + *offset as u64 * size as u64,
        strides: (!row_major).then(|| strides.clone()),
        member: found.member,
    })
}
