//! Times training steps and answering on random weights, as the scripts in `bench` time PyTorch: the same texts, shapes and
//! optimizer, one warm-up step, the median of the others; texts are encoded before the clock starts. One model, one file.

mod classifier;
mod colbert;
mod encoder;
mod plaid;
mod profile;
mod reader;
mod retriever;

use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Tensor};

pub use classifier::{ClassifierBenchMode, ClassifierBenchOptions, ClassifierBenchReport, bench_classifier};
pub use colbert::{ColbertBenchMode, ColbertBenchOptions, ColbertBenchReport, bench_colbert};
pub use encoder::{EncoderBenchOptions, bench_encoder};
pub use plaid::{ExactReport, PlaidBenchOptions, PlaidBenchReport, bench_plaid};
pub use profile::{Profile, ProfileLine, Profiled};
pub use reader::{BenchMode, BenchOptions, bench_reader, product_flops};
pub use retriever::{RetrieverBenchOptions, bench_retriever};

use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize, Shown};
use crate::optimizer::no_moments;
use crate::options::{BatchPlan, Optim, OptimOptions};
use crate::ranks::RankDevice;
use crate::run::memory;
use crate::step::{Stepper, TrainState};

/// Rows and columns of the matrices whose product is the device's peak.
const PEAK_SIZE: usize = 1536;

/// What was measured. Names are those of the peers' scripts.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// This program's version.
    pub tercio: &'static str,
    /// What was timed.
    pub mode: BenchMode,
    /// Name of the shape.
    pub size: String,
    /// Questions a step; of an encoder alone its sequences.
    pub questions: usize,
    /// Passages a question; of an encoder alone 0.
    pub passages: usize,
    /// Whether the factors of products are rounded to bf16.
    pub bf16: bool,
    /// Whether encoder layers were computed again.
    pub recompute: bool,
    /// Threads.
    pub threads: usize,
    /// Median of the timed steps.
    pub seconds_per_step: f64,
    /// Encoder tokens, none of them padding, over the time of all timed steps.
    pub real_tokens_per_second: f64,
    /// Encoder tokens over the places of a system that pads every text to its most tokens.
    pub real_fraction: f64,
    /// Largest resident size of the process, 10^6 kB of 1024 bytes as the peer has it.
    pub peak_rss_gb: f64,
    /// Largest size of the tensors on a device with a memory of its own, 2^30 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_device_gib: Option<f64>,
    /// Floating-point operations of the products per second over the peak.
    pub share_of_peak: f64,
    /// The best product of 1536 x 1536 matrices of this process, 10^9 operations a second.
    pub peak_gflops: f64,
    /// Number format and kernels of the device.
    pub arithmetic: String,
    /// Loss of every step, the warm-up first; empty for answering.
    pub losses: Vec<f64>,
    /// Where the time went, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Vec<ProfileLine>>,
}

/// What all benchmarks are told.
#[derive(Clone, Debug)]
pub struct BenchSettings {
    /// Timed steps, after one that is not timed.
    pub steps: usize,
    /// Whether encoder layers are computed again in the backward pass.
    pub recompute: bool,
    /// Threads of the device, for the report.
    pub threads: usize,
    /// Whether the device's products are in bf16, for the report.
    pub bf16: bool,
    /// Gathers where the time of the timed steps goes.
    pub profile: Option<Profile>,
}

impl BenchSettings {
    /// Keeps the time of step `i` that began at `start`, when the device is done with it; step 0 is the warm-up.
    fn timed<D: Device>(&self, device: &D, i: usize, start: Instant, times: &mut Vec<f64>) {
        device.wait();
        match (i, &self.profile) {
            (0, Some(profile)) => profile.clear(),
            (0, None) => {}
            _ => times.push(start.elapsed().as_secs_f64()),
        }
    }
}

/// What the timed steps had to do.
struct Work {
    mode: BenchMode,
    size: String,
    questions: usize,
    passages: usize,
    /// Encoder tokens of all timed steps.
    tokens: f64,
    /// The same, with padding.
    places: f64,
    /// Operations of their products.
    flops: f64,
    /// Seconds of each timed step.
    times: Vec<f64>,
    losses: Vec<f64>,
    /// The device's peak before the steps.
    peak: f64,
}

fn report<D: Device>(device: &D, o: &BenchSettings, work: Work) -> BenchReport {
    let total: f64 = work.times.iter().sum();
    // Before the next products are counted.
    let profile = o.profile.as_ref().map(Profile::so_far);
    // Other work may have met the first measurement; the peak is what the device can do.
    let peak = work.peak.max(product_peak(device));
    BenchReport {
        tercio: env!("CARGO_PKG_VERSION"),
        mode: work.mode,
        size: work.size,
        questions: work.questions,
        passages: work.passages,
        bf16: o.bf16,
        recompute: o.recompute,
        threads: o.threads,
        seconds_per_step: rounded(median(&work.times), 3),
        real_tokens_per_second: (work.tokens / total).round(),
        real_fraction: rounded(work.tokens / work.places, 3),
        peak_rss_gb: rounded(memory::peak_resident().map_or(0.0, |b| b as f64 / 1024.0 / 1e6), 2),
        peak_device_gib: device.peak_bytes().map(|b| rounded(b as f64 / (1u64 << 30) as f64, 3)),
        share_of_peak: rounded(work.flops / total / peak, 3),
        peak_gflops: rounded(peak / 1e9, 1),
        arithmetic: device.arithmetic(),
        losses: work.losses.iter().map(|&l| rounded(l, 4)).collect(),
        profile: profile.map(|p| p.lines(work.times.len(), total, peak)),
    }
}

