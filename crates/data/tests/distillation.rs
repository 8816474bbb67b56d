//! Lists of documents with a teacher's scores become questions with passages, and every fault says where.

use std::path::Path;

use tercio_data::RetrievalExamples;
use tercio_data::convert::distillation_lists;

fn convert(dir: &Path, lists: &str, most: usize) -> Result<(u64, u64), String> {
    let path = |name: &str| dir.join(name);
    std::fs::write(path("lists.jsonl"), lists).unwrap();
    let files = (path("queries.tsv"), path("documents.jsonl"));
    distillation_lists(&path("lists.jsonl"), (&files.0, &files.1), dir, most, &path("out.jsonl"))
        .map(|done| (done.items, done.passages))
        .map_err(|e| e.to_string())
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    // MS MARCO's two columns, and PyLate's names.
    std::fs::write(dir.path().join("queries.tsv"), "7\twhat is \"a\" river\n8\twho\n").unwrap();
    let documents = "{\"document_id\": \"11\", \"text\": \"one\"}\n{\"document_id\": 12, \"text\": \"two\"}\n\
                     {\"document_id\": \"13\", \"text\": \"three\", \"title\": \"T\"}\n";
    std::fs::write(dir.path().join("documents.jsonl"), documents).unwrap();
    dir
}

#[test]
fn lists_of_all_forms() {
    let dir = folder();
    let lists = "{\"query_id\": 7, \"document_ids\": [\"12\", 11], \"scores\": [0.5, 2]}\n\
                 {\"query_id\": \"8\", \"document_ids\": \"['13', '11', '12']\", \"scores\": \"[3.5, 1, 2]\"}\n\
                 [8, [11, 1.5], [13, -2]]\n[7, [[12, 1], [13, 0]]]\n";
    assert_eq!(convert(dir.path(), lists, 2), Ok((4, 8)));
    let found = RetrievalExamples::open(&dir.path().join("out.jsonl"), dir.path()).unwrap();
    let get = |i: usize| {
        let example = found.get(i).unwrap();
        let passages = example.scored(9).unwrap();
        let passages: Vec<(String, f64)> = passages.iter().map(|(p, s)| (p.text.clone(), *s)).collect();
        (example.question, passages)
    };
    let texts = |list: &[(&str, f64)]| list.iter().map(|(t, s)| (t.to_string(), *s)).collect::<Vec<_>>();
    assert_eq!(get(0), ("what is \"a\" river".into(), texts(&[("one", 2.0), ("two", 0.5)])));
    assert_eq!(get(1), ("who".into(), texts(&[("three", 3.5), ("one", 1.0)])));
    assert_eq!(get(2).1, texts(&[("one", 1.5), ("three", -2.0)]));
    assert_eq!(get(3).1, texts(&[("two", 1.0), ("three", 0.0)]));
}

#[test]
fn every_fault_says_where() {
    let dir = folder();
    for (line, part) in [
        ("{\"query_id\": 9, \"document_ids\": [11], \"scores\": [1]}", "the query \"9\" is not in"),
        ("{\"query_id\": 7, \"document_ids\": [14], \"scores\": [1]}", "the document \"14\" is not in"),
        ("{\"query_id\": 7, \"document_ids\": [11, 12], \"scores\": [1]}", "as many `scores`"),
        ("{\"query_id\": 7, \"document_ids\": \"[11\", \"scores\": [1]}", "`document_ids`"),
        ("{\"query_id\": 7, \"scores\": [1]}", "`document_ids`"),
        ("{\"query_id\": 7, \"document_ids\": [11], \"scores\": [null]}", "finite score"),
        ("[7, 11, 12]", "[document, score]"),
        ("[]", "expected `query_id`"),
        ("7", "expected `query_id`"),
        ("{", "JSON"),
    ] {
        let error = convert(dir.path(), &format!("[7, [11, 1]]\n{line}\n"), 9).unwrap_err();
        assert!(error.contains("lists.jsonl") && error.contains("line 2") && error.contains(part), "{error}");
        assert!(!dir.path().join("out.jsonl").exists());
    }
    assert!(convert(dir.path(), "\n", 9).unwrap_err().contains("found none"));
    std::fs::write(dir.path().join("queries.tsv"), "7\ta\n7\tb\n").unwrap();
    let error = convert(dir.path(), "[7, [11, 1]]\n", 9).unwrap_err();
    assert!(error.contains("queries.tsv") && error.contains("\"7\" again"), "{error}");
}
