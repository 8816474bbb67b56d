//! Files of results: what the readers of the data crate find in them, ranks that no tie rule changes, names that a run cannot hold.

use serde_json::{Map, Value, json};
use tercio_data::has_answer::{AnswerMatcher, AnswerMode};
use tercio_data::retrieval::{Relevance, RunFile};
use tercio_data::{Passages, Questions, RetrievalExamples};
use tercio_search::Hit;
use tercio_search::output::{Format, Found, FoundPassage, ResultsFile, found_passages};
use tercio_search::ranking::trec_order;

fn question(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn passage(id: &str, score: f32) -> FoundPassage {
    FoundPassage {
        id: id.into(),
        title: "T".into(),
        text: format!("text of {id}"),
        score,
        has_answer: Some(id == "b"),
    }
}

fn found(id: &str, passages: Vec<FoundPassage>) -> Found {
    let old =
        json!({"id": id, "question": "who?", "answers": ["x"], "ctxs": [{"text": "old"}], "split": "dev"});
    Found { question: question(old), passages }
}

#[test]
fn fids_form_is_read_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let results = [found("q\t1", vec![passage("a b", 0.1), passage("b", -3.5e-8)]), found("q2", vec![])];
    for (name, format) in [("new/r.json", Format::Fid), ("r.jsonl", Format::Jsonl)] {
        let path = dir.path().join(name);
        let mut file = ResultsFile::create(&path, format).unwrap();
        results.iter().for_each(|f| file.push(&format.render(f, "t").unwrap()).unwrap());
        assert!(!path.exists(), "it appears when it is whole");
        assert_eq!(file.finish().unwrap(), path);

        let questions = Questions::open(&path, dir.path()).unwrap();
        assert_eq!(questions.len(), 2);
        let raw = questions.get_raw(0).unwrap();
        assert_eq!(
            (&raw["id"], &raw["split"], &raw["answers"]),
            (&json!("q\t1"), &json!("dev"), &json!(["x"]))
        );
        assert_eq!(
            raw["ctxs"],
            json!([
                {"id": "a b", "title": "T", "text": "text of a b", "score": 0.1, "hasanswer": false},
                {"id": "b", "title": "T", "text": "text of b", "score": -3.5e-8, "hasanswer": true},
            ])
        );
        let scores: Vec<f32> =
            questions.get(0).unwrap().ctxs.iter().map(|c| c.score.unwrap() as f32).collect();
        assert_eq!(scores, [0.1, -3.5e-8], "the digits are enough for 32 bits");
        let examples = RetrievalExamples::open(&path, dir.path()).unwrap();
        assert_eq!(examples.get(0).unwrap().of(Relevance::Positive).count(), 1);
        assert_eq!(questions.get(1).unwrap().ctxs, []);
    }
    // As FiD writes it: a list with an indent of 4.
    let text = std::fs::read_to_string(dir.path().join("new/r.json")).unwrap();
    assert!(
        text.starts_with("[\n    {\n        \"id\": \"q\\t1\",") && text.ends_with("\n    }\n]\n"),
        "{text}"
    );
}

#[test]
fn a_runs_ranks_survive_every_rule_for_ties() {
    // Names in the order that trec_eval would turn round, ties at every kind of number.
    let passages: Vec<FoundPassage> =
        [2.0, 2.0, 2.0, 1.5, 1.5, 0.0, -0.0, 0.0, -7.25, -7.25, f32::MIN_POSITIVE - 1.0]
            .into_iter()
            .enumerate()
            .map(|(i, score)| passage(&format!("d{i:02}"), score))
            .collect();
    let names: Vec<String> = passages.iter().map(|p| p.id.clone()).collect();
    let mut text = Format::Trec.render(&found("q1", passages), "sys").unwrap();
    text.extend(
        Format::Trec.render(&found("q2", vec![passage("z", 1e-30), passage("a", 1e-30)]), "sys").unwrap(),
    );
    assert_eq!(Format::Trec.render(&found("q3", vec![]), "sys").unwrap(), b"");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.trec");
    let mut file = ResultsFile::create(&path, Format::Trec).unwrap();
    file.push(&text).unwrap();
    file.finish().unwrap();
    let lines = String::from_utf8(text).unwrap();
    assert!(lines.starts_with("q1 Q0 d00 1 2 sys\nq1 Q0 d01 2 1.9999999 sys\n"), "{lines}");
    let run = RunFile::open(&path, usize::MAX).unwrap();
    let mut documents: Vec<(&str, f64)> =
        run.documents("q1").iter().map(|(id, s)| (id.as_str(), *s)).collect();
    assert!(documents.windows(2).all(|w| (w[0].1 as f32) > w[1].1 as f32), "{documents:?}");
    documents.sort_by(|a, b| trec_order(*a, *b));
    assert_eq!(documents.iter().map(|d| d.0).collect::<Vec<_>>(), names);
    assert_eq!((run.len(), run.documents("q2")[0].0.as_str()), (2, "z"));
}

