//! Vectors on disk: what was written is read, a finished shard stays, and nothing is believed on the word of a file.

use std::fs;
use std::path::Path;

use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, Vectors, VectorsFolder};

fn settings(dtype: VectorDtype) -> VectorSettings {
    VectorSettings {
        format: FORMAT,
        model: "models/a".into(),
        model_fingerprint: Some("ab".repeat(32)),
        dimension: 3,
        dtype,
        precision: "f32".into(),
        pooling: "mean".into(),
        normalized: false,
        template: "title: {title} context: {text}".into(),
        maxlength: 200,
        batch_tokens: 8192,
        batch_texts: 128,
        window: 1024,
        source: "p.tsv".into(),
        source_fingerprint: Some("cd".repeat(32)),
        count: 5,
        per_shard: 2,
    }
}

fn vector(row: u64) -> [f32; 3] {
    [row as f32 + 0.5, -0.25, row as f32 * -0.125]
}

const IDS: [&str; 5] = ["1", "a\tb", "\"q\"", "line\nend", "東京"];

fn write_shard(folder: &VectorsFolder, number: u64) {
    let mut shard = folder.shard(number).unwrap();
    for row in folder.settings().rows_of(number) {
        shard.push(IDS[row as usize], &vector(row)).unwrap();
    }
    shard.finish("portable").unwrap();
}

fn complete(dir: &Path, dtype: VectorDtype) {
    let folder = VectorsFolder::open(dir, settings(dtype)).unwrap();
    for number in [2, 0, 1] {
        write_shard(&folder, number);
    }
    assert_eq!(folder.complete().unwrap(), 3);
}

#[test]
fn what_was_written_is_read() {
    for dtype in [VectorDtype::F32, VectorDtype::F16, VectorDtype::Bf16] {
        let dir = tempfile::tempdir().unwrap();
        complete(dir.path(), dtype);
        let vectors = Vectors::open(dir.path()).unwrap();
        vectors.verify().unwrap();
        assert_eq!((vectors.len(), vectors.dimension(), vectors.shards()), (5, 3, 3));
        let mut ids = Vec::new();
        for number in 0..3 {
            let shard = vectors.shard(number).unwrap();
            let mut rows = vec![0.0; shard.len() * 3];
            shard.rows(0, &mut rows).unwrap();
            for (k, row) in rows.chunks(3).enumerate() {
                assert_eq!(row, vector(shard.first() + k as u64)); // small dyadic numbers: exact in every format
            }
            ids.extend(shard.ids().unwrap());
        }
        assert_eq!(ids, IDS);
        let shard = vectors.shard(1).unwrap();
        let mut row = [0.0; 3];
        shard.rows(1, &mut row).unwrap();
        assert_eq!(row, vector(3));
        assert!(shard.rows(1, &mut [0.0; 6]).unwrap_err().to_string().contains("has 2 rows of 3 numbers"));
        assert!(shard.rows(usize::MAX, &mut row).is_err() && shard.rows(0, &mut [0.0; 4]).is_err());
        assert!(vectors.shard(3).is_err());
        let stored = fs::metadata(dir.path().join("shard-00000.vectors")).unwrap().len();
        assert_eq!(stored, 2 * 3 * dtype.bytes() as u64);
    }
}

#[test]
fn a_set_grows_shard_by_shard_and_is_complete_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let folder = VectorsFolder::open(dir.path(), settings(VectorDtype::F32)).unwrap();
    write_shard(&folder, 1);
    assert_eq!(folder.complete().unwrap(), 1);
    let error = Vectors::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("not complete") && error.contains("it goes on"), "{error}");

    // A second process, which dies in the middle of a shard.
    let again = VectorsFolder::open(dir.path(), settings(VectorDtype::F32)).unwrap();
    assert!(again.finished(1).unwrap().is_some() && again.finished(0).unwrap().is_none());
    let mut shard = again.shard(0).unwrap();
    shard.push("1", &vector(0)).unwrap();
    drop(shard);
    fs::write(dir.path().join(".shard-00000.vectors.1.0.tmp"), "left by a dead process").unwrap();
    let hidden = || {
        let names = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with('.')).count()
    };
    assert_eq!(hidden(), 1);
    write_shard(&again, 0);
    assert_eq!(hidden(), 0, "what others left of the shard is gone");
    write_shard(&again, 2);
    assert_eq!(again.complete().unwrap(), 3);
    Vectors::open(dir.path()).unwrap().verify().unwrap();

    let short = again.shard(2).unwrap();
    assert!(short.finish("").unwrap_err().to_string().contains("shard 2 has 1 rows, 0 were written"));
    assert!(again.shard(3).is_err());
    Vectors::open(dir.path()).unwrap().verify().unwrap();
}

