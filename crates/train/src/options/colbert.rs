//! What is a ColBERT model's own among the settings of its training.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tercio_data::DataError;
use tercio_data::template::TextTemplate;

use super::{DataOptions, MOST_DIMENSIONS, MOST_PASSAGES, MOST_TEXT_TOKENS, TaskOptions, TrainOptions};

/// Tokens that are believed to be meant by `--xtr_k`.
const MOST_RETRIEVED: usize = 1 << 24;

/// All settings of `tercio train colbert`.
pub type ColbertOptions = TrainOptions<ColbertModelOptions>;

/// What a ColBERT model learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColbertLossKind {
    /// Each query's positive document against all other documents of the update (PyLate's Contrastive and CachedContrastive).
    Contrastive,
    /// A teacher's scores of each query's documents: Kullback-Leibler divergence (PyLate's Distillation).
    Kl,
}

/// How the texts of a ColBERT model are made.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
pub struct ColbertTextOptions {
    /// Text of a query, with {question}; default: `{question}`
    #[arg(long, env = "TERCIO_QUESTION_TEMPLATE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub question_template: Option<String>,
    /// Text of a document, with {title} and {text}; default: `{title} {text}`, without the space where there is no title
    #[arg(long, env = "TERCIO_PASSAGE_TEMPLATE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passage_template: Option<String>,
    /// Tokens of a query at most, special ones and the prefix counted; with expansion all queries have as many; default: the model's,
    /// 32 for a plain encoder
    #[arg(long, visible_alias = "question-maxlength", env = "TERCIO_QUERY_LENGTH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_length: Option<usize>,
    /// Tokens of a document at most; default: the model's, 180 for a plain encoder
    #[arg(long, visible_alias = "passage-maxlength", env = "TERCIO_DOCUMENT_LENGTH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document_length: Option<usize>,
}

impl ColbertTextOptions {
    /// The templates of queries and of documents.
    ///
    /// # Errors
    /// A template without the places that it needs.
    pub fn templates(&self) -> Result<(TextTemplate, TextTemplate), String> {
        let read = |flag: &str, text: &Option<String>, default: &str, is_query: bool| {
            let text = text.as_deref().unwrap_or(default);
            let template: TextTemplate = text.parse().map_err(|e: DataError| format!("--{flag}: {e}"))?;
            let place = if is_query { "{question}" } else { "{text} and {title}" };
            match template.is_for_questions() == is_query {
                true => Ok(template),
                false => Err(format!("--{flag} {text:?}: expected a place for {place}")),
            }
        };
        Ok((
            read("question_template", &self.question_template, "{question}", true)?,
            read("passage_template", &self.passage_template, "{title} {text}", false)?,
        ))
    }
    /// What is wrong with the lengths, if anything.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check(&self) -> Result<(), String> {
        for (flag, n) in [("query_length", self.query_length), ("document_length", self.document_length)] {
            if let Some(n) = n.filter(|n| !(1..=MOST_TEXT_TOKENS).contains(n)) {
                return Err(format!("--{flag} {n}: expected 1 to {MOST_TEXT_TOKENS}"));
            }
        }
        self.templates().map(drop)
    }
}

