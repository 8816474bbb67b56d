//! The compressed index of late interaction: exact over its own vectors where it looks everywhere, near where it does not, the same
//! bytes with any number of threads, whole at any time, and never silent about damage.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tercio_data::TokenVectors;
use tercio_data::multi_vectors::TokensInMemory;
use tercio_engine::Cpu;
use tercio_engine::cpu::late::QueryTokens;
use tercio_search::manifest::{Collection, Manifest};
use tercio_search::max_sim::MaxSim;
use tercio_search::part::merged;
use tercio_search::plaid::{PlaidIndex, PlaidOptions, PlaidReport, PlaidSearch, Rows};
use tercio_search::{Hit, Part, SearchError};

mod tokens_common;
use tokens_common::{documents, lengths, tokens};

const GO_ON: fn() -> bool = || false;

fn collection(count: u64) -> Collection {
    Collection { path: "/passages.tsv".into(), fingerprint: None, count }
}

fn built(cpu: &Cpu, vectors: &dyn TokenVectors, dir: &Path, options: &PlaidOptions) -> PlaidReport {
    let of = collection(vectors.documents());
    PlaidIndex::build(cpu, vectors, of, dir, options, &GO_ON, &mut |_| {}).unwrap()
}

fn grown(cpu: &Cpu, vectors: &dyn TokenVectors, total: u64, dir: &Path) -> Result<PlaidReport, SearchError> {
    PlaidIndex::add(cpu, vectors, collection(total), dir, &GO_ON, &mut |_| {})
}

fn rows(hits: &[Hit]) -> Vec<u64> {
    hits.iter().map(|hit| hit.row).collect()
}

/// MaxSim over the vectors of all rows as the index has them, best first.
fn over_own_vectors(cpu: &Cpu, index: &PlaidIndex, gone: &[u64], query: &[f32], depth: usize) -> Vec<Hit> {
    let asked = QueryTokens::new(query, index.settings().dimension);
    let mut all = Vec::new();
    for row in (0..index.rows()).filter(|row| !gone.contains(row)) {
        let vectors = index.vectors(cpu, row).unwrap();
        if !vectors.is_empty() {
            all.push(Hit { row, score: cpu.max_sim(&asked, &vectors) });
        }
    }
    all.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.row.cmp(&b.row)));
    all.truncate(depth);
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Who looks into all lists and scores all candidates finds what MaxSim over the index's own vectors finds, bit for bit; who looks
    /// into one list still gets as many documents as there are, each once.
    #[test]
    fn all_probes_and_all_candidates_are_max_sim_over_its_vectors(
        count in 0usize..120,
        added in 0usize..30,
        most in 0usize..12,
        dimension in 1usize..20,
        bits in prop::sample::select(vec![1usize, 2, 4, 8]),
        centroids in 0usize..40,
        depth in 0usize..40,
        seed in 0u64..1000,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let cpu = Cpu::new(2).unwrap();
        let vectors = documents(seed, 0, &lengths(seed, count, most), dimension, 9);
        built(&cpu, &vectors, dir.path(), &PlaidOptions { bits, centroids, seed, ..PlaidOptions::default() });
        let more = documents(seed, count, &lengths(seed + 1, added, most), dimension, 9);
        grown(&cpu, &more, (count + added) as u64, dir.path()).unwrap();
        let gone: Vec<u64> = (0..(count + added) as u64).filter(|row| row % 7 == 3).collect();
        let ids: Vec<String> = gone.iter().map(|row| format!("d{row}")).collect();
        PlaidIndex::delete(dir.path(), &ids).unwrap();
        let index = PlaidIndex::open(dir.path()).unwrap();
        prop_assert_eq!(index.len() as usize, count + added - gone.len());
        let asked: Vec<Vec<f32>> = (0..3).map(|q| tokens(seed + 50 + q, 1 + 20 * q as usize, dimension, 9)).collect();
        let queries: Vec<&[f32]> = asked.iter().map(Vec::as_slice).collect();
        let want: Vec<Vec<Hit>> = queries.iter().map(|q| over_own_vectors(&cpu, &index, &gone, q, depth)).collect();
        let how = PlaidSearch { depth, probes: usize::MAX, candidates: usize::MAX, only: None };
        prop_assert_eq!(&index.search(&cpu, &queries, how, &GO_ON).unwrap(), &want);
        // All lists without the shortcut for few documents.
        let how = PlaidSearch { probes: usize::MAX, candidates: index.len().saturating_sub(1) as usize, ..how };
        let found = index.search(&cpu, &queries, how, &GO_ON).unwrap();
        prop_assert!(found.iter().zip(&want).all(|(found, want)| found.len() == want.len()));
        let with_vectors = over_own_vectors(&cpu, &index, &gone, queries[0], usize::MAX).len();
        // None: as many as are scored where nothing is said.
        if how.candidates == 0 || how.candidates.max(depth) >= with_vectors {
            prop_assert_eq!(&found, &want, "no document but those without vectors is left out");
        }
        let how = PlaidSearch { depth, probes: 1, candidates: 1, only: None };
        let want = index.search(&cpu, &queries, how, &GO_ON).unwrap();
        let parts: Vec<PlaidIndex> =
            (0..3).map(|n| PlaidIndex::open(dir.path()).unwrap().only(Part::of(n, 3))).collect();
        let together = |found: Vec<Vec<Vec<Hit>>>, kept: usize| -> Vec<Vec<Hit>> {
            (0..3).map(|q| merged(found.iter().map(|f| f[q].clone()), kept)).collect()
        };
        let own = parts.iter().map(|p| p.candidates(&cpu, &queries, how, &GO_ON).unwrap()).collect();
        let all = together(own, how.kept());
        let own = parts.iter().map(|p| p.scored(&cpu, &queries, &all, depth, &GO_ON).unwrap()).collect();
        prop_assert_eq!(&together(own, depth), &want);
        for (found, query) in index.search(&cpu, &queries, how, &GO_ON).unwrap().iter().zip(&queries) {
            let own = over_own_vectors(&cpu, &index, &gone, query, usize::MAX);
            prop_assert_eq!(found.len(), depth.min(own.len()));
            // Each once, in order, with the score that it has.
            prop_assert!(found.windows(2).all(|p| p[0].score > p[1].score || (p[0].score == p[1].score && p[0].row < p[1].row)));
            prop_assert!(found.iter().all(|hit| own.contains(hit)));
        }
    }
}

