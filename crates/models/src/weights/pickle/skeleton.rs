//! What is left of a large pickle when the numbers of its arrays are left out: small enough for memory, and run as it is.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

/// Texts (ids, names) up to this many bytes are kept; no id comes near it.
const MAX_TEXT: u64 = 1 << 20;
/// Larger skeletons are not kept in memory.
const MAX_SKELETON: usize = 8 << 30;

/// What follows an operation.
enum Argument {
    Fixed(u64),
    /// Lines, each with its end.
    Lines(u32),
    /// A little-endian length of so many bytes, then a text of this length.
    Text(u64),
    /// The same, then bytes.
    Bytes(u64),
    Unknown,
}

/// Source: the list of operations in CPython's `pickletools`.
fn argument(op: u8) -> Argument {
    match op {
        b'.' | b'(' | b'0' | b'1' | b'2' | b'N' | 0x88 | 0x89 => Argument::Fixed(0),
        b')' | b']' | b'}' | b't' | b'l' | b'd' | 0x85..=0x87 => Argument::Fixed(0),
        b'a' | b'e' | b's' | b'u' | b'R' | b'b' | b'Q' | 0x93 | 0x94 => Argument::Fixed(0),
        0x80 | b'K' | b'q' | b'h' => Argument::Fixed(1),
        b'M' => Argument::Fixed(2),
        b'J' | b'r' | b'j' => Argument::Fixed(4),
        0x95 | b'G' => Argument::Fixed(8),
        b'c' | b'i' => Argument::Lines(2),
        0x8a | 0x8c | b'U' => Argument::Text(1),
        0x8b | b'X' | b'T' => Argument::Text(4),
        0x8d => Argument::Text(8),
        b'C' => Argument::Bytes(1),
        b'B' => Argument::Bytes(4),
        0x8e | 0x96 => Argument::Bytes(8),
        _ => Argument::Unknown,
    }
}

/// Reads the pickle at the start of a file; bytes are replaced by where they lie: 16 bytes, offset and length. After an
/// operation that is not known nothing is read: the machine will refuse it.
pub(super) fn read(file: &File) -> io::Result<Vec<u8>> {
    let mut source = BufReader::with_capacity(1 << 18, file);
    let length = file.metadata()?.len();
    let mut skeleton = Vec::new();
    let mut at = 0u64;
    loop {
        let mut op = [0];
        source.read_exact(&mut op)?;
        at += 1;
        let op = op[0];
        let start = skeleton.len();
        skeleton.push(op);
        let cut = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut take = |n: u64, skeleton: &mut Vec<u8>| -> io::Result<u64> {
            let read = source.by_ref().take(n).read_to_end(skeleton)? as u64;
            if read < n { Err(cut()) } else { Ok(n) }
        };
        match argument(op) {
            Argument::Fixed(n) => at += take(n, &mut skeleton)?,
            Argument::Lines(n) => {
                for _ in 0..n {
                    let read = source.by_ref().take(MAX_TEXT).read_until(b'\n', &mut skeleton)?;
                    at += read as u64;
                    if !skeleton.ends_with(b"\n") {
                        return Err(cut());
                    }
                }
            }
            Argument::Text(width) => {
                at += take(width, &mut skeleton)?;
                let n = little_endian(&skeleton[start + 1..]);
                if n > MAX_TEXT {
                    return Err(too_large(format!("a text of {n} bytes")));
                }
                at += take(n, &mut skeleton)?;
            }
            Argument::Bytes(width) => {
                at += take(width, &mut skeleton)?;
                let n = little_endian(&skeleton[start + 1..]);
                if n > length - at.min(length) {
                    return Err(cut());
                }
                skeleton.truncate(start);
                skeleton.extend_from_slice(&[b'C', 16]);
                skeleton.extend_from_slice(&at.to_le_bytes());
                skeleton.extend_from_slice(&n.to_le_bytes());
                source.seek_relative(n as i64)?;
                at += n;
            }
            Argument::Unknown => return Ok(skeleton),
        }
        // It only says how much to read ahead.
        if op == 0x95 {
            skeleton.truncate(start);
        }
        if op == b'.' {
            return Ok(skeleton);
        }
        if skeleton.len() > MAX_SKELETON {
            return Err(too_large(format!("more than {MAX_SKELETON} bytes beside the vectors")));
        }
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |value, &b| value << 8 | u64::from(b))
}

fn too_large(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