/// A batch that is encoded already.
struct Batch<S> {
    rows: Vec<usize>,
    shard: S,
}

/// An objective over batches that are encoded already.
struct Encoded<O, S> {
    objective: O,
    batches: Vec<Batch<S>>,
}

impl<O, S> Encoded<O, S> {
    /// Batch of step `i`, the warm-up being step 0.
    fn batch(&self, i: usize) -> &Batch<S> {
        &self.batches[i % self.batches.len()]
    }
}

impl<D: Device, O: Objective<D>> Objective<D> for Encoded<O, O::Shard>
where
    O::Shard: Clone,
{
    type Shard = O::Shard;

    fn layout(&self) -> &Layout {
        self.objective.layout()
    }
    fn examples(&self) -> usize {
        self.objective.examples()
    }
    fn shards(&self, update: &UpdateExamples, _micro: usize) -> Result<Vec<O::Shard>, TrainError> {
        let batch = self.batches.iter().find(|b| b.rows == update.rows);
        Ok(batch.map(|b| b.shard.clone()).into_iter().collect())
    }
    fn size(&self, shard: &O::Shard) -> ShardSize {
        self.objective.size(shard)
    }
    fn has_first_pass(&self) -> bool {
        self.objective.has_first_pass()
    }
    fn first_pass(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &mut O::Shard,
        draw: Draw,
    ) -> Result<Shown, TrainError> {
        self.objective.first_pass(device, parameters, shard, draw)
    }
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &O::Shard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome {
        self.objective.gradient_with(device, parameters, shard, draw, weight, gradients, buckets)
    }
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        self.objective.evaluate_among(world, device, parameters, interrupted)
    }
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        self.objective.save(device, parameters, folder)
    }
    fn fingerprint(&self) -> Map<String, Value> {
        self.objective.fingerprint()
    }
}

/// Times of the steps after the first, and the losses of all: forward, backward, clipping, AdamW.
fn train<D: RankDevice, O: Objective<D>>(
    device: &D,
    objective: &Encoded<O, O::Shard>,
    parameters: Arena<D>,
    settings: &BenchSettings,
) -> Result<(Vec<f64>, Vec<f64>), TrainError>
where
    O::Shard: Clone,
{
    let steps = settings.steps;
    let optim = OptimOptions {
        total_steps: steps as u64 + 1,
        optim: Optim::Adamw,
        weight_decay: 0.01,
        ..OptimOptions::default()
    };
    let global = objective.batch(0).rows.len();
    let plan = BatchPlan { global, micro: global, shards: 1, groups: 1 };
    let [first, second] = no_moments(device, optim.optim, objective.layout(), None);
    let mut state = TrainState { step: 0, parameters, first, second };
    let mut stepper = Stepper::new(device, objective, plan, &optim, 0);
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for i in 0..=steps {
        let rows = objective.batch(i).rows.clone();
        let start = Instant::now();
        let outcome = stepper.update(&mut state, &UpdateExamples { epoch: 0, rows })?;
        settings.timed(device, i, start, &mut times);
        losses.push(outcome.loss);
    }
    Ok((times, losses))
}

/// Rows of each batch: the `questions` items from `i * questions` on, round and round; no more batches differ than the
/// file has rows.
fn rows_of_batches(steps: usize, questions: usize, len: usize) -> Vec<Vec<usize>> {
    let different = steps.saturating_add(1).min(len);
    (0..different).map(|i| (0..questions).map(|j| (i * questions + j) % len).collect()).collect()
}

/// Operations a second of the device's own product on large matrices: the best of some.
fn product_peak<D: Device>(device: &D) -> f64 {
    let n = PEAK_SIZE;
    let mut best = f64::INFINITY;
    device.run(|| {
        let mut a = Tensor::zeros(device, n, n);
        let mut b = Tensor::zeros(device, n, n);
        let mut c = Tensor::zeros(device, n, n);
        device.fill(a.view_mut(), 0.5);
        device.fill(b.view_mut(), -0.25);
        for _ in 0..5 {
            device.wait();
            let start = Instant::now();
            device.product(a.matrix(), b.matrix(), c.view_mut(), false);
            device.wait();
            best = best.min(start.elapsed().as_secs_f64());
        }
    });
    device.trim();
    2.0 * (n as f64) * (n as f64) * (n as f64) / best.max(1e-9)
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

fn rounded(value: f64, digits: i32) -> f64 {
    let unit = [1.0, 10.0, 100.0, 1e3, 1e4][digits as usize];
    (value * unit).round() / unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(rounded(1.23456, 3), 1.235);
    }
}
