//! `tercio rerank`: the passages that a search has found, in the order of a ColBERT model's exact scores.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::replace::refuse_source;
use tercio_data::{Questions, RetrievalExamples};
use tercio_engine::{Cpu, Device};
use tercio_search::output::{Format, ResultsFile};
use tercio_train::TrainError;
use tercio_train::colbert::rerank::{RerankReport, RerankSettings, rerank_among};
use tercio_train::objectives::colbert::ColbertLoss;
use tercio_train::objectives::colbert::evaluate::ColbertRanker;
use tercio_train::options::{ColbertTextOptions, PrecisionOptions};
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::ranks::start;
use tercio_train::run::Signals;
use tercio_train::setup::colbert::{encoding, open_colbert_among};

use super::common::{self, MOST_QUESTIONS, line, within};

/// Passages of a question that are believed to be meant.
const MOST_DOCS: usize = 1 << 20;

/// Flags of `tercio rerank`.
#[derive(Args)]
pub struct Rerank {
    /// Model: a folder as `tercio train colbert` takes it, or a run's folder, which stands for its best checkpoint
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH")]
    model_path: String,
    /// Folder of the tokenizer; default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    text: ColbertTextOptions,
    /// Questions with their passages as `ctxs`, as `tercio search` writes them: .json or .jsonl, also .gz or .zst
    #[arg(long, visible_alias = "questions", env = "TERCIO_EVAL_DATA")]
    data: PathBuf,
    /// File to write
    #[arg(long, visible_alias = "output-path")]
    output: PathBuf,
    /// Its form; default: as its name says
    #[arg(long, value_enum)]
    format: Option<Form>,
    /// How the system is called in a TREC run
    #[arg(long, default_value = "tercio")]
    tag: String,
    /// Passages of each question that are scored, from the first on; 0: all
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 0)]
    n_context: usize,
    /// Passages of each question that are written, best first; 0: all that are scored
    #[arg(long, env = "TERCIO_N_DOCS", default_value_t = 0)]
    n_docs: usize,
    /// A masked token of a passage counts as a product of 0, as in PyLate
    #[arg(long)]
    zero_floor: bool,
    /// Questions at a time
    #[arg(long, env = "TERCIO_PER_GPU_BATCH_SIZE", default_value_t = 1)]
    per_gpu_batch_size: usize,
    #[command(flatten)]
    compute: PrecisionOptions,
    /// Threads; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    threads: usize,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    link: LinkOptions,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    local_rank: i64,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    main_port: i64,
    /// Print the figures as one line of JSON on stdout
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

impl Rerank {
    /// Reranks.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.link.check().map_err(TrainError::Options)?;
        self.text.check().map_err(TrainError::Options)?;
        within(&[
            ("per_gpu_batch_size", self.per_gpu_batch_size, MOST_QUESTIONS),
            ("n_context", self.n_context.max(1), MOST_DOCS),
            ("n_docs", self.n_docs.max(1), MOST_DOCS),
        ])?;
        let place = common::place(Flags { local_rank: self.local_rank, main_port: self.main_port })?;
        let threads = common::threads_of_rank(self.threads)?;
        common::start_log(&place, self.quiet)?;
        let signals = Signals::install()?;
        let world = common::join(&place, &self.link)?;
        match common::end(&world, self.rerank(&world, threads, &signals))? {
            Ok(report) if world.is_main() => {
                line(&if self.json { serde_json::to_string(&report)? } else { self.sentence(&report) })?;
                Ok(ExitCode::SUCCESS)
            }
            Ok(_) => Ok(ExitCode::SUCCESS),
            Err(code) => Ok(code),
        }
    }

    fn sentence(&self, r: &RerankReport) -> String {
        let rate = r.scored as f64 / r.seconds.max(1e-9);
        format!(
            "{} passages of {} questions scored in {:.1} s ({rate:.0} passages/s), {} written to {}",
            r.scored,
            r.questions,
            r.seconds,
            r.passages,
            self.output.display()
        )
    }

    fn format(&self) -> Result<Format, TrainError> {
        match self.format {
            Some(Form::Fid) => Ok(Format::Fid),
            Some(Form::Trec) => Ok(Format::Trec),
            Some(Form::Jsonl) => Ok(Format::Jsonl),
            None => Format::of_name(&self.output).ok_or_else(|| {
                TrainError::Options(format!(
                    "--output {}: expected a name that ends in .json, .jsonl or .trec, or --format",
                    self.output.display()
                ))
            }),
        }
    }

    fn rerank(&self, world: &World, threads: usize, signals: &Signals) -> Result<RerankReport, TrainError> {
        let format = self.format()?;
        let device: Cpu = start::device_among(world, threads, self.compute.get())?;
        let tokenizer = self.tokenizer.as_deref();
        let open = || open_colbert_among(world, &self.model_path, tokenizer, &self.text, &device);
        let opened = device.run(open)?;
        let (data, cache) = (&self.data, self.cache_dir.as_deref());
        let questions: Questions = open_among(world, data, cache, self.link.broadcast_data)?;
        let examples: RetrievalExamples = open_among(world, data, cache, self.link.broadcast_data)?;
        let encoding = encoding(&opened, &self.text)?;
        let or_all = |n: usize| if n == 0 { usize::MAX } else { n };
        let ranker = ColbertRanker {
            device: &device,
            model: &opened.loaded.model,
            parameters: &opened.loaded.parameters,
            tokenizer: &opened.tokenizer,
            encoding: &encoding,
            loss: ColbertLoss::Contrastive { temperature: 1.0, smoothing: 0.0 },
            zero_floor: self.zero_floor,
            teacher: None,
            n_context: or_all(self.n_context),
            batch: self.per_gpu_batch_size,
            print_freq: u64::MAX,
        };
        let settings = RerankSettings { depth: or_all(self.n_docs), format, tag: self.tag.clone() };
        let mut out = match world.is_main() {
            true => {
                refuse_source(&self.output, data)?;
                Some(ResultsFile::create(&self.output, format)?)
            }
            false => None,
        };
        let stop = || signals.requested().is_some();
        let files = (&questions, &examples);
        let report = device.run(|| rerank_among(world, &ranker, files, &settings, out.as_mut(), &stop))?;
        if let Some(out) = out {
            out.finish()?;
        }
        // Nobody is done before rank 0 has written everything.
        world.barrier()?;
        Ok(report)
    }
}
