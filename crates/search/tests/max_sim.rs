//! Exact late interaction: the scores of a plain loop, the same with every instruction set, ties by the earlier document.

use tercio_data::TokenVectors;
use tercio_data::multi_vectors::TokensInMemory;
use tercio_engine::Cpu;
use tercio_engine::cpu::Isa;
use tercio_search::max_sim::MaxSim;
use tercio_search::{Hit, SearchError};

mod tokens_common;
use tokens_common::{document, documents, lengths, tokens};

const GO_ON: fn() -> bool = || false;

fn plain(vectors: &dyn TokenVectors, query: &[f32]) -> Vec<(u64, f64)> {
    let dimension = vectors.dimension();
    let dot =
        |q: &[f32], x: &[f32]| -> f64 { q.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    let mut scores: Vec<(u64, f64)> = Vec::new();
    for d in 0..vectors.documents() {
        let rows = document(vectors, d);
        if !rows.is_empty() {
            let of = |q: &[f32]| rows.chunks(dimension).map(|x| dot(q, x)).fold(f64::NEG_INFINITY, f64::max);
            scores.push((d, query.chunks(dimension).map(of).sum()));
        }
    }
    scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    scores
}

#[test]
fn all_documents_are_found_in_the_order_of_a_plain_loop_with_any_instructions_and_threads() {
    for (dimension, count, most) in [(16, 300, 30), (7, 40, 90), (128, 120, 40)] {
        let vectors = documents(1, 0, &lengths(2, count, most), dimension, 25);
        let asked: Vec<Vec<f32>> =
            (0..7).map(|q| tokens(100 + q, 1 + 6 * q as usize, dimension, 25)).collect();
        let queries: Vec<&[f32]> = asked.iter().map(Vec::as_slice).collect();
        let mut fused: Option<Vec<Vec<Hit>>> = None;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for threads in [1, 3] {
                let cpu = Cpu::with_isa(threads, isa).unwrap();
                let all = MaxSim::load(&cpu, &vectors, &GO_ON).unwrap();
                assert_eq!(all.documents(), count as u64);
                let found = all.search(&cpu, &queries, 20, &GO_ON).unwrap();
                for (query, found) in queries.iter().zip(&found) {
                    for (hit, want) in found.iter().zip(plain(&vectors, query)) {
                        assert!(
                            (f64::from(hit.score) - want.1).abs() < 1e-5 * want.1.abs().max(1.0),
                            "{hit:?} {want:?}"
                        );
                    }
                    assert_eq!(found.len(), 20);
                }
                // One by one, and all of them: the same scores.
                for (query, found) in queries.iter().zip(&found) {
                    let alone = &all.search(&cpu, &[query], usize::MAX, &GO_ON).unwrap()[0];
                    assert_eq!(&alone[..20], &found[..]);
                    assert_eq!(alone.len(), plain(&vectors, query).len());
                }
                if isa.fuses() {
                    assert_eq!(fused.get_or_insert_with(|| found.clone()), &found, "{isa:?} {threads}");
                }
            }
        }
    }
}

#[test]
fn equal_documents_come_in_their_order_and_those_without_vectors_do_not() {
    let mut vectors = TokensInMemory::new(4);
    let rows = tokens(1, 3, 4, 5);
    for n in 0..50 {
        vectors.push(&n.to_string(), if n % 5 == 1 { &[] } else { &rows }).unwrap();
    }
    let cpu = Cpu::new(2).unwrap();
    let all = MaxSim::load(&cpu, &vectors, &GO_ON).unwrap();
    let found = &all.search(&cpu, &[&rows], 9, &GO_ON).unwrap()[0];
    assert_eq!(found.iter().map(|h| h.row).collect::<Vec<_>>(), [0, 2, 3, 4, 5, 7, 8, 9, 10]);
    assert_eq!(all.search(&cpu, &[&rows], 100, &GO_ON).unwrap()[0].len(), 40);
    assert!(all.search(&cpu, &[&rows], 0, &GO_ON).unwrap()[0].is_empty());
    assert!(all.search(&cpu, &[], 9, &GO_ON).unwrap().is_empty());
    let none = MaxSim::load(&cpu, &TokensInMemory::new(4), &GO_ON).unwrap();
    assert!(none.search(&cpu, &[&rows], 9, &GO_ON).unwrap()[0].is_empty());
}

#[test]
fn numbers_of_any_size_are_screened_right() {
    // Beyond bf16, and so small that their copies are zeros: nothing is lost.
    for (size, asked_size) in [(1e30, 1e-20), (1e-30, 1e-5), (3.3e38, 1e-30)] {
        let mut vectors = TokensInMemory::new(8);
        for d in 0..60 {
            let rows: Vec<f32> = tokens(d, 4, 8, 6).iter().map(|v| v * size).collect();
            vectors.push(&d.to_string(), &rows).unwrap();
        }
        let query: Vec<f32> = tokens(99, 3, 8, 6).iter().map(|v| v * asked_size).collect();
        let of = |isa| {
            let cpu = Cpu::with_isa(1, isa).unwrap();
            MaxSim::load(&cpu, &vectors, &GO_ON).unwrap().search(&cpu, &[&query], 5, &GO_ON).unwrap()
        };
        let all: Vec<_> = Isa::ALL.into_iter().filter(|i| i.available() && i.fuses()).map(of).collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{size} {all:?}");
        let want: Vec<u64> = plain(&vectors, &query).iter().take(5).map(|w| w.0).collect();
        assert_eq!(all[0][0].iter().map(|h| h.row).collect::<Vec<_>>(), want);
    }
}

#[test]
fn what_cannot_be_asked_is_refused() {
    let cpu = Cpu::new(1).unwrap();
    let vectors = documents(1, 0, &[3, 4], 6, 5);
    let all = MaxSim::load(&cpu, &vectors, &GO_ON).unwrap();
    let refused = |query: &[f32]| all.search(&cpu, &[&[0.5; 6], query], 3, &GO_ON).unwrap_err().to_string();
    assert!(refused(&[0.5; 8]).contains("query 1: 8 numbers are no vectors of 6 numbers"));
    assert!(refused(&[]).contains("query 1"));
    let mut none = [0.5; 12];
    none[8] = f32::NAN;
    assert!(refused(&none).contains("vector 1 has NaN as number 2"));
    assert!(refused(&[3e38; 6]).contains("beyond the range of f32"));
    let stopped = all.search(&cpu, &[&[0.5; 6]], 3, &|| true);
    assert!(matches!(stopped, Err(SearchError::Stopped)));
    assert!(TokensInMemory::new(3).push("x", &[0.0; 4]).is_err());
    assert!(
        TokensInMemory::new(2).push("x", &[0.0, f32::INFINITY]).unwrap_err().to_string().contains("\"x\"")
    );
}
