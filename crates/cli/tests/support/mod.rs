//! What the tests of the command share: a folder with questions and a tiny model, runs as processes, and what they leave.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Updates of a whole run.
pub const TOTAL: u64 = 30;

/// Longest wait for something that a process should do; machines that build at the same time are slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// A port that is free now. Not one of those that the system gives to outgoing connections: tests at the same time make
/// many, and one of them would have it before rank 0 does.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(2654435761) >> 8;
    (0..12_000)
        .map(|_| 20_001 + (start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000) as u16)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("no port is free")
}

/// A folder with training questions, held-out questions, and runs below `runs`.
pub struct Place {
    root: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        let place = Place { root: tempfile::tempdir().unwrap() };
        place.write("train.jsonl", &questions(24));
        place.write("eval.jsonl", &questions(6));
        place
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
    pub fn write(&self, name: &str, content: &str) {
        std::fs::write(self.path(name), content).unwrap();
    }
    pub fn run_dir(&self, name: &str) -> PathBuf {
        self.path("runs").join(name)
    }
    /// The command that trains the run `name`; later flags win over the defaults here.
    pub fn command(&self, name: &str, flags: &[&str]) -> Command {
        let model = golden().join("fid_reader_t5v10/model");
        let mut command =
            tercio(&["train", "reader", "--name", name, "--model_path", model.to_str().unwrap()]);
        command.args(["--checkpoint_dir".as_ref(), self.path("runs").as_os_str()]);
        command.args(["--train_data".as_ref(), self.path("train.jsonl").as_os_str()]);
        let settings = "--dropout 0.1 --global_batch_size 8 --micro_batch_size 2 --save_freq 5 --log_freq 1 \
                        --n_context 3 --text_maxlength 64 --lr 1e-3 --generation_max_length 8 --threads 1 --keep_last 0";
        command.args(settings.split_whitespace()).args(["--total_steps", &TOTAL.to_string()]);
        command.args(flags);
        command
    }
    /// Runs it to its end.
    pub fn run(&self, name: &str, flags: &[&str]) -> Output {
        finish(self.command(name, flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }
    /// As [`Place::run`]; the run must succeed.
    pub fn train(&self, name: &str, flags: &[&str]) -> Output {
        let output = self.run(name, flags);
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }
    /// Starts it, with its talk in a file, so that no pipe can fill.
    pub fn start(&self, name: &str, flags: &[&str]) -> Child {
        let log = std::fs::File::create(self.path("stderr")).unwrap();
        self.command(name, flags).stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }
}

/// The binary, free of this process's own settings.
pub fn tercio(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tercio"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TERCIO_") {
            command.env_remove(name);
        }
    }
    command.env_remove("SLURM_JOB_ID").stdin(Stdio::null()).args(words);
    command
}

/// The stored cases of the repository.
pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// `n` questions as JSONL, no two alike, made of the stored case's texts.
pub fn questions(n: usize) -> String {
    let text = std::fs::read_to_string(golden().join("fid_reader_t5v10/input.json")).unwrap();
    let input: Value = serde_json::from_str(&text).unwrap();
    let stored = input["questions"].as_array().unwrap();
    let line = |i: usize| {
        let mut question = stored[i % stored.len()].clone();
        question["id"] = json!(i.to_string());
        question["question"] = json!(format!("{} {i}", question["question"].as_str().unwrap()));
        format!("{question}\n")
    };
    (0..n).map(line).collect()
}

/// Waits for the process's end.
pub fn finish(child: Child) -> Output {
    let pid = rustix::process::Pid::from_child(&child);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(PATIENCE) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            panic!("the process did not end within {PATIENCE:?}");
        }
    }
}

/// Waits until `ready`; false when the process ended first.
pub fn wait_for(child: &mut Child, mut ready: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    loop {
        if ready() {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return ready();
        }
        if Instant::now() > end {
            let _ = child.kill();
            panic!("nothing happened within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// `kill -9`; false when the process had ended well before.
pub fn kill_dead(mut child: Child) -> bool {
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(status.signal() == Some(9) || status.success(), "{status}");
    !status.success()
}

/// Sends a signal.
pub fn send(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The output of a run that must fail, and must not panic.
pub fn failure(output: &Output) -> String {
    let text = stderr(output);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{:?}: {text}", output.status);
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// Whole lines of `metrics.jsonl`.
pub fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Step and loss, as bits, of all logged updates.
pub fn losses(run: &Path) -> Vec<(u64, u64)> {
    let lines = metrics(run);
    let updates = lines.iter().filter(|line| line.get("event").is_none());
    updates.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap().to_bits())).collect()
}

/// Steps of all events of a kind.
pub fn events(run: &Path, kind: &str) -> Vec<u64> {
    let lines = metrics(run);
    let of_kind = lines.iter().filter(|line| line.get("event").is_some_and(|event| event == kind));
    of_kind.map(|line| line["step"].as_u64().unwrap()).collect()
}

/// Processes that have begun to train the run.
pub fn begins(run: &Path) -> usize {
    events(run, "start").len() + events(run, "resume").len()
}

/// Updates that process number `n` (from 1) of the run has logged.
pub fn updates_of(run: &Path, n: usize) -> usize {
    let (mut begun, mut updates) = (0, 0);
    for line in metrics(run) {
        match line.get("event").and_then(Value::as_str) {
            Some("start" | "resume") => begun += 1,
            None if begun == n => updates += 1,
            _ => {}
        }
    }
    updates
}

/// Names of the run's checkpoint folders, sorted.
pub fn checkpoints(run: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(run.join("checkpoint")) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("step-"))
        .collect();
    names.sort();
    names
}

/// What a link of the run's checkpoints points at.
pub fn link(run: &Path, name: &str) -> String {
    std::fs::read_link(run.join("checkpoint").join(name)).unwrap().to_str().unwrap().to_owned()
}

/// Parameters and moments of a checkpoint, as bytes.
#[derive(PartialEq)]
pub struct Bits {
    pub model: Vec<u8>,
    pub moments: Vec<u8>,
}

// Megabytes are of no use in a message.
impl std::fmt::Debug for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} and {} bytes", self.model.len(), self.moments.len())
    }
}

pub fn bits(run: &Path, checkpoint: &str) -> Bits {
    let read = |name: &str| std::fs::read(run.join("checkpoint").join(checkpoint).join(name)).unwrap();
    Bits { model: read("model.safetensors"), moments: read("optimizer.safetensors") }
}

/// What a run that was never disturbed leaves: bits after the last update, and all losses.
pub struct Undisturbed {
    pub bits: Bits,
    pub losses: Vec<(u64, u64)>,
}

/// The undisturbed run, computed once for a test program.
pub fn undisturbed() -> &'static Undisturbed {
    static RUN: std::sync::OnceLock<Undisturbed> = std::sync::OnceLock::new();
    RUN.get_or_init(|| {
        let place = Place::new();
        place.train("whole", &[]);
        let run = place.run_dir("whole");
        let losses = losses(&run);
        assert_eq!(losses.iter().map(|l| l.0).collect::<Vec<_>>(), (1..=TOTAL).collect::<Vec<_>>());
        Undisturbed { bits: bits(&run, &format!("step-{TOTAL}")), losses }
    })
}
