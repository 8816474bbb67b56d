//! Text to token ids and back: a `tokenizer.json`, or a `spiece.model` where only that is there, or byT5's bytes.
//!
//! The files of a model folder are kept in memory, so that a saved model has the same ones, byte for byte.

use std::fs::{self, File};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;

use crate::byt5::{self, Bytes};
use crate::charsmap;
use crate::error::DataError;
use crate::spiece;

/// Longest vocabulary piece that is accepted, in bytes: the library's trie is as deep as its longest piece.
pub(crate) const MAX_PIECE_BYTES: usize = 4096;
/// Largest tokenizer.json that is read.
const MAX_JSON_BYTES: u64 = 256 << 20;
/// Largest vocabulary that is believed.
const MAX_VOCAB: usize = 1 << 24;

const JSON: &str = "tokenizer.json";
const SPIECE: &str = "spiece.model";
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_MAP: &str = "special_tokens_map.json";

/// The names of the special tokens.
pub(crate) struct SpecialNames {
    pub pad: String,
    pub eos: String,
    pub unk: String,
}

/// A tokenizer with its special ids; can be shared between threads.
pub struct Tokenizer {
    inner: Inner,
    files: Vec<(&'static str, Vec<u8>)>,
    pad: u32,
    eos: u32,
    unk: Option<u32>,
    vocab_size: usize,
}

enum Inner {
    Pipeline(Box<tokenizers::Tokenizer>),
    Bytes(Box<Bytes>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.files.iter().map(|f| f.0).collect();
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).field("files", &names).finish()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a model folder: `tokenizer.json` if it is there, else `spiece.model`. Truncation
    /// and padding that the file asks for are switched off. The names of the special tokens and the number of
    /// `<extra_id_N>` come from `tokenizer_config.json` if it is there, else T5's (`<pad>`, `</s>`, `<unk>`, 100). Where
    /// neither file is there and `tokenizer_config.json` or `config.json` names the class `ByT5Tokenizer`, it is byT5's.
    ///
    /// # Errors
    /// If neither file is there, or a file is damaged, too large, or lacks the padding or end token.
    pub fn load(dir: &Path) -> Result<Tokenizer, DataError> {
        let mut files = Vec::new();
        for (name, limit) in
            [(JSON, MAX_JSON_BYTES), (SPIECE, spiece::MAX_BYTES), (CONFIG, 64 << 20), (SPECIAL_MAP, 64 << 20)]
        {
            if let Some(bytes) = read(&dir.join(name), limit)? {
                files.push((name, bytes));
            }
        }
        let bytes_of = |name: &str| files.iter().find(|f| f.0 == name).map(|f| f.1.as_slice());
        let config = match bytes_of(CONFIG) {
            None => Value::Null,
            Some(bytes) => serde_json::from_slice(bytes).map_err(|e| {
                DataError::file(
                    &dir.join(CONFIG),
                    format!("expected JSON, found an error ({e}); get the file again"),
                )
            })?,
        };
        let name = |key: &str, default: &str| match &config[key] {
            Value::String(name) => name.clone(),
            Value::Object(token) => {
                token.get("content").and_then(Value::as_str).unwrap_or(default).to_string()
            }
            _ => default.to_string(),
        };
        let names = SpecialNames {
            pad: name("pad_token", "<pad>"),
            eos: name("eos_token", "</s>"),
            unk: name("unk_token", "<unk>"),
        };

        let (main, mut inner) = if let Some(bytes) = bytes_of(JSON) {
            (JSON, guarded(|| from_json(bytes)))
        } else if let Some(bytes) = bytes_of(SPIECE) {
            let extra =
                config["extra_ids"].as_u64().map_or(100, |n| usize::try_from(n).unwrap_or(usize::MAX));
            (SPIECE, guarded(|| spiece::build(bytes, &names, extra)))
        } else if is_byt5(dir, &config)? {
            return Tokenizer::bytes(dir, &config, &names, files);
        } else {
            return Err(DataError::file(
                dir,
                format!(
                    "expected {JSON} or {SPIECE} in this folder (or `tokenizer_class` \"{}\" in {CONFIG}), found neither; name a model folder that has one",
                    byt5::CLASS
                ),
            ));
        };
        let path = dir.join(main);
        if let Ok(tokenizer) = &mut inner {
            tokenizer.with_padding(None);
            if let Err(e) = tokenizer.with_truncation(None) {
                inner = Err(e.to_string());
            }
        }
        let inner = inner.map_err(|message| DataError::file(&path, message))?;

        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size > MAX_VOCAB {
            return Err(DataError::file(
                &path,
                format!("expected ids below {MAX_VOCAB}, found {}; get the file again", vocab_size - 1),
            ));
        }
        let id = |name: &str, what: &str| {
            inner.token_to_id(name).ok_or_else(|| {
                DataError::file(&path, format!("expected the {what} token {name:?} in the vocabulary, found none; name it in {CONFIG}"))
            })
        };
        let (pad, eos, unk) =
            (id(&names.pad, "padding")?, id(&names.eos, "end")?, inner.token_to_id(&names.unk));
        if main == SPIECE {
            let json = inner.to_string(true).map_err(|e| DataError::file(&path, e.to_string()))?;
            files.insert(0, (JSON, json.into_bytes()));
        }
        let inner = Inner::Pipeline(Box::new(inner));
        let tokenizer = Tokenizer { inner, files, pad, eos, unk, vocab_size };
        // a pipeline that cannot encode at all is refused now and not at the first example
        tokenizer.encode("question: a").map_err(|e| DataError::file(&path, e.to_string()))?;
        Ok(tokenizer)
    }

