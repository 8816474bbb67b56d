//! Text classification: cross-entropy of each text's label, or binary cross-entropy of every label, over the update's texts; measured by
//! micro F1 (with one label a text, that is accuracy). Source: what flair's TextClassifier and its trainer do.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::corpus::{Corpus, Split};
use tercio_data::shuffle::UpdateExamples;
use tercio_data::{Labels, Tokenizer};
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Span, Tape, Tensor};
use tercio_models::classifier::{self, Classifier};
use tercio_models::model_file::KeptTensor;

use crate::classify::{TextClassifier, WINDOW, measure_among};
use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize, shards_of};
use crate::options::Reduction;

pub mod loss;

use loss::ClassificationLoss;

/// Tokens of a batch of an evaluation at most.
const EVAL_TOKENS: usize = 8192;
/// Texts of one.
const EVAL_TEXTS: usize = 64;

/// A classifier's training data, model and measure.
pub struct ClassifierObjective {
    /// The model.
    pub model: Classifier,
    /// Fields of the `config.json` that the model came with.
    pub json: Map<String, Value>,
    /// Tensors that are saved as they came: nothing trains them.
    pub kept: Vec<KeptTensor>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Training, held-out and test documents.
    pub corpus: Corpus,
    /// The model's labels, by their names.
    pub labels: Labels,
    /// What is learnt.
    pub loss: ClassificationLoss,
    /// What an update's loss is.
    pub reduction: Reduction,
    /// Tokens of a text at most.
    pub maxlength: usize,
    /// Whether encoder layers are computed again in the backward pass.
    pub recompute: bool,
}

/// Some texts with their labels, packed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassifierShard {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where each text lies in `ids`.
    pub spans: Vec<Span>,
    /// Each text's labels, by their numbers in the model.
    pub labels: Vec<Vec<u32>>,
    /// Texts that reach the maximal length.
    pub full: u64,
}

impl ClassifierShard {
    /// Packs encoded texts with their labels.
    ///
    /// # Errors
    /// More than 2^32 - 1 tokens.
    pub fn new(texts: Vec<(Vec<u32>, Vec<u32>)>, maxlength: usize) -> Result<ClassifierShard, TrainError> {
        let mut shard = ClassifierShard::default();
        for (ids, labels) in texts {
            let start = shard.ids.len();
            shard.full += u64::from(ids.len() == maxlength);
            shard.ids.extend(ids);
            let place = |n: usize| {
                u32::try_from(n).map_err(|_| {
                    TrainError::Unusable(format!(
                        "expected a shard of at most {} tokens, found more; use a smaller --mini_batch_chunk_size",
                        u32::MAX
                    ))
                })
            };
            shard.spans.push(Span { start: place(start)?, end: place(shard.ids.len())? });
            shard.labels.push(labels);
        }
        Ok(shard)
    }
}

impl ClassifierObjective {
    /// A training document as token ids, and its labels by their numbers.
    fn encode(&self, row: usize) -> Result<(Vec<u32>, Vec<u32>), TrainError> {
        let document = self.corpus.train.get(row)?;
        let ids = self.tokenizer.encode_framed(&document.text, self.maxlength)?;
        if ids.is_empty() {
            let what = "the tokenizer makes none of it and puts none around it";
            return Err(document.place.error("a text of at least one token", "none", what).into());
        }
        let number = |label: &String| {
            self.labels.id(label).ok_or_else(|| {
                let what = "the file has changed since the run began";
                document.place.error("a label of the model", format!("{label:?}"), what)
            })
        };
        Ok((ids, document.labels.iter().map(number).collect::<Result<_, _>>()?))
    }

