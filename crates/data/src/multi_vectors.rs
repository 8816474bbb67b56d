//! Vectors of tokens on disk: a folder in which every document (or question) has as many vectors as it has tokens, or none.
//!
//! ```text
//! settings.json         what the vectors are made of and how: written first, compared by whoever goes on
//! shard-00000.tokens    rows of little-endian numbers, one a token, the documents one after the other
//! shard-00000.lengths   little-endian u32, one a document: its tokens
//! shard-00000.ids       a JSON string a line, the document's id
//! shard-00000.json      counts and checksums of the three: a shard is finished once this is there
//! manifest.json         settings and all shards: the set is complete once this is there
//! ```
//!
//! The rules are those of [`crate::vectors`]: every file is written beside its name, synced and renamed, and several processes may write different
//! shards at once. `count` and `per_shard` of the settings count documents.
//!
//! [`TokenVectors`] is what an index reads: such a folder ([`MultiVectors`]), an array of NumPy ([`TokenArray`]), or vectors in
//! memory ([`TokensInMemory`]).

use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::vectors::VectorSettings;

mod array;
mod memory;
mod reader;
mod writer;

pub use array::{TokenArray, whole_numbers};
pub use memory::TokensInMemory;
pub use reader::MultiVectors;
pub use writer::{MultiShardWriter, MultiVectorsFolder};

/// What `kind` says in the files of these folders, so that they are not taken for folders of one vector each.
const KIND: &str = "multi-vector";
const SETTINGS: &str = "settings.json";
const MANIFEST: &str = "manifest.json";

/// Documents of several vectors each, to be read in any order, from several threads.
pub trait TokenVectors: Sync {
    /// Numbers of a vector.
    fn dimension(&self) -> usize;
    /// How many documents there are.
    fn documents(&self) -> u64;
    /// How many vectors there are before those of document `document`; with `document` their number, all.
    fn start(&self, document: u64) -> u64;
    /// Reads vectors from number `first` on: as many as `out` has room for.
    ///
    /// # Errors
    /// Vectors that are not there, a file that cannot be read, numbers that are none.
    fn read(&self, first: u64, out: &mut [f32]) -> Result<(), DataError>;
    /// The ids of documents, in order.
    ///
    /// # Errors
    /// A file that cannot be read, or has more or fewer.
    fn ids(&self) -> Result<Vec<String>, DataError>;
    /// What is said of the model and the texts.
    fn origin(&self) -> Origin;

    /// How many vectors there are.
    fn tokens(&self) -> u64 {
        self.start(self.documents())
    }
}

/// Where vectors of tokens come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The file or folder of the vectors, for people.
    pub path: String,
    /// The model as it was named; empty where it is not known.
    pub model: String,
    /// Its fingerprint, where it is known.
    pub model_fingerprint: Option<String>,
    /// SHA-256 of the decompressed content of the texts, where it is known.
    pub source_fingerprint: Option<String>,
    /// SHA-256 over the vectors' checksums, where they are known.
    pub vectors_fingerprint: Option<String>,
}

/// Settings of a set, as its first file has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Settings {
    kind: String,
    #[serde(flatten)]
    of: VectorSettings,
}

/// A finished shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MultiShardEntry {
    /// Its number, from 0.
    pub number: u64,
    /// Document of the whole set that is its first.
    pub first: u64,
    /// Its documents.
    pub count: u64,
    /// Its vectors.
    pub tokens: u64,
    /// SHA-256 of the file of vectors.
    pub tokens_sha256: String,
    /// SHA-256 of the file of lengths.
    pub lengths_sha256: String,
    /// SHA-256 of the file of ids.
    pub ids_sha256: String,
    /// The instructions that computed it, for people.
    pub arithmetic: String,
}

impl MultiShardEntry {
    /// Whether it is the shard of this number that the settings ask for.
    fn check(&self, settings: &VectorSettings, number: u64) -> Result<(), String> {
        let rows = settings.rows_of(number);
        let found = (self.number, self.first, self.count);
        let expected = (number, rows.start, rows.end - rows.start);
        match found == expected && self.tokens <= self.count.saturating_mul(u64::from(u32::MAX)) {
            true => Ok(()),
            false => Err(format!(
                "expected shard {number} with {} documents from number {} on, found shard {} with {} from {} on and {} vectors",
                expected.2, expected.1, found.0, found.2, found.1, self.tokens
            )),
        }
    }
}

/// The whole of a set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Manifest {
    #[serde(flatten)]
    settings: Settings,
    shards: Vec<MultiShardEntry>,
}

/// A file of a shard.
fn name(number: u64, part: &str) -> String {
    format!("shard-{number:05}.{part}")
}
