//! The matrix product on AMX tiles. In bf16, factors are rounded to one part. In f32, every factor is cut into three bf16
//! parts, and six of the nine partial products are added in f32 (the technique of Henry, Tang and Heinecke, 2019; the
//! three left out lie below f32's own rounding).
//!
//! A part's bits are exact: `x = high + middle + low` holds for every normal x. Every element of the result is one
//! chain of tile steps over blocks of 32 of the inner dimension, in order, so its bits depend neither on threads nor on
//! blocking. They are not the bits of the multiply-add chain of `product.rs`; the error is of the same size. Values below
//! 1.2e-38 count as zero, values from 3.39e38 on as not finite.

use std::arch::asm;
use std::arch::x86_64::*;

use rayon::prelude::*;

use super::lanes::transpose16;
use super::product::{LEFT, Operand, RIGHT, SERIAL, Target, prefetch, roomy};

/// Inner dimension of a tile step.
const STEP: usize = 32;
/// Rows or columns of a tile.
const TILE: usize = 16;
/// f32-sized words of one part of a packed tile step: 16 x 16 pairs of bf16.
const PART: usize = TILE * TILE;
/// Tile steps of a depth block of three parts: two strips of the right operand stay near.
const STEPS: usize = 8;
/// Rows of a packed block of the left operand at most: it stays in the second-level cache.
const ROWS: usize = 512;
/// Columns of the right operand that are packed at a time at most.
const COLUMNS: usize = 4096;

/// Whether a product of this shape gains by tiles: packing costs as much as about twenty rows of the FMA kernel.
pub(super) fn gains(m: usize, n: usize, k: usize) -> bool {
    k >= STEP && m * n >= 20 * (m + n)
}

/// Shapes of the eight tile registers: all 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}
static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Whether processor and operating system let this process use bf16 tiles; asks the system for them.
pub(super) fn available() -> bool {
    use std::sync::OnceLock;
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let leaf = __cpuid_count(7, 0);
        let (bf16, tile) = (leaf.edx >> 22 & 1, leaf.edx >> 24 & 1);
        bf16 == 1 && tile == 1 && is_x86_feature_detected!("xsave") && permitted()
    })
}

/// Linux gives the tile registers' large state to processes that ask for it.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let mut answer = ARCH_PRCTL;
    // SAFETY: the call touches no memory of the process.
    unsafe {
        asm!("syscall", inout("rax") answer, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _, out("r11") _, options(nostack));
    }
    answer == 0
}
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// f32-sized words of a packed tile step.
const fn words(parts: usize) -> usize {
    parts * PART
}

/// Inner dimension of a depth block: as many bytes for any number of parts.
const fn depth_block(parts: usize) -> usize {
    STEPS * 3 / parts * STEP
}

/// Which operand a strip belongs to: its tiles hold rows of pairs, or pairs of rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

/// `c = a b` or `c += a b`; operands and result as in [`super::product::product_raw`].
///
/// # Safety
/// As there; the processor has AMX and AVX-512.
pub(super) unsafe fn run<const PARTS: usize>(
    a: Operand,
    b: Operand,
    c: Target,
    stride: usize,
    accumulate: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let threads = if m * n * k < SERIAL { 1 } else { rayon::current_num_threads() };
    let blocks = m.div_ceil(ROWS).next_multiple_of(if m >= threads * 4 * TILE { threads } else { 1 });
    let rows = m.div_ceil(blocks).next_multiple_of(2 * TILE);
    let blocks = m.div_ceil(rows);
    let mut storage = RIGHT.take();
    for j in (0..n).step_by(COLUMNS) {
        let columns = COLUMNS.min(n - j);
        let strips = columns.div_ceil(2 * TILE) * 2;
        let packed = roomy(&mut storage, strips * k.div_ceil(STEP) * words(PARTS));
        let b = Operand { data: b.data.wrapping_add(j * b.column), columns, ..b };
        // Few rows are cut by columns too.
        let pairs = strips / 2;
        let cuts = if blocks >= threads { 1 } else { (4 * threads).div_ceil(blocks).min(pairs) };
        let part = move |t: usize| unsafe {
            let (i, cut) = (t / cuts, t % cuts);
            let rows = (i * rows, m.min((i + 1) * rows));
            let pairs = (pairs * cut / cuts, pairs * (cut + 1) / cuts);
            compute::<PARTS>(a, columns, packed, strips, Target(c.at(j)), stride, accumulate, rows, pairs);
        };
        if threads == 1 {
            unsafe { pack_right::<PARTS>(b, packed, strips, 0, strips) };
            (0..blocks * cuts).for_each(part);
            continue;
        }
        let chunks = (2 * threads).min(strips);
        (0..chunks).into_par_iter().with_max_len(1).for_each(|t| unsafe {
            pack_right::<PARTS>(b, packed, strips, strips * t / chunks, strips * (t + 1) / chunks)
        });
        (0..blocks * cuts).into_par_iter().with_max_len(1).for_each(part);
    }
    RIGHT.set(storage);
}

