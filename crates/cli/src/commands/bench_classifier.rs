//! `tercio bench classifier`: times training steps and the labels of texts, as `bench/peer_classifier.py` times transformers.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_train::bench::{
    ClassifierBenchMode, ClassifierBenchOptions, ClassifierBenchReport, bench_classifier,
};
use tercio_train::on_device;
use tercio_train::scratch::ScratchFolder;

use super::bench::{BenchFlags, profile_table};
use super::common::{MOST_QUESTIONS, line, within};

/// What to time.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Forward, backward, clipping, AdamW on one batch
    Train,
    /// The labels of all texts
    Predict,
}

/// Flags of `tercio bench classifier`.
#[derive(Args)]
pub struct BenchClassifier {
    /// What to time
    #[arg(value_enum)]
    mode: Mode,
    /// JSON lines with `text`, or JSON with a list `documents`
    #[arg(long)]
    input: PathBuf,
    /// Folder of an encoder or a classifier, or a hub name; an encoder gets a head of 8 labels
    #[arg(long)]
    model: String,
    /// Texts of a batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Tokens of a text at most
    #[arg(long, default_value_t = 512)]
    text_maxlength: usize,
    #[command(flatten)]
    bench: BenchFlags,
}

impl BenchClassifier {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[("batch", self.batch, MOST_QUESTIONS), ("text_maxlength", self.text_maxlength, 1 << 16)])?;
        let (device, settings) = self.bench.open()?;
        let options = ClassifierBenchOptions {
            mode: match self.mode {
                Mode::Train => ClassifierBenchMode::Train,
                Mode::Predict => ClassifierBenchMode::Predict,
            },
            input: self.input,
            model: self.model,
            batch: self.batch,
            maxlength: self.text_maxlength,
            settings,
        };
        let cache = ScratchFolder::new()?;
        let found = on_device!(&device, |d| bench_classifier(d, &options, cache.path()))?;
        match &found {
            _ if self.bench.json() => line(&serde_json::to_string(&found)?)?,
            ClassifierBenchReport::Train { report, texts_per_second } => {
                let size =
                    format!("{}, {} texts, {texts_per_second} a second", report.size, report.questions);
                self.bench.print(report, &size)?;
            }
            ClassifierBenchReport::Predict {
                texts,
                texts_per_second,
                seconds_per_step,
                peak_rss_gb,
                arithmetic,
                profile,
                ..
            } => {
                line(&format!(
                    "labels of {texts} texts, {arithmetic}: {seconds_per_step:.3} s, {texts_per_second} texts/s, {peak_rss_gb:.2} GB at most"
                ))?;
                if let Some(profile) = profile {
                    line(&profile_table(profile).join("\n"))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
