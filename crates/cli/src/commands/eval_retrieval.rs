//! `tercio eval retrieval`: how good a retrieval is: hits by answer, or the metrics of a run against judgements; and whether two
//! of them differ by more than chance.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use tercio_data::has_answer::AnswerMode;
use tercio_data::replace::refuse_source;
use tercio_data::retrieval::RunFile;
use tercio_data::{Qrels, Questions};
use tercio_engine::{Cpu, Device};
use tercio_search::SearchError;
use tercio_search::ranking::hits::{self, Hits};
use tercio_search::ranking::{Evaluation, Figures, Lacking, Metric, Rules, USUAL, evaluate};
use tercio_search::significance::{CONFIDENCE, Compared, TestRules, compare};
use tercio_train::TrainError;
use tercio_train::run::Signals;
use tercio_train::scratch::ScratchFolder;

use super::common::{line, threads};

/// Most draws that are believed to be meant.
const MOST_DRAWS: u64 = 100_000_000;

/// Flags of `tercio eval retrieval`.
#[derive(Args)]
pub struct EvalRetrieval {
    /// Questions with answers and with what was retrieved for them, as `ctxs` best first (FiD's JSON, `tercio search --format
    /// fid`): counts how often one of the first k passages holds an answer
    #[arg(long, required_unless_present = "run", conflicts_with_all = ["run", "qrels"])]
    data: Option<PathBuf>,
    /// A run in TREC's form, also .gz or .zst: measured against --qrels
    #[arg(long, requires = "qrels")]
    run: Option<PathBuf>,
    /// Judgements in TREC's form (query, 0, document, grade) or BEIR's (query-id, corpus-id, score), also .gz or .zst
    #[arg(long, requires = "run")]
    qrels: Option<PathBuf>,
    /// Another file like --data, or run like --run: tests whether the two differ by more than chance
    #[arg(long)]
    compare: Option<PathBuf>,
    /// Metrics of a run: ndcg, map, mrr, each with @ and a depth or without; recall, precision, success with one. trec_eval's names
    /// will do
    #[arg(long, value_delimiter = ',', num_args = 1.., conflicts_with = "data")]
    metrics: Vec<String>,
    /// Depths at which hits by answer are counted
    #[arg(long, value_delimiter = ',', num_args = 1.., default_values_t = [1, 5, 20, 100], conflicts_with = "run")]
    k: Vec<usize>,
    /// How answers are looked for in the passages' texts
    #[arg(long, value_enum, default_value_t = AnswerMatch::Words, conflicts_with = "run")]
    answer_match: AnswerMatch,
    /// Queries with judgements that the run does not have
    #[arg(long, value_enum, default_value_t = Treatment::Zero, conflicts_with = "data")]
    missing: Treatment,
    /// Queries of which no document is relevant
    #[arg(long, value_enum, default_value_t = Treatment::Zero, conflicts_with = "data")]
    no_relevant: Treatment,
    /// A document is relevant from this grade on; nDCG takes the grades as they are
    #[arg(long, default_value_t = 1, conflicts_with = "data")]
    relevance_level: i64,
    /// JSON lines to write: the figures of every query
    #[arg(long)]
    per_query: Option<PathBuf>,
    /// Draws of the randomization test of --compare; up to 16 queries that differ all choices are tried
    #[arg(long, default_value_t = TestRules::default().draws)]
    draws: u64,
    /// What these draws are keyed by
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads; 0: all cores
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0, visible_alias = "validation-workers")]
    threads: usize,
    /// Folder for the index of --data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Print the figures as one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum AnswerMatch {
    /// As words, as Fusion-in-Decoder and DPR count hits
    Words,
    /// As regular expressions (CuratedTREC)
    Regex,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Treatment {
    /// They count as 0
    Zero,
    /// They are left out of the means
    Skip,
}

impl Treatment {
    fn rule(self) -> Lacking {
        match self {
            Treatment::Zero => Lacking::Zero,
            Treatment::Skip => Lacking::Skip,
        }
    }
    fn text(self) -> &'static str {
        match self {
            Treatment::Zero => "counted as 0",
            Treatment::Skip => "left out",
        }
    }
}

/// What is printed of one file.
struct Report {
    figures: Figures,
    json: Map<String, Value>,
    text: String,
}

