//! Several processes of the command as the ranks of one run; none outlives its test.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Place, events, free_port, metrics};

/// Longest wait for something that ranks should do; machines that build at the same time are slow.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Settings of the runs here, over those of [`Place::command`]: shards of one question.
pub const SETTINGS: [&str; 4] = ["--micro_batch_size", "1", "--total_steps", "12"];

/// The ranks of a run, as processes.
pub struct Ranks {
    pub children: Vec<Child>,
    logs: Vec<PathBuf>,
    out: Vec<PathBuf>,
}

/// How a rank ended.
pub struct End {
    pub code: Option<i32>,
    pub stderr: String,
    pub stdout: String,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts `command(rank)` as rank 0 to `ranks - 1`, with what they say in files of `folder`.
pub fn start(folder: &Path, ranks: usize, command: impl Fn(usize) -> Command) -> Ranks {
    let (port, nonce) = (free_port(), free_port());
    let mut started = Ranks { children: Vec::new(), logs: Vec::new(), out: Vec::new() };
    for rank in 0..ranks {
        let path = |what: &str| folder.join(format!("{what}-{port}-{nonce}-{rank}"));
        let (log, out) = (path("stderr"), path("stdout"));
        let mut command = command(rank);
        command
            .env("TERCIO_RANK", rank.to_string())
            .env("TERCIO_WORLD_SIZE", ranks.to_string())
            .env("TERCIO_LOCAL_RANK", rank.to_string())
            .env("TERCIO_LOCAL_SIZE", ranks.to_string())
            .env("TERCIO_MEETING", format!("127.0.0.1:{port}"))
            .env("TERCIO_SECRET", format!("secret {port}"))
            .stdin(Stdio::null())
            .stdout(File::create(&out).unwrap())
            .stderr(File::create(&log).unwrap());
        started.children.push(command.spawn().unwrap());
        started.logs.push(log);
        started.out.push(out);
    }
    started
}

/// Starts a training by `ranks`; `own` gives a rank flags of its own.
pub fn train_with(
    place: &Place,
    name: &str,
    ranks: usize,
    flags: &[&str],
    own: impl Fn(usize) -> Vec<String>,
) -> Ranks {
    start(&place.path(""), ranks, |rank| {
        let mut command = place.command(name, &[&SETTINGS, flags].concat());
        command.args(own(rank));
        command
    })
}

/// As [`train_with`], with the same flags for all.
pub fn train(place: &Place, name: &str, ranks: usize, flags: &[&str]) -> Ranks {
    train_with(place, name, ranks, flags, |_| Vec::new())
}

impl Ranks {
    /// Waits for all ends.
    pub fn finish(mut self) -> Vec<End> {
        let end = Instant::now() + PATIENCE;
        let mut codes: Vec<Option<ExitStatus>> = vec![None; self.children.len()];
        while codes.iter().any(Option::is_none) {
            for (code, child) in codes.iter_mut().zip(&mut self.children) {
                if code.is_none() {
                    *code = child.try_wait().unwrap();
                }
            }
            assert!(Instant::now() < end, "not all ended: {codes:?}\n{}", self.talk());
            std::thread::sleep(Duration::from_millis(5));
        }
        let read = |path: &PathBuf| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
        let texts = self.logs.iter().map(read).zip(self.out.iter().map(read));
        let ends: Vec<End> = codes
            .into_iter()
            .zip(texts)
            .map(|(code, (stderr, stdout))| End { code: code.and_then(|c| c.code()), stderr, stdout })
            .collect();
        assert!(ends.iter().all(|e| !e.stderr.contains("panicked")), "{}", self.talk());
        ends
    }
    /// Waits for all ends, which must be good; gives rank 0's stdout.
    pub fn succeed(self) -> String {
        let ends = self.finish();
        for (rank, end) in ends.iter().enumerate() {
            assert_eq!(end.code, Some(0), "rank {rank}: {}", end.stderr);
        }
        ends[0].stdout.clone()
    }
    /// Waits until `ready`; false when rank 0 ended first.
    pub fn wait_for(&mut self, ready: impl FnMut() -> bool) -> bool {
        crate::support::wait_for(&mut self.children[0], ready)
    }
    /// All that was said.
    pub fn talk(&self) -> String {
        self.logs.iter().map(|log| std::fs::read_to_string(log).unwrap_or_default()).collect()
    }
}

/// Exit codes, by rank; a signal is none.
pub fn codes(ends: &[End]) -> Vec<Option<i32>> {
    ends.iter().map(|e| e.code).collect()
}

/// `shards` of every logged update.
pub fn shards(run: &Path) -> Vec<Vec<u64>> {
    let lines = metrics(run);
    let updates = lines.iter().filter(|line| line.get("event").is_none());
    updates
        .map(|line| line["shards"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect())
        .collect()
}

/// Updates that are logged.
pub fn logged(run: &Path) -> usize {
    metrics(run).iter().filter(|line| line.get("event").is_none()).count()
}

/// Whether a checkpoint was made after update `step`.
pub fn saved(run: &Path, step: u64) -> bool {
    events(run, "checkpoint").contains(&step)
}
