//! Fusion of lists against sums by hand; ties, passages that only one list has, runs on disk.

use tercio_data::draw::index;
use tercio_data::retrieval::RunFile;
use tercio_search::fusion::{Method, Normalisation, RRF_K, fuse, fuse_hits, fuse_runs};
use tercio_search::{Hit, SearchError};

fn hits(list: &[(u64, f32)]) -> Vec<Hit> {
    list.iter().map(|&(row, score)| Hit { row, score }).collect()
}

/// By ranks, all lists of the same weight.
fn reciprocal_rank(lists: &[&[Hit]], k: f64, depth: usize) -> Result<Vec<Hit>, SearchError> {
    fuse_hits(lists, &vec![1.0; lists.len()], &Method::ReciprocalRank { k }, depth)
}

/// By scores.
fn weighted(
    lists: &[&[Hit]],
    weights: &[f64],
    normalisation: Normalisation,
    depth: usize,
) -> Result<Vec<Hit>, SearchError> {
    fuse_hits(lists, weights, &Method::Weighted { normalisation }, depth)
}

fn rows(hits: &[Hit]) -> Vec<u64> {
    hits.iter().map(|hit| hit.row).collect()
}

#[test]
fn reciprocal_ranks_add_up() {
    let (a, b) = (hits(&[(5, 9.0), (3, 8.0), (1, 7.0)]), hits(&[(3, 0.5), (8, 0.25)]));
    let fused = reciprocal_rank(&[&a, &b], RRF_K, 10).unwrap();
    // 5: 1/61; 3: 1/62 + 1/61; 1: 1/63; 8: 1/62.
    assert_eq!(rows(&fused), [3, 5, 8, 1]);
    assert_eq!(fused[0].score, (1.0f64 / 62.0 + 1.0 / 61.0) as f32);
    assert_eq!(rows(&reciprocal_rank(&[&a, &b], 60.0, 2).unwrap()), [3, 5]);
    // Passages of the same rank in two lists tie: the earlier row first, whichever list has it.
    let ties = [hits(&[(9, 1.0), (4, 0.5)]), hits(&[(2, 1.0), (7, 0.5)])];
    for order in [[0, 1], [1, 0]] {
        let lists = order.map(|i: usize| ties[i].as_slice());
        assert_eq!(rows(&reciprocal_rank(&lists, 60.0, 10).unwrap()), [2, 9, 4, 7]);
    }
    // One list keeps its order; empty ones change nothing.
    assert_eq!(rows(&reciprocal_rank(&[&[], &a, &[]], 60.0, 10).unwrap()), rows(&a));
    assert_eq!(reciprocal_rank(&[&[]], 60.0, 10).unwrap(), []);
}

#[test]
fn weighted_scores_add_up_and_a_missing_passage_is_the_last() {
    let (a, b) = (hits(&[(1, 10.0), (2, 6.0), (3, 2.0)]), hits(&[(4, 0.75), (2, 0.5), (1, 0.25)]));
    let fused = |weights: [f64; 2], normalisation| weighted(&[&a, &b], &weights, normalisation, 10).unwrap();
    // In [0, 1]: 1: 1 + 0; 2: 0.5 + 0.5; 3: 0 + 0 (not in b); 4: 0 (not in a) + 1.
    assert_eq!(fused([1.0, 1.0], Normalisation::MinMax), hits(&[(1, 1.0), (2, 1.0), (4, 1.0), (3, 0.0)]));
    assert_eq!(fused([1.0, 3.0], Normalisation::MinMax), hits(&[(4, 3.0), (2, 2.0), (1, 1.0), (3, 0.0)]));
    // As they are: 3 gets b's least, 0.25; 4 gets a's, 2.
    assert_eq!(fused([1.0, 4.0], Normalisation::None), hits(&[(1, 11.0), (2, 8.0), (4, 5.0), (3, 3.0)]));
    // Deviations of both lists are 1.2247 times (1, 0, -1).
    let z = fused([1.0, 0.5], Normalisation::Z);
    assert_eq!(rows(&z), [1, 2, 4, 3]);
    let s = 1.5f64.sqrt();
    let expected = [s - 0.5 * s, 0.0, 0.5 * s - s, -1.5 * s];
    assert!(z.iter().zip(expected).all(|(hit, e)| (f64::from(hit.score) - e).abs() < 1e-6), "{z:?}");
    // A list of equal scores still tells which passages it has.
    let flat = hits(&[(8, 3.0), (9, 3.0)]);
    let fused =
        weighted(&[&flat, &hits(&[(7, 1.0), (9, 0.0)])], &[1.0, 0.5], Normalisation::MinMax, 10).unwrap();
    assert_eq!(fused, hits(&[(8, 1.0), (9, 1.0), (7, 0.5)]));
}

