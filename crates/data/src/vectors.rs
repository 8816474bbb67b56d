//! Vectors of passages (or questions) on disk: a folder that grows shard by shard and can be trusted once it has a manifest.
//!
//! ```text
//! settings.json         what the vectors are made of and how: written first, compared by whoever goes on
//! shard-00000.vectors   rows of little-endian numbers, one after the other, nothing else
//! shard-00000.ids       a JSON string a line, the row's id
//! shard-00000.json      counts and checksums of the two: a shard is finished once this is there
//! manifest.json         settings and all shards: the set is complete once this is there
//! ```
//!
//! Every file is written beside its name, synced and renamed. Several processes may write different shards at once.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::DataError;

mod dtype;
pub(crate) mod reader;
pub(crate) mod writer;

pub use dtype::VectorDtype;
pub use reader::{VectorShard, Vectors};
pub use writer::{ShardWriter, VectorsFolder};

/// The format that this version writes; others are refused.
pub const FORMAT: u32 = 1;
/// Largest dimension that is believed.
pub const MAX_DIMENSION: usize = 1 << 16;

const SETTINGS: &str = "settings.json";
const MANIFEST: &str = "manifest.json";
/// Larger settings or manifests are not read: a million shards would fit.
const MAX_JSON_BYTES: u64 = 512 << 20;

/// What a set of vectors is made of and how: equal settings and texts give equal vectors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VectorSettings {
    /// Version of the layout, [`FORMAT`].
    pub format: u32,
    /// The model as it was named.
    pub model: String,
    /// SHA-256 of the model's parameters, tokenizer and pooling; `None` where it is not known (imported vectors).
    pub model_fingerprint: Option<String>,
    /// Numbers of a vector.
    pub dimension: usize,
    /// How they are stored.
    pub dtype: VectorDtype,
    /// Arithmetic of the model's products: `f32` or `bf16`; empty where it is not known.
    pub precision: String,
    /// How token states become a vector: `mean`, `cls`, ...; empty where it is not known.
    pub pooling: String,
    /// Whether vectors have length 1.
    pub normalized: bool,
    /// The text that was made of each passage ([`crate::template::TextTemplate`]); empty where it is not known.
    pub template: String,
    /// Most tokens of a text, special ones included; 0 where it is not known.
    pub maxlength: usize,
    /// Most tokens of a batch; 0 where it is not known, as the two below.
    pub batch_tokens: usize,
    /// Most texts of a batch.
    pub batch_texts: usize,
    /// Texts that are sorted by length and cut into batches together. With the two above it says which texts a product has
    /// beside each other, which on some devices reaches the last bits.
    pub window: usize,
    /// The file of passages or questions, as it was named.
    pub source: String,
    /// SHA-256 of its decompressed content, or of the files that were imported; `None` where it is not known.
    pub source_fingerprint: Option<String>,
    /// Rows of the whole set.
    pub count: u64,
    /// Rows of every shard but the last, which has what is left.
    pub per_shard: u64,
}

impl VectorSettings {
    /// How many shards the set has.
    pub fn shards(&self) -> u64 {
        self.count.div_ceil(self.per_shard.max(1))
    }

    /// The rows of shard `number`.
    pub fn rows_of(&self, number: u64) -> std::ops::Range<u64> {
        let cut = |n: u64| n.saturating_mul(self.per_shard.max(1)).min(self.count);
        cut(number)..cut(number.saturating_add(1))
    }

