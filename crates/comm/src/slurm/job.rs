//! What Slurm knows of a job, read from `scontrol show job`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;

use super::ask;
use super::script::COMMENT;
use crate::error::CommError;

/// A job, as Slurm tells of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Its number.
    pub id: String,
    /// Its name.
    pub name: String,
    /// PENDING, RUNNING, COMPLETED, FAILED, ...
    pub state: String,
    /// Why it waits or failed; empty where there is nothing to say.
    pub reason: String,
    /// Its nodes, in Slurm's notation; empty while it waits.
    pub nodes: String,
    /// Whether it has a batch script, and so can be queued again.
    pub batch: bool,
    /// How often it was started again.
    pub restarts: u32,
    /// Time it has run, [days-]hours:minutes:seconds.
    pub run_time: String,
    /// Its limit of time.
    pub time_limit: String,
    /// Exit code of its script and the signal that ended it, as in `0:9`.
    pub exit: (u8, u8),
    /// Where its output goes.
    pub output: Option<PathBuf>,
    /// The run's folder, where the job is one of `tercio slurm submit`'s.
    pub run_dir: Option<PathBuf>,
}

/// The numbers of this user's jobs that wait or run.
///
/// # Errors
/// [`CommError::Place`] where there is no `squeue`, or with what it says.
pub fn job_ids() -> Result<Vec<String>, CommError> {
    let answer = ask("squeue", &["--noheader", "--me", "--format=%A"].map(OsStr::new), b"")?;
    let mut ids: Vec<String> = answer.split_whitespace().map(str::to_owned).collect();
    ids.dedup();
    Ok(ids)
}

impl Job {
    /// Asks Slurm for a job (`1234`, or `1234_5` of an array); several where an array's number is given.
    ///
    /// # Errors
    /// [`CommError::Place`] where there is no `scontrol`, or no such job any more.
    pub fn ask(id: &str) -> Result<Vec<Job>, CommError> {
        if id.is_empty() || !id.bytes().all(|b| b.is_ascii_digit() || b == b'_') {
            return Err(CommError::Place(format!("job {id:?}: expected its number, as in 1234 or 1234_5")));
        }
        let answer = ask("scontrol", &["show", "job", id].map(OsStr::new), b"").map_err(|error| match error {
            CommError::Place(what) if what.contains("refused") => CommError::Place(format!(
                "{what}; Slurm forgets a job some minutes after its end (`sacct -j {id}` may still know it)"
            )),
            other => other,
        })?;
        let jobs: Vec<Job> = answer.split("\n\n").filter_map(Job::read).collect();
        match jobs.is_empty() {
            true => Err(CommError::Place(format!("`scontrol show job {id}` tells of no job"))),
            false => Ok(jobs),
        }
    }

    /// Reads one record of `scontrol show job`.
    fn read(text: &str) -> Option<Job> {
        let mut fields: BTreeMap<&str, &str> = BTreeMap::new();
        for line in text.lines().map(str::trim) {
            // These stand alone on their line, and may have blanks and equal signs in them.
            let alone = ["Comment=", "StdOut=", "StdErr=", "StdIn=", "Command=", "WorkDir="];
            let name = line.find("JobName=").filter(|_| line.starts_with("JobId="));
            if let (true, Some((key, value))) =
                (alone.iter().any(|k| line.starts_with(k)), line.split_once('='))
            {
                fields.insert(key, value);
                continue;
            }
            let (plain, name) =
                name.map_or((line, None), |at| (&line[..at], Some(&line[at + "JobName=".len()..])));
            fields.extend(plain.split_whitespace().filter_map(|word| word.split_once('=')));
            fields.extend(name.map(|name| ("JobName", name)));
        }
        let get = |key: &str| {
            let value = fields.get(key).copied().unwrap_or_default();
            if matches!(value, "(null)" | "None" | "N/A") { String::new() } else { value.to_owned() }
        };
        let array = get("ArrayJobId");
        let id = match array.is_empty() {
            true => get("JobId"),
            false => format!("{array}_{}", get("ArrayTaskId")),
        };
        if id.is_empty() {
            return None;
        }
        let exit = get("ExitCode");
        let exit = exit.split_once(':').map_or((0, 0), |(code, signal)| {
            (code.parse().unwrap_or(u8::MAX), signal.parse().unwrap_or(u8::MAX))
        });
        let comment = get("Comment");
        let run = comment.strip_prefix(COMMENT).and_then(|c| c.split_once("run=")).map(|(_, run)| run);
        let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        Some(Job {
            id,
            name: get("JobName"),
            state: get("JobState"),
            reason: get("Reason"),
            nodes: get("NodeList"),
            batch: get("BatchFlag") == "1",
            restarts: get("Restarts").parse().unwrap_or(0),
            run_time: get("RunTime"),
            time_limit: get("TimeLimit"),
            exit,
            output: path(&get("StdOut")),
            run_dir: path(run.unwrap_or_default()),
        })
    }

    /// Whether nothing will become of it any more.
    pub fn has_ended(&self) -> bool {
        const ALIVE: [&str; 8] = [
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "SUSPENDED",
            "COMPLETING",
            "REQUEUED",
            "REQUEUE_HOLD",
            "RESIZING",
        ];
        !ALIVE.contains(&self.state.as_str())
    }

