//! The lease of a run folder: who may prune checkpoints and move links, and a lock against two starts on one host.
//!
//! `RUN/.lock` is locked (`flock`) while the holder lives; the system lets go of it however the process ends.
//! `RUN/lease.json` names the holder with a random token. A later attempt on another host writes a new token, and the older
//! attempt, if it still lives there, finds out by reading the file again: from then on it may only add, and it ends at its next
//! update.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::config::CONFIG_NAME;
use super::error::{Context, RunError};
use super::files;
use super::log::LOG_NAME;
use super::metrics::METRICS_NAME;

/// Name of the lease in the run folder.
const LEASE_NAME: &str = "lease.json";

/// A process that was just killed holds its lock until its memory is given back: seconds for a large model.
const WAIT: Duration = Duration::from_secs(3);

/// What `lease.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    host: String,
    pid: u32,
    since: String,
    token: String,
    /// Slurm's job id: a requeued job keeps it, so a new attempt can tell its own older self from a stranger.
    job: Option<String>,
}

/// The right to prune and to move links in one run folder, held until dropped or taken over.
#[derive(Debug)]
pub struct Lease {
    path: PathBuf,
    token: String,
    /// Absent where the file system cannot lock, or where another host's attempt of this job still holds the lock.
    _lock: Option<File>,
}

impl Lease {
    /// Takes the lease of `run_dir`, which is created if need be. Waits some seconds for a holder that is just ending.
    ///
    /// # Errors
    /// [`RunError::InUse`] while another process holds it, unless that one is an older attempt of the same Slurm job on another
    /// host; or when the folder cannot be written.
    pub fn acquire(run_dir: &Path) -> Result<Self, RunError> {
        Self::acquire_within(run_dir, WAIT)
    }

    /// As [`Lease::acquire`], with the time to wait for a holder that ends.
    ///
    /// # Errors
    /// As [`Lease::acquire`].
    pub fn acquire_within(run_dir: &Path, wait: Duration) -> Result<Self, RunError> {
        std::fs::create_dir_all(run_dir).context("create the folder", run_dir)?;
        only_files(run_dir)?;
        let path = run_dir.join(LEASE_NAME);
        let job = std::env::var("SLURM_JOB_ID").ok().filter(|job| !job.is_empty());
        let host = files::host_name();
        let lock = take_lock(&run_dir.join(".lock"), wait)?;
        let older = read(&path);
        match (&lock, &older) {
            (Locked::Held(_), _) => {}
            (Locked::Unsupported, Some(older)) => {
                let other = older.host == host && older.pid != std::process::id();
                if other && process_lives(older.pid) {
                    return Err(in_use(run_dir, Some(older)));
                }
            }
            (Locked::Unsupported, None) => {}
            (Locked::Busy, Some(older)) if older.host != host && job.is_some() && older.job == job => {
                tracing::warn!(
                    "taking over run folder {} from an older attempt of this job: pid {} on host {} since {}",
                    run_dir.display(),
                    older.pid,
                    older.host,
                    older.since
                );
            }
            (Locked::Busy, older) => return Err(in_use(run_dir, older.as_ref())),
        }
        let (year, month, day, hour, minute, second) = files::utc(files::unix_time() as u64);
        let record = Record {
            host,
            pid: std::process::id(),
            since: format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC"),
            token: files::random_hex(16),
            job,
        };
        let mut text = serde_json::to_string_pretty(&record)
            .map_err(|error| RunError::malformed(&path, format!("cannot write the lease: {error}")))?;
        text.push('\n');
        files::write_atomic(&path, text.as_bytes())?;
        let lock = match lock {
            Locked::Held(file) => Some(file),
            Locked::Busy | Locked::Unsupported => None,
        };
        Ok(Self { path, token: record.token, _lock: lock })
    }

    /// Whether no later attempt has taken the lease; reads the file again. `false` also where it cannot be read.
    pub fn still_mine(&self) -> bool {
        read(&self.path).is_some_and(|record| record.token == self.token)
    }

    /// Who has taken the lease over, in words; nothing while it is this attempt's, or where the file cannot be read just now.
    pub fn taken_over(&self) -> Option<String> {
        let now = read(&self.path).filter(|record| record.token != self.token)?;
        let run = self.path.parent().unwrap_or(&self.path).display();
        Some(format!(
            "a later attempt holds the lease of {run}: pid {} on host {} since {}",
            now.pid, now.host, now.since
        ))
    }

