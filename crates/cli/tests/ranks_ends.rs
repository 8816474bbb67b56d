//! Ends of a training on several ranks: signals to one of them, ranks that fail or are killed, and ranks that were not
//! started alike. Never a hang, never half a checkpoint, and always a reason.

mod ranks_support;
mod support;

use rustix::process::Signal;

use ranks_support::*;
use support::*;

const LONG: [&str; 4] = ["--total_steps", "40", "--save_freq", "1000"];

#[test]
fn a_signal_to_one_rank_ends_all_at_one_boundary() {
    let place = Place::new();
    let whole = train(&place, "whole", 1, &["--total_steps", "40"]);
    let run = place.run_dir("told");
    // The second time there is no time left: the update at work is dropped by all.
    for (start, signal, code, grace) in
        [(1, Signal::USR1, 75, "30"), (2, Signal::TERM, 75, "0"), (3, Signal::INT, 130, "30")]
    {
        let mut ranks = train(&place, "told", 2, &[&LONG[..], &["--grace_seconds", grace]].concat());
        assert!(ranks.wait_for(|| updates_of(&run, start) >= 4), "{}", ranks.talk());
        send(&ranks.children[1], signal);
        let ends = ranks.finish();
        assert_eq!(codes(&ends), [Some(code); 2], "{}{}", ends[0].stderr, ends[1].stderr);
        let last = losses(&run).last().unwrap().0;
        assert_eq!(link(&run, "latest"), format!("step-{last}"), "every logged update is saved");
        assert_eq!(checkpoints(&run).len(), start);
    }
    train(&place, "told", 4, &LONG).succeed();
    whole.succeed();
    let whole = place.run_dir("whole");
    assert_eq!(losses(&run), losses(&whole));
    assert!(bits(&run, "step-40") == bits(&whole, "step-40"), "parameters and moments differ");
}

#[test]
fn an_interrupted_evaluation_is_left_by_all() {
    let place = Place::new();
    place.write("many.jsonl", &questions(1_000));
    let many = place.path("many.jsonl");
    let flags = ["--eval_data", many.to_str().unwrap(), "--eval_freq", "4", "--total_steps", "4"];
    let run = place.run_dir("asked");
    let mut ranks = train(&place, "asked", 2, &flags);
    assert!(ranks.wait_for(|| losses(&run).len() == 4), "{}", ranks.talk());
    send(&ranks.children[1], Signal::TERM);
    let ends = ranks.finish();
    assert_eq!(codes(&ends), [Some(75); 2], "{}{}", ends[0].stderr, ends[1].stderr);
    assert_eq!(events(&run, "eval"), [0u64; 0]);
    place.write("many.jsonl", &questions(40));
    train(&place, "asked", 2, &flags).succeed();
    assert_eq!(events(&run, "eval"), [4]);
    // One rank measures the same.
    train(&place, "one", 1, &flags).succeed();
    let score = |name: &str| {
        let lines = metrics(&place.run_dir(name));
        let eval = lines.iter().find(|l| l.get("event").is_some_and(|e| e == "eval")).unwrap();
        (eval["exact_match"].as_f64().unwrap().to_bits(), eval["f1"].as_f64().unwrap().to_bits())
    };
    assert_eq!(score("asked"), score("one"));
    assert_eq!(link(&run, "best_dev"), "step-4");
}

#[test]
fn a_rank_0_that_fails_or_dies_ends_the_others() {
    let place = Place::new();
    let run = place.run_dir("a");
    let mut ranks = train(&place, "a", 2, &["--total_steps", "4000", "--save_freq", "10"]);
    assert!(ranks.wait_for(|| updates_of(&run, 1) >= 2), "{}", ranks.talk());
    // Nothing can be saved any more.
    std::fs::rename(run.join("checkpoint"), run.join("gone")).unwrap();
    let ends = ranks.finish();
    assert_eq!(codes(&ends), [Some(1), Some(76)], "{}{}", ends[0].stderr, ends[1].stderr);
    assert!(ends[0].stderr.contains("cannot create the folder"), "{}", ends[0].stderr);
    assert!(
        ends[1].stderr.contains("rank 0 on host ") && ends[1].stderr.contains("failed at update"),
        "{}",
        ends[1].stderr
    );

    let mut ranks = train(&place, "b", 4, &["--total_steps", "4000"]);
    assert!(ranks.wait_for(|| updates_of(&place.run_dir("b"), 1) >= 2), "{}", ranks.talk());
    ranks.children[0].kill().unwrap();
    let ends = ranks.finish();
    assert_eq!(codes(&ends), [None, Some(76), Some(76), Some(76)]);
    assert!(ends[3].stderr.contains("rank 0 on host "), "{}", ends[3].stderr);
}