/// Packs strips `[s0, s1)` of the right operand: depth blocks one after the other, in each all strips.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn pack_right<const PARTS: usize>(b: Operand, d: Target, strips: usize, s0: usize, s1: usize) {
    for k in (0..b.rows).step_by(depth_block(PARTS)) {
        let depth = depth_block(PARTS).min(b.rows - k);
        let steps = depth.div_ceil(STEP);
        for s in s0..s1 {
            let width = b.columns.saturating_sub(s * TILE).min(TILE);
            let source = b.data.wrapping_add(k * b.row + s * TILE * b.column);
            let target = d.at((k / STEP * strips + s * steps) * words(PARTS));
            unsafe { pack_strip::<PARTS>(Side::Right, source, b.column, b.row, width, depth, target) };
        }
    }
}

/// Rows `[rows.0, rows.1)` by the pairs of strips `[pairs.0, pairs.1)` of the result.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn compute<const PARTS: usize>(
    a: Operand,
    columns: usize,
    packed: Target,
    strips: usize,
    c: Target,
    stride: usize,
    accumulate: bool,
    rows: (usize, usize),
    pairs: (usize, usize),
) {
    let height = rows.1 - rows.0;
    let mut storage = LEFT.take();
    let left = roomy(
        &mut storage,
        height.next_multiple_of(2 * TILE) / TILE * depth_block(PARTS) / STEP * words(PARTS),
    );
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly)) };
    let mut edge = [0f32; 4 * TILE * TILE];
    for k in (0..a.columns).step_by(depth_block(PARTS)) {
        let depth = depth_block(PARTS).min(a.columns - k);
        let steps = depth.div_ceil(STEP);
        for s in 0..height.div_ceil(2 * TILE) * 2 {
            let i = rows.0 + s * TILE;
            let width = rows.1.saturating_sub(i).min(TILE);
            let source = a.data.wrapping_add(i * a.row + k * a.column);
            let target = left.at(s * steps * words(PARTS));
            unsafe { pack_strip::<PARTS>(Side::Left, source, a.row, a.column, width, depth, target) };
        }
        let fresh = k == 0 && !accumulate;
        for j in pairs.0..pairs.1 {
            let right = packed.at((k / STEP * strips + 2 * j * steps) * words(PARTS));
            let width = (columns - j * 2 * TILE).min(2 * TILE);
            for i in (0..height).step_by(2 * TILE) {
                let lines = (height - i).min(2 * TILE);
                let block = left.at(i / TILE * steps * words(PARTS));
                let target = c.at((rows.0 + i) * stride + j * 2 * TILE);
                // The next tiles' part of the result comes from far away; it is asked for while these compute.
                for x in 2 * TILE..(4 * TILE).min(height - i) {
                    prefetch(target.wrapping_add(x * stride));
                    prefetch(target.wrapping_add(x * stride + TILE));
                }
                unsafe {
                    if (lines, width) == (2 * TILE, 2 * TILE) {
                        tiles::<PARTS>(steps, block, right, target, stride, fresh);
                        continue;
                    }
                    // Over the border: computed whole beside, its valid part copied.
                    let beside = edge.as_mut_ptr();
                    if !fresh {
                        for x in 0..lines {
                            let from = target.add(x * stride);
                            std::ptr::copy_nonoverlapping(from, beside.add(x * 2 * TILE), width);
                        }
                    }
                    tiles::<PARTS>(steps, block, right, beside, 2 * TILE, fresh);
                    for x in 0..lines {
                        let to = target.add(x * stride);
                        std::ptr::copy_nonoverlapping(beside.add(x * 2 * TILE), to, width);
                    }
                }
            }
        }
    }
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
    LEFT.set(storage);
}

