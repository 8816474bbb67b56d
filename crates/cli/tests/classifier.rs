//! `tercio train classifier` on one rank and several: the same bits with every recipe and head, after a kill in the middle of an epoch too;
//! flair's table of losses; which model stands for a run; what it refuses.

mod ranks_support;
mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use ranks_support::start;
use serde_json::Value;
use support::*;

/// A [`Place`] with the stored corpus: 40 documents of three labels to learn from, and 10 held out.
struct Corner {
    place: Place,
}

impl Corner {
    fn new() -> Corner {
        let place = Place::new();
        for name in ["train.txt", "dev.txt"] {
            let text = std::fs::read_to_string(golden().join("flair_classifier/corpus").join(name)).unwrap();
            place.write(name, &text);
        }
        Corner { place }
    }
    /// The command that trains the run `name`; later flags win over the defaults here.
    fn command(&self, name: &str, flags: &[&str]) -> Command {
        let model = golden().join("flair_classifier/model");
        let mut command =
            tercio(&["train", "classifier", "--name", name, "--model_path", model.to_str().unwrap()]);
        command.args(["--checkpoint_dir".as_ref(), self.place.path("runs").as_os_str()]);
        command.args(["--train_data".as_ref(), self.place.path("train.txt").as_os_str()]);
        command.args(["--eval_data".as_ref(), self.place.path("dev.txt").as_os_str()]);
        let settings = "--missing_splits none --dropout 0.1 --mini_batch_size 8 --mini_batch_chunk_size 1 --epochs 2 --lr 2e-3 \
                        --log_freq 1 --threads 1 --keep_last 0";
        command.args(settings.split_whitespace()).args(flags);
        command
    }
    fn run(&self, name: &str, flags: &[&str]) -> Output {
        finish(self.command(name, flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }
    fn train(&self, name: &str, flags: &[&str]) -> Output {
        let output = self.run(name, flags);
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }
    fn dir(&self, name: &str) -> std::path::PathBuf {
        self.place.run_dir(name)
    }
}

/// flair's table without the times of day.
fn table(run: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(run.join("loss.tsv")).unwrap();
    let row = |line: &str| {
        let fields = line.split('\t').enumerate().filter(|(i, _)| *i != 1);
        fields.map(|(_, field)| field).collect::<Vec<_>>().join(" ")
    };
    text.lines().map(row).collect()
}

#[test]
fn two_and_four_ranks_give_the_bits_of_one() {
    let corner = Corner::new();
    let kinds: [&[&str]; 3] = [
        &["--label_smoothing", "0.1", "--class_weights", "balanced"],
        &[
            "--recipe",
            "train",
            "--head",
            "linear",
            "--pooling",
            "mean",
            "--layers",
            "0,-1",
            "--lr",
            "0.05",
            "--reduction",
            "sum",
        ],
        &["--multi_label", "--recompute", "--bf16"],
    ];
    for (i, kind) in kinds.into_iter().enumerate() {
        let run = |name: &str, ranks: usize, more: &[&str]| {
            let name = format!("{name}-{i}");
            let flags = [kind, &["--epochs", "2"], more].concat();
            start(&corner.place.path(""), ranks, |_| corner.command(&name, &flags)).succeed();
            let dir = corner.dir(&name);
            (bits(&dir, "step-10"), losses(&dir), table(&dir))
        };
        let one = run("one", 1, &[]);
        for (ranks, more) in [(2, &["--threads", "2"][..]), (4, &[])] {
            let many = run(if ranks == 2 { "two" } else { "four" }, ranks, more);
            assert_eq!(many.1, one.1, "{kind:?}, {ranks} ranks: losses");
            assert_eq!(many.2, one.2, "{kind:?}, {ranks} ranks: the table");
            assert!(many.0 == one.0, "{kind:?}, {ranks} ranks: parameters and moments differ");
        }
        assert_eq!(one.2.len(), 3, "a row for each of two epochs: {:?}", one.2);
        let other = run("other", 1, &["--seed", "3"]);
        assert!(other.0 != one.0, "{kind:?}: the seed has no effect");
    }
}

#[test]
fn killed_in_the_middle_of_an_epoch_it_goes_on_to_the_same_bits() {
    let corner = Corner::new();
    let flags = "--epochs 6 --recipe train --patience 0 --optim adamw --head linear --average_decay 0.9";
    let flags: Vec<&str> = flags.split(' ').collect();
    corner.train("whole", &flags);
    let (whole, run) = (corner.dir("whole"), corner.dir("killed"));
    for ranks in [2, 4] {
        let begun = begins(&run) + 1;
        let mut started = start(&corner.place.path(""), ranks, |_| {
            // Five updates are an epoch.
            corner.command("killed", &[&flags[..], &["--save_freq", "3"]].concat())
        });
        let ready = started.wait_for(|| updates_of(&run, begun) >= 4 + ranks);
        assert!(ready && losses(&run).len() < 30, "it was done before it was killed: {}", started.talk());
        drop(started);
    }
    corner.train("killed", &flags);
    assert!(events(&run, "resume").iter().any(|&step| step % 5 != 0), "{:?}", events(&run, "resume"));
    assert_eq!(losses(&run), losses(&whole), "every update is logged once, with the same loss");
    assert!(bits(&run, "step-30") == bits(&whole, "step-30"), "parameters, head and moments differ");
    // The average went along, and is a model of its own.
    let average = |run: &Path, file: &str| std::fs::read(run.join(file)).unwrap();
    for file in ["average-model/model.safetensors", "checkpoint/step-30/average.safetensors"] {
        assert!(average(&run, file) == average(&whole, file), "{file} differs");
    }
    let last = average(&run, "checkpoint/step-30/model.safetensors");
    assert!(average(&run, "average-model/model.safetensors") != last);
    let (model, data) = (run.join("average-model"), corner.place.path("dev.txt"));
    let words = ["eval", "classifier", "--model", model.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let output = tercio(&words).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(events(&run, "eval"), [5, 10, 15, 20, 25, 30]);
    assert_eq!(table(&run), table(&whole), "rates, epochs without gain and figures too");
    let head = &table(&run)[0];
    assert_eq!(
        head,
        "EPOCH BAD_EPOCHS LEARNING_RATE TRAIN_LOSS DEV_LOSS DEV_PRECISION DEV_RECALL DEV_F1 DEV_ACCURACY"
    );
}

#[test]
fn a_rate_falls_on_a_plateau_and_ends_the_run() {
    let corner = Corner::new();
    // Steps too small to matter: no evaluation is better than the first.
    let flags = [
        "--recipe",
        "train",
        "--lr",
        "1e-12",
        "--min_learning_rate",
        "3e-13",
        "--patience",
        "1",
        "--epochs",
        "50",
    ];
    corner.train("flat", &[&flags[..], &["--dropout", "0"]].concat());
    let rows = table(&corner.dir("flat"));
    let column =
        |i: usize| rows[1..].iter().map(|r| r.split(' ').nth(i).unwrap().to_owned()).collect::<Vec<_>>();
    // The first gains; each second one without gain lets the rate fall by a half; at a quarter it is below the least.
    assert_eq!(column(1), ["0", "1", "0", "1", "0"], "{rows:?}");
    let rates: Vec<f64> = column(2).iter().map(|r| r.parse().unwrap()).collect();
    assert_eq!(rates, [1e-12, 1e-12, 1e-12, 5e-13, 5e-13], "{rows:?}");
    let said = std::fs::read_to_string(corner.dir("flat").join("run.log")).unwrap();
    assert!(said.contains("the learning rate has fallen"), "{said}");
}

#[test]
fn the_model_of_a_run_is_the_best_or_the_last() {
    let corner = Corner::new();
    let flags = ["--epochs", "3", "--lr", "3e-3"];
    for (name, which) in [("best", "best"), ("last", "last")] {
        let test = golden().join("flair_classifier/corpus/test.txt");
        let more = ["--use_model", which, "--json", "--test_data", test.to_str().unwrap()];
        let output = corner.train(name, &[&flags[..], &more].concat());
        let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
        let dir = corner.dir(name);
        let best = format!("step-{}", outcome["best"]["step"]);
        let links = ["checkpoint/model", "best-model", "final-model"].map(|link| {
            std::fs::canonicalize(dir.join(link)).unwrap().file_name().unwrap().to_str().unwrap().to_owned()
        });
        let chosen = if which == "best" { best.clone() } else { "step-15".into() };
        assert_eq!(links, [chosen, best, "step-15".into()]);
        // What was measured at the end is what the command measures of the run's model.
        let measured: Value = serde_json::from_slice(&std::fs::read(dir.join("test.json")).unwrap()).unwrap();
        let words = ["eval", "classifier", "--model", dir.to_str().unwrap(), "--threads", "1", "--json"];
        let data = ["--data", test.to_str().unwrap()];
        let output = tercio(&[&words[..], &data].concat()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["accuracy"], measured["accuracy"], "{report}");
        let near = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-9;
        assert!(near(&report["loss"], &measured["loss"]), "{report} {measured}");
        let config = std::fs::read(dir.join("final-model/config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["architectures"], serde_json::json!(["BertForSequenceClassification"]));
        assert_eq!(config["id2label"], serde_json::json!({"0": "sale", "1": "repair", "2": "art"}));
    }
    // A classifier of the same labels is trained on with its head; one of others gets a new layer of logits.
    let start = corner.dir("last");
    let text = std::fs::read_to_string(corner.place.path("train.txt")).unwrap();
    corner.place.write("fewer.txt", &text.replace("__label__art", "__label__sale"));
    let dev = std::fs::read_to_string(corner.place.path("dev.txt")).unwrap();
    corner.place.write("fewer_dev.txt", &dev.replace("__label__art", "__label__sale"));
    let more = ["--model_path", start.to_str().unwrap(), "--epochs", "1"];
    let said = stderr(&corner.train("more", &more));
    assert!(!said.contains("drawn by --seed"), "{said}");
    let [train, dev] =
        ["fewer.txt", "fewer_dev.txt"].map(|f| corner.place.path(f).to_str().unwrap().to_owned());
    let said =
        stderr(&corner.train("fewer", &[&more[..], &["--train_data", &train, "--eval_data", &dev]].concat()));
    assert!(said.contains("drawn by --seed: classifier.weight, classifier.bias"), "{said}");
}

#[test]
fn ranks_with_other_labels_are_named() {
    let corner = Corner::new();
    let text = std::fs::read_to_string(corner.place.path("train.txt")).unwrap();
    corner.place.write("other.txt", &text.replacen("__label__art", "__label__craft", 1));
    let other = corner.place.path("other.txt");
    let ends = start(&corner.place.path(""), 2, |rank| {
        let own = ["--train_data", other.to_str().unwrap()];
        corner.command("labels", if rank == 1 { &own } else { &[] })
    })
    .finish();
    assert!(ends.iter().all(|end| end.code.is_some_and(|code| code != 0)), "{:?}", ends[0].code);
    let said: String = ends.iter().map(|e| e.stderr.as_str()).collect();
    assert!(said.contains("rank 1") && said.contains("other.txt") && said.contains("line "), "{said}");
}

#[test]
fn all_ranks_have_the_same_test_file() {
    let corner = Corner::new();
    let text = std::fs::read_to_string(golden().join("flair_classifier/corpus/test.txt")).unwrap();
    corner.place.write("test.txt", &text);
    // Without its last line.
    let shorter = text.trim_end().rfind('\n').map(|end| &text[..=end]).unwrap();
    corner.place.write("other_test.txt", shorter);
    let path = |name: &str| corner.place.path(name).to_str().unwrap().to_owned();
    let among = |name: &str, second: &str, more: &[&str]| {
        start(&corner.place.path(""), 2, |rank| {
            let own = path(if rank == 1 { second } else { "test.txt" });
            corner.command(name, &[&["--epochs", "1", "--test_data", &own], more].concat())
        })
    };
    let ends = among("unlike", "other_test.txt", &[]).finish();
    assert!(ends.iter().all(|end| end.code.is_some_and(|code| code != 0)), "{:?}", ends[0].code);
    let said: String = ends.iter().map(|e| e.stderr.as_str()).collect();
    assert!(said.contains("rank 1") && said.contains("other_test.txt"), "{said}");
    assert!(losses(&corner.dir("unlike")).is_empty(), "it was to be found before the first update");
    // A rank without the file gets it.
    among("sent", "nowhere/test.txt", &["--broadcast_data"]).succeed();
    corner.train("alone", &["--epochs", "1", "--test_data", &path("test.txt")]);
    let figures = |name: &str| std::fs::read_to_string(corner.dir(name).join("test.json")).unwrap();
    assert_eq!(figures("sent"), figures("alone"));
}

#[test]
fn the_link_to_the_model_moves_while_a_run_goes_on() {
    let corner = Corner::new();
    let flags = ["--keep_last", "1", "--use_model", "last", "--save_freq", "5"];
    corner.train("goes-on", &[&flags[..], &["--epochs", "1"]].concat());
    let link = corner.dir("goes-on").join("checkpoint/model");
    let step = || {
        let folder = std::fs::canonicalize(&link).ok()?;
        folder.file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok()
    };
    assert_eq!(step(), Some(5));
    let mut child = corner.command("goes-on", &[&flags[..], &["--epochs", "1000"]].concat());
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let moved = wait_for(&mut child, || step().is_some_and(|step| step > 5));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(moved && step().is_some(), "{:?}", std::fs::read_link(&link));
}

#[test]
fn another_kind_of_labels_than_the_model_has_is_said() {
    let corner = Corner::new();
    corner.train("several", &["--epochs", "1", "--multi_label"]);
    let start = corner.dir("several").join("checkpoint/model");
    let said = |name: &str, more: &[&str]| {
        let flags = ["--epochs", "1", "--model_path", start.to_str().unwrap()];
        stderr(&corner.train(name, &[&flags[..], more].concat()))
    };
    assert!(said("one", &[]).contains("without --multi_label it learns to give one"));
    assert!(said("above", &["--multi_label", "--threshold", "0.3"]).contains("those above --threshold 0.3"));
    let same = said("same", &["--multi_label"]);
    assert!(!same.contains("--multi_label") && !same.contains("--threshold"), "{same}");
}

#[test]
fn a_missing_dev_is_cut_the_same_on_all_ranks() {
    let corner = Corner::new();
    let run = |name: &str, ranks: usize| {
        start(&corner.place.path(""), ranks, |_| {
            let model = golden().join("flair_classifier/model");
            let mut command =
                tercio(&["train", "classifier", "--name", name, "--epochs", "1", "--log_freq", "1"]);
            command.args(["--model_path".as_ref(), model.as_os_str()]);
            command.args(["--checkpoint_dir".as_ref(), corner.place.path("runs").as_os_str()]);
            command.args(["--train_data".as_ref(), corner.place.path("train.txt").as_os_str()]);
            command.args("--mini_batch_chunk_size 1 --threads 1 --stratified".split_whitespace());
            command
        })
        .succeed();
        let said = std::fs::read_to_string(corner.dir(name).join("run.log")).unwrap();
        assert!(said.contains("test, 4 documents"), "{said}");
        // 40 documents: 4 are cut for test, then 4 of 36 for dev; 32 in batches of 4 are 8 updates.
        assert!(said.contains("32 documents in train, 4 in dev, 4 in test"), "{said}");
        let test = std::fs::read_to_string(corner.dir(name).join("test.json")).unwrap();
        (bits(&corner.dir(name), "step-8"), table(&corner.dir(name)), test)
    };
    assert!(run("one", 1) == run("two", 2));
}

#[test]
fn the_stored_settings_give_the_run_again() {
    let corner = Corner::new();
    let flags =
        ["--recipe", "train", "--epochs", "1", "--class_weights", "sale=2,art=0.5", "--text_maxlength", "20"];
    corner.train("first", &flags);
    let config = corner.dir("first").join("config.toml");
    let output =
        tercio(&["train", "classifier", "--config", config.to_str().unwrap(), "--name", "again"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let (first, again) = (corner.dir("first"), corner.dir("again"));
    assert!(bits(&first, "step-5") == bits(&again, "step-5"), "parameters and moments differ");
    let text = |run: &Path| std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert_eq!(text(&first).replace("\"first\"", "\"again\""), text(&again));
    let printed =
        tercio(&["config", "print-classifier", "--config", config.to_str().unwrap()]).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap().trim_end(), text(&first).trim_end());
    // More epochs go on; another recipe for the optimizer is another run.
    corner.train("first", &[&flags[..], &["--epochs", "2"]].concat());
    assert_eq!(events(&first, "eval"), [5, 10]);
    let said = failure(&corner.run("first", &[&flags[..], &["--optim", "adam"]].concat()));
    assert!(said.contains("optim") && said.contains("--new-run"), "{said}");
}

#[test]
fn a_plan_says_what_an_update_is() {
    let corner = Corner::new();
    let output = corner.train("plan", &["--dry-run", "--json"]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (name, value) in [
        ("examples", 40),
        ("updates", 10),
        ("updates_per_epoch", 5),
        ("global_batch_size", 8),
        ("shards", 8),
        ("measured_updates", 2),
    ] {
        assert_eq!(plan[name], value, "{name}: {plan}");
    }
    assert!(!corner.dir("plan").exists());
    // An average is one more arena, and one more file of a checkpoint.
    let output = corner.train("plan", &["--dry-run", "--json", "--average_decay", "0.9"]);
    let averaged: Value = serde_json::from_slice(&output.stdout).unwrap();
    let parameters = plan["memory"]["parameters"].as_u64().unwrap();
    let average = |plan: &Value| plan["memory"]["average"].as_u64().unwrap();
    assert_eq!((average(&plan), average(&averaged)), (0, parameters));
    let checkpoint = |plan: &Value| plan["checkpoint"].as_u64().unwrap();
    assert_eq!(checkpoint(&averaged), checkpoint(&plan) + parameters);
    let said = stderr(&corner.train("plan", &["--dry-run"]));
    assert!(said.contains("an update is 8 texts on any number of ranks"), "{said}");
}

#[test]
fn what_cannot_be_trained_is_named() {
    let corner = Corner::new();
    let path = |name: &str| corner.place.path(name).to_str().unwrap().to_owned();
    corner.place.write("bare.txt", "__label__a one\n__label__b two\nno label here\n");
    corner.place.write("one.txt", "__label__a one\n__label__a two\n");
    corner.place.write("two.txt", "__label__a __label__b one\n__label__b two\n");
    let text = std::fs::read_to_string(corner.place.path("dev.txt")).unwrap();
    corner.place.write("unknown.txt", &text.replacen("__label__art", "__label__craft", 1));
    let reader = golden().join("fid_reader_t5v10/model");
    let cases: [(&[&str], i32, &[&str]); 11] = [
        (&["--train_data", &path("bare.txt")], 1, &["bare.txt", "line 3", "a label", "--skip_bad"]),
        (&["--train_data", &path("one.txt")], 1, &["one.txt", "two labels"]),
        (&["--train_data", &path("two.txt")], 1, &["two.txt", "line 1", "--multi_label"]),
        (&["--eval_data", &path("unknown.txt")], 1, &["unknown.txt", "line ", "craft", "--unknown_labels"]),
        (&["--class_weights", "craft=2"], 2, &["--class_weights", "craft", "sale"]),
        (&["--class_weights", "art"], 2, &["--class_weights", "\"art\""]),
        (&["--pooling", "mean"], 2, &["BertForSequenceClassification", "linear"]),
        (&["--text_maxlength", "65"], 2, &["--text_maxlength 65", "64"]),
        (&["--mini_batch_chunk_size", "3"], 2, &["multiple"]),
        (&["--model_path", reader.to_str().unwrap()], 1, &["t5"]),
        (&["--train_data", &path("nowhere.csv")], 1, &["nowhere.csv"]),
    ];
    for (i, (flags, code, words)) in cases.into_iter().enumerate() {
        let output = corner.run(&format!("bad-{i}"), flags);
        let said = failure(&output);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {said}");
        assert!(words.iter().all(|w| said.contains(w)), "{flags:?}: expected {words:?} in: {said}");
    }
    // What is bad can be left out, and what is unknown counted.
    let eval = path("unknown.txt");
    corner.train("counted", &["--epochs", "1", "--eval_data", &eval, "--unknown_labels", "count"]);
    let bare = path("bare.txt");
    let none = ["--train_data", &bare, "--skip_bad", "--epochs", "1", "--eval_data", &bare];
    let said = stderr(&corner.train("skipped", &none));
    assert!(said.contains("left out") && said.contains("line 3"), "{said}");
}
