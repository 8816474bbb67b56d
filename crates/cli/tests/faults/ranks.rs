//! Ranks of a run as processes of this host, each with its variables, as a launcher would start them.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::support::{self, Place, free_port};

/// Seconds without a sign of life until a rank counts as lost.
pub const LOST_AFTER: u64 = 5;
/// Within this time after a loss all ranks must have ended. The excess over [`LOST_AFTER`] is for machines that do much else.
pub const GONE_AFTER: Duration = Duration::from_secs(LOST_AFTER + 25);
/// A guard against hanging, not a measure of speed.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// Exit code of a process that ended because another rank was lost or failed.
pub const PEER_LOST: i32 = 76;

/// What all ranks of a start share.
#[derive(Clone)]
pub struct Meeting {
    pub port: u16,
    pub secret: String,
}

impl Meeting {
    pub fn new() -> Meeting {
        Meeting { port: free_port(), secret: "of this test".into() }
    }
    /// One rank's command.
    pub fn rank(&self, rank: usize, world: usize, mut command: Command) -> Command {
        command
            .env("TERCIO_RANK", rank.to_string())
            .env("TERCIO_WORLD_SIZE", world.to_string())
            .env("TERCIO_LOCAL_RANK", rank.to_string())
            .env("TERCIO_LOCAL_SIZE", world.to_string())
            .env("TERCIO_MEETING", format!("127.0.0.1:{}", self.port))
            .env("TERCIO_SECRET", &self.secret);
        command
    }
}

/// Processes that end with this value, whatever becomes of the test.
pub struct Ranks {
    pub children: Vec<Child>,
    logs: Vec<PathBuf>,
}

impl Ranks {
    pub fn none() -> Ranks {
        Ranks { children: Vec::new(), logs: Vec::new() }
    }
    /// Starts all ranks of the run `name`.
    pub fn start(place: &Place, name: &str, world: usize, flags: &[&str]) -> Ranks {
        let meeting = Meeting::new();
        let mut ranks = Ranks::none();
        for rank in 0..world {
            ranks.add(place, name, meeting.rank(rank, world, command(place, name, flags)));
        }
        ranks
    }
    /// Starts one more process; its talk goes to a file.
    pub fn add(&mut self, place: &Place, name: &str, mut command: Command) {
        let log = place.path(&format!("stderr-{name}-{}", self.logs.len()));
        command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
        self.children.push(command.spawn().unwrap());
        self.logs.push(log);
    }
    /// What a process has said.
    pub fn said(&self, index: usize) -> String {
        std::fs::read_to_string(&self.logs[index]).unwrap()
    }
    pub fn send(&self, index: usize, signal: Signal) {
        support::send(&self.children[index], signal);
    }
    /// Waits for the end of a process.
    pub fn end_of(&mut self, index: usize, deadline: Duration) -> ExitStatus {
        let end = Instant::now() + deadline;
        loop {
            if let Some(status) = self.children[index].try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < end,
                "process {index} has not ended after {deadline:?}: {}",
                self.said(index)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    /// Exit codes of all, in order; `None` for one that a signal ended.
    pub fn codes(&mut self, deadline: Duration) -> Vec<Option<i32>> {
        let end = Instant::now() + deadline;
        (0..self.children.len())
            .map(|index| self.end_of(index, end.saturating_duration_since(Instant::now())).code())
            .collect()
    }
    /// Waits until the run has logged an update; no process may end before.
    pub fn wait_update(&mut self, place: &Place, name: &str, step: u64) {
        let end = Instant::now() + PATIENCE;
        while support::losses(&place.run_dir(name)).last().is_none_or(|last| last.0 < step) {
            for index in 0..self.children.len() {
                if let Some(status) = self.children[index].try_wait().unwrap() {
                    panic!("process {index} ended ({status}) before update {step}: {}", self.said(index));
                }
            }
            assert!(Instant::now() < end, "update {step} does not come: {}", self.said(0));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill(); // SIGKILL ends a stopped process as well.
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for (index, log) in self.logs.iter().enumerate() {
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                eprintln!("== process {index}\n{}", lines[lines.len().saturating_sub(15)..].join("\n"));
            }
        }
    }
}

/// The command of a run with updates long enough to be disturbed.
pub fn command(place: &Place, name: &str, flags: &[&str]) -> Command {
    let lost_after = LOST_AFTER.to_string();
    let mut command = place.command(name, &["--lost_after", &lost_after]);
    command.args(flags);
    command
}

/// The run must be complete, with the bits and losses of one process that nothing disturbed.
pub fn assert_undisturbed(place: &Place, name: &str) {
    let (run, whole) = (place.run_dir(name), support::undisturbed());
    assert!(
        support::bits(&run, &format!("step-{}", support::TOTAL)) == whole.bits,
        "parameters or moments differ"
    );
    assert_eq!(support::losses(&run), whole.losses, "every update is logged once");
}

/// Runs to the end on so many ranks, from wherever the run is.
pub fn go_on(place: &Place, name: &str, world: usize) {
    let mut ranks = Ranks::start(place, name, world, &[]);
    assert_eq!(ranks.codes(PATIENCE), vec![Some(0); world], "{}", ranks.said(0));
}

/// run.log must say that the rank was lost or failed, at which update; returns the line.
pub fn lost_line(place: &Place, name: &str, rank: usize) -> String {
    let log = std::fs::read_to_string(place.run_dir(name).join("run.log")).unwrap_or_default();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let named = format!("rank {rank} on host {host} ");
    let line = log.lines().find(|line| line.contains(&named) && line.contains("at update"));
    line.unwrap_or_else(|| panic!("run.log does not say that {named} was lost: {log}")).to_owned()
}
