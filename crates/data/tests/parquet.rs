//! Passages and questions of Parquet: the same as those of JSON, from files of pyarrow; and files that are none.
#![cfg(feature = "parquet")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use tercio_data::{Passages, Questions, RetrievalExamples};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/parquet").join(name)
}

/// A file of a column of texts `text` and, where there are some, one of numbers `id`, nullable both; a group of rows.
fn written(path: &Path, schema: &str, ids: Option<&[Option<i64>]>, texts: &[Option<&[u8]>]) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut file =
        SerializedFileWriter::new(std::fs::File::create(path).unwrap(), schema, Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    if let Some(ids) = ids {
        let levels: Vec<i16> = ids.iter().map(|id| i16::from(id.is_some())).collect();
        let values: Vec<i64> = ids.iter().flatten().copied().collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
    }
    let levels: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
    let values: Vec<ByteArray> = texts.iter().flatten().map(|text| text.to_vec().into()).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
}

const ID_TEXT: &str = "message m { optional int64 id; optional binary text (UTF8); }";

#[test]
fn passages_are_those_of_the_json_in_any_order() {
    let cache = tempfile::tempdir().unwrap();
    let want = Passages::open(&data("passages.jsonl"), cache.path()).unwrap();
    assert!(want.len() > 50);
    for codec in ["snappy", "zstd", "gzip", "lz4", "none"] {
        let path = data(&format!("passages.{codec}.parquet"));
        let passages = Passages::open(&path, cache.path()).unwrap();
        assert_eq!(passages.len(), want.len(), "{codec}");
        for i in (0..want.len()).rev().step_by(7).chain(0..want.len()) {
            assert_eq!(passages.get(i).unwrap(), want.get(i).unwrap(), "{codec}, row {i}");
        }
        assert_eq!(passages.get_placed(30).unwrap().1, 31, "rows are numbered as lines are");
        // The copy of the first time serves the second, and holds no column that nobody asks for.
        let again = Passages::open(&path, cache.path()).unwrap();
        assert_eq!(again.fingerprint(), passages.fingerprint(), "{codec}");
    }
    let copies = std::fs::read_dir(cache.path()).unwrap().map(|e| e.unwrap().path());
    let copies: Vec<PathBuf> = copies.filter(|p| p.extension().is_some_and(|e| e == "data")).collect();
    assert_eq!(copies.len(), 5);
    for copy in copies {
        assert!(!std::fs::read_to_string(copy).unwrap().contains("emb"));
    }
}

#[test]
fn questions_and_examples_are_those_of_the_json() {
    let cache = tempfile::tempdir().unwrap();
    let want = Questions::open(&data("questions.jsonl"), cache.path()).unwrap();
    let questions = Questions::open(&data("questions.parquet"), cache.path()).unwrap();
    assert_eq!((questions.len(), want.len()), (9, 9));
    for i in 0..want.len() {
        let (mut got, mut expected) = (questions.get(i).unwrap(), want.get(i).unwrap());
        (got.place, expected.place) = (want.get(0).unwrap().place, want.get(0).unwrap().place);
        assert_eq!(got, expected);
    }
    let examples = RetrievalExamples::open(&data("questions.parquet"), cache.path()).unwrap();
    assert_eq!(examples.get(8).unwrap().passages.len(), 8);
}

#[test]
fn every_fault_says_where_and_what() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.parquet");
    let read = |i: usize| -> String {
        let passages = Passages::open(&path, &dir.path().join("cache")).map_err(|e| e.to_string());
        passages.and_then(|p| p.get(i).map_err(|e| e.to_string())).unwrap_err()
    };
    let says = |i: usize, parts: &[&str]| {
        let error = read(i);
        for part in parts {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    };
    let texts = [Some(&b"a"[..]), None, Some(b"c")];
    written(&path, ID_TEXT, Some(&[Some(1), Some(2), None]), &texts);
    assert_eq!(Passages::open(&path, &dir.path().join("cache")).unwrap().get(0).unwrap().id, "1");
    says(1, &["p.parquet, line 2 (item 1)", "a string in `text`", "found none"]);
    says(2, &["p.parquet, line 3 (item 2)", "`id`", "an id of its own"]);
    // Columns of other names, or of another kind.
    let plain = &texts[..1];
    written(&path, "message m { optional binary body (UTF8); }", None, plain);
    says(0, &["p.parquet, line 1", "a string in `text`", "found none"]);
    written(&path, "message m { optional binary body; }", None, plain);
    says(0, &["p.parquet: expected columns such as id, title, text", "found body"]);
    written(&path, "message m { optional binary text (UTF8); }", None, plain);
    says(0, &["`id`, `_id`", "an id of its own"]);
    written(&path, "message m { optional int64 id; optional binary body (UTF8); }", Some(&[Some(1)]), plain);
    says(0, &["a string in `text`", "found none"]);
    written(
        &path,
        "message m { optional int64 id (TIMESTAMP(MILLIS, true)); optional binary text (UTF8); }",
        Some(&[Some(1)]),
        plain,
    );
    says(0, &["p.parquet: row 1", "column id, found a time", "write it as a string"]);
    written(&path, ID_TEXT, Some(&[Some(1)]), &[Some(b"\xff")]);
    says(0, &["p.parquet", "expected Parquet data"]);
    written(
        &path,
        "message m { optional int64 id; optional binary text; }",
        Some(&[Some(1)]),
        &[Some(b"\xff")],
    );
    says(0, &["p.parquet: row 1", "bytes that are not UTF-8"]);
    written(&path, ID_TEXT, Some(&[]), &[]);
    says(0, &["expected passages, found none"]);
    std::fs::copy(data("brotli.parquet"), &path).unwrap();
    says(0, &["p.parquet: the column", "BROTLI", "zstd"]);
    std::fs::write(&path, b"{\"id\": 1, \"text\": \"a\"}\n").unwrap();
    says(0, &["p.parquet: expected Parquet data", "get the file again"]);
    std::fs::write(&path, b"P").unwrap();
    says(0, &["p.parquet"]);
}

#[test]
fn a_file_that_was_cut_or_damaged_is_an_error_and_leaves_no_copy() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let whole = std::fs::read(data("passages.snappy.parquet")).unwrap();
    let path = dir.path().join("p.parquet");
    for length in [8, 100, whole.len() / 2, whole.len() - 5, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = Passages::open(&path, &cache).unwrap_err().to_string();
        assert!(error.contains("p.parquet: the Parquet data ends too early"), "{length}: {error}");
        assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0, "{length}");
    }
    // Wrong bytes anywhere: an error, or other values, but never an end of the process.
    let (mut errors, mut read) = (0, 0);
    for at in (4..whole.len() - 4).step_by(13) {
        let mut bytes = whole.clone();
        bytes[at] = !bytes[at];
        std::fs::write(&path, &bytes).unwrap();
        match Passages::open(&path, &cache) {
            Ok(passages) => {
                read += 1;
                (0..passages.len()).for_each(|i| drop(passages.get(i)));
            }
            Err(error) => {
                errors += 1;
                assert!(error.to_string().contains("p.parquet"), "{error}");
            }
        }
    }
    assert!(errors > 20 && read > 20, "{errors} errors, {read} read");
}
