//! A loop as dependent jobs: each stage waits for those it needs, vectors are an array, and the end is that of one process.

use std::collections::BTreeMap;

use super::cluster::*;
use super::rounds_support::{STAGES, collection, results, settings};
use super::support::{Place, finish, stderr, tercio};

#[test]
fn a_loop_as_jobs_that_wait_for_one_another() {
    let place = Place::new();
    place.write("passages.tsv", &collection());
    // A job of Slurm runs where it was sent in from.
    let of = |name: &str| format!("\"{}\"", place.path(name).display());
    let mut text = settings();
    for name in ["passages.tsv", "train.jsonl", "eval.jsonl"] {
        text = text.replace(&format!("\"{name}\""), &of(name));
    }
    let alone = text.replace("\"loop\"", &of("alone"));
    place.write("alone.toml", &alone);
    let slurm = format!(
        "\n[slurm]\noutput = {}\ntime = \"20\"\n[slurm.reader]\nntasks_per_node = 2\n[slurm.vectors]\narray = 2\n",
        of("output-%x-%j")
    );
    place.write("loop.toml", &(text.replace("\"loop\"", &of("loop")) + &slurm));
    let mut command = tercio(&["loop", "--config", place.path("alone.toml").to_str().unwrap()]);
    let alone = finish(command.stderr(std::process::Stdio::piped()).spawn().unwrap());
    assert!(alone.status.success(), "{}", stderr(&alone));

    let cluster = Cluster::start(2, &[]);
    let config = place.path("loop.toml");
    let words = ["loop", "--config", config.to_str().unwrap(), "--slurm"];
    let output = cluster.client(env!("CARGO_BIN_EXE_tercio"), &words);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let jobs: BTreeMap<&str, &str> =
        text.lines().map(|line| line.split_once(' ').unwrap()).map(|(job, stage)| (stage, job)).collect();
    assert_eq!(jobs.len(), STAGES.len(), "{text}");
    let talk = || {
        let mut all = String::new();
        for entry in std::fs::read_dir(place.path("")).unwrap().flatten() {
            if entry.file_name().to_string_lossy().starts_with("output-") {
                all += &tail(&entry.path(), 5);
            }
        }
        all
    };
    for stage in STAGES {
        wait_until(&format!("{stage} has ended"), || {
            let shown = cluster.client("scontrol", &["show", "job", jobs[stage], "--oneliner"]);
            let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
            let states = ["FAILED", "CANCELLED", "TIMEOUT"].map(|state| format!("JobState={state}"));
            assert!(!states.iter().any(|state| shown.contains(state)), "{shown}\n{}", talk());
            // An array shows a line for each of its jobs.
            shown.lines().filter(|l| l.contains("JobState=")).all(|l| l.contains("JobState=COMPLETED"))
        });
    }
    assert_eq!(results(&place.path("loop")), results(&place.path("alone")));

    // All is there now: nothing is sent in, and one process only writes the table.
    let again = cluster.client(env!("CARGO_BIN_EXE_tercio"), &words);
    assert!(again.status.success() && again.stdout.is_empty(), "{}", stderr(&again));
    assert!(stderr(&again).contains("all stages are up to date"), "{}", stderr(&again));
}
