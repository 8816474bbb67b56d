//! Fusion-in-Decoder's layout out and in, as a folder and as an archive; and archives that are made to do harm.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use golden_folder::golden_folder;
use serde_json::Value;
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;
use tercio_engine::{Cpu, Device};
use tercio_models::export::{ExportReport, FidOptions, ModelLayout, TokenizerFiles, export};
use tercio_models::folder::ModelFolder;
use tercio_models::import::{ImportedKind, import};
use tercio_models::t5::{LoadedT5, T5};
use tercio_models::weights::fid_layout::CROSS_ATTENTION_BIAS;
use tercio_models::weights::{WeightsReader, save_safetensors};

const FID: ModelLayout =
    ModelLayout::Fid(FidOptions { no_cross_attention_bias: false, newer_library: false });
const ONLY_OURS: ModelLayout =
    ModelLayout::Fid(FidOptions { no_cross_attention_bias: true, newer_library: true });

/// Folders of models: those of the stored cases, and the relatives.
fn models() -> Vec<PathBuf> {
    let list = |folder: PathBuf| fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    let mut all = list(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/families"));
    for case in list(golden_folder()) {
        let is_reader = case.file_name().unwrap().to_str().unwrap().starts_with("fid_reader");
        all.extend(
            ["model", "model_fid_layout"]
                .map(|m| case.join(m))
                .into_iter()
                .filter(|m| is_reader && m.is_dir()),
        );
    }
    all.sort();
    assert!(all.len() > 6);
    all
}

fn open(folder: &Path) -> ModelFolder {
    ModelFolder::open(folder.to_str().unwrap()).unwrap()
}

fn load(folder: &Path) -> LoadedT5<Cpu> {
    LoadedT5::open(&open(folder), &Cpu::new(1).unwrap()).unwrap()
}

fn write(folder: &Path, layout: ModelLayout, output: &Path) -> Result<ExportReport, String> {
    export(&open(folder), layout, &TokenizerFiles::default(), output).map_err(|e| e.to_string())
}

fn assert_same(left: &Path, right: &Path) {
    let (a, b) = (load(left), load(right));
    assert_eq!(format!("{:?}", a.model.config), format!("{:?}", b.model.config), "{}", left.display());
    let device = Cpu::new(1).unwrap();
    let bits =
        |m: &LoadedT5<Cpu>| device.host(m.parameters.all()).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(bits(&a) == bits(&b), "{}: the values differ", left.display());
}

#[test]
fn golden_models_go_through_both_layouts_and_come_back() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let [fid, plain, again] = ["fid", "plain", "again"].map(|n| dir.path().join(n));
        write(&model, ONLY_OURS, &fid).unwrap();
        write(&fid, ModelLayout::HuggingFace, &plain).unwrap();
        assert!(T5::read_headers(&open(&fid)).unwrap().fid_layout);
        assert!(!T5::read_headers(&open(&plain)).unwrap().fid_layout);
        assert_same(&model, &fid);
        assert_same(&model, &plain);
        let report = import(&fid, &TokenizerFiles::default(), &again).unwrap();
        assert_eq!((report.kind, report.tokenizer), (ImportedKind::Reader, false));
        assert_same(&model, &again);
    }
}

#[test]
fn golden_fid_export_has_the_names_of_fid() {
    let mut seen = 0;
    for model in models().into_iter().filter(|m| m.ends_with("model_fid_layout")) {
        seen += 1;
        let case = model.parent().unwrap();
        let expected: Value = serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        let keys = expected["legacy"]["state_dict_keys"].as_array().unwrap();
        let mut keys: Vec<&str> = keys.iter().map(|k| k.as_str().unwrap()).collect();
        keys.sort_unstable();
        // With its table, and from the model without one, where it is zeros.
        for (source, zeros) in [(model.clone(), false), (case.join("model"), true)] {
            let dir = tempfile::tempdir().unwrap();
            let output = dir.path().join("fid");
            let report = write(&source, FID, &output).unwrap();
            assert!(report.cross_attention_bias && report.tensors == keys.len());
            let reader = WeightsReader::open(&output.join("pytorch_model.bin")).unwrap();
            assert_eq!(reader.names().collect::<Vec<_>>(), keys);
            let table = reader.read(CROSS_ATTENTION_BIAS).unwrap();
            assert_eq!(table.iter().all(|v| v.to_bits() == 0), zeros);
            let config: Value =
                serde_json::from_slice(&fs::read(output.join("config.json")).unwrap()).unwrap();
            assert_eq!(config["architectures"][0], "FiDT5");
        }
    }
    assert!(seen > 0, "no stored case in Fusion-in-Decoder's layout");
}

