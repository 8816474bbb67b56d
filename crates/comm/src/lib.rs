//! Ranks in step: where a process stands among others ([`place`]), and what they do together ([`World`]).
//!
//! Knows nothing of models. Carriers only move bytes; every sum is made here, in one order, so that its bits depend
//! neither on the carrier nor on time.
//!
//! One call finds the others, whoever started the processes; a process that is alone works the same way:
//!
//! ```
//! use tercio_comm::{Settings, World};
//!
//! let world = World::from_env(&Settings::default())?;
//! let mut gradient = vec![1.0f32; 1000];
//! world.all_reduce(&mut gradient)?;
//! let seen = world.all_gather(&[world.rank() as f32])?;
//! if world.is_main() {
//!     println!("{} of {} ranks, the sum is {}", seen.len(), world.size(), gradient[0]);
//! }
//! # Ok::<(), tercio_comm::CommError>(())
//! ```
//!
//! Inside: a control plane (`control`, TCP, a star at rank 0) brings the ranks together and names who is lost; carriers
//! ([`carrier`]) move bytes; `collective` cuts them into checked frames and sums along one tree.

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

pub use control::message::host_name;
pub use error::CommError;
pub use number::Number;
pub use place::Place;
pub use reduction::{Cost, Leave, Reduction};
pub use settings::{Backend, Settings};
pub use world::{Gathered, World};
