//! Which rows may have a great inner product with a query: a screen of 8-bit copies with a bound that is proved.
//!
//! A row x has the copy x' = s c, where c are whole numbers of -127..=127, and so has a query q. By Cauchy and Schwarz
//! `q.x = q'.x' + (q - q').x' + q.(x - x') <= q'.x' + |q - q'| |x'| + |q| |x - x'|`: a row of which the right side is below the
//! least score that still counts cannot be among the best. The others are few, and their true scores are computed. Sums of
//! whole numbers are exact, and `SLACK` covers the rounding of everything else, so no row is lost.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::lanes::kernel;
use super::pool::ask_for_huge_pages;
use super::{Cpu, Isa, math};

/// Rows of a panel.
pub const PANEL: usize = 32;
/// Most queries of a group.
pub const GROUP: usize = 14;
/// Zero of a row's codes, which are stored without a sign.
const ZERO: i32 = 128;
/// Rounding of f32 in norms, scores and bounds, relative to the norms, per element of a vector and for the last steps: four
/// times what a sum of that many products can err.
const SLACK: f32 = 1.0 / (1 << 22) as f32;
/// A vector whose greatest number is less has only zeros for codes, and all of it counts as what its copy lacks: the product of two such
/// scales would be beyond the normal numbers of f32, where rounding is not relative and [`SLACK`] does not cover it.
const TINY: f32 = 1e-15;

/// A cache line of codes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Scale of the codes, norm of the copy, norm of what the copy lacks: one each of a panel's rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Terms {
    scale: [f32; PANEL],
    length: [f32; PANEL],
    error: [f32; PANEL],
}

/// 8-bit copies of rows. Code k of row r lies in panel `r / 32`, at `k / 4 * 128 + r % 32 * 4 + k % 4`.
pub struct Screen {
    rows: usize,
    steps: usize,
    codes: Vec<Line>,
    terms: Vec<Terms>,
}

/// 8-bit copies of up to [`GROUP`] queries.
pub struct Group {
    count: usize,
    /// Queries that are multiplied together: `count`, or the next size that there is a kernel for.
    size: usize,
    steps: usize,
    /// Four codes of each query, a step after the other.
    codes: Vec<i32>,
    terms: [Asked; GROUP],
}

#[derive(Clone, Copy, Default)]
struct Asked {
    scale: f32,
    error: f32,
    length: f32,
    /// What the zero of the rows' codes adds to a sum.
    offset: i32,
}

/// A row that may be among the best of a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The query's number in its group.
    pub query: u32,
    /// The row's number in its screen.
    pub row: u32,
    /// Its score is at most this.
    pub most: f32,
    /// Its score is at least this; no number where a bound is beyond f32.
    pub least: f32,
}

/// A vector's codes and terms.
pub(super) struct Copied {
    pub scale: f32,
    pub length: f32,
    pub error: f32,
}

kernel! {
    /// Writes the codes of `x`; the terms are upper bounds.
    pub(super) fn copy(x: &[f32], codes: &mut [i8]) -> Copied {
        let mut lanes = [0f32; 32];
        let (chunks, rest) = x.as_chunks::<32>();
        for chunk in chunks {
            for (lane, v) in lanes.iter_mut().zip(chunk) {
                *lane = if v.abs() > *lane { v.abs() } else { *lane };
            }
        }
        let most = lanes.iter().chain(rest).fold(0f32, |m, v| if v.abs() > m { v.abs() } else { m });
        let slack = (x.len() + 32) as f32 * SLACK;
        if most < TINY {
            codes.fill(0);
            return Copied { scale: 0.0, length: 0.0, error: most * x.len() as f32 + f32::MIN_POSITIVE };
        }
        // Adding and subtracting this rounds to a whole number, ties to even.
        const ROUND: f32 = 12_582_912.0;
        let (factor, scale) = (127.0 / most, most / 127.0);
        for (code, v) in codes.iter_mut().zip(x) {
            *code = (v * factor + ROUND).to_bits() as u8 as i8;
        }
        let rounded = |i: usize| x[i] * factor + ROUND - ROUND;
        let copied = math::sum(x.len(), |i, s| s + rounded(i) * rounded(i)).sqrt();
        let lacking = math::sum(x.len(), |i, s| s + (x[i] * factor - rounded(i)) * (x[i] * factor - rounded(i))).sqrt();
        let whole = copied + lacking;
        Copied {
            scale,
            length: scale * copied * (1.0 + slack),
            error: scale * (lacking * 1.001 + whole * slack),
        }
    }
}

