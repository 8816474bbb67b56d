//! What each rank did since the last line of the log, gathered on rank 0: shards, times, and a trace on demand.

use std::io::Write;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tercio_comm::{CommError, World};

use super::spans::{Kind, Spans};
use crate::error::TrainError;
use crate::run::RunError;
use crate::step::UpdateOutcome;

/// Most bytes of trace that a rank keeps between two lines of the log.
const MOST_TRACE: usize = 16 << 20;

/// What this rank did since the last line of the log.
pub struct Report {
    traced: bool,
    since: Instant,
    tokens: u64,
    shards: u64,
    seconds: [f64; 4],
    trace: String,
}

/// One rank's report, on rank 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankReport {
    /// Shards that it computed in the last update.
    pub shards: u64,
    /// Seconds of each [`Kind`].
    pub seconds: [f64; 4],
    trace: String,
}

/// What the reports of several ranks say together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Share of the time in communication that nothing hid: the waiting of the rank that waits least, since the others
    /// also wait for work.
    pub exposed: f64,
    /// The rank whose own work took longest.
    pub slowest: usize,
    /// By how much of the mean.
    pub by: f64,
}

impl Report {
    /// Begins; `traced`: spans are kept.
    pub fn new(traced: bool) -> Self {
        Report {
            traced,
            since: Instant::now(),
            tokens: 0,
            shards: 0,
            seconds: [0.0; 4],
            trace: String::new(),
        }
    }
    /// A line of the log was written.
    pub fn begin(&mut self) {
        *self = Report::new(self.traced);
    }
    /// Time passed without updates.
    pub fn pause_over(&mut self) {
        (self.since, self.tokens) = (Instant::now(), 0);
    }
    /// An update is done.
    pub fn update(&mut self, step: u64, outcome: &UpdateOutcome, spans: &Spans) {
        self.tokens += outcome.size.tokens;
        self.shards = outcome.own_shards as u64;
        for (sum, kind) in self.seconds.iter_mut().zip(Kind::ALL) {
            *sum += spans.seconds(kind);
        }
        if self.traced && self.trace.len() < MOST_TRACE {
            let (now, unix) =
                (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
            let at = |t: Instant| unix.as_secs_f64() - now.duration_since(t).as_secs_f64();
            let spans: Vec<_> =
                spans.0.iter().map(|s| json!([s.kind.name(), at(s.at.0), at(s.at.1)])).collect();
            self.trace
                .push_str(&json!({ "update": step, "shards": self.shards, "spans": spans }).to_string());
            self.trace.push('\n');
        }
    }
    /// Tokens of all ranks in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.since.elapsed().as_secs_f64().max(1e-9)
    }
    /// All ranks' reports, on rank 0.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn gather(&self, world: &World) -> Result<Vec<RankReport>, CommError> {
        let mut bytes = self.shards.to_le_bytes().to_vec();
        bytes.extend(self.seconds.iter().flat_map(|s| s.to_le_bytes()));
        bytes.extend(self.trace.as_bytes());
        let all = world.gather_bytes(bytes)?;
        let read = |(rank, bytes): (usize, &Vec<u8>)| {
            RankReport::of(bytes)
                .ok_or_else(|| CommError::Protocol(format!("rank {rank} sent bytes that are no report")))
        };
        all.iter().enumerate().map(read).collect()
    }
}

impl RankReport {
    fn of(bytes: &[u8]) -> Option<RankReport> {
        let (head, trace) = bytes.split_at_checked(8 * 5)?;
        let words = head.as_chunks::<8>().0;
        let mut seconds = [0.0; 4];
        for (s, w) in seconds.iter_mut().zip(&words[1..]) {
            *s = f64::from_le_bytes(*w);
        }
        let trace = String::from_utf8(trace.to_vec()).ok()?;
        Some(RankReport { shards: u64::from_le_bytes(words[0]), seconds, trace })
    }
    fn of_kind(&self, kind: Kind) -> f64 {
        Kind::ALL.iter().zip(&self.seconds).find(|(k, _)| **k == kind).map_or(0.0, |(_, s)| *s)
    }
    /// What several reports say together; `None` of one.
    pub fn summary(all: &[RankReport]) -> Option<Summary> {
        if all.len() < 2 {
            return None;
        }
        let share = |r: &RankReport| r.of_kind(Kind::Waiting) / r.seconds.iter().sum::<f64>().max(1e-9);
        let work = |r: &RankReport| r.seconds.iter().sum::<f64>() - r.of_kind(Kind::Waiting);
        let mean = all.iter().map(work).sum::<f64>() / all.len() as f64;
        let slowest = (0..all.len()).max_by(|&a, &b| work(&all[a]).total_cmp(&work(&all[b])))?;
        Some(Summary {
            exposed: all.iter().map(share).fold(f64::INFINITY, f64::min),
            slowest,
            by: work(&all[slowest]) / mean.max(1e-9) - 1.0,
        })
    }
    /// Appends the traces to `trace/rank-N.jsonl` in the run's folder, where there are any.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn trace(all: &[RankReport], run_dir: &Path) -> Result<(), TrainError> {
        let folder = run_dir.join("trace");
        for (rank, report) in all.iter().enumerate().filter(|(_, r)| !r.trace.is_empty()) {
            let path = folder.join(format!("rank-{rank}.jsonl"));
            let append = || -> std::io::Result<()> {
                std::fs::create_dir_all(&folder)?;
                let mut file = std::fs::File::options().create(true).append(true).open(&path)?;
                file.write_all(report.trace.as_bytes())
            };
            append().map_err(|e| RunError::from_io("write", &path, Some(report.trace.len() as u64), e))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_say_who_is_slow_and_what_nothing_hid() {
        let of = |seconds: [f64; 4]| RankReport { seconds, ..RankReport::default() };
        // Data, computing, waiting, optimizer.
        let all = [of([0.1, 0.5, 0.35, 0.05]), of([0.1, 0.8, 0.05, 0.05])];
        let s = RankReport::summary(&all).unwrap();
        assert_eq!(s.slowest, 1);
        assert!((s.exposed - 0.05).abs() < 1e-9 && (s.by - (0.95 / 0.8 - 1.0)).abs() < 1e-9, "{s:?}");
        assert_eq!(RankReport::summary(&all[..1]), None);
    }

    #[test]
    fn traces_are_appended() {
        let dir = tempfile::tempdir().unwrap();
        let mut report = Report::new(true);
        let mut spans = Spans::default();
        spans.of(Kind::Data, || ());
        report.update(7, &UpdateOutcome { own_shards: 3, ..UpdateOutcome::default() }, &spans);
        for _ in 0..2 {
            let all = report.gather(&World::alone()).unwrap();
            assert_eq!(all[0].shards, 3);
            RankReport::trace(&all, dir.path()).unwrap();
        }
        let text = std::fs::read_to_string(dir.path().join("trace/rank-0.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 2);
        let line: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!((line["update"].as_u64(), line["spans"][0][0].as_str()), (Some(7), Some("data")));
        report.begin();
        assert!(report.trace.is_empty() && report.traced);
        assert_eq!(RankReport::of(&[1, 2, 3]), None);
    }
}
