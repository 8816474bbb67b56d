//! Products of a few rows with a large matrix, as in decoding: the matrix is read once from memory, straight through
//! registers, and never packed. Every element is the chain of multiply-adds of `product.rs`, so the bits are the same.

use std::arch::x86_64::*;

use rayon::prelude::*;

use super::lanes::{Isa, Lanes, Pairs, transpose16};
use super::packing::{Factors, pack, round_two, some, zip_two};
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

/// The left operand, element (i, k) at `k * rows + i`, or a word of two steps of k; and where the result goes.
#[derive(Clone, Copy)]
struct Few {
    left: Target,
    c: Target,
    stride: usize,
    fresh: bool,
}

/// Whether [`run`] takes this product.
pub(super) fn takes(a: Operand, b: Operand) -> bool {
    (1..=MOST_ROWS).contains(&a.rows) && a.columns > 0 && (b.row == 1 || b.column == 1)
}

/// `c = a b` or `c += a b`.
///
/// # Safety
/// As `product_raw`; the processor has AVX-512, with its products of pairs where `factors` says so, and [`takes`] is true.
pub(super) unsafe fn run(
    a: Operand,
    b: Operand,
    factors: Factors,
    c: Target,
    stride: usize,
    accumulate: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    // Up to a vector is written behind the last element.
    let mut left = vec![0f32; m * k + N];
    unsafe { pack(Isa::Avx512, factors, a.data, a.row, a.column, m, k, left.as_mut_ptr(), m) };
    let few = Few { left: Target(left.as_mut_ptr()), c, stride, fresh: !accumulate };
    let groups = n.div_ceil(N);
    let parts = match rayon::current_num_threads() {
        threads if threads > 1 && m * n * k >= SERIAL => (4 * threads).min(groups),
        _ => 1,
    };
    let part = |t: usize| {
        let at = |t: usize| (groups * t / parts * N).min(n);
        // SAFETY: as promised to this function; parts are disjoint.
        unsafe { columns(few, factors, m, k, b, Columns { j0: at(t), j1: at(t + 1) }) }
    };
    match parts {
        1 => part(0),
        _ => (0..parts).into_par_iter().with_max_len(1).for_each(part),
    }
}

unsafe fn columns(few: Few, factors: Factors, m: usize, k: usize, b: Operand, range: Columns) {
    unsafe {
        match m {
            1 => of_rows::<1>(few, factors, k, b, range),
            2 => of_rows::<2>(few, factors, k, b, range),
            3 => of_rows::<3>(few, factors, k, b, range),
            4 => of_rows::<4>(few, factors, k, b, range),
            5 => of_rows::<5>(few, factors, k, b, range),
            6 => of_rows::<6>(few, factors, k, b, range),
            7 => of_rows::<7>(few, factors, k, b, range),
            _ => of_rows::<MOST_ROWS>(few, factors, k, b, range),
        }
    }
}

unsafe fn of_rows<const M: usize>(few: Few, factors: Factors, k: usize, b: Operand, range: Columns) {
    unsafe {
        match factors {
            Factors::Plain => rows::<M, Plain>(few, k, b, range),
            Factors::Rounded => rows::<M, Rounded>(few, k, b, range),
            Factors::Pairs => rows_of_pairs::<M>(few, k, b, range),
        }
    }
}

/// Words of sixteen columns, a line for each step.
type Tile = [f32; N * N];

/// How factors are taken from the matrix and multiplied.
trait Factor {
    /// Steps of the inner dimension in a word.
    const STEPS: usize;
    /// Sixteen words of each of `width` rows that lie `row` apart, transposed; `steps` elements of a row are valid.
    unsafe fn tile(s: *const f32, row: usize, width: usize, steps: usize, tile: &mut Tile);
    /// Words of a line, and of the line after it where a word holds both (zeros without `second`).
    unsafe fn across(s: *const f32, next: usize, second: bool, mask: u16) -> __m512;
    /// `sum + left * right`
    unsafe fn add(sum: __m512, left: *const f32, right: __m512) -> __m512;
}

struct Plain;
impl Factor for Plain {
    const STEPS: usize = 1;
    #[inline(always)]
    unsafe fn tile(s: *const f32, row: usize, width: usize, steps: usize, tile: &mut Tile) {
        unsafe { transpose16(s, row, width, steps, tile.as_mut_ptr(), N) }
    }
    #[inline(always)]
    unsafe fn across(s: *const f32, _: usize, _: bool, mask: u16) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(mask, s) }
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, left: *const f32, right: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(_mm512_set1_ps(*left), right, sum) }
    }
}

struct Rounded;
impl Factor for Rounded {
    const STEPS: usize = 1;
    #[inline(always)]
    unsafe fn tile(s: *const f32, row: usize, width: usize, steps: usize, tile: &mut Tile) {
        unsafe {
            Plain::tile(s, row, width, steps, tile);
            for line in tile.chunks_exact_mut(N).take(steps) {
                _mm512_storeu_ps(line.as_mut_ptr(), rounded(_mm512_loadu_ps(line.as_ptr())));
            }
        }
    }
    #[inline(always)]
    unsafe fn across(s: *const f32, next: usize, second: bool, mask: u16) -> __m512 {
        unsafe { rounded(Plain::across(s, next, second, mask)) }
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, left: *const f32, right: __m512) -> __m512 {
        unsafe { Plain::add(sum, left, right) }
    }
}

