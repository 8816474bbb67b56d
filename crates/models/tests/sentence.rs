//! sentence-transformers' folders against vectors that it computed (tools/make_embedding_cases.py), in the files of its releases 2 to 5 and
//! of 6; prompts, lengths, folders out and in, gradients, and folders that ask for what is not known.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tercio_engine::{Arena, Cpu, Device, Reference, Span, Tape, Tensor};
use tercio_models::embedding_model::{EmbeddingModel, TextKind};
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::Pooling;
use tercio_models::sentence::LoadedSentenceEncoder;

const CASES: [&str; 3] = ["dense", "dense_older", "cls"];

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sentence").join(name)
}

fn folder(path: &Path) -> ModelFolder {
    ModelFolder::open(path.to_str().unwrap()).unwrap()
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn tensors(case: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = fs::read(case.join("expected.safetensors")).unwrap();
    let values = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().iter().map(|(name, view)| (name.clone(), values(view.data()))).collect()
}

fn pack(texts: &Value) -> (Vec<u32>, Vec<Span>) {
    let texts: Vec<Vec<u32>> = serde_json::from_value(texts.clone()).unwrap();
    let mut offsets = vec![0];
    offsets.extend(texts.iter().scan(0, |at, text| {
        *at += text.len() as u32;
        Some(*at)
    }));
    (texts.concat(), Span::from_offsets(&offsets))
}

fn compare<D: Device>(device: &D, path: &Path, case: &Path) {
    let (expected, vectors) = (read(&case.join("expected.json")), tensors(case));
    let model = EmbeddingModel::open(&folder(path), None, device).unwrap();
    assert_eq!(model.max_tokens(TextKind::Passage) as u64, expected["max_seq_length"].as_u64().unwrap());
    assert!(!model.pads(TextKind::Question) && !model.lower_case());
    assert!(!vectors.is_empty());
    for (task, vectors) in &vectors {
        let expected = &expected[task];
        let name = Some(task.as_str()).filter(|task| *task != "none");
        assert_eq!(model.prompt(name).unwrap(), expected["prompt"].as_str().unwrap());
        let (ids, spans) = pack(&expected["ids"]);
        let mut tape = Tape::inference(device, model.parameters());
        let found = model.embed(&mut tape, &ids, &spans, false);
        assert_eq!((found.tensor.rows, found.tensor.columns), (spans.len(), model.dimension()));
        for (i, (f, e)) in device.read_f64(found.tensor.view()).iter().zip(vectors).enumerate() {
            let e = f64::from(*e);
            assert!((f - e).abs() <= 1e-4 * e.abs() + 1e-5, "{case:?} {task} [{i}]: expected {e}, found {f}");
        }
        assert_eq!(found.tensor.len(), vectors.len());
    }
    let error = model.prompt(Some("nobody")).unwrap_err();
    assert!(error.contains("\"nobody\"") && error.contains("query"), "{error}");
}

#[test]
fn vectors_are_those_of_sentence_transformers() {
    for name in CASES {
        compare(&Cpu::new(2).unwrap(), &case(name), &case(name));
        compare(&Reference, &case(name), &case(name));
    }
}

#[test]
fn a_saved_folder_is_the_same_model_again() {
    let device = Cpu::new(1).unwrap();
    for name in CASES {
        let loaded = LoadedSentenceEncoder::open(&folder(&case(name)), &device).unwrap();
        let saved = tempfile::tempdir().unwrap();
        loaded.save(saved.path(), &device).unwrap();
        if name == "cls" {
            // its greatest length stands with its tokenizer, which this does not write
            let file = "tokenizer_config.json";
            fs::copy(case(name).join(file), saved.path().join(file)).unwrap();
        } else {
            let settings = read(&saved.path().join("sentence_bert_config.json"));
            assert_eq!(settings["max_seq_length"].as_u64(), (name == "dense_older").then_some(12));
            fs::copy(case(name).join("tokenizer_config.json"), saved.path().join("tokenizer_config.json"))
                .unwrap();
        }
        compare(&device, saved.path(), &case(name));
        let again = LoadedSentenceEncoder::open(&folder(saved.path()), &device).unwrap();
        assert_eq!(device.host(loaded.parameters.all()), device.host(again.parameters.all()));
        assert_eq!(again.kept, loaded.kept);
        let settings = read(&saved.path().join("config_sentence_transformers.json"));
        assert_eq!(settings["similarity_fn_name"], "cosine");
    }
}

/// Copies a case, changes one of its files, and says what opening it gives.
fn error_of(name: &str, file: &str, change: impl Fn(&mut Value)) -> String {
    let dir = tempfile::tempdir().unwrap();
    copy(&case(name), dir.path());
    let path = dir.path().join(file);
    let mut json = if path.exists() { read(&path) } else { json!({}) };
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    let opened = LoadedSentenceEncoder::open(&folder(dir.path()), &Cpu::new(1).unwrap());
    let error = opened.err().unwrap_or_else(|| panic!("{file} is accepted: {json}")).to_string();
    assert!(error.contains(file), "{file}: {error}");
    error
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(|e| e.unwrap().path()) {
        let target = to.join(entry.file_name().unwrap());
        if entry.is_dir() {
            fs::create_dir(&target).unwrap();
            copy(&entry, &target);
        } else {
            fs::copy(&entry, &target).unwrap();
        }
    }
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let modules = |change: &dyn Fn(&mut Vec<Value>)| {
        error_of("dense", "modules.json", |json| change(json.as_array_mut().unwrap()))
    };
    let kind = |n: usize, name: &'static str| {
        modules(&move |list| list[n]["type"] = format!("sentence_transformers.models.{name}").into())
    };
    assert!(kind(2, "LayerNorm").contains("LayerNorm"));
    assert!(kind(1, "WordEmbeddings").contains("WordEmbeddings"));
    assert!(kind(2, "Pooling").contains("in this order"));
    assert!(kind(3, "Normalize").contains("in this order"));
    assert!(modules(&|list| list.swap(0, 1)).contains("in this order"));
    assert!(modules(&|list| list.truncate(1)).contains("found 1 modules"));
    assert!(modules(&|list| list[2]["path"] = "../2_Dense".into()).contains("found \"../2_Dense\""));
    assert!(modules(&|list| list[2]["path"] = "..".into()).contains("found \"..\""));
    assert!(modules(&|list| list[2]["path"] = 7.into()).contains("found 7"));
    assert!(modules(&|list| list[2]["type"] = Value::Null).contains("expected a `type`"));
    assert!(error_of("dense", "modules.json", |json| *json = json!({})).contains("a list of modules"));

    let set = |name: &str, file: &str, key: &'static str, value: Value| {
        error_of(name, file, move |json| json[key] = value.clone())
    };
    let file = "1_Pooling/config.json";
    assert!(set("dense", file, "pooling_mode", "max".into()).contains("found [\"max\"]"));
    assert!(set("dense", file, "pooling_mode", json!(["mean", "cls"])).contains("found [\"mean\", \"cls\"]"));
    assert!(set("dense", file, "include_prompt", false.into()).contains("include_prompt"));
    assert!(set("dense_older", file, "pooling_mode_max_tokens", true.into()).contains("\"max\""));
    assert!(set("dense_older", file, "pooling_mode_mean_tokens", false.into()).contains("found []"));
    let file = "2_Dense/config.json";
    assert!(
        set("dense", file, "activation_function", "torch.nn.modules.activation.ReLU".into()).contains("ReLU")
    );
    assert!(set("dense", file, "use_residual", true.into()).contains("use_residual"));
    assert!(set("dense", file, "module_input_name", "token_embeddings".into()).contains("token_embeddings"));
    assert!(set("dense", file, "in_features", 17.into()).contains("expected 16"));
    assert!(set("dense", file, "out_features", 1e9.into()).contains("out_features"));
    assert!(set("dense", "4_Normalize/config.json", "module_input_name", "x".into()).contains("\"x\""));
    let file = "sentence_bert_config.json";
    assert!(set("dense", file, "transformer_task", "fill-mask".into()).contains("fill-mask"));
    assert!(set("dense", file, "query_length", 32.into()).contains("one of many"));
    assert!(set("dense_older", file, "max_seq_length", 0.into()).contains("max_seq_length"));
    let file = "config_sentence_transformers.json";
    assert!(set("dense", file, "default_prompt_name", "nobody".into()).contains("\"nobody\""));
    assert!(set("dense", file, "prompts", json!(["a"])).contains("prompts"));
}

