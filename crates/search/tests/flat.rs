//! Exact search: what it finds, whatever the form of the vectors and of the question, and what it refuses.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tercio_data::vectors::VectorDtype;
use tercio_engine::Cpu;
use tercio_engine::cpu::{Isa, StoredRows};
use tercio_search::flat::{FlatIndex, Metric, read_all, same_model};
use tercio_search::part::merged;
use tercio_search::{Hit, Part};

mod flat_common;
use flat_common::{clustered, number, settings, write};

const GO_ON: &dyn Fn() -> bool = &|| false;

fn on_disk(cpu: &Cpu, dir: &Path, metric: Metric, queries: &[f32], depth: usize) -> Vec<Vec<Hit>> {
    let index = FlatIndex::open(dir, metric).unwrap();
    index.search(cpu, queries, depth, GO_ON, &mut |_| {}).unwrap()
}

fn in_memory(cpu: &Cpu, dir: &Path, metric: Metric, queries: &[f32], depth: usize) -> Vec<Vec<Hit>> {
    let resident = FlatIndex::open(dir, metric).unwrap().load(cpu, &|| false).unwrap();
    resident.search(cpu, queries, depth, GO_ON).unwrap()
}

/// By the definition: all scores by the kernel that scores are defined by, then sorted.
fn plainly(
    cpu: &Cpu,
    rows: &[f32],
    dimension: usize,
    metric: Metric,
    queries: &[f32],
    depth: usize,
) -> Vec<Vec<Hit>> {
    let dot = |a: &[f32], b: &[f32]| {
        let bytes: Vec<[u8; 4]> = b.iter().map(|v| v.to_le_bytes()).collect();
        let mut out = [0.0];
        cpu.dots(a, StoredRows::F32(&bytes), &mut out);
        out[0]
    };
    let norm = |x: &[f32]| dot(x, x).sqrt();
    let score = |q: &[f32], x: &[f32]| match metric {
        Metric::Inner => dot(q, x),
        Metric::Cosine if norm(q) < 1e-15 || norm(x) < 1e-15 => 0.0,
        Metric::Cosine => dot(q, x) / norm(q) / norm(x),
    };
    let found = queries.chunks(dimension).map(|q| {
        let scored =
            rows.chunks(dimension).enumerate().map(|(r, x)| Hit { row: r as u64, score: score(q, x) });
        let mut hits: Vec<Hit> = scored.collect();
        hits.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.row.cmp(&b.row)));
        hits.truncate(depth);
        hits
    });
    found.collect()
}

/// Zeros of either sign are one number, but not one text.
fn bits(found: &[Vec<Hit>]) -> Vec<Vec<(u64, u32)>> {
    found.iter().map(|hits| hits.iter().map(|h| (h.row, (h.score + 0.0).to_bits())).collect()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any sizes, with duplicates, zero vectors and depths beyond the number of rows: disk and memory, one query and many, one thread and
    /// three find what the definition says, bit for bit.
    #[test]
    fn the_best_rows_come_in_order_however_they_are_asked_for(
        count in 0usize..700,
        dimension in 1usize..40,
        queries in 1usize..40,
        depth in 0usize..60,
        per_shard in 1u64..900,
        cosine in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let dir = tempfile::tempdir().unwrap();
        // Numbers that f16 and bf16 hold, so that all three are one set.
        let value = |key: &[u64]| (number(key) * 8.0).round() / 8.0;
        let mut rows: Vec<f32> = (0..count * dimension).map(|i| value(&[seed, i as u64])).collect();
        for (r, row) in rows.chunks_mut(dimension).enumerate() {
            match r % 11 {
                3 => row.fill(0.0),
                5 | 6 => row.iter_mut().enumerate().for_each(|(d, v)| *v = value(&[seed, d as u64, 99])),
                _ => {}
            }
        }
        let mut asked: Vec<f32> = (0..queries * dimension).map(|i| value(&[seed, i as u64, 1])).collect();
        if queries > 5 {
            asked[5 * dimension..6 * dimension].fill(0.0);
        }
        let metric = if cosine { Metric::Cosine } else { Metric::Inner };
        let cpus = [Cpu::new(1).unwrap(), Cpu::new(3).unwrap()];
        let want = bits(&plainly(&cpus[0], &rows, dimension, metric, &asked, depth));
        for dtype in [VectorDtype::F32, VectorDtype::F16, VectorDtype::Bf16] {
            let place = dir.path().join(dtype.name());
            write(&place, &rows, settings(count, dimension, dtype, per_shard));
            for cpu in &cpus {
                prop_assert_eq!(&bits(&on_disk(cpu, &place, metric, &asked, depth)), &want);
                prop_assert_eq!(&bits(&in_memory(cpu, &place, metric, &asked, depth)), &want);
            }
            let last = asked.chunks(dimension).next_back().unwrap();
            let alone = bits(&on_disk(&cpus[1], &place, metric, last, depth));
            prop_assert_eq!(&alone[0], &want[queries - 1]);
        }
    }
}

/// Enough rows for several blocks, pieces and steps, and enough queries for several groups, with every instruction set.
#[test]
fn large_sets_are_cut_without_loss() {
    let (count, dimension, depth) = (20_000, 24, 50);
    let dir = tempfile::tempdir().unwrap();
    let rows = clustered(1, count, dimension, 40);
    write(dir.path(), &rows, settings(count, dimension, VectorDtype::F32, 9000));
    let asked = clustered(2, 70, dimension, 40);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let cpu = Cpu::with_isa(2, isa).unwrap();
        for metric in [Metric::Inner, Metric::Cosine] {
            let want = bits(&plainly(&cpu, &rows, dimension, metric, &asked, depth));
            assert_eq!(bits(&on_disk(&cpu, dir.path(), metric, &asked, depth)), want, "{isa:?} {metric:?}");
            assert_eq!(bits(&in_memory(&cpu, dir.path(), metric, &asked, depth)), want, "{isa:?} {metric:?}");
            let one = &asked[..dimension];
            assert_eq!(
                bits(&in_memory(&cpu, dir.path(), metric, one, depth)),
                want[..1],
                "{isa:?} {metric:?}"
            );
        }
    }
}

