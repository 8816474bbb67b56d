//! `tercio slurm submit`: writes the batch script of a run, sends it in, and follows it.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tercio_comm::CommError;
use tercio_comm::slurm::{self, Script};
use tercio_train::TrainError;
use tercio_train::run::{Verbosity, init_logging};

use super::common::line;
use super::slurm_logs::follow;

/// Flags of `tercio slurm submit`.
#[derive(Args)]
#[command(
    after_help = "Example: tercio slurm submit --nodes 4 --gpus-per-node 8 --time 12:00:00 -- train reader \
    --train-data train.jsonl\n\n\
    Before the time limit, and where the job is preempted with notice, the run saves and is requeued: nothing is lost. \
    After a loss that nobody announced the job is requeued and goes on from the last checkpoint, unless two restarts \
    added none."
)]
pub struct SlurmSubmit {
    #[command(flatten)]
    job: JobOptions,
    /// Name of the job
    #[arg(long, env = "TERCIO_JOB_NAME", default_value = "tercio")]
    job_name: String,
    /// Print the script, and send nothing in
    #[arg(long, conflicts_with = "follow")]
    print: bool,
    /// Stay, show the job's output and state, and end with its exit code
    #[arg(long)]
    follow: bool,
    /// The command, without `tercio`: train reader ...
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What a job asks for.
#[derive(Args)]
pub struct JobOptions {
    /// Nodes of the job
    #[arg(long, env = "TERCIO_NODES", default_value_t = 1)]
    nodes: u32,
    /// GPUs of each node
    #[arg(long, env = "TERCIO_GPUS_PER_NODE")]
    gpus_per_node: Option<u32>,
    /// Ranks on each node; default: one for each GPU, or one
    #[arg(long, env = "TERCIO_NTASKS_PER_NODE")]
    ntasks_per_node: Option<u32>,
    /// Cores of each rank
    #[arg(long, env = "TERCIO_CPUS_PER_TASK")]
    cpus_per_task: Option<u32>,
    /// Limit of time, as sbatch reads it: minutes, hours:minutes:seconds, days-hours; default: the partition's
    #[arg(long, env = "TERCIO_TIME")]
    time: Option<String>,
    /// Partition
    #[arg(long, env = "TERCIO_PARTITION")]
    partition: Option<String>,
    /// Account that is charged
    #[arg(long, env = "TERCIO_ACCOUNT")]
    account: Option<String>,
    /// Array of jobs: 0-7, 0-15%4; each one sees its number in SLURM_ARRAY_TASK_ID
    #[arg(long, env = "TERCIO_ARRAY")]
    pub array: Option<String>,
    /// Signal, and seconds before the time limit at which it comes
    #[arg(long, env = "TERCIO_SIGNAL", default_value = "USR1@120")]
    signal: String,
    /// Memory of each node: 64G
    #[arg(long, env = "TERCIO_MEM")]
    mem: Option<String>,
    /// Features that nodes must have
    #[arg(long, env = "TERCIO_CONSTRAINT")]
    constraint: Option<String>,
    /// Nodes that are not wanted: node[3-4]
    #[arg(long, env = "TERCIO_EXCLUDE")]
    exclude: Option<String>,
    /// File of the output; default: NAME-JOB.out in this folder
    #[arg(long, env = "TERCIO_OUTPUT")]
    output: Option<String>,
    /// Another option of sbatch: qos=high, exclusive; may be given several times
    #[arg(long, value_name = "KEY[=VALUE]")]
    sbatch: Vec<String>,
}

impl SlurmSubmit {
    /// Submits; `check` reads the words of the command, and gives the run's folder where it has one.
    pub fn run(
        self,
        check: impl FnOnce(Vec<OsString>) -> anyhow::Result<Option<PathBuf>>,
    ) -> anyhow::Result<ExitCode> {
        init_logging(None, Verbosity::Normal)?;
        let run_dir = check([&["tercio".into()], &*self.command].concat())?;
        let script = Script {
            program: std::env::current_exe()?,
            options: self.job.options(&self.job_name),
            srun: self.job.srun(),
            run_dir: run_dir.map(std::path::absolute).transpose()?,
            args: self.command,
        };
        let text = script.text().map_err(|e| match e {
            CommError::Place(what) => TrainError::Options(what).into(),
            other => anyhow::Error::from(other),
        })?;
        if self.print {
            std::io::stdout().write_all(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        let job = slurm::submit(&text)?;
        line(&job)?;
        if self.follow {
            return follow(&job, true);
        }
        eprintln!(
            "job {job} is submitted; `tercio slurm status {job}` and `tercio slurm logs {job} --follow` tell of it"
        );
        Ok(ExitCode::SUCCESS)
    }
}

impl JobOptions {
    /// Options of srun.
    pub fn srun(&self) -> Vec<String> {
        self.cpus_per_task.map(|n| format!("--cpus-per-task={n}")).into_iter().collect()
    }

    /// Options of sbatch; what is given by `--sbatch` comes last, and so wins.
    pub fn options(&self, job_name: &str) -> Vec<(String, Option<String>)> {
        let output = self.output.clone().unwrap_or_else(|| {
            let number = if self.array.is_some() { "%A_%a" } else { "%j" };
            format!("{}-{number}.out", job_name.replace(['/', '%'], "_"))
        });
        let tasks = self.ntasks_per_node.or(self.gpus_per_node).unwrap_or(1);
        let number = |n: u32| Some(n.to_string());
        let all = [
            ("job-name", Some(job_name.to_owned())),
            ("nodes", number(self.nodes)),
            ("ntasks-per-node", number(tasks)),
            ("gpus-per-node", self.gpus_per_node.and_then(number)),
            ("cpus-per-task", self.cpus_per_task.and_then(number)),
            ("time", self.time.clone()),
            ("partition", self.partition.clone()),
            ("account", self.account.clone()),
            ("array", self.array.clone()),
            ("mem", self.mem.clone()),
            ("constraint", self.constraint.clone()),
            ("exclude", self.exclude.clone()),
            ("output", Some(output)),
            ("signal", Some(self.signal.clone())),
            ("open-mode", Some("append".into())),
        ];
        let mut options: Vec<(String, Option<String>)> = all
            .into_iter()
            .filter_map(|(name, value)| value.map(|value| (name.to_owned(), Some(value))))
            .collect();
        options.push(("requeue".into(), None));
        options.extend(self.sbatch.iter().map(|given| match given.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (given.clone(), None),
        }));
        options
    }
}