/// Packs one strip of up to 16 vectors: vector i, inner index k at `s + i * vector + k * along`. A tile step holds the parts low,
/// middle, high; its pairs are inner indices 16 apart, so that packing needs no shuffle. What is over is zero.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn pack_strip<const PARTS: usize>(
    side: Side,
    s: *const f32,
    vector: usize,
    along: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
) {
    let natural = if side == Side::Left { along == 1 } else { vector == 1 };
    debug_assert!(natural || along == 1 || vector == 1);
    let mut turned = [[0f32; TILE * TILE]; 2];
    for k in (0..depth).step_by(STEP) {
        // 16 lines of 16 elements of each half: (first line, distance of lines, number of lines, valid elements).
        let halves: [(*const f32, usize, usize, usize); 2] = std::array::from_fn(|half| {
            let inner = depth.saturating_sub(k + half * TILE).min(TILE);
            let source = s.wrapping_add((k + half * TILE) * along);
            let flat = turned[half].as_mut_ptr();
            match (side, natural) {
                (Side::Left, true) => (source, vector, vectors, inner),
                (Side::Right, true) => (source, along, inner, vectors),
                (Side::Left, false) => {
                    unsafe { transpose16(source, along, inner, vectors, flat, TILE) };
                    (flat as *const f32, TILE, vectors, TILE)
                }
                (Side::Right, false) => {
                    unsafe { transpose16(source, vector, vectors, inner, flat, TILE) };
                    (flat as *const f32, TILE, inner, TILE)
                }
            }
        });
        let tile = d.wrapping_add(k / STEP * words(PARTS)) as *mut __m512i;
        let put = |line: usize, x: [__m512; 2]| unsafe {
            if PARTS == 1 {
                return _mm512_store_si512(tile.add(line), rounded(x));
            }
            let [high, middle, low] = cut(x);
            _mm512_store_si512(tile.add(line), low);
            _mm512_store_si512(tile.add(TILE + line), middle);
            _mm512_store_si512(tile.add(2 * TILE + line), high);
        };
        if halves.iter().all(|&(_, _, lines, valid)| (lines, valid) == (TILE, TILE)) {
            for line in 0..TILE {
                put(
                    line,
                    halves
                        .map(|(first, distance, ..)| unsafe { _mm512_loadu_ps(first.add(line * distance)) }),
                );
            }
            continue;
        }
        for line in 0..TILE {
            put(
                line,
                halves.map(|(first, distance, lines, valid)| {
                    let mask = if line < lines { (0xffff_u32 >> (TILE - valid)) as u16 } else { 0 };
                    unsafe { _mm512_maskz_loadu_ps(mask, first.wrapping_add(line * distance)) }
                }),
            );
        }
    }
}

/// The three bf16 parts of two vectors, as pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
fn cut(x: [__m512; 2]) -> [__m512i; 3] {
    let half = _mm512_set1_epi32(0x8000);
    let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let round = |x: __m512| _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), mask);
    let minus = |x: __m512, part: __m512i| _mm512_sub_ps(x, _mm512_castsi512_ps(part));
    let pair = |first: __m512i, second: __m512i| {
        _mm512_or_si512(_mm512_srli_epi32::<16>(first), _mm512_and_si512(second, mask))
    };
    let high = x.map(round);
    let rest: [__m512; 2] = std::array::from_fn(|i| minus(x[i], high[i]));
    let middle = rest.map(round);
    let low: [__m512i; 2] = std::array::from_fn(|i| _mm512_castps_si512(minus(rest[i], middle[i])));
    [pair(high[0], high[1]), pair(middle[0], middle[1]), pair(low[0], low[1])]
}

