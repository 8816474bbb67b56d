//! A run that is killed, told to end, moved to other threads or another instruction set, and goes on to the same bits.

mod support;

use std::time::Duration;

use rustix::process::Signal;
use support::*;

/// Evaluation is a part of these runs; it must not change what they compute.
const EVAL: [&str; 2] = ["--eval_freq", "10"];

fn with_eval(place: &Place) -> Vec<String> {
    let data = place.path("eval.jsonl").to_str().unwrap().to_owned();
    EVAL.iter().map(|s| s.to_string()).chain(["--eval_data".into(), data]).collect()
}

/// Numbers that differ from one another and are the same at every run of the tests.
fn draw(i: u64) -> u64 {
    let mut x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 27)
}

#[test]
fn killed_at_random_moments_it_goes_on_to_the_same_bits() {
    let place = Place::new();
    let flags = with_eval(&place);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let run = place.run_dir("killed");
    let mut kills = 0;
    for attempt in 0..6 {
        let mut child = place.start("killed", &flags);
        // Counted in updates, so that it is in the middle of a run on any machine; then anywhere in an update.
        let updates = 1 + draw(attempt) as usize % 6;
        let ready = wait_for(&mut child, || match attempt {
            // The first leaves a checkpoint to go on from; two die while one is being written.
            0 => !events(&run, "checkpoint").is_empty(),
            1 | 3 => updates_of(&run, kills + 1) > 0 && is_writing(&run),
            _ => updates_of(&run, kills + 1) >= updates,
        });
        if !ready {
            assert!(child.wait().unwrap().success(), "it ended by itself, and not well");
            break;
        }
        if attempt % 2 == 0 {
            std::thread::sleep(Duration::from_micros(draw(attempt + 100) % 40_000));
        }
        // A fast machine may be done by now.
        if !kill_dead(child) {
            break;
        }
        kills += 1;
    }
    assert!(kills >= 2, "{kills} kills are no test");
    place.train("killed", &flags);
    assert_eq!(losses(&run), undisturbed().losses, "every update is logged once, with the same loss");
    let resumed = events(&run, "resume");
    assert!(resumed.len() == kills && resumed.iter().any(|&step| step > 0), "resumed at {resumed:?}");
    assert_eq!(events(&run, "start"), [0]);
    assert_eq!(events(&run, "eval"), [10, 20, 30]);
    assert!(bits(&run, "step-30") == undisturbed().bits, "parameters and moments differ");
    assert_eq!(link(&run, "latest"), "step-30");
    let hidden = std::fs::read_dir(run.join("checkpoint")).unwrap();
    let hidden: Vec<_> =
        hidden.map(|e| e.unwrap().file_name()).filter(|n| n.as_encoded_bytes()[0] == b'.').collect();
    assert!(hidden.is_empty(), "{hidden:?} are left");
}

fn is_writing(run: &std::path::Path) -> bool {
    let Ok(entries) = std::fs::read_dir(run.join("checkpoint")) else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(".writing-"))
}

#[test]
fn told_to_end_it_saves_at_the_boundary() {
    let place = Place::new();
    let run = place.run_dir("told");
    let mut ends = 0;
    let signals = [(Signal::TERM, 75), (Signal::USR1, 75), (Signal::INT, 130)];
    for (i, (signal, code)) in signals.into_iter().enumerate() {
        let mut child = place.start("told", &["--save_freq", "1000"]);
        let ready = wait_for(&mut child, || updates_of(&run, i + 1) >= 3);
        send(&child, signal);
        let (status, last) = (finish(child).status, losses(&run).last().unwrap().0);
        if i > 0 && last == TOTAL {
            break; // A fast machine was done before it was told.
        }
        assert!(ready);
        assert_eq!(status.code(), Some(code), "{signal:?}");
        ends += 1;
        assert_eq!(events(&run, "end").last(), Some(&last));
        assert_eq!(link(&run, "latest"), format!("step-{last}"), "every logged update is saved");
    }
    place.train("told", &["--save_freq", "1000"]);
    assert!(ends >= 1 && events(&run, "resume").len() >= ends);
    assert!(events(&run, "resume").iter().all(|&step| step >= 3));
    assert_eq!(losses(&run), undisturbed().losses);
    assert!(bits(&run, "step-30") == undisturbed().bits, "parameters and moments differ");
}

#[test]
fn an_interrupted_evaluation_is_made_up_for() {
    let place = Place::new();
    place.write("many.jsonl", &questions(1_000));
    let many = place.path("many.jsonl");
    let flags = ["--eval_data", many.to_str().unwrap(), "--eval_freq", "4", "--total_steps", "4"];
    let run = place.run_dir("asked");
    let mut child = place.start("asked", &flags);
    assert!(wait_for(&mut child, || losses(&run).len() == 4));
    send(&child, Signal::TERM);
    assert_eq!(finish(child).status.code(), Some(75));
    assert_eq!(events(&run, "eval"), [0u64; 0], "the evaluation was to be left");
    assert_eq!(link(&run, "latest"), "step-4");
    // What the checkpoint owes is a fifth of it now: the file may change, and the test is quick.
    place.write("many.jsonl", &questions(200));
    let output = place.train("asked", &[&flags[..], &["--json"]].concat());
    assert!(!stderr(&output).contains("the best score so far"), "there was none");
    assert_eq!(events(&run, "eval"), [4]);
    assert_eq!(link(&run, "best_dev"), "step-4");
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcome["best"]["step"], 4, "{outcome}");
}

