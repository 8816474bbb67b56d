//! Files of lines between spaces or tabs, as TREC's tools have them: read line by line, every fault told with its number.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::error::DataError;
use crate::source::{compression, reader, unpack_error};

/// Longest line that is read, in bytes; more is taken for a broken file.
const MAX_LINE: u64 = 1 << 20;

/// Gives every line that is not blank to `take`, with its number from 1 and without its end; `.gz` and `.zst` are unpacked. A sentence
/// that `take` returns becomes an error of that line.
pub(crate) fn each_line(
    path: &Path,
    take: &mut dyn FnMut(u64, &str) -> Result<(), String>,
) -> Result<(), DataError> {
    let packed = compression(path);
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    let source = reader(file, packed).map_err(|e| unpack_error(path, packed, e))?;
    let mut source = BufReader::with_capacity(1 << 18, source);
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        let read = source.by_ref().take(MAX_LINE).read_until(b'\n', &mut line);
        let read = read.map_err(|e| unpack_error(path, packed, e))?;
        if read == 0 {
            break;
        }
        let at = |what: String| DataError::file(path, format!("line {number}: {what}"));
        if read as u64 == MAX_LINE && line.last() != Some(&b'\n') {
            return Err(at(format!(
                "expected a line of fewer than {MAX_LINE} bytes; look for missing line ends"
            )));
        }
        let text = std::str::from_utf8(&line).map_err(|_| at("expected UTF-8 text".into()))?;
        let text = if number == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
        let text = text.trim_end_matches(['\n', '\r']);
        if !text.trim_ascii().is_empty() {
            take(number, text).map_err(at)?;
        }
    }
    Ok(())
}
