//! A text classifier: training steps, or the labels of texts, as `bench/peer_classifier.py` times transformers: the same texts and model,
//! labels made up. Training texts are encoded before the clock starts; of prediction the encoding is a part.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Map, Value, json};
use tercio_data::corpus::{Corpus, CorpusSettings, Documents};
use tercio_data::shuffle::UpdateExamples;
use tercio_data::{Labels, Tokenizer};
use tercio_models::bert::BertConfig;
use tercio_models::classifier::{ClassifierConfig, ClassifierHeaders, LoadedClassifier};
use tercio_models::encoder::EncoderConfig;
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::Pooling;

use super::encoder::encoder_flops;
use super::{
    Batch, BenchMode, BenchReport, BenchSettings, Encoded, Profiled, Work, median, product_peak, report,
    rounded, rows_of_batches, train,
};
use crate::classify::{TextClassifier, predicted};
use crate::error::TrainError;
use crate::objective::Objective;
use crate::objectives::classifier::loss::ClassificationLoss;
use crate::objectives::classifier::{ClassifierObjective, ClassifierShard};
use crate::options::Reduction;
use crate::ranks::RankDevice;
use crate::run::memory;

/// Labels of an encoder that has none.
const LABELS: usize = 8;
/// Tokens of a batch that holds no more than that.
const TOKENS: usize = 1 << 20;

/// What to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassifierBenchMode {
    /// Forward, backward, clipping and AdamW on one batch.
    Train,
    /// The labels of all texts.
    Predict,
}

