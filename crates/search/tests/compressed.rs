//! The compressed index: exact where it looks everywhere, near where it does not, the same with any number of threads, and never
//! half-written.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use tercio_data::Vectors;
use tercio_data::vectors::VectorDtype;
use tercio_engine::Cpu;
use tercio_engine::cpu::Isa;
use tercio_search::compressed::{CompressedIndex, CompressedOptions, CompressedReport, CompressedSearch};
use tercio_search::flat::{FlatIndex, Metric};
use tercio_search::manifest::{Collection, Manifest};
use tercio_search::part::merged;
use tercio_search::{Hit, Part, SearchError};

mod flat_common;
use flat_common::{clustered, settings, write};

const GO_ON: &dyn Fn() -> bool = &|| false;

fn collection(count: u64) -> Collection {
    Collection { path: "/passages.tsv".into(), fingerprint: None, count }
}

fn built(cpu: &Cpu, vectors: &Vectors, dir: &Path, options: &CompressedOptions) -> CompressedReport {
    CompressedIndex::build(cpu, vectors, collection(vectors.len()), dir, options, GO_ON, &mut |_| {}).unwrap()
}

fn grown(cpu: &Cpu, vectors: &Vectors, total: u64, dir: &Path) -> Result<CompressedReport, SearchError> {
    CompressedIndex::append(cpu, vectors, collection(total), dir, GO_ON, &mut |_| {})
}

fn searched(
    cpu: &Cpu,
    dir: &Path,
    queries: &[f32],
    depth: usize,
    probes: usize,
    rescore: usize,
) -> Vec<Vec<Hit>> {
    let index = CompressedIndex::open(cpu, dir, rescore > 0).unwrap();
    index.search(cpu, queries, CompressedSearch { depth, probes, rescore }, GO_ON).unwrap()
}

fn exact(cpu: &Cpu, dir: &Path, metric: Metric, queries: &[f32], depth: usize) -> Vec<Vec<Hit>> {
    FlatIndex::open(dir, metric).unwrap().search(cpu, queries, depth, GO_ON, &mut |_| {}).unwrap()
}

fn recall(found: &[Vec<Hit>], exact: &[Vec<Hit>]) -> f64 {
    let (mut hits, mut all) = (0, 0);
    for (found, exact) in found.iter().zip(exact) {
        all += exact.len();
        hits += exact.iter().filter(|e| found.iter().any(|f| f.row == e.row)).count();
    }
    hits as f64 / all as f64
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Who looks into all lists and scores all rows again finds what an exact search finds, bit for bit; who looks into one list
    /// still gets as many rows as asked for, each once.
    #[test]
    fn all_lists_and_all_rows_are_an_exact_search(
        count in 0usize..400,
        dimension in 4usize..30,
        lists in 1usize..40,
        depth in 0usize..50,
        clusters in 1u64..20,
        cosine in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (vectors_dir, index_dir) = (dir.path().join("vectors"), dir.path().join("index"));
        let mut rows = clustered(seed, count, dimension, clusters);
        for (r, row) in rows.chunks_mut(dimension).enumerate() {
            match r % 9 {
                2 => row.fill(0.0),
                4 | 5 => row.fill(0.25),
                _ => {}
            }
        }
        let vectors = write(&vectors_dir, &rows, settings(count, dimension, VectorDtype::F16, 70));
        let cpu = Cpu::new(2).unwrap();
        let metric = if cosine { Metric::Cosine } else { Metric::Inner };
        let options = CompressedOptions { metric, lists, code_bytes: 2, rounds: 3, seed, ..Default::default() };
        built(&cpu, &vectors, &index_dir, &options);
        let asked = clustered(seed + 1, 5, dimension, clusters);
        let want = exact(&cpu, &vectors_dir, metric, &asked, depth);
        prop_assert_eq!(&searched(&cpu, &index_dir, &asked, depth, lists, count.max(1)), &want);
        let mut kept = CompressedIndex::open(&cpu, &index_dir, true).unwrap();
        kept.keep_vectors(&cpu).unwrap();
        let how = CompressedSearch { depth, probes: lists, rescore: count.max(1) };
        prop_assert_eq!(&kept.search(&cpu, &asked, how, GO_ON).unwrap(), &want);
        for rescore in [0, 1] {
            let how = CompressedSearch { depth, probes: 1, rescore };
            let parts: Vec<CompressedIndex> = (0..3)
                .map(|n| CompressedIndex::open(&cpu, &index_dir, rescore > 0).unwrap().only(Part::of(n, 3)))
                .collect();
            let together = |found: Vec<Vec<Vec<Hit>>>, kept: usize| -> Vec<Vec<Hit>> {
                (0..5).map(|q| merged(found.iter().map(|f| f[q].clone()), kept)).collect()
            };
            let own = parts.iter().map(|p| p.candidates(&cpu, &asked, how, GO_ON).unwrap()).collect();
            let all = together(own, parts[0].kept(how));
            let own = parts.iter().map(|p| p.rescored(&cpu, &asked, &all, how, GO_ON).unwrap()).collect();
            prop_assert_eq!(&together(own, depth), &searched(&cpu, &index_dir, &asked, depth, 1, rescore));
            for found in searched(&cpu, &index_dir, &asked, depth, 1, rescore) {
                prop_assert_eq!(found.len(), depth.min(count));
                let mut rows: Vec<u64> = found.iter().map(|h| h.row).collect();
                rows.sort_unstable();
                rows.dedup();
                prop_assert_eq!(rows.len(), found.len());
                let ordered = |pair: &[Hit]| {
                    pair[0].score > pair[1].score || (pair[0].score == pair[1].score && pair[0].row < pair[1].row)
                };
                prop_assert!(found.windows(2).all(ordered));
            }
        }
    }
}

