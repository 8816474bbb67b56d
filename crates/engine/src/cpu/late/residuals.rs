//! Residuals in a few bits: what a row has beyond its centroid, each number replaced by the number of its bucket.
//!
//! Value i of a row lies in bits `i * bits ..` of its bytes, lowest first; 1, 2, 4 or 8 bits, so that a byte holds whole values.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::super::lanes::{fma, kernel};
use super::super::{Cpu, Isa};

/// Buckets of numbers: bucket b holds what is above `b` cut-offs, and stands for `weights[b]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    bits: usize,
    cutoffs: Vec<f32>,
    weights: Vec<f32>,
    /// For every byte the weights of the values that it holds.
    bytes: Vec<f32>,
}

/// Rows in a few bits each.
#[derive(Clone, Copy)]
pub struct PackedRows<'a> {
    /// The centroid of each row, little-endian. One beyond the centroids counts as the last.
    pub codes: &'a [[u8; 2]],
    /// [`Buckets::row_bytes`] of each row.
    pub residuals: &'a [u8],
    /// The centroids, one after the other.
    pub centroids: &'a [f32],
    /// Numbers of a row.
    pub dimension: usize,
    /// Whether rows are scaled to length 1 once they are put together.
    pub unit: bool,
}

impl Buckets {
    /// `2^bits - 1` cut-offs in ascending order and `2^bits` weights, for 1, 2, 4 or 8 bits; `None` for anything else.
    pub fn new(bits: usize, cutoffs: Vec<f32>, weights: Vec<f32>) -> Option<Buckets> {
        let ordered = cutoffs.windows(2).all(|pair| pair[0] <= pair[1]);
        let finite = cutoffs.iter().chain(&weights).all(|v| v.is_finite());
        let count = [1, 2, 4, 8].contains(&bits).then(|| 1usize << bits)?;
        if !ordered || !finite || cutoffs.len() != count - 1 || weights.len() != count {
            return None;
        }
        let values = |byte: usize| (0..8 / bits).map(move |i| byte >> (i * bits) & (count - 1));
        let bytes = (0..256).flat_map(|byte| values(byte).map(|b| weights[b])).collect();
        Some(Buckets { bits, cutoffs, weights, bytes })
    }

    /// Bits of a value.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// The cut-offs.
    pub fn cutoffs(&self) -> &[f32] {
        &self.cutoffs
    }

    /// The weights.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Bytes of a row.
    pub fn row_bytes(&self, dimension: usize) -> usize {
        (dimension * self.bits).div_ceil(8)
    }
}

kernel! {
    /// Writes the buckets' numbers of a row into its bytes.
    fn pack(buckets: &Buckets, row: &[f32], numbers: &mut [u8], packed: &mut [u8]) {
        numbers.fill(0);
        for cutoff in &buckets.cutoffs {
            for (number, v) in numbers.iter_mut().zip(row) {
                *number += u8::from(v > cutoff);
            }
        }
        for (byte, values) in packed.iter_mut().zip(numbers.chunks(8 / buckets.bits)) {
            *byte = values.iter().enumerate().fold(0, |byte, (i, v)| byte | v << (i * buckets.bits));
        }
    }
}

/// Puts rows together: `P` values a byte.
#[inline(always)]
fn put_together<const P: usize, const F: bool>(bytes: &[f32], rows: PackedRows<'_>, out: &mut [f32]) {
    let dimension = rows.dimension;
    let (table, _) = bytes.as_chunks::<P>();
    let width = dimension.div_ceil(P);
    for ((code, packed), out) in
        rows.codes.iter().zip(rows.residuals.chunks_exact(width)).zip(out.chunks_exact_mut(dimension))
    {
        let (whole, rest) = out.as_chunks_mut::<P>();
        for (out, byte) in whole.iter_mut().zip(packed) {
            *out = table[usize::from(*byte)];
        }
        for (out, value) in rest.iter_mut().zip(&table[usize::from(packed[width - 1])]) {
            *out = *value;
        }
        let centroid = rows.centroid(*code);
        out.iter_mut().zip(centroid).for_each(|(o, c)| *o += c);
        if rows.unit {
            let mut lanes = [0f32; 32];
            let (chunks, rest) = out.as_chunks::<32>();
            for chunk in chunks {
                for l in 0..32 {
                    lanes[l] = fma::<F>(chunk[l], chunk[l], lanes[l]);
                }
            }
            for (lane, v) in lanes.iter_mut().zip(rest) {
                *lane = fma::<F>(*v, *v, *lane);
            }
            let factor = factor(lanes);
            out.iter_mut().for_each(|o| *o *= factor);
        }
    }
}