#[test]
fn the_files_are_the_same_bytes_with_any_number_of_threads() {
    let vectors = documents(3, 0, &lengths(3, 700, 60), 24, 60);
    let more = documents(3, 700, &lengths(4, 90, 60), 24, 60);
    let of = |threads: usize| -> Vec<(String, String)> {
        let dir = tempfile::tempdir().unwrap();
        let cpu = Cpu::new(threads).unwrap();
        built(&cpu, &vectors, dir.path(), &PlaidOptions::default());
        let report = grown(&cpu, &more, 790, dir.path()).unwrap();
        report.manifest.verify(dir.path(), &GO_ON).unwrap();
        report.manifest.files.into_iter().map(|f| (f.name, f.sha256)).collect()
    };
    let one = of(1);
    assert_eq!(one.len(), 2 + 5 + 5);
    assert_eq!(of(2), one);
    assert_eq!(of(5), one);
}

#[test]
fn few_probes_find_most_of_what_an_exact_search_finds_and_more_bits_more() {
    let vectors = documents(5, 0, &lengths(5, 2000, 40), 32, 300);
    let cpu = Cpu::new(2).unwrap();
    let exact = MaxSim::load(&cpu, &vectors, &GO_ON).unwrap();
    let asked: Vec<Vec<f32>> = (0..20).map(|q| tokens(900 + q, 16, 32, 300)).collect();
    let queries: Vec<&[f32]> = asked.iter().map(Vec::as_slice).collect();
    let want = exact.search(&cpu, &queries, 10, &GO_ON).unwrap();
    let mut before = 0.0;
    for (bits, least) in [(1, 0.5), (2, 0.7), (4, 0.9), (8, 0.95)] {
        let dir = tempfile::tempdir().unwrap();
        let report = built(&cpu, &vectors, dir.path(), &PlaidOptions { bits, ..PlaidOptions::default() });
        assert!(report.warnings.is_empty() && report.settings.unit, "{:?}", report.warnings);
        let index = PlaidIndex::open(dir.path()).unwrap();
        let how = PlaidSearch { depth: 10, ..PlaidSearch::default() };
        let found = index.search(&cpu, &queries, how, &GO_ON).unwrap();
        let both = |(found, want): (&Vec<Hit>, &Vec<Hit>)| {
            want.iter().filter(|w| rows(found).contains(&w.row)).count()
        };
        let recall = found.iter().zip(&want).map(both).sum::<usize>() as f64 / 200.0;
        assert!(recall >= least && recall >= before - 0.02, "{bits} bits: {recall}");
        before = recall;
        // One by one: the same.
        for (query, found) in queries.iter().zip(&found) {
            assert_eq!(&index.search(&cpu, &[query], how, &GO_ON).unwrap()[0], found);
        }
    }
}

