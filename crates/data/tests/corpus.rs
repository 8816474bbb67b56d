//! Corpora of every form: the same documents, parts cut by rule and seed, labels in order.

use std::path::{Path, PathBuf};

use tercio_data::corpus::{Columns, CorpusFiles, CorpusSettings, Parts, Split, UnknownLabels};
use tercio_data::{Corpus, DataError, Document, Documents};

fn file(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, text).unwrap();
    path
}

fn open(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> Documents {
    Documents::open(&file(dir, name, text), &dir.join("cache")).unwrap()
}

/// Text and labels of all documents, read in order and one by one.
fn all(documents: &Documents) -> Vec<(String, Vec<String>)> {
    let short = |d: Document| (d.text, d.labels);
    let mut streamed = Vec::new();
    documents
        .each(&mut |i, document| {
            let document = document?;
            assert_eq!((i, document.place.row), (streamed.len(), i));
            streamed.push(short(document));
            Ok(())
        })
        .unwrap();
    let one_by_one: Vec<_> = (0..documents.len()).map(|i| short(documents.get(i).unwrap())).collect();
    assert_eq!(streamed, one_by_one);
    streamed
}

fn owned(rows: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
    rows.iter()
        .map(|(text, labels)| (text.to_string(), labels.iter().map(|l| l.to_string()).collect()))
        .collect()
}

fn corpus(documents: Documents, settings: &CorpusSettings) -> Result<Corpus, String> {
    Corpus::new(documents, None, None, settings, &mut |e| panic!("{e}")).map_err(|e| e.to_string())
}

/// `n` lines whose label is chosen by `label`.
fn lines(n: usize, label: impl Fn(usize) -> &'static str) -> String {
    (0..n).map(|i| format!("__label__{} document number {i}\n", label(i))).collect()
}

fn texts(split: &Split) -> Vec<String> {
    (0..split.len()).map(|k| split.get(k).unwrap().text).collect()
}

#[test]
fn every_form_gives_the_same_documents() {
    let dir = tempfile::tempdir().unwrap();
    let want = owned(&[("a \"b\", c", &["x"]), ("second, text", &["y"]), ("naïve 東京", &["x"])]);
    let fast = "__label__x a \"b\", c\n\n__label__y \t second, text \r\n__label__x naïve 東京";
    let csv = "id,label,text\n1,x,\"a \"\"b\"\", c\"\r\n2, y ,\" second, text\"\n3,x,naïve 東京\n";
    let tsv = "text\tlabel\n\"a \"\"b\"\", c\"\tx\nsecond, text\ty\nnaïve 東京\tx\n";
    let jsonl = "{\"text\": \"a \\\"b\\\", c\", \"label\": \"x\"}\n{\"label\": [\"y\"], \"text\": \"second, text\"}\n\
                 {\"text\": \"naïve 東京\", \"labels\": [\"x\"], \"label\": null}\n";
    let list = format!("[{}]", jsonl.trim_end().replace("\n", ","));
    for (name, text) in [
        ("c.txt", fast),
        ("c.ft", fast),
        ("c.csv", csv),
        ("c.tsv", tsv),
        ("c.jsonl", jsonl),
        ("c.json", &list),
    ] {
        assert_eq!(all(&open(dir.path(), name, text)), want, "{name}");
        let packed = zstd::encode_all(text.as_bytes(), 1).unwrap();
        let packed = open(dir.path(), &format!("{name}.zst"), packed);
        assert_eq!(all(&packed), want, "{name}.zst");
        let marked = open(dir.path(), &format!("marked-{name}"), format!("\u{feff}{text}"));
        assert_eq!(all(&marked), want, "{name} with a byte order mark");
    }
    for (name, text) in [("x/1.txt", "a \"b\", c\n"), ("y/2", "second, text"), ("x/3.txt", "naïve 東京")] {
        file(&dir.path().join("folder"), name, text);
    }
    file(&dir.path().join("folder"), "README", "no label");
    file(&dir.path().join("folder"), "x/.hidden", "no document");
    let folder = Documents::open(&dir.path().join("folder"), &dir.path().join("cache")).unwrap();
    assert_eq!(all(&folder), [want[0].clone(), want[2].clone(), want[1].clone()]);
    assert_eq!(folder.get(1).unwrap().id, "x/3.txt");
}

#[test]
fn columns_are_named_or_numbered() {
    let dir = tempfile::tempdir().unwrap();
    let columns = |text: &[&str], labels: &[&str], header| Columns {
        text: text.iter().map(|c| c.to_string()).collect(),
        labels: labels.iter().map(|c| c.to_string()).collect(),
        header,
        no_label: Some("none".into()),
    };
    let named = "title,a,body,b\nT,x,t,none\nU,y,\"u\nv\",z\n";
    let documents = open(dir.path(), "named.csv", named);
    let wanted = columns(&["title", "body"], &["a", "b"], true);
    let documents = documents.with_columns(wanted).unwrap();
    assert_eq!(all(&documents), owned(&[("T t", &["x"]), ("U u\nv", &["y", "z"])]));
    assert_eq!((documents.get(1).unwrap().place.line, documents.len()), (3, 2));
    let documents = open(dir.path(), "bare.csv", "x,t\ny,u\n").with_columns(columns(&["1"], &["0"], false));
    assert_eq!(all(&documents.unwrap()), owned(&[("t", &["x"]), ("u", &["y"])]));
    let keys =
        "{\"sentence\": \"s\", \"label\": 1, \"id\": \"d7\"}\n{\"sentence\": \"t\", \"label\": true}\n";
    let documents =
        open(dir.path(), "k.jsonl", keys).with_columns(columns(&["sentence"], &[], true)).unwrap();
    assert_eq!(all(&documents), owned(&[("s", &["1"]), ("t", &["true"])]));
    assert_eq!((documents.get(0).unwrap().id, documents.get(1).unwrap().id), ("d7".into(), 1.into()));
    for (wanted, part) in [
        (
            columns(&["text"], &[], true),
            "line 1 (item 0): expected a column named \"text\", found 4 columns: title, a, body, b",
        ),
        (columns(&["title"], &["label"], true), "a column named \"label\""),
        (columns(&["4"], &[], false), "a column \"4\" among numbers from 0"),
    ] {
        let error = open(dir.path(), "named.csv", named).with_columns(wanted).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn missing_parts_are_cut_by_flairs_rule_and_by_seed_alone() {
    let dir = tempfile::tempdir().unwrap();
    let text = lines(200, |i| ["a", "b", "c"][i % 3]);
    let path = file(dir.path(), "c.txt", &text);
    let cut = |seed| {
        let settings = CorpusSettings { seed, ..CorpusSettings::default() };
        corpus(Documents::open(&path, &dir.path().join("cache")).unwrap(), &settings).unwrap()
    };
    let one = cut(1);
    let (dev, test) = (one.dev.as_ref().unwrap(), one.test.as_ref().unwrap());
    assert_eq!((one.train.len(), dev.len(), test.len()), (162, 18, 20));
    let mut rows: Vec<usize> = [&one.train, dev, test]
        .into_iter()
        .flat_map(|split| (0..split.len()).map(|k| split.row(k)).collect::<Vec<_>>())
        .collect();
    assert!(rows[..162].is_sorted() && rows[162..180].is_sorted() && rows[180..].is_sorted());
    rows.sort_unstable();
    assert_eq!(rows, (0..200).collect::<Vec<_>>(), "every document is in one part");
    assert_eq!(cut(1).fingerprint(), one.fingerprint());
    assert_eq!(texts(&cut(1).train), texts(&one.train));
    assert_ne!(cut(2).fingerprint(), one.fingerprint());
    assert_eq!(one.labels.counts().iter().sum::<u64>(), 162);
    let first = one.train.get(0).unwrap();
    assert_eq!(one.labels.name(0), first.labels[0], "labels come in the order of train");

    let only_dev = CorpusSettings { cut_test: false, ..CorpusSettings::default() };
    let only_dev = corpus(open(dir.path(), "c.txt", &text), &only_dev).unwrap();
    assert_eq!((only_dev.train.len(), only_dev.dev.unwrap().len(), only_dev.test.is_none()), (180, 20, true));
}

#[test]
fn given_parts_stay_and_a_corpus_is_found_by_names() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flair_classifier/corpus");
    let files = CorpusFiles::find(&golden).unwrap();
    let settings = CorpusSettings::default();
    let open = || Corpus::open(&files, &Columns::default(), &settings, dir.path(), &mut |_| {}).unwrap();
    let corpus = open();
    let count = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
    assert_eq!(corpus.train.len(), count(&files.train));
    assert_eq!(corpus.dev.as_ref().unwrap().len(), count(files.dev.as_ref().unwrap()));
    assert_eq!(corpus.test.as_ref().unwrap().len(), count(files.test.as_ref().unwrap()));
    assert_eq!(corpus.fingerprint(), open().fingerprint());
    let first = std::fs::read_to_string(&files.train).unwrap();
    let first = first.lines().next().unwrap().split_once(' ').unwrap();
    assert_eq!(corpus.train.get(0).unwrap().text, first.1.trim());
    assert_eq!(format!("__label__{}", corpus.labels.name(0)), first.0);
}

#[test]
fn downsampling_keeps_a_share_of_the_parts_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let text = lines(1000, |i| if i % 50 == 0 { "rare" } else { "common" });
    let settings = CorpusSettings {
        downsample: Some(0.1),
        downsampled: Parts { train: true, dev: false, test: true },
        stratified: true,
        unknown_labels: UnknownLabels::Count,
        ..CorpusSettings::default()
    };
    let corpus = corpus(open(dir.path(), "c.txt", &text), &settings).unwrap();
    let (dev, test) = (corpus.dev.as_ref().unwrap(), corpus.test.as_ref().unwrap());
    assert_eq!((corpus.train.len(), dev.len(), test.len()), (81, 90, 10));
    let rare = |split: &Split| split.labels().unwrap();
    // 20 of 1000 are rare: 2 of the 100 that were cut for test, 2 of the 90 of dev, 16 are left and a tenth of them is 2.
    assert_eq!(rare(dev).counts()[rare(dev).id("rare").unwrap() as usize], 2);
    assert_eq!(corpus.labels.counts()[corpus.labels.id("rare").unwrap() as usize], 2);
    assert_eq!(corpus.unknown, 0);
    for share in [0.0, -1.0, 1.5, f64::NAN] {
        let settings = CorpusSettings { downsample: Some(share), ..CorpusSettings::default() };
        let error = Corpus::new(open(dir.path(), "c.txt", &text), None, None, &settings, &mut |_| {});
        assert!(error.unwrap_err().to_string().contains("--downsample"), "{share}");
    }
}

#[test]
fn a_label_that_train_lacks_is_refused_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    let build = |unknown_labels| {
        let train = open(dir.path(), "train.txt", lines(6, |i| ["a", "b"][i % 2]));
        let dev = open(dir.path(), "dev.txt", "__label__a one\n__label__c two\n__label__c three\n");
        let settings = CorpusSettings { unknown_labels, ..CorpusSettings::default() };
        Corpus::new(train, Some(dev), None, &settings, &mut |_| {})
    };
    let error = build(UnknownLabels::Refuse).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, DataError::Item { row: 1, line: 2, .. }), "{text}");
    assert!(
        text.contains("dev.txt, line 2") && text.contains("\"c\"") && text.contains("--unknown_labels"),
        "{text}"
    );
    let counted = build(UnknownLabels::Count).unwrap();
    assert_eq!((counted.unknown, counted.labels.len(), counted.dev.as_ref().unwrap().len()), (2, 2, 3));
    assert!(counted.to_string().contains("2 documents of dev and test have a label"), "{counted}");
}

#[test]
fn several_labels_are_for_multi_label_corpora() {
    let dir = tempfile::tempdir().unwrap();
    let text = "__label__a __label__b one\n__label__b __label__b two\n__label__c three\n";
    let settings = CorpusSettings { cut_dev: false, cut_test: false, ..CorpusSettings::default() };
    let error = corpus(open(dir.path(), "c.txt", text), &settings).unwrap_err();
    assert!(
        error.contains("line 1 (item 0): expected one label, found 2: a, b")
            && error.contains("--multi_label"),
        "{error}"
    );
    let settings = CorpusSettings { multi_label: true, ..settings };
    let corpus = corpus(open(dir.path(), "c.txt", text), &settings).unwrap();
    assert_eq!((corpus.labels.names().len(), corpus.labels.counts()), (3, &[1, 2, 1][..]));
    assert_eq!(corpus.repeated, 1, "a label that a line names twice counts once");
}
