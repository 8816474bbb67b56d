//! Vectors that other programs pickled are read as they are; whatever else a pickle may be is refused.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::Value;
use tercio_models::weights::PickledVectors;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vectors")
}

fn facts() -> (Vec<String>, usize) {
    let facts: Value = serde_json::from_slice(&std::fs::read(folder().join("facts.json")).unwrap()).unwrap();
    let ids = facts["ids"].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect();
    (ids, facts["dimension"].as_u64().unwrap() as usize)
}

fn error(name: &str) -> String {
    PickledVectors::open(&folder().join(name)).unwrap_err().to_string()
}

#[test]
fn both_forms_are_read_in_every_format() {
    let (ids, dimension) = facts();
    let want: Vec<f32> =
        (0..ids.len()).flat_map(|r| (0..dimension).map(move |c| r as f32 - c as f32 / 8.0)).collect();
    let mut names = vec!["dpr-4.pickle".to_owned(), "dpr-5.pickle".to_owned()];
    for protocol in [3, 4, 5] {
        for dtype in ["float16", "float32", "float64"] {
            names.push(format!("fid-{dtype}-{protocol}.pickle"));
        }
    }
    for name in names {
        let vectors = PickledVectors::open(&folder().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((vectors.len(), vectors.dimension()), (ids.len(), dimension), "{name}");
        let found: Vec<&str> = (0..vectors.len()).map(|i| vectors.id(i)).collect();
        assert_eq!(found, ids, "{name}");
        let mut rows = vec![0.0; want.len()];
        vectors.rows(0, &mut rows).unwrap();
        assert_eq!(rows, want, "{name}");
        let mut two = vec![0.0; 2 * dimension];
        vectors.rows(3, &mut two).unwrap();
        assert_eq!(two, want[3 * dimension..5 * dimension], "{name}");
        assert!(vectors.rows(5, &mut two).is_err() && vectors.rows(usize::MAX, &mut two).is_err());
        assert!(vectors.rows(0, &mut two[..dimension + 1]).is_err());
    }
}

#[test]
fn other_contents_are_refused_by_name() {
    for (name, part) in [
        ("integers.pickle", "other numbers than floats"),
        ("big-endian.pickle", "byte order \">\""),
        ("by-columns.pickle", "columns come first"),
        ("short.pickle", "as many rows as the 5 ids, found 6"),
        ("objects.pickle", "an id, found None"),
        ("flat.pickle", "2 axes, found the shape [5]"),
        ("empty.pickle", "an empty list"),
        ("protocol-2.pickle", "protocol 4"),
        ("facts.json", "refused"),
    ] {
        let error = error(name);
        assert!(error.contains(name) && error.contains(part), "{name}: {error} lacks {part}");
    }
    assert!(error("nothing.pickle").contains("cannot open"));
}

#[test]
fn code_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.pickle");
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        PickledVectors::open(&path).unwrap_err().to_string()
    };
    for (bytes, part) in [
        (&b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."[..], "`os.system`"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "`builtins.eval`"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n.", "`torch._utils._rebuild_tensor_v2`"),
        (b"cnumpy\nload\n.", "`numpy.load`"),
        (b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93(K\x01K\x02tR.", "a call of a class or function"),
        (b"\x80\x04]K\x01}b.", "a state that is a dict"),
        (b"\x80\x04B\xff\xff\xff\x7f.", "cut short"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", "cut short"),
        (b"\x80\x04X\xff\xff\xff\x7f.", "a text of 2147483647 bytes"),
        (b"\x80\x04]", "cut short"),
        (b"\x80\x04K\x01.", "found an integer"),
        (b"I1\n.", "operation 'I', which no list of ids and vectors needs"),
        (b"", "cut short"),
    ] {
        let error = open(bytes);
        assert!(error.contains(part), "{error} lacks {part}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_flipped_byte_is_an_error_or_another_vector(which in 0usize..4, at in any::<prop::sample::Index>(), bits in 1u8..) {
        let name = ["fid-float16-3.pickle", "fid-float32-4.pickle", "fid-float64-5.pickle", "dpr-4.pickle"][which];
        let mut bytes = std::fs::read(folder().join(name)).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= bits;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flipped.pickle");
        std::fs::write(&path, bytes).unwrap();
        if let Ok(vectors) = PickledVectors::open(&path) {
            let mut row = vec![0.0; vectors.dimension()];
            for i in 0..vectors.len() {
                // A number of 64 bits may have become one that 32 cannot hold.
                let read = vectors.rows(i, &mut row).map_err(|e| e.to_string());
                prop_assert!(read.is_ok() || read.unwrap_err().contains("does not fit into 32-bit floats"));
            }
        }
    }
}
