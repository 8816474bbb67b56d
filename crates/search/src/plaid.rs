//! A compressed index of late interaction, in the spirit of PLAID (Santhanam et al. 2022): every vector is the number of its nearest
//! centroid and a residual of 1, 2, 4 or 8 bits a number; every centroid has the list of the documents that have a vector near it.
//!
//! A query looks into the lists of the centroids that have the greatest inner products with each of its tokens (`probes`). The documents found there get an
//! estimate from their centroids alone: a table of bytes, one row a centroid, of which the greatest per token are summed. The best
//! `candidates` of them are put together from their bits again and scored by MaxSim exactly. With all probes and all candidates a search is
//! the exact one over the vectors as the index has them.
//!
//! Of equal scores the earlier document is better. There are fewer results than asked for only where the index (or a filter) has no more
//! documents with vectors: where the lists hold fewer, all documents are candidates. A filter without documents finds nothing.
//!
//! Files are mapped and never change (`manifest.rs`): an addition is a further piece under the centroids that are there, a deletion a
//! new list of deleted rows. Who has the index open keeps the version that was opened. Learning draws by a seed and sums in a fixed
//! order: the same files with any number of threads.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tercio_engine::Cpu;
use tercio_engine::cpu::late::Buckets;

use crate::compressed::lists::read_numbers;
use crate::error::SearchError;
use crate::manifest::Manifest;
use crate::part::Part;

mod build;
mod change;
mod codec;
mod piece;
mod search;

pub use build::{PlaidOptions, PlaidReport};
pub use piece::PieceEntry;
pub use search::PlaidSearch;

use piece::{Piece, file_of, read_rows};

/// The kind of these indexes in their manifest.
pub const KIND: &str = "plaid";
/// Most centroids: their numbers have 16 bits.
pub const MOST_CENTROIDS: usize = 1 << 16;
/// How often an index is opened that is replaced meanwhile.
const REOPENED: usize = 5;

/// What an index remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlaidSettings {
    /// Numbers of a vector.
    pub dimension: usize,
    /// Bits of a number of a residual.
    pub bits: usize,
    /// Centroids.
    pub centroids: usize,
    /// Whether vectors have length 1, so that they are scaled to it again.
    pub unit: bool,
    /// Vectors that centroids were learnt from.
    pub sample: usize,
    /// Rounds of k-means.
    pub rounds: usize,
    /// What the draws are keyed by.
    pub seed: u64,
    /// The model of the vectors as it was named.
    pub model: String,
    /// Its fingerprint, where it is known.
    pub model_fingerprint: Option<String>,
    /// Mean square of the distance between a vector and its centroid, of the documents that these were learnt from.
    pub distance: f64,
    /// The version that centroids and buckets came with.
    pub learnt: u64,
    /// The pieces, in the order of rows.
    pub pieces: Vec<PieceEntry>,
    /// How many rows are deleted.
    pub deleted: u64,
    /// The version that the list of them came with; 0 where there is none.
    pub deleted_version: u64,
}

/// An open index. Its files are mapped: memory holds centroids, 8 bytes a document and 8 a centroid and piece; what else is touched the system
/// keeps as it keeps files.
pub struct PlaidIndex {
    manifest: Manifest,
    settings: PlaidSettings,
    centroids: Vec<f32>,
    buckets: Buckets,
    pieces: Vec<Piece>,
    deleted: Rows,
    total: u64,
    part: Part,
}

/// A set of rows: those of a filter, or those that are deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    bits: Vec<u64>,
    count: usize,
}

impl Rows {
    /// Of rows in any order.
    pub fn of(rows: impl IntoIterator<Item = u32>) -> Rows {
        let mut all = Rows::default();
        rows.into_iter().for_each(|row| all.insert(row));
        all
    }

    /// Adds a row.
    pub fn insert(&mut self, row: u32) {
        let (word, bit) = (row as usize / 64, 1u64 << (row % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        self.count += usize::from(self.bits[word] & bit == 0);
        self.bits[word] |= bit;
    }

    /// Whether a row is among them.
    pub fn has(&self, row: u32) -> bool {
        self.bits.get(row as usize / 64).is_some_and(|word| word >> (row % 64) & 1 == 1)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The rows, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.bits.iter().enumerate().flat_map(|(w, &word)| {
            std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)))
                .take_while(|rest| *rest != 0)
                .map(move |rest| w as u32 * 64 + rest.trailing_zeros())
        })
    }
}

/// Ids of the documents of an index.
pub struct PlaidIds {
    ids: Vec<String>,
    /// Rows of the ids that are not deleted.
    rows: HashMap<String, u32>,
}

impl PlaidIds {
    /// The id of a row, deleted or not.
    pub fn id(&self, row: u64) -> Option<&str> {
        self.ids.get(usize::try_from(row).ok()?).map(String::as_str)
    }

    /// The row of an id; `None` where the index has no such document, or it was deleted.
    pub fn row(&self, id: &str) -> Option<u32> {
        self.rows.get(id).copied()
    }

    /// The rows of some ids, for a filter, and those ids that the index does not have: whoever asks says so.
    pub fn rows<'a, S: AsRef<str>>(&self, ids: &'a [S]) -> (Rows, Vec<&'a str>) {
        let (mut rows, mut unknown) = (Rows::default(), Vec::new());
        for id in ids {
            match self.row(id.as_ref()) {
                Some(row) => rows.insert(row),
                None => unknown.push(id.as_ref()),
            }
        }
        (rows, unknown)
    }
}

