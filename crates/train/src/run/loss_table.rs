//! `loss.tsv`, as flair writes it: a row for every evaluation with the loss of training and the figures of the held-out data.
//!
//! It differs in three things: the learning rate has all its digits (flair's four make 0.0000 of 5e-5), a run that goes on keeps the
//! header and loses the rows of updates it does again, and an evaluation within an epoch has a fraction for its number.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::error::{Context, RunError};
use super::files;

/// The file's name in the run's folder.
pub const LOSS_TABLE_NAME: &str = "loss.tsv";
/// No table of a training is longer.
const MOST_BYTES: u64 = 1 << 30;
const DEV: [&str; 5] = ["DEV_LOSS", "DEV_PRECISION", "DEV_RECALL", "DEV_F1", "DEV_ACCURACY"];

/// The table of a run under way.
pub struct LossTable {
    path: PathBuf,
    file: File,
    /// Updates of an epoch.
    epoch: u64,
    has_header: bool,
}

impl LossTable {
    /// Opens the table of a run that has done `step` updates, `epoch` to an epoch, and drops the rows of later ones; that of `step` itself
    /// too where its evaluation is still `due`: a process that made up for it died before it could save that it had.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn open(run_dir: &Path, epoch: u64, step: u64, due: bool) -> Result<Self, RunError> {
        let (path, epoch) = (run_dir.join(LOSS_TABLE_NAME), epoch.max(1));
        let mut has_header = false;
        if path.exists() {
            let text = files::read_small(&path, MOST_BYTES)?;
            let done = step as f64 / epoch as f64;
            let again = due.then(|| number(step, epoch));
            let stays = |line: &&str| {
                let first = line.split('\t').next().unwrap_or_default();
                // A number that was rounded to four digits.
                let is_done = first.parse::<f64>().is_ok_and(|number| number <= done + 1e-4);
                first == "EPOCH" || (is_done && again.as_deref() != Some(first))
            };
            // The last line may lack its end: the process died in it.
            let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
            let kept: String = whole.lines().filter(stays).map(|line| format!("{line}\n")).collect();
            let kept = if step == 0 { String::new() } else { kept };
            has_header = !kept.is_empty();
            if kept != text {
                files::write_atomic(&path, kept.as_bytes())?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).context("open", &path)?;
        Ok(LossTable { path, file, epoch, has_header })
    }

    /// Writes the row of an evaluation after `step` updates: evaluations without gain (where the rate falls on a plateau), the learning
    /// rate, the loss of training, and of the held-out data loss, precision, recall, F1 and accuracy.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn row(
        &mut self,
        step: u64,
        bad: Option<u64>,
        lr: f64,
        train_loss: f64,
        dev: Option<[Option<f64>; 5]>,
    ) -> Result<(), RunError> {
        let (_, _, _, hour, minute, second) = files::utc(files::unix_time() as u64);
        let mut row = vec![
            ("EPOCH", number(step, self.epoch)),
            ("TIMESTAMP", format!("{hour:02}:{minute:02}:{second:02}")),
        ];
        row.extend(bad.map(|bad| ("BAD_EPOCHS", bad.to_string())));
        row.push(("LEARNING_RATE", lr.to_string()));
        row.push(("TRAIN_LOSS", format!("{train_loss:.4}")));
        for (name, value) in DEV.into_iter().zip(dev.into_iter().flatten()) {
            row.push((name, value.map_or(String::new(), |value| format!("{value:.4}"))));
        }
        let (names, values): (Vec<&str>, Vec<String>) = row.into_iter().unzip();
        let mut text = String::new();
        if !self.has_header {
            text = names.join("\t") + "\n";
            self.has_header = true;
        }
        text += &(values.join("\t") + "\n");
        let needed = Some(text.len() as u64);
        self.file
            .write_all(text.as_bytes())
            .map_err(|error| RunError::from_io("write", &self.path, needed, error))
    }
}

/// The epochs of `step` updates, `epoch` to one.
fn number(step: u64, epoch: u64) -> String {
    match step.is_multiple_of(epoch) {
        true => (step / epoch).to_string(),
        false => format!("{:.4}", step as f64 / epoch as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_times(dir: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(dir.join(LOSS_TABLE_NAME)).unwrap();
        let row = |line: &str| {
            line.split('\t')
                .enumerate()
                .filter(|(i, _)| *i != 1)
                .map(|(_, v)| v)
                .collect::<Vec<_>>()
                .join(" ")
        };
        text.lines().map(row).collect()
    }

    #[test]
    fn a_run_that_goes_on_has_the_table_of_an_undisturbed_one() {
        let dir = tempfile::tempdir().unwrap();
        let dev = Some([Some(0.25), Some(0.5), Some(1.0), Some(0.125), None]);
        let rows = |table: &mut LossTable, steps: &[u64]| {
            steps.iter().for_each(|&s| table.row(s, Some(s), 5e-5, 1.0 / s as f64, dev).unwrap());
        };
        rows(&mut LossTable::open(dir.path(), 3, 0, false).unwrap(), &[3, 4, 6, 9]);
        let whole = without_times(dir.path());
        assert_eq!(
            whole[0],
            "EPOCH BAD_EPOCHS LEARNING_RATE TRAIN_LOSS DEV_LOSS DEV_PRECISION DEV_RECALL DEV_F1 DEV_ACCURACY"
        );
        assert_eq!(whole[2], "1.3333 4 0.00005 0.2500 0.2500 0.5000 1.0000 0.1250 ");
        // Killed in the middle of a row, two rows behind its checkpoint.
        let path = dir.path().join(LOSS_TABLE_NAME);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}4\t12:0")).unwrap();
        rows(&mut LossTable::open(dir.path(), 3, 4, false).unwrap(), &[6, 9]);
        assert_eq!(without_times(dir.path()), whole);
        // The evaluation after update 4 was interrupted and saved so; it was made up for, and the process killed before it saved.
        rows(&mut LossTable::open(dir.path(), 3, 4, true).unwrap(), &[4, 6, 9]);
        assert_eq!(without_times(dir.path()), whole);
        // Without a checkpoint it starts over.
        rows(&mut LossTable::open(dir.path(), 3, 0, false).unwrap(), &[3]);
        assert_eq!(without_times(dir.path()), whole[..2]);
    }
}
