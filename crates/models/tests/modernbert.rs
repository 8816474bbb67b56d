//! ModernBERT against values that Hugging Face computed (tools/make_embedding_cases.py): states and gradients, with and without biases,
//! in the fields of transformers 4 and 5; packed texts, folders in and out, damaged ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use tercio_engine::{AdamStep, Arena, Cpu, Device, Draw, Reference, Span, Tape, Tensor};
use tercio_models::encoder::{EncoderConfig, LoadedEncoder};
use tercio_models::folder::ModelFolder;
use tercio_models::modernbert::ModernBertConfig;

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/modernbert").join(name)
}

const CASES: [&str; 3] = ["plain", "biases", "masked_language_model"];

fn open<D: Device>(folder: &Path, device: &D) -> LoadedEncoder<D> {
    LoadedEncoder::open(&ModelFolder::open(folder.to_str().unwrap()).unwrap(), device).unwrap()
}

fn tensors(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let values = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().iter().map(|(name, view)| (name.clone(), values(view.data()))).collect()
}

/// Texts packed, one after the other.
fn pack(texts: &[Vec<u32>]) -> (Vec<u32>, Vec<Span>) {
    let mut offsets = vec![0];
    offsets.extend(texts.iter().scan(0, |at, text| {
        *at += text.len() as u32;
        Some(*at)
    }));
    (texts.concat(), Span::from_offsets(&offsets))
}

fn assert_close(found: &[f64], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let e = f64::from(*e);
        assert!((f - e).abs() <= 1e-4 * e.abs() + 1e-5, "{what}[{i}]: expected {e}, found {f}");
    }
}

/// States, and the gradient of their sum with weights.
fn compute<D: Device>(
    device: &D,
    loaded: &LoadedEncoder<D>,
    texts: &[Vec<u32>],
    weights: &[f32],
    recompute: bool,
) -> (Vec<f64>, Arena<D>) {
    let (ids, spans) = pack(texts);
    let mut tape = Tape::recording(device, &loaded.parameters, None);
    let states = loaded.encoder.encode(&mut tape, &ids, None, &spans, recompute);
    let (rows, columns) = (states.tensor.rows, states.tensor.columns);
    let values = device.read_f64(states.tensor.view());
    tape.inject(&states, Tensor::from_values(device, rows, columns, weights));
    let mut gradients = Arena::zeros(device, &loaded.layout);
    tape.backward(&mut gradients, &[]);
    (values, gradients)
}

fn compare<D: Device>(device: &D, name: &str) {
    let folder = case(name);
    let expected: Value =
        serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let texts: Vec<Vec<u32>> = serde_json::from_value(expected["texts"].clone()).unwrap();
    let expected = tensors(&folder);
    let loaded = open(&folder, device);
    for recompute in [false, true] {
        let (states, gradients) = compute(device, &loaded, &texts, &expected["weights"], recompute);
        assert_close(&states, &expected["states"], &format!("{name}: states"));
        let mut compared = 0;
        for spec in loaded.layout.specs() {
            let found = device.read_f64(gradients.view(spec.place));
            let name = format!("grad/{}", spec.name);
            assert_close(&found, &expected[&name], &name);
            compared += 1;
        }
        assert_eq!(compared + 2, expected.len(), "every stored gradient");
    }
}

#[test]
fn states_and_gradients_are_those_of_hugging_face() {
    for name in CASES {
        compare(&Cpu::new(2).unwrap(), name);
        compare(&Reference, name);
    }
}

#[test]
fn a_saved_model_is_the_same_again() {
    let device = Cpu::new(1).unwrap();
    for name in CASES {
        let loaded = open(&case(name), &device);
        let folder = tempfile::tempdir().unwrap();
        loaded.save(folder.path(), &device).unwrap();
        let again = open(folder.path(), &device);
        assert_eq!(loaded.encoder.config(), again.encoder.config());
        assert_eq!(device.host(loaded.parameters.all()), device.host(again.parameters.all()));
        assert_eq!(again.json["architectures"], json!(["ModernBertModel"]));
        assert_eq!(again.json.get("global_attn_every_n_layers"), None);
    }
}

