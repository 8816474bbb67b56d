//! The job of Slurm is queued again after an announced end: the run goes on where it saved.

use std::process::{Command, Stdio};

use tercio_comm::World;
use tercio_comm::slurm::Job;

/// Queues this process's batch job again, where it is in one; the same answer on all ranks. Asked for by rank 0 as the
/// last thing of a run: the job's processes are ended by it.
pub fn requeue_among(world: &World) -> bool {
    let job = own_job(&|name| std::env::var(name).ok()).filter(|_| world.is_main());
    let answer = job.as_deref().is_some_and(may_requeue);
    // Told before: afterwards nobody may be left.
    let told = world.broadcast_bytes(0, vec![u8::from(answer)]);
    let answer = told.is_ok_and(|b| b == [1]);
    let Some(job) = job.filter(|_| answer) else { return answer };
    match queue_again(&job) {
        Ok(_) => {
            tracing::info!("job {job} is queued again: the run goes on from its checkpoint");
            true
        }
        Err(what) => {
            tracing::warn!("job {job} could not be queued again ({what}): start the same command again");
            false
        }
    }
}

/// This process's job. One of an array goes by the array's number and its own: the plain number of the last one is also
/// the whole array's, and would queue all of it again.
fn own_job(env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let number = |name| env(name).filter(|n: &String| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    match (number("SLURM_ARRAY_JOB_ID"), number("SLURM_ARRAY_TASK_ID")) {
        (Some(array), Some(task)) => Some(format!("{array}_{task}")),
        _ => number("SLURM_JOB_ID"),
    }
}

/// Whether the job may be queued again; one that somebody cancels may not, though Slurm would do it.
fn may_requeue(job: &str) -> bool {
    match Job::ask(job) {
        Ok(found) => found.iter().any(Job::may_be_requeued),
        Err(what) => {
            tracing::warn!("job {job} cannot be asked for ({what}): it is not queued again");
            false
        }
    }
}

/// Slurm ends the job's processes while it still answers, `scontrol` among them: that one ignores the signal.
fn queue_again(job: &str) -> Result<(), String> {
    let output = Command::new("sh")
        .args(["-c", "trap '' TERM; exec scontrol requeue \"$1\"", "sh", job])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| e.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_an_array_goes_by_its_own_number() {
        let with = |variables: &[(&str, &str)]| {
            own_job(&|name| variables.iter().find(|v| v.0 == name).map(|v| v.1.to_owned()))
        };
        assert_eq!(with(&[("SLURM_JOB_ID", "7")]).unwrap(), "7");
        let last = [("SLURM_JOB_ID", "7"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "2")];
        assert_eq!(with(&last).unwrap(), "7_2");
        assert_eq!((with(&[]), with(&[("SLURM_JOB_ID", "--all")])), (None, None));
    }

    #[test]
    fn outside_of_a_job_nothing_is_asked_for() {
        if std::env::var_os("SLURM_JOB_ID").is_none() {
            assert!(!requeue_among(&World::alone()));
        }
    }
}
