//! A `tokenizer.json` as a pipeline, after a look at what the library would take unchecked.

use serde_json::Value;

use super::MAX_PIECE_BYTES;
use crate::charsmap;

/// Longest word that is cut into word pieces: the search looks at every part of it.
const MAX_WORD: u64 = 1000;

pub(super) fn build(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let bad = |e: String| {
        format!(
            "expected a tokenizer.json of Hugging Face tokenizers, found an error ({e}); get the file again"
        )
    };
    let json: Value = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    check_maps(&json)?;
    let model = &json["model"];
    for (id, entry) in model["vocab"].as_array().into_iter().flatten().enumerate() {
        let length = entry[0].as_str().map_or(0, str::len);
        if length > MAX_PIECE_BYTES {
            return Err(format!(
                "expected pieces of at most {MAX_PIECE_BYTES} bytes, found {length} in piece {id}; get the file again"
            ));
        }
    }
    if model["max_input_chars_per_word"].as_u64().is_some_and(|n| n > MAX_WORD) {
        return Err(format!(
            "expected `max_input_chars_per_word` of at most {MAX_WORD}, found {}; lower it (BERT has 100)",
            model["max_input_chars_per_word"]
        ));
    }
    // The library misses it only where a text needs it.
    if let (Value::Object(vocab), Some(unk)) = (&model["vocab"], model["unk_token"].as_str())
        && !vocab.contains_key(unk)
    {
        return Err(format!(
            "expected the `unk_token` {unk:?} in the vocabulary, found none; get the file again"
        ));
    }
    // It would draw other tokens for the same text every time.
    if model["dropout"].as_f64().is_some_and(|p| p != 0.0) {
        return Err(format!(
            "expected no `dropout` of merges, found {}; set it to null in the file",
            model["dropout"]
        ));
    }
    tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| bad(e.to_string()))
}

/// Checks every character map of the pipeline, however it is nested.
fn check_maps(json: &Value) -> Result<(), String> {
    match json {
        Value::Object(map) => {
            if let Some(Value::String(text)) = map.get("precompiled_charsmap") {
                let bytes = charsmap::from_base64(text).ok_or(
                    "expected base64 in `precompiled_charsmap`, found something else; get the file again",
                )?;
                charsmap::check(&bytes)?;
            }
            map.values().try_for_each(check_maps)
        }
        Value::Array(list) => list.iter().filter(|v| v.is_object() || v.is_array()).try_for_each(check_maps),
        _ => Ok(()),
    }
}
