//! Beam search as `answer` and `eval reader` offer it: several answers with how likely they are, and flags that nobody should give.

mod support;

use std::fs;
use std::process::{Output, Stdio};

use serde_json::Value;
use support::*;

fn run(words: &[&str], flags: &[&str]) -> Output {
    let model = golden().join("fid_reader_t5v10/model");
    let mut command = tercio(words);
    command.arg("--model_path").arg(model).args(["--threads", "1", "--n_context", "2"]);
    command.args(["--generation_max_length", "8"]).args(flags);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap())
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("{name} of {value}"))
}

/// All answers of a line, the text under `name`, best first, with their log probabilities.
fn answers(line: &Value, name: &str) -> Vec<(String, f64)> {
    let all = std::iter::once(line).chain(line["alternatives"].as_array().into_iter().flatten());
    all.map(|a| (a[name].as_str().unwrap().to_owned(), number(a, "log_probability"))).collect()
}

#[test]
fn several_answers_with_how_likely_they_are() {
    let place = Place::new();
    let file = place.path("eval.jsonl");
    let beams = [
        "--num_beams",
        "4",
        "--num_return_sequences",
        "3",
        "--length_penalty",
        "0",
        "--early_stopping",
        "never",
    ];
    let output = run(&["answer", file.to_str().unwrap(), "--json", "--scores"], &beams);
    let printed = lines(&String::from_utf8(output.stdout.clone()).unwrap());
    assert!(output.status.success() && printed.len() == 6, "{}", stderr(&output));
    for line in &printed {
        let all = answers(line, "answer");
        assert_eq!(all.len(), 3, "{line}");
        // Without a length penalty beams are compared by the log probability itself.
        assert_eq!(number(line, "beam_score"), all[0].1);
        assert!(all[0].1 < 0.0 && all.windows(2).all(|w| w[0].1 >= w[1].1), "{line}");
        assert!(number(line, "mean_log_probability") > number(line, "log_probability"), "{line}");
    }
    // The same from an evaluation, and whatever shares a batch.
    let predictions = place.path("predictions.jsonl");
    let words = ["eval", "reader", "--eval_data", file.to_str().unwrap(), "--per_gpu_batch_size", "4"];
    let output = run(&[&words[..], &["--output", predictions.to_str().unwrap()]].concat(), &beams);
    assert!(output.status.success(), "{}", stderr(&output));
    let written = lines(&fs::read_to_string(&predictions).unwrap());
    assert_eq!(written.len(), printed.len());
    for (a, b) in printed.iter().zip(&written) {
        for (a, b) in answers(a, "answer").iter().zip(answers(b, "prediction")) {
            assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-4, "{a:?}, in a batch {b:?}");
        }
    }
}

#[test]
fn flags_that_cannot_be_meant() {
    for (flags, want) in [
        (&["--num_beams", "0"][..], "--num_beams 0: expected 1 to 64"),
        (&["--num_beams", "18446744073709551615"], "expected 1 to 64"),
        (&["--num_return_sequences", "2"], "--num_return_sequences 2: expected 1 to 1"),
        (&["--generation_min_length", "9"], "--generation_min_length 9: expected 0 to 8"),
        (&["--length_penalty", "inf"], "--length_penalty inf: expected a number"),
        (&["--early_stopping", "yes"], "expected true, false or never"),
    ] {
        let output = run(&["answer", "--question", "who?"], flags);
        let text = failure(&output);
        assert!(output.status.code() == Some(2) && text.contains(want), "{flags:?}: {text}");
    }
}
