//! A run on several ranks: who computes what, what they tell one another, and who owns which part of the optimizer.
//!
//! Everything here is a function of sizes and of what all ranks know, so that all come to the same decisions. One rank
//! alone goes the same way, and nothing waits.

pub mod answers;
pub mod corpus;
pub mod deal;
pub mod device;
pub mod exchange;
pub mod in_order;
pub mod message;
pub mod options;
pub mod parts;
pub mod report;
pub mod requeue;
pub mod setup;
pub mod spans;
pub mod start;

use tercio_comm::Number;
use tercio_engine::Device;

/// A device whose gradients ranks can add.
pub trait RankDevice: Device<Element: Number> {}
impl<D: Device<Element: Number>> RankDevice for D {}
