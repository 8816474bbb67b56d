//! The fused differentiable operations, one a file: formula, forward, backward.
//! Each is a method of [`crate::Tape`]; `crates/engine/tests` holds each against finite differences and the reference.

pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod embedding_sum;
pub mod feed_forward;
pub mod feed_forward_end;
pub mod inject;
pub mod layer_norm;
pub mod linear;
pub mod linear_bias;
pub mod max_sim;
pub mod norm;
pub mod pooling;
pub mod residual;
pub mod rotary;
pub mod scaled;
pub mod state_attention;
pub mod sum;
