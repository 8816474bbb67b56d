//! The retriever: one encoder for questions and passages. It learns a reader's scores of each question's passages
//! (Izacard and Grave, 2021), or sets each question's positive passage against all others of the update (Karpukhin et al.,
//! 2020), or both. With the latter an update has two passes: the first embeds everything, the exact loss over all vectors is
//! computed, and the second carries its gradients through the model (Gao et al., 2021, "GradCache").

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};
use tercio_comm::{CommError, World};
use tercio_data::shuffle::UpdateExamples;
use tercio_data::{RetrievalExample, RetrievalExamples, Tokenizer};
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Tape, Tensor};
use tercio_models::model_file::KeptTensor;
use tercio_models::retriever::{self, Retriever};

use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize, Shown, shards_of};
use crate::options::KlMean;

pub mod batch;
pub mod evaluate;
pub mod loss;
pub mod measure;
mod teacher;

use batch::{EncodedQuestion, PassageChoice, RetrieverEncoding, RetrieverShard, Settled};
use loss::{Pool, Rows, Scale};
pub use teacher::Teacher;

/// What a retriever learns from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetrieverLosses {
    /// Weight of the divergence from a teacher's scores; 0: none is learned.
    pub kl: f64,
    /// What the divergence is a mean over.
    pub kl_mean: KlMean,
    /// Weight of the contrastive loss; 0: there is none.
    pub contrastive: f64,
    /// Share of the contrastive target that is spread over all passages.
    pub label_smoothing: f64,
    /// How scores are made.
    pub scale: Scale,
}

/// A retriever's training data, model and measure.
pub struct RetrieverObjective<D: Device> {
    /// The model.
    pub model: Retriever,
    /// Fields of the `config.json` that the model came with.
    pub json: Map<String, Value>,
    /// Tensors that are saved as they came: nothing trains them.
    pub kept: Vec<KeptTensor>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// How inputs are made.
    pub encoding: RetrieverEncoding,
    /// Which passages are used.
    pub choice: PassageChoice,
    /// What is learned.
    pub losses: RetrieverLosses,
    /// A reader that scores passages on the fly.
    pub teacher: Option<Teacher<D>>,
    /// Training examples.
    pub train: RetrievalExamples,
    /// How many of them are used, from the start of the file.
    pub used: usize,
    /// Held-out examples.
    pub eval: Option<RetrievalExamples>,
    /// Passages of each question in evaluation, at most.
    pub eval_n_context: usize,
    /// Questions of an evaluation batch.
    pub eval_batch: usize,
    /// Batches between progress lines of an evaluation.
    pub eval_print_freq: u64,
    /// The run's seed, which draws passages.
    pub seed: u64,
    /// Whether encoder layers are computed again in the backward pass.
    pub recompute: bool,
}

impl<D: Device> RetrieverObjective<D> {
    fn contrasts(&self) -> bool {
        self.losses.contrastive > 0.0
    }
    fn encode(&self, example: &RetrievalExample, epoch: u64) -> Result<EncodedQuestion, TrainError> {
        let chosen = self.choice.of(example, self.seed, epoch)?;
        let teacher = self.teacher.as_ref().map(|t| (&t.encoding, &t.tokenizer));
        EncodedQuestion::new(example, &chosen, (&self.encoding, &self.tokenizer), teacher)
    }
    /// What the divergence of `questions` questions with `scored` scored passages in all is divided by.
    fn kl_count(&self, questions: usize, scored: usize) -> usize {
        match self.losses.kl_mean {
            KlMean::Element => scored,
            KlMean::Batch => questions,
        }
    }
    /// The divergence of a shard whose vectors are `values`: each question's with `weight`, one after the other; adds to
    /// `gradients`.
    fn distil(&self, shard: &RetrieverShard, values: &[f64], weight: f64, gradients: &mut [f64]) -> f64 {
        let width = self.model.config.dimension();
        let at = shard.questions * width;
        let (questions, passages) = values.split_at(at);
        let (question_gradients, passage_gradients) = gradients.split_at_mut(at);
        let mut loss = 0.0;
        for q in 0..shard.questions {
            let own = q * width..(q + 1) * width;
            let theirs = shard.passage_offsets[q] * width..shard.passage_offsets[q + 1] * width;
            let rows = Rows {
                question: &questions[own.clone()],
                passages: &passages[theirs.clone()],
                question_gradient: &mut question_gradients[own],
                passage_gradients: &mut passage_gradients[theirs],
            };
            loss += loss::distil(rows, &shard.gold[q], self.losses.scale, weight);
        }
        loss
    }
}

