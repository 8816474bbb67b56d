//! `RUN/metrics.jsonl`: one JSON line per logged update and per event, for programs.
//!
//! ```text
//! {"event":"start","step":0,"time":1700000000.0}
//! {"step":10,"loss":2.5,"lr":0.0001,"time":1700000001.0}
//! {"event":"resume","step":10,"time":1700000900.0}
//! ```
//!
//! After a resume at step N the lines of later steps, which the run will write again, are gone: the steps of a run that was
//! killed and resumed are those of one that never stopped. `time` is in seconds since 1970; a number that is not finite is `null`.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::{Context, RunError};
use super::files;

/// Name of the file in the run folder.
pub const METRICS_NAME: &str = "metrics.jsonl";

/// Our lines are a few hundred bytes; a longer one is damage, and is not read into memory.
const LINE_LIMIT: u64 = 1 << 20;

/// The open file; every line is handed to the system at once.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// Opens the metrics of `run_dir` at `step`: drops lines of later steps and torn ones, then writes the event `start`
    /// (no lines were there) or `resume`.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(run_dir: &Path, step: u64) -> Result<Self, RunError> {
        let path = run_dir.join(METRICS_NAME);
        let kept = if path.exists() { drop_after(&path, step)? } else { 0 };
        let file = File::options().create(true).append(true).open(&path).context("open", &path)?;
        files::sync_parent(&path)?;
        let mut writer = Self { path, file };
        writer.event(if kept == 0 { "start" } else { "resume" }, step, Map::new())?;
        Ok(writer)
    }

    /// Writes the line of one logged update.
    ///
    /// # Errors
    /// When the line cannot be written, for one because the disk is full.
    pub fn update(&mut self, step: u64, fields: Map<String, Value>) -> Result<(), RunError> {
        self.line(None, step, fields)
    }

    /// Writes an event: `start`, `resume`, `checkpoint`, `eval`, `end`.
    ///
    /// # Errors
    /// As [`MetricsWriter::update`].
    pub fn event(&mut self, event: &str, step: u64, fields: Map<String, Value>) -> Result<(), RunError> {
        self.line(Some(event), step, fields)
    }

    /// Makes all lines durable. Call it before a checkpoint is committed, so that no power cut keeps a checkpoint and loses
    /// lines before it.
    ///
    /// # Errors
    /// When the system cannot write.
    pub fn sync(&mut self) -> Result<(), RunError> {
        self.file.sync_data().context("sync", &self.path)
    }

    fn line(&mut self, event: Option<&str>, step: u64, fields: Map<String, Value>) -> Result<(), RunError> {
        let mut line = Map::new();
        if let Some(event) = event {
            line.insert("event".into(), event.into());
        }
        line.insert("step".into(), step.into());
        line.extend(fields.into_iter().filter(|(key, _)| key != "event" && key != "step"));
        line.insert("time".into(), files::unix_time().into());
        let mut text = Value::Object(line).to_string();
        text.push('\n');
        // One write, so that a line is torn by a crash at most at the end of the file.
        let needed = Some(text.len() as u64);
        self.file
            .write_all(text.as_bytes())
            .map_err(|error| RunError::from_io("write", &self.path, needed, error))
    }
}

/// Rewrites the file without lines of steps after `step` and without damaged lines; returns how many lines stay.
fn drop_after(path: &Path, step: u64) -> Result<u64, RunError> {
    let mut kept = 0;
    let (mut dropped, mut lost) = (false, 0);
    let temp = files::beside(path);
    let mut output = BufWriter::new(File::create(&temp).context("create", &temp)?);
    let result = for_each_line(path, |number, line| {
        let parsed = serde_json::from_slice::<Map<String, Value>>(line).ok();
        let stays = parsed
            .as_ref()
            .is_some_and(|line| line.get("step").and_then(Value::as_u64).is_none_or(|at| at <= step));
        if parsed.is_none() {
            tracing::warn!("{}:{number}: dropped a damaged line", path.display());
        }
        if !stays {
            dropped = true;
            lost += u64::from(parsed.is_some());
            return Ok(());
        }
        kept += 1;
        output.write_all(line).and_then(|()| output.write_all(b"\n")).context("write", &temp)
    });
    let result = result
        .and_then(|()| output.flush().context("write", &temp))
        .and_then(|()| output.get_ref().sync_all().context("sync", &temp))
        .and_then(|()| match dropped {
            true => std::fs::rename(&temp, path).context("rename", &temp),
            false => Ok(()),
        });
    if result.is_err() || !dropped {
        let _ = std::fs::remove_file(&temp);
    }
    result?;
    if step == 0 && lost > 0 {
        tracing::warn!(
            "{}: the run logged updates and has no checkpoint to go on from: it starts over, {lost} lines are dropped",
            path.display()
        );
    }
    end_last_line(path)?;
    Ok(kept)
}

