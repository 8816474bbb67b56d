//! Kernels of late interaction: for every token of a query the greatest inner product with the rows of a document, the same
//! looked up in a table of bytes, and the best centroids of every token; below it the nearest centroid of many rows, and residuals.
//!
//! An inner product is one chain of multiply-adds over the dimension, in order: the same bits whatever the number of rows, threads or
//! lanes, on every instruction set that fuses multiply-add. Tokens of the query lie beside each other in vector registers, so that
//! no sum goes across one.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512, _mm256_max_ps, _mm512_max_ps};

use rayon::prelude::*;

use super::lanes::{Lanes, kernel};
use super::{Cpu, Device, Isa};

mod bytes;
mod nearest;
mod residuals;

use bytes::QueryCopies;
pub use bytes::TokenCopies;
pub use residuals::{Buckets, PackedRows};

/// Tokens of a query that are multiplied together.
pub const LANES: usize = 32;
/// Best codes of a lane that are kept in order while all are looked at; of more a selection is quicker.
const FEW: usize = 64;
/// Rows that a thread takes at a time.
const ROWS: usize = 512;

/// Tokens of a query as the kernels read them.
pub struct QueryTokens {
    tokens: usize,
    lanes: usize,
    dimension: usize,
    /// Number d of token t at `d * lanes + t`; zeros where there is no token.
    values: Vec<f32>,
    /// Its copies in 8 bits.
    copies: QueryCopies,
}