    /// The figures of a part of the corpus, by all ranks; on rank 0.
    ///
    /// # Errors
    /// As [`measure_among`].
    pub fn measure<D: Device>(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        split: &Split,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        let classifier = TextClassifier {
            device,
            model: &self.model,
            parameters,
            tokenizer: &self.tokenizer,
            maxlength: self.maxlength,
            batch_tokens: EVAL_TOKENS,
            batch_texts: EVAL_TEXTS,
            window: WINDOW,
        };
        let measured = measure_among(world, &classifier, split, interrupted, &mut |_, _| Ok(()))?;
        if !world.is_main() {
            return Ok(None);
        }
        let report = measured.report();
        let mut figures = vec![
            ("f1", report.micro.f1),
            ("precision", report.micro.precision),
            ("recall", report.micro.recall),
            ("macro_f1", report.macro_.f1),
            ("accuracy", report.accuracy),
        ];
        let shown =
            [("micro F1", report.micro.f1), ("macro F1", report.macro_.f1), ("accuracy", report.accuracy)];
        let mut text = Evaluation::of_shares(0.0, shown.to_vec()).text;
        if let Some(loss) = measured.loss() {
            figures.push(("loss", loss));
            text = format!("loss {loss:.4}, {text}");
        }
        Ok(Some(Evaluation { score: report.micro.f1, figures, text }))
    }
}

impl<D: Device> Objective<D> for ClassifierObjective {
    type Shard = ClassifierShard;

    fn layout(&self) -> &Layout {
        self.model.layout()
    }
    fn examples(&self) -> usize {
        self.corpus.train.len()
    }
    fn shards(&self, update: &UpdateExamples, micro: usize) -> Result<Vec<ClassifierShard>, TrainError> {
        shards_of(update, micro, |row| self.encode(row), |texts| ClassifierShard::new(texts, self.maxlength))
    }
    fn size(&self, shard: &ClassifierShard) -> ShardSize {
        let texts = shard.spans.len();
        let longest = shard.spans.iter().map(Span::len).max().unwrap_or(0);
        ShardSize {
            tokens: shard.ids.len() as u64,
            padded_tokens: (texts * longest) as u64,
            // Nothing to divide a sum by.
            count: if self.reduction == Reduction::Sum { 0 } else { texts as u64 },
            inputs: texts as u64,
            truncated: shard.full,
        }
    }
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &ClassifierShard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome {
        let mut tape = Tape::recording(device, parameters, Some(draw));
        let logits = self.model.logits(&mut tape, &shard.ids, &shard.spans, self.recompute);
        let (rows, columns) = (logits.tensor.rows, logits.tensor.columns);
        let values = device.read_f64(logits.tensor.view());
        let mut slopes = vec![0.0; values.len()];
        let mut loss = 0.0;
        for ((z, labels), g) in
            values.chunks_exact(columns).zip(&shard.labels).zip(slopes.chunks_exact_mut(columns))
        {
            loss += self.loss.of(z, labels, weight, g);
        }
        let slopes: Vec<f32> = slopes.iter().map(|&g| g as f32).collect();
        tape.inject(&logits, Tensor::from_values(device, rows, columns, &slopes));
        drop(logits);
        match buckets {
            Some(buckets) => tape.backward_with(gradients, buckets),
            None => drop(tape.backward(gradients, &[])),
        }
        ShardOutcome { loss: weight * loss }
    }
    fn smaller_shards(&self) -> Vec<String> {
        let recompute = (!self.recompute).then(|| "--recompute".to_owned());
        let tokens = (self.maxlength > 1).then(|| format!("--text_maxlength below {}", self.maxlength));
        recompute.into_iter().chain(tokens).collect()
    }
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        let Some(dev) = &self.corpus.dev else { return Ok(None) };
        self.measure(world, device, parameters, dev, interrupted)
    }
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        classifier::save(&self.model, parameters, &self.json, &self.kept, folder, device)?;
        self.tokenizer.copy_to(folder)?;
        Ok(())
    }
    fn fingerprint(&self) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("train_data".into(), self.corpus.train.documents().fingerprint().into());
        map.insert("examples".into(), self.corpus.train.len().into());
        map.insert("labels".into(), self.labels.fingerprint().into());
        if let Some(dev) = &self.corpus.dev {
            map.insert("eval_data".into(), dev.documents().fingerprint().into());
        }
        map
    }
}
