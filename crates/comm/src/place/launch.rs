//! The place that `tercio launch` gives its processes.

use super::vars::Vars;
use super::{Flags, Place, Starter, refuse_local_rank, refuse_main_port};
use crate::error::CommError;

/// Variable: number of the process among all.
pub const RANK: &str = "TERCIO_RANK";
/// Variable: number of processes.
pub const WORLD_SIZE: &str = "TERCIO_WORLD_SIZE";
/// Variable: number of the process on its host.
pub const LOCAL_RANK: &str = "TERCIO_LOCAL_RANK";
/// Variable: number of processes on this host.
pub const LOCAL_SIZE: &str = "TERCIO_LOCAL_SIZE";
/// Variable: `host:port` where rank 0 listens.
pub const MEETING: &str = "TERCIO_MEETING";
/// Variable: what only the processes of the run know.
pub const SECRET: &str = "TERCIO_SECRET";

/// Variable: how often the launcher has started the run again.
pub const RESTART_COUNT: &str = "TERCIO_RESTART_COUNT";

const STARTER: &str = "tercio launch";

pub(super) fn find(vars: &Vars, flags: Flags) -> Result<Option<Place>, CommError> {
    // A meeting place and a secret may be set for other starters too.
    if ![RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE].iter().any(|name| vars.has(name)) {
        return Ok(None);
    }
    refuse_local_rank(flags, STARTER, LOCAL_RANK)?;
    refuse_main_port(flags, STARTER, MEETING)?;
    let world_size = vars.need(WORLD_SIZE, STARTER)?;
    let meeting = match vars.meeting()? {
        Some(meeting) => meeting,
        None if world_size == 1 => String::new(),
        None => vars.need_text(MEETING, STARTER)?,
    };
    Ok(Some(Place {
        rank: vars.need(RANK, STARTER)?,
        world_size,
        local_rank: vars.need(LOCAL_RANK, STARTER)?,
        local_size: vars.need(LOCAL_SIZE, STARTER)?,
        secret: vars.secret(&["launch", &meeting]),
        meeting,
        starter: Starter::Launch,
    }))
}
