//! What is a retriever's own among the settings of its training.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tercio_data::DataError;
use tercio_data::template::TextTemplate;

use super::{Init, MOST_TEXT_TOKENS, TaskOptions, TrainOptions};

/// Most elements of a vector that are believed to be meant.
pub const MOST_DIMENSIONS: usize = 1 << 16;
/// Most passages of a question that are believed to be meant.
pub const MOST_PASSAGES: usize = 1 << 16;

/// All settings of `tercio train retriever`.
pub type RetrieverOptions = TrainOptions<RetrieverModelOptions>;

/// What a retriever learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetrieverLoss {
    /// A reader's scores of each question's passages: Kullback-Leibler divergence (Fusion-in-Decoder's distillation).
    Kl,
    /// Each question's positive passage against all other passages of the update.
    Contrastive,
    /// The sum of both, by --kl_weight and --contrastive_weight.
    Both,
}

/// What the divergence is a mean over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KlMean {
    /// Questions times passages, as FiD has it: the true divergence over the number of passages.
    Element,
    /// Questions: the true divergence.
    Batch,
}

/// The texts of questions and passages.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
pub struct TextOptions {
    /// Leave the titles out of the passages
    #[arg(long, env = "TERCIO_NO_TITLE")]
    pub no_title: bool,
    /// Text of a question, with {question}; default: `question: {question}`
    #[arg(long, env = "TERCIO_QUESTION_TEMPLATE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub question_template: Option<String>,
    /// Text of a passage, with {title} and {text}; default: `title: {title} context: {text}`
    #[arg(long, env = "TERCIO_PASSAGE_TEMPLATE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passage_template: Option<String>,
}

impl TextOptions {
    /// The templates of questions and of passages.
    ///
    /// # Errors
    /// A template without the places that it needs.
    pub fn templates(&self) -> Result<(TextTemplate, TextTemplate), String> {
        let read =
            |flag: &str, text: &Option<String>, default: TextTemplate| -> Result<TextTemplate, String> {
                let template =
                    text.as_ref().map(|t| t.parse().map_err(|e: DataError| format!("--{flag}: {e}")));
                let template: TextTemplate = template.transpose()?.unwrap_or(default.clone());
                if template.is_for_questions() == default.is_for_questions() {
                    return Ok(template);
                }
                let place = if default.is_for_questions() { "{question}" } else { "{text} and {title}" };
                Err(format!("--{flag} {template:?}: expected a place for {place}"))
            };
        if self.no_title && self.passage_template.is_some() {
            return Err(
                "--no_title is one template of passages, --passage_template another: give one of them".into(),
            );
        }
        Ok((
            read("question_template", &self.question_template, TextTemplate::question())?,
            read("passage_template", &self.passage_template, TextTemplate::passage(self.no_title))?,
        ))
    }
}

