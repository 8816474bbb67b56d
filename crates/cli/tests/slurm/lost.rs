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
    let job = trial.cluster.submit(&trial.written_script(2, str::to_owned), &[]);
    trial.wait_update(&job, SAVE + 3);
    let first = trial.ranks(4);
    first[3].send(Signal::KILL);
    wait_gone(&first, GONE_AFTER);
    let line = trial.lost_line();
    assert!(line.contains("rank 3 ") && line.contains("node2") && line.contains("at update 1"), "{line}");
    wait_until("the job is requeued", || job.restarts() == 1);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_went_on(&trial);
    trial.assert_undisturbed();
}

#[test]
fn a_task_that_dies_before_the_ranks_have_met() {
    let trial = Trial::new(2, &[]);
    // Only in the first attempt. The others would wait for it as long as `--join_timeout` says: longer than this test does.
    let early = r#"bash -c '[ "$SLURM_PROCID:$SLURM_RESTART_COUNT" = 3: ] && kill -9 $$; exec "$@"' - "${command[@]}""#;
    let script = trial.written_script(2, |text| {
        assert_eq!(text.matches("\"${command[@]}\"").count(), 1, "{text}");
        text.replace("\"${command[@]}\"", early)
    });
    let job = trial.cluster.submit(&script, &[]);
    wait_until("the job is requeued", || job.restarts() == 1);
    let output = trial.output();
    assert!(output.contains("was asked to end before all ranks had met"), "{output}");
    assert_eq!(support::begins(&trial.run()), 0, "nothing was begun: {output}");
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    trial.assert_undisturbed();
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

/// Sleeping ranks are to be found alive by the next attempt, not to be given up by their own.
const PATIENT: [&str; 2] = ["--lost_after", "600"];

/// Slurm gives a silent node up sooner.
const QUICK: (&str, &str) = ("NODE_TIMEOUT", "4");

fn new_attempt_is_at_work(trial: &Trial, job: &Job) {
    wait_until("the job is requeued", || job.restarts() >= 1);
    wait_until("the new attempt is at work", || {
        support::events(&trial.run(), "resume").len() == 1 && support::updates_of(&trial.run(), 2) >= 2
    });
}

#[test]
fn a_dead_daemon_whose_ranks_live_on() {
    let trial = Trial::new(3, &[QUICK, ("KILL_WAIT", "3")]);
    let job = trial.cluster.submit(&trial.script_with(2, &PATIENT, ""), &["--exclusive"]);
    trial.wait_update(&job, SAVE + 3);
    let old = trial.ranks(4);
    // Slurm loses node2, ends what it can reach, and starts the job elsewhere; nobody ends the ranks of node2.
    let on_node2 = &old[2..];
    on_node2.iter().for_each(|rank| rank.send(Signal::STOP));
    trial.cluster.tool("slurmd-kill", &["node2"]);
    new_attempt_is_at_work(&trial, &job);
    wait_gone(&old[..2], PATIENCE);
    assert!(on_node2.iter().all(Process::lives), "they are to live on");
    on_node2.iter().for_each(|rank| rank.send(Signal::CONT));
    // They find their main rank gone.
    wait_gone(on_node2, GONE_AFTER);
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(job.field("NodeList"), "node[1,3]");
    assert_went_on(&trial);
    trial.assert_undisturbed();
}

#[test]
fn an_old_attempt_that_lives_on_neither_replaces_nor_removes() {
    let trial = Trial::new(2, &[("NET", "1"), QUICK]);
    let more = [&PATIENT[..], &["--keep_last", "2"]].concat();
    let job = trial.cluster.submit(&trial.script_with(1, &more, ""), &["--exclusive"]);
    trial.wait_update(&job, SAVE + 3);
    let old = trial.ranks(2);
    // Cut off, the node is lost to Slurm, which starts the job on the other one. Its ranks lack nothing: they sleep only
    // until the new ones are at work.
    old.iter().for_each(|rank| rank.send(Signal::STOP));
    trial.cluster.tool("link", &["node1", "down"]);
    new_attempt_is_at_work(&trial, &job);
    assert!(old.iter().all(Process::lives), "they are to live on");
    old.iter().for_each(|rank| rank.send(Signal::CONT));
    assert_eq!(job.ended(), "COMPLETED", "{}", trial.output());
    assert_eq!(job.field("NodeList"), "node2");
    wait_gone(&old, PATIENCE);
    let output = trial.output();
    let word = output.lines().find(|line| line.contains("a later attempt holds the lease"));
    let word = word.unwrap_or_else(|| panic!("the old attempt was to notice: {output}"));
    assert!(word.contains("on host node2") && word.contains("saves nothing"), "{word}");
    assert_went_on(&trial);
    trial.assert_undisturbed();
}
