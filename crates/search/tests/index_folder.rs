//! The folder of an index: what is in it of somebody else stays, what contradicts itself is refused.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tercio_data::Passages;
use tercio_search::bm25::{Bm25Index, Bm25Settings};
use tercio_search::manifest::{Collection, FileEntry, IndexFolder, MANIFEST, Manifest};

fn collection(count: u64) -> Collection {
    Collection { path: "/passages.tsv".into(), fingerprint: None, count }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

fn commit(dir: &Path, part: &str) -> Manifest {
    let folder = IndexFolder::open(dir).unwrap();
    let mut file = folder.create(part).unwrap();
    file.write(b"content").unwrap();
    let files: Vec<FileEntry> = vec![file.finish().unwrap()];
    folder.commit("bm25", collection(1), json!({}), files).unwrap()
}

#[test]
fn files_of_somebody_else_stay() {
    let dir = tempfile::tempdir().unwrap();
    // A folder that is no index, with names that look a little like those of one: refused, and nothing is touched.
    let own = ["v1-draft.tex", "v2-notes", "v10-0.postings", "v3-codes", "thesis.tex", ".v1-hidden.txt"];
    for alone in own.iter().filter(|name| !["v10-0.postings", "v3-codes", ".v1-hidden.txt"].contains(name)) {
        let place = dir.path().join(format!("with-{alone}"));
        fs::create_dir(&place).unwrap();
        let mut all = vec![*alone, "v10-0.postings", "v3-codes", ".v1-hidden.txt"];
        all.sort_unstable();
        all.iter().for_each(|name| fs::write(place.join(name), "mine").unwrap());
        let error = IndexFolder::open(&place).unwrap_err().to_string();
        assert!(error.contains("expected an empty folder or an index"), "{error}");
        assert_eq!(names(&place), all);
    }
    // In the folder of an index, what it has not written stays, too; what it has written goes.
    let place = dir.path().join("index");
    assert_eq!(commit(&place, "0.postings").version, 1);
    for name in ["v1-draft.tex", "v1-0.postings.bak", "v1-run-.terms", ".v7-hidden.txt"] {
        fs::write(place.join(name), "mine").unwrap();
    }
    for name in ["v2-run-3.terms", "v2-all.lengths", "v9-codebooks", ".v2-1.terms.77-0123abcd"] {
        fs::write(place.join(name), "left behind").unwrap();
    }
    assert_eq!(commit(&place, "0.postings").version, 2);
    let left = [
        ".lock",
        ".v7-hidden.txt",
        MANIFEST,
        "v1-0.postings.bak",
        "v1-draft.tex",
        "v1-run-.terms",
        "v2-0.postings",
    ];
    assert_eq!(names(&place), left);
}

#[test]
fn who_appends_to_nothing_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("none");
    let error = IndexFolder::open_earlier(&place).unwrap_err().to_string();
    assert!(error.contains("expected an index to append to"), "{error}");
    assert!(!place.exists());
}

#[test]
fn the_last_version_has_no_next() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), "0.terms");
    let path = dir.path().join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"version\": 1", &format!("\"version\": {}", u64::MAX))).unwrap();
    let error = IndexFolder::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("index into another folder"), "{error}");
    assert!(dir.path().join("v1-0.terms").exists());
}

#[test]
fn a_manifest_has_one_fingerprint_wherever_its_things_are() {
    let of = |settings: Value, print: &str, sum: &str| {
        let file = FileEntry { name: "v1-0.terms".into(), bytes: 1, sha256: sum.into() };
        let (path, fingerprint) = (format!("/{sum}").into(), Some(print.to_owned()));
        let collection = Collection { path, fingerprint, count: 3 };
        Manifest { format: 1, kind: "flat".into(), version: 1, collection, settings, files: vec![file] }
            .fingerprint()
    };
    let settings =
        |place: &str, sum: &str| json!({"vectors": place, "sources": [{"path": place, "fingerprint": sum}]});
    let one = of(settings("/a", "s"), "p", "f");
    assert_eq!(one, of(settings("/b", "s"), "p", "f"));
    assert_ne!(one, of(settings("/a", "t"), "p", "f"), "other vectors");
    assert_ne!(one, of(settings("/a", "s"), "q", "f"), "another collection");
    assert_ne!(one, of(settings("/a", "s"), "p", "g"), "other files");
}

#[test]
fn segments_that_do_not_follow_one_another_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passages.tsv");
    fs::write(&file, "id\ttext\ttitle\n1\tone word\ta\n2\ttwo words\tb\n").unwrap();
    let passages = Passages::open(&file, dir.path()).unwrap();
    let place = dir.path().join("index");
    let settings = Bm25Settings::default();
    Bm25Index::build(&place, &passages, &settings, 64 << 20, &|| false, &mut |_, _| {}).unwrap();
    let path = place.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    for (first, passages, count) in
        [(7, 2, u64::MAX), (0, u64::MAX, u64::MAX), (0, 1 << 32, 1 << 32), (u64::MAX, 3, 2), (1, 1, 2)]
    {
        let mut value: Value = serde_json::from_str(&text).unwrap();
        value["collection"]["count"] = json!(count);
        value["settings"]["segments"][0]["first"] = json!(first);
        value["settings"]["segments"][0]["passages"] = json!(passages);
        fs::write(&path, value.to_string()).unwrap();
        let error = Bm25Index::open(&place, None).err().expect("refused").to_string();
        assert!(error.contains("segments"), "{first} {passages} {count}: {error}");
    }
}
