//! Checks a sentencepiece character map before the tokenizers library gets it, which indexes it unchecked.
//!
//! Layout: u32 bytes of the trie, the trie (little-endian u32 units of a Darts double array), then the
//! replacements as NUL-terminated UTF-8 strings that the trie's values point into.

/// Walks every state that any text can reach and says what would go out of bounds.
pub(crate) fn check(map: &[u8]) -> Result<(), String> {
    let bad = |what: &str| Err(format!("expected a sound character map, found {what}"));
    let Some((size, rest)) = map.split_first_chunk::<4>() else {
        return bad("fewer than 4 bytes");
    };
    let size = u32::from_le_bytes(*size) as usize;
    if !size.is_multiple_of(4) || size < 4 || size > rest.len() {
        return bad(&format!("a trie of {size} bytes in {} bytes", map.len()));
    }
    let (trie, text) = rest.split_at(size);
    let units: Vec<usize> = trie.as_chunks::<4>().0.iter().map(|c| u32::from_le_bytes(*c) as usize).collect();
    let Ok(text) = std::str::from_utf8(text) else {
        return bad("replacements that are not UTF-8");
    };

    let offset = |unit: usize| (unit >> 10) << ((unit & (1 << 9)) >> 6);
    let label = |unit: usize| unit & ((1 << 31) | 0xFF);
    let mut seen = vec![false; units.len()];
    let mut todo = vec![offset(units[0])];
    while let Some(node) = todo.pop() {
        // a node's children lie at node ^ 1 ..= node ^ 255, all of which are looked at
        if node | 0xFF >= units.len() {
            return bad(&format!("a state beyond the trie's {} units", units.len()));
        }
        if std::mem::replace(&mut seen[node], true) {
            continue;
        }
        for byte in 1..=255usize {
            let child = node ^ byte;
            let unit = units[child];
            if label(unit) != byte {
                continue;
            }
            let next = child ^ offset(unit);
            if (unit >> 8) & 1 == 1 {
                let value = units.get(next).map(|u| u & ((1 << 31) - 1));
                if !value.is_some_and(|v| text.is_char_boundary(v)) {
                    return bad("a replacement outside its text");
                }
            }
            todo.push(next);
        }
    }
    Ok(())
}

/// Decodes standard base64 with padding, as a tokenizer.json holds its character map.
pub(crate) fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    let mut out = Vec::with_capacity(digits.len() / 4 * 3 + 3);
    let (mut bits, mut count) = (0u32, 0);
    for c in digits.bytes() {
        let digit = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(digit)) & 0xFF_FFFF;
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_rfc4648() {
        for (text, bytes) in [
            ("", &b""[..]),
            ("Zg==", b"f"),
            ("Zm8=", b"fo"),
            ("Zm9vYmFy", b"foobar"),
            ("//79", b"\xff\xfe\xfd"),
        ] {
            assert_eq!(from_base64(text).unwrap(), bytes);
        }
        assert_eq!(from_base64("a b"), None);
    }

    #[test]
    fn small_and_wild_maps_are_refused() {
        for map in [
            &b""[..],
            b"\0\0",
            &[4, 0, 0, 0],
            &[0, 0, 0, 0, b'x'],
            &[4, 0, 0, 0, 0, 0, 0, 0],
            &[255, 255, 255, 255, 1, 2, 3, 4],
        ] {
            assert!(check(map).is_err(), "{map:?}");
        }
        let mut unit = vec![0u8; 4 + 4 * 256];
        unit[..4].copy_from_slice(&1024u32.to_le_bytes());
        assert_eq!(check(&unit), Ok(()), "a trie without entries");
        unit[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(check(&unit).unwrap_err().contains("beyond the trie"));
    }
}
