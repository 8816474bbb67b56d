//! Writes `pytorch_model.bin`: the zip archive of `torch.save`, whose pickle names nothing but tensors, so that
//! `torch.load(weights_only=True)` opens it.
//!
//! Written as torch writes it since 1.6: members are stored, numbers begin at multiples of 64 bytes, tensors may share a
//! storage. The same input gives the same bytes.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use super::checked_numel;
use super::error::{Result, WeightsError};

/// A tensor of the archive: row-major, the whole of its storage.
#[derive(Clone, Debug)]
pub struct TorchTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Number of the storage that holds its values, from 0; tied tensors have the same.
    pub storage: usize,
}

/// An archive that is written piece by piece: first the names, then the numbers of storage 0, 1, ...
pub struct TorchWriter {
    path: PathBuf,
    zip: ZipWriter<BufWriter<File>>,
    /// Numbers of every storage.
    lengths: Vec<usize>,
    next: usize,
}

const ROOT: &str = "archive";

impl TorchWriter {
    /// Begins a file of f32 tensors.
    ///
    /// # Errors
    /// The file cannot be written; a name that is there twice; shapes that do not fit their storage; a storage of no tensor.
    pub fn create(path: &Path, tensors: &[TorchTensor]) -> Result<Self> {
        let storages = tensors.iter().map(|t| t.storage + 1).max().unwrap_or(0);
        let mut lengths = vec![None; storages.min(tensors.len())];
        let mut names = std::collections::BTreeSet::new();
        for TorchTensor { name, shape, storage } in tensors {
            let numel = checked_numel(shape)
                .filter(|n| i64::try_from(*n).is_ok())
                .ok_or_else(|| WeightsError::tensor(path, name, format!("its shape {shape:?} overflows")))?;
            if !names.insert(name) {
                return Err(WeightsError::tensor(path, name, "it is to be written twice"));
            }
            let fits = lengths.get_mut(*storage).is_some_and(|length| *length.get_or_insert(numel) == numel);
            if !fits {
                let what = format!("its {numel} numbers are not those of storage {storage}");
                return Err(WeightsError::tensor(path, name, what));
            }
        }
        let lengths: Option<Vec<usize>> = lengths.into_iter().collect();
        let lengths = lengths.ok_or_else(|| WeightsError::invalid(path, "a storage belongs to no tensor"))?;
        let file = File::create(path).map_err(|e| WeightsError::io(path, "create", e))?;
        let zip = ZipWriter::new(BufWriter::with_capacity(super::CHUNK, file));
        let mut writer = TorchWriter { path: path.to_owned(), zip, lengths, next: 0 };
        let pickle = pickle(tensors, &writer.lengths);
        writer.member("data.pkl", &[&pickle])?;
        writer.member("byteorder", &[b"little"])?;
        Ok(writer)
    }

    /// All numbers of the next storage.
    ///
    /// # Errors
    /// The file cannot be written (a full disk); another number of numbers than its tensors have.
    pub fn append(&mut self, data: &[f32]) -> Result<()> {
        let expected = self.lengths.get(self.next).copied();
        if expected != Some(data.len()) {
            let what = format!("storage {} has {expected:?} numbers, not {}", self.next, data.len());
            return Err(WeightsError::invalid(&self.path, what));
        }
        let name = format!("data/{}", self.next);
        self.next += 1;
        self.begin(&name)?;
        let mut bytes = Vec::with_capacity(super::CHUNK);
        for part in data.chunks(super::CHUNK / 4) {
            bytes.clear();
            bytes.extend(part.iter().flat_map(|v| v.to_le_bytes()));
            self.write(&bytes)?;
        }
        Ok(())
    }

    /// Ends and syncs the file.
    ///
    /// # Errors
    /// As [`TorchWriter::append`]; storages are missing.
    pub fn finish(mut self) -> Result<()> {
        if self.next != self.lengths.len() {
            let what =
                format!("{} of {} storages are missing", self.lengths.len() - self.next, self.lengths.len());
            return Err(WeightsError::invalid(&self.path, what));
        }
        // The version of the archive that every torch since 1.6 reads.
        self.member("version", &[b"3\n"])?;
        let TorchWriter { path, zip, .. } = self;
        let error = |e: std::io::Error| WeightsError::io(&path, "write", e);
        let mut file = zip.finish().map_err(|e| error(e.into()))?;
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(error)
    }

    fn begin(&mut self, name: &str) -> Result<()> {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .last_modified_time(DateTime::default())
            .large_file(true)
            .with_alignment(64);
        let begun = self.zip.start_file(format!("{ROOT}/{name}"), options);
        begun.map_err(|e| WeightsError::io(&self.path, "write", e.into()))
    }

