//! Questions, passages, tokenizing, packing, shuffling and answer metrics: everything a reader's
//! data needs before a model sees it, and no floats of a model.
//!
//! The way of one training example: [`Questions`] reads item `i` of a file in any order,
//! [`ReaderEncoding`] turns it into token ids, [`PackedReaderBatch`] lays a batch out without padding.
//! [`Batches`] says which items belong to update `u`.

#![forbid(unsafe_code)]

pub mod answers;
pub mod baselines;
mod byt5;
mod charsmap;
pub mod check;
pub mod classification;
#[cfg(feature = "parquet")]
mod columns;
pub mod convert;
pub mod corpus;
pub mod download;
pub mod draw;
mod error;
pub mod has_answer;
mod index;
mod items;
pub mod labels;
pub mod leftovers;
mod lines;
pub mod multi_vectors;
pub mod packed;
pub mod passages;
pub mod qrels;
pub mod question;
pub mod questions;
pub mod reader;
pub mod replace;
pub mod retrieval;
mod scan;
pub mod shuffle;
mod source;
mod spiece;
pub mod template;
pub mod tokenizer;
pub mod vectors;

pub use answers::{AnswerTally, exact_match, f1};
pub use check::{CheckReport, check};
pub use corpus::{Corpus, Document, Documents};
pub use error::DataError;
pub use index::hex;
pub use labels::Labels;
pub use multi_vectors::{MultiVectors, TokenVectors};
pub use packed::PackedReaderBatch;
pub use passages::Passages;
pub use qrels::Qrels;
pub use question::{Passage, Place, Question};
pub use questions::Questions;
pub use reader::{EncodedExample, ReaderEncoding};
pub use retrieval::{RetrievalExample, RetrievalExamples};
pub use shuffle::{Batches, Permutation, epoch_permutation};
pub use tokenizer::Tokenizer;
pub use vectors::Vectors;
