//! Classifiers of every family against values that Hugging Face computed (tools/make_classifier_cases.py): logits, gradients of its
//! loss; folders in and out; flair's head; what of a folder is kept when labels change.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tercio_engine::{Cpu, Device, Draw, Reference, Span, Tape, Tensor};
use tercio_models::bert::BertConfig;
use tercio_models::classifier::{ClassifierConfig, ClassifierHeaders, HeadKind, LoadedClassifier};
use tercio_models::encoder::{EncoderConfig, LoadedEncoder};
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::Pooling;
use tercio_models::weights::WeightsReader;

struct Case {
    name: String,
    folder: PathBuf,
    expected: Value,
    texts: Vec<Vec<u32>>,
}

fn cases() -> Vec<Case> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/classifiers");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(all).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    let case = |folder: PathBuf| {
        let bytes = std::fs::read(folder.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&bytes).unwrap();
        let texts = lists(&expected["ids"]).iter().map(|t| t.iter().map(|&v| v as u32).collect()).collect();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        Case { name, folder, expected, texts }
    };
    folders.into_iter().map(case).collect()
}

fn lists(value: &Value) -> Vec<Vec<f64>> {
    let row = |row: &Value| row.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    value.as_array().unwrap().iter().map(row).collect()
}

fn folder(path: &Path) -> ModelFolder {
    ModelFolder::open(path.to_str().unwrap()).unwrap()
}

fn open<D: Device>(path: &Path, device: &D) -> LoadedClassifier<D> {
    LoadedClassifier::open(&folder(path), device).unwrap()
}

fn spans(texts: &[Vec<u32>]) -> Vec<Span> {
    let mut offsets = vec![0];
    texts.iter().for_each(|text| offsets.push(offsets[offsets.len() - 1] + text.len() as u32));
    Span::from_offsets(&offsets)
}

fn logits<D: Device>(device: &D, loaded: &LoadedClassifier<D>, texts: &[Vec<u32>]) -> Vec<f64> {
    let mut tape = Tape::inference(device, &loaded.parameters);
    let found = loaded.model.logits(&mut tape, &texts.concat(), &spans(texts), false);
    device.read_f64(found.tensor.view())
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-4 * e.abs() + 1e-5, "{what}[{i}]: expected {e}, found {f}");
    }
}

#[test]
fn logits_and_gradients_are_those_of_hugging_face() {
    let device = Cpu::new(2).unwrap();
    let cases = cases();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let loaded = open(&case.folder, &device);
        let config = &loaded.model.config;
        let names: Vec<&str> =
            case.expected["labels"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
        assert_eq!((&config.labels, loaded.drawn.len()), (&named(&names), 0));
        let several = ["bert_multi_label", "xlm_roberta", "modernbert_mean"].contains(&&*case.name);
        assert_eq!(config.multi_label, several, "{}", case.name);
        let mut tape = Tape::recording(&device, &loaded.parameters, None);
        let found = loaded.model.logits(&mut tape, &case.texts.concat(), &spans(&case.texts), true);
        let values = device.read_f64(found.tensor.view());
        assert_close(&values, &lists(&case.expected["logits"]).concat(), &case.name);
        let (n, count) = (case.texts.len(), names.len());
        let mut slopes = Vec::new();
        for (place, row) in values.chunks(count).enumerate() {
            for (i, p) in config.probabilities(row).into_iter().enumerate() {
                let (target, mean) = match config.multi_label {
                    true => (((place >> i) & 1) as f64, n * count),
                    false => (f64::from(place % count == i), n),
                };
                slopes.push(((p - target) / mean as f64) as f32);
            }
        }
        tape.inject(&found, Tensor::from_values(&device, n, count, &slopes));
        drop(found);
        let mut gradients = tercio_engine::Arena::zeros(&device, loaded.model.layout());
        tape.backward(&mut gradients, &[]);
        let stored = WeightsReader::open(&case.folder.join("gradients.safetensors")).unwrap();
        let norms = case.expected["gradient_norms"].as_object().unwrap();
        let file_name = |name: &str| {
            let ends = |n: &&String| n.as_str() == name || n.ends_with(&format!(".{name}"));
            norms.keys().find(ends).unwrap_or_else(|| panic!("{}: {name}", case.name)).clone()
        };
        for spec in loaded.model.layout().specs() {
            let name = file_name(&spec.name);
            let found = device.read_f64(gradients.view(spec.place));
            let norm = found.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert_close(&[norm], &[norms[&name].as_f64().unwrap()], &format!("{} {name}", case.name));
            if stored.contains(&name) {
                let expected: Vec<f64> = stored.read(&name).unwrap().iter().map(|&v| f64::from(v)).collect();
                assert_close(&found, &expected, &format!("{} {name}", case.name));
            }
        }
    }
}

