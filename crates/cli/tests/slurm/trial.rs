//! A training job under test: its questions, its batch script, and what it must come to.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::cluster::*;
use super::support::{self, Bits, Place};

/// Updates of the run.
pub const TOTAL: u64 = 60;
/// Updates between checkpoints.
pub const SAVE: u64 = 10;
/// Seconds without a sign of life until a rank counts as lost.
pub const LOST_AFTER: u64 = 5;
/// Within this time after a loss all ranks must have ended. The excess over [`LOST_AFTER`] is for machines that do much else.
pub const GONE_AFTER: Duration = Duration::from_secs(LOST_AFTER + 25);
/// How the run is named.
const NAME: &str = "reader";

/// A run on a cluster.
pub struct Trial {
    pub cluster: Cluster,
    pub place: Place,
}

impl Trial {
    pub fn new(nodes: usize, settings: &[(&str, &str)]) -> Trial {
        let place = Place::new();
        place.write("train.jsonl", &support::questions(240));
        Trial { cluster: Cluster::start(nodes, settings), place }
    }
    pub fn run(&self) -> PathBuf {
        self.place.run_dir(NAME)
    }
    /// What the job has printed.
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.place.path("output")).unwrap_or_default()
    }
    /// The command of a run; updates that take long enough to be disturbed.
    fn command(&self, name: &str) -> Command {
        let (total, save) = (TOTAL.to_string(), SAVE.to_string());
        self.place
            .command(name, &["--global_batch_size", "16", "--total_steps", &total, "--save_freq", &save])
    }
    /// `tercio train reader ...` as words of a shell.
    fn words(&self, flags: &[&str]) -> String {
        let mut command = self.command(NAME);
        command.args(["--lost_after", &LOST_AFTER.to_string()]).args(flags);
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| format!("'{}'", word.to_str().unwrap())).collect::<Vec<_>>().join(" ")
    }
    /// A batch script as a person writes it; `last` is what stands below `srun`.
    pub fn script(&self, nodes: usize, last: &str) -> PathBuf {
        self.script_with(nodes, &[], last)
    }
    /// As [`Trial::script`], with more flags for the training.
    pub fn script_with(&self, nodes: usize, flags: &[&str], last: &str) -> PathBuf {
        let (output, words) = (self.place.path("output"), self.words(flags));
        let text = format!(
            "#!/bin/bash\n\
             #SBATCH --job-name=reader --nodes={nodes} --ntasks-per-node=2 --time=20\n\
             #SBATCH --requeue --open-mode=append --signal=USR1@60 --output={}\n\
             srun --kill-on-bad-exit=1 {words}\n{last}\n",
            output.display()
        );
        self.place.write("job.sh", &text);
        self.place.path("job.sh")
    }
    /// The words after `tercio` that submit the same job.
    pub fn submit_words(&self, nodes: usize, more: &[&str]) -> Vec<String> {
        let mut train = self.command(NAME);
        train.args(["--lost_after", &LOST_AFTER.to_string()]);
        let fixed = ["--ntasks-per-node", "2", "--time", "20", "--job-name", "reader", "--output"];
        let (nodes, output) = (nodes.to_string(), self.place.path("output"));
        let submit = ["slurm", "submit", "--nodes", &nodes].into_iter().chain(fixed);
        let submit = submit.chain([output.to_str().unwrap()]).chain(more.iter().copied()).chain(["--"]);
        let train = train.get_args().map(|word| word.to_str().unwrap());
        submit.chain(train).map(str::to_owned).collect()
    }
    /// The script that `tercio slurm submit --print` writes for the same job; `change` is what the test does to its text.
    pub fn written_script(&self, nodes: usize, change: impl Fn(&str) -> String) -> PathBuf {
        let words = self.submit_words(nodes, &["--print"]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = support::tercio(&words).output().unwrap();
        assert!(output.status.success(), "{}", support::stderr(&output));
        self.place.write("job.sh", &change(std::str::from_utf8(&output.stdout).unwrap()));
        self.place.path("job.sh")
    }
    /// Waits until the job's run has logged this update.
    pub fn wait_update(&self, job: &Job, step: u64) {
        wait_until(&format!("update {step} is logged"), || {
            assert!(
                matches!(job.state().as_str(), "PENDING" | "RUNNING"),
                "the job ended before update {step}"
            );
            support::losses(&self.run()).last().is_some_and(|last| last.0 >= step)
        });
    }
    /// The job's ranks, of which there must be so many.
    pub fn ranks(&self, expected: usize) -> Vec<Process> {
        let found = trainers(&self.place.path("runs"));
        let numbers: Vec<_> = found.iter().map(|process| process.rank.unwrap()).collect();
        assert_eq!(numbers, (0..expected).collect::<Vec<_>>(), "the ranks at work");
        found
    }
    /// The run must be complete, with the bits and losses of one process that nothing disturbed.
    pub fn assert_undisturbed(&self) {
        let whole = self.command("whole").output().unwrap();
        assert!(whole.status.success(), "{}", support::stderr(&whole));
        let (run, whole) = (self.run(), self.place.run_dir("whole"));
        let last = format!("step-{TOTAL}");
        let expected: Bits = support::bits(&whole, &last);
        assert!(support::bits(&run, &last) == expected, "parameters or moments differ");
        assert_eq!(support::losses(&run), support::losses(&whole), "every update is logged once");
        assert_eq!(support::link(&run, "latest"), last);
        assert_eq!(trainers(&self.place.path("runs")), [], "nothing is left running");
    }
    /// run.log must name a lost rank; returns the line.
    pub fn lost_line(&self) -> String {
        let log = std::fs::read_to_string(self.run().join("run.log")).unwrap_or_default();
        let line = log.lines().find(|line| line.contains("was lost") || line.contains(" failed at update"));
        line.unwrap_or_else(|| panic!("run.log names no lost rank: {log}")).to_owned()
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("== job's output\n{}", tail(&self.place.path("output"), 60));
            eprintln!("== run.log\n{}", tail(&self.run().join("run.log"), 30));
        }
    }
}
