//! Folders that are no encoder, or a damaged one: an error that names the file and what to expect, never a panic.

use std::path::Path;

use serde_json::{Map, Value, json};
use tercio_engine::Cpu;
use tercio_models::bert::BertFamily;
use tercio_models::encoder::{EncoderConfig, EncoderHeaders, LoadedEncoder};
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::{LoadedRetriever, RetrieverConfig, RetrieverHeaders};
use tercio_models::weights::save_safetensors;

fn json_of(family: BertFamily) -> Map<String, Value> {
    let Value::Object(json) = json!({
        "model_type": family.model_type(), "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 10, "type_vocab_size": 2,
        "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12,
    }) else {
        unreachable!()
    };
    json
}

/// A folder of a random encoder whose tensors went through `change`.
fn folder(change: impl Fn(&str, &mut Vec<usize>, &mut Vec<f32>) -> bool) -> tempfile::TempDir {
    let device = Cpu::new(1).unwrap();
    let config = EncoderConfig::from_json(&json_of(BertFamily::Bert)).unwrap();
    let loaded = LoadedEncoder::random(config, 3, &device);
    let folder = tempfile::tempdir().unwrap();
    loaded.save(folder.path(), &device).unwrap();
    let mut tensors = Vec::new();
    for spec in loaded.layout.specs() {
        let mut values = vec![0.5; spec.place.len()];
        let mut shape = spec.shape.clone();
        if change(&spec.name, &mut shape, &mut values) {
            tensors.push((spec.name.clone(), shape, values));
        }
    }
    let all = tensors.iter().map(|(n, s, v)| (n.as_str(), s.as_slice(), v.as_slice()));
    save_safetensors(&folder.path().join("model.safetensors"), all, &[]).unwrap();
    folder
}

fn error(folder: &Path) -> String {
    let device = Cpu::new(1).unwrap();
    let folder = ModelFolder::open(folder.to_str().unwrap()).unwrap();
    LoadedEncoder::open(&folder, &device).err().expect("an error").to_string()
}

#[test]
fn damaged_tensors_are_named() {
    const QUERY: &str = "encoder.layer.0.attention.self.query.weight";
    let missing = folder(|name, _, _| name != QUERY);
    assert!(error(missing.path()).contains(&format!("there is no tensor `{QUERY}`")));
    let shaped = folder(|name, shape, values| {
        if name == QUERY {
            shape[0] = 7;
            values.truncate(7 * 8);
        }
        true
    });
    let text = error(shaped.path());
    assert!(text.contains(QUERY) && text.contains("[7, 8]") && text.contains("[8, 8]"), "{text}");
    for bad in [f32::NAN, f32::INFINITY] {
        let nan = folder(|name, _, values| {
            if name == QUERY {
                values[13] = bad;
            }
            true
        });
        let text = error(nan.path());
        assert!(text.contains(QUERY) && text.contains("element 13") && text.contains("damaged"), "{text}");
    }
}

#[test]
fn tensors_of_other_parts_are_named_and_heads_left_out() {
    let device = Cpu::new(1).unwrap();
    let config = EncoderConfig::from_json(&json_of(BertFamily::Bert)).unwrap();
    let loaded = LoadedEncoder::random(config, 3, &device);
    let write = |prefix: &str, more: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        loaded.save(folder.path(), &device).unwrap();
        let specs = loaded.layout.specs();
        let names: Vec<String> = specs
            .iter()
            .map(|s| format!("{prefix}{}", s.name))
            .chain(more.iter().map(|n| n.to_string()))
            .collect();
        let shapes: Vec<Vec<usize>> =
            specs.iter().map(|s| s.shape.clone()).chain(more.iter().map(|_| vec![1])).collect();
        let values: Vec<Vec<f32>> = shapes.iter().map(|s| vec![0.25; s.iter().product()]).collect();
        let all = names
            .iter()
            .zip(&shapes)
            .zip(&values)
            .map(|((n, s), v)| (n.as_str(), s.as_slice(), v.as_slice()));
        save_safetensors(&folder.path().join("model.safetensors"), all, &[]).unwrap();
        folder
    };
    let text = error(write("", &["encoder.layer.1.output.dense.bias"]).path());
    assert!(
        text.contains("`encoder.layer.1.output.dense.bias` belongs to no part of a bert model"),
        "{text}"
    );
    assert!(error(write("", &["something.else"]).path()).contains("`something.else`"));
    let headed = write("bert.", &["cls.predictions.bias", "bert.embeddings.position_ids"]);
    let folder = ModelFolder::open(headed.path().to_str().unwrap()).unwrap();
    let headers = EncoderHeaders::read(&folder, &[]).unwrap();
    assert_eq!(headers.ignored, ["cls.predictions.bias"]);
    assert!(headers.note().unwrap().contains("left out 1 tensors"));
    LoadedEncoder::open(&folder, &device).unwrap();
    // The same parameter under two names.
    let text = error(write("", &["embeddings.LayerNorm.gamma"]).path());
    assert!(text.contains("same parameter"), "{text}");
}