#[test]
fn recall_is_high_on_clusters_and_is_what_the_build_says() {
    let (count, dimension) = (6000, 64);
    let dir = tempfile::tempdir().unwrap();
    let (vectors_dir, index_dir) = (dir.path().join("vectors"), dir.path().join("index"));
    let rows = clustered(1, count, dimension, 60);
    let vectors = write(&vectors_dir, &rows, settings(count, dimension, VectorDtype::F32, 2500));
    let cpu = Cpu::new(2).unwrap();
    let asked = clustered(2, 60, dimension, 60);
    let options = CompressedOptions { queries: Some(asked.clone()), ..Default::default() };
    let report = built(&cpu, &vectors, &index_dir, &options);
    assert_eq!((report.settings.lists, report.settings.code_bytes), (154, 8));
    let want = exact(&cpu, &vectors_dir, Metric::Inner, &asked, 100);
    let of = |probes, rescore| recall(&searched(&cpu, &index_dir, &asked, 100, probes, rescore), &want);
    assert!(of(20, 400) > 0.9, "{}", of(20, 400));
    assert!(of(154, 100) < of(154, 800) && of(1, 400) < of(20, 400), "more work must find more");
    assert_eq!(of(154, 6000), 1.0);
    // The estimates themselves are worth something: far better than the share of rows that is asked for.
    assert!(of(154, 0) > 0.3, "{}", of(154, 0));
    let said = report.settings.recall.iter().find(|r| r.depth == 100 && r.probes == 20 && r.rescore == 200);
    let said = said.map(|r| r.recall).expect("measured with an eighth of the lists");
    assert_eq!(said, of(20, 200));
}

#[test]
fn an_index_is_the_same_bytes_with_any_number_of_threads() {
    let (count, dimension) = (3000, 20);
    let dir = tempfile::tempdir().unwrap();
    let rows = clustered(3, count, dimension, 30);
    let vectors =
        write(&dir.path().join("vectors"), &rows, settings(count, dimension, VectorDtype::Bf16, 800));
    let asked = clustered(4, 20, dimension, 30);
    let mut first = None;
    for threads in [1, 2, 5] {
        let cpu = Cpu::new(threads).unwrap();
        let place = dir.path().join(threads.to_string());
        let report = built(&cpu, &vectors, &place, &CompressedOptions::default());
        let found = searched(&cpu, &place, &asked, 30, 0, 60);
        let made = (report.manifest, found, searched(&cpu, &place, &asked, 30, 3, 0));
        assert_eq!(first.get_or_insert_with(|| made.clone()), &made, "{threads} threads");
    }
    // The lists are searched alike by all instruction sets, as they are whole numbers; tables come from one code.
    let (_, found, _) = first.unwrap();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available() && isa.fuses()) {
        let cpu = Cpu::with_isa(1, isa).unwrap();
        let again = searched(&cpu, &dir.path().join("1"), &asked, 30, 0, 60);
        assert!(recall(&again, &found) > 0.99, "{isa:?}");
    }
}