    /// Whether this lease speaks for the run folder `run_dir`, however either path is written.
    pub(crate) fn is_of(&self, run_dir: &Path) -> bool {
        let own = self.path.canonicalize().ok();
        let other = run_dir.join(LEASE_NAME).canonicalize().ok();
        own.is_some() && own == other
    }
}

enum Locked {
    Held(File),
    Busy,
    Unsupported,
}

fn take_lock(path: &Path, wait: Duration) -> Result<Locked, RunError> {
    let file = File::options().create(true).truncate(false).write(true).open(path).context("open", path)?;
    let deadline = Instant::now() + wait;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Locked::Held(file)),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50))
            }
            Err(Errno::WOULDBLOCK) => return Ok(Locked::Busy),
            Err(Errno::INTR) => {}
            Err(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK | Errno::INVAL) => {
                tracing::warn!(
                    "{}: this file system cannot lock; do not start the run twice",
                    path.display()
                );
                return Ok(Locked::Unsupported);
            }
            Err(error) => return Err(RunError::from_io("lock", path, None, error.into())),
        }
    }
}

/// Opening a pipe would wait for its other end for ever.
fn only_files(run_dir: &Path) -> Result<(), RunError> {
    for name in [".lock", LEASE_NAME, CONFIG_NAME, METRICS_NAME, LOG_NAME] {
        let path = run_dir.join(name);
        if std::fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(RunError::malformed(
                &path,
                "expected a file, found a folder, a pipe or a device; move it away",
            ));
        }
    }
    Ok(())
}

fn read(path: &Path) -> Option<Record> {
    serde_json::from_str(&files::read_small(path, 1 << 16).ok()?).ok()
}

fn in_use(dir: &Path, older: Option<&Record>) -> RunError {
    let unknown = || "unknown".to_string();
    RunError::InUse {
        dir: dir.to_path_buf(),
        pid: older.map_or(0, |older| older.pid),
        host: older.map_or_else(unknown, |older| older.host.clone()),
        since: older.map_or_else(unknown, |older| older.since.clone()),
    }
}

/// Whether a process of this host exists; true where that cannot be told.
pub(crate) fn process_lives(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) else {
        return false;
    };
    rustix::process::test_kill_process(pid) != Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;

    #[test]
    fn a_second_start_is_refused_until_the_first_ends() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lease::acquire_within(dir.path(), AT_ONCE).unwrap();
        assert!(first.still_mine());
        let message = Lease::acquire_within(dir.path(), AT_ONCE).unwrap_err().to_string();
        let pid = std::process::id();
        assert!(
            message.contains(&format!("in use by pid {pid} on host {}", files::host_name())),
            "{message}"
        );
        assert!(first.still_mine() && first.taken_over().is_none(), "a refused start changes nothing");
        drop(first);
        assert!(Lease::acquire_within(dir.path(), AT_ONCE).unwrap().still_mine());
    }

    #[test]
    fn a_pipe_or_folder_in_place_of_a_file_is_named_and_not_waited_for() {
        for name in [".lock", "lease.json", "config.toml", "metrics.jsonl", "run.log"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            files::make_pipe(&path);
            let error = Lease::acquire_within(dir.path(), AT_ONCE).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("move it away"), "{error}");
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
            assert!(Lease::acquire_within(dir.path(), AT_ONCE).is_err(), "{name}");
        }
    }

    #[test]
    fn a_rewritten_or_lost_token_ends_the_lease() {
        let dir = tempfile::tempdir().unwrap();
        let lease = Lease::acquire_within(dir.path(), AT_ONCE).unwrap();
        let path = dir.path().join("lease.json");
        let mut record = read(&path).unwrap();
        record.token = "of a later attempt".into();
        std::fs::write(&path, serde_json::to_string(&record).unwrap()).unwrap();
        assert!(!lease.still_mine());
        assert!(lease.taken_over().is_some_and(|who| who.contains("a later attempt holds the lease")));
        std::fs::write(&path, "{").unwrap();
        assert!(!lease.still_mine());
        assert_eq!(lease.taken_over(), None, "what cannot be read is no takeover");
    }

    #[test]
    fn the_lease_of_a_dead_process_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let dead = Lease::acquire_within(dir.path(), AT_ONCE).unwrap();
        let Lease { path, token, _lock } = dead;
        drop(_lock);
        let next = Lease::acquire_within(dir.path(), AT_ONCE).unwrap();
        assert!(next.still_mine());
        assert!(!Lease { path, token, _lock: None }.still_mine());
    }

    #[test]
    fn a_process_lives_or_does_not() {
        assert!(process_lives(std::process::id()));
        assert!(!process_lives(0));
        assert!(!process_lives(u32::MAX));
    }
}
