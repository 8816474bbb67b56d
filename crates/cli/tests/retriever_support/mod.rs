//! A folder with examples for a retriever, and the command that trains one on them.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::support::{Place, finish, golden, metrics, stderr, tercio};

/// Updates of a run here.
const TOTAL: &str = "8";

/// A [`Place`] with examples: `train.jsonl` and `eval.jsonl` with scores and judgements, `unscored.jsonl` without.
pub struct Corner {
    pub place: Place,
}

impl Corner {
    pub fn new() -> Corner {
        let place = Place::new();
        place.write("train.jsonl", &examples(24, true));
        place.write("eval.jsonl", &examples(7, true));
        place.write("unscored.jsonl", &examples(16, false));
        Corner { place }
    }
    /// The command that trains the run `name`; later flags win over the defaults here.
    pub fn command(&self, name: &str, flags: &[&str]) -> Command {
        let model = golden().join("fid_retriever/model");
        let mut command =
            tercio(&["train", "retriever", "--name", name, "--model_path", model.to_str().unwrap()]);
        command.args(["--checkpoint_dir".as_ref(), self.place.path("runs").as_os_str()]);
        command.args(["--train_data".as_ref(), self.place.path("train.jsonl").as_os_str()]);
        let settings = "--dropout 0.1 --global_batch_size 8 --micro_batch_size 1 --save_freq 5 --log_freq 1 --n_context 3 \
                        --question_maxlength 24 --passage_maxlength 48 --lr 2e-3 --threads 1 --keep_last 0";
        command.args(settings.split_whitespace()).args(["--total_steps", TOTAL]).args(flags);
        command
    }
    /// Runs it to its end.
    pub fn run(&self, name: &str, flags: &[&str]) -> Output {
        finish(self.command(name, flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }
    /// As [`Corner::run`]; the run must succeed.
    pub fn train(&self, name: &str, flags: &[&str]) -> Output {
        let output = self.run(name, flags);
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }
}

/// `n` questions as JSONL, no two alike, made of the stored case's texts; the first passage is the positive one.
pub fn examples(n: usize, judged: bool) -> String {
    let text = std::fs::read_to_string(golden().join("fid_retriever/input.json")).unwrap();
    let input: Value = serde_json::from_str(&text).unwrap();
    let stored = input["questions"].as_array().unwrap();
    let line = |i: usize| {
        let mut question = stored[i % stored.len()].clone();
        question["question"] = json!(format!("{} {i}", question["question"].as_str().unwrap()));
        for (k, passage) in question["ctxs"].as_array_mut().unwrap().iter_mut().enumerate() {
            let passage = passage.as_object_mut().unwrap();
            match judged {
                true => drop(passage.insert("hasanswer".into(), (k == 0).into())),
                false => drop(passage.remove("score")),
            }
        }
        format!("{question}\n")
    };
    (0..n).map(line).collect()
}

/// Figures of all evaluations of a run.
pub fn evaluations(run: &Path) -> Vec<Value> {
    let mut lines = metrics(run);
    lines.retain(|line| line.get("event").is_some_and(|event| event == "eval"));
    for line in &mut lines {
        line.as_object_mut().unwrap().retain(|key, _| key != "time" && key != "seconds");
    }
    lines
}
