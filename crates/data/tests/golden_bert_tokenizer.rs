//! BERT's tokenizer against the golden ids: from `tokenizer.json` and from `vocab.txt` alone, exactly.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use std::fs;

use serde_json::Value;
use tercio_data::Tokenizer;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
fn golden_bert_tokenizer() {
    let golden = golden_folder::golden_folder().join("tokenizers");
    let cases: Value = serde_json::from_slice(&fs::read(golden.join("expected.json")).unwrap()).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    let fast = Tokenizer::load(&golden.join("bert")).unwrap();
    let only = tempfile::tempdir().unwrap();
    fs::write(only.path().join("vocab.txt"), fs::read(golden.join("bert/vocab.txt")).unwrap()).unwrap();
    let slow = Tokenizer::load(only.path()).unwrap();
    let special =
        |t: &Tokenizer| (t.pad_id(), t.unk_id(), t.cls_id(), t.sep_id(), t.mask_id(), t.vocab_size());
    assert_eq!(special(&fast), special(&slow));
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_eq!(fast.encode_framed(text, usize::MAX).unwrap(), ids(&case["bert_ids"]), "{text:?}");
        let expected = ids(&case["bert_ids_slow_tokenizer"]);
        assert_eq!(slow.encode_framed(text, usize::MAX).unwrap(), expected, "{text:?}");
    }
}
