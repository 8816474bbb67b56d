//! Exact search over vectors: the greatest inner products or cosines of a query with all rows of a folder of vectors.
//!
//! A score is one sum of products in a fixed order (`tercio_engine::Cpu::dots`), computed from the numbers as they are stored:
//! the same bits for one query or many, whatever the threads and blocks, from disk or from memory, with every instruction set that fuses
//! multiply-add. Few rows need it: an 8-bit copy of the rows (`tercio_engine::cpu::screen`) proves of all others that they are
//! not among the best. Of equal scores the earlier row is better.
//!
//! [`FlatIndex`] reads the rows from disk in blocks, so memory does not grow with the collection; [`Resident`] keeps rows and
//! copies in memory, for who asks again and again.

use std::path::Path;

use rayon::prelude::*;
use tercio_data::Vectors;
use tercio_data::vectors::VectorSettings;
use tercio_engine::{Cpu, memory};

use crate::error::SearchError;
use crate::part::Part;
use crate::top::{Hit, Top};

mod piece;
mod scan;

pub(crate) use piece::{Piece, Place, norm, places};
use scan::Asked;
pub(crate) use scan::check_queries;

/// Rows that are read together from disk: [`PIECES`] pieces of [`ROWS`].
const ROWS: usize = 512;
/// Pieces of a block that is read from disk.
const PIECES: usize = 16;
/// Rows of a piece that stays in memory.
const RESIDENT_ROWS: usize = 8192;
/// Fewer queries are compared with rows from disk as they are: a copy of the rows costs more than it saves.
const FEW: usize = 4;

/// How a row is compared with a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// The inner product.
    #[default]
    Inner,
    /// The inner product, divided by the norm of the query, then by the norm of the row. A vector shorter than 1e-15 counts
    /// as zero: its cosine with anything is 0.
    Cosine,
}

impl std::str::FromStr for Metric {
    type Err = SearchError;

    fn from_str(name: &str) -> Result<Metric, SearchError> {
        match name {
            "inner" => Ok(Metric::Inner),
            "cosine" => Ok(Metric::Cosine),
            _ => Err(SearchError::Unusable(format!("expected inner or cosine, found {name:?}"))),
        }
    }
}

/// Refuses vectors that cannot be compared with each other: of another dimension, or of another model where both say theirs.
/// `Some` is a warning: one of them does not say its model.
///
/// # Errors
/// Naming both.
pub fn same_model(queries: &Vectors, passages: &Vectors) -> Result<Option<String>, SearchError> {
    let (q, p) = (queries.settings(), passages.settings());
    let other_model = is_other_model(&q.model_fingerprint, &p.model_fingerprint);
    let of = |s: &VectorSettings| format!("{} numbers, of {}", s.dimension, s.model);
    let (queries, passages) = (queries.dir().display(), passages.dir().display());
    if q.dimension != p.dimension || other_model {
        return Err(SearchError::Unusable(format!(
            "{queries}: its vectors ({}) cannot be compared with those of {passages} ({}); embed both with the same model",
            of(q),
            of(p)
        )));
    }
    Ok((q.model_fingerprint.is_none() || p.model_fingerprint.is_none()).then(|| {
        format!(
            "vectors were imported, so nothing says that {queries} (of {}) and {passages} (of {}) are of one model: it is taken \
             for granted",
            q.model, p.model
        )
    }))
}

/// Whether two fingerprints are of different models; one that is not known is taken for the other.
pub(crate) fn is_other_model(one: &Option<String>, other: &Option<String>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one != other)
}

/// Reads all vectors of a folder, row after row: the queries of a search.
///
/// # Errors
/// Vectors that do not fit into memory; a file that cannot be read.
pub fn read_all(vectors: &Vectors) -> Result<Vec<f32>, SearchError> {
    let bytes = vectors.len().saturating_mul(vectors.dimension() as u64 * 4);
    fits(vectors, bytes)?;
    let mut values = vec![0.0; vectors.len() as usize * vectors.dimension()];
    for number in 0..vectors.shards() {
        let shard = vectors.shard(number)?;
        let start = shard.first() as usize * vectors.dimension();
        shard.rows(0, &mut values[start..start + shard.len() * vectors.dimension()])?;
    }
    Ok(values)
}

pub(crate) fn fits(vectors: &Vectors, bytes: u64) -> Result<(), SearchError> {
    match memory::available() {
        Some(room) if room < bytes => Err(SearchError::Unusable(format!(
            "{}: {} of vectors do not fit into memory, of which {} are free; search them from disk, or fewer at a time",
            vectors.dir().display(),
            memory::human(bytes),
            memory::human(room)
        ))),
        _ => Ok(()),
    }
}

/// Exact search over a folder of vectors, read from disk in blocks.
#[derive(Debug)]
pub struct FlatIndex {
    vectors: Vectors,
    metric: Metric,
    part: Part,
}

