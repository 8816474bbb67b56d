//! Records as Python's csv module writes them with its default quotes: DPR's questions and passages (between tabs), corpora.
//!
//! A field that begins with `"` ends with `"`, may hold separators and line ends, and has its own quotes doubled.

use std::io::{BufRead, Read};
use std::path::Path;

use super::at_line;
use crate::error::DataError;

/// Longest record that is read; more is taken for a quote that nobody closed.
pub(crate) const MAX_RECORD: u64 = 16 << 20;

/// Reads records one after the other.
pub(super) struct Records<'a, R> {
    path: &'a Path,
    source: R,
    /// Offset of the next record in the (decompressed) file.
    pub offset: u64,
    /// Line of the next record, from 1.
    line: u64,
    bytes: Vec<u8>,
}

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordPlace {
    /// First byte.
    pub offset: u64,
    /// First line, from 1.
    pub line: u64,
}

impl<'a, R: BufRead> Records<'a, R> {
    pub fn new(path: &'a Path, source: R) -> Self {
        Records { path, source, offset: 0, line: 1, bytes: Vec::new() }
    }

    /// The next record that is not blank, its line end included; `error` explains why reading failed.
    pub fn next(
        &mut self,
        error: impl Fn(std::io::Error) -> DataError,
    ) -> Result<Option<(RecordPlace, &[u8])>, DataError> {
        loop {
            let place = RecordPlace { offset: self.offset, line: self.line };
            self.bytes.clear();
            let mut fields = Fields::between(b'\t');
            loop {
                let start = self.bytes.len();
                let left = MAX_RECORD + 1 - start as u64;
                let n = self.source.by_ref().take(left).read_until(b'\n', &mut self.bytes).map_err(&error)?;
                if self.bytes.len() as u64 > MAX_RECORD {
                    let what = format!(
                        "expected a record of at most {MAX_RECORD} bytes, found more; look for a quote that is not closed"
                    );
                    return Err(at_line(self.path, place.line, what));
                }
                self.offset += n as u64;
                self.line += u64::from(self.bytes.ends_with(b"\n") && n > 0);
                if n == 0 {
                    if fields.quoted() {
                        return Err(at_line(
                            self.path,
                            place.line,
                            "the quote that opens here is not closed before the file ends",
                        ));
                    }
                    break;
                }
                // Most records have no quotes and need no second look.
                if start > 0 || self.bytes.contains(&b'"') {
                    fields.feed(&self.bytes[start..]);
                }
                if !fields.quoted() {
                    break;
                }
            }
            if self.bytes.is_empty() {
                return Ok(None);
            }
            if !self.bytes.trim_ascii().is_empty() {
                return Ok(Some((place, &self.bytes)));
            }
        }
    }
}

/// Splits a record.
pub(crate) fn fields(path: &Path, line: u64, record: &[u8]) -> Result<Vec<String>, DataError> {
    texts(path, line, split(record, b'\t'))
}

/// The fields of a record between separators, as bytes.
pub(crate) fn split(record: &[u8], separator: u8) -> Vec<Vec<u8>> {
    let mut fields = Fields { done: Some(vec![Vec::new()]), ..Fields::between(separator) };
    fields.feed(without_end(record));
    fields.done.unwrap_or_default()
}

/// Splits a record whose quotes are characters like others.
pub(crate) fn plain_fields(path: &Path, line: u64, record: &[u8]) -> Result<Vec<String>, DataError> {
    texts(path, line, without_end(record).split(|&b| b == b'\t').map(<[u8]>::to_vec).collect())
}

fn without_end(record: &[u8]) -> &[u8] {
    let end = record.strip_suffix(b"\n").unwrap_or(record);
    end.strip_suffix(b"\r").unwrap_or(end)
}

fn texts(path: &Path, line: u64, fields: Vec<Vec<u8>>) -> Result<Vec<String>, DataError> {
    let text = |field: Vec<u8>| {
        String::from_utf8(field).map_err(|e| {
            let byte = e.as_bytes()[e.utf8_error().valid_up_to()];
            at_line(
                path,
                line,
                format!("expected UTF-8 text, found the byte 0x{byte:02x}; convert the file to UTF-8"),
            )
        })
    };
    fields.into_iter().map(text).collect()
}

/// Where in a field a byte stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Start,
    Plain,
    Quoted,
    /// After a quote inside a quoted field: its end, or half of a doubled one.
    Quote,
}

impl State {
    /// The state after `byte`, and whether the byte is part of the field's text.
    pub fn next(self, byte: u8, separator: u8) -> (State, bool) {
        match (self, byte) {
            (State::Quoted, b'"') => (State::Quote, false),
            (State::Quoted, _) => (State::Quoted, true),
            (State::Start, b'"') => (State::Quoted, false),
            (State::Quote, b'"') => (State::Quoted, true),
            (_, b) if b == separator => (State::Start, false),
            _ => (State::Plain, true),
        }
    }
}

/// The state between two pieces of a record, and the fields so far where they are wanted.
struct Fields {
    separator: u8,
    state: State,
    done: Option<Vec<Vec<u8>>>,
}

impl Fields {
    fn between(separator: u8) -> Fields {
        Fields { separator, state: State::Start, done: None }
    }

    fn quoted(&self) -> bool {
        self.state == State::Quoted
    }

    fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let (next, kept) = self.state.next(byte, self.separator);
            if let Some(done) = &mut self.done {
                if byte == self.separator && next == State::Start {
                    done.push(Vec::new());
                } else if kept && let Some(field) = done.last_mut() {
                    field.push(byte);
                }
            }
            self.state = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(u64, u64, Vec<String>)>, String> {
        let path = Path::new("x.tsv");
        let mut records = Records::new(path, text.as_bytes());
        let mut all = Vec::new();
        let io = |e: std::io::Error| DataError::file(path, e.to_string());
        while let Some((place, record)) = records.next(io).map_err(|e| e.to_string())? {
            let fields = fields(path, place.line, record).map_err(|e| e.to_string())?;
            all.push((place.offset, place.line, fields));
        }
        Ok(all)
    }

    #[test]
    fn records_are_those_of_pythons_csv() {
        let text = "1\ta b\tc\r\n\n2\t\"x \"\"y\"\" \tz\nnew\"\tt\n\"\"\t\"a\"b\tc\"d\"\n4\t\t";
        let strings = |fields: &[&str]| fields.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>();
        let found = read(text).unwrap();
        assert_eq!(found[0], (0, 1, strings(&["1", "a b", "c"])));
        assert_eq!(found[1], (10, 3, strings(&["2", "x \"y\" \tz\nnew", "t"])));
        assert_eq!((found[2].1, &found[2].2), (5, &strings(&["", "ab", "c\"d\""])));
        assert_eq!((found[3].1, &found[3].2), (6, &strings(&["4", "", ""])));
        assert_eq!(found.len(), 4);
        assert_eq!(read("").unwrap(), []);
    }

    #[test]
    fn an_open_quote_is_named_by_its_line() {
        assert!(read("1\ta\n2\t\"b\n3\tc\n").unwrap_err().contains("line 2: the quote"));
        let long = format!("1\t\"{}", "a\n".repeat(9 << 20));
        assert!(read(&long).unwrap_err().contains("line 1: expected a record of at most"));
    }
}
