//! `tercio model export` and `tercio model import`: from a folder to Fusion-in-Decoder's layout and back, to the same answers.

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
    let asked = ["--question", "what year did the canal open", "--passage", "Old Canal|The Old Canal opened in 1794."];
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
    // The folder of Fusion-in-Decoder's own weights has no tokenizer: it is said, and one can be given.
    let own = golden().join("fid_reader_t5v10/model_fid_layout");
    let words = ["model", "import", own.to_str().unwrap(), "--output", &other];
    assert!(run(&words).1.contains("--tokenizer"));
    let third = place.path("third").to_str().unwrap().to_owned();
    let words = ["model", "import", own.to_str().unwrap(), "--output", &third, "--tokenizer", source];
    assert_eq!(run(&words).1, "");
    assert!(!answer(Path::new(&third)).is_empty());
}