#[test]
fn appended_rows_are_found_like_those_that_were_there() {
    let (count, more, dimension) = (900, 300, 16);
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    let rows = clustered(5, count + more, dimension, 12);
    let (old, new) = rows.split_at(count * dimension);
    let cpu = Cpu::new(2).unwrap();
    let first = write(&of("first"), old, settings(count, dimension, VectorDtype::F32, 400));
    let second = write(&of("second"), new, settings(more, dimension, VectorDtype::F32, 400));
    write(&of("both"), &rows, settings(count + more, dimension, VectorDtype::F32, 400));
    built(&cpu, &first, &of("index"), &CompressedOptions::default());
    let before = Manifest::read(&of("index")).unwrap();
    let report = grown(&cpu, &second, (count + more) as u64, &of("index")).unwrap();
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    assert_eq!((before.version, report.manifest.version), (1, 2));
    let asked = clustered(6, 10, dimension, 12);
    let all = count + more;
    let want = exact(&cpu, &of("both"), Metric::Inner, &asked, 40);
    assert_eq!(searched(&cpu, &of("index"), &asked, 40, usize::MAX, all), want);
    let found = searched(&cpu, &of("index"), &asked, 40, 0, 100);
    assert!(
        found.iter().flatten().any(|h| h.row >= count as u64),
        "new rows are among the best of some query"
    );
    // Two appends make the lists that one makes.
    built(&cpu, &first, &of("again"), &CompressedOptions::default());
    let (head, tail) = new.split_at(100 * dimension);
    let head = write(&of("head"), head, settings(100, dimension, VectorDtype::F32, 400));
    let tail = write(&of("tail"), tail, settings(more - 100, dimension, VectorDtype::F32, 33));
    grown(&cpu, &head, (count + 100) as u64, &of("again")).unwrap();
    grown(&cpu, &tail, all as u64, &of("again")).unwrap();
    let sums = |name: &str| -> Vec<String> {
        Manifest::read(&of(name)).unwrap().files.into_iter().map(|f| f.sha256).collect()
    };
    assert_eq!(sums("index"), sums("again"));
    assert_eq!(searched(&cpu, &of("again"), &asked, 40, usize::MAX, all), want);
}

#[test]
fn only_the_vectors_of_all_new_passages_are_added_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    let cpu = Cpu::new(1).unwrap();
    let rows = clustered(15, 260, 8, 5);
    let first = write(&of("first"), &rows[..200 * 8], settings(200, 8, VectorDtype::F32, 100));
    let second = write(&of("second"), &rows[200 * 8..], settings(60, 8, VectorDtype::F32, 100));
    for count in [199, 201] {
        let options = CompressedOptions::default();
        let made = CompressedIndex::build(
            &cpu,
            &first,
            collection(count),
            &of("index"),
            &options,
            GO_ON,
            &mut |_| {},
        );
        assert!(made.unwrap_err().to_string().contains("200 vectors for"), "{count}");
        assert!(!of("index").exists());
    }
    built(&cpu, &first, &of("index"), &CompressedOptions::default());
    for total in [0, 200, 259, 261, u64::MAX] {
        let error = grown(&cpu, &second, total, &of("index")).unwrap_err().to_string();
        assert!(error.contains("embed the new passages alone"), "{total}: {error}");
    }
    let report = grown(&cpu, &second, 260, &of("index")).unwrap();
    assert_eq!((report.manifest.version, report.manifest.collection.count), (2, 260));
    // Once more, as who was killed behind the commit does: it has them already. With one passage more it is an error.
    let again = grown(&cpu, &second, 260, &of("index")).unwrap();
    assert!(again.warnings[0].contains("nothing to add"), "{:?}", again.warnings);
    assert_eq!(again.manifest, report.manifest);
    assert_eq!(Manifest::read(&of("index")).unwrap(), report.manifest);
    assert!(grown(&cpu, &second, 261, &of("index")).is_err());
    assert_eq!(CompressedIndex::open(&cpu, &of("index"), true).unwrap().len(), 260);
}

