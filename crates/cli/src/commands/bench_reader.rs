//! `tercio bench reader`: times a training step or answering, as `bench/peer_reader.py` times PyTorch.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_data::Tokenizer;
use tercio_models::t5::T5Config;
use tercio_train::bench::{BenchMode, BenchOptions, bench_reader};
use tercio_train::on_device;
use tercio_train::options::MOST_TEXT_TOKENS;
use tercio_train::scratch::ScratchFolder;
use tercio_train::setup;

use super::bench::BenchFlags;
use super::common::{MOST_QUESTIONS, within};

/// What to time.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Forward, backward, clipping, AdamW
    Train,
    /// Encoding and greedy decoding of exactly 20 tokens
    Generate,
}

/// Flags of `tercio bench reader`.
#[derive(Args)]
pub struct BenchReader {
    /// What to time
    #[arg(value_enum)]
    mode: Mode,
    /// Questions with targets and passages: .json or .jsonl, also .gz or .zst
    #[arg(long)]
    input: PathBuf,
    /// Folder of the tokenizer (tokenizer.json or spiece.model)
    #[arg(long)]
    tokenizer: PathBuf,
    /// Shape of the model: small, base, large, 3b, 11b; weights are random
    #[arg(long, default_value = "base")]
    size: String,
    /// config.json of another shape, instead of --size
    #[arg(long)]
    model_config: Option<PathBuf>,
    /// Questions of a step
    #[arg(long, default_value_t = 1)]
    questions: usize,
    /// Passages of each question
    #[arg(long, default_value_t = 20)]
    passages: usize,
    /// Tokens of "question + title + passage" at most
    #[arg(long, default_value_t = 250)]
    text_maxlength: usize,
    #[command(flatten)]
    bench: BenchFlags,
}

impl BenchReader {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[
            ("questions", self.questions, MOST_QUESTIONS),
            ("passages", self.passages, MOST_QUESTIONS),
            ("text_maxlength", self.text_maxlength, MOST_TEXT_TOKENS),
        ])?;
        let config = match &self.model_config {
            Some(path) => T5Config::read(path)?.0,
            None => setup::of_size(&self.size)?,
        };
        let (device, settings) = self.bench.open()?;
        let options = BenchOptions {
            mode: match self.mode {
                Mode::Train => BenchMode::Train,
                Mode::Generate => BenchMode::Generate,
            },
            size: self.model_config.as_ref().map_or(self.size, |p| p.display().to_string()),
            config,
            input: self.input,
            questions: self.questions,
            passages: self.passages,
            text_maxlength: self.text_maxlength,
            settings,
        };
        let tokenizer = Tokenizer::load(&self.tokenizer)?;
        let cache = ScratchFolder::new()?;
        let report = on_device!(&device, |d| bench_reader(d, &options, tokenizer, cache.path()))?;
        let size = format!("t5 {}, {} x {} passages", report.size, report.questions, report.passages);
        self.bench.print(&report, &size)?;
        Ok(ExitCode::SUCCESS)
    }
}
