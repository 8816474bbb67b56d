//! `tercio launch`: several ranks of a command on this host.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tercio_comm::CommError;
use tercio_comm::launch::Launch as Start;
use tercio_train::TrainError;
use tercio_train::run::{Verbosity, init_logging};

/// Flags of `tercio launch`.
#[derive(Args)]
#[command(
    after_help = "Example: tercio launch --nproc-per-node 2 -- train reader --train-data train.jsonl\n\n\
    Exit code: 0 done; 75 saved after a signal, start it again to go on; 76 a rank elsewhere was lost; else that of the \
    rank that failed first, 128 and the signal's number where one killed it."
)]
pub struct Launch {
    /// Processes on this host
    #[arg(long, env = "TERCIO_NPROC_PER_NODE")]
    nproc_per_node: usize,
    /// Hosts; start this command on each
    #[arg(long, env = "TERCIO_NNODES", default_value_t = 1)]
    nnodes: usize,
    /// Number of this host, from 0
    #[arg(long, env = "TERCIO_NODE_RANK", default_value_t = 0)]
    node_rank: usize,
    /// Host 0 and a port that is free there, the same on all hosts: host:port. With one host it is found
    #[arg(long, env = "TERCIO_RDZV_ENDPOINT")]
    rdzv_endpoint: Option<String>,
    /// How often all ranks are started again after a failure; they go on from their last checkpoint
    #[arg(long, env = "TERCIO_MAX_RESTARTS", default_value_t = 0)]
    max_restarts: u32,
    /// Seconds that ranks have to end, once they were asked to because another one failed; then they are killed
    #[arg(long, env = "TERCIO_GRACE", default_value_t = 30)]
    grace: u64,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
    /// The command, without `tercio`: train reader ...
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl Launch {
    /// Launches; `check` reads the words of the command once, so that a slip is told once and not by every rank.
    pub fn run(self, check: impl FnOnce(Vec<OsString>) -> anyhow::Result<()>) -> anyhow::Result<ExitCode> {
        init_logging(None, if self.quiet { Verbosity::Quiet } else { Verbosity::Normal })?;
        check([&["tercio".into()], &*self.command].concat())?;
        let mut start = Start::new(std::env::current_exe()?, self.command, self.nproc_per_node);
        start.nnodes = self.nnodes;
        start.node_rank = self.node_rank;
        start.rdzv_endpoint = self.rdzv_endpoint;
        start.max_restarts = self.max_restarts;
        start.grace = Duration::from_secs(self.grace);
        let outcome = start.run().map_err(|e| match e {
            CommError::Place(what) => TrainError::Options(what).into(),
            other => anyhow::Error::from(other),
        })?;
        Ok(outcome.code.into())
    }
}