    /// Refuses what no set of vectors has.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!(
                "expected vectors of format {FORMAT}, found format {}; use the version of Tercio that wrote them, or embed \
                 again",
                self.format
            ));
        }
        if !(1..=MAX_DIMENSION).contains(&self.dimension) {
            return Err(format!("expected a dimension of 1 to {MAX_DIMENSION}, found {}", self.dimension));
        }
        if self.per_shard == 0 {
            return Err("expected a `per_shard` of 1 or more, found 0".into());
        }
        Ok(())
    }

    /// What these settings have otherwise than `other`, in words: name, value here, value there.
    pub(crate) fn difference(&self, other: &VectorSettings) -> Option<String> {
        // The names of model and source may change as folders move; the fingerprints tell.
        if self.model_fingerprint != other.model_fingerprint {
            let shown = |s: &VectorSettings| match &s.model_fingerprint {
                Some(print) => format!("{} (fingerprint {})", s.model, &print[..print.len().min(12)]),
                None => s.model.clone(),
            };
            return Some(format!("another model: {} there, {} here", shown(other), shown(self)));
        }
        let same_texts = match (&self.source_fingerprint, &other.source_fingerprint) {
            // Nothing but the names can tell.
            (None, None) => self.source == other.source,
            (here, there) => here == there,
        };
        if !same_texts {
            return Some(format!("other texts: {} there, {} here", other.source, self.source));
        }
        let fields = |s: &VectorSettings| {
            [
                ("format", s.format.to_string()),
                ("dimension", s.dimension.to_string()),
                ("dtype", s.dtype.name().to_string()),
                ("precision", s.precision.clone()),
                ("pooling", s.pooling.clone()),
                ("normalized", s.normalized.to_string()),
                ("template", format!("{:?}", s.template)),
                ("maxlength", s.maxlength.to_string()),
                ("batch_tokens", s.batch_tokens.to_string()),
                ("per_gpu_batch_size", s.batch_texts.to_string()),
                ("window", s.window.to_string()),
                ("count", s.count.to_string()),
                ("per_shard", s.per_shard.to_string()),
            ]
        };
        let (here, there) = (fields(self), fields(other));
        let (here, there) = here.iter().zip(&there).find(|(a, b)| a.1 != b.1)?;
        Some(format!("another {}: {} there, {} here", here.0, there.1, here.1))
    }
}

/// A finished shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Its number, from 0.
    pub number: u64,
    /// Row of the whole set that is its first.
    pub first: u64,
    /// Its rows.
    pub count: u64,
    /// Name of the file of vectors.
    pub vectors: String,
    /// Name of the file of ids.
    pub ids: String,
    /// SHA-256 of the file of vectors.
    pub vectors_sha256: String,
    /// SHA-256 of the file of ids.
    pub ids_sha256: String,
    /// The instructions that computed it, for people.
    pub arithmetic: String,
}

impl ShardEntry {
    /// Whether it is the shard of this number that the settings ask for.
    fn check(&self, settings: &VectorSettings, number: u64) -> Result<(), String> {
        let rows = settings.rows_of(number);
        let (vectors, ids) = names(number);
        let found = (self.number, self.first, self.count, self.vectors.as_str(), self.ids.as_str());
        let expected = (number, rows.start, rows.end - rows.start, vectors.as_str(), ids.as_str());
        // Names are compared too: a file does not say where else to read.
        if found != expected {
            return Err(format!(
                "expected shard {number} with {} rows from row {} in {vectors} and {ids}, found shard {} with {} rows from \
                 row {} in {:?} and {:?}",
                expected.2, expected.1, found.0, found.2, found.1, found.3, found.4
            ));
        }
        Ok(())
    }
}

/// The whole of a set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VectorsManifest {
    /// What it is made of and how.
    #[serde(flatten)]
    pub settings: VectorSettings,
    /// All its shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// Names of a shard's files of vectors and ids.
fn names(number: u64) -> (String, String) {
    (format!("shard-{number:05}.vectors"), format!("shard-{number:05}.ids"))
}

fn entry_name(number: u64) -> String {
    format!("shard-{number:05}.json")
}

/// Reads a file of JSON; `None` where it is not there.
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, DataError> {
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(DataError::io(path, "open the file")(e)),
    };
    if !meta.is_file() || meta.len() > MAX_JSON_BYTES {
        let what = format!("expected a file of at most {MAX_JSON_BYTES} bytes of JSON, found something else");
        return Err(DataError::file(path, what));
    }
    let bytes = std::fs::read(path).map_err(DataError::io(path, "read the file"))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|e| {
        DataError::file(
            path,
            format!("expected JSON as `tercio embed` writes it, found another ({e}); embed again"),
        )
    })
}

/// Bytes of a shard's vectors.
pub(crate) fn bytes_of(settings: &VectorSettings, rows: u64) -> Option<u64> {
    let row = (settings.dimension as u64).checked_mul(settings.dtype.bytes() as u64)?;
    rows.checked_mul(row)
}

/// Refuses a file that has another size than it must have.
pub(crate) fn check_size(path: &PathBuf, bytes: u64) -> Result<(), DataError> {
    let found = std::fs::metadata(path).map_err(DataError::io(path, "open the file"))?.len();
    if found != bytes {
        return Err(DataError::file(
            path,
            format!(
                "expected {bytes} bytes, found {found}; the file was cut or replaced: remove its shard's .json and embed again"
            ),
        ));
    }
    Ok(())
}
