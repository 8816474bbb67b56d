//! The vectors that an index was made of: for exact scores of what its codes found.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tercio_data::Vectors;
use tercio_engine::Cpu;

use crate::error::SearchError;
use crate::flat::{Metric, Piece, Place, cpu_run, fits, places};
use crate::part::within;

/// Rows of a piece in memory.
const PIECE: usize = 8192;

/// A folder of vectors that an index holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The folder, absolute.
    pub path: PathBuf,
    /// Its rows.
    pub count: u64,
    /// What its rows are ([`Vectors::fingerprint`]).
    pub fingerprint: String,
}

impl Source {
    pub(super) fn of(vectors: &Vectors) -> Source {
        let path = std::path::absolute(vectors.dir()).unwrap_or_else(|_| vectors.dir().to_owned());
        Source { path, count: vectors.len(), fingerprint: vectors.fingerprint() }
    }
}

/// Rows of several folders, one after the other.
pub(super) struct Originals {
    folders: Vec<(u64, Vectors, Vec<Place>)>,
    metric: Metric,
    /// The rows that are kept in memory.
    pieces: Vec<Piece>,
}

impl Originals {
    /// Opens the folders of an index.
    ///
    /// # Errors
    /// One that is not there, or has other rows by now.
    pub fn open(index: &Path, sources: &[Source], metric: Metric) -> Result<Originals, SearchError> {
        let mut folders = Vec::new();
        let mut first = 0;
        for source in sources {
            let again = "give the folder where it is now, search without re-scoring, or index again";
            let vectors = Vectors::open(&source.path).map_err(|e| {
                SearchError::file(
                    index,
                    format!("re-scores with vectors that cannot be opened ({e}); {again}"),
                )
            })?;
            if vectors.len() != source.count || vectors.fingerprint() != source.fingerprint {
                let what =
                    format!("its vectors are no longer those of the index {}; {again}", index.display());
                return Err(SearchError::file(&source.path, what));
            }
            let places = places(&vectors, 0..vectors.len(), PIECE)?;
            folders.push((first, vectors, places));
            first += source.count;
        }
        Ok(Originals { folders, metric, pieces: Vec::new() })
    }

    /// Reads some rows into memory, the only ones that are asked for from now on; says how many bytes they take.
    pub fn keep(&mut self, cpu: &Cpu, rows: Range<u64>) -> Result<u64, SearchError> {
        self.pieces.clear();
        let mut all = Vec::new();
        for (first, vectors, _) in &self.folders {
            let row = (vectors.dimension() * vectors.settings().dtype.bytes()) as u64 + 4;
            let rows = within(&rows, *first, vectors.len());
            fits(vectors, (rows.end - rows.start).saturating_mul(row))?;
            let places = places(vectors, rows, PIECE)?;
            let read = |place: &Place| Piece::read(cpu, vectors, place, self.metric, false);
            let pieces: Vec<_> = cpu_run(cpu, || places.par_iter().map(read).collect());
            for piece in pieces {
                let mut piece: Piece = piece?;
                piece.first += first;
                all.push(piece);
            }
        }
        self.pieces = all;
        Ok(self.pieces.iter().map(Piece::bytes).sum())
    }

    /// The score of a row: the same bits as of an exact search.
    pub fn score(&self, cpu: &Cpu, query: &[f32], norm: f32, row: u64) -> Result<f32, SearchError> {
        let mut score = [0.0];
        if let Some(n) = self.pieces.partition_point(|p| p.first <= row).checked_sub(1) {
            let piece = &self.pieces[n];
            piece.scores(cpu, query, norm, (row - piece.first) as usize, &mut score)?;
            return Ok(score[0]);
        }
        let n = self.folders.partition_point(|(first, ..)| *first <= row).saturating_sub(1);
        let (first, vectors, places) = &self.folders[n];
        let within = row - first;
        let place = places[places.partition_point(|p| p.first() <= within).saturating_sub(1)].one(within);
        let piece = Piece::read(cpu, vectors, &place, self.metric, false)?;
        piece.scores(cpu, query, norm, 0, &mut score)?;
        Ok(score[0])
    }
}
