//! The f32 matrix product.
//!
//! Every element of the result is one chain of multiply-adds over the inner dimension in order, starting from zero (or
//! from what stands there, when accumulating). Tiles, blocks and threads only decide who computes it when: the bits
//! depend on neither, nor on the vector width. Layout after Goto and van de Geijn (2008): the right operand is packed
//! in panels of `NR` columns, the left in panels of `MR` rows, blocks of `KC` stay in the caches.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::cell::RefCell;

use rayon::prelude::*;

use super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::lanes::Pairs;
use super::lanes::{Arithmetic, Isa, Lanes, Precision};
use super::packing::{Factors, pack, pack_panel_of};
use super::pool::ask_for_huge_pages;
use crate::device::Matrix;
use crate::memory::{self, OutOfMemory};

/// Depth of a packed block.
pub(super) const KC: usize = 768;
/// Rows of a packed block of the left operand, about.
const MC: usize = 112;
/// Panels of the right operand whose part of the result is finished before the next are begun.
const JB: usize = 6;
/// Below this many multiply-adds a product runs on the calling thread.
pub(super) const SERIAL: usize = 1 << 17;

/// An operand: element (i, j) at `data + i * row + j * column`.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub data: *const f32,
    pub rows: usize,
    pub columns: usize,
    pub row: usize,
    pub column: usize,
}
// SAFETY: read-only during a product.
unsafe impl Send for Operand {}
unsafe impl Sync for Operand {}

impl Operand {
    pub(super) fn of(m: &Matrix<'_, Cpu>) -> Operand {
        let data = m.view.slice();
        let (stored_rows, stored_columns) =
            if m.transposed { (m.columns, m.rows) } else { (m.rows, m.columns) };
        assert!(stored_rows == 0 || data.len() >= (stored_rows - 1) * m.stride + stored_columns);
        let (row, column) = if m.transposed { (1, m.stride) } else { (m.stride, 1) };
        Operand { data: data.as_ptr(), rows: m.rows, columns: m.columns, row, column }
    }
    /// The transposed operand.
    pub(super) fn t(self) -> Operand {
        Operand { rows: self.columns, columns: self.rows, row: self.column, column: self.row, ..self }
    }
}

