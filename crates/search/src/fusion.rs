//! One ranking of several: reciprocal rank fusion, weighted scores.
//!
//! Both add, for every passage that any list has, what each list gives it; the sums decide, of equal ones the earlier row (or the smaller
//! name). Sums run over the lists in their order, in 64 bits.
//!
//! A passage that a list lacks gets nothing from it in reciprocal rank fusion, as in Cormack, Clarke and Buettcher 2009. Where scores are
//! added it counts as if it stood in the list's last place, with the least score that the list has: a list shows only its
//! best, and what it does not show is no better than its last.

use std::collections::BTreeMap;

use tercio_data::retrieval::RunFile;

use crate::ranking::trec_order;
use crate::{Hit, SearchError};

/// The constant of reciprocal rank fusion as its authors set it.
pub const RRF_K: f64 = 60.0;

/// What is done to a list's scores before they are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Normalisation {
    /// (score - least) / (greatest - least), from 0 to 1. Where all are equal they are 1, and 0 for a passage that the list lacks.
    #[default]
    MinMax,
    /// (score - mean) / standard deviation, over the passages of the list; 0 where all are equal.
    Z,
    /// Nothing.
    None,
}

/// How lists become one.
#[derive(Clone, Debug, PartialEq)]
pub enum Method {
    /// The sum of weight / (k + rank), ranks from 1.
    ReciprocalRank {
        /// Greater: the first ranks count less beside the later ones.
        k: f64,
    },
    /// The sum of weight x score.
    Weighted {
        /// What is done to the scores first.
        normalisation: Normalisation,
    },
}

/// Lists of hits that are ranked best first as one; at most `depth` hits.
///
/// # Errors
/// As [`fuse`]; a sum beyond 32-bit numbers.
pub fn fuse_hits(
    lists: &[&[Hit]],
    weights: &[f64],
    method: &Method,
    depth: usize,
) -> Result<Vec<Hit>, SearchError> {
    let named = |list: &&[Hit]| list.iter().map(|hit| (hit.row, f64::from(hit.score))).collect();
    let lists: Vec<Vec<(u64, f64)>> = lists.iter().map(named).collect();
    let fused = fuse(&lists, weights, method, depth)?;
    fused.into_iter().map(|(row, score)| Ok(Hit { row, score: single(score)? })).collect()
}

/// A fused score as hits and runs hold it.
///
/// # Errors
/// It is beyond 32-bit numbers.
pub fn single(score: f64) -> Result<f32, SearchError> {
    let single = score as f32;
    if single.is_finite() {
        return Ok(single);
    }
    Err(SearchError::Unusable(format!(
        "the fused score {score} is too great; use smaller weights, or normalise"
    )))
}

/// Fuses lists of names and scores, ranked best first; the best `depth`, best first, of equal sums the smaller name.
///
/// # Errors
/// A number of weights that is not that of the lists; weights, a k or scores that are no numbers, weights below 0 or all 0, a k below 0; a name
/// twice in a list.
pub fn fuse<N: Ord + Clone + std::fmt::Debug>(
    lists: &[Vec<(N, f64)>],
    weights: &[f64],
    method: &Method,
    depth: usize,
) -> Result<Vec<(N, f64)>, SearchError> {
    check(lists.len(), weights, method)?;
    for (i, list) in lists.iter().enumerate() {
        if let Some((name, score)) = list.iter().find(|(_, score)| !score.is_finite()) {
            let what = format!("list {}: {name:?} has the score {score}, which is no number", i + 1);
            return Err(SearchError::Unusable(what));
        }
        let mut seen = std::collections::BTreeSet::new();
        if let Some((name, _)) = list.iter().find(|(name, _)| !seen.insert(name)) {
            return Err(SearchError::Unusable(format!("list {}: {name:?} stands there twice", i + 1)));
        }
    }
    let mut sums: BTreeMap<N, f64> = lists.iter().flatten().map(|(name, _)| (name.clone(), 0.0)).collect();
    for (list, weight) in lists.iter().zip(weights) {
        let (given, otherwise) = match method {
            Method::ReciprocalRank { k } => {
                ((1..=list.len()).map(|rank| 1.0 / (k + rank as f64)).collect(), 0.0)
            }
            Method::Weighted { normalisation } => {
                normalised(list.iter().map(|(_, score)| *score), *normalisation)
            }
        };
        let given: BTreeMap<&N, f64> = list.iter().map(|(name, _)| name).zip(given).collect();
        for (name, sum) in &mut sums {
            *sum += weight * given.get(name).copied().unwrap_or(otherwise);
        }
    }
    let mut fused: Vec<(N, f64)> = sums.into_iter().collect();
    // They are in the order of their names; the sort keeps equal ones so.
    fused.sort_by(|a, b| b.1.total_cmp(&a.1));
    fused.truncate(depth);
    Ok(fused)
}