#[test]
fn damaged_folders_are_named() {
    let device = Cpu::new(1).unwrap();
    let broken = |change: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        copy(&case("dense"), dir.path());
        change(dir.path());
        let opened = LoadedSentenceEncoder::open(&folder(dir.path()), &device);
        opened.err().expect("an error").to_string()
    };
    let gone = broken(&|dir| fs::remove_file(dir.join("2_Dense/model.safetensors")).unwrap());
    assert!(gone.contains("2_Dense") && gone.contains("no weights"), "{gone}");
    let gone = broken(&|dir| fs::remove_file(dir.join("1_Pooling/config.json")).unwrap());
    assert!(gone.contains("1_Pooling") && gone.contains("found no file"), "{gone}");
    let other = broken(&|dir| {
        fs::copy(dir.join("3_Dense/model.safetensors"), dir.join("2_Dense/model.safetensors"))
            .map(drop)
            .unwrap();
    });
    assert!(other.contains("2_Dense.linear."), "{other}");
    let json = broken(&|dir| fs::write(dir.join("modules.json"), "[{").unwrap());
    assert!(json.contains("modules.json") && json.contains("expected JSON"), "{json}");
}

#[test]
fn a_plain_encoder_needs_a_pooling() {
    let device = Cpu::new(1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(case("dense").join(name), dir.path().join(name)).unwrap();
    }
    let error = EmbeddingModel::open(&folder(dir.path()), None, &device).err().unwrap().to_string();
    assert!(error.contains("plain encoder") && error.contains("mean or first"), "{error}");
    for pooling in [Pooling::Mean, Pooling::First] {
        let model = EmbeddingModel::open(&folder(dir.path()), Some(pooling), &device).unwrap();
        assert_eq!((model.pooling(), model.dimension(), model.normalizes()), (pooling, 16, false));
        assert_eq!(model.max_tokens(TextKind::Question), 40);
    }
    assert!(EmbeddingModel::open(&folder(&case("dense")), None, &device).unwrap().normalizes());
}

