//! What ranks say: lines of the others get their rank before them.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::{Mutex, PoisonError};

/// Longest piece of a line that is passed on at once.
const LONGEST: u64 = 64 << 10;

/// Copies lines with a prefix, each by one write so that lines of several ranks do not mix.
pub(super) fn prefix_lines(from: impl Read, prefix: &str, to: &mut impl Write) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        match from.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        // Where nobody hears, the rank goes on.
        let _ = to.write_all(&line);
    }
}

/// Collects all that comes, as it comes.
pub(super) fn collect(mut from: impl Read, to: &Mutex<Vec<u8>>) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut piece) {
        to.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&piece[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_get_their_rank() {
        let mut out = Vec::new();
        prefix_lines(&b"one\n\ntwo \xff\nrest"[..], "[rank 3] ", &mut out);
        assert_eq!(out, b"[rank 3] one\n[rank 3] \n[rank 3] two \xff\n[rank 3] rest\n");
        let long = vec![b'x'; LONGEST as usize + 5];
        let mut out = Vec::new();
        prefix_lines(&long[..], "> ", &mut out);
        assert_eq!(out.iter().filter(|&&b| b == b'\n').count(), 2);
        assert_eq!(out.len(), long.len() + 6);
    }
}