/// A benchmark's settings.
#[derive(Clone, Debug)]
pub struct ClassifierBenchOptions {
    /// What to time.
    pub mode: ClassifierBenchMode,
    /// JSON lines with `text`, or one object of JSON with a list `documents`.
    pub input: PathBuf,
    /// Folder of an encoder or a classifier, or a hub name.
    pub model: String,
    /// Texts of a batch.
    pub batch: usize,
    /// Tokens of a text at most.
    pub maxlength: usize,
    /// Steps and device.
    pub settings: BenchSettings,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ClassifierBenchReport {
    /// Of training.
    Train {
        /// What all benchmarks say.
        #[serde(flatten)]
        report: Box<BenchReport>,
        /// Texts a second, by the median step.
        texts_per_second: f64,
    },
    /// Of prediction.
    Predict {
        /// This program's version.
        tercio: &'static str,
        /// `predict`
        mode: &'static str,
        /// Whether the factors of products are rounded to bf16.
        bf16: bool,
        /// Threads.
        threads: usize,
        /// Texts of a step.
        texts: usize,
        /// Texts a second, by the median step.
        texts_per_second: f64,
        /// Median of the steps, each of which gives all texts their labels.
        seconds_per_step: f64,
        /// Number format and kernels of the device.
        arithmetic: String,
        /// Largest resident size of the process, 10^6 kB of 1024 bytes as the peer has it.
        peak_rss_gb: f64,
        /// Where the time went, if it was asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        profile: Option<Vec<super::ProfileLine>>,
    },
}

/// Times a classifier; `cache` is a folder for a copy of the input.
///
/// # Errors
/// An input or model that cannot be used.
pub fn bench_classifier<D: RankDevice>(
    device: &D,
    options: &ClassifierBenchOptions,
    cache: &Path,
) -> Result<ClassifierBenchReport, TrainError> {
    match &options.settings.profile {
        None => bench(device, options, cache),
        Some(profile) => bench(&Profiled::new(device, profile.clone()), options, cache),
    }
}

fn bench<D: RankDevice>(
    device: &D,
    options: &ClassifierBenchOptions,
    cache: &Path,
) -> Result<ClassifierBenchReport, TrainError> {
    let texts = texts(&options.input)?;
    if texts.len() < options.batch {
        return Err(TrainError::Options(format!(
            "--batch {}: {} has only {} texts",
            options.batch,
            options.input.display(),
            texts.len()
        )));
    }
    let folder = ModelFolder::open(&options.model)?;
    let headers = ClassifierHeaders::read(&folder)?;
    let labels = match headers.is_classifier {
        true => headers.config.labels.clone(),
        false => (0..LABELS).map(|i| i.to_string()).collect(),
    };
    let config = ClassifierConfig { labels, ..headers.config.clone() };
    let loaded = LoadedClassifier::with_config(headers, config, 0, device)?;
    let tokenizer = Tokenizer::load(folder.path())?;
    let known = loaded.model.config.encoder.vocab_size();
    if tokenizer.vocab_size() > known {
        return Err(TrainError::Vocabulary { tokenizer: tokenizer.vocab_size(), model: known });
    }
    match options.mode {
        ClassifierBenchMode::Train => steps(device, options, &texts, loaded, tokenizer, cache),
        ClassifierBenchMode::Predict => predict(device, options, &texts, &loaded, &tokenizer),
    }
}

/// The texts of lines of JSON, or of one object.
fn texts(path: &Path) -> Result<Vec<String>, TrainError> {
    let bytes = std::fs::read(path)
        .map_err(|source| TrainError::Read { path: path.display().to_string(), source })?;
    let wrong = |line: usize, what: &str| {
        TrainError::Unusable(format!("{}, line {line}: expected {what}", path.display()))
    };
    if path.extension().is_none_or(|ending| ending != "jsonl") {
        let input: Value =
            serde_json::from_slice(&bytes).map_err(|e| wrong(e.line(), &format!("JSON: {e}")))?;
        let list = input["documents"].as_array().into_iter().flatten();
        return Ok(list.filter_map(|d| d.as_str().map(str::to_owned)).collect());
    }
    let lines = bytes.split(|b| *b == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
    let text = |(i, line): (usize, &[u8])| {
        let object: Option<Map<String, Value>> = serde_json::from_slice(line).ok();
        let text = object.as_ref().and_then(|o| o.get("text")?.as_str()).map(str::to_owned);
        text.ok_or_else(|| wrong(i + 1, "an object with a `text`"))
    };
    lines.map(text).collect()
}

fn steps<D: RankDevice>(
    device: &D,
    options: &ClassifierBenchOptions,
    texts: &[String],
    loaded: LoadedClassifier<D>,
    tokenizer: Tokenizer,
    cache: &Path,
) -> Result<ClassifierBenchReport, TrainError> {
    let (o, settings) = (options, &options.settings);
    let LoadedClassifier { model, parameters, json, kept, .. } = loaded;
    let path = cache.join("labelled.jsonl");
    let wrong = |source| TrainError::Write { path: path.display().to_string(), source };
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).map_err(wrong)?);
    let names = &model.config.labels;
    for (i, text) in texts.iter().enumerate() {
        writeln!(file, "{}", json!({"text": text, "label": names[i % names.len()]})).map_err(wrong)?;
    }
    file.flush().map_err(wrong)?;
    let corpus =
        CorpusSettings { cut_dev: false, cut_test: false, multi_label: true, ..CorpusSettings::default() };
    let corpus = Corpus::new(Documents::open(&path, cache)?, None, None, &corpus, &mut |_| {})?;
    let labels = Labels::from_names(names.clone())?;
    let loss = ClassificationLoss { multi_label: model.config.multi_label, weights: None, smoothing: 0.0 };
    let maxlength = o.maxlength.min(model.config.encoder.max_tokens());
    let recompute = settings.recompute;
    let reduction = Reduction::Mean;
    let config = model.config.clone();
    let objective = ClassifierObjective {
        model,
        json,
        kept,
        tokenizer,
        corpus,
        labels,
        loss,
        reduction,
        maxlength,
        recompute,
    };
    let batches = rows_of_batches(settings.steps, o.batch, texts.len()).into_iter().map(|rows| {
        let update = UpdateExamples { epoch: 0, rows: rows.clone() };
        let shard: ClassifierShard = Objective::<D>::shards(&objective, &update, o.batch)?.remove(0);
        Ok(Batch { rows, shard })
    });
    let batches = batches.collect::<Result<_, TrainError>>()?;
    let objective = Encoded { objective, batches };
    let peak = product_peak(device);
    let (times, losses) = train(device, &objective, parameters, settings)?;
    let rate = o.batch as f64 / median(&times).max(1e-9);
    let timed = || (1..=settings.steps).map(|i| &objective.batch(i).shard);
    let passes = if recompute { 4.0 } else { 3.0 };
    let work = Work {
        mode: BenchMode::Train,
        size: name(&o.model),
        questions: o.batch,
        passages: 0,
        tokens: timed().map(|s| s.ids.len() as f64).sum(),
        places: timed().map(|s| Objective::<D>::size(&objective, s).padded_tokens as f64).sum(),
        flops: timed().map(|s| passes * flops(&config, s)).sum(),
        times,
        losses,
        peak,
    };
    let report = Box::new(report(device, settings, work));
    Ok(ClassifierBenchReport::Train { report, texts_per_second: rounded(rate, 2) })
}

