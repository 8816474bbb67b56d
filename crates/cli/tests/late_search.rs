//! `tercio index --kind plaid` and `tercio search` over it as processes: from texts to results, what was added and deleted since, filters,
//! ranks, and what is refused.

mod ranks_support;
mod support;

use std::path::Path;
use std::process::Output;

use ranks_support::start;
use serde_json::{Value, json};
use support::*;

struct Corner {
    place: Place,
    model: String,
}

impl Corner {
    fn new() -> Corner {
        let model = golden().join("colbert/model").to_str().unwrap().to_owned();
        let corner = Corner { place: Place::new(), model };
        corner.passages("passages.jsonl", 0..120);
        corner
    }
    fn path(&self, name: &str) -> String {
        self.place.path(name).to_str().unwrap().to_owned()
    }
    /// Some of the stored case's documents as passages.
    fn passages(&self, name: &str, rows: std::ops::Range<usize>) {
        let bytes = std::fs::read(golden().join("colbert/input.json")).unwrap();
        let input: Value = serde_json::from_slice(&bytes).unwrap();
        let texts = input["retrieval_documents"].as_object().unwrap();
        let line = |row: usize| {
            let text = &texts[&format!("doc{row}")];
            format!("{}\n", json!({"id": format!("doc{row}"), "title": "", "text": text}))
        };
        self.place.write(name, &rows.map(line).collect::<String>());
    }
    fn run(&self, words: &[&str]) -> Output {
        tercio(words).args(["--threads", "1"]).output().unwrap()
    }
    fn succeed(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }
    fn embed(&self, passages: &str, output: &str) {
        let (passages, output) = (self.path(passages), self.path(output));
        self.succeed(&[
            "embed",
            "--multi-vector",
            "--model_path",
            &self.model,
            "--passages",
            &passages,
            "--output",
            &output,
            "--no_title",
        ]);
    }
    fn index(&self, more: &[&str]) -> Output {
        let index = self.path("index");
        self.run(&[&["index", "--kind", "plaid", "--output", &index, "--json"], more].concat())
    }
    fn build(&self) {
        self.embed("passages.jsonl", "vectors");
        let (passages, vectors) = (self.path("passages.jsonl"), self.path("vectors"));
        let made = self.index(&["--passages", &passages, "--vectors", &vectors]);
        assert!(made.status.success(), "{}", stderr(&made));
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        assert_eq!(
            (&made["kind"], &made["passages"], &made["version"]),
            (&json!("plaid"), &json!(120), &json!(1))
        );
    }
    /// Ids that a question finds, in order.
    fn found(&self, question: &str, more: &[&str]) -> Vec<String> {
        let index = self.path("index");
        let words =
            ["search", question, "--index", &index, "--model_path", &self.model, "--json", "--n-docs", "5"];
        let found: Value = serde_json::from_str(&self.succeed(&[&words[..], more].concat())).unwrap();
        let ids = found["ctxs"].as_array().unwrap().iter();
        ids.map(|ctx| ctx["id"].as_str().unwrap().to_owned()).collect()
    }
}

#[test]
fn passages_are_found_added_deleted_and_filtered() {
    let corner = Corner::new();
    corner.build();
    let question = "who repaired the church bell?";
    let first = corner.found(question, &[]);
    assert_eq!(first.len(), 5);
    assert_eq!(corner.found(question, &["--probes", "100", "--rescore", "120", "--verify"]), first);

    // More passages at the end of the file.
    corner.passages("all.jsonl", 0..150);
    corner.passages("new.jsonl", 120..150);
    corner.embed("new.jsonl", "more");
    let (all, more) = (corner.path("all.jsonl"), corner.path("more"));
    let grown = corner.index(&["--append", "--passages", &all, "--vectors", &more]);
    assert!(grown.status.success(), "{}", stderr(&grown));
    let own = corner.found(question, &["--passages", &all]);
    assert!(
        own.len() == 5
            && own.iter().filter(|id| !first.contains(id)).all(|id| id[3..].parse::<usize>().unwrap() >= 120)
    );
    // Not twice, and not another file.
    let again = corner.index(&["--append", "--passages", &all, "--vectors", &more]);
    assert!(failure(&again).contains("not there"), "{}", stderr(&again));
    corner.passages("other.jsonl", 1..151);
    let other = corner.index(&["--append", "--passages", &corner.path("other.jsonl"), "--vectors", &more]);
    assert!(failure(&other).contains("\"doc0\""), "{}", stderr(&other));

    // Without the best.
    corner.place.write("gone.txt", &format!("{}\n{}\n", own[0], own[2]));
    let gone = corner.path("gone.txt");
    let deleted = corner.index(&["--delete", &gone]);
    assert!(deleted.status.success(), "{}", stderr(&deleted));
    let deleted: Value = serde_json::from_slice(&deleted.stdout).unwrap();
    assert_eq!((&deleted["passages"], &deleted["deleted"]), (&json!(148), &json!(2)));
    let left = corner.found(question, &["--passages", &all]);
    assert_eq!(left[..3], [own[1].clone(), own[3].clone(), own[4].clone()]);
    let twice = corner.index(&["--delete", &gone]);
    assert!(failure(&twice).contains("found 2 that it does not have"), "{}", stderr(&twice));

    // Only some.
    corner.place.write("only.txt", &format!("{}\nnobody\n{}\n", own[4], own[3]));
    let only = corner.path("only.txt");
    assert_eq!(
        corner.found(question, &["--passages", &all, "--only", &only]),
        [own[3].clone(), own[4].clone()]
    );
    let index = corner.path("index");
    let said = corner.run(&[
        "search",
        question,
        "--index",
        &index,
        "--model_path",
        &corner.model,
        "--passages",
        &all,
        "--only",
        &only,
    ]);
    assert!(stderr(&said).contains("1 of 3 ids") && stderr(&said).contains("nobody"), "{}", stderr(&said));
    corner.place.write("nothing.txt", "");
    assert!(corner.found(question, &["--passages", &all, "--only", &corner.path("nothing.txt")]).is_empty());
}

