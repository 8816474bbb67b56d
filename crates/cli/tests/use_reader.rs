//! A trained reader in use: `eval reader` and `answer`, as processes, on the stored tiny models.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;
mod support;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use golden_folder::golden_folder;
use serde_json::{Value, json};
use support::*;

fn case(name: &str) -> PathBuf {
    golden().join("fid_reader_t5v10").join(name)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn input() -> Value {
    read_json(&case("input.json"))
}

/// Runs words, with the stored model and its case's own sizes, to the end.
fn with_model(words: &[&str], flags: &[&str]) -> Output {
    with_case(&case(""), "model", words, flags)
}

fn with_case(case: &Path, model: &str, words: &[&str], flags: &[&str]) -> Output {
    let input = read_json(&case.join("input.json"));
    let mut command = tercio(words);
    command.arg("--model_path").arg(case.join(model)).args(["--threads", "2"]);
    command.args(["--text_maxlength", &input["text_maxlength"].to_string()]);
    command.args(["--generation_max_length", &input["generate_max_length"].to_string()]);
    command.args(flags);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap())
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The case's questions with retrieval scores that turn the order of the passages round, as JSONL.
fn turned() -> (Vec<Value>, String) {
    let mut questions = input()["questions"].as_array().unwrap().clone();
    for (i, question) in questions.iter_mut().enumerate() {
        question["id"] = json!(format!("q{i}"));
        question["note"] = json!({"kept": i});
        for (k, passage) in question["ctxs"].as_array_mut().unwrap().iter_mut().enumerate() {
            passage["score"] = json!((k * 2).to_string());
        }
    }
    let lines: String = questions.iter().map(|q| q.to_string() + "\n").collect();
    (questions, lines)
}

/// Scores and answers of the library that Fusion-in-Decoder used come out of the command: with and without `</s>` on
/// passages, and from its own checkpoint layout with its bias table.
#[test]
fn golden_eval_gives_the_stored_scores_and_answers() {
    let root = golden_folder();
    for name in ["fid_reader_t5v10", "fid_reader_t5v11"] {
        let case = root.join(name);
        let (expected, input) = (read_json(&case.join("expected.json")), read_json(&case.join("input.json")));
        for (variant, eos) in input["encoder_eos"].as_object().unwrap() {
            compare_with_stored(&case, &input, "model", &expected[variant], eos.as_bool().unwrap());
        }
        if let Some(legacy) = expected.get("legacy").filter(|l| !l.is_null()) {
            compare_with_stored(&case, &input, "model_fid_layout", legacy, false);
        }
    }
}

fn compare_with_stored(case: &Path, input: &Value, model: &str, expected: &Value, eos: bool) {
    let place = Place::new();
    fs::write(place.path("q.json"), input["questions"].to_string()).unwrap();
    let file = place.path("q.json").to_str().unwrap().to_owned();
    let output = place.path("predictions.jsonl").to_str().unwrap().to_owned();
    let (n_context, folder) = (input["n_context"].to_string(), case.join("model"));
    let mut flags = vec!["--eval_data", &file, "--n_context", &n_context, "--output", &output, "--scores"];
    flags.extend(["--json", "-q", "--per_gpu_batch_size", "2", "--tokenizer", folder.to_str().unwrap()]);
    flags.extend(eos.then_some("--passage_eos"));
    let report = stdout(&with_case(case, model, &["eval", "reader"], &flags));
    let report: Value = serde_json::from_str(&report).unwrap();
    let questions = input["questions"].as_array().unwrap();
    let tokenizer = tercio_data::Tokenizer::load(&folder).unwrap();
    let lines = fs::read_to_string(&output).unwrap();
    assert_eq!(lines.lines().count(), questions.len());
    let mut right = 0;
    for (i, line) in lines.lines().enumerate() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["question"], questions[i]["question"], "input order");
        let ids: Vec<u32> = serde_json::from_value(expected["generated_ids"][i].clone()).unwrap();
        let answer = tokenizer.decode(&ids).unwrap();
        assert_eq!(line["prediction"], answer);
        let answers: Vec<String> = serde_json::from_value(questions[i]["answers"].clone()).unwrap();
        right += usize::from(tercio_data::exact_match(&answer, &answers) == Some(true));
        let want = expected["crossattention_scores"][i].as_array().unwrap();
        let found = line["scores"].as_array().unwrap();
        assert_eq!(found.len(), want.len());
        for (a, b) in found.iter().zip(want) {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{model}, question {i}: {a} is not {b}");
        }
    }
    assert_eq!(report["exact_match"], right as f64 / questions.len() as f64);
}

