//! BM25 indexes against a plain scorer, under memory that is too small, appended to, killed, damaged.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tercio_data::{Passages, draw};
use tercio_search::bm25::{
    Analyzer, Bm25Constants, Bm25Index, Bm25Settings, Fields, LEAST_MEMORY, MOST_SEGMENTS,
};
use tercio_search::manifest::{MANIFEST, Manifest};
use tercio_search::part::merged;
use tercio_search::{Hit, Part};

const MEMORY: u64 = 256 << 20;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    /// A collection of these titles and texts.
    fn passages(&self, texts: &[(String, String)]) -> Passages {
        let lines = texts.iter().enumerate().map(|(i, (title, text))| {
            serde_json::json!({"id": format!("p{i}"), "title": title, "text": text}).to_string() + "\n"
        });
        let path = self.path("passages.jsonl");
        fs::write(&path, lines.collect::<String>()).unwrap();
        Passages::open(&path, &self.path("cache")).unwrap()
    }
    fn build(&self, name: &str, passages: &Passages, settings: &Bm25Settings, memory: u64) -> Bm25Index {
        let dir = self.path(name);
        Bm25Index::build(&dir, passages, settings, memory, &|| false, &mut |_, _| {}).unwrap();
        Bm25Index::open(&dir, None).unwrap()
    }
    fn append(&self, name: &str, passages: &Passages) -> Option<Manifest> {
        Bm25Index::append(&self.path(name), passages, MEMORY, &|| false, &mut |_, _| {}).unwrap()
    }
    /// Names and bytes of all files of an index but its manifest and lock.
    fn files(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(self.path(name)).unwrap().map(|e| e.unwrap().path());
        let mut files: Vec<_> = entries
            .map(|p| (p.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&p).unwrap()))
            .filter(|(name, _)| name != MANIFEST && name != ".lock")
            .collect();
        files.sort();
        files
    }
}

/// Texts of drawn words: few words often, many rarely, as in languages; some texts are empty, some twice there.
fn texts(seed: u64, count: u64, words: u64) -> Vec<(String, String)> {
    let word = |key: &[u64]| {
        let draws = [0, 1, 2].map(|k| draw::keyed(&[key, &[k]].concat()) % words);
        format!("w{}", draws.into_iter().min().unwrap())
    };
    let text = |i: u64, part: u64, most: u64| {
        let length = draw::keyed(&[seed, i, part]) % (most + 1);
        (0..length).map(|k| word(&[seed, i, part, k])).collect::<Vec<_>>().join(" ")
    };
    (0..count)
        .map(|i| if draw::keyed(&[seed, i]).is_multiple_of(9) { i / 2 } else { i })
        .map(|i| (text(i, 1, 3), text(i, 2, 30)))
        .collect()
}

fn plain_words(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_lowercase).collect()
}

/// The formula, word by word over all passages, in f64.
fn plain_scores(texts: &[(String, String)], query: &str, constants: Bm25Constants) -> Vec<f64> {
    let documents: Vec<Vec<String>> =
        texts.iter().map(|(title, text)| [plain_words(title), plain_words(text)].concat()).collect();
    let mean = documents.iter().map(Vec::len).sum::<usize>() as f64 / documents.len() as f64;
    let mut times: HashMap<String, f64> = HashMap::new();
    plain_words(query).into_iter().for_each(|w| *times.entry(w).or_default() += 1.0);
    let mut scores = vec![0.0; texts.len()];
    for (word, times) in times {
        let counts: Vec<f64> =
            documents.iter().map(|d| d.iter().filter(|w| **w == word).count() as f64).collect();
        let having = counts.iter().filter(|n| **n > 0.0).count() as f64;
        let idf = ((documents.len() as f64 - having + 0.5) / (having + 0.5)).ln_1p();
        for (score, (f, document)) in scores.iter_mut().zip(counts.iter().zip(&documents)) {
            let Bm25Constants { k1, b } = constants;
            let norm = k1 * (1.0 - b + b * document.len() as f64 / mean);
            if *f > 0.0 {
                *score += times * idf * f * (k1 + 1.0) / (f + norm);
            }
        }
    }
    scores
}

