//! Times a reader's training step or its answering on random weights, as `bench/peer_reader.py` times PyTorch: the same
//! texts, shapes and optimizer, one warm-up step, the median of the others; texts are encoded before the clock starts.

use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_data::{PackedReaderBatch, Questions, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Span, Tensor};
use tercio_models::t5::T5Config;

use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize};
use crate::objectives::reader::ReaderObjective;
use crate::optimizer::no_moments;
use crate::options::{BatchPlan, Optim, OptimOptions};
use crate::predict::question_spans;
use crate::ranks::RankDevice;
use crate::run::memory;
use crate::setup::{check_vocabulary, random_model};
use crate::step::{Stepper, TrainState};

/// Tokens of every generated answer, the start token counted; the end token is not taken before.
const ANSWER_TOKENS: usize = 20;
/// Rows and columns of the matrices whose product is the device's peak.
const PEAK_SIZE: usize = 1536;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BenchMode {
    /// Forward, backward, clipping, AdamW.
    Train,
    /// Encoding and greedy decoding of 20 tokens.
    Generate,
}

/// A benchmark's settings.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// What is timed.
    pub mode: BenchMode,
    /// Name of the shape, for the report.
    pub size: String,
    /// The shape.
    pub config: T5Config,
    /// File of questions with a `target` and passages.
    pub input: PathBuf,
    /// Questions a step.
    pub questions: usize,
    /// Passages a question, from the start of the file's list.
    pub passages: usize,
    /// Timed steps, after one that is not timed.
    pub steps: usize,
    /// Whether encoder layers are computed again in the backward pass.
    pub recompute: bool,
    /// Tokens of a passage at most.
    pub text_maxlength: usize,
    /// Threads of the device, for the report.
    pub threads: usize,
    /// Whether the device's products are in bf16, for the report.
    pub bf16: bool,
}

/// What was measured. Names are those of the peer's script.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// This program's version.
    pub tercio: &'static str,
    /// What was timed.
    pub mode: BenchMode,
    /// Name of the shape.
    pub size: String,
    /// Questions a step.
    pub questions: usize,
    /// Passages a question.
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
    /// Encoder tokens over the places of a system that pads every passage to `text_maxlength`.
    pub real_fraction: f64,
    /// Largest resident size of the process, 10^6 kB of 1024 bytes as the peer has it.
    pub peak_rss_gb: f64,
    /// Floating-point operations of the products per second (see [`product_flops`]) over the peak.
    pub share_of_peak: f64,
    /// The best product of 1536 x 1536 matrices of this process, 10^9 operations a second.
    pub peak_gflops: f64,
    /// Number format and kernels of the device.
    pub arithmetic: String,
    /// Loss of every step, the warm-up first; empty for answering.
    pub losses: Vec<f64>,
}

/// Reads, encodes and times; `cache` is a folder for the input's index.
///
/// # Errors
/// A setting of 0, fewer questions or passages than asked for, an input or tokenizer that cannot be used.
pub fn bench_reader<D: RankDevice>(
    device: &D,
    options: &BenchOptions,
    tokenizer: Tokenizer,
    cache: &Path,
) -> Result<BenchReport, TrainError> {
    let o = options;
    check_vocabulary(&tokenizer, &o.config)?;
    let encoding = ReaderEncoding {
        text_maxlength: o.text_maxlength,
        answer_maxlength: None,
        n_context: o.passages,
        no_title: false,
        passage_eos: false,
    };
    let questions = Questions::open(&o.input, cache)?;
    // Rows come round again, so no more batches differ than the file has rows.
    let different = o.steps.saturating_add(1).min(questions.len());
    let batches: Vec<Batch> =
        (0..different).map(|i| encode(&questions, &tokenizer, &encoding, o, i)).collect::<Result<_, _>>()?;
    let mut config = o.config.clone();
    config.dropout_rate = 0.1;
    let loaded = random_model(config, 0, device)?;
    let objective = Encoded {
        reader: ReaderObjective {
            model: loaded.model,
            json: loaded.json,
            tokenizer,
            encoding,
            used: questions.len(),
            train: questions,
            eval: None,
            seed: 0,
            label_smoothing: 0.0,
            recompute: o.recompute,
            generation_max_length: ANSWER_TOKENS,
            eval_n_context: o.passages,
            eval_batch: o.questions,
            eval_print_freq: u64::MAX,
        },
        batches,
    };
    let mut peak = product_peak(device);
    let (times, losses) = match o.mode {
        BenchMode::Train => train(device, &objective, loaded.parameters, o)?,
        BenchMode::Generate => (generate(device, &objective, &loaded.parameters, o)?, Vec::new()),
    };
    // Other work may have met the first measurement; the peak is what the device can do.
    peak = peak.max(product_peak(device));
    let timed = || (1..=o.steps).map(|i| objective.batch(i));
    let tokens: f64 = timed().map(|b| b.packed.ids.len() as f64).sum();
    let places = o.steps as f64 * o.questions as f64 * o.passages as f64 * o.text_maxlength as f64;
    let flops: f64 = timed().map(|b| product_flops(&o.config, &b.packed, o.mode, o.recompute)).sum();
    let total: f64 = times.iter().sum();
    Ok(BenchReport {
        tercio: env!("CARGO_PKG_VERSION"),
        mode: o.mode,
        size: o.size.clone(),
        questions: o.questions,
        passages: o.passages,
        bf16: o.bf16,
        recompute: o.recompute,
        threads: o.threads,
        seconds_per_step: rounded(median(&times), 3),
        real_tokens_per_second: (tokens / total).round(),
        real_fraction: rounded(tokens / places, 3),
        peak_rss_gb: rounded(memory::peak_resident().map_or(0.0, |b| b as f64 / 1024.0 / 1e6), 2),
        share_of_peak: rounded(flops / total / peak, 3),
        peak_gflops: rounded(peak / 1e9, 1),
        arithmetic: device.arithmetic(),
        losses: losses.iter().map(|&l| rounded(l, 4)).collect(),
    })
}

