//! ColBERT: queries and documents of many vectors, compared token by token. It learns a query's positive document against all others of the
//! update, or a teacher's scores of each query's documents.
//!
//! The contrastive loss is exact over the whole update, however it is cut: where it has several shards, a first pass embeds everything, the
//! loss and the gradient of every vector are computed (`pool.rs`), and the second pass carries them through the model. That is what PyLate
//! calls cached contrastive, but for its gradient, which there is as many times larger as the batch has queries: here it is the gradient of
//! the mean, as the loss is. An update of one shard needs no first pass.

use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

use serde_json::{Map, Value, json};
use tercio_comm::{CommError, World};
use tercio_data::shuffle::UpdateExamples;
use tercio_data::{RetrievalExample, RetrievalExamples, Tokenizer};
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Tape, Tensor};
use tercio_models::colbert::{self, Colbert};
use tercio_models::model_file::KeptTensor;

use crate::colbert::Collection;
use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize, Shown, shards_of};
use crate::objectives::retriever::Teacher;
use crate::objectives::retriever::batch::PassageChoice;

pub mod batch;
pub mod evaluate;
pub mod loss;
mod pool;

use batch::{ColbertEncoding, ColbertShard, EncodedQuery, Settled};
use loss::{Contrast, Distillation};
use pool::{WholeUpdate, show};

/// What a ColBERT model learns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ColbertLoss {
    /// The positive document among all documents of the update.
    Contrastive {
        /// Divisor of the scores.
        temperature: f64,
        /// Share of the target that is spread over all documents.
        smoothing: f64,
    },
    /// A teacher's scores.
    Distillation(Distillation),
}

/// A ColBERT model's training data, model and measure.
pub struct ColbertObjective<D: Device> {
    /// The device.
    pub device: D,
    /// The model.
    pub model: Colbert,
    /// Fields of the encoder's `config.json`.
    pub json: Map<String, Value>,
    /// Tensors that are saved as they came: nothing trains them.
    pub kept: Vec<KeptTensor>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// How inputs are made.
    pub encoding: ColbertEncoding,
    /// Which documents are used.
    pub choice: PassageChoice,
    /// What is learned.
    pub loss: ColbertLoss,
    /// XTR's scores: how many tokens of all documents are retrieved for a query's token; 0: MaxSim.
    pub retrieved: usize,
    /// Whether masked tokens of documents count as products of 0, as in PyLate.
    pub zero_floor: bool,
    /// Whether an update is one shard, so that its loss needs no pass before.
    pub one_shard: bool,
    /// A reader that scores documents on the fly.
    pub teacher: Option<Teacher<D>>,
    /// Training examples.
    pub train: RetrievalExamples,
    /// How many of them are used, from the start of the file.
    pub used: usize,
    /// Held-out examples.
    pub eval: Option<RetrievalExamples>,
    /// A collection with judged queries to search while training.
    pub collection: Option<Collection>,
    /// Documents of each query in evaluation, at most.
    pub eval_n_context: usize,
    /// Queries of an evaluation batch.
    pub eval_batch: usize,
    /// Batches between progress lines of an evaluation.
    pub eval_print_freq: u64,
    /// The run's seed, which draws documents.
    pub seed: u64,
    /// Whether encoder layers are computed again in the backward pass.
    pub recompute: bool,
}

impl<D: Device> ColbertObjective<D> {
    fn encode(&self, example: &RetrievalExample, epoch: u64) -> Result<EncodedQuery, TrainError> {
        let chosen = self.choice.of(example, self.seed, epoch)?;
        let teacher = self.teacher.as_ref().map(|t| (&t.encoding, &t.tokenizer));
        EncodedQuery::new(example, &chosen, (&self.encoding, &self.tokenizer), teacher)
    }
    /// Whether gradients come from a pass over all shards.
    fn settles(&self) -> bool {
        matches!(self.loss, ColbertLoss::Contrastive { .. }) && !self.one_shard
    }
    fn contrast(&self, temperature: f64, smoothing: f64, queries: usize) -> Contrast {
        Contrast { scale: 1.0 / temperature, smoothing, weight: 1.0 / queries.max(1) as f64 }
    }
    /// The loss of a shard by itself, on a tape that holds its vectors; records what carries its gradient back.
    fn record(
        &self,
        device: &D,
        tape: &mut Tape<'_, D>,
        vectors: &tercio_engine::Var<D>,
        shard: &ColbertShard,
        weight: f64,
    ) -> f64 {
        let mut shape = match self.loss {
            ColbertLoss::Contrastive { .. } => shard.all_pairs(),
            ColbertLoss::Distillation(_) => shard.own_pairs(|q| shard.gold[q].len()),
        };
        shape.retrieved = self.retrieved;
        let scored = tape.max_sim(vectors, vectors, &Rc::new(shape));
        let scores = device.read_f64(scored.tensor.view());
        let (mut loss, mut slopes) = (0.0, Vec::with_capacity(scores.len()));
        match self.loss {
            ColbertLoss::Contrastive { temperature, smoothing } => {
                let (count, c) = (shard.documents(), self.contrast(temperature, smoothing, shard.queries));
                for (row, positive) in scores.chunks(count.max(1)).zip(&shard.positives) {
                    let (positive, n) = (positive.unwrap_or(usize::MAX), c.normalizer(row));
                    loss += c.loss(row, positive, n);
                    slopes.extend(
                        row.iter().enumerate().map(|(d, &s)| c.slope(s, d == positive, n, count) as f32),
                    );
                }
            }
            ColbertLoss::Distillation(d) => {
                let mut rest = scores.as_slice();
                for gold in shard.gold.iter().filter(|gold| !gold.is_empty()) {
                    let (own, tail) = rest.split_at(gold.len());
                    rest = tail;
                    let (part, slope) = d.divergence(own, gold);
                    loss += weight * part;
                    slopes.extend(slope.iter().map(|s| (weight * s) as f32));
                }
            }
        }
        if !slopes.is_empty() {
            tape.inject(&scored, Tensor::from_values(device, slopes.len(), 1, &slopes));
        }
        loss
    }
}

