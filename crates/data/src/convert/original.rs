//! The original dumps of NQ-open and TriviaQA with the passages that Fusion-in-Decoder's authors retrieved for them: what its
//! preprocessing reads and writes.
//!
//! Of the collection only the places of passages that are used are kept in memory; texts are read when they are written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::output::Output;
use super::tsv::{Records, fields};
use super::{Converted, at_line, converted, passage};
use crate::error::DataError;

/// Which dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dump {
    /// Natural Questions, open: `NQ-open.{train,dev}.jsonl`, `NQ.{train,dev,test}.idx.json`, `nq_passages/{split}.json`.
    Nq,
    /// TriviaQA, unfiltered: `triviaqa-unfiltered/unfiltered-web-{train,dev}.json`, `TQA.{split}.idx.json`,
    /// `tqa_passages/{split}.json`.
    TriviaQa,
}

/// The splits that are written, and the original file that each is cut from.
const SPLITS: [(&str, &str); 3] = [("train", "train"), ("dev", "train"), ("test", "dev")];
/// Rows between two lines of progress.
const PROGRESS: u64 = 2_000_000;

/// Reads a dump below `download` and the collection `passages` (DPR's TSV, not compressed), and writes `train.json`,
/// `dev.json` and `test.json` into the folder `output`. `say` gets lines of progress.
///
/// # Errors
/// A file that is not there, is damaged, or does not fit the others; each with its file, and line where there is one.
pub fn convert_dump(
    dump: Dump,
    download: &Path,
    passages: &Path,
    output: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<Converted>, DataError> {
    // What is missing is said before minutes are spent.
    let (prefix, folder) = match dump {
        Dump::Nq => ("NQ", "nq_passages"),
        Dump::TriviaQa => ("TQA", "tqa_passages"),
    };
    let file = |name: String| download.join(name);
    let original = |part: &str| match dump {
        Dump::Nq => file(format!("NQ-open.{part}.jsonl")),
        Dump::TriviaQa => file(format!("triviaqa-unfiltered/unfiltered-web-{part}.json")),
    };
    let mut needed = vec![passages.to_owned(), original("train"), original("dev")];
    for (split, _) in SPLITS {
        needed.push(file(format!("{prefix}.{split}.idx.json")));
        needed.push(file(format!("{folder}/{split}.json")));
    }
    for path in &needed {
        File::open(path).map_err(DataError::io(path, "open the file"))?;
    }
    let mut splits = Vec::new();
    for (split, part) in SPLITS {
        let rows_path = file(format!("{prefix}.{split}.idx.json"));
        let ids_path = file(format!("{folder}/{split}.json"));
        let rows: Vec<u64> = read_json(&rows_path)?;
        let ids: BTreeMap<String, Vec<PassageId>> = read_json(&ids_path)?;
        splits.push(Split { name: split, part, rows, rows_path, ids, ids_path });
    }
    let wanted = splits.iter().flat_map(|s| s.ids.values().flatten().map(|id| id.0));
    let collection = Collection::find(passages, wanted.collect(), say)?;
    let mut written = Vec::new();
    let mut read: Option<(&str, Vec<Original>)> = None;
    for split in &splits {
        if read.as_ref().is_none_or(|(part, _)| *part != split.part) {
            // The one before goes first: both need not be in memory.
            drop(read.take());
            let path = original(split.part);
            say(&format!("{}: reading", path.display()));
            let items = match dump {
                Dump::Nq => nq(&path)?,
                Dump::TriviaQa => triviaqa(&path)?,
            };
            read = Some((split.part, items));
        }
        let items = read.as_ref().map_or(&[][..], |(_, items)| items);
        let done = split.write(
            items,
            &original(split.part),
            &collection,
            &output.join(format!("{}.json", split.name)),
        )?;
        say(&format!("{}: {} questions with {} passages", done.path, done.items, done.passages));
        written.push(done);
    }
    Ok(written)
}

/// A question of an original file.
struct Original {
    question: String,
    /// TriviaQA's `QuestionId`, by which its passages are found; NQ's are found by position.
    id: Option<String>,
    answers: Vec<String>,
    target: Option<String>,
}

struct Split {
    name: &'static str,
    part: &'static str,
    rows: Vec<u64>,
    rows_path: PathBuf,
    ids: BTreeMap<String, Vec<PassageId>>,
    ids_path: PathBuf,
}

impl Split {
    fn write(
        &self,
        items: &[Original],
        original: &Path,
        collection: &Collection<'_>,
        output: &Path,
    ) -> Result<Converted, DataError> {
        let mut out = Output::create(output)?;
        let mut passages = 0;
        for (position, &row) in self.rows.iter().enumerate() {
            let item = usize::try_from(row).ok().and_then(|row| items.get(row)).ok_or_else(|| {
                let what = format!(
                    "entry {position}: expected a row of {}, which has {}, found {row}",
                    original.display(),
                    items.len()
                );
                DataError::file(&self.rows_path, what)
            })?;
            let key = item.id.clone().unwrap_or_else(|| position.to_string());
            let ids = self.ids.get(&key).ok_or_else(|| {
                DataError::file(
                    &self.ids_path,
                    format!("expected the passages of question {key:?}, found none"),
                )
            })?;
            let mut ctxs = Vec::with_capacity(ids.len());
            for id in ids {
                let found = collection.read(id.0)?.ok_or_else(|| {
                    let what = format!(
                        "question {key:?} has passage {}, which is not in {}; expected the collection that these ids are of",
                        id.0,
                        collection.path.display()
                    );
                    DataError::file(&self.ids_path, what)
                })?;
                ctxs.push(Value::Object(found));
            }
            passages += ctxs.len() as u64;
            let mut fields = Map::new();
            fields.insert("question".into(), item.question.clone().into());
            fields.insert("answers".into(), json!(item.answers));
            if let Some(target) = &item.target {
                fields.insert("target".into(), target.clone().into());
            }
            fields.insert("ctxs".into(), ctxs.into());
            out.item(fields)?;
        }
        let path = out.target().to_owned();
        Ok(converted(&path, out.finish()?, passages))
    }
}

/// The id of a passage: a whole number, or its digits.
#[derive(Deserialize)]
#[serde(try_from = "Value")]
struct PassageId(u64);

impl TryFrom<Value> for PassageId {
    type Error = String;
    fn try_from(value: Value) -> Result<Self, String> {
        let number = match &value {
            Value::Number(n) => n.as_u64(),
            Value::String(s) => s.parse().ok(),
            _ => None,
        };
        number.map(PassageId).ok_or_else(|| format!("expected the number of a passage, found {value}"))
    }
}

/// Streams a JSON file into what is wanted of it.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    serde_json::from_reader(BufReader::with_capacity(1 << 18, file)).map_err(|e| {
        if e.is_io() {
            return DataError::io(path, "read the file")(e.into());
        }
        let text = e.to_string();
        let reason = text.split(" at line ").next().unwrap_or_default();
        let cut = if e.is_eof() { "; the file was cut short, get it again" } else { "" };
        at_line(path, e.line() as u64, format!("{reason} (column {}){cut}", e.column()))
    })
}