#[test]
fn deleted_documents_are_not_found_and_all_may_be_deleted_and_others_added() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(2).unwrap();
    let vectors = documents(1, 0, &[4; 30], 8, 10);
    built(&cpu, &vectors, dir.path(), &PlaidOptions::default());
    let query = tokens(77, 5, 8, 10);
    let how = PlaidSearch { depth: 50, ..PlaidSearch::default() };
    let found = |index: &PlaidIndex| rows(&index.search(&cpu, &[&query], how, &GO_ON).unwrap()[0]);
    let open = || PlaidIndex::open(dir.path()).unwrap();
    let first = open();
    let best = found(&first)[0];
    PlaidIndex::delete(dir.path(), &[format!("d{best}")]).unwrap();
    let second = open();
    assert!(found(&second).len() == 29 && !found(&second).contains(&best));
    assert_eq!((second.len(), second.rows()), (29, 30));
    // Who had it open still has its version, whose files need no name.
    assert_eq!(found(&first).len(), 30);

    // Unknown ids, and those that were deleted before: an error that names them, and nothing changes.
    let error =
        PlaidIndex::delete(dir.path(), &["d1".to_owned(), "nobody".into(), format!("d{best}")]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("found 2 that") && text.contains("nobody") && text.contains("nothing"), "{text}");
    assert_eq!(open().len(), 29);
    assert_eq!(PlaidIndex::delete::<String>(dir.path(), &[]).unwrap().warnings.len(), 1);

    let rest: Vec<String> = (0..30).filter(|row| *row != best).map(|row| format!("d{row}")).collect();
    PlaidIndex::delete(dir.path(), &rest).unwrap();
    let empty = open();
    assert!(empty.is_empty() && found(&empty).is_empty());
    // The same ids may come again.
    let again = documents(1, 0, &[4; 10], 8, 10);
    grown(&cpu, &again, 40, dir.path()).unwrap();
    let last = open();
    assert_eq!((last.len(), found(&last).len()), (10, 10));
    assert!(found(&last).iter().all(|row| *row >= 30));
    assert_eq!(last.ids().unwrap().row("d3"), Some(33));
    // Twice they may not.
    let error = grown(&cpu, &documents(1, 5, &[4; 2], 8, 10), 42, dir.path()).unwrap_err().to_string();
    assert!(error.contains("\"d5\"") && error.contains("delete it there first"), "{error}");
    let mut twice = TokensInMemory::new(8);
    twice.push("new", &query).unwrap();
    twice.push("new", &query).unwrap();
    let error = grown(&cpu, &twice, 42, dir.path()).unwrap_err().to_string();
    assert!(error.contains("\"new\"") && error.contains("same id"), "{error}");
    let left: Vec<_> = open().manifest().files.iter().map(|f| f.name.clone()).collect();
    assert!(left.iter().filter(|name| name.ends_with("-deleted")).count() == 1, "{left:?}");
}

