//! `tercio launch`: what becomes of its ranks when one ends, or when it ends itself.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::ranks::*;
use super::support::{self, Place};

/// `tercio launch WORDS -- train ...`.
fn launch(place: &Place, name: &str, words: &[&str], flags: &[&str]) -> Ranks {
    let train = command(place, name, flags);
    let mut launch = support::tercio(&["launch", "--nproc-per-node", "2"]);
    launch.args(words).arg("--").args(train.get_args()).stdout(Stdio::null());
    let mut ranks = Ranks::none();
    ranks.add(place, name, launch);
    ranks
}

/// The launcher's ranks: processes whose words name the run's folder, by rank, without the launcher itself.
fn children(place: &Place) -> Vec<(usize, i32)> {
    let marker = place.path("runs").to_str().unwrap().to_owned();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let read = |name: &str| {
            String::from_utf8_lossy(&std::fs::read(entry.path().join(name)).unwrap_or_default()).into_owned()
        };
        let rank = read("environ").split('\0').find_map(|e| e.strip_prefix("TERCIO_RANK=")?.parse().ok());
        if let (true, Some(rank)) = (read("cmdline").contains(&marker), rank) {
            found.push((rank, pid));
        }
    }
    found.sort();
    found
}

fn kill(pid: i32, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// A zombie has no words any more, so it does not count.
fn wait_alone(place: &Place, deadline: Duration) {
    let end = Instant::now() + deadline;
    while !children(place).is_empty() {
        assert!(Instant::now() < end, "still alive after {deadline:?}: {:?}", children(place));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_killed_launcher_leaves_no_orphan() {
    let place = Place::new();
    let mut launcher = launch(&place, "a", &[], &["--total_steps", "1000000", "--save_freq", "1000000"]);
    launcher.wait_update(&place, "a", 3);
    assert_eq!(children(&place).iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1]);
    launcher.send(0, Signal::KILL);
    wait_alone(&place, GONE_AFTER);
}

#[test]
fn a_killed_rank_ends_the_launch_and_restarts_bring_the_run_to_its_end() {
    let place = Place::new();
    let mut launcher = launch(&place, "a", &[], &[]);
    launcher.wait_update(&place, "a", 7);
    kill(children(&place)[1].1, Signal::KILL);
    let code = launcher.end_of(0, GONE_AFTER).code();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    assert!(launcher.said(0).contains("rank 1") && launcher.said(0).contains("KILL"), "{}", launcher.said(0));
    wait_alone(&place, GONE_AFTER);

    let mut launcher = launch(&place, "a", &["--max-restarts", "2"], &[]);
    launcher.wait_update(&place, "a", 16);
    kill(children(&place)[0].1, Signal::KILL);
    assert_eq!(launcher.end_of(0, PATIENCE).code(), Some(0), "{}", launcher.said(0));
    assert_eq!(support::events(&place.run_dir("a"), "resume").len(), 2);
    assert_undisturbed(&place, "a");
    wait_alone(&place, GONE_AFTER);
}

#[test]
fn a_signal_to_the_launcher_saves_and_restarts_do_not_undo_it() {
    let place = Place::new();
    let mut launcher = launch(&place, "a", &["--max-restarts", "2"], &["--save_freq", "1000"]);
    launcher.wait_update(&place, "a", 7);
    launcher.send(0, Signal::TERM);
    assert_eq!(launcher.end_of(0, PATIENCE).code(), Some(75), "{}", launcher.said(0));
    let last = support::losses(&place.run_dir("a")).last().unwrap().0;
    assert!((7..support::TOTAL).contains(&last));
    assert_eq!(support::link(&place.run_dir("a"), "latest"), format!("step-{last}"));
    wait_alone(&place, GONE_AFTER);
    go_on(&place, "a", 2);
    assert_eq!(support::events(&place.run_dir("a"), "resume"), [last]);
    assert_undisturbed(&place, "a");
}
