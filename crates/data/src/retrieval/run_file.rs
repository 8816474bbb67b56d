//! A run as TREC's tools write it: `query Q0 document rank score tag`, white space between, a line a document.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::DataError;
use crate::lines::each_line;

/// The first documents of every query.
#[derive(Debug, Default)]
pub struct RunFile {
    queries: BTreeMap<String, Vec<(String, f64)>>,
}

impl RunFile {
    /// Reads a run (`.gz` and `.zst` too); keeps the first `depth` documents of each query, best score first, equal ones in the
    /// order of the file. While it reads, memory grows with all lines of the file, whatever `depth`: queries need not stand together, and
    /// the best of one are known at the end only. A line takes about 80 bytes, with a document's id of 20 letters.
    ///
    /// # Errors
    /// A file that cannot be read, or has no line; a line of another form, with its number; a document twice for a query.
    pub fn open(path: &Path, depth: usize) -> Result<RunFile, DataError> {
        let mut run = RunFile::default();
        each_line(path, &mut |_, line| run.add(line))?;
        if run.queries.is_empty() {
            return Err(DataError::file(path, "expected lines of a run, found none; get the file again"));
        }
        for (query, documents) in &mut run.queries {
            // Scores are finite; the sort keeps equal ones in their order.
            documents.sort_by(|a, b| b.1.total_cmp(&a.1));
            let mut seen = std::collections::HashSet::new();
            if let Some((twice, _)) = documents.iter().find(|(id, _)| !seen.insert(id)) {
                let what =
                    format!("the query {query} has the document {twice} twice; a run ranks a document once");
                return Err(DataError::file(path, what));
            }
            documents.truncate(depth);
        }
        Ok(run)
    }

    /// A run of documents that were just ranked: each query's, best first.
    pub fn of(queries: impl IntoIterator<Item = (String, Vec<(String, f64)>)>) -> RunFile {
        RunFile { queries: queries.into_iter().collect() }
    }

    fn add(&mut self, line: &str) -> Result<(), String> {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [query, _, document, _, score, _] = fields[..] else {
            let what = "expected 6 fields (query, Q0, document, rank, score, tag)";
            return Err(format!("{what}, found {}", fields.len()));
        };
        let finite = score.parse().ok().filter(|s: &f64| s.is_finite());
        let score = finite.ok_or_else(|| format!("expected a finite number as score, found {score:?}"))?;
        let documents = match self.queries.get_mut(query) {
            Some(documents) => documents,
            None => self.queries.entry(query.to_owned()).or_default(),
        };
        // -0 is 0 to everybody who reads a run.
        documents.push((document.to_owned(), score + 0.0));
        Ok(())
    }

    /// Ids and scores of a query's documents, best first; none where the run has no such query.
    pub fn documents(&self, query: &str) -> &[(String, f64)] {
        self.queries.get(query).map_or(&[], Vec::as_slice)
    }

    /// The queries' ids, in the order of their names.
    pub fn queries(&self) -> impl Iterator<Item = &str> {
        self.queries.keys().map(String::as_str)
    }

    /// How many queries have documents.
    pub fn len(&self) -> usize {
        self.queries.len()
    }

    /// Whether there is none; never so after [`RunFile::open`].
    pub fn is_empty(&self) -> bool {
        self.queries.is_empty()
    }

    /// Every document's id, as often as it is ranked.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.queries.values().flatten().map(|(id, _)| id.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str, depth: usize) -> Result<RunFile, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.trec");
        std::fs::write(&path, text).unwrap();
        RunFile::open(&path, depth).map_err(|e| e.to_string())
    }

    #[test]
    fn documents_come_by_score_and_equal_ones_in_their_order() {
        let run = open(
            "q1 Q0 a 1 2.0 t\nq2 Q0 z 1 1 t\n\nq1\tQ0\tb\t2\t3e0\tt\nq1 Q0 c 3 2 t\nq1 Q0 d 4 -1 t\n",
            3,
        )
        .unwrap();
        let ids: Vec<&str> = run.documents("q1").iter().map(|d| d.0.as_str()).collect();
        assert_eq!((ids, run.len(), run.documents("q3").len()), (vec!["b", "a", "c"], 2, 0));
        assert_eq!(run.ids().count(), 4);
    }

    #[test]
    fn every_fault_says_where_and_what() {
        for (text, part) in [
            ("q Q0 a 1 2.0 t\nq Q0 a 1\n", "line 2: expected 6 fields"),
            ("q Q0 a 1 high t\n", "line 1: expected a finite number as score, found \"high\""),
            ("q Q0 a 1 nan t\n", "finite number"),
            ("q Q0 a 1 2 t\nq Q0 a 2 1 t\n", "the query q has the document a twice"),
            ("\n", "expected lines of a run"),
        ] {
            let error = open(text, 9).unwrap_err();
            assert!(error.contains("run.trec") && error.contains(part), "{error}");
        }
    }
}
