//! Panels of an operand as the multiply-add kernels of `product.rs` read them: the vectors of a panel side by side.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::lanes::{Isa, Lanes, kernel};
use super::product::{KC, Operand};

/// What becomes of a factor in its panel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Factors {
    /// f32 as it is.
    Plain,
    /// Rounded to bf16, as f32.
    Rounded,
    /// Rounded to bf16, two steps of the inner dimension in a word: half the panel is used.
    Pairs,
}

/// Vectors of the widest panel of pairs.
#[cfg(target_arch = "x86_64")]
const WIDEST: usize = 32;

/// Packs columns `[j, j + nr)` of `b`, all depth blocks, into their places in the whole packed operand of `np` panels.
pub(super) unsafe fn pack_panel_of(
    isa: Isa,
    b: Operand,
    factors: Factors,
    j: usize,
    nr: usize,
    d: *mut f32,
    np: usize,
) {
    let width = nr.min(b.columns - j);
    for p in (0..b.rows).step_by(KC) {
        let depth = KC.min(b.rows - p);
        unsafe {
            let source = b.data.add(p * b.row + j * b.column);
            let target = d.add(p * np * nr + j * depth);
            pack(isa, factors, source, b.column, b.row, width, depth, target, nr);
        }
    }
}

/// Rows of a known width, so that a copy is a few moves and not a call.
unsafe fn copy_rows<const W: usize>(s: *const f32, along: usize, depth: usize, d: *mut f32) {
    for k in 0..depth {
        unsafe { *(d.add(k * W) as *mut [f32; W]) = *(s.add(k * along) as *const [f32; W]) };
    }
}

/// The bits of the nearest bf16, ties to even, in the upper half of the word; what is not a number stays none.
#[inline(always)]
fn nearest_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    (if x.is_nan() { bits | 0x0040_0000 } else { near }) & 0xffff_0000
}

kernel! {
    /// Rounds to the nearest bf16.
    fn round_to_bf16(x: &mut [f32]) {
        for x in x {
            *x = f32::from_bits(nearest_bf16(*x));
        }
    }
}

/// Packs a panel as [`pack_plain`] does, with factors as they are wanted.
pub(super) unsafe fn pack(
    isa: Isa,
    factors: Factors,
    s: *const f32,
    vector: usize,
    along: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
    width: usize,
) {
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if factors == Factors::Pairs {
            return pack_pairs(isa, s, vector, along, vectors, depth, d, width);
        }
        pack_plain(isa, s, vector, along, vectors, depth, d, width);
        if factors == Factors::Rounded {
            round_to_bf16(isa, std::slice::from_raw_parts_mut(d, depth * width));
        }
    }
}

/// The mask of the first `n` elements of a vector.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn some(n: usize) -> u16 {
    if n < 16 { (1 << n) - 1 } else { u16::MAX }
}

/// Thirty-two elements rounded: neighbours share a word, the first in its lower half. The instruction takes numbers below
/// the normal ones for zero, as the multiply-add of pairs does.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
pub(super) fn round_two(first: __m512, second: __m512) -> __m512i {
    // SAFETY: both are 512 bits.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) }
}

/// Two lines rounded: elements of one column share a word, the first line's in its lower half.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
pub(super) fn zip_two(first: __m512, second: __m512) -> __m512i {
    let zip = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18,
        2, 17, 1, 16, 0,
    );
    _mm512_permutexvar_epi16(zip, round_two(first, second))
}

/// As [`pack_plain`], every two steps of the depth in one word.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_pairs(
    isa: Isa,
    s: *const f32,
    vector: usize,
    along: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
    width: usize,
) {
    debug_assert!(vectors <= WIDEST);
    // SAFETY: masked loads and stores stay within the caller's rows and panel.
    unsafe {
        if vector == 1 {
            for p in 0..depth.div_ceil(2) {
                let (line, last) = (s.add(2 * p * along), 2 * p + 1 == depth);
                for i in (0..width).step_by(16) {
                    let mask = some(vectors.saturating_sub(i));
                    let first = _mm512_maskz_loadu_ps(mask, line.wrapping_add(i));
                    let second =
                        _mm512_maskz_loadu_ps(if last { 0 } else { mask }, line.wrapping_add(along + i));
                    let words = zip_two(first, second);
                    _mm512_mask_storeu_epi32(d.add(p * width + i).cast(), some(width - i), words);
                }
            }
            return;
        }
        debug_assert_eq!(along, 1);
        // Rows become words first, so that half as much is transposed.
        let mut rows = [const { MaybeUninit::<f32>::uninit() }; WIDEST * KC / 2];
        let rows = rows.as_mut_ptr() as *mut f32;
        for start in (0..depth).step_by(KC) {
            let depth = KC.min(depth - start);
            let words = depth.div_ceil(2);
            for i in 0..vectors {
                let row = s.add(i * vector + start);
                for p in (0..words).step_by(16) {
                    let left = depth - 2 * p;
                    let first = _mm512_maskz_loadu_ps(some(left), row.add(2 * p));
                    let rest = some(left.saturating_sub(16));
                    let second = _mm512_maskz_loadu_ps(rest, row.wrapping_add(2 * p + 16));
                    let target = rows.add(i * words + p);
                    _mm512_mask_storeu_epi32(target.cast(), some(words - p), round_two(first, second));
                }
            }
            pack_plain(isa, rows, words, 1, vectors, words, d.add(start / 2 * width), width);
        }
    }
}

/// `d[k * width + i] = s[i * vector + k * along]` for `vectors` vectors; the rest of `width` is zero.
unsafe fn pack_plain(
    isa: Isa,
    s: *const f32,
    vector: usize,
    along: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
    width: usize,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn transpose512(s: *const f32, t: usize, v: usize, k: usize, d: *mut f32, w: usize) {
        unsafe { <__m512 as Lanes>::transpose(s, t, v, k, d, w) }
    }
    unsafe {
        if vectors < width {
            for k in 0..depth {
                std::slice::from_raw_parts_mut(d.add(k * width + vectors), width - vectors).fill(0.0);
            }
        }
        if vector == 1 {
            return match (vectors == width, width) {
                (true, 32) => copy_rows::<32>(s, along, depth, d),
                (true, 16) => copy_rows::<16>(s, along, depth, d),
                (true, 14) => copy_rows::<14>(s, along, depth, d),
                (true, 8) => copy_rows::<8>(s, along, depth, d),
                (true, 6) => copy_rows::<6>(s, along, depth, d),
                (true, 4) => copy_rows::<4>(s, along, depth, d),
                _ => {
                    for k in 0..depth {
                        std::ptr::copy_nonoverlapping(s.add(k * along), d.add(k * width), vectors);
                    }
                }
            };
        }
        debug_assert_eq!(along, 1);
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => transpose512(s, vector, vectors, depth, d, width),
            _ => <[f32; 4] as Lanes>::transpose(s, vector, vectors, depth, d, width),
        }
    }
}
