//! byT5's tokenizer against values that Hugging Face's gave (tools/make_family_cases.py), and hostile configurations.

use std::fs;

use serde_json::{Value, json};
use tercio_data::Tokenizer;

fn load(files: &[(&str, &str)]) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    Tokenizer::load(dir.path()).map_err(|e| e.to_string())
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// Compares all stored values.
fn compare(tokenizer: &Tokenizer) {
    let stored: Value = serde_json::from_str(include_str!("data/byt5.json")).unwrap();
    assert_eq!(tokenizer.vocab_size() as u64, stored["size"].as_u64().unwrap());
    let special = |name: &str| stored["specials"][name].as_u64().unwrap() as u32;
    let found = (tokenizer.pad_id(), tokenizer.eos_id(), tokenizer.unk_id());
    assert_eq!(found, (special("<pad>"), special("</s>"), Some(special("<unk>"))));
    for case in stored["encoded"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{text:?}");
    }
    for case in stored["decoded"].as_array().unwrap() {
        assert_eq!(tokenizer.decode(&ids(&case["ids"])).unwrap(), case["text"].as_str().unwrap(), "{case}");
    }
    assert_eq!(tokenizer.decode(&[100, 384, u32::MAX]).unwrap(), "a");
}

#[test]
fn ids_and_texts_are_those_of_hugging_face() {
    // as google/byt5-small has it, by config.json alone, and as newer tools save it
    compare(
        &load(&[("tokenizer_config.json", r#"{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}"#)])
            .unwrap(),
    );
    let alone =
        load(&[("config.json", r#"{"model_type": "t5", "tokenizer_class": "ByT5Tokenizer"}"#)]).unwrap();
    compare(&alone);
    let mut tokens = serde_json::Map::new();
    let specials = ["<pad>", "</s>", "<unk>"].into_iter().enumerate();
    for (id, text) in specials {
        tokens.insert(id.to_string(), json!({"content": text, "lstrip": true, "rstrip": true}));
    }
    for n in 0..125 {
        tokens.insert((259 + n).to_string(), json!({"content": format!("<extra_id_{n}>"), "lstrip": false}));
    }
    let saved = json!({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0, "added_tokens_decoder": tokens});
    compare(&load(&[("tokenizer_config.json", &saved.to_string())]).unwrap());
    // what is copied into a saved model is known again
    let dir = tempfile::tempdir().unwrap();
    alone.copy_to(dir.path()).unwrap();
    compare(&Tokenizer::load(dir.path()).unwrap());
}

#[test]
fn a_bad_configuration_is_named() {
    for (fields, part) in [
        (json!({"extra_ids": 1_000_000}), "`extra_ids` from 0 to 10000, found 1000000"),
        (json!({"extra_ids": "x"}), "`extra_ids`"),
        (json!({"added_tokens_decoder": {"7": {"content": "x"}}}), "from 259 on"),
        (json!({"added_tokens_decoder": {"259": {}}}), "a `content`"),
        (json!({"added_tokens_decoder": {"259": {"content": ""}}}), "1 to 4096 bytes"),
        (json!({"additional_special_tokens": ["a", "a"]}), "\"a\" (id 260) twice"),
        (json!({"additional_special_tokens": [3]}), "expected names"),
        (json!({"pad_token": "<p>", "added_tokens_decoder": {"0": {"content": "<q>"}}}), "\"<p>\""),
    ] {
        let mut fields = fields;
        fields["tokenizer_class"] = "ByT5Tokenizer".into();
        let error = load(&[("tokenizer_config.json", &fields.to_string())]).unwrap_err();
        assert!(error.contains(part) && error.contains("tokenizer_config.json"), "{fields}: {error}");
    }
    // another class has a vocabulary file, and none is there
    let other = [("tokenizer_config.json", r#"{"tokenizer_class": "T5Tokenizer"}"#)];
    assert!(load(&other).unwrap_err().contains("spiece.model"));
}
