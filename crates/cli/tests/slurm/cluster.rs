//! A real Slurm cluster for a test (`tools/cluster`), its jobs, and the processes that they leave.
//!
//! Whatever becomes of the test, the cluster ends: by `Drop`, or, where the test is killed, by the script's own watcher.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for something that must happen. A guard against hanging, not a measure of speed.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// `cargo test` runs tests as threads: one cluster at a time is enough for a small machine. (nextest: a test group.)
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A running cluster.
pub struct Cluster {
    folder: tempfile::TempDir,
    /// Whether nodes have their own network; clients then run where the controller is.
    own_network: bool,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Starts one of nodes `node1` to `nodeN`, with settings of the script (`NET=1`, `GRACE=8`).
    pub fn start(nodes: usize, settings: &[(&str, &str)]) -> Cluster {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        for program in ["munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "ip"] {
            assert!(
                has(program),
                "{program} is not installed: these tests need a real Slurm, see `NET=1 tools/cluster install`"
            );
        }
        let cluster = Cluster {
            folder: tempfile::tempdir().unwrap(),
            own_network: settings.contains(&("NET", "1")),
            _turn: turn,
        };
        let mut start = cluster.script(&["start"], &[&nodes.to_string()]);
        start.envs(settings.iter().copied()).env("OWNER", std::process::id().to_string());
        // A file, not a pipe: the daemons inherit it, and reading a pipe to its end would wait for theirs.
        let log = cluster.folder.path().with_extension("start");
        let file = std::fs::File::create(&log).unwrap();
        let status = start.stdout(file.try_clone().unwrap()).stderr(file).status().unwrap();
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let _ = std::fs::remove_file(&log);
        assert!(status.success(), "tools/cluster start: {text}");
        cluster
    }
    fn script(&self, words: &[&str], more: &[&str]) -> Command {
        let mut command = plain("bash");
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/cluster"));
        command.args(words).arg(self.folder.path()).args(more);
        command
    }
    /// `tools/cluster WORD DIR MORE...`; it must succeed.
    pub fn tool(&self, word: &str, more: &[&str]) -> String {
        text(&format!("tools/cluster {word}"), self.script(&[word], more).output().unwrap())
    }
    /// One of Slurm's own commands, as a user gives it.
    pub fn client(&self, program: &str, words: &[&str]) -> Output {
        let mut command = if self.own_network {
            let mut command = self.script(&["exec"], &["head", program]);
            command.args(words);
            command
        } else {
            let mut command = plain(program);
            command.args(words);
            command
        };
        command.env("SLURM_CONF", self.folder.path().join("etc/slurm.conf")).output().unwrap()
    }
    /// As [`Cluster::client`]; it must succeed.
    pub fn ask(&self, program: &str, words: &[&str]) -> String {
        text(program, self.client(program, words))
    }
    /// `sbatch FLAGS SCRIPT`.
    pub fn submit(&self, script: &Path, flags: &[&str]) -> Job<'_> {
        let mut words = vec!["--parsable"];
        words.extend(flags);
        words.push(script.to_str().unwrap());
        let id = self.ask("sbatch", &words).trim().to_owned();
        assert!(id.parse::<u32>().is_ok(), "sbatch said {id:?}");
        Job { cluster: self, id }
    }
    /// What the controller has written last, for messages.
    fn log(&self) -> String {
        tail(&self.folder.path().join("log/slurmctld.log"), 30)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("== slurmctld.log\n{}", self.log());
        }
        let _ = self.script(&["stop"], &[]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// A submitted job.
pub struct Job<'a> {
    cluster: &'a Cluster,
    pub id: String,
}

impl Job<'_> {
    /// A field of `scontrol show job`: `JobState`, `Restarts`, `ExitCode`, `NodeList`, ...
    pub fn field(&self, name: &str) -> String {
        let shown = self.cluster.ask("scontrol", &["show", "job", &self.id, "--oneliner"]);
        let prefix = format!("{name}=");
        let found = shown.split_whitespace().find_map(|word| word.strip_prefix(&prefix));
        found.unwrap_or_else(|| panic!("scontrol shows no {name}: {shown}")).to_owned()
    }
    pub fn state(&self) -> String {
        self.field("JobState")
    }
    pub fn restarts(&self) -> u32 {
        self.field("Restarts").parse().unwrap()
    }
    /// Waits until the job has ended, and no step of it is left.
    pub fn ended(&self) -> String {
        let ended = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"];
        let mut state = String::new();
        wait_until(&format!("job {} has ended", self.id), || {
            state = self.state();
            ended.contains(&state.as_str())
        });
        state
    }
    /// `scancel WORDS JOB`.
    pub fn cancel(&self, words: &[&str]) {
        self.cluster.ask("scancel", &[words, &[&self.id]].concat());
    }
}

/// A process of the machine, told from a later one of the same number by its time of start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    started: String,
    /// `SLURM_PROCID`, or `TERCIO_RANK`.
    pub rank: Option<usize>,
}

impl Process {
    /// Whether it still runs; one that nobody has reaped yet does not.
    pub fn lives(&self) -> bool {
        stamp(self.pid).is_some_and(|started| started == self.started)
    }
    pub fn send(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

/// Time of start of a process that is no zombie.
fn stamp(pid: i32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    (fields[0] != "Z" && fields[0] != "X").then(|| fields[19].to_owned())
}

/// Every `tercio train` of the machine that has `marker` among its words, in the order of ranks.
pub fn trainers(marker: &Path) -> Vec<Process> {
    let marker = marker.to_str().unwrap();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let words = read("cmdline");
        let mut words = words.split(|&b| b == 0);
        if !words.next().is_some_and(|program| program.ends_with(b"/tercio"))
            || words.next() != Some(b"train")
            || !words.any(|word| String::from_utf8_lossy(word).contains(marker))
        {
            continue;
        }
        let environment = String::from_utf8_lossy(&read("environ")).into_owned();
        let variable = |name: &str| {
            let found = environment.split('\0').find_map(|e| e.strip_prefix(name)?.strip_prefix('='));
            found.and_then(|value| value.parse().ok())
        };
        let rank = variable("TERCIO_RANK").or_else(|| variable("SLURM_PROCID"));
        if let Some(started) = stamp(pid) {
            found.push(Process { pid, started, rank });
        }
    }
    found.sort_by_key(|process| (process.rank, process.pid));
    found
}

/// Waits until all of these have ended.
pub fn wait_gone(processes: &[Process], deadline: Duration) {
    let end = Instant::now() + deadline;
    loop {
        let left: Vec<_> = processes.iter().filter(|process| process.lives()).collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < end, "still alive after {deadline:?}: {left:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until `ready`.
pub fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !ready() {
        assert!(Instant::now() < end, "waited {PATIENCE:?} until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The last lines of a file.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// A command that has nothing of this process's own job or settings.
fn plain(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["TERCIO_", "SLURM_", "OMPI_", "PMI"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

fn text(what: &str, output: Output) -> String {
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")]);
    folders.into_iter().any(|folder| folder.join(program).is_file())
}
