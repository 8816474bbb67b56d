//! `tercio eval classifier`: what a classifier is worth on documents with labels.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;
use tercio_comm::World;
use tercio_data::Labels;
use tercio_data::classification::ClassificationReport;
use tercio_data::corpus::{Split, UnknownLabels};
use tercio_data::replace::{ReplacedFile, refuse_source};
use tercio_train::classify::{Faults, Measured, measure_among};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::device::open_device;
use tercio_train::run::Signals;
use tercio_train::{TrainError, on_device};

use super::classifier_flags::ClassifierFlags;
use super::common::{self, line};

/// Flags of `tercio eval classifier`.
#[derive(Args)]
pub struct EvalClassifier {
    /// Documents with labels: .txt (FastText), .jsonl, .json, .csv or .tsv, also .gz or .zst; .parquet in a build with that feature; or a
    /// folder with a folder per label
    #[arg(long, visible_alias = "eval-data", env = "TERCIO_EVAL_DATA")]
    data: PathBuf,
    #[command(flatten)]
    flags: ClassifierFlags,
    /// What becomes of documents with a label that the classifier does not have
    #[arg(long, value_enum, default_value_t = Unknown::Refuse)]
    unknown_labels: Unknown,
    /// Draw the confusion matrix into this file (SVG)
    #[arg(long, value_name = "FILE.svg")]
    confusion: Option<PathBuf>,
    /// Write the predictions here, as flair's dev.tsv has them: the text, gold and predicted labels, and whether they differ
    #[arg(long)]
    output: Option<PathBuf>,
    /// Print the figures as one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

/// What becomes of documents with a label that the classifier does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Unknown {
    /// They are an error
    Refuse,
    /// They count as missed
    Count,
}

impl EvalClassifier {
    /// Evaluates.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.flags.check()?;
        let place = common::place(self.flags.place())?;
        let threads = common::threads_of_rank(self.flags.threads)?;
        common::start_log(&place, self.flags.quiet)?;
        let signals = Signals::install()?;
        let world = common::join(&place, &self.flags.link)?;
        let open = || open_device(&world, threads, self.flags.compute.get(), &self.flags.device);
        let evaluated = open().and_then(|device| on_device!(&device, |d| self.evaluate(&world, d, &signals)));
        let (measured, report) = match common::end(&world, evaluated)? {
            Ok(found) if world.is_main() => found,
            Ok(_) => return Ok(ExitCode::SUCCESS),
            Err(code) => return Ok(code),
        };
        if self.json {
            let mut json = serde_json::to_value(&report)?;
            json["loss"] = json!(measured.loss());
            line(&json.to_string())?;
        } else {
            let loss = measured.loss().map_or(String::new(), |loss| format!("- Loss {loss:.4}\n"));
            line(&format!("{loss}{report}"))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn evaluate<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        signals: &Signals,
    ) -> Result<(Measured, ClassificationReport), TrainError> {
        let opened = self.flags.open(world, device)?;
        let classifier = self.flags.classifier(&opened, device)?;
        let config = &classifier.model.config;
        let documents = self.flags.documents(world, &self.data)?;
        let mut faults = Faults::default();
        let on_fault = &mut |fault: &_| {
            if world.is_main() {
                faults.say(fault);
            }
        };
        let survey = Split::survey(documents, config.multi_label, self.flags.skip_bad, on_fault)?;
        faults.sum_up();
        if survey.split.is_empty() {
            let what = "no document is good: nothing to measure";
            return Err(TrainError::Unusable(format!("{}: {what}", self.data.display())));
        }
        let policy = match self.unknown_labels {
            Unknown::Refuse => UnknownLabels::Refuse,
            Unknown::Count => UnknownLabels::Count,
        };
        survey.split.unknown(&Labels::from_names(config.labels.clone())?, policy)?;
        let open = |path: &Option<PathBuf>| match path.as_deref().filter(|_| world.is_main()) {
            Some(path) => {
                refuse_source(path, &self.data)?;
                Ok::<_, TrainError>(Some(ReplacedFile::create(path)?))
            }
            None => Ok(None),
        };
        let (mut output, picture) = (open(&self.output)?, open(&self.confusion)?);
        let same = |a: &ReplacedFile, b: &ReplacedFile| a.target() == b.target();
        if output.as_ref().zip(picture.as_ref()).is_some_and(|(a, b)| same(a, b)) {
            let what = "--output and --confusion: expected two files, found one name twice";
            return Err(TrainError::Options(what.into()));
        }
        let stop = || signals.requested().is_some();
        let measured = device.run(|| {
            measure_among(world, &classifier, &survey.split, &stop, &mut |document, prediction| {
                let Some(file) = &mut output else { return Ok(()) };
                let names: Vec<&str> = prediction.chosen.iter().map(|&i| config.labels[i].as_str()).collect();
                file.write(block(&document.text, &document.labels, &names).as_bytes())?;
                Ok(())
            })
        });
        let measured = match measured {
            Err(TrainError::Interrupted) => return Err(TrainError::Stopped),
            other => other?,
        };
        let report = measured.report();
        if let Some(mut file) = picture {
            match report.confusion.as_ref().and_then(|c| c.svg()) {
                Some(svg) => {
                    file.write(svg.as_bytes())?;
                    tracing::info!("wrote {}", file.finish()?.display());
                }
                None => tracing::warn!(
                    "no confusion matrix is drawn: documents have several labels, or there are more than 200 of them"
                ),
            }
        }
        if let Some(file) = output {
            tracing::info!("wrote {}", file.finish()?.display());
        }
        // Nobody is done before rank 0 has written everything.
        world.barrier()?;
        Ok((measured, report))
    }
}

/// A document of flair's dev.tsv.
fn block(text: &str, gold: &[String], predicted: &[&str]) -> String {
    let clean = |text: &str| text.replace(|c: char| c.is_control(), " ");
    let (mut a, mut b): (Vec<&str>, Vec<&str>) =
        (gold.iter().map(String::as_str).collect(), predicted.to_vec());
    a.sort_unstable();
    b.sort_unstable();
    let mismatch = if a == b { "" } else { " -> MISMATCH!\n" };
    let (text, gold, predicted) = (clean(text), clean(&gold.join(", ")), clean(&predicted.join(", ")));
    format!("{text}\n - Gold: {gold}\n - Pred: {predicted}\n{mismatch}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_a_line() {
        let gold = ["a\nb".to_owned(), "c".to_owned()];
        let want = "x y\n - Gold: a b, c\n - Pred: c, a b\n\n";
        assert_eq!(block("x\ny", &gold, &["c", "a\nb"]), want);
        let other = block("x", &gold, &["a b"]);
        assert_eq!(other, "x\n - Gold: a b, c\n - Pred: a b\n -> MISMATCH!\n\n");
    }
}
