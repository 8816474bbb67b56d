//! `tercio answer --index`: a question about a whole collection, answered with the passages it rests on.

mod rounds_support;
mod support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use rounds_support::collection;
use serde_json::Value;
use support::{Place, failure, finish, golden, stderr, tercio};

struct Corner {
    place: Place,
}

impl Corner {
    /// A collection with an index of words.
    fn new() -> Corner {
        let place = Place::new();
        place.write("passages.tsv", &collection());
        let corner = Corner { place };
        let (passages, index) = (corner.text("passages.tsv"), corner.text("index"));
        let output =
            corner.run(&["index", "--kind", "bm25", "--passages", &passages, "--output", &index], "");
        assert!(output.status.success(), "{}", stderr(&output));
        corner
    }
    fn text(&self, name: &str) -> String {
        self.place.path(name).to_str().unwrap().to_owned()
    }
    fn run(&self, words: &[&str], stdin: &str) -> Output {
        let mut command = tercio(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A command that has ended does not read it.
        let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
        finish(child)
    }
    fn answer(&self, flags: &[&str], stdin: &str) -> Output {
        let model = golden().join("fid_reader_t5v10/model");
        let (model, index) = (model.to_str().unwrap(), self.text("index"));
        let words = [
            "answer",
            "--model_path",
            model,
            "--index",
            &index,
            "--n_context",
            "4",
            "--generation_max_length",
            "8",
        ];
        self.run(&[&words[..], flags].concat(), stdin)
    }
}

fn told(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

const QUESTION: &str = "which river flows through the old town of Heron Bay";

#[test]
fn an_answer_comes_with_the_passages_it_rests_on() {
    let corner = Corner::new();
    let json: Value = serde_json::from_str(&told(&corner.answer(&["--json", QUESTION], ""))).unwrap();
    assert_eq!(json["question"], QUESTION);
    let passages = json["passages"].as_array().unwrap();
    assert_eq!(passages.len(), 4);
    let numbers = |key: &str| passages.iter().map(|p| p[key].as_f64().unwrap()).collect::<Vec<_>>();
    let (scores, found) = (numbers("score"), numbers("retrieval_score"));
    assert!(scores.is_sorted_by(|a, b| a >= b), "the reader's scores say the order: {scores:?}");
    assert!(found.iter().all(|&score| score > 0.0), "{found:?}");

    // The same as a search, and then the reader on what it found.
    let queries = corner.place.path("q.jsonl");
    std::fs::write(&queries, format!("{{\"id\": 0, \"question\": \"{QUESTION}\"}}\n")).unwrap();
    let (index, queries, out) = (corner.text("index"), corner.text("q.jsonl"), corner.text("found.jsonl"));
    let words = [
        "search",
        "--index",
        &index,
        "--queries",
        &queries,
        "--n_docs",
        "4",
        "--format",
        "jsonl",
        "--output",
        &out,
    ];
    told(&corner.run(&words, ""));
    let model = golden().join("fid_reader_t5v10/model");
    let words = [
        "answer",
        &out,
        "--model_path",
        model.to_str().unwrap(),
        "--generation_max_length",
        "8",
        "--json",
        "--scores",
    ];
    let by_hand: Value = serde_json::from_str(&told(&corner.run(&words, ""))).unwrap();
    assert_eq!(by_hand["answer"], json["answer"]);
    let mut want: Vec<f64> =
        by_hand["scores"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    want.sort_by(|a, b| b.total_cmp(a));
    assert_eq!(scores, want);

    // For people: the answer, then the passages with both scores.
    let text = told(&corner.answer(&["--question", QUESTION], ""));
    let mut lines = text.lines();
    assert_eq!(lines.next().unwrap(), json["answer"].as_str().unwrap());
    assert!(lines.next().unwrap().starts_with(&format!("  1. [{}] ", passages[0]["id"].as_str().unwrap())));
    assert_eq!(text.matches("     reader ").count(), 4, "{text}");
}

#[test]
fn one_question_after_the_other() {
    let corner = Corner::new();
    let asked = format!("{QUESTION}\n\n  who wrote it?  \r\n{QUESTION}");
    let text = told(&corner.answer(&["--interactive", "--json"], &asked));
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let questions: Vec<&str> = lines.iter().map(|line| line["question"].as_str().unwrap()).collect();
    assert_eq!(questions, [QUESTION, "who wrote it?", QUESTION]);
    assert_eq!(lines[0], lines[2], "nothing is left of the question between");
    let alone: Value = serde_json::from_str(&told(&corner.answer(&["--json", QUESTION], ""))).unwrap();
    assert_eq!(lines[0], alone);
    assert_eq!(told(&corner.answer(&["--interactive"], "")), "");
    // What no passage has a word of is answered by heart, and that is said.
    let output = corner.answer(&["--interactive", "--json"], "zzzyzx\n");
    assert!(stderr(&output).is_empty() || !stderr(&output).contains("panicked"));
    let line: Value = serde_json::from_str(told(&output).trim()).unwrap();
    assert_eq!(line["passages"].as_array().unwrap().len(), 0);
    let words = corner.answer(&["zzzyzx"], "");
    assert!(
        stderr(&words).contains("no passage was found; the reader answers by heart"),
        "{}",
        stderr(&words)
    );
}

#[test]
fn what_does_not_go_together_is_refused() {
    let corner = Corner::new();
    let refused = |flags: &[&str], code: i32, with: &str| {
        let output = corner.answer(flags, "q\n");
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {}", stderr(&output));
        assert!(failure(&output).contains(with), "{with} in {}", stderr(&output));
    };
    refused(&[], 2, "required");
    refused(&["--passage", "t|x", "--question", "q"], 2, "--passage");
    refused(&["--depth", "0", "q"], 2, "--depth 0");
    refused(&["--interactive", "--passages", "/no/such.tsv"], 1, "/no/such.tsv");
    let model = golden().join("fid_reader_t5v10/model");
    let model = model.to_str().unwrap();
    let interactive = corner.run(&["answer", "--model_path", model, "--interactive"], "");
    assert_eq!(interactive.status.code(), Some(2));
    let gone = corner.run(&["answer", "--model_path", model, "--index", "/no/such", "q"], "");
    assert!(failure(&gone).contains("/no/such"), "{}", stderr(&gone));
    // A collection that is another one by now.
    corner.place.write("passages.tsv", &collection().replace("Heron", "Hero"));
    refused(&["q"], 1, "passages.tsv");
    // An index that was damaged.
    let index: PathBuf = corner.place.path("index");
    corner.place.write("passages.tsv", &collection());
    assert!(corner.answer(&["--json", QUESTION], "").status.success());
    cut(&index);
    refused(&["q"], 1, "index");
}

/// Cuts the largest file of a folder short.
fn cut(folder: &Path) {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let largest = files.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let bytes = std::fs::read(&largest).unwrap();
    std::fs::write(&largest, &bytes[..bytes.len() / 2]).unwrap();
}