#[test]
fn what_fid_cannot_compute_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/families");
    for (name, part) in [
        ("mt5", "the architecture of mT5, a gated feed-forward, a vocabulary head of its own"),
        ("t5_efficient", "another number of decoder than encoder layers"),
        ("t5_tied_unscaled", "not scaled"),
    ] {
        let error = write(&families.join(name), FID, &dir.path().join("x")).unwrap_err();
        assert!(error.contains(part) && error.contains("3.0.2"), "{error}");
    }
    let tokenizer = TokenizerFiles { size: 1_000_000, files: vec![] };
    let error =
        export(&open(&families.join("mt5")), ModelLayout::HuggingFace, &tokenizer, &dir.path().join("x"));
    assert!(error.unwrap_err().to_string().contains("1000000 ids"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was left behind");
}

/// What an entry of a made archive is.
enum Made<'a> {
    File(&'a [u8]),
    Other(EntryType, &'a str),
}

fn tar(entries: &[(&str, Made)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, made) in entries {
        let mut header = Header::new_gnu();
        // Not through the library, which refuses such names.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_mode(0o644);
        let bytes = match made {
            Made::File(bytes) => *bytes,
            Made::Other(kind, target) => {
                header.set_entry_type(*kind);
                if !target.is_empty() {
                    header.set_link_name(target).unwrap();
                }
                &[]
            }
        };
        header.set_size(bytes.len() as u64);
        header.set_cksum();
        builder.append(&header, bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Imports the bytes of an archive; what is left of a failure is nothing.
fn import_bytes(bytes: &[u8]) -> (TempDir, Result<tercio_models::import::ImportReport, String>) {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("nq_reader_base.tar.gz");
    fs::write(&archive, bytes).unwrap();
    let result =
        import(&archive, &TokenizerFiles::default(), &dir.path().join("out")).map_err(|e| e.to_string());
    if result.is_err() {
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was left behind");
    }
    (dir, result)
}

fn reader_files() -> (Vec<u8>, Vec<u8>) {
    let model = models().into_iter().find(|m| m.ends_with("model_fid_layout")).unwrap();
    (fs::read(model.join("config.json")).unwrap(), fs::read(model.join("pytorch_model.bin")).unwrap())
}

#[test]
fn golden_archives_of_readers_are_imported() {
    let model = models().into_iter().find(|m| m.ends_with("model_fid_layout")).unwrap();
    let (config, weights) = reader_files();
    let files = |prefix: &str| {
        let names = ["config.json", "pytorch_model.bin", "optimizer.pth.tar"].map(|n| format!("{prefix}{n}"));
        let entries = [
            (prefix, Made::Other(EntryType::Directory, "")),
            (&names[0], Made::File(&config)),
            (&names[1], Made::File(&weights)),
            (&names[2], Made::File(b"x")),
        ];
        tar(&entries[usize::from(prefix.is_empty())..])
    };
    for bytes in [gz(&files("nq_reader_base/")), gz(&files("./a/b/")), files("")] {
        let (dir, result) = import_bytes(&bytes);
        let report = result.unwrap();
        assert!(report.cross_attention_bias && report.left_out[0].ends_with("optimizer.pth.tar"));
        assert_same(&model, &dir.path().join("out"));
        let files: Vec<_> =
            fs::read_dir(dir.path().join("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(files.len(), 3, "{files:?}");
    }
}

#[test]
fn hostile_archives_are_refused() {
    let (config, weights) = reader_files();
    let config = || Made::File(&config);
    let model = || [("m/config.json", config()), ("m/pytorch_model.bin", Made::File(&weights))];
    let with = |name, made| {
        let [a, b] = model();
        gz(&tar(&[a, b, (name, made)]))
    };
    let zeros = vec![0; 100 << 20];
    let whole = gz(&tar(&model()));
    for (bytes, part) in [
        (with("../x", Made::File(b"x")), "would leave the folder"),
        (with("m/../../config.json", Made::File(b"x")), "would leave the folder"),
        (with("/etc/x", Made::File(b"x")), "would leave the folder"),
        (with("..\\x", Made::File(b"x")), "would leave the folder"),
        (with("m/link", Made::Other(EntryType::Symlink, "/etc/passwd")), "a symbolic link"),
        (with("m/spiece.model", Made::Other(EntryType::Link, "m/config.json")), "a hard link"),
        (with("m/pipe", Made::Other(EntryType::Fifo, "")), "a pipe"),
        (with("m/device", Made::Other(EntryType::Block, "")), "a device"),
        (with("m/config.json", config()), "twice"),
        (with("n/config.json", config()), "found 2 (\"m\", \"n\")"),
        (gz(&tar(&[("m/bomb", Made::File(&zeros))])), "unpacks to more than"),
        (gz(&tar(&[("m/x", config())])), "no config.json"),
        (whole[..whole.len() / 2].to_vec(), "cut off or damaged"),
        (tar(&model())[..2000].to_vec(), "cut off"),
        (b"x".to_vec(), "found 1 bytes"),
        (b"<html>not found</html>".repeat(50), "cut off or damaged"),
        (
            gz(&tar(&[("m/config.json", config()), ("m/pytorch_model.bin", Made::File(b"x"))])),
            "pytorch_model.bin",
        ),
        (gz(&tar(&[("m/config.json", Made::File(b"[]"))])), "JSON object"),
    ] {
        let error = import_bytes(&bytes).1.unwrap_err();
        assert!(error.contains(part), "expected {part:?} in {error}");
    }
}

#[test]
fn a_retriever_becomes_a_bert() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("nq_retriever");
    fs::create_dir(&source).unwrap();
    let config = r#"{"model_type": "bert", "indexing_dimension": 768, "vocab_size": 3, "hidden_size": 2, "projection": false}"#;
    fs::write(source.join("config.json"), config).unwrap();
    let tensors: [(&str, &[usize], &[f32]); 3] = [
        ("model.embeddings.word_embeddings.weight", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        ("model.embeddings.position_ids", &[1], &[0.0]),
        ("proj.weight", &[1, 2], &[7.0, 8.0]),
    ];
    save_safetensors(&source.join("model.safetensors"), tensors, &[]).unwrap();
    fs::write(source.join("vocab.txt"), "[PAD]\n").unwrap();
    let output = dir.path().join("bert");
    let report = import(&source, &TokenizerFiles::default(), &output).unwrap();
    assert_eq!((report.kind, report.parameters, report.tokenizer), (ImportedKind::Retriever, 8, true));
    let reader = WeightsReader::open(&output.join("model.safetensors")).unwrap();
    assert_eq!(reader.names().collect::<Vec<_>>(), ["embeddings.word_embeddings.weight", "proj.weight"]);
    assert_eq!(reader.read("proj.weight").unwrap(), [7.0, 8.0]);
    let json: Value = serde_json::from_slice(&fs::read(output.join("config.json")).unwrap()).unwrap();
    assert_eq!((&json["architectures"][0], &json["indexing_dimension"]), (&"BertModel".into(), &768.into()));
    // Sizes that do not fit.
    fs::write(source.join("config.json"), config.replace("\"hidden_size\": 2", "\"hidden_size\": 5"))
        .unwrap();
    let error = import(&source, &TokenizerFiles::default(), &dir.path().join("x")).unwrap_err().to_string();
    assert!(error.contains("[3, 5]"), "{error}");
}