    /// Whether the job should be queued again by one of its processes that has saved on a signal: it is a batch job that
    /// runs, or whose time is up. One that somebody cancels is `COMPLETING` with time left while its processes end, and
    /// Slurm would queue it again if asked to.
    pub fn may_be_requeued(&self) -> bool {
        let time_is_up = match (seconds(&self.run_time), seconds(&self.time_limit)) {
            (Some(run), Some(limit)) => run >= limit,
            _ => self.reason == "TimeLimit",
        };
        self.batch
            && matches!(self.state.as_str(), "RUNNING" | "COMPLETING" | "TIMEOUT")
            && (self.state == "RUNNING" || time_is_up)
    }

    /// Exit code of an ended job, as a shell counts.
    pub fn exit_code(&self) -> u8 {
        match (self.exit, self.state.as_str()) {
            ((0, 0), "COMPLETED") => 0,
            ((0, 0), _) => 1,
            ((code @ 1.., _), _) => code,
            ((0, signal), _) => 128u8.saturating_add(signal.min(127)),
        }
    }
}

/// Seconds of `[days-]hours:minutes:seconds`; `None` for `UNLIMITED`.
fn seconds(text: &str) -> Option<u64> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let parts: Vec<u64> = clock.split(':').map(|p| p.parse().ok()).collect::<Option<_>>()?;
    let [hours, minutes, seconds] = parts[..] else { return None };
    let hours = days.parse::<u64>().ok()?.checked_mul(24)?.checked_add(hours)?;
    hours.checked_mul(3600)?.checked_add(minutes.checked_mul(60)?)?.checked_add(seconds)
}

impl fmt::Display for Job {
    /// One line: number, name, state, reason, nodes, restarts, time.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.id, self.name, self.state.to_lowercase())?;
        if !self.reason.is_empty() {
            write!(f, " ({})", self.reason)?;
        }
        if self.has_ended() && self.exit != (0, 0) {
            match self.exit {
                (code, 0) => write!(f, ", exit code {code}")?,
                (_, signal) => write!(f, ", ended by signal {signal}")?,
            }
        }
        if !self.nodes.is_empty() {
            write!(f, " on {}", self.nodes)?;
        }
        if !self.run_time.is_empty() {
            write!(f, ", {} of {}", self.run_time, self.time_limit)?;
        }
        match self.restarts {
            0 => Ok(()),
            1 => write!(f, ", restarted once"),
            n => write!(f, ", restarted {n} times"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "JobId=12 ArrayJobId=11 ArrayTaskId=3 JobName=my job=x
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:15
   RunTime=00:01:05 TimeLimit=00:30:00 TimeMin=N/A
   NodeList=node[1-2]
   Command=(null)
   Comment=tercio newest=40 idle=1 run=/tmp/a b/c=d 
   StdOut=/tmp/out put=1.txt
   Power=";

    #[test]
    fn records_of_scontrol_are_read() {
        let job = Job::read(TEXT).unwrap();
        assert_eq!((job.id.as_str(), job.name.as_str(), job.restarts), ("11_3", "my job=x", 2));
        assert_eq!(job.run_dir, Some("/tmp/a b/c=d".into()));
        assert_eq!(job.output, Some("/tmp/out put=1.txt".into()));
        assert!(!job.has_ended());
        let line = "11_3 (my job=x): running on node[1-2], 00:01:05 of 00:30:00, restarted 2 times";
        assert_eq!(job.to_string(), line);
        let ended = Job::read(&TEXT.replace("RUNNING Reason=None", "FAILED Reason=NonZeroExitCode")).unwrap();
        assert!(
            ended.has_ended() && ended.to_string().contains("failed (NonZeroExitCode), ended by signal 15")
        );
        assert_eq!(ended.exit_code(), 143);
        assert_eq!(Job { state: "CANCELLED".into(), ..Job::default() }.exit_code(), 1);
        assert_eq!(Job::read("No jobs in the system"), None);
    }

    #[test]
    fn a_cancelled_job_is_not_queued_again() {
        let may = |state: &str, run: &str, limit: &str| {
            let text = TEXT.replace("RUNNING", state).replace("00:01:05", run).replace("00:30:00", limit);
            Job::read(&text).unwrap().may_be_requeued()
        };
        assert!(may("RUNNING", "00:01:05", "UNLIMITED") && may("COMPLETING", "1-00:30:01", "1-00:30:00"));
        assert!(!may("COMPLETING", "00:01:05", "00:30:00") && !may("COMPLETING", "00:01:05", "UNLIMITED"));
        assert!(!may("CANCELLED", "01:00:00", "00:30:00") && !may("PENDING", "00:00:00", "00:30:00"));
        assert!(!Job { batch: false, ..Job::read(TEXT).unwrap() }.may_be_requeued(), "an interactive one");
    }

    #[test]
    fn a_job_is_a_number() {
        for id in ["", "x", "1;2", "--all"] {
            assert!(Job::ask(id).unwrap_err().to_string().contains("expected its number"), "{id}");
        }
    }
}