#[test]
fn a_loss_that_is_no_number_is_said_once() {
    let place = Place::new();
    let ends = train(&place, "a", 2, &["--lr", "1e30"]).finish();
    assert_eq!(codes(&ends), [Some(1); 2], "{}{}", ends[0].stderr, ends[1].stderr);
    assert!(ends[0].stderr.contains("is not finite; the update was not applied"), "{}", ends[0].stderr);
    assert_eq!(ends[1].stderr, "", "rank 0 has said it");
    let log = std::fs::read_to_string(place.run_dir("a").join("run.log")).unwrap();
    assert!(log.contains("ERROR update "), "{log}");
}

#[test]
fn a_rank_that_finds_a_bad_example_is_named() {
    let place = Place::new();
    let good = questions(24);
    let bad: String = good
        .lines()
        .enumerate()
        .map(|(i, line)| match i {
            17 => "{\"question\": 5}\n".to_owned(),
            _ => format!("{line}\n"),
        })
        .collect();
    place.write("train.jsonl", &bad);
    let ends = train(&place, "a", 2, &[]).finish();
    let failed: Vec<usize> = (0..2).filter(|&r| ends[r].code == Some(1)).collect();
    assert_eq!((failed.len(), ends[1 - failed[0]].code), (1, Some(76)));
    assert!(ends[failed[0]].stderr.contains("train.jsonl, line 18"), "{}", ends[failed[0]].stderr);
    assert!(ends[1 - failed[0]].stderr.contains("train.jsonl, line 18"), "the other one says why, too");
}

#[test]
fn ranks_that_were_not_started_alike_are_named() {
    let place = Place::new();
    let good = questions(24);
    let lines: Vec<&str> = good.lines().collect();
    let other: Vec<&str> =
        lines.iter().enumerate().map(|(i, l)| if i >= 11 { lines[0] } else { l }).collect();
    place.write("other.jsonl", &(other.join("\n") + "\n"));
    let other = place.path("other.jsonl").to_str().unwrap().to_owned();
    for (flags, want) in [
        (["--lr", "0.5"], "--lr is 0.5 there and 0.001 on rank 0"),
        (["--train_data", &other], "example 11 (line 12 there) is the first that differs"),
        (["--train_data", "/nowhere/train.jsonl"], "/nowhere/train.jsonl: cannot open the file"),
    ] {
        let own = |rank| if rank == 1 { flags.map(String::from).to_vec() } else { Vec::new() };
        let ends = train_with(&place, "a", 3, &[], own).finish();
        let text = &ends[0].stderr;
        assert!(text.contains("rank 1 on host ") && text.contains(want), "{flags:?}: {text}");
        assert!(ends.iter().all(|e| matches!(e.code, Some(1 | 76))), "{:?}", codes(&ends));
    }
    assert_eq!(checkpoints(&place.run_dir("a")).len(), 0);
    // The same content under another name, from another folder, with other white space is the same data.
    place.write("same.jsonl", &good.replace("\"question\":", "\"question\":  "));
    let same = place.path("same.jsonl").to_str().unwrap().to_owned();
    let own = |rank| if rank == 1 { vec!["--train_data".into(), same.clone()] } else { Vec::new() };
    train_with(&place, "a", 2, &["--total_steps", "2"], own).succeed();
}

#[test]
fn data_that_a_rank_lacks_is_sent() {
    let place = Place::new();
    let own = |rank| {
        if rank == 1 { vec!["--train_data".into(), "/nowhere/train.jsonl".into()] } else { Vec::new() }
    };
    train_with(&place, "sent", 2, &["--broadcast_data"], own).succeed();
    place.train("one", &SETTINGS);
    let (sent, one) = (place.run_dir("sent"), place.run_dir("one"));
    assert_eq!(losses(&sent), losses(&one));
    assert!(bits(&sent, "step-12") == bits(&one, "step-12"));
}

#[test]
fn a_job_that_is_started_once_more_goes_on_in_spite_of_new_run() {
    let place = Place::new();
    place.train("a", &["--total_steps", "5"]);
    let again = |restarts: &str| {
        let mut command = place.command("a", &["--total_steps", "6", "--new-run"]);
        let output = command.env("SLURM_RESTART_COUNT", restarts).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        events(&place.run_dir("a"), "resume")
    };
    assert_eq!(again("1"), [5]);
    assert!(!place.path("runs/a.before-1").exists());
    assert_eq!(again("0"), [0u64; 0]);
    assert!(place.path("runs/a.before-1").exists());
}