fn queries(seed: u64, words: u64) -> Vec<String> {
    let mut queries: Vec<String> = (0..30)
        .map(|q| {
            let length = 1 + draw::keyed(&[seed, q]) % 8;
            let word = |k| draw::keyed(&[seed, q, k]) % (words + 2);
            // Often a frequent word, and sometimes one that no passage has.
            (0..length)
                .map(|k| format!("W{}", word(2 * k).min(word(2 * k + 1))))
                .collect::<Vec<_>>()
                .join(", ")
        })
        .collect();
    queries.extend(["", "?!", "unknown words", "w0 w0 w0 w1"].map(str::to_owned));
    queries
}

fn bits(found: &[Vec<Hit>]) -> Vec<Vec<(u64, u32)>> {
    found.iter().map(|hits| hits.iter().map(|h| (h.row, h.score.to_bits())).collect()).collect()
}

fn search(index: &Bm25Index, queries: &[String], depth: usize) -> Vec<Vec<Hit>> {
    index.search(queries, depth, &|| false).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_found_is_what_a_plain_scorer_finds(
        seed in any::<u64>(),
        count in prop::sample::select(vec![1u64, 2, 50, 300, 1500, 6000]),
        words in prop::sample::select(vec![3u64, 40, 500]),
        (k1, b) in (0.0f64..4.0, 0.0f64..=1.0),
        depth in prop::sample::select(vec![0usize, 1, 5, 100, 10_000]),
    ) {
        let place = Place::new();
        let texts = texts(seed, count, words);
        let mut index = place.build("index", &place.passages(&texts), &Bm25Settings::default(), MEMORY);
        index.set_constants(Bm25Constants { k1, b }).unwrap();
        let queries = queries(seed, words);
        let found = search(&index, &queries, depth);
        prop_assert_eq!(bits(&found), bits(&index.search_all(&queries, depth).unwrap()));
        for of in [2, 5] {
            let mut parts = Vec::new();
            for number in 0..of {
                index = index.only(Part::of(number, of));
                parts.push(search(&index, &queries, depth));
            }
            index = index.only(Part::WHOLE);
            let all: Vec<Vec<Hit>> =
                (0..queries.len()).map(|q| merged(parts.iter().map(|p| p[q].clone()), depth)).collect();
            prop_assert_eq!(bits(&all), bits(&found), "{} parts", of);
        }
        for (query, hits) in queries.iter().zip(&found) {
            let scores = plain_scores(&texts, query, index.constants());
            let having = scores.iter().filter(|s| **s > 0.0).count();
            prop_assert_eq!(hits.len(), depth.min(having), "{} hits for {:?}", hits.len(), query);
            for hit in hits {
                let want = scores[hit.row as usize];
                prop_assert!((f64::from(hit.score) - want).abs() <= 2e-6 * want, "{query}: {hit:?} {want}");
            }
            for pair in hits.windows(2) {
                let falls = pair[0].score > pair[1].score;
                prop_assert!(falls || pair[0].score == pair[1].score && pair[0].row < pair[1].row);
            }
            // Nobody better was passed over.
            if let Some(last) = hits.last() {
                let found: std::collections::HashSet<u64> = hits.iter().map(|h| h.row).collect();
                let others = scores.iter().enumerate().filter(|(row, _)| !found.contains(&(*row as u64)));
                let best = others.map(|(_, s)| *s).fold(0.0, f64::max);
                prop_assert!(best <= f64::from(last.score) * (1.0 + 2e-6), "{query}: {best} {last:?}");
            }
        }
    }

    #[test]
    fn appends_find_what_one_build_finds(seed in any::<u64>(), cuts in prop::collection::vec(1usize..700, 1..4)) {
        let place = Place::new();
        let texts = texts(seed, 700, 40);
        let whole = place.build("whole", &place.passages(&texts), &Bm25Settings::default(), MEMORY);
        let mut cuts = cuts;
        cuts.sort_unstable();
        place.build("parts", &place.passages(&texts[..cuts[0]]), &Bm25Settings::default(), MEMORY);
        for &cut in cuts[1..].iter().chain([&700]) {
            place.append("parts", &place.passages(&texts[..cut]));
        }
        let parts = Bm25Index::open(&place.path("parts"), None).unwrap();
        for depth in [1, 10, 1000] {
            let queries = queries(seed, 40);
            let want = bits(&search(&whole, &queries, depth));
            prop_assert_eq!(&want, &bits(&search(&parts, &queries, depth)));
            // The border of two parts lies in a segment, and each part has some.
            let [first, second] = [0, 1].map(|n| {
                let index = Bm25Index::open(&place.path("parts"), None).unwrap().only(Part::of(n, 2));
                search(&index, &queries, depth)
            });
            let both = first.into_iter().zip(second).map(|(one, two)| merged([one, two], depth));
            prop_assert_eq!(&want, &bits(&both.collect::<Vec<_>>()));
        }
    }
}

