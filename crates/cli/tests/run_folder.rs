//! A run's folder in trouble: other settings, other data, lost and damaged files, a full disk, two processes, and the ends that
//! the data or the numbers force. Each is a clear error or a stated way on, and nothing is lost.

mod support;

use std::path::Path;

use rustix::process::Signal;
use support::*;

fn config(run: &Path) -> String {
    std::fs::read_to_string(run.join("config.toml")).unwrap()
}

#[test]
fn other_settings_are_refused_or_moved_on_with() {
    let place = Place::new();
    let run = place.run_dir("a");
    place.train("a", &["--total_steps", "20"]);
    let (before, settings) = (bits(&run, "step-20"), config(&run));
    let message = failure(&place.run("a", &["--lr", "2e-3", "--seed", "5"]));
    for part in ["setting  stored  wanted", "lr       0.001   0.002", "seed     0       5", "--new-run"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(config(&run) == settings && bits(&run, "step-20") == before);
    assert_eq!(losses(&run).len(), 20, "nothing is lost");

    // More updates are no other run, and the stored settings are those of the whole.
    let output = place.train("a", &[]);
    assert!(stderr(&output).contains("--total_steps was 20, from here on it is 30"), "{}", stderr(&output));
    assert_eq!(losses(&run), undisturbed().losses);
    assert!(bits(&run, "step-30") == undisturbed().bits);
    assert!(config(&run).contains("total_steps = 30"));

    let output = place.train("a", &["--lr", "2e-3", "--total_steps", "2", "--new-run"]);
    assert!(stderr(&output).contains("a.before-1"), "{}", stderr(&output));
    assert_eq!(losses(&run).len(), 2);
    assert!(bits(&place.run_dir("a.before-1"), "step-30") == undisturbed().bits);
    let log = std::fs::read_to_string(run.join("run.log")).unwrap();
    assert!(log.contains("a.before-1"), "the log tells where the earlier run is: {log}");

    // A folder without the settings of its checkpoints could be anything.
    std::fs::remove_file(run.join("config.toml")).unwrap();
    assert!(failure(&place.run("a", &["--lr", "2e-3", "--total_steps", "2"])).contains("config.toml"));
}

#[test]
fn settings_do_not_bind_before_the_first_update() {
    let place = Place::new();
    let none = place.path("none.jsonl");
    failure(&place.run("a", &["--train_data", none.to_str().unwrap(), "--lr", "1"]));
    place.train("a", &["--total_steps", "1"]);
    assert!(config(&place.run_dir("a")).contains("lr = 0.001"));
}

#[test]
fn changed_training_data_is_named() {
    let place = Place::new();
    place.train("a", &["--total_steps", "5"]);
    let text = questions(24);
    place.write("train.jsonl", &text.replacen("river", "rover", 1));
    let message = failure(&place.run("a", &[]));
    assert!(message.contains("the training data is not that of the checkpoint"), "{message}");
    place.write("train.jsonl", &text);
    place.train("a", &["--total_steps", "6"]);
    // The same questions from another place are the same data, and what --model_path says is of no weight any more.
    place.write("moved.jsonl", &text);
    let moved = place.path("moved.jsonl");
    let flags = ["--total_steps", "7", "--train_data", moved.to_str().unwrap(), "--model_path", "/not/there"];
    let output = place.train("a", &flags);
    assert!(
        stderr(&output).contains("--model_path /not/there was the start of this run"),
        "{}",
        stderr(&output)
    );
    assert_eq!(losses(&place.run_dir("a"))[..], undisturbed().losses[..7]);
}

#[test]
fn a_lost_file_costs_one_checkpoint_and_a_flipped_byte_is_named() {
    let place = Place::new();
    let run = place.run_dir("a");
    // A line of the log is the mean of the updates since the last one, wherever the run was cut.
    let four = ["--log_freq", "4"];
    place.train("a", &["--total_steps", "15", "--log_freq", "4"]);
    std::fs::remove_file(run.join("checkpoint/step-15/model.safetensors")).unwrap();
    let output = place.train("a", &four);
    let message = stderr(&output);
    assert!(message.contains("WARN checkpoint") && message.contains("step-15 is not complete"), "{message}");
    assert_eq!(events(&run, "resume"), [10]);
    assert_eq!(losses(&run), means());
    assert!(bits(&run, "step-30") == undisturbed().bits);

    let path = run.join("checkpoint/step-30/optimizer.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let message = failure(&place.run("a", &[]));
    assert!(message.contains("optimizer.safetensors is damaged") && message.contains("step-25"), "{message}");
    let log = std::fs::read_to_string(run.join("run.log")).unwrap();
    assert!(log.lines().last().unwrap().contains("ERROR checkpoint file"), "{log}");
    std::fs::remove_dir_all(run.join("checkpoint/step-30")).unwrap();
    place.train("a", &four);
    assert_eq!(events(&run, "resume"), [10, 25]);
    assert!(bits(&run, "step-30") == undisturbed().bits);
    assert_eq!((losses(&run), link(&run, "latest")), (means(), "step-30".to_owned()));

    // With every checkpoint broken, to start over in silence would hide the loss.
    for name in checkpoints(&run) {
        let _ = std::fs::remove_file(run.join("checkpoint").join(name).join("model.safetensors"));
    }
    assert!(failure(&place.run("a", &[])).contains("no checkpoint of this run is complete"));
}

/// The log of the undisturbed run with a line every four updates and one at the end.
fn means() -> Vec<(u64, u64)> {
    let chunks = undisturbed().losses.chunks(4);
    let mean =
        |lines: &[(u64, u64)]| lines.iter().map(|l| f64::from_bits(l.1)).sum::<f64>() / lines.len() as f64;
    chunks.map(|lines| (lines.last().unwrap().0, mean(lines).to_bits())).collect()
}

/// A small file system of its own, unmounted at the end.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(at: &'a Path, size: &str) -> Result<Self, String> {
        std::fs::create_dir_all(at).unwrap();
        Self::command("mount", &["-t", "tmpfs", "-o", size, "tmpfs", at.to_str().unwrap()])?;
        Ok(SmallDisk(at))
    }
    fn command(program: &str, words: &[&str]) -> Result<(), String> {
        let output = std::process::Command::new(program).args(words).output().map_err(|e| e.to_string())?;
        if output.status.success() { Ok(()) } else { Err(stderr(&output)) }
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Self::command("umount", &[self.0.to_str().unwrap()]);
    }
}