#[test]
fn a_filter_finds_its_rows_only_and_an_empty_one_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(2).unwrap();
    let vectors = documents(1, 0, &lengths(8, 1500, 9), 8, 30);
    built(&cpu, &vectors, dir.path(), &PlaidOptions::default());
    PlaidIndex::delete(dir.path(), &["d3", "d4"]).unwrap();
    let index = PlaidIndex::open(dir.path()).unwrap();
    let query = tokens(5, 7, 8, 30);
    let search = |only: &Rows, candidates: usize| {
        let how = PlaidSearch { depth: 12, candidates, only: Some(only), ..PlaidSearch::default() };
        index.search(&cpu, &[&query], how, &GO_ON).unwrap().remove(0)
    };
    let ids = index.ids().unwrap();
    assert!(search(&Rows::default(), 0).is_empty());
    let (none, unknown) = ids.rows(&["x", "y", "d3"]);
    assert!(none.is_empty() && unknown == ["x", "y", "d3"]);
    assert!(search(&none, 0).is_empty());
    let wanted: Vec<String> = (0..1500).step_by(3).map(|d| format!("d{d}")).collect();
    let (only, unknown) = ids.rows(&wanted);
    assert!(unknown == ["d3"] && only.len() == 499);
    let all = over_own_vectors(&cpu, &index, &[3, 4], &query, usize::MAX);
    let want: Vec<Hit> = all.into_iter().filter(|hit| only.has(hit.row as u32)).take(12).collect();
    // All of the filter are scored, or those of its lists.
    assert_eq!(search(&only, 0), want);
    let some = search(&only, 100);
    assert!(some.len() == 12 && some.iter().all(|hit| only.has(hit.row as u32)));
    // Rows of no document are none.
    assert!(search(&Rows::of([1500, 1_000_000]), 0).is_empty());
}

#[test]
fn documents_of_one_vector_of_none_and_equal_ones() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(2).unwrap();
    let mut vectors = TokensInMemory::new(4);
    let row = tokens(1, 1, 4, 5);
    for n in 0..40 {
        vectors.push(&format!("d{n}"), if n % 4 == 0 { &[] } else { &row }).unwrap();
    }
    built(&cpu, &vectors, dir.path(), &PlaidOptions::default());
    let index = PlaidIndex::open(dir.path()).unwrap();
    let how = PlaidSearch { depth: 6, probes: 1, candidates: 6, only: None };
    let found = index.search(&cpu, &[&row], how, &GO_ON).unwrap().remove(0);
    assert_eq!(rows(&found), [1, 2, 3, 5, 6, 7]);
    assert!((found[0].score - 1.0).abs() < 1e-6);
    assert_eq!(index.search(&cpu, &[&row], PlaidSearch { depth: 100, ..how }, &GO_ON).unwrap()[0].len(), 30);
}