/// The greater of two, and no number if one is none.
fn nan_or_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

impl Screen {
    /// How many rows it has.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Its panels: 32 rows each, the last perhaps fewer.
    pub fn panels(&self) -> usize {
        self.terms.len()
    }

    /// At least the norm of every row, times its factor.
    pub fn longest(&self) -> f32 {
        let rows = self.terms.iter().flat_map(|t| t.length.iter().zip(&t.error));
        rows.map(|(length, error)| length + error).fold(0.0, nan_or_max)
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        (self.codes.capacity() * size_of::<Line>() + self.terms.capacity() * size_of::<Terms>()) as u64
    }
}

impl Group {
    /// How many queries it has.
    pub fn count(&self) -> usize {
        self.count
    }

    /// At least the norm of every query, times its factor.
    pub fn longest(&self) -> f32 {
        self.terms.iter().map(|asked| asked.length).fold(0.0, nan_or_max)
    }
}

impl Cpu {
    /// The 8-bit copies of rows of `dimension` finite numbers (at most 65536). `factors`: what each row's scores are multiplied by later, as
    /// the reciprocal of its norm.
    pub fn screen(&self, rows: &[f32], dimension: usize, factors: Option<&[f32]>) -> Screen {
        assert!((1..=1 << 16).contains(&dimension) && rows.len().is_multiple_of(dimension));
        let count = rows.len() / dimension;
        let (steps, panels) = (dimension.div_ceil(4), count.div_ceil(PANEL));
        let none = Terms { scale: [0.0; PANEL], length: [0.0; PANEL], error: [0.0; PANEL] };
        let mut screen = Screen { rows: count, steps, codes: Vec::new(), terms: vec![none; panels] };
        screen.codes.reserve_exact(panels * steps * 2);
        let len = panels * steps * size_of::<Line>() * 2 / size_of::<f32>();
        ask_for_huge_pages(screen.codes.as_mut_ptr().cast(), len);
        screen.codes.resize(panels * steps * 2, Line([ZERO as u8; 64]));
        let mut codes = vec![0i8; steps * 4];
        for (r, row) in rows.chunks_exact(dimension).enumerate() {
            let copied = copy(self.isa(), row, &mut codes[..dimension]);
            let factor = factors.map_or(1.0, |f| f[r]);
            let (terms, at) = (&mut screen.terms[r / PANEL], r % PANEL);
            terms.scale[at] = copied.scale * factor;
            terms.length[at] = copied.length * factor;
            terms.error[at] = copied.error * factor;
            let panel = &mut screen.codes[r / PANEL * steps * 2..][..steps * 2];
            for (lines, four) in panel.as_chunks_mut::<2>().0.iter_mut().zip(codes.as_chunks::<4>().0) {
                let place = &mut lines[at / 16].0[at % 16 * 4..][..4];
                for (to, code) in place.iter_mut().zip(four) {
                    *to = (i32::from(*code) + ZERO) as u8;
                }
            }
        }
        screen
    }

