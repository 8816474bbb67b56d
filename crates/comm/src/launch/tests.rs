//! Starts of small shell scripts as ranks: what they see, how they end, and that none stays.

use std::time::Instant;

use super::*;

/// Ranks of a shell script.
fn shell(script: &str, nproc: usize) -> Launch {
    let mut launch = Launch::new("/bin/sh", vec!["-c".into(), script.into()], nproc);
    launch.secret = None;
    launch.capture = true;
    launch.patience = Duration::from_millis(200);
    launch.grace = Duration::from_millis(500);
    launch
}

fn text(outcome: &Outcome) -> String {
    String::from_utf8(outcome.stdout.clone()).unwrap()
}

#[test]
fn ranks_are_told_their_place_and_only_the_main_one_is_heard() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "echo $TERCIO_RANK $TERCIO_WORLD_SIZE $TERCIO_LOCAL_RANK $TERCIO_LOCAL_SIZE $TERCIO_MEETING \
         > {0}/$TERCIO_RANK; echo $TERCIO_SECRET > {0}/secret$TERCIO_RANK; echo heard $TERCIO_RANK",
        folder.path().display()
    );
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let outcome = shell(&script, 3).run().unwrap();
    assert_eq!((outcome.code, &*text(&outcome)), (0, "heard 0\n"));
    let meeting = read("0").trim().rsplit_once(' ').unwrap().1.to_owned();
    assert!(valid_meeting(&meeting), "{meeting}");
    for rank in 0..3 {
        assert_eq!(read(&rank.to_string()), format!("{rank} 3 {rank} 3 {meeting}\n"));
        assert_eq!(read(&format!("secret{rank}")), read("secret0"));
    }
    let first = read("secret0");
    assert!(first.len() > 60, "{first}");
    shell(&script, 1).run().unwrap();
    assert_ne!(read("secret0"), first, "every run has a secret of its own");
    // The second of two hosts.
    let mut second = shell(&script, 2);
    (second.nnodes, second.node_rank) = (2, 1);
    second.rdzv_endpoint = Some("node1:15001".into());
    let outcome = second.run().unwrap();
    assert_eq!(text(&outcome), "", "rank 0 is elsewhere");
    assert_eq!(read("3"), "3 4 1 2 node1:15001\n");
    assert_eq!(read("secret2"), read("secret3"));
}

/// Whether a process of this group runs; dead ones that nobody reaped do not count.
fn group_lives(group: &str) -> bool {
    let stat = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()
    };
    std::fs::read_dir("/proc").unwrap().filter_map(stat).any(|stat| {
        // "pid (name) state parent group ...", where a name may have blanks and parentheses.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        fields.len() > 2 && fields[0] != "Z" && fields[2] == group
    })
}

#[test]
fn the_first_failure_decides_and_no_process_stays() {
    // What a shell starts is in its group, and ends with it.
    let cases = [
        // (script, exit code, rank of the cause)
        ("exit 0", 0, None),
        ("[ $TERCIO_RANK = 1 ] && exit 75; exit 0", 75, None),
        ("[ $TERCIO_RANK = 1 ] && exit 7; exit 76", 7, Some(1)),
        ("[ $TERCIO_RANK = 1 ] && exit 76; exit 0", 76, Some(1)),
        ("[ $TERCIO_RANK = 1 ] && kill -9 $$; sleep 600", 137, Some(1)),
        ("[ $TERCIO_RANK = 0 ] && exit 3; trap '' TERM; sleep 600 & wait; wait", 3, Some(0)),
    ];
    for (script, code, rank) in cases {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("echo $$ > {}/$TERCIO_RANK; {script}", folder.path().display());
        let start = Instant::now();
        let outcome = shell(&script, 2).run().unwrap();
        assert_eq!((outcome.code, outcome.cause().map(|c| c.0)), (code, rank), "{script}: {outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(60), "{script}");
        for name in ["0", "1"] {
            // A rank may be ended before it could write.
            let Ok(pid) = std::fs::read_to_string(folder.path().join(name)) else { continue };
            let start = Instant::now();
            while group_lives(pid.trim()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{script}: rank {name} lives");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

#[test]
fn a_failed_world_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "echo $TERCIO_SECRET >> {0}/$TERCIO_RANK; [ $TERCIO_RESTART_COUNT = 2 ] && exit 0; exit 76",
        folder.path().display()
    );
    let mut launch = shell(&script, 2);
    launch.max_restarts = 5;
    let outcome = launch.run().unwrap();
    assert_eq!((outcome.code, outcome.restarts), (0, 2));
    let secrets = std::fs::read_to_string(folder.path().join("0")).unwrap();
    let mut secrets: Vec<&str> = secrets.lines().collect();
    secrets.dedup();
    assert_eq!(secrets.len(), 3, "every start has a secret of its own");
    // What another start would not change, and what was asked for, is not started again.
    for code in [0, 2, 75, 130] {
        let mut launch = shell(&format!("exit {code}"), 1);
        launch.max_restarts = 5;
        let outcome = launch.run().unwrap();
        assert_eq!((outcome.code, outcome.restarts), (code, 0));
    }
}

#[test]
fn numbers_that_do_not_fit_are_named() {
    let with = |change: fn(&mut Launch)| {
        let mut launch = shell("exit 0", 2);
        change(&mut launch);
        launch.run().unwrap_err().to_string()
    };
    let cases: [(fn(&mut Launch), &str); 6] = [
        (|l| l.nproc_per_node = 0, "--nproc-per-node 0"),
        (|l| l.nnodes = 2, "--nnodes 2 needs --rdzv-endpoint"),
        (|l| l.node_rank = 1, "--node-rank 1 of 1"),
        (|l| l.nnodes = 0, "--nnodes 0"),
        (|l| l.rdzv_endpoint = Some("fe80::1:80".into()), "expected host:port"),
        (|l| l.program = "/no/such/program".into(), "starting rank 0, /no/such/program"),
    ];
    for (change, want) in cases {
        let error = with(change);
        assert!(error.contains(want), "{error}");
    }
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let mut launch = shell("exit 0", 1);
    launch.rdzv_endpoint = Some(format!("127.0.0.1:{}", taken.local_addr().unwrap().port()));
    let error = launch.run().unwrap_err().to_string();
    assert!(error.contains("cannot be used on this host"), "{error}");
}

#[test]
fn the_result_of_a_call_comes_back_at_any_size() {
    let name = "launch::tests::the_result_of_a_call_comes_back_at_any_size";
    let args = [name, "--exact", "--nocapture"].map(Into::into).to_vec();
    let mut launch = Launch::new(std::env::current_exe().unwrap(), args, 3);
    launch.secret = None;
    // More than a pipe holds.
    let result = launch
        .distributed(|place| {
            assert_eq!(place.world_size, 3);
            Ok::<_, String>(vec![place.rank as u8 + 7; 3_000_001])
        })
        .unwrap();
    assert_eq!(result, vec![7; 3_000_001]);
    let again = launch_distributed(1, |_| Ok::<_, String>(Vec::new())).unwrap_err().to_string();
    assert!(again.contains("second time"), "{again}");
}
