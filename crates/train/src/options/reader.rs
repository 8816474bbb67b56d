//! What is a reader's own among the settings of its training.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Init, TaskOptions, TrainOptions};

/// Most tokens of a passage that are believed to be meant; memory grows with it.
pub const MOST_TEXT_TOKENS: usize = 1 << 16;
/// Most tokens of an answer that are believed to be meant; memory grows with it.
pub const MOST_ANSWER_TOKENS: usize = 1 << 12;

/// All settings of `tercio train reader`.
pub type ReaderOptions = TrainOptions<ReaderModelOptions>;

/// The model and its inputs.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct ReaderModelOptions {
    /// Model to start from: a folder (Hugging Face or FiD layout) or a hub name; step 0 of a run without checkpoints
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH", default_value = "none")]
    pub model_path: String,
    /// Size of T5: small, base, large, 3b, 11b; pretrained `t5-SIZE` unless --init random
    #[arg(long, env = "TERCIO_MODEL_SIZE", default_value = "base")]
    pub model_size: String,
    /// Initial weights
    #[arg(long, value_enum, env = "TERCIO_INIT", default_value_t = Init::Pretrained)]
    pub init: Init,
    /// config.json of the shape for --init random, instead of --model_size
    #[arg(long, env = "TERCIO_MODEL_CONFIG")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_config: Option<PathBuf>,
    /// Folder of the tokenizer (tokenizer.json or spiece.model); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens of "question + title + passage" at most
    #[arg(long, env = "TERCIO_TEXT_MAXLENGTH", default_value_t = 200)]
    pub text_maxlength: usize,
    /// Tokens of a target at most, its end token counted; -1: no limit
    #[arg(long, env = "TERCIO_ANSWER_MAXLENGTH", default_value_t = -1, allow_negative_numbers = true)]
    pub answer_maxlength: i64,
    /// Leave the titles out of the inputs
    #[arg(long, env = "TERCIO_NO_TITLE")]
    pub no_title: bool,
    /// Passages of each question that are read
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 1)]
    pub n_context: usize,
    /// Passages of each question that are read in evaluation; 0: as --n_context
    #[arg(long, env = "TERCIO_EVAL_N_CONTEXT", default_value_t = 0)]
    pub eval_n_context: usize,
    /// End every passage with `</s>`, as newer libraries do (FiD's released models were trained without)
    #[arg(long, env = "TERCIO_PASSAGE_EOS")]
    pub passage_eos: bool,
    /// Keep only each encoder layer's input for the backward pass and compute the rest again
    #[arg(long, visible_alias = "use-checkpoint", env = "TERCIO_RECOMPUTE")]
    pub recompute: bool,
    /// Tokens of a generated answer at most, the start token counted
    #[arg(long, env = "TERCIO_GENERATION_MAX_LENGTH", default_value_t = 50)]
    pub generation_max_length: usize,
}

impl TaskOptions for ReaderModelOptions {
    const NAME: &'static str = "reader";
    const MAY_CHANGE: &'static [&'static str] =
        &["eval_n_context", "model_path", "model_config", "tokenizer"];

    fn added() -> Vec<(&'static str, toml::Value)> {
        vec![
            ("precision", "f32".into()),
            ("no_decay", "".into()),
            ("scale_parameter", false.into()),
            ("relative_step", false.into()),
            ("clip_threshold", 1.0.into()),
            ("decay_rate", (-0.8).into()),
            ("label_smoothing", 0.0.into()),
        ]
    }
    fn check(&self, _: &TrainOptions<Self>) -> Result<(), String> {
        check_lengths(self.text_maxlength, self.generation_max_length)?;
        if self.answer_maxlength < -1 {
            return Err("--answer_maxlength must be -1 (no limit) or more".into());
        }
        Ok(())
    }
}

/// Refuses lengths of passages and answers that no reader can mean.
pub fn check_lengths(text_maxlength: usize, generation_max_length: usize) -> Result<(), String> {
    if !(1..=MOST_TEXT_TOKENS).contains(&text_maxlength) {
        return Err(format!("--text_maxlength {text_maxlength}: expected 1 to {MOST_TEXT_TOKENS}"));
    }
    if !(2..=MOST_ANSWER_TOKENS).contains(&generation_max_length) {
        return Err(format!(
            "--generation_max_length {generation_max_length}: expected 2 to {MOST_ANSWER_TOKENS}"
        ));
    }
    Ok(())
}
