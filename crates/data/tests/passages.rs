//! Collections of passages: every form, awkward ids and texts, and files that are no collections.

use std::io::Write;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tercio_data::Passages;

fn file(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn open(dir: &Path, name: &str, text: &str) -> Result<Passages, String> {
    Passages::open(&file(dir, name, text.as_bytes()), &dir.join("cache")).map_err(|e| e.to_string())
}

fn all(passages: &Passages) -> Vec<[String; 3]> {
    let of = |i| passages.get(i).map(|p| [p.id, p.title, p.text]).unwrap();
    (0..passages.len()).map(of).collect()
}

fn owned(rows: &[[&str; 3]]) -> Vec<[String; 3]> {
    rows.iter().map(|row| row.map(str::to_owned)).collect()
}

const TSV: &str = "id\ttext\ttitle\n1\tAaron was a \"prophet\".\tAaron\n\"a\t\"\"b\"\"\"\t\"tab\there,\nline there\"\t\"\"\n\
                   é–1\t\t\t\n"; // the last row has a field too many and is cut off below

#[test]
fn dprs_tsv_is_read_with_its_quotes() {
    let dir = tempfile::tempdir().unwrap();
    let text = TSV.replace("é–1\t\t\t\n", "é–1\t\t\n\n4\tword\tone\r\n");
    let passages = open(dir.path(), "p.tsv", &text).unwrap();
    let want = owned(&[
        ["1", "Aaron", "Aaron was a \"prophet\"."],
        ["a\t\"b\"", "", "tab\there,\nline there"],
        ["é–1", "", ""],
        ["4", "one", "word"],
    ]);
    assert_eq!(all(&passages), want);
    assert_eq!((passages.get(3).unwrap().file_position, passages.get_placed(3).unwrap().1), (3, 7));
    // Without names of columns, and with a byte order mark.
    let bare = format!("\u{feff}{}", text.strip_prefix("id\ttext\ttitle\n").unwrap());
    assert_eq!(all(&open(dir.path(), "bare.tsv", &bare).unwrap()), want);
    // Other columns, and none for titles.
    let named = open(dir.path(), "n.tsv", "id\ttitle\tsection\ttext\n7\tT\tS\tx\n").unwrap();
    assert_eq!(all(&named), owned(&[["7", "T", "x"]]));
    let untitled = open(dir.path(), "u.tsv", "id\ttext\n7\tx\n").unwrap();
    assert_eq!(all(&untitled), owned(&[["7", "", "x"]]));
}

#[test]
fn rows_that_are_even_only_without_quotes_are_read_so() {
    let dir = tempfile::tempdir().unwrap();
    let text = "id\ttext\ttitle\n1\ta quote \" is here\t\"\n2\t\"x\" y\tT\n3\tz\t#\n";
    let want = owned(&[["1", "\"", "a quote \" is here"], ["2", "T", "\"x\" y"], ["3", "#", "z"]]);
    for name in ["p.tsv", "p.tsv.zst"] {
        let bytes =
            if name.ends_with("zst") { zstd::encode_all(text.as_bytes(), 1).unwrap() } else { text.into() };
        let passages = Passages::open(&file(dir.path(), name, &bytes), &dir.path().join("cache")).unwrap();
        assert_eq!((all(&passages), passages.is_quoted()), (want.clone(), false), "{name}");
    }
    // One decompressed copy serves both ways of reading.
    let copies = std::fs::read_dir(dir.path().join("cache")).unwrap().map(|e| e.unwrap().path());
    assert_eq!(copies.filter(|p| p.extension().is_some_and(|e| e == "data")).count(), 1);
    let quoted = open(dir.path(), "q.tsv", "1\t\"a\tb\"\tc\n2\td\te\n").unwrap();
    assert_eq!((all(&quoted)[0][2].as_str(), quoted.is_quoted()), ("a\tb", true));
}

#[test]
fn json_is_read_as_its_kinds_have_it() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"id\": 3, \"title\": \"T\", \"text\": \"a\"}\n\n{\"_id\": \"d\\t\\\"2\", \"text\": \"\", \"metadata\": {}}\n";
    let want = owned(&[["3", "T", "a"], ["d\t\"2", "", ""]]);
    assert_eq!(all(&open(dir.path(), "p.jsonl", lines).unwrap()), want);
    let list = format!("[{}]", lines.trim_end().replace("\n\n", ","));
    assert_eq!(all(&open(dir.path(), "p.json", &list).unwrap()), want);
}

