//! Parquet as lines of JSON: the rows of a file, one object a line, with the columns that data files are known to have, and all others of text
//! or whole numbers: a corpus names its own.
//!
//! Parquet stores columns, and a row in the middle costs a page of each. So a file is turned into lines once, beside the index,
//! as a compressed file is decompressed; after that any row is one read. Memory is a page of each column at a time.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::basic::{Compression, ConvertedType, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use crate::question::ID_KEYS;

/// Columns that are read beside [`ID_KEYS`], whatever is in them: those of passages, questions, training data and corpora. Collections often
/// have others, such as vectors of another model, that would make the copy many times larger.
const COLUMNS: [&str; 21] = [
    "title",
    "text",
    "score",
    "question",
    "query",
    "answers",
    "target",
    "ctxs",
    "positive_ctxs",
    "hard_negative_ctxs",
    "negative_ctxs",
    "positive",
    "negative",
    "negatives",
    "label",
    "labels",
    "class",
    "sentence",
    "content",
    "document_ids",
    "scores",
];

const MAGIC: &[u8; 4] = b"PAR1";

/// A reader of the lines. Its errors are of the kind `Unsupported` where the file is whole but of no use here, and then
/// sentences for the user; `UnexpectedEof` where the file was cut short.
pub(crate) fn lines(file: File) -> io::Result<Box<dyn Read>> {
    look_at_magic(&file)?;
    let rows = guarded(|| open(file))??;
    Ok(Box::new(Lines { rows, bytes: Vec::new(), at: 0, row: 0 }))
}

/// A file that was cut short begins as Parquet and does not end so; its footer, without which nothing can be read, is gone.
fn look_at_magic(file: &File) -> io::Result<()> {
    let mut ends = [[0u8; 4]; 2];
    let last = file.metadata()?.len().saturating_sub(4);
    file.read_exact_at(&mut ends[0], 0)?;
    file.read_exact_at(&mut ends[1], last)?;
    match ends.map(|end| end == *MAGIC) {
        [true, false] => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()), // The library says what is wrong with a file that begins otherwise, or is encrypted.
    }
}

fn open(file: File) -> io::Result<RowIter<'static>> {
    let reader = SerializedFileReader::new(file).map_err(damage)?;
    let metadata = reader.metadata();
    let schema = metadata.file_metadata().schema();
    let known = |name: &str| ID_KEYS.contains(&name) || COLUMNS.contains(&name);
    let of_use = |field: &Type| known(field.name()) || is_plain(field);
    let kept: Vec<_> = schema.get_fields().iter().filter(|field| of_use(field)).cloned().collect();
    if kept.is_empty() {
        let names: Vec<&str> = schema.get_fields().iter().map(|field| field.name()).collect();
        return Err(unsupported(format!(
            "expected columns such as id, title, text or question, found {}; rename the columns",
            if names.is_empty() { "none".into() } else { names.join(", ") }
        )));
    }
    for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
        let first = column.column_path().parts().first();
        let of_ours = kept.iter().any(|field| first.is_some_and(|name| field.name() == name));
        if of_ours && matches!(column.compression(), Compression::BROTLI(_) | Compression::LZO) {
            return Err(unsupported(format!(
                "the column {} is compressed as {}, which is not read here; write it with zstd, snappy, gzip or lz4",
                column.column_path(),
                column.compression()
            )));
        }
    }
    let projection = Type::group_type_builder(schema.name()).with_fields(kept).build().map_err(damage)?;
    RowIter::from_file_into(Box::new(reader)).project(Some(projection)).map_err(damage)
}

/// Whether a column has text, or whole numbers that are no more than that.
fn is_plain(field: &Type) -> bool {
    if !field.is_primitive() {
        return false;
    }
    let kind = field.get_basic_info().converted_type();
    match field.get_physical_type() {
        Physical::BYTE_ARRAY => kind == ConvertedType::UTF8,
        Physical::INT32 | Physical::INT64 => kind == ConvertedType::NONE,
        Physical::BOOLEAN => true,
        _ => false,
    }
}

struct Lines {
    rows: RowIter<'static>,
    /// The line at hand.
    bytes: Vec<u8>,
    /// How much of it was handed out.
    at: usize,
    /// Rows so far.
    row: u64,
}

impl Read for Lines {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at == self.bytes.len() {
            let Some(row) = guarded(|| self.rows.next())? else { return Ok(0) };
            let row = row.map_err(damage)?;
            self.row += 1;
            (self.bytes, self.at) = (serde_json::to_vec(&object(&row, self.row)?)?, 0);
            self.bytes.push(b'\n');
        }
        let n = out.len().min(self.bytes.len() - self.at);
        out[..n].copy_from_slice(&self.bytes[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

/// The library has assertions that a damaged file can reach.
fn guarded<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "an impossible value"))
}

fn damage(error: ParquetError) -> io::Error {
    let kind = match error {
        ParquetError::EOF(_) => io::ErrorKind::UnexpectedEof,
        _ => io::ErrorKind::InvalidData,
    };
    io::Error::new(kind, error)
}

fn unsupported(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, message)
}

/// A row, or a group within one, without its nulls: no key and `null` mean the same everywhere.
fn object(row: &Row, number: u64) -> io::Result<Map<String, Value>> {
    let mut map = Map::new();
    for (name, field) in row.get_column_iter() {
        let value = value(field, name, number)?;
        if !value.is_null() {
            map.insert(name.clone(), value);
        }
    }
    Ok(map)
}

fn value(field: &Field, name: &str, number: u64) -> io::Result<Value> {
    // JSON has no NaN: its name is no number, and whoever reads the item says so.
    let float = |v: f64| if v.is_finite() { Value::from(v) } else { Value::from(v.to_string()) };
    let other = |what: &str| {
        Err(unsupported(format!(
            "row {number}: expected text, numbers, lists or structs in the column {name}, found {what}; write it as a string"
        )))
    };
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(v) => Value::from(*v),
        Field::Byte(v) => Value::from(*v),
        Field::Short(v) => Value::from(*v),
        Field::Int(v) => Value::from(*v),
        Field::Long(v) => Value::from(*v),
        Field::UByte(v) => Value::from(*v),
        Field::UShort(v) => Value::from(*v),
        Field::UInt(v) => Value::from(*v),
        Field::ULong(v) => Value::from(*v),
        Field::Float16(v) => float(v.to_f64()),
        Field::Float(v) => float(f64::from(*v)),
        Field::Double(v) => float(*v),
        Field::Str(text) => Value::from(text.as_str()),
        // Some writers do not mark text as text.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Value::from(text),
            Err(_) => return other("bytes that are not UTF-8"),
        },
        Field::Group(row) => Value::Object(object(row, number)?),
        Field::ListInternal(list) => {
            list.elements().iter().map(|element| value(element, name, number)).collect::<Result<_, _>>()?
        }
        Field::MapInternal(_) => return other("a map"),
        Field::Decimal(_) => return other("a decimal"),
        Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => return other("a time"),
    })
}
