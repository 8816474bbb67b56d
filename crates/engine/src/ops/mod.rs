//! The fused differentiable operations, one a file: formula, forward, backward.
//! Each is a method of [`crate::Tape`]; `crates/engine/tests` holds each against finite differences and the reference.

pub mod attention;
pub mod cross_entropy;
pub mod embedding;
pub mod feed_forward;
pub mod inject;
pub mod linear;
pub mod norm;
pub mod residual;
pub mod state_attention;
