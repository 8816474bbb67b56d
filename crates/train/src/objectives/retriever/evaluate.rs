//! A retriever at work on examples whose passages are at hand: scores, and what [`super::measure`] makes of them, by all
//! ranks. Batches are cut without regard to the ranks, so that no figure depends on their number.

use rayon::prelude::*;
use tercio_comm::{CommError, World};
use tercio_data::retrieval::Relevance;
use tercio_data::{RetrievalExample, RetrievalExamples, Tokenizer};
use tercio_engine::{Arena, Device, Tape};
use tercio_models::retriever::Retriever;

use super::batch::{Chosen, EncodedQuestion, RetrieverEncoding, RetrieverShard, nothing_to_score};
use super::loss::{divergence, dot};
use super::measure::{self, QuestionFigures, Tally, compare_orders, rank_positives};
use super::{RetrieverLosses, RetrieverObjective, Teacher};
use crate::error::TrainError;
use crate::objective::Evaluation;
use crate::options::KlMean;
use crate::ranks::in_order::{Batches, items_among};

/// A retriever that scores the passages of examples.
pub struct Ranker<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a Retriever,
    /// Its values.
    pub parameters: &'a Arena<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How inputs are made.
    pub encoding: &'a RetrieverEncoding,
    /// What the loss among the figures is of.
    pub losses: RetrieverLosses,
    /// Whether an example without scores is an error; else it has no figures of them.
    pub needs_scores: bool,
    /// Who scores the passages, where the file's scores are not to be taken.
    pub teacher: Option<&'a Teacher<D>>,
    /// Passages of each question at most, as the example has them in order.
    pub n_context: usize,
    /// Questions at a time.
    pub batch: usize,
    /// Batches between progress lines.
    pub print_freq: u64,
}

/// An example on its way through an evaluation.
struct Asked<'a> {
    example: &'a RetrievalExample,
    /// Whether the file has a teacher's score of each passage, or a live one gives them.
    scored: bool,
}

impl<D: Device> Ranker<'_, D> {
    /// The figures of the first `limit` examples, on rank 0; elsewhere an empty tally. `stop` is asked before every batch.
    ///
    /// # Errors
    /// A bad example; [`TrainError::Interrupted`] on all ranks soon after `stop` says so on one; a rank was lost.
    pub fn measure_among(
        &self,
        world: &World,
        examples: &RetrievalExamples,
        limit: usize,
        stop: &dyn Fn() -> bool,
    ) -> Result<Tally, TrainError> {
        let len = examples.len().min(limit);
        let mut work = |rows: std::ops::Range<usize>| {
            let read: Vec<RetrievalExample> =
                rows.into_par_iter().map(|i| examples.get(i)).collect::<Result<_, _>>()?;
            let figures = self.measure(&read)?;
            self.device.trim();
            let message = |figures: &QuestionFigures| {
                let mut message = Vec::new();
                measure::write(figures, &mut message);
                message
            };
            Ok(figures.iter().map(message).collect())
        };
        let batches = Batches { len, size: self.batch, print_freq: self.print_freq };
        let mut tally = Tally::default();
        for message in items_among(world, batches, stop, &mut work)? {
            let figures = measure::read(&message).filter(|figures| figures.len() == 1).ok_or_else(|| {
                CommError::Protocol("a rank sent bytes that are no figures of an evaluation".into())
            })?;
            tally.add(&figures[0]);
        }
        Ok(tally)
    }

    /// The figures of some examples.
    fn measure(&self, examples: &[RetrievalExample]) -> Result<Vec<QuestionFigures>, TrainError> {
        let encoded: Vec<(EncodedQuestion, Asked<'_>)> =
            examples.par_iter().map(|example| self.encode(example)).collect::<Result<_, _>>()?;
        let (encoded, asked): (Vec<_>, Vec<_>) = encoded.into_iter().unzip();
        let mut shard = RetrieverShard::new(encoded)?;
        if let Some(teacher) = self.teacher {
            teacher.score(self.device, &mut shard)?;
        }
        let mut tape = Tape::inference(self.device, self.parameters);
        let vectors = self.model.embed(&mut tape, &shard.ids, &shard.spans, false);
        let values = self.device.read_f64(vectors.tensor.view());
        let width = self.model.config.dimension();
        let (questions, passages) = values.split_at(shard.questions * width);
        let mut figures = Vec::with_capacity(asked.len());
        for (q, asked) in asked.iter().enumerate() {
            let question = &questions[q * width..(q + 1) * width];
            let theirs = shard.passage_offsets[q] * width..shard.passage_offsets[q + 1] * width;
            let score = |p: &[f64]| dot(question, p) * self.losses.scale.score;
            let scores: Vec<f64> = passages[theirs].chunks_exact(width).map(score).collect();
            figures.push(self.figures(asked, &scores, &shard.gold[q]));
        }
        Ok(figures)
    }

    fn encode<'e>(&self, example: &'e RetrievalExample) -> Result<(EncodedQuestion, Asked<'e>), TrainError> {
        let n = example.passages.len().min(self.n_context);
        let live = self.teacher.is_some();
        if live && n == 0 && self.needs_scores {
            return Err(nothing_to_score(example).into());
        }
        let all_scored = n > 0 && example.passages.iter().all(|p| p.passage.score.is_some());
        // A distilled retriever is compared with scores: an example without them is named.
        let gold = match self.needs_scores && !live || all_scored {
            true => example.scored(n.max(1))?.into_iter().map(|(_, score)| score).collect(),
            false => Vec::new(),
        };
        let chosen = Chosen {
            passages: example.passages[..n].iter().map(|p| &p.passage).collect(),
            scored: if live { n } else { gold.len() },
            gold,
            positive: None,
            other_positives: Vec::new(),
        };
        let teacher = self.teacher.map(|t| (&t.encoding, &t.tokenizer));
        let encoded = EncodedQuestion::new(example, &chosen, (self.encoding, self.tokenizer), teacher)?;
        Ok((encoded, Asked { example, scored: chosen.scored > 0 }))
    }

    fn figures(&self, asked: &Asked<'_>, scores: &[f64], gold: &[f64]) -> QuestionFigures {
        let mut figures = QuestionFigures::default();
        let mut loss = None;
        if asked.scored {
            compare_orders(scores, gold, &mut figures);
            let gold: Vec<f64> = gold.iter().map(|g| g * self.losses.scale.gold).collect();
            let count = match self.losses.kl_mean {
                KlMean::Element => gold.len(),
                KlMean::Batch => 1,
            };
            if self.losses.kl > 0.0 {
                loss = Some(self.losses.kl * divergence(scores, &gold).0 / count as f64);
            }
        }
        let kinds = asked.example.passages[..scores.len()].iter().map(|p| p.relevance);
        let positive: Vec<bool> = kinds.map(|kind| kind == Relevance::Positive).collect();
        rank_positives(scores, &positive, &mut figures);
        if self.losses.contrastive > 0.0 && positive.contains(&true) {
            let share = contrast(scores, &positive);
            loss = Some(loss.unwrap_or(0.0) + self.losses.contrastive * share);
        }
        figures[0] = loss;
        figures
    }
}

