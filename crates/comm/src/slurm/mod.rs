//! Slurm from outside of a job: the batch script of a run ([`Script`]), sending it in, and what becomes of jobs
//! ([`Job`]). Where a process stands inside a job is [`crate::place`]'s.

mod follow;
mod job;
mod script;

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};

pub use follow::{Follow, last_line};
pub use job::{Job, job_ids};
pub use script::Script;

use crate::error::CommError;

/// Runs a command of Slurm's with `input` on stdin; returns its stdout.
fn ask(program: &str, args: &[&OsStr], input: &[u8]) -> Result<String, CommError> {
    let failed = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => CommError::Place(format!(
            "cannot run `{program}`: it is not in PATH; expected a machine with Slurm's commands, such as a cluster's \
             login node (`tercio slurm submit --print` only writes the script, and works anywhere)"
        )),
        _ => CommError::Io { what: format!("running `{program}`"), source },
    };
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read all of it says why itself.
        let _ = stdin.write_all(input);
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(CommError::Place(format!("`{program}` refused: {said}")))
}

/// Sends a batch script in; returns the job's number.
///
/// # Errors
/// [`CommError::Place`] where there is no `sbatch`, or with what it says.
pub fn submit(script: &[u8]) -> Result<String, CommError> {
    let answer = ask("sbatch", &["--parsable".as_ref()], script)?;
    // "number" or "number;cluster".
    let id = answer.trim().split(';').next().unwrap_or_default();
    match !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()) {
        true => Ok(id.to_owned()),
        false => Err(CommError::Place(format!("`sbatch` said {answer:?}: expected the number of a job"))),
    }
}