/// A place that several tasks write to.
#[derive(Clone, Copy)]
pub(super) struct Target(pub *mut f32);
// SAFETY: tasks write disjoint parts.
unsafe impl Send for Target {}
unsafe impl Sync for Target {}
impl Target {
    pub(super) fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// Steps of the inner dimension for each line that a tile asks for ahead: eight tiles ask for the whole of a panel of 32 columns.
const STEPS: usize = 4;
/// Elements of a cache line; packed panels begin at one, so that no load crosses a border.
const LINE: usize = 16;

fn aligned(p: *mut f32) -> *mut f32 {
    p.wrapping_add((p as usize).wrapping_neg() % (4 * LINE) / 4)
}

/// Room for `len` elements from the beginning of a cache line on, in huge pages where there are any.
pub(super) fn roomy(storage: &mut Vec<f32>, len: usize) -> Target {
    let needed = len + LINE;
    if storage.capacity() < needed {
        *storage = Vec::new();
        let asked = (needed * size_of::<f32>()) as u64;
        let room = memory::room_beside(0);
        if room.is_some_and(|room| room < asked) || storage.try_reserve_exact(needed).is_err() {
            OutOfMemory { asked, room, used: 0, peak: 0 }.raise();
        }
        ask_for_huge_pages(storage.as_mut_ptr(), needed);
    }
    storage.resize(needed.max(storage.len()), 0.0);
    Target(aligned(storage.as_mut_ptr()))
}

thread_local! {
    pub(super) static LEFT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    pub(super) static RIGHT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// `c = a b` or `c += a b`; `c` has rows of `stride` elements, of which the first `b.columns` are written.
pub(super) fn product(
    how: Arithmetic,
    a: Operand,
    b: Operand,
    c: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    debug_assert!(a.rows == 0 || c.len() >= (a.rows - 1) * stride + b.columns);
    // SAFETY: the operands lie within their slices (checked where they are made), `c` is exclusive.
    unsafe { product_raw(how, a, b, c.as_mut_ptr(), stride, accumulate) }
}

/// As [`product`], into memory that others may write elsewhere.
///
/// # Safety
/// The operands and the `a.rows x b.columns` elements of `c` are valid, and no one else touches the latter.
pub(super) unsafe fn product_raw(
    how: Arithmetic,
    a: Operand,
    b: Operand,
    c: *mut f32,
    stride: usize,
    accumulate: bool,
) {
    let c = Target(c);
    #[cfg(target_arch = "x86_64")]
    if how.isa == Isa::Amx && super::product_amx::gains(a.rows, b.columns, a.columns) {
        return unsafe {
            match how.precision {
                Precision::F32 => super::product_amx::run::<3>(a, b, c, stride, accumulate),
                Precision::Bf16 => super::product_amx::run::<1>(a, b, c, stride, accumulate),
            }
        };
    }
    let bf16 = how.precision == Precision::Bf16;
    let factors = match (bf16, how.isa) {
        (false, _) => Factors::Plain,
        (true, Isa::Avx512Bf16) => Factors::Pairs,
        (true, _) => Factors::Rounded,
    };
    #[cfg(target_arch = "x86_64")]
    if matches!(how.isa, Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512) && super::few_rows::takes(a, b) {
        return unsafe { super::few_rows::run(a, b, factors, c, stride, accumulate) };
    }
    unsafe {
        match how.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if bf16 => run::<Pairs, 14, 2>(pair_panels, a, b, factors, c, stride, accumulate),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => {
                run::<__m512, 14, 2>(avx512_panels, a, b, factors, c, stride, accumulate)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => run::<__m256, 6, 2>(avx2_panels, a, b, factors, c, stride, accumulate),
            _ => run::<[f32; 4], 4, 2>(portable_panels, a, b, factors, c, stride, accumulate),
        }
    }
}

/// A part of the work: rows `[i0, i1)` by the panels `[j0, j1)` of the right operand.
struct Part {
    i0: usize,
    i1: usize,
    j0: usize,
    j1: usize,
}

type Panels = unsafe fn(Operand, Operand, Factors, Packed, Target, usize, bool, Part);

/// The right operand, packed (all panels of a depth block one after the other), or to be packed by each part.
#[derive(Clone, Copy)]
enum Packed {
    Whole(Target),
    Each,
}

unsafe fn run<L: Lanes, const MR: usize, const NV: usize>(
    panels: Panels,
    a: Operand,
    b: Operand,
    factors: Factors,
    c: Target,
    stride: usize,
    accumulate: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            for i in 0..m {
                unsafe { std::slice::from_raw_parts_mut(c.at(i * stride), n) }.fill(0.0);
            }
        }
        return;
    }
    let nr = NV * L::N;
    let np = n.div_ceil(nr);
    let threads = if m * n * k < SERIAL { 1 } else { rayon::current_num_threads() };
    let whole = Part { i0: 0, i1: m, j0: 0, j1: np };
    if threads == 1 && m <= MC {
        return unsafe { panels(a, b, factors, Packed::Each, c, stride, accumulate, whole) };
    }
    // Cut rows into blocks of at most MC, as even as MR allows; few rows are cut by columns too, then each part packs its own panels.
    let strips = m.div_ceil(MR);
    let blocks = m.div_ceil(MC).next_multiple_of(if m >= threads * MR { threads } else { 1 }).min(strips);
    let cuts = if blocks >= threads { 1 } else { (4 * threads).div_ceil(blocks).min(np) };
    let parts = move |t: usize| {
        let (i, j) = (t / cuts, t % cuts);
        let row = |i: usize| m.min(strips * i / blocks * MR);
        Part { i0: row(i), i1: row(i + 1), j0: np * j / cuts, j1: np * (j + 1) / cuts }
    };
    if blocks == 1 {
        (0..cuts)
            .into_par_iter()
            .with_max_len(1)
            .for_each(|t| unsafe { panels(a, b, factors, Packed::Each, c, stride, accumulate, parts(t)) });
        return;
    }
    let mut storage = RIGHT.take();
    let packed = roomy(&mut storage, np * nr * k);
    let chunks = (2 * threads).min(np);
    let pack_all = |t: usize| unsafe {
        for j in np * t / chunks..np * (t + 1) / chunks {
            pack_panel_of(isa_of::<L>(), b, factors, j * nr, nr, packed.at(0), np);
        }
    };
    (0..chunks).into_par_iter().with_max_len(1).for_each(pack_all);
    (0..blocks * cuts).into_par_iter().with_max_len(1).for_each(|t| unsafe {
        panels(a, b, factors, Packed::Whole(packed), c, stride, accumulate, parts(t))
    });
    RIGHT.set(storage);
}

