//! Too little memory: a run ends with what took it and which flags take less, and not with an abort.

mod ranks_support;
mod support;

use std::process::{Command, Output};

use ranks_support::start;
use support::*;

/// The same command with at most `mib` of addresses (`ulimit -v`).
fn limited(command: &Command, mib: u64) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -v {} && exec \"$0\" \"$@\"", mib * 1024)]);
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

/// Questions with many long passages: their activations take far more than the model.
fn long_questions(n: usize) -> String {
    let words: String = (0..80).map(|i| format!("word{} of the text ", i % 89)).collect();
    let passage = |i: usize| serde_json::json!({"title": format!("title {i}"), "text": words});
    let line = |i: usize| {
        let passages: Vec<_> = (0..24).map(passage).collect();
        format!(
            "{}\n",
            serde_json::json!({"question": format!("which {i}?"), "answers": ["one"], "ctxs": passages})
        )
    };
    (0..n).map(line).collect()
}

const MIB: u64 = 400;
const LONG: &str = "--n_context 24 --text_maxlength 250 --threads 1";

fn output(command: &Command) -> Output {
    let mut command = limited(command, MIB);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    finish(command.spawn().unwrap())
}

#[test]
fn training_says_what_took_the_memory_and_what_takes_less() {
    let place = Place::new();
    place.write("long.jsonl", &long_questions(16));
    let data = place.path("long.jsonl");
    let flags = ["--train_data", data.to_str().unwrap(), "--global_batch_size", "16", "--total_steps", "1"];
    let train = |name: &str, own: &[&str]| {
        let mut command = place.command(name, &flags);
        command.args(LONG.split(' ')).args(own);
        output(&command)
    };
    let large = train("large", &["--micro_batch_size", "8"]);
    let said = failure(&large);
    assert_eq!(large.status.code(), Some(1), "{said}");
    let wanted = [
        "out of memory in update 1: ",
        "Taken by activations ",
        "moments ",
        "gradients ",
        "parameters ",
        "--micro_batch_size below 8, --recompute, --n_context below 24, --text_maxlength below 250",
        "--bit_groups 1",
        "--optim adafactor",
    ];
    for part in wanted {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("--shard optimizer"), "there is one rank: {said}");
    let log = std::fs::read_to_string(place.run_dir("large").join("run.log")).unwrap();
    assert!(log.contains("out of memory in update 1"), "{log}");
    // What it advises helps, and the run of this name goes on.
    let small = train("small", &["--micro_batch_size", "1", "--recompute"]);
    assert!(small.status.success(), "{}", stderr(&small));
}

#[test]
fn a_plan_of_what_does_not_fit_is_a_plan_with_a_warning() {
    let place = Place::new();
    place.write("long.jsonl", &long_questions(16));
    let mut command = place.command(
        "r",
        &["--global_batch_size", "16", "--micro_batch_size", "8", "--total_steps", "1", "--dry_run"],
    );
    command.arg("--train_data").arg(place.path("long.jsonl")).args(LONG.split(' '));
    let output = output(&command);
    assert!(output.status.success(), "{}", stderr(&output));
    let plan = String::from_utf8(output.stdout).unwrap();
    let warning = "warning: no update could be measured: out of memory in update 1: ";
    assert!(plan.contains(warning) && plan.contains("--micro_batch_size below 8, --recompute"), "{plan}");
    assert!(plan.contains("activations not measured"), "{plan}");
}

#[test]
fn an_evaluation_says_it_too() {
    let place = Place::new();
    place.write("long.jsonl", &long_questions(32));
    let model = golden().join("fid_reader_t5v10/model");
    let eval = |batch: &str| {
        let mut command = tercio(&["eval", "reader", "--model", model.to_str().unwrap()]);
        command.arg("--eval_data").arg(place.path("long.jsonl")).args(LONG.split(' '));
        command.args(["--generation_max_length", "4", "--per_gpu_batch_size", batch]);
        output(&command)
    };
    let large = eval("32");
    let said = failure(&large);
    assert_eq!(large.status.code(), Some(1), "{said}");
    for part in [
        "out of memory in the answers to 32 questions at a time: ",
        "Taken by activations ",
        "--per_gpu_batch_size (in training --micro_batch_size) below 32",
        "--n_context (in training --eval_n_context) below 24",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let small = eval("2");
    assert!(small.status.success(), "{}", stderr(&small));
}

#[test]
fn a_rank_without_memory_ends_the_others() {
    let place = Place::new();
    place.write("long.jsonl", &long_questions(16));
    let ends = start(&place.path(""), 2, |rank| {
        let mut command = place.command("r", &["--global_batch_size", "16", "--micro_batch_size", "8"]);
        command.arg("--train_data").arg(place.path("long.jsonl")).args(LONG.split(' '));
        match rank {
            1 => limited(&command, MIB),
            _ => command,
        }
    })
    .finish();
    assert_eq!(ranks_support::codes(&ends), [Some(76), Some(1)], "{}\n{}", ends[0].stderr, ends[1].stderr);
    assert!(ends[1].stderr.contains("out of memory in update 1"), "{}", ends[1].stderr);
    assert!(ends[1].stderr.contains("--shard optimizer"), "there are two ranks: {}", ends[1].stderr);
    assert!(ends[0].stderr.contains("rank 1"), "{}", ends[0].stderr);
}