#[test]
fn an_update_that_does_not_fit_into_the_grace_is_dropped() {
    let place = Place::new();
    place.write("many.jsonl", &questions(240));
    let many = place.path("many.jsonl");
    let flags = ["--train_data", many.to_str().unwrap(), "--global_batch_size", "240", "--total_steps", "2"];
    // On a busy machine the signal may come before the second update begins; then it is another try.
    let dropped = (0..8).map(|i| format!("told-{i}")).find(|name| {
        let run = place.run_dir(name);
        let mut child = place.start(name, &[&flags[..], &["--grace_seconds", "0"]].concat());
        assert!(wait_for(&mut child, || losses(&run).len() == 1));
        send(&child, Signal::TERM);
        assert_eq!(finish(child).status.code(), Some(75));
        let log = std::fs::read_to_string(run.join("run.log")).unwrap();
        assert!(losses(&run).len() == 1, "{log}");
        log.contains("update 2 is dropped")
    });
    let name = dropped.expect("no signal came within the second update");
    let run = place.run_dir(&name);
    assert_eq!(link(&run, "latest"), "step-1", "the last boundary is saved");
    place.train(&name, &flags);
    place.train("whole", &flags);
    assert_eq!(losses(&run), losses(&place.run_dir("whole")));
    assert!(bits(&run, "step-2") == bits(&place.run_dir("whole"), "step-2"), "parameters and moments differ");
}

#[test]
fn threads_and_instruction_sets_reach_no_bit() {
    let place = Place::new();
    place.train("threads", &["--threads", "2"]);
    assert!(bits(&place.run_dir("threads"), "step-30") == undisturbed().bits, "2 threads");
    // One and two threads of every instruction set that the processor has.
    let with = |isa: &str| {
        let of = |threads: &str| {
            let name = format!("{isa}-{threads}");
            let flags = ["--total_steps", "6", "--threads", threads];
            let output = place.command(&name, &flags).env("TERCIO_ISA", isa).output().unwrap();
            if !output.status.success() {
                assert!(failure(&output).contains("this processor does not have it"), "{}", stderr(&output));
                eprintln!("not tested here: this processor has no {isa}");
                return None;
            }
            Some(bits(&place.run_dir(&name), "step-6"))
        };
        let (one, two) = (of("1"), of("2"));
        assert!(one == two, "{isa}: other bits with 2 threads");
        one
    };
    let amx = with("amx");
    let fused = [with("avx512"), with("avx2")];
    if let [Some(avx512), Some(avx2)] = &fused {
        assert!(avx512 == avx2, "avx512 and avx2 add in the same order");
    }
    let portable = with("portable").expect("every processor has it");
    // A change of the arithmetic is said, not hidden, and the same one is not said to have changed.
    let fused = fused.into_iter().flatten().next();
    for (from, to) in [("amx", "avx512"), ("avx512", "avx2"), ("portable", "portable"), ("portable", "avx2")]
    {
        let of = |isa: &str| match isa {
            "amx" => amx.as_ref(),
            "portable" => Some(&portable),
            _ => fused.as_ref(),
        };
        let (Some(before), Some(after)) = (of(from), of(to)) else { continue };
        let run = format!("{from}-1");
        let last = |n: &str| link(&place.run_dir(&run), "latest") == format!("step-{n}");
        let total = if last("6") { "7" } else { "8" };
        let output = place.command(&run, &["--total_steps", total]).env("TERCIO_ISA", to).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let said = stderr(&output).contains("not with the same bits");
        assert_eq!(said, before != after, "{from} to {to}: {}", stderr(&output));
    }
}

#[test]
fn the_stored_settings_give_the_run_again() {
    let place = Place::new();
    place.train(
        "first",
        &["--total_steps", "10", "--seed", "7", "--scheduler", "linear", "--warmup_steps", "3"],
    );
    let config = place.run_dir("first").join("config.toml");
    let output = tercio(&["train", "reader", "--config", config.to_str().unwrap(), "--name", "again"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let (first, again) = (place.run_dir("first"), place.run_dir("again"));
    assert_eq!(losses(&first), losses(&again));
    assert!(bits(&first, "step-10") == bits(&again, "step-10"), "parameters and moments differ");
    let text = |run: &std::path::Path| std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert_eq!(text(&first).replace("\"first\"", "\"again\""), text(&again));
}