struct Batch {
    rows: Vec<usize>,
    packed: PackedReaderBatch,
}

/// Batch `i` holds the `questions` items from `i * questions` on, round and round.
fn encode(
    questions: &Questions,
    tokenizer: &Tokenizer,
    encoding: &ReaderEncoding,
    o: &BenchOptions,
    i: usize,
) -> Result<Batch, TrainError> {
    let rows: Vec<usize> = (0..o.questions).map(|j| (i * o.questions + j) % questions.len()).collect();
    let encoded: Vec<_> = rows
        .par_iter()
        .map(|&row| {
            let question = questions.get(row)?;
            if question.ctxs.len() < o.passages {
                return Err(TrainError::Unusable(format!(
                    "{}: item {row} has {} passages, --passages asks for {}",
                    o.input.display(),
                    question.ctxs.len(),
                    o.passages
                )));
            }
            Ok(encoding.encode_for_training(&question, tokenizer, 0, 0)?)
        })
        .collect::<Result<_, _>>()?;
    Ok(Batch { packed: PackedReaderBatch::new(&encoded)?, rows })
}

/// A reader's objective over batches that are encoded already.
struct Encoded {
    reader: ReaderObjective,
    batches: Vec<Batch>,
}

impl Encoded {
    /// Batch of step `i`, the warm-up being step 0.
    fn batch(&self, i: usize) -> &Batch {
        &self.batches[i % self.batches.len()]
    }
}

impl<D: Device> Objective<D> for Encoded {
    type Shard = PackedReaderBatch;

    fn layout(&self) -> &Layout {
        self.reader.model.layout()
    }
    fn examples(&self) -> usize {
        self.reader.used
    }
    fn shards(&self, update: &UpdateExamples, _micro: usize) -> Result<Vec<PackedReaderBatch>, TrainError> {
        let batch = self.batches.iter().find(|b| b.rows == update.rows);
        Ok(batch.map(|b| b.packed.clone()).into_iter().collect())
    }
    fn size(&self, shard: &PackedReaderBatch) -> ShardSize {
        Objective::<D>::size(&self.reader, shard)
    }
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &PackedReaderBatch,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome {
        self.reader.gradient_with(device, parameters, shard, draw, weight, gradients, buckets)
    }
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        self.reader.evaluate_among(world, device, parameters, interrupted)
    }
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        self.reader.save(device, parameters, folder)
    }
    fn fingerprint(&self) -> Map<String, Value> {
        Objective::<D>::fingerprint(&self.reader)
    }
}

fn train<D: RankDevice>(
    device: &D,
    objective: &Encoded,
    parameters: Arena<D>,
    o: &BenchOptions,
) -> Result<(Vec<f64>, Vec<f64>), TrainError> {
    let optim = OptimOptions {
        total_steps: o.steps as u64 + 1,
        optim: Optim::Adamw,
        weight_decay: 0.01,
        ..OptimOptions::default()
    };
    let plan = BatchPlan { global: o.questions, micro: o.questions, shards: 1, groups: 1 };
    let [first, second] = no_moments(device, optim.optim, objective.reader.model.layout(), None);
    let mut state = TrainState { step: 0, parameters, first, second };
    let mut stepper = Stepper::new(device, objective, plan, &optim, 0);
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for i in 0..=o.steps {
        let batch = objective.batch(i);
        let rows = batch.rows.clone();
        let start = Instant::now();
        let outcome = stepper.update(&mut state, &UpdateExamples { epoch: 0, rows })?;
        if i > 0 {
            times.push(start.elapsed().as_secs_f64());
        }
        losses.push(outcome.loss);
    }
    Ok((times, losses))
}

