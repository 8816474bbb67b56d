//! Sums of table entries chosen by 4-bit codes: the estimated scores of a compressed index, 32 rows at a time.
//!
//! After André, Kermarrec and Le Scouarnec (2015), "Cache locality is not enough: high-performance nearest neighbor search
//! with product quantization fast scan": tables of 16 bytes lie in registers, a shuffle looks 64 codes up. Whole numbers only,
//! so every instruction set finds the same rows.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::lanes::kernel;
use super::{Cpu, Isa};

/// Rows of a block of codes.
pub const CODE_ROWS: usize = 32;
/// Tables whose codes lie in one line of a block.
pub const LINE_TABLES: usize = 4;
/// Bytes of a line: 4 tables, 32 rows, half a byte each.
pub const LINE_BYTES: usize = 64;

/// Where code `table` of row `row` lies in a block of [`CODE_ROWS`] rows: the byte, and how far its four bits are shifted.
pub fn code_place(row: usize, table: usize) -> (usize, u32) {
    let lane = table / LINE_TABLES * LINE_BYTES + table % LINE_TABLES * 16;
    (lane + row % 16, 4 * (row / 16) as u32)
}

impl Cpu {
    /// Sums of table entries for every row of some blocks, on the calling thread; calls `found(row, sum)` for those that are at
    /// least `least`, in the order of rows. `tables`: 16 entries each; their number is a multiple of [`LINE_TABLES`] and no sum of one entry of each is
    /// above 65535. `codes`: blocks as [`code_place`] says.
    pub fn look_up(&self, tables: &[u8], codes: &[u8], least: u16, found: &mut impl FnMut(usize, u16)) {
        let lines = tables.len() / LINE_BYTES;
        assert!(tables.len().is_multiple_of(LINE_BYTES) && lines > 0, "tables come in fours");
        let block = lines * LINE_BYTES;
        assert!(codes.len().is_multiple_of(block), "blocks of codes are whole");
        for (n, codes) in codes.chunks_exact(block).enumerate() {
            let mut sums = [0u16; CODE_ROWS];
            match self.isa() {
                // SAFETY: the processor has AVX-512; the slices are whole lines, as many of one as of the other.
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512(tables, codes, &mut sums) },
                // SAFETY: as above, with AVX2.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2(tables, codes, &mut sums) },
                isa => plain(isa, tables, codes, &mut sums),
            }
            // Most blocks have none.
            if sums.iter().fold(0, |most, &s| s.max(most)) < least {
                continue;
            }
            for (r, &sum) in sums.iter().enumerate() {
                if sum >= least {
                    found(n * CODE_ROWS + r, sum);
                }
            }
        }
    }
}

kernel! {
    fn plain(tables: &[u8], codes: &[u8], sums: &mut [u16; CODE_ROWS]) {
        for (tables, codes) in tables.chunks_exact(16).zip(codes.chunks_exact(16)) {
            for r in 0..16 {
                sums[r] += u16::from(tables[usize::from(codes[r] & 15)]);
                sums[16 + r] += u16::from(tables[usize::from(codes[r] >> 4)]);
            }
        }
    }
}

/// SAFETY: the processor has AVX-512 BW; both slices are the same number of whole lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
unsafe fn avx512(tables: &[u8], codes: &[u8], sums: &mut [u16; CODE_ROWS]) {
    unsafe {
        let low = _mm512_set1_epi8(15);
        // Sums of pairs of bytes, whose upper ones spill over, and of the upper bytes alone, of rows 0..16 and 16..32.
        let mut both = [_mm512_setzero_si512(); 2];
        let mut upper = [_mm512_setzero_si512(); 2];
        for at in (0..tables.len()).step_by(LINE_BYTES) {
            let table = _mm512_loadu_si512(tables.as_ptr().add(at).cast());
            let code = _mm512_loadu_si512(codes.as_ptr().add(at).cast());
            let halves = [_mm512_and_si512(code, low), _mm512_and_si512(_mm512_srli_epi16::<4>(code), low)];
            for (i, half) in halves.into_iter().enumerate() {
                let entries = _mm512_shuffle_epi8(table, half);
                both[i] = _mm512_add_epi16(both[i], entries);
                upper[i] = _mm512_add_epi16(upper[i], _mm512_srli_epi16::<8>(entries));
            }
        }
        for i in 0..2 {
            let even = _mm512_sub_epi16(both[i], _mm512_slli_epi16::<8>(upper[i]));
            let lanes = |x: __m512i| {
                let x = _mm256_add_epi16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x));
                _mm_add_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x))
            };
            store(lanes(even), lanes(upper[i]), &mut sums[16 * i..16 * i + 16]);
        }
    }
}

