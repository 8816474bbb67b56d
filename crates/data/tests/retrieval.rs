//! Training data of retrievers: every form is read, and every fault says where and what.

use std::path::{Path, PathBuf};

use tercio_data::retrieval::{ContrastiveChoice, Relevance, check_retrieval};
use tercio_data::{RetrievalExample, RetrievalExamples};

fn file(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn open(name: &str, text: &str) -> RetrievalExamples {
    let dir = tempfile::tempdir().unwrap();
    RetrievalExamples::open(&file(dir.path(), name, text), &dir.path().join("cache")).unwrap()
}

fn texts(example: &RetrievalExample, relevance: Relevance) -> Vec<&str> {
    example.of(relevance).map(|p| p.passage.text.as_str()).collect()
}

const DPR: &str = r#"{"dataset": "nq", "question": "who?", "answers": ["a", "b"],
  "positive_ctxs": [{"title": "T", "text": "yes", "score": 1000, "title_score": 1, "passage_id": "7"},
                    {"title": "", "text": "also", "score": 3.5, "psg_id": 8}],
  "negative_ctxs": [{"title": "N", "text": "no"}],
  "hard_negative_ctxs": [{"title": "H", "text": "hard 1"}, {"title": "H", "text": "hard 2"}]}"#;

#[test]
fn dprs_files_are_read() {
    let examples = open("train.json", &format!("[{DPR}]"));
    let e = examples.get(0).unwrap();
    assert_eq!((examples.len(), e.question.as_str(), e.answers.len()), (1, "who?", 2));
    assert_eq!(texts(&e, Relevance::Positive), ["yes", "also"]);
    assert_eq!(texts(&e, Relevance::HardNegative), ["hard 1", "hard 2"]);
    assert_eq!(texts(&e, Relevance::Negative), ["no"]);
    let ids: Vec<_> = e.passages.iter().map(|p| p.passage.id.as_str()).collect();
    assert_eq!(ids, ["7", "8", "", "", ""]);
    assert!(e.passages.iter().all(|p| p.passage.score.is_none()), "DPR's scores are no scale");
    let positions: Vec<_> = e.passages.iter().map(|p| p.passage.file_position).collect();
    assert_eq!(positions, [0, 1, 2, 3, 4]);
    assert!(e.scored(5).unwrap_err().to_string().contains("`score` on every passage"));
}

#[test]
fn fids_files_are_read_by_score_and_by_answer() {
    let text = r#"{"id": "x", "question": "q", "ctxs": [
        {"id": "1", "title": "T", "text": "low", "score": "1", "hasanswer": false},
        {"id": "2", "title": "T", "text": "high", "score": 2, "has_answer": true},
        {"id": "3", "title": "T", "text": "middle", "score": 1.5}]}"#
        .replace('\n', " ");
    let e = open("train.jsonl", &text).get(0).unwrap();
    let scored: Vec<_> = e.scored(2).unwrap().iter().map(|(p, s)| (p.text.clone(), *s)).collect();
    assert_eq!(scored, [("high".to_owned(), 2.0), ("middle".to_owned(), 1.5)]);
    assert_eq!(texts(&e, Relevance::Positive), ["high"]);
    assert_eq!(texts(&e, Relevance::HardNegative), ["low"]);
    assert_eq!(texts(&e, Relevance::Unknown), ["middle"]);
    let some = open("some.jsonl", r#"{"question": "q", "ctxs": [{"text": "a", "score": 1}, {"text": "b"}]}"#);
    let error = some.get(0).unwrap().scored(1).unwrap_err().to_string();
    assert!(error.contains("some.jsonl, line 1 (item 0): expected a `score`"), "{error}");
    assert!(error.contains("passage 1"), "{error}");
}

