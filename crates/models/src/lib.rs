//! Model architectures and their weights: Hugging Face and FiD layouts in and out.

pub mod folder;
pub mod t5;
pub mod weights;
