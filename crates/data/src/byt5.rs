//! byT5's tokenizer: a token is a byte of the UTF-8 text, its id the byte plus 3; before them stand `<pad>`, `</s>` and `<unk>`,
//! behind them the `<extra_id_N>`. It has no vocabulary file.
//!
//! Source: Xue et al. (2022), "ByT5", and what Hugging Face's `ByT5Tokenizer` gives (stored values in tests/data).

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::tokenizer::{MAX_PIECE_BYTES, SpecialNames};

/// The name in `tokenizer_config.json` or `config.json` that stands for this tokenizer.
pub(crate) const CLASS: &str = "ByT5Tokenizer";
/// Id of the byte 0.
const FIRST_BYTE: u32 = 3;
/// Id behind the byte 255.
const FIRST_EXTRA: u32 = FIRST_BYTE + 256;
const EXTRA_IDS: u64 = 125;
const MAX_EXTRA_IDS: u64 = 10_000;

/// A token that is written out in texts.
struct Special {
    text: String,
    id: u32,
    /// White space around it goes.
    strips: bool,
}

/// The byte tokenizer.
pub(crate) struct Bytes {
    specials: Vec<Special>,
    /// Bytes with which a special token begins.
    first: [bool; 256],
}

impl Bytes {
    /// By the fields of a `tokenizer_config.json`; all may be missing.
    pub fn new(config: &Value, names: &SpecialNames) -> Result<Bytes, String> {
        let mut specials = match &config["added_tokens_decoder"] {
            Value::Object(tokens) => added(tokens)?,
            _ => extra(config)?,
        };
        for (id, name) in [&names.pad, &names.eos, &names.unk].into_iter().enumerate() {
            if !specials.iter().any(|s| s.id == id as u32) {
                specials.push(Special { text: name.clone(), id: id as u32, strips: true });
            }
        }
        let (mut texts, mut ids) = (BTreeSet::new(), BTreeSet::new());
        let mut first = [false; 256];
        for special in &specials {
            let Some(&byte) =
                special.text.as_bytes().first().filter(|_| special.text.len() <= MAX_PIECE_BYTES)
            else {
                return Err(format!(
                    "expected 1 to {MAX_PIECE_BYTES} bytes in every added token, found {} in that of id {}; correct tokenizer_config.json",
                    special.text.len(),
                    special.id
                ));
            };
            if !texts.insert(&special.text) || !ids.insert(special.id) {
                return Err(format!(
                    "expected added tokens that differ, found {:?} (id {}) twice; correct tokenizer_config.json",
                    special.text, special.id
                ));
            }
            first[byte as usize] = true;
        }
        Ok(Bytes { specials, first })
    }

    /// The fields that make [`crate::Tokenizer::load`] and Hugging Face's tools take this tokenizer, added to a file's.
    pub fn config(config: &Value) -> Vec<u8> {
        let mut fields = config.as_object().cloned().unwrap_or_else(|| {
            let all = json!({"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_ids": EXTRA_IDS});
            all.as_object().cloned().unwrap_or_default()
        });
        fields.insert("tokenizer_class".into(), CLASS.into());
        (serde_json::to_string_pretty(&Value::Object(fields)).unwrap_or_default() + "\n").into_bytes()
    }