/// A whole last line may lack its line end; the next line must not run into it.
fn end_last_line(path: &Path) -> Result<(), RunError> {
    let mut file = File::options().read(true).append(true).open(path).context("open", path)?;
    if file.metadata().context("look at", path)?.len() == 0 {
        return Ok(());
    }
    let mut last = [0u8];
    file.seek(SeekFrom::End(-1)).and_then(|_| file.read_exact(&mut last)).context("read", path)?;
    match last {
        [b'\n'] => Ok(()),
        _ => file.write_all(b"\n").context("write", path),
    }
}

/// Calls `each` with line number (from 1) and bytes without the line end; a line over the limit comes as an empty one.
fn for_each_line(
    path: &Path,
    mut each: impl FnMut(u64, &[u8]) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let mut reader = BufReader::new(File::open(path).context("open", path)?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = reader.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut line).context("read", path)?;
        if read == 0 {
            return Ok(());
        }
        if read as u64 == LINE_LIMIT && line.last() != Some(&b'\n') {
            reader.skip_until(b'\n').context("read", path)?;
            line.clear();
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        each(number, &line)?;
    }
    Ok(())
}

/// The points (step, value) of the number `key` in a metrics file, of updates (`event` = `None`) or of one kind of event.
/// Damaged lines are skipped.
///
/// # Errors
/// When the file cannot be read.
pub fn read_series(run_dir: &Path, event: Option<&str>, key: &str) -> Result<Vec<(u64, f64)>, RunError> {
    let mut points = Vec::new();
    for_each_line(&run_dir.join(METRICS_NAME), |_, line| {
        let Ok(line) = serde_json::from_slice::<Map<String, Value>>(line) else {
            return Ok(());
        };
        let of_kind = line.get("event").and_then(Value::as_str) == event;
        let step = line.get("step").and_then(Value::as_u64);
        if let (true, Some(step), Some(value)) = (of_kind, step, line.get(key).and_then(Value::as_f64)) {
            points.push((step, value));
        }
        Ok(())
    })?;
    Ok(points)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(value: f64) -> Map<String, Value> {
        Map::from_iter([("loss".to_string(), value.into())])
    }

    fn lines(dir: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(dir.join(METRICS_NAME)).unwrap();
        let shown = |line: &str| {
            let line: Map<String, Value> = serde_json::from_str(line).expect("every line is JSON");
            format!("{} {}", line.get("event").and_then(Value::as_str).unwrap_or("update"), line["step"])
        };
        text.lines().map(shown).collect()
    }

    #[test]
    fn a_resumed_file_has_the_steps_of_an_undisturbed_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::open(dir.path(), 0).unwrap();
        for step in 1..=5 {
            writer.update(step, loss(1.0 / step as f64)).unwrap();
            if step == 3 {
                writer.sync().unwrap();
                writer.event("checkpoint", 3, Map::new()).unwrap();
            }
        }
        writer.file.write_all(b"{\"step\":6,\"los").unwrap();
        drop(writer);
        let mut writer = MetricsWriter::open(dir.path(), 3).unwrap();
        for step in 4..=6 {
            writer.update(step, loss(1.0 / step as f64)).unwrap();
        }
        writer.event("end", 6, Map::new()).unwrap();
        let expected = ["start 0", "update 1", "update 2", "update 3", "checkpoint 3", "resume 3"];
        assert_eq!(lines(dir.path())[..6], expected);
        assert_eq!(lines(dir.path())[6..], ["update 4", "update 5", "update 6", "end 6"]);
        let series = read_series(dir.path(), None, "loss").unwrap();
        assert_eq!(series.iter().map(|&(step, _)| step).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(series[3].1, 0.25);
    }

    #[test]
    fn damage_in_the_middle_costs_only_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS_NAME);
        let mut content = b"{\"step\":1,\"loss\":2.0}\n\0\0\0\n".to_vec();
        content.extend(vec![b'x'; 3 << 20]);
        content.extend(b"\n{\"note\":\"kept\"}\n{\"step\":2,\"loss\":1.0}");
        std::fs::write(&path, content).unwrap();
        drop(MetricsWriter::open(dir.path(), 2).unwrap());
        assert_eq!(read_series(dir.path(), None, "loss").unwrap(), [(1, 2.0), (2, 1.0)]);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 4);
        assert!(
            text.contains(
                "{\"note\":\"kept\"}\n{\"step\":2,\"loss\":1.0}\n{\"event\":\"resume\",\"step\":2,"
            ),
            "{text}"
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_last_line_without_its_end_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(METRICS_NAME), "{\"step\":1}").unwrap();
        drop(MetricsWriter::open(dir.path(), 1).unwrap());
        assert_eq!(lines(dir.path()), ["update 1", "resume 1"]);
    }

    #[test]
    fn a_loss_that_is_no_number_is_null() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::open(dir.path(), 0).unwrap();
        writer.update(1, loss(f64::NAN)).unwrap();
        assert!(std::fs::read_to_string(&writer.path).unwrap().contains("{\"step\":1,\"loss\":null,"));
        assert!(read_series(dir.path(), None, "loss").unwrap().is_empty());
    }
}
