//! Ranks that end before all have met: `tercio launch` knows of them, and tells the others, here and on other hosts.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{free_port, settings};
use tercio_comm::launch::{Launch, Outcome};
use tercio_comm::place::Flags;
use tercio_comm::{Backend, CommError, Place, Settings, World};

/// Far longer than anything here takes, and than the tests' patience with a lost rank: whoever waits for it fails the test.
const NEVER: Duration = Duration::from_secs(100);

/// A launcher of this program's [`a_rank`], which leaves its word in a file of `folder`; `early` is what a shell does before.
fn launcher(folder: &Path, nproc: usize, early: &str) -> Launch {
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "export TEST_FOLDER='{}'; {early}; exec '{}' --exact a_rank --ignored --nocapture >/dev/null",
        folder.display(),
        program.display()
    );
    let mut launch = Launch::new("/bin/sh", vec!["-c".into(), script.into()], nproc);
    launch.capture = true;
    // Nobody is asked to end while the word goes round.
    launch.patience = NEVER;
    launch
}

#[test]
#[ignore = "a rank of the other tests"]
fn a_rank() {
    let folder = std::env::var("TEST_FOLDER").expect("started by this file");
    let place = Place::from_env(Flags::default()).unwrap();
    let settings = Settings { join_timeout: NEVER, ..settings(Backend::Auto) };
    let error = World::join(&place, &settings).map(|_| ()).expect_err("one is missing");
    std::fs::write(format!("{folder}/{}", place.rank), error.to_string()).unwrap();
    std::process::exit(if matches!(error, CommError::Failed { .. }) { 76 } else { 1 });
}

/// What a rank said.
fn said(folder: &Path, rank: usize) -> String {
    std::fs::read_to_string(folder.join(rank.to_string())).unwrap_or_default()
}

fn cause(outcome: &Outcome) -> Option<usize> {
    outcome.cause().map(|(rank, _)| rank)
}

#[test]
fn the_others_are_told_of_a_rank_that_never_comes() {
    for (early, why) in [
        ("[ $TERCIO_RANK = 1 ] && kill -9 $$", "killed by SIGKILL"),
        // The others are slow to come.
        ("[ $TERCIO_RANK = 1 ] && exit 3; sleep 1", "exit code 3"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let started = Instant::now();
        let outcome = launcher(folder.path(), 3, early).run().unwrap();
        let text = said(folder.path(), 0);
        let words = ["rank 1 on host", "it ended before the ranks had met", why];
        assert!(words.iter().all(|word| text.contains(word)), "{early}: {text}");
        // It may come when rank 0 has gone already.
        let text = said(folder.path(), 2);
        assert!(text.contains("it ended before the ranks had met"), "{early}: {text}");
        assert_eq!(cause(&outcome), Some(1), "{outcome:?}");
        assert!(started.elapsed() < NEVER, "they waited in vain");
    }
}

#[test]
fn those_who_look_for_a_dead_rank_0_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let early = "[ $TERCIO_RANK = 0 ] && exit 4; sleep 0.5";
    let mut launch = launcher(folder.path(), 3, early);
    launch.max_restarts = 1; // its port is free again for the next start
    let outcome = launch.run().unwrap();
    for rank in [1, 2] {
        let text = said(folder.path(), rank);
        let words = ["refused", "rank 0 on host", "it ended before the ranks had met: exit code 4"];
        assert!(words.iter().all(|word| text.contains(word)), "rank {rank}: {text}");
    }
    assert_eq!((cause(&outcome), outcome.code, outcome.restarts), (Some(0), 4, 1));
}

#[test]
fn other_hosts_are_told() {
    for lost in [0, 1] {
        let folder = tempfile::tempdir().unwrap();
        let endpoint = format!("127.0.0.1:{}", free_port("127.0.0.1"));
        let early = format!("[ $TERCIO_RANK = {lost} ] && exit 5");
        let outcomes = std::thread::scope(|scope| {
            let launchers = [0, 1].map(|node| {
                let (folder, endpoint, early) = (folder.path(), endpoint.clone(), early.clone());
                scope.spawn(move || {
                    let mut launch = launcher(folder, 1, &early);
                    (launch.nnodes, launch.node_rank) = (2, node);
                    launch.rdzv_endpoint = Some(endpoint);
                    launch.secret = Some("of this test".into());
                    // The launcher of the lost rank stays so long where nobody hears it.
                    launch.patience = Duration::from_secs(15);
                    launch.run().unwrap()
                })
            });
            launchers.map(|launcher| launcher.join().unwrap())
        });
        assert_eq!(outcomes[lost].code, 5);
        let text = said(folder.path(), 1 - lost);
        let words = [&*format!("rank {lost} on host"), "it ended before the ranks had met: exit code 5"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}
