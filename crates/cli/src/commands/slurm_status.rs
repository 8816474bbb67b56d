//! `tercio slurm status`: what becomes of jobs.

use std::process::ExitCode;

use clap::Args;
use tercio_comm::slurm::{Job, job_ids, last_line};

use super::common::line;

/// Jobs that are listed when none is named.
const MOST_JOBS: usize = 100;

/// Flags of `tercio slurm status`.
#[derive(Args)]
pub struct SlurmStatus {
    /// Number of a job; default: all of your jobs that wait or run
    job: Option<String>,
    /// Print each job as one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl SlurmStatus {
    /// Tells.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let ids = match self.job {
            Some(id) => vec![id],
            None => job_ids()?,
        };
        if ids.is_empty() && !self.json {
            eprintln!("none of your jobs waits or runs");
        }
        if ids.len() > MOST_JOBS {
            eprintln!("{} jobs; the first {MOST_JOBS} are shown", ids.len());
        }
        for job in ids.iter().take(MOST_JOBS).map(|id| Job::ask(id)) {
            for job in job? {
                // It is news where this machine sees the run's folder, and no fault where it does not.
                let log = job.run_dir.as_ref().map(|dir| dir.join("run.log"));
                let said = log.as_ref().and_then(|log| last_line(log).ok().flatten());
                if self.json {
                    line(&json(&job, said.as_deref()).to_string())?;
                    continue;
                }
                line(&job.to_string())?;
                if let (Some(log), Some(said)) = (log, said) {
                    line(&format!("    {}: {said}", log.display()))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn json(job: &Job, said: Option<&str>) -> serde_json::Value {
    serde_json::json!({
        "job": job.id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "nodes": job.nodes,
        "restarts": job.restarts,
        "run_time": job.run_time,
        "time_limit": job.time_limit,
        "exit_code": job.has_ended().then(|| job.exit_code()),
        "output": job.output,
        "run": job.run_dir,
        "log": said,
    })
}
