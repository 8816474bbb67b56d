//! `tercio eval retrieval` and `tercio fuse` as processes: figures, tables, comparisons, files, and what is refused.

mod support;

use std::fs;
use std::process::{Output, Stdio};

use serde_json::{Value, json};
use support::{failure, finish, golden, stderr, tercio};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }
    fn text(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }
    fn write(&self, name: &str, content: &str) -> String {
        fs::write(self.0.path().join(name), content).unwrap();
        self.text(name)
    }
}

fn run(words: &[&str]) -> Output {
    let mut command = tercio(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap())
}

fn stdout(words: &[&str]) -> String {
    let output = run(words);
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn stored(name: &str) -> String {
    golden().join("eval").join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_run_is_measured_against_judgements() {
    let place = Place::new();
    let (run_file, qrels, per_query) =
        (stored("run.txt"), stored("qrels.txt"), place.text("new/per_query.jsonl"));
    let expected: Value =
        serde_json::from_slice(&fs::read(golden().join("eval/ranking_expected.json")).unwrap()).unwrap();
    let flags = [
        "eval",
        "retrieval",
        "--run",
        &run_file,
        "--qrels",
        &qrels,
        "--metrics",
        "ndcg_cut_10,map",
        "recall@100",
    ];
    let names = ["ndcg_cut_10", "map", "recall_100"];
    for (missing, key) in
        [("zero", "mean_counting_absent_queries_as_zero"), ("skip", "mean_over_queries_in_both")]
    {
        let words = [&flags[..], &["--json", "--missing", missing, "--per_query", &per_query]].concat();
        let report: Value = serde_json::from_str(&stdout(&words)).unwrap();
        for (own, name) in ["ndcg@10", "map", "recall@100"].into_iter().zip(names) {
            let (found, mean) =
                (report["metrics"][own].as_f64().unwrap(), expected[key][name].as_f64().unwrap());
            assert!((found - mean).abs() < 1e-9, "{own}: {found}, not {mean}");
        }
        assert_eq!((&report["missing"], &report["judged_queries"]), (&json!(1), &json!(12)));
        let lines = fs::read_to_string(&per_query).unwrap();
        assert_eq!(lines.lines().count() as u64, report["queries"].as_u64().unwrap());
        let first: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        let map = expected["per_query"]["q0"]["map"].as_f64().unwrap();
        assert!(first["query"] == "q0" && (first["map"].as_f64().unwrap() - map).abs() < 1e-9, "{first}");
    }
    let text = stdout(&flags);
    assert!(text.contains("1 missing in the run (counted as 0)") && text.starts_with("ndcg@10"), "{text}");
    let text = stdout(&[&flags[..6], &["--missing", "skip"]].concat());
    assert!(text.contains("missing in the run (left out)") && text.contains("precision@10"), "{text}");
}

#[test]
fn two_runs_are_compared() {
    let place = Place::new();
    let (run_file, qrels) = (stored("run.txt"), stored("qrels.txt"));
    // A worse run: the scores turned round.
    let text = fs::read_to_string(&run_file).unwrap();
    let worse: String = text
        .lines()
        .map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let score: f64 = fields[4].parse().unwrap();
            format!("{} Q0 {} {} {} worse\n", fields[0], fields[2], fields[3], -score)
        })
        .collect();
    let worse = place.write("worse.trec", &worse);
    let compare = |a: &str, b: &str, more: &[&str]| {
        let words =
            ["eval", "retrieval", "--run", a, "--qrels", &qrels, "--compare", b, "--metrics", "map", "ndcg"];
        stdout(&[&words[..], more].concat())
    };
    let report: Value = serde_json::from_str(&compare(&run_file, &worse, &["--json"])).unwrap();
    let test = &report["compare"]["tests"]["map"];
    let of = |name: &str| test[name].as_f64().unwrap();
    assert!((of("this") - of("other") - of("difference")).abs() < 1e-12, "{test}");
    assert!((of("this") - report["metrics"]["map"].as_f64().unwrap()).abs() < 1e-12);
    let back: Value = serde_json::from_str(&compare(&worse, &run_file, &["--json"])).unwrap();
    let reverse = &back["compare"]["tests"]["map"];
    assert!((of("difference") + reverse["difference"].as_f64().unwrap()).abs() < 1e-12);
    for p in ["p_t", "p_randomization"] {
        assert!((of(p) - reverse[p].as_f64().unwrap()).abs() < 1e-9 && (0.0..1.0).contains(&of(p)), "{test}");
    }
    assert_eq!((&test["better"], &test["worse"]), (&reverse["worse"], &reverse["better"]));
    let itself: Value = serde_json::from_str(&compare(&worse, &worse, &["--json"])).unwrap();
    let same = &itself["compare"]["tests"]["ndcg"];
    assert_eq!(
        (&same["difference"], &same["p_t"], &same["p_randomization"]),
        (&json!(0.0), &json!(1.0), &json!(1.0))
    );
    let text = compare(&run_file, &worse, &[]);
    assert!(text.contains("95% interval") && text.contains("over 12 queries of both"), "{text}");
    assert_eq!(text, compare(&run_file, &worse, &["--threads", "1"]));
}

const RETRIEVED: &str = r#"{"id": "a", "question": "q", "answers": ["Rome"], "ctxs": [{"text": "x", "score": 1}, {"text": "in ROME", "score": 9}]}
{"id": "b", "question": "q", "answers": ["Paris"], "ctxs": [{"text": "Paris"}, {"text": "y"}]}
{"id": "c", "question": "q", "answers": ["L.nd.n"], "ctxs": [{"text": "London"}]}
"#;

