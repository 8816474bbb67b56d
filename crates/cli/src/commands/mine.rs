//! `tercio mine`: hard negatives for the training of retrievers.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_comm::place::Flags;
use tercio_data::has_answer::AnswerMode;
use tercio_data::retrieval::{RetrievalExamples, RunFile};
use tercio_data::{Passages, Vectors};
use tercio_engine::{Cpu, Device};
use tercio_train::TrainError;
use tercio_train::mine::{
    Candidates, Collection, MineForm, MineReport, MineRules, exact_search, id_text, mine, same_ids,
};
use tercio_train::run::{Progress, Signals, Verbosity, init_logging_of_rank};
use tercio_train::scratch::ScratchFolder;

use super::common::{line, not_quoted, place, threads};

/// Most candidates of a question that are believed to be meant.
const MOST_RANKS: usize = 1 << 20;

/// Flags of `tercio mine`.
#[derive(Args)]
pub struct Mine {
    /// Questions with answers or with known positives: FiD's JSON, DPR's JSON or triples, also .gz or .zst. Where neither
    /// --run nor --vectors is given, the candidates are the questions' own `ctxs`
    #[arg(long, env = "TERCIO_TRAIN_DATA", visible_alias = "train-data")]
    data: PathBuf,
    /// Take the candidates from this run (TREC's form), by the questions' ids; needs --passages
    #[arg(long, conflicts_with = "vectors", requires = "passages")]
    run: Option<PathBuf>,
    /// Take the candidates from an exact search over these vectors (a folder of `tercio embed`); needs --question-vectors and
    /// --passages
    #[arg(long, requires_all = ["question_vectors", "passages"])]
    vectors: Option<PathBuf>,
    /// Vectors of the questions: `tercio embed --questions` of the same file as --data, which is FiD's or DPR's JSON then; that
    /// command takes no triples. Or imported ones, whose ids are those of --data
    #[arg(long, requires = "vectors")]
    question_vectors: Option<PathBuf>,
    /// The collection that was searched: .tsv, .jsonl or .json, also .gz or .zst
    #[arg(long, env = "TERCIO_PASSAGES")]
    passages: Option<PathBuf>,
    /// JSON lines to write: DPR's form or triples, which `tercio train retriever` reads
    #[arg(long)]
    output: PathBuf,
    /// Form of the output
    #[arg(long, value_enum, default_value_t = Form::Dpr)]
    form: Form,
    /// Negatives of each question at most
    #[arg(long, default_value_t = 30)]
    negatives: usize,
    /// Positives of each question at most, where candidates that hold an answer are taken for them
    #[arg(long, default_value_t = 1)]
    positives: usize,
    /// First rank, from 1, that may be a negative
    #[arg(long, default_value_t = 1)]
    first_rank: usize,
    /// Last rank that may be a negative
    #[arg(long, default_value_t = 100)]
    last_rank: usize,
    /// A negative's score is at least this far below the positive's
    #[arg(long)]
    margin: Option<f64>,
    /// A negative's score is at least this share of the positive's below it (0.05: five percent)
    #[arg(long)]
    relative_margin: Option<f64>,
    /// How answers are looked for in candidates, which are no negatives then
    #[arg(long, value_enum, default_value_t = Answers::Words)]
    answers: Answers,
    /// Draw the negatives from the window by this seed; without it they are the best ranked
    #[arg(long)]
    seed: Option<u64>,
    /// Threads; 0: all cores
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    threads: usize,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Print the counts as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// {question, answers, positive_ctxs, hard_negative_ctxs}
    Dpr,
    /// {query, positive, negatives}
    Triples,
}

#[derive(Clone, Copy, ValueEnum)]
enum Answers {
    /// As words, as hits are counted
    Words,
    /// As regular expressions (CuratedTREC)
    Regex,
    /// Not at all: every candidate that is no known positive may be a negative
    None,
}

