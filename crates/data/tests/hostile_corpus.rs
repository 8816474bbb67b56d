//! Corpora that are damaged or strange: every fault is named by file and line, or left out and counted.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tercio_data::corpus::{Columns, CorpusSettings, LabelCount, check_corpus};
use tercio_data::{Corpus, Documents};

fn file(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The corpus of one file, nothing cut from it, and the faults that were left out.
fn read(name: &str, bytes: &[u8], skip_bad: bool) -> Result<(Corpus, Vec<String>), String> {
    let dir = tempfile::tempdir().unwrap();
    let settings = CorpusSettings { skip_bad, cut_dev: false, cut_test: false, ..CorpusSettings::default() };
    let documents = Documents::open(&file(dir.path(), name, bytes), &dir.path().join("cache"));
    let mut faults = Vec::new();
    let corpus =
        documents.and_then(|documents| documents.with_columns(Columns::default())).and_then(|documents| {
            Corpus::new(documents, None, None, &settings, &mut |e| faults.push(e.to_string()))
        });
    corpus.map(|corpus| (corpus, faults)).map_err(|e| e.to_string())
}

#[test]
fn every_fault_names_file_and_line_and_can_be_left_out() {
    let good = "__label__a one\n__label__b two\n";
    let csv = "text,label\none,a\ntwo,b\n";
    for (name, bytes, line, part) in [
        ("c.txt", [good, "no label here\n"].concat().into_bytes(), 3, "expected a label, found none"),
        ("c.txt", [good, "__label__a\n"].concat().into_bytes(), 3, "expected a text, found none"),
        ("c.txt", [good, "\n__label__ text\n"].concat().into_bytes(), 4, "the name of a label behind"),
        ("c.txt", [good, "__label__a __label__b x\n"].concat().into_bytes(), 3, "expected one label, found 2: a, b"),
        ("c.txt", [good.as_bytes(), b"__label__a caf\xe9\n"].concat(), 3, "the byte 0xe9 at byte 15"),
        ("c.csv", [csv, "x\n"].concat().into_bytes(), 4, "expected 2 fields, as in the first row, found 1 field"),
        ("c.csv", [csv, "x,a,b\n"].concat().into_bytes(), 4, "found 3 fields"),
        ("c.csv", [csv, ",a\n"].concat().into_bytes(), 4, "expected a text"),
        ("c.csv", [csv, "x, \n"].concat().into_bytes(), 4, "expected a label"),
        ("c.csv", [csv.as_bytes(), b"\"\n\xff\",a\n"].concat(), 4, "0xff"),
        ("c.jsonl", b"{\"text\": \"x\", \"label\": \"a\"}\n{\"text\": \"y\", \"label\": \"b\"}\n{\"text\": 1}\n".to_vec(), 3, "a string in `text`"),
        ("c.jsonl", b"{\"text\": \"x\", \"label\": \"a\"}\n{\"text\": \"y\", \"label\": \"b\"}\n{\"label\": 1}\n".to_vec(), 3, "name the key of the text"),
        ("c.jsonl", b"{\"text\": \"x\", \"label\": \"a\"}\n{\"text\": \"y\", \"label\": \"b\"}\n{\"text\": \"\", \"label\": 1.5}\n".to_vec(), 3, "a whole number"),
        ("c.jsonl", b"{\"text\": \"x\", \"label\": \"a\"}\n{\"text\": \"y\", \"label\": \"b\"}\n{\"text\": \n".to_vec(), 3, "bad JSON"),
    ] {
        let error = read(name, &bytes, false).unwrap_err();
        let shown = String::from_utf8_lossy(&bytes);
        assert!(error.contains(&format!("{name}, line {line} ")) && error.contains(part), "{shown}: {error}");
        assert!(error.contains("--skip_bad"), "{error}");
        let (corpus, faults) = read(name, &bytes, true).unwrap();
        assert_eq!((corpus.train.len(), corpus.bad, faults.len()), (2, 1, 1), "{shown}");
        assert!(faults[0].contains(part), "{faults:?}");
        assert_eq!((corpus.train.row(1), corpus.labels.names().len()), (1, 2));
    }
}

#[test]
fn files_without_a_corpus_are_refused() {
    for (name, bytes, part) in [
        ("c.txt", &b""[..], "found an empty file"),
        ("c.txt", b"\n \r\n", "expected documents, found none"),
        ("c.csv", b"text,label\n", "only the names of columns"),
        (
            "c.csv",
            b"label,sentence\na,b\n",
            "expected a column named \"text\", found 2 columns: label, sentence",
        ),
        ("c.csv", b"text,label\n\"x,a\n", "the quote that opens in this record is not closed"),
        ("c.jsonl", b"[{}]", "must be named .json"),
        ("c.doc", b"x", "expected a name that ends in .txt"),
        ("c.txt", b"__label__a one\n__label__a two\n", "two labels or more, found only \"a\" in 2 documents"),
    ] {
        let error = read(name, bytes, true).unwrap_err();
        assert!(error.contains(name) && error.contains(part), "{error}");
    }
    let error = read("c.txt", b"a\nb\n", true).unwrap_err();
    assert!(error.contains("no document is left to learn from"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let error = Documents::open(dir.path(), &dir.path().join("cache")).unwrap_err().to_string();
    assert!(error.contains("a folder for each label"), "{error}");
}

#[test]
fn line_ends_marks_and_long_lines_are_no_faults() {
    let long = "word ".repeat(1 << 18); // more than a megabyte
    let text = format!("\u{feff}__label__a one\r\n__label__b {long}\r\n\r\n__label__b __label__b three\r");
    let (corpus, _) = read("c.txt", text.as_bytes(), false).unwrap();
    let documents: Vec<_> = (0..3).map(|k| corpus.train.get(k).unwrap()).collect();
    assert_eq!((documents[0].text.as_str(), documents[2].text.as_str()), ("one", "three"));
    assert_eq!((documents[1].text.len(), documents[2].place.line), (long.len() - 1, 4));
    assert_eq!((corpus.repeated, corpus.labels.counts()), (1, &[1, 2][..]));
    // As many labels as a line can hold take no longer than reading them.
    let many = "__label__x ".repeat(100_000) + "text\n__label__y text\n";
    assert_eq!(read("c.txt", many.as_bytes(), false).unwrap().0.labels.counts(), [1, 1]);
}

#[test]
fn a_check_names_every_fault_and_counts_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let text =
        b"__label__a one\nno label\n__label__b __label__a __label__b three\n__label__a\n__label__c \xff\n";
    let documents = Documents::open(&file(dir.path(), "c.txt", text), &dir.path().join("cache")).unwrap();
    let mut faults = Vec::new();
    let report = check_corpus(documents, Columns::default(), &mut |e| faults.push(e.to_string())).unwrap();
    for (fault, line) in faults.iter().zip([2, 4, 5]) {
        assert!(fault.contains(&format!("c.txt, line {line} ")), "{fault}");
    }
    assert_eq!((report.documents, report.good, report.bad, faults.len()), (5, 2, 3, 3));
    assert_eq!((report.several, report.repeated, report.characters.max), (1, 1, 5));
    let label = |label: &str, documents| LabelCount { label: label.into(), documents };
    assert_eq!(report.labels, [label("a", 2), label("b", 1)]);
    assert!(report.to_string().contains("2  100.0 %  a"), "{report}");
}

#[test]
fn a_file_that_changes_in_use_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "c.txt", b"__label__a one\n__label__b two\n");
    let documents = Documents::open(&path, &dir.path().join("cache")).unwrap();
    std::fs::write(&path, b"__label__a other\n__label__b longer\n").unwrap();
    let error = documents.get(0).unwrap_err().to_string();
    assert!(error.contains("changed while it was in use"), "{error}");
    let settings = CorpusSettings { skip_bad: true, ..CorpusSettings::default() };
    let error = Corpus::new(documents, None, None, &settings, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("changed while it was in use"), "a file's fault is nobody's bad line: {error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn no_bytes_cause_a_panic(bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(b'\n'), Just(b'"'), Just(b','), Just(b'_')], 0..200)) {
        for name in ["c.txt", "c.csv", "c.tsv", "c.jsonl", "c.json"] {
            let _ = read(name, &bytes, true);
            let _ = read(name, &[b"text,label\n__label__a b,c\n", &bytes[..]].concat(), true);
        }
    }
}
