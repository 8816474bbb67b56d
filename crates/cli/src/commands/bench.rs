//! What the benchmarks share: flags of steps and device, and the table of what was measured.

use clap::Args;
use tercio_engine::Cpu;
use tercio_train::TrainError;
use tercio_train::bench::{BenchMode, BenchReport, BenchSettings};
use tercio_train::options::{Precision, PrecisionOptions};

use super::common::{self, line, within};

/// Flags of every `tercio bench`.
#[derive(Args)]
pub struct BenchFlags {
    /// Steps that are timed, after one that is not
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Keep only each encoder layer's input for the backward pass and compute the rest again
    #[arg(long, visible_alias = "use-checkpoint")]
    recompute: bool,
    #[command(flatten)]
    compute: PrecisionOptions,
    /// Threads; 0: all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl BenchFlags {
    /// The device, and what a benchmark has to know.
    ///
    /// # Errors
    /// Flags out of range.
    pub fn open(&self) -> Result<(Cpu, BenchSettings), TrainError> {
        within(&[("steps", self.steps, 1_000_000)])?;
        let precision = self.compute.get();
        let device = Cpu::new(common::threads(self.threads)?)?.with_precision(precision.into());
        let settings = BenchSettings {
            steps: self.steps,
            recompute: self.recompute,
            threads: device.threads(),
            bf16: precision == Precision::Bf16,
        };
        Ok((device, settings))
    }
    /// Prints what was measured, of a model and input described by `size`.
    ///
    /// # Errors
    /// Nobody reads it.
    pub fn print(&self, report: &BenchReport, size: &str) -> anyhow::Result<()> {
        match self.json {
            true => line(&serde_json::to_string(report)?)?,
            false => line(&table(report, size))?,
        }
        Ok(())
    }
}

fn table(r: &BenchReport, size: &str) -> String {
    let mode = match r.mode {
        BenchMode::Train => "training step",
        BenchMode::Generate => "answering, 20 tokens",
    };
    let recompute = if r.recompute { ", recompute" } else { "" };
    let mut lines = vec![
        format!("{mode}, {size}, {}{recompute}, {} threads", r.arithmetic, r.threads),
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
