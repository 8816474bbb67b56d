//! Where a process stands: its rank, the number of ranks, and where they meet, found from the environment that its
//! starter left.
//!
//! Order of belief: Tercio's own launcher, torchrun (or torch.distributed.launch), an MPI launcher, a step of Slurm's
//! `srun`, PMIx or PMI without a launcher of their own; else the process is alone. The variables of a Slurm allocation
//! alone say nothing: its batch script, its shell and whatever they start otherwise are not ranks.

mod hostlist;
mod launch;
mod mpi;
mod slurm;
mod torchrun;
mod vars;

pub use hostlist::{expand_hosts, first_host};
pub use launch::{LOCAL_RANK, LOCAL_SIZE, MEETING, RANK, RESTART_COUNT, SECRET, WORLD_SIZE};
pub use slurm::is_step as is_slurm_step;

use crate::error::CommError;
use vars::Vars;
pub(crate) use vars::{derived_secret, valid_meeting};

/// Most ranks that are believed to be meant.
pub const MOST_RANKS: usize = 1 << 16;
/// Ports that are derived, and that `--main_port` may name (FiD's range).
pub const PORTS: std::ops::RangeInclusive<u16> = 10001..=20000;

/// Who started this process, and so whose variables were believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// Nobody: it is alone.
    Alone,
    /// `tercio launch`.
    Launch,
    /// torchrun, or torch.distributed.launch.
    Torchrun,
    /// Slurm's `srun`.
    Slurm,
    /// Open MPI, MPICH or another PMIx / PMI launcher.
    Mpi,
}

impl std::fmt::Display for Starter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Starter::Alone => "nobody",
            Starter::Launch => "tercio launch",
            Starter::Torchrun => "torchrun",
            Starter::Slurm => "srun",
            Starter::Mpi => "an MPI launcher",
        })
    }
}

/// A process among the processes of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of this process, 0 to `world_size - 1`; rank 0 is the main one.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Number of this process on its host.
    pub local_rank: usize,
    /// Number of processes on this host.
    pub local_size: usize,
    /// Host and port where rank 0 listens (`host:port`, `[::1]:port`); empty in a world of one.
    pub meeting: String,
    /// What the ranks of this run know and strangers do not; empty in a world of one.
    pub secret: String,
    /// Who started it.
    pub starter: Starter,
}

/// FiD's flags of one's place; -1 is "not given".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// `--local_rank`, set by torch.distributed.launch; must stay -1 elsewhere.
    pub local_rank: i64,
    /// `--main_port`, for srun and MPI: where rank 0 listens, 10001 to 20000; derived from the job by default.
    pub main_port: i64,
}

impl Default for Flags {
    fn default() -> Flags {
        Flags { local_rank: -1, main_port: -1 }
    }
}

impl Place {
    /// A process on its own.
    pub fn alone() -> Place {
        Place {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_size: 1,
            meeting: String::new(),
            secret: String::new(),
            starter: Starter::Alone,
        }
    }

    /// The place that this process's environment gives.
    ///
    /// # Errors
    /// As [`find`].
    pub fn from_env(flags: Flags) -> Result<Place, CommError> {
        find(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()), flags)
    }

    fn checked(self) -> Result<Place, CommError> {
        let Place { rank, world_size, local_rank, local_size, starter, .. } = &self;
        if !(1..=MOST_RANKS).contains(world_size) {
            return Err(wrong(format!("{starter} gives {world_size} ranks: expected 1 to {MOST_RANKS}")));
        }
        if rank >= world_size {
            return Err(wrong(format!(
                "{starter} gives rank {rank} of {world_size} ranks: expected a rank from 0 to {}; are variables of \
                 two starts mixed?",
                world_size - 1
            )));
        }
        if local_rank >= local_size || local_size > world_size {
            return Err(wrong(format!(
                "{starter} gives local rank {local_rank} of {local_size} ranks on this host, {world_size} in all: \
                 expected a local rank below the number on the host, and that at most the number in all; are \
                 variables of two starts mixed?"
            )));
        }
        Ok(match self.world_size {
            1 => Place { meeting: String::new(), secret: String::new(), ..self },
            _ => self,
        })
    }
}