#[test]
fn gradients_reach_every_dense_layer() {
    let loaded = LoadedSentenceEncoder::open(&folder(&case("dense")), &Reference).unwrap();
    let (ids, spans) = pack(&read(&case("dense").join("expected.json"))["none"]["ids"]);
    let slope: Vec<f32> = (0..spans.len() * 6).map(|i| ((i * 5) % 7) as f32 - 3.0).collect();
    let value = |parameters: &Arena<Reference>| {
        let mut tape = Tape::inference(&Reference, parameters);
        let y = loaded.model.embed(&mut tape, &ids, &spans, false);
        Reference.read_f64(y.tensor.view()).iter().zip(&slope).map(|(y, s)| y * f64::from(*s)).sum::<f64>()
    };
    let mut tape = Tape::recording(&Reference, &loaded.parameters, None);
    let y = loaded.model.embed(&mut tape, &ids, &spans, true);
    tape.inject(&y, Tensor::from_values(&Reference, spans.len(), 6, &slope));
    let mut gradients = Arena::zeros(&Reference, loaded.model.layout());
    tape.backward(&mut gradients, &[]);
    let dense = loaded.model.layout().specs().iter().filter(|s| s.name.contains("_Dense."));
    let mut seen = 0;
    for spec in dense {
        let found = Reference.read_f64(gradients.view(spec.place))[0];
        let mut moved = Arena::zeros(&Reference, loaded.model.layout());
        let all = Reference.read(loaded.parameters.all());
        let mut at = |by: f32| {
            let mut all = all.clone();
            all[spec.place.start] += by;
            // what was really added, in the storage's numbers
            let by = f64::from(all[spec.place.start]);
            Reference.write(moved.all_mut(), &all);
            (by, value(&moved))
        };
        let ((a, low), (b, high)) = (at(-1e-3), at(1e-3));
        let expected = (high - low) / (b - a);
        assert!(
            (found - expected).abs() <= 1e-4 * expected.abs() + 1e-5,
            "{}: {expected}, found {found}",
            spec.name
        );
        assert!(expected.abs() > 1e-6, "{}", spec.name);
        seen += 1;
    }
    assert_eq!(seen, 3);
}
