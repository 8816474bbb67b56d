//! Products of rows with lanes that are all kept, and the nearest of many centroids, whose products are never kept.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::super::lanes::Pairs;
use super::super::lanes::{Lanes, Precision};
use super::super::{Cpu, Device, Isa};
use super::{Job, ROWS, sums};

/// Rows whose products with a centroid are computed together.
const WIDE: usize = 64;

/// Up to two numbers as bf16, the first below.
fn pair(two: &[f32]) -> u32 {
    let round = |v: f32| v.to_bits().wrapping_add(0x7fff + (v.to_bits() >> 16 & 1)) >> 16;
    round(two[0]) | two.get(1).map_or(0, |v| round(*v)) << 16
}

/// SAFETY: as of [`sums`]; `out` has `lanes` elements for each of the job's rows.
#[inline(always)]
unsafe fn all<L: Lanes, const J: usize, const V: usize>(job: Job, out: *mut f32) {
    unsafe {
        let mut r = 0;
        while r + J <= job.count {
            for lane in (0..job.lanes).step_by(V * L::N) {
                let rows = job.rows.add(r * job.steps);
                let sums = sums::<L, J, V>(job.query.add(lane), job.lanes, rows, job.steps);
                for (j, sums) in sums.into_iter().enumerate() {
                    for (v, sum) in sums.into_iter().enumerate() {
                        sum.store(out.add((r + j) * job.lanes + lane + v * L::N));
                    }
                }
            }
            r += J;
        }
        if J > 1 && r < job.count {
            let rest = Job { rows: job.rows.add(r * job.steps), count: job.count - r, ..job };
            all::<L, 1, V>(rest, out.add(r * job.lanes));
        }
    }
}

/// For each of [`WIDE`] rows, which lie as a query's tokens do, the first centroid whose product less its half is greatest.
///
/// SAFETY: as of [`sums`], with as many halves as rows of the job, the centroids.
#[inline(always)]
unsafe fn closest<L: Lanes, const J: usize, const V: usize>(
    job: Job,
    halves: &[f32],
    best: &mut [f32; WIDE],
    place: &mut [u32; WIDE],
) {
    let mut c = 0;
    while c < job.count {
        let together = J.min(job.count - c);
        let mut products = [[0f32; WIDE]; J];
        for lane in (0..WIDE).step_by(V * L::N) {
            // SAFETY: as asked for; `together` centroids are there, and a row of products has room for all lanes.
            unsafe {
                let rows = job.rows.add(c * job.steps);
                if together == J {
                    let sums = sums::<L, J, V>(job.query.add(lane), job.lanes, rows, job.steps);
                    for (sums, products) in sums.into_iter().zip(&mut products) {
                        for (v, sum) in sums.into_iter().enumerate() {
                            sum.store(products.as_mut_ptr().add(lane + v * L::N));
                        }
                    }
                } else {
                    for (j, products) in products.iter_mut().enumerate().take(together) {
                        let [sums] = sums::<L, 1, V>(
                            job.query.add(lane),
                            job.lanes,
                            rows.add(j * job.steps),
                            job.steps,
                        );
                        for (v, sum) in sums.into_iter().enumerate() {
                            sum.store(products.as_mut_ptr().add(lane + v * L::N));
                        }
                    }
                }
            }
        }
        for (j, (products, half)) in products.iter().zip(&halves[c..]).enumerate().take(together) {
            let at = (c + j) as u32;
            for l in 0..WIDE {
                let value = products[l] - half;
                let better = value > best[l];
                best[l] = if better { value } else { best[l] };
                place[l] = if better { at } else { place[l] };
            }
        }
        c += together;
    }
}

