//! Answers of a reader: batches of questions through encoder and decoder, in input order, and passage scores.

use std::collections::VecDeque;
use std::ops::Range;

use rayon::prelude::*;
use tercio_comm::World;
use tercio_data::{DataError, PackedReaderBatch, Question, Questions, ReaderEncoding, Tokenizer};
use tercio_engine::memory::{OutOfMemory, caught};
use tercio_engine::{Arena, Device, Span, Tape};
use tercio_models::t5::{Decoded, Decoding, GenerationRequest, T5};

use crate::error::TrainError;
use crate::ranks::answers::{self, Answers};
use crate::shortage::{Part, Shortage};

/// Batches of each rank between two gatherings of answers: what rank 0 keeps of the others' is bounded.
const ROUND: usize = 4;

/// What a reader says to one question.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The answer, special tokens left out.
    pub answer: String,
    /// Its tokens, with the end token where it came.
    pub tokens: Vec<u32>,
    /// How likely it is.
    pub likelihood: Likelihood,
    /// The next best answers, where more than one was asked for; best first.
    pub alternatives: Vec<Alternative>,
    /// Fusion-in-Decoder's score of each passage that was read: the mean over layers, heads and the passage's tokens of
    /// query times key, unscaled and before the softmax, at the first decoding step.
    pub scores: Option<Vec<f32>>,
}

/// An answer beside the best.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The answer, special tokens left out.
    pub answer: String,
    /// Its tokens, with the end token where it came.
    pub tokens: Vec<u32>,
    /// How likely it is.
    pub likelihood: Likelihood,
}

/// How likely an answer is, to the reader. Natural logarithms, of all its tokens, the end token where it came.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likelihood {
    /// Sum of its tokens' log probabilities.
    pub log_probability: f64,
    /// Mean of them.
    pub mean_log_probability: f64,
    /// What beam search compared, `log_probability / length^length_penalty`; `None` where there was one beam.
    pub beam_score: Option<f64>,
}

impl Likelihood {
    /// Whether all of it are numbers.
    pub fn is_finite(&self) -> bool {
        let score = self.beam_score.unwrap_or(0.0);
        self.log_probability.is_finite() && self.mean_log_probability.is_finite() && score.is_finite()
    }
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
    /// How answers are decoded.
    pub decoding: Decoding,
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
    ///
    /// # Errors
    /// A question that cannot be encoded; [`TrainError::OutOfMemory`].
    pub fn answer(&self, questions: &[Question]) -> Result<Vec<Prediction>, TrainError> {
        let before = self.device.bytes_in_use();
        caught(|| self.answer_here(questions)).unwrap_or_else(|out| {
            Err(TrainError::OutOfMemory(Box::new(self.shortage(questions, before, out))))
        })
    }

    /// What took the memory where `questions` were answered, beside the `before` bytes that were in use.
    fn shortage(&self, questions: &[Question], before: u64, out: OutOfMemory) -> Shortage {
        let parameters = (self.parameters.len() * size_of::<D::Element>()) as u64;
        let below = |flag: &str, now: usize| (now > 1).then(|| format!("{flag} below {now}"));
        let (e, beams) = (&self.encoding, self.decoding.num_beams);
        let read = questions.iter().map(|q| q.ctxs.len().min(e.n_context)).max().unwrap_or(0);
        let batch = below("--per_gpu_batch_size (in training --micro_batch_size)", questions.len());
        let passages = below("--n_context (in training --eval_n_context)", read);
        let flags =
            [batch, passages, below("--text_maxlength", e.text_maxlength), below("--num_beams", beams)];
        let part = |name, bytes| Part { name, bytes, note: String::new(), flags: Vec::new() };
        let training = part("the training around it", before.saturating_sub(parameters));
        let known = vec![part("parameters", parameters), training];
        let activations = Part { flags: flags.into_iter().flatten().collect(), ..part("activations", 0) };
        let doing = match questions.len() {
            1 => "in the answer to a question".to_owned(),
            n => format!("in the answers to {n} questions at a time"),
        };
        Shortage::new(doing, out, known, activations)
    }

    fn answer_here(&self, questions: &[Question]) -> Result<Vec<Prediction>, TrainError> {
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
            decoding: self.decoding.clone(),
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
        for (i, answers) in generation.answers.into_iter().enumerate() {
            let mut answers = answers.into_iter().map(|decoded| self.alternative(decoded));
            let Alternative { answer, tokens, likelihood } =
                answers.next().expect("at least one answer a question")?;
            let alternatives = answers.collect::<Result<_, _>>()?;
            let scores = passage_scores.as_ref().map(|s| s[i].clone());
            predictions.push(Prediction { answer, tokens, likelihood, alternatives, scores });
        }
        Ok(predictions)
    }

