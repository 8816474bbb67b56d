//! What others publish becomes questions that Tercio reads, and every fault is named by file and line.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use tercio_data::convert::{Dump, convert_dump, dpr_json, dpr_passages, dpr_questions};
use tercio_data::{DataError, Questions};

struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: tempfile::tempdir().unwrap() }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }
    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }
    fn questions(&self, name: &str) -> Questions {
        Questions::open(&self.path(name), &self.path("cache")).unwrap()
    }
}

const PASSAGES: &str = "id\ttext\ttitle\n1\tone\tA\n2\t\"two \"\"x\"\" and\ta tab\"\tB\n7\tseven\tC\n";

/// The files of both dumps: three questions in the train file, one in the dev file.
fn dumps() -> Place {
    let place = Place::new();
    place.write("psgs_w100.tsv", PASSAGES);
    let nq = "{\"question\": \"q0\", \"answer\": [\"a\"]}\n{\"question\": \"q1\", \"answer\": [\"b\", \"c\"]}\n{\"question\": \"q2\", \"answer\": []}\n";
    place.write("d/NQ-open.train.jsonl", nq);
    place.write("d/NQ-open.dev.jsonl", "{\"question\": \"q9\", \"answer\": [\"z\"]}\n");
    let item = |q: &str, value: &str| {
        json!({"Question": q, "QuestionId": format!("tc_{q}"), "SearchResults": [{"a": [1]}],
        "Answer": {"Aliases": [value, "other"], "Value": value, "Type": "x"}, "EntityPages": []})
    };
    let train = json!({"Domain": "unfiltered", "Data": [item("q0", "SOUTH POLE"), item("q1", "b"), item("q2", "c")], "Split": "train"});
    place.write("d/triviaqa-unfiltered/unfiltered-web-train.json", &train.to_string());
    place.write(
        "d/triviaqa-unfiltered/unfiltered-web-dev.json",
        &json!({"Data": [item("q9", "z")]}).to_string(),
    );
    for (split, rows) in [("train", "[2, 0]"), ("dev", "[1]"), ("test", "[0]")] {
        place.write(&format!("d/NQ.{split}.idx.json"), rows);
        place.write(&format!("d/TQA.{split}.idx.json"), rows);
    }
    place.write("d/nq_passages/train.json", r#"{"0": [7, 1], "1": ["2"]}"#);
    place.write("d/nq_passages/dev.json", r#"{"0": ["1"]}"#);
    place.write("d/nq_passages/test.json", r#"{"0": []}"#);
    place.write("d/tqa_passages/train.json", r#"{"tc_q2": ["7"], "tc_q0": ["2", "1"]}"#);
    place.write("d/tqa_passages/dev.json", r#"{"tc_q1": ["1"]}"#);
    place.write("d/tqa_passages/test.json", r#"{"tc_q9": ["2"]}"#);
    place
}

fn convert(place: &Place, dump: Dump) -> Result<Vec<(u64, u64)>, DataError> {
    let mut said = Vec::new();
    let (download, passages) = (place.path("d"), place.path("psgs_w100.tsv"));
    let done =
        convert_dump(dump, &download, &passages, &place.path("out"), &mut |line| said.push(line.to_owned()))?;
    assert!(said.iter().any(|line| line.contains("train.json: 2 questions")), "{said:?}");
    Ok(done.iter().map(|d| (d.items, d.passages)).collect())
}

#[test]
fn nq_is_cut_as_fusion_in_decoder_cuts_it() {
    let place = dumps();
    assert_eq!(convert(&place, Dump::Nq).unwrap(), [(2, 3), (1, 1), (1, 0)]);
    let ctx = |id: &str, title: &str, text: &str| json!({"id": id, "title": title, "text": text});
    let (one, two, seven) =
        (ctx("1", "A", "one"), ctx("2", "B", "two \"x\" and\ta tab"), ctx("7", "C", "seven"));
    let train = json!([
        {"question": "q2", "answers": [], "ctxs": [seven, one]},
        {"question": "q0", "answers": ["a"], "ctxs": [two]},
    ]);
    assert_eq!(place.json("out/train.json"), train);
    assert_eq!(place.json("out/dev.json"), json!([{"question": "q1", "answers": ["b", "c"], "ctxs": [one]}]));
    assert_eq!(place.json("out/test.json"), json!([{"question": "q9", "answers": ["z"], "ctxs": []}]));
    assert_eq!(place.questions("out/train.json").get(1).unwrap().ctxs[0].title, "B");
    assert_eq!(fs::read_dir(place.path("out")).unwrap().count(), 3, "no temporary file stays");
}

#[test]
fn triviaqa_has_readable_targets() {
    let place = dumps();
    assert_eq!(convert(&place, Dump::TriviaQa).unwrap(), [(2, 3), (1, 1), (1, 1)]);
    let train = place.json("out/train.json");
    assert_eq!((&train[0]["question"], &train[1]["target"]), (&json!("q2"), &json!("South Pole")));
    assert_eq!(train[1]["answers"], json!(["SOUTH POLE", "other"]));
    assert_eq!(train[1]["ctxs"][1]["id"], "1");
}

#[test]
fn faults_of_dumps_are_named() {
    let nq = Dump::Nq;
    for (dump, file, text, parts) in [
        (nq, "d/NQ.dev.idx.json", "[3]", &["NQ.dev.idx.json", "entry 0", "which has 3, found 3"][..]),
        (nq, "d/NQ.dev.idx.json", "[1", &["NQ.dev.idx.json: line 1", "cut short"]),
        (nq, "d/NQ.dev.idx.json", "{}", &["NQ.dev.idx.json: line 1", "expected a sequence"]),
        (
            nq,
            "d/nq_passages/dev.json",
            "{\"0\":\n [8]}",
            &["dev.json: question \"0\" has passage 8", "psgs_w100.tsv"],
        ),
        (
            nq,
            "d/nq_passages/dev.json",
            "{\"1\":\n [1]}",
            &["dev.json: expected the passages of question \"0\""],
        ),
        (nq, "d/nq_passages/dev.json", "{\"0\":\n [-1]}", &["dev.json: line 2", "found -1"]),
        (
            nq,
            "d/NQ-open.train.jsonl",
            "{\"question\": \"q\", \"answer\": []}\n{\"question\": 3}\n",
            &["NQ-open.train.jsonl: line 2", "expected a string"],
        ),
        (
            nq,
            "psgs_w100.tsv",
            "1\ta\n2\tb\tB\n7\tc\tC\n",
            &["psgs_w100.tsv: line 1: expected 3 fields", "found 2"],
        ),
        (nq, "psgs_w100.tsv", "1\ta\tA\n1\tb\tB\n", &["psgs_w100.tsv: line 2: passage 1 was on line 1"]),
        (nq, "psgs_w100.tsv", "1\t\"a\tA\n1\tb\tB\n", &["psgs_w100.tsv: line 1: the quote"]),
        (
            Dump::TriviaQa,
            "d/triviaqa-unfiltered/unfiltered-web-train.json",
            "{\"Data\": [\n{\"Question\": \"q\"}]}",
            &["unfiltered-web-train.json: line 2", "QuestionId"],
        ),
        (
            Dump::TriviaQa,
            "d/tqa_passages/test.json",
            "{}",
            &["test.json: expected the passages of question \"tc_q9\""],
        ),
    ] {
        let place = dumps();
        place.write(file, text);
        let error = convert(&place, dump).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{file}: {error}");
    }
    let place = dumps();
    fs::remove_file(place.path("d/nq_passages/test.json")).unwrap();
    let error = convert(&place, nq).unwrap_err().to_string();
    assert!(error.contains("nq_passages/test.json: cannot open"), "{error}");
    assert!(!place.path("out").exists(), "it was said before anything was written");
}

#[test]
fn dpr_training_data_becomes_questions() {
    let place = Place::new();
    let ctx = |id: &str, text: &str| json!({"title": "T", "text": text, "score": 1000, "title_score": 1, "passage_id": id});
    let items = json!([
        {"dataset": "nq", "question": "q0", "answers": ["a"], "positive_ctxs": [ctx("1", "p")],
         "negative_ctxs": [ctx("3", "n")], "hard_negative_ctxs": [{"title": "T", "text": "h", "psg_id": 2}]},
        {"question": "q1", "answers": [], "positive_ctxs": []},
    ]);
    let input = place.write("nq-train.json", &serde_json::to_string_pretty(&items).unwrap());
    let output = place.path("nq.jsonl");
    let done = dpr_json(&input, &place.path("cache"), usize::MAX, &output).unwrap();
    assert_eq!((done.items, done.passages), (2, 3));
    let questions = place.questions("nq.jsonl");
    let found: Vec<_> =
        questions.get(0).unwrap().ctxs.iter().map(|c| (c.id.clone(), c.text.clone())).collect();
    let pair = |id: &str, text: &str| (id.to_owned(), text.to_owned());
    assert_eq!(found, [pair("1", "p"), pair("2", "h"), pair("3", "n")]);
    let raw = questions.get_raw(0).unwrap();
    assert_eq!((&raw["ctxs"][0]["hasanswer"], &raw["ctxs"][1]["hasanswer"]), (&json!(true), &json!(false)));
    assert_eq!(dpr_json(&input, &place.path("cache"), 2, &output).unwrap().passages, 2);
    for (text, part) in [
        (
            "[\n{\"question\": \"q\", \"answers\": \"a\"}]",
            "line 2 (item 0): expected a list of strings in `answers`, found the string",
        ),
        (
            "[{\"question\": \"q\", \"answers\": []},\n {\"question\": 1}]",
            "line 1 (item 0): expected a list of passages in `positive_ctxs`",
        ),
        ("[{\"question\": \"q\", \"answers\": [], \"ctxs\": []}]", "needs no conversion"),
        (
            "[\n\n{\"question\": \"q\", \"answers\": [], \"positive_ctxs\": [{\"title\": 3}]}]",
            "line 3 (item 0): expected a string in `positive_ctxs[0].title`",
        ),
        (
            "[{\"question\": \"q\", \"answers\": [], \"positive_ctxs\": [3]}]",
            "`positive_ctxs[0].title`, found none",
        ),
    ] {
        let input = place.write("bad.json", text);
        let error = dpr_json(&input, &place.path("cache"), 9, &place.path("x.json")).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(!place.path("x.json").exists());
    }
}

#[test]
fn dpr_tables_become_objects() {
    let place = Place::new();
    let input = place.write(
        "nq-test.qa.csv",
        "who sang it\t['Kenny Loggins']\n\"say \"\"hi\"\"\"\t\"['a \"\"b\"\"', \"\"c's\"\"]\"\n",
    );
    assert_eq!(dpr_questions(&input, &place.path("q.json")).unwrap().items, 2);
    let expected = json!([
        {"question": "who sang it", "answers": ["Kenny Loggins"], "ctxs": []},
        {"question": "say \"hi\"", "answers": ["a \"b\"", "c's"], "ctxs": []},
    ]);
    assert_eq!(place.json("q.json"), expected);

    let compressed = place.path("psgs.tsv.gz");
    let mut encoder =
        flate2::write::GzEncoder::new(fs::File::create(&compressed).unwrap(), flate2::Compression::fast());
    encoder.write_all(PASSAGES.as_bytes()).unwrap();
    encoder.finish().unwrap();
    assert_eq!(dpr_passages(&compressed, &place.path("p.jsonl")).unwrap().items, 3);
    let text = fs::read_to_string(place.path("p.jsonl")).unwrap();
    assert_eq!(text.lines().nth(2).unwrap(), r#"{"id":"7","title":"C","text":"seven"}"#);

    let fault = |convert: fn(&Path, &Path) -> Result<tercio_data::convert::Converted, DataError>,
                 text: &str| {
        let input = place.write("bad.tsv", text);
        convert(&input, &place.path("x.jsonl")).unwrap_err().to_string()
    };
    assert!(
        fault(dpr_questions, "a\t['b']\nc\tParis\n").contains("bad.tsv: line 2: expected a list of answers")
    );
    assert!(fault(dpr_questions, "a\n").contains("line 1: expected 2 fields"));
    assert!(fault(dpr_passages, "1\ta\tb\n2\ta\n").contains("line 2: expected 3 fields"));
    assert!(fault(dpr_passages, "id\ttext\ttitle\n").contains("found none"));
    assert!(fault(dpr_questions, "").contains("found none"));
    let bytes = fs::read(&compressed).unwrap();
    fs::write(&compressed, &bytes[..bytes.len() / 2]).unwrap();
    let error = dpr_passages(&compressed, &place.path("x.jsonl")).unwrap_err().to_string();
    assert!(error.contains("ends too early"), "{error}");
    assert!(
        dpr_passages(&compressed, &place.path("x.tsv"))
            .unwrap_err()
            .to_string()
            .contains("name that ends in .json")
    );
    assert!(!place.path("x.jsonl").exists());
}