#[test]
fn a_saved_classifier_is_the_same_model_under_the_same_names() {
    let device = Cpu::new(1).unwrap();
    for case in cases() {
        let loaded = open(&case.folder, &device);
        let saved = tempfile::tempdir().unwrap();
        loaded.save(saved.path(), &device).unwrap();
        let names = |path: &Path| {
            let weights = folder(path).weights().unwrap();
            let mut names: Vec<String> = weights.names().map(str::to_owned).collect();
            names.sort();
            names
        };
        assert_eq!(names(saved.path()), names(&case.folder), "{}", case.name);
        let again = open(saved.path(), &device);
        assert_eq!(format!("{:?}", again.model.config), format!("{:?}", loaded.model.config));
        assert_eq!(again.json["architectures"], loaded.json["architectures"]);
        assert_eq!(device.host(again.parameters.all()), device.host(loaded.parameters.all()));
        // What rank 0 tells the others makes the same configuration.
        let told = ClassifierConfig::from_json(&loaded.model.config.to_json(&loaded.json)).unwrap();
        assert_eq!(told, (loaded.model.config, true));
    }
}

fn small() -> EncoderConfig {
    EncoderConfig::Bert(BertConfig {
        vocab_size: 30,
        hidden_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 12,
        max_position_embeddings: 12,
        ..BertConfig::base()
    })
}

fn named(labels: &[&str]) -> Vec<String> {
    labels.iter().map(|l| l.to_string()).collect()
}

#[test]
fn flairs_head_is_kept_apart_from_hugging_faces() {
    let device = Cpu::new(1).unwrap();
    let texts = vec![vec![2, 5, 7, 3], vec![2, 9, 3]];
    let mut config = ClassifierConfig::new(small(), named(&["x", "y"]));
    (config.head, config.pooling, config.threshold) = (HeadKind::Linear, Pooling::Mean, 0.25);
    config.max_length = Some(9);
    config.check().unwrap();
    let loaded = LoadedClassifier::random(config, 4, &device);
    let saved = tempfile::tempdir().unwrap();
    loaded.save(saved.path(), &device).unwrap();
    let again = open(saved.path(), &device);
    assert_eq!(again.model.config, loaded.model.config);
    assert_eq!(logits(&device, &again, &texts), logits(&device, &loaded, &texts));
    // The encoder's part opens as an encoder; the mean of its states, then one layer, are the logits.
    let encoder = LoadedEncoder::open(&folder(saved.path()), &device).unwrap();
    let mut tape = Tape::inference(&device, &encoder.parameters);
    let states = encoder.encoder.encode(&mut tape, &texts.concat(), None, &spans(&texts), false);
    let states = device.read_f64(states.tensor.view());
    let [weight, bias] = again.model.output_specs() else { panic!() };
    let [weight, bias] = [weight, bias].map(|s| device.read_f64(again.parameters.view(s.place)));
    let mut expected = Vec::new();
    for (from, to) in [(0, 4), (4, 7)] {
        let mean = |c: usize| (from..to).map(|t| states[t * 8 + c]).sum::<f64>() / (to - from) as f64;
        for label in 0..2 {
            let products = (0..8).map(|c| mean(c) * weight[label * 8 + c]);
            expected.push(products.sum::<f64>() + bias[label]);
        }
    }
    assert_close(&logits(&device, &again, &texts), &expected, "logits");
    assert_eq!(again.json["architectures"], serde_json::json!(["BertModel"]));
}

