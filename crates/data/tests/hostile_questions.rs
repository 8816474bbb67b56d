//! Question files that are broken, strange or merely large: a clear error or the documented meaning.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use tercio_data::{DataError, Questions, ReaderEncoding, check};

const ENCODING: ReaderEncoding = ReaderEncoding {
    text_maxlength: 12,
    answer_maxlength: None,
    n_context: 2,
    no_title: false,
    passage_eos: false,
};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join("cache")
    }

    fn open(&self, path: &Path) -> Result<Questions, DataError> {
        Questions::open(path, &self.cache())
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

#[test]
fn all_four_forms_of_a_file_read_the_same_in_any_order() {
    let dir = Folder::new();
    let items = [
        "{\"question\": \"a\", \"x\": [1.50, {}]}",
        "{\"question\": \"b\",\n\"ctxs\": []}",
        "{\"id\": \"k\", \"question\": \"c\"}",
    ];
    let list = format!("[\n{}\n]", items.join(",\n"));
    let lines = items.map(|i| i.replace('\n', " ")).join("\n");
    let paths = [
        dir.write("q.json", list.as_bytes()),
        dir.write("q.jsonl", lines.as_bytes()),
        dir.write("q.json.gz", &gzip(list.as_bytes())),
        dir.write("q.jsonl.zst", &zstd::encode_all(lines.as_bytes(), 1).unwrap()),
    ];
    for path in &paths {
        // the second time the index comes from the cache
        for _ in 0..2 {
            let questions = dir.open(path).unwrap();
            assert_eq!(questions.len(), 3);
            assert_eq!(questions.fingerprint().len(), 64);
            for (i, text, id) in [(2, "c", "k"), (0, "a", "0"), (1, "b", "1")] {
                let q = questions.get(i).unwrap();
                assert_eq!((q.question.as_str(), q.id_text().as_str()), (text, id));
            }
            let raw = serde_json::to_string(&questions.get_raw(0).unwrap()).unwrap();
            assert_eq!(raw, "{\"question\":\"a\",\"x\":[1.5,{}]}");
            assert!(questions.get(3).unwrap_err().to_string().contains("3 items"));
        }
    }
    let open = |k: usize| dir.open(&paths[k]).unwrap();
    assert_eq!(open(0).fingerprint(), open(2).fingerprint());
    assert_eq!(open(0).get(2).unwrap().place.line, 5);
}

#[test]
fn files_that_cannot_be_used_say_why() {
    let dir = Folder::new();
    let mut text = String::new();
    for i in 0..5000u64 {
        text += &format!("{{\"question\": \"{}\"}}\n", i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    }
    let gz = gzip(text.as_bytes());
    let mut damaged = gz.clone();
    damaged[gz.len() / 2] ^= 0xFF;
    let zst = zstd::encode_all(&b"{\"question\": \"a\"}\n"[..], 1).unwrap();
    for (name, bytes, part) in [
        ("empty.jsonl", &b""[..], "empty file"),
        ("blank.jsonl", b"\n \n", "found none"),
        ("none.json", b"[ ]", "found none"),
        ("cut.json", b"[{\"question\": \"a\"},\n{\"ques", "line 2: item 1 starts here"),
        ("lines.json", b"{\"question\": \"a\"}\n{\"question\": \"b\"}\n", ".jsonl"),
        (
            "list.jsonl",
            b"\xef\xbb\xbf\n [{\"question\": \"a\"}]",
            "line 2: expected an object '{' on every line, found a list",
        ),
        ("q.txt", b"[]", ".json"),
        ("cut.jsonl.gz", &gz[..gz.len() / 2], "cut short"),
        ("damaged.jsonl.gz", &damaged, "gzip"),
        ("plain.jsonl.gz", b"{\"question\": \"a\"}", "gzip"),
        ("plain.jsonl.zst", b"{\"question\": \"a\"}", "zstd"),
        ("cut.jsonl.zst", &zst[..zst.len() - 3], "zstd"),
    ] {
        let path = dir.write(name, bytes);
        let error = dir.open(&path).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(part), "{error}");
        let names = fs::read_dir(dir.cache()).into_iter().flatten().map(|e| e.unwrap().file_name());
        let left = names.filter(|n| n.to_str().unwrap().ends_with(".tmp")).count();
        assert_eq!(left, 0, "half-written files of {name} stay in the cache");
    }
    let error = dir.open(&dir.0.path().join("absent.json")).unwrap_err().to_string();
    assert!(error.contains("absent.json") && error.contains("check the path"), "{error}");
    let folder = dir.0.path().join("folder.json");
    fs::create_dir(&folder).unwrap();
    assert!(dir.open(&folder).unwrap_err().to_string().contains("regular file"));
    // a pipe without a writer must not make us wait
    let pipe = dir.0.path().join("pipe.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(dir.open(&pipe).unwrap_err().to_string().contains("regular file"));
}

#[test]
fn a_file_that_changes_is_noticed() {
    let dir = Folder::new();
    let path = dir.write("q.jsonl", b"{\"question\": \"a\"}\n");
    let questions = dir.open(&path).unwrap();
    let first = questions.fingerprint().to_string();
    let mut file = File::options().append(true).open(&path).unwrap();
    file.write_all(b"{\"question\": \"b\"}\n").unwrap();
    assert!(questions.get(0).unwrap_err().to_string().contains("changed"));
    let again = dir.open(&path).unwrap();
    assert_eq!(again.len(), 2);
    assert_ne!(again.fingerprint(), first);
    assert_eq!(fs::read_dir(dir.cache()).unwrap().count(), 1, "the index of the earlier state is gone");
}

#[test]
fn a_line_of_ten_megabytes_is_read() {
    let dir = Folder::new();
    let long = "word ".repeat(2_000_000);
    let text =
        format!("{{\"question\": \"q\", \"ctxs\": [{{\"text\": \"{long}\"}}]}}\n{{\"question\": \"r\"}}\n");
    let questions = dir.open(&dir.write("q.jsonl", text.as_bytes())).unwrap();
    assert_eq!(questions.get(0).unwrap().ctxs[0].text.len(), 10_000_000);
    assert_eq!(questions.get(1).unwrap().place.line, 2);
}

#[test]
fn questions_are_read_from_many_threads() {
    let dir = Folder::new();
    let text: String = (0..200).map(|i| format!("{{\"question\": \"{i}\"}}\n")).collect();
    let questions = dir.open(&dir.write("q.jsonl", text.as_bytes())).unwrap();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let questions = &questions;
            scope.spawn(move || {
                for i in 0..200 {
                    let row = (i * 7 + t) % 200;
                    assert_eq!(questions.get(row).unwrap().question, row.to_string());
                }
            });
        }
    });
}

