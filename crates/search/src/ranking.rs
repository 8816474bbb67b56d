//! Metrics of rankings: nDCG, MAP, MRR, recall, precision and success, as trec_eval computes them; hits by answer
//! ([`hits`]).
//!
//! What trec_eval decides is decided alike: scores are compared as 32-bit numbers, of equal ones the document with the greater
//! name (byte by byte) comes first; a document that is not judged, or judged below 0, is not relevant and gains nothing; nDCG's gain
//! is the grade itself, its discount log2(rank + 1), its ideal made of all judgements (Järvelin and Kekäläinen 2002); MAP divides by all
//! relevant documents, at whatever depth it stops. Queries are added in the order of their names, so the order of lines in a file reaches no figure.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use tercio_data::Qrels;
use tercio_data::retrieval::RunFile;

use crate::SearchError;

mod figures;
pub mod hits;

pub use figures::Figures;

/// What is measured of a query's ranking. All lie between 0 and 1; `depth` counts ranks from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Metric {
    /// `ndcg`, `ndcg@k`: gain of the ranking over that of the best possible one.
    Ndcg(Option<usize>),
    /// `map`, `map@k`: precision at every relevant document, over all relevant ones.
    Map(Option<usize>),
    /// `mrr`, `mrr@k`: one over the rank of the first relevant document; 0 without one.
    Mrr(Option<usize>),
    /// `recall@k`: share of the relevant documents that are among the first k.
    Recall(usize),
    /// `precision@k`: relevant ones among the first k, over k, however many there are.
    Precision(usize),
    /// `success@k`: 1 if one of the first k is relevant.
    Success(usize),
}

/// The metrics that are printed unless others are asked for.
pub const USUAL: [Metric; 8] = [
    Metric::Ndcg(Some(10)),
    Metric::Map(None),
    Metric::Mrr(Some(10)),
    Metric::Recall(10),
    Metric::Recall(100),
    Metric::Precision(10),
    Metric::Success(1),
    Metric::Success(5),
];

impl FromStr for Metric {
    type Err = String;

    /// Reads `ndcg@10` and the like, and trec_eval's names (`ndcg_cut_10`, `map_cut_10`, `recip_rank`, `P_10`, `recall_10`, `success_1`).
    fn from_str(text: &str) -> Result<Metric, String> {
        let lower = text.to_ascii_lowercase();
        let (name, depth) = match lower.split_once('@').or_else(|| cut_by_underscore(&lower)) {
            Some((name, depth)) => (name, Some(depth)),
            None => (lower.as_str(), None),
        };
        let depth =
            depth.map(|k| k.parse().ok().filter(|&k: &usize| k > 0)).map_or(Some(None), |k| k.map(Some));
        match (name, depth) {
            ("ndcg", Some(k)) => Ok(Metric::Ndcg(k)),
            ("map", Some(k)) => Ok(Metric::Map(k)),
            ("mrr" | "recip_rank", Some(k)) => Ok(Metric::Mrr(k)),
            ("recall", Some(Some(k))) => Ok(Metric::Recall(k)),
            ("precision" | "p", Some(Some(k))) => Ok(Metric::Precision(k)),
            ("success", Some(Some(k))) => Ok(Metric::Success(k)),
            _ => Err(format!(
                "expected ndcg, map or mrr, with @ and a depth of 1 or more or without, or recall, precision or success with one \
                 (ndcg@10, recall@100), found {text:?}"
            )),
        }
    }
}

/// The parts of trec_eval's `ndcg_cut_10`, `P_10`.
fn cut_by_underscore(text: &str) -> Option<(&str, &str)> {
    let (name, depth) = text.rsplit_once('_')?;
    depth.bytes().all(|b| b.is_ascii_digit()).then(|| (name.strip_suffix("_cut").unwrap_or(name), depth))
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, depth) = match *self {
            Metric::Ndcg(k) => ("ndcg", k),
            Metric::Map(k) => ("map", k),
            Metric::Mrr(k) => ("mrr", k),
            Metric::Recall(k) => ("recall", Some(k)),
            Metric::Precision(k) => ("precision", Some(k)),
            Metric::Success(k) => ("success", Some(k)),
        };
        match depth {
            Some(k) => write!(f, "{name}@{k}"),
            None => f.write_str(name),
        }
    }
}