#[test]
fn what_fits_of_a_head_is_kept_and_the_rest_is_drawn() {
    let device = Cpu::new(1).unwrap();
    let case = cases().into_iter().find(|c| c.name == "bert").unwrap();
    let headers = || ClassifierHeaders::read(&folder(&case.folder)).unwrap();
    let with = |labels: &[&str], seed| {
        let config = ClassifierConfig { labels: named(labels), ..headers().config };
        LoadedClassifier::with_config(headers(), config, seed, &device).unwrap()
    };
    let output = named(&["classifier.weight", "classifier.bias"]);
    assert!(with(&["sport", "world", "science"], 1).drawn.is_empty());
    for labels in [&["sport", "world"][..], &["sport", "science", "world"], &["a", "b", "c"]] {
        let loaded = with(labels, 1);
        assert_eq!(loaded.drawn, output, "{labels:?}");
        let head = |loaded: &LoadedClassifier<Cpu>| {
            device.read(loaded.parameters.view(loaded.model.output_specs()[0].place))
        };
        assert_eq!(head(&loaded), head(&with(labels, 1)));
        assert_ne!(head(&loaded), head(&with(labels, 2)));
        assert_eq!(
            device.read(loaded.parameters.view(loaded.model.output_specs()[1].place)),
            vec![0.0; labels.len()]
        );
    }
    let flair = ClassifierConfig { head: HeadKind::Linear, ..headers().config };
    let loaded = LoadedClassifier::with_config(headers(), flair, 1, &device).unwrap();
    assert_eq!(loaded.drawn, named(&["linear_head.weight", "linear_head.bias"]));
    // The pooler is none of that head's parameters, but goes on with the encoder.
    assert_eq!(loaded.kept.len(), 2);
}

#[test]
fn heads_have_the_gradients_of_their_forward() {
    let family = |config| config;
    let linear = |config| ClassifierConfig {
        head: HeadKind::Linear,
        pooling: Pooling::Mean,
        layers: vec![0, -1],
        ..config
    };
    let kinds: [(&dyn Fn(ClassifierConfig) -> ClassifierConfig, bool, [&str; 2]); 2] = [
        (&family, true, ["pooler.dense.weight", "encoder.layer.1.output.dense.weight"]),
        (&linear, false, ["linear_head.weight", "embeddings.LayerNorm.weight"]),
    ];
    for (kind, drops, names) in kinds {
        for name in names {
            gradient_is_a_slope(kind, name, drops);
        }
    }
}

/// The gradient of a parameter against differences, under a head with dropout.
fn gradient_is_a_slope(kind: &dyn Fn(ClassifierConfig) -> ClassifierConfig, name: &str, drops: bool) {
    let device = Reference;
    let mut encoder = small();
    encoder.set_dropout(0.0);
    let mut config = kind(ClassifierConfig::new(encoder, named(&["x", "y", "z"])));
    config.dropout = 0.5;
    config.check().unwrap();
    let mut loaded = LoadedClassifier::random(config, 4, &device);
    let texts = vec![vec![2, 5, 7, 3], vec![2, 9, 3]];
    let draw = Draw { seed: 1, update: 2, shard: 3 };
    let spec = loaded.model.layout().specs().iter().find(|s| s.name == name).unwrap().clone();
    let sum = |loaded: &LoadedClassifier<Reference>| {
        let mut tape = Tape::passing(&device, &loaded.parameters, draw);
        let found = loaded.model.logits(&mut tape, &texts.concat(), &spans(&texts), false);
        device.read_f64(found.tensor.view()).iter().zip(1..).map(|(v, i)| v * f64::from(i)).sum::<f64>()
    };
    let gradient = {
        let mut tape = Tape::recording(&device, &loaded.parameters, Some(draw));
        let found = loaded.model.logits(&mut tape, &texts.concat(), &spans(&texts), false);
        let slopes: Vec<f32> = (1..=6).map(|i| i as f32).collect();
        tape.inject(&found, Tensor::from_values(&device, 2, 3, &slopes));
        drop(found);
        let mut gradients = tercio_engine::Arena::zeros(&device, loaded.model.layout());
        tape.backward(&mut gradients, &[]);
        device.read_f64(gradients.view(spec.place))
    };
    assert!(gradient.iter().any(|g| g.abs() > 1e-3), "{name}");
    assert!(!drops || !name.starts_with("pooler") || gradient.contains(&0.0), "nothing was dropped");
    let values = device.read(loaded.parameters.view(spec.place));
    let step = 1.0 / 1024.0;
    for i in (0..values.len()).step_by(7) {
        let mut at = |by: f32| {
            let mut moved = values.clone();
            moved[i] += by;
            device.write(loaded.parameters.view_mut(spec.place), &moved);
            sum(&loaded)
        };
        let slope = (at(step) - at(-step)) / (2.0 * f64::from(step));
        assert!(
            (slope - gradient[i]).abs() < 2e-4 * (1.0 + slope.abs()),
            "{name}[{i}]: {slope}, {}",
            gradient[i]
        );
    }
}