impl FlatIndex {
    /// Opens a folder that `tercio embed` has finished.
    ///
    /// # Errors
    /// As [`Vectors::open`].
    pub fn open(dir: &Path, metric: Metric) -> Result<FlatIndex, SearchError> {
        Ok(FlatIndex::of(Vectors::open(dir)?, metric))
    }

    /// Of vectors that are open.
    pub fn of(vectors: Vectors, metric: Metric) -> FlatIndex {
        FlatIndex { vectors, metric, part: Part::WHOLE }
    }

    /// Searches a part of the rows only.
    pub fn only(self, part: Part) -> FlatIndex {
        FlatIndex { part, ..self }
    }

    /// The vectors.
    pub fn vectors(&self) -> &Vectors {
        &self.vectors
    }

    /// How rows are compared.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// The `depth` best of its rows for every query, best first; all of them where there are not so many. `queries`: rows of the vectors' dimension.
    /// Memory: a block of 8192 rows and their copies, the queries and their copies, and twice `depth` hits a query. `stop` is asked before
    /// every block, `progress` told the share that is done.
    ///
    /// # Errors
    /// Queries that are not rows of the dimension, or whose numbers are none; rows that cannot be read or whose numbers are none;
    /// scores beyond f32; [`SearchError::Stopped`].
    pub fn search(
        &self,
        cpu: &Cpu,
        queries: &[f32],
        depth: usize,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let asked = Asked::new(cpu, queries, self.vectors.dimension(), self.metric, 0)?;
        let places = places(&self.vectors, self.part.rows(self.vectors.len()), ROWS)?;
        let mut tops = scan::tops(asked.count(), depth, self.vectors.len());
        let screened = asked.count() >= FEW;
        for (n, block) in places.chunks(PIECES).enumerate() {
            if stop() {
                return Err(SearchError::Stopped);
            }
            let read = |place: &Place| Piece::read(cpu, &self.vectors, place, self.metric, screened);
            // The first error in the order of rows.
            let pieces: Vec<_> = cpu_run(cpu, || block.par_iter().map(read).collect());
            let pieces = pieces.into_iter().collect::<Result<Vec<_>, _>>()?;
            scan::scan(cpu, &asked, &pieces, &mut tops)?;
            progress(((n * PIECES + block.len()) as f64 / places.len() as f64).min(1.0));
        }
        Ok(tops.into_iter().map(Top::into_sorted).collect())
    }

    /// Bytes of memory that [`FlatIndex::load`] takes: its rows as they are stored and a byte a number, 12 to 16 bytes a row.
    pub fn resident_bytes(&self) -> u64 {
        let settings = self.vectors.settings();
        let row = settings.dimension as u64 * (settings.dtype.bytes() as u64 + 1) + 16;
        let rows = self.part.rows(self.vectors.len());
        (rows.end - rows.start).saturating_mul(row)
    }

    /// Reads its rows into memory.
    ///
    /// # Errors
    /// Vectors that do not fit; as [`FlatIndex::search`].
    pub fn load(self, cpu: &Cpu, stop: &(dyn Fn() -> bool + Sync)) -> Result<Resident, SearchError> {
        fits(&self.vectors, self.resident_bytes())?;
        let places = places(&self.vectors, self.part.rows(self.vectors.len()), RESIDENT_ROWS)?;
        let read = |place: &Place| match stop() {
            true => Err(SearchError::Stopped),
            false => Piece::read(cpu, &self.vectors, place, self.metric, true),
        };
        let pieces: Vec<_> = cpu_run(cpu, || places.par_iter().map(read).collect());
        let pieces = pieces.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(Resident { index: self, pieces })
    }
}

/// Exact search over vectors that lie in memory; the same scores and rows as from disk.
pub struct Resident {
    index: FlatIndex,
    pieces: Vec<Piece>,
}

impl Resident {
    /// The vectors on disk.
    pub fn vectors(&self) -> &Vectors {
        &self.index.vectors
    }

    /// Bytes of memory that rows and copies take.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(Piece::bytes).sum()
    }

    /// As [`FlatIndex::search`]. `stop` is asked before every few hundred queries.
    ///
    /// # Errors
    /// As [`FlatIndex::search`].
    pub fn search(
        &self,
        cpu: &Cpu,
        queries: &[f32],
        depth: usize,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        /// Queries between two looks at whether to stop: they are searched together.
        const BATCH: usize = 1024;
        let dimension = self.index.vectors.dimension();
        let mut hits = Vec::new();
        for batch in queries.chunks(BATCH * dimension) {
            if stop() {
                return Err(SearchError::Stopped);
            }
            let asked = Asked::new(cpu, batch, dimension, self.index.metric, hits.len())?;
            let mut tops = scan::tops(asked.count(), depth, self.index.vectors.len());
            scan::scan(cpu, &asked, &self.pieces, &mut tops)?;
            hits.extend(tops.into_iter().map(Top::into_sorted));
        }
        Ok(hits)
    }
}

/// Runs on the device's threads.
pub(crate) fn cpu_run<R: Send>(cpu: &Cpu, work: impl FnOnce() -> R + Send) -> R {
    tercio_engine::Device::run(cpu, work)
}
