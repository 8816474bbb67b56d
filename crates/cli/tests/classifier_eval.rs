//! `tercio predict` and `tercio eval classifier` as processes: flair's stored logits, files, pipes, ranks, and what is refused.

mod ranks_support;
mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use support::{failure, finish, golden, stderr, tercio};
use tercio_engine::{Cpu, Device};
use tercio_models::classifier::{ClassifierConfig, ClassifierHeaders, HeadKind, LoadedClassifier};
use tercio_models::folder::ModelFolder;
use tercio_models::weights::WeightsReader;

fn case() -> PathBuf {
    golden().join("flair_classifier")
}

fn stored(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(case().join(name)).unwrap()).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
}

/// A folder with the classifier of the stored case, at its start values.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { root: tempfile::tempdir().unwrap() };
        place.classifier("model", |_| {});
        place
    }
    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
    fn write(&self, name: &str, content: &str) -> String {
        std::fs::write(self.path(name), content).unwrap();
        self.text(name)
    }
    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }
    /// Saves the stored encoder with flair's head and its stored start values.
    fn classifier(&self, name: &str, change: impl Fn(&mut ClassifierConfig)) {
        let device = Cpu::new(1).unwrap();
        let from = case().join("model");
        let headers = ClassifierHeaders::read(&ModelFolder::open(from.to_str().unwrap()).unwrap()).unwrap();
        let mut config = headers.config.clone();
        let input = stored("input.json");
        config.labels = strings(&input["labels_of_head_file"]);
        config.head = HeadKind::Linear;
        config.max_length = Some(input["max_length"].as_u64().unwrap() as usize);
        change(&mut config);
        let mut loaded = LoadedClassifier::with_config(headers, config, 0, &device).unwrap();
        let head = WeightsReader::open(&case().join("classifier_head.safetensors")).unwrap();
        for spec in loaded.model.output_specs().to_vec() {
            let values =
                head.read(if spec.shape.len() == 2 { "decoder.weight" } else { "decoder.bias" }).unwrap();
            device.write(loaded.parameters.view_mut(spec.place), &values);
        }
        let folder = self.path(name);
        std::fs::create_dir(&folder).unwrap();
        loaded.save(&folder, &device).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            // written anew: the golden folder may be read-only
            std::fs::write(folder.join(file), std::fs::read(from.join(file)).unwrap()).unwrap();
        }
    }
    fn predict(&self, data: &str, flags: &[&str]) -> Command {
        let mut command = tercio(&["predict", "--threads", "1", "--model", &self.text("model"), data]);
        command.args(flags);
        command
    }
    fn eval(&self, data: &str, flags: &[&str]) -> Command {
        let mut command = tercio(&["eval", "classifier", "--threads", "1", "--model", &self.text("model")]);
        command.args(["--data", data]).args(flags);
        command
    }
}