impl QueryTokens {
    /// Rows of `dimension` finite numbers, one a token.
    pub fn new(rows: &[f32], dimension: usize) -> QueryTokens {
        assert!(dimension > 0 && rows.len().is_multiple_of(dimension));
        let tokens = rows.len() / dimension;
        let lanes = tokens.next_multiple_of(LANES);
        let mut values = vec![0.0; lanes * dimension];
        for (t, row) in rows.chunks_exact(dimension).enumerate() {
            row.iter().enumerate().for_each(|(d, v)| values[d * lanes + t] = *v);
        }
        QueryTokens { tokens, lanes, dimension, values, copies: QueryCopies::new(rows, dimension, lanes) }
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The sum of what [`Cpu::raise_to_products`] has left for the tokens, in their order, in f64: a document's score.
    pub fn sum(&self, best: &[f32]) -> f32 {
        best[..self.tokens].iter().fold(0f64, |sum, b| sum + f64::from(*b)) as f32
    }

    /// Elements that a kernel gives: the tokens, and some that mean nothing.
    pub fn lanes(&self) -> usize {
        self.lanes
    }
}

/// The greater of two vectors' elements; no number counts as less.
trait Greatest: Lanes {
    /// SAFETY: as of [`Lanes`].
    unsafe fn greatest(self, other: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
impl Greatest for __m512 {
    #[inline(always)]
    unsafe fn greatest(self, other: Self) -> Self {
        unsafe { _mm512_max_ps(self, other) }
    }
}
#[cfg(target_arch = "x86_64")]
impl Greatest for __m256 {
    #[inline(always)]
    unsafe fn greatest(self, other: Self) -> Self {
        unsafe { _mm256_max_ps(self, other) }
    }
}
impl Greatest for [f32; 4] {
    #[inline(always)]
    unsafe fn greatest(self, other: Self) -> Self {
        std::array::from_fn(|i| if self[i] > other[i] { self[i] } else { other[i] })
    }
}

/// Products of `J` rows of `steps` elements with `V` vectors of lanes.
///
/// SAFETY: `query` has `steps` rows of `lanes` elements, of which the first `V` vectors are read; the rows are there; the processor has
/// the instructions.
#[inline(always)]
unsafe fn sums<L: Lanes, const J: usize, const V: usize>(
    query: *const f32,
    lanes: usize,
    rows: *const f32,
    steps: usize,
) -> [[L; V]; J] {
    unsafe {
        let mut sums = [[L::zero(); V]; J];
        for d in 0..steps {
            let q = query.add(d * lanes);
            let q: [L; V] = std::array::from_fn(|v| L::load(q.add(v * L::N)));
            for (j, sums) in sums.iter_mut().enumerate() {
                let x = L::splat(rows.add(j * steps + d));
                for v in 0..V {
                    sums[v] = sums[v].fma(q[v], x);
                }
            }
        }
        sums
    }
}

/// Raises `best` (`V` vectors) to the products of `count` rows, `J` of them at a time.
///
/// SAFETY: as of [`sums`].
#[inline(always)]
unsafe fn strip<L: Greatest, const J: usize, const V: usize>(
    query: *const f32,
    lanes: usize,
    rows: *const f32,
    count: usize,
    steps: usize,
    best: &mut [L; V],
) {
    unsafe {
        let mut r = 0;
        while r + J <= count {
            for sums in sums::<L, J, V>(query, lanes, rows.add(r * steps), steps) {
                for v in 0..V {
                    best[v] = best[v].greatest(sums[v]);
                }
            }
            r += J;
        }
        // What is left by fours, then one by one.
        if J > 4 && r < count {
            strip::<L, 4, V>(query, lanes, rows.add(r * steps), count - r, steps, best);
        } else if J > 1 && r < count {
            strip::<L, 1, V>(query, lanes, rows.add(r * steps), count - r, steps, best);
        }
    }
}

/// What a kernel is given: a query's elements, a document's, and how many of each row.
#[derive(Clone, Copy)]
struct Job {
    query: *const f32,
    lanes: usize,
    rows: *const f32,
    count: usize,
    steps: usize,
}

/// SAFETY: as of [`strip`]; `best` has `lanes` elements.
#[inline(always)]
unsafe fn strips<L: Greatest, const J: usize, const V: usize>(job: Job, best: *mut f32) {
    unsafe {
        for lane in (0..job.lanes).step_by(V * L::N) {
            let mut greatest: [L; V] = std::array::from_fn(|v| L::load(best.add(lane + v * L::N)));
            strip::<L, J, V>(job.query.add(lane), job.lanes, job.rows, job.count, job.steps, &mut greatest);
            for (v, g) in greatest.into_iter().enumerate() {
                g.store(best.add(lane + v * L::N));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn avx512(job: Job, best: *mut f32) {
    unsafe { strips::<__m512, 8, 2>(job, best) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(job: Job, best: *mut f32) {
    unsafe { strips::<__m256, 5, 2>(job, best) }
}

kernel! {
    /// Raises `best` to the bytes of the table's rows that the codes name. A code beyond the table counts as its last row.
    fn raise(table: &[[u8; LANES]], strips: usize, codes: &[[u8; 2]], best: &mut [[u8; LANES]]) {
        let last = (table.len() / strips).saturating_sub(1);
        for (s, best) in best.iter_mut().enumerate() {
            let mut sets = [[0u8; LANES]; 4];
            let row = |code: &[u8; 2]| &table[usize::from(u16::from_le_bytes(*code)).min(last) * strips + s];
            let (fours, rest) = codes.as_chunks::<4>();
            for four in fours {
                for (set, code) in sets.iter_mut().zip(four) {
                    let row = row(code);
                    for l in 0..LANES {
                        set[l] = set[l].max(row[l]);
                    }
                }
            }
            for code in rest {
                let row = row(code);
                for l in 0..LANES {
                    sets[0][l] = sets[0][l].max(row[l]);
                }
            }
            for l in 0..LANES {
                best[l] = sets[0][l].max(sets[1][l]).max(sets[2][l].max(sets[3][l]));
            }
        }
    }
}

kernel! {
    /// Bit l says whether element l is above the least that counts.
    fn above(row: &[f32; LANES], least: &[f32; LANES]) -> bool {
        let mut any = 0u32;
        for l in 0..LANES {
            any |= u32::from(row[l] > least[l]);
        }
        any != 0
    }
}

impl Cpu {
    /// Raises `best` (a number for each of the query's lanes) to the inner products of its tokens with rows, on the calling thread.
    pub fn raise_to_products(&self, query: &QueryTokens, rows: &[f32], best: &mut [f32]) {
        assert!(best.len() == query.lanes && rows.len().is_multiple_of(query.dimension));
        let (lanes, steps) = (query.lanes, query.dimension);
        let job = Job {
            query: query.values.as_ptr(),
            lanes,
            rows: rows.as_ptr(),
            count: rows.len() / steps,
            steps,
        };
        // SAFETY: sizes are those of the slices; a device has only instructions that the processor has; lanes come in 32.
        unsafe {
            match self.isa() {
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => avx512(job, best.as_mut_ptr()),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2(job, best.as_mut_ptr()),
                _ => strips::<[f32; 4], 1, 8>(job, best.as_mut_ptr()),
            }
        }
    }

    /// The sum, over the query's tokens in order, of the greatest inner product with a row (Khattab and Zaharia 2020, "ColBERT"); negative
    /// infinity without rows. Added in f64, on the calling thread.
    pub fn max_sim(&self, query: &QueryTokens, rows: &[f32]) -> f32 {
        let mut best = vec![f32::NEG_INFINITY; query.lanes];
        self.raise_to_products(query, rows, &mut best);
        query.sum(&best)
    }

    /// Estimates from a table: `table` has, for every code, a byte for each lane of the query, `lanes` of them (a multiple of [`LANES`]);
    /// gives the sum over lanes of the greatest byte among the codes' rows. `codes`: little-endian, of a document's tokens.
    pub fn max_sim_of_codes(&self, table: &[[u8; LANES]], strips: usize, codes: &[[u8; 2]]) -> u32 {
        assert!(strips > 0 && !table.is_empty() && table.len().is_multiple_of(strips));
        let mut best = [[0u8; LANES]; 4];
        match best.get_mut(..strips) {
            Some(best) => {
                raise(self.isa(), table, strips, codes, best);
                sum_of(best)
            }
            None => {
                let mut best = vec![[0u8; LANES]; strips];
                raise(self.isa(), table, strips, codes, &mut best);
                sum_of(&best)
            }
        }
    }

    /// Inner products of the query's tokens with rows: those of a row beside each other, one for each lane of the query, zeros where there is no
    /// token.
    pub fn products_of_lanes(&self, query: &QueryTokens, rows: &[f32]) -> Vec<f32> {
        let (lanes, steps) = (query.lanes, query.dimension);
        let mut out = vec![0.0; rows.len() / steps * lanes];
        let of = |(rows, out): (&[f32], &mut [f32])| {
            let (rows, count) = (rows.as_ptr(), rows.len() / steps);
            let job = Job { query: query.values.as_ptr(), lanes, rows, count, steps };
            nearest::products(self.isa(), job, out);
        };
        self.run(|| {
            out.par_chunks_mut(ROWS * lanes).zip(rows.par_chunks(ROWS * steps)).for_each(|(o, r)| of((r, o)))
        });
        out
    }

    /// The `count` best codes of every lane, best first, of equal scores the first: lane l's at `[l]`. `scores`: `lanes` numbers a code.
    pub fn best_of_lanes(&self, scores: &[f32], lanes: usize, tokens: usize, count: usize) -> Vec<Vec<u32>> {
        assert!(lanes.is_multiple_of(LANES) && scores.len().is_multiple_of(lanes) && tokens <= lanes);
        if count > FEW {
            return (0..tokens)
                .into_par_iter()
                .map(|lane| most_of_lane(scores, lanes, lane, count))
                .collect();
        }
        let mut best: Vec<Vec<(f32, u32)>> = vec![Vec::new(); tokens];
        for strip in 0..tokens.div_ceil(LANES) {
            let mut least = [f32::NEG_INFINITY; LANES];
            let real = LANES.min(tokens - strip * LANES);
            least[real..].fill(f32::INFINITY);
            for (code, row) in scores.chunks_exact(lanes).enumerate() {
                let Some(row) = row[strip * LANES..].first_chunk::<LANES>() else { continue };
                if !above(self.isa(), row, &least) {
                    continue;
                }
                for l in 0..real {
                    if row[l] > least[l] {
                        let best = &mut best[strip * LANES + l];
                        let at = best.partition_point(|(score, _)| *score >= row[l]);
                        best.insert(at, (row[l], code as u32));
                        best.truncate(count);
                        if best.len() == count {
                            least[l] = best.last().map_or(f32::INFINITY, |(score, _)| *score);
                        }
                    }
                }
            }
        }
        best.into_iter().map(|best| best.into_iter().map(|(_, code)| code).collect()).collect()
    }
}

/// The `count` best codes of one lane, by a selection: its work does not grow with their number.
fn most_of_lane(scores: &[f32], lanes: usize, lane: usize, count: usize) -> Vec<u32> {
    let all = scores.chunks_exact(lanes).map(|row| row[lane]).zip(0u32..);
    let mut codes: Vec<(f32, u32)> = all.filter(|(score, _)| *score > f32::NEG_INFINITY).collect();
    let order = |a: &(f32, u32), b: &(f32, u32)| {
        b.0.partial_cmp(&a.0).unwrap_or(std::cmp::Ordering::Equal).then(a.1.cmp(&b.1))
    };
    if count < codes.len() {
        codes.select_nth_unstable_by(count, order);
        codes.truncate(count);
    }
    codes.sort_unstable_by(order);
    codes.into_iter().map(|(_, code)| code).collect()
}

fn sum_of(best: &[[u8; LANES]]) -> u32 {
    best.iter().flatten().map(|b| u32::from(*b)).sum()
}

#[cfg(test)]
mod tests;