#[test]
fn labels_of_a_text() {
    let config = ClassifierConfig::new(small(), named(&["a", "b", "c"]));
    let p = config.probabilities(&[1.0, 2.0, 2.0]);
    assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12 && (p[1] / p[0] - 1f64.exp()).abs() < 1e-12);
    assert_eq!(config.chosen(&p), [1]);
    let several = ClassifierConfig { multi_label: true, threshold: 0.6, ..config };
    let p = several.probabilities(&[0.0, 1.0, -900.0]);
    assert_eq!((p[0], p[2]), (0.5, 0.0));
    assert_eq!((several.chosen(&p), several.chosen(&[0.1; 3])), (vec![1], vec![]));
}

#[test]
fn hostile_configurations_are_refused_in_words() {
    let base = ClassifierConfig::new(small(), named(&["a", "b"])).to_json(&Map::new());
    let refuse = |change: &dyn Fn(&mut Map<String, Value>), word: &str| {
        let mut json = base.clone();
        change(&mut json);
        let said = ClassifierConfig::from_json(&json).unwrap_err();
        assert!(said.contains(word), "{said}");
    };
    for (field, value, word) in [
        ("id2label", serde_json::json!({"0": "a", "2": "b"}), "none of 1"),
        ("id2label", serde_json::json!({"0": "a", "1": "a"}), "twice"),
        ("id2label", serde_json::json!({"0": 7}), "found 7"),
        ("id2label", serde_json::json!({}), "no label"),
        ("id2label", serde_json::json!([1]), "found [1]"),
        ("problem_type", "regression".into(), "regression"),
        ("classifier_dropout", 1.5.into(), "classifier_dropout"),
        ("tercio_classifier", 3.into(), "expected an object"),
        ("tercio_classifier", serde_json::json!({"head": "x"}), "\"x\""),
        ("tercio_classifier", serde_json::json!({"threshold": 2}), "threshold"),
    ] {
        refuse(&|json| drop(json.insert(field.into(), value.clone())), word);
    }
    refuse(
        &|json| {
            json.shift_remove("id2label");
            json.insert("num_labels".into(), (1 << 22).into());
        },
        "num_labels",
    );
    let mean = ClassifierConfig { pooling: Pooling::Mean, ..ClassifierConfig::new(small(), named(&["a"])) };
    assert!(mean.check().unwrap_err().contains("BertForSequenceClassification"));
}

#[test]
fn an_encoder_is_no_classifier() {
    let device = Cpu::new(1).unwrap();
    let saved = tempfile::tempdir().unwrap();
    LoadedEncoder::random(small(), 1, &device).save(saved.path(), &device).unwrap();
    let said = LoadedClassifier::open(&folder(saved.path()), &device).err().unwrap().to_string();
    assert!(said.contains("BertForSequenceClassification") && said.contains("BertModel"), "{said}");
    // Nor is one whose file lost its head.
    let case = cases().into_iter().find(|c| c.name == "roberta").unwrap();
    let config = std::fs::read(case.folder.join("config.json")).unwrap();
    let loaded = open(&case.folder, &device);
    let encoder = LoadedEncoder::<Cpu>::open(&folder(&case.folder), &device).unwrap();
    encoder.save(saved.path(), &device).unwrap();
    std::fs::write(saved.path().join("config.json"), config).unwrap();
    let said = LoadedClassifier::open(&folder(saved.path()), &device).err().unwrap().to_string();
    assert!(said.contains(&loaded.model.head_specs()[0].name), "{said}");
}

