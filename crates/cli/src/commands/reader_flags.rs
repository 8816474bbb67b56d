//! Flags of the commands that use a trained reader, and the reader they give.

use std::path::PathBuf;

use clap::Args;
use tercio_comm::World;
use tercio_data::{ReaderEncoding, Tokenizer};
use tercio_models::t5::{Decoding, LoadedT5};
use tercio_train::decoding::DecodingOptions;
use tercio_train::options::{DeviceOptions, PrecisionOptions};
use tercio_train::predict::Predictor;
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::setup::open_model_among;
use tercio_train::shortage::guarded;
use tercio_train::{TrainError, options};

use super::common::{MOST_QUESTIONS, within};

/// The model and how its inputs are made.
#[derive(Args)]
pub struct ReaderFlags {
    /// Model: a folder (Hugging Face or FiD layout), a hub name, or a run's folder, which stands for its best checkpoint
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH")]
    pub model_path: String,
    /// Folder of the tokenizer (tokenizer.json or spiece.model); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens of "question + title + passage" at most
    #[arg(long, env = "TERCIO_TEXT_MAXLENGTH", default_value_t = 200)]
    pub text_maxlength: usize,
    /// Leave the titles out of the inputs
    #[arg(long, env = "TERCIO_NO_TITLE")]
    pub no_title: bool,
    /// End every passage with `</s>`, as newer libraries do (FiD's released models were trained without)
    #[arg(long, env = "TERCIO_PASSAGE_EOS")]
    pub passage_eos: bool,
    /// Tokens of an answer at most, the start token counted
    #[arg(long, env = "TERCIO_GENERATION_MAX_LENGTH", default_value_t = 50)]
    pub generation_max_length: usize,
    #[command(flatten)]
    pub decoding: DecodingOptions,
    #[command(flatten)]
    pub compute: PrecisionOptions,
    #[command(flatten)]
    pub device: DeviceOptions,
    /// Questions at a time
    #[arg(long, env = "TERCIO_PER_GPU_BATCH_SIZE", default_value_t = 1)]
    pub per_gpu_batch_size: usize,
    /// Threads; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    pub threads: usize,
}

/// A reader in memory.
pub struct Reader<D: RankDevice> {
    loaded: LoadedT5<D>,
    decoding: Decoding,
    tokenizer: Tokenizer,
}

/// Checks the flags and loads the model; on several ranks rank 0 does and sends it to the others.
///
/// # Errors
/// Flags out of range, a model or tokenizer that cannot be used; a rank was lost.
pub fn load<D: RankDevice>(flags: &ReaderFlags, world: &World, device: &D) -> Result<Reader<D>, TrainError> {
    options::check_lengths(flags.text_maxlength, flags.generation_max_length).map_err(TrainError::Options)?;
    let decoding = flags.decoding.decoding(flags.generation_max_length).map_err(TrainError::Options)?;
    within(&[("per_gpu_batch_size", flags.per_gpu_batch_size, MOST_QUESTIONS)])?;
    if flags.model_path == "none" {
        return Err(TrainError::Options(
            "--model_path none: expected the folder or hub name of a trained model".into(),
        ));
    }
    let (name, tokenizer) = (&flags.model_path, flags.tokenizer.as_deref());
    let open = || device.run(|| open_model_among(world, name, tokenizer, device));
    let (loaded, tokenizer) = guarded("while the model was read", &["a smaller model"], open)?;
    Ok(Reader { loaded, decoding, tokenizer })
}

impl<D: RankDevice> Reader<D> {
    /// The predictor that the flags describe, without scores.
    pub fn predictor<'a>(&'a self, flags: &ReaderFlags, device: &'a D, n_context: usize) -> Predictor<'a, D> {
        Predictor {
            device,
            model: &self.loaded.model,
            parameters: &self.loaded.parameters,
            tokenizer: &self.tokenizer,
            encoding: ReaderEncoding {
                text_maxlength: flags.text_maxlength,
                answer_maxlength: None,
                n_context,
                no_title: flags.no_title,
                passage_eos: flags.passage_eos,
            },
            decoding: self.decoding.clone(),
            batch: flags.per_gpu_batch_size,
            scores: false,
            print_freq: u64::MAX,
        }
    }
}