/// The model, its inputs and its losses.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct RetrieverModelOptions {
    /// Model to start from: a folder of a retriever or of a BERT-like encoder (Hugging Face), or a hub name; none:
    /// bert-base-uncased. Step 0 of a run without checkpoints
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH", default_value = "none")]
    pub model_path: String,
    /// Initial weights
    #[arg(long, value_enum, env = "TERCIO_INIT", default_value_t = Init::Pretrained)]
    pub init: Init,
    /// config.json of the encoder's shape for --init random
    #[arg(long, env = "TERCIO_MODEL_CONFIG")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_config: Option<PathBuf>,
    /// Folder of the tokenizer (tokenizer.json or vocab.txt); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Elements of a vector; default: what the retriever in --model_path has, 768 for a new projection
    #[arg(long, env = "TERCIO_INDEXING_DIMENSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub indexing_dimension: Option<usize>,
    /// No projection after the encoder: vectors are as wide as its states
    #[arg(long, env = "TERCIO_NO_PROJECTION")]
    pub no_projection: bool,
    /// Tokens of a question at most, its special tokens counted; default: what the retriever in --model_path has, 40 for a
    /// plain encoder
    #[arg(long, env = "TERCIO_QUESTION_MAXLENGTH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub question_maxlength: Option<usize>,
    /// Tokens of "title + passage" at most, special tokens counted; default: what the retriever in --model_path has, 200 for
    /// a plain encoder
    #[arg(long, env = "TERCIO_PASSAGE_MAXLENGTH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passage_maxlength: Option<usize>,
    /// Pad questions to their maximum, and let the padding count as text
    #[arg(long, env = "TERCIO_NO_QUESTION_MASK")]
    pub no_question_mask: bool,
    /// Pad passages to their maximum, and let the padding count as text
    #[arg(long, env = "TERCIO_NO_PASSAGE_MASK")]
    pub no_passage_mask: bool,
    /// Take the first token's state instead of the mean
    #[arg(long, env = "TERCIO_EXTRACT_CLS")]
    pub extract_cls: bool,
    /// Divide vectors by their length: scores are cosines, and not divided by the root of the dimension. So it is by itself
    /// where --model_path is a folder of sentence-transformers that does so
    #[arg(long, env = "TERCIO_NORMALIZE", visible_alias = "normalise")]
    pub normalize: bool,
    /// Texts of questions and passages.
    #[command(flatten)]
    #[serde(flatten)]
    pub text: TextOptions,
    /// Passages of each question whose scores are distilled, best first
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 1)]
    pub n_context: usize,
    /// Passages of each question in evaluation; 0: as --n_context, all of them where only --loss contrastive is trained
    #[arg(long, env = "TERCIO_EVAL_N_CONTEXT", default_value_t = 0)]
    pub eval_n_context: usize,
    /// Keep only each layer's input for the backward pass and compute the rest again
    #[arg(long, visible_alias = "use-checkpoint", env = "TERCIO_RECOMPUTE")]
    pub recompute: bool,
    /// What the retriever learns from
    #[arg(long, value_enum, env = "TERCIO_LOSS", default_value_t = RetrieverLoss::Kl)]
    pub loss: RetrieverLoss,
    /// What the divergence is a mean over
    #[arg(long, value_enum, env = "TERCIO_KL_MEAN", default_value_t = KlMean::Element)]
    pub kl_mean: KlMean,
    /// Divisor of the retriever's scores, beside the root of the dimension; of cosines 0.05 is usual
    #[arg(long, env = "TERCIO_TEMPERATURE", default_value_t = 1.0)]
    pub temperature: f64,
    /// Divisor of the teacher's scores
    #[arg(long, env = "TERCIO_TEACHER_TEMPERATURE", default_value_t = 1.0)]
    pub teacher_temperature: f64,
    /// Weight of the divergence with --loss both
    #[arg(long, env = "TERCIO_KL_WEIGHT", default_value_t = 1.0)]
    pub kl_weight: f64,
    /// Weight of the contrastive loss with --loss both
    #[arg(long, env = "TERCIO_CONTRASTIVE_WEIGHT", default_value_t = 1.0)]
    pub contrastive_weight: f64,
    /// Contrastive: hard negatives of each question; other negatives stand in where there are too few
    #[arg(long, env = "TERCIO_HARD_NEGATIVES", default_value_t = 1)]
    pub hard_negatives: usize,
    /// Contrastive: other negatives of each question, beside the hard ones
    #[arg(long, env = "TERCIO_OTHER_NEGATIVES", default_value_t = 0)]
    pub other_negatives: usize,
    /// Contrastive: draw the positive passage anew every epoch, instead of taking the first
    #[arg(long, env = "TERCIO_DRAW_POSITIVE")]
    pub draw_positive: bool,
    /// Contrastive: draw the negatives anew every epoch, instead of taking the first ones
    #[arg(long, env = "TERCIO_DRAW_NEGATIVES")]
    pub draw_negatives: bool,
    /// A trained reader (a folder, a hub name, or a run's folder) that scores the passages on the fly: the training data
    /// needs no scores then
    #[arg(long, env = "TERCIO_TEACHER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<String>,
    /// Tokens of "question + title + passage" at most that the teacher reads
    #[arg(long, env = "TERCIO_TEACHER_TEXT_MAXLENGTH", default_value_t = 200)]
    pub teacher_text_maxlength: usize,
    /// The teacher was trained with `</s>` at the end of every passage
    #[arg(long, env = "TERCIO_TEACHER_PASSAGE_EOS")]
    pub teacher_passage_eos: bool,
}