#[test]
fn an_index_without_documents_or_vectors_learns_from_the_first_that_come() {
    let cpu = Cpu::new(2).unwrap();
    let query = tokens(5, 3, 16, 20);
    let how = PlaidSearch { depth: 10, ..PlaidSearch::default() };
    for empty in [0, 5] {
        let dir = tempfile::tempdir().unwrap();
        built(&cpu, &documents(0, 0, &vec![0; empty], 16, 3), dir.path(), &PlaidOptions::default());
        let none = PlaidIndex::open(dir.path()).unwrap();
        assert!(none.search(&cpu, &[&query], how, &GO_ON).unwrap()[0].is_empty());
        let vectors = documents(2, empty, &[9; 200], 16, 20);
        let report = grown(&cpu, &vectors, 200 + empty as u64, dir.path()).unwrap();
        assert!(report.warnings.is_empty() && report.settings.centroids == 512, "{:?}", report.warnings);
        let other = tempfile::tempdir().unwrap();
        let alone = built(&cpu, &vectors, other.path(), &PlaidOptions::default());
        assert_eq!(report.settings.distance, alone.settings.distance);
        let open = |dir: &Path| {
            PlaidIndex::open(dir).unwrap().search(&cpu, &[&query], how, &GO_ON).unwrap().remove(0)
        };
        let moved: Vec<Hit> =
            open(other.path()).iter().map(|h| Hit { row: h.row + empty as u64, ..*h }).collect();
        assert_eq!(open(dir.path()), moved);
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(1).unwrap();
    let vectors = documents(1, 0, &[4; 30], 8, 10);
    let build = |options: &PlaidOptions, count: u64| {
        let of = collection(count);
        PlaidIndex::build(&cpu, &vectors, of, dir.path(), options, &GO_ON, &mut |_| {})
            .map_err(|e| e.to_string())
    };
    let usual = PlaidOptions::default();
    assert!(build(&PlaidOptions { bits: 3, ..usual.clone() }, 30).unwrap_err().contains("1, 2, 4 or 8"));
    assert!(build(&PlaidOptions { centroids: 1 << 17, ..usual.clone() }, 30).unwrap_err().contains("65536"));
    assert!(build(&usual, 31).unwrap_err().contains("31 passages"));
    assert!(!dir.path().join("manifest.json").exists());
    let warned = build(&PlaidOptions { centroids: 500, ..usual }, 30).unwrap().warnings;
    assert!(warned[0].contains("500 centroids were asked for, 120 vectors give 120"), "{warned:?}");
    let index = PlaidIndex::open(dir.path()).unwrap();
    let how = PlaidSearch { depth: 3, ..PlaidSearch::default() };
    let refused = |query: &[f32]| index.search(&cpu, &[query], how, &GO_ON).unwrap_err().to_string();
    assert!(refused(&[0.1; 12]).contains("no vectors of 8 numbers") && refused(&[]).contains("query 0"));
    let mut none = [0.1; 8];
    none[3] = f32::NEG_INFINITY;
    assert!(refused(&none).contains("-inf as number 3"));
    let stopped = index.search(&cpu, &[&[0.1; 8]], how, &|| true);
    assert!(matches!(stopped, Err(SearchError::Stopped)));
    let error = grown(&cpu, &documents(1, 30, &[4], 9, 10), 31, dir.path()).unwrap_err().to_string();
    assert!(error.contains("9 numbers") && error.contains("8 numbers"), "{error}");
    let error = grown(&cpu, &documents(1, 30, &[4], 8, 10), 33, dir.path()).unwrap_err().to_string();
    assert!(error.contains("33 passages"), "{error}");
    // Vectors of another kind lie far from the centroids: that is said.
    let report = grown(&cpu, &documents(9, 30, &[4; 50], 8, 1 << 40), 80, dir.path()).unwrap();
    assert!(report.warnings.iter().any(|w| w.contains("build the index again")), "{:?}", report.warnings);
    assert!(index.vectors(&cpu, 30).is_err());
    let nowhere = dir.path().join("nowhere");
    assert!(PlaidIndex::open(&nowhere).is_err());
    let error = PlaidIndex::delete(&nowhere, &["d1"]).unwrap_err().to_string();
    assert!(error.contains("to delete from") && !nowhere.exists(), "{error}");
}

#[test]
fn a_build_that_is_stopped_leaves_the_index_that_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(1).unwrap();
    built(&cpu, &documents(1, 0, &[4; 30], 8, 10), dir.path(), &PlaidOptions::default());
    let files = || -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let before = files();
    let more = documents(1, 30, &[4; 30], 8, 10);
    let stopped = PlaidIndex::add(&cpu, &more, collection(60), dir.path(), &|| true, &mut |_| {});
    assert!(matches!(stopped, Err(SearchError::Stopped)));
    let of = collection(30);
    let stopped =
        PlaidIndex::build(&cpu, &more, of, dir.path(), &PlaidOptions::default(), &|| true, &mut |_| {});
    assert!(matches!(stopped, Err(SearchError::Stopped)));
    assert_eq!(files(), before);
    assert_eq!(PlaidIndex::open(dir.path()).unwrap().len(), 30);
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(1).unwrap();
    built(&cpu, &documents(1, 0, &[4; 30], 8, 10), dir.path(), &PlaidOptions::default());
    PlaidIndex::delete(dir.path(), &["d7"]).unwrap();
    let manifest = Manifest::read(dir.path()).unwrap();
    assert_eq!(manifest.files.len(), 8);
    for file in &manifest.files {
        let path = dir.path().join(&file.name);
        let whole = fs::read(&path).unwrap();
        let opened = || PlaidIndex::open(dir.path()).map(|_| ()).map_err(|e| e.to_string());
        // Shorter, longer, gone: found as it is opened.
        for bytes in [&whole[..whole.len() - 1], &[&whole[..], b"x"].concat(), b""] {
            fs::write(&path, bytes).unwrap();
            let error = opened().unwrap_err();
            assert!(error.contains(&file.name), "{error}");
        }
        fs::remove_file(&path).unwrap();
        assert!(opened().unwrap_err().contains(&file.name));
        // Other bytes: found as it is opened where they cannot be, by the checksums in any case.
        let mut other = whole.clone();
        other.iter_mut().for_each(|b| *b = 0xff);
        fs::write(&path, &other).unwrap();
        if !["-residuals", "-ids"].iter().any(|part| file.name.ends_with(part)) {
            let error = opened().unwrap_err();
            assert!(error.contains(&file.name), "{error}");
        }
        if file.name.ends_with("-ids") {
            let ids = PlaidIndex::open(dir.path()).unwrap().ids().err().unwrap().to_string();
            assert!(ids.contains(&file.name), "{ids}");
        }
        let mut other = whole.clone();
        other[whole.len() / 2] ^= 1;
        fs::write(&path, &other).unwrap();
        let error = manifest.verify(dir.path(), &GO_ON).unwrap_err().to_string();
        assert!(error.contains(&file.name) && error.contains("damaged"), "{error}");
        fs::write(&path, &whole).unwrap();
        manifest.verify(dir.path(), &GO_ON).unwrap();
        opened().unwrap();
    }
    // A manifest that contradicts itself.
    let text = fs::read_to_string(dir.path().join("manifest.json")).unwrap();
    for (from, to, word) in [
        ("\"dimension\": 8", "\"dimension\": 0", "centroids of 0 numbers"),
        ("\"bits\": 4", "\"bits\": 5", "1, 2, 4 or 8"),
        ("\"documents\": 30", "\"documents\": 31", "30 passages, but 31 documents"),
        ("\"tokens\": 120", "\"tokens\": 119", "expected lengths that sum to 119, found 120"),
        ("\"deleted\": 1", "\"deleted\": 2", "expected 2 deleted rows, found 1"),
        ("\"kind\": \"plaid\"", "\"kind\": \"flat\"", "found one of kind flat"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(dir.path().join("manifest.json"), text.replace(from, to)).unwrap();
        let error = PlaidIndex::open(dir.path()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(word), "{to}: {error}");
    }
}

#[test]
fn who_searches_while_others_add_and_delete_sees_one_version_or_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(1).unwrap();
    // Every document is the same, so that a search that asks for all tells how many there are.
    let row = tokens(1, 2, 8, 3);
    let some = |first: usize, count: usize| {
        let mut vectors = TokensInMemory::new(8);
        (first..first + count).for_each(|n| vectors.push(&format!("d{n}"), &row).unwrap());
        vectors
    };
    built(&cpu, &some(0, 10), dir.path(), &PlaidOptions::default());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut seen, mut searches) = (std::collections::BTreeSet::new(), 0);
            let cpu = Cpu::new(1).unwrap();
            while !done.load(std::sync::atomic::Ordering::Relaxed) || searches == 0 {
                let index = PlaidIndex::open(dir.path()).unwrap();
                let how = PlaidSearch { depth: 1000, ..PlaidSearch::default() };
                let found = index.search(&cpu, &[&row], how, &GO_ON).unwrap().remove(0);
                assert_eq!(found.len() as u64, index.len());
                assert_eq!(index.rows(), index.manifest().collection.count);
                seen.insert(found.len());
                searches += 1;
            }
            (seen, searches)
        });
        for round in 0..12 {
            grown(&cpu, &some(10 + round * 10, 10), 20 + round as u64 * 10, dir.path()).unwrap();
            let ids: Vec<String> = (0..5).map(|n| format!("d{}", round * 10 + n)).collect();
            PlaidIndex::delete(dir.path(), &ids).unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let (seen, searches) = reader.join().unwrap();
        assert!(searches > 0 && seen.iter().all(|n| n % 5 == 0), "{seen:?}");
    });
    assert_eq!(PlaidIndex::open(dir.path()).unwrap().len(), 130 - 60);
}