#[test]
fn parts_searched_apart_make_one_answer() {
    let (count, dimension, depth) = (500, 8, 20);
    let dir = tempfile::tempdir().unwrap();
    let rows = clustered(3, count, dimension, 9);
    let vectors = write(dir.path(), &rows, settings(count, dimension, VectorDtype::F16, 60));
    let cpu = Cpu::new(2).unwrap();
    let asked = clustered(4, 6, dimension, 9);
    let whole = on_disk(&cpu, dir.path(), Metric::Inner, &asked, depth);
    let index = FlatIndex::open(dir.path(), Metric::Inner).unwrap();
    let in_memory_of_all = index.load(&cpu, &|| false).unwrap().bytes();
    // Within a shard, over the borders of shards, more parts than rows.
    for of in [1, 2, 7, 600] {
        let part = |number| {
            let index = FlatIndex::open(dir.path(), Metric::Inner).unwrap().only(Part::of(number, of));
            let found = index.search(&cpu, &asked, depth, GO_ON, &mut |_| {}).unwrap();
            let own = Part::of(number, of).rows(count as u64);
            assert!(found.iter().flatten().all(|hit| own.contains(&hit.row)));
            let kept = index.load(&cpu, &|| false).unwrap();
            assert!(
                kept.bytes() * (of.min(8) as u64).div_ceil(2) <= in_memory_of_all,
                "{number} of {of}: {}",
                kept.bytes()
            );
            assert_eq!(kept.search(&cpu, &asked, depth, GO_ON).unwrap(), found);
            found
        };
        let parts: Vec<_> = (0..of).map(part).collect();
        for (q, whole) in whole.iter().enumerate() {
            assert_eq!(&merged(parts.iter().map(|p| p[q].clone()), depth), whole, "{of} parts");
        }
    }
    let all = read_all(&vectors).unwrap();
    assert!(all.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1e-3) && all.len() == rows.len());
}

#[test]
fn more_shards_than_are_kept_open_are_searched() {
    let dir = tempfile::tempdir().unwrap();
    let (count, dimension) = (211, 5);
    let rows = clustered(21, count, dimension, 4);
    let (few, many) = (dir.path().join("few"), dir.path().join("many"));
    write(&few, &rows, settings(count, dimension, VectorDtype::F32, 1000));
    assert_eq!(write(&many, &rows, settings(count, dimension, VectorDtype::F32, 2)).shards(), 106);
    let cpu = Cpu::new(2).unwrap();
    for queries in [1, 6] {
        let asked = clustered(22, queries, dimension, 4);
        let want = on_disk(&cpu, &few, Metric::Cosine, &asked, 20);
        assert_eq!(bits(&on_disk(&cpu, &many, Metric::Cosine, &asked, 20)), bits(&want));
        assert_eq!(bits(&in_memory(&cpu, &many, Metric::Cosine, &asked, 20)), bits(&want));
    }
    // A shard that is gone is named at once.
    fs::remove_file(many.join("shard-00105.vectors")).unwrap();
    let index = FlatIndex::open(&many, Metric::Inner);
    let asked = clustered(22, 1, dimension, 4);
    let error = index.and_then(|i| i.search(&cpu, &asked, 3, GO_ON, &mut |_| {})).unwrap_err().to_string();
    assert!(error.contains("shard-00105"), "{error}");
}

