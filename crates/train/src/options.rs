//! The settings of a training: each field is a flag, a key of `config.toml`, and an environment variable
//! (`TERCIO_` and its name), with its default and its help said once, here.
//!
//! Names are FiD's where it has the setting; `--train_data` and `--train-data` are the same flag.

mod classifier;
mod colbert;
mod device;
mod optim;
mod precision;
mod reader;
mod retriever;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

pub use classifier::{
    Anneal, ClassWeights, ClassifierHead, ClassifierModelOptions, ClassifierOptions, ClassifierPooling,
    MissingSplits, Recipe, Reduction, UnknownLabelsOption, UseModel, classifier_options, columns_of, dashed,
    with_recipe,
};
pub use colbert::{ColbertLossKind, ColbertModelOptions, ColbertOptions, ColbertTextOptions};
pub use device::{DeviceChoice, DeviceOptions};
pub use optim::{Optim, OptimOptions, Scheduler};
pub use precision::{Precision, PrecisionOptions};
pub use reader::{MOST_ANSWER_TOKENS, MOST_TEXT_TOKENS, ReaderModelOptions, ReaderOptions, check_lengths};
pub use retriever::{
    KlMean, MOST_DIMENSIONS, MOST_PASSAGES, RetrieverLoss, RetrieverModelOptions, RetrieverOptions,
    TextOptions,
};

use crate::ranks::options::{self as rank_options, RankOptions, Shard};
use crate::trainer::LoopOptions;

/// What becomes of the examples that do not fill a batch at the end of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LastBatch {
    /// They are left out of this epoch (as FiD does).
    Drop,
    /// They make a short update.
    Keep,
}

/// Where initial weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// From --model_path, or the pretrained model of --model_size.
    Pretrained,
    /// Random, of the shape of --model_config or --model_size.
    Random,
}

/// The run: its folder, and what it starts from.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct RunOptions {
    /// Name of the run: its folder below --checkpoint_dir
    #[arg(long, env = "TERCIO_NAME", default_value = "experiment_name")]
    pub name: String,
    /// Folder of all runs
    #[arg(long, env = "TERCIO_CHECKPOINT_DIR", default_value = "./checkpoint/")]
    pub checkpoint_dir: PathBuf,
    /// Seed of initial values, order of examples, choice of targets and dropout
    #[arg(long, env = "TERCIO_SEED", default_value_t = 0)]
    pub seed: u64,
    /// Threads of this process; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    pub threads: usize,
    /// Seconds from a signal (SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C) to the kill that follows: where the rest of an update and
    /// a checkpoint would take longer, the update is dropped and the last boundary saved at once
    #[arg(long, env = "TERCIO_GRACE_SECONDS", default_value_t = crate::trainer::DEFAULT_GRACE_SECONDS)]
    pub grace_seconds: u64,
    /// Start over where the run folder holds a run of another configuration: its content is moved aside, not deleted
    #[arg(long)]
    #[serde(skip)]
    pub new_run: bool,
    /// Print the plan (examples, updates, tokens, memory, time after two measured updates) and stop
    #[arg(long)]
    #[serde(skip)]
    pub dry_run: bool,
    /// Several ranks.
    #[command(flatten)]
    #[serde(flatten)]
    pub ranks: RankOptions,
    /// Set by torch.distributed.launch; must stay -1 otherwise
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    #[serde(skip)]
    pub local_rank: i64,
    /// Port where the ranks meet under srun and MPI, 10001 to 20000; -1: derived from the job
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    #[serde(skip)]
    pub main_port: i64,
}