#[test]
fn constants_that_hide_frequencies_find_the_same() {
    let place = Place::new();
    // Frequencies up to some hundreds, most of which look alike as shares.
    let long = |i: u64| ("w0 ".repeat((i % 7 * 50) as usize), format!("w1 w{} w0", i % 40));
    let mut texts = texts(5, 3000, 40);
    texts.extend((0..600).map(long));
    let mut index = place.build("index", &place.passages(&texts), &Bm25Settings::default(), MEMORY);
    let queries = queries(5, 40);
    for (k1, b) in [(0.0, 0.0), (0.0, 1.0), (1e-6, 0.5), (1000.0, 1.0), (1000.0, 0.0)] {
        index.set_constants(Bm25Constants { k1, b }).unwrap();
        for depth in [1, 10, 5000] {
            let found = search(&index, &queries, depth);
            assert_eq!(bits(&found), bits(&index.search_all(&queries, depth).unwrap()), "{k1} {b} {depth}");
        }
    }
}

#[test]
fn a_build_in_little_memory_has_the_same_bytes() {
    let place = Place::new();
    // Some five times what the least memory holds.
    let passages = place.passages(&texts(3, 60_000, 5000));
    place.build("once", &passages, &Bm25Settings::default(), MEMORY);
    let mut told = Vec::new();
    let mut progress = |done, total| told.push((done, total));
    let dir = place.path("runs");
    Bm25Index::build(&dir, &passages, &Bm25Settings::default(), LEAST_MEMORY, &|| false, &mut progress)
        .unwrap();
    assert!(told.is_sorted() && told.last() == Some(&(60_000, 60_000)));
    let (once, runs) = (place.files("once"), place.files("runs"));
    assert_eq!(once.len(), 3);
    assert!(once == runs, "other names or bytes");
    let error = Bm25Index::build(&dir, &passages, &Bm25Settings::default(), 1000, &|| false, &mut |_, _| {});
    assert!(error.unwrap_err().to_string().contains("memory"));
    // Three runs at least, or this test shows nothing: a posting takes 12 bytes, and half of the memory is for them.
    let index = Bm25Index::open(&dir, None).unwrap();
    let postings: u64 = index.segments().map(|s| s.postings).sum();
    assert!(postings * 12 > LEAST_MEMORY, "{postings}");
}

#[test]
fn threads_do_not_reach_the_scores() {
    let place = Place::new();
    let index = place.build("index", &place.passages(&texts(1, 3000, 300)), &Bm25Settings::default(), MEMORY);
    let queries = queries(5, 300);
    let one = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| bits(&search(&index, &queries, 20)))
    };
    let alone: Vec<_> =
        queries.iter().map(|q| bits(&search(&index, std::slice::from_ref(q), 20)).remove(0)).collect();
    assert_eq!(one(1), one(3));
    assert_eq!(one(1), alone);
}