/// What [`closest`] works on.
struct Tile<'a> {
    job: Job,
    halves: &'a [f32],
    best: &'a mut [f32; WIDE],
    place: &'a mut [u32; WIDE],
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
unsafe fn closest_bf16(t: Tile<'_>) {
    unsafe { closest::<Pairs, 6, 4>(t.job, t.halves, t.best, t.place) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn closest_avx512(t: Tile<'_>) {
    unsafe { closest::<__m512, 6, 4>(t.job, t.halves, t.best, t.place) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn closest_avx2(t: Tile<'_>) {
    unsafe { closest::<__m256, 5, 2>(t.job, t.halves, t.best, t.place) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
unsafe fn all_avx512(job: Job, out: *mut f32) {
    unsafe { all::<__m512, 8, 2>(job, out) }
}
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn all_avx2(job: Job, out: *mut f32) {
    unsafe { all::<__m256, 5, 2>(job, out) }
}

/// All products of a job.
pub(super) fn products(isa: Isa, job: Job, out: &mut [f32]) {
    assert_eq!(out.len(), job.count * job.lanes);
    let out = out.as_mut_ptr();
    // SAFETY: sizes are those of the slices; a device has only instructions that the processor has; lanes come in 32.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => all_avx512(job, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => all_avx2(job, out),
            _ => all::<[f32; 4], 1, 8>(job, out),
        }
    }
}

/// Whether there are instructions for products of pairs of bf16.
fn multiplies_pairs(isa: Isa) -> bool {
    match isa {
        Isa::Avx512Bf16 => true,
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => is_x86_feature_detected!("avx512bf16"),
        _ => false,
    }
}

impl Cpu {
    /// For every row the centroid c whose `row.c - halves[c]` is greatest, of equal ones the first, and that number: with halves of the
    /// squared norms the nearest one. A device of bf16 rounds both factors to it where the processor multiplies it; each product is one
    /// chain of multiply-adds, whatever the blocks and threads.
    pub fn nearest(
        &self,
        rows: &[f32],
        centroids: &[f32],
        halves: &[f32],
        dimension: usize,
    ) -> Vec<(u32, f32)> {
        assert!(rows.len().is_multiple_of(dimension) && centroids.len() == halves.len() * dimension);
        let near = self.arithmetic.precision == Precision::Bf16 && multiplies_pairs(self.isa());
        let copies: Vec<u32> = match near {
            true => centroids.chunks_exact(dimension).flat_map(|row| row.chunks(2).map(pair)).collect(),
            false => Vec::new(),
        };
        let steps = if near { dimension.div_ceil(2) } else { dimension };
        let block = |(rows, nearest): (&[f32], &mut [(u32, f32)])| {
            let mut lanes = vec![0f32; steps * WIDE];
            for (rows, nearest) in rows.chunks(WIDE * dimension).zip(nearest.chunks_mut(WIDE)) {
                for (l, row) in rows.chunks_exact(dimension).enumerate() {
                    match near {
                        true => row.chunks(2).enumerate().for_each(|(s, two)| {
                            lanes[s * WIDE + l] = f32::from_bits(pair(two));
                        }),
                        false => row.iter().enumerate().for_each(|(d, v)| lanes[d * WIDE + l] = *v),
                    }
                }
                let (mut best, mut place) = ([f32::NEG_INFINITY; WIDE], [0u32; WIDE]);
                let rows = if near { copies.as_ptr().cast() } else { centroids.as_ptr() };
                let job = Job { query: lanes.as_ptr(), lanes: WIDE, rows, count: halves.len(), steps };
                let tile = Tile { job, halves, best: &mut best, place: &mut place };
                // SAFETY: `lanes` has `steps` rows of WIDE, the centroids `steps` elements each and as many as halves; the
                // instructions are there.
                unsafe {
                    match self.isa() {
                        #[cfg(target_arch = "x86_64")]
                        _ if near => closest_bf16(tile),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => closest_avx512(tile),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => closest_avx2(tile),
                        _ => closest::<[f32; 4], 1, 8>(tile.job, tile.halves, tile.best, tile.place),
                    }
                }
                for (l, nearest) in nearest.iter_mut().enumerate() {
                    *nearest = (place[l], best[l]);
                }
            }
        };
        let mut nearest = vec![(0u32, f32::NEG_INFINITY); rows.len() / dimension];
        self.run(|| rows.par_chunks(ROWS * dimension).zip(nearest.par_chunks_mut(ROWS)).for_each(block));
        nearest
    }
}