/// One over the root of the sum of lanes, added as a tree; zeros stay what they are.
#[inline(always)]
fn factor(mut lanes: [f32; 32]) -> f32 {
    for half in [16, 8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    if lanes[0] > 0.0 { 1.0 / lanes[0].sqrt() } else { 1.0 }
}

impl<'a> PackedRows<'a> {
    #[inline(always)]
    fn centroid(&self, code: [u8; 2]) -> &'a [f32] {
        let last = (self.centroids.len() / self.dimension).saturating_sub(1);
        &self.centroids[usize::from(u16::from_le_bytes(code)).min(last) * self.dimension..][..self.dimension]
    }
}

kernel! {
    fn unpack(buckets: &Buckets, rows: PackedRows<'_>, out: &mut [f32]) {
        match buckets.bits {
            1 => put_together::<8, F>(&buckets.bytes, rows, out),
            2 => put_together::<4, F>(&buckets.bytes, rows, out),
            4 => put_together::<2, F>(&buckets.bytes, rows, out),
            _ => put_together::<1, F>(&buckets.bytes, rows, out),
        }
    }
}

/// The same for 4 bits and a dimension of whole 32: the sixteen weights lie in a register, and sixteen values are looked up at once.
///
/// SAFETY: the processor has AVX-512; `out` and `rows.residuals` have room for all codes, 16 weights are there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn four_bits(buckets: &Buckets, rows: PackedRows<'_>, out: &mut [f32]) {
    let dimension = rows.dimension;
    unsafe {
        let weights = _mm512_loadu_ps(buckets.weights.as_ptr());
        let low = _mm_set1_epi8(15);
        for ((n, (code, packed)), out) in rows
            .codes
            .iter()
            .zip(rows.residuals.chunks_exact(dimension / 2))
            .enumerate()
            .zip(out.chunks_exact_mut(dimension))
        {
            // Centroids lie anywhere: the one of a later row is asked for now.
            if let Some(later) = rows.codes.get(n + 3) {
                let later = rows.centroid(*later);
                for k in (0..dimension).step_by(16) {
                    _mm_prefetch::<_MM_HINT_T0>(later.as_ptr().add(k).cast());
                }
            }
            let centroid = rows.centroid(*code);
            let mut squares = [_mm512_setzero_ps(); 2];
            for k in (0..dimension).step_by(16) {
                let bytes = _mm_loadl_epi64(packed.as_ptr().add(k / 2).cast());
                let upper = _mm_and_si128(_mm_srli_epi16::<4>(bytes), low);
                let numbers = _mm_unpacklo_epi8(_mm_and_si128(bytes, low), upper);
                let values = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(numbers), weights);
                let values = _mm512_add_ps(values, _mm512_loadu_ps(centroid.as_ptr().add(k)));
                squares[k / 16 % 2] = _mm512_fmadd_ps(values, values, squares[k / 16 % 2]);
                _mm512_storeu_ps(out.as_mut_ptr().add(k), values);
            }
            if rows.unit {
                let mut lanes = [0f32; 32];
                _mm512_storeu_ps(lanes.as_mut_ptr(), squares[0]);
                _mm512_storeu_ps(lanes.as_mut_ptr().add(16), squares[1]);
                let factor = factor(lanes);
                out.iter_mut().for_each(|o| *o *= factor);
            }
        }
    }
}

impl Cpu {
    /// Writes the buckets of a residual's numbers into `packed` ([`Buckets::row_bytes`]).
    pub fn pack_residual(
        &self,
        buckets: &Buckets,
        residual: &[f32],
        numbers: &mut Vec<u8>,
        packed: &mut [u8],
    ) {
        assert_eq!(packed.len(), buckets.row_bytes(residual.len()));
        numbers.resize(residual.len(), 0);
        pack(self.isa(), buckets, residual, numbers, packed);
    }

