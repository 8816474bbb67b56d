//! Ends that nobody announces: a node's power, a node's daemon, a cable, one task. The ranks that are left end by themselves
//! and say who was lost; the job starts again and goes on from the last checkpoint, to the same bits.

use rustix::process::Signal;

use super::cluster::*;
use super::support;
use super::trial::*;

/// What a batch script does about exit code 76 ("another rank was lost"), where Slurm itself has seen nothing.
const REQUEUE: &str = "code=$?; [ $code = 76 ] && scontrol requeue $SLURM_JOB_ID; exit $code";

/// The run went on from a checkpoint, and repeats in its log nothing that it computed twice.
fn assert_went_on(trial: &Trial) {
    let resumed = support::events(&trial.run(), "resume");
    assert!(!resumed.is_empty() && resumed.iter().all(|&step| step >= SAVE), "{resumed:?}");
    assert!(!trial.output().contains("panicked"), "{}", trial.output());
}

#[test]
fn a_power_cut_of_a_node() {
    let trial = Trial::new(3, &[]);
    let job = trial.cluster.submit(&trial.script(2, REQUEUE), &["--exclusive"]);
    trial.wait_update(&job, SAVE + 3);
    let first = trial.ranks(4);
    trial.cluster.tool("node-kill", &["node2"]);
    wait_gone(&first, GONE_AFTER);
    let line = trial.lost_line();
    assert!((line.contains("rank 2 ") || line.contains("rank 3 ")) && line.contains("node2"), "{line}");
    assert!(line.contains("at update 1"), "{line}");
    wait_until("the job is requeued", || job.restarts() >= 1);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(job.field("NodeList"), "node[1,3]");
    assert_went_on(&trial);
    trial.assert_undisturbed();
}

#[test]
fn a_killed_task() {
    let trial = Trial::new(2, &[]);
    let job = trial.cluster.submit(&trial.written_script(2, &["--sbatch", &output_flag(&trial)]), &[]);
    trial.wait_update(&job, SAVE + 3);
    let first = trial.ranks(4);
    first[3].send(Signal::KILL);
    wait_gone(&first, GONE_AFTER);
    wait_until("the job is requeued", || job.restarts() == 1);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_went_on(&trial);
    trial.assert_undisturbed();
}

fn output_flag(trial: &Trial) -> String {
    format!("output={}", trial.place.path("output").display())
}

#[test]
fn a_cut_cable() {
    let trial = Trial::new(3, &[("NET", "1")]);
    let job = trial.cluster.submit(&trial.script(2, REQUEUE), &["--exclusive"]);
    trial.wait_update(&job, SAVE + 3);
    let first = trial.ranks(4);
    trial.cluster.tool("link", &["node2", "down"]);
    // On both sides of the cut: nobody waits for the other longer than the setting says.
    wait_gone(&first, GONE_AFTER);
    let line = trial.lost_line();
    assert!((line.contains("rank 2 ") || line.contains("rank 3 ")) && line.contains("node2"), "{line}");
    assert!(line.contains(&format!("{LOST_AFTER} s")), "{line}");
    wait_until("the job is requeued", || job.restarts() >= 1);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_went_on(&trial);
    trial.assert_undisturbed();
}

#[test]
fn dead_daemons_and_an_old_attempt_that_lives_on() {
    let trial = Trial::new(4, &[("NET", "1")]);
    let job = trial.cluster.submit(&trial.script(2, ""), &["--exclusive"]);
    trial.wait_update(&job, 3);
    let first = trial.ranks(4);
    // Slurm loses both nodes and starts the job elsewhere; the ranks feel nothing and train on.
    for node in ["node1", "node2"] {
        trial.cluster.tool("slurmd-kill", &[node]);
    }
    wait_until("the job is requeued", || job.restarts() >= 1);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(job.field("NodeList"), "node[3-4]");
    wait_gone(&first, PATIENCE);
    trial.assert_undisturbed();
}
