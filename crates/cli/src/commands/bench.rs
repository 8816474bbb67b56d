//! What the benchmarks share: flags of steps and device, and the table of what was measured.

use clap::Args;
use tercio_comm::World;
use tercio_train::TrainError;
use tercio_train::bench::{BenchMode, BenchReport, BenchSettings, Profile, ProfileLine};
use tercio_train::options::{DeviceOptions, Precision, PrecisionOptions};
use tercio_train::ranks::device::{AnyDevice, open_device};

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
    #[command(flatten)]
    device: DeviceOptions,
    /// Threads; 0: all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Tell where the time goes: time and share of the peak of every kind of kernel. Costs a little time
    #[arg(long)]
    profile: bool,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl BenchFlags {
    /// The device, and what a benchmark has to know.
    ///
    /// # Errors
    /// Flags out of range.
    pub fn open(&self) -> Result<(AnyDevice, BenchSettings), TrainError> {
        within(&[("steps", self.steps, 1_000_000)])?;
        let (precision, threads) = (self.compute.get(), common::threads(self.threads)?);
        let device = open_device(&World::alone(), threads, precision, &self.device)?;
        let settings = BenchSettings {
            steps: self.steps,
            recompute: self.recompute,
            threads,
            bf16: precision == Precision::Bf16,
            profile: self.profile.then(Profile::default),
        };
        Ok((device, settings))
    }
    /// Whether a line of JSON is asked for.
    pub fn json(&self) -> bool {
        self.json
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
    if let Some(gib) = r.peak_device_gib {
        lines.insert(4, format!("  peak on the device   {gib:.2} GiB"));
    }
    if !r.losses.is_empty() {
        let losses: Vec<String> = r.losses.iter().map(|l| format!("{l:.4}")).collect();
        lines.push(format!("  losses               {}", losses.join(", ")));
    }
    if let Some(profile) = &r.profile {
        lines.extend(profile_table(profile));
    }
    lines.join("\n")
}

/// Where the time goes: in the name of a product, T stands for the tokens.
pub(super) fn profile_table(profile: &[ProfileLine]) -> Vec<String> {
    let wide = profile.iter().map(|line| line.operation.len()).max().unwrap_or(0).max(16);
    let head = format!(
        "  {:wide$} {:>9} {:>9} {:>7} {:>8} {:>8}",
        "where time goes", "calls", "seconds", "share", "GFLOP/s", "of peak"
    );
    let row = |line: &ProfileLine| {
        let of = |value: Option<f64>, digits: usize| value.map_or("".into(), |v| format!("{v:.digits$}"));
        format!(
            "  {:wide$} {:>9.1} {:>9.4} {:>5.1} % {:>8} {:>8}",
            line.operation,
            line.calls_per_step,
            line.seconds_per_step,
            100.0 * line.share,
            of(line.gflops, 1),
            of(line.share_of_peak, 2)
        )
    };
    [head].into_iter().chain(profile.iter().map(row)).collect()
}
