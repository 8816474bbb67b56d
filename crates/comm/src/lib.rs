//! Ranks in step: where a process stands among others ([`place`]), and what they do together ([`World`]).
//!
//! Knows nothing of models. Carriers only move bytes; every sum is made here, in one order, so that its bits depend
//! neither on the carrier nor on time.

pub mod carrier;
mod collective;
mod control;
pub mod doctor;
pub mod error;
mod frame;
mod join;
pub mod launch;
mod number;
pub mod place;
mod ranks;
pub mod reduction;
mod secret;
pub mod settings;
pub mod slurm;
pub mod world;

pub use error::CommError;
pub use number::Number;
pub use place::Place;
pub use reduction::{Cost, Leave, Reduction};
pub use settings::{Backend, Settings};
pub use world::{Gathered, World};
