//! Vectors of tokens in an array of NumPy (`.npy`): documents x tokens x dimension, or tokens x dimension of one document, f32 or f16.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{Origin, TokenVectors};
use crate::error::DataError;
use crate::vectors::VectorDtype;
use crate::vectors::reader::refuse_no_numbers;

/// A longer header is not read.
const MAX_HEADER: usize = 1 << 16;

/// An array of which every document has as many vectors.
#[derive(Debug)]
pub struct TokenArray {
    path: PathBuf,
    file: File,
    /// Where the numbers begin.
    data: u64,
    dtype: VectorDtype,
    documents: u64,
    length: u64,
    dimension: usize,
}

impl TokenArray {
    /// Opens a file of NumPy's format 1 to 3 (`numpy.lib.format`), little-endian, in C order.
    ///
    /// # Errors
    /// Another file, another type, another order, or a size that the header contradicts.
    pub fn open(path: &Path) -> Result<TokenArray, DataError> {
        let (file, data, header) = header(path)?;
        let wrong = |what: String| DataError::file(path, what);
        let dtype = match field(&header, "descr") {
            Some("'<f4'") => VectorDtype::F32,
            Some("'<f2'") => VectorDtype::F16,
            other => {
                let found = other.unwrap_or("none");
                return Err(wrong(format!("expected numbers of f32 ('<f4') or f16 ('<f2'), found {found}")));
            }
        };
        let shape = shape(path, &header)?;
        let (documents, length, dimension) = match shape[..] {
            [documents, length, dimension] => (documents, length, dimension),
            [length, dimension] => (1, length, dimension),
            _ => {
                let found = shape.len();
                return Err(wrong(format!(
                    "expected documents x tokens x dimension, found {found} dimensions"
                )));
            }
        };
        let dimension = usize::try_from(dimension).unwrap_or(usize::MAX);
        if !(1..=crate::vectors::MAX_DIMENSION).contains(&dimension) {
            return Err(wrong(format!("expected vectors of 1 to {} numbers, found {dimension}", 1 << 16)));
        }
        let bytes = documents
            .checked_mul(length)
            .and_then(|n| n.checked_mul((dimension * dtype.bytes()) as u64))
            .and_then(|n| n.checked_add(data));
        let found = file.metadata().map_err(DataError::io(path, "open the file"))?.len();
        if bytes != Some(found) {
            return Err(wrong(format!(
                "its shape {shape:?} does not go with its {found} bytes; the file was cut"
            )));
        }
        Ok(TokenArray { path: path.to_owned(), file, data, dtype, documents, length, dimension })
    }

    /// Tokens of a document.
    pub fn length(&self) -> u64 {
        self.length
    }
}

/// Reads a file of whole numbers (i4 or i8) of any shape, row by row.
///
/// # Errors
/// As [`TokenArray::open`]; a file larger than 1 GiB.
pub fn whole_numbers(path: &Path) -> Result<(Vec<u64>, Vec<i64>), DataError> {
    let (file, data, header) = header(path)?;
    let shape = shape(path, &header)?;
    let width = match field(&header, "descr") {
        Some("'<i4'") => 4,
        Some("'<i8'") => 8,
        other => {
            let what = format!("expected whole numbers ('<i4' or '<i8'), found {}", other.unwrap_or("none"));
            return Err(DataError::file(path, what));
        }
    };
    let found = file.metadata().map_err(DataError::io(path, "open the file"))?.len();
    let count = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).filter(|n| *n <= 1 << 27);
    let Some(count) = count.filter(|n| data + n * width == found) else {
        let what = format!("its shape {shape:?} does not go with its {found} bytes, or is beyond 1 GiB");
        return Err(DataError::file(path, what));
    };
    let mut bytes = vec![0; (count * width) as usize];
    file.read_exact_at(&mut bytes, data).map_err(DataError::io(path, "read the file"))?;
    let numbers = match width {
        4 => bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
        _ => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
    };
    Ok((shape, numbers))
}

/// The file, where its numbers begin, and the dictionary that says what they are.
fn header(path: &Path) -> Result<(File, u64, String), DataError> {
    let strange = || DataError::file(path, "expected an array of NumPy (.npy), found another file");
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    let mut start = [0u8; 12];
    file.read_exact_at(&mut start, 0).map_err(|_| strange())?;
    let (len, at) = match (start.strip_prefix(b"\x93NUMPY"), start[6]) {
        (Some(_), 1) => (usize::from(u16::from_le_bytes([start[8], start[9]])), 10),
        (Some(_), 2 | 3) => (u32::from_le_bytes([start[8], start[9], start[10], start[11]]) as usize, 12),
        _ => return Err(strange()),
    };
    if len > MAX_HEADER {
        return Err(strange());
    }
    let mut header = vec![0; len];
    file.read_exact_at(&mut header, at).map_err(|_| strange())?;
    let header = String::from_utf8(header).map_err(|_| strange())?;
    if field(&header, "fortran_order") != Some("False") {
        return Err(DataError::file(
            path,
            "expected an array in C order; save it with numpy.ascontiguousarray",
        ));
    }
    Ok((file, at + len as u64, header))
}

/// The value of a field of the header, as it is written: a string, a word, or a tuple.
fn field<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("'{name}':"))?;
    let rest = rest.trim_start();
    let end = match rest.starts_with('(') {
        true => rest.find(')')? + 1,
        false => rest.find([',', '}'])?,
    };
    Some(rest[..end].trim_end())
}

fn shape(path: &Path, header: &str) -> Result<Vec<u64>, DataError> {
    let text = field(header, "shape").and_then(|s| s.strip_prefix('(')?.strip_suffix(')'));
    let numbers = text.map(|text| text.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::parse));
    numbers
        .and_then(|numbers| numbers.collect::<Result<Vec<u64>, _>>().ok())
        .ok_or_else(|| DataError::file(path, "expected a shape of whole numbers in the header, found none"))
}

impl TokenVectors for TokenArray {
    fn dimension(&self) -> usize {
        self.dimension
    }
    fn documents(&self) -> u64 {
        self.documents
    }
    fn start(&self, document: u64) -> u64 {
        document * self.length
    }
    fn read(&self, first: u64, out: &mut [f32]) -> Result<(), DataError> {
        let end = first.checked_add((out.len() / self.dimension) as u64);
        if !out.len().is_multiple_of(self.dimension) || end.is_none_or(|end| end > self.tokens()) {
            return Err(DataError::Setting(format!(
                "{}: has {} vectors of {} numbers, {} numbers from vector {first} were asked for",
                self.path.display(),
                self.tokens(),
                self.dimension,
                out.len()
            )));
        }
        let mut bytes = vec![0; out.len() * self.dtype.bytes()];
        let at = self.data + first * (self.dimension * self.dtype.bytes()) as u64;
        self.file.read_exact_at(&mut bytes, at).map_err(DataError::io(&self.path, "read the file"))?;
        self.dtype.decode(&bytes, out);
        refuse_no_numbers(&self.path, first as usize, self.dimension, out)
    }
    fn ids(&self) -> Result<Vec<String>, DataError> {
        Ok((0..self.documents).map(|d| d.to_string()).collect())
    }
    fn origin(&self) -> Origin {
        Origin { path: self.path.display().to_string(), ..Origin::default() }
    }
}
