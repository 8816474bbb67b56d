//! A ColBERT model: contrastive steps and the encoding of documents, as `bench/peer_colbert.py` times PyLate. Texts become tokens while the
//! clock runs, as there.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde_json::Value;
use tercio_data::RetrievalExamples;
use tercio_data::retrieval::ContrastiveChoice;
use tercio_data::shuffle::UpdateExamples;
use tercio_models::bert::BertConfig;
use tercio_models::colbert::{ColbertHeaders, LoadedColbert};
use tercio_models::embedding_model::TextKind;
use tercio_models::encoder::EncoderConfig;
use tercio_models::folder::ModelFolder;

use super::encoder::encoder_flops;
use super::{
    BenchMode, BenchReport, BenchSettings, Profiled, Work, median, product_peak, report, rounded,
    rows_of_batches,
};
use crate::colbert::{ColbertEncoder, ColbertModel, TokenPooling};
use crate::error::TrainError;
use crate::objective::Objective;
use crate::objectives::colbert::{ColbertLoss, ColbertObjective};
use crate::objectives::retriever::batch::PassageChoice;
use crate::optimizer::no_moments;
use crate::options::{BatchPlan, ColbertTextOptions, Optim, OptimOptions};
use crate::ranks::RankDevice;
use crate::run::memory;
use crate::setup::colbert::encoding;
use crate::step::{Stepper, TrainState};

/// Width of a token's vector, as the peer asks for it.
const DIMENSION: usize = 128;
/// Documents of a batch, as the peer's.
const ENCODED: usize = 32;
/// Tokens of a batch that holds no more than that.
const TOKENS: usize = 1 << 20;

/// What to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColbertBenchMode {
    /// Contrastive steps on the triples of the input.
    Train,
    /// Encoding of its documents.
    Encode,
}

/// A benchmark's settings.
#[derive(Clone, Debug)]
pub struct ColbertBenchOptions {
    /// What to time.
    pub mode: ColbertBenchMode,
    /// JSON with `triples` (query, positive, negative) and `documents`.
    pub input: PathBuf,
    /// The model's folder.
    pub model: String,
    /// Triples of a step.
    pub batch: usize,
    /// Triples of a shard; 0: all of a step.
    pub micro: usize,
    /// Documents that are encoded.
    pub documents: usize,
    /// Steps and device.
    pub settings: BenchSettings,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ColbertBenchReport {
    /// Of training.
    Train {
        /// What all benchmarks say.
        #[serde(flatten)]
        report: Box<BenchReport>,
        /// Triples of a shard.
        micro: usize,
        /// Triples a second, by the median step.
        examples_per_second: f64,
    },
    /// Of encoding.
    Encode {
        /// This program's version.
        tercio: &'static str,
        /// `encode`
        mode: &'static str,
        /// Whether the factors of products are rounded to bf16.
        bf16: bool,
        /// Threads.
        threads: usize,
        /// Documents.
        documents: usize,
        /// Documents a second, of all.
        documents_per_second: f64,
        /// Vectors of their tokens.
        tokens_kept: usize,
        /// Seconds of the whole.
        seconds_per_step: f64,
        /// Number format and kernels of the device.
        arithmetic: String,
        /// Largest resident size of the process, 10^6 kB of 1024 bytes as the peer has it.
        peak_rss_gb: f64,
    },
}

/// Times forward, backward and AdamW of contrastive steps, or the encoding of documents; `cache` is a folder for a copy of the input.
///
/// # Errors
/// An input or model that cannot be used.
pub fn bench_colbert<D: RankDevice>(
    device: &D,
    options: &ColbertBenchOptions,
    cache: &Path,
) -> Result<ColbertBenchReport, TrainError> {
    match &options.settings.profile {
        None => bench(device, options, cache),
        Some(profile) => bench(&Profiled::new(device, profile.clone()), options, cache),
    }
}

fn bench<D: RankDevice>(
    device: &D,
    options: &ColbertBenchOptions,
    cache: &Path,
) -> Result<ColbertBenchReport, TrainError> {
    let text = std::fs::read(&options.input)
        .map_err(|source| TrainError::Read { path: options.input.display().to_string(), source })?;
    let input: Value = serde_json::from_slice(&text)
        .map_err(|e| TrainError::Unusable(format!("{}: expected JSON: {e}", options.input.display())))?;
    let headers = ColbertHeaders::read(&ModelFolder::open(&options.model)?, Some(DIMENSION))?;
    let model = ColbertModel::read(headers, None, |_| (), None, 0, device)?;
    match options.mode {
        ColbertBenchMode::Train => train(device, options, &input, model, cache),
        ColbertBenchMode::Encode => encode(device, options, &input, &model),
    }
}

fn list<'v>(options: &ColbertBenchOptions, input: &'v Value, name: &str) -> Result<&'v [Value], TrainError> {
    match input[name].as_array() {
        Some(list) if !list.is_empty() => Ok(list),
        _ => Err(TrainError::Unusable(format!(
            "{}: expected a list `{name}`, found none",
            options.input.display()
        ))),
    }
}

