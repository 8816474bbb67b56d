//! Model architectures and their weights: Hugging Face and FiD layouts in and out.

pub mod export;
pub mod folder;
pub mod import;
mod new_folder;
pub mod t5;
pub mod weights;
