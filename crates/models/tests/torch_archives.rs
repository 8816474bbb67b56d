//! PyTorch archives built byte by byte: both formats, views, and files that are cut off, damaged or hostile.

use std::io::{Cursor, Write};
use std::path::Path;

use proptest::prelude::*;
use tercio_models::weights::{Result, WeightsReader};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A view of a storage: name, class, key, elements of the storage, offset, shape, strides.
struct View(&'static str, &'static str, &'static str, i64, i64, Vec<i64>, Vec<i64>);

fn text(out: &mut Vec<u8>, s: &str) {
    out.push(b'X');
    out.extend((s.len() as u32).to_le_bytes());
    out.extend(s.as_bytes());
}

fn int(out: &mut Vec<u8>, i: i64) {
    out.extend([0x8a, 8]);
    out.extend(i.to_le_bytes());
}

fn ints(out: &mut Vec<u8>, values: &[i64]) {
    out.push(b'(');
    values.iter().for_each(|&i| int(out, i));
    out.push(b't');
}

/// The pickle of an OrderedDict of views, with `_metadata` as a state dict has it. `legacy` adds the view field.
fn pickle(views: &[View], legacy: bool) -> Vec<u8> {
    let mut p = b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec();
    for View(name, class, key, numel, offset, shape, strides) in views {
        text(&mut p, name);
        p.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut p, "storage");
        p.extend(format!("ctorch\n{class}\n").bytes());
        text(&mut p, key);
        text(&mut p, "cpu");
        int(&mut p, *numel);
        p.extend(if legacy { &b"NtQ"[..] } else { b"tQ" });
        int(&mut p, *offset);
        ints(&mut p, shape);
        ints(&mut p, strides);
        p.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    p.extend(b"u}");
    text(&mut p, "_metadata");
    p.extend(b"ccollections\nOrderedDict\n)Rsb.");
    p
}

fn zip_of(pickle: &[u8], storages: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(method);
    let mut add = |name: &str, bytes: &[u8]| {
        zip.start_file(name, options).unwrap();
        zip.write_all(bytes).unwrap();
    };
    add("archive/data.pkl", pickle);
    add("archive/byteorder", b"little");
    for (key, bytes) in storages {
        add(&format!("archive/data/{key}"), bytes);
    }
    zip.finish().unwrap().into_inner()
}

/// The format before torch 1.6; a storage comes with its number of elements.
fn legacy_of(pickle: &[u8], storages: &[(&str, u64, &[u8])]) -> Vec<u8> {
    let mut file =
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}".to_vec();
    text(&mut file, "little_endian");
    file.extend(b"\x88s.");
    file.extend(pickle);
    file.extend(b"\x80\x02](");
    storages.iter().for_each(|(key, ..)| text(&mut file, key));
    file.extend(b"e.");
    for (_, numel, bytes) in storages {
        file.extend(numel.to_le_bytes());
        file.extend(*bytes);
    }
    file
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn write(folder: &Path, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.join("pytorch_model.bin");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Opens and reads everything.
fn read_all(path: &Path) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
    let reader = WeightsReader::open(path)?;
    reader
        .names()
        .map(|name| Ok((name.to_owned(), reader.shape(name)?.to_vec(), reader.read(name)?)))
        .collect()
}

fn read_bytes(bytes: &[u8]) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
    let folder = tempfile::tempdir().unwrap();
    read_all(&write(folder.path(), bytes))
}

fn error_of(bytes: &[u8]) -> String {
    let error = read_bytes(bytes).expect_err("an error").to_string();
    assert!(error.contains("pytorch_model.bin"), "{error}");
    error
}

fn view(offset: i64, shape: &[i64], strides: &[i64]) -> View {
    View("w", "FloatStorage", "0", 6, offset, shape.to_vec(), strides.to_vec())
}

const SIX: [f32; 6] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];

fn both(views: &[View]) -> [Vec<u8>; 2] {
    let six = f32s(&SIX);
    [
        zip_of(&pickle(views, false), &[("0", &six)], CompressionMethod::Stored),
        legacy_of(&pickle(views, true), &[("0", 6, &six)]),
    ]
}

