//! Model architectures and their weights: Hugging Face and FiD layouts in and out.

pub mod bert;
pub mod classifier;
pub mod colbert;
pub mod embedding_model;
pub mod encoder;
pub mod export;
mod fields;
pub mod folder;
pub mod import;
pub mod model_file;
pub mod modernbert;
mod new_folder;
pub mod retriever;
pub mod sentence;
pub mod t5;
pub mod weights;