/// The part of a shard that all others see: questions, passages, scored passages, then each question's positive and for each
/// passage the question whose row it is left out of; 2^64 - 1 stands for none.
fn counts(shard: &RetrieverShard) -> Vec<u64> {
    let head = [shard.questions, shard.passages(), shard.scored_passages()];
    let places = shard.positives.iter().chain(&shard.left_out).map(|p| p.map_or(u64::MAX, |p| p as u64));
    head.into_iter().map(|n| n as u64).chain(places).collect()
}

impl<D: Device> Objective<D> for RetrieverObjective<D> {
    type Shard = RetrieverShard;

    fn layout(&self) -> &Layout {
        self.model.layout()
    }
    fn examples(&self) -> usize {
        self.used
    }
    fn shards(&self, update: &UpdateExamples, micro: usize) -> Result<Vec<RetrieverShard>, TrainError> {
        let encode = |row| self.encode(&self.train.get(row)?, update.epoch);
        shards_of(update, micro, encode, RetrieverShard::new)
    }
    fn size(&self, shard: &RetrieverShard) -> ShardSize {
        let padded = shard.questions * self.encoding.question_maxlength
            + shard.passages() * self.encoding.passage_maxlength;
        let count = match self.contrasts() {
            true => shard.questions,
            false => self.kl_count(shard.questions, shard.scored_passages()),
        };
        ShardSize {
            tokens: shard.ids.len() as u64,
            padded_tokens: padded as u64,
            count: count as u64,
            inputs: shard.spans.len() as u64,
            truncated: shard.full,
        }
    }
    fn has_first_pass(&self) -> bool {
        self.contrasts() || self.teacher.is_some()
    }
    fn first_pass(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &mut RetrieverShard,
        draw: Draw,
    ) -> Result<Shown, TrainError> {
        if let Some(teacher) = &self.teacher {
            teacher.score(device, shard)?;
        }
        if !self.contrasts() {
            return Ok(Shown::default());
        }
        let mut tape = Tape::passing(device, parameters, draw);
        let vectors = self.model.embed(&mut tape, &shard.ids, &shard.spans, false);
        Ok(Shown { counts: counts(shard), values: device.read_f64(vectors.tensor.view()) })
    }
    fn settle(
        &self,
        world: &World,
        shown: &[Shown],
        own: Range<usize>,
        shards: &mut [RetrieverShard],
    ) -> Result<(), TrainError> {
        if !self.contrasts() {
            return Ok(());
        }
        let width = self.model.config.dimension();
        let update = WholeUpdate::new(shown, width).ok_or_else(|| {
            CommError::Protocol("a rank sent vectors that do not fit its questions and passages".into())
        })?;
        let pool = Pool {
            questions: update.questions,
            passages: update.passages,
            positives: update.positives,
            left_out: update.left_out,
            scale: self.losses.scale.score,
            smoothing: self.losses.label_smoothing,
            weight: self.losses.contrastive / update.question_starts[shown.len()].max(1) as f64,
        };
        let (q, p) = (&update.question_starts, &update.passage_starts);
        let rows = pool.questions(q[own.start]..q[own.end]);
        let normalizers: Vec<f64> = rows.iter().map(|r| r.normalizer).collect();
        let normalizers = world.all_gather(&normalizers)?.concat();
        if normalizers.len() != pool.questions.len() {
            return Err(
                CommError::Protocol("a rank sent another number of questions than before".into()).into()
            );
        }
        let columns = pool.passages(p[own.start]..p[own.end], &normalizers);
        let (mut rows, mut columns) = (rows.into_iter(), columns.into_iter());
        let kl_count = self.kl_count(q[shown.len()], update.scored).max(1);
        for (shard, shown) in shards.iter_mut().zip(&shown[own]) {
            let mut loss = 0.0;
            let mut gradients = Vec::with_capacity(shown.values.len());
            for row in rows.by_ref().take(shard.questions) {
                loss += row.loss;
                gradients.extend(row.gradient);
            }
            gradients.extend(columns.by_ref().take(shard.passages()).flatten());
            if self.losses.kl > 0.0 {
                let weight = self.losses.kl / kl_count as f64;
                loss += self.distil(shard, &shown.values, weight, &mut gradients);
            }
            shard.settled = Some(Settled { loss, gradients });
        }
        Ok(())
    }
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        shard: &RetrieverShard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome {
        let mut tape = Tape::recording(device, parameters, Some(draw));
        let vectors = self.model.embed(&mut tape, &shard.ids, &shard.spans, self.recompute);
        let found;
        let settled = match &shard.settled {
            Some(settled) => settled,
            None => {
                let values = device.read_f64(vectors.tensor.view());
                let mut gradients = vec![0.0; values.len()];
                let loss = self.distil(shard, &values, weight * self.losses.kl, &mut gradients);
                found = Settled { loss, gradients };
                &found
            }
        };
        let injected: Vec<f32> = settled.gradients.iter().map(|&g| g as f32).collect();
        let (rows, columns) = (vectors.tensor.rows, vectors.tensor.columns);
        tape.inject(&vectors, Tensor::from_values(device, rows, columns, &injected));
        drop(vectors);
        match buckets {
            Some(buckets) => tape.backward_with(gradients, buckets),
            None => drop(tape.backward(gradients, &[])),
        }
        ShardOutcome { loss: settled.loss }
    }
    fn smaller_shards(&self) -> Vec<String> {
        let recompute = (!self.recompute).then(|| "--recompute".to_owned());
        let below = |flag: &str, now: usize| (now > 1).then(|| format!("{flag} below {now}"));
        let passages = below("--n_context", self.choice.scored);
        let negatives = self.choice.contrastive.and_then(|c| below("--hard_negatives", c.hard_negatives));
        let tokens = below("--passage_maxlength", self.encoding.passage_maxlength);
        [recompute, passages, negatives, tokens].into_iter().flatten().collect()
    }
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        let Some(examples) = &self.eval else { return Ok(None) };
        self.evaluation(world, device, parameters, examples, interrupted)
    }
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        retriever::save(&self.model, parameters, &self.json, &self.kept, folder, device)?;
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
        if let Some(eval) = &self.eval {
            map.insert("eval_data".into(), eval.fingerprint().into());
        }
        map
    }
}

