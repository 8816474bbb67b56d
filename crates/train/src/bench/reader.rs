//! A Fusion-in-Decoder reader: training steps, or answering.

use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use tercio_data::{PackedReaderBatch, Questions, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Device, Span};
use tercio_models::t5::T5Config;

use super::{
    Batch, BenchReport, BenchSettings, Encoded, Profiled, Work, product_peak, report, rows_of_batches, train,
};
use crate::error::TrainError;
use crate::objectives::reader::ReaderObjective;
use crate::predict::question_spans;
use crate::ranks::RankDevice;
use crate::setup::reader::{check_vocabulary, random_model};

/// Tokens of every generated answer, the start token counted; the end token is not taken before.
const ANSWER_TOKENS: usize = 20;

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
    /// Tokens of a passage at most.
    pub text_maxlength: usize,
    /// Steps and device.
    pub settings: BenchSettings,
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
    match &options.settings.profile {
        None => bench(device, options, tokenizer, cache),
        Some(profile) => bench(&Profiled::new(device, profile.clone()), options, tokenizer, cache),
    }
}

fn bench<D: RankDevice>(
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
    let batches = rows_of_batches(o.settings.steps, o.questions, questions.len())
        .into_iter()
        .map(|rows| encode(&questions, &tokenizer, &encoding, o, rows))
        .collect::<Result<_, _>>()?;
    let mut config = o.config.clone();
    config.dropout_rate = 0.1;
    let loaded = random_model(config, 0, device)?;
    let steps = o.settings.steps;
    let objective = Encoded {
        objective: ReaderObjective {
            model: loaded.model,
            json: loaded.json,
            tokenizer,
            encoding,
            used: questions.len(),
            train: questions,
            eval: None,
            seed: 0,
            label_smoothing: 0.0,
            recompute: o.settings.recompute,
            generation_max_length: ANSWER_TOKENS,
            eval_n_context: o.passages,
            eval_batch: o.questions,
            eval_print_freq: u64::MAX,
        },
        batches,
    };
    let peak = product_peak(device);
    let (times, losses) = match o.mode {
        BenchMode::Train => train(device, &objective, loaded.parameters, &o.settings)?,
        BenchMode::Generate => (generate(device, &objective, &loaded.parameters, &o.settings)?, Vec::new()),
    };
    let timed = || (1..=steps).map(|i| &objective.batch(i).shard);
    let flops = |shard| product_flops(&o.config, shard, o.mode, o.settings.recompute);
    let work = Work {
        mode: o.mode,
        size: o.size.clone(),
        questions: o.questions,
        passages: o.passages,
        tokens: timed().map(|shard| shard.ids.len() as f64).sum(),
        places: steps as f64 * o.questions as f64 * o.passages as f64 * o.text_maxlength as f64,
        flops: timed().map(flops).sum(),
        times,
        losses,
        peak,
    };
    Ok(report(device, &o.settings, work))
}

/// A batch of the items `rows`.
fn encode(
    questions: &Questions,
    tokenizer: &Tokenizer,
    encoding: &ReaderEncoding,
    o: &BenchOptions,
    rows: Vec<usize>,
) -> Result<Batch<PackedReaderBatch>, TrainError> {
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
    Ok(Batch { shard: PackedReaderBatch::new(&encoded)?, rows })
}

fn generate<D: Device>(
    device: &D,
    objective: &Encoded<ReaderObjective, PackedReaderBatch>,
    parameters: &Arena<D>,
    settings: &BenchSettings,
) -> Result<Vec<f64>, TrainError> {
    let mut predictor = objective.objective.predictor(device, parameters);
    predictor.decoding.min_length = ANSWER_TOKENS;
    let mut times = Vec::new();
    for i in 0..=settings.steps {
        let batch = objective.batch(i);
        let start = Instant::now();
        device.run(|| predictor.answer_batch(&batch.shard))?;
        device.trim();
        settings.timed(device, i, start, &mut times);
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

#[cfg(test)]
mod tests {
    use super::*;

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
