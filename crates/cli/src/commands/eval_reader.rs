//! `tercio eval reader`: exact match and F1 of a reader on a file, with FiD's files of results on demand.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_train::evaluate::{EvaluationFiles, EvaluationReport, evaluate_among};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::device::open_device;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::run::Signals;
use tercio_train::{TrainError, on_device, options};

use super::common::{self, line};
use super::reader_flags::{ReaderFlags, load};

/// Flags of `tercio eval reader`.
#[derive(Args)]
pub struct EvalReader {
    #[command(flatten)]
    reader: ReaderFlags,
    /// Questions to answer: .json or .jsonl, also .gz or .zst
    #[arg(long, env = "TERCIO_EVAL_DATA")]
    eval_data: PathBuf,
    /// Passages of each question that are read, best score first
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 1)]
    n_context: usize,
    /// Questions to use, from the start of the file; -1: all
    #[arg(long, env = "TERCIO_MAXLOAD", default_value_t = -1, allow_negative_numbers = true)]
    maxload: i64,
    /// Write the predictions here, JSON lines in input order: id, question, prediction, log_probability,
    /// mean_log_probability, beam_score (with --num-beams), alternatives (with --num-return-sequences), answers,
    /// exact_match, f1, scores
    #[arg(long)]
    output: Option<PathBuf>,
    /// Add the reader's score of every passage (Fusion-in-Decoder's cross-attention score) to --output
    #[arg(long)]
    scores: bool,
    /// Write final_output.txt (id, tab, answer) into the folder of --name
    #[arg(long)]
    write_results: bool,
    /// Write dataset_wscores.json (the questions with the reader's passage scores) into the folder of --name
    #[arg(long)]
    write_crossattention_scores: bool,
    /// Name of the folder below --checkpoint_dir for --write_results and --write_crossattention_scores
    #[arg(long, env = "TERCIO_NAME", default_value = "experiment_name")]
    name: String,
    /// Folder of all runs
    #[arg(long, env = "TERCIO_CHECKPOINT_DIR", default_value = "./checkpoint/")]
    checkpoint_dir: PathBuf,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Batches between progress lines
    #[arg(long, env = "TERCIO_EVAL_PRINT_FREQ", default_value_t = 1000)]
    eval_print_freq: u64,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    unused: Unused,
    /// Print the figures as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

/// Flags of FiD's test script that have no bearing on an evaluation.
#[derive(Args)]
struct Unused {
    #[arg(long, hide = true)]
    answer_maxlength: Option<i64>,
    #[arg(long, hide = true)]
    model_size: Option<String>,
    #[arg(long, hide = true)]
    train_data: Option<String>,
    #[arg(long, hide = true)]
    seed: Option<u64>,
    #[arg(long, hide = true)]
    eval_freq: Option<u64>,
    #[arg(long, hide = true)]
    save_freq: Option<u64>,
    #[arg(long, hide = true)]
    use_checkpoint: bool,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    local_rank: i64,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    main_port: i64,
}

impl Unused {
    fn given(&self) -> Vec<&'static str> {
        [
            ("--answer_maxlength", self.answer_maxlength.is_some()),
            ("--model_size", self.model_size.is_some()),
            ("--train_data", self.train_data.is_some()),
            ("--seed", self.seed.is_some()),
            ("--eval_freq", self.eval_freq.is_some()),
            ("--save_freq", self.save_freq.is_some()),
            ("--use_checkpoint", self.use_checkpoint),
        ]
        .into_iter()
        .filter_map(|(flag, given)| given.then_some(flag))
        .collect()
    }
}

impl EvalReader {
    /// Evaluates.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check().map_err(TrainError::Options)?;
        let flags = Flags { local_rank: self.unused.local_rank, main_port: self.unused.main_port };
        let place = common::place(flags)?;
        let threads = common::threads_of_rank(self.reader.threads)?;
        common::start_log(&place, self.quiet)?;
        for flag in self.unused.given() {
            tracing::info!("{flag} does nothing in an evaluation");
        }
        let signals = Signals::install()?;
        let world = common::join(&place, &self.link)?;
        let open = || open_device(&world, threads, self.reader.compute.get(), &self.reader.device);
        let evaluated = open().and_then(|device| on_device!(&device, |d| self.evaluate(&world, d, &signals)));
        let report = match common::end(&world, evaluated)? {
            Ok(report) if world.is_main() => report,
            Ok(_) => return Ok(ExitCode::SUCCESS),
            Err(code) => return Ok(code),
        };
        if self.json {
            line(&serde_json::to_string(&report)?)?;
        } else {
            line(&sentence(&report))?;
            for file in &report.files {
                tracing::info!("wrote {}", file.display());
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn evaluate<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        signals: &Signals,
    ) -> Result<EvaluationReport, TrainError> {
        let loaded = load(&self.reader, world, device)?;
        let (data, cache) = (&self.eval_data, self.cache_dir.as_deref());
        let questions = open_among(world, data, cache, self.link.broadcast_data)?;
        let folder = self.checkpoint_dir.join(&self.name);
        let files = EvaluationFiles {
            predictions: self.output.clone(),
            final_output: self.write_results.then(|| folder.join("final_output.txt")),
            wscores: self.write_crossattention_scores.then(|| folder.join("dataset_wscores.json")),
        };
        let mut predictor = loaded.predictor(&self.reader, device, self.n_context);
        predictor.scores = self.scores || self.write_crossattention_scores;
        predictor.print_freq = self.eval_print_freq;
        let limit = usize::try_from(self.maxload).unwrap_or(usize::MAX);
        let stop = || signals.requested().is_some();
        let report = device.run(|| evaluate_among(world, &predictor, &questions, limit, &files, &stop))?;
        // Nobody is done before rank 0 has written everything.
        world.barrier()?;
        Ok(report)
    }

    fn check(&self) -> Result<(), String> {
        self.link.check()?;
        options::check_name(&self.name)?;
        if self.maxload < -1 || self.maxload == 0 {
            return Err("--maxload must be -1 (all) or at least 1".into());
        }
        if self.eval_print_freq == 0 {
            return Err("--eval_print_freq must be at least 1".into());
        }
        if self.scores && self.output.is_none() {
            return Err("--scores adds to --output: name a file there".into());
        }
        if self.write_crossattention_scores && self.n_context == 0 {
            return Err("--write_crossattention_scores needs passages: --n_context of at least 1".into());
        }
        Ok(())
    }
}

fn sentence(r: &EvaluationReport) -> String {
    let (Some(em), Some(f1)) = (r.exact_match, r.f1) else {
        return format!("{} questions answered, none has `answers`: nothing to measure", r.questions);
    };
    let without = match r.without_answers {
        0 => String::new(),
        n => format!(" ({n} more have no answers and are not counted)"),
    };
    format!("exact match {:.2}, F1 {:.2} over {} questions{without}", 100.0 * em, 100.0 * f1, r.counted)
}