#[test]
fn fields_and_analyzers_are_kept() {
    let place = Place::new();
    let text = |title: &str, text: &str| (title.to_owned(), text.to_owned());
    let passages = place.passages(&[
        text("Paris", "The capital of France."),
        text("Ünïcode", "ΟΔΟΣ running"),
        text("", ""),
    ]);
    let rows = |fields, analyzer, query: &str| -> Vec<u64> {
        let settings = Bm25Settings { fields, analyzer, ..Bm25Settings::default() };
        let index = place.build("index", &passages, &settings, MEMORY);
        assert_eq!(index.settings(), &settings);
        search(&index, &[query.to_owned()], 10)[0].iter().map(|h| h.row).collect()
    };
    assert_eq!(rows(Fields::TitleAndText, Analyzer::Plain, "paris"), [0]);
    assert!(rows(Fields::Text, Analyzer::Plain, "paris").is_empty());
    assert_eq!(rows(Fields::Title, Analyzer::Plain, "paris"), [0]);
    assert!(rows(Fields::Title, Analyzer::Plain, "capital").is_empty());
    assert_eq!(rows(Fields::TitleAndText, Analyzer::Plain, "the ünïCODE οδος"), [1, 0]);
    assert!(rows(Fields::TitleAndText, Analyzer::Plain, "runs").is_empty());
    assert_eq!(rows(Fields::TitleAndText, Analyzer::Stopped, "the running"), [1]);
    assert_eq!(rows(Fields::TitleAndText, Analyzer::Stopped, "the of"), [0]);
    assert_eq!(rows(Fields::TitleAndText, Analyzer::English, "the runs"), [1]);
    assert!(rows(Fields::TitleAndText, Analyzer::English, "the").is_empty());
}

#[test]
fn a_collection_without_words_has_an_index() {
    let place = Place::new();
    let passages = place.passages(&vec![(String::new(), "…".to_owned()); 3]);
    let index = place.build("index", &passages, &Bm25Settings::default(), MEMORY);
    assert_eq!((index.len(), search(&index, &["a".into()], 5)), (3, vec![vec![]]));
}

#[test]
fn constants_out_of_range_are_refused() {
    let place = Place::new();
    let mut index = place.build("index", &place.passages(&texts(1, 9, 9)), &Bm25Settings::default(), MEMORY);
    for (k1, b) in [(-0.1, 0.4), (0.9, 1.1), (f64::NAN, 0.4), (0.9, f64::NAN), (f64::INFINITY, 0.0)] {
        let error = index.set_constants(Bm25Constants { k1, b }).unwrap_err().to_string();
        assert!(error.contains("k1 from 0"), "{error}");
    }
}

#[test]
fn appends_know_their_collection() {
    let place = Place::new();
    let all = texts(7, 100, 20);
    place.build("index", &place.passages(&all[..50]), &Bm25Settings::default(), MEMORY);
    assert!(place.append("index", &place.passages(&all[..50])).is_none(), "nothing was added");
    let manifest = place.append("index", &place.passages(&all[..60])).unwrap();
    assert_eq!((manifest.version, manifest.collection.count, manifest.files.len()), (2, 60, 6));
    let refused = |texts: &[(String, String)], what: &str| {
        let before = place.files("index");
        let passages = place.passages(texts);
        let error = Bm25Index::append(&place.path("index"), &passages, MEMORY, &|| false, &mut |_, _| {});
        let error = error.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(place.files("index"), before, "the index stays");
    };
    let mut other = all.clone();
    other[55].1.push_str(" more");
    refused(&other, "passages 50 to 59 are not those");
    refused(&all[..59], "has 60");
    // Many appends come to one segment, which has the bytes of one build.
    for cut in 61..=60 + MOST_SEGMENTS {
        place.append("index", &place.passages(&all[..cut]));
    }
    let index = Bm25Index::open(&place.path("index"), None).unwrap();
    assert!(index.segments().count() <= MOST_SEGMENTS);
    let count = index.len() as usize;
    let whole = place.build("whole", &place.passages(&all[..count]), &Bm25Settings::default(), MEMORY);
    let queries = queries(3, 20);
    assert_eq!(bits(&search(&index, &queries, 30)), bits(&search(&whole, &queries, 30)));
    assert_eq!(
        place.files("index").len(),
        index.manifest().files.len(),
        "no file of an older version is left"
    );
}

