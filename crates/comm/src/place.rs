//! Where a process stands: its rank, the number of ranks, and where they meet.

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
    /// Host and port where rank 0 listens; empty when alone.
    pub meeting: String,
    /// What the ranks of this run know and strangers do not.
    pub secret: String,
    /// Who started it.
    pub starter: Starter,
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
}
