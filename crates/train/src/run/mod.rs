//! What a run is on disk and on screen: its folder, lease, configuration, checkpoints, logs, and the signals that end it.
//!
//! ```text
//! RUN/config.toml      every decision, defaults included      RUN/run.log        log for people
//! RUN/metrics.jsonl    one line per logged update             RUN/tensorboard/   event files
//! RUN/checkpoint/step-N/                                      RUN/checkpoint/latest, best_dev -> step-N
//! RUN/lease.json, RUN/.lock                                   who may prune checkpoints and move links
//! ```
//!
//! Nothing in here knows of models or data: the training loop hands over plain files, numbers and names.

pub mod checkpoint;
pub mod config;
mod error;
mod files;
pub mod lease;
pub mod log;
pub mod loss_plot;
pub mod loss_table;
mod manifest;
pub mod metrics;
pub mod progress;
pub mod signals;
pub mod tensorboard;

pub use checkpoint::{CheckpointStore, CheckpointWriter, Committed, FoundCheckpoint};
pub use error::RunError;
pub use files::{free_bytes, remove_temporary, write_atomic};
pub(crate) use files::{hex, random_hex, replace_folder};
pub use lease::Lease;
pub use log::{Verbosity, init_logging, init_logging_of_rank, log_to, note_failure};
pub use loss_table::LossTable;
pub use manifest::{FileEntry, MANIFEST_NAME, Manifest};
pub use metrics::MetricsWriter;
pub use progress::Progress;
pub use signals::{EXIT_SAVED_NOT_REQUEUED, Signals, StopReason};
pub use tensorboard::TensorboardWriter;
pub use tercio_engine::memory;