fn small(window: usize) -> ModernBertConfig {
    ModernBertConfig {
        vocab_size: 40,
        hidden_size: 24,
        intermediate_size: 20,
        num_attention_heads: 2,
        sliding: vec![false, true, true],
        local_attention: window,
        pad_token_id: None,
        ..ModernBertConfig::base()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn ragged_texts_are_the_texts_one_by_one(
        texts in prop::collection::vec(prop::collection::vec(0..40u32, 1..=50), 1..=5), window in 1..20usize, seed: u64,
    ) {
        let device = Cpu::new(1).unwrap();
        let loaded = LoadedEncoder::random(EncoderConfig::ModernBert(small(window)), seed, &device);
        let width = 24;
        let tokens: usize = texts.iter().map(Vec::len).sum();
        let weights: Vec<f32> = (0..tokens * width).map(|i| ((i * 7919) % 23) as f32 / 11.0 - 1.0).collect();
        let (states, gradients) = compute(&device, &loaded, &texts, &weights, false);
        let mut sum = Arena::zeros(&device, &loaded.layout);
        let mut at = 0;
        for text in &texts {
            let range = at * width..(at + text.len()) * width;
            let (own, gradients) = compute(&device, &loaded, std::slice::from_ref(text), &weights[range.clone()], false);
            for (a, b) in states[range].iter().zip(&own) {
                prop_assert!((a - b).abs() <= 1e-4 * b.abs() + 1e-5, "{a} among others, {b} alone");
            }
            device.add(sum.all_mut(), gradients.all());
            at += text.len();
        }
        for spec in loaded.layout.specs() {
            let (a, b) = (device.read_f64(gradients.view(spec.place)), device.read_f64(sum.view(spec.place)));
            let norm = |x: &[f64]| x.iter().map(|v| v * v).sum::<f64>().sqrt();
            let difference: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
            prop_assert!(norm(&difference) <= 1e-4 * norm(&b) + 1e-5, "gradient of {}", spec.name);
        }
    }
}

/// Losses of some steps towards given states, and the parameters behind them.
fn train(threads: usize) -> (Vec<f64>, Vec<f32>) {
    let device = Cpu::new(threads).unwrap();
    let mut config = EncoderConfig::ModernBert(small(6));
    config.set_dropout(0.1);
    let mut loaded = LoadedEncoder::random(config, 3, &device);
    let texts: Vec<Vec<u32>> = (1..6).map(|n| (0..9 * n).map(|i| (i * n) % 40).collect()).collect();
    let (ids, spans) = pack(&texts);
    let goal: Vec<f32> = (0..ids.len() * 24).map(|i| ((i * 31) % 17) as f32 / 8.0 - 1.0).collect();
    let [mut first, mut second] = [(); 2].map(|()| Arena::zeros(&device, &loaded.layout));
    let mut losses = Vec::new();
    for update in 1..=12u64 {
        let draw = Draw { seed: 1, update, shard: 0 };
        let mut tape = Tape::recording(&device, &loaded.parameters, Some(draw));
        let states = loaded.encoder.encode(&mut tape, &ids, None, &spans, false);
        let values = states.tensor.to_vec(&device);
        let slope: Vec<f32> = values.iter().zip(&goal).map(|(v, g)| (v - g) / goal.len() as f32).collect();
        losses.push(
            values.iter().zip(&goal).map(|(v, g)| f64::from(v - g).powi(2)).sum::<f64>() / goal.len() as f64,
        );
        tape.inject(&states, Tensor::from_values(&device, ids.len(), 24, &slope));
        let mut gradients = Arena::zeros(&device, &loaded.layout);
        tape.backward(&mut gradients, &[]);
        let step = AdamStep {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            step: update,
            gradient_scale: 1.0,
        };
        device.adam(loaded.parameters.all_mut(), gradients.all(), first.all_mut(), second.all_mut(), step);
    }
    (losses, device.read(loaded.parameters.all()))
}

#[test]
fn training_with_dropout_learns_and_has_the_same_bits_with_any_threads() {
    let (losses, one) = train(1);
    assert!(losses[11] < 0.8 * losses[0], "{losses:?}");
    for threads in [2, 3] {
        assert_eq!(train(threads), (losses.clone(), one.clone()), "{threads} threads");
    }
}

#[test]
fn bad_configurations_are_named() {
    let read = |change: Value| {
        let mut json = small(6).to_json(&Map::new());
        json.extend(change.as_object().unwrap().clone());
        EncoderConfig::from_json(&json)
    };
    read(json!({})).unwrap();
    for (change, part) in [
        (json!({"layer_types": ["full_attention"]}), "`layer_types`: expected a list of 3 names"),
        (json!({"layer_types": ["full_attention", "none", "full_attention"]}), "found \"none\""),
        (json!({"num_attention_heads": 5}), "expected heads of an even width, found 5 heads"),
        (json!({"num_attention_heads": 8}), "even width"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}),
            "found \"yarn\"",
        ),
        (json!({"rope_parameters": {"sliding_attention": {"rope_theta": 0.0}}}), "`rope_theta`"),
        (json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}), "each an object"),
        (json!({"rope_parameters": {"full_attention": {}, "local": {}}}), "each an object"),
        (json!({"rope_parameters": {"full_attention": 1e4}}), "each an object"),
        (json!({"rope_parameters": [1e4]}), "each an object"),
        (json!({"rope_parameters": {"full_attention": {"type": "linear"}}}), "found \"linear\""),
        (json!({"rope_scaling": {"factor": 2.0}}), "`rope_scaling`"),
        (json!({"hidden_activation": "mish"}), "`hidden_activation`"),
        (json!({"num_hidden_layers": 16_000_000}), "1024 layers"),
        (json!({"hidden_size": 16_000_000, "intermediate_size": 16_000_000}), "2^40"),
        (json!({"pad_token_id": 40}), "`pad_token_id`"),
        (json!({"local_attention": 0}), "`local_attention`"),
        (json!({"model_type": "longformer"}), "modernbert"),
    ] {
        let error = read(change.clone()).unwrap_err();
        assert!(error.contains(part), "{change}: {error}");
    }
    // transformers 4: layers counted, one base for all where the local one is null
    let mut json = small(6).to_json(&Map::new());
    for key in ["layer_types", "rope_parameters"] {
        json.remove(key);
    }
    json.insert("global_rope_theta".into(), 500.0.into());
    json.insert("local_rope_theta".into(), Value::Null);
    let config = ModernBertConfig::from_json(&json).unwrap();
    assert_eq!(
        (config.sliding, config.global_theta, config.local_theta),
        (vec![false, true, true], 500.0, 500.0)
    );
}