/// The model, its inputs and its losses.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct ColbertModelOptions {
    /// Model to start from: a folder of PyLate or sentence-transformers, a checkpoint of Stanford's ColBERT, or a BERT-like encoder
    /// (Hugging Face), which gets a new projection; or a hub name. none: bert-base-uncased. Step 0 of a run without checkpoints
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH", default_value = "none")]
    pub model_path: String,
    /// Folder of the tokenizer (tokenizer.json or vocab.txt); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Elements of a token's vector; default: what the model has, 128 for a new projection. A model that ends in another width gets
    /// one more projection
    #[arg(long, visible_alias = "indexing-dimension", env = "TERCIO_EMBEDDING_SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_size: Option<usize>,
    /// Texts.
    #[command(flatten)]
    #[serde(flatten)]
    pub text: ColbertTextOptions,
    /// The token behind the first one of a query, a trailing space included; `none`: no token; default: the model's, `"[Q] "` for a plain
    /// encoder
    #[arg(long, env = "TERCIO_QUERY_PREFIX")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_prefix: Option<String>,
    /// The same of documents, `"[D] "`
    #[arg(long, env = "TERCIO_DOCUMENT_PREFIX")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document_prefix: Option<String>,
    /// Queries keep their own length, instead of being filled up with mask tokens
    #[arg(long, env = "TERCIO_NO_EXPANSION")]
    pub no_expansion: bool,
    /// The tokens of a query attend to the mask tokens that fill it up
    #[arg(long, env = "TERCIO_ATTEND_TO_EXPANSION")]
    pub attend_to_expansion: bool,
    /// Score documents by all their tokens, punctuation too
    #[arg(long, env = "TERCIO_NO_SKIPLIST")]
    pub no_skiplist: bool,
    /// A masked token of a document counts as a product of 0 with every token of a query, as in PyLate; else it has no part
    #[arg(long, env = "TERCIO_ZERO_FLOOR")]
    pub zero_floor: bool,
    /// Score as XTR does in training: of a token of a query only so many tokens of all documents of the update count (with --loss kl of
    /// the query's own documents), and a document's score is the mean over the tokens that find one in it; 0: MaxSim. PyLate takes 256
    #[arg(long, env = "TERCIO_XTR_K", default_value_t = 0)]
    pub xtr_k: usize,
    /// Documents of each query whose scores are distilled, best first
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 32)]
    pub n_context: usize,
    /// Documents of each query in evaluation; 0: as --n_context, all of them with --loss contrastive
    #[arg(long, env = "TERCIO_EVAL_N_CONTEXT", default_value_t = 0)]
    pub eval_n_context: usize,
    /// A collection as BEIR lays it out (corpus.jsonl, queries.jsonl, qrels/) to search by exact scores at every evaluation; nDCG@10 then
    /// tells which checkpoint is the best
    #[arg(long, env = "TERCIO_EVAL_BEIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_beir: Option<PathBuf>,
    /// Which of its judgements
    #[arg(long, env = "TERCIO_EVAL_BEIR_SPLIT", default_value = "test")]
    pub eval_beir_split: String,
    /// Keep only each layer's input for the backward pass and compute the rest again
    #[arg(long, visible_alias = "use-checkpoint", env = "TERCIO_RECOMPUTE")]
    pub recompute: bool,
    /// What the model learns from
    #[arg(long, value_enum, env = "TERCIO_LOSS", default_value_t = ColbertLossKind::Contrastive)]
    pub loss: ColbertLossKind,
    /// Divisor of the model's scores
    #[arg(long, env = "TERCIO_TEMPERATURE", default_value_t = 1.0)]
    pub temperature: f64,
    /// Divisor of the teacher's scores
    #[arg(long, env = "TERCIO_TEACHER_TEMPERATURE", default_value_t = 1.0)]
    pub teacher_temperature: f64,
    /// Distil scores as they are, instead of bringing those of a query to the range 0 to 1 before
    #[arg(long, env = "TERCIO_RAW_SCORES")]
    pub raw_scores: bool,
    /// Contrastive: hard negatives of each query; other negatives stand in where there are too few
    #[arg(long, env = "TERCIO_HARD_NEGATIVES", default_value_t = 1)]
    pub hard_negatives: usize,
    /// Contrastive: other negatives of each query, beside the hard ones
    #[arg(long, env = "TERCIO_OTHER_NEGATIVES", default_value_t = 0)]
    pub other_negatives: usize,
    /// Contrastive: draw the positive document anew every epoch, instead of taking the first
    #[arg(long, env = "TERCIO_DRAW_POSITIVE")]
    pub draw_positive: bool,
    /// Contrastive: draw the negatives anew every epoch, instead of taking the first ones
    #[arg(long, env = "TERCIO_DRAW_NEGATIVES")]
    pub draw_negatives: bool,
    /// A trained reader (a folder, a hub name, or a run's folder) that scores the documents on the fly for --loss kl: the training
    /// data needs no scores then
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

impl ColbertModelOptions {
    /// Whether scores are distilled.
    pub fn distils(&self) -> bool {
        self.loss == ColbertLossKind::Kl
    }
}

impl TaskOptions for ColbertModelOptions {
    const NAME: &'static str = "colbert";
    const MAY_CHANGE: &'static [&'static str] =
        &["eval_n_context", "eval_beir", "eval_beir_split", "model_path", "tokenizer", "teacher"];

    fn evaluates(&self, data: &DataOptions) -> bool {
        data.eval_data.is_some() || self.eval_beir.is_some()
    }

    fn added() -> Vec<(&'static str, toml::Value)> {
        vec![("xtr_k", 0.into())]
    }
    fn check(&self, all: &TrainOptions<Self>) -> Result<(), String> {
        self.text.check()?;
        let n = self.teacher_text_maxlength;
        if !(1..=MOST_TEXT_TOKENS).contains(&n) {
            return Err(format!("--teacher_text_maxlength {n}: expected 1 to {MOST_TEXT_TOKENS}"));
        }
        if let Some(n) = self.embedding_size.filter(|n| !(1..=MOST_DIMENSIONS).contains(n)) {
            return Err(format!("--embedding_size {n}: expected 1 to {MOST_DIMENSIONS}"));
        }
        for (flag, value) in
            [("temperature", self.temperature), ("teacher_temperature", self.teacher_temperature)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("--{flag} must be a number above 0, is {value}"));
            }
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
        if self.xtr_k > MOST_RETRIEVED {
            return Err(format!("--xtr_k {}: expected at most {MOST_RETRIEVED}", self.xtr_k));
        }
        if self.xtr_k > 0 && self.zero_floor {
            return Err("--xtr_k: a token that is not retrieved has no part, so there is no floor: leave --zero_floor out".into());
        }
        if self.no_expansion && self.attend_to_expansion {
            return Err(
                "--no_expansion leaves no mask tokens to attend to: leave --attend_to_expansion out".into()
            );
        }
        if self.distils() {
            if self.n_context < 2 {
                return Err(format!(
                    "--n_context {}: distillation compares the documents of a query with each other; give at least 2",
                    self.n_context
                ));
            }
            if all.optim.label_smoothing > 0.0 {
                let what =
                    "--label_smoothing spreads the target of --loss contrastive; with --loss kl leave it out";
                return Err(what.into());
            }
            return Ok(());
        }
        if self.teacher.is_some() {
            return Err("--teacher scores documents for --loss kl; leave it out, or choose that loss".into());
        }
        if self.raw_scores {
            return Err("--raw_scores is a setting of --loss kl; leave it out, or choose that loss".into());
        }
        let each = (1 + self.hard_negatives).saturating_add(self.other_negatives);
        if all.data.batch_plan()?.global.saturating_mul(each) < 2 {
            return Err("--loss contrastive sets a positive document against the others of its update, and there would be none: \
                        give a larger --global_batch_size (or --per_gpu_batch_size), or --hard_negatives"
                .into());
        }
        Ok(())
    }
}