impl EvalRetrieval {
    /// Measures.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let device = Cpu::new(threads(self.threads)?)?;
        match device.run(|| self.measure()) {
            Err(SearchError::Stopped) => Err(TrainError::Stopped.into()),
            other => Ok(other.map(|text| line(&text).map(|()| ExitCode::SUCCESS))??),
        }
    }

    fn check(&self) -> Result<(), TrainError> {
        let refuse = |what: String| Err(TrainError::Options(what));
        if self.k.contains(&0) {
            return refuse("--k 0: expected depths of 1 or more".into());
        }
        if self.relevance_level < 1 {
            return refuse(format!("--relevance_level {}: expected 1 or more", self.relevance_level));
        }
        if !(1..=MOST_DRAWS).contains(&self.draws) {
            return refuse(format!("--draws {}: expected 1 to {MOST_DRAWS}", self.draws));
        }
        self.metrics().map(|_| ())
    }

    fn metrics(&self) -> Result<Vec<Metric>, TrainError> {
        if self.metrics.is_empty() {
            return Ok(USUAL.to_vec());
        }
        let read = |name: &String| name.parse().map_err(|e| TrainError::Options(format!("--metrics: {e}")));
        self.metrics.iter().map(read).collect()
    }

    fn measure(&self) -> Result<String, SearchError> {
        let inputs = [&self.data, &self.run, &self.qrels, &self.compare];
        for (output, input) in
            inputs.into_iter().flatten().filter_map(|i| Some((self.per_query.as_ref()?, i)))
        {
            refuse_source(output, input)?;
        }
        let mut reports = match (&self.data, &self.run, &self.qrels) {
            (Some(data), ..) => self.of_answers(data)?,
            (None, Some(run), Some(qrels)) => self.of_judgements(run, qrels)?,
            _ => return Err(SearchError::Unusable("expected --data, or --run and --qrels".into())),
        };
        let second = if reports.len() > 1 { reports.pop() } else { None };
        let Report { figures, mut json, mut text } = reports.remove(0);
        if let Some(path) = &self.per_query {
            figures.write(path)?;
        }
        if let (Some(second), Some(path)) = (second, &self.compare) {
            let compared =
                compare(&figures, &second.figures, &TestRules { draws: self.draws, seed: self.seed })?;
            text += &format!("\n\nCompared with {}:\n{}", path.display(), comparison_text(&compared));
            json.insert("compare".into(), comparison_json(path, second, &compared));
        }
        Ok(if self.json { Value::Object(json).to_string() } else { text })
    }

    /// Hits by answer of the file, and of the one that it is compared with.
    fn of_answers(&self, data: &Path) -> Result<Vec<Report>, SearchError> {
        let scratch = ScratchFolder::new().map_err(|e| SearchError::Unusable(e.to_string()))?;
        let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
        let mode = match self.answer_match {
            AnswerMatch::Words => AnswerMode::Words,
            AnswerMatch::Regex => AnswerMode::Regex,
        };
        let signals = Signals::install().map_err(|e| SearchError::Unusable(e.to_string()))?;
        let count = |path: &Path| {
            hits::count(&Questions::open(path, cache)?, mode, &|| signals.requested().is_some())
        };
        let found: Vec<(&Path, Hits)> = [Some(data), self.compare.as_deref()]
            .into_iter()
            .flatten()
            .map(|path| Ok((path, count(path)?)))
            .collect::<Result<_, SearchError>>()?;
        let deepest = found.iter().map(|(_, hits)| hits.depth).min().unwrap_or(0);
        let mut depths: Vec<usize> = self.k.iter().copied().filter(|&k| k <= deepest).collect();
        if depths.is_empty() {
            depths.push(deepest);
        }
        depths.sort_unstable();
        depths.dedup();
        let mut left_out: Vec<usize> = self.k.iter().copied().filter(|k| !depths.contains(k)).collect();
        left_out.sort_unstable();
        left_out.dedup();
        let mut reports: Vec<Report> =
            found.into_iter().map(|(path, hits)| answer_report(path, &hits, &depths)).collect();
        for report in reports.iter_mut().filter(|_| !left_out.is_empty()) {
            let names: Vec<String> = left_out.iter().map(|k| format!("hits@{k}")).collect();
            report.text += &format!("\nleft out: {}, deeper than the {deepest} passages", names.join(", "));
            report.json.insert("left_out".into(), names.into());
        }
        Ok(reports)
    }

    /// Metrics of the run, and of the one that it is compared with.
    fn of_judgements(&self, run: &Path, qrels: &Path) -> Result<Vec<Report>, SearchError> {
        let qrels = Qrels::open(qrels)?;
        let rules = Rules {
            metrics: self.metrics().map_err(|e| SearchError::Unusable(e.to_string()))?,
            least_grade: self.relevance_level,
            missing: self.missing.rule(),
            without_relevant: self.no_relevant.rule(),
        };
        let report = |path: &Path| {
            let found = evaluate(&RunFile::open(path, usize::MAX)?, &qrels, &rules)
                .map_err(|e| SearchError::file(path, e.to_string()))?;
            Ok(self.judgement_report(path, found))
        };
        [Some(run), self.compare.as_deref()].into_iter().flatten().map(report).collect()
    }

    fn judgement_report(&self, path: &Path, found: Evaluation) -> Report {
        let json = json!({
            "run": path.display().to_string(),
            "metrics": named(&found.figures),
            "queries": found.figures.queries.len(),
            "judged_queries": found.judged_queries,
            "missing": found.missing,
            "missing_are": self.missing.text(),
            "without_relevant": found.without_relevant,
            "without_relevant_are": self.no_relevant.text(),
            "not_judged_queries": found.not_judged_queries,
            "ranked": found.ranked,
            "not_judged": found.not_judged,
            "relevant": found.relevant,
            "relevant_ranked": found.relevant_ranked,
            "relevance_level": self.relevance_level,
        });
        let text = format!(
            "{}\n{} queries measured of {} with judgements; {} missing in the run ({}), {} without relevant documents ({})\n\
             {} queries of the run have no judgements and count nowhere\n\
             {} documents ranked, {} of them not judged (taken for not relevant); {} of {} relevant ones are ranked",
            table(&found.figures),
            found.figures.queries.len(),
            found.judged_queries,
            found.missing,
            self.missing.text(),
            found.without_relevant,
            self.no_relevant.text(),
            found.not_judged_queries,
            found.ranked,
            found.not_judged,
            found.relevant_ranked,
            found.relevant
        );
        Report { figures: found.figures, json: object(json), text }
    }
}