#[test]
fn triples_are_read_as_json_and_as_rows() {
    let text = r#"{"query": "q1", "positive": "p", "negatives": ["n1", {"_id": 5, "title": "T", "text": "n2"}]}
{"id": 9, "question": "q2", "positive": [{"docid": "d", "text": "p1"}, "p2"], "negative": "n"}"#;
    let examples = open("t.jsonl", text);
    let (a, b) = (examples.get(0).unwrap(), examples.get(1).unwrap());
    assert_eq!(
        (a.question.as_str(), a.id.clone(), b.question.as_str(), b.id.clone()),
        ("q1", 0.into(), "q2", 9.into())
    );
    assert_eq!(texts(&a, Relevance::HardNegative), ["n1", "n2"]);
    assert_eq!(a.passages[2].passage.id, "5");
    assert_eq!(
        (texts(&b, Relevance::Positive), texts(&b, Relevance::HardNegative)),
        (vec!["p1", "p2"], vec!["n"])
    );

    let rows = "\u{feff}q \"1\tp\tn\r\n\nq2\tp2\tn2\tn3\n";
    let examples = open("t.tsv", rows);
    let (a, b) = (examples.get(0).unwrap(), examples.get(1).unwrap());
    assert_eq!((examples.len(), a.question.as_str(), b.place.line), (2, "q \"1", 3));
    assert_eq!(
        (texts(&a, Relevance::HardNegative), texts(&b, Relevance::HardNegative)),
        (vec!["n"], vec!["n2", "n3"])
    );
}

#[test]
fn compressed_rows_are_read_and_keep_their_fingerprint() {
    let dir = tempfile::tempdir().unwrap();
    let rows = "a\tb\tc\n";
    let plain = RetrievalExamples::open(&file(dir.path(), "t.tsv", rows), &dir.path().join("cache")).unwrap();
    let packed = dir.path().join("t.tsv.zst");
    std::fs::write(&packed, zstd::encode_all(rows.as_bytes(), 1).unwrap()).unwrap();
    let packed = RetrievalExamples::open(&packed, &dir.path().join("cache")).unwrap();
    assert_eq!(plain.fingerprint(), packed.fingerprint());
    assert_eq!(packed.get(0).unwrap().question, "a");
}

#[test]
fn choices_are_drawn_by_key() {
    let hard: Vec<String> = (0..6).map(|i| format!("{{\"text\": \"h{i}\"}}")).collect();
    let text = format!(
        r#"[{{"question": "q", "positive_ctxs": [{{"text": "p0"}}, {{"text": "p1"}}], "hard_negative_ctxs": [{}],
            "negative_ctxs": [{{"text": "n0"}}, {{"text": "n1"}}]}}]"#,
        hard.join(", ")
    );
    let e = open("d.json", &text).get(0).unwrap();
    let take = |choice: ContrastiveChoice, seed, epoch| -> Vec<String> {
        e.contrastive(&choice, seed, epoch).unwrap().iter().map(|p| p.text.clone()).collect()
    };
    let first = ContrastiveChoice {
        hard_negatives: 2,
        other_negatives: 1,
        draw_positive: false,
        draw_negatives: false,
    };
    assert_eq!(take(first, 1, 1), ["p0", "h0", "h1", "n0"]);
    assert_eq!(take(first, 1, 2), ["p0", "h0", "h1", "n0"]);
    let many = ContrastiveChoice { hard_negatives: 7, other_negatives: 0, ..first };
    assert_eq!(take(many, 1, 1), ["p0", "h0", "h1", "h2", "h3", "h4", "h5", "n0"], "others stand in");
    let drawn = ContrastiveChoice { draw_positive: true, draw_negatives: true, ..first };
    let draws: Vec<_> = (0..40).map(|epoch| take(drawn, 3, epoch)).collect();
    assert_eq!(draws, (0..40).map(|epoch| take(drawn, 3, epoch)).collect::<Vec<_>>());
    assert_ne!(draws, (0..40).map(|epoch| take(drawn, 4, epoch)).collect::<Vec<_>>());
    for text in ["p0", "p1", "h0", "h1", "h2", "h3", "h4", "h5", "n0", "n1"] {
        assert!(draws.iter().flatten().any(|t| t == text), "{text} is never drawn");
    }
    assert!(draws.iter().all(|d| d.len() == 4 && d[1] != d[2]));
}