#[test]
fn check_reports_every_fault_and_counts_the_rest() {
    let dir = Folder::new();
    let text = concat!(
        "{\"id\": 1, \"question\": \"a?\", \"answers\": [\"b\"], \"ctxs\": [{\"title\": \"t\", \"text\": \"a\", ",
        "\"score\": 1}, {\"text\": \"b\"}, {\"text\": \"c\"}]}\n",
        "{\"question\": 5}\n",
        "not json\n",
        "{\"id\": 1, \"question\": \"b?\", \"target\": \"x\"}\n",
        "{\"question\": \"c?\", \"ctxs\": [{\"text\": \"t\", \"score\": NaN}]}\n",
        "{\"question\": \"d?\", \"ctxs\": [{\"text\": \"t\", \"title\": \"t\", \"score\": \"2\"}]}\n",
        "{\"question\": \"\\ud800\"}\n",
    );
    let mut bytes = text.as_bytes().to_vec();
    bytes.extend_from_slice(b"{\"question\": \"\xff\"}");
    let path = dir.write("q.jsonl", &bytes);
    let mut faults = Vec::new();
    let mut keep = |e: &DataError| match e {
        DataError::Item { line, .. } => faults.push(*line),
        other => panic!("{other}"),
    };
    let report = check(&path, &dir.cache(), None, &ENCODING, &mut keep).unwrap();
    assert_eq!(faults, [2, 3, 5, 7, 8]);
    assert_eq!((report.items, report.good, report.bad, report.tokens.is_none()), (8, 3, 5, true));
    assert_eq!((report.ctxs.min, report.ctxs.max), (0, 3));
    assert_eq!((report.with_target, report.with_answers, report.without_target_and_answers), (1, 1, 1));
    assert_eq!((report.with_scores, report.with_some_scores, report.without_ctxs), (1, 1, 1));
    assert_eq!((report.duplicate_ids, report.fewer_ctxs_than_n_context), (1, 2));
    assert_eq!(report.passages_without_title, 2);
    let shown = report.to_string();
    assert!(shown.contains("8 items, 5 faults") && shown.contains("items repeat an id"), "{shown}");
    assert!(serde_json::to_string(&report).unwrap().contains("\"duplicate_ids\":1"));
}

#[test]
fn check_goes_on_to_the_end_of_a_list_that_was_cut_short() {
    let dir = Folder::new();
    let text = b"[{\"question\": \"a\"},\n{\"question\": 1},\n{\"question\": \"b\"},\n{\"question";
    let path = dir.write("q.json", text);
    let mut faults = Vec::new();
    let report = check(&path, &dir.cache(), None, &ENCODING, &mut |e| faults.push(e.to_string())).unwrap();
    assert_eq!((report.items, report.good, report.bad), (3, 2, 2));
    assert!(report.to_string().contains("with target        0 of 2"), "{report}");
    assert!(faults[0].contains("line 2 (item 1)"), "{faults:?}");
    assert!(faults[1].contains("line 4: item 3 starts here"), "{faults:?}");
}