fn generate<D: Device>(
    device: &D,
    objective: &Encoded,
    parameters: &Arena<D>,
    o: &BenchOptions,
) -> Result<Vec<f64>, TrainError> {
    let mut predictor = objective.reader.predictor(device, parameters);
    predictor.decoding.min_length = ANSWER_TOKENS;
    let mut times = Vec::new();
    for i in 0..=o.steps {
        let batch = objective.batch(i);
        let start = Instant::now();
        device.run(|| predictor.answer_batch(&batch.packed))?;
        device.trim();
        if i > 0 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(times)
}

/// Floating-point operations of a step's matrix products, a multiply-add counted as two: the projections of encoder and
/// decoder, the vocabulary, and both products of every attention. A backward pass takes twice the forward's;
/// recomputing adds the encoder's forward once. What a kernel may do beyond this (such as forming the attention's
/// probabilities again) is not counted, so the share of the peak is a lower bound.
pub fn product_flops(c: &T5Config, batch: &PackedReaderBatch, mode: BenchMode, recompute: bool) -> f64 {
    let inner = (c.num_heads * c.d_kv) as f64;
    let (d, ff) = (c.d_model as f64, c.d_ff as f64);
    let feed_forward = 2.0 * d * ff * if c.gated { 3.0 } else { 2.0 };
    let own = 2.0 * 4.0 * d * inner;
    let tokens = batch.ids.len() as f64;
    let pairs: f64 = batch.offsets.windows(2).map(|w| f64::from(w[1] - w[0]) * f64::from(w[1] - w[0])).sum();
    let encoder = c.num_layers as f64 * (tokens * (own + feed_forward) + 4.0 * pairs * inner);
    let layers = c.num_decoder_layers as f64;
    let cross_keys = layers * tokens * 2.0 * d * 2.0 * inner;
    // Query and output of cross-attention, and everything else of a decoder token.
    let token = layers * (own + feed_forward + 2.0 * d * 2.0 * inner) + 2.0 * d * c.vocab_size as f64;
    match mode {
        BenchMode::Train => {
            let targets = batch.targets.len() as f64;
            let (queries, keys) = (Span::from_offsets(&batch.target_offsets), question_spans(batch));
            let spans = || queries.iter().zip(&keys).map(|(q, k)| (q.len() as f64, k.len() as f64));
            let own_pairs: f64 = spans().map(|(n, _)| n * (n + 1.0) / 2.0).sum();
            let cross_pairs: f64 = spans().map(|(n, k)| n * k).sum();
            let cross = if c.attends_to_states(&queries, &keys) {
                // Two products forward, five backward; divided by the three below.
                7.0 / 3.0 * 2.0 * cross_pairs * c.num_heads as f64 * d
            } else {
                tokens * 2.0 * d * 2.0 * inner + 4.0 * cross_pairs * inner
            };
            let decoder = layers * cross + targets * token + layers * 4.0 * own_pairs * inner;
            3.0 * (encoder + decoder) + if recompute { encoder } else { 0.0 }
        }
        BenchMode::Generate => {
            let steps = (ANSWER_TOKENS - 1) as f64;
            let questions = batch.questions() as f64;
            let attended = questions * steps * (steps + 1.0) / 2.0 + steps * tokens;
            encoder + cross_keys + questions * steps * token + layers * 4.0 * attended * inner
        }
    }
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
            let start = Instant::now();
            device.product(a.matrix(), b.matrix(), c.view_mut(), false);
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

    #[test]
    fn operations_are_those_counted_by_hand() {
        let config = T5Config {
            vocab_size: 11,
            d_model: 2,
            d_kv: 3,
            d_ff: 5,
            num_layers: 1,
            num_decoder_layers: 1,
            num_heads: 1,
            ..T5Config::of_size("small").unwrap()
        };
        let batch = PackedReaderBatch {
            ids: vec![0; 3],
            offsets: vec![0, 2, 3],
            question_sequences: vec![0, 2],
            targets: vec![0; 2],
            target_offsets: vec![0, 2],
            examples: vec![0],
        };
        // Multiply-adds: projections 4*2*3 = 24, feed-forward 2*2*5 = 20.
        let encoder = 3 * (24 + 20) + 2 * (4 + 1) * 3;
        let keys = 3 * 2 * 2 * 3;
        let decoder = 2 * (24 + 20 + 12 + 22) + 2 * (3 + 2 * 3) * 3;
        let train = |recompute| product_flops(&config, &batch, BenchMode::Train, recompute) as usize;
        assert_eq!(train(false), 2 * 3 * (encoder + keys + decoder));
        assert_eq!(train(true), 2 * (4 * encoder + 3 * (keys + decoder)));
        let answer = 19 * 78 + 2 * (19 * 20 / 2 + 19 * 3) * 3;
        let found = product_flops(&config, &batch, BenchMode::Generate, false) as usize;
        assert_eq!(found, 2 * (encoder + keys + answer));
    }
}