/// The ranking of one query as metrics see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranked {
    /// The grade of each document, best ranked first; 0 of one that is not judged.
    pub grades: Vec<i64>,
    /// The grades of all documents that are judged above 0, greatest first, ranked or not.
    pub ideal: Vec<i64>,
    /// A document is relevant from this grade on; at least 1. It does not reach nDCG, whose gains are the grades.
    pub least_grade: i64,
}

impl Ranked {
    /// A ranking of relevant (grade 1) and other documents, all of which are ranked.
    pub fn of_flags(relevant: &[bool]) -> Ranked {
        let grades: Vec<i64> = relevant.iter().map(|&r| i64::from(r)).collect();
        let ideal = grades.iter().copied().filter(|&g| g > 0).collect();
        Ranked { grades, ideal, least_grade: 1 }
    }

    fn relevant(&self, depth: Option<usize>) -> impl Iterator<Item = (usize, bool)> {
        let first = self.grades.iter().take(depth.unwrap_or(usize::MAX));
        first.enumerate().map(|(i, &grade)| (i + 1, grade >= self.least_grade))
    }

    fn found(&self, depth: usize) -> f64 {
        self.relevant(Some(depth)).filter(|(_, relevant)| *relevant).count() as f64
    }

    /// How many documents are relevant, ranked or not.
    pub fn all_relevant(&self) -> usize {
        self.ideal.iter().filter(|&&grade| grade >= self.least_grade).count()
    }

    /// The metric; 0 where no document is relevant.
    pub fn value(&self, metric: Metric) -> f64 {
        let all = self.all_relevant() as f64;
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        match metric {
            Metric::Ndcg(depth) => share(gain(&self.grades, depth), gain(&self.ideal, depth)),
            Metric::Map(depth) => {
                let mut found = 0.0;
                let mut sum = 0.0;
                for (rank, _) in self.relevant(depth).filter(|(_, relevant)| *relevant) {
                    found += 1.0;
                    sum += found / rank as f64;
                }
                share(sum, all)
            }
            Metric::Mrr(depth) => {
                let first = self.relevant(depth).find(|(_, relevant)| *relevant);
                first.map_or(0.0, |(rank, _)| 1.0 / rank as f64)
            }
            Metric::Recall(depth) => share(self.found(depth), all),
            Metric::Precision(depth) => self.found(depth) / depth as f64,
            Metric::Success(depth) => f64::from(u8::from(self.found(depth) > 0.0)),
        }
    }
}

/// Discounted cumulative gain of grades in this order.
fn gain(grades: &[i64], depth: Option<usize>) -> f64 {
    let first = grades.iter().take(depth.unwrap_or(usize::MAX)).enumerate();
    first.filter(|(_, grade)| **grade > 0).map(|(i, &grade)| grade as f64 / libm::log2((i + 2) as f64)).sum()
}

/// trec_eval's order of two documents: score as a 32-bit number, greater first, then name, greater first.
pub fn trec_order(a: (&str, f64), b: (&str, f64)) -> Ordering {
    // Adding 0 makes -0 of a tiny score what it is when compared.
    let single = |score: f64| score as f32 + 0.0;
    single(b.1).total_cmp(&single(a.1)).then_with(|| b.0.cmp(a.0))
}

/// What becomes of queries that give nothing to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lacking {
    /// They count as 0.
    #[default]
    Zero,
    /// They are left out of the means.
    Skip,
}

