//! k-means: the lists of an index, and the codes of its residuals. The same bits with any number of threads.

use rayon::prelude::*;
use tercio_data::draw;
use tercio_engine::{Cpu, Device, Tensor};

use crate::error::SearchError;

/// Rows that are compared with all centroids at once.
const BLOCK: usize = 2048;

/// Centroids of lists, on the device.
pub(super) struct Centroids {
    pub values: Tensor<Cpu>,
    /// Half the square of every centroid's norm.
    halves: Vec<f32>,
}

impl Centroids {
    pub fn new(cpu: &Cpu, values: &[f32], dimension: usize) -> Centroids {
        let halves = values.chunks_exact(dimension).map(|c| square(c) / 2.0).collect();
        Centroids { values: Tensor::from_values(cpu, values.len() / dimension, dimension, values), halves }
    }

    /// The nearest centroid of every row, of equally near ones the first, and the square of the distance.
    pub fn nearest(&self, cpu: &Cpu, rows: &[f32]) -> Vec<(u32, f32)> {
        let (dimension, lists) = (self.values.columns, self.values.rows);
        let mut nearest = Vec::with_capacity(rows.len() / dimension);
        for block in rows.chunks(BLOCK * dimension) {
            let scores = self.products(cpu, block);
            let of = |(scores, row): (&[f32], &[f32])| {
                let mut best = (0u32, f32::NEG_INFINITY);
                for (list, (score, half)) in scores.iter().zip(&self.halves).enumerate() {
                    if score - half > best.1 {
                        best = (list as u32, score - half);
                    }
                }
                (best.0, (square(row) - 2.0 * best.1).max(0.0))
            };
            let found: Vec<(u32, f32)> = cpu.run(|| {
                scores.par_chunks(lists).zip(block.par_chunks(dimension)).with_min_len(64).map(of).collect()
            });
            nearest.extend(found);
        }
        nearest
    }

    /// Inner products of rows with all centroids, a row of them after the other.
    pub fn products(&self, cpu: &Cpu, rows: &[f32]) -> Vec<f32> {
        let count = rows.len() / self.values.columns;
        let rows = Tensor::from_values(cpu, count, self.values.columns, rows);
        let mut scores = Tensor::scratch(cpu, count, self.values.rows);
        cpu.run(|| cpu.product(rows.matrix(), self.values.matrix().t(), scores.view_mut(), false));
        scores.to_vec(cpu)
    }
}

fn square(x: &[f32]) -> f32 {
    x.iter().map(|v| v * v).sum()
}

/// What a run of k-means draws and how long it goes on.
#[derive(Clone, Copy)]
pub(super) struct Rounds<'a> {
    pub seed: u64,
    pub rounds: usize,
    pub stop: &'a dyn Fn() -> bool,
}

/// Keeps these draws apart from others with the same seed.
const FIRST: u64 = 0x6c69_7374;

/// `lists` centroids of the rows (at least one row, at least as many as lists). First come rows that are drawn; a list that loses all its
/// rows begins anew at the row of the largest list that is farthest from its centroid.
pub(super) fn of_lists(
    cpu: &Cpu,
    rows: &[f32],
    dimension: usize,
    lists: usize,
    how: Rounds<'_>,
    progress: &mut dyn FnMut(f64),
) -> Result<Vec<f32>, SearchError> {
    let count = rows.len() / dimension;
    let row = |r: usize| &rows[r * dimension..][..dimension];
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&r| (draw::keyed(&[FIRST, how.seed, r as u64]), r));
    let mut values: Vec<f32> = order[..lists].iter().flat_map(|&r| row(r).iter().copied()).collect();
    for round in 0..how.rounds {
        if (how.stop)() {
            return Err(SearchError::Stopped);
        }
        let nearest = Centroids::new(cpu, &values, dimension).nearest(cpu, rows);
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); lists];
        nearest.iter().enumerate().for_each(|(r, (list, _))| members[*list as usize].push(r as u32));
        for list in 0..lists {
            if members[list].is_empty() {
                let largest = (0..lists).rev().max_by_key(|&l| members[l].len()).unwrap_or(0);
                let far = |a: &u32, b: &u32| {
                    nearest[*a as usize].1.total_cmp(&nearest[*b as usize].1).then(b.cmp(a))
                };
                if let Some(farthest) = members[largest].iter().copied().max_by(far) {
                    members[largest].retain(|&r| r != farthest);
                    members[list].push(farthest);
                }
            }
        }
        cpu.run(|| {
            values.par_chunks_mut(dimension).zip(&members).for_each(|(centroid, members)| {
                let mut sum = vec![0f64; dimension];
                for &r in members {
                    sum.iter_mut().zip(row(r as usize)).for_each(|(s, v)| *s += f64::from(*v));
                }
                if !members.is_empty() {
                    centroid.iter_mut().zip(sum).for_each(|(c, s)| *c = (s / members.len() as f64) as f32);
                }
            });
        });
        progress((round + 1) as f64 / how.rounds as f64);
    }
    Ok(values)
}