#[test]
fn every_fault_says_where_and_what() {
    for (name, text, parts) in [
        (
            "a.json",
            r#"[{"text": "q"}]"#,
            &["a.json, line 1 (item 0)", "`positive_ctxs`", "the keys text"][..],
        ),
        ("a.json", r#"[{}]"#, &["no key"]),
        ("a.json", "[\n[1]]", &["line 2", "a JSON object", "a list"]),
        (
            "a.json",
            r#"[{"question": "q", "positive_ctxs": {}}]"#,
            &["a list of passages in `positive_ctxs`", "an object"],
        ),
        (
            "a.json",
            r#"[{"question": "q", "positive_ctxs": [{"title": "t"}]}]"#,
            &["`positive_ctxs[0].text`", "none"],
        ),
        ("a.json", r#"[{"positive_ctxs": [{"text": "t"}]}]"#, &["`question`"]),
        ("a.jsonl", r#"{"query": 3, "positive": "p"}"#, &["`question`", "the number 3"]),
        ("a.jsonl", r#"{"positive": "p"}"#, &["a string in `query`"]),
        (
            "a.jsonl",
            r#"{"query": "q", "positive": "p", "negatives": [4]}"#,
            &["`negatives[0]`", "the number 4"],
        ),
        (
            "a.jsonl",
            r#"{"question": "q", "ctxs": [{"text": "t", "hasanswer": "yes"}]}"#,
            &["true or false", "\"yes\""],
        ),
        ("a.tsv", "q\tp\tn\nq\tp\n", &["a.tsv, line 2 (item 1)", "3 or more fields", "2 fields"]),
        ("a.tsv", "q\tp\tn\nq\t \tn\n", &["line 2", "field 2 (positive)"]),
        ("a.tsv", "\tp\tn\n", &["field 1 (query)"]),
    ] {
        let examples = open(name, text);
        let error = examples.get(examples.len() - 1).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.tsv");
    std::fs::write(&bad, b"q\tp\t\xff\n").unwrap();
    let error = RetrievalExamples::open(&bad, dir.path()).unwrap().get(0).unwrap_err().to_string();
    assert!(error.contains("0xff at byte 5"), "{error}");
    let empty = file(dir.path(), "empty.tsv", "\n\n");
    let error = RetrievalExamples::open(&empty, dir.path()).unwrap_err().to_string();
    assert!(error.contains("expected examples of retrieval, found none"), "{error}");
    let other = RetrievalExamples::open(Path::new("x.csv"), dir.path()).unwrap_err().to_string();
    assert!(other.contains(".tsv (query, positive"), "{other}");
    let e = open("t.jsonl", r#"{"question": "q", "ctxs": []}"#).get(0).unwrap();
    let choice = ContrastiveChoice {
        hard_negatives: 1,
        other_negatives: 0,
        draw_positive: true,
        draw_negatives: true,
    };
    assert!(e.contrastive(&choice, 0, 0).unwrap_err().to_string().contains("a positive passage"));
    assert!(e.scored(1).unwrap_err().to_string().contains("a question with passages"));
}

#[test]
fn a_check_counts_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "{}\n{}\n{{\"question\": 1}}\n",
        DPR.replace('\n', " "),
        r#"{"question": "q", "ctxs": [{"text": "a", "score": 1}]}"#
    );
    let path = file(dir.path(), "t.jsonl", &text);
    let mut faults = Vec::new();
    let report =
        check_retrieval(&path, &dir.path().join("cache"), &mut |e| faults.push(e.to_string())).unwrap();
    assert_eq!((report.items, report.good, report.bad, faults.len()), (3, 2, 1, 1));
    assert_eq!((report.with_positive, report.with_scores), (1, 1));
    assert_eq!(
        (report.positives.max, report.hard_negatives.max, report.negatives.mean, report.unknown.max),
        (2, 2, 0.5, 1)
    );
    assert!(faults[0].contains("line 3"), "{}", faults[0]);
}
