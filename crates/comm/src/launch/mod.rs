//! `tercio launch`: starts the ranks of one host, passes signals and output on, and ends all when one fails.
//!
//! A program that wants several ranks of itself calls [`launch_distributed`]; one that wants another program's calls
//! [`Launch::run`].

mod children;
mod distributed;
mod output;

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

pub use children::End;
pub use distributed::launch_distributed;

use crate::error::CommError;
use crate::place::{PORTS, SECRET, derived_secret, valid_meeting};
use crate::secret::{hex, random};

/// Exit code of a rank that used words the command does not know.
pub const EXIT_USAGE: u8 = 2;
/// Exit code of a rank that saved after a signal: the same command goes on where it ended.
pub const EXIT_SAVED: u8 = 75;
/// Exit code of a rank that ends because another one was lost or failed.
pub const EXIT_LOST: u8 = 76;
/// Exit code after Ctrl-C.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Most processes that are believed to be meant for a host.
pub const MOST_PROCESSES: usize = 4096;

/// What to start, and how.
///
/// Every process gets the variables `TERCIO_RANK`, `TERCIO_WORLD_SIZE`, `TERCIO_LOCAL_RANK`, `TERCIO_LOCAL_SIZE`,
/// `TERCIO_MEETING`, `TERCIO_SECRET` and `TERCIO_RESTART_COUNT`. On stdout only rank 0 is heard; on stderr all are, each line of another rank
/// with `[rank N]` before it.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Processes on this host.
    pub nproc_per_node: usize,
    /// Hosts of the run; each has its own launcher.
    pub nnodes: usize,
    /// Number of this host, from 0.
    pub node_rank: usize,
    /// Host 0 and a port free there, `host:port`, the same for all launchers; with one host a free port is found.
    pub rdzv_endpoint: Option<String>,
    /// What only this run's processes know; drawn for a run of one host.
    pub secret: Option<String>,
    /// How often all processes of this host are started again after a failure.
    pub max_restarts: u32,
    /// From the first failure until processes that do not end by themselves are asked to (SIGTERM).
    pub patience: Duration,
    /// From then until they are killed.
    pub grace: Duration,
    /// Whether rank 0's stdout is returned instead of being this process's.
    pub capture: bool,
    /// Whether rank 0 gets a pipe for a result ([`Launch::distributed`]).
    wants_result: bool,
}

/// How the processes of this host ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code: that of the cause of a failure ([`Outcome::cause`]), or else the greatest.
    pub code: u8,
    /// How each ended: its rank, and how. In the order of their ends.
    pub ends: Vec<(usize, End)>,
    /// Rank 0's stdout, where it was captured.
    pub stdout: Vec<u8>,
    /// Starts after the first one.
    pub restarts: u32,
    /// What rank 0 wrote into its pipe.
    result: Vec<u8>,
}

impl Outcome {
    /// The first failure, unless that process only ended because of another's; `None` where none failed.
    pub fn cause(&self) -> Option<(usize, End)> {
        let failures = || self.ends.iter().copied().filter(|(_, end)| end.failed());
        failures().find(|(_, end)| *end != End::Code(EXIT_LOST)).or_else(|| failures().next())
    }
}

impl Launch {
    /// `nproc_per_node` processes of a program on this host.
    pub fn new(program: impl Into<PathBuf>, args: Vec<OsString>, nproc_per_node: usize) -> Launch {
        Launch {
            program: program.into(),
            args,
            nproc_per_node,
            nnodes: 1,
            node_rank: 0,
            rdzv_endpoint: None,
            secret: std::env::var(SECRET).ok().filter(|s| !s.is_empty()),
            max_restarts: 0,
            patience: Duration::from_secs(5),
            grace: Duration::from_secs(30),
            capture: false,
            wants_result: false,
        }
    }

