//! Scores of documents from 8-bit copies of their vectors, with a bound that is proved (`screen.rs` says how, for one vector): who is
//! told that a document's true score cannot be among the best need not compute it.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use super::super::lanes::Lanes;
use super::super::screen::{copy, has_vnni};
use super::super::{Cpu, Isa};
#[cfg(target_arch = "x86_64")]
use super::sums;
use super::{LANES, QueryTokens};

/// 8-bit copies of some vectors.
pub struct TokenCopies {
    /// Four codes without a sign in a word, a vector after the other.
    words: Vec<u32>,
    steps: usize,
    scales: Vec<f32>,
    /// The norm of each copy and of what it lacks, not less.
    lengths: Vec<f32>,
    errors: Vec<f32>,
}

impl TokenCopies {
    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        (self.words.len() + self.scales.len() * 3) as u64 * 4
    }

    /// The greatest norm of the copies `first..end`, and of what they lack.
    pub fn terms(&self, first: usize, end: usize) -> (f32, f32) {
        let most = |terms: &[f32]| {
            terms[first..end].iter().fold(0f32, |most, v| if *v > most || v.is_nan() { *v } else { most })
        };
        (most(&self.lengths), most(&self.errors))
    }
}

/// 8-bit copies of a query's tokens.
pub(super) struct QueryCopies {
    /// Four codes of each lane, a step after the other.
    words: Vec<u32>,
    scales: Vec<f32>,
    /// What the zero of the documents' codes adds to a lane's sum.
    offsets: Vec<i32>,
    /// Sums over the tokens: of their norms, and of the norms of what their copies lack.
    norms: f32,
    errors: f32,
}

/// Codes as words of four, and the terms.
fn copied(
    isa: Isa,
    row: &[f32],
    codes: &mut [i8],
    zero: u8,
    mut word: impl FnMut(usize, u32),
) -> (f32, f32, f32, i32) {
    codes.fill(0);
    let copied = copy(isa, row, &mut codes[..row.len()]);
    for (step, four) in codes.as_chunks::<4>().0.iter().enumerate() {
        word(step, u32::from_le_bytes(four.map(|code| (code as u8).wrapping_add(zero))));
    }
    (copied.scale, copied.length, copied.error, codes.iter().map(|code| i32::from(*code)).sum())
}

impl QueryCopies {
    pub(super) fn new(rows: &[f32], dimension: usize, lanes: usize) -> QueryCopies {
        let steps = dimension.div_ceil(4);
        let mut all = QueryCopies {
            words: vec![0; steps * lanes],
            scales: vec![0.0; lanes],
            offsets: vec![0; lanes],
            norms: 0.0,
            errors: 0.0,
        };
        let mut codes = vec![0i8; steps * 4];
        for (t, row) in rows.chunks_exact(dimension).enumerate() {
            let words = &mut all.words;
            let place = |step: usize, word: u32| words[step * lanes + t] = word;
            // Whole numbers and bounds: the instructions make no difference.
            let (scale, length, error, sum) = copied(Isa::Portable, row, &mut codes, 0, place);
            all.scales[t] = scale;
            all.offsets[t] = sum * 128;
            // Of the token itself, not of its copy.
            all.norms += length + error;
            all.errors += error;
        }
        all
    }
}

/// Sums of products of bytes.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Bytes(__m512i);

#[cfg(target_arch = "x86_64")]
impl Lanes for Bytes {
    const N: usize = 16;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Bytes(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_si512(p.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self {
        unsafe { Bytes(_mm512_set1_epi32(*p.cast::<i32>())) }
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { Bytes(_mm512_setzero_si512()) }
    }
    /// `a` is the query's, with a sign, `b` the document's, without.
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        unsafe { Bytes(_mm512_dpbusd_epi32(self.0, b.0, a.0)) }
    }
}

/// The greatest scaled sums of `count` copies, `J` at a time, for the lanes of a strip; the query's scale is still to come.
///
/// SAFETY: `query` has `steps` rows of `lanes` words, of which 32 are read, `offsets` 32; `words` and `scales` are those of the copies; the
/// processor has the instructions.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn strip<const J: usize>(
    (query, lanes, offsets): (*const f32, usize, [__m512i; 2]),
    (words, scales, steps): (*const f32, &[f32], usize),
    best: &mut [__m512; 2],
) {
    unsafe {
        let mut r = 0;
        while r + J <= scales.len() {
            let sums = sums::<Bytes, J, 2>(query, lanes, words.add(r * steps), steps);
            for (sums, scale) in sums.into_iter().zip(&scales[r..]) {
                for v in 0..2 {
                    let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[v].0, offsets[v]));
                    best[v] = _mm512_max_ps(best[v], _mm512_mul_ps(sum, _mm512_set1_ps(*scale)));
                }
            }
            r += J;
        }
        if J > 1 && r < scales.len() {
            strip::<1>((query, lanes, offsets), (words.add(r * steps), &scales[r..], steps), best);
        }
    }
}

