//! The place that a step of Slurm's `srun` gives its tasks, with FiD's rules for its two flags.

use super::vars::Vars;
use super::{Flags, Place, Starter, first_host, meeting, port, refuse_local_rank, wrong};
use crate::error::CommError;

const STARTER: &str = "Slurm's srun";
/// Steps from here on are no sruns: the batch script, the shell of an allocation, external ones.
const FIRST_SPECIAL_STEP: u64 = 0xffff_fff0;

/// Whether an environment is that of one of several tasks of a `srun`, not of an allocation's batch script or shell.
pub fn is_step(env: &dyn Fn(&str) -> Option<String>) -> bool {
    step(&Vars(env)).is_ok_and(|s| s.is_some())
}

struct Step {
    id: u64,
    tasks: usize,
}

fn step(vars: &Vars) -> Result<Option<Step>, CommError> {
    let Some(id) = vars.text("SLURM_STEP_ID").or_else(|| vars.text("SLURM_STEPID")) else { return Ok(None) };
    // Names ("batch", "interactive") and numbers of steps that are no sruns.
    let Some(id) = id.parse().ok().filter(|&id| id < FIRST_SPECIAL_STEP) else { return Ok(None) };
    // In a terminal of `srun --pty` a person starts things one at a time.
    if !vars.has("SLURM_PROCID") || vars.has("SLURM_PTY_PORT") {
        return Ok(None);
    }
    let tasks = match vars.number("SLURM_STEP_NUM_TASKS")? {
        Some(n) => n,
        None => vars.need("SLURM_NTASKS", STARTER)?,
    };
    Ok((tasks > 1).then_some(Step { id, tasks }))
}

pub(super) fn find(vars: &Vars, flags: Flags) -> Result<Option<Place>, CommError> {
    let Some(Step { id, tasks }) = step(vars)? else { return Ok(None) };
    refuse_local_rank(flags, "Slurm", "SLURM_PROCID, SLURM_LOCALID")?;
    let job = vars.need("SLURM_JOB_ID", STARTER)? as u64;
    let restart = vars.number("SLURM_RESTART_COUNT")?.unwrap_or(0) as u64;
    let node = vars.need("SLURM_NODEID", STARTER)?;
    let counts_name = match vars.has("SLURM_STEP_TASKS_PER_NODE") {
        true => "SLURM_STEP_TASKS_PER_NODE",
        false => "SLURM_TASKS_PER_NODE",
    };
    let counts = vars.need_text(counts_name, STARTER)?;
    let local_size = tasks_of(&counts, node).ok_or_else(|| {
        wrong(format!(
            "{counts_name} is {counts:?} and SLURM_NODEID is {node}: expected counts of tasks, one for each node, as \
             in 2(x3),1"
        ))
    })?;
    // An attempt that lives on after a requeue holds its port.
    let seed = job.wrapping_add(id.wrapping_mul(7)).wrapping_add(restart.wrapping_mul(1009));
    let at = port(flags, seed)?;
    let meeting = match vars.meeting()? {
        Some(meeting) => meeting,
        None => {
            let list = match vars.text("SLURM_STEP_NODELIST").or_else(|| vars.text("SLURM_JOB_NODELIST")) {
                Some(list) => list,
                None => vars.need_text("SLURM_NODELIST", STARTER)?,
            };
            meeting(&first_host(&list)?, at)
        }
    };
    let uid = vars.text("SLURM_JOB_UID").unwrap_or_default();
    let names = [job, id, restart].map(|n| n.to_string());
    Ok(Some(Place {
        rank: vars.need("SLURM_PROCID", STARTER)?,
        world_size: tasks,
        local_rank: vars.need("SLURM_LOCALID", STARTER)?,
        local_size,
        meeting,
        secret: vars.secret(&["slurm", &names[0], &names[1], &names[2], &uid]),
        starter: Starter::Slurm,
    }))
}

/// The count of tasks of one node in a text like `2(x3),1`.
fn tasks_of(counts: &str, node: usize) -> Option<usize> {
    let mut before = 0usize;
    for part in counts.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1usize),
        };
        before = before.checked_add(times)?;
        if node < before {
            return count.trim().parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::tasks_of;

    #[test]
    fn counts_of_tasks() {
        let of = |counts| (0..4).map(|node| tasks_of(counts, node)).collect::<Vec<_>>();
        assert_eq!(of("2(x3),1"), [Some(2), Some(2), Some(2), Some(1)]);
        assert_eq!(of("4"), [Some(4), None, None, None]);
        assert_eq!(of("1,x,3"), [Some(1), None, Some(3), None]);
        assert_eq!(of("2(x99999999999999999999)"), [None; 4]);
        assert_eq!(of("2(x18446744073709551615),1(x2)"), [Some(2); 4]);
    }
}
