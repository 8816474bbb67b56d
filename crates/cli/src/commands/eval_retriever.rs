//! `tercio eval retriever`: how a retriever orders the passages of questions: against a reader's scores as FiD measures it, and
//! where it puts the passages that are known to be positive.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::RetrievalExamples;
use tercio_engine::{Cpu, Device};
use tercio_train::TrainError;
use tercio_train::objectives::retriever::evaluate::Ranker;
use tercio_train::objectives::retriever::loss::Scale;
use tercio_train::objectives::retriever::{RetrieverLosses, measure};
use tercio_train::options::{KlMean, MOST_PASSAGES, PrecisionOptions, TextOptions};
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::ranks::start;
use tercio_train::run::Signals;
use tercio_train::setup::retriever::{encoding, open_retriever_among};

use super::common::{self, MOST_QUESTIONS, line, within};

/// Flags of `tercio eval retriever`.
#[derive(Args)]
pub struct EvalRetriever {
    /// Model: a retriever's folder, or a run's folder, which stands for its best checkpoint
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH")]
    model_path: String,
    /// Folder of the tokenizer (tokenizer.json or vocab.txt); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    /// Tokens of a question at most; default: as the retriever was trained
    #[arg(long, env = "TERCIO_QUESTION_MAXLENGTH")]
    question_maxlength: Option<usize>,
    /// Tokens of "title + passage" at most; default: as the retriever was trained
    #[arg(long, env = "TERCIO_PASSAGE_MAXLENGTH")]
    passage_maxlength: Option<usize>,
    #[command(flatten)]
    text: TextOptions,
    /// Examples: questions with passages that have scores, judgements (`hasanswer`), or both
    #[arg(long, env = "TERCIO_EVAL_DATA")]
    eval_data: PathBuf,
    /// Passages of each question, best score first; 0: all
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 0)]
    n_context: usize,
    /// Questions to use, from the start of the file; -1: all
    #[arg(long, env = "TERCIO_MAXLOAD", default_value_t = -1, allow_negative_numbers = true)]
    maxload: i64,
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
    /// Batches between progress lines
    #[arg(long, env = "TERCIO_EVAL_PRINT_FREQ", default_value_t = 1000)]
    eval_print_freq: u64,
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

impl EvalRetriever {
    /// Evaluates.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let place = common::place(Flags { local_rank: self.local_rank, main_port: self.main_port })?;
        let threads = common::threads_of_rank(self.threads)?;
        common::start_log(&place, self.quiet)?;
        let signals = Signals::install()?;
        let world = common::join(&place, &self.link)?;
        let figures = match common::end(&world, self.evaluate(&world, threads, &signals))? {
            Ok(figures) if world.is_main() => figures,
            Ok(_) => return Ok(ExitCode::SUCCESS),
            Err(code) => return Ok(code),
        };
        if self.json {
            let figures: Map<String, Value> =
                figures.iter().map(|(name, v)| ((*name).to_owned(), (*v).into())).collect();
            line(&Value::from(figures).to_string())?;
        } else {
            line(&measure::text(&figures))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn check(&self) -> Result<(), TrainError> {
        self.link.check().map_err(TrainError::Options)?;
        self.text.templates().map_err(TrainError::Options)?;
        within(&[("per_gpu_batch_size", self.per_gpu_batch_size, MOST_QUESTIONS)])?;
        if self.n_context > MOST_PASSAGES {
            let n = self.n_context;
            return Err(TrainError::Options(format!("--n_context {n}: expected at most {MOST_PASSAGES}")));
        }
        if self.maxload < -1 || self.maxload == 0 {
            return Err(TrainError::Options("--maxload must be -1 (all) or at least 1".into()));
        }
        if self.eval_print_freq == 0 {
            return Err(TrainError::Options("--eval_print_freq must be at least 1".into()));
        }
        Ok(())
    }

    fn evaluate(
        &self,
        world: &World,
        threads: usize,
        signals: &Signals,
    ) -> Result<Vec<(&'static str, f64)>, TrainError> {
        let device: Cpu = start::device_among(world, threads, self.compute.get())?;
        let tokenizer = self.tokenizer.as_deref();
        let opened = device.run(|| open_retriever_among(world, &self.model_path, tokenizer, &device))?;
        let (data, cache) = (&self.eval_data, self.cache_dir.as_deref());
        let examples: RetrievalExamples = open_among(world, data, cache, self.link.broadcast_data)?;
        let lengths = (self.question_maxlength, self.passage_maxlength);
        let encoding = encoding(&opened.loaded.model, &self.text, lengths)?;
        let ranker = Ranker {
            device: &device,
            model: &opened.loaded.model,
            parameters: &opened.loaded.parameters,
            tokenizer: &opened.tokenizer,
            encoding: &encoding,
            losses: RetrieverLosses {
                kl: 1.0,
                kl_mean: KlMean::Element,
                contrastive: 0.0,
                label_smoothing: 0.0,
                scale: Scale::new(opened.loaded.model.score_divisor(), 1.0, 1.0),
            },
            needs_scores: false,
            teacher: None,
            n_context: if self.n_context == 0 { usize::MAX } else { self.n_context },
            batch: self.per_gpu_batch_size,
            print_freq: self.eval_print_freq,
        };
        let limit = usize::try_from(self.maxload).unwrap_or(usize::MAX);
        let stop = || signals.requested().is_some();
        let measured = device.run(|| ranker.measure_among(world, &examples, limit, &stop));
        let tally = match measured {
            Err(TrainError::Interrupted) => return Err(TrainError::Stopped),
            other => other?,
        };
        // How the model was trained is not known here: its own loss may be another.
        let name = |name| if name == measure::NAMES[0] { measure::KL_ELEMENT_MEAN } else { name };
        let figures: Vec<_> = tally.figures().into_iter().map(|(n, value)| (name(n), value)).collect();
        // Nobody is done before rank 0 has seen everything.
        world.barrier()?;
        if world.is_main() && figures.is_empty() {
            return Err(TrainError::Unusable(format!(
                "{}: no example has scores of all its passages, or judged ones: nothing to measure",
                data.display()
            )));
        }
        Ok(figures)
    }
}