#[test]
fn a_full_disk_costs_nothing_that_was_saved() {
    let place = Place::new();
    let run = place.run_dir("a");
    let disk = match SmallDisk::mount(&run, "size=12m") {
        Ok(disk) => disk,
        Err(why) => {
            return eprintln!(
                "not tested here: a full disk, for no small one can be mounted: {}",
                why.trim()
            );
        }
    };
    let message = failure(&place.run("a", &[]));
    assert!(message.contains("disk is full at") && message.contains("bytes are needed"), "{message}");
    let saved = checkpoints(&run);
    assert!(!saved.is_empty() && saved.len() < 6, "{saved:?}");
    assert_eq!(link(&run, "latest"), format!("step-{}", 5 * saved.len()));
    // Still full: still the same error, and still nothing lost.
    assert!(failure(&place.run("a", &[])).contains("disk is full at"));
    assert_eq!(checkpoints(&run), saved);
    // Full to the last byte: not even the lease can be written.
    let filler = std::fs::File::create(run.join("filler")).unwrap();
    let mut block = vec![0u8; 1 << 16];
    while block.len() > 1 {
        if std::io::Write::write_all(&mut &filler, &block).is_err() {
            block.truncate(block.len() / 2);
        }
    }
    assert!(failure(&place.run("a", &[])).contains("disk is full at"));
    drop(filler);
    std::fs::remove_file(run.join("filler")).unwrap();
    SmallDisk::command("mount", &["-o", "remount,size=64m", run.to_str().unwrap()]).unwrap();
    place.train("a", &[]);
    assert!(events(&run, "resume").iter().all(|&step| step == 5 * saved.len() as u64));
    assert_eq!(losses(&run), undisturbed().losses);
    assert!(bits(&run, "step-30") == undisturbed().bits);
    drop(disk);
}

