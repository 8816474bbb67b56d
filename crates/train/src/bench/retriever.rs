//! A retriever: steps of distillation, as `bench/peer_retriever.py` has them.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tercio_data::template::TextTemplate;
use tercio_data::{Questions, RetrievalExamples, Tokenizer};
use tercio_engine::Span;
use tercio_models::bert::BertConfig;
use tercio_models::encoder::EncoderConfig;
use tercio_models::retriever::{LoadedRetriever, RetrieverConfig};

use super::encoder::encoder_flops;
use super::{
    Batch, BenchMode, BenchReport, BenchSettings, Encoded, Profiled, Work, product_peak, report,
    rows_of_batches, train,
};
use crate::error::TrainError;
use crate::objectives::retriever::batch::{
    EncodedQuestion, PassageChoice, RetrieverEncoding, RetrieverShard,
};
use crate::objectives::retriever::loss::Scale;
use crate::objectives::retriever::{RetrieverLosses, RetrieverObjective};
use crate::options::KlMean;
use crate::ranks::RankDevice;

/// From one passage to the next the teacher's score falls by so much.
const FALL: f64 = 0.1;

/// A benchmark's settings.
#[derive(Clone, Debug)]
pub struct RetrieverBenchOptions {
    /// File of questions with passages.
    pub input: PathBuf,
    /// Questions a step.
    pub questions: usize,
    /// Passages a question, from the start of the file's list.
    pub passages: usize,
    /// Tokens of a question at most.
    pub question_maxlength: usize,
    /// Tokens of a passage at most.
    pub passage_maxlength: usize,
    /// Steps and device.
    pub settings: BenchSettings,
}

/// Times forward, backward, clipping and AdamW of BERT-base with a projection to 768 and dropout 0.1; `cache` is a folder for the
/// input's index.
///
/// # Errors
/// Fewer passages than asked for, an input or tokenizer that cannot be used.
pub fn bench_retriever<D: RankDevice>(
    device: &D,
    options: &RetrieverBenchOptions,
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
    options: &RetrieverBenchOptions,
    tokenizer: Tokenizer,
    cache: &Path,
) -> Result<BenchReport, TrainError> {
    let o = options;
    let bert = BertConfig::base();
    let config = RetrieverConfig {
        question_maxlength: o.question_maxlength,
        passage_maxlength: o.passage_maxlength,
        ..RetrieverConfig::new(EncoderConfig::Bert(bert.clone()))
    };
    let (ids, rows) = (tokenizer.vocab_size(), config.encoder.vocab_size());
    if ids > rows {
        return Err(TrainError::Vocabulary { tokenizer: ids, model: rows });
    }
    let encoding = RetrieverEncoding {
        question_maxlength: o.question_maxlength,
        passage_maxlength: o.passage_maxlength,
        question_template: TextTemplate::question(),
        passage_template: TextTemplate::passage(false),
        pad_questions: false,
        pad_passages: false,
    };
    let questions = Questions::open(&o.input, cache)?;
    let batches = rows_of_batches(o.settings.steps, o.questions, questions.len())
        .into_iter()
        .map(|rows| encode(&questions, &tokenizer, &encoding, o, rows))
        .collect::<Result<_, _>>()?;
    let loaded = LoadedRetriever::random(config.clone(), 0, device);
    let objective = RetrieverObjective {
        losses: RetrieverLosses {
            kl: 1.0,
            kl_mean: KlMean::Element,
            contrastive: 0.0,
            label_smoothing: 0.0,
            scale: Scale::new(loaded.model.score_divisor(), 1.0, 1.0),
        },
        model: loaded.model,
        json: loaded.json,
        kept: loaded.kept,
        tokenizer,
        encoding,
        choice: PassageChoice { scored: o.passages, live: false, contrastive: None },
        teacher: None,
        used: questions.len(),
        train: RetrievalExamples::open(&o.input, cache)?,
        eval: None,
        eval_n_context: o.passages,
        eval_batch: o.questions,
        eval_print_freq: u64::MAX,
        seed: 0,
        recompute: o.settings.recompute,
    };
    let objective = Encoded { objective, batches };
    let peak = product_peak(device);
    let steps = o.settings.steps;
    let (times, losses) = train(device, &objective, loaded.parameters, &o.settings)?;
    let timed = || (1..=steps).map(|i| &objective.batch(i).shard);
    let padded = o.questions * (o.question_maxlength + o.passages * o.passage_maxlength);
    let work = Work {
        mode: BenchMode::Train,
        size: "bert-base".into(),
        questions: o.questions,
        passages: o.passages,
        tokens: timed().map(|shard| shard.ids.len() as f64).sum(),
        places: steps as f64 * padded as f64,
        flops: timed()
            .map(|shard| step_flops(&bert, config.dimension(), &shard.spans, o.settings.recompute))
            .sum(),
        times,
        losses,
        peak,
    };
    Ok(report(device, &o.settings, work))
}

/// Operations of a step's matrix products: a backward pass takes twice the forward's, recomputing the encoder's once more.
fn step_flops(bert: &BertConfig, dimension: usize, spans: &[Span], recompute: bool) -> f64 {
    let encoder: f64 = spans.iter().map(|s| encoder_flops(bert, 1, s.len())).sum();
    let tokens: usize = spans.iter().map(Span::len).sum();
    let head = 2.0 * tokens as f64 * bert.hidden_size as f64 * dimension as f64;
    3.0 * (encoder + head) + if recompute { encoder } else { 0.0 }
}

fn encode(
    questions: &Questions,
    tokenizer: &Tokenizer,
    encoding: &RetrieverEncoding,
    o: &RetrieverBenchOptions,
    rows: Vec<usize>,
) -> Result<Batch<RetrieverShard>, TrainError> {
    let encoded: Vec<EncodedQuestion> = rows
        .par_iter()
        .map(|&row| {
            let item = questions.get(row)?;
            if item.ctxs.len() < o.passages {
                return Err(TrainError::Unusable(format!(
                    "{}: item {row} has {} passages, --passages asks for {}",
                    o.input.display(),
                    item.ctxs.len(),
                    o.passages
                )));
            }
            let (question, full) = encoding.question(&item.question, tokenizer)?;
            let mut full = u64::from(full);
            let mut passages = Vec::with_capacity(o.passages);
            for passage in &item.ctxs[..o.passages] {
                let (ids, at_most) = encoding.passage(passage, tokenizer)?;
                full += u64::from(at_most);
                passages.push(ids);
            }
            let gold = (0..o.passages).map(|k| -FALL * k as f64).collect();
            let scored = o.passages;
            let (positive, other_positives, taught) = (None, Vec::new(), None);
            Ok(EncodedQuestion { question, passages, full, scored, gold, positive, other_positives, taught })
        })
        .collect::<Result<_, _>>()?;
    Ok(Batch { shard: RetrieverShard::new(encoded)?, rows })
}