#[test]
fn states_of_first_tokens_are_those_of_all_tokens() {
    let device = Cpu::new(2).unwrap();
    for case in cases() {
        let loaded = open(&case.folder, &device);
        let (encoder, parameters) = (&loaded.model.encoder, &loaded.parameters);
        let (ids, spans) = (case.texts.concat(), spans(&case.texts));
        let first: Vec<u32> = spans.iter().map(|s| s.start).collect();
        let run = |alone: bool, recompute: bool| {
            let mut tape = Tape::recording(&device, parameters, None);
            let states = match alone {
                true => encoder.encode_first(&mut tape, &ids, &spans, recompute),
                false => {
                    let all = encoder.encode(&mut tape, &ids, None, &spans, recompute);
                    tape.rows(&all, &first)
                }
            };
            let (rows, columns) = (states.tensor.rows, states.tensor.columns);
            let slopes: Vec<f32> = (0..rows * columns).map(|i| libm::sin(i as f64) as f32).collect();
            tape.inject(&states, Tensor::from_values(&device, rows, columns, &slopes));
            let values = device.read(states.tensor.view());
            drop(states);
            let mut gradients = tercio_engine::Arena::zeros(&device, loaded.model.layout());
            tape.backward(&mut gradients, &[]);
            (values, device.read_f64(gradients.all()))
        };
        let (all, alone) = (run(false, false), run(true, false));
        assert!(alone.0 == all.0, "{}: other bits", case.name);
        assert_close(&alone.1, &all.1, &format!("{}: gradients", case.name));
        assert!(run(true, true) == alone, "{}: recomputed", case.name);
    }
}

#[test]
fn layers_are_averaged_as_those_of_hugging_face() {
    let device = Cpu::new(1).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/classifier_layers");
    let expected: Value =
        serde_json::from_slice(&std::fs::read(path.join("expected.json")).unwrap()).unwrap();
    let texts: Vec<Vec<u32>> =
        lists(&expected["ids"]).iter().map(|t| t.iter().map(|&v| v as u32).collect()).collect();
    let layers: Vec<i64> = serde_json::from_value(expected["layers"].clone()).unwrap();
    for (pooling, name) in [(Pooling::First, "cls"), (Pooling::Mean, "mean")] {
        let headers = ClassifierHeaders::read(&folder(&path)).unwrap();
        let width = headers.config.encoder.width();
        let labels = (0..width).map(|i| i.to_string()).collect();
        let layers = layers.clone();
        let config =
            ClassifierConfig { head: HeadKind::Linear, layers, pooling, labels, ..headers.config.clone() };
        config.check().unwrap();
        let mut loaded = LoadedClassifier::with_config(headers, config, 1, &device).unwrap();
        // Logits are the vectors themselves.
        let [weight, bias] = [0, 1].map(|i| loaded.model.output_specs()[i].place);
        let one: Vec<f32> = (0..width * width).map(|i| f32::from(u8::from(i % (width + 1) == 0))).collect();
        device.write(loaded.parameters.view_mut(weight), &one);
        device.write(loaded.parameters.view_mut(bias), &vec![0.0; width]);
        assert_close(&logits(&device, &loaded, &texts), &lists(&expected[name]).concat(), name);
        let saved = tempfile::tempdir().unwrap();
        loaded.save(saved.path(), &device).unwrap();
        let again = open(saved.path(), &device);
        assert_eq!(again.model.config, loaded.model.config);
        assert_eq!(logits(&device, &again, &texts), logits(&device, &loaded, &texts));
    }
}

#[test]
fn layers_that_are_none_are_refused() {
    let with = |layers: &[i64], head| {
        let config = ClassifierConfig::new(small(), named(&["a"]));
        ClassifierConfig { layers: layers.to_vec(), head, ..config }.check()
    };
    assert_eq!(with(&[0, -2, 2], HeadKind::Linear), Ok(()));
    for (layers, head, word) in [
        (&[-2][..], HeadKind::Family, "linear head"),
        (&[3], HeadKind::Linear, "found 3"),
        (&[-4], HeadKind::Linear, "found -4"),
        (&[2, -1], HeadKind::Linear, "each once"),
        (&[], HeadKind::Linear, "found none"),
    ] {
        let said = with(layers, head).unwrap_err();
        assert!(said.contains(word), "{layers:?}: {said}");
    }
}
