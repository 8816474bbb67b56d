//! `tercio bench reader`: times a training step or answering, as `bench/peer_reader.py` times PyTorch.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_data::Tokenizer;
use tercio_engine::Cpu;
use tercio_models::t5::T5Config;
use tercio_train::bench::{BenchMode, BenchOptions, BenchReport, bench_reader};
use tercio_train::options::{MOST_TEXT_TOKENS, Precision, PrecisionOptions};
use tercio_train::scratch::ScratchFolder;
use tercio_train::setup;

use super::common::{self, MOST_QUESTIONS, line, within};

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
    /// Steps that are timed, after one that is not
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Keep only each encoder layer's input for the backward pass and compute the rest again
    #[arg(long, visible_alias = "use-checkpoint")]
    recompute: bool,
    #[command(flatten)]
    compute: PrecisionOptions,
    /// Tokens of "question + title + passage" at most
    #[arg(long, default_value_t = 250)]
    text_maxlength: usize,
    /// Threads; 0: all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl BenchReader {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[
            ("questions", self.questions, MOST_QUESTIONS),
            ("passages", self.passages, MOST_QUESTIONS),
            ("steps", self.steps, 1_000_000),
            ("text_maxlength", self.text_maxlength, MOST_TEXT_TOKENS),
        ])?;
        let config = match &self.model_config {
            Some(path) => T5Config::read(path)?.0,
            None => setup::of_size(&self.size)?,
        };
        let precision = self.compute.get();
        let device = Cpu::new(common::threads(self.threads)?)?.with_precision(precision.into());
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
            steps: self.steps,
            recompute: self.recompute,
            text_maxlength: self.text_maxlength,
            threads: device.threads(),
            bf16: precision == Precision::Bf16,
        };
        let tokenizer = Tokenizer::load(&self.tokenizer)?;
        let cache = ScratchFolder::new()?;
        let report = bench_reader(&device, &options, tokenizer, cache.path())?;
        if self.json {
            line(&serde_json::to_string(&report)?)?;
        } else {
            line(&table(&report))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(r: &BenchReport) -> String {
    let mode = match r.mode {
        BenchMode::Train => "training step",
        BenchMode::Generate => "answering, 20 tokens",
    };
    let recompute = if r.recompute { ", recompute" } else { "" };
    let mut lines = vec![
        format!(
            "{mode}, t5 {}, {} x {} passages, {}{recompute}, {} threads",
            r.size, r.questions, r.passages, r.arithmetic, r.threads
        ),
        format!("  seconds per step     {:.3}", r.seconds_per_step),
        format!(
            "  tokens per second    {:.0} ({:.1} % of a padded batch)",
            r.real_tokens_per_second,
            100.0 * r.real_fraction
        ),
        format!("  peak memory          {:.2} GB", r.peak_rss_gb),
        format!(
            "  share of peak        {:.3} of {:.1} GFLOP/s (the engine's own product)",
            r.share_of_peak, r.peak_gflops
        ),
    ];
    if !r.losses.is_empty() {
        let losses: Vec<String> = r.losses.iter().map(|l| format!("{l:.4}")).collect();
        lines.push(format!("  losses               {}", losses.join(", ")));
    }
    lines.join("\n")
}
