//! `tercio search`: the passages of a collection that fit questions best, by an index of any kind.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::has_answer::AnswerMode;
use tercio_data::replace::refuse_source;
use tercio_data::template::TextTemplate;
use tercio_engine::{Cpu, Device};
use tercio_search::Part;
use tercio_search::output::{Format, Found, ResultsFile, found_passages};
use tercio_train::TrainError;
use tercio_train::find::queries::{Queries, Query};
use tercio_train::find::{
    AnyIndex, DenseSettings, FLAT, FindSettings, Finder, FoundReport, FoundSettings, search_parts, verify,
    write_found_among,
};
use tercio_train::options::Precision;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::ranks::start::{device_among, same_among};
use tercio_train::run::{Progress, Signals};
use tercio_train::scratch::ScratchFolder;

use super::common::{self, line, within};

/// Passages of a question that are believed to be meant.
const MOST_DOCS: usize = 1 << 20;

/// Flags of `tercio search`.
#[derive(Args)]
pub struct Search {
    /// Questions to ask and print the answers of
    #[arg(required_unless_present = "queries", conflicts_with = "queries")]
    question: Vec<String>,
    /// Questions of a file: FiD's .json or .jsonl, BEIR's .jsonl, DPR's .tsv, or .tsv of ids and questions; also .gz or .zst
    #[arg(long, visible_aliases = ["data", "questions"], requires = "output")]
    queries: Option<PathBuf>,
    /// Folder of the index
    #[arg(long, env = "TERCIO_INDEX")]
    index: PathBuf,
    /// The passages, where they are not where they were when they were indexed
    #[arg(long, env = "TERCIO_PASSAGES")]
    passages: Option<PathBuf>,
    /// Passages of each question
    #[arg(long, env = "TERCIO_N_DOCS", default_value_t = 100)]
    n_docs: usize,
    /// File to write
    #[arg(long, visible_alias = "output-path", conflicts_with = "question")]
    output: Option<PathBuf>,
    /// Its form; default: as its name says
    #[arg(long, value_enum, conflicts_with = "question")]
    format: Option<Form>,
    /// How the system is called in a TREC run; default: tercio
    #[arg(long, conflicts_with = "question")]
    tag: Option<String>,
    /// How the questions' answers are looked for in the passages, for `hasanswer`
    #[arg(long, value_enum, default_value_t = Answers::Words, conflicts_with = "question")]
    answer_match: Answers,
    /// BM25's k1; default: the index's
    #[arg(long)]
    k1: Option<f64>,
    /// BM25's b; default: the index's
    #[arg(long)]
    b: Option<f64>,
    /// Model that embeds the questions, for an index of vectors: the one that embedded the passages
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH")]
    model_path: Option<String>,
    /// Folder of its tokenizer; default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    /// Text that is made of a question, with {question}; default: as `tercio embed --questions` makes it
    #[arg(long)]
    template: Option<TextTemplate>,
    /// Tokens of a question at most; default: as the model's configuration has it, or 40
    #[arg(long, env = "TERCIO_QUESTION_MAXLENGTH")]
    question_maxlength: Option<usize>,
    /// Keep the vectors in memory, for many questions
    #[arg(long)]
    resident: bool,
    /// Lists of a compressed index that a question looks into, of one of late interaction each of its tokens; 0: as the index says, or 8
    #[arg(long, default_value_t = 0)]
    probes: usize,
    /// Passages of a compressed index that are scored again from their vectors; 0: none, and scores are estimates; default: four
    /// times --n-docs. Of an index of late interaction: passages that are scored; default: that many, and 512 at least
    #[arg(long)]
    rescore: Option<usize>,
    /// What ranks share: the questions, or the index. Of that each then looks into a part, with --resident keeps no more, and what all find
    /// becomes one answer. The same is found in any case
    #[arg(long, value_enum, default_value_t = Share::Questions)]
    share: Share,
    /// File of ids, one a line, of the passages that may be found, for an index of late interaction. Without ids nothing is
    #[arg(long)]
    only: Option<PathBuf>,
    /// Compare the checksums of the index's files first, and of the vectors that it reads
    #[arg(long)]
    verify: bool,
    /// Threads; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    threads: usize,
    /// Folder for the index of the files themselves, and their decompressed copies; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    unused: Unused,
    /// Print the figures, or what was found, as JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// Fusion-in-Decoder's: one list of the questions, with `ctxs`
    Fid,
    /// `query Q0 passage rank score tag`, a line a passage
    Trec,
    /// The questions with `ctxs`, one a line
    Jsonl,
}