/// Refuses what makes no sense, whatever the lists hold.
///
/// # Errors
/// No lists; a number of weights that is not theirs; weights or a k as [`fuse`] refuses them.
pub fn check(lists: usize, weights: &[f64], method: &Method) -> Result<(), SearchError> {
    let what = if lists == 0 {
        "expected lists to fuse, found none".to_owned()
    } else if weights.len() != lists {
        format!("expected a weight for each of {lists} lists, found {}", weights.len())
    } else if weights.iter().any(|w| !w.is_finite() || *w < 0.0) || weights.iter().all(|w| *w == 0.0) {
        "expected weights of 0 or more, one of them above 0".to_owned()
    } else if matches!(method, Method::ReciprocalRank { k } if !k.is_finite() || *k < 0.0) {
        "expected a k of 0 or more (60 is usual)".to_owned()
    } else {
        return Ok(());
    };
    Err(SearchError::Unusable(what))
}

/// The scores of a list, normalised, and what a passage that it lacks gets: the least of them.
fn normalised(scores: impl Iterator<Item = f64>, normalisation: Normalisation) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = scores.collect();
    let least = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if scores.is_empty() {
        return (scores, 0.0);
    }
    let count = scores.len() as f64;
    let (shift, scale) = match normalisation {
        Normalisation::None => (0.0, 1.0),
        Normalisation::MinMax if greatest == least => return (vec![1.0; scores.len()], 0.0),
        Normalisation::Z if greatest == least => return (vec![0.0; scores.len()], 0.0),
        Normalisation::MinMax => (least, greatest - least),
        Normalisation::Z => {
            let mean = scores.iter().sum::<f64>() / count;
            let variance = scores.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>() / count;
            (mean, variance.sqrt())
        }
    };
    let normal = |score: f64| (score - shift) / scale;
    (scores.iter().map(|&score| normal(score)).collect(), normal(least))
}

/// A query's name, and its documents' names and scores, best first.
pub type FusedQuery<'a> = (&'a str, Vec<(&'a str, f64)>);

/// Fuses runs, query by query, in the order of the queries' names; documents of a run are ranked as trec_eval ranks them
/// ([`trec_order`]). A query that some runs lack is fused of those that have it.
///
/// # Errors
/// As [`fuse`], naming the query.
pub fn fuse_runs<'a>(
    runs: &'a [RunFile],
    weights: &'a [f64],
    method: &'a Method,
    depth: usize,
) -> Result<impl Iterator<Item = Result<FusedQuery<'a>, SearchError>>, SearchError> {
    check(runs.len(), weights, method)?;
    let queries: std::collections::BTreeSet<&str> = runs.iter().flat_map(RunFile::queries).collect();
    Ok(queries.into_iter().map(move |query| {
        // With no documents for the query a list gives nothing, whatever the method.
        let list = |run: &'a RunFile| {
            let mut list: Vec<(&str, f64)> =
                run.documents(query).iter().map(|(id, score)| (id.as_str(), *score)).collect();
            list.sort_unstable_by(|a, b| trec_order(*a, *b));
            list
        };
        let lists: Vec<Vec<(&str, f64)>> = runs.iter().map(list).collect();
        match fuse(&lists, weights, method, depth) {
            Ok(fused) => Ok((query, fused)),
            Err(e) => Err(SearchError::Unusable(format!("query {query}: {e}"))),
        }
    }))
}
