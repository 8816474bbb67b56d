//! Consecutive rows in memory, as they are stored, and their 8-bit copies.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tercio_data::Vectors;
use tercio_data::vectors::{VectorDtype, VectorShard};
use tercio_engine::Cpu;
use tercio_engine::cpu::StoredRows;
use tercio_engine::cpu::screen::Screen;

use super::Metric;
use crate::error::SearchError;
use crate::part::within;

/// Squares of norms below this one count as zero.
const LEAST_SQUARE: f32 = 1e-30;

/// Shards that are kept open at most: a set may have more than a process can open files.
const MOST_OPEN: usize = 64;

/// The shards of a set that were asked for last.
#[derive(Default)]
struct OpenShards {
    open: Mutex<VecDeque<(usize, Arc<VectorShard>)>>,
}

impl OpenShards {
    fn get(&self, vectors: &Vectors, number: usize) -> Result<Arc<VectorShard>, SearchError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, shard)) = open.iter().find(|(n, _)| *n == number) {
            return Ok(shard.clone());
        }
        if open.len() >= MOST_OPEN {
            open.pop_front();
        }
        let shard = Arc::new(vectors.shard(number)?);
        open.push_back((number, shard.clone()));
        Ok(shard)
    }
}

/// Where the rows of a piece lie.
pub(crate) struct Place {
    shards: Arc<OpenShards>,
    number: usize,
    /// The first row of the shard in the whole set.
    shard_first: u64,
    start: usize,
    count: usize,
}

impl Place {
    /// The first row in the whole set.
    pub fn first(&self) -> u64 {
        self.shard_first + self.start as u64
    }

    /// One row of the same shard.
    pub fn one(&self, row: u64) -> Place {
        let start = (row - self.shard_first) as usize;
        Place { shards: self.shards.clone(), start, count: 1, ..*self }
    }
}

/// Some of the rows, cut into pieces of at most `most`, in order.
pub(crate) fn places(vectors: &Vectors, rows: Range<u64>, most: usize) -> Result<Vec<Place>, SearchError> {
    let mut places = Vec::new();
    let open = Arc::new(OpenShards::default());
    for number in 0..vectors.shards() {
        // One that is gone is an error now, and not after half of the work.
        let shard = open.get(vectors, number)?;
        let own = within(&rows, shard.first(), shard.len() as u64);
        let (first, end) = (own.start as usize, own.end as usize);
        for start in (first..end).step_by(most) {
            let count = most.min(end - start);
            let shards = open.clone();
            places.push(Place { shards, number, shard_first: shard.first(), start, count });
        }
    }
    Ok(places)
}

/// Consecutive rows.
pub(crate) struct Piece {
    dir: PathBuf,
    /// The first in the whole set.
    pub first: u64,
    pub count: usize,
    dimension: usize,
    dtype: VectorDtype,
    bytes: Vec<u8>,
    /// Of every row, for cosines; 0 for a vector that counts as zero.
    norms: Option<Vec<f32>>,
    pub screen: Option<Screen>,
}

impl Piece {
    /// Reads rows, and copies them where they are to be screened.
    pub fn read(
        cpu: &Cpu,
        vectors: &Vectors,
        place: &Place,
        metric: Metric,
        screened: bool,
    ) -> Result<Piece, SearchError> {
        let (dimension, dtype) = (vectors.dimension(), vectors.settings().dtype);
        let mut bytes = vec![0; place.count * dimension * dtype.bytes()];
        let shard = place.shards.get(vectors, place.number)?;
        shard.stored(place.start, &mut bytes)?;
        let mut piece = Piece {
            dir: vectors.dir().to_owned(),
            first: place.first(),
            count: place.count,
            dimension,
            dtype,
            bytes,
            norms: None,
            screen: None,
        };
        // The kernel of scores takes every half for a finite number; other formats show what is none in the score.
        let halves = || piece.bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b) & 0x7fff);
        let odd = dtype == VectorDtype::F16 && halves().fold(0, u16::max) >= 0x7c00;
        let mut values = Vec::new();
        if screened || odd || metric == Metric::Cosine {
            values.resize(place.count * dimension, 0.0);
            shard.decode(place.start, &piece.bytes, &mut values)?;
        }
        if metric == Metric::Cosine {
            let norms = values.chunks_exact(dimension).enumerate().map(|(row, x)| {
                let mut square = [0.0];
                cpu.dots(x, piece.rows(row, 1), &mut square);
                norm(square[0]).ok_or_else(|| piece.beyond(row))
            });
            piece.norms = Some(norms.collect::<Result<_, _>>()?);
        }
        if screened {
            let factor = |norm: &f32| if *norm > 0.0 { 1.0 / norm } else { 0.0 };
            let factors: Option<Vec<f32>> = piece.norms.as_ref().map(|n| n.iter().map(factor).collect());
            piece.screen = Some(cpu.screen(&values, dimension, factors.as_deref()));
        }
        Ok(piece)
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        let norms = self.norms.as_ref().map_or(0, |n| n.len() * size_of::<f32>());
        (self.bytes.len() + norms) as u64 + self.screen.as_ref().map_or(0, Screen::bytes)
    }

    fn rows(&self, row: usize, count: usize) -> StoredRows<'_> {
        let size = self.dimension * self.dtype.bytes();
        let bytes = &self.bytes[row * size..(row + count) * size];
        match self.dtype {
            VectorDtype::F32 => StoredRows::F32(bytes.as_chunks().0),
            VectorDtype::F16 => StoredRows::F16(bytes.as_chunks().0),
            VectorDtype::Bf16 => StoredRows::Bf16(bytes.as_chunks().0),
        }
    }

    /// Scores of rows `row..row + scores.len()`; `norm` is the query's, for cosines.
    pub fn scores(
        &self,
        cpu: &Cpu,
        query: &[f32],
        norm: f32,
        row: usize,
        scores: &mut [f32],
    ) -> Result<(), SearchError> {
        cpu.dots(query, self.rows(row, scores.len()), scores);
        if let Some(norms) = &self.norms {
            for (score, own) in scores.iter_mut().zip(&norms[row..]) {
                // Twice a division: a product of norms could leave the range.
                *score = if norm > 0.0 && *own > 0.0 { *score / norm / own } else { 0.0 };
            }
        }
        match scores.iter().position(|s| !s.is_finite()) {
            None => Ok(()),
            Some(at) => Err(self.beyond(row + at)),
        }
    }

    /// What is wrong with a row whose score is not finite.
    fn beyond(&self, row: usize) -> SearchError {
        let mut values = vec![0.0; self.dimension];
        let size = self.dimension * self.dtype.bytes();
        self.dtype.decode(&self.bytes[row * size..][..size], &mut values);
        let what = match values.iter().position(|v| !v.is_finite()) {
            Some(at) => {
                format!("has {} as number {at}; the file was damaged, embed again", values[at])
            }
            None => "has a score or a norm beyond the range of f32; normalize the vectors".into(),
        };
        SearchError::file(&self.dir, format!("row {} {what}", self.first + row as u64))
    }
}

/// The norm of a square; `None` beyond the range, 0 for what counts as zero.
pub(crate) fn norm(square: f32) -> Option<f32> {
    match square {
        s if !s.is_finite() => None,
        s if s < LEAST_SQUARE => Some(0.0),
        s => Some(s.sqrt()),
    }
}