#[test]
fn results_are_written_in_fids_layout_and_do_not_depend_on_threads() {
    let place = Place::new();
    let (questions, lines) = turned();
    place.write("q.jsonl", &lines);
    let file = place.path("q.jsonl").to_str().unwrap().to_owned();
    let runs = place.path("runs").to_str().unwrap().to_owned();
    let mut written = Vec::new();
    for threads in ["1", "2"] {
        let flags = ["--eval_data", &file, "--n_context", "2", "--checkpoint_dir", &runs, "--name", threads];
        let more = [
            "--write_results",
            "--write_crossattention_scores",
            "--threads",
            threads,
            "--answer_maxlength",
            "20",
        ];
        let ran = with_model(&["eval", "reader"], &[&flags[..], &more[..]].concat());
        let said = stdout(&ran);
        assert!(said.starts_with("exact match ") && said.contains(" over 3 questions"), "{said}");
        assert!(stderr(&ran).contains("--answer_maxlength does nothing"), "{}", stderr(&ran));
        let dir = place.run_dir(threads);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "results and nothing half-written");
        written.push(
            ["final_output.txt", "dataset_wscores.json"].map(|f| fs::read_to_string(dir.join(f)).unwrap()),
        );
    }
    assert!(written[0] == written[1], "the same bits with one and two threads");
    let [text, scored] = &written[0];
    let ids: Vec<_> = text.lines().map(|l| l.split_once('\t').unwrap().0).collect();
    assert_eq!(ids, ["q0", "q1", "q2"]);
    assert!(scored.starts_with("[\n    {\n        \"question\": "), "indent of 4");
    let scored: Vec<Value> = serde_json::from_str(scored).unwrap();
    for (item, before) in scored.iter().zip(&questions) {
        assert_eq!((&item["id"], &item["note"]), (&before["id"], &before["note"]));
        let (ctxs, old) = (item["ctxs"].as_array().unwrap(), before["ctxs"].as_array().unwrap());
        // The retrieval scores rise along the file's list, and two passages were read.
        for (passage, stored) in ctxs.iter().zip(old.iter().rev()) {
            assert_eq!(passage["text"], stored["text"]);
            assert_eq!(passage["retrieval_score"], stored["score"]);
        }
        assert!(ctxs[0]["score"].is_f64() && ctxs[1]["score"].is_f64());
        assert!(ctxs[2..].iter().all(|c| c.get("score").is_none()));
    }
}

#[test]
fn a_bad_item_ends_an_evaluation_without_results_and_old_ones_stay() {
    let place = Place::new();
    let (_, lines) = turned();
    place.write(
        "q.jsonl",
        &(lines + "{\"question\": \"x\", \"ctxs\": [{\"text\": \"t\", \"score\": NaN}]}\n"),
    );
    place.write("predictions.jsonl", "old\n");
    let file = place.path("q.jsonl").to_str().unwrap().to_owned();
    let output = place.path("predictions.jsonl").to_str().unwrap().to_owned();
    let ran = with_model(&["eval", "reader"], &["--eval_data", &file, "--output", &output]);
    let text = failure(&ran);
    assert!(text.contains("q.jsonl, line 4") && text.contains("a finite number"), "{text}");
    assert!(ran.stdout.is_empty());
    assert_eq!(fs::read_to_string(&output).unwrap(), "old\n");
    let names = fs::read_dir(place.path("")).unwrap().count();
    assert_eq!(names, 4, "the two files of the place, questions and old predictions: nothing half-written");
    // The first three alone can be had.
    let ran = with_model(&["eval", "reader"], &["--eval_data", &file, "--maxload", "3", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&stdout(&ran)).unwrap()["questions"], 3);
}