#[test]
fn packed_files_are_the_same_collection() {
    let dir = tempfile::tempdir().unwrap();
    let text = "id\ttext\ttitle\n1\tone\tT\n2\ttwo\tT\n";
    let plain = open(dir.path(), "p.tsv", text).unwrap();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(text.as_bytes()).unwrap();
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    for (name, bytes) in [("p.tsv.gz", gz.finish().unwrap()), ("p.tsv.zst", zst)] {
        let packed = Passages::open(&file(dir.path(), name, &bytes), &dir.path().join("cache")).unwrap();
        assert_eq!((all(&packed), packed.fingerprint()), (all(&plain), plain.fingerprint()));
    }
}

#[test]
fn every_fault_says_where_and_what() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str, text: &str, i: usize| -> String {
        open(dir.path(), name, text).and_then(|p| p.get(i).map_err(|e| e.to_string())).unwrap_err()
    };
    for (name, text, i, parts) in [
        ("a.tsv", TSV, 2, &["a.tsv, line 5 (item 2)", "3 fields between tabs", "found 4 fields"][..]),
        ("a.tsv", "1\ta\tb\n2\tc\n", 1, &["line 2 (item 1)", "found 2 fields"]),
        ("a.tsv", "1\ta\tb\n2\n", 1, &["found 1 field;"]),
        ("a.tsv", "1\ta\tb\n\tc\td\n", 1, &["an id in the first field"]),
        ("a.tsv", "1\ta\tb\n2\t\"c\td\te\n", 0, &["line 2", "quote"]),
        ("a.tsv", "id\ttitle\n1\ta\n", 0, &["a column named text", "id, title"]),
        ("a.tsv", "id\ttext\ttitle\n", 0, &["found only the names of columns"]),
        ("a.tsv", "\n \n", 0, &["expected passages, found none"]),
        ("a.jsonl", "{\"text\": \"a\"}\n", 0, &["line 1 (item 0)", "`id`, `_id`", "an id of its own"]),
        ("a.jsonl", "{\"id\": \"a\"}\n", 0, &["a string in `text`", "found none"]),
        ("a.jsonl", "{\"id\": [], \"text\": \"a\"}\n", 0, &["a string in `id`", "a list"]),
        (
            "a.jsonl",
            "{\"id\": 1, \"text\": \"a\", \"title\": 4}\n",
            0,
            &["a string in `title`", "the number 4"],
        ),
        ("a.jsonl", "[]\n", 0, &["line 1", "found a list '['"]),
        ("a.txt", "", 0, &[".tsv (id, text, title"]),
    ] {
        let error = read(name, text, i);
        for part in parts {
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }
    let bad = file(dir.path(), "b.tsv", b"1\ta\tb\n2\t\xff\tc\n");
    let error = Passages::open(&bad, dir.path()).unwrap().get(1).unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("0xff"), "{error}");
    let one = open(dir.path(), "one.tsv", "id\ttext\ttitle\n1\ta\tb\n").unwrap();
    assert!(one.get(1).unwrap_err().to_string().contains("one.tsv"));
    assert!(one.get(usize::MAX).is_err());
}

/// A field as Python's csv writer quotes it.
fn quoted(field: &str) -> String {
    if field.contains(['\t', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.into()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read(rows in prop::collection::vec(["[a-z\"\t\n ]{0,6}", "[é\"\t\r\n,x]{0,8}", "[T\"\n]{0,3}"], 1..8)) {
        let dir = tempfile::tempdir().unwrap();
        let mut text = String::from("id\ttext\ttitle\n");
        let mut want = Vec::new();
        for (i, [id, body, title]) in rows.iter().enumerate() {
            let id = format!("{i}{id}");
            text += &format!("{}\t{}\t{}\r\n", quoted(&id), quoted(body), quoted(title));
            want.push([id, title.clone(), body.clone()]);
        }
        prop_assert_eq!(all(&open(dir.path(), "p.tsv", &text).unwrap()), want);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(prop::sample::select(b"\t\"\n\r a1{}[]:,\xff\xef".to_vec()), 0..60)) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["p.tsv", "p.jsonl", "p.json"] {
            if let Ok(passages) = Passages::open(&file(dir.path(), name, &bytes), &dir.path().join("cache")) {
                for i in 0..passages.len() {
                    let _ = passages.get(i);
                }
            }
        }
    }
}