#[test]
fn a_second_process_is_refused() {
    let place = Place::new();
    let run = place.run_dir("a");
    let endless = ["--total_steps", "1000000", "--save_freq", "1000000"];
    let mut first = place.start("a", &endless);
    assert!(wait_for(&mut first, || updates_of(&run, 1) > 0));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for flags in [&endless[..], &["--new-run"][..]] {
        let message = failure(&place.run("a", flags));
        assert!(message.contains(&format!("in use by pid {} on host {host}", first.id())), "{message}");
    }
    send(&first, Signal::TERM);
    assert_eq!(finish(first).status.code(), Some(75), "the first went on undisturbed");
    assert_eq!(begins(&run), 1);
}

#[test]
fn data_and_numbers_that_cannot_be_trained_on() {
    let place = Place::new();
    place.write("few.jsonl", &questions(4));
    place.write("empty.jsonl", "");
    for (name, expected) in
        [("few.jsonl", "4 examples, fewer than one batch of 8"), ("empty.jsonl", "empty.jsonl")]
    {
        let message = failure(&place.run(name, &["--train_data", place.path(name).to_str().unwrap()]));
        assert!(message.contains(expected), "{message}");
    }
    let few = place.path("few.jsonl");
    place.train(
        "kept",
        &["--train_data", few.to_str().unwrap(), "--last_batch", "keep", "--total_steps", "2"],
    );

    let message = failure(&place.run("blown", &["--lr", "1e30", "--save_freq", "1"]));
    assert!(message.contains("update 2: the ") && message.contains(" is not finite"), "{message}");
    let run = place.run_dir("blown");
    assert_eq!((checkpoints(&run), link(&run, "latest")), (vec!["step-1".to_owned()], "step-1".to_owned()));
    // Parameters past the range of f32 are not worth a checkpoint.
    let message = failure(&place.run("infinite", &["--lr", "1e39", "--save_freq", "1"]));
    assert!(message.contains("the parameters after update 1 are not finite"), "{message}");
    assert!(checkpoints(&place.run_dir("infinite")).is_empty());
}

#[test]
fn best_early_stop_and_the_last_update() {
    let place = Place::new();
    let run = place.run_dir("a");
    let eval = place.path("eval.jsonl");
    let data = ["--eval_data", eval.to_str().unwrap(), "--json"];
    let rare = ["--save_freq", "1000", "--eval_freq", "1000", "--total_steps", "7"];
    place.train("short", &[&data[..], &rare[..]].concat());
    let short = place.run_dir("short");
    assert_eq!((checkpoints(&short), events(&short, "eval")), (vec!["step-7".to_owned()], vec![7]));

    let flags = [
        "--eval_freq",
        "3",
        "--early_stop",
        "2",
        "--save_freq",
        "2",
        "--keep_last",
        "2",
        "--total_steps",
        "200",
    ];
    let flags = [&data[..], &flags[..]].concat();
    let output = place.train("a", &flags);
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let (best, last) = (outcome["best"]["step"].as_u64().unwrap(), outcome["step"].as_u64().unwrap());
    assert_eq!(last, best + 6, "two evaluations without gain: {outcome}");
    assert_eq!(link(&run, "best_dev"), format!("step-{best}"));
    assert_eq!(link(&run, "latest"), format!("step-{last}"));
    let steps: std::collections::BTreeSet<u64> =
        checkpoints(&run).iter().map(|name| name[5..].parse().unwrap()).collect();
    assert_eq!(steps, [best, last - last % 2 - if last % 2 == 0 { 2 } else { 0 }, last].into());

    // Lost links come back, and a run that has ended stays where it is.
    let before = bits(&run, &format!("step-{last}"));
    for name in ["latest", "best_dev"] {
        std::fs::remove_file(run.join("checkpoint").join(name)).unwrap();
    }
    let output = place.train("a", &flags);
    let again: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&again["step"], &again["best"]), (&outcome["step"], &outcome["best"]));
    assert_eq!(again["checkpoint"], outcome["checkpoint"]);
    assert_eq!(link(&run, "best_dev"), format!("step-{best}"));
    assert_eq!(link(&run, "latest"), format!("step-{last}"));
    assert_eq!(losses(&run).len() as u64, last);
    assert!(bits(&run, &format!("step-{last}")) == before);
}