/// Operations of a forward pass's matrix products; 0 for an encoder whose operations are not counted here. Where first tokens are read, the last
/// layer has keys and values of all tokens and all else of one a text.
fn flops(config: &ClassifierConfig, shard: &ClassifierShard) -> f64 {
    let EncoderConfig::Bert(bert) = &config.encoder else { return 0.0 };
    let all =
        |bert: &BertConfig| -> f64 { shard.spans.iter().map(|s| encoder_flops(bert, 1, s.len())).sum() };
    if config.pooling == Pooling::Mean {
        return all(bert);
    }
    let layers = bert.num_hidden_layers.saturating_sub(1);
    let [d, ff, tokens, texts] =
        [bert.hidden_size, bert.intermediate_size, shard.ids.len(), shard.spans.len()].map(|n| n as f64);
    let last = tokens * 2.0 * 2.0 * d * d + texts * 2.0 * (2.0 * d * d + 2.0 * d * ff) + 4.0 * tokens * d;
    all(&BertConfig { num_hidden_layers: layers, ..bert.clone() }) + last
}

fn name(model: &str) -> String {
    model.rsplit('/').find(|part| !part.is_empty()).unwrap_or(model).to_owned()
}

fn predict<D: RankDevice>(
    device: &D,
    options: &ClassifierBenchOptions,
    texts: &[String],
    loaded: &LoadedClassifier<D>,
    tokenizer: &Tokenizer,
) -> Result<ClassifierBenchReport, TrainError> {
    let (o, settings) = (options, &options.settings);
    let config = &loaded.model.config;
    let classifier = TextClassifier {
        device,
        model: &loaded.model,
        parameters: &loaded.parameters,
        tokenizer,
        maxlength: o.maxlength.min(config.encoder.max_tokens()),
        batch_tokens: TOKENS,
        batch_texts: o.batch,
        window: texts.len(),
    };
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let labels = |texts: &[&str]| -> Result<usize, TrainError> {
        let logits = device.run(|| classifier.logits(texts, &|| false))?.unwrap_or_default();
        device.trim();
        Ok(logits.chunks_exact(config.labels.len()).map(|row| predicted(config, row).chosen.len()).sum())
    };
    let (mut times, mut start) = (Vec::new(), Instant::now());
    labels(&texts[..o.batch])?;
    settings.timed(device, 0, start, &mut times);
    let begin = Instant::now();
    for i in 1..=settings.steps {
        start = Instant::now();
        labels(&texts)?;
        settings.timed(device, i, start, &mut times);
    }
    let total = begin.elapsed().as_secs_f64();
    let profile = settings.profile.as_ref().map(super::Profile::so_far);
    let seconds = median(&times);
    Ok(ClassifierBenchReport::Predict {
        tercio: env!("CARGO_PKG_VERSION"),
        mode: "predict",
        bf16: settings.bf16,
        threads: settings.threads,
        texts: texts.len(),
        texts_per_second: rounded(texts.len() as f64 / seconds.max(1e-9), 1),
        seconds_per_step: rounded(seconds, 3),
        arithmetic: device.arithmetic(),
        peak_rss_gb: rounded(memory::peak_resident().map_or(0.0, |b| b as f64 / 1024.0 / 1e6), 2),
        profile: profile.map(|p| p.lines(times.len(), total, product_peak(device))),
    })
}
