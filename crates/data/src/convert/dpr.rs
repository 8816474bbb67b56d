//! DPR's files: training data (`positive_ctxs`, `negative_ctxs`, `hard_negative_ctxs`), questions with answers as TSV, and
//! the passages of the collection as TSV.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::output::Output;
use super::tsv::{Records, fields};
use super::{Converted, at_line, converted, passage};
use crate::error::DataError;
use crate::question::{Place, kind};
use crate::questions::Questions;
use crate::source::{compression, reader, unpack_error};

/// Turns DPR's training data (`.json`, `.jsonl`, compressed or not) into questions whose passages are the positive ones, then
/// the hard negatives, then the other negatives, each with `hasanswer`. DPR's scores are of several kinds (1000 stands for
/// "gold") and are left out. `most_passages`: of each question at most.
///
/// # Errors
/// A file that cannot be read or written; an item that is not DPR's, with its line.
pub fn dpr_json(
    input: &Path,
    cache_dir: &Path,
    most_passages: usize,
    output: &Path,
) -> Result<Converted, DataError> {
    let items = Questions::open(input, cache_dir)?;
    let mut out = Output::create(output)?;
    let mut passages = 0;
    for row in 0..items.len() {
        let (bytes, place) = items.bytes(row)?;
        let item = crate::question::parse_object(&bytes, &place)?;
        let item = training_item(item, &place, most_passages)?;
        passages += item["ctxs"].as_array().map_or(0, Vec::len) as u64;
        out.item(item)?;
    }
    Ok(converted(output, out.finish()?, passages))
}

fn training_item(
    mut item: Map<String, Value>,
    place: &Place,
    most: usize,
) -> Result<Map<String, Value>, DataError> {
    let question = match item.remove("question") {
        Some(Value::String(text)) => text,
        other => return Err(place.error("a string in `question`", found(other.as_ref()), "")),
    };
    let answers = match item.remove("answers") {
        Some(Value::Array(list)) if list.iter().all(Value::is_string) => list,
        other => return Err(place.error("a list of strings in `answers`", found(other.as_ref()), "")),
    };
    if !item.contains_key("positive_ctxs") {
        let hint = if item.contains_key("ctxs") {
            "a file with `ctxs` needs no conversion"
        } else {
            "this is not DPR's training data"
        };
        return Err(place.error("a list of passages in `positive_ctxs`", "none", hint));
    }
    let mut ctxs = Vec::new();
    for (key, has_answer) in
        [("positive_ctxs", true), ("hard_negative_ctxs", false), ("negative_ctxs", false)]
    {
        let list = match item.remove(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(list)) => list,
            Some(other) => {
                return Err(place.error(format!("a list of passages in `{key}`"), kind(&other), ""));
            }
        };
        for (k, ctx) in list.iter().enumerate() {
            if ctxs.len() >= most {
                break;
            }
            let text = |field: &str| match &ctx[field] {
                Value::String(text) => Ok(text.clone()),
                other => {
                    let expected = format!("a string in `{key}[{k}].{field}`");
                    Err(place.error(expected, found(Some(other).filter(|v| !v.is_null())), ""))
                }
            };
            // `passage_id` in the files for NQ, `psg_id` in those for TriviaQA, absent in the ones of SQuAD.
            let id = match (&ctx["passage_id"], &ctx["psg_id"]) {
                (Value::String(id), _) | (Value::Null, Value::String(id)) => id.clone(),
                (Value::Number(id), _) | (Value::Null, Value::Number(id)) => id.to_string(),
                _ => String::new(),
            };
            let mut passage = passage(&id, &text("title")?, &text("text")?);
            passage.insert("hasanswer".into(), has_answer.into());
            ctxs.push(Value::Object(passage));
        }
    }
    let value = json!({"question": question, "answers": answers, "ctxs": ctxs});
    Ok(value.as_object().cloned().unwrap_or_default())
}

fn found(value: Option<&Value>) -> String {
    value.map_or("none".into(), kind)
}

/// Turns DPR's questions (`question<TAB>['answer', ...]`, no header, `.gz` and `.zst` too) into questions without passages.
///
/// # Errors
/// A file that cannot be read or written; a line that is not DPR's.
pub fn dpr_questions(input: &Path, output: &Path) -> Result<Converted, DataError> {
    each_record(input, output, |path, line, fields| {
        let [question, answers] = fields else {
            let what =
                format!("expected 2 fields (question and answers) between tabs, found {}", fields.len());
            return Err(at_line(path, line, what));
        };
        if line == 1 && answers == "answers" {
            return Ok(None);
        }
        let answers = python_list(answers).map_err(|what| at_line(path, line, what))?;
        let value = json!({"question": question, "answers": answers, "ctxs": []});
        Ok(value.as_object().cloned())
    })
}

