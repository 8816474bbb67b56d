//! Appending to a compressed index: the collection must be the one that was indexed, with passages added at its end.

use std::fs;
use std::path::Path;

use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, VectorsFolder};
use tercio_data::{Passages, Vectors, draw};
use tercio_engine::Cpu;
use tercio_search::compressed::{CompressedIndex, CompressedOptions};
use tercio_search::manifest::{Collection, Manifest};
use tercio_train::find::append_compressed;

const DIMENSION: usize = 8;

fn vectors(dir: &Path, ids: &[&str]) -> Vectors {
    let settings = VectorSettings {
        format: FORMAT,
        model: "a model".into(),
        model_fingerprint: Some("12".repeat(32)),
        dimension: DIMENSION,
        dtype: VectorDtype::F32,
        precision: "f32".into(),
        pooling: "mean".into(),
        normalized: false,
        template: "{text}".into(),
        maxlength: 16,
        batch_tokens: 100,
        batch_texts: 10,
        window: 10,
        source: "passages.tsv".into(),
        source_fingerprint: None,
        count: ids.len() as u64,
        per_shard: 3,
    };
    let folder = VectorsFolder::open(dir, settings.clone()).unwrap();
    for number in 0..settings.shards() {
        let mut shard = folder.shard(number).unwrap();
        for row in settings.rows_of(number) {
            let key = [row, ids.len() as u64];
            let of = |d: usize| (draw::keyed(&[key[0], key[1], d as u64]) % 1000) as f32 / 1000.0;
            shard.push(ids[row as usize], &(0..DIMENSION).map(of).collect::<Vec<f32>>()).unwrap();
        }
        shard.finish("f32").unwrap();
    }
    folder.complete().unwrap();
    Vectors::open(dir).unwrap()
}

fn passages(dir: &Path, name: &str, ids: &[&str]) -> Passages {
    let path = dir.join(name);
    let lines = ids.iter().map(|id| format!("{id}\ttext of {id}\ttitle\n"));
    fs::write(&path, format!("id\ttext\ttitle\n{}", lines.collect::<String>())).unwrap();
    Passages::open(&path, &dir.join("cache")).unwrap()
}

#[test]
fn a_collection_in_another_order_is_not_appended_from() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, index) = (dir.path(), dir.path().join("index"));
    let cpu = Cpu::new(1).unwrap();
    let go_on: &dyn Fn() -> bool = &|| false;
    let append = |vectors: &Vectors, passages: &Passages| {
        append_compressed(&cpu, &index, vectors, passages, go_on, &mut |_| {})
    };
    let first = vectors(&dir.join("first"), &["a", "b", "c", "d"]);
    let second = vectors(&dir.join("second"), &["e", "f"]);
    let grown = passages(dir, "grown.tsv", &["a", "b", "c", "d", "e", "f"]);
    assert!(append(&second, &grown).unwrap_err().to_string().contains("found none"), "no index yet");
    assert!(!index.exists());
    let collection = Collection::of(&passages(dir, "old.tsv", &["a", "b", "c", "d"]));
    let options = CompressedOptions::default();
    CompressedIndex::build(&cpu, &first, collection, &index, &options, go_on, &mut |_| {}).unwrap();
    let before = Manifest::read(&index).unwrap();
    // Two passages of the index have changed places, or one of those that are new, or one went.
    for (name, ids) in [
        ("earlier.tsv", vec!["a", "c", "b", "d", "e", "f"]),
        ("last.tsv", vec!["a", "b", "c", "d", "f", "e"]),
        ("fewer.tsv", vec!["a", "b"]),
        ("more.tsv", vec!["a", "b", "c", "d", "e", "f", "g"]),
    ] {
        let error = append(&second, &passages(dir, name, &ids)).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        assert_eq!(Manifest::read(&index).unwrap(), before, "{name}");
    }
    let report = append(&second, &grown).unwrap();
    assert_eq!((report.manifest.version, report.manifest.collection.count), (2, 6));
    // Once more: nothing to add. The same of a collection in another order is an error.
    assert!(append(&second, &grown).unwrap().warnings[0].contains("nothing to add"));
    let other = passages(dir, "other.tsv", &["b", "a", "c", "d", "e", "f"]);
    assert!(append(&second, &other).unwrap_err().to_string().contains("other.tsv"));
    assert_eq!(Manifest::read(&index).unwrap(), report.manifest);
    // Without the vectors of the passages that it has, nothing says that they are the same.
    fs::remove_dir_all(dir.join("first")).unwrap();
    let longer = passages(dir, "longer.tsv", &["a", "b", "c", "d", "e", "f", "g"]);
    let error = append(&vectors(&dir.join("third"), &["g"]), &longer).unwrap_err().to_string();
    assert!(error.contains("compare their ids"), "{error}");
}
