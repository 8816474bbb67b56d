//! A ColBERT model at work on examples whose documents are at hand: exact scores, and what is made of them, by all ranks.

use std::rc::Rc;

use rayon::prelude::*;
use tercio_comm::{CommError, World};
use tercio_data::retrieval::Relevance;
use tercio_data::{RetrievalExample, RetrievalExamples, Tokenizer};
use tercio_engine::{Arena, Device, Tape};
use tercio_models::colbert::Colbert;

use super::batch::{ColbertEncoding, ColbertShard, EncodedQuery};
use super::{ColbertLoss, ColbertObjective};
use crate::colbert::CollectionSearch;
use crate::colbert::collection::FIGURES;
use crate::error::TrainError;
use crate::objective::Evaluation;
use crate::objectives::retriever::Teacher;
use crate::objectives::retriever::batch::Chosen;
use crate::objectives::retriever::evaluate::contrast;
use crate::objectives::retriever::measure::{self, QuestionFigures, Tally, compare_orders, rank_positives};
use crate::ranks::in_order::{Batches, items_among};

/// Share of pairs of a positive and another document of a query of which the positive scores higher: of one positive and one negative
/// PyLate's accuracy of triplets.
pub const TRIPLETS: &str = "triplet_accuracy";

/// A ColBERT model that scores the documents of examples.
pub struct ColbertRanker<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a Colbert,
    /// Its values.
    pub parameters: &'a Arena<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How inputs are made.
    pub encoding: &'a ColbertEncoding,
    /// What the loss among the figures is.
    pub loss: ColbertLoss,
    /// Whether masked tokens of documents count as products of 0.
    pub zero_floor: bool,
    /// Who scores the documents, where the file's scores are not to be taken.
    pub teacher: Option<&'a Teacher<D>>,
    /// Documents of each query at most, as the example has them in order.
    pub n_context: usize,
    /// Queries at a time.
    pub batch: usize,
    /// Batches between progress lines.
    pub print_freq: u64,
}

/// A query's scores.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The model's, of each document.
    pub scores: Vec<f64>,
    /// A teacher's, from the file or computed.
    pub gold: Option<Vec<f64>>,
}

/// Means over queries, on rank 0.
#[derive(Clone, Debug, Default)]
pub struct ColbertFigures {
    /// What all retrievers have.
    pub tally: Tally,
    triplets: f64,
    judged: u64,
}

impl ColbertFigures {
    /// The mean of each figure that some query had, by name.
    pub fn figures(&self) -> Vec<(&'static str, f64)> {
        let mut figures = self.tally.figures();
        if self.judged > 0 {
            figures.push((TRIPLETS, self.triplets / self.judged as f64));
        }
        figures
    }
}

