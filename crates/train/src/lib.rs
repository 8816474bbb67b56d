//! The training loop, objectives, schedules, checkpoints and logs.

pub mod accumulate;
pub mod answer;
pub mod bench;
pub mod classify;
pub mod colbert;
pub mod decoding;
pub mod embed;
pub mod error;
pub mod evaluate;
pub mod find;
pub mod grace;
pub mod inspect;
pub mod launch;
pub mod layer_norms;
pub mod mine;
pub mod objective;
pub mod objectives;
pub mod optimizer;
pub mod options;
pub mod plan;
pub mod predict;
pub mod ranks;
pub mod records;
pub mod rounds;
pub mod run;
pub mod schedule;
pub mod scratch;
pub mod session;
pub mod setup;
pub mod shortage;
pub mod state;
pub mod step;
pub mod trainer;

pub use error::TrainError;
pub use tercio_data::replace;