    fn alternative(&self, decoded: Decoded) -> Result<Alternative, TrainError> {
        let likelihood = Likelihood {
            log_probability: decoded.log_probability,
            mean_log_probability: decoded.mean_log_probability(),
            beam_score: (self.decoding.num_beams > 1).then_some(decoded.score),
        };
        Ok(Alternative {
            answer: self.tokenizer.decode(&decoded.tokens)?,
            tokens: decoded.tokens,
            likelihood,
        })
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
        take: impl FnMut(&Question, Prediction) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.each_among(&World::alone(), questions, limit, &|| false, take)
    }

    /// As [`Predictor::first`], by all ranks: batches are cut as for one rank and dealt out in turn; on rank 0, and there
    /// only, `take` gets every question once, in the order of the file. `stop` is asked before every batch.
    ///
    /// # Errors
    /// As [`Predictor::first`]; [`TrainError::Interrupted`] on all ranks soon after `stop` says so on one.
    pub fn each_among(
        &self,
        world: &World,
        questions: &Questions,
        limit: usize,
        stop: &dyn Fn() -> bool,
        mut take: impl FnMut(&Question, Prediction) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (size, len) = (self.batch.max(1), questions.len().min(limit));
        let (batches, ranks, rank) = (len.div_ceil(size), world.size(), world.rank());
        let read =
            |b: usize| read_batch(questions, b * size..b.saturating_add(1).saturating_mul(size).min(len));
        let round = if ranks == 1 { 1 } else { ROUND.saturating_mul(ranks) };
        for start in (0..batches).step_by(round) {
            let end = start.saturating_add(round).min(batches);
            let (mut own, mut stopped) = (VecDeque::new(), false);
            for b in (start..end).filter(|b| (b - start) % ranks == rank) {
                stopped = stop();
                if stopped {
                    break;
                }
                let (batch, fault) = read(b);
                let predictions = if batch.is_empty() { Vec::new() } else { self.answer(&batch)? };
                own.push_back((batch, predictions, fault));
                self.device.trim();
            }
            if world.all_gather_bytes(vec![u8::from(stopped)])?.concat().contains(&1) {
                return Err(TrainError::Interrupted);
            }
            let mut bytes = Vec::new();
            if rank > 0 {
                own.iter().for_each(|(_, predictions, _)| answers::write(predictions, &mut bytes));
            }
            let all = world.gather_bytes(bytes)?;
            if rank > 0 {
                continue;
            }
            let mut others: Vec<_> = all.iter().enumerate().map(|(r, b)| Answers::new(b, r)).collect();
            for b in start..end {
                let (batch, predictions, fault) = match (b - start) % ranks {
                    0 => own.pop_front().expect("rank 0 has answered its batches"),
                    from => {
                        let predictions = others[from].batch()?;
                        let (batch, fault) = read(b);
                        if batch.len() != predictions.len() {
                            return Err(TrainError::Unusable(format!(
                                "{}: rank {from} found {} good questions in items {} to {}, rank 0 found {}: give all ranks the \
                                 same file",
                                questions.path().display(),
                                predictions.len(),
                                b * size,
                                (b * size).saturating_add(size).min(len) - 1,
                                batch.len()
                            )));
                        }
                        (batch, predictions, fault)
                    }
                };
                for (question, prediction) in batch.iter().zip(predictions) {
                    take(question, prediction)?;
                }
                if let Some(fault) = fault {
                    return Err(fault.into());
                }
                if (b as u64 + 1).is_multiple_of(self.print_freq.max(1)) {
                    tracing::info!("evaluation: {} of {batches} batches", b + 1);
                }
            }
        }
        Ok(())
    }
}

/// The questions of a batch, passages sorted; up to a bad item, with its error.
fn read_batch(questions: &Questions, rows: Range<usize>) -> (Vec<Question>, Option<DataError>) {
    let read: Vec<_> = rows.into_par_iter().map(|i| questions.get(i)).collect();
    let mut batch: Vec<Question> = Vec::new();
    for question in read {
        match question {
            Ok(question) => batch.push(question),
            Err(e) => return (sorted(batch), Some(e)),
        }
    }
    (sorted(batch), None)
}

fn sorted(mut batch: Vec<Question>) -> Vec<Question> {
    batch.iter_mut().for_each(Question::sort_by_score);
    batch
}