#[test]
fn hits_by_answer_are_counted_and_compared() {
    let place = Place::new();
    let data = place.write("r.jsonl", RETRIEVED);
    let flags = ["eval", "retrieval", "--data", &data, "--k", "1", "2", "50"];
    let text = stdout(&flags);
    assert!(
        text.starts_with(
            "hits@1         0.3333\nhits@2         0.6667\n3 questions, at most 2 passages each; 1 have fewer"
        ),
        "{text}"
    );
    assert!(text.contains("left out: hits@50, deeper than the 2 passages"), "{text}");
    let report: Value =
        serde_json::from_str(&stdout(&[&flags[..], &["--json", "--answer_match", "regex"]].concat()))
            .unwrap();
    assert_eq!(report["left_out"], json!(["hits@50"]));
    assert_eq!((&report["counts"], &report["questions"]), (&json!([2, 3]), &json!(3)));
    assert_eq!(report["metrics"].as_object().unwrap().len(), 2, "no figure of a depth that no question has");
    let other = place.write("s.jsonl", &RETRIEVED.replace("in ROME", "nowhere"));
    let words = [&flags[..], &["--compare", &other, "--json"]].concat();
    let report: Value = serde_json::from_str(&stdout(&words)).unwrap();
    let test = &report["compare"]["tests"]["hits@2"];
    assert_eq!(
        (&test["better"], &test["worse"], &test["p_randomization"]),
        (&json!(1), &json!(0), &json!(1.0))
    );
    assert_eq!(report["compare"]["report"]["counts"], json!([1, 1]));
}

#[test]
fn runs_become_one() {
    let place = Place::new();
    let a = place.write("a.trec", "q1 Q0 x 1 9 a\nq1 Q0 y 2 8 a\nq2 Q0 x 1 1 a\n");
    let b = place.write("b.trec", "q1 Q0 y 1 0.5 b\nq1 Q0 z 2 0.25 b\n");
    let output = place.text("new/c.trec");
    let fuse = |more: &[&str]| {
        let words = ["fuse", "--runs", &a, &b, "--output", &output];
        let text = stdout(&[&words[..], more].concat());
        (text, fs::read_to_string(&output).unwrap())
    };
    let (text, lines) = fuse(&[]);
    assert!(text.contains("2 queries of 2 runs, 1 of them in some"), "{text}");
    let ranked = |lines: &str| -> Vec<String> {
        lines
            .lines()
            .map(|l| {
                l.split(' ')
                    .enumerate()
                    .filter(|(i, _)| *i != 4)
                    .map(|(_, f)| f)
                    .collect::<Vec<_>>()
                    .join(" ")
            })
            .collect()
    };
    assert_eq!(ranked(&lines), ["q1 Q0 y 1 fused", "q1 Q0 x 2 fused", "q1 Q0 z 3 fused", "q2 Q0 x 1 fused"]);
    let (_, lines) = fuse(&[
        "--method",
        "weighted",
        "--weights",
        "3,1",
        "--normalise",
        "none",
        "--depth",
        "1",
        "--tag",
        "w",
        "--json",
    ]);
    // x: 3 x 9 and b's least; y: 3 x 8 and 0.5.
    assert_eq!(lines, "q1 Q0 x 1 27.25 w\nq2 Q0 x 1 3 w\n");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let place = Place::new();
    let (run_file, qrels) = (stored("run.txt"), stored("qrels.txt"));
    let data = place.write("r.jsonl", RETRIEVED);
    let bad = place.write("bad.txt", "q1 0 a 1\nq1 0 b\n");
    let with_run = ["eval", "retrieval", "--run", &run_file, "--qrels", &qrels];
    let fuse = ["fuse", "--output", &place.text("c.trec"), "--runs", &run_file];
    for (words, code, part) in [
        (vec!["eval", "retrieval"], 2, "--data"),
        (vec!["eval", "retrieval", "--run", &run_file], 2, "--qrels"),
        ([&with_run[..], &["--data", &data]].concat(), 2, "cannot be used"),
        ([&with_run[..], &["--metrics", "bpref"]].concat(), 2, "--metrics: expected ndcg"),
        ([&with_run[..], &["--relevance_level", "0"]].concat(), 2, "expected 1 or more"),
        ([&with_run[..], &["--draws", "0"]].concat(), 2, "--draws 0"),
        (vec!["eval", "retrieval", "--data", &data, "--k", "0"], 2, "--k 0"),
        (
            vec!["eval", "retrieval", "--run", &run_file, "--qrels", &bad],
            1,
            "bad.txt: line 2: expected 4 fields",
        ),
        (vec!["eval", "retrieval", "--run", &qrels, "--qrels", &qrels], 1, "line 1: expected 6 fields"),
        ([&with_run[..], &["--per_query", &run_file]].concat(), 1, "would replace the file"),
        (vec!["eval", "retrieval", "--data", "/nowhere.json"], 1, "nowhere.json"),
        ([&fuse[..], &["--weights", "1", "2"]].concat(), 2, "a weight for each of 1 lists, found 2"),
        ([&fuse[..], &["--depth", "0"]].concat(), 2, "--depth 0"),
        ([&fuse[..], &["--k", "-1"]].concat(), 2, "a k of 0 or more"),
        ([&fuse[..], &["--weights", "-2"]].concat(), 2, "weights of 0 or more"),
        ([&fuse[..], &["--tag", "a b"]].concat(), 1, "the tag \"a b\""),
        (vec!["fuse", "--runs", &bad, "--output", &bad], 1, "would replace the file"),
    ] {
        let output = run(&words);
        let text = failure(&output);
        assert!(output.status.code() == Some(code) && text.contains(part), "{words:?}: {text}");
    }
    assert!(!fs::exists(place.text("c.trec")).unwrap());
}