    /// The 8-bit copies of one to [`GROUP`] queries of `dimension` finite numbers; `factors` as in [`Cpu::screen`].
    pub fn screened(&self, queries: &[f32], dimension: usize, factors: Option<&[f32]>) -> Group {
        let count = queries.len() / dimension;
        assert!((1..=GROUP).contains(&count) && queries.len().is_multiple_of(dimension));
        let steps = dimension.div_ceil(4);
        let size = [1, 2, 4, 8, GROUP].into_iter().find(|s| *s >= count).unwrap_or(GROUP);
        let mut group = Group { count, size, steps, codes: vec![0; steps * size], terms: Default::default() };
        let mut codes = vec![0i8; steps * 4];
        for (i, query) in queries.chunks_exact(dimension).enumerate() {
            let copied = copy(self.isa(), query, &mut codes[..dimension]);
            let factor = factors.map_or(1.0, |f| f[i]);
            group.terms[i] = Asked {
                scale: copied.scale * factor,
                error: copied.error * factor,
                // Of the query itself, not of its copy.
                length: (copied.length + copied.error) * factor,
                offset: ZERO * codes.iter().map(|&c| i32::from(c)).sum::<i32>(),
            };
            for (step, four) in codes.as_chunks::<4>().0.iter().enumerate() {
                group.codes[step * size + i] = i32::from_le_bytes(four.map(|c| c as u8));
            }
        }
        group
    }

    /// Appends to `found` what may score `least[i]` or more, on the calling thread; only rows of these panels.
    pub fn may_reach(
        &self,
        group: &Group,
        screen: &Screen,
        panels: std::ops::Range<usize>,
        least: &[f32],
        found: &mut Vec<Candidate>,
    ) {
        assert!(group.steps == screen.steps && panels.end <= screen.panels());
        assert_eq!(least.len(), group.count);
        let job = Job { group, screen, least };
        #[cfg(target_arch = "x86_64")]
        if matches!(self.isa(), Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512) && has_vnni() {
            // SAFETY: the processor has the instructions; sizes were compared above.
            return unsafe { vnni(&job, panels, found) };
        }
        for panel in panels {
            plain(self.isa(), &job, panel, found);
        }
    }
}

struct Job<'a> {
    group: &'a Group,
    screen: &'a Screen,
    least: &'a [f32],
}

impl Job<'_> {
    /// Keeps the rows of a panel's half (16 rows) whose bits are set in `mask` and that exist. `most`: the greatest scores that they
    /// can have, which lie `bound` above the scores of the copies.
    #[inline(always)]
    fn keep(
        &self,
        query: usize,
        first: usize,
        mask: u16,
        (most, bound): (&[f32; 16], &[f32; 16]),
        found: &mut Vec<Candidate>,
    ) {
        let mut mask = mask;
        while mask != 0 {
            let at = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            if first + at < self.screen.rows {
                let (query, row) = (query as u32, (first + at) as u32);
                found.push(Candidate { query, row, most: most[at], least: most[at] - 2.0 * bound[at] });
            }
        }
    }
}

kernel! {
    /// One panel, in whole numbers that any instruction set has.
    fn plain(job: &Job<'_>, panel: usize, found: &mut Vec<Candidate>) {
        let (group, screen) = (job.group, job.screen);
        let lines = &screen.codes[panel * screen.steps * 2..][..screen.steps * 2];
        for (i, (asked, least)) in group.terms.iter().zip(job.least).enumerate() {
            let mut sums = [0i32; PANEL];
            for (step, two) in lines.as_chunks::<2>().0.iter().enumerate() {
                let codes = group.codes[step * group.size + i].to_le_bytes().map(|c| i32::from(c as i8));
                for (sums, line) in sums.as_chunks_mut::<16>().0.iter_mut().zip(two) {
                    for (sum, x) in sums.iter_mut().zip(line.0.as_chunks::<4>().0) {
                        let pair = |a: usize, b: usize| i32::from(x[a]) * codes[a] + i32::from(x[b]) * codes[b];
                        *sum += pair(0, 1) + pair(2, 3);
                    }
                }
            }
            let terms = &screen.terms[panel];
            for half in 0..2 {
                let mut mask = 0u16;
                let (mut most, mut bounds) = ([0f32; 16], [0f32; 16]);
                for r in 0..16 {
                    let at = half * 16 + r;
                    let sum = (sums[at] - asked.offset) as f32;
                    let bound =
                        asked.error * terms.length[at] + asked.length * terms.error[at] + f32::MIN_POSITIVE;
                    (most[r], bounds[r]) = (sum * (asked.scale * terms.scale[at]) + bound, bound);
                    let below = most[r] < *least;
                    mask |= u16::from(!below) << r;
                }
                job.keep(i, panel * PANEL + half * 16, mask, (&most, &bounds), found);
            }
        }
    }
}

