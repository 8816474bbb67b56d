//! What can go wrong while training or evaluating.

use tercio_comm::CommError;
use tercio_data::DataError;
use tercio_engine::Fault;
use tercio_engine::cpu::CpuError;
use tercio_models::t5::T5Error;
use tercio_models::weights::WeightsError;

use crate::run::RunError;
use crate::shortage::Shortage;

/// An error of training or evaluation; each says what was expected and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Another rank was lost or failed, or the ranks are not in step.
    #[error(transparent)]
    Ranks(#[from] CommError),
    /// Ranks that were not started alike, as all of them have found.
    #[error("{0}")]
    NotAlike(String),
    /// Settings that are out of range or do not fit each other, whatever the files hold.
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
    /// A device that does not work, or does no more.
    #[error(transparent)]
    Device(#[from] Fault),
    /// A loss or gradient that is no number.
    #[error(
        "update {update}: the {what} is not finite; the update was not applied, and the last checkpoint stands. \
         Rows of the batch: {}. A lower --lr, a longer --warmup_steps or --clip 1 mostly help",
        some_rows(rows)
    )]
    NotFinite {
        /// The update, from 1.
        update: u64,
        /// `loss` or `gradient`.
        what: &'static str,
        /// Rows of the training file (from 0) in the update.
        rows: Vec<usize>,
    },
    /// Parameters that are no numbers, found when they were to be saved.
    #[error(
        "the parameters after update {update} are not finite; they were not saved, and the last checkpoint stands. \
         A lower --lr, a longer --warmup_steps or --clip 1 mostly help"
    )]
    NotFiniteParameters {
        /// The update, from 1.
        update: u64,
    },
    /// A signal came during an evaluation or an update; the training loop saves and ends.
    #[error("interrupted by a signal")]
    Interrupted,
    /// A later attempt has taken the run over, as all ranks know.
    #[error("{0}; this one ends before update {1} and saves nothing: the later one goes on with the run")]
    Superseded(String, u64),
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
    /// No more memory.
    #[error("{0}")]
    OutOfMemory(Box<Shortage>),
    /// A file, a checkpoint or a result that cannot be used as it is.
    #[error("{0}")]
    Unusable(String),
    /// A signal ended the work; nothing half-written is left.
    #[error("stopped by a signal; no file of results was written")]
    Stopped,
    /// A source of questions could not be read.
    #[error("{path}: cannot read it: {source}")]
    Read {
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
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

fn some_rows(rows: &[usize]) -> String {
    const SHOWN: usize = 32;
    let list: Vec<String> = rows.iter().take(SHOWN).map(usize::to_string).collect();
    let rest = rows.len().saturating_sub(SHOWN);
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    list.join(", ") + &more
}

impl TrainError {
    /// Whether all ranks come to this error together, by what they told one another.
    pub fn is_common(&self) -> bool {
        use TrainError::{Interrupted, NotAlike, NotFinite, Stopped, Superseded};
        matches!(self, NotAlike(_) | NotFinite { .. } | Stopped | Interrupted | Superseded(..))
    }
    /// Turns a failed write in a checkpoint's folder into the error of a full disk, where that is the cause.
    pub(crate) fn or_disk_full(self, needed: u64) -> Self {
        let (path, source) = match &self {
            TrainError::Weights(WeightsError::Io { path, source, .. })
            | TrainError::Model(T5Error::Weights(WeightsError::Io { path, source, .. })) => (path, source),
            TrainError::Data(DataError::Io { path, source, .. }) => (path, source),
            _ => return self,
        };
        let full = std::io::Error::from(source.kind());
        match RunError::from_io("write", path, Some(needed), full) {
            error @ RunError::DiskFull { .. } => TrainError::Run(error),
            _ => self,
        }
    }
}
