//! ColBERT models beside PyLate's golden folder: Stanford's checkpoints, several dense layers with everything that they may have, new
//! projections and words, ModernBERT, and folders that are refused.

use std::path::Path;

use serde_json::{Value, json};
use tercio_engine::{Cpu, Device, Reference, Span, Tape};
use tercio_models::colbert::{ColbertHeaders, LoadedColbert, TokenRows};
use tercio_models::encoder::EncoderConfig;
use tercio_models::folder::ModelFolder;
use tercio_models::weights::{WeightsReader, save_safetensors};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/colbert/model");
const MODERN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/modernbert/plain");

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

fn golden_copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy(Path::new(GOLDEN), folder.path());
    folder
}

fn folder(path: &Path) -> ModelFolder {
    ModelFolder::open(path.to_str().unwrap()).unwrap()
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn write(path: &Path, json: &Value) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, json.to_string()).unwrap();
}

/// Two texts, of which the second has two tokens that nobody attends to.
const IDS: [u32; 9] = [2, 10, 7, 3, 2, 11, 3, 4, 4];

fn vectors<D: Device>(device: &D, model: &LoadedColbert<D>) -> Vec<f64> {
    let span = |start, end| Span { start, end };
    let texts = TokenRows {
        ids: &IDS,
        spans: &[span(0, 4), span(4, 9)],
        keys: &[span(0, 4), span(4, 7)],
        kept: &[0, 1, 3, 4, 5, 6, 7, 8],
    };
    device.run(|| {
        let mut tape = Tape::inference(device, &model.parameters);
        let vectors = model.model.embed(&mut tape, texts, false);
        device.read_f64(vectors.tensor.view())
    })
}

#[test]
fn a_checkpoint_of_stanfords_is_the_same_model() {
    let (device, root) = (Cpu::new(1).unwrap(), golden_copy());
    let path = root.path();
    let golden = LoadedColbert::open(&folder(path), &device).unwrap();
    // Their names: `bert.` before the encoder's, the projection beside it.
    let own = WeightsReader::open(&path.join("model.safetensors")).unwrap();
    let dense = WeightsReader::open(&path.join("1_Dense/model.safetensors")).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = own
        .names()
        .map(|name| (format!("bert.{name}"), own.shape(name).unwrap().to_vec(), own.read(name).unwrap()))
        .collect();
    let name = "linear.weight";
    tensors.push((name.into(), dense.shape(name).unwrap().to_vec(), dense.read(name).unwrap()));
    let mut config = read(&path.join("config.json"));
    config["architectures"] = json!(["HF_ColBERT"]);
    for gone in ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"] {
        std::fs::remove_file(path.join(gone)).unwrap();
    }
    std::fs::remove_dir_all(path.join("1_Dense")).unwrap();
    write(&path.join("config.json"), &config);
    write(
        &path.join("artifact.metadata"),
        &json!({"query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_maxlen": 16, "doc_maxlen": 32,
                "attend_to_mask_tokens": false, "mask_punctuation": true, "dim": 16}),
    );
    let tensors = tensors.iter().map(|(n, s, v)| (n.as_str(), s.as_slice(), v.as_slice()));
    save_safetensors(&path.join("model.safetensors"), tensors, &[("format", "pt")]).unwrap();
    let loaded = LoadedColbert::open(&folder(path), &device).unwrap();
    assert_eq!(vectors(&device, &loaded), vectors(&device, &golden));
    let (ours, theirs) = (&loaded.model.config, &golden.model.config);
    assert_eq!(
        (&ours.query_prefix, &ours.document_prefix, ours.query_length, ours.document_length, &ours.skiplist),
        (&theirs.query_prefix, &theirs.document_prefix, 16, 32, &theirs.skiplist)
    );
    assert_eq!((loaded.new_layers, ours.expansion, ours.attend_to_expansion), (0, true, false));
    // Without settings they are the paper's prefixes; other defaults are PyLate's.
    std::fs::remove_file(path.join("artifact.metadata")).unwrap();
    write(&path.join("artifact.metadata"), &json!({"mask_punctuation": false}));
    let headers = ColbertHeaders::read(&folder(path), None).unwrap();
    assert_eq!((headers.config.query_prefix.as_str(), headers.config.query_length), ("[unused0]", 32));
    assert!(headers.config.skiplist.is_empty() && headers.is_colbert);
}

/// y = act(W x + b), and the residual, by the reference's states.
fn layer(x: &[f64], w: &[f32], b: Option<&[f32]>, act: fn(f64) -> f64, residual: Option<&[f32]>) -> Vec<f64> {
    let (n, m) = (x.len(), w.len() / x.len());
    let product = |w: &[f32], i: usize| (0..n).map(|j| f64::from(w[i * n + j]) * x[j]).sum::<f64>();
    let of = |i: usize| {
        let y = act(product(w, i) + b.map_or(0.0, |b| f64::from(b[i])));
        y + residual.map_or(0.0, |r| if r.is_empty() { x[i] } else { product(r, i) })
    };
    (0..m).map(of).collect()
}