/// Data, batches and evaluation.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct DataOptions {
    /// Training questions: .json or .jsonl, also .gz or .zst
    #[arg(long, env = "TERCIO_TRAIN_DATA")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_data: Option<PathBuf>,
    /// Questions to evaluate on while training; none: no evaluation
    #[arg(long, env = "TERCIO_EVAL_DATA")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_data: Option<PathBuf>,
    /// Examples of the training file to use, from its start; -1: all
    #[arg(long, env = "TERCIO_MAXLOAD", default_value_t = -1, allow_negative_numbers = true)]
    pub maxload: i64,
    /// Questions of an update; 0: --per_gpu_batch_size times --accumulation_steps
    #[arg(long, visible_alias = "mini-batch-size", env = "TERCIO_GLOBAL_BATCH_SIZE", default_value_t = 0)]
    pub global_batch_size: usize,
    /// Questions of a shard, the unit of work and memory; 0: --per_gpu_batch_size
    #[arg(
        long,
        visible_alias = "mini-batch-chunk-size",
        env = "TERCIO_MICRO_BATCH_SIZE",
        default_value_t = 0
    )]
    pub micro_batch_size: usize,
    /// Groups of shards whose gradients are summed along one fixed tree, a power of two; 0: up to 8
    #[arg(long, env = "TERCIO_BIT_GROUPS", default_value_t = 0)]
    pub bit_groups: usize,
    /// FiD's name for the questions of a shard; 0: all of --global_batch_size
    #[arg(long, env = "TERCIO_PER_GPU_BATCH_SIZE", default_value_t = 1)]
    #[serde(skip)]
    pub per_gpu_batch_size: usize,
    /// FiD's name for the shards of an update
    #[arg(long, env = "TERCIO_ACCUMULATION_STEPS", default_value_t = 1)]
    #[serde(skip)]
    pub accumulation_steps: usize,
    /// The rest of an epoch that does not fill a batch
    #[arg(long, value_enum, env = "TERCIO_LAST_BATCH", default_value_t = LastBatch::Drop)]
    pub last_batch: LastBatch,
    /// Updates between evaluations
    #[arg(long, env = "TERCIO_EVAL_FREQ", default_value_t = 500)]
    pub eval_freq: u64,
    /// Updates between checkpoints
    #[arg(long, env = "TERCIO_SAVE_FREQ", default_value_t = 5000)]
    pub save_freq: u64,
    /// Updates between lines of metrics.jsonl
    #[arg(long, env = "TERCIO_LOG_FREQ", default_value_t = 10)]
    pub log_freq: u64,
    /// Updates between norms of every layer's gradient and values in the logs; 0: none
    #[arg(long, env = "TERCIO_STATS_FREQ", default_value_t = 0)]
    pub stats_freq: u64,
    /// Batches between progress lines of an evaluation
    #[arg(long, env = "TERCIO_EVAL_PRINT_FREQ", default_value_t = 1000)]
    pub eval_print_freq: u64,
    /// Checkpoints to keep, the best and the latest apart; 0: all
    #[arg(long, env = "TERCIO_KEEP_LAST", default_value_t = 2)]
    pub keep_last: usize,
    /// Evaluations without a better score before the run ends; 0: never
    #[arg(long, env = "TERCIO_EARLY_STOP", default_value_t = 0)]
    pub early_stop: u64,
}

/// What is a task's own among the settings of its training: the model and its inputs.
pub trait TaskOptions: Args + Clone + Serialize + Send + Sync {
    /// The task, as in `tercio train TASK`.
    const NAME: &'static str;
    /// Own settings that may differ when a run goes on.
    const MAY_CHANGE: &'static [&'static str];

    /// Whether 0 of --total_steps, --eval_freq and --save_freq is settled by whole epochs ([`TaskOptions::settle`]).
    const COUNTS_EPOCHS: bool = false;
    /// What --train_data holds.
    const TRAIN_DATA: &'static str = "the questions to train on (.json or .jsonl, also .gz or .zst)";

    /// Whether there is something to evaluate on.
    fn evaluates(&self, data: &DataOptions) -> bool {
        data.eval_data.is_some()
    }

    /// Settles what depends on the number of training examples, before the first update.
    ///
    /// # Errors
    /// A sentence for the user.
    fn settle(&self, _settings: &mut LoopOptions, _examples: usize) -> Result<(), String> {
        Ok(())
    }
    /// What a person should know of the settings, as sentences.
    fn notes(&self, _all: &TrainOptions<Self>) -> Vec<String> {
        Vec::new()
    }
    /// Own settings that came later than the task's first runs, and what those did before.
    fn added() -> Vec<(&'static str, toml::Value)>;
    /// What is wrong with them, if anything, said before any file is opened.
    ///
    /// # Errors
    /// A sentence for the user.
    fn check(&self, all: &TrainOptions<Self>) -> Result<(), String>;
}

/// All settings of a training.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct TrainOptions<T: Args> {
    /// The run.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunOptions,
    /// The model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: T,
    /// Data and evaluation.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataOptions,
    /// The optimizer.
    #[command(flatten)]
    #[serde(flatten)]
    pub optim: OptimOptions,
    /// How it is computed.
    #[command(flatten)]
    #[serde(flatten)]
    pub compute: PrecisionOptions,
    /// Where it is computed: not a setting of the run, which may go on elsewhere.
    #[command(flatten)]
    #[serde(skip)]
    pub device: DeviceOptions,
}

/// Settings of every task that may differ when a run goes on: none changes what an update computes, but for the length of the schedule.
pub const MAY_CHANGE: &[&str] = &[
    "threads",
    "grace_seconds",
    "total_steps",
    "eval_freq",
    "save_freq",
    "log_freq",
    "stats_freq",
    "eval_print_freq",
    "keep_last",
    "early_stop",
    "checkpoint_dir",
    "name",
    "train_data",
    "eval_data",
];

/// Batch sizes after translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Questions of an update.
    pub global: usize,
    /// Questions of a shard.
    pub micro: usize,
    /// Shards of an update.
    pub shards: usize,
    /// Groups of shards, a power of two.
    pub groups: usize,
}

