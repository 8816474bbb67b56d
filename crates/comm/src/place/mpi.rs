//! The place that MPI launchers give their processes, known before MPI is initialised.

use super::vars::{Vars, seed};
use super::{Flags, Place, Starter, first_host, meeting, port, refuse_local_rank, wrong};
use crate::error::CommError;

const OPEN_MPI: &str = "Open MPI's mpirun";
const HYDRA: &str = "MPICH's mpiexec";

/// Processes of `mpirun` or `mpiexec`. Inside a Slurm allocation these start their daemons by `srun`, so their processes
/// see variables of a step that is not theirs; hence they come before Slurm.
pub(super) fn find_launched(vars: &Vars, flags: Flags) -> Result<Option<Place>, CommError> {
    if vars.has("OMPI_COMM_WORLD_RANK") || vars.has("OMPI_COMM_WORLD_SIZE") {
        let id = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_ID"].iter().find_map(|n| vars.text(n));
        let place = Place {
            rank: vars.need("OMPI_COMM_WORLD_RANK", OPEN_MPI)?,
            world_size: vars.need("OMPI_COMM_WORLD_SIZE", OPEN_MPI)?,
            local_rank: vars.need("OMPI_COMM_WORLD_LOCAL_RANK", OPEN_MPI)?,
            local_size: vars.need("OMPI_COMM_WORLD_LOCAL_SIZE", OPEN_MPI)?,
            ..Place::alone()
        };
        return finish(vars, flags, place, id, OPEN_MPI).map(Some);
    }
    if vars.has("PMI_RANK") && vars.has("MPI_LOCALRANKID") {
        let place = Place {
            rank: vars.need("PMI_RANK", HYDRA)?,
            world_size: vars.need("PMI_SIZE", HYDRA)?,
            local_rank: vars.need("MPI_LOCALRANKID", HYDRA)?,
            local_size: vars.need("MPI_LOCALNRANKS", HYDRA)?,
            ..Place::alone()
        };
        return finish(vars, flags, place, vars.text("PMI_JOBID"), HYDRA).map(Some);
    }
    Ok(None)
}

/// Processes that a resource manager serves with PMIx or PMI without a launcher of MPI's.
pub(super) fn find_served(vars: &Vars, flags: Flags) -> Result<Option<Place>, CommError> {
    let (rank, size, starter) = match (vars.has("PMIX_RANK"), vars.has("PMI_RANK")) {
        (true, _) => ("PMIX_RANK", ["PMIX_SIZE", "PMIX_JOB_SIZE", "PMIX_UNIV_SIZE", "PMI_SIZE"], "PMIx"),
        (_, true) => ("PMI_RANK", ["PMI_SIZE"; 4], "PMI"),
        _ => return Ok(None),
    };
    let rank = vars.need(rank, starter)?;
    let Some(name) = size.into_iter().find(|name| vars.has(name)) else {
        // Slurm's PMIx serves single tasks too, without a size.
        if vars.number("SLURM_NTASKS")? == Some(1) {
            return Ok(None);
        }
        return Err(wrong(format!(
            "{starter} gives rank {rank}, but no variable says how many ranks there are (looked for {}); start with \
             mpirun or srun, or set TERCIO_RANK, TERCIO_WORLD_SIZE, TERCIO_LOCAL_RANK, TERCIO_LOCAL_SIZE and \
             TERCIO_MEETING",
            size[..if size[0] == size[1] { 1 } else { 4 }].join(", ")
        )));
    };
    let world_size = vars.need(name, starter)?;
    let first = |names: &[&str], otherwise| {
        names.iter().find_map(|n| vars.number(n).transpose()).unwrap_or(Ok(otherwise))
    };
    let place = Place {
        rank,
        world_size,
        local_rank: first(&["PMIX_LOCAL_RANK", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"], rank)?,
        local_size: first(&["PMIX_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"], world_size)?,
        ..Place::alone()
    };
    let id = ["PMIX_NAMESPACE", "PMI_JOBID"].iter().find_map(|n| vars.text(n));
    finish(vars, flags, place, id, starter).map(Some)
}

/// Adds where the ranks meet and what they know.
fn finish(
    vars: &Vars,
    flags: Flags,
    place: Place,
    id: Option<String>,
    starter: &str,
) -> Result<Place, CommError> {
    refuse_local_rank(flags, starter, "its ranks on the host")?;
    let id = id.unwrap_or_default();
    let at = match (flags.main_port, vars.text("MASTER_PORT")) {
        (-1, Some(_)) => vars.need_port("MASTER_PORT", starter)?,
        _ => port(flags, seed(&id))?,
    };
    let meeting = match vars.meeting()? {
        Some(meeting) => meeting,
        None => meeting(&host(vars, &place, starter)?, at),
    };
    let secret = vars.secret(&["mpi", &id, &place.world_size.to_string()]);
    Ok(Place { meeting, secret, starter: Starter::Mpi, ..place })
}

/// The host of rank 0.
fn host(vars: &Vars, place: &Place, starter: &str) -> Result<String, CommError> {
    if place.world_size <= place.local_size {
        return Ok("127.0.0.1".into());
    }
    if let Some(address) = vars.text("MASTER_ADDR") {
        return Ok(address);
    }
    if let Some(list) = vars.text("SLURM_JOB_NODELIST").or_else(|| vars.text("SLURM_NODELIST")) {
        return first_host(&list);
    }
    Err(wrong(format!(
        "{starter} gives {} ranks on several hosts, but not where rank 0 runs; export TERCIO_MEETING=host:port with a \
         host of rank 0 and a free port (mpirun -x TERCIO_MEETING=node1:15001 ...)",
        place.world_size
    )))
}
