//! Ends that are announced: the warning before a time limit, preemption, `scancel`. Nothing is lost or repeated.

use std::time::Duration;

use super::cluster::*;
use super::support;
use super::trial::*;

/// Whether the job's output shows a panic or a rank that was lost: announced ends are orderly.
fn assert_orderly(trial: &Trial) {
    let output = trial.output();
    for word in ["panicked", "was lost", "ERROR"] {
        assert!(!output.contains(word), "{word}: {output}");
    }
}

#[test]
fn two_nodes_of_two_tasks_train_like_one_process() {
    let trial = Trial::new(2, &[]);
    let job = trial.cluster.submit(&trial.script(2, ""), &[]);
    trial.wait_update(&job, 3);
    let ranks = trial.ranks(4);
    // Each in its own node: the first two on node1.
    let on_node1 = trial.cluster.tool("pids", &["node1"]);
    let here: Vec<_> =
        ranks.iter().map(|rank| on_node1.lines().any(|pid| pid == rank.pid.to_string())).collect();
    assert_eq!(here, [true, true, false, false]);
    assert_eq!((job.ended().as_str(), job.restarts()), ("COMPLETED", 0), "{}", trial.output());
    assert_orderly(&trial);
    trial.assert_undisturbed();
}

#[test]
fn the_warning_before_the_limit_saves_and_requeues() {
    let trial = Trial::new(2, &[]);
    let job = trial.cluster.submit(&trial.script(2, ""), &[]);
    trial.wait_update(&job, 13);
    let first = trial.ranks(4);
    job.cancel(&["--signal=USR1"]);
    wait_gone(&first, PATIENCE);
    let run = trial.run();
    let saved = support::losses(&run).last().unwrap().0;
    assert!((13..TOTAL).contains(&saved), "it ended too late to be a test: {saved}");
    assert_eq!(support::events(&run, "end"), [saved], "saved at the boundary where all ranks agreed");
    assert_eq!(support::link(&run, "latest"), format!("step-{saved}"));
    wait_until("the job is requeued", || job.restarts() == 1);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(support::events(&run, "resume"), [saved]);
    assert_eq!(job.restarts(), 1);
    assert_orderly(&trial);
    trial.assert_undisturbed();
}

/// A job in partition `low` gives way to one in `high`, and goes on after it.
fn preempted(settings: &[(&str, &str)]) {
    let trial = Trial::new(2, settings);
    let job = trial.cluster.submit(&trial.script(2, ""), &["--partition=low", "--exclusive"]);
    trial.wait_update(&job, 13);
    let first = trial.ranks(4);
    trial.place.write("high.sh", "#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 1\n");
    let flags = ["--partition=high", "--nodes=2", "--exclusive"];
    let high = trial.cluster.submit(&trial.place.path("high.sh"), &flags);
    assert_eq!(high.ended(), "COMPLETED");
    assert!(first.iter().all(|process| !process.lives()), "the nodes are the other job's");
    let run = trial.run();
    let saved = support::losses(&run).last().unwrap().0;
    assert!((13..TOTAL).contains(&saved), "it ended too late to be a test: {saved}");
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(support::events(&run, "resume"), [saved], "nothing is computed twice");
    assert_eq!(support::events(&run, "end"), [saved, TOTAL]);
    assert_eq!(job.restarts(), 1);
    assert_orderly(&trial);
    trial.assert_undisturbed();
}

#[test]
fn preemption_without_grace() {
    preempted(&[]);
}

#[test]
fn preemption_with_grace() {
    preempted(&[("GRACE", "30")]);
}

#[test]
fn scancel_saves_and_the_job_stays_cancelled() {
    let trial = Trial::new(2, &[]);
    let job = trial.cluster.submit(&trial.script(2, ""), &[]);
    trial.wait_update(&job, 13);
    let ranks = trial.ranks(4);
    job.cancel(&[]);
    wait_gone(&ranks, PATIENCE);
    assert_eq!(job.ended(), "CANCELLED");
    let run = trial.run();
    let saved = support::losses(&run).last().unwrap().0;
    assert!((13..TOTAL).contains(&saved), "it ended too late to be a test: {saved}");
    assert_eq!(support::events(&run, "end"), [saved]);
    assert_eq!(support::link(&run, "latest"), format!("step-{saved}"));
    assert_orderly(&trial);
    // Somebody's wish: nothing brings it back (a requeued job starts within six seconds here).
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!((job.state().as_str(), job.restarts()), ("CANCELLED", 0));
    // The same script goes on where it was.
    let again = trial.cluster.submit(&trial.script(2, ""), &[]);
    assert_eq!(again.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(support::events(&run, "resume"), [saved]);
    trial.assert_undisturbed();
}
