//! Checkpoints under crashes: every state in which a process can die leaves the newest complete checkpoint to resume from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use tercio_train::run::{CheckpointStore, CheckpointWriter, Committed, Lease, MANIFEST_NAME, RunError};

/// Set for a test that was started again as a child: the run folder to work in.
const CHILD_DIR: &str = "TERCIO_TEST_RUN_DIR";

struct Run {
    dir: tempfile::TempDir,
    store: CheckpointStore,
    lease: Lease,
}

fn run() -> Run {
    let dir = tempfile::tempdir().unwrap();
    let lease = Lease::acquire(dir.path()).unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    Run { dir, store, lease }
}

fn filled(store: &CheckpointStore, step: u64) -> CheckpointWriter {
    let writer = store.begin(step).unwrap();
    fs::write(writer.path().join("model.safetensors"), format!("weights of {step}")).unwrap();
    fs::create_dir(writer.path().join("1_Pooling")).unwrap();
    fs::write(writer.path().join("1_Pooling/config.json"), "{}").unwrap();
    writer
}

fn commit(store: &CheckpointStore, step: u64) -> Committed {
    filled(store, step).commit(json!({ "epoch": 1, "best": 0.1 })).unwrap()
}

fn names(store_dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(store_dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

impl Run {
    fn folder(&self) -> PathBuf {
        self.dir.path().join("checkpoint")
    }

    fn resumes_from(&self) -> Option<u64> {
        let found = self.store.latest_complete().unwrap()?;
        found.verify_full().unwrap();
        Some(found.step)
    }
}

#[test]
fn a_commit_lists_hashes_and_state() {
    let run = run();
    assert_eq!(run.resumes_from(), None);
    let done = commit(&run.store, 7);
    assert!(done.is_new && done.path.ends_with("checkpoint/step-7"));
    let found = run.store.latest_complete().unwrap().unwrap();
    let listed: Vec<_> = found.manifest.files.iter().map(|file| (file.name.as_str(), file.size)).collect();
    assert_eq!(listed, [("1_Pooling/config.json", 2), ("model.safetensors", 12)]);
    // printf '{}' | sha256sum
    assert_eq!(
        found.manifest.files[0].sha256,
        "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    );
    assert_eq!(found.manifest.state["best"], 0.1);
    assert_eq!(found.manifest.total_size(), 14);
    assert_eq!(names(&run.folder()), ["step-7"]);
}

#[test]
fn whatever_a_crash_leaves_the_last_complete_one_is_taken() {
    let run = run();
    commit(&run.store, 9);
    commit(&run.store, 10);
    let whole = run.folder().join("step-10");
    // The states of a commit that was cut short, in their order, as left by a process that is dead.
    for (stage, files) in [("begun", 0), ("half", 1), ("written", 2), ("unnamed", 3)] {
        let left = run.folder().join(format!(".writing-step-11-{}-{}-{stage}", host(), u32::MAX));
        fs::create_dir_all(left.join("1_Pooling")).unwrap();
        for name in ["model.safetensors", "1_Pooling/config.json", MANIFEST_NAME].iter().take(files) {
            fs::copy(whole.join(name), left.join(name)).unwrap();
        }
        assert_eq!(run.resumes_from(), Some(10), "{stage}");
    }
    // Links that died before they moved, and a link to nowhere.
    std::os::unix::fs::symlink("step-11", run.folder().join(".latest.123-abcd")).unwrap();
    std::os::unix::fs::symlink("step-11", run.folder().join("latest")).unwrap();
    assert_eq!(run.resumes_from(), Some(10));
    // A living writer's folder stays, the leftovers go.
    let alive = filled(&run.store, 12);
    let removed = run.store.remove_stale(&run.lease).unwrap();
    assert_eq!(removed.len(), 5, "{removed:?}");
    assert!(alive.path().exists());
    assert_eq!(alive.commit(json!({})).unwrap().step, 12);
    assert_eq!(names(&run.folder()), ["latest", "step-10", "step-12", "step-9"]);
}

fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_string()
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let run = run();
    commit(&run.store, 1);
    drop(filled(&run.store, 2));
    assert_eq!(names(&run.folder()), ["step-1"]);
    let writer = filled(&run.store, 2);
    std::os::unix::fs::symlink("/etc/passwd", writer.path().join("link")).unwrap();
    assert!(writer.commit(json!({})).unwrap_err().to_string().contains("plain file"));
    assert_eq!(names(&run.folder()), ["step-1"]);
}

#[test]
fn incomplete_ones_are_skipped_and_damaged_ones_refused() {
    let run = run();
    for step in [1, 2, 3, 4] {
        commit(&run.store, step);
    }
    fs::remove_file(run.folder().join("step-4/model.safetensors")).unwrap();
    fs::write(run.folder().join("step-3/model.safetensors"), "weights").unwrap();
    let listing = run.store.list().unwrap();
    assert_eq!(listing.complete.iter().map(|found| found.step).collect::<Vec<_>>(), [1, 2]);
    assert!(listing.incomplete[0].1.contains("model.safetensors has 7 bytes, expected 12"), "{listing:?}");
    assert!(listing.incomplete[1].1.contains("model.safetensors cannot be found"), "{listing:?}");

    fs::write(run.folder().join("step-2/model.safetensors"), "weights 0f 2").unwrap();
    let found = run.store.latest_complete().unwrap().unwrap();
    assert_eq!(found.step, 2, "same names and sizes: complete");
    let message = found.verify_full().unwrap_err().to_string();
    assert!(message.contains("step-2/model.safetensors is damaged"), "{message}");
    assert!(message.contains("to fall back to step-1"), "{message}");
}

#[test]
fn to_start_over_beside_incomplete_checkpoints_is_refused() {
    let run = run();
    commit(&run.store, 3);
    fs::write(run.folder().join("step-3").join(MANIFEST_NAME), "{\"format\":1").unwrap();
    let message = run.store.latest_complete().unwrap_err().to_string();
    assert!(message.contains("step-3: no checkpoint of this run is complete"), "{message}");
}

#[test]
fn a_newer_checkpoint_of_another_version_is_not_passed_over() {
    let run = run();
    for step in [1, 2, 3] {
        commit(&run.store, step);
    }
    let path = run.folder().join("step-2").join(MANIFEST_NAME);
    let good = fs::read_to_string(&path).unwrap();
    fs::write(&path, "{\"format\": 2, \"fields\": \"unknown here\"}").unwrap();
    assert_eq!(run.resumes_from(), Some(3), "an older one is of no use anyway");
    fs::write(&path, good).unwrap();
    fs::write(run.folder().join("step-3").join(MANIFEST_NAME), "{\"format\": 2}").unwrap();
    let message = run.store.latest_complete().unwrap_err().to_string();
    assert!(message.contains("step-3: expected checkpoint format 1, found 2"), "{message}");
    fs::remove_dir_all(run.folder().join("step-3")).unwrap();
    assert_eq!(run.resumes_from(), Some(2));
}

#[test]
fn hostile_manifests_are_not_complete() {
    let run = run();
    commit(&run.store, 1);
    let path = run.folder().join("step-1").join(MANIFEST_NAME);
    let good = fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("1_Pooling/config.json", "../step-1/x"),
        ("1_Pooling/config.json", "/etc/passwd"),
        ("\"format\": 1", "\"format\": 2"),
        ("\"step\": 1", "\"step\": 2"),
        ("\"size\": 2", "\"size\": -2"),
        ("\"size\": 2", "\"size\": 18446744073709551615"),
    ] {
        assert!(good.contains(from));
        fs::write(&path, good.replace(from, to)).unwrap();
        assert_eq!(run.store.list().unwrap().complete.len(), 0, "{to}");
    }
    fs::write(&path, good).unwrap();
    assert_eq!(run.resumes_from(), Some(1));
    for name in
        ["step-", "step-01", "step-2-1", "step-+3", "step-99999999999999999999", "step-4.old", "backup"]
    {
        fs::create_dir(run.folder().join(name)).unwrap();
    }
    assert!(run.store.list().unwrap().incomplete.is_empty(), "not our names");
}

#[test]
fn a_name_is_never_used_twice() {
    let run = run();
    let first = commit(&run.store, 5);
    let again = commit(&run.store, 5);
    assert_eq!((again.is_new, &again.path), (false, &first.path), "the same bytes are there already");
    let other = filled(&run.store, 5).commit(json!({ "epoch": 2 })).unwrap();
    assert!(other.path.ends_with("step-5-2"));
    fs::remove_file(first.path.join("model.safetensors")).unwrap();
    fs::remove_file(other.path.join("model.safetensors")).unwrap();
    let third = commit(&run.store, 5);
    assert!(third.path.ends_with("step-5-3"), "incomplete folders keep their names");
    assert_eq!(run.store.latest_complete().unwrap().unwrap().path, third.path);
}

#[test]
fn pruning_keeps_the_newest_the_linked_and_the_protected() {
    let run = run();
    for step in [10, 9, 100, 20, 30, 40] {
        commit(&run.store, step);
    }
    fs::remove_file(run.folder().join("step-9/model.safetensors")).unwrap();
    assert!(run.store.set_best_dev(&run.lease, &run.folder().join("step-20")).unwrap());
    assert!(run.store.set_latest(&run.lease, &run.folder().join("step-100")).unwrap());
    assert_eq!(fs::read_link(run.folder().join("best_dev")).unwrap(), Path::new("step-20"));
    assert_eq!(
        fs::canonicalize(run.folder().join("latest")).unwrap(),
        fs::canonicalize(run.folder().join("step-100")).unwrap()
    );
    let removed = run.store.prune(&run.lease, 2, &[30]).unwrap();
    assert_eq!(removed, [run.folder().join("step-10")]);
    assert_eq!(
        names(&run.folder()),
        ["best_dev", "latest", "step-100", "step-20", "step-30", "step-40", "step-9"]
    );
    run.store.prune(&run.lease, 0, &[]).unwrap();
    assert_eq!(names(&run.folder()), ["best_dev", "latest", "step-100", "step-20", "step-9"]);
}

#[test]
fn the_link_to_the_model_is_kept_as_the_others_are() {
    let run = run();
    commit(&run.store, 10);
    assert!(!run.store.set_model(&run.lease, false).unwrap(), "no link says which it would be");
    assert!(run.store.set_latest(&run.lease, &run.folder().join("step-10")).unwrap());
    assert!(run.store.set_model(&run.lease, false).unwrap());
    for step in [20, 30] {
        commit(&run.store, step);
        run.store.set_latest(&run.lease, &run.folder().join(format!("step-{step}"))).unwrap();
    }
    run.store.prune(&run.lease, 1, &[]).unwrap();
    assert_eq!(names(&run.folder()), ["latest", "model", "step-10", "step-30"]);
    // The best one stands for the run, or the last.
    run.store.set_best_dev(&run.lease, &run.folder().join("step-10")).unwrap();
    for (last, name) in [(true, "step-30"), (false, "step-10")] {
        assert!(run.store.set_model(&run.lease, last).unwrap());
        assert_eq!(fs::read_link(run.folder().join("model")).unwrap(), Path::new(name));
    }
    let torn = run.folder().join(".model.1-00ff");
    std::os::unix::fs::symlink("step-10", &torn).unwrap();
    assert_eq!(run.store.remove_stale(&run.lease).unwrap(), [torn]);
}

#[test]
fn an_older_attempt_adds_but_neither_prunes_nor_moves_links() {
    let run = run();
    for step in [1, 2, 3] {
        commit(&run.store, step);
    }
    run.store.set_latest(&run.lease, &run.folder().join("step-3")).unwrap();
    let lease = run.dir.path().join("lease.json");
    let text = fs::read_to_string(&lease).unwrap();
    let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
    record["token"] = json!("of a later attempt on another host");
    fs::write(&lease, record.to_string()).unwrap();

    let added = commit(&run.store, 4);
    assert!(added.is_new);
    assert!(!run.store.set_latest(&run.lease, &added.path).unwrap());
    assert!(run.store.prune(&run.lease, 1, &[]).unwrap().is_empty());
    assert!(run.store.remove_stale(&run.lease).unwrap().is_empty());
    assert_eq!(fs::read_link(run.folder().join("latest")).unwrap(), Path::new("step-3"));
    assert_eq!(names(&run.folder()), ["latest", "step-1", "step-2", "step-3", "step-4"]);
}

#[test]
fn a_full_disk_is_told_before_and_while_writing() {
    let run = run();
    let writer = filled(&run.store, 1);
    writer.require_space(1).unwrap();
    let message = writer.require_space(u64::MAX).unwrap_err().to_string();
    assert!(
        message.contains(&format!("{} bytes are needed", u64::MAX)) && message.contains("bytes are free"),
        "{message}"
    );
    // A file system of 64 KiB, where this process may mount one.
    let small = run.dir.path().join("small");
    fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
        .arg(&small)
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        eprintln!("skipped: no file system of 64 KiB can be mounted here");
        return;
    }
    let outcome = std::panic::catch_unwind(|| {
        let store = CheckpointStore::open(&small).unwrap();
        commit(&store, 1);
        let writer = filled(&store, 2);
        let path = writer.path().join("optimizer.bin");
        let error = fs::write(&path, vec![0u8; 1 << 17]).unwrap_err();
        let message = RunError::from_io("write", &path, Some(1 << 17), error).to_string();
        assert!(
            message.contains("disk is full at") && message.contains("131072 bytes are needed"),
            "{message}"
        );
        let error = writer.commit(json!({})).unwrap_err();
        assert!(matches!(error, RunError::DiskFull { .. }), "{error}");
        assert_eq!(names(&small.join("checkpoint")), ["step-1"]);
        store.latest_complete().unwrap().unwrap().verify_full().unwrap();
    });
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
    outcome.unwrap();
}