fn train<D: RankDevice>(
    device: &D,
    options: &ColbertBenchOptions,
    input: &Value,
    model: ColbertModel<D>,
    cache: &Path,
) -> Result<ColbertBenchReport, TrainError> {
    let (o, settings) = (options, &options.settings);
    let path = cache.join("triples.jsonl");
    let wrong = |source| TrainError::Write { path: path.display().to_string(), source };
    let mut file = std::fs::File::create(&path).map_err(wrong)?;
    for triple in list(o, input, "triples")? {
        writeln!(file, "{triple}").map_err(wrong)?;
    }
    let train = RetrievalExamples::open(&path, cache)?;
    let encoding = encoding(&model, &ColbertTextOptions::default())?;
    let micro = if o.micro == 0 { o.batch } else { o.micro };
    let plan = BatchPlan { global: o.batch, micro, shards: o.batch.div_ceil(micro), groups: 1 };
    let ColbertModel { loaded, tokenizer } = model;
    let LoadedColbert { model, parameters, json, kept, .. } = loaded;
    let objective = ColbertObjective {
        device: device.clone(),
        model,
        json,
        kept,
        tokenizer,
        encoding,
        choice: PassageChoice {
            scored: 0,
            live: false,
            contrastive: Some(ContrastiveChoice {
                hard_negatives: 1,
                other_negatives: 0,
                draw_positive: false,
                draw_negatives: false,
            }),
        },
        loss: ColbertLoss::Contrastive { temperature: 1.0, smoothing: 0.0 },
        retrieved: 0,
        zero_floor: false,
        one_shard: plan.shards == 1,
        teacher: None,
        used: train.len(),
        train,
        eval: None,
        collection: None,
        eval_n_context: usize::MAX,
        eval_batch: micro,
        eval_print_freq: u64::MAX,
        seed: 0,
        recompute: settings.recompute,
    };
    let peak = product_peak(device);
    // The peer's optimizer: no clipping, AdamW's own decay.
    let optim = OptimOptions {
        total_steps: settings.steps as u64 + 1,
        optim: Optim::Adamw,
        weight_decay: 0.01,
        lr: 3e-6,
        clip: 0.0,
        ..OptimOptions::default()
    };
    let [first, second] = no_moments(device, optim.optim, Objective::<D>::layout(&objective), None);
    let mut state = TrainState { step: 0, parameters, first, second };
    let batches = rows_of_batches(settings.steps, o.batch, objective.used);
    let mut stepper = Stepper::new(device, &objective, plan, &optim, 0);
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    let (mut tokens, mut places, mut flops) = (0.0, 0.0, 0.0);
    for i in 0..=settings.steps {
        let rows = batches[i % batches.len()].clone();
        let start = Instant::now();
        let outcome = stepper.update(&mut state, &UpdateExamples { epoch: 0, rows })?;
        settings.timed(device, i, start, &mut times);
        losses.push(outcome.loss);
        if i > 0 {
            tokens += outcome.size.tokens as f64;
            places += outcome.size.padded_tokens as f64;
            flops += step_flops(&objective, outcome.size.tokens, outcome.size.inputs);
        }
    }
    let rate = o.batch as f64 / median(&times).max(1e-9);
    let size = o.model.rsplit('/').find(|part| !part.is_empty()).unwrap_or(&o.model).to_owned();
    let (questions, mode) = (o.batch, BenchMode::Train);
    let work = Work { mode, size, questions, passages: 2, tokens, places, flops, times, losses, peak };
    let report = Box::new(report(device, settings, work));
    Ok(ColbertBenchReport::Train { report, micro, examples_per_second: rounded(rate, 2) })
}

/// Operations of a step's matrix products, of texts of their mean length: a backward pass takes twice the forward's; a first pass one more
/// forward, recomputing another. 0 for an encoder whose operations are not counted here.
fn step_flops<D: RankDevice>(objective: &ColbertObjective<D>, tokens: u64, texts: u64) -> f64 {
    let EncoderConfig::Bert(bert) = objective.model.encoder.config() else { return 0.0 };
    let bert: BertConfig = bert;
    let texts = texts.max(1) as usize;
    let encoder = encoder_flops(&bert, texts, tokens as usize / texts);
    let head = 2.0 * tokens as f64 * bert.hidden_size as f64 * objective.model.dimension() as f64;
    let again = usize::from(objective.recompute) + usize::from(!objective.one_shard);
    3.0 * (encoder + head) + again as f64 * encoder
}

fn encode<D: RankDevice>(
    device: &D,
    options: &ColbertBenchOptions,
    input: &Value,
    model: &ColbertModel<D>,
) -> Result<ColbertBenchReport, TrainError> {
    let documents = list(options, input, "documents")?;
    let texts: Vec<String> =
        documents.iter().take(options.documents).map(|d| d.as_str().unwrap_or_default().to_owned()).collect();
    let tokens = model.tokens()?;
    let encoder = ColbertEncoder {
        device,
        model: &model.loaded.model,
        parameters: &model.loaded.parameters,
        tokenizer: &model.tokenizer,
        tokens: &tokens,
        kind: TextKind::Passage,
        pooling: TokenPooling::NONE,
        batch_tokens: TOKENS,
        batch_texts: ENCODED,
        window: texts.len(),
    };
    let run = |texts: &[String]| device.run(|| encoder.rows(texts, &|| false));
    run(&texts[..texts.len().min(ENCODED)])?;
    let start = Instant::now();
    let rows = run(&texts)?.unwrap_or_default();
    let seconds = start.elapsed().as_secs_f64();
    Ok(ColbertBenchReport::Encode {
        tercio: env!("CARGO_PKG_VERSION"),
        mode: "encode",
        bf16: options.settings.bf16,
        threads: options.settings.threads,
        documents: texts.len(),
        documents_per_second: rounded(texts.len() as f64 / seconds.max(1e-9), 1),
        tokens_kept: rows.lengths.iter().map(|&n| n as usize).sum(),
        seconds_per_step: rounded(seconds, 3),
        arithmetic: device.arithmetic(),
        peak_rss_gb: rounded(memory::peak_resident().map_or(0.0, |b| b as f64 / 1024.0 / 1e6), 2),
    })
}