/// Finds a process's place from its environment (`env` looks up a variable; an empty one counts as not set).
///
/// `TERCIO_SECRET`, where set, is the secret whoever started the process. Otherwise it is derived from names of the job,
/// which guards against mix-ups of runs, not against an attacker. `TERCIO_MEETING`, where set, is the meeting place
/// under srun and MPI too.
///
/// # Errors
/// [`CommError::Place`] where variables or flags are half set, contradict each other or are no numbers.
pub fn find(env: &dyn Fn(&str) -> Option<String>, flags: Flags) -> Result<Place, CommError> {
    let vars = Vars(env);
    if flags.local_rank < -1 {
        return Err(wrong(format!("--local_rank {}: expected -1 (not given), 0 or more", flags.local_rank)));
    }
    if let Some(place) = launch::find(&vars, flags)? {
        return place.checked();
    }
    if let Some(place) = torchrun::find(&vars, flags)? {
        return place.checked();
    }
    if let Some(place) = mpi::find_launched(&vars, flags)? {
        return place.checked();
    }
    if let Some(place) = slurm::find(&vars, flags)? {
        return place.checked();
    }
    if let Some(place) = mpi::find_served(&vars, flags)? {
        return place.checked();
    }
    if flags.local_rank != -1 {
        return Err(wrong(format!(
            "--local_rank {} belongs to torch.distributed.launch, but RANK is not set; start with `tercio launch` or \
             torchrun, or leave the flag out",
            flags.local_rank
        )));
    }
    // Each of a crowd that believes to be alone would train the same run.
    if let Some(n @ 2..) = vars.number("WORLD_SIZE")? {
        return Err(wrong(format!(
            "WORLD_SIZE is {n}, but RANK is not set, so this process has no place among them; start with `tercio \
             launch`, torchrun or srun, or unset WORLD_SIZE"
        )));
    }
    Ok(Place::alone())
}

/// How often the same command was started again, by `tercio launch --max-restarts` or as the same job of Slurm: what was
/// meant for the first start only, such as `--new-run`, no longer counts then.
pub fn restarts(env: &dyn Fn(&str) -> Option<String>) -> u64 {
    let of = |name: &str| env(name).and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
    of(RESTART_COUNT).saturating_add(of("SLURM_RESTART_COUNT"))
}

fn wrong(what: String) -> CommError {
    CommError::Place(what)
}

/// Refuses `--local_rank` where the starter numbers the processes itself.
fn refuse_local_rank(flags: Flags, starter: &str, its: &str) -> Result<(), CommError> {
    match flags.local_rank {
        -1 => Ok(()),
        n => Err(wrong(format!(
            "--local_rank {n}: must stay -1 under {starter}, which numbers the processes itself ({its}); leave the \
             flag out"
        ))),
    }
}

/// Refuses `--main_port` where the starter says where the ranks meet.
fn refuse_main_port(flags: Flags, starter: &str, its: &str) -> Result<(), CommError> {
    match flags.main_port {
        -1 => Ok(()),
        n => Err(wrong(format!(
            "--main_port {n}: must stay -1 under {starter}, which says where the ranks meet ({its}); leave the flag out"
        ))),
    }
}

/// The port that `--main_port` names, or else one that `seed` gives, so that two jobs on a host rarely meet on one.
fn port(flags: Flags, seed: u64) -> Result<u16, CommError> {
    let (first, last) = (*PORTS.start(), *PORTS.end());
    if flags.main_port == -1 {
        return Ok(first + (seed % u64::from(last - first + 1)) as u16);
    }
    u16::try_from(flags.main_port).ok().filter(|p| PORTS.contains(p)).ok_or_else(|| {
        wrong(format!(
            "--main_port {}: expected {first} to {last}, or -1 for one that is derived from the job",
            flags.main_port
        ))
    })
}

/// `host:port`, with an IPv6 address in brackets.
fn meeting(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests;