#[test]
fn numbers_that_are_none_are_refused_with_their_row() {
    let dir = tempfile::tempdir().unwrap();
    let (count, dimension) = (40, 4);
    let rows = clustered(5, count, dimension, 3);
    let cpu = Cpu::new(2).unwrap();
    for (dtype, nan) in [
        (VectorDtype::F32, f32::NAN.to_le_bytes().to_vec()),
        (VectorDtype::F16, vec![0, 0x7c]),
        (VectorDtype::Bf16, vec![0x80, 0xff]),
    ] {
        let place = dir.path().join(dtype.name());
        write(&place, &rows, settings(count, dimension, dtype, 100));
        let file = place.join("shard-00000.vectors");
        let mut bytes = fs::read(&file).unwrap();
        let at = (17 * dimension + 2) * nan.len();
        bytes[at..at + nan.len()].copy_from_slice(&nan);
        fs::write(&file, bytes).unwrap();
        for queries in [1, 9] {
            let asked = clustered(6, queries, dimension, 3);
            let index = FlatIndex::open(&place, Metric::Inner).unwrap();
            let error = index.search(&cpu, &asked, 3, GO_ON, &mut |_| {}).unwrap_err().to_string();
            assert!(error.contains("row 17 has") && error.contains("number 2"), "{error}");
        }
        let loaded = FlatIndex::open(&place, Metric::Inner).unwrap().load(&cpu, &|| false);
        let error = loaded.err().unwrap().to_string();
        assert!(error.contains("row 17 has"), "{error}");
    }
    let place = dir.path().join("f32 again");
    write(&place, &rows, settings(count, dimension, VectorDtype::F32, 100));
    let index = FlatIndex::open(&place, Metric::Inner).unwrap();
    let refused =
        |queries: &[f32]| index.search(&cpu, queries, 3, GO_ON, &mut |_| {}).unwrap_err().to_string();
    let error = refused(&[0.0, 0.0, 0.0, 0.0, 1.0, f32::INFINITY, 0.0, 0.0]);
    assert!(error.contains("query 1 has inf as number 1"), "{error}");
    assert!(refused(&[0.0; 5]).contains("queries of 4 numbers"));
    assert!(refused(&[3e38; 4]).contains("beyond the range of f32"));
    // A score beyond the range is an error with any number of queries, on disk and in memory, though its row be the worst.
    let place = dir.path().join("far below");
    let mut rows = vec![1.0; count * dimension];
    rows[31 * dimension..32 * dimension].fill(-2e38);
    write(&place, &rows, settings(count, dimension, VectorDtype::F32, 100));
    let index = || FlatIndex::open(&place, Metric::Inner).unwrap();
    let loaded = index().load(&cpu, &|| false).unwrap();
    for queries in [1, 3, 4, 15] {
        let asked = vec![2.0; queries * dimension];
        let found = index().search(&cpu, &asked, 3, GO_ON, &mut |_| {}).unwrap_err().to_string();
        assert!(found.contains("row 31 has a score or a norm beyond"), "{queries}: {found}");
        assert_eq!(loaded.search(&cpu, &asked, 3, GO_ON).unwrap_err().to_string(), found);
    }
}

#[test]
fn empty_sets_and_no_results_are_answers() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(2).unwrap();
    write(dir.path(), &[], settings(0, 3, VectorDtype::F32, 5));
    for found in [
        on_disk(&cpu, dir.path(), Metric::Inner, &[1.0; 6], 4),
        in_memory(&cpu, dir.path(), Metric::Inner, &[1.0; 6], usize::MAX),
    ] {
        assert_eq!(found, [vec![], vec![]]);
    }
    assert!(on_disk(&cpu, dir.path(), Metric::Cosine, &[], 4).is_empty());
    let one = dir.path().join("one");
    write(&one, &[1.0, -2.0, 0.5], settings(1, 3, VectorDtype::F32, 5));
    let want = Hit { row: 0, score: -0.5 };
    assert_eq!(on_disk(&cpu, &one, Metric::Inner, &[1.0, 1.0, 1.0], 9), [vec![want]]);
}

#[test]
fn vectors_of_another_model_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, dimension: usize, print: Option<&str>| {
        let rows = clustered(7, 5, dimension, 2);
        let mut settings = settings(5, dimension, VectorDtype::F32, 5);
        settings.model_fingerprint = print.map(str::to_owned);
        settings.model = name.into();
        write(&dir.path().join(name), &rows, settings)
    };
    let (a, same) = (of("a", 4, Some("aa")), of("same", 4, Some("aa")));
    let (other, imported, wide) =
        (of("other", 4, Some("bb")), of("imported", 4, None), of("wide", 5, Some("aa")));
    assert_eq!(same_model(&a, &same).unwrap(), None);
    assert!(same_model(&a, &imported).unwrap().unwrap().contains("taken for granted"));
    for different in [&other, &wide] {
        let error = same_model(&a, different).unwrap_err().to_string();
        assert!(error.contains("embed both with the same model"), "{error}");
    }
}

#[test]
fn a_search_stops_when_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &clustered(8, 30, 4, 2), settings(30, 4, VectorDtype::F32, 10));
    let cpu = Cpu::new(1).unwrap();
    let index = FlatIndex::open(dir.path(), Metric::Inner).unwrap();
    let error = index.search(&cpu, &[0.0; 4], 3, &|| true, &mut |_| {}).unwrap_err();
    assert!(matches!(error, tercio_search::SearchError::Stopped));
}
