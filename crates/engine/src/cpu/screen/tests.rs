//! Tests of the screen: nothing is lost, whatever the sizes of numbers.

use super::*;
use crate::random::{key, normal};

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| normal(key(&[seed]), i) as f32).collect()
}

/// Every row whose exact inner product reaches the threshold is found, with every instruction set the same rows; and
/// the screen leaves most others out.
#[test]
fn no_row_is_lost_and_all_instruction_sets_agree() {
    for (dimension, count) in [(384, 700), (7, 33), (64, 32), (1, 5)] {
        let mut rows = numbers(1, count * dimension);
        // Rows of very different sizes, one of zeros, one so small that it has no codes.
        for (r, row) in rows.chunks_mut(dimension).enumerate() {
            let factor = [1.0, 1e-3, 1e3][r % 3];
            row.iter_mut().for_each(|v| *v *= factor);
        }
        rows[dimension..2 * dimension].fill(0.0);
        rows[2 * dimension..3 * dimension].iter_mut().for_each(|v| *v *= 1e-36);
        for queries in [1, 2, 3, 7, GROUP] {
            let asked = numbers(2, queries * dimension);
            let exact = |q: usize, r: usize| -> f64 {
                let (q, r) = (&asked[q * dimension..][..dimension], &rows[r * dimension..][..dimension]);
                q.iter().zip(r).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let mut scores: Vec<f64> = (0..count).map(|r| exact(0, r)).collect();
            scores.sort_by(|a, b| b.total_cmp(a));
            let least = vec![scores[count / 10] as f32; queries];
            let mut first: Option<usize> = None;
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let cpu = Cpu::with_isa(1, isa).unwrap();
                let screen = cpu.screen(&rows, dimension, None);
                let group = cpu.screened(&asked, dimension, None);
                let mut found = Vec::new();
                let middle = screen.panels() / 2;
                cpu.may_reach(&group, &screen, 0..middle, &least, &mut found);
                cpu.may_reach(&group, &screen, middle..screen.panels(), &least, &mut found);
                found.sort_unstable_by_key(|c| (c.query, c.row));
                for c in &found {
                    let score = exact(c.query as usize, c.row as usize);
                    assert!(f64::from(c.least) <= score && score <= f64::from(c.most), "{c:?} {score}");
                }
                for (q, least) in least.iter().enumerate() {
                    for r in 0..count {
                        let is_found =
                            found.binary_search_by_key(&(q as u32, r as u32), |c| (c.query, c.row)).is_ok();
                        assert!(is_found || exact(q, r) < f64::from(*least), "{dimension} {q} {r}");
                    }
                }
                let most = queries * count;
                assert!(dimension < 64 || found.len() < most / 2, "{} of {most}", found.len());
                // Bounds may differ in the last bit where multiply-add rounds twice.
                if isa.fuses() {
                    let first = *first.get_or_insert(found.len());
                    assert!(first.abs_diff(found.len()) <= 2, "{isa:?}");
                }
            }
        }
    }
}

/// Scales whose product is no normal number of f32, and so many nearly equal numbers that its rounding counts.
#[test]
fn no_row_is_lost_among_tiny_numbers() {
    let (dimension, count) = (4096, 40);
    let alike = |v: &f32, of: f32| of * (1.0 - 0.01 * v.abs().min(1.0));
    for (of_rows, of_queries) in
        [(1e-20, 1e-20), (1e-20, 1.1e-20), (1e-20, 1.2e-20), (1e-16, 1.5e-24), (1e-14, 1e-14)]
    {
        let rows: Vec<f32> = numbers(3, count * dimension).iter().map(|v| alike(v, of_rows)).collect();
        let asked: Vec<f32> = numbers(4, 3 * dimension).iter().map(|v| alike(v, of_queries)).collect();
        let exact = |q: usize, r: usize| -> f64 {
            let (q, r) = (&asked[q * dimension..][..dimension], &rows[r * dimension..][..dimension]);
            q.iter().zip(r).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let cpu = Cpu::with_isa(1, isa).unwrap();
            let screen = cpu.screen(&rows, dimension, None);
            let group = cpu.screened(&asked, dimension, None);
            for q in 0..3 {
                let best = (0..count).max_by(|a, b| exact(q, *a).total_cmp(&exact(q, *b))).unwrap();
                let mut least = [f32::MAX; 3];
                least[q] = exact(q, best) as f32;
                let mut found = Vec::new();
                cpu.may_reach(&group, &screen, 0..screen.panels(), &least, &mut found);
                let found = found.iter().find(|c| (c.query, c.row) == (q as u32, best as u32));
                let found = found.unwrap_or_else(|| panic!("{of_rows} {of_queries} {isa:?}: {q}, {best}"));
                let score = exact(q, best);
                assert!(f64::from(found.least) <= score && score <= f64::from(found.most), "{found:?}");
            }
        }
    }
}

#[test]
fn what_overflows_is_found() {
    let cpu = Cpu::new(1).unwrap();
    let screen = cpu.screen(&[3e38; 64], 32, None);
    let group = cpu.screened(&[3e38; 32], 32, None);
    let mut found = Vec::new();
    cpu.may_reach(&group, &screen, 0..1, &[f32::MAX], &mut found);
    let rows: Vec<u32> = found.iter().map(|c| c.row).collect();
    assert_eq!(rows, [0, 1]);
}
