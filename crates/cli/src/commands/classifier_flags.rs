//! Flags of the commands that use a trained classifier, and the classifier they give.

use std::path::{Path, PathBuf};

use clap::Args;
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::Documents;
use tercio_data::corpus::Columns;
use tercio_train::TrainError;
use tercio_train::classify::{OpenedClassifier, TextClassifier, WINDOW};
use tercio_train::options::{DeviceOptions, PrecisionOptions, columns_of};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::options::LinkOptions;

use super::common::within;

/// Tokens that are believed to be meant.
const MOST_TOKENS: usize = 1 << 20;
/// Texts of a window that are believed to be meant.
const MOST_WINDOW: usize = 1 << 20;

/// The model and how texts come to it.
#[derive(Args)]
pub struct ClassifierFlags {
    /// Model: a folder of Hugging Face's `*ForSequenceClassification` (or Tercio's), a hub name, or a run's folder, which stands for
    /// its chosen checkpoint
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH")]
    pub model_path: String,
    /// Folder of the tokenizer (tokenizer.json or a vocabulary); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    /// Tokens of a text at most, special ones counted; default: as the classifier was trained, else as many as it has positions
    #[arg(long, env = "TERCIO_TEXT_MAXLENGTH")]
    text_maxlength: Option<usize>,
    /// Texts of a batch at most
    #[arg(long, visible_alias = "eval-batch-size", env = "TERCIO_BATCH_TEXTS", default_value_t = 32)]
    batch_texts: usize,
    /// Tokens of a batch at most; a longer text is a batch by itself
    #[arg(long, default_value_t = 8192)]
    batch_tokens: usize,
    /// Texts that one rank takes at a time and sorts by length into batches
    #[arg(long, default_value_t = WINDOW)]
    window: usize,
    #[command(flatten)]
    columns: ColumnFlags,
    /// Leave faulty documents out and count them, instead of ending with the first
    #[arg(long)]
    pub skip_bad: bool,
    #[command(flatten)]
    pub compute: PrecisionOptions,
    #[command(flatten)]
    pub device: DeviceOptions,
    /// Threads; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    pub threads: usize,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    pub link: LinkOptions,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    local_rank: i64,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    main_port: i64,
    /// Warnings and errors only
    #[arg(long, short)]
    pub quiet: bool,
}

/// Where text and labels are.
#[derive(Args)]
pub struct ColumnFlags {
    /// Tables and JSON: columns of the text, with commas between them; they are joined by a space
    #[arg(long, env = "TERCIO_TEXT_COLUMN", default_value = "text")]
    text_column: String,
    /// Tables and JSON: columns of labels, with commas between them; default: label, labels or class, whichever is there
    #[arg(long, env = "TERCIO_LABEL_COLUMN", default_value = "", hide_default_value = true)]
    label_column: String,
    /// Tables: the first row is a document; columns are numbers from 0
    #[arg(long, env = "TERCIO_NO_HEADER")]
    no_header: bool,
    /// Tables and JSON: a value of a label that stands for none
    #[arg(long, visible_alias = "no-class-label", env = "TERCIO_NO_LABEL")]
    no_label: Option<String>,
}

impl ColumnFlags {
    /// The columns that they name.
    pub fn columns(&self) -> Columns {
        columns_of(&self.text_column, &self.label_column, self.no_header, self.no_label.as_deref())
    }
}

impl ClassifierFlags {
    /// Refuses flags that are out of range.
    ///
    /// # Errors
    /// The first such flag.
    pub fn check(&self) -> Result<(), TrainError> {
        self.link.check().map_err(TrainError::Options)?;
        within(&[
            ("batch_texts", self.batch_texts, MOST_TOKENS),
            ("batch_tokens", self.batch_tokens, MOST_TOKENS),
            ("window", self.window, MOST_WINDOW),
            ("text_maxlength", self.text_maxlength.unwrap_or(3), MOST_TOKENS),
        ])
    }

    /// What says where this process stands.
    pub fn place(&self) -> Flags {
        Flags { local_rank: self.local_rank, main_port: self.main_port }
    }

    /// Loads the model.
    ///
    /// # Errors
    /// As [`OpenedClassifier::open_among`].
    pub fn open<D: RankDevice>(&self, world: &World, device: &D) -> Result<OpenedClassifier<D>, TrainError> {
        device
            .run(|| OpenedClassifier::open_among(world, &self.model_path, self.tokenizer.as_deref(), device))
    }

    /// The classifier that the flags describe.
    ///
    /// # Errors
    /// Texts longer than the model has positions.
    pub fn classifier<'a, D: RankDevice>(
        &self,
        opened: &'a OpenedClassifier<D>,
        device: &'a D,
    ) -> Result<TextClassifier<'a, D>, TrainError> {
        Ok(TextClassifier {
            device,
            model: &opened.loaded.model,
            parameters: &opened.loaded.parameters,
            tokenizer: &opened.tokenizer,
            maxlength: opened.maxlength(self.text_maxlength)?,
            batch_tokens: self.batch_tokens,
            batch_texts: self.batch_texts,
            window: self.window,
        })
    }

    /// Opens a file of documents, or a folder of them, on all ranks.
    ///
    /// # Errors
    /// As [`open_among`]; columns that are not there.
    pub fn documents(&self, world: &World, path: &Path) -> Result<Documents, TrainError> {
        let cache = self.cache_dir.as_deref();
        let documents: Documents = open_among(world, path, cache, self.link.broadcast_data)?;
        Ok(documents.with_columns(self.columns())?)
    }

    /// Where text and labels are.
    pub fn columns(&self) -> Columns {
        self.columns.columns()
    }
}
