//! Vectors of tokens on disk: what was written comes back, across shards and formats; what was not finished, is damaged, or is another
//! folder's, is said.

use std::fs;
use std::path::Path;

use tercio_data::multi_vectors::{MultiVectorsFolder, TokenArray, TokensInMemory, whole_numbers};
use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, VectorsFolder};
use tercio_data::{MultiVectors, TokenVectors, Vectors};

/// Lengths of the documents; some have no vectors, a whole shard among them.
const LENGTHS: [usize; 11] = [3, 0, 5, 1, 0, 0, 0, 2, 7, 0, 1];
const DIMENSION: usize = 3;

fn settings(dtype: VectorDtype, per_shard: u64) -> VectorSettings {
    VectorSettings {
        format: FORMAT,
        model: "a model".into(),
        model_fingerprint: Some("12".repeat(32)),
        dimension: DIMENSION,
        dtype,
        precision: "f32".into(),
        pooling: "tokens".into(),
        normalized: false,
        template: "{text}".into(),
        maxlength: 16,
        batch_tokens: 100,
        batch_texts: 10,
        window: 10,
        source: "passages.tsv".into(),
        source_fingerprint: Some("34".repeat(32)),
        count: LENGTHS.len() as u64,
        per_shard,
    }
}

/// Numbers that every format holds: document, vector and place.
fn vectors(document: usize) -> Vec<f32> {
    (0..LENGTHS[document] * DIMENSION).map(|i| document as f32 * 16.0 + i as f32).collect()
}

fn written(dir: &Path, dtype: VectorDtype, per_shard: u64) -> MultiVectors {
    let folder = MultiVectorsFolder::open(dir, settings(dtype, per_shard)).unwrap();
    // In any order, as several processes do.
    for number in (0..folder.settings().shards()).rev() {
        let mut shard = folder.shard(number).unwrap();
        for d in folder.settings().rows_of(number) {
            shard.push(&format!("id \"{d}\"\n"), &vectors(d as usize)).unwrap();
        }
        shard.finish("f32").unwrap();
        let finished = folder.finished(number).unwrap().unwrap();
        assert_eq!(
            finished.tokens,
            folder.settings().rows_of(number).map(|d| LENGTHS[d as usize] as u64).sum::<u64>()
        );
    }
    assert_eq!(folder.complete().unwrap(), folder.settings().shards());
    MultiVectors::open(dir).unwrap()
}

#[test]
fn what_was_written_comes_back_across_shards_and_formats() {
    let all: Vec<f32> = (0..LENGTHS.len()).flat_map(vectors).collect();
    for dtype in [VectorDtype::F32, VectorDtype::F16, VectorDtype::Bf16] {
        for per_shard in [1, 3, 4, 100] {
            let dir = tempfile::tempdir().unwrap();
            let read = written(dir.path(), dtype, per_shard);
            assert_eq!((read.documents(), read.tokens(), read.dimension()), (11, 19, 3));
            for first in 0..19 {
                for count in 0..=19 - first {
                    let mut out = vec![f32::NAN; count * DIMENSION];
                    read.read(first as u64, &mut out).unwrap();
                    assert_eq!(out, all[first * DIMENSION..(first + count) * DIMENSION], "{first} {count}");
                }
            }
            for d in 0..LENGTHS.len() {
                assert_eq!(read.document(d as u64).unwrap(), vectors(d));
            }
            assert_eq!(read.ids().unwrap()[10], "id \"10\"\n");
            assert!(read.verify_until(&|| false).unwrap() && !read.verify_until(&|| true).unwrap());
            // Beyond the end, and parts of vectors.
            assert!(read.read(19, &mut [0.0; 3]).is_err() && read.read(u64::MAX, &mut [0.0; 3]).is_err());
            assert!(read.read(0, &mut [0.0; 4]).is_err() && read.document(11).is_err());
            assert_eq!(read.origin().vectors_fingerprint, Some(read.fingerprint()));
        }
    }
}