#[test]
fn rows_of_another_kind_are_added_with_a_warning_and_of_another_model_not_at_all() {
    let dimension = 16;
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    let cpu = Cpu::new(1).unwrap();
    let rows = clustered(7, 600, dimension, 8);
    let vectors = write(&of("vectors"), &rows, settings(600, dimension, VectorDtype::F32, 400));
    built(&cpu, &vectors, &of("index"), &CompressedOptions::default());
    let far: Vec<f32> = clustered(8, 50, dimension, 1 << 40).iter().map(|v| v * 3.0).collect();
    let far = write(&of("far"), &far, settings(50, dimension, VectorDtype::F32, 400));
    let report = grown(&cpu, &far, 650, &of("index")).unwrap();
    assert!(report.warnings.iter().any(|w| w.contains("build the index again")), "{:?}", report.warnings);
    for (name, other) in [
        ("model", {
            let mut other = settings(50, dimension, VectorDtype::F32, 400);
            other.model_fingerprint = Some("ff".repeat(32));
            other
        }),
        ("dimension", settings(25, 2 * dimension, VectorDtype::F32, 400)),
    ] {
        let vectors = write(&of(name), &clustered(9, 50, dimension, 3), other);
        let error = grown(&cpu, &vectors, 700, &of("index")).unwrap_err().to_string();
        assert!(error.contains("cannot be added"), "{error}");
    }
    // Vectors that have changed since are not scored with.
    fs::remove_dir_all(of("far")).unwrap();
    let error = CompressedIndex::open(&cpu, &of("index"), true).err().unwrap().to_string();
    assert!(error.contains("vectors that cannot be opened"), "{error}");
    write(&of("far"), &clustered(10, 50, dimension, 3), settings(50, dimension, VectorDtype::F32, 400));
    let error = CompressedIndex::open(&cpu, &of("index"), true).err().unwrap().to_string();
    assert!(error.contains("no longer those of the index"), "{error}");
    let index = CompressedIndex::open(&cpu, &of("index"), false).unwrap();
    let how = CompressedSearch { depth: 3, probes: 0, rescore: 5 };
    let error = index.search(&cpu, &[0.0; 16], how, GO_ON).unwrap_err().to_string();
    assert!(error.contains("without its vectors"), "{error}");
}

#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(1).unwrap();
    let rows = clustered(11, 200, 8, 4);
    let vectors = write(&dir.path().join("vectors"), &rows, settings(200, 8, VectorDtype::F32, 100));
    let place = dir.path().join("index");
    built(&cpu, &vectors, &place, &CompressedOptions::default());
    let manifest = Manifest::read(&place).unwrap();
    let open = || CompressedIndex::open(&cpu, &place, false).err().map(|e| e.to_string());
    assert_eq!(open(), None);
    for file in &manifest.files {
        let path = place.join(&file.name);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(open().expect("a cut file is refused").contains("bytes"), "{}", file.name);
        let mut other = bytes.clone();
        other[..8].fill(0xff);
        fs::write(&path, &other).unwrap();
        // Codes are any bytes; what they are is known by their checksum.
        assert!(open().is_some() || file.name.ends_with("-codes"), "{}", file.name);
        assert!(manifest.verify(&place, GO_ON).is_err(), "{}", file.name);
        fs::remove_file(&path).unwrap();
        assert!(open().is_some(), "{}", file.name);
        fs::write(&path, &bytes).unwrap();
    }
    assert_eq!(open(), None);
    let text = fs::read_to_string(place.join("manifest.json")).unwrap();
    for (from, to) in [
        ("\"lists\": 28", "\"lists\": 27"),
        ("\"dimension\": 8", "\"dimension\": 0"),
        ("\"dimension\": 8", "\"dimension\": 18446744073709551615"),
        ("\"code_bytes\": 2", "\"code_bytes\": 3"),
        ("\"count\": 200", "\"count\": 18446744073709551615"),
        ("\"compressed\"", "\"flat\""),
        ("-codebooks", "-elsewhere"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        fs::write(place.join("manifest.json"), text.replace(from, to)).unwrap();
        assert!(open().is_some(), "{to}");
    }
}