#[test]
fn vectors_that_cannot_be_stored_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = VectorsFolder::open(dir.path(), settings(VectorDtype::F16)).unwrap();
    let mut shard = folder.shard(0).unwrap();
    for (vector, part) in [
        (&[1.0, 2.0][..], "has 2 numbers, not 3"),
        (&[1.0, f32::NAN, 2.0], "number 1 of the vector is NaN"),
        (&[1.0, 1e6, 2.0], "too large for f16"),
    ] {
        let error = shard.push("a\"b", vector).unwrap_err().to_string();
        assert!(error.contains(r#"passage "a\"b""#) && error.contains(part), "{error}");
    }
}

#[test]
fn other_settings_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let open = |s: VectorSettings| VectorsFolder::open(dir.path(), s).map_err(|e| e.to_string());
    open(settings(VectorDtype::F32)).unwrap();
    let base = || settings(VectorDtype::F32);
    let moved = VectorSettings { model: "elsewhere/a".into(), source: "data/p.tsv".into(), ..base() };
    open(moved).unwrap();
    for (other, parts) in [
        (
            VectorSettings { model: "models/b".into(), model_fingerprint: Some("ef".repeat(32)), ..base() },
            &["another model: models/a (fingerprint abababababab) there, models/b", "name another folder"][..],
        ),
        (
            VectorSettings { source_fingerprint: None, source: "q.tsv".into(), ..base() },
            &["other texts: p.tsv there, q.tsv"],
        ),
        (VectorSettings { dtype: VectorDtype::Bf16, ..base() }, &["another dtype: f32 there, bf16 here"]),
        (VectorSettings { maxlength: 100, ..base() }, &["another maxlength: 200 there"]),
        (VectorSettings { batch_tokens: 64, ..base() }, &["another batch_tokens: 8192 there, 64 here"]),
        (VectorSettings { batch_texts: 64, ..base() }, &["another per_gpu_batch_size: 128 there, 64 here"]),
        (VectorSettings { window: 64, ..base() }, &["another window: 1024 there, 64 here"]),
        (VectorSettings { template: "{text}".into(), ..base() }, &["another template"]),
        (VectorSettings { per_shard: 3, ..base() }, &["another per_shard: 2 there, 3 here"]),
        (VectorSettings { per_shard: 0, ..base() }, &["`per_shard` of 1 or more"]),
        (VectorSettings { dimension: 0, ..base() }, &["a dimension of 1 to"]),
    ] {
        let error = open(other).unwrap_err();
        for part in parts {
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }
    // Without prints the names tell.
    let dir = tempfile::tempdir().unwrap();
    let unknown = |source: &str| {
        let settings = VectorSettings { source_fingerprint: None, source: source.into(), ..base() };
        VectorsFolder::open(dir.path(), settings).map_err(|e| e.to_string())
    };
    unknown("a").unwrap();
    unknown("a").unwrap();
    assert!(unknown("b").unwrap_err().contains("other texts: a there, b here"));
}

#[test]
fn files_that_contradict_their_manifest_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    complete(dir.path(), VectorDtype::F32);
    let manifest = fs::read_to_string(dir.path().join("manifest.json")).unwrap();
    let open = |text: &str| {
        fs::write(dir.path().join("manifest.json"), text).unwrap();
        Vectors::open(dir.path()).map_err(|e| e.to_string())
    };
    for (from, to, part) in [
        ("\"format\": 1", "\"format\": 2", "expected vectors of format 1, found format 2"),
        ("\"count\": 5", "\"count\": 50", "expected 25 shards of 50 vectors, found 3"),
        ("\"dimension\": 3", "\"dimension\": 4", "expected 32 bytes, found 24"),
        ("\"dimension\": 3", "\"dimension\": 99999999999", "expected a dimension of 1 to 65536"),
        ("\"dtype\": \"f32\"", "\"dtype\": \"f64\"", "expected JSON as `tercio embed` writes it"),
        ("shard-00001.vectors", "../../etc/passwd", "../../etc/passwd"),
        ("\"per_shard\": 2", "\"per_shard\": 0", "`per_shard` of 1 or more"),
        ("\"first\": 2", "\"first\": 1", "shard 1 with 2 rows from row 2"),
    ] {
        assert!(manifest.contains(from), "{from} is in {manifest}");
        let error = open(&manifest.replace(from, to)).unwrap_err();
        assert!(error.contains(part), "{error} lacks {part}");
    }
    assert!(open("{").unwrap_err().contains("manifest.json: expected JSON"));
    open(&manifest).unwrap().verify().unwrap();

    let path = dir.path().join("shard-00001.vectors");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[1..]).unwrap();
    assert!(open(&manifest).unwrap_err().contains("expected 24 bytes, found 23"));
    let folder = VectorsFolder::open(dir.path(), settings(VectorDtype::F32)).unwrap();
    assert!(folder.finished(1).unwrap_err().to_string().contains("embed again"));
    let mut damaged = whole.clone();
    damaged[3] ^= 0x40;
    fs::write(&path, &damaged).unwrap();
    let error = open(&manifest).unwrap().verify().unwrap_err().to_string();
    assert!(error.contains("shard-00001.vectors: expected the SHA-256"), "{error}");
    let not_a_number = [&f32::NAN.to_le_bytes()[..], &whole[4..]].concat();
    fs::write(&path, &not_a_number).unwrap();
    let error = open(&manifest).unwrap().shard(1).unwrap().rows(0, &mut [0.0; 6]).unwrap_err().to_string();
    assert!(error.contains("row 0 has NaN as number 0"), "{error}");
    fs::write(&path, &whole).unwrap();

    for (ids, part) in [
        ("\"a\"\n", "expected 2 ids, found 1"),
        ("\"a\"\n\"b\"\n\"c\"\n", "found more"),
        ("\"a\"\nb\n", "line 2: expected a JSON string"),
    ] {
        fs::write(dir.path().join("shard-00001.ids"), ids).unwrap();
        let error = open(&manifest).unwrap().shard(1).unwrap().ids().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    fs::remove_file(&path).unwrap();
    assert!(open(&manifest).unwrap_err().contains("shard-00001.vectors"));
    let empty = tempfile::tempdir().unwrap();
    assert!(Vectors::open(empty.path()).unwrap_err().to_string().contains("make one with `tercio embed`"));
}
