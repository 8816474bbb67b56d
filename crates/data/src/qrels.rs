//! Judgements of relevance: which documents answer a query, and how well.
//!
//! Two forms, told apart by their first line, also `.gz` or `.zst`:
//! - TREC's: `query 0 document grade`, white space between;
//! - BEIR's: `query-id`, `corpus-id` and `score` between tabs, with these names in the first line.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::error::DataError;
use crate::lines::each_line;

/// Greatest grade, and least below 0, that is believed to be meant: trec_eval takes "a small integer".
const MOST_GRADE: i64 = 1 << 20;

/// The judgements of a file, by query.
///
/// All are in memory: about 100 bytes each, with names of 20 letters.
#[derive(Clone, Debug, Default)]
pub struct Qrels {
    queries: BTreeMap<String, HashMap<String, i64>>,
}

impl Qrels {
    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read, or holds no judgement; a line of another form, or a document that is judged twice for a query, with
    /// the number of the line.
    pub fn open(path: &Path) -> Result<Qrels, DataError> {
        let mut qrels = Qrels::default();
        let mut beir = None;
        each_line(path, &mut |_, line| match beir {
            None => {
                let header = line.split('\t').map(str::trim_ascii).eq(["query-id", "corpus-id", "score"]);
                beir = Some(header);
                if header { Ok(()) } else { qrels.trec(line) }
            }
            Some(true) => qrels.beir(line),
            Some(false) => qrels.trec(line),
        })?;
        if qrels.queries.is_empty() {
            return Err(DataError::file(path, "expected judgements, found none; get the file again"));
        }
        Ok(qrels)
    }

    fn trec(&mut self, line: &str) -> Result<(), String> {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        match fields[..] {
            [query, _, document, judged] => self.add(query, document, judged),
            _ => Err(format!(
                "expected 4 fields (query, 0, document, grade), or BEIR's first line (query-id, corpus-id, score between tabs); found {}",
                count(fields.len())
            )),
        }
    }

    fn beir(&mut self, line: &str) -> Result<(), String> {
        let fields: Vec<&str> = line.split('\t').map(str::trim_ascii).collect();
        match fields[..] {
            [query, document, judged] if !query.is_empty() && !document.is_empty() => {
                self.add(query, document, judged)
            }
            _ => Err(format!(
                "expected 3 fields between tabs (query-id, corpus-id, score), found {}",
                count(fields.iter().filter(|f| !f.is_empty()).count())
            )),
        }
    }

    fn add(&mut self, query: &str, document: &str, judged: &str) -> Result<(), String> {
        let Some(judgement) = grade(judged) else {
            return Err(format!(
                "expected a whole number of at most {MOST_GRADE} as grade, found {judged:?}"
            ));
        };
        let documents = match self.queries.get_mut(query) {
            Some(documents) => documents,
            None => self.queries.entry(query.to_owned()).or_default(),
        };
        match documents.insert(document.to_owned(), judgement) {
            None => Ok(()),
            Some(_) => Err(format!(
                "the document {document} is judged twice for the query {query}; leave one of the lines out"
            )),
        }
    }

    /// The queries in the order of their names, with the grades of their documents.
    pub fn queries(&self) -> impl Iterator<Item = (&str, &HashMap<String, i64>)> {
        self.queries.iter().map(|(query, grades)| (query.as_str(), grades))
    }

    /// Whether the query has judgements.
    pub fn has(&self, query: &str) -> bool {
        self.queries.contains_key(query)
    }

    /// How many queries have judgements.
    pub fn len(&self) -> usize {
        self.queries.len()
    }

    /// Whether there is none; never so after [`Qrels::open`].
    pub fn is_empty(&self) -> bool {
        self.queries.is_empty()
    }
}

/// A whole number, which some files write as `1.0`.
fn grade(text: &str) -> Option<i64> {
    let whole = text.strip_suffix(".0").unwrap_or(text);
    whole.parse().ok().filter(|grade: &i64| (-MOST_GRADE..=MOST_GRADE).contains(grade))
}

fn count(fields: usize) -> String {
    if fields == 1 { "1 field".into() } else { format!("{fields} fields") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str) -> Result<Qrels, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qrels.txt");
        std::fs::write(&path, text).unwrap();
        Qrels::open(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn both_forms_are_read() {
        let trec = open("q2 0 a 1\nq1\t0\tb\t-2\n\n  q1 Q0 a 3\r\n").unwrap();
        let beir = open("\u{feff}query-id\tcorpus-id\tscore\nq2\ta\t1\nq1\tb\t-2\r\nq1\ta\t3.0\n").unwrap();
        for qrels in [trec, beir] {
            let names: Vec<&str> = qrels.queries().map(|(query, _)| query).collect();
            assert_eq!((names, qrels.len()), (vec!["q1", "q2"], 2));
            let (_, grades) = qrels.queries().next().unwrap();
            assert_eq!((grades["a"], grades["b"], grades.len()), (3, -2, 2));
            assert!(qrels.has("q2") && !qrels.has("q3"));
        }
        let spaced = open("query-id\tcorpus-id\tscore\nq 1\tdoc one\t2\n").unwrap();
        assert_eq!(spaced.queries().next().unwrap().1["doc one"], 2);
    }

    #[test]
    fn every_fault_says_where_and_what() {
        let header = "query-id\tcorpus-id\tscore\n";
        for (text, part) in [
            ("q 0 a 1\nq 0 a\n".to_owned(), "line 2: expected 4 fields"),
            ("q\ta\t1\n".into(), "or BEIR's first line"),
            ("q 0 a high\n".into(), "line 1: expected a whole number"),
            ("q 0 a 1.5\n".into(), "found \"1.5\""),
            ("q 0 a nan\n".into(), "found \"nan\""),
            ("q 0 a 99999999999999999999\n".into(), "whole number"),
            ("q 0 a 1\nr 0 a 1\nq 0 a 1\n".into(), "line 3: the document a is judged twice for the query q"),
            (format!("{header}q\ta\n"), "line 2: expected 3 fields between tabs"),
            (format!("{header}q\t\t1\n"), "line 2: expected 3 fields"),
            (header.into(), "expected judgements"),
            ("\n".into(), "expected judgements"),
            ("x".repeat(2 << 20), "line 1: expected a line of fewer than"),
        ] {
            let error = open(&text).unwrap_err();
            assert!(error.contains("qrels.txt") && error.contains(part), "{error}");
        }
        let path = std::path::Path::new("/nowhere/qrels.txt");
        assert!(Qrels::open(path).unwrap_err().to_string().contains("cannot open the file"));
    }
}