impl DataOptions {
    /// Translates FiD's batch flags and checks that the sizes fit each other.
    pub fn batch_plan(&self) -> Result<BatchPlan, String> {
        let micro = match (self.micro_batch_size, self.per_gpu_batch_size) {
            (0, 0) => self.global_batch_size,
            (0, n) | (n, _) => n,
        };
        let global = match self.global_batch_size {
            0 => micro.checked_mul(self.accumulation_steps).ok_or("the batch size is out of range")?,
            n => n,
        };
        if micro == 0 || global == 0 {
            return Err("batch sizes must be at least 1".into());
        }
        if global % micro != 0 {
            return Err(format!(
                "--global_batch_size {global} is not a multiple of --micro_batch_size {micro}; choose sizes that divide"
            ));
        }
        let shards = global / micro;
        let most = 1usize << shards.ilog2();
        let groups = if self.bit_groups == 0 { most.min(8) } else { self.bit_groups };
        if !groups.is_power_of_two() || groups > most {
            return Err(format!(
                "--bit_groups {groups} must be a power of two of at most the {shards} shards of an update"
            ));
        }
        Ok(BatchPlan { global, micro, shards, groups })
    }
}

impl RunOptions {
    /// Where this process stands, as far as flags say.
    pub fn place_flags(&self) -> tercio_comm::place::Flags {
        tercio_comm::place::Flags { local_rank: self.local_rank, main_port: self.main_port }
    }
}

/// Which settings may differ when a run goes on.
pub fn may_change<T: TaskOptions>() -> Vec<&'static str> {
    [MAY_CHANGE, rank_options::MAY_CHANGE, T::MAY_CHANGE].concat()
}

/// Refuses a name that would leave the folder of all runs.
pub fn check_name(name: &str) -> Result<(), String> {
    let plain = std::path::Path::new(name).components().all(|c| matches!(c, std::path::Component::Normal(_)));
    if name.is_empty() || !plain {
        return Err(format!("--name {name:?} must be the name of a folder below --checkpoint_dir"));
    }
    Ok(())
}

impl<T: TaskOptions> TrainOptions<T> {
    /// What is wrong with the settings, if anything, said before any file is opened.
    pub fn check(&self) -> Result<(), String> {
        let o = &self.optim;
        self.run.ranks.link.check()?;
        check_name(&self.run.name)?;
        for (flag, value) in [("eval_freq", self.data.eval_freq), ("save_freq", self.data.save_freq)] {
            if value == 0 && !T::COUNTS_EPOCHS {
                return Err(format!("--{flag} must be at least 1"));
            }
        }
        if self.data.log_freq == 0 || self.data.eval_print_freq == 0 {
            return Err("--log_freq and --eval_print_freq must be at least 1".into());
        }
        if o.total_steps == 0 && !T::COUNTS_EPOCHS {
            return Err("--total_steps must be at least 1".into());
        }
        o.check()?;
        if o.optim == Optim::Sgd && self.run.ranks.shard == Shard::Optimizer {
            return Err("--shard optimizer shares out the moments of adam and adamw, and sgd has none: leave --shard out".into());
        }
        if o.optim == Optim::Adafactor && self.run.ranks.shard == Shard::Optimizer {
            return Err("--shard optimizer shares out the moments of adam and adamw; Adafactor keeps next to nothing, and steps \
                        whole matrices: leave --shard out"
                .into());
        }
        if self.data.maxload < -1 {
            return Err("--maxload must be -1 (all) or more".into());
        }
        self.model.check(self)?;
        if self.data.early_stop > 0 && !self.model.evaluates(&self.data) {
            return Err(
                "--early_stop needs --eval_data: without evaluation nothing tells when to stop".into()
            );
        }
        if self.data.train_data.is_none() {
            return Err(format!("--train_data is missing: {}", T::TRAIN_DATA));
        }
        if self.run.seed > i64::MAX as u64 {
            return Err(format!(
                "--seed {}: expected at most 2^63 - 1, the largest number of TOML",
                self.run.seed
            ));
        }
        self.data.batch_plan().map(drop)
    }
    /// Settings that FiD ignores in silence and that do nothing here either, as sentences.
    pub fn notes(&self) -> Vec<String> {
        let o = &self.optim;
        let mut notes = o.notes();
        notes.extend(self.model.notes(self));
        if let Ok(plan) = self.data.batch_plan()
            && plan.shards > 1
            && !T::COUNTS_EPOCHS
        {
            notes.push(format!(
                "{} shards an update: steps, warm-up and frequencies count updates here; FiD counts micro-batches, its \
                 --total_steps {} would be {}",
                plan.shards,
                o.total_steps,
                o.total_steps.saturating_mul(plan.shards as u64)
            ));
        }
        notes
    }
}