impl RetrieverModelOptions {
    /// Whether scores are distilled.
    pub fn distils(&self) -> bool {
        self.loss != RetrieverLoss::Contrastive
    }
    /// Whether positives are set against the passages of the whole update.
    pub fn contrasts(&self) -> bool {
        self.loss != RetrieverLoss::Kl
    }
}

impl TaskOptions for RetrieverModelOptions {
    const NAME: &'static str = "retriever";
    const MAY_CHANGE: &'static [&'static str] =
        &["eval_n_context", "model_path", "model_config", "tokenizer", "teacher"];

    fn added() -> Vec<(&'static str, toml::Value)> {
        vec![("normalize", false.into())]
    }
    fn check(&self, all: &TrainOptions<Self>) -> Result<(), String> {
        let lengths = [
            ("question_maxlength", self.question_maxlength),
            ("passage_maxlength", self.passage_maxlength),
            ("teacher_text_maxlength", Some(self.teacher_text_maxlength)),
        ];
        let lengths = lengths.into_iter().filter_map(|(flag, n)| Some((flag, n?)));
        if let Some((flag, n)) = lengths.into_iter().find(|(_, n)| !(1..=MOST_TEXT_TOKENS).contains(n)) {
            return Err(format!("--{flag} {n}: expected 1 to {MOST_TEXT_TOKENS}"));
        }
        if let Some(n) = self.indexing_dimension.filter(|n| !(1..=MOST_DIMENSIONS).contains(n)) {
            return Err(format!("--indexing_dimension {n}: expected 1 to {MOST_DIMENSIONS}"));
        }
        for (flag, value) in
            [("temperature", self.temperature), ("teacher_temperature", self.teacher_temperature)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("--{flag} must be a number above 0, is {value}"));
            }
        }
        for (flag, value) in [("kl_weight", self.kl_weight), ("contrastive_weight", self.contrastive_weight)]
        {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!("--{flag} must be a number of at least 0, is {value}"));
            }
        }
        if self.loss == RetrieverLoss::Both && self.kl_weight == 0.0 && self.contrastive_weight == 0.0 {
            return Err("--kl_weight 0 --contrastive_weight 0: --loss both would learn nothing; give one of them a weight \
                        above 0"
                .into());
        }
        let counts = [
            ("n_context", self.n_context),
            ("eval_n_context", self.eval_n_context),
            ("hard_negatives", self.hard_negatives),
            ("other_negatives", self.other_negatives),
        ];
        if let Some((flag, n)) = counts.iter().find(|(_, n)| *n > MOST_PASSAGES) {
            return Err(format!("--{flag} {n}: expected at most {MOST_PASSAGES}"));
        }
        self.text.templates()?;
        if self.distils() && self.n_context < 2 {
            return Err(format!(
                "--n_context {}: distillation compares the passages of a question with each other; give at least 2",
                self.n_context
            ));
        }
        if !self.distils() && self.teacher.is_some() {
            return Err(
                "--teacher scores passages for --loss kl or both; leave it out, or choose one of them".into(),
            );
        }
        if !self.contrasts() && all.optim.label_smoothing > 0.0 {
            return Err(
                "--label_smoothing spreads the target of --loss contrastive; with --loss kl leave it out"
                    .into(),
            );
        }
        let passages =
            all.data.batch_plan()?.global.saturating_mul(1 + self.hard_negatives + self.other_negatives);
        if !self.distils() && passages < 2 {
            return Err("--loss contrastive sets a positive passage against the others of its update, and there would be none: \
                        give a larger --global_batch_size (or --per_gpu_batch_size), or --hard_negatives"
                .into());
        }
        Ok(())
    }
}