fn child(test: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env(CHILD_DIR, dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The child's part of the two tests below: goes on from the newest checkpoint and writes new ones until it is killed.
#[test]
#[ignore = "runs as the child of other tests"]
fn child_writes_until_killed() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else {
        return;
    };
    let dir = Path::new(&dir);
    let lease = Lease::acquire(dir).unwrap();
    let store = CheckpointStore::open(dir).unwrap();
    store.remove_stale(&lease).unwrap();
    let start = store.latest_complete().unwrap().map_or(0, |found| found.step);
    for step in start + 1.. {
        let writer = filled(&store, step);
        fs::write(writer.path().join("optimizer.bin"), vec![step as u8; 300_000]).unwrap();
        let done = writer.commit(json!({ "step": step })).unwrap();
        store.set_latest(&lease, &done.path).unwrap();
        store.prune(&lease, 2, &[]).unwrap();
    }
}

#[test]
fn kill_9_at_any_moment_loses_no_complete_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let newest = || store.latest_complete().unwrap().map_or(0, |found| found.step);
    let mut last = 0;
    for round in 0..6u64 {
        let mut writer = child("child_writes_until_killed", dir.path());
        wait_for("a new checkpoint", || newest() > last);
        std::thread::sleep(Duration::from_micros(700 * round));
        writer.kill().unwrap();
        writer.wait().unwrap();
        let found = store.latest_complete().unwrap().unwrap();
        found.verify_full().unwrap();
        assert!(found.step > last, "round {round}: {} after {last}", found.step);
        assert_eq!(found.manifest.state["step"], found.step);
        assert!(store.list().unwrap().incomplete.is_empty());
        last = found.step;
    }
    let lease = Lease::acquire(dir.path()).unwrap();
    store.remove_stale(&lease).unwrap();
    let hidden: Vec<_> =
        names(&dir.path().join("checkpoint")).into_iter().filter(|name| name.starts_with('.')).collect();
    assert!(hidden.is_empty(), "{hidden:?}");
}

#[test]
fn two_processes_do_not_share_a_run_folder() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let mut writer = child("child_writes_until_killed", dir.path());
    wait_for("the child's first checkpoint", || store.latest_complete().unwrap().is_some());
    let message = Lease::acquire_within(dir.path(), Duration::ZERO).unwrap_err().to_string();
    assert!(message.contains(&format!("is in use by pid {}", writer.id())), "{message}");
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert!(Lease::acquire(dir.path()).unwrap().still_mine());
}