    /// Ids of a text; special tokens written in it are recognised, and those that say so take the white space around them.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len());
        let (mut start, mut at) = (0, 0);
        let mut strip_next = false;
        let bytes = |mut part: &str, strip_start: bool, strip_end: bool, ids: &mut Vec<u32>| {
            if strip_start {
                part = part.trim_start_matches(is_space);
            }
            if strip_end {
                part = part.trim_end_matches(is_space);
            }
            ids.extend(part.bytes().map(|b| u32::from(b) + FIRST_BYTE));
        };
        while at < text.len() {
            let found = self.first[text.as_bytes()[at] as usize]
                .then(|| self.longest_at(&text.as_bytes()[at..]))
                .flatten();
            let Some(special) = found else {
                at += 1;
                continue;
            };
            bytes(&text[start..at], strip_next, special.strips, &mut ids);
            ids.push(special.id);
            at += special.text.len();
            (start, strip_next) = (at, special.strips);
        }
        bytes(&text[start..], strip_next, false, &mut ids);
        ids
    }

    fn longest_at(&self, rest: &[u8]) -> Option<&Special> {
        let fits = self.specials.iter().filter(|s| rest.starts_with(s.text.as_bytes()));
        fits.max_by_key(|s| s.text.len())
    }

    /// The text of ids: special ones and unknown ones give nothing, and neither do bytes that are no UTF-8.
    pub fn decode(&self, ids: &[u32]) -> String {
        let byte = |id: &u32| id.checked_sub(FIRST_BYTE).and_then(|b| u8::try_from(b).ok());
        let bytes: Vec<u8> = ids.iter().filter_map(byte).collect();
        bytes.utf8_chunks().map(|chunk| chunk.valid()).collect()
    }

    /// Id of a special token.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.specials.iter().find(|s| s.text == name).map(|s| s.id)
    }

    /// One more than the highest id.
    pub fn size(&self) -> usize {
        let highest = self.specials.iter().map(|s| s.id).max().unwrap_or_default();
        highest.max(FIRST_EXTRA - 1) as usize + 1
    }
}

/// What Python's `str.strip` takes for white space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The tokens as newer Hugging Face tools save them: `{"259": {"content": "<extra_id_0>", "lstrip": false, ...}, ...}`.
fn added(tokens: &Map<String, Value>) -> Result<Vec<Special>, String> {
    let token = |(id, token): (&String, &Value)| {
        let text = token["content"].as_str();
        let number = id.parse::<u32>().ok();
        let known = number
            .filter(|n| *n < FIRST_BYTE || (FIRST_EXTRA..FIRST_EXTRA + MAX_EXTRA_IDS as u32).contains(n));
        match (text, known) {
            (Some(text), Some(id)) => {
                let strips = token["lstrip"] == true || token["rstrip"] == true;
                Ok(Special { text: text.to_owned(), id, strips })
            }
            _ => Err(format!(
                "expected a `content` and an id below {FIRST_BYTE} or from {FIRST_EXTRA} on in every token of `added_tokens_decoder`, found {id:?}: {token}; correct tokenizer_config.json"
            )),
        }
    };
    tokens.iter().map(token).collect()
}

/// The tokens as older tools say them: a number, or a list of names.
fn extra(config: &Value) -> Result<Vec<Special>, String> {
    let names: Vec<String> = match (&config["additional_special_tokens"], &config["extra_ids"]) {
        (Value::Array(list), _) if !list.is_empty() => {
            let name = |v: &Value| v.as_str().or_else(|| v["content"].as_str()).map(str::to_owned);
            list.iter().map(name).collect::<Option<_>>().ok_or(
                "expected names in `additional_special_tokens`, found something else; correct tokenizer_config.json",
            )?
        }
        (_, extra) => {
            let n = if extra.is_null() { Some(EXTRA_IDS) } else { extra.as_u64() };
            let n = n.filter(|n| *n <= MAX_EXTRA_IDS).ok_or_else(|| {
                format!("expected `extra_ids` from 0 to {MAX_EXTRA_IDS}, found {extra}; correct tokenizer_config.json")
            })?;
            (0..n).map(|i| format!("<extra_id_{i}>")).collect()
        }
    };
    if names.len() as u64 > MAX_EXTRA_IDS {
        return Err(format!(
            "expected at most {MAX_EXTRA_IDS} special tokens, found {}; correct tokenizer_config.json",
            names.len()
        ));
    }
    let ids = FIRST_EXTRA..;
    Ok(names.into_iter().zip(ids).map(|(text, id)| Special { text, id, strips: false }).collect())
}
