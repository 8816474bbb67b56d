//! What each round brought, as a table for people and for programs.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::inputs::Known;
use super::settings::LoopSettings;
use super::stage::{Part, Stage, Step};
use super::work::{ALONE, HITS};
use crate::error::TrainError;
use crate::run::progress::duration;
use crate::run::write_atomic;

/// Held-out questions with the passages that something found, and what a reader made of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What found the passages.
    pub passages: String,
    /// The round whose reader read them; `None`: nobody did.
    pub reader: Option<u32>,
    /// Share of questions with an answer in the text of the first 1, 5, 20 and 100 passages; `None` beyond n_docs.
    pub hits: [Option<f64>; HITS.len()],
    /// Share of exact matches.
    pub exact_match: Option<f64>,
    /// Mean token F1.
    pub f1: Option<f64>,
}

/// The seconds of a part's stages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Times {
    /// `bm25`, `untrained`, `round-1`, ...
    pub part: String,
    /// Stage and seconds, in order.
    pub stages: Vec<(String, f64)>,
}

/// What each round brought.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// In order: BM25, the untrained retriever, each round's retriever; what a round read stands before what its retriever found.
    pub rows: Vec<Row>,
    /// Where the time went.
    pub times: Vec<Times>,
}

impl Table {
    /// Of the stages that are up to date.
    pub(super) fn of(settings: &LoopSettings, known: &Known) -> Table {
        let mut rows = Vec::new();
        let hybrid = settings.search.hybrid;
        let with_words = |retriever: &str| match hybrid {
            true => format!("{retriever} and BM25"),
            false => retriever.to_owned(),
        };
        for round in 1..=settings.all.rounds {
            let stage = |step| Stage::of(round, step);
            let searched = match round {
                1 => "BM25".to_owned(),
                n => with_words(&format!("retriever of round {}", n - 1)),
            };
            let (search, scores) = (stage(Step::Search), stage(Step::Scores));
            rows.extend(row(known, searched, (search, ""), Some((round, scores, "dev_"))));
            let mut measured = |retriever: &str, stage: Stage| {
                if hybrid {
                    rows.extend(row(known, retriever.to_owned(), (stage, ALONE), None));
                }
                rows.extend(row(known, with_words(retriever), (stage, ""), Some((round, stage, ""))));
            };
            if round == 1 {
                measured("untrained retriever", Stage { part: Part::Untrained, step: Step::Measure });
            }
            measured(&format!("retriever of round {round}"), stage(Step::Measure));
        }
        let mut times: Vec<Times> = Vec::new();
        for stage in super::stages(settings.shape()) {
            let Some(done) = known.get(stage) else { continue };
            let name = stage.to_string();
            let (part, step) = name.split_once('/').unwrap_or((&name, ""));
            let at = match times.iter_mut().find(|times| times.part == part) {
                Some(times) => times,
                None => {
                    times.push(Times { part: part.to_owned(), stages: Vec::new() });
                    times.last_mut().expect("it was put there")
                }
            };
            at.stages.push((step.to_owned(), done.seconds));
        }
        Table { rows, times }
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        let share = |value: Option<f64>| value.map_or("".into(), |v| format!("{:.1}", 100.0 * v));
        let mut head = vec!["passages found by".to_owned(), "reader of round".to_owned()];
        head.extend(HITS.map(|k| format!("hits@{k}")));
        head.extend(["exact match", "F1"].map(str::to_owned));
        let mut lines = vec![head];
        for row in &self.rows {
            let mut line = vec![row.passages.clone(), row.reader.map_or("".into(), |n| n.to_string())];
            line.extend(row.hits.map(share));
            line.extend([share(row.exact_match), share(row.f1)]);
            lines.push(line);
        }
        let mut out = aligned(&lines);
        out.push('\n');
        for times in &self.times {
            let total = times.stages.iter().map(|(_, seconds)| seconds).sum();
            let each: Vec<String> = times
                .stages
                .iter()
                .map(|(stage, seconds)| format!("{stage} {}", duration(*seconds)))
                .collect();
            out += &format!("- {}: {} ({})\n", times.part, duration(total), each.join(", "));
        }
        out
    }

    /// Writes `table.md` and `table.json` into a folder.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), TrainError> {
        let mut json = serde_json::to_vec_pretty(self).expect("plain JSON");
        json.push(b'\n');
        write_atomic(&dir.join("table.json"), &json)?;
        Ok(write_atomic(&dir.join("table.md"), self.markdown().as_bytes())?)
    }
}

/// A row, where its stages are known: where passages were found, and the round, the stage and the prefix of the figures of who read them.
fn row(
    known: &Known,
    passages: String,
    found: (Stage, &str),
    read: Option<(u32, Stage, &str)>,
) -> Option<Row> {
    let figure = |stage: Stage, before: &str, name: &str| {
        known.get(stage)?.figures.get(&format!("{before}{name}")).and_then(Value::as_f64)
    };
    if !known.has(found.0) || read.is_some_and(|(_, stage, _)| !known.has(stage)) {
        return None;
    }
    Some(Row {
        passages,
        reader: read.map(|(round, ..)| round),
        hits: HITS.map(|k| figure(found.0, found.1, &format!("hits@{k}"))),
        exact_match: read.and_then(|(_, stage, before)| figure(stage, before, "exact_match")),
        f1: read.and_then(|(_, stage, before)| figure(stage, before, "f1")),
    })
}

/// Cells as a table of Markdown, columns as wide as their widest cell; the first line is the head.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines[0].len();
    let width = |c: usize| lines.iter().map(|line| line[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        let cells: Vec<String> = line
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(c, (cell, width))| {
                    if c == 0 { format!("{cell:width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        out += &format!("| {} |\n", cells.join(" | "));
        if i == 0 {
            let rules: Vec<String> = widths
                .iter()
                .enumerate()
                .map(|(c, width)| if c == 0 { "-".repeat(*width) } else { "-".repeat(width - 1) + ":" })
                .collect();
            out += &format!("| {} |\n", rules.join(" | "));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_and_leave_out_what_is_not_known() {
        let row = |passages: &str, hits| Row {
            passages: passages.into(),
            reader: Some(1),
            hits,
            exact_match: Some(0.5),
            f1: None,
        };
        let times = vec![Times {
            part: "round-1".into(),
            stages: vec![("search".into(), 1.0), ("reader".into(), 61.0)],
        }];
        let table = Table {
            rows: vec![
                row("BM25", [Some(0.661), Some(0.874), None, None]),
                row("untrained retriever", [Some(0.0), Some(1.0), None, None]),
            ],
            times,
        };
        let want = "\
| passages found by   | reader of round | hits@1 | hits@5 | hits@20 | hits@100 | exact match | F1 |
| ------------------- | --------------: | -----: | -----: | ------: | -------: | ----------: | -: |
| BM25                |               1 |   66.1 |   87.4 |         |          |        50.0 |    |
| untrained retriever |               1 |    0.0 |  100.0 |         |          |        50.0 |    |

- round-1: 1:02 (search 0:01, reader 1:01)
";
        assert_eq!(table.markdown(), want);
    }
}
