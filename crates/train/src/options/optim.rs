//! The optimizer and its schedule: the settings of every objective's training.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optim {
    /// Adam; no weight decay.
    Adam,
    /// AdamW: decoupled weight decay.
    Adamw,
    /// Adafactor: statistics by row and column instead of two moments of every value; decoupled weight decay.
    Adafactor,
    /// Plain stochastic gradient descent, without momentum; weight decay as in adamw.
    Sgd,
}

/// The course of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheduler {
    /// Constant, from the first update.
    Fixed,
    /// Linear warm-up from 0, then linear decay to 0 (or constant with --fixed_lr).
    Linear,
    /// Linear warm-up from 0, then half a cosine down to 0.
    Cosine,
}

impl Scheduler {
    /// Whether the learning rate has a warm-up and an end.
    pub fn has_course(self) -> bool {
        self != Scheduler::Fixed
    }
}

/// The optimizer and its schedule.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct OptimOptions {
    /// Optimizer updates of the run
    #[arg(long, env = "TERCIO_TOTAL_STEPS", default_value_t = 1000)]
    pub total_steps: u64,
    /// Updates of the warm-up of the linear and the cosine schedule
    #[arg(long, env = "TERCIO_WARMUP_STEPS", default_value_t = 1000)]
    pub warmup_steps: u64,
    /// Update at which the linear or the cosine schedule reaches 0; default: --total_steps
    #[arg(long, env = "TERCIO_SCHEDULER_STEPS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_steps: Option<u64>,
    /// Dropout; default: what the model's configuration says
    #[arg(long, env = "TERCIO_DROPOUT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Peak learning rate
    #[arg(long, env = "TERCIO_LR", default_value_t = 1e-4)]
    pub lr: f64,
    /// Greatest global L2 norm of the gradient; 0: no clipping
    #[arg(long, env = "TERCIO_CLIP", default_value_t = 1.0)]
    pub clip: f64,
    /// Optimizer
    #[arg(long, value_enum, env = "TERCIO_OPTIM", default_value_t = Optim::Adam)]
    pub optim: Optim,
    /// Course of the learning rate
    #[arg(long, value_enum, env = "TERCIO_SCHEDULER", default_value_t = Scheduler::Fixed)]
    pub scheduler: Scheduler,
    /// Weight decay of adamw, adafactor and sgd
    #[arg(long, env = "TERCIO_WEIGHT_DECAY", default_value_t = 0.1)]
    pub weight_decay: f64,
    /// With the linear schedule: constant after the warm-up
    #[arg(long, env = "TERCIO_FIXED_LR")]
    pub fixed_lr: bool,
    /// Parameters without weight decay: parts of names, with commas between them, as `bias,layer_norm`
    #[arg(long, env = "TERCIO_NO_DECAY", default_value = "")]
    pub no_decay: String,
    /// Adafactor: scale each parameter's rate by the root of the mean of its squares
    #[arg(long, env = "TERCIO_SCALE_PARAMETER")]
    pub scale_parameter: bool,
    /// Adafactor: the rate is the lesser of 0.01 and one by the root of the update's number, instead of --lr
    #[arg(long, env = "TERCIO_RELATIVE_STEP")]
    pub relative_step: bool,
    /// Adafactor: greatest root of the mean of squares of a parameter's step, before the rate
    #[arg(long, env = "TERCIO_CLIP_THRESHOLD", default_value_t = 1.0)]
    pub clip_threshold: f64,
    /// Adafactor: exponent by which the running means get longer with the updates
    #[arg(long, env = "TERCIO_DECAY_RATE", default_value_t = -0.8, allow_negative_numbers = true)]
    pub decay_rate: f64,
    /// Share of every target that is spread over the whole vocabulary
    #[arg(long, env = "TERCIO_LABEL_SMOOTHING", default_value_t = 0.0)]
    pub label_smoothing: f64,
}

impl Default for OptimOptions {
    /// The defaults of the flags.
    fn default() -> Self {
        OptimOptions {
            total_steps: 1000,
            warmup_steps: 1000,
            scheduler_steps: None,
            dropout: None,
            lr: 1e-4,
            clip: 1.0,
            optim: Optim::Adam,
            scheduler: Scheduler::Fixed,
            weight_decay: 0.1,
            fixed_lr: false,
            no_decay: String::new(),
            scale_parameter: false,
            relative_step: false,
            clip_threshold: 1.0,
            decay_rate: -0.8,
            label_smoothing: 0.0,
        }
    }
}

impl OptimOptions {
    /// What is wrong with the settings, if anything.
    pub fn check(&self) -> Result<(), String> {
        let o = self;
        for (flag, value) in [("lr", o.lr), ("clip", o.clip), ("weight_decay", o.weight_decay)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!("--{flag} must be a number of at least 0, is {value}"));
            }
        }
        if let Some(p) = o.dropout
            && !(0.0..1.0).contains(&p)
        {
            return Err(format!("--dropout must be at least 0 and less than 1, is {p}"));
        }
        if o.fixed_lr && o.scheduler == Scheduler::Cosine {
            return Err("--fixed_lr holds the linear schedule's rate after the warm-up: give --scheduler linear with it, or \
                        leave it out for a cosine"
                .into());
        }
        if !(0.0..1.0).contains(&o.label_smoothing) {
            let p = o.label_smoothing;
            return Err(format!("--label_smoothing must be at least 0 and less than 1, is {p}"));
        }
        if !(o.clip_threshold.is_finite() && o.clip_threshold > 0.0) {
            return Err(format!("--clip_threshold must be a number above 0, is {}", o.clip_threshold));
        }
        if !(-10.0..0.0).contains(&o.decay_rate) {
            return Err(format!("--decay_rate must be less than 0 and at least -10, is {}", o.decay_rate));
        }
        if o.optim != Optim::Adafactor && (o.scale_parameter || o.relative_step) {
            let flag = if o.scale_parameter { "scale_parameter" } else { "relative_step" };
            return Err(format!(
                "--{flag} is a setting of Adafactor: give --optim adafactor with it, or leave it out"
            ));
        }
        if o.relative_step && o.scheduler != Scheduler::Fixed {
            return Err("--relative_step is a course of the learning rate of its own: give --scheduler fixed with it, or \
                        leave it out"
                .into());
        }
        Ok(())
    }
    /// Settings that do nothing beside the others, as sentences.
    pub fn notes(&self) -> Vec<String> {
        let o = self;
        let mut notes: Vec<String> = Vec::new();
        if o.scheduler == Scheduler::Fixed {
            notes
                .push("--scheduler fixed: the learning rate is constant, --warmup_steps does nothing".into());
        }
        if o.optim == Optim::Adam {
            notes.push("--optim adam: --weight_decay does nothing (adamw, adafactor and sgd decay)".into());
        }
        if o.relative_step {
            notes.push("--relative_step: --lr does nothing".into());
        }
        notes
    }
}