#[test]
fn views_of_a_shared_storage_are_read_in_both_formats() {
    let mut views =
        vec![view(0, &[2, 3], &[3, 1]), view(0, &[3, 2], &[1, 3]), view(4, &[2], &[1]), view(2, &[], &[])];
    views.push(view(0, &[0, 7], &[7, 1]));
    views.push(view(0, &[0, i64::MAX, i64::MAX], &[1, 1, 1]));
    for (view, name) in views.iter_mut().zip(["plain", "transposed", "tail", "scalar", "empty", "void"]) {
        view.0 = name;
    }
    for bytes in both(&views) {
        let read = read_bytes(&bytes).unwrap();
        let huge = i64::MAX as usize;
        let expected: [(&str, &[usize], &[f32]); 6] = [
            ("empty", &[0, 7], &[]),
            ("plain", &[2, 3], &SIX),
            ("scalar", &[], &[2.0]),
            ("tail", &[2], &[4.0, 5.0]),
            ("transposed", &[3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
            ("void", &[0, huge, huge], &[]),
        ];
        for ((name, shape, data), expected) in read.iter().zip(expected) {
            assert_eq!((name.as_str(), &shape[..], &data[..]), expected);
        }
        assert_eq!(read.len(), 6);
    }
}

#[test]
fn other_formats_are_turned_into_f32_or_listed() {
    let views = [
        View("half", "HalfStorage", "0", 2, 0, vec![2], vec![1]),
        View("ids", "LongStorage", "1", 1, 0, vec![1], vec![1]),
    ];
    let (half, ids) = ([0x00, 0x3c, 0x00, 0xc1], 7i64.to_le_bytes());
    let bytes = zip_of(&pickle(&views, false), &[("0", &half), ("1", &ids)], CompressionMethod::Stored);
    let folder = tempfile::tempdir().unwrap();
    let reader = WeightsReader::open(&write(folder.path(), &bytes)).unwrap();
    assert_eq!(reader.read("half").unwrap(), [1.0, -2.5]);
    assert_eq!(reader.shape("ids").unwrap(), [1]);
    let error = reader.read("ids").unwrap_err().to_string();
    assert!(error.contains("`ids`") && error.contains("I64"), "{error}");
    assert!(reader.read("w").unwrap_err().to_string().contains("no tensor `w` among the 2"));
    assert!(reader.read_f32("half", &mut [0.0; 3]).unwrap_err().to_string().contains("expected 3 numbers"));
}

#[test]
fn views_outside_their_storage_are_errors() {
    let huge = i64::MAX;
    for (offset, shape, strides) in [
        (1, vec![2, 3], vec![3, 1]),
        (0, vec![2, 3], vec![4, 1]),
        (6, vec![1], vec![1]),
        (7, vec![0], vec![1]),
        (0, vec![huge, huge], vec![huge, 1]),
        (0, vec![3], vec![huge]),
        (huge, vec![1], vec![1]),
        // More elements than the storage has, all of them the same one.
        (0, vec![1 << 40], vec![0]),
    ] {
        for bytes in both(&[view(offset, &shape, &strides)]) {
            let error = error_of(&bytes);
            assert!(error.contains("tensor `w`") && error.contains("leave its storage of 6"), "{error}");
        }
    }
    for bytes in both(&[view(0, &[2], &[-1])]) {
        assert!(error_of(&bytes).contains("strides -1"));
    }
}

#[test]
fn storages_that_lie_about_their_size_are_errors() {
    for numel in [5, 7, i64::MAX] {
        for bytes in both(&[View("w", "FloatStorage", "0", numel, 0, vec![1], vec![1])]) {
            assert!(error_of(&bytes).contains("its storage should have"), "{numel}");
        }
    }
    let [zip, _] = both(&[View("w", "FloatStorage", "9", 6, 0, vec![1], vec![1])]);
    assert!(error_of(&zip).contains("storage 9 is not in the file"));
    let p = pickle(&[view(0, &[6], &[1])], true);
    assert!(error_of(&legacy_of(&p, &[("0", u64::MAX, &f32s(&SIX))])).contains("does not fit"));
    assert!(error_of(&legacy_of(&p, &[("0", 6, &f32s(&[0.0; 7]))])).contains("follow the last storage"));
    assert!(error_of(&legacy_of(&p, &[("1", 6, &f32s(&SIX))])).contains("belongs to no tensor"));
}

#[test]
fn code_is_refused_and_named() {
    let system = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.";
    for bytes in [zip_of(system, &[], CompressionMethod::Stored), legacy_of(system, &[])] {
        let error = error_of(&bytes);
        assert!(error.contains("`posix.system` is not a tensor; the file may run code; refused"), "{error}");
    }
    assert!(error_of(system).contains("posix.system"));
}

#[test]
fn wrong_checksums_and_compressed_members_are_errors() {
    let [good, _] = both(&[view(0, &[6], &[1])]);
    let data = f32s(&SIX);
    let at = good.windows(data.len()).position(|w| w == data).unwrap();
    let mut bad = good.clone();
    bad[at] ^= 1;
    let error = error_of(&bad);
    assert!(error.contains("tensor `w`") && error.contains("damaged"), "{error}");
    let packed = zip_of(&pickle(&[view(0, &[6], &[1])], false), &[("0", &data)], CompressionMethod::Deflated);
    assert!(error_of(&packed).contains("compressed"));
}

#[test]
fn other_files_are_told_apart() {
    assert!(error_of(b"").contains("something else"));
    assert!(error_of(b"{\"a\": 1}").contains("something else"));
    assert!(error_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n").contains("git lfs pull"));
    assert!(error_of(b"\x80\x02}.").contains("not one that torch.save wrote"));
    assert!(error_of(&zip_of(b"", &[], CompressionMethod::Stored)).contains("cut off"));
    let mut other = ZipWriter::new(Cursor::new(Vec::new()));
    other
        .start_file("readme", SimpleFileOptions::default().compression_method(CompressionMethod::Stored))
        .unwrap();
    assert!(error_of(&other.finish().unwrap().into_inner()).contains("expected one `data.pkl`"));
}

#[test]
fn every_prefix_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in both(&[view(0, &[2, 3], &[3, 1])]) {
        for n in 0..bytes.len() {
            assert!(read_all(&write(folder.path(), &bytes[..n])).is_err(), "{n} of {} bytes", bytes.len());
        }
    }
}

#[test]
fn a_damaged_zip_is_an_error_or_still_right() {
    let folder = tempfile::tempdir().unwrap();
    let [bytes, _] = both(&[view(0, &[2, 3], &[3, 1])]);
    let right = read_bytes(&bytes).unwrap();
    for i in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut bad = bytes.clone();
            bad[i] ^= flip;
            if let Ok(read) = read_all(&write(folder.path(), &bad)) {
                assert_eq!(read, right, "byte {i}");
            }
        }
    }
}

