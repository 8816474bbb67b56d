//! `tercio bench retriever`: times a step of distillation, as `bench/peer_retriever.py` times PyTorch.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_data::Tokenizer;
use tercio_train::bench::{RetrieverBenchOptions, bench_retriever};
use tercio_train::on_device;
use tercio_train::scratch::ScratchFolder;

use super::bench::BenchFlags;
use super::common::{MOST_QUESTIONS, within};

/// What to time.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Forward, backward, clipping, AdamW
    Train,
}

/// Flags of `tercio bench retriever`.
#[derive(Args)]
pub struct BenchRetriever {
    /// What to time
    #[arg(value_enum)]
    mode: Mode,
    /// Questions with passages: .json or .jsonl, also .gz or .zst
    #[arg(long)]
    input: PathBuf,
    /// Folder of the tokenizer (tokenizer.json or vocab.txt)
    #[arg(long)]
    tokenizer: PathBuf,
    /// Questions of a step
    #[arg(long, default_value_t = 1)]
    questions: usize,
    /// Passages of each question
    #[arg(long, default_value_t = 20)]
    passages: usize,
    /// Tokens of a question at most
    #[arg(long, default_value_t = 40)]
    question_maxlength: usize,
    /// Tokens of "title + passage" at most
    #[arg(long, default_value_t = 200)]
    passage_maxlength: usize,
    #[command(flatten)]
    bench: BenchFlags,
}

impl BenchRetriever {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[
            ("questions", self.questions, MOST_QUESTIONS),
            ("passages", self.passages, MOST_QUESTIONS),
            ("question_maxlength", self.question_maxlength, 512),
            ("passage_maxlength", self.passage_maxlength, 512),
        ])?;
        let Mode::Train = self.mode;
        let (device, settings) = self.bench.open()?;
        let options = RetrieverBenchOptions {
            input: self.input,
            questions: self.questions,
            passages: self.passages,
            question_maxlength: self.question_maxlength,
            passage_maxlength: self.passage_maxlength,
            settings,
        };
        let tokenizer = Tokenizer::load(&self.tokenizer)?;
        let cache = ScratchFolder::new()?;
        let report = on_device!(&device, |d| bench_retriever(d, &options, tokenizer, cache.path()))?;
        let size = format!("{}, {} x {} passages", report.size, report.questions, report.passages);
        self.bench.print(&report, &size)?;
        Ok(ExitCode::SUCCESS)
    }
}