fn run(command: &mut Command) -> Output {
    finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

fn succeed(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let powers: Vec<f64> = logits.iter().map(|&z| f64::from(z).exp()).collect();
    powers.iter().map(|p| p / powers.iter().sum::<f64>()).collect()
}

/// `n` documents of the stored corpus with their labels, some longer and some shorter than others.
fn corpus(n: usize) -> String {
    let text = std::fs::read_to_string(case().join("corpus/train.txt")).unwrap();
    let stored: Vec<&str> = text.lines().collect();
    (0..n)
        .map(|i| {
            let (label, text) = stored[i % stored.len()].split_once(' ').unwrap();
            let text: String = text.split_inclusive(' ').take(2 + i * 7 % 23).collect();
            format!("{label} {} {i}\n", text.trim())
        })
        .collect()
}

#[test]
fn golden_flair_probabilities_of_files_and_pipes() {
    let place = Place::new();
    let (input, expected) = (stored("input.json"), stored("expected.json"));
    let (texts, labels) = (strings(&input["texts"]), strings(&expected["labels"]));
    let logits =
        WeightsReader::open(&case().join("expected.safetensors")).unwrap().read("logits_before").unwrap();
    let want: Vec<Vec<f64>> = logits.chunks(labels.len()).map(softmax).collect();
    assert_eq!(want.len(), texts.len());

    let jsonl: String = texts
        .iter()
        .enumerate()
        .map(|(i, t)| format!("{}\n", json!({"id": format!("t{i}"), "text": t})))
        .collect();
    let jsonl_file = place.write("texts.jsonl", &jsonl);
    let found = lines(&succeed(&mut place.predict(&jsonl_file, &["--all_probabilities", "--text"])));
    assert_eq!(found.len(), texts.len());
    for (i, line) in found.iter().enumerate() {
        assert_eq!((&line["id"], &line["text"]), (&json!(format!("t{i}")), &json!(texts[i])));
        let best = (0..labels.len()).max_by(|&a, &b| want[i][a].total_cmp(&want[i][b])).unwrap();
        assert_eq!(line["label"], json!(labels[best]), "text {i}");
        for (label, p) in labels.iter().zip(&want[i]) {
            let score = line["scores"][label].as_f64().unwrap();
            assert!((score - p).abs() <= 1e-4 * p + 1e-5, "text {i}, {label}: {score} instead of {p}");
        }
        assert_eq!(line["probability"], line["scores"][&labels[best]]);
        assert!(line.get("gold").is_none());
    }

    // The same from plain text, from a pipe, and from a table; numbers stand for ids there.
    let plain = place.write("texts.txt", &texts.iter().map(|t| format!("{t}\n\n")).collect::<String>());
    let labels_of = |text: &str| {
        lines(text).iter().map(|l| (l["label"].clone(), l["probability"].clone())).collect::<Vec<_>>()
    };
    let want: Vec<_> = found.iter().map(|l| (l["label"].clone(), l["probability"].clone())).collect();
    let printed = succeed(&mut place.predict(&plain, &[]));
    assert_eq!(labels_of(&printed), want);
    assert_eq!((&lines(&printed)[2]["id"], &lines(&printed)[2]["line"]), (&json!(2), &json!(5)));
    let quoted = |t: &String| format!("\"{}\",x\n", t.replace('"', "\"\""));
    let table = place
        .write("texts.csv", &("body,other\n".to_owned() + &texts.iter().map(quoted).collect::<String>()));
    assert_eq!(labels_of(&succeed(&mut place.predict(&table, &["--text_column", "body"]))), want);
    // Lists are read as training reads them: spaces around names, variables that are set to nothing.
    for names in [" body ,", "body"] {
        let mut command = place.predict(&table, &["--text_column", names]);
        assert_eq!(labels_of(&succeed(command.env("TERCIO_LABEL_COLUMN", ""))), want, "{names:?}");
    }
    for text in [texts.join("\n"), jsonl] {
        let mut child = place
            .predict("-", &[])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = finish(child);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(labels_of(std::str::from_utf8(&output.stdout).unwrap()), want);
    }
}

#[test]
fn whoever_writes_a_line_gets_its_labels_before_the_next() {
    let place = Place::new();
    let mut child = place
        .predict("-", &[])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (mut stdin, mut out) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    for i in 0..4 {
        // Empty lines behind the text, in one piece with it, are no line to wait for.
        let text = format!("the river number {i}\n{}", "\n \r\n".repeat(i % 2));
        stdin.write_all(text.as_bytes()).unwrap();
        stdin.flush().unwrap();
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["id"], json!(i));
    }
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

#[test]
fn any_number_of_ranks_gives_the_same_lines_and_figures() {
    let place = Place::new();
    let data = place.write("docs.txt", &corpus(150));
    let cut = ["--window", "16", "--batch_texts", "4", "--quiet"];
    let whole = succeed(&mut place.predict(&data, &cut));
    let found = lines(&whole);
    assert_eq!(found.len(), 150);
    assert!(found.iter().enumerate().all(|(i, line)| line["id"] == json!(i)), "in the order of the input");
    let report = succeed(&mut place.eval(&data, &[&cut[..], &["--json"]].concat()));
    // The figures are those of the lines.
    let right = found.iter().filter(|l| l["gold"] == json!([l["label"]])).count();
    let figures: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(figures["accuracy"].as_f64().unwrap(), right as f64 / 150.0);
    assert!(figures["loss"].as_f64().unwrap() > 0.0 && right > 0 && right < 150);
    for ranks in [2, 3] {
        let folder = place.path("");
        let command = |_| place.predict(&data, &cut);
        assert_eq!(ranks_support::start(&folder, ranks, command).succeed(), whole, "{ranks} ranks");
        let command = |_| place.eval(&data, &[&cut[..], &["--json"]].concat());
        assert_eq!(ranks_support::start(&folder, ranks, command).succeed(), report, "{ranks} ranks");
        let file = place.text(&format!("out-{ranks}.jsonl"));
        let command = |_| place.predict(&data, &[&cut[..], &["--output", &file]].concat());
        assert_eq!(ranks_support::start(&folder, ranks, command).succeed(), "");
        assert_eq!(std::fs::read_to_string(file).unwrap(), whole);
    }
}

#[test]
fn ranks_with_other_documents_or_another_model_are_refused() {
    let place = Place::new();
    let data = place.write("docs.txt", &corpus(30));
    let other = place.write("other.txt", &corpus(30).replacen("__label__sale", "__label__art", 1));
    place.classifier("threshold", |config| config.multi_label = true);
    let second = |rank: usize, a: &str, b: &str| if rank == 0 { a.to_owned() } else { b.to_owned() };
    let differing = |rank: usize| place.eval(&second(rank, &data, &other), &[]);
    let ends = ranks_support::start(&place.path(""), 2, differing).finish();
    assert_eq!(ranks_support::codes(&ends), [Some(1); 2]);
    let said: String = ends.into_iter().map(|end| end.stderr).collect();
    let line = 1 + corpus(30).lines().position(|l| l.starts_with("__label__sale")).unwrap();
    let part = format!("example {} (line {line} there) is the first that differs", line - 1);
    assert!(said.contains(&part), "{said}");
    let models = |rank: usize| {
        let mut command = tercio(&["eval", "classifier", "--threads", "1", "--data", &data]);
        command.args(["--model", &place.text(&second(rank, "model", "threshold"))]);
        command
    };
    let said: String =
        ranks_support::start(&place.path(""), 2, models).finish().into_iter().map(|end| end.stderr).collect();
    assert!(said.contains("--model_path is not the same there as on rank 0"), "{said}");
}

#[test]
fn reports_as_text_picture_and_json() {
    let place = Place::new();
    let data = place.write("docs.txt", &corpus(40));
    let (svg, tsv) = (place.text("confusion.svg"), place.text("dev.tsv"));
    let text = succeed(&mut place.eval(&data, &["--confusion", &svg, "--output", &tsv]));
    for part in [
        "- Loss ",
        "- F-score (micro) ",
        "- Accuracy ",
        "By class:",
        "macro avg",
        "Confusion",
        "Calibration (expected error",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    assert!(place.read("confusion.svg").starts_with("<svg "));
    let report: Value = serde_json::from_str(&succeed(&mut place.eval(&data, &["--json"]))).unwrap();
    let wrong = 40 - (report["accuracy"].as_f64().unwrap() * 40.0).round() as usize;
    let listed = place.read("dev.tsv");
    assert_eq!((listed.matches(" - Gold: ").count(), listed.matches(" -> MISMATCH!").count()), (40, wrong));
    assert_eq!(report["documents"], 40);
    let support: u64 =
        report["labels"].as_array().unwrap().iter().map(|l| l["support"].as_u64().unwrap()).sum();
    assert_eq!(support, 40);
}

#[test]
fn several_labels_a_document() {
    let place = Place::new();
    place.classifier("multi", |config| {
        config.multi_label = true;
        config.threshold = 0.4;
    });
    let data = place.write("docs.txt", "__label__sale __label__art the river\n__label__art a book\n");
    let model = place.text("multi");
    let found = lines(&succeed(
        tercio(&["predict", "--threads", "1", "--model", &model, &data]).arg("--all_probabilities"),
    ));
    for line in &found {
        let above: Vec<&String> = line["scores"]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, p)| p.as_f64().unwrap() > 0.4)
            .map(|(l, _)| l)
            .collect();
        assert_eq!(json!(above), line["labels"]);
        assert_eq!(line["labels"].as_array().unwrap().len(), line["probabilities"].as_array().unwrap().len());
    }
    assert_eq!(found[0]["gold"], json!(["sale", "art"]));
    let report = succeed(&mut tercio(&["eval", "classifier", "--model", &model, "--data", &data, "--json"]));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert!(report["multi_label"] == json!(true) && report["samples"]["recall"].is_f64(), "{report}");
    let single = failure(&run(&mut place.eval(&data, &[])));
    assert!(single.contains("line 1 (item 0): expected one label, found 2: sale, art"), "{single}");
}