/// Whether the processor multiplies bytes.
pub(super) fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// SAFETY: the processor has AVX-512 with VNNI, and group and screen have the same steps.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma")]
unsafe fn vnni(job: &Job<'_>, panels: std::ops::Range<usize>, found: &mut Vec<Candidate>) {
    unsafe {
        match job.group.size {
            1 => vnni_of::<1, 2>(job, panels, found),
            2 => vnni_of::<2, 2>(job, panels, found),
            4 => vnni_of::<4, 2>(job, panels, found),
            8 => vnni_of::<8, 1>(job, panels, found),
            _ => vnni_of::<GROUP, 1>(job, panels, found),
        }
    }
}

/// `M` queries by `W` panels at a time: with few queries one panel has too few sums to hide the latency of an addition.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn vnni_of<const M: usize, const W: usize>(
    job: &Job<'_>,
    panels: std::ops::Range<usize>,
    found: &mut Vec<Candidate>,
) {
    let mut panel = panels.start;
    unsafe {
        while panel + W <= panels.end {
            vnni_tile::<M, W>(job, panel, found);
            panel += W;
        }
        for panel in panel..panels.end {
            vnni_tile::<M, 1>(job, panel, found);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn vnni_tile<const M: usize, const W: usize>(job: &Job<'_>, panel: usize, found: &mut Vec<Candidate>) {
    let (group, screen) = (job.group, job.screen);
    unsafe {
        let mut sums = [[[_mm512_setzero_si512(); 2]; W]; M];
        let lines = screen.codes.as_ptr().add(panel * screen.steps * 2);
        let codes = group.codes.as_ptr();
        for step in 0..screen.steps {
            let rows: [[__m512i; 2]; W] = std::array::from_fn(|w| {
                let at = lines.add((w * screen.steps + step) * 2);
                [_mm512_load_si512(at.cast()), _mm512_load_si512(at.add(1).cast())]
            });
            for (i, sums) in sums.iter_mut().enumerate() {
                let query = _mm512_set1_epi32(*codes.add(step * M + i));
                for (sums, rows) in sums.iter_mut().zip(&rows) {
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        *sum = _mm512_dpbusd_epi32(*sum, *row, query);
                    }
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(group.count) {
            let asked = &group.terms[i];
            let least = _mm512_set1_ps(job.least[i]);
            for (w, sums) in sums.iter().enumerate() {
                let terms = &screen.terms[panel + w];
                for (half, sum) in sums.iter().enumerate() {
                    let of = |terms: &[f32; PANEL]| _mm512_load_ps(terms.as_ptr().add(half * 16));
                    let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(*sum, _mm512_set1_epi32(asked.offset)));
                    let bound = _mm512_set1_ps(f32::MIN_POSITIVE);
                    let bound = _mm512_fmadd_ps(_mm512_set1_ps(asked.error), of(&terms.length), bound);
                    let bound = _mm512_fmadd_ps(_mm512_set1_ps(asked.length), of(&terms.error), bound);
                    let scale = _mm512_mul_ps(_mm512_set1_ps(asked.scale), of(&terms.scale));
                    let most = _mm512_fmadd_ps(sum, scale, bound);
                    // Not below: what is no number counts.
                    let mask = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(most, least);
                    if mask != 0 {
                        let (mut mosts, mut bounds) = ([0f32; 16], [0f32; 16]);
                        _mm512_storeu_ps(mosts.as_mut_ptr(), most);
                        _mm512_storeu_ps(bounds.as_mut_ptr(), bound);
                        job.keep(i, (panel + w) * PANEL + half * 16, mask, (&mosts, &bounds), found);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
