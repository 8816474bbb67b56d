//! A compressed index: inverted lists of 4-bit codes, whose best rows are scored again from the vectors themselves.
//!
//! Rows are put into lists around centroids (k-means); what a row has beyond its centroid is cut into parts of a few numbers, and
//! each part is replaced by one of 16 that were learnt (product quantisation). A query looks into the lists whose centroids have the
//! greatest inner products with it (`probes`), estimates the scores of their rows from tables, and computes the true scores of the best
//! `rescore` of them: the bits of an exact search. If the lists hold fewer rows than asked for, further lists follow, so there
//! are fewer results than asked for only where the index has no more rows.
//!
//! Training draws rows by a seed and sums in a fixed order: the same index with any number of threads.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tercio_engine::Cpu;

use crate::error::SearchError;
use crate::flat::Metric;
use crate::manifest::Manifest;
use crate::part::Part;

pub(crate) mod build;
pub(crate) mod clusters;
mod codec;
pub(crate) mod lists;
mod originals;
mod recall;
mod search;

pub use build::{CompressedOptions, CompressedReport};
pub use originals::Source;

use clusters::Centroids;
use codec::Codec;
use lists::Lists;
use originals::Originals;

/// The kind of these indexes in their manifest.
pub const KIND: &str = "compressed";
/// Most parts of a code: sums of 8 bits of each fit into 16.
const MOST_PARTS: usize = 256;
/// Most lists that are believed.
const MOST_LISTS: usize = 1 << 20;

/// What a compressed index remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompressedSettings {
    /// How rows are compared.
    pub metric: Metric,
    /// Numbers of a vector.
    pub dimension: usize,
    /// Lists.
    pub lists: usize,
    /// Bytes of a row's code; its number takes 4 more.
    pub code_bytes: usize,
    /// Rows that lists and codes were learnt from.
    pub sample: usize,
    /// Rounds of k-means.
    pub rounds: usize,
    /// What the draws are keyed by.
    pub seed: u64,
    /// The model of the vectors as it was named.
    pub model: String,
    /// Its fingerprint, where it is known.
    pub model_fingerprint: Option<String>,
    /// The vectors, in the order of rows.
    pub sources: Vec<Source>,
    /// Mean square of the distance between a row and its centroid, of the rows it was built of.
    pub distance: f64,
    /// Mean square of what a row's code lacks, of the same rows.
    pub lacking: f64,
    /// What was measured after the last build.
    pub recall: Vec<Recall>,
    /// What the queries of that were.
    pub recall_queries: String,
    /// Lists that a query looks into unless it says otherwise.
    pub probes: usize,
}

/// A share of the exact search's results that the index found as well.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recall {
    /// Results of a query.
    pub depth: usize,
    /// Lists looked into.
    pub probes: usize,
    /// Rows scored again; 0: estimates only.
    pub rescore: usize,
    /// Found of the exact search's, in 0..=1.
    pub recall: f64,
}

/// How a search trades time for recall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedSearch {
    /// Results of a query.
    pub depth: usize,
    /// Lists to look into; 0: as the index says.
    pub probes: usize,
    /// Rows to score again, at least `depth`; 0: none, and scores are estimates.
    pub rescore: usize,
}

/// An index in memory; its vectors stay on disk unless they are kept, too.
pub struct CompressedIndex {
    settings: CompressedSettings,
    centroids: Centroids,
    codec: Codec,
    lists: Lists,
    total: u64,
    originals: Option<Originals>,
    part: Part,
}

impl CompressedIndex {
    /// Opens an index. Without `vectors` only estimates can be had; with it, re-scoring reads rows of the folders that the index was made of.
    ///
    /// # Errors
    /// A folder that is no compressed index, files that contradict the manifest, vectors that are not there or have changed.
    pub fn open(cpu: &Cpu, dir: &Path, vectors: bool) -> Result<CompressedIndex, SearchError> {
        let manifest = Manifest::read(dir)?;
        let mut index = CompressedIndex::of_manifest(cpu, dir, &manifest)?;
        if vectors {
            let settings = &index.settings;
            index.originals = Some(Originals::open(dir, &settings.sources, settings.metric)?);
        }
        Ok(index)
    }

