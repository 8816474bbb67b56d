//! Safetensors files, single and sharded, against the safetensors crate and against damage.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::tensor::{SafeTensors, TensorView};
use tercio_models::weights::{Dtype, Result, WeightsReader, save_safetensors};

fn file(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A file with this header and data.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(data);
    bytes
}

fn read_all(path: &Path) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
    let reader = WeightsReader::open(path)?;
    reader
        .names()
        .map(|name| Ok((name.to_owned(), reader.shape(name)?.to_vec(), reader.read(name)?)))
        .collect()
}

fn error_of(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let error = read_all(&file(folder.path(), "model.safetensors", bytes)).expect_err("an error").to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    error
}

#[test]
fn what_is_written_is_read_by_the_crate_and_by_us() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    // More than one chunk of reading, and not a multiple of it.
    let long: Vec<f32> = (0..70_001).map(|i| i as f32 * 0.5).collect();
    let tensors: [(&str, &[usize], &[f32]); 4] = [
        ("b", &[70_001], &long),
        ("a", &[2, 1], &[1.0, f32::NAN]),
        ("scalar", &[], &[3.0]),
        ("none", &[0, 4], &[]),
    ];
    save_safetensors(&path, tensors, &[("format", "pt"), ("by", "tercio")]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let ours = WeightsReader::open(&path).unwrap();
    assert_eq!(ours.names().collect::<Vec<_>>(), ["a", "b", "none", "scalar"]);
    for (name, shape, data) in tensors {
        let view = theirs.tensor(name).unwrap();
        let stored: Vec<u8> = data.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!((view.shape(), view.data()), (shape, &stored[..]));
        assert_eq!(ours.shape(name).unwrap(), shape);
        let read = ours.read(name).unwrap();
        assert!(read.iter().zip(data).all(|(x, y)| x.to_bits() == y.to_bits()) && read.len() == data.len());
    }
    assert!(ours.same("b", "b").unwrap() && !ours.same("a", "scalar").unwrap());
    save_safetensors(&path, tensors, &[("format", "pt"), ("by", "tercio")]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

#[test]
fn files_of_the_crate_are_read_whatever_their_format() {
    let folder = tempfile::tempdir().unwrap();
    let (half, ids) = ([0x00, 0x3c, 0x00, 0xc1], 7i64.to_le_bytes());
    let views = [
        ("half", TensorView::new(safetensors::Dtype::F16, vec![2], &half).unwrap()),
        ("position_ids", TensorView::new(safetensors::Dtype::I64, vec![1], &ids).unwrap()),
        ("small", TensorView::new(safetensors::Dtype::F8_E4M3, vec![4], &half).unwrap()),
    ];
    let path = file(folder.path(), "model.safetensors", &safetensors::serialize(views, None).unwrap());
    let reader = WeightsReader::open(&path).unwrap();
    assert_eq!(reader.read("half").unwrap(), [1.0, -2.5]);
    assert_eq!(reader.dtype("half").unwrap(), &Dtype::F16);
    for (name, dtype) in [("position_ids", "I64"), ("small", "F8_E4M3")] {
        let error = reader.read(name).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}`: it is stored as {dtype}")), "{error}");
    }
}

#[test]
fn writing_checks_its_input() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let twice: [(&str, &[usize], &[f32]); 2] = [("a", &[1], &[1.0]), ("a", &[1], &[2.0])];
    assert!(save_safetensors(&path, twice, &[]).unwrap_err().to_string().contains("written twice"));
    let short: [(&str, &[usize], &[f32]); 1] = [("a", &[2, 2], &[1.0])];
    assert!(save_safetensors(&path, short, &[]).unwrap_err().to_string().contains("shape [2, 2]"));
    assert!(!path.exists());
    let nowhere = folder.path().join("no/where.safetensors");
    assert!(save_safetensors(&nowhere, [], &[]).unwrap_err().to_string().contains("cannot create"));
}

#[test]
fn wrong_headers_name_file_and_tensor() {
    let tensor = |dtype: &str, shape: &str, range: &str| {
        format!(r#"{{"w": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {range}}}}}"#)
    };
    for (header, data, expected) in [
        (tensor("F32", "[2]", "[0, 8]"), 7, "are not inside the 7 bytes"),
        (tensor("F32", "[2]", "[8, 0]"), 8, "are not inside"),
        (tensor("F32", "[3]", "[0, 8]"), 8, "does not fit its 8 bytes"),
        (tensor("F32", "[2]", "[4, 12]"), 12, "expected 0: ranges overlap or leave a gap"),
        (tensor("F32", "[9223372036854775807, 9]", "[0, 8]"), 8, "overflows"),
        (tensor("F32", "[4611686018427387904]", "[0, 0]"), 0, "does not fit its 0 bytes"),
        (tensor("F32", "[-1]", "[0, 4]"), 4, "the header is not what"),
        (tensor("F32", "[1]", "[0]"), 4, "the header is not what"),
        (r#"{"w": 3}"#.to_owned(), 0, "the header is not what"),
    ] {
        let error = error_of(&raw(&header, &vec![0; data]));
        assert!(error.contains("tensor `w`") && error.contains(expected), "{error}");
    }
    let error = error_of(&raw(&tensor("F32", "[2]", "[0, 8]"), &[0; 9]));
    assert!(error.contains("end at byte 8 of 9"), "{error}");
    let twice = r#"{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": {}}"#;
    assert!(error_of(&raw(twice, &[0])).contains("`w` is there twice"));
    assert!(error_of(&raw("[]", &[])).contains("the header is not what"));
    assert!(error_of(&raw(&"[".repeat(100_000), &[])).contains("the header is not what"));
    assert!(
        error_of(&u64::MAX.to_le_bytes()).contains("claims 18446744073709551615 bytes, but only 0 follow")
    );
    assert!(error_of(b"abc").contains("found only 3 bytes"));
    assert!(error_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n").contains("git lfs pull"));
}

fn small() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors: [(&str, &[usize], &[f32]); 2] = [("a", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), ("b", &[1], &[5.0])];
    save_safetensors(&path, tensors, &[("format", "pt")]).unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn every_prefix_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = small();
    for n in 0..bytes.len() {
        assert!(read_all(&file(folder.path(), "model.safetensors", &bytes[..n])).is_err(), "{n}");
    }
}

proptest! {
    #[test]
    fn damage_never_panics(position: prop::sample::Index, value: u8) {
        let mut bytes = small();
        let i = position.index(bytes.len());
        bytes[i] = value;
        let folder = tempfile::tempdir().unwrap();
        let _ = read_all(&file(folder.path(), "model.safetensors", &bytes));
    }
}

/// Two shards, with this index.
fn sharded(index: &str) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
    let folder = tempfile::tempdir().unwrap();
    for (shard, tensors) in [("one", &["a", "b"][..]), ("two", &["c"]), ("again", &["c", "d"])] {
        let path = folder.path().join(format!("{shard}.safetensors"));
        let owned: Vec<_> = tensors.iter().map(|name| (*name, [f32::from(name.as_bytes()[0])])).collect();
        save_safetensors(&path, owned.iter().map(|(n, d)| (*n, &[1usize][..], &d[..])), &[]).unwrap();
    }
    read_all(&file(folder.path(), "model.safetensors.index.json", index.as_bytes()))
}

#[test]
fn shards_are_joined_and_checked_against_the_index() {
    let index =
        |map: &str| sharded(&format!(r#"{{"metadata": {{"total_size": 12}}, "weight_map": {{{map}}}}}"#));
    let read = index(r#""a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors""#).unwrap();
    let values: Vec<(&str, f32)> = read.iter().map(|(name, _, data)| (name.as_str(), data[0])).collect();
    assert_eq!(values, [("a", 97.0), ("b", 98.0), ("c", 99.0)]);
    for (map, expected) in [
        (r#""a": "three.safetensors""#, "tensor `a`: its shard"),
        (
            r#""a": "two.safetensors""#,
            "tensor `a`: the index says that it is in two.safetensors, but it is not",
        ),
        (r#""c": "two.safetensors", "d": "again.safetensors""#, "tensor `c`: it is in"),
        (r#""a": "one.safetensors", "a": "two.safetensors""#, "`a` is there twice"),
        (r#""a": "../one.safetensors""#, "beside the index"),
        (r#""a": "/etc/passwd""#, "beside the index"),
        (r#""a": "model.safetensors.index.json""#, "beside the index"),
        (r#""a": 1"#, "weight_map"),
        ("", "an empty one"),
    ] {
        let error = index(map).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(sharded("{").unwrap_err().to_string().contains("index.json: expected"));
    assert!(sharded("{}").unwrap_err().to_string().contains("weight_map"));
}