impl<D: Device> Objective<D> for ColbertObjective<D> {
    type Shard = ColbertShard;

    fn layout(&self) -> &Layout {
        self.model.layout()
    }
    fn examples(&self) -> usize {
        self.used
    }
    fn shards(&self, update: &UpdateExamples, micro: usize) -> Result<Vec<ColbertShard>, TrainError> {
        let encode = |row| self.encode(&self.train.get(row)?, update.epoch);
        shards_of(update, micro, encode, |queries| ColbertShard::new(queries, self.zero_floor))
    }
    fn size(&self, shard: &ColbertShard) -> ShardSize {
        let (query, document) = self.encoding.tokens.lengths();
        ShardSize {
            tokens: shard.texts.ids.len() as u64,
            padded_tokens: (shard.queries * query + shard.documents() * document) as u64,
            count: shard.queries as u64,
            inputs: shard.texts.spans.len() as u64,
            truncated: shard.full,
        }
    }
    fn has_first_pass(&self) -> bool {
        self.settles() || self.teacher.is_some()
    }
    fn first_pass(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &mut ColbertShard,
        draw: Draw,
    ) -> Result<Shown, TrainError> {
        if let (Some(teacher), Some(taught)) = (&self.teacher, &shard.taught) {
            let scores = teacher.finite_scores(device, taught)?;
            let read = shard.gold.iter_mut().zip(&shard.scored).filter(|(_, scored)| **scored > 0);
            for ((gold, _), scores) in read.zip(scores) {
                *gold = scores;
            }
        }
        if !self.settles() {
            return Ok(Shown::default());
        }
        let mut tape = Tape::passing(device, parameters, draw);
        let vectors = self.model.embed(&mut tape, shard.texts.rows(), false);
        Ok(show(shard, &vectors.tensor, device))
    }
    fn settle(
        &self,
        world: &World,
        shown: &[Shown],
        own: Range<usize>,
        shards: &mut [ColbertShard],
    ) -> Result<(), TrainError> {
        let (ColbertLoss::Contrastive { temperature, smoothing }, true) = (self.loss, self.settles()) else {
            return Ok(());
        };
        let width = self.model.dimension();
        let update = WholeUpdate::new(shown, width).ok_or_else(|| {
            CommError::Protocol("a rank sent vectors that do not fit its queries and documents".into())
        })?;
        let contrast = self.contrast(temperature, smoothing, update.len());
        let settled = update.settle(world, &self.device, width, (contrast, self.retrieved), own)?;
        for (shard, (loss, gradients)) in shards.iter_mut().zip(settled) {
            shard.settled = Some(Settled { loss, gradients });
        }
        Ok(())
    }
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &ColbertShard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome {
        let mut tape = Tape::recording(device, parameters, Some(draw));
        let vectors = self.model.embed(&mut tape, shard.texts.rows(), self.recompute);
        let loss = match &shard.settled {
            Some(settled) => {
                let (rows, columns) = (vectors.tensor.rows, vectors.tensor.columns);
                tape.inject(&vectors, Tensor::from_values(device, rows, columns, &settled.gradients));
                settled.loss
            }
            None => self.record(device, &mut tape, &vectors, shard, weight),
        };
        drop(vectors);
        match buckets {
            Some(buckets) => tape.backward_with(gradients, buckets),
            None => drop(tape.backward(gradients, &[])),
        }
        ShardOutcome { loss }
    }
    fn smaller_shards(&self) -> Vec<String> {
        let recompute = (!self.recompute).then(|| "--recompute".to_owned());
        let below = |flag: &str, now: usize| (now > 1).then(|| format!("{flag} below {now}"));
        let scored = below("--n_context", self.choice.scored);
        let negatives = self.choice.contrastive.and_then(|c| below("--hard_negatives", c.hard_negatives));
        let tokens = below("--document_length", self.encoding.tokens.lengths().1);
        [recompute, scored, negatives, tokens].into_iter().flatten().collect()
    }
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        self.evaluation(world, device, parameters, interrupted)
    }
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        colbert::save(&self.model, parameters, &self.json, &self.kept, folder, device)?;
        self.tokenizer.copy_to(folder)?;
        Ok(())
    }
    fn fingerprint(&self) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("train_data".into(), self.train.fingerprint().into());
        map.insert("examples".into(), self.used.into());
        if let Some(teacher) = &self.teacher {
            map.insert("teacher".into(), teacher.fingerprint.clone().into());
        }
        // Both say which checkpoint is the best.
        let eval = self.eval.as_ref().map(|eval| Value::from(eval.fingerprint()));
        let measured = match &self.collection {
            Some(collection) => Some(json!([eval, collection.fingerprint()])),
            None => eval,
        };
        map.extend(measured.map(|measured| ("eval_data".to_owned(), measured)));
        map
    }
}