    fn of_manifest(cpu: &Cpu, dir: &Path, manifest: &Manifest) -> Result<CompressedIndex, SearchError> {
        manifest.expect_kind(dir, KIND)?;
        let settings: CompressedSettings = manifest.settings(dir)?;
        let total = settings.check(manifest).map_err(|what| {
            SearchError::file(
                dir,
                format!("the manifest of the index contradicts itself: {what}; index again"),
            )
        })?;
        let file = |part: &str| -> Result<&str, SearchError> {
            let suffix = format!("-{part}");
            let found = manifest.files.iter().find(|f| f.name.ends_with(&suffix));
            found.map(|f| f.name.as_str()).ok_or_else(|| {
                SearchError::file(
                    dir,
                    format!("expected a file of {part} in the manifest, found none; index again"),
                )
            })
        };
        let (dimension, lists) = (settings.dimension, settings.lists);
        let parts = 2 * settings.code_bytes;
        let centroids = lists::read_numbers(&dir.join(file("centroids")?), lists * dimension)?;
        let entries = lists::read_numbers(&dir.join(file("codebooks")?), codec::ENTRIES * dimension)?;
        let files = [file("counts")?, file("rows")?, file("codes")?];
        Ok(CompressedIndex {
            centroids: Centroids::new(cpu, &centroids, dimension),
            codec: Codec { dimension, parts, entries },
            lists: Lists::read(dir, files, lists, parts, total)?,
            settings,
            total,
            originals: None,
            part: Part::WHOLE,
        })
    }

    /// Searches a part of the rows only.
    pub fn only(self, part: Part) -> CompressedIndex {
        CompressedIndex { part, ..self }
    }

    /// What the index remembers.
    pub fn settings(&self) -> &CompressedSettings {
        &self.settings
    }

    /// How many rows it has.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Bytes of memory of lists and codes, without vectors that are kept.
    pub fn bytes(&self) -> u64 {
        let numbers = self.settings.lists * self.settings.dimension + self.codec.entries.len();
        self.lists.bytes() + numbers as u64 * 4
    }

    /// Reads the vectors of its rows into memory, so that re-scoring reads no files; says how many bytes they take.
    ///
    /// # Errors
    /// Vectors that do not fit or cannot be read, or an index that was opened without them.
    pub fn keep_vectors(&mut self, cpu: &Cpu) -> Result<u64, SearchError> {
        match &mut self.originals {
            Some(originals) => originals.keep(cpu, self.part.rows(self.total)),
            None => Err(SearchError::Unusable("the index was opened without its vectors".into())),
        }
    }
}

impl CompressedSettings {
    /// Refuses what no index has; gives the count of rows.
    fn check(&self, manifest: &Manifest) -> Result<u64, String> {
        let total = self.sources.iter().try_fold(0u64, |sum, s| sum.checked_add(s.count));
        let total = total.filter(|t| *t <= u64::from(u32::MAX)).ok_or("more rows than 4 bytes can name")?;
        if total != manifest.collection.count {
            return Err(format!("{} passages, but {total} vectors", manifest.collection.count));
        }
        let most = tercio_data::vectors::MAX_DIMENSION;
        if !(1..=most).contains(&self.dimension) || !(1..=MOST_LISTS).contains(&self.lists) {
            return Err(format!("{} lists of vectors of {} numbers", self.lists, self.dimension));
        }
        check_parts(self.code_bytes, self.dimension)?;
        Ok(total)
    }
}

/// Refuses codes of a size that cannot be.
fn check_parts(code_bytes: usize, dimension: usize) -> Result<(), String> {
    let most = MOST_PARTS.min(dimension) / 2;
    if code_bytes == 0 || !code_bytes.is_multiple_of(2) || code_bytes > most {
        return Err(format!(
            "codes of {code_bytes} bytes: expected an even number of 2 to {} for vectors of {dimension} numbers",
            most / 2 * 2
        ));
    }
    Ok(())
}
