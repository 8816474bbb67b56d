//! Commands that bring models and data from and to other programs: a reader in Fusion-in-Decoder's layout and back, to the
//! same answers; questions that others publish.

mod support;

use std::path::Path;

use serde_json::Value;
use support::{Place, failure, finish, golden, stderr, tercio};

/// Stdout of a command that must go well, and what it said.
fn run(words: &[&str]) -> (String, String) {
    let mut command = tercio(words);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let output = finish(command.spawn().unwrap());
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
}

fn refused(words: &[&str]) -> String {
    let mut command = tercio(words);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    failure(&finish(command.spawn().unwrap()))
}

fn answer(model: &Path) -> String {
    let asked = [
        "--question",
        "what year did the canal open",
        "--passage",
        "Old Canal|The Old Canal opened in 1794.",
    ];
    let model = model.to_str().unwrap();
    run(&[&["answer", "--model", model, "--scores", "--json"], &asked[..]].concat()).0
}

#[test]
fn a_reader_goes_to_fid_and_comes_back() {
    let place = Place::new();
    let [fid, back] = ["fid", "back"].map(|name| place.path(name).to_str().unwrap().to_owned());
    let model = golden().join("fid_reader_t5v10/model");
    let source = model.to_str().unwrap();
    let (said, talk) = run(&["model", "export", source, "--layout", "fid", "--output", &fid]);
    assert!(said.starts_with(&fid) && talk.is_empty(), "{said}{talk}");
    assert!(Path::new(&fid).join("spiece.model").is_file(), "the tokenizer goes along");
    let (said, _) = run(&["model", "inspect", &fid, "--json"]);
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["fid_layout"], &report["cross_attention_bias"]), (&true.into(), &true.into()));
    let (said, _) = run(&["model", "import", &fid, "--output", &back, "--json"]);
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["kind"], &report["tokenizer"]), (&"reader".into(), &true.into()));
    // The table that was added is zeros: it changes no answer and no score.
    assert_eq!(answer(Path::new(&back)), answer(&model));
    let text = refused(&["model", "import", &fid, "--output", &back]);
    assert!(text.contains("not there yet"), "{text}");
    let gated = golden().join("fid_reader_t5v11/model");
    let other = place.path("other").to_str().unwrap().to_owned();
    let text = refused(&["model", "export", gated.to_str().unwrap(), "--layout", "fid", "--output", &other]);
    assert!(text.contains("a gated feed-forward") && !Path::new(&other).exists(), "{text}");
    // A vocabulary of any family that is there must be whole.
    let damaged = place.path("damaged");
    std::fs::create_dir(&damaged).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model.join(name), damaged.join(name)).unwrap();
    }
    std::fs::write(damaged.join("vocab.txt"), [0xff, 0xfe]).unwrap();
    let text = refused(&["model", "export", damaged.to_str().unwrap(), "--layout", "hf", "--output", &other]);
    assert!(text.contains("vocab.txt") && !Path::new(&other).exists(), "{text}");
    // The folder of Fusion-in-Decoder's own weights has no tokenizer: it is said, and one can be given.
    let own = golden().join("fid_reader_t5v10/model_fid_layout");
    let words = ["model", "import", own.to_str().unwrap(), "--output", &other];
    assert!(run(&words).1.contains("--tokenizer"));
    let third = place.path("third").to_str().unwrap().to_owned();
    let words = ["model", "import", own.to_str().unwrap(), "--output", &third, "--tokenizer", source];
    assert_eq!(run(&words).1, "");
    assert!(!answer(Path::new(&third)).is_empty());
}

#[test]
fn converted_questions_are_good_ones() {
    let place = Place::new();
    place.write("q.csv", "who sang it\t['Kenny Loggins']\n");
    let [input, output] = ["q.csv", "q.jsonl"].map(|name| place.path(name).to_str().unwrap().to_owned());
    let (said, _) = run(&["data", "convert", "dpr-questions", &input, "--output", &output, "--json"]);
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["items"], &report["path"]), (&1.into(), &output.as_str().into()));
    let (said, _) = run(&["data", "check", &output, "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["with_answers"], 1);
    let text = refused(&["data", "convert", "nq", &input, "--output", &output]);
    assert!(text.contains("psgs_w100.tsv: cannot open"), "{text}");
    let text = refused(&["data", "convert", "dpr-questions", &input, "--output", &output, "--passages", "x"]);
    assert!(text.contains("--passages does not belong"), "{text}");
}

/// Gives every connection the file of a folder that it asks for, or 404; ends with the test's process.
fn serve(folder: std::path::PathBuf) -> String {
    use std::io::{BufRead, BufReader, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let name = head[0].split(' ').nth(1).unwrap().trim_start_matches('/').to_owned();
            let (status, body) = match std::fs::read(folder.join(name)) {
                Ok(body) => ("200 OK", body),
                Err(_) => ("404 Not Found", Vec::new()),
            };
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(&[head.as_bytes(), &body].concat());
        }
    });
    address
}

