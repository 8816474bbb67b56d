//! `tercio loop` as a user runs it: to its end, ended in every stage, by two ranks, with settings that changed, and with files that
//! make no sense.

mod ranks_support;
mod rounds_support;
mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};

use rounds_support::{STAGES, collection, results, settings};
use rustix::process::Signal;
use serde_json::Value;
use support::{Place, failure, finish, kill_dead, send, stderr, tercio, wait_for};

/// A folder with a collection, questions, and settings of a small loop.
struct Corner {
    place: Place,
}

impl Corner {
    fn new() -> Corner {
        let place = Place::new();
        place.write("passages.tsv", &collection());
        place.write("loop.toml", &settings());
        Corner { place }
    }
    fn folder(&self) -> PathBuf {
        self.place.path("loop")
    }
    fn command(&self, flags: &[&str]) -> std::process::Command {
        let mut command = tercio(&["loop", "--config", "loop.toml"]);
        command.current_dir(self.place.path("")).args(flags);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
    fn run(&self, flags: &[&str]) -> Output {
        finish(self.command(flags).spawn().unwrap())
    }
    /// Runs it to its end.
    fn complete(&self) -> Output {
        let output = self.run(&[]);
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }
    fn start(&self) -> Child {
        let log = std::fs::File::create(self.place.path("stderr")).unwrap();
        self.command(&[]).stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }
    /// How each stage stands.
    fn plan(&self) -> BTreeMap<String, String> {
        let output = self.run(&["--dry-run", "--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        let plan: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        assert_eq!(plan.iter().map(|p| text(&p["stage"])).collect::<Vec<_>>(), STAGES);
        plan.iter().map(|p| (text(&p["stage"]), text(&p["standing"]))).collect()
    }
    /// Stages that are not up to date.
    fn to_do(&self) -> Vec<String> {
        let plan = self.plan();
        STAGES.iter().filter(|s| plan[**s] != "up to date").map(|s| (*s).to_owned()).collect()
    }
    /// What each stage came to, by content.
    fn results(&self) -> BTreeMap<&'static str, Value> {
        results(&self.folder())
    }
}

/// What a loop that was never disturbed comes to.
fn undisturbed() -> &'static BTreeMap<&'static str, Value> {
    static ONCE: std::sync::OnceLock<BTreeMap<&'static str, Value>> = std::sync::OnceLock::new();
    ONCE.get_or_init(|| {
        let corner = Corner::new();
        let output = corner.complete();
        let text = String::from_utf8(output.stdout).unwrap();
        let table = std::fs::read_to_string(corner.folder().join("table.md")).unwrap();
        assert_eq!(text, table);
        for row in ["| BM25 ", "| untrained retriever ", "| retriever of round 1 ", "| retriever of round 2 "]
        {
            assert!(text.contains(row), "{row} in {text}");
        }
        let table: Value =
            serde_json::from_slice(&std::fs::read(corner.folder().join("table.json")).unwrap()).unwrap();
        let rows = table["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 5, "BM25, untrained, and what each round read and found: {table}");
        for row in rows {
            let hits: Vec<f64> =
                row["hits"].as_array().unwrap()[..2].iter().map(|h| h.as_f64().unwrap()).collect();
            assert!(0.0 <= hits[0] && hits[0] <= hits[1] && hits[1] <= 1.0, "{row}");
            assert_eq!(row["hits"][2], Value::Null, "there are six passages only");
            assert!((0.0..=1.0).contains(&row["exact_match"].as_f64().unwrap()), "{row}");
        }
        assert!(rows[0]["hits"][1].as_f64().unwrap() > 0.5, "words find most of these answers: {table}");
        assert!(corner.to_do().is_empty());
        // Nothing is computed again.
        let (before, again) = (corner.results(), corner.complete());
        assert_eq!(String::from_utf8(again.stdout.clone()).unwrap(), text);
        assert_eq!(corner.results(), before);
        assert!(!stderr(&again).contains("round-1/"), "no stage was done: {}", stderr(&again));
        before
    })
}

#[test]
fn a_loop_goes_on_wherever_it_was_killed() {
    let want = undisturbed();
    // A loop that ran on while this test did not get the processor was hardly killed: then another one is.
    let mut counts = (0, 0);
    for _ in 0..5 {
        let corner = Corner::new();
        counts = (0, 0);
        for stage in STAGES {
            let begun = corner.folder().join(format!("{stage}.begun.json"));
            let done = corner.folder().join(format!("{stage}.json"));
            let mut child = corner.start();
            if wait_for(&mut child, || begun.exists() || done.exists()) && kill_dead(child) {
                counts.0 += 1;
                counts.1 += usize::from(begun.exists() && !done.exists());
            }
        }
        corner.complete();
        assert_eq!(&corner.results(), want);
        if counts.0 >= 15 && counts.1 >= 8 {
            break;
        }
    }
    let (killed, inside) = counts;
    assert!(killed >= 15 && inside >= 8, "it was killed {killed} times, {inside} of them at work");
}

#[test]
fn a_loop_killed_while_it_made_a_folder_anew_goes_on() {
    let folder_is_gone = || {
        let corner = Corner::new();
        let begun = corner.folder().join("bm25/index.begun.json");
        let mut child = corner.start();
        wait_for(&mut child, || begun.exists());
        kill_dead(child);
        let gone = corner.plan()["bm25/index"] == "begun";
        if gone {
            // Sometimes it is gone already.
            let _ = std::fs::remove_dir_all(corner.folder().join("bm25/index"));
            assert!(!corner.folder().join("bm25/index").exists());
        }
        gone.then_some(corner)
    };
    let corner = (0..50).find_map(|_| folder_is_gone()).expect("one of these was killed in its first stage");
    corner.complete();
    assert_eq!(&corner.results(), undisturbed());
}

#[test]
fn a_signal_saves_and_the_next_start_goes_on() {
    let corner = Corner::new();
    let metrics = corner.folder().join("round-1/reader/metrics.jsonl");
    let mut child = corner.start();
    assert!(wait_for(&mut child, || metrics.exists()));
    send(&child, Signal::TERM);
    let output = finish(child);
    assert_eq!(
        output.status.code(),
        Some(75),
        "{}",
        std::fs::read_to_string(corner.place.path("stderr")).unwrap()
    );
    let plan = corner.plan();
    assert_eq!(plan["round-1/search"], "up to date");
    assert!(["begun", "up to date"].contains(&plan["round-1/reader"].as_str()), "{plan:?}");
    corner.complete();
    assert_eq!(&corner.results(), undisturbed());
}

#[test]
fn two_ranks_give_the_same_bits() {
    let want = undisturbed();
    let corner = Corner::new();
    let folder = corner.place.path("");
    let text = ranks_support::start(&folder, 2, |_| {
        let mut command = tercio(&["loop", "--config", "loop.toml"]);
        command.current_dir(&folder);
        command
    })
    .succeed();
    assert!(text.contains("| retriever of round 2 "), "{text}");
    assert_eq!(&corner.results(), want);
    assert!(corner.to_do().is_empty());
}

#[test]
fn what_rests_on_a_changed_setting_is_done_again_and_nothing_else() {
    let corner = Corner::new();
    corner.complete();
    let text = settings();
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from));
        corner.place.write("loop.toml", &text.replace(from, to));
        corner.to_do()
    };
    // What changes no result.
    assert!(changed("threads = 1", "threads = 2").is_empty());
    assert!(
        changed(
            "save_freq = 2\neval_freq = 2\nlog_freq = 1\n\n[scores]",
            "save_freq = 1\neval_freq = 2\nlog_freq = 2\n\n[scores]"
        )
        .is_empty()
    );
    // One round less or more.
    assert_eq!(corner.run(&["--rounds", "1", "--dry-run", "--json"]).status.code(), Some(0));
    let more = corner.run(&["--rounds", "3", "--dry-run", "--json"]);
    let plan: Vec<Value> = serde_json::from_slice(&more.stdout).unwrap();
    let to_do: Vec<&str> =
        plan.iter().filter(|p| p["standing"] != "up to date").map(|p| p["stage"].as_str().unwrap()).collect();
    assert!(to_do.iter().all(|stage| stage.starts_with("round-3/")) && to_do.len() == 7, "{to_do:?}");
    // The retriever's rate: its training, and all after it, but neither reader nor untrained retriever of round 1.
    let to_do = changed("lr = 2e-3", "lr = 1e-3");
    assert_eq!(to_do, STAGES[8..].iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
    let before = corner.results();
    corner.complete();
    let after = corner.results();
    for stage in &STAGES[..8] {
        assert_eq!(before[stage], after[stage], "{stage} was up to date");
    }
    assert_ne!(before["round-1/retriever"], after["round-1/retriever"]);
    // Back again: the same as in the first place.
    corner.place.write("loop.toml", &text);
    corner.complete();
    assert_eq!(&corner.results(), undisturbed());
    // A result that is gone is made anew.
    std::fs::remove_file(corner.folder().join("round-2/scores/train.jsonl")).unwrap();
    assert_eq!(corner.to_do()[0], "round-2/scores");
    corner.complete();
    assert_eq!(&corner.results(), undisturbed());
    // So is what other questions were the start of.
    corner.place.write("train.jsonl", &support::questions(23));
    assert_eq!(corner.to_do()[0], "round-1/search");
}

#[test]
fn stages_one_by_one() {
    let corner = Corner::new();
    let early = corner.run(&["--stage", "round-1/reader"]);
    let text = failure(&early);
    assert!(text.contains("round-1/reader: round-1/search is not up to date; do it first"), "{text}");
    for stage in STAGES {
        let output = corner.run(&["--stage", stage]);
        assert!(output.status.success(), "{stage}: {}", stderr(&output));
    }
    assert_eq!(&corner.results(), undisturbed());
    let unknown = corner.run(&["--stage", "round-3/reader"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("round-3/reader: there is no such stage; expected one of bm25/index"));
}

#[test]
fn parts_of_vectors_by_an_array() {
    let corner = Corner::new();
    for stage in &STAGES[..5] {
        let output = corner.run(&["--stage", stage]);
        assert!(output.status.success(), "{stage}: {}", stderr(&output));
    }
    let part = |number: &str| {
        let mut command = corner.command(&["--stage", "untrained/vectors", "--parts", "2"]);
        finish(command.env("SLURM_ARRAY_TASK_ID", number).spawn().unwrap())
    };
    let beyond = part("2");
    assert_eq!(beyond.status.code(), Some(2));
    assert!(
        stderr(&beyond).contains("expected the number of a part, from 0 to one less, in SLURM_ARRAY_TASK_ID")
    );
    assert!(part("1").status.success());
    assert!(corner.to_do().contains(&"untrained/vectors".to_owned()), "half of it is there");
    assert!(part("0").status.success());
    assert!(!corner.to_do().contains(&"untrained/vectors".to_owned()));
    let state = std::fs::read(corner.folder().join("untrained/vectors.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    assert_eq!(state["results"], undisturbed()["untrained/vectors"]["results"]);
    let wrong = corner.run(&["--stage", "round-1/search", "--parts", "2"]);
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn scripts_of_jobs_wait_for_one_another() {
    let corner = Corner::new();
    let slurm = "\n[slurm]\ntime = \"30\"\nnodes = 2\n[slurm.vectors]\narray = 4\nnodes = 1\n";
    corner.place.write("loop.toml", &(settings() + slurm));
    let output = corner.run(&["--slurm", "--dry-run"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let scripts: Vec<&str> = text.split("#!/bin/bash").skip(1).collect();
    assert_eq!(scripts.len(), STAGES.len());
    for (script, stage) in scripts.iter().zip(STAGES) {
        let name = stage.replace('/', "-");
        assert!(script.contains(&format!("#SBATCH --job-name=tercio-{name}\n")), "{script}");
        assert!(
            script.contains(&format!("'{stage}'")) || script.contains(&format!("    {stage}\n")),
            "{script}"
        );
        assert!(script.contains("#SBATCH --time=30\n"));
        let is_vectors = stage.ends_with("vectors");
        assert_eq!(script.contains("#SBATCH --array=0-3\n"), is_vectors, "{script}");
        assert_eq!(script.contains("--parts"), is_vectors);
        assert!(script.contains(if is_vectors { "--nodes=1\n" } else { "--nodes=2\n" }));
        assert_eq!(script.contains("#SBATCH --dependency=afterok:"), stage != "bm25/index");
    }
    assert!(scripts[9].contains("--dependency=afterok:JOB_OF_ROUND_1_RETRIEVER\n"), "{}", scripts[9]);
    assert!(!corner.folder().exists(), "nothing was begun");
    // What is wrong with the jobs is said before anything is done.
    for (wrong, with) in [
        ("[slurm]\nnode = 2\n", "node: there is no such setting; did you mean nodes?"),
        ("[slurm.readers]\nnodes = 2\n", "there is no table [slurm.readers]"),
        ("[slurm.reader]\narray = 2\n", "array: the parts of vectors"),
        ("[slurm.vectors]\narray = 0\n", "array = \"0\": expected the number of parts"),
    ] {
        corner.place.write("loop.toml", &(settings() + "\n" + wrong));
        let output = corner.run(&[]);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        assert!(
            stderr(&output).contains(with) && stderr(&output).contains("loop.toml, line "),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn hostile_settings_and_folders() {
    let corner = Corner::new();
    for (text, code, with) in [
        ("", 2, "--passages"),
        ("passages = 1", 2, "loop.toml"),
        ("[[reader]]\n", 2, "loop.toml"),
        ("passages = \"x", 2, "loop.toml, line 1"),
        (&settings().replace("rounds = 2", "rounds = -2"), 2, "line 4"),
        (
            &settings().replace("n_docs = 6", "n_docs = 2"),
            2,
            "n_docs = 2: reader or retriever are to use 4 passages",
        ),
        (&settings().replace("passages.tsv", "gone.tsv"), 1, "gone.tsv"),
        (&settings().replace("train.jsonl", "gone.jsonl"), 1, "gone.jsonl"),
        (&settings().replace("output = \"loop\"", "output = \"passages.tsv\""), 1, "passages.tsv"),
    ] {
        corner.place.write("loop.toml", text);
        let output = corner.run(&[]);
        assert_eq!(output.status.code(), Some(code), "{text}: {}", stderr(&output));
        assert!(failure(&output).contains(with), "{with} in {}", stderr(&output));
    }
    let none = finish(tercio(&["loop", "--config", "/no/such.toml"]).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(none.status.code(), Some(1));
    // A folder that is somebody else's is left as it is.
    let corner = Corner::new();
    let theirs = corner.folder().join("bm25/index");
    std::fs::create_dir_all(&theirs).unwrap();
    std::fs::write(theirs.join("thesis.txt"), "years of work").unwrap();
    let output = corner.run(&[]);
    assert!(failure(&output).contains("nothing says what it is of; move it away"), "{}", stderr(&output));
    assert!(theirs.join("thesis.txt").exists());
}
