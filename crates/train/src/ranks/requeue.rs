//! The job of Slurm is queued again after an announced end: the run goes on where it saved.

use std::process::{Command, Stdio};

use tercio_comm::World;

/// Queues this process's batch job again, where it is in one; the same answer on all ranks. Asked for by rank 0 as the
/// last thing of a run: the job's processes are ended by it.
pub fn requeue_among(world: &World) -> bool {
    let job = std::env::var("SLURM_JOB_ID").ok().filter(|job| job.bytes().all(|b| b.is_ascii_digit()));
    let answer = match job.filter(|job| world.is_main() && !job.is_empty()) {
        Some(job) => may_requeue(&job),
        None => false,
    };
    // Told before: afterwards nobody may be left.
    let told = world.broadcast_bytes(0, vec![u8::from(answer)]);
    let answer = told.is_ok_and(|b| b == [1]);
    let Some(job) = std::env::var("SLURM_JOB_ID").ok().filter(|_| answer && world.is_main()) else {
        return answer;
    };
    match scontrol(&["requeue", &job]) {
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

/// Whether the job is a batch job that nobody has cancelled.
fn may_requeue(job: &str) -> bool {
    match scontrol(&["--oneliner", "show", "job", job]) {
        Ok(text) => may_requeue_by(&text),
        Err(what) => {
            tracing::warn!("job {job} cannot be asked for ({what}): it is not queued again");
            false
        }
    }
}

/// By what `scontrol show job` says.
fn may_requeue_by(text: &str) -> bool {
    let field = |name: &str| text.split_whitespace().find_map(|word| word.strip_prefix(name));
    field("BatchFlag=") == Some("1") && !field("JobState=").unwrap_or_default().starts_with("CANCELLED")
}

fn scontrol(words: &[&str]) -> Result<String, String> {
    let output =
        Command::new("scontrol").args(words).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_jobs_that_nobody_cancelled() {
        let job = |state: &str, batch: &str| {
            format!(
                "JobId=7 JobName=x UserId=a(1) JobState={state} Reason=None Requeue=1 BatchFlag={batch} Reboot=0"
            )
        };
        assert!(may_requeue_by(&job("RUNNING", "1")) && may_requeue_by(&job("TIMEOUT", "1")));
        assert!(!may_requeue_by(&job("RUNNING", "0")), "an interactive allocation");
        assert!(!may_requeue_by(&job("CANCELLED", "1")) && !may_requeue_by(""));
        // Alone, outside of any job, nothing is asked for.
        if std::env::var_os("SLURM_JOB_ID").is_none() {
            assert!(!requeue_among(&World::alone()));
        }
    }
}