#[test]
fn configurations_that_are_not_known_are_named() {
    let with = |family: BertFamily, field: &str, value: Value| {
        let mut json = json_of(family);
        json.insert(field.into(), value);
        EncoderConfig::from_json(&json).unwrap_err()
    };
    let largest = (1u64 << 24) - 1;
    for (field, value, part) in [
        (
            "model_type",
            json!("electra"),
            "model_type is \"electra\"; the text encoders known here are bert, distilbert",
        ),
        ("model_type", Value::Null, "model_type is null"),
        ("position_embedding_type", json!("relative_key"), "expected \"absolute\""),
        ("is_decoder", json!(true), "`is_decoder`"),
        ("hidden_act", json!("mish"), "`hidden_act`: expected gelu"),
        ("hidden_size", json!(-3), "`hidden_size`: expected a positive number"),
        ("hidden_size", json!(9), "`num_attention_heads`: expected a divisor of the width 9"),
        ("num_hidden_layers", json!(largest), "`num_hidden_layers`: expected at most 1024 layers"),
        ("vocab_size", Value::Null, "`vocab_size`: expected a positive number, found nothing"),
        ("pad_token_id", json!(11), "`pad_token_id`: expected an id below vocab_size"),
        ("layer_norm_eps", json!("tiny"), "`layer_norm_eps`: expected a number"),
        ("hidden_dropout_prob", json!(1.0), "`hidden_dropout_prob`: expected a number from 0 to below 1"),
    ] {
        let error = with(BertFamily::Bert, field, value);
        assert!(error.contains(part), "{field}: {error}");
    }
    assert!(with(BertFamily::Roberta, "max_position_embeddings", json!(2)).contains("id of padding"));
    assert!(with(BertFamily::Roberta, "pad_token_id", Value::Null).contains("`pad_token_id`"));
    let mut huge = json_of(BertFamily::Bert);
    for field in ["hidden_size", "intermediate_size", "num_attention_heads"] {
        huge.insert(field.into(), largest.into());
    }
    huge.insert("num_hidden_layers".into(), 1024.into());
    assert!(EncoderConfig::from_json(&huge).unwrap_err().contains("more than 2^40"));
}

#[test]
fn a_retriever_folder_without_its_head_is_refused_and_a_plain_encoder_gets_a_random_one() {
    let device = Cpu::new(1).unwrap();
    let mut config = RetrieverConfig::new(EncoderConfig::from_json(&json_of(BertFamily::Bert)).unwrap());
    config.indexing_dimension = 5;
    config.passage_template = Some("{title} {text}".into());
    let folder = tempfile::tempdir().unwrap();
    LoadedRetriever::random(config.clone(), 4, &device).save(folder.path(), &device).unwrap();
    let open = |path: &Path| ModelFolder::open(path.to_str().unwrap()).unwrap();
    let again = LoadedRetriever::open(&open(folder.path()), &device).unwrap();
    assert_eq!(again.model.config, config);
    let stored = again.model.config.to_json(&again.json);
    assert!(stored["passage_template"] == "{title} {text}" && !stored.contains_key("question_template"));
    let fids = RetrieverConfig { passage_template: None, ..config.clone() }.to_json(&stored);
    assert!(!fids.contains_key("passage_template"), "a stale template stays");
    // Another dimension is another head.
    let headers = RetrieverHeaders::read(&open(folder.path())).unwrap();
    let wider = RetrieverConfig { indexing_dimension: 6, ..config.clone() };
    let wider = LoadedRetriever::with_config(headers, wider, 4, &device).unwrap();
    assert!(wider.random_head && !again.random_head);

    let plain = tempfile::tempdir().unwrap();
    LoadedEncoder::random(config.encoder.clone(), 4, &device).save(plain.path(), &device).unwrap();
    let headers = RetrieverHeaders::read(&open(plain.path())).unwrap();
    assert!(!headers.fid && !headers.config.projection && headers.config.apply_passage_mask);
    let headed = LoadedRetriever::with_config(headers, config.clone(), 4, &device).unwrap();
    assert!(headed.random_head);
    // FiD's configuration over weights that have no head.
    let text = std::fs::read(folder.path().join("config.json")).unwrap();
    std::fs::write(plain.path().join("config.json"), text).unwrap();
    let error = LoadedRetriever::open(&open(plain.path()), &device).err().unwrap().to_string();
    assert!(error.contains("config.json") && error.contains("proj.weight"), "{error}");
}