    /// Starts all processes, and returns when all of this host have ended; none outlives this call, nor this process.
    ///
    /// While it works, SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and SIGHUP of this process are passed on to every child; the
    /// handlers stay. Children have process groups of their own, so a key pressed reaches them once, by this way.
    ///
    /// # Errors
    /// [`CommError::Place`] for numbers that do not fit each other or a port that is taken, [`CommError::Io`] when a
    /// process cannot be started. Failures of the processes are no errors, but in the outcome.
    pub fn run(&self) -> Result<Outcome, CommError> {
        self.check()?;
        let signals = children::Signals::watch()?;
        let mut restarts = 0;
        loop {
            let (meeting, secret) = (self.meeting()?, self.secret(restarts)?);
            let mut outcome = children::run(self, &meeting, &secret, restarts, &signals)?;
            outcome.restarts = restarts;
            let ends_well = matches!(outcome.code, 0 | EXIT_USAGE | EXIT_SAVED | EXIT_INTERRUPTED);
            if ends_well || restarts == self.max_restarts || signals.asked_to_end() {
                return Ok(outcome);
            }
            restarts += 1;
            tracing::warn!("starting all ranks again (restart {restarts} of {})", self.max_restarts);
        }
    }

    fn check(&self) -> Result<(), CommError> {
        let wrong = |what| Err(CommError::Place(what));
        if !(1..=MOST_PROCESSES).contains(&self.nproc_per_node) {
            return wrong(format!(
                "--nproc-per-node {}: expected 1 to {MOST_PROCESSES} processes",
                self.nproc_per_node
            ));
        }
        if !(1..=MOST_PROCESSES).contains(&self.nnodes) {
            return wrong(format!("--nnodes {}: expected 1 to {MOST_PROCESSES} hosts", self.nnodes));
        }
        if self.node_rank >= self.nnodes {
            return wrong(format!(
                "--node-rank {} of {} hosts: expected 0 to {}",
                self.node_rank,
                self.nnodes,
                self.nnodes - 1
            ));
        }
        match &self.rdzv_endpoint {
            Some(endpoint) if !valid_meeting(endpoint) => wrong(format!(
                "--rdzv-endpoint {endpoint}: expected host:port, as in node1:15001 or [fe80::1]:15001"
            )),
            None if self.nnodes > 1 => wrong(format!(
                "--nnodes {} needs --rdzv-endpoint host:port, the same on every host: host 0 and a port free there",
                self.nnodes
            )),
            _ => Ok(()),
        }
    }

    /// Where the ranks meet.
    fn meeting(&self) -> Result<String, CommError> {
        let Some(endpoint) = &self.rdzv_endpoint else { return free_meeting() };
        let port = endpoint.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if let (0, Some(port)) = (self.node_rank, port) {
            let tried = TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
            if let Err(error) = tried {
                return Err(CommError::Place(format!(
                    "--rdzv-endpoint {endpoint}: port {port} cannot be used on this host ({error}); choose another, or \
                     end what uses it"
                )));
            }
        }
        Ok(endpoint.clone())
    }

    fn secret(&self, attempt: u32) -> Result<String, CommError> {
        if let Some(secret) = &self.secret {
            return Ok(secret.clone());
        }
        if self.nnodes > 1 {
            let endpoint = self.rdzv_endpoint.as_deref().unwrap_or_default();
            if attempt == 0 {
                tracing::warn!(
                    "{SECRET} is not set: the run's secret follows from the endpoint {endpoint}, which keeps runs \
                     apart but no attacker out; set {SECRET} to the same random text on every host"
                );
            }
            return Ok(derived_secret(&["launch", endpoint, &self.nnodes.to_string()]));
        }
        Ok(hex(&random::<32>()?))
    }
}

/// A port of this host that nobody listens at. It lies outside of the range from which the system takes ports for
/// outgoing connections, so that it stays free until rank 0 binds it.
fn free_meeting() -> Result<String, CommError> {
    let (first, last) = (*PORTS.start(), *PORTS.end());
    for host in ["127.0.0.1", "::1"] {
        for _ in 0..100 {
            let draw = u16::from_le_bytes(random()?);
            let port = first + draw % (last - first + 1);
            if TcpListener::bind((host, port)).is_ok() {
                return Ok(if host.contains(':') {
                    format!("[{host}]:{port}")
                } else {
                    format!("{host}:{port}")
                });
            }
        }
    }
    Err(CommError::Place(format!(
        "no free port found from {first} to {last} on this host's loopback address; name one by --rdzv-endpoint"
    )))
}

#[cfg(test)]
mod tests;
