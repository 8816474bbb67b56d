//! What can go wrong while training or evaluating.

use tercio_data::DataError;
use tercio_engine::cpu::CpuError;
use tercio_models::t5::T5Error;
use tercio_models::weights::WeightsError;

use crate::run::RunError;

/// An error of training or evaluation; each says what was expected and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Settings that do not fit each other.
    #[error("{0}")]
    Options(String),
    /// Questions, or the tokenizer.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model.
    #[error(transparent)]
    Model(#[from] T5Error),
    /// Weights or a model folder.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The run folder.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The device.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A loss or gradient that is no number.
    #[error(
        "update {update}: the {what} is not finite; nothing was changed after update {update}, and the last checkpoint \
         stands. Rows of the batch: {rows:?}. A lower --lr, a longer --warmup_steps or --clip 1 mostly help"
    )]
    NotFinite {
        /// The update, from 1.
        update: u64,
        /// `loss` or `gradient`.
        what: &'static str,
        /// Rows of the training file (from 0) in the update.
        rows: Vec<usize>,
    },
    /// A tokenizer that does not fit the model.
    #[error(
        "the tokenizer has {tokenizer} ids, the model's vocabulary only {model}; use the tokenizer of the model"
    )]
    Vocabulary {
        /// Ids of the tokenizer.
        tokenizer: usize,
        /// Rows of the model's embedding.
        model: usize,
    },
    /// A file of results could not be written.
    #[error("{path}: cannot write it: {source}")]
    Write {
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
}
