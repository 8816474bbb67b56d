//! Answers of a reader: batches of questions through encoder and decoder, in input order, and passage scores.

use rayon::prelude::*;
use tercio_data::{PackedReaderBatch, Question, Questions, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Device, Span, Tape};
use tercio_models::t5::{GenerationRequest, T5};

use crate::error::TrainError;

/// What a reader says to one question.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The answer, special tokens left out.
    pub answer: String,
    /// Its tokens, with the end token where it came.
    pub tokens: Vec<u32>,
    /// Fusion-in-Decoder's score of each passage that was read: the mean over layers, heads and the passage's tokens of
    /// query times key, unscaled and before the softmax, at the first decoding step.
    pub scores: Option<Vec<f32>>,
}

/// A reader ready to answer.
pub struct Predictor<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a T5,
    /// Its values.
    pub parameters: &'a Arena<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How inputs are made.
    pub encoding: ReaderEncoding,
    /// Tokens of an answer at most, the start token counted.
    pub max_length: usize,
    /// Tokens of an answer at least, the start token counted; 0: no such limit.
    pub min_length: usize,
    /// Questions at a time.
    pub batch: usize,
    /// Whether passages are scored.
    pub scores: bool,
    /// Batches between progress lines.
    pub print_freq: u64,
}

/// Encoder tokens of each question.
pub fn question_spans(batch: &PackedReaderBatch) -> Vec<Span> {
    let at = |sequence: u32| batch.offsets[sequence as usize];
    batch.question_sequences.windows(2).map(|w| Span { start: at(w[0]), end: at(w[1]) }).collect()
}

/// Positions of encoder tokens as in a batch padded to `width` tokens a passage: what the old bias table was trained on.
pub fn padded_positions(batch: &PackedReaderBatch, width: usize) -> Vec<u32> {
    let mut positions = Vec::with_capacity(batch.ids.len());
    for question in batch.question_sequences.windows(2) {
        for (n, sequence) in (question[0]..question[1]).enumerate() {
            let (start, end) = (batch.offsets[sequence as usize], batch.offsets[sequence as usize + 1]);
            let first = u32::try_from(n.saturating_mul(width)).unwrap_or(u32::MAX);
            positions.extend((0..end - start).map(|t| first.saturating_add(t)));
        }
    }
    positions
}

impl<D: Device> Predictor<'_, D> {
    /// Answers questions that are at hand; passages are read in the order of their scores, where all have one.
    pub fn answer(&self, questions: &[Question]) -> Result<Vec<Prediction>, TrainError> {
        let encoded: Vec<_> = questions
            .par_iter()
            .map(|q| self.encoding.encode_for_answering(q, self.tokenizer))
            .collect::<Result<_, _>>()?;
        let mut predictions = self.answer_batch(&PackedReaderBatch::new(&encoded)?)?;
        // Where no passage was read the only sequence was the bare question, which is no passage's.
        for (question, prediction) in questions.iter().zip(&mut predictions) {
            let read = question.ctxs.len().min(self.encoding.n_context);
            if let Some(scores) = &mut prediction.scores {
                scores.truncate(read);
            }
        }
        Ok(predictions)
    }

    /// Answers questions that are encoded already; call it within the device's pool ([`Device::run`]).
    pub fn answer_batch(&self, batch: &PackedReaderBatch) -> Result<Vec<Prediction>, TrainError> {
        let spans = Span::from_offsets(&batch.offsets);
        let mut tape = Tape::inference(self.device, self.parameters);
        let states = self.model.encode(&mut tape, &batch.ids, &spans, false);
        let positions = self.model.needs_key_positions();
        let request = GenerationRequest {
            keys: &question_spans(batch),
            key_positions: positions.then(|| padded_positions(batch, self.encoding.text_maxlength)),
            max_length: self.max_length,
            min_length: self.min_length,
            scores: self.scores,
        };
        let generation = self.model.generate(&mut tape, self.parameters, &states, &request);
        let passage_scores = generation.raw_scores.map(|raw| {
            let mean = |s: &Span| {
                let part = &raw[s.start as usize..s.end as usize];
                (part.iter().map(|&v| v as f64).sum::<f64>() / part.len() as f64) as f32
            };
            let of_question =
                |w: &[u32]| spans[w[0] as usize..w[1] as usize].iter().map(mean).collect::<Vec<_>>();
            batch.question_sequences.windows(2).map(of_question).collect::<Vec<_>>()
        });
        let mut predictions = Vec::with_capacity(batch.questions());
        for (i, tokens) in generation.tokens.into_iter().enumerate() {
            let answer = self.tokenizer.decode(&tokens)?;
            let scores = passage_scores.as_ref().map(|s| s[i].clone());
            predictions.push(Prediction { answer, tokens, scores });
        }
        Ok(predictions)
    }

    /// Answers a whole file in its order, a batch at a time, handing each question with its prediction to `take`.
    pub fn each(
        &self,
        questions: &Questions,
        take: impl FnMut(&Question, Prediction) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.first(questions, usize::MAX, take)
    }

    /// As [`Predictor::each`], for the first `limit` questions. Those before a bad item are answered before its error
    /// is returned.
    pub fn first(
        &self,
        questions: &Questions,
        limit: usize,
        mut take: impl FnMut(&Question, Prediction) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (size, len) = (self.batch.max(1), questions.len().min(limit));
        let batches = len.div_ceil(size);
        for (b, start) in (0..len).step_by(size).enumerate() {
            let end = start.saturating_add(size).min(len);
            let read: Vec<_> = (start..end).into_par_iter().map(|i| questions.get(i)).collect();
            let mut fault = None;
            let mut batch: Vec<Question> = Vec::new();
            for question in read {
                match question {
                    Ok(question) => batch.push(question),
                    Err(e) => {
                        fault = Some(e);
                        break;
                    }
                }
            }
            batch.iter_mut().for_each(Question::sort_by_score);
            if !batch.is_empty() {
                for (question, prediction) in batch.iter().zip(self.answer(&batch)?) {
                    take(question, prediction)?;
                }
            }
            if let Some(fault) = fault {
                return Err(fault.into());
            }
            self.device.trim();
            if (b as u64 + 1).is_multiple_of(self.print_freq.max(1)) {
                tracing::info!("evaluation: {} of {batches} batches", b + 1);
            }
        }
        Ok(())
    }
}