#[test]
fn ranks_find_what_one_process_finds() {
    let corner = Corner::new();
    corner.build();
    let input: Value =
        serde_json::from_slice(&std::fs::read(golden().join("colbert/input.json")).unwrap()).unwrap();
    let queries = input["retrieval_queries"].as_array().unwrap();
    let line = |(i, text): (usize, &Value)| format!("q{i}\t{}\n", text.as_str().unwrap());
    corner.place.write("queries.tsv", &queries.iter().enumerate().map(line).collect::<String>());
    let run = |name: &str, ranks: usize, share: &str| {
        let (output, index, file) = (corner.path(name), corner.path("index"), corner.path("queries.tsv"));
        let words = ["search", "--index", &index, "--queries", &file, "--output", &output, "--n-docs", "10"];
        let rest = ["--model_path", &corner.model, "--threads", "1", "--format", "trec", "--share", share];
        start(&corner.place.path(""), ranks, |_| tercio(&[&words[..], &rest].concat())).succeed();
        std::fs::read_to_string(Path::new(&output)).unwrap()
    };
    let one = run("one.run", 1, "questions");
    assert_eq!(one.lines().count(), 10 * queries.len());
    assert_eq!(run("two.run", 2, "questions"), one);
    assert_eq!(run("three.run", 3, "index"), one);
}

#[test]
fn what_does_not_go_together_is_refused() {
    let corner = Corner::new();
    corner.build();
    let index = corner.path("index");
    let usage = |words: &[&str], what: &str| {
        let output = corner.run(words);
        assert!(
            output.status.code() == Some(2) && stderr(&output).contains(what),
            "{words:?}: {}",
            stderr(&output)
        );
    };
    usage(&["search", "who?", "--index", &index], "--model_path");
    let search = ["search", "who?", "--index", &index, "--model_path", &corner.model];
    usage(&[&search[..], &["--rescore", "0"]].concat(), "--rescore");
    usage(&[&search[..], &["--resident"]].concat(), "--resident");
    usage(&[&search[..], &["--k1", "1"]].concat(), "--k1");
    let (passages, vectors) = (corner.path("passages.jsonl"), corner.path("vectors"));
    let plaid = ["index", "--kind", "plaid", "--output", &index, "--passages", &passages];
    usage(&plaid, "--vectors");
    usage(&[&plaid[..], &["--vectors", &vectors, "--lists", "3"]].concat(), "--lists has no bearing");
    usage(&["index", "--output", &index, "--passages", &passages, "--bits", "2"], "--bits has no bearing");
    let words = corner.path("words");
    corner.succeed(&["index", "--output", &words, "--passages", &passages]);
    corner.place.write("only.txt", "doc1\n");
    usage(&["search", "who?", "--index", &words, "--only", &corner.path("only.txt")], "--only is for");

    let fails = |words: &[&str], what: &str| {
        let output = corner.run(words);
        assert!(failure(&output).contains(what), "{words:?}: {}", stderr(&output));
    };
    fails(&[&plaid[..], &["--vectors", &vectors, "--bits", "3"]].concat(), "1, 2, 4 or 8");
    corner.passages("few.jsonl", 0..100);
    let few = corner.path("few.jsonl");
    let other = ["index", "--kind", "plaid", "--output", &index, "--passages", &few, "--vectors", &vectors];
    fails(&other, "not of the passages of");
    fails(&["index", "--kind", "plaid", "--output", &index, "--delete", &few], "does not have");
    // A folder of one vector a text, and the other way round.
    let flat = corner.path("flat");
    fails(
        &["index", "--kind", "flat", "--output", &flat, "--passages", &passages, "--vectors", &vectors],
        "vectors",
    );
    // A damaged file is named.
    let file = corner.place.path("index/v1-residuals");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[100] ^= 8;
    std::fs::write(&file, &bytes).unwrap();
    fails(&[&search[..], &["--verify"]].concat(), "v1-residuals");
    std::fs::write(&file, &bytes[1..]).unwrap();
    fails(&search, "v1-residuals");
}