#[test]
fn faults_are_named_and_leave_no_file() {
    let place = Place::new();
    let bad = format!("{}\u{0}", corpus(3));
    let mut bytes = bad.trim_end_matches('\u{0}').as_bytes().to_vec();
    bytes.extend_from_slice(b"caf\xe9\n");
    bytes.extend_from_slice(corpus(2).as_bytes());
    std::fs::write(place.path("bad.txt"), bytes).unwrap();
    let (data, output) = (place.text("bad.txt"), place.text("out.jsonl"));
    let printed = run(&mut place.predict(&data, &[]));
    let error = failure(&printed);
    assert!(error.contains("bad.txt, line 4 (item 3)") && error.contains("0xe9"), "{error}");
    assert_eq!(String::from_utf8(printed.stdout).unwrap().lines().count(), 3, "those before it are told");
    failure(&run(&mut place.predict(&data, &["--output", &output])));
    assert!(!Path::new(&output).exists());
    let skipped = run(&mut place.predict(&data, &["--output", &output, "--skip_bad"]));
    assert!(
        skipped.status.success() && stderr(&skipped).contains("1 faulty documents are left out"),
        "{}",
        stderr(&skipped)
    );
    let ids: Vec<Value> = lines(&place.read("out.jsonl")).iter().map(|l| l["id"].clone()).collect();
    assert_eq!(ids, [0, 1, 2, 4, 5].map(Value::from));

    let checked = run(tercio(&["data", "check", "--classifier", "--json"]).arg(&data));
    let report: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert_eq!((checked.status.code(), &report["good"], &report["bad"]), (Some(1), &json!(5), &json!(1)));
    assert!(stderr(&checked).contains("bad.txt, line 4"), "{}", stderr(&checked));

    let unknown = place.write("unknown.txt", "__label__sale a\n__label__sail b\n");
    let error = failure(&run(&mut place.eval(&unknown, &[])));
    assert!(error.contains("unknown.txt, line 2") && error.contains("\"sail\""), "{error}");
    let text = succeed(&mut place.eval(&unknown, &["--unknown_labels", "count"]));
    assert!(text.contains("1 documents have a label that the classifier does not know (sail)"), "{text}");

    let good = place.write("good.txt", &corpus(3));
    for (command, code, part) in [
        (place.predict(&good, &["--text_maxlength", "100000"]), 2, "positions for"),
        (place.predict(&good, &["--batch_texts", "0"]), 2, "--batch_texts 0: expected 1"),
        (place.predict(&good, &["--output", &good]), 1, "would replace the file"),
        (place.eval(&good, &["--output", &output, "--confusion", &output]), 2, "expected two files"),
        (place.predict(&place.text("nowhere.txt"), &[]), 1, "nowhere.txt"),
        (
            tercio(&["predict", "--model", case().join("model").to_str().unwrap(), &good]),
            1,
            "expected a classifier's",
        ),
    ] {
        let mut command = command;
        let output = run(&mut command);
        let error = failure(&output);
        assert!(
            output.status.code() == Some(code) && error.contains(part),
            "{command:?}: {error} lacks {part}"
        );
    }
}