/// SAFETY: as of [`strip`]; `best` and `offsets` have `lanes` elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma")]
unsafe fn strips(
    query: &QueryCopies,
    lanes: usize,
    words: *const f32,
    scales: &[f32],
    steps: usize,
    best: &mut [f32],
) {
    unsafe {
        for lane in (0..lanes).step_by(LANES) {
            let at = |p: usize| _mm512_loadu_si512(query.offsets.as_ptr().add(lane + p).cast());
            let mut greatest = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
            let asked = (query.words.as_ptr().cast::<f32>().add(lane), lanes, [at(0), at(16)]);
            strip::<8>(asked, (words, scales, steps), &mut greatest);
            for (v, g) in greatest.into_iter().enumerate() {
                _mm512_storeu_ps(best.as_mut_ptr().add(lane + 16 * v), g);
            }
        }
    }
}

impl Cpu {
    /// Whether [`Cpu::near_max_sim`] is there and gains anything.
    pub fn has_near_max_sim(&self) -> bool {
        cfg!(target_arch = "x86_64")
            && matches!(self.isa(), Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512)
            && has_vnni()
    }

    /// 8-bit copies of rows of `dimension` finite numbers (at most 65536).
    pub fn copy_tokens(&self, rows: &[f32], dimension: usize) -> TokenCopies {
        assert!((1..=1 << 16).contains(&dimension) && rows.len().is_multiple_of(dimension));
        let (count, steps) = (rows.len() / dimension, dimension.div_ceil(4));
        let mut all = TokenCopies {
            words: Vec::with_capacity(count * steps),
            steps,
            scales: Vec::with_capacity(count),
            lengths: Vec::with_capacity(count),
            errors: Vec::with_capacity(count),
        };
        let mut codes = vec![0i8; steps * 4];
        for row in rows.chunks_exact(dimension) {
            let words = &mut all.words;
            let (scale, length, error, _) =
                copied(self.isa(), row, &mut codes, 128, |_, word| words.push(word));
            all.scales.push(scale);
            all.lengths.push(length);
            all.errors.push(error);
        }
        all
    }

    /// As [`Cpu::max_sim`] of the copies `first..end`, one at least, instead of the vectors: from the true score by at most
    /// [`QueryTokens::bound`] of their [`TokenCopies::terms`]. Only where [`Cpu::has_near_max_sim`].
    pub fn near_max_sim(&self, query: &QueryTokens, copies: &TokenCopies, first: usize, end: usize) -> f32 {
        assert!(self.has_near_max_sim() && query.dimension.div_ceil(4) == copies.steps && first < end);
        let words = &copies.words[first * copies.steps..end * copies.steps];
        let mut best = vec![f32::NEG_INFINITY; query.lanes];
        #[cfg(target_arch = "x86_64")]
        // SAFETY: sizes are those of the slices; the processor has the instructions, as asserted.
        unsafe {
            let scales = &copies.scales[first..end];
            strips(&query.copies, query.lanes, words.as_ptr().cast(), scales, copies.steps, &mut best);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = words;
        let scaled = best.iter().zip(&query.copies.scales);
        scaled.take(query.tokens).fold(0f64, |sum, (b, scale)| sum + f64::from(*b) * f64::from(*scale)) as f32
    }
}

impl QueryTokens {
    /// How far [`Cpu::near_max_sim`] of a document may be from its true score: for each token `|q - q'| |x'| + |q| |x - x'|` (Cauchy and
    /// Schwarz), of the greatest terms of its vectors, and what the sums round.
    pub fn bound(&self, (length, error): (f32, f32)) -> f32 {
        let c = &self.copies;
        let rounding = (self.dimension + self.tokens + 32) as f32 / (1 << 22) as f32;
        // A product of numbers too small for f32 is lost whole.
        let lost = f32::MIN_POSITIVE * (self.dimension * self.tokens) as f32;
        (c.errors * length + c.norms * error) * (1.0 + rounding)
            + c.norms * (length + error) * rounding
            + lost
    }
}