#[test]
fn options_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(1).unwrap();
    let vectors =
        write(&dir.path().join("vectors"), &clustered(12, 9, 8, 2), settings(9, 8, VectorDtype::F32, 9));
    for code_bytes in [1, 3, 6, 1 << 40] {
        let options = CompressedOptions { code_bytes, ..Default::default() };
        let made = CompressedIndex::build(
            &cpu,
            &vectors,
            collection(9),
            &dir.path().join("no"),
            &options,
            GO_ON,
            &mut |_| {},
        );
        assert!(made.unwrap_err().to_string().contains("an even number of 2 to 4"), "{code_bytes}");
    }
    let options = CompressedOptions { lists: 50, ..Default::default() };
    let report = built(&cpu, &vectors, &dir.path().join("few"), &options);
    assert_eq!(report.settings.lists, 9);
    assert!(report.warnings[0].contains("9 rows give 9"), "{:?}", report.warnings);
}

/// Names of an environment variable: which call of `stop` is the process's last.
const DIES: &str = "TERCIO_TEST_COMPRESSED_DIES";

/// A build and an append, in a process that dies at some call of `stop`: the folder of the environment variable's path.
#[test]
fn a_child_that_dies() {
    let Ok(order) = std::env::var(DIES) else { return };
    let (at, dir) = order.split_once(':').unwrap();
    let (at, dir) = (at.parse::<usize>().unwrap(), Path::new(dir));
    let calls = AtomicUsize::new(0);
    let stop = || {
        if calls.fetch_add(1, Ordering::Relaxed) == at {
            std::process::abort();
        }
        false
    };
    let cpu = Cpu::new(1).unwrap();
    let of = |name: &str| Vectors::open(&dir.join(name)).unwrap();
    let index = dir.join("index");
    let options = CompressedOptions { rounds: 2, ..Default::default() };
    if !index.join("manifest.json").exists() {
        CompressedIndex::build(&cpu, &of("first"), collection(300), &index, &options, &stop, &mut |_| {})
            .unwrap();
    } else {
        CompressedIndex::append(&cpu, &of("second"), collection(400), &index, &stop, &mut |_| {}).unwrap();
    }
}

#[test]
fn who_dies_leaves_the_index_that_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    let cpu = Cpu::new(1).unwrap();
    let rows = clustered(13, 400, 8, 6);
    write(&of("first"), &rows[..300 * 8], settings(300, 8, VectorDtype::F32, 150));
    write(&of("second"), &rows[300 * 8..], settings(100, 8, VectorDtype::F32, 30));
    let child = |at: usize| {
        let order = format!("{at}:{}", dir.path().display());
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["a_child_that_dies", "--exact"])
            .env(DIES, order)
            .output()
            .unwrap();
        child.status.success()
    };
    // A build leaves nothing that could be taken for an index, until it is done.
    let mut at = 0;
    while !child(at) {
        let error = CompressedIndex::open(&cpu, &of("index"), false).err().unwrap().to_string();
        assert!(error.contains("no index was finished"), "{error}");
        at += 1;
    }
    assert!(at > 3, "{at} places to die at");
    let asked = clustered(14, 4, 8, 6);
    let before = searched(&cpu, &of("index"), &asked, 20, 2, 30);
    let mut at = 0;
    while !child(at) {
        assert_eq!(Manifest::read(&of("index")).unwrap().version, 1);
        assert_eq!(searched(&cpu, &of("index"), &asked, 20, 2, 30), before);
        at += 1;
    }
    assert!(at > 1, "{at} places to die at");
    let manifest = Manifest::read(&of("index")).unwrap();
    assert_eq!(manifest.version, 2);
    manifest.verify(&of("index"), GO_ON).unwrap();
    let plain = |e: &fs::DirEntry| !e.file_name().to_string_lossy().starts_with('.');
    let files = fs::read_dir(of("index")).unwrap().flatten().filter(plain).count();
    assert_eq!(files, manifest.files.len() + 1, "nothing else is left in the folder");
    assert_eq!(CompressedIndex::open(&cpu, &of("index"), true).unwrap().len(), 400);
}
