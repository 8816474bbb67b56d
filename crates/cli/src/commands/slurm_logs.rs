//! `tercio slurm logs`: what a job printed.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use tercio_comm::slurm::{Follow, Job};

/// Between two looks at a job's state; its controller serves many.
const STATE_EVERY: Duration = Duration::from_secs(3);
/// Between two looks at its output.
const OUTPUT_EVERY: Duration = Duration::from_millis(300);
/// A controller that is busy or restarts may refuse so many looks one after the other.
const PATIENCE: u32 = 20;

/// Flags of `tercio slurm logs`.
#[derive(Args)]
pub struct SlurmLogs {
    /// Number of the job
    job: String,
    /// Go on until the job ends, and end with its exit code
    #[arg(long)]
    follow: bool,
}

impl SlurmLogs {
    /// Prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        follow(&self.job, self.follow)
    }
}

/// Prints a job's output; with `stay` until it ends, and changes of its state on stderr.
pub fn follow(id: &str, stay: bool) -> anyhow::Result<ExitCode> {
    let mut jobs = Job::ask(id)?;
    if jobs.len() > 1 {
        bail!("job {id} is an array of {} jobs: name one of them, as in {}", jobs.len(), jobs[0].id);
    }
    let mut job = jobs.remove(0);
    let path = job.output.clone().with_context(|| format!("job {id} writes no output file"))?;
    if !stay && !path.exists() {
        bail!(
            "{}: the output of job {id} is not there{}; the job is {}",
            path.display(),
            if job.state == "PENDING" { " yet" } else { " (does this machine share its folder?)" },
            job.state.to_lowercase()
        );
    }
    let mut output = Follow::new(path.clone());
    let mut copy = || {
        let out = &mut std::io::stdout().lock();
        output.copy(out).and_then(|n| std::io::Write::flush(out).map(|()| n))
    };
    copy()?;
    if !stay {
        return Ok(ExitCode::SUCCESS);
    }
    let (mut told, mut refusals) = (String::new(), 0);
    loop {
        let state = format!("{} {} {}", job.state, job.reason, job.restarts);
        if state != told {
            eprintln!("{job}");
            told = state;
        }
        if job.has_ended() {
            // What a node's cache held back may come a moment later.
            std::thread::sleep(OUTPUT_EVERY);
            copy()?;
            return Ok(job.exit_code().into());
        }
        let start = std::time::Instant::now();
        while start.elapsed() < STATE_EVERY {
            std::thread::sleep(OUTPUT_EVERY);
            copy()?;
        }
        match Job::ask(&job.id) {
            Ok(jobs) => {
                refusals = 0;
                job = jobs.into_iter().next().unwrap_or(job);
            }
            Err(_) if refusals < PATIENCE => refusals += 1,
            Err(error) => return Err(error.into()),
        }
    }
}