    /// Puts rows together again, on the calling thread: centroid and weights of the buckets, scaled to length 1 where that is wanted. `out` has
    /// room for all of them.
    pub fn unpack_rows(&self, buckets: &Buckets, rows: PackedRows<'_>, out: &mut [f32]) {
        let (count, dimension) = (rows.codes.len(), rows.dimension);
        assert!(
            dimension > 0 && !rows.centroids.is_empty() && rows.centroids.len().is_multiple_of(dimension)
        );
        assert_eq!(rows.residuals.len(), count * buckets.row_bytes(dimension));
        assert_eq!(out.len(), count * dimension);
        #[cfg(target_arch = "x86_64")]
        if buckets.bits == 4
            && dimension.is_multiple_of(32)
            && matches!(self.isa(), Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512)
        {
            // SAFETY: the processor has the instructions; sizes were compared above, and buckets of 4 bits have 16 weights.
            return unsafe { four_bits(buckets, rows, out) };
        }
        unpack(self.isa(), buckets, rows, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{key, normal};

    #[test]
    fn rows_come_back_as_their_buckets_say() {
        for (bits, dimension) in [(1, 16), (2, 128), (4, 7), (4, 128), (8, 5), (1, 3)] {
            let buckets_count = 1usize << bits;
            let cutoffs: Vec<f32> =
                (1..buckets_count).map(|i| i as f32 / buckets_count as f32 - 0.5).collect();
            let weights: Vec<f32> =
                (0..buckets_count).map(|i| (i as f32 + 0.5) / buckets_count as f32 - 0.5).collect();
            let buckets = Buckets::new(bits, cutoffs.clone(), weights.clone()).unwrap();
            let draw = |seed: u64, n: usize| -> Vec<f32> {
                (0..n as u64).map(|i| normal(key(&[seed]), i) as f32 * 0.3).collect()
            };
            let (centroids, residuals) = (draw(1, 3 * dimension), draw(2, 4 * dimension));
            let codes = [[2, 0], [0, 0], [1, 0], [255, 255]];
            let mut fused = None;
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let cpu = Cpu::with_isa(1, isa).unwrap();
                let width = buckets.row_bytes(dimension);
                let (mut packed, mut numbers) = (vec![0u8; 4 * width], Vec::new());
                for (row, packed) in residuals.chunks(dimension).zip(packed.chunks_mut(width)) {
                    cpu.pack_residual(&buckets, row, &mut numbers, packed);
                }
                let mut rows = PackedRows {
                    codes: &codes,
                    residuals: &packed,
                    centroids: &centroids,
                    dimension,
                    unit: false,
                };
                let mut out = vec![0.0; 4 * dimension];
                cpu.unpack_rows(&buckets, rows, &mut out);
                for (i, (out, residual)) in out.iter().zip(&residuals).enumerate() {
                    let centroid = centroids[[2, 0, 1, 2][i / dimension] * dimension + i % dimension];
                    let bucket = cutoffs.iter().filter(|c| residual > c).count();
                    assert_eq!(*out, weights[bucket] + centroid, "{bits} {i}");
                }
                rows.unit = true;
                cpu.unpack_rows(&buckets, rows, &mut out);
                for row in out.chunks(dimension) {
                    let norm: f32 = row.iter().map(|v| v * v).sum::<f32>().sqrt();
                    assert!((norm - 1.0).abs() < 1e-5, "{norm}");
                }
                if isa.fuses() {
                    assert_eq!(*fused.get_or_insert_with(|| out.clone()), out, "{isa:?}");
                }
            }
        }
    }

    #[test]
    fn buckets_that_cannot_be_are_refused() {
        assert!(Buckets::new(3, vec![0.0; 7], vec![0.0; 8]).is_none());
        assert!(Buckets::new(1, vec![0.0], vec![0.0; 3]).is_none());
        assert!(Buckets::new(2, vec![1.0, 0.0, 2.0], vec![0.0; 4]).is_none());
        assert!(Buckets::new(1, vec![f32::NAN], vec![0.0; 2]).is_none());
        assert!(Buckets::new(64, vec![], vec![]).is_none());
    }
}