#[test]
fn the_plan_is_that_of_one_of_the_ranks() {
    let place = Place::new();
    let plan = |flags: &[&str]| -> serde_json::Value {
        let text = train(&place, "a", 4, &[&["--dry-run", "--json"], flags].concat()).succeed();
        serde_json::from_str(&text).unwrap()
    };
    let (whole, split) = (plan(&[]), plan(&["--shard", "optimizer"]));
    assert_eq!((&whole["ranks"], &whole["shards_of_a_rank"]), (&4.into(), &2.into()));
    // Eight groups are two on each rank: their sum waits for the second one.
    assert_eq!(whole["memory"]["gradient_arenas"], 2);
    let bytes = |plan: &serde_json::Value, part: &str| plan["memory"][part].as_u64().unwrap();
    assert_eq!(bytes(&whole, "moments"), 2 * bytes(&whole, "parameters"));
    assert_eq!(bytes(&split, "moments"), bytes(&whole, "moments") / 4);
    assert!(!place.path("runs").exists(), "a plan leaves no folder");
}

#[test]
fn only_rank_0_keeps_records() {
    let place = Place::new();
    // Rank 1 has neither the model nor a place for runs.
    let own = |rank| match rank {
        1 => {
            ["--checkpoint_dir", "/nowhere/runs", "--model_path", "/nowhere/model"].map(String::from).to_vec()
        }
        _ => Vec::new(),
    };
    let json = train_with(&place, "a", 2, &["--json", "--trace_ranks"], own).succeed();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["step"], 12);
    let run = place.run_dir("a");
    for rank in 0..2 {
        let text = std::fs::read_to_string(run.join(format!("trace/rank-{rank}.jsonl"))).unwrap();
        let updates: Vec<u64> = text
            .lines()
            .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["update"].as_u64().unwrap())
            .collect();
        assert_eq!(updates, (1..=12).collect::<Vec<_>>());
    }
    assert!(!std::path::Path::new("/nowhere").exists());
}

/// Whether the process has a handler for SIGUSR2, the last one that it makes.
fn watches_signals(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|mask| {
        u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask >> (Signal::USR2.as_raw() - 1) & 1 == 1)
    })
}

#[test]
fn a_signal_ends_ranks_that_have_not_met() {
    // Of three, one never comes: first it is rank 0, then another one.
    for absent in [0, 2] {
        for (signal, code) in [(Signal::USR1, 75), (Signal::TERM, 75), (Signal::INT, 130)] {
            let place = Place::new();
            let mut ranks = train_with(&place, "a", 3, &[], |_| Vec::new());
            ranks.children[absent].kill().unwrap();
            for present in (0..3).filter(|rank| *rank != absent) {
                let child = &mut ranks.children[present];
                let pid = child.id();
                assert!(wait_for(child, || watches_signals(pid)), "rank {present} ended by itself");
                send(&ranks.children[present], signal);
            }
            let ends = ranks.finish();
            let mut want = [Some(code); 3];
            want[absent] = None;
            assert_eq!(codes(&ends), want, "{}{}", ends[0].stderr, ends[1].stderr);
            let said = "was asked to end before all ranks had met";
            assert!(ends[1].stderr.contains(&format!("rank 1 {said}")), "{}", ends[1].stderr);
            assert!(!place.run_dir("a").exists(), "nothing was begun");
        }
    }
}

/// As the attempt that another host started finds the folder: the lease is its own, the old one lives on.
#[test]
fn an_attempt_that_was_taken_over_ends_and_saves_nothing() {
    for ranks in [1, 2] {
        let place = Place::new();
        let run = place.run_dir("a");
        let flags = ["--total_steps", "4000", "--save_freq", "5"];
        let mut old = train(&place, "a", ranks, &flags);
        assert!(old.wait_for(|| saved(&run, 5)), "{}", old.talk());
        let path = run.join("lease.json");
        let mut lease: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        lease["token"] = "of the later attempt".into();
        lease["host"] = "another-host".into();
        std::fs::write(place.path("lease"), lease.to_string()).unwrap();
        std::fs::rename(place.path("lease"), &path).unwrap();
        let ends = old.finish();
        assert_eq!(codes(&ends), vec![Some(1); ranks], "{}", ends[0].stderr);
        let words = ["a later attempt holds the lease", "on host another-host", "saves nothing"];
        assert!(words.iter().all(|word| ends[0].stderr.contains(word)), "{}", ends[0].stderr);
        assert!(
            ends[1..].iter().all(|end| end.stderr.is_empty()),
            "rank 0 has said it: {}",
            ends[ranks - 1].stderr
        );
        // It came no further than the checkpoint that was under way.
        let last = losses(&run).last().unwrap().0;
        assert!(checkpoints(&run).len() as u64 <= last / 5, "{:?} after update {last}", checkpoints(&run));
        assert!(events(&run, "end").is_empty());
        // The run itself goes on as if nothing had been.
        let goal = (last + 3).to_string();
        train(&place, "a", ranks, &["--total_steps", &goal]).succeed();
        train(&place, "whole", 1, &["--total_steps", &goal]).succeed();
        let step = format!("step-{goal}");
        assert!(bits(&run, &step) == bits(&place.run_dir("whole"), &step), "parameters and moments differ");
    }
}
