//! `tercio slurm submit`, `status` and `logs` against a real Slurm.

use std::process::Output;

use serde_json::Value;

use super::cluster::*;
use super::support;
use super::trial::*;

/// `tercio WORDS`, as a user of the cluster.
fn tercio(trial: &Trial, words: &[impl AsRef<str>]) -> Output {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    trial.cluster.client(env!("CARGO_BIN_EXE_tercio"), &words)
}

/// Its stdout; it must succeed.
fn told(trial: &Trial, words: &[&str]) -> String {
    let output = tercio(trial, words);
    assert!(output.status.success(), "{words:?}: {}", support::stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_job_is_submitted_followed_and_asked_for() {
    let trial = Trial::new(2, &[]);
    let output = tercio(&trial, &trial.submit_words(2, &["--follow"]));
    let talk = support::stderr(&output);
    assert!(output.status.success(), "{talk}{}", trial.output());
    let text = String::from_utf8(output.stdout).unwrap();
    let (job, rest) = text.split_once('\n').unwrap();
    assert!(job.parse::<u32>().is_ok(), "{text}");
    assert!(rest.contains("4 ranks on node1, node2") && rest == trial.output(), "{rest}");
    assert!(talk.contains("(reader): running on node[1-2]") && talk.contains("completed"), "{talk}");
    trial.assert_undisturbed();

    let status: Value = serde_json::from_str(&told(&trial, &["slurm", "status", job, "--json"])).unwrap();
    assert_eq!((&status["state"], &status["exit_code"]), (&"COMPLETED".into(), &0.into()), "{status}");
    assert_eq!(status["run"], trial.run().to_str().unwrap());
    let log = std::fs::read_to_string(trial.run().join("run.log")).unwrap();
    assert_eq!(status["log"], log.lines().last().unwrap().trim());
    assert_eq!(told(&trial, &["slurm", "logs", job]), trial.output());
    // All jobs that wait or run: none.
    assert_eq!(told(&trial, &["slurm", "status", "--json"]), "");
    let unknown = tercio(&trial, &["slurm", "status", "999999"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(support::stderr(&unknown).contains("Slurm forgets a job"), "{}", support::stderr(&unknown));
}

#[test]
fn a_failed_job_gives_its_exit_code() {
    let trial = Trial::new(1, &[]);
    let mut words = trial.submit_words(1, &["--follow"]);
    words.extend(["--train_data".into(), "/no/such.jsonl".into()]);
    let output = tercio(&trial, &words);
    let talk = support::stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{talk}");
    assert!(talk.contains("failed (NonZeroExitCode), exit code 1"), "{talk}");
    assert!(trial.output().contains("/no/such.jsonl: cannot open the file"), "{}", trial.output());
    assert!(trial.output().contains("the job is not requeued"), "{}", trial.output());
}

#[test]
fn an_array_is_several_jobs() {
    let trial = Trial::new(2, &[]);
    let (questions, output) = (trial.place.path("train.jsonl"), trial.place.path("out-%a"));
    let words = ["slurm", "submit", "--array", "0-1", "--output", output.to_str().unwrap(), "--"];
    let array = told(&trial, &[&words[..], &["data", "check", questions.to_str().unwrap()]].concat());
    let array = array.trim();
    wait_until("both have ended", || {
        told(&trial, &["slurm", "status", array]).matches("completed").count() == 2
    });
    let status = told(&trial, &["slurm", "status", array, "--json"]);
    let jobs: Vec<Value> = status.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut ids: Vec<&str> = jobs.iter().map(|job| job["job"].as_str().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, [format!("{array}_0"), format!("{array}_1")]);
    for id in &ids {
        let log = told(&trial, &["slurm", "logs", id]);
        assert!(log.contains("240"), "the questions were counted: {log}");
    }
    let all = tercio(&trial, &["slurm", "logs", array]);
    assert_eq!(all.status.code(), Some(1));
    assert!(support::stderr(&all).contains("name one of them"), "{}", support::stderr(&all));
}
