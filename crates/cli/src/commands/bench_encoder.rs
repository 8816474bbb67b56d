//! `tercio bench encoder`: times a training step of an encoder's layers, as `bench/peer_bert_trunk.py` times PyTorch.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_train::bench::{EncoderBenchOptions, bench_encoder};
use tercio_train::on_device;

use super::bench::BenchFlags;
use super::common::{MOST_QUESTIONS, within};

/// What to time.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Forward, backward, clipping, AdamW
    Train,
}

/// Flags of `tercio bench encoder`.
#[derive(Args)]
pub struct BenchEncoder {
    /// What to time
    #[arg(value_enum)]
    mode: Mode,
    /// Texts of a step
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Tokens of each text
    #[arg(long, default_value_t = 180)]
    tokens: usize,
    #[command(flatten)]
    bench: BenchFlags,
}

impl BenchEncoder {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[("sequences", self.sequences, MOST_QUESTIONS), ("tokens", self.tokens, 512)])?;
        let Mode::Train = self.mode;
        let (device, settings) = self.bench.open()?;
        let options = EncoderBenchOptions { sequences: self.sequences, tokens: self.tokens, settings };
        let report = on_device!(&device, |d| bench_encoder(d, &options))?;
        let size = format!("{}, {} x {} tokens", report.size, self.sequences, self.tokens);
        self.bench.print(&report, &size)?;
        Ok(ExitCode::SUCCESS)
    }
}