/// Makes a `.tar.gz` of a folder's content.
fn pack(archive: &Path, folder: &Path) {
    let packed =
        std::process::Command::new("tar").arg("-czf").arg(archive).arg("-C").arg(folder).arg(".").status();
    assert!(packed.unwrap().success());
}

#[test]
fn models_and_data_are_fetched_from_a_mirror_and_made_ready() {
    let place = Place::new();
    let [mirror, data, models] = ["mirror", "data", "models"].map(|name| place.path(name));
    for folder in ["dataindex", "nq"] {
        std::fs::create_dir_all(mirror.join(folder)).unwrap();
    }
    let put = |name: &str, text: &str| std::fs::write(mirror.join(name), text).unwrap();
    put(
        "NQ-open.train.jsonl",
        "{\"question\": \"q0\", \"answer\": [\"a\"]}\n{\"question\": \"q1\", \"answer\": [\"b\"]}\n",
    );
    put("NQ-open.dev.jsonl", "{\"question\": \"q2\", \"answer\": [\"c\"]}\n");
    std::fs::create_dir(mirror.join("nq/nq_passages")).unwrap();
    for (split, row) in [("train", 0), ("dev", 1), ("test", 0)] {
        put(&format!("dataindex/NQ.{split}.idx.json"), &format!("[{row}]"));
        put(&format!("nq/nq_passages/{split}.json"), "{\"0\": [\"1\"]}");
    }
    pack(&mirror.join("dataindex.tar.gz"), &mirror.join("dataindex"));
    pack(&mirror.join("nq_passages.tar.gz"), &mirror.join("nq"));
    pack(&mirror.join("nq_reader_base.tar.gz"), &golden().join("fid_reader_t5v10/model_fid_layout"));
    let address = serve(mirror.clone());
    let [data, models] = [&data, &models].map(|path| path.to_str().unwrap());
    let (said, talk) = run(&["data", "download", "nq", "--output", data, "--mirror", &address]);
    assert!(said.contains("nq_passages/train.json") && talk.contains("SHA-256"), "{said}{talk}");
    std::fs::write(place.path("data/psgs_w100.tsv"), "id\ttext\ttitle\n1\tone\tA\n").unwrap();
    let output = place.path("NQ").to_str().unwrap().to_owned();
    run(&["data", "convert", "nq", data, "--output", &output]);
    let (said, _) = run(&["data", "check", &format!("{output}/dev.json"), "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["items"], 1);
    // A second call finds everything in place.
    assert!(run(&["data", "download", "nq", "--output", data, "--mirror", &address]).1.contains("is there"));
    let tokenizer = golden().join("fid_reader_t5v10/model");
    let flags = ["--output", models, "--mirror", &address, "--tokenizer", tokenizer.to_str().unwrap()];
    let (said, _) = run(&[&["model", "download", "nq_reader_base"], &flags[..]].concat());
    assert!(!answer(Path::new(said.trim())).is_empty());
    let text = refused(&[&["model", "download", "tqa_retriever"], &flags[..]].concat());
    assert!(text.contains("404 Not Found"), "{text}");
    let text = refused(&["model", "download", "x"]);
    assert!(text.contains("nq_reader_base, nq_reader_large"), "{text}");
}

#[test]
fn byt5_needs_no_file_of_a_tokenizer() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/families/byt5");
    let name = folder.to_str().unwrap();
    let (said, _) = run(&["model", "inspect", name, "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["tokenizer"], &report["tokenizer_size"]), (&"bytes".into(), &384.into()), "{report}");
    assert!(run(&["model", "inspect", name]).0.contains("tokenizer      byT5's bytes, 384 ids"));
    let place = Place::new();
    let config = folder.join("config.json");
    let random = ["--model_path", "none", "--init", "random", "--total_steps", "2", "--model_config"];
    place.train("byt5", &[&random[..], &[config.to_str().unwrap()]].concat());
    // A checkpoint of it is a folder that names its tokenizer.
    let saved = place.run_dir("byt5").join("checkpoint/latest");
    assert!(run(&["model", "inspect", saved.to_str().unwrap()]).0.contains("byT5's bytes"));
    // A shape alone, of another family, says what is missing.
    let alone = place.path("alone");
    std::fs::create_dir(&alone).unwrap();
    std::fs::copy(golden().join("fid_reader_t5v10/model/config.json"), alone.join("config.json")).unwrap();
    let config = alone.join("config.json");
    let said = failure(&place.run("alone", &[&random[..], &[config.to_str().unwrap()]].concat()));
    assert!(said.contains("expected tokenizer.json") && said.contains("--tokenizer"), "{said}");
}