/// The vectors of all shards, as one list of questions and one of passages.
struct WholeUpdate<'a> {
    questions: Vec<&'a [f64]>,
    passages: Vec<&'a [f64]>,
    positives: Vec<usize>,
    left_out: Vec<Option<usize>>,
    /// Of each shard and the end.
    question_starts: Vec<usize>,
    passage_starts: Vec<usize>,
    scored: usize,
}

impl<'a> WholeUpdate<'a> {
    /// `None` where what a rank has sent does not fit together.
    fn new(shown: &'a [Shown], width: usize) -> Option<WholeUpdate<'a>> {
        let mut update = WholeUpdate {
            questions: Vec::new(),
            passages: Vec::new(),
            positives: Vec::new(),
            left_out: Vec::new(),
            question_starts: vec![0],
            passage_starts: vec![0],
            scored: 0,
        };
        for Shown { counts, values } in shown {
            let (&[questions, passages, scored], places) = counts.split_first_chunk::<3>()?;
            let (questions, passages) = (usize::try_from(questions).ok()?, usize::try_from(passages).ok()?);
            let mut vectors = values.chunks_exact(width);
            let sequences = questions.checked_add(passages)?;
            if places.len() != sequences || vectors.len() != sequences {
                return None;
            }
            let (positives, left_out) = places.split_at(questions);
            let (first_question, first) = (update.questions.len(), update.passages.len());
            for &p in positives {
                let place = usize::try_from(p).ok().filter(|&p| p < passages)?;
                update.positives.push(first + place);
            }
            for (p, &question) in left_out.iter().enumerate() {
                let question = match question {
                    u64::MAX => None,
                    q => Some(usize::try_from(q).ok().filter(|&q| q < questions)?),
                };
                // A row always has its positive.
                if question.is_some_and(|q| positives[q] == p as u64) {
                    return None;
                }
                update.left_out.push(question.map(|q| first_question + q));
            }
            update.questions.extend(vectors.by_ref().take(questions));
            update.passages.extend(vectors);
            update.question_starts.push(update.questions.len());
            update.passage_starts.push(update.passages.len());
            update.scored = update.scored.checked_add(usize::try_from(scored).ok()?)?;
        }
        Some(update)
    }
}
