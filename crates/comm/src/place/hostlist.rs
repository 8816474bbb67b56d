//! Lists of hosts in Slurm's notation: `node[1-3,07-10],a[1-2]b[3-4]`.

use super::wrong;
use crate::error::CommError;

/// Most hosts of a list.
const MOST_HOSTS: usize = 1 << 16;
/// Longest text of a list, in bytes.
const MOST_TEXT: usize = 1 << 20;

/// The hosts of a list, in its order.
///
/// # Errors
/// [`CommError::Place`] where brackets or ranges are not as expected, or the list has more than 65536 hosts.
pub fn expand_hosts(list: &str) -> Result<Vec<String>, CommError> {
    expand(list, MOST_HOSTS).map_err(|what| bad(list, &what))
}

/// The first host of a list; the others are not made, so a long list costs nothing.
///
/// # Errors
/// As [`expand_hosts`], for what comes up to the end of the first host.
pub fn first_host(list: &str) -> Result<String, CommError> {
    if list.len() > MOST_TEXT {
        return Err(bad(list, "it is longer than 1 MiB"));
    }
    let word = words(list).map(|mut w| w.swap_remove(0)).map_err(|what| bad(list, &what))?;
    let pieces = pieces(word).map_err(|what| bad(list, &what))?;
    Ok(pieces.iter().map(|p| p.at(0)).collect())
}

fn bad(list: &str, what: &str) -> CommError {
    let shown: String = list.chars().take(200).collect();
    wrong(format!("list of hosts {shown:?}: {what}; expected names as in node[1-3,07-10],gpu5"))
}

fn expand(list: &str, most: usize) -> Result<Vec<String>, String> {
    if list.len() > MOST_TEXT {
        return Err("it is longer than 1 MiB".into());
    }
    let mut hosts = Vec::new();
    for word in words(list)? {
        let pieces = pieces(word)?;
        let count = pieces.iter().try_fold(1usize, |n, p| n.checked_mul(p.len()));
        let count =
            count.filter(|&n| n <= most - hosts.len()).ok_or(format!("it has more than {most} hosts"))?;
        for i in 0..count {
            // The last brackets turn fastest.
            let mut rest = i;
            let mut parts: Vec<String> = Vec::with_capacity(pieces.len());
            for piece in pieces.iter().rev() {
                parts.push(piece.at(rest % piece.len()));
                rest /= piece.len();
            }
            parts.reverse();
            hosts.push(parts.concat());
        }
    }
    Ok(hosts)
}

/// The texts between commas that are outside of brackets.
fn words(list: &str) -> Result<Vec<&str>, String> {
    let (mut words, mut start, mut open) = (Vec::new(), 0, false);
    for (i, c) in list.char_indices() {
        match (c, open) {
            ('[', true) => return Err("it has brackets within brackets".into()),
            (']', false) => return Err("a closing bracket has no opening one".into()),
            ('[', false) => open = true,
            (']', true) => open = false,
            (',', false) => {
                words.push(&list[start..i]);
                start = i + 1;
            }
            (c, _) if c.is_whitespace() || c.is_control() => return Err("it has white space".into()),
            _ => {}
        }
    }
    if open {
        return Err("an opening bracket has no closing one".into());
    }
    words.push(&list[start..]);
    match words.iter().any(|w| w.is_empty()) {
        true => Err("it has an empty name".into()),
        false => Ok(words),
    }
}

/// A part of a name: a fixed text, or the numbers of a pair of brackets.
enum Piece {
    Text(String),
    Numbers(Vec<Range>),
}

struct Range {
    first: u64,
    count: usize,
    width: usize,
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Text(_) => 1,
            // Each range was counted when it was read.
            Piece::Numbers(ranges) => ranges.iter().fold(0, |n, r| n.saturating_add(r.count)),
        }
    }

    fn at(&self, mut i: usize) -> String {
        match self {
            Piece::Text(text) => text.clone(),
            Piece::Numbers(ranges) => {
                for range in ranges {
                    if i < range.count {
                        return format!("{:0width$}", range.first + i as u64, width = range.width);
                    }
                    i -= range.count;
                }
                unreachable!("an index within the length")
            }
        }
    }
}

fn pieces(word: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after.split_once(']').ok_or("an opening bracket has no closing one")?;
        if !before.is_empty() {
            pieces.push(Piece::Text(before.into()));
        }
        pieces.push(Piece::Numbers(inside.split(',').map(range).collect::<Result<_, _>>()?));
        rest = after;
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest.into()));
    }
    Ok(pieces)
}

fn range(text: &str) -> Result<Range, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |s: &str| match s.len() <= 18 && s.bytes().all(|b| b.is_ascii_digit()) {
        true => s.parse::<u64>().ok(),
        false => None,
    };
    let (a, b) = number(first).zip(number(last)).ok_or(format!("`{text}` is no number and no range"))?;
    let count = b.checked_sub(a).ok_or(format!("the range `{text}` runs backwards"))?;
    let count = usize::try_from(count).ok().filter(|&n| n < MOST_HOSTS);
    let count = count.ok_or(format!("the range `{text}` has more than {MOST_HOSTS} hosts"))? + 1;
    Ok(Range { first: a, count, width: first.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_as_slurm_writes_them() {
        let cases: &[(&str, &[&str])] = &[
            ("node1", &["node1"]),
            ("node[1-3]", &["node1", "node2", "node3"]),
            ("node[1-2,08-10],gpu5", &["node1", "node2", "node08", "node09", "node10", "gpu5"]),
            ("a[1-2]b[3-4]", &["a1b3", "a1b4", "a2b3", "a2b4"]),
            ("r[1,3]n[07]-ib,x", &["r1n07-ib", "r3n07-ib", "x"]),
            ("n[9-11]", &["n9", "n10", "n11"]),
            ("n[099-101].site", &["n099.site", "n100.site", "n101.site"]),
        ];
        for (list, want) in cases {
            assert_eq!(expand_hosts(list).unwrap(), *want, "{list}");
            assert_eq!(first_host(list).unwrap(), want[0], "{list}");
        }
    }

    #[test]
    fn hostile_lists_are_named_and_cost_nothing() {
        let cases = [
            ("", "empty name"),
            ("a,,b", "empty name"),
            ("n[1-3", "no closing"),
            ("n1-3]", "no opening"),
            ("n[1-[2]]", "within brackets"),
            ("n[3-1]", "backwards"),
            ("n[a-b]", "no number"),
            ("n[]", "no number"),
            ("n[-1]", "no number"),
            ("n[1-99999999999]", "more than 65536"),
            ("n[0-65535],m", "more than 65536"),
            ("n[1-9999][1-9999][1-9999][1-9999][1-9999]", "more than 65536"),
            ("n[99999999999999999999]", "no number"),
            ("two words", "white space"),
        ];
        for (list, want) in cases {
            let error = expand_hosts(list).unwrap_err().to_string();
            assert!(error.contains(want), "{list}: {error}");
        }
        let long = "n,".repeat(MOST_TEXT);
        assert!(expand_hosts(&long).unwrap_err().to_string().contains("1 MiB"));
        assert_eq!(expand_hosts("n[0-65535]").unwrap().len(), MOST_HOSTS);
        // Too many to list, but the first is known.
        assert_eq!(first_host("n[1-9999][1-9999][1-9999]").unwrap(), "n111");
    }
}
