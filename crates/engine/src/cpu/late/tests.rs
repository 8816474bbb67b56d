//! Kernels of late interaction against plain loops, with every instruction set that the processor has.

use super::*;
use crate::random::{key, normal};

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| normal(key(&[seed]), i) as f32).collect()
}

fn devices() -> impl Iterator<Item = Cpu> {
    Isa::ALL.into_iter().filter(|isa| isa.available()).map(|isa| Cpu::with_isa(2, isa).unwrap())
}

fn cpu_of(isa: Isa) -> Cpu {
    Cpu::with_isa(2, isa).unwrap()
}

fn cpu_products(cpu: &Cpu, query: &QueryTokens, rows: &[f32]) -> Vec<f32> {
    cpu.products_of_lanes(query, rows)
}

fn exact(query: &[f32], rows: &[f32], dimension: usize) -> f64 {
    let dot =
        |q: &[f32], x: &[f32]| -> f64 { q.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    let of = |q: &[f32]| rows.chunks(dimension).map(|x| dot(q, x)).fold(f64::NEG_INFINITY, f64::max);
    query.chunks(dimension).map(of).sum()
}

#[test]
fn max_sim_is_that_of_a_plain_loop_and_the_same_bits_where_multiply_add_fuses() {
    for (tokens, count, dimension) in [(1, 1, 1), (32, 80, 128), (33, 17, 96), (5, 3, 7), (64, 9, 16)] {
        let (query, rows) = (numbers(1, tokens * dimension), numbers(2, count * dimension));
        let want = exact(&query, &rows, dimension);
        let mut fused = None;
        for cpu in devices() {
            let asked = QueryTokens::new(&query, dimension);
            let found = cpu.max_sim(&asked, &rows);
            assert!((f64::from(found) - want).abs() < 1e-5 * want.abs().max(1.0), "{found} {want}");
            if cpu.isa().fuses() {
                assert_eq!(*fused.get_or_insert(found.to_bits()), found.to_bits(), "{:?}", cpu.isa());
            }
            // Rows that are given in two parts, too.
            let mut best = vec![f32::NEG_INFINITY; asked.lanes()];
            let (some, rest) = rows.split_at(count / 2 * dimension);
            cpu.raise_to_products(&asked, some, &mut best);
            cpu.raise_to_products(&asked, rest, &mut best);
            let sum = best[..tokens].iter().fold(0f64, |sum, b| sum + f64::from(*b)) as f32;
            assert_eq!(sum.to_bits(), found.to_bits());
            assert_eq!(cpu.max_sim(&asked, &[]), f32::NEG_INFINITY);
        }
    }
}

#[test]
fn near_scores_lie_within_their_bound() {
    for cpu in devices().filter(Cpu::has_near_max_sim) {
        for (tokens, dimension, size) in [(32, 128, 1.0), (3, 7, 1e3), (40, 16, 1e-3)] {
            let query = numbers(3, tokens * dimension);
            let rows: Vec<f32> = numbers(4, 50 * dimension).iter().map(|v| v * size).collect();
            let asked = QueryTokens::new(&query, dimension);
            let copies = cpu.copy_tokens(&rows, dimension);
            for (first, end) in [(0, 50), (49, 50), (3, 20)] {
                let rows = &rows[first * dimension..end * dimension];
                let (near, want) =
                    (cpu.near_max_sim(&asked, &copies, first, end), exact(&query, rows, dimension));
                let bound = f64::from(asked.bound(copies.terms(first, end)));
                assert!((f64::from(near) - want).abs() <= bound, "{near} {want} {bound}");
                // And it says something: lengths are about the root of the dimension.
                assert!(bound < 0.05 * tokens as f64 * dimension as f64 * f64::from(size), "{bound}");
            }
        }
    }
}

#[test]
fn sums_of_greatest_bytes_are_those_of_a_plain_loop() {
    for (tokens_strips, codes_count, rows) in [(1, 11, 40), (2, 4, 3), (5, 1, 7)] {
        let byte = |i: u64| (key(&[5, i]) % 251) as u8;
        let table: Vec<[u8; LANES]> = (0..rows * tokens_strips)
            .map(|r| std::array::from_fn(|l| byte((r * LANES + l) as u64)))
            .collect();
        let codes: Vec<u16> = (0..codes_count).map(|i| (key(&[6, i]) % rows as u64) as u16).collect();
        let most = |(strip, lane): (usize, usize)| {
            codes
                .iter()
                .map(|c| u32::from(table[usize::from(*c) * tokens_strips + strip][lane]))
                .max()
                .unwrap()
        };
        let lanes = |strip: usize| (0..LANES).map(move |lane| (strip, lane));
        let want: u32 = (0..tokens_strips).flat_map(lanes).map(most).sum();
        let bytes: Vec<[u8; 2]> = codes.iter().map(|c| c.to_le_bytes()).collect();
        for cpu in devices() {
            assert_eq!(cpu.max_sim_of_codes(&table, tokens_strips, &bytes), want);
            // A code that no table has is no way out of it.
            cpu.max_sim_of_codes(&table, tokens_strips, &[[255, 255]]);
            assert_eq!(cpu.max_sim_of_codes(&table, tokens_strips, &[]), 0);
        }
    }
}

#[test]
fn the_best_of_every_lane_are_those_of_a_sort() {
    // Few different numbers: many are equal.
    let codes = 3 * FEW;
    let scores: Vec<f32> = (0..64 * codes as u64).map(|i| (key(&[7, i]) % 9) as f32).collect();
    for (tokens, count) in [(64, 1), (33, 4), (5, FEW), (37, FEW + 1), (5, codes), (5, usize::MAX)] {
        for cpu in devices() {
            for (lane, found) in cpu.best_of_lanes(&scores, 64, tokens, count).into_iter().enumerate() {
                let mut want: Vec<u32> = (0..codes as u32).collect();
                let score = |c: u32| scores[c as usize * 64 + lane];
                want.sort_by(|a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
                want.truncate(count);
                assert_eq!(found, want, "{tokens} {count} {lane}");
            }
        }
    }
}

#[test]
fn the_nearest_centroid_is_found_in_any_block() {
    let dimension = 6;
    const CENTROIDS: usize = 1000;
    let centroids = numbers(8, (2 * CENTROIDS + 77) * dimension);
    let halves: Vec<f32> =
        centroids.chunks(dimension).map(|c| c.iter().map(|v| v * v).sum::<f32>() / 2.0).collect();
    let mut rows = numbers(9, (ROWS + 50) * dimension);
    // Some lie where a centroid is.
    for (r, c) in [(0, 0), (3, CENTROIDS), (ROWS, 2 * CENTROIDS + 76), (ROWS + 49, 63)] {
        rows[r * dimension..][..dimension].copy_from_slice(&centroids[c * dimension..][..dimension]);
    }
    for cpu in devices() {
        let found = cpu.nearest(&rows, &centroids, &halves, dimension);
        assert_eq!(found.len(), ROWS + 50);
        for (r, c) in [(0, 0), (3, CENTROIDS), (ROWS, 2 * CENTROIDS + 76), (ROWS + 49, 63)] {
            assert_eq!(found[r].0 as usize, c);
        }
        for (row, (place, most)) in rows.chunks(dimension).zip(&found) {
            let of = |c: usize| -> f32 {
                row.iter().zip(&centroids[c * dimension..]).map(|(a, b)| a * b).sum::<f32>() - halves[c]
            };
            let best = (0..halves.len()).map(of).fold(f32::NEG_INFINITY, f32::max);
            assert!((of(*place as usize) - best).abs() < 1e-4 && (most - best).abs() < 1e-4);
        }
        // In bf16: nearly as near.
        let fast = cpu.with_precision(crate::cpu::Precision::Bf16);
        for (row, (place, _)) in
            rows.chunks(dimension).zip(fast.nearest(&rows, &centroids, &halves, dimension))
        {
            let of = |c: usize| -> f32 {
                row.iter().zip(&centroids[c * dimension..]).map(|(a, b)| a * b).sum::<f32>() - halves[c]
            };
            let best = (0..halves.len()).map(of).fold(f32::NEG_INFINITY, f32::max);
            assert!(best - of(place as usize) < 0.2, "{best} {}", of(place as usize));
        }
        let query = QueryTokens::new(&rows[..40 * dimension], dimension);
        let products = cpu_products(&cpu_of(fast.isa()), &query, &centroids[..1003 * dimension]);
        for (c, products) in products.chunks(64).enumerate() {
            for (lane, product) in products.iter().enumerate() {
                let of = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                let want: f64 = match lane < 40 {
                    true => rows[lane * dimension..][..dimension]
                        .iter()
                        .zip(&centroids[c * dimension..])
                        .map(of)
                        .sum(),
                    false => 0.0,
                };
                assert!((f64::from(*product) - want).abs() < 1e-4, "{c} {lane}");
            }
        }
    }
}