    fn member(&mut self, name: &str, parts: &[&[u8]]) -> Result<()> {
        self.begin(name)?;
        parts.iter().try_for_each(|part| self.write(part))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.zip.write_all(bytes).map_err(|e| WeightsError::io(&self.path, "write", e))
    }
}

/// `OrderedDict` of name to `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`, protocol 2.
fn pickle(tensors: &[TorchTensor], lengths: &[usize]) -> Vec<u8> {
    let mut out = vec![0x80, 2];
    let empty_dict = b"ccollections\nOrderedDict\n)R";
    out.extend(empty_dict);
    out.push(b'(');
    for TorchTensor { name, shape, storage } in tensors {
        text(&mut out, name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(b"ctorch\nFloatStorage\n");
        text(&mut out, &storage.to_string());
        text(&mut out, "cpu");
        integer(&mut out, lengths[*storage]);
        out.extend(b"tQ");
        integer(&mut out, 0);
        tuple(&mut out, shape);
        // An axis of 0 makes all products harmless: the shape was checked.
        let stride =
            |i: usize| shape[i + 1..].iter().fold(1usize, |product, &n| product.saturating_mul(n.max(1)));
        let strides: Vec<usize> = (0..shape.len()).map(stride).collect();
        tuple(&mut out, &strides);
        out.push(0x89);
        out.extend(empty_dict);
        out.extend(b"tR");
    }
    out.extend(b"u.");
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    // Names of tensors; nobody has one of 4 GiB.
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn tuple(out: &mut Vec<u8>, values: &[usize]) {
    out.push(b'(');
    values.iter().for_each(|&v| integer(out, v));
    out.push(b't');
}

fn integer(out: &mut Vec<u8>, value: usize) {
    match i32::try_from(value) {
        Ok(value) => {
            out.push(b'J');
            out.extend(value.to_le_bytes());
        }
        Err(_) => {
            out.extend([0x8a, 8]);
            out.extend((value as i64).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::WeightsReader;
    use super::*;

    fn tensor(name: &str, shape: &[usize], storage: usize) -> TorchTensor {
        TorchTensor { name: name.into(), shape: shape.into(), storage }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pytorch_model.bin");
        let (a, b) = (vec![1.0, -0.0, f32::MIN_POSITIVE, 3.5, 4.0, 5.0], vec![7.25]);
        let tensors = [
            tensor("a", &[2, 3], 0),
            tensor("tied", &[2, 3], 0),
            tensor("b", &[], 1),
            tensor("none", &[0, 4], 2),
        ];
        let write = || {
            let mut writer = TorchWriter::create(&path, &tensors).unwrap();
            for data in [&a[..], &b, &[]] {
                writer.append(data).unwrap();
            }
            writer.finish().unwrap();
            std::fs::read(&path).unwrap()
        };
        let bytes = write();
        assert_eq!(bytes, write(), "the same input gives the same bytes");
        let reader = WeightsReader::open(&path).unwrap();
        assert_eq!(reader.names().collect::<Vec<_>>(), ["a", "b", "none", "tied"]);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&reader.read("a").unwrap()), bits(&a));
        assert_eq!(reader.read("b").unwrap(), b);
        assert_eq!((reader.shape("none").unwrap(), reader.shape("b").unwrap()), (&[0, 4][..], &[][..]));
        assert!(reader.same("a", "tied").unwrap());
        // Numbers begin where a memory map wants them.
        let at =
            bytes.windows(24).position(|w| w == a.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
        assert_eq!(at.unwrap() % 64, 0);
    }

    #[test]
    fn mistakes_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.bin");
        let create = |tensors: &[TorchTensor]| {
            TorchWriter::create(&path, tensors).map(|_| ()).unwrap_err().to_string()
        };
        assert!(create(&[tensor("a", &[2], 0), tensor("a", &[2], 0)]).contains("twice"));
        assert!(create(&[tensor("a", &[2], 0), tensor("b", &[3], 0)]).contains("not those of storage 0"));
        assert!(create(&[tensor("a", &[2], 1)]).contains("storage 1"));
        assert!(create(&[tensor("a", &[usize::MAX, 2], 0)]).contains("overflows"));
        let mut writer = TorchWriter::create(&path, &[tensor("a", &[2], 0)]).unwrap();
        assert!(writer.append(&[1.0]).unwrap_err().to_string().contains("not 1"));
        assert!(writer.finish().unwrap_err().to_string().contains("missing"));
        assert!(TorchWriter::create(Path::new("/nowhere/x.bin"), &[]).is_err());
    }
}