/// How a run is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// What to measure.
    pub metrics: Vec<Metric>,
    /// A document is relevant from this grade on; at least 1.
    pub least_grade: i64,
    /// Queries with judgements that the run does not have. (trec_eval leaves them out unless it is given `-c`.)
    pub missing: Lacking,
    /// Queries none of whose documents is relevant. (trec_eval counts 0.)
    pub without_relevant: Lacking,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            metrics: USUAL.to_vec(),
            least_grade: 1,
            missing: Lacking::Zero,
            without_relevant: Lacking::Zero,
        }
    }
}

/// What measuring a run gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The metrics of every query that counts, by name.
    pub figures: Figures,
    /// Queries with judgements.
    pub judged_queries: u64,
    /// Those of them that the run does not have.
    pub missing: u64,
    /// Those of them without a relevant document.
    pub without_relevant: u64,
    /// Queries of the run without judgements: they count nowhere.
    pub not_judged_queries: u64,
    /// Documents ranked for the judged queries.
    pub ranked: u64,
    /// Those of them that are not judged.
    pub not_judged: u64,
    /// Relevant documents of the judged queries, ranked or not.
    pub relevant: u64,
    /// Those of them that are ranked.
    pub relevant_ranked: u64,
}

/// Measures a run.
///
/// # Errors
/// Rules that make no sense; no query of the run is judged; all queries are left out.
pub fn evaluate(run: &RunFile, qrels: &Qrels, rules: &Rules) -> Result<Evaluation, SearchError> {
    if rules.metrics.is_empty() || rules.least_grade < 1 {
        let what = "expected at least one metric, and relevance from grade 1 on or above";
        return Err(SearchError::Unusable(what.into()));
    }
    let names = rules.metrics.iter().map(Metric::to_string).collect();
    let mut found = Evaluation {
        figures: Figures { names, queries: Vec::new() },
        judged_queries: qrels.len() as u64,
        missing: 0,
        without_relevant: 0,
        not_judged_queries: run.queries().filter(|query| !qrels.has(query)).count() as u64,
        ranked: 0,
        not_judged: 0,
        relevant: 0,
        relevant_ranked: 0,
    };
    for (query, judgements) in qrels.queries() {
        let mut documents: Vec<(&str, f64)> =
            run.documents(query).iter().map(|(id, score)| (id.as_str(), *score)).collect();
        documents.sort_unstable_by(|a, b| trec_order(*a, *b));
        let judged: Vec<Option<i64>> = documents.iter().map(|(id, _)| judgements.get(*id).copied()).collect();
        let mut ideal: Vec<i64> = judgements.values().copied().filter(|&grade| grade > 0).collect();
        ideal.sort_unstable_by(|a, b| b.cmp(a));
        let grades = judged.iter().map(|grade| grade.unwrap_or(0)).collect();
        let ranked = Ranked { grades, ideal, least_grade: rules.least_grade };
        let all = ranked.all_relevant();
        found.ranked += documents.len() as u64;
        found.not_judged += judged.iter().filter(|grade| grade.is_none()).count() as u64;
        found.relevant += all as u64;
        found.relevant_ranked += ranked.found(usize::MAX) as u64;
        found.missing += u64::from(documents.is_empty());
        found.without_relevant += u64::from(all == 0);
        let left_out = (documents.is_empty() && rules.missing == Lacking::Skip)
            || (all == 0 && rules.without_relevant == Lacking::Skip);
        if !left_out {
            let values = rules.metrics.iter().map(|&metric| ranked.value(metric)).collect();
            found.figures.queries.push((query.to_owned(), values));
        }
    }
    if found.missing == found.judged_queries {
        return Err(SearchError::Unusable(format!(
            "none of the {} queries of the run is among the {} with judgements; compare how the two files name queries",
            run.len(),
            found.judged_queries
        )));
    }
    if found.figures.queries.is_empty() {
        let what = "all queries are left out: those that are judged and in the run have no relevant document";
        return Err(SearchError::Unusable(what.into()));
    }
    Ok(found)
}