    fn bytes(
        dir: &Path,
        config: &Value,
        names: &SpecialNames,
        mut files: Vec<(&'static str, Vec<u8>)>,
    ) -> Result<Tokenizer, DataError> {
        let bytes = Bytes::new(config, names).map_err(|e| DataError::file(&dir.join(CONFIG), e))?;
        let id = |name: &str, what: &str| {
            bytes.id(name).ok_or_else(|| {
                let what = format!("expected the {what} token {name:?} among the added tokens, found none; name it in {CONFIG}");
                DataError::file(&dir.join(CONFIG), what)
            })
        };
        let (pad, eos, unk) = (id(&names.pad, "padding")?, id(&names.eos, "end")?, bytes.id(&names.unk));
        if config["tokenizer_class"] != byt5::CLASS {
            // a folder of these files alone must be known again
            files.retain(|(name, _)| *name != CONFIG);
            files.push((CONFIG, Bytes::config(config)));
        }
        let vocab_size = bytes.size();
        Ok(Tokenizer { inner: Inner::Bytes(Box::new(bytes)), files, pad, eos, unk, vocab_size })
    }

    /// Token ids of a text; no special tokens are added, those written in the text are recognised.
    ///
    /// # Errors
    /// If the pipeline of a strange tokenizer file fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let pipeline = match &self.inner {
            Inner::Pipeline(pipeline) => pipeline,
            Inner::Bytes(bytes) => return Ok(bytes.encode(text)),
        };
        guarded(|| pipeline.encode_fast(text, false).map_err(|e| e.to_string()))
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| DataError::Text(format!("expected a text that the tokenizer takes, found that it fails ({e}); look at the tokenizer file")))
    }

    /// The text of token ids, special tokens left out; ids beyond the vocabulary give nothing.
    ///
    /// # Errors
    /// If the decoder of a strange tokenizer file fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        let pipeline = match &self.inner {
            Inner::Pipeline(pipeline) => pipeline,
            Inner::Bytes(bytes) => return Ok(bytes.decode(ids)),
        };
        guarded(|| pipeline.decode(ids, true).map_err(|e| e.to_string()))
            .map_err(|e| DataError::Text(format!("expected ids that the tokenizer can decode, found that it fails ({e}); look at the tokenizer file")))
    }

    /// Id of the padding token, which starts a T5 decoder.
    pub fn pad_id(&self) -> u32 {
        self.pad
    }

    /// Id of the end token `</s>`.
    pub fn eos_id(&self) -> u32 {
        self.eos
    }

    /// Id of the unknown token, if the vocabulary has one.
    pub fn unk_id(&self) -> Option<u32> {
        self.unk
    }

    /// One more than the highest id; a model's embedding must have at least as many rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The files that make the tokenizer, by name: `tokenizer.json` always (byT5's has none), others as the source folder
    /// had them.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (*name, bytes.as_slice()))
    }

    /// Writes [`Tokenizer::files`] into a folder.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn copy_to(&self, dir: &Path) -> Result<(), DataError> {
        for (name, bytes) in self.files() {
            let path = dir.join(name);
            fs::write(&path, bytes).map_err(DataError::io(&path, "write the tokenizer's file"))?;
        }
        Ok(())
    }
}

/// Whether the folder's files, of which none is a vocabulary, name byT5's tokenizer.
fn is_byt5(dir: &Path, config: &Value) -> Result<bool, DataError> {
    if let Value::String(class) = &config["tokenizer_class"] {
        return Ok(class == byt5::CLASS);
    }
    let Some(bytes) = read(&dir.join("config.json"), 1 << 20)? else { return Ok(false) };
    let model: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    Ok(model["tokenizer_class"] == byt5::CLASS)
}

/// Runs library code that may panic on hostile input.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the tokenizer library stopped on this input".into()))
}

fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, DataError> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() => {}
        Ok(_) => {
            return Err(DataError::file(path, "expected a regular file, found a folder or a device"));
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(DataError::io(path, "open the file")(e)),
    }
    let file = File::open(path).map_err(DataError::io(path, "open the file"))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(DataError::io(path, "read the file"))?;
    if bytes.len() as u64 > limit {
        return Err(DataError::file(
            path,
            format!("expected at most {limit} bytes, found more; this is not a tokenizer's file"),
        ));
    }
    Ok(Some(bytes))
}

fn from_json(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let bad = |e: String| {
        format!(
            "expected a tokenizer.json of Hugging Face tokenizers, found an error ({e}); get the file again"
        )
    };
    let json: Value = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    check_maps(&json)?;
    for (id, entry) in json["model"]["vocab"].as_array().into_iter().flatten().enumerate() {
        let length = entry[0].as_str().map_or(0, str::len);
        if length > MAX_PIECE_BYTES {
            return Err(format!(
                "expected pieces of at most {MAX_PIECE_BYTES} bytes, found {length} in piece {id}; get the file again"
            ));
        }
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
