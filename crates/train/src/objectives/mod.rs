//! The tasks that models are trained for, one a file.

pub mod classifier;
pub mod colbert;
pub mod reader;
pub mod retriever;
