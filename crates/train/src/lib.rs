//! The training loop, objectives, schedules, checkpoints and logs.

pub mod run;
