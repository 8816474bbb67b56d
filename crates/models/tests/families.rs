//! T5's relatives against values that Hugging Face computed (tools/make_family_cases.py): mT5, byT5, T5 v1.1 and the shapes
//! of T5-efficient, with heads tied and not, outputs scaled and not.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tercio_engine::{Cpu, Device, Span, Tape};
use tercio_models::folder::ModelFolder;
use tercio_models::t5::{LoadedT5, T5Config, T5Family, Targets};

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/families");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    cases
}

fn open(case: &Path, device: &Cpu) -> LoadedT5<Cpu> {
    LoadedT5::open(&ModelFolder::open(case.to_str().unwrap()).unwrap(), device).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-4 * e.abs() + 1e-5, "{what}[{i}]: expected {e}, found {f}");
    }
}

#[test]
fn losses_logits_and_answers_are_those_of_hugging_face() {
    let device = Cpu::new(1).unwrap();
    let cases = cases();
    assert_eq!(cases.len(), 6, "{cases:?}");
    for case in cases {
        let name = case.file_name().unwrap().to_str().unwrap().to_owned();
        let expected: Value =
            serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
        let loaded = open(&case, &device);
        let (model, parameters) = (&loaded.model, &loaded.parameters);
        let (input, labels) = (ids(&expected["input"]), ids(&expected["labels"]));
        let mut inputs = vec![model.config.decoder_start_token_id];
        inputs.extend(&labels[..labels.len() - 1]);
        let spans = |n: usize| Span::from_offsets(&[0, n as u32]);
        let (keys, target) = (spans(input.len()), spans(labels.len()));
        let targets = Targets {
            inputs: &inputs,
            labels: &labels,
            spans: &target,
            keys: &keys,
            key_positions: None,
            weight: 1.0,
            smoothing: 0.0,
        };
        let mut tape = Tape::inference(&device, parameters);
        let states = model.encode(&mut tape, &input, &keys, false);
        let losses = model.loss(&mut tape, &states, &targets);
        assert_close(&losses, &numbers(&expected["losses"]), &format!("{name}: losses"));
        let logits = device.read_f64(model.logits(&mut tape, &states, &targets).view());
        let first = numbers(&expected["first_logits"]);
        assert_close(&logits[..first.len()], &first, &format!("{name}: logits"));
        let expected = ids(&expected["generated"]);
        assert_eq!(greedy(&loaded, &device, &input, expected.len()), expected, "{name}");
    }
}

/// The best next token, again and again, each time from all tokens before it.
fn greedy(loaded: &LoadedT5<Cpu>, device: &Cpu, input: &[u32], steps: usize) -> Vec<u32> {
    let (model, parameters) = (&loaded.model, &loaded.parameters);
    let keys = Span::from_offsets(&[0, input.len() as u32]);
    let mut tokens = vec![model.config.decoder_start_token_id];
    for n in 1..=steps {
        let mut tape = Tape::inference(device, parameters);
        let states = model.encode(&mut tape, input, &keys, false);
        let (labels, spans) = (vec![0; n], Span::from_offsets(&[0, n as u32]));
        let targets = Targets {
            inputs: &tokens,
            labels: &labels,
            spans: &spans,
            keys: &keys,
            key_positions: None,
            weight: 1.0,
            smoothing: 0.0,
        };
        let logits = device.read_f64(model.logits(&mut tape, &states, &targets).view());
        let last = &logits[logits.len() - model.config.vocab_size..];
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        tokens.push(best as u32);
    }
    tokens.split_off(1)
}

#[test]
fn a_saved_relative_is_the_same_model_again() {
    let device = Cpu::new(1).unwrap();
    for case in cases() {
        let loaded = open(&case, &device);
        let folder = tempfile::tempdir().unwrap();
        loaded.save(folder.path(), &device).unwrap();
        let again = open(folder.path(), &device);
        // The text too: ranks compare it.
        assert_eq!(format!("{:?}", loaded.model.config), format!("{:?}", again.model.config));
        assert_eq!(device.host(loaded.parameters.all()), device.host(again.parameters.all()));
        let family = loaded.model.config.family;
        assert_eq!(again.json["model_type"], if family == T5Family::MT5 { "mt5" } else { "t5" });
        if case.ends_with("byt5") {
            assert_eq!(again.json["tokenizer_class"], "ByT5Tokenizer");
        }
        // What rank 0 tells the others makes the same configuration.
        let told = T5Config::from_json(&loaded.model.config.to_json(&loaded.json)).unwrap();
        let told = T5Config { tied: loaded.model.config.tied, ..told };
        assert_eq!(told, loaded.model.config);
    }
}

#[test]
fn other_families_are_refused() {
    let json = |kind: Value| {
        let mut json = T5Config::of_size("small").unwrap().to_json(&serde_json::Map::new());
        json.insert("model_type".into(), kind);
        T5Config::from_json(&json).unwrap_err().to_string()
    };
    for kind in ["umt5", "bart", "longt5"] {
        assert!(json(kind.into()).contains(kind));
    }
    assert!(json(3.into()).contains("model_type is 3"));
}