impl<D: Device> ColbertRanker<'_, D> {
    /// The figures of the first `limit` examples, on rank 0; elsewhere none. `stop` is asked before every batch.
    ///
    /// # Errors
    /// A bad example; [`TrainError::Interrupted`] on all ranks soon after `stop` says so on one; a rank was lost.
    pub fn measure_among(
        &self,
        world: &World,
        examples: &RetrievalExamples,
        limit: usize,
        stop: &dyn Fn() -> bool,
    ) -> Result<ColbertFigures, TrainError> {
        let batches =
            Batches { len: examples.len().min(limit), size: self.batch, print_freq: self.print_freq };
        let mut work = |rows: std::ops::Range<usize>| {
            let read: Vec<RetrievalExample> =
                rows.into_par_iter().map(|i| examples.get(i)).collect::<Result<_, _>>()?;
            let scored = self.scores(&read)?;
            self.device.trim();
            Ok(read.iter().zip(scored).map(|(example, scored)| self.message(example, scored)).collect())
        };
        let mut all = ColbertFigures::default();
        for message in items_among(world, batches, stop, &mut work)? {
            let broken =
                || CommError::Protocol("a rank sent bytes that are no figures of an evaluation".into());
            let (triplets, rest) = message.split_first_chunk::<9>().ok_or_else(broken)?;
            let figures = measure::read(rest).filter(|f| f.len() == 1).ok_or_else(broken)?;
            all.tally.add(&figures[0]);
            let [has, value @ ..] = triplets;
            if *has == 1 {
                all.triplets += f64::from_le_bytes(*value);
                all.judged += 1;
            }
        }
        Ok(all)
    }

    /// Scores of each example's documents, in their order, and a teacher's, if they have any.
    ///
    /// # Errors
    /// A text that the tokenizer does not take; an example without scores where they are distilled.
    pub fn scores(&self, examples: &[RetrievalExample]) -> Result<Vec<Scored>, TrainError> {
        let encoded: Vec<EncodedQuery> =
            examples.par_iter().map(|example| self.encode(example)).collect::<Result<_, _>>()?;
        let shard = ColbertShard::new(encoded, self.zero_floor)?;
        let mut taught = match (self.teacher, &shard.taught) {
            (Some(teacher), Some(taught)) => teacher.finite_scores(self.device, taught)?,
            _ => Vec::new(),
        }
        .into_iter();
        let mut tape = Tape::inference(self.device, self.parameters);
        let vectors = self.model.embed(&mut tape, shard.texts.rows(), false);
        let shape = shard.own_pairs(|_| usize::MAX);
        let scored = tape.max_sim(&vectors, &vectors, &Rc::new(shape));
        let scores = self.device.read_f64(scored.tensor.view());
        let of = |(example, bounds): (&RetrievalExample, &[usize])| {
            let scores = scores[bounds[0]..bounds[1]].to_vec();
            let gold = match self.teacher {
                // Only queries with documents are among those that the teacher has read.
                Some(_) if scores.is_empty() => None,
                Some(_) => taught.next(),
                None => example.passages[..scores.len()].iter().map(|p| p.passage.score).collect(),
            };
            Scored { gold: gold.filter(|gold| !gold.is_empty()), scores }
        };
        Ok(examples.iter().zip(shard.document_offsets.windows(2)).map(of).collect())
    }

    fn encode(&self, example: &RetrievalExample) -> Result<EncodedQuery, TrainError> {
        let n = example.passages.len().min(self.n_context);
        if matches!(self.loss, ColbertLoss::Distillation(_)) && self.teacher.is_none() {
            // A distilled model is compared with scores: an example without them is named.
            example.scored(n.max(1))?;
        }
        let chosen = Chosen {
            passages: example.passages[..n].iter().map(|p| &p.passage).collect(),
            scored: if self.teacher.is_some() { n } else { 0 },
            gold: Vec::new(),
            positive: None,
            other_positives: Vec::new(),
        };
        let teacher = self.teacher.map(|t| (&t.encoding, &t.tokenizer));
        EncodedQuery::new(example, &chosen, (self.encoding, self.tokenizer), teacher)
    }

    /// The figures of a query, the triplets first.
    fn message(&self, example: &RetrievalExample, scored: Scored) -> Vec<u8> {
        let Scored { scores, gold } = scored;
        let passages = &example.passages[..scores.len()];
        let positive: Vec<bool> = passages.iter().map(|p| p.relevance == Relevance::Positive).collect();
        let mut figures = QuestionFigures::default();
        if let Some(gold) = &gold {
            compare_orders(&scores, gold, &mut figures);
        }
        rank_positives(&scores, &positive, &mut figures);
        figures[0] = match self.loss {
            ColbertLoss::Contrastive { temperature, .. } if positive.contains(&true) => {
                let scaled: Vec<f64> = scores.iter().map(|s| s / temperature).collect();
                Some(contrast(&scaled, &positive))
            }
            ColbertLoss::Distillation(d) => gold.map(|gold| d.divergence(&scores, &gold).0),
            ColbertLoss::Contrastive { .. } => None,
        };
        let (mut higher, mut pairs) = (0usize, 0usize);
        for (s, _) in scores.iter().zip(&positive).filter(|(_, p)| **p) {
            for (other, _) in scores.iter().zip(&positive).filter(|(_, p)| !**p) {
                higher += usize::from(s > other);
                pairs += 1;
            }
        }
        let mut message = vec![u8::from(pairs > 0)];
        message.extend((higher as f64 / pairs.max(1) as f64).to_le_bytes());
        measure::write(&figures, &mut message);
        message
    }
}

impl<D: Device> ColbertObjective<D> {
    /// A ranker with the current values, measured as it is trained.
    pub fn ranker<'a>(&'a self, device: &'a D, parameters: &'a Arena<D>) -> ColbertRanker<'a, D> {
        ColbertRanker {
            device,
            model: &self.model,
            parameters,
            tokenizer: &self.tokenizer,
            encoding: &self.encoding,
            loss: self.loss,
            zero_floor: self.zero_floor,
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
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        let mut figures = Vec::new();
        let mut score = None;
        if let Some(examples) = &self.eval {
            let ranker = self.ranker(device, parameters);
            let found = ranker.measure_among(world, examples, usize::MAX, &|| stop())?;
            if world.is_main() {
                let loss = loss_of(&found, &examples.path().display().to_string())?;
                score = Some(-loss);
                figures = found.figures();
            }
        }
        if let Some(collection) = &self.collection {
            let search = CollectionSearch {
                device,
                model: &self.model,
                parameters,
                tokenizer: &self.tokenizer,
                encoding: &self.encoding,
                zero_floor: self.zero_floor,
                batch: self.eval_batch,
            };
            let found = search.measure_among(world, collection, &|| stop())?;
            score = found.first().copied().or(score);
            figures.extend(FIGURES.iter().zip(found).map(|((_, name, _), value)| (*name, value)));
        }
        let Some(score) = score else { return Ok(None) };
        let text = measure::text(&figures);
        Ok(Some(Evaluation { score, figures, text }))
    }
}

/// The loss of an evaluation of the file `path`.
fn loss_of(found: &ColbertFigures, path: &str) -> Result<f64, TrainError> {
    match found.tally.loss() {
        Some(loss) if loss.is_finite() => Ok(loss),
        Some(loss) => Err(TrainError::Unusable(format!(
            "{path}: the loss of the evaluation is {loss}; a lower --lr or a longer --warmup_steps mostly help"
        ))),
        None => Err(TrainError::Unusable(format!(
            "{path}: no example has a positive document, so nothing can be measured; give --eval_data with positives or none"
        ))),
    }
}