#[test]
fn results_never_replace_the_questions_or_one_another() {
    let place = Place::new();
    let (_, lines) = turned();
    place.write("q.jsonl", &lines);
    let file = place.path("q.jsonl").to_str().unwrap().to_owned();
    std::os::unix::fs::symlink(&file, place.path("link")).unwrap();
    let link = place.path("link").to_str().unwrap().to_owned();
    for output in [&file, &link] {
        let ran = with_model(&["eval", "reader"], &["--eval_data", &file, "--output", output]);
        assert!(failure(&ran).contains("would replace the file"), "{}", stderr(&ran));
        assert_eq!(fs::read_to_string(&file).unwrap(), lines);
    }
    let runs = place.path("").to_str().unwrap().to_owned();
    let twice = place.path("x/final_output.txt").to_str().unwrap().to_owned();
    let ran = with_model(
        &["eval", "reader"],
        &[
            "--eval_data",
            &file,
            "--output",
            &twice,
            "--write_results",
            "--checkpoint_dir",
            &runs,
            "--name",
            "x",
        ],
    );
    assert!(failure(&ran).contains("two kinds of results"), "{}", stderr(&ran));
}

#[test]
fn questions_without_answers_are_answered_but_not_measured() {
    let place = Place::new();
    place.write("q.jsonl", "{\"question\": \"what year did the canal open\"}\n");
    let file = place.path("q.jsonl").to_str().unwrap().to_owned();
    let said = stdout(&with_model(&["eval", "reader"], &["--eval_data", &file]));
    assert!(said.contains("none has `answers`"), "{said}");
    let said = stdout(&with_model(&["eval", "reader"], &["--eval_data", &file, "--json"]));
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["exact_match"], &report["without_answers"]), (&Value::Null, &json!(1)));
}

#[test]
fn answer_takes_a_question_a_file_or_a_pipe() {
    let place = Place::new();
    let asked = "what year did the canal open";
    let by_hand = ["--question", asked, "--passage", "Old Canal|The Old Canal opened in 1794."];
    let one = stdout(&with_model(&["answer"], &by_hand));
    assert_eq!(one, "1794\n");
    let closed = stdout(&with_model(&["answer"], &["--question", asked, "--json", "--scores"]));
    let closed: Value = serde_json::from_str(&closed).unwrap();
    assert_eq!((&closed["question"], &closed["scores"]), (&json!(asked), &json!([])));

    let (questions, lines) = turned();
    place.write("q.jsonl", &lines);
    let file = place.path("q.jsonl").to_str().unwrap().to_owned();
    let from_file = stdout(&with_model(&["answer", &file], &[]));
    assert_eq!(from_file.lines().count(), questions.len());

    // From a pipe, with a bad line in the middle: what came before it is answered, then the line is named.
    let bad = lines.lines().next().unwrap().to_owned() + "\n\n{\"question\": 3}\n" + &lines;
    let mut command = tercio(&["answer", "-", "--text_maxlength", "48", "--per_gpu_batch_size", "3"]);
    command.arg("--model").arg(case("model")).args(["--json", "--scores", "--n_context", "1"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(bad.as_bytes()).unwrap();
    let output = finish(child);
    let text = failure(&output);
    assert!(text.contains("<stdin>, line 3 (item 1): expected a string in `question`"), "{text}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let printed: Vec<Value> = printed.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(printed.len(), 1);
    assert_eq!(printed[0]["id"], "q0");
    // Of three passages the one with the best retrieval score was read: the last of the file.
    let scores = printed[0]["scores"].as_array().unwrap();
    assert!(scores[0].is_null() && scores[1].is_null() && scores[2].is_f64(), "{scores:?}");
    assert_eq!(printed[0]["answer"].as_str().unwrap(), from_first_passage(&questions[0]));
}

/// The answer when only the last passage of the file's list is given.
fn from_first_passage(question: &Value) -> String {
    let passage = question["ctxs"].as_array().unwrap().last().unwrap();
    let written = format!("{}|{}", passage["title"].as_str().unwrap(), passage["text"].as_str().unwrap());
    let asked = question["question"].as_str().unwrap();
    let flags = ["--question", asked, "--passage", &written, "--generation_max_length", "50"];
    stdout(&with_model(&["answer"], &flags)).trim_end().to_owned()
}
