//! The Fusion-in-Decoder reader: cross-entropy of the answer's tokens given all passages, averaged over all target
//! tokens of the update; measured by exact match of greedy answers. Source: Izacard and Grave (2021).

use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_data::{AnswerTally, PackedReaderBatch, Questions, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Span, Tape};
use tercio_models::t5::{self, Decoding, T5, Targets};

use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize};
use crate::predict::{Predictor, question_spans};

/// A reader's training data, model and measure.
pub struct ReaderObjective {
    /// The model.
    pub model: T5,
    /// Fields of the `config.json` that the model came with.
    pub json: Map<String, Value>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// How inputs are made.
    pub encoding: ReaderEncoding,
    /// Training questions.
    pub train: Questions,
    /// How many of them are used, from the start of the file.
    pub used: usize,
    /// Held-out questions.
    pub eval: Option<Questions>,
    /// The run's seed, which draws targets.
    pub seed: u64,
    /// Label smoothing of the training loss.
    pub label_smoothing: f64,
    /// Whether encoder layers are computed again in the backward pass.
    pub recompute: bool,
    /// Tokens of an answer at most, the start token counted.
    pub generation_max_length: usize,
    /// Passages of each question that are read in evaluation.
    pub eval_n_context: usize,
    /// Questions of an evaluation batch.
    pub eval_batch: usize,
    /// Batches between progress lines of an evaluation.
    pub eval_print_freq: u64,
}

impl ReaderObjective {
    /// The predictor of the current parameters.
    pub fn predictor<'a, D: Device>(&'a self, device: &'a D, parameters: &'a Arena<D>) -> Predictor<'a, D> {
        Predictor {
            device,
            model: &self.model,
            parameters,
            tokenizer: &self.tokenizer,
            encoding: ReaderEncoding { n_context: self.eval_n_context, ..self.encoding },
            decoding: Decoding::greedy(self.generation_max_length),
            batch: self.eval_batch,
            scores: false,
            print_freq: self.eval_print_freq,
        }
    }
}

impl<D: Device> Objective<D> for ReaderObjective {
    type Shard = PackedReaderBatch;

    fn layout(&self) -> &Layout {
        self.model.layout()
    }
    fn examples(&self) -> usize {
        self.used
    }
    fn shards(&self, update: &UpdateExamples, micro: usize) -> Result<Vec<PackedReaderBatch>, TrainError> {
        let encoded: Vec<_> = update
            .rows
            .par_iter()
            .map(|&row| {
                let mut question = self.train.get(row)?;
                question.sort_by_score();
                self.encoding.encode_for_training(&question, &self.tokenizer, self.seed, update.epoch)
            })
            .collect::<Result<_, _>>()?;
        Ok(encoded.chunks(micro).map(PackedReaderBatch::new).collect::<Result<_, _>>()?)
    }
    fn size(&self, shard: &PackedReaderBatch) -> ShardSize {
        let lengths = shard.offsets.windows(2).map(|w| (w[1] - w[0]) as usize);
        ShardSize {
            tokens: shard.ids.len() as u64,
            padded_tokens: shard.padded_tokens(self.encoding.text_maxlength),
            count: shard.targets.len() as u64,
            inputs: shard.sequences() as u64,
            truncated: lengths.filter(|&n| n == self.encoding.text_maxlength).count() as u64,
        }
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
        let mut tape = Tape::recording(device, parameters, Some(draw));
        let encoded =
            self.model.encode(&mut tape, &shard.ids, &Span::from_offsets(&shard.offsets), self.recompute);
        let positions = self.model.needs_key_positions();
        let targets = Targets {
            inputs: &shard.decoder_inputs(self.model.config.decoder_start_token_id),
            labels: &shard.targets,
            spans: &Span::from_offsets(&shard.target_offsets),
            keys: &question_spans(shard),
            key_positions: positions
                .then(|| crate::predict::padded_positions(shard, self.encoding.text_maxlength)),
            weight,
            smoothing: self.label_smoothing,
        };
        let losses = self.model.loss(&mut tape, &encoded, &targets);
        drop(encoded);
        match buckets {
            Some(buckets) => tape.backward_with(gradients, buckets),
            None => drop(tape.backward(gradients, &[])),
        }
        ShardOutcome { loss: losses.iter().sum::<f64>() * weight }
    }
    fn smaller_shards(&self) -> Vec<String> {
        let recompute = (!self.recompute).then(|| "--recompute".to_owned());
        let below = |flag: &str, now: usize| (now > 1).then(|| format!("{flag} below {now}"));
        let passages = below("--n_context", self.encoding.n_context);
        let tokens = below("--text_maxlength", self.encoding.text_maxlength);
        [recompute, passages, tokens].into_iter().flatten().collect()
    }
    fn evaluate_among(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        let Some(questions) = &self.eval else {
            return Ok(None);
        };
        let mut tally = AnswerTally::default();
        self.predictor(device, parameters).each_among(
            world,
            questions,
            usize::MAX,
            interrupted,
            |question, prediction| {
                tally.add(&prediction.answer, &question.answers);
                Ok(())
            },
        )?;
        if !world.is_main() {
            return Ok(None);
        }
        let em = tally.exact_match().ok_or_else(|| {
            TrainError::Unusable(format!(
                "{}: no question has `answers`, so nothing can be measured; give --eval_data with answers or none",
                questions.path().display()
            ))
        })?;
        let figures = vec![("exact_match", em), ("f1", tally.f1().unwrap_or(0.0))];
        Ok(Some(Evaluation::of_shares(em, figures)))
    }
    fn save(&self, device: &D, parameters: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        t5::save(&self.model, parameters, &self.json, folder, device)?;
        self.tokenizer.copy_to(folder)?;
        Ok(())
    }
    fn fingerprint(&self) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("train_data".into(), self.train.fingerprint().into());
        map.insert("examples".into(), self.used.into());
        if let Some(eval) = &self.eval {
            map.insert("eval_data".into(), eval.fingerprint().into());
        }
        map
    }
}
