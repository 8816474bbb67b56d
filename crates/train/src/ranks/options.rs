//! The settings of a run on several ranks: how they find and lose one another, and what they share out. None reaches a
//! result, and all may change when a run goes on.

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tercio_comm::Settings;

/// Longest time that is believed to be meant, in seconds: a month.
const MOST_SECONDS: u64 = 31 * 86_400;

/// Which way bytes go between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Shared memory within a host, TCP between hosts.
    Auto,
    /// Shared memory: all ranks on one host.
    Local,
    /// TCP.
    Tcp,
    /// MPI's messages; of a build with the feature `mpi`.
    Mpi,
}

/// What is shared out to the ranks beside the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// Nothing: every rank holds everything.
    None,
    /// The optimizer: each rank holds the moments of its part of the parameters and updates that part.
    Optimizer,
}

/// What becomes of a job of Slurm that was told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Requeue {
    /// A batch job is queued again.
    Auto,
    /// It ends with exit code 75.
    Never,
}

/// How ranks find, hear and lose one another.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct LinkOptions {
    /// Way of bytes between ranks
    #[arg(long, value_enum, env = "TERCIO_BACKEND", default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// Seconds that the ranks may take to find each other
    #[arg(long, env = "TERCIO_JOIN_TIMEOUT", default_value_t = 300)]
    pub join_timeout: u64,
    /// Seconds of silence after which another rank counts as lost
    #[arg(long, env = "TERCIO_LOST_AFTER", default_value_t = 30)]
    pub lost_after: u64,
    /// Seconds that ranks wait for one that lives but does not come
    #[arg(long, env = "TERCIO_COLLECTIVE_TIMEOUT", default_value_t = 1800)]
    pub collective_timeout: u64,
    /// Network interface, or own address, for the ranks' connections; default: the one on the way to rank 0
    #[arg(long, env = "TERCIO_INTERFACE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Rank 0 sends the data files to ranks that have no copy of them
    #[arg(long, env = "TERCIO_BROADCAST_DATA")]
    pub broadcast_data: bool,
}

/// All settings of the ranks of a training.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct RankOptions {
    /// How they talk.
    #[command(flatten)]
    #[serde(flatten)]
    pub link: LinkOptions,
    /// What is shared out to the ranks beside the work: `optimizer` takes less memory (ZeRO-1), with the same bits
    #[arg(long, value_enum, env = "TERCIO_SHARD", default_value_t = Shard::None)]
    pub shard: Shard,
    /// Under Slurm, after a signal and the save: whether the job is queued again
    #[arg(long, value_enum, env = "TERCIO_REQUEUE", default_value_t = Requeue::Auto)]
    pub requeue: Requeue,
    /// Keep a trace of where every rank's time goes, in the folder `trace` of the run
    #[arg(long, env = "TERCIO_TRACE_RANKS")]
    pub trace_ranks: bool,
}

/// Names of these settings: all may change when a run goes on.
pub const MAY_CHANGE: &[&str] = &[
    "backend",
    "join_timeout",
    "lost_after",
    "collective_timeout",
    "interface",
    "broadcast_data",
    "shard",
    "requeue",
    "trace_ranks",
];

impl LinkOptions {
    /// What is wrong with them, if anything.
    pub fn check(&self) -> Result<(), String> {
        let times = [
            ("join_timeout", self.join_timeout),
            ("lost_after", self.lost_after),
            ("collective_timeout", self.collective_timeout),
        ];
        match times.iter().find(|(_, seconds)| !(1..=MOST_SECONDS).contains(seconds)) {
            Some((flag, seconds)) => {
                Err(format!("--{flag} {seconds}: expected 1 to {MOST_SECONDS} seconds (a month)"))
            }
            None => Ok(()),
        }
    }
    /// As the ranks' crate takes them.
    pub fn settings(&self) -> Settings {
        Settings {
            backend: match self.backend {
                Backend::Auto => tercio_comm::Backend::Auto,
                Backend::Local => tercio_comm::Backend::Local,
                Backend::Tcp => tercio_comm::Backend::Tcp,
                Backend::Mpi => tercio_comm::Backend::Mpi,
            },
            join_timeout: Duration::from_secs(self.join_timeout),
            lost_after: Duration::from_secs(self.lost_after),
            collective_timeout: Duration::from_secs(self.collective_timeout),
            interface: self.interface.clone(),
        }
    }
}