#[test]
fn what_a_form_cannot_hold_is_refused() {
    let render = |f: &Found, tag: &str| Format::Trec.render(f, tag).map_err(|e| e.to_string());
    let one = |query: &str, id: &str| found(query, vec![passage(id, 1.0)]);
    for (f, tag, part) in [
        (one("q 1", "a"), "t", "the query \"q 1\" cannot stand in a run"),
        (one("", "a"), "t", "the query \"\""),
        (one("q", "a\tb"), "t", "the document \"a\\tb\""),
        (one("q", "a\u{a0}b"), "t", "the document"),
        (one("q", "a"), "my run", "the tag \"my run\""),
    ] {
        let error = render(&f, tag).unwrap_err();
        assert!(error.contains(part) && error.contains("write JSON"), "{error}");
    }
    let nameless = Found { question: question(json!({"question": "q"})), passages: vec![] };
    assert!(render(&nameless, "t").unwrap_err().contains("`id` on every question"));
    let numbered = Found { question: question(json!({"id": 7})), passages: vec![passage("a", 1.0)] };
    assert_eq!(render(&numbered, "t").unwrap(), b"7 Q0 a 1 1 t\n");
    for format in [Format::Fid, Format::Jsonl, Format::Trec] {
        for score in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = format.render(&found("q", vec![passage("a", score)]), "t").unwrap_err().to_string();
            assert!(error.contains("\"a\" has the score"), "{error}");
        }
    }
    let lowest = found("q", vec![passage("a", f32::MIN), passage("b", f32::MIN)]);
    assert!(render(&lowest, "t").unwrap_err().contains("no finite score"));
    let twice = found("q", vec![passage("a", 2.0), passage("b", 1.5), passage("a", 1.0)]);
    let error = render(&twice, "t").unwrap_err();
    assert!(error.contains("query q: the document a was found twice"), "{error}");
    assert!(Format::Jsonl.render(&twice, "t").is_ok());
    let dir = tempfile::tempdir().unwrap();
    for (name, format, part) in [
        ("r.jsonl", Format::Fid, "another name than .jsonl"),
        ("r.json", Format::Trec, "another name than .json"),
        ("r.out", Format::Fid, "ends in .json"),
        ("r", Format::Jsonl, "ends in .jsonl"),
        ("r.trec.gz", Format::Trec, "without .gz"),
    ] {
        let error = ResultsFile::create(&dir.path().join(name), format).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(part), "{error}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn rows_are_read_from_the_collection_and_none_is_made_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.jsonl");
    std::fs::write(
        &path,
        "{\"_id\": \"x\", \"text\": \"in Rome\"}\n{\"_id\": \"y\", \"title\": \"Rome\", \"text\": \"t\"}\n",
    )
    .unwrap();
    let passages = Passages::open(&path, dir.path()).unwrap();
    let answers = AnswerMatcher::new(&["rome"], AnswerMode::Words).unwrap();
    let hits = [Hit { row: 1, score: 2.0 }, Hit { row: 0, score: 1.0 }];
    let found = found_passages(&passages, &hits, Some(&answers)).unwrap();
    let seen: Vec<(&str, f32, Option<bool>)> =
        found.iter().map(|p| (p.id.as_str(), p.score, p.has_answer)).collect();
    assert_eq!(seen, [("y", 2.0, Some(false)), ("x", 1.0, Some(true))]);
    assert_eq!(found_passages(&passages, &hits, None).unwrap()[0].has_answer, None);
    for row in [2, u64::MAX] {
        let error = found_passages(&passages, &[Hit { row, score: 1.0 }], None).unwrap_err().to_string();
        assert!(error.contains("has 2 items"), "{error}");
    }
}
