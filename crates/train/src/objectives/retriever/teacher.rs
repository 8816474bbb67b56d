//! A live teacher: a reader whose cross-attention scores of the passages are what the retriever learns, computed in the
//! first pass of every update instead of read from a file.

use tercio_data::{PackedReaderBatch, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Device};
use tercio_models::t5::{Decoding, T5};

use super::batch::RetrieverShard;
use crate::embed::model_fingerprint;
use crate::error::TrainError;
use crate::predict::Predictor;

/// Start token and the first token of an answer: the scores are those of the first decoding step.
const TOKENS: usize = 2;

/// A trained reader.
pub struct Teacher<D: Device> {
    /// The model.
    pub model: T5,
    /// Its values.
    pub parameters: Arena<D>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// How its inputs are made; the number of passages is each question's own.
    pub encoding: ReaderEncoding,
    /// What tells it from other readers: its values and its tokenizer.
    pub fingerprint: String,
}

impl<D: Device> Teacher<D> {
    /// A teacher of a reader's model and values.
    pub fn new(
        device: &D,
        model: T5,
        parameters: Arena<D>,
        tokenizer: Tokenizer,
        encoding: ReaderEncoding,
    ) -> Teacher<D> {
        let fingerprint = model_fingerprint(device, model.layout(), &parameters, &tokenizer, "");
        Teacher { model, parameters, tokenizer, encoding, fingerprint }
    }
    /// Scores of the passages of each question in a packed batch.
    ///
    /// # Errors
    /// Those of answering.
    pub fn scores(&self, device: &D, batch: &PackedReaderBatch) -> Result<Vec<Vec<f64>>, TrainError> {
        let predictor = Predictor {
            device,
            model: &self.model,
            parameters: &self.parameters,
            tokenizer: &self.tokenizer,
            encoding: self.encoding,
            decoding: Decoding::greedy(TOKENS),
            batch: batch.questions(),
            scores: true,
            print_freq: u64::MAX,
        };
        let answers = predictor.answer_batch(batch)?;
        let of = |scores: Option<Vec<f32>>| scores.into_iter().flatten().map(f64::from).collect();
        Ok(answers.into_iter().map(|a| of(a.scores)).collect())
    }
    /// As [`Teacher::scores`].
    ///
    /// # Errors
    /// As there; a score that is no number.
    pub fn finite_scores(&self, device: &D, batch: &PackedReaderBatch) -> Result<Vec<Vec<f64>>, TrainError> {
        let scores = self.scores(device, batch)?;
        if scores.iter().flatten().any(|s| !s.is_finite()) {
            return Err(TrainError::Unusable(
                "the teacher gives scores that are no numbers; its weights are damaged or its values overflow".into(),
            ));
        }
        Ok(scores)
    }
    /// Gives the questions of a shard their scores; those without passages to score keep none.
    ///
    /// # Errors
    /// As [`Teacher::finite_scores`].
    pub(super) fn score(&self, device: &D, shard: &mut RetrieverShard) -> Result<(), TrainError> {
        let Some(taught) = &shard.taught else { return Ok(()) };
        let scores = self.finite_scores(device, taught)?;
        // Only questions with passages to score are among those that the teacher has read.
        let read = shard.gold.iter_mut().zip(&shard.scored).filter(|(_, scored)| **scored > 0);
        for ((gold, _), scores) in read.zip(scores) {
            *gold = scores;
        }
        Ok(())
    }
}