impl PlaidIndex {
    /// Opens an index.
    ///
    /// # Errors
    /// A folder that is no such index; a file that is missing, of another size, or contradicts the others, by its name.
    pub fn open(dir: &Path) -> Result<PlaidIndex, SearchError> {
        // Files of two versions must not meet, and those of an older one may go while they are opened.
        for _ in 0..REOPENED {
            let before = Manifest::read_if_there(dir)?;
            let opened = Manifest::read(dir).and_then(|manifest| PlaidIndex::of_manifest(dir, manifest));
            if Manifest::read_if_there(dir)? == before {
                return opened;
            }
        }
        let what =
            format!("the index was replaced {REOPENED} times while it was opened; wait until it is finished");
        Err(SearchError::file(dir, what))
    }

    /// Opens the version of a manifest.
    ///
    /// # Errors
    /// As [`PlaidIndex::open`].
    pub fn of_manifest(dir: &Path, manifest: Manifest) -> Result<PlaidIndex, SearchError> {
        manifest.expect_kind(dir, KIND)?;
        let settings: PlaidSettings = manifest.settings(dir)?;
        let total = settings.check(&manifest).map_err(|what| {
            SearchError::file(
                dir,
                format!("the manifest of the index contradicts itself: {what}; index again"),
            )
        })?;
        let path =
            |version: u64, part: &str| file_of(dir, &manifest, version, part).map(|f| dir.join(f.name));
        let numbers = settings.centroids * settings.dimension;
        let centroids = read_numbers(&path(settings.learnt, "centroids")?, numbers)?;
        let buckets = codec::read(&path(settings.learnt, "buckets")?, settings.bits)?;
        let row_bytes = buckets.row_bytes(settings.dimension);
        let (mut pieces, mut first) = (Vec::new(), 0u32);
        for entry in &settings.pieces {
            pieces.push(Piece::open(dir, &manifest, entry, first, settings.centroids, row_bytes)?);
            first += entry.documents as u32;
        }
        let deleted = match settings.deleted_version {
            0 => Rows::default(),
            version => {
                let path = path(version, "deleted")?;
                let rows = read_rows(&path, total)?;
                if rows.len() as u64 != settings.deleted {
                    let what = format!(
                        "expected {} deleted rows, found {}; index again",
                        settings.deleted,
                        rows.len()
                    );
                    return Err(SearchError::file(&path, what));
                }
                Rows::of(rows)
            }
        };
        let part = Part::WHOLE;
        Ok(PlaidIndex { manifest, settings, centroids, buckets, pieces, deleted, total, part })
    }

    /// Searches a part of the documents only.
    pub fn only(self, part: Part) -> PlaidIndex {
        PlaidIndex { part, ..self }
    }

    /// What the folder says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What the index remembers.
    pub fn settings(&self) -> &PlaidSettings {
        &self.settings
    }

    /// How many rows it has, deleted ones included: a further document gets this row.
    pub fn rows(&self) -> u64 {
        self.total
    }

    /// How many documents it has.
    pub fn len(&self) -> u64 {
        self.total - self.deleted.len() as u64
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the ids of all documents.
    ///
    /// # Errors
    /// A file of ids that is damaged, by its name.
    pub fn ids(&self) -> Result<PlaidIds, SearchError> {
        let mut ids = Vec::with_capacity(self.total as usize);
        for piece in &self.pieces {
            ids.extend(piece.ids()?);
        }
        let live = ids.iter().zip(0u32..).filter(|(_, row)| !self.deleted.has(*row));
        let rows = live.map(|(id, row)| (id.clone(), row)).collect();
        Ok(PlaidIds { ids, rows })
    }

    /// The vectors of a row as the index has them, one after the other.
    ///
    /// # Errors
    /// A row that is not there.
    pub fn vectors(&self, cpu: &Cpu, row: u64) -> Result<Vec<f32>, SearchError> {
        match u32::try_from(row).ok().filter(|_| row < self.total) {
            Some(row) => Ok(self.unpacked(cpu, row)),
            None => Err(SearchError::Unusable(format!("row {row}: the index has {}", self.total))),
        }
    }

    /// The piece of a row, and the document's number there.
    fn place(&self, row: u32) -> (&Piece, u32) {
        let at = self.pieces.partition_point(|piece| piece.first <= row);
        // Of pieces without documents the last one begins where the next does.
        let piece = &self.pieces[at - 1];
        (piece, row - piece.first)
    }
}

impl PlaidSettings {
    /// Refuses what no index has; gives the count of rows.
    fn check(&self, manifest: &Manifest) -> Result<u64, String> {
        let sum =
            |of: fn(&PieceEntry) -> u64| self.pieces.iter().try_fold(0u64, |sum, p| sum.checked_add(of(p)));
        let total = sum(|p| p.documents)
            .filter(|t| *t <= u64::from(u32::MAX))
            .ok_or("more rows than 4 bytes can name")?;
        sum(|p| p.tokens).filter(|t| *t < 1 << 48).ok_or("more vectors than any index has")?;
        if total != manifest.collection.count {
            return Err(format!("{} passages, but {total} documents", manifest.collection.count));
        }
        let most = tercio_data::vectors::MAX_DIMENSION;
        if !(1..=most).contains(&self.dimension) || !(1..=MOST_CENTROIDS).contains(&self.centroids) {
            return Err(format!("{} centroids of {} numbers", self.centroids, self.dimension));
        }
        if self.deleted > total {
            return Err(format!("{} deleted rows of {total}", self.deleted));
        }
        codec::check_bits(self.bits).map_err(|e| e.to_string())?;
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_a_set_in_order() {
        let rows = Rows::of([200, 3, 64, 3, 0, 63]);
        assert_eq!((rows.len(), rows.iter().collect::<Vec<_>>()), (5, vec![0, 3, 63, 64, 200]));
        assert!(rows.has(63) && !rows.has(65) && !rows.has(u32::MAX) && Rows::default().is_empty());
    }
}