#[derive(Clone, Copy, ValueEnum)]
enum Share {
    /// Each rank asks the whole index, other questions
    Questions,
    /// All ask all questions, each a part of the index
    Index,
}

#[derive(Clone, Copy, ValueEnum)]
enum Answers {
    /// As words, as Fusion-in-Decoder and DPR count hits
    Words,
    /// As regular expressions (CuratedTREC)
    Regex,
    /// Not at all
    None,
}

/// Flags of FiD's script that have no bearing here.
#[derive(Args)]
struct Unused {
    #[arg(long, hide = true)]
    no_fp16: bool,
    #[arg(long, hide = true)]
    save_or_load_index: bool,
    #[arg(long, hide = true)]
    validation_workers: Option<usize>,
    #[arg(long, hide = true)]
    passage_maxlength: Option<usize>,
    #[arg(long, hide = true)]
    indexing_batch_size: Option<usize>,
}

impl Search {
    /// Searches.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[("n_docs", self.n_docs, MOST_DOCS)])?;
        self.link.check().map_err(TrainError::Options)?;
        let place = common::place(Flags::default())?;
        let threads = common::threads_of_rank(self.threads)?;
        common::start_log(&place, self.quiet)?;
        let signals = Signals::install()?;
        let world = common::join(&place, &self.link)?;
        let stop = || signals.requested().is_some();
        match common::end(&world, self.search(&world, threads, &stop))? {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(code) => Ok(code),
        }
    }

    fn search(
        &self,
        world: &World,
        threads: usize,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TrainError> {
        let device = device_among(world, threads, Precision::F32)?;
        device.run(|| self.search_in(world, &device, stop))
    }

    fn search_in(
        &self,
        world: &World,
        device: &Cpu,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TrainError> {
        let settings = FindSettings {
            passages: self.passages.clone(),
            cache_dir: self.cache_dir.clone(),
            k1: self.k1,
            b: self.b,
            dense: DenseSettings {
                model: self.model_path.clone(),
                tokenizer: self.tokenizer.clone(),
                template: self.template.clone(),
                question_maxlength: self.question_maxlength,
                resident: self.resident,
                probes: self.probes,
                rescore: self.rescore,
            },
            only: self.only.clone(),
            part: match self.share {
                Share::Questions => Part::WHOLE,
                Share::Index => Part::of(world.rank(), world.size()),
            },
        };
        if self.verify {
            verify(&self.index, self.rescore != Some(0), stop)?;
        }
        let finder = Finder::open_on(device, &self.index, &settings)?;
        if self.resident && matches!(finder.index(), AnyIndex::Bm25(_)) {
            let what = "--resident is for indexes of vectors; this one is of words (bm25)";
            return Err(TrainError::Options(what.into()));
        }
        same_among(world, "--index", &finder.index().manifest().fingerprint())?;
        let scratch = ScratchFolder::new()?;
        let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
        match (&self.queries, &self.output) {
            (Some(queries), Some(output)) => self.file(world, &finder, queries, output, cache, stop),
            _ => self.print(world, &finder, stop),
        }
    }

    fn file(
        &self,
        world: &World,
        finder: &Finder,
        path: &Path,
        output: &Path,
        cache: &Path,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TrainError> {
        let passages = finder.passages().path();
        [path, passages].into_iter().try_for_each(|source| refuse_source(output, source))?;
        let queries = Queries::open(path, cache)?;
        same_among(world, "--queries", &queries.fingerprint())?;
        let format = match self.format {
            Some(Form::Fid) => Format::Fid,
            Some(Form::Trec) => Format::Trec,
            Some(Form::Jsonl) => Format::Jsonl,
            None => Format::of_name(output).unwrap_or_default(),
        };
        if self.tag.is_some() && format != Format::Trec {
            let what = "--tag is for a TREC run; name the output .run, or give --format trec".into();
            return Err(TrainError::Options(what));
        }
        let settings = FoundSettings {
            depth: self.n_docs,
            format,
            tag: self.tag.clone().unwrap_or_else(|| "tercio".into()),
            answers: match self.answer_match {
                Answers::Words => Some(AnswerMode::Words),
                Answers::Regex => Some(AnswerMode::Regex),
                Answers::None => None,
            },
        };
        let mut out = match world.is_main() {
            true => Some(ResultsFile::create(output, format)?),
            false => None,
        };
        let since = std::time::Instant::now();
        let wanted = world.is_main() && !self.quiet && !self.json;
        let mut bar = Progress::start(0, queries.len() as u64, wanted);
        let mut progress = |done| bar.advance(done, "questions");
        let report =
            write_found_among(world, finder, &queries, &settings, out.as_mut(), stop, &mut progress)?;
        let Some(out) = out else { return Ok(()) };
        let target = out.finish()?;
        self.tell(finder, &report, &target, since.elapsed().as_secs_f64())
    }

    fn tell(&self, finder: &Finder, r: &FoundReport, target: &Path, seconds: f64) -> Result<(), TrainError> {
        if r.fewer > 0 {
            tracing::warn!(
                "{} of {} questions got fewer passages than {}, {} of them none: {}",
                r.fewer,
                r.questions,
                self.n_docs,
                r.without,
                why_fewer(finder)
            );
        }
        let text = if self.json {
            let sum = json!({
                "output": target, "questions": r.questions, "passages": r.passages, "fewer": r.fewer, "without": r.without,
                "seconds": seconds, "search_seconds": r.search_seconds,
            });
            sum.to_string()
        } else {
            let rate = r.questions as f64 / seconds.max(1e-9);
            format!(
                "{} passages for {} questions in {} ({rate:.0} questions/s)",
                r.passages,
                r.questions,
                target.display()
            )
        };
        written(line(&text))
    }

    /// The questions of the command line, on stdout.
    fn print(
        &self,
        world: &World,
        finder: &Finder,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TrainError> {
        let found = match finder.part().is_whole() {
            false => search_parts(world, finder, &self.question, self.n_docs, stop)?,
            true if world.is_main() => finder.search(&self.question, self.n_docs, stop)?,
            true => return Ok(()),
        };
        if !world.is_main() {
            return Ok(());
        }
        let queries = Queries::of_texts(&self.question);
        for (i, hits) in found.iter().enumerate() {
            let Query { text, item, .. } = queries.get(i)?;
            let passages = found_passages(finder.passages(), hits, None)?;
            if self.json {
                let rendered = Format::Jsonl.render(&Found { question: item, passages }, "")?;
                written(line(String::from_utf8_lossy(&rendered).trim_end()))?;
                continue;
            }
            written(line(&text))?;
            for (rank, p) in passages.iter().enumerate() {
                let line_of = format!("{:>4}. {:<9.4} [{}] {}: {}", rank + 1, p.score, p.id, p.title, p.text);
                written(line(&line_of))?;
            }
            if hits.len() < self.n_docs {
                tracing::info!("{} passages found, not {}: {}", hits.len(), self.n_docs, why_fewer(finder));
            }
        }
        Ok(())
    }
}

/// Why a question gets fewer passages than were asked for.
fn why_fewer(finder: &Finder) -> &'static str {
    let manifest = finder.index().manifest();
    match finder.index() {
        AnyIndex::Bm25(_) => "no other passage has a word of theirs",
        AnyIndex::Dense(_) if manifest.kind == FLAT => "the collection has no more",
        AnyIndex::Late(_) => "the index, or the passages of --only, have no more",
        AnyIndex::Dense(_) => {
            "the lists that were looked into, or the collection, have no more; see --probes"
        }
    }
}

fn written(result: std::io::Result<()>) -> Result<(), TrainError> {
    result.map_err(|source| TrainError::Write { path: "stdout".into(), source })
}