#[test]
fn fusing_a_list_with_itself_keeps_its_order() {
    for seed in 0..30 {
        let mut list: Vec<(u64, f64)> =
            (0..40).map(|row| (row, index(&[seed, row], 9).unwrap() as f64)).collect();
        list.sort_by(|a, b| b.1.total_cmp(&a.1));
        let names: Vec<u64> = list.iter().map(|l| l.0).collect();
        for method in [
            Method::ReciprocalRank { k: 0.0 },
            Method::Weighted { normalisation: Normalisation::MinMax },
            Method::Weighted { normalisation: Normalisation::Z },
            Method::Weighted { normalisation: Normalisation::None },
        ] {
            let fused = fuse(&[list.clone(), list.clone()], &[0.25, 2.0], &method, 100).unwrap();
            assert_eq!(fused.iter().map(|f| f.0).collect::<Vec<_>>(), names, "{method:?}");
        }
    }
}

#[test]
fn what_cannot_be_fused_is_refused() {
    let rrf = Method::ReciprocalRank { k: 60.0 };
    let raw = Method::Weighted { normalisation: Normalisation::None };
    let one = vec![(1u64, 1.0)];
    for (lists, weights, method, part) in [
        (vec![], vec![], &rrf, "expected lists"),
        (vec![one.clone()], vec![1.0, 1.0], &rrf, "a weight for each of 1 lists, found 2"),
        (vec![one.clone()], vec![0.0], &rrf, "one of them above 0"),
        (vec![one.clone()], vec![-1.0], &raw, "0 or more"),
        (vec![one.clone()], vec![f64::NAN], &raw, "0 or more"),
        (vec![one.clone()], vec![1.0], &Method::ReciprocalRank { k: -1.0 }, "a k of 0 or more"),
        (vec![one.clone(), vec![(2, f64::NAN)]], vec![1.0, 1.0], &rrf, "list 2: 2 has the score NaN"),
        (vec![vec![(2, 1.0), (2, 0.5)]], vec![1.0], &raw, "list 1: 2 stands there twice"),
    ] {
        let error = fuse(&lists, &weights, method, 10).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let huge = hits(&[(1, f32::MAX)]);
    let error = weighted(&[&huge, &huge], &[1.0, 1.0], Normalisation::None, 10).unwrap_err().to_string();
    assert!(error.contains("too great"), "{error}");
}

#[test]
fn runs_are_fused_by_query() {
    let dir = tempfile::tempdir().unwrap();
    let open = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        RunFile::open(&dir.path().join(name), usize::MAX).unwrap()
    };
    // Tied in the first run: trec_eval's order puts b before a.
    let runs = [
        open("a", "q2 Q0 a 1 1 t\nq2 Q0 b 2 1 t\nq1 Q0 a 1 1 t\n"),
        open("b", "q2 Q0 c 1 5 t\nq3 Q0 z 1 1 t\n"),
    ];
    let fused: Vec<(&str, Vec<&str>)> =
        fuse_runs(&runs, &[1.0, 1.0], &Method::ReciprocalRank { k: 60.0 }, 10)
            .unwrap()
            .map(|query| query.map(|(name, list)| (name, list.into_iter().map(|d| d.0).collect())).unwrap())
            .collect();
    assert_eq!(fused, [("q1", vec!["a"]), ("q2", vec!["b", "c", "a"]), ("q3", vec!["z"])]);
}