/// SAFETY: the processor has AVX2; both slices are the same number of whole lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(tables: &[u8], codes: &[u8], sums: &mut [u16; CODE_ROWS]) {
    unsafe {
        let low = _mm256_set1_epi8(15);
        let mut both = [_mm256_setzero_si256(); 2];
        let mut upper = [_mm256_setzero_si256(); 2];
        for at in (0..tables.len()).step_by(32) {
            let table = _mm256_loadu_si256(tables.as_ptr().add(at).cast());
            let code = _mm256_loadu_si256(codes.as_ptr().add(at).cast());
            let halves = [_mm256_and_si256(code, low), _mm256_and_si256(_mm256_srli_epi16::<4>(code), low)];
            for (i, half) in halves.into_iter().enumerate() {
                let entries = _mm256_shuffle_epi8(table, half);
                both[i] = _mm256_add_epi16(both[i], entries);
                upper[i] = _mm256_add_epi16(upper[i], _mm256_srli_epi16::<8>(entries));
            }
        }
        for i in 0..2 {
            let even = _mm256_sub_epi16(both[i], _mm256_slli_epi16::<8>(upper[i]));
            let lanes =
                |x: __m256i| _mm_add_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            store(lanes(even), lanes(upper[i]), &mut sums[16 * i..16 * i + 16]);
        }
    }
}

/// Sums of the even and of the odd rows, beside each other again.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn store(even: __m128i, odd: __m128i, sums: &mut [u16]) {
    debug_assert_eq!(sums.len(), 16);
    unsafe {
        _mm_storeu_si128(sums.as_mut_ptr().cast(), _mm_unpacklo_epi16(even, odd));
        _mm_storeu_si128(sums.as_mut_ptr().add(8).cast(), _mm_unpackhi_epi16(even, odd));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{key, uniform};

    #[test]
    fn sums_are_those_of_a_plain_loop() {
        for tables_count in [4, 96, 256] {
            let draw = |seed: u64, i: u64, n: f64| (uniform(key(&[seed]), i) * n) as u8;
            let tables: Vec<u8> = (0..16 * tables_count as u64).map(|i| draw(1, i, 256.0)).collect();
            let rows = 3 * CODE_ROWS;
            let code = |row: usize, t: usize| draw(2, (row * tables_count + t) as u64, 16.0);
            let block = tables_count * 16;
            let mut codes = vec![0u8; 3 * block];
            for row in 0..rows {
                for t in 0..tables_count {
                    let (byte, shift) = code_place(row % CODE_ROWS, t);
                    codes[row / CODE_ROWS * block + byte] |= code(row, t) << shift;
                }
            }
            let sum = |row: usize| -> u16 {
                (0..tables_count).map(|t| u16::from(tables[t * 16 + usize::from(code(row, t))])).sum()
            };
            let mut all: Vec<u16> = (0..rows).map(sum).collect();
            all.sort_unstable();
            for least in [0, all[rows / 2], all[rows - 1], u16::MAX] {
                let want: Vec<(usize, u16)> =
                    (0..rows).map(|r| (r, sum(r))).filter(|(_, s)| *s >= least).collect();
                for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                    let mut found = Vec::new();
                    let cpu = Cpu::with_isa(1, isa).unwrap();
                    cpu.look_up(&tables, &codes, least, &mut |row, sum| found.push((row, sum)));
                    assert_eq!(found, want, "{tables_count} tables, {least}, {isa:?}");
                }
            }
        }
    }
}