fn nq(path: &Path) -> Result<Vec<Original>, DataError> {
    #[derive(Deserialize)]
    struct Line {
        question: String,
        answer: Vec<String>,
    }
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    let lines =
        serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 18, file)).into_iter::<Line>();
    let mut items = Vec::new();
    for line in lines {
        let Line { question, answer } = line.map_err(|e| {
            let text = e.to_string();
            at_line(path, e.line() as u64, text.split(" at line ").next().unwrap_or_default())
        })?;
        items.push(Original { question, id: None, answers: answer, target: None });
    }
    Ok(items)
}

fn triviaqa(path: &Path) -> Result<Vec<Original>, DataError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Whole {
        data: Vec<Item>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Item {
        question: String,
        question_id: String,
        answer: Answer,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Answer {
        aliases: Vec<String>,
        value: String,
    }
    let whole: Whole = read_json(path)?;
    let item = |item: Item| Original {
        question: item.question,
        id: Some(item.question_id),
        answers: item.answer.aliases,
        target: Some(readable(item.answer.value)),
    };
    Ok(whole.data.into_iter().map(item).collect())
}

/// A value that is all upper case with every word's first letter in upper case only, as Python's `title` does it.
fn readable(value: String) -> String {
    let is_upper = value.chars().any(char::is_uppercase) && !value.chars().any(char::is_lowercase);
    if !is_upper {
        return value;
    }
    let mut title = String::with_capacity(value.len());
    let mut inside = false;
    for c in value.chars() {
        if inside {
            title.extend(c.to_lowercase());
        } else {
            title.push(c);
        }
        inside = c.is_uppercase();
    }
    title
}

/// The places of the passages that are wanted.
struct Collection<'a> {
    path: &'a Path,
    file: File,
    /// In ascending order.
    ids: Vec<u64>,
    /// Offset, length and line; a length of 0 where the collection lacks the passage.
    places: Vec<(u64, u32, u32)>,
}