/// Two vectors rounded to the nearest bf16, ties to even, as pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
fn rounded(x: [__m512; 2]) -> __m512i {
    let [first, second] = x.map(|x| {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_mask_or_epi32(near, nan, bits, _mm512_set1_epi32(0x0040_0000))
    });
    let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    _mm512_or_si512(_mm512_srli_epi32::<16>(first), _mm512_and_si512(second, mask))
}

/// 32 x 32 elements of the result over `steps` tile steps; the small partial products of a step come first.
///
/// # Safety
/// Two packed strips each in `a` and `b`; 32 rows of 32 elements, `stride` apart, in `c`; the tiles are configured.
#[inline]
unsafe fn tiles<const PARTS: usize>(
    steps: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    fresh: bool,
) {
    let strip = steps * words(PARTS);
    if PARTS == 1 {
        return unsafe { tiles_of_one_part(steps, a, b, c, stride, fresh) };
    }
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jnz 2f",
            "tileloadd tmm0, [{c} + {cs}*1]",
            "tileloadd tmm1, [{c} + {cs}*1 + 64]",
            "tileloadd tmm2, [{c2} + {cs}*1]",
            "tileloadd tmm3, [{c2} + {cs}*1 + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            // low x high
            "tileloadd tmm4, [{a} + {line}*1]",
            "tileloadd tmm6, [{b} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b2} + {line}*1 + 2048]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a2} + {line}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // middle x high
            "tileloadd tmm4, [{a} + {line}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a2} + {line}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // middle x middle
            "tileloadd tmm6, [{b} + {line}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b2} + {line}*1 + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high x middle
            "tileloadd tmm4, [{a} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a2} + {line}*1 + 2048]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high x low
            "tileloadd tmm6, [{b} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b2} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high x high
            "tileloadd tmm6, [{b} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b2} + {line}*1 + 2048]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 3072",
            "add {a2}, 3072",
            "add {b}, 3072",
            "add {b2}, 3072",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{c} + {cs}*1], tmm0",
            "tilestored [{c} + {cs}*1 + 64], tmm1",
            "tilestored [{c2} + {cs}*1], tmm2",
            "tilestored [{c2} + {cs}*1 + 64], tmm3",
            fresh = in(reg) fresh as u32,
            c = in(reg) c,
            c2 = in(reg) c.add(TILE * stride),
            cs = in(reg) stride * 4,
            a = inout(reg) a => _,
            a2 = inout(reg) a.add(strip) => _,
            b = inout(reg) b => _,
            b2 = inout(reg) b.add(strip) => _,
            line = in(reg) 64usize,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}

/// As [`tiles`], for factors of one part.
#[inline]
unsafe fn tiles_of_one_part(
    steps: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    fresh: bool,
) {
    let strip = steps * words(1);
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jnz 2f",
            "tileloadd tmm0, [{c} + {cs}*1]",
            "tileloadd tmm1, [{c} + {cs}*1 + 64]",
            "tileloadd tmm2, [{c2} + {cs}*1]",
            "tileloadd tmm3, [{c2} + {cs}*1 + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "tileloadd tmm4, [{a} + {line}*1]",
            "tileloadd tmm6, [{b} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b2} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a2} + {line}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 1024",
            "add {a2}, 1024",
            "add {b}, 1024",
            "add {b2}, 1024",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{c} + {cs}*1], tmm0",
            "tilestored [{c} + {cs}*1 + 64], tmm1",
            "tilestored [{c2} + {cs}*1], tmm2",
            "tilestored [{c2} + {cs}*1 + 64], tmm3",
            fresh = in(reg) fresh as u32,
            c = in(reg) c,
            c2 = in(reg) c.add(TILE * stride),
            cs = in(reg) stride * 4,
            a = inout(reg) a => _,
            a2 = inout(reg) a.add(strip) => _,
            b = inout(reg) b => _,
            b2 = inout(reg) b.add(strip) => _,
            line = in(reg) 64usize,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}