proptest! {
    #[test]
    fn damage_never_panics(position: prop::sample::Index, value: u8, which in 0usize..2, cut: prop::sample::Index) {
        let mut bytes = both(&[view(0, &[2, 3], &[3, 1])])[which].clone();
        let i = position.index(bytes.len());
        bytes[i] = value;
        // Two faults at once reach further than one.
        let j = cut.index(bytes.len());
        bytes[j] = value.wrapping_mul(31);
        let _ = read_bytes(&bytes);
    }
}

#[test]
fn shards_of_archives_are_joined() {
    let folder = tempfile::tempdir().unwrap();
    let [zip, legacy] = both(&[view(0, &[6], &[1])]);
    std::fs::write(folder.path().join("one.bin"), zip).unwrap();
    let index = folder.path().join("pytorch_model.bin.index.json");
    std::fs::write(&index, r#"{"weight_map": {"w": "one.bin"}}"#).unwrap();
    assert_eq!(read_all(&index).unwrap(), [("w".to_owned(), vec![6], SIX.to_vec())]);
    std::fs::write(folder.path().join("two.bin"), legacy).unwrap();
    std::fs::write(&index, r#"{"weight_map": {"w": "one.bin", "v": "two.bin"}}"#).unwrap();
    let error = read_all(&index).unwrap_err().to_string();
    assert!(error.contains("two.bin: tensor `w`: it is in"), "{error}");
}

#[test]
fn what_is_no_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = |path: &Path| WeightsReader::open(path).unwrap_err().to_string();
    assert!(error(folder.path()).contains("found a folder"));
    assert!(error(Path::new("/dev/zero")).contains("found a folder, pipe or device"));
    assert!(error(&folder.path().join("pytorch_model.bin")).contains("cannot open"));
}