impl<'a> Collection<'a> {
    fn find(path: &'a Path, mut ids: Vec<u64>, say: &mut dyn FnMut(&str)) -> Result<Self, DataError> {
        if path.extension().is_some_and(|e| e == "gz" || e == "zst") {
            return Err(DataError::file(path, "passages are read out of order; decompress the file first"));
        }
        ids.sort_unstable();
        ids.dedup();
        let open = || File::open(path).map_err(DataError::io(path, "open the file"));
        let mut places = vec![(0, 0, 0); ids.len()];
        let mut records = Records::new(path, BufReader::with_capacity(1 << 20, open()?));
        let mut rows = 0u64;
        while let Some((place, record)) = records.next(|e| DataError::io(path, "read the file")(e))? {
            let id = record.split(|&b| b == b'\t').next().unwrap_or_default();
            // The header, and every id that is not a plain number, can be nobody's.
            let id = std::str::from_utf8(id).ok().and_then(|id| id.trim_matches('"').parse::<u64>().ok());
            if let Some(found) = id.and_then(|id| ids.binary_search(&id).ok()) {
                let [length, line] =
                    [record.len() as u64, place.line].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
                if places[found].1 > 0 {
                    let what = format!(
                        "passage {} was on line {} before; expected every id once",
                        ids[found], places[found].2
                    );
                    return Err(at_line(path, place.line, what));
                }
                places[found] = (place.offset, length, line);
            }
            rows += 1;
            if rows.is_multiple_of(PROGRESS) {
                say(&format!("{}: {rows} passages looked at", path.display()));
            }
        }
        Ok(Collection { path, file: open()?, ids, places })
    }

    fn read(&self, id: u64) -> Result<Option<Map<String, Value>>, DataError> {
        let place = self.ids.binary_search(&id).ok().map(|i| self.places[i]).filter(|place| place.1 > 0);
        let Some((offset, length, line)) = place else { return Ok(None) };
        let mut record = vec![0; length as usize];
        self.file.read_exact_at(&mut record, offset).map_err(DataError::io(self.path, "read the file"))?;
        let fields = fields(self.path, line.into(), &record)?;
        let [id, text, title] = &fields[..] else {
            let what = format!("expected 3 fields (id, text, title) between tabs, found {}", fields.len());
            return Err(at_line(self.path, line.into(), what));
        };
        Ok(Some(passage(id, title, text)))
    }
}

#[cfg(test)]
mod tests {
    use super::readable;

    #[test]
    fn shouted_values_become_titles() {
        for (value, expected) in [
            ("SOUTH AFRICA", "South Africa"),
            ("THEY'RE", "They'Re"),
            ("N.A.S.A.", "N.A.S.A."),
            ("3M", "3M"),
            ("1984", "1984"),
            ("ÉTÉ", "Été"),
            ("iPhone", "iPhone"),
            ("Rome", "Rome"),
        ] {
            assert_eq!(readable(value.into()), expected);
        }
    }
}