/// Minus the logarithm of the positives' share in the softmax over a question's own passages.
pub(crate) fn contrast(scores: &[f64], positive: &[bool]) -> f64 {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut all, mut found) = (0.0, 0.0);
    for (score, positive) in scores.iter().zip(positive) {
        let e = libm::exp(score - most);
        all += e;
        found += if *positive { e } else { 0.0 };
    }
    libm::log(all) - libm::log(found)
}

impl<D: Device> RetrieverObjective<D> {
    /// A ranker with the current values, measured as it is trained.
    pub fn ranker<'a>(&'a self, device: &'a D, parameters: &'a Arena<D>) -> Ranker<'a, D> {
        Ranker {
            device,
            model: &self.model,
            parameters,
            tokenizer: &self.tokenizer,
            encoding: &self.encoding,
            losses: self.losses,
            needs_scores: self.losses.kl > 0.0,
            teacher: self.teacher.as_ref(),
            n_context: self.eval_n_context,
            batch: self.eval_batch,
            print_freq: self.eval_print_freq,
        }
    }
    pub(super) fn evaluation(
        &self,
        world: &World,
        device: &D,
        parameters: &Arena<D>,
        examples: &RetrievalExamples,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        let tally = self.ranker(device, parameters).measure_among(world, examples, usize::MAX, &|| stop())?;
        if !world.is_main() {
            return Ok(None);
        }
        let loss = tally.loss().ok_or_else(|| {
            TrainError::Unusable(format!(
                "{}: no example has a positive passage, so nothing can be measured; give --eval_data with positives or none",
                examples.path().display()
            ))
        })?;
        if !loss.is_finite() {
            return Err(TrainError::Unusable(format!(
                "{}: the loss of the evaluation is {loss}; a lower --lr or a longer --warmup_steps mostly help",
                examples.path().display()
            )));
        }
        let figures = tally.figures();
        let text = measure::text(&figures);
        Ok(Some(Evaluation { score: -loss, figures, text }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_positives_share_of_the_softmax() {
        let found = contrast(&[0.0, libm::log(3.0), 0.0], &[false, true, false]);
        assert!((found - libm::log(5.0 / 3.0)).abs() < 1e-12, "{found}");
        assert!(contrast(&[1e4, -1e4], &[true, true]).abs() < 1e-12);
        assert!(contrast(&[1e4, -1e4], &[false, true]).is_infinite());
    }
}
