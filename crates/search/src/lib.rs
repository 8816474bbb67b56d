//! Indexes of passages and what they find: BM25, exact and compressed dense search, late interaction, fusion of runs, ranking metrics.
//!
//! Every index answers a query with [`Hit`]s: rows of the collection and scores, best first, of equal scores the
//! earlier row. What a row's id and text are, the collection says.

pub mod bm25;
pub mod compressed;
pub mod error;
pub mod flat;
pub mod fusion;
pub mod manifest;
pub mod max_sim;
pub mod output;
pub mod part;
pub mod plaid;
pub mod ranking;
pub mod significance;
mod top;

pub use error::SearchError;
pub use part::Part;
pub use top::{Hit, Top};