#[test]
fn dense_layers_with_all_that_they_may_have() {
    let root = golden_copy();
    let path = root.path();
    // The states themselves: one layer that is the identity, for the unit length at the end.
    let values = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 29) as f32 / 29.0 - 0.5).collect()
    };
    let layers = [
        ("1_Dense", 32, 8, true, "torch.nn.modules.activation.Tanh", true),
        ("2_Dense", 8, 8, true, "torch.nn.modules.activation.GELU", true),
        ("3_Dense", 8, 6, false, "torch.nn.modules.linear.Identity", false),
    ];
    let mut modules =
        vec![json!({"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"})];
    modules.push(
        json!({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}),
    );
    let mut weights = Vec::new();
    for (i, (name, inputs, outputs, bias, activation, residual)) in layers.into_iter().enumerate() {
        modules.push(json!({"idx": i + 2, "name": name, "path": name, "type": "pylate.models.Dense.Dense"}));
        let fields = json!({"in_features": inputs, "out_features": outputs, "bias": bias,
                            "activation_function": activation, "use_residual": residual});
        write(&path.join(name).join("config.json"), &fields);
        let (w, b, r) =
            (values(inputs * outputs, i), values(outputs, i + 5), values(inputs * outputs, i + 9));
        let matrix = [outputs, inputs];
        let mut tensors = vec![("linear.weight", &matrix[..], w.as_slice())];
        if bias {
            tensors.push(("linear.bias", &matrix[..1], b.as_slice()));
        }
        if residual && inputs != outputs {
            tensors.push(("residual.weight", &matrix[..], r.as_slice()));
        }
        save_safetensors(&path.join(name).join("model.safetensors"), tensors, &[]).unwrap();
        weights.push((w, b, r));
    }
    write(&path.join("modules.json"), &modules.into());
    let device = Reference;
    let loaded = LoadedColbert::open(&folder(path), &device).unwrap();
    let found = vectors(&device, &loaded);
    let states = {
        let mut tape = Tape::inference(&device, &loaded.parameters);
        let spans = [Span { start: 0, end: 4 }, Span { start: 4, end: 9 }];
        let keys = [spans[0], Span { start: 4, end: 7 }];
        let states = loaded.model.encoder.encode_keyed(&mut tape, &IDS, None, &spans, &keys, false);
        device.read_f64(states.tensor.view())
    };
    let gelu = |x: f64| 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2));
    let kept = [0usize, 1, 3, 4, 5, 6, 7, 8];
    for (row, found) in kept.iter().zip(found.chunks(6)) {
        let x = &states[row * 32..(row + 1) * 32];
        let [(w1, b1, r1), (w2, b2, _), (w3, ..)] = &weights[..] else { unreachable!("three layers") };
        let x = layer(x, w1, Some(b1), libm::tanh, Some(r1));
        let x = layer(&x, w2, Some(b2), gelu, Some(&[]));
        let x = layer(&x, w3, None, |x| x, None);
        let length = x.iter().map(|v| v * v).sum::<f64>().sqrt();
        for (f, x) in found.iter().zip(&x) {
            assert!((f - x / length).abs() < 1e-9, "row {row}: {f} {}", x / length);
        }
    }
    // Out and in again; the pooling is gone, as it has no part.
    let cpu = Cpu::new(1).unwrap();
    let loaded = LoadedColbert::open(&folder(path), &cpu).unwrap();
    let saved = tempfile::tempdir().unwrap();
    loaded.save(saved.path(), &cpu).unwrap();
    let again = LoadedColbert::open(&folder(saved.path()), &cpu).unwrap();
    assert_eq!(vectors(&cpu, &again), vectors(&cpu, &loaded));
    assert_eq!(again.model.config.dense, loaded.model.config.dense);
    assert_eq!(read(&saved.path().join("modules.json")).as_array().unwrap().len(), 4);
}

#[test]
fn new_projections_and_words_are_drawn_by_seed() {
    let (device, root) = (Cpu::new(1).unwrap(), golden_copy());
    let path = root.path();
    let headers = |dimension| ColbertHeaders::read(&folder(path), dimension).unwrap();
    let open = |dimension: Option<usize>, more: usize, seed: u64| {
        let headers = headers(dimension);
        let (mut encoder, config) = (headers.encoder.config.clone(), headers.config.clone());
        encoder.set_vocab_size(encoder.vocab_size() + more);
        LoadedColbert::with_config(headers, encoder, config, seed, &device).unwrap()
    };
    let golden = open(None, 0, 0);
    // One more layer where another width is asked for; the folder's own values stay.
    let wider = open(Some(24), 3, 1);
    assert_eq!((wider.new_layers, wider.model.dimension(), wider.model.config.dense.len()), (1, 24, 2));
    assert_ne!(vectors(&device, &wider), vectors(&device, &open(Some(24), 3, 2)));
    assert_eq!(vectors(&device, &wider), vectors(&device, &open(Some(24), 3, 1)));
    let words = |m: &LoadedColbert<Cpu>| device.read(m.parameters.view(m.model.layout().specs()[0].place));
    let (before, after) = (words(&golden), words(&wider));
    assert_eq!(after[..before.len()], before);
    let rows: Vec<&[f32]> = after[before.len()..].chunks(32).collect();
    assert!(rows.len() == 3 && rows[0] != rows[1]);
    let mean = |k: usize| before.iter().skip(k).step_by(32).sum::<f32>() / 2002.0;
    assert!((0..32).all(|k| (rows[0][k] - mean(k)).abs() < 0.1), "near the mean of the others");
    // Without dense layers a projection of 128.
    std::fs::write(path.join("modules.json"), "[{\"path\": \"\", \"type\": \"Transformer\"}]").unwrap();
    let plain = LoadedColbert::open(&folder(path), &device).unwrap();
    assert_eq!((plain.model.dimension(), plain.new_layers), (128, 1));
}