fn isa_of<L: Lanes>() -> Isa {
    match L::N {
        16 => Isa::Avx512,
        8 => Isa::Avx2,
        _ => Isa::Portable,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn avx512_panels(
    a: Operand,
    b: Operand,
    factors: Factors,
    p: Packed,
    c: Target,
    stride: usize,
    acc: bool,
    part: Part,
) {
    unsafe { panels::<__m512, 14, 2>(a, b, factors, p, c, stride, acc, part) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
unsafe fn pair_panels(
    a: Operand,
    b: Operand,
    factors: Factors,
    p: Packed,
    c: Target,
    stride: usize,
    acc: bool,
    part: Part,
) {
    unsafe { panels::<Pairs, 14, 2>(a, b, factors, p, c, stride, acc, part) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2_panels(
    a: Operand,
    b: Operand,
    factors: Factors,
    p: Packed,
    c: Target,
    stride: usize,
    acc: bool,
    part: Part,
) {
    unsafe { panels::<__m256, 6, 2>(a, b, factors, p, c, stride, acc, part) }
}
unsafe fn portable_panels(
    a: Operand,
    b: Operand,
    factors: Factors,
    p: Packed,
    c: Target,
    stride: usize,
    acc: bool,
    part: Part,
) {
    unsafe { panels::<[f32; 4], 4, 2>(a, b, factors, p, c, stride, acc, part) }
}

#[inline(always)]
unsafe fn panels<L: Lanes, const MR: usize, const NV: usize>(
    a: Operand,
    b: Operand,
    factors: Factors,
    packed: Packed,
    c: Target,
    stride: usize,
    accumulate: bool,
    part: Part,
) {
    let (n, k, nr) = (b.columns, a.columns, NV * L::N);
    let np = n.div_ceil(nr);
    let isa = isa_of::<L>();
    let rows = part.i1 - part.i0;
    let mut left = LEFT.take();
    let own = matches!(packed, Packed::Each);
    // A wide result goes by blocks of columns, so that a block stays in the cache from one depth to the next; the left
    // operand is then packed whole before.
    let whole_left = part.j1 - part.j0 > JB;
    let padded = rows.next_multiple_of(MR);
    let left_len = (padded * if whole_left { k } else { KC.min(k) }).next_multiple_of(LINE);
    let panel_len = if own { nr * KC } else { 0 };
    left.resize((left_len + panel_len + LINE).max(left.len()), 0.0);
    let la = aligned(left.as_mut_ptr());
    let lb = unsafe { la.add(left_len) };
    let pack_left = |p: usize, depth: usize, to: *mut f32| {
        for i in (part.i0..part.i1).step_by(MR) {
            unsafe {
                let source = a.data.add(i * a.row + p * a.column);
                let target = to.add((i - part.i0) * depth);
                pack(isa, factors, source, a.row, a.column, MR.min(part.i1 - i), depth, target, MR);
            }
        }
    };
    if whole_left {
        for p in (0..k).step_by(KC) {
            pack_left(p, KC.min(k - p), unsafe { la.add(p * padded) });
        }
    }
    let mut edge = [0f32; 14 * 32];
    for j0 in (part.j0..part.j1).step_by(JB) {
        for p in (0..k).step_by(KC) {
            let depth = KC.min(k - p);
            let steps = if L::PAIRS { depth.div_ceil(2) } else { depth };
            let fresh = p == 0 && !accumulate;
            let lp = if whole_left { unsafe { la.add(p * padded) } } else { la };
            if !whole_left {
                pack_left(p, depth, lp);
            }
            let j1 = part.j1.min(j0 + JB);
            for j in j0..j1 {
                let columns = nr.min(n - j * nr);
                unsafe {
                    let panel = match packed {
                        Packed::Whole(d) => d.at(p * np * nr + j * nr * depth) as *const f32,
                        Packed::Each => {
                            let source = b.data.add(p * b.row + j * nr * b.column);
                            pack(isa, factors, source, b.column, b.row, columns, depth, lb, nr);
                            lb
                        }
                    };
                    // The panel after this one, of which each tile asks for its share.
                    let mut ahead = match packed {
                        Packed::Whole(d) if j + 1 < j1 => {
                            d.at(p * np * nr + (j + 1) * nr * depth) as *const f32
                        }
                        Packed::Whole(d) if p + KC < k => {
                            d.at((p + KC) * np * nr + j0 * nr * KC.min(k - p - KC)) as *const f32
                        }
                        _ => panel,
                    };
                    for i in (part.i0..part.i1).step_by(MR) {
                        let target = c.at(i * stride + j * nr);
                        // The next tile's part of the result comes from far away; it is asked for while this one computes.
                        for x in MR..(2 * MR).min(part.i1 - i) {
                            prefetch(target.add(x * stride));
                            prefetch(target.add(x * stride + columns - 1));
                        }
                        let (block, size) = (lp.add((i - part.i0) * depth), (MR.min(part.i1 - i), columns));
                        border_tile::<L, MR, NV>(
                            steps, block, panel, target, stride, fresh, ahead, size, &mut edge,
                        );
                        ahead = ahead.wrapping_add(steps / STEPS * LINE);
                    }
                }
            }
        }
    }
    LEFT.set(left);
}

/// A tile of which the first `size` rows and columns lie within the result; one over the border is computed whole beside,
/// and its valid part copied.
#[inline(always)]
unsafe fn border_tile<L: Lanes, const MR: usize, const NV: usize>(
    steps: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    fresh: bool,
    ahead: *const f32,
    size: (usize, usize),
    edge: &mut [f32; 14 * 32],
) {
    let nr = NV * L::N;
    if size == (MR, nr) {
        return unsafe { tile::<L, MR, NV>(steps, a, b, c, stride, fresh, ahead) };
    }
    let beside = edge.as_mut_ptr();
    unsafe {
        if !fresh {
            for x in 0..size.0 {
                std::ptr::copy_nonoverlapping(c.add(x * stride), beside.add(x * nr), size.1);
            }
        }
        tile::<L, MR, NV>(steps, a, b, beside, nr, fresh, ahead);
        for x in 0..size.0 {
            std::ptr::copy_nonoverlapping(beside.add(x * nr), c.add(x * stride), size.1);
        }
    }
}

#[inline(always)]
pub(super) fn prefetch(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, valid for any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p as *const i8)
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// `MR x (NV * N)` elements of the result in registers over one depth block of `steps` factors, or pairs of factors. What
/// lies `ahead` is asked for, a line every [`STEPS`].
#[inline(always)]
unsafe fn tile<L: Lanes, const MR: usize, const NV: usize>(
    steps: usize,
    mut a: *const f32,
    mut b: *const f32,
    c: *mut f32,
    stride: usize,
    fresh: bool,
    mut ahead: *const f32,
) {
    unsafe {
        let mut r = [[L::zero(); NV]; MR];
        if !fresh {
            for (i, row) in r.iter_mut().enumerate() {
                for (v, x) in row.iter_mut().enumerate() {
                    *x = L::load(c.add(i * stride + v * L::N));
                }
            }
        }
        let mut step = || {
            let mut y = [L::zero(); NV];
            for (v, x) in y.iter_mut().enumerate() {
                *x = L::load(b.add(v * L::N));
            }
            for (i, row) in r.iter_mut().enumerate() {
                let s = L::splat(a.add(i));
                for (x, &y) in row.iter_mut().zip(&y) {
                    *x = x.fma(s, y);
                }
            }
            a = a.add(MR);
            b = b.add(NV * L::N);
        };
        for _ in 0..steps / STEPS {
            prefetch(ahead);
            ahead = ahead.wrapping_add(LINE);
            for _ in 0..STEPS {
                step();
            }
        }
        for _ in 0..steps % STEPS {
            step();
        }
        for (i, row) in r.iter().enumerate() {
            for (v, x) in row.iter().enumerate() {
                x.store(c.add(i * stride + v * L::N));
            }
        }
    }
}
