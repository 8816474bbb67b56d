//! k-means: the lists of an index, and the codes of its residuals. The same bits with any number of threads.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use rayon::prelude::*;
use tercio_data::draw;
use tercio_engine::{Cpu, Device, Tensor};

use crate::error::SearchError;

/// Centroids of lists, on the device.
pub(crate) struct Centroids {
    pub values: Tensor<Cpu>,
    plain: Vec<f32>,
    /// Half the square of every centroid's norm.
    halves: Vec<f32>,
}

impl Centroids {
    pub fn new(cpu: &Cpu, values: &[f32], dimension: usize) -> Centroids {
        let halves = values.chunks_exact(dimension).map(|c| square(c) / 2.0).collect();
        let tensor = Tensor::from_values(cpu, values.len() / dimension, dimension, values);
        Centroids { values: tensor, plain: values.to_vec(), halves }
    }

    /// The nearest centroid of every row, of equally near ones the first, and the square of the distance. Products have the
    /// precision of `cpu`.
    pub fn nearest(&self, cpu: &Cpu, rows: &[f32]) -> Vec<(u32, f32)> {
        let dimension = self.values.columns;
        let nearest = cpu.nearest(rows, &self.plain, &self.halves, dimension);
        let of = |(row, best): (&[f32], (u32, f32))| (best.0, (square(row) - 2.0 * best.1).max(0.0));
        cpu.run(|| rows.par_chunks(dimension).zip(nearest).with_min_len(64).map(of).collect())
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
pub(crate) struct Rounds<'a> {
    pub seed: u64,
    pub rounds: usize,
    pub stop: &'a dyn Fn() -> bool,
}

/// Keeps these draws apart from others with the same seed.
const FIRST: u64 = 0x6c69_7374;

/// `lists` centroids of the rows (at least one row, at least as many as lists). First come rows that are drawn; a list that loses all its
/// rows begins anew at the row of the largest list that is farthest from its centroid.
pub(crate) fn of_lists(
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
        refill(&mut members, &nearest, how.stop)?;
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

/// Gives every empty list, in order, the farthest row of the list that is the largest at its turn. Rows of a list stay in order.
fn refill(
    members: &mut [Vec<u32>],
    nearest: &[(u32, f32)],
    stop: &dyn Fn() -> bool,
) -> Result<(), SearchError> {
    let empty: Vec<usize> = (0..members.len()).filter(|&l| members[l].is_empty()).collect();
    let mut by_size: BinaryHeap<(usize, Reverse<usize>)> =
        members.iter().enumerate().map(|(list, rows)| (rows.len(), Reverse(list))).collect();
    // Rows of the lists that are taken from, sorted once, the farthest at the end: in a set of equal rows nearly all lists are empty.
    let mut taken: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let far = |a: &u32, b: &u32| nearest[*a as usize].1.total_cmp(&nearest[*b as usize].1).then(b.cmp(a));
    for (n, list) in empty.into_iter().enumerate() {
        if n.is_multiple_of(1024) && stop() {
            return Err(SearchError::Stopped);
        }
        let Some(mut largest) = by_size.peek_mut() else { break };
        let from = largest.1.0;
        let rows = taken.entry(from).or_insert_with(|| {
            let mut rows = std::mem::take(&mut members[from]);
            rows.sort_unstable_by(far);
            rows
        });
        members[list].extend(rows.pop());
        largest.0 = rows.len();
    }
    for (list, mut rows) in taken {
        rows.sort_unstable();
        members[list] = rows;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What [`refill`] does, a list after the other.
    fn plainly(members: &mut [Vec<u32>], nearest: &[(u32, f32)]) {
        for list in 0..members.len() {
            if members[list].is_empty() {
                let most = members.iter().map(Vec::len).max().unwrap();
                let largest = members.iter().position(|m| m.len() == most).unwrap();
                let greatest = members[largest].iter().map(|&r| nearest[r as usize].1).fold(0.0, f32::max);
                let at = members[largest].iter().position(|&r| nearest[r as usize].1 == greatest).unwrap();
                let row = members[largest].remove(at);
                members[list].push(row);
            }
        }
    }

    #[test]
    fn empty_lists_take_the_farthest_rows_of_the_largest() {
        for seed in 0..40u64 {
            let (lists, rows) = (1 + (seed % 13) as usize, 13 + (seed * 7 % 60) as u32);
            // Few lists have rows, and many rows are equally far.
            let nearest: Vec<(u32, f32)> = (0..u64::from(rows))
                .map(|r| {
                    let list = draw::keyed(&[seed, r]) % (1 + seed % 5);
                    (list as u32 % lists as u32, (draw::keyed(&[seed, r, 1]) % 4) as f32)
                })
                .collect();
            let mut members = vec![Vec::new(); lists];
            nearest.iter().enumerate().for_each(|(r, (list, _))| members[*list as usize].push(r as u32));
            let mut want = members.clone();
            plainly(&mut want, &nearest);
            refill(&mut members, &nearest, &|| false).unwrap();
            assert_eq!(members, want, "{seed}");
            assert!(members.iter().all(|m| !m.is_empty()));
        }
        let mut members = vec![vec![0, 1, 2], Vec::new()];
        let stopped = refill(&mut members, &[(0, 1.0); 3], &|| true);
        assert!(matches!(stopped, Err(SearchError::Stopped)));
    }
}