/// As `lanes::Pairs`.
struct PairsOfBf16;
impl Factor for PairsOfBf16 {
    const STEPS: usize = 2;
    #[inline(always)]
    unsafe fn tile(s: *const f32, row: usize, width: usize, steps: usize, tile: &mut Tile) {
        let mut words = [0f32; N * N];
        unsafe {
            for (v, words) in words.chunks_exact_mut(N).take(width).enumerate() {
                let source = s.add(v * row);
                let first = _mm512_maskz_loadu_ps(some(steps), source);
                let second = _mm512_maskz_loadu_ps(some(steps.saturating_sub(N)), source.wrapping_add(N));
                _mm512_storeu_ps(words.as_mut_ptr(), _mm512_castsi512_ps(round_two(first, second)));
            }
            Plain::tile(words.as_ptr(), N, width, steps.div_ceil(2), tile);
        }
    }
    #[inline(always)]
    unsafe fn across(s: *const f32, next: usize, second: bool, mask: u16) -> __m512 {
        unsafe {
            let first = _mm512_maskz_loadu_ps(mask, s);
            let after = _mm512_maskz_loadu_ps(if second { mask } else { 0 }, s.wrapping_add(next));
            _mm512_castsi512_ps(zip_two(first, after))
        }
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, left: *const f32, right: __m512) -> __m512 {
        unsafe { Pairs(sum).fma(Pairs::splat(left), Pairs(right)).0 }
    }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn rows<const M: usize, F: Factor>(few: Few, k: usize, b: Operand, range: Columns) {
    unsafe { rows_body::<M, F>(few, k, b, range) }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
unsafe fn rows_of_pairs<const M: usize>(few: Few, k: usize, b: Operand, range: Columns) {
    unsafe { rows_body::<M, PairsOfBf16>(few, k, b, range) }
}

#[inline(always)]
unsafe fn rows_body<const M: usize, F: Factor>(few: Few, k: usize, b: Operand, range: Columns) {
    unsafe {
        if b.row == 1 {
            // The inner dimension is contiguous: a linear layer's weights, keys.
            for j in (range.j0..range.j1).step_by(N) {
                transposed::<M, F>(few, k, b, j, N.min(range.j1 - j));
            }
        } else {
            for j in (range.j0..range.j1).step_by(4 * N) {
                plain::<M, F>(few, k, b, j, (4 * N).min(range.j1 - j));
            }
        }
    }
}

/// Sixteen columns of the result: tiles of 16 x 16 words are transposed on the way.
#[inline(always)]
unsafe fn transposed<const M: usize, F: Factor>(few: Few, k: usize, b: Operand, j: usize, width: usize) {
    let mask = some(width);
    let mut tile = [0f32; N * N];
    unsafe {
        let mut sums = [_mm512_setzero_ps(); M];
        if !few.fresh {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_maskz_loadu_ps(mask, few.c.at(i * few.stride + j));
            }
        }
        let source = b.data.wrapping_add(j * b.column);
        for k0 in (0..k).step_by(N * F::STEPS) {
            let steps = (N * F::STEPS).min(k - k0);
            // The columns after these, which no hardware expects: each row ends before its page does.
            for v in 0..N {
                let after = source.wrapping_add((N + v) * b.column + k0);
                prefetch(after);
                if F::STEPS == 2 {
                    prefetch(after.wrapping_add(N));
                }
            }
            F::tile(source.add(k0), b.column, width, steps, &mut tile);
            let left = few.left.at(k0 / F::STEPS * M);
            for p in 0..steps.div_ceil(F::STEPS) {
                let y = _mm512_loadu_ps(tile.as_ptr().add(p * N));
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = F::add(*sum, left.add(p * M + i), y);
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
unsafe fn plain<const M: usize, F: Factor>(few: Few, k: usize, b: Operand, j: usize, width: usize) {
    let masks: [u16; 4] = std::array::from_fn(|v| some(width.saturating_sub(v * N)));
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 4]; M];
        if !few.fresh {
            for (i, row) in sums.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = _mm512_maskz_loadu_ps(masks[v], few.c.at(i * few.stride + j + v * N));
                }
            }
        }
        for p in (0..k).step_by(F::STEPS) {
            let source = b.data.wrapping_add(p * b.row + j);
            let left = few.left.at(p / F::STEPS * M);
            for (v, &mask) in masks.iter().enumerate() {
                let y = F::across(source.wrapping_add(v * N), b.row, p + 1 < k, mask);
                for (i, row) in sums.iter_mut().enumerate() {
                    row[v] = F::add(row[v], left.add(i), y);
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