#[test]
fn modernbert_has_expansion_too() {
    let found = std::fs::read_dir(Path::new(MODERN).parent().unwrap()).unwrap();
    let mut folders: Vec<_> = found.map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    folders.sort();
    for path in folders {
        fn open<D: Device>(path: &Path, device: &D) -> LoadedColbert<D> {
            let headers = ColbertHeaders::read(&folder(path), Some(8)).unwrap();
            let (encoder, config) = (headers.encoder.config.clone(), headers.config.clone());
            assert!(matches!(encoder, EncoderConfig::ModernBert(_)), "{}", path.display());
            LoadedColbert::with_config(headers, encoder, config, 3, device).unwrap()
        }
        let cpu = Cpu::new(1).unwrap();
        let (fast, slow) = (open(&path, &cpu), open(&path, &Reference));
        for (f, s) in vectors(&cpu, &fast).iter().zip(vectors(&Reference, &slow)) {
            assert!((f - s).abs() < 1e-4, "{}: {f} {s}", path.display());
        }
    }
}

#[test]
fn unattended_tokens_change_nothing_for_the_others() {
    let (device, root) = (Cpu::new(1).unwrap(), golden_copy());
    let loaded = LoadedColbert::open(&folder(root.path()), &device).unwrap();
    let span = |start, end| Span { start, end };
    let of = |ids: &[u32], real: u32| {
        let (texts, kept) = ([span(0, ids.len() as u32)], (0..real).collect::<Vec<u32>>());
        let rows = TokenRows { ids, spans: &texts, keys: &[span(0, real)], kept: &kept };
        let mut tape = Tape::inference(&device, &loaded.parameters);
        loaded.model.embed(&mut tape, rows, false).tensor.to_vec(&device)
    };
    assert_eq!(of(&[2, 41, 3, 4, 4, 4], 3), of(&[2, 41, 3], 3));
    assert_ne!(of(&[2, 41, 3, 4, 4, 4], 6)[..48], of(&[2, 41, 3], 3));
}

#[test]
fn folders_that_are_no_colbert_models_are_named() {
    type Change = fn(&Path);
    let cases: [(&str, Change); 9] = [
        ("WeightedLayerPooling", |p| {
            let modules = json!([{"path": "", "type": "a.Transformer"}, {"path": "x", "type": "a.WeightedLayerPooling"}]);
            write(&p.join("modules.json"), &modules);
        }),
        ("module 0", |p| write(&p.join("modules.json"), &json!([{"path": "1_Dense", "type": "a.Dense"}]))),
        ("..", |p| write(&p.join("modules.json"), &json!([{"path": "..", "type": "a.Transformer"}]))),
        ("a list of modules", |p| write(&p.join("modules.json"), &json!({"a": 1}))),
        ("in_features", |p| {
            let fields = json!({"in_features": 31, "out_features": 16, "bias": false, "activation_function": "Identity"});
            write(&p.join("1_Dense/config.json"), &fields);
        }),
        ("linear.weight", |p| {
            let fields = json!({"in_features": 32, "out_features": 17, "bias": false, "activation_function": "Identity"});
            write(&p.join("1_Dense/config.json"), &fields);
        }),
        ("activation_function", |p| {
            let fields = json!({"in_features": 32, "out_features": 16, "bias": false, "activation_function": "x.Mish"});
            write(&p.join("1_Dense/config.json"), &fields);
        }),
        ("query_length", |p| {
            write(&p.join("config_sentence_transformers.json"), &json!({"query_length": -1}))
        }),
        ("skiplist_words", |p| {
            write(
                &p.join("config_sentence_transformers.json"),
                &json!({"query_length": 8, "skiplist_words": [1]}),
            );
        }),
    ];
    let device = Cpu::new(1).unwrap();
    for (word, change) in cases {
        let root = golden_copy();
        change(root.path());
        let error = match LoadedColbert::open(&folder(root.path()), &device) {
            Ok(_) => panic!("{word}: opened"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}
