//! The passages that another search has found, in the order of exact MaxSim, by all ranks.

use std::ops::Range;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use tercio_comm::World;
use tercio_data::retrieval::Relevance;
use tercio_data::{Questions, RetrievalExample, RetrievalExamples};
use tercio_engine::Device;
use tercio_search::output::{Format, Found, FoundPassage, ResultsFile};

use crate::error::TrainError;
use crate::objectives::colbert::evaluate::{ColbertRanker, Scored};
use crate::ranks::in_order::{Batches, items_among};

/// Questions whose results are in memory together.
const BLOCK: usize = 1024;

/// What is written.
#[derive(Clone, Debug)]
pub struct RerankSettings {
    /// Passages of a question at most, the best ones.
    pub depth: usize,
    /// The form of the file.
    pub format: Format,
    /// Names the system in a TREC run.
    pub tag: String,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RerankReport {
    /// Questions.
    pub questions: u64,
    /// Passages that were scored.
    pub scored: u64,
    /// Passages that were written.
    pub passages: u64,
    /// Seconds that this took.
    pub seconds: f64,
}

/// Scores the `ctxs` of the questions of a file, which is opened twice: as `questions` for all that it says, and as `examples`. The best come
/// first, of equal scores the one that came first. Rank 0 writes into `out`, the others have none. The report is rank 0's.
///
/// # Errors
/// A question that cannot be read; what the form cannot hold; a file that cannot be written; a rank was lost; [`TrainError::Stopped`] on all
/// ranks soon after `stop` says so on one.
pub fn rerank_among<D: Device>(
    world: &World,
    ranker: &ColbertRanker<'_, D>,
    (questions, examples): (&Questions, &RetrievalExamples),
    settings: &RerankSettings,
    mut out: Option<&mut ResultsFile>,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<RerankReport, TrainError> {
    let since = Instant::now();
    let mut report = RerankReport::default();
    for start in (0..examples.len()).step_by(BLOCK) {
        let len = BLOCK.min(examples.len() - start);
        let mut work = |rows: Range<usize>| {
            let rows = start + rows.start..start + rows.end;
            let read: Vec<RetrievalExample> =
                rows.clone().into_par_iter().map(|i| examples.get(i)).collect::<Result<_, _>>()?;
            let scored = ranker.scores(&read)?;
            ranker.device.trim();
            let message = |((row, example), scored): ((usize, &RetrievalExample), Scored)| {
                let scores = scored.scores;
                let found = Found {
                    question: questions.get_raw(row)?,
                    passages: best(example, &scores, settings.depth),
                };
                let mut bytes = (scores.len() as u64).to_le_bytes().to_vec();
                bytes.extend((found.passages.len() as u64).to_le_bytes());
                bytes.extend(settings.format.render(&found, &settings.tag)?);
                Ok(bytes)
            };
            rows.zip(&read).zip(scored).map(message).collect::<Result<Vec<_>, TrainError>>()
        };
        let batches = Batches { len, size: ranker.batch, print_freq: u64::MAX };
        let found = match items_among(world, batches, &|| stop(), &mut work) {
            Err(TrainError::Interrupted) => return Err(TrainError::Stopped),
            other => other?,
        };
        for message in found {
            let (scored, rest) = message.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
            let (written, rendered) = rest.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
            report.questions += 1;
            report.scored += u64::from_le_bytes(*scored);
            report.passages += u64::from_le_bytes(*written);
            if let Some(out) = &mut out {
                out.push(rendered)?;
            }
        }
    }
    report.seconds = since.elapsed().as_secs_f64();
    Ok(report)
}

/// The passages of the greatest scores.
fn best(example: &RetrievalExample, scores: &[f64], depth: usize) -> Vec<FoundPassage> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let passage = |i: usize| {
        let judged = &example.passages[i];
        FoundPassage {
            id: judged.passage.id.clone(),
            title: judged.passage.title.clone(),
            text: judged.passage.text.clone(),
            score: scores[i] as f32,
            has_answer: match judged.relevance {
                Relevance::Positive => Some(true),
                Relevance::HardNegative | Relevance::Negative => Some(false),
                Relevance::Unknown => None,
            },
        }
    };
    order.into_iter().take(depth).map(passage).collect()
}
