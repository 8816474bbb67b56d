//! The place that torchrun and torch.distributed.launch give their processes.

use super::vars::{Vars, seed};
use super::{Flags, Place, Starter, meeting, port, refuse_main_port, wrong};
use crate::error::CommError;

const STARTER: &str = "torchrun or torch.distributed.launch";

pub(super) fn find(vars: &Vars, flags: Flags) -> Result<Option<Place>, CommError> {
    if !vars.has("RANK") && !vars.has("LOCAL_RANK") {
        return Ok(None);
    }
    refuse_main_port(flags, STARTER, "MASTER_ADDR, MASTER_PORT")?;
    let rank = vars.need("RANK", STARTER)?;
    let world_size = vars.need("WORLD_SIZE", STARTER)?;
    let flag = usize::try_from(flags.local_rank).ok();
    let local_rank = match (vars.number("LOCAL_RANK")?, flag) {
        (Some(n), Some(flag)) if n != flag => {
            return Err(wrong(format!(
                "LOCAL_RANK is {n}, but --local_rank is {flag}: expected the same; leave the flag out"
            )));
        }
        (Some(n), _) | (None, Some(n)) => n,
        (None, None) => {
            return Err(wrong(
                "RANK is set, but neither LOCAL_RANK nor --local_rank: expected the number of the process on its host; \
                 set LOCAL_RANK (and LOCAL_WORLD_SIZE; 0 and 1 where a host has one process), or start with torchrun"
                    .into(),
            ));
        }
    };
    let master = match world_size {
        1 => None,
        _ => Some((vars.need_text("MASTER_ADDR", STARTER)?, vars.need_port("MASTER_PORT", STARTER)?)),
    };
    let local_size = local_size(vars, rank, world_size, local_rank, master.as_ref().map(|m| &*m.0))?;
    let mut place =
        Place { rank, world_size, local_rank, local_size, starter: Starter::Torchrun, ..Place::alone() };
    if let Some((address, mut at)) = master {
        let run = vars.text("TORCHELASTIC_RUN_ID").unwrap_or_default();
        // TORCHELASTIC_RESTART_COUNT may differ between hosts: only the one whose worker failed counts.
        place.secret = vars.secret(&["torchrun", &run, &address, &at.to_string()]);
        // Then torchrun itself listens at MASTER_PORT, for its workers' store.
        if vars.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            at = port(flags, seed(&format!("{at} {run}")))?;
        }
        place.meeting = match vars.meeting()? {
            Some(meeting) => meeting,
            None => meeting(&address, at),
        };
    }
    Ok(Some(place))
}

/// Processes on this host: torchrun says it, under torch.distributed.launch the user does (`NGPU`, as FiD wants it).
fn local_size(
    vars: &Vars,
    rank: usize,
    world_size: usize,
    local_rank: usize,
    address: Option<&str>,
) -> Result<usize, CommError> {
    if let Some(n) = vars.number("LOCAL_WORLD_SIZE")? {
        return Ok(n);
    }
    if let Some(n) = vars.number("NGPU")? {
        if n == 0 || !world_size.is_multiple_of(n) || rank % n != local_rank {
            return Err(wrong(format!(
                "NGPU is {n}, with RANK {rank}, WORLD_SIZE {world_size} and local rank {local_rank}: expected the \
                 number of processes on every host, the nproc_per_node of torch.distributed.launch"
            )));
        }
        return Ok(n);
    }
    match address {
        None | Some("localhost" | "127.0.0.1" | "::1") => Ok(world_size),
        Some(address) => Err(wrong(format!(
            "RANK and WORLD_SIZE are set and MASTER_ADDR is {address}, but neither LOCAL_WORLD_SIZE nor NGPU: expected \
             the number of processes on this host; export LOCAL_WORLD_SIZE=<nproc_per_node>"
        ))),
    }
}
