//! Products of a few rows with a large matrix, as in decoding: the matrix is read once from memory, straight through
//! registers, and never packed. Every element is the chain of multiply-adds of `product.rs`, so the bits are the same.

use std::arch::x86_64::*;

use rayon::prelude::*;

use super::lanes::{Isa, transpose16};
use super::packing::{Factors, pack};
use super::product::{Operand, SERIAL, Target, prefetch};

/// Rows up to which reading the matrix costs more than multiplying.
pub(super) const MOST_ROWS: usize = 8;
/// Columns of a vector.
const N: usize = 16;

/// Columns `[j0, j1)` of the result.
#[derive(Clone, Copy)]
struct Columns {
    j0: usize,
    j1: usize,
}

/// The left operand, element (i, k) at `k * rows + i`; and where the result goes.
#[derive(Clone, Copy)]
struct Few {
    left: Target,
    c: Target,
    stride: usize,
    fresh: bool,
    bf16: bool,
}

/// Whether [`run`] takes this product.
pub(super) fn takes(a: Operand, b: Operand) -> bool {
    (1..=MOST_ROWS).contains(&a.rows) && a.columns > 0 && (b.row == 1 || b.column == 1)
}

/// `c = a b` or `c += a b`.
///
/// # Safety
/// As `product_raw`; the processor has AVX-512, and [`takes`] is true.
pub(super) unsafe fn run(a: Operand, b: Operand, bf16: bool, c: Target, stride: usize, accumulate: bool) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    // Up to a vector is written behind the last element.
    let mut left = vec![0f32; m * k + N];
    let factors = if bf16 { Factors::Rounded } else { Factors::Plain };
    unsafe { pack(Isa::Avx512, factors, a.data, a.row, a.column, m, k, left.as_mut_ptr(), m) };
    let few = Few { left: Target(left.as_mut_ptr()), c, stride, fresh: !accumulate, bf16 };
    let groups = n.div_ceil(N);
    let parts = match rayon::current_num_threads() {
        threads if threads > 1 && m * n * k >= SERIAL => (4 * threads).min(groups),
        _ => 1,
    };
    let part = |t: usize| {
        let at = |t: usize| (groups * t / parts * N).min(n);
        // SAFETY: as promised to this function; parts are disjoint.
        unsafe { columns(few, m, k, b, Columns { j0: at(t), j1: at(t + 1) }) }
    };
    match parts {
        1 => part(0),
        _ => (0..parts).into_par_iter().with_max_len(1).for_each(part),
    }
}

unsafe fn columns(few: Few, m: usize, k: usize, b: Operand, range: Columns) {
    unsafe {
        match m {
            1 => rows::<1>(few, k, b, range),
            2 => rows::<2>(few, k, b, range),
            3 => rows::<3>(few, k, b, range),
            4 => rows::<4>(few, k, b, range),
            5 => rows::<5>(few, k, b, range),
            6 => rows::<6>(few, k, b, range),
            7 => rows::<7>(few, k, b, range),
            _ => rows::<MOST_ROWS>(few, k, b, range),
        }
    }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn rows<const M: usize>(few: Few, k: usize, b: Operand, range: Columns) {
    unsafe {
        if b.row == 1 {
            // The inner dimension is contiguous: a linear layer's weights, keys.
            for j in (range.j0..range.j1).step_by(N) {
                transposed::<M>(few, k, b, j, N.min(range.j1 - j));
            }
        } else {
            for j in (range.j0..range.j1).step_by(4 * N) {
                plain::<M>(few, k, b, j, (4 * N).min(range.j1 - j));
            }
        }
    }
}

/// Sixteen columns of the result: tiles of 16 x 16 are transposed on the way.
#[inline(always)]
unsafe fn transposed<const M: usize>(few: Few, k: usize, b: Operand, j: usize, width: usize) {
    let mask = (0xffff_u32 >> (N - width)) as u16;
    let mut tile = [0f32; N * N];
    unsafe {
        let mut sums = [_mm512_setzero_ps(); M];
        if !few.fresh {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_maskz_loadu_ps(mask, few.c.at(i * few.stride + j));
            }
        }
        let source = b.data.wrapping_add(j * b.column);
        for k0 in (0..k).step_by(N) {
            let depth = N.min(k - k0);
            // The columns after these, which no hardware expects: each row ends before its page does.
            for v in 0..N {
                prefetch(source.wrapping_add((N + v) * b.column + k0));
            }
            transpose16(source.add(k0), b.column, width, depth, tile.as_mut_ptr(), N);
            let left = few.left.at(k0 * M);
            for p in 0..depth {
                let mut y = _mm512_loadu_ps(tile.as_ptr().add(p * N));
                if few.bf16 {
                    y = rounded(y);
                }
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_fmadd_ps(_mm512_set1_ps(*left.add(p * M + i)), y, *sum);
                }
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            _mm512_mask_storeu_ps(few.c.at(i * few.stride + j), mask, *sum);
        }
    }
}

/// Up to four vectors of columns, whose rows are read as they lie: values of an attention.
#[inline(always)]
unsafe fn plain<const M: usize>(few: Few, k: usize, b: Operand, j: usize, width: usize) {
    let masks: [u16; 4] = std::array::from_fn(|v| match width.saturating_sub(v * N).min(N) {
        0 => 0,
        n => (0xffff_u32 >> (N - n)) as u16,
    });
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 4]; M];
        if !few.fresh {
            for (i, row) in sums.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = _mm512_maskz_loadu_ps(masks[v], few.c.at(i * few.stride + j + v * N));
                }
            }
        }
        for p in 0..k {
            let source = b.data.wrapping_add(p * b.row + j);
            let left = few.left.at(p * M);
            for (v, &mask) in masks.iter().enumerate() {
                let mut y = _mm512_maskz_loadu_ps(mask, source.wrapping_add(v * N));
                if few.bf16 {
                    y = rounded(y);
                }
                for (i, row) in sums.iter_mut().enumerate() {
                    row[v] = _mm512_fmadd_ps(_mm512_set1_ps(*left.add(i)), y, row[v]);
                }
            }
        }
        for (i, row) in sums.iter().enumerate() {
            for (v, sum) in row.iter().enumerate() {
                _mm512_mask_storeu_ps(few.c.at(i * few.stride + j + v * N), masks[v], *sum);
            }
        }
    }
}

/// Rounded to the nearest bf16 as `packing.rs` does.
#[inline(always)]
unsafe fn rounded(x: __m512) -> __m512 {
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let chosen = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), quiet);
        _mm512_castsi512_ps(_mm512_and_si512(chosen, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
    }
}