#[test]
fn damaged_weights_are_named() {
    let device = Cpu::new(1).unwrap();
    let error = |change: &dyn Fn(&mut Vec<(String, Vec<usize>, Vec<f32>)>)| {
        let loaded = open(&case("plain"), &device);
        let folder = tempfile::tempdir().unwrap();
        loaded.save(folder.path(), &device).unwrap();
        let specs = loaded.layout.specs();
        let mut all: Vec<_> = specs
            .iter()
            .map(|s| (s.name.clone(), s.shape.clone(), device.host(loaded.parameters.view(s.place)).to_vec()))
            .collect();
        change(&mut all);
        let tensors = all.iter().map(|(n, s, v)| (n.as_str(), s.as_slice(), v.as_slice()));
        tercio_models::weights::save_safetensors(&folder.path().join("model.safetensors"), tensors, &[])
            .unwrap();
        let folder = ModelFolder::open(folder.path().to_str().unwrap()).unwrap();
        LoadedEncoder::open(&folder, &device).err().expect("an error").to_string()
    };
    let place = |all: &[(String, Vec<usize>, Vec<f32>)]| {
        all.iter().position(|t| t.0 == "layers.1.attn_norm.weight").unwrap()
    };
    let gone = error(&|all| drop(all.remove(place(all))));
    assert!(gone.contains("layers.1.attn_norm.weight"), "{gone}");
    let strange = error(&|all| all.push(("layers.0.attn_norm.weight".into(), vec![24], vec![0.0; 24])));
    assert!(strange.contains("layers.0.attn_norm.weight") && strange.contains("no part"), "{strange}");
    let wild = error(&|all| {
        let at = place(all);
        all[at].2[5] = f32::NAN;
    });
    assert!(wild.contains("element 5 is NaN"), "{wild}");
    let flat = error(&|all| {
        let at = place(all);
        (all[at].1, all[at].2) = (vec![23], vec![0.0; 23]);
    });
    assert!(flat.contains("[23]") && flat.contains("[24]"), "{flat}");
}
