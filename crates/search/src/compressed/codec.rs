//! Product quantisation with 4 bits (Jégou, Douze and Schmid 2011): a residual is cut into parts, and each part is one of 16.

use std::ops::Range;

use rayon::prelude::*;
use tercio_data::draw;
use tercio_engine::{Cpu, Device};

use super::clusters::Rounds;
use crate::error::SearchError;

/// Entries of a part's codebook.
pub(super) const ENTRIES: usize = 16;
/// Keeps these draws apart from others with the same seed.
const FIRST: u64 = 0x636f_6465;

/// The codebooks of all parts.
pub(super) struct Codec {
    pub dimension: usize,
    /// How many parts there are: two in a byte.
    pub parts: usize,
    /// Entry e of part p, number t: at `16 * first number of p + t * 16 + e`, so that 16 entries are compared at once.
    pub entries: Vec<f32>,
}

/// The table of a query: scores of all entries in whole numbers, and what a sum of them means.
pub(super) struct Table {
    pub entries: Vec<u8>,
    /// Inner product of the residual with the query: `least + sum / factor`.
    pub least: f32,
    pub factor: f32,
}

impl Codec {
    /// Numbers of part `p`.
    pub fn part(&self, p: usize) -> Range<usize> {
        let cut = |p: usize| self.dimension * p / self.parts;
        cut(p)..cut(p + 1)
    }

    fn book(&self, p: usize) -> &[f32] {
        let part = self.part(p);
        &self.entries[ENTRIES * part.start..ENTRIES * part.end]
    }

    /// Learns codebooks from residuals (rows of the dimension).
    pub fn learn(
        cpu: &Cpu,
        residuals: &[f32],
        dimension: usize,
        parts: usize,
        how: Rounds<'_>,
    ) -> Result<Codec, SearchError> {
        if (how.stop)() {
            return Err(SearchError::Stopped);
        }
        let mut codec = Codec { dimension, parts, entries: Vec::new() };
        let learnt = |p: usize| {
            let part = codec.part(p);
            let own = residuals.chunks_exact(dimension).flat_map(|r| r[part.clone()].iter().copied());
            let own: Vec<f32> = own.collect();
            learn_part(&own, part.len(), &[FIRST, how.seed, p as u64], how.rounds)
        };
        let books: Vec<Vec<f32>> =
            cpu.run(|| (0..parts).into_par_iter().with_max_len(1).map(learnt).collect());
        codec.entries = books.concat();
        Ok(codec)
    }

    /// The codes of a residual, one a part, and the square of what they lack.
    pub fn encode(&self, residual: &[f32], codes: &mut [u8]) -> f32 {
        let mut lacking = 0.0;
        for (p, code) in codes.iter_mut().enumerate() {
            let (nearest, square) = nearest(&residual[self.part(p)], self.book(p));
            *code = nearest;
            lacking += square;
        }
        lacking
    }

    /// The table of a query.
    pub fn table(&self, query: &[f32]) -> Table {
        let mut scores = vec![[0f32; ENTRIES]; self.parts];
        // Greatest spread of one part, and of a sum of all: what must fit into 8 and into 16 bits.
        let (mut least, mut widest, mut all) = (0f32, 0f32, 0f32);
        for (p, scores) in scores.iter_mut().enumerate() {
            for (q, entries) in query[self.part(p)].iter().zip(self.book(p).as_chunks::<ENTRIES>().0) {
                scores.iter_mut().zip(entries).for_each(|(s, e)| *s += q * e);
            }
            let low = scores.iter().copied().fold(f32::INFINITY, f32::min);
            let high = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|s| *s -= low);
            least += low;
            widest = widest.max(high - low);
            all += high - low;
        }
        // A sum of rounded entries may be half a step above for every part.
        let room = 65535.0 - self.parts as f32;
        let factor = (255.0 / widest).min(room / all);
        let factor = if factor.is_finite() && factor > 0.0 { factor } else { 1.0 };
        let whole = |s: &f32| (s * factor + 0.5) as u8;
        let entries = scores.as_flattened().iter().map(whole).collect();
        Table { entries, least, factor }
    }
}

/// The nearest entry of a book, of equally near ones the first, and the square of the distance.
fn nearest(x: &[f32], book: &[f32]) -> (u8, f32) {
    let mut squares = [0f32; ENTRIES];
    for (v, entries) in x.iter().zip(book.as_chunks::<ENTRIES>().0) {
        for (square, entry) in squares.iter_mut().zip(entries) {
            *square += (v - entry) * (v - entry);
        }
    }
    let mut best = 0;
    for e in 1..ENTRIES {
        if squares[e] < squares[best] {
            best = e;
        }
    }
    (best as u8, squares[best])
}

/// The book of one part. An entry that no row is near to stays where it was.
fn learn_part(rows: &[f32], width: usize, key: &[u64], rounds: usize) -> Vec<f32> {
    let count = rows.len() / width;
    let mut book = vec![0f32; width * ENTRIES];
    for e in 0..ENTRIES {
        let drawn = draw::index(&[key, &[e as u64]].concat(), count).unwrap_or(0);
        for (t, v) in rows[drawn * width..].iter().take(width).enumerate() {
            book[t * ENTRIES + e] = *v;
        }
    }
    for _ in 0..rounds {
        let mut sums = vec![0f64; width * ENTRIES];
        let mut members = [0u32; ENTRIES];
        for row in rows.chunks_exact(width) {
            let (e, _) = nearest(row, &book);
            members[usize::from(e)] += 1;
            for (t, v) in row.iter().enumerate() {
                sums[t * ENTRIES + usize::from(e)] += f64::from(*v);
            }
        }
        for (at, value) in book.iter_mut().enumerate() {
            let members = members[at % ENTRIES];
            if members > 0 {
                *value = (sums[at] / f64::from(members)) as f32;
            }
        }
    }
    book
}