#[test]
fn a_build_that_ends_early_leaves_the_old_index_or_none() {
    let place = Place::new();
    let passages = place.passages(&texts(2, 9000, 50));
    let dir = place.path("index");
    for asked in [0, 1, 3] {
        let left = std::sync::atomic::AtomicUsize::new(asked);
        let stop = || left.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_err();
        use std::sync::atomic::Ordering::Relaxed;
        let error =
            Bm25Index::build(&dir, &passages, &Bm25Settings::default(), MEMORY, &stop, &mut |_, _| {});
        assert!(matches!(error, Err(tercio_search::SearchError::Stopped)));
        assert!(place.files("index").is_empty(), "nothing is left");
        let error = Bm25Index::open(&dir, None).err().unwrap().to_string();
        assert!(error.contains("no index was finished here"), "{error}");
    }
    // As if killed: files of a version that has no manifest.
    fs::write(dir.join("v1-0.postings"), "x").unwrap();
    fs::write(dir.join(".v1-0.terms.12-00000000"), "x").unwrap();
    let index = place.build("index", &passages, &Bm25Settings::default(), MEMORY);
    let before = (place.files("index"), bits(&search(&index, &queries(1, 50), 9)));
    assert_eq!(before.0.len(), 3);
    fs::write(dir.join("v2-0.postings"), "x").unwrap();
    fs::write(dir.join(".v2-0.terms.12-00000000"), "x").unwrap();
    let index = Bm25Index::open(&dir, None).unwrap();
    assert_eq!(bits(&search(&index, &queries(1, 50), 9)), before.1);
    assert!(place.append("index", &passages).is_none());
    assert_eq!(place.files("index"), before.0, "what was left behind is gone");
    // Somebody's folder stays as it is.
    let other = place.path("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("thesis.tex"), "x").unwrap();
    let error =
        Bm25Index::build(&other, &passages, &Bm25Settings::default(), MEMORY, &|| false, &mut |_, _| {});
    assert!(error.unwrap_err().to_string().contains("thesis.tex"));
    assert!(other.join("thesis.tex").exists());
}

#[test]
fn damage_is_an_error_and_never_a_panic() {
    let place = Place::new();
    let index = place.build("index", &place.passages(&texts(4, 400, 60)), &Bm25Settings::default(), MEMORY);
    let queries = queries(2, 60);
    let want = bits(&search(&index, &queries, 20));
    drop(index);
    let dir = place.path("index");
    let manifest = Manifest::read(&dir).unwrap();
    manifest.verify(&dir, &|| false).unwrap();
    let mut noticed = 0;
    for (name, bytes) in place.files("index") {
        let path = dir.join(&name);
        for k in 0..150u64 {
            let at = (draw::keyed(&[9, k]) % bytes.len() as u64) as usize;
            let mut other = bytes.clone();
            other[at] ^= 1 << (draw::keyed(&[9, k, 1]) % 8);
            fs::write(&path, &other).unwrap();
            // Whatever comes of it, it is an error or finite scores of passages that there are.
            if let Ok(index) = Bm25Index::open(&dir, None) {
                match index.search(&queries, 20, &|| false) {
                    Ok(found) => {
                        let good = |h: &Hit| h.row < 400 && h.score.is_finite();
                        assert!(found.iter().flatten().all(good), "{name} {at}");
                        noticed += usize::from(bits(&found) != want);
                    }
                    Err(_) => noticed += 1,
                }
                assert!(manifest.verify(&dir, &|| false).unwrap_err().to_string().contains(&name));
            }
        }
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let error = Bm25Index::open(&dir, None).err().unwrap().to_string();
        assert!(error.contains("cut or replaced") && error.contains(&name), "{error}");
        fs::remove_file(&path).unwrap();
        assert!(Bm25Index::open(&dir, None).err().unwrap().to_string().contains(&name));
        fs::write(&path, &bytes).unwrap();
    }
    assert!(noticed > 50, "{noticed}");
    let text = fs::read_to_string(dir.join(MANIFEST)).unwrap();
    for (from, to, what) in [
        ("\"format\": 1", "\"format\": 2", "format 2"),
        ("\"kind\": \"bm25\"", "\"kind\": \"flat\"", "kind flat"),
        ("\"first\": 0", "\"first\": 1", "segments"),
        ("\"name\": \"v1-0.postings", "\"name\": \"../other", "another file"),
        ("{", "", "other"),
        ("\"analyzer\": \"stopped\"", "\"analyzer\": \"french\"", "french"),
    ] {
        write(&dir.join(MANIFEST), &text.replacen(from, to, 1));
        let error = Bm25Index::open(&dir, None).err().unwrap().to_string();
        assert!(error.contains(what), "{error}");
    }
    write(&dir.join(MANIFEST), &text);
    assert_eq!(bits(&search(&Bm25Index::open(&dir, None).unwrap(), &queries, 20)), want);
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
}