/// Turns DPR's passages (`id<TAB>text<TAB>title`, the header skipped, `.gz` and `.zst` too) into objects of `id`, `title` and
/// `text`.
///
/// # Errors
/// A file that cannot be read or written; a line that is not DPR's.
pub fn dpr_passages(input: &Path, output: &Path) -> Result<Converted, DataError> {
    each_record(input, output, |path, line, fields| {
        let [id, text, title] = fields else {
            let what = format!("expected 3 fields (id, text, title) between tabs, found {}", fields.len());
            return Err(at_line(path, line, what));
        };
        Ok((id != "id").then(|| passage(id, title, text)))
    })
}

fn each_record(
    input: &Path,
    output: &Path,
    item: impl Fn(&Path, u64, &[String]) -> Result<Option<Map<String, Value>>, DataError>,
) -> Result<Converted, DataError> {
    let compression = compression(input);
    let file = File::open(input).map_err(DataError::io(input, "open the file"))?;
    let source = reader(file, compression).map_err(DataError::io(input, "open the file"))?;
    let mut records = Records::new(input, BufReader::with_capacity(1 << 18, source));
    let mut out = Output::create(output)?;
    while let Some((place, record)) = records.next(|e| unpack_error(input, compression, e))? {
        let fields = fields(input, place.line, record)?;
        if let Some(item) = item(input, place.line, &fields)? {
            out.item(item)?;
        }
    }
    if out.items == 0 {
        return Err(DataError::file(input, "expected records between tabs, found none; get the file again"));
    }
    Ok(converted(output, out.finish()?, 0))
}

/// Reads a list of strings as Python's `repr` writes it: `['a', "b's", 'c\'d']`.
fn python_list(text: &str) -> Result<Vec<String>, String> {
    let bad = |found: String| {
        format!("expected a list of answers such as ['Paris', \"Rue d'Alger\"], found {found}")
    };
    let end = || bad(format!("its end missing in {:?}", text.chars().take(60).collect::<String>()));
    let mut chars = text.trim().chars().peekable();
    let shown = |c: Option<char>| {
        c.map_or_else(end, |c| bad(format!("{c:?} in {:?}", text.chars().take(60).collect::<String>())))
    };
    if chars.next() != Some('[') {
        return Err(shown(text.trim().chars().next()));
    }
    let mut list = Vec::new();
    loop {
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        let quote = match chars.next() {
            Some(']') => break,
            Some(quote @ ('\'' | '"')) => quote,
            other => return Err(shown(other)),
        };
        let mut item = String::new();
        loop {
            match chars.next().ok_or_else(end)? {
                c if c == quote => break,
                '\\' => item.extend(escaped(&mut chars).ok_or_else(|| bad("a bad escape".into()))?),
                c => item.push(c),
            }
        }
        list.push(item);
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        match chars.next() {
            Some(',') => {}
            Some(']') => break,
            other => return Err(shown(other)),
        }
    }
    match chars.next() {
        None => Ok(list),
        other => Err(shown(other)),
    }
}

/// What an escape stands for, after its backslash: nothing for a line that goes on, `None` for what Python never writes.
fn escaped(chars: &mut impl Iterator<Item = char>) -> Option<Option<char>> {
    let c = chars.next()?;
    let digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        '\n' => return Some(None),
        'n' => return Some(Some('\n')),
        'r' => return Some(Some('\r')),
        't' => return Some(Some('\t')),
        '\\' | '\'' | '"' => return Some(Some(c)),
        _ => return None,
    };
    let text: String = chars.take(digits).collect();
    // from_str_radix would take a sign.
    let whole = text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit());
    let code = whole.then(|| u32::from_str_radix(&text, 16).ok()).flatten()?;
    char::from_u32(code).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_python_writes_them() {
        for (text, expected) in [
            ("['Kenny Loggins']", &["Kenny Loggins"][..]),
            (r#"["Rue d'Alger", 'say "hi"', 'it\'s "x"']"#, &["Rue d'Alger", "say \"hi\"", "it's \"x\""]),
            (r"['a\\b\n', '\xe9\u20ac\U0001f600']", &["a\\b\n", "é€😀"]),
            (" [ 'a' ,'b', ] ", &["a", "b"]),
            ("[]", &[]),
        ] {
            assert_eq!(python_list(text).unwrap(), expected, "{text}");
        }
        for (text, part) in [
            ("Paris", "found 'P'"),
            ("['a'", "its end missing"),
            ("['a", "its end missing"),
            ("[3]", "found '3'"),
            ("['a' 'b']", "found '\\''"),
            ("['a'] x", "found ' '"),
            (r"['\x+1']", "a bad escape"),
            (r"['\q']", "a bad escape"),
            ("", "its end missing"),
        ] {
            let error = python_list(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