#[test]
fn what_is_not_finished_or_is_another_folders_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let open = |dir: &Path| MultiVectors::open(dir).unwrap_err().to_string();
    assert!(open(dir.path()).contains("found none"));
    let folder = MultiVectorsFolder::open(dir.path(), settings(VectorDtype::F32, 4)).unwrap();
    let mut shard = folder.shard(0).unwrap();
    shard.push("0", &vectors(0)).unwrap();
    assert!(shard.push("1", &[1.0; 4]).unwrap_err().to_string().contains("\"1\""));
    assert!(shard.push("1", &[f32::NAN; 3]).unwrap_err().to_string().contains("NaN"));
    // Fewer than the shard has: nothing is left of it.
    assert!(shard.finish("f32").unwrap_err().to_string().contains("4 documents, 1 were written"));
    assert_eq!((folder.complete().unwrap(), folder.finished(0).unwrap()), (0, None));
    assert!(folder.shard(3).is_err());
    assert!(open(dir.path()).contains("not complete"));
    let other = MultiVectorsFolder::open(dir.path(), settings(VectorDtype::F16, 4)).unwrap_err().to_string();
    assert!(other.contains("dtype: f32 there, f16 here"), "{other}");

    // Vectors of whole texts are another kind, both ways.
    assert!(VectorsFolder::open(&dir.path().join("one"), settings(VectorDtype::F32, 20)).is_ok());
    let one = MultiVectorsFolder::open(&dir.path().join("one"), settings(VectorDtype::F32, 20)).unwrap_err();
    assert!(one.to_string().contains("vectors of tokens"), "{one}");
    let many = tempfile::tempdir().unwrap();
    written(many.path(), VectorDtype::F32, 4);
    assert!(Vectors::open(many.path()).is_err());
    let manifest = fs::read_to_string(many.path().join("manifest.json")).unwrap();
    fs::write(many.path().join("manifest.json"), manifest.replace("multi-vector", "vector")).unwrap();
    assert!(open(many.path()).contains("another manifest"));
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    for name in ["shard-00001.tokens", "shard-00001.lengths", "shard-00001.ids"] {
        let dir = tempfile::tempdir().unwrap();
        let read = written(dir.path(), VectorDtype::F32, 3);
        let path = dir.path().join(name);
        let whole = fs::read(&path).unwrap();
        let mut other = whole.clone();
        other[0] ^= 1;
        fs::write(&path, &other).unwrap();
        let error = read.verify_until(&|| false).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("damaged"), "{error}");
        if name.ends_with("lengths") {
            let error = MultiVectors::open(dir.path()).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("1 vectors"), "{error}");
        }
        if name.ends_with("ids") {
            assert!(read.ids().unwrap_err().to_string().contains(name));
        } else {
            fs::write(&path, &whole[..whole.len() - 1]).unwrap();
            assert!(MultiVectors::open(dir.path()).unwrap_err().to_string().contains(name));
        }
        if name.ends_with("tokens") {
            let mut none = whole.clone();
            none[..4].copy_from_slice(&f32::NAN.to_le_bytes());
            fs::write(&path, &none).unwrap();
            let error = read.document(3).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("NaN"), "{error}");
        }
        fs::remove_file(&path).unwrap();
        assert!(MultiVectors::open(dir.path()).unwrap_err().to_string().contains(name));
    }
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), VectorDtype::F32, 3);
    let path = dir.path().join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("\"dimension\": 3", "\"dimension\": 0"),
        ("\"count\": 11", "\"count\": 12"),
        ("\"tokens\": 8", "\"tokens\": 9"),
        ("\"first\": 3", "\"first\": 4"),
    ] {
        assert!(text.contains(from), "{from}: {text}");
        fs::write(&path, text.replace(from, to)).unwrap();
        assert!(MultiVectors::open(dir.path()).is_err(), "{from}");
    }
}

fn array(path: &Path, kind: &str, order: &str, shape: &str, bytes: &[u8]) {
    let header = format!("{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
    let mut all = b"\x93NUMPY\x01\x00".to_vec();
    all.extend((header.len() as u16).to_le_bytes());
    all.extend(header.as_bytes());
    all.extend(bytes);
    fs::write(path, all).unwrap();
}

#[test]
fn arrays_of_numpy_are_read_and_others_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.npy");
    let bytes: Vec<u8> = (0..24).flat_map(|i| (i as f32).to_le_bytes()).collect();
    array(&path, "<f4", "False", "(2, 3, 4)", &bytes);
    let read = TokenArray::open(&path).unwrap();
    assert_eq!((read.documents(), read.tokens(), read.dimension(), read.length()), (2, 6, 4, 3));
    let mut out = [0.0; 8];
    read.read(2, &mut out).unwrap();
    assert_eq!(out.to_vec(), (8..16).map(|i| i as f32).collect::<Vec<_>>());
    assert!(read.read(5, &mut out).is_err());
    assert_eq!((read.start(1), read.ids().unwrap()), (3, vec!["0".to_owned(), "1".to_owned()]));
    for (kind, order, shape, len) in [
        ("<f8", "False", "(2, 3, 4)", 96),
        ("<f4", "True", "(2, 3, 4)", 96),
        ("<f4", "False", "(2, 3, 5)", 96),
        ("<f4", "False", "(24,)", 96),
        ("<f4", "False", "(2, 3, 4)", 95),
        ("<f4", "False", "(99999999999, 99999999999, 4)", 96),
        ("<f4", "False", "(0, 0, 0)", 0),
        ("<f4", "False", "nothing", 96),
    ] {
        array(&path, kind, order, shape, &bytes[..len]);
        let error = TokenArray::open(&path).unwrap_err().to_string();
        assert!(error.contains("a.npy"), "{error}");
    }
    fs::write(&path, b"\x93NUMPY\x01\x00\xff\xff{").unwrap();
    assert!(TokenArray::open(&path).is_err());
    fs::write(&path, b"no").unwrap();
    assert!(TokenArray::open(&path).is_err());

    let bytes: Vec<u8> = [3i64, -1, 5, 7].iter().flat_map(|i| i.to_le_bytes()).collect();
    array(&path, "<i8", "False", "(2, 2)", &bytes);
    assert_eq!(whole_numbers(&path).unwrap(), (vec![2, 2], vec![3, -1, 5, 7]));
    array(&path, "<i8", "False", "(2, 3)", &bytes);
    assert!(whole_numbers(&path).is_err());
    array(&path, "<f4", "False", "(8,)", &bytes);
    assert!(whole_numbers(&path).is_err());
}

#[test]
fn vectors_in_memory_are_read_as_those_on_disk() {
    let mut all = TokensInMemory::new(DIMENSION);
    (0..LENGTHS.len()).for_each(|d| all.push(&d.to_string(), &vectors(d)).unwrap());
    assert_eq!((all.documents(), all.tokens(), all.start(3)), (11, 19, 8));
    let mut out = [0.0; 6];
    all.read(7, &mut out).unwrap();
    assert_eq!(out.to_vec(), [&vectors(2)[12..], &vectors(3)[..]].concat());
    assert!(all.read(18, &mut out).is_err() && all.read(u64::MAX, &mut out).is_err());
}