impl Mine {
    /// Mines.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let place = place(Flags::default())?;
        if place.world_size > 1 {
            // Each would write the same file.
            return Err(TrainError::Options(format!(
                "tercio mine is one process, found rank {} of {}: start it without a launcher, with as many --threads as there are cores",
                place.rank, place.world_size
            ))
            .into());
        }
        let rules = self.rules();
        rules.check().map_err(TrainError::Options)?;
        if rules.last_rank > MOST_RANKS {
            return Err(TrainError::Options(format!("--last_rank: expected 1 to {MOST_RANKS}")).into());
        }
        let threads = threads(self.threads)?;
        init_logging_of_rank(0, "", if self.quiet { Verbosity::Quiet } else { Verbosity::Normal })?;
        let scratch = ScratchFolder::new()?;
        let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
        let examples = RetrievalExamples::open(&self.data, cache)?;
        let passages = self.passages.as_ref().map(|path| Passages::open(path, cache)).transpose()?;
        if let Some(passages) = passages.as_ref().filter(|p| !p.is_quoted()) {
            tracing::warn!("{}", not_quoted(passages));
        }
        let run = self.run.as_ref().map(|run| RunFile::open(run, rules.last_rank)).transpose()?;
        // Only now: nothing above looks whether to stop.
        let signals = Signals::install()?;
        let stop = || signals.requested().is_some();
        let candidates = match (run, &self.vectors, passages) {
            (Some(run), _, Some(passages)) => {
                let collection = Collection::of(passages, run.ids(), &stop)?;
                Candidates::Run(run, collection)
            }
            (None, Some(vectors), Some(passages)) => {
                let device = Cpu::new(threads)?;
                device.run(|| self.search(&device, &examples, vectors, passages, rules.last_rank, &stop))?
            }
            (None, None, Some(_)) => {
                let what =
                    "--passages goes with --run or --vectors: candidates are taken from the items themselves";
                return Err(TrainError::Options(what.into()).into());
            }
            _ => Candidates::Own,
        };
        let form = match self.form {
            Form::Dpr => MineForm::Dpr,
            Form::Triples => MineForm::Triples,
        };
        let report = mine(&examples, &candidates, &rules, form, &self.output, &stop)?;
        line(&if self.json { serde_json::to_string(&report)? } else { sentences(&report) })?;
        Ok(ExitCode::SUCCESS)
    }

    fn rules(&self) -> MineRules {
        MineRules {
            first_rank: self.first_rank,
            last_rank: self.last_rank,
            negatives: self.negatives,
            positives: self.positives,
            margin: self.margin,
            relative_margin: self.relative_margin,
            answers: match self.answers {
                Answers::Words => Some(AnswerMode::Words),
                Answers::Regex => Some(AnswerMode::Regex),
                Answers::None => None,
            },
            seed: self.seed,
        }
    }

    fn search(
        &self,
        device: &Cpu,
        examples: &RetrievalExamples,
        vectors: &Path,
        passages: Passages,
        depth: usize,
        stop: &dyn Fn() -> bool,
    ) -> Result<Candidates, TrainError> {
        let vectors = Vectors::open(vectors)?;
        let questions = self.question_vectors.as_ref().expect("--vectors requires it");
        let questions = Vectors::open(questions)?;
        for (set, path, fingerprint) in [
            (&questions, examples.path(), examples.fingerprint()),
            (&vectors, passages.path(), passages.fingerprint()),
        ] {
            let of = set.settings();
            if !is_imported(set) && of.source_fingerprint.as_deref() != Some(fingerprint) {
                return Err(TrainError::Unusable(format!(
                    "{}: expected vectors of {}, found those of {}; embed the file that is given here",
                    set.dir().display(),
                    path.display(),
                    of.source
                )));
            }
        }
        if questions.len() != examples.len() as u64 || vectors.len() != passages.len() as u64 {
            return Err(TrainError::Unusable(format!(
                "expected a vector of every question and every passage, found {} for {} and {} for {}; embed whole files",
                questions.len(),
                examples.len(),
                vectors.len(),
                passages.len()
            )));
        }
        if is_imported(&questions) {
            let id = |row| Ok(id_text(&examples.get(row)?));
            same_ids(&questions, examples.path(), id, stop)?;
        }
        if is_imported(&vectors) {
            same_ids(&vectors, passages.path(), |row| Ok(passages.get(row)?.id), stop)?;
        }
        let mut bar = Progress::start(0, vectors.len(), !self.quiet && !self.json);
        let mut progress = |share: f64| bar.advance((share * vectors.len() as f64) as u64, "passages");
        let found = exact_search(device, &questions, &vectors, depth, stop, &mut progress)?;
        Ok(Candidates::Search(found, passages))
    }
}

/// Whether a set does not say which texts it is of, so that the ids must.
fn is_imported(set: &Vectors) -> bool {
    set.settings().model_fingerprint.is_none() || set.settings().source_fingerprint.is_none()
}

fn sentences(r: &MineReport) -> String {
    let mut text = format!(
        "{} of {} questions written to {}, {} negatives",
        r.written, r.questions, r.output, r.negatives
    );
    for (count, what) in [
        (r.without_positive, "questions left out: nothing is known to be positive"),
        (r.without_negative, "questions left out: no candidate is a negative"),
        (r.without_score, "questions without a margin: no positive is among the candidates"),
        (r.known_positive, "candidates are known positives"),
        (r.with_answer, "candidates hold an answer"),
        (r.within_margin, "candidates score too near the positive"),
    ] {
        if count > 0 {
            text.push_str(&format!("\n  {count} {what}"));
        }
    }
    text
}