fn answer_report(path: &Path, hits: &Hits, depths: &[usize]) -> Report {
    let figures = hits.figures(depths);
    let json = json!({
        "data": path.display().to_string(),
        "metrics": named(&figures),
        "questions": hits.first.len(),
        "depth": hits.depth,
        "counts": hits.counts(),
        "fewer_passages": hits.fewer,
        "without_answers": hits.without_answers,
        "with_empty_answers": hits.with_empty_answers,
    });
    let mut text =
        format!("{}\n{} questions, at most {} passages each", table(&figures), hits.first.len(), hits.depth);
    for (count, what) in [
        (hits.fewer, "have fewer"),
        (hits.without_answers, "have no answers: misses"),
        (hits.with_empty_answers, "have an answer that every text holds: hits"),
    ] {
        if count > 0 {
            text += &format!("; {count} {what}");
        }
    }
    Report { figures, json: object(json), text }
}

fn named(figures: &Figures) -> Value {
    let means = figures.means().into_iter().map(Value::from);
    Value::Object(figures.names.iter().cloned().zip(means).collect())
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn table(figures: &Figures) -> String {
    let rows = figures.names.iter().zip(figures.means()).map(|(name, mean)| format!("{name:<14} {mean:.4}"));
    rows.collect::<Vec<_>>().join("\n")
}

fn comparison_text(compared: &Compared) -> String {
    let mut text = format!(
        "{:<14} {:>7} {:>7} {:>10}  {:<20} {:>9} {:>9} {:>7} {:>6}",
        "metric",
        "this",
        "other",
        "difference",
        format!("{:.0}% interval", 100.0 * CONFIDENCE),
        "p (t)",
        "p (rand.)",
        "better",
        "worse"
    );
    for metric in &compared.metrics {
        let test = &metric.test;
        let interval = test.interval.map_or("-".into(), |(low, high)| format!("[{low:+.4}, {high:+.4}]"));
        text += &format!(
            "\n{:<14} {:>7.4} {:>7.4} {:>+10.4}  {interval:<20} {:>9} {:>9} {:>7} {:>6}",
            metric.name,
            metric.first,
            metric.second,
            test.difference,
            test.p_t.map_or("-".into(), p_text),
            p_text(test.p_randomization),
            test.better,
            test.worse
        );
    }
    text += &format!("\nover {} queries of both", compared.queries);
    if compared.only_first + compared.only_second > 0 {
        text +=
            &format!("; {} only here and {} only there left out", compared.only_first, compared.only_second);
    }
    text
}

fn p_text(p: f64) -> String {
    if p < 5e-5 { "<0.0001".into() } else { format!("{p:.4}") }
}

fn comparison_json(path: &Path, second: Report, compared: &Compared) -> Value {
    let tests = compared.metrics.iter().map(|metric| {
        let test = &metric.test;
        let value = json!({
            "this": metric.first,
            "other": metric.second,
            "difference": test.difference,
            "interval": test.interval.map(|(low, high)| [low, high]),
            "t": test.t.filter(|t| t.is_finite()),
            "p_t": test.p_t,
            "p_randomization": test.p_randomization,
            "better": test.better,
            "worse": test.worse,
        });
        (metric.name.clone(), value)
    });
    json!({
        "with": path.display().to_string(),
        "report": second.json,
        "queries": compared.queries,
        "only_this": compared.only_first,
        "only_other": compared.only_second,
        "confidence": CONFIDENCE,
        "tests": tests.collect::<Map<String, Value>>(),
    })
}
