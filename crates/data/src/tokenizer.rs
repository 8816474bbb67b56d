//! Text to token ids and back: a `tokenizer.json`, or the vocabulary file of a family where only that is there, or byT5's bytes.
//!
//! The files of a model folder are kept in memory, so that a saved model has the same ones, byte for byte.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;

use crate::byt5::{self, Bytes};
use crate::error::DataError;
use crate::spiece;

mod added;
mod byte_pairs;
mod files;
mod frame;
mod json;
mod names;
mod word_pieces;
mod xlm_roberta;

use files::{BYTE_PAIRS, CONFIG, Files, JSON, MERGES, SPECIAL_MAP, SPIECE, WORD_PIECES, XLM_ROBERTA};
use frame::Frame;
use names::Names;
pub(crate) use names::SpecialNames;

/// Files that can hold a tokenizer's vocabulary, in the order in which they are looked for.
pub const VOCABULARIES: [&str; 5] = [JSON, SPIECE, XLM_ROBERTA, WORD_PIECES, BYTE_PAIRS];

/// Longest vocabulary piece that is accepted, in bytes: the library's trie is as deep as its longest piece.
pub(crate) const MAX_PIECE_BYTES: usize = 4096;
/// Largest vocabulary that is believed.
const MAX_VOCAB: usize = 1 << 24;
/// Hugging Face's tools write a huge number where a tokenizer knows no longest text.
const NO_LIMIT: f64 = 1e9;

/// A tokenizer with its special ids; can be shared between threads.
pub struct Tokenizer {
    inner: Inner,
    files: Files,
    frame: Frame,
    pad: u32,
    eos: u32,
    unk: Option<u32>,
    mask: Option<u32>,
    vocab_size: usize,
    max_length: Option<usize>,
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
    /// Loads the tokenizer of a model folder: `tokenizer.json` if it is there, else T5's `spiece.model`, XLM-RoBERTa's
    /// `sentencepiece.bpe.model`, BERT's `vocab.txt`, or RoBERTa's `vocab.json` with `merges.txt`. Truncation
    /// and padding that the file asks for are switched off. What the special tokens are called (and for T5 the number of
    /// `<extra_id_N>`, for BERT `do_lower_case`) comes from `tokenizer_config.json` or `special_tokens_map.json`, else it is the
    /// family's custom. Where no vocabulary is there and `tokenizer_config.json` or `config.json` names the class `ByT5Tokenizer`,
    /// it is byT5's.
    ///
    /// # Errors
    /// If no such file is there, or a file is damaged, too large, or lacks the padding or end token.
    pub fn load(dir: &Path) -> Result<Tokenizer, DataError> {
        let mut files = Files::read(dir)?;
        let names = Names { config: files.json(CONFIG)?, map: files.json(SPECIAL_MAP)? };
        let Some(main) = VOCABULARIES.into_iter().find(|n| files.get(n).is_some()) else {
            if is_byt5(dir, &names.config)? {
                return Tokenizer::bytes(dir, &names, files);
            }
            return Err(DataError::file(
                dir,
                format!(
                    "expected {} or {BYTE_PAIRS} in this folder (or `tokenizer_class` \"{}\" \
                     in {CONFIG}), found none; name a model folder that has one",
                    VOCABULARIES[..VOCABULARIES.len() - 1].join(", "),
                    byt5::CLASS
                ),
            ));
        };
        let path = files.path(main);
        let error = |message: String| DataError::file(&path, message);
        let mut inner = guarded(|| build(main, &files, &names)).map_err(error)?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| error(e.to_string()))?;

        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size > MAX_VOCAB {
            return Err(error(format!(
                "expected ids below {MAX_VOCAB}, found {}; get the file again",
                vocab_size - 1
            )));
        }
        // a pipeline that cannot encode at all is refused now and not at the first example
        let frame = guarded(|| Frame::of(&inner, &names)).map_err(error)?;
        let special = |key: &str, customs: &[&str]| match names.get(key) {
            Some(name) => inner.token_to_id(name),
            None => customs.iter().find_map(|name| inner.token_to_id(name)),
        };
        let need = |id: Option<u32>, key: &str, what: &str, custom: &str| {
            id.ok_or_else(|| {
                let name = names.get(key).unwrap_or(custom);
                error(format!(
                    "expected the {what} token {name:?} in the vocabulary, found none; name it in {CONFIG}"
                ))
            })
        };
        let pad = need(special("pad_token", &["<pad>", "[PAD]"]), "pad_token", "padding", "<pad>")?;
        // BERT's texts end with the token that also stands between two texts
        let last = names.get("eos_token").is_none().then(|| frame.behind.last().copied()).flatten();
        let eos = need(special("eos_token", &["</s>"]).or(last), "eos_token", "end", "</s>")?;
        let unk = special("unk_token", &["<unk>", "[UNK]"]);
        let mask = special("mask_token", &["<mask>", "[MASK]"]);
        if main != JSON {
            let json = inner.to_string(true).map_err(|e| error(e.to_string()))?;
            files.set(JSON, json.into_bytes());
        }
        let inner = Inner::Pipeline(Box::new(inner));
        let max_length = longest(&names.config);
        Ok(Tokenizer { inner, files, frame, pad, eos, unk, mask, vocab_size, max_length })
    }

    fn bytes(dir: &Path, names: &Names, mut files: Files) -> Result<Tokenizer, DataError> {
        let (config, names) = (&names.config, names.t5());
        let bytes = Bytes::new(config, &names).map_err(|e| DataError::file(&dir.join(CONFIG), e))?;
        let id = |name: &str, what: &str| {
            bytes.id(name).ok_or_else(|| {
                let what = format!("expected the {what} token {name:?} among the added tokens, found none; name it in {CONFIG}");
                DataError::file(&dir.join(CONFIG), what)
            })
        };
        let (pad, eos, unk) = (id(&names.pad, "padding")?, id(&names.eos, "end")?, bytes.id(&names.unk));
        if config["tokenizer_class"] != byt5::CLASS {
            // a folder of these files alone must be known again
            files.set(CONFIG, Bytes::config(config));
        }
        let (vocab_size, max_length) = (bytes.size(), longest(config));
        let frame = Frame { before: Vec::new(), behind: vec![eos] };
        let inner = Inner::Bytes(Box::new(bytes));
        Ok(Tokenizer { inner, files, frame, pad, eos, unk, mask: None, vocab_size, max_length })
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

    /// Token ids of a text between the special tokens that the family puts around it ([`Tokenizer::frame`]), cut at the end
    /// so that all are at most `max_length`.
    ///
    /// # Errors
    /// If `max_length` is less than the number of the special tokens; as [`Tokenizer::encode`].
    pub fn encode_framed(&self, text: &str, max_length: usize) -> Result<Vec<u32>, DataError> {
        self.frame.around(&self.encode(text)?, max_length).ok_or_else(|| {
            DataError::Setting(format!(
                "expected a maximum length of at least {} tokens, which this tokenizer puts around every text, found {max_length}; raise it",
                self.frame.len()
            ))
        })
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

    /// Id of the end token `</s>`; BERT's `[SEP]`.
    pub fn eos_id(&self) -> u32 {
        self.eos
    }

    /// Id of the unknown token, if the vocabulary has one.
    pub fn unk_id(&self) -> Option<u32> {
        self.unk
    }

    /// Ids of the special tokens before and behind an encoded text: `[CLS]` and `[SEP]`, `<s>` and `</s>`, T5's nothing and `</s>`.
    pub fn frame(&self) -> (&[u32], &[u32]) {
        (&self.frame.before, &self.frame.behind)
    }

    /// Id of the token that opens a text, `[CLS]` or `<s>`, if the family has one.
    pub fn cls_id(&self) -> Option<u32> {
        self.frame.before.first().copied()
    }

    /// Id of the token that closes a text, `[SEP]` or `</s>`, if the family has one.
    pub fn sep_id(&self) -> Option<u32> {
        self.frame.behind.first().copied()
    }

    /// Id of the mask token, if the vocabulary has one.
    pub fn mask_id(&self) -> Option<u32> {
        self.mask
    }

    /// Most tokens of a text, special tokens counted, if `tokenizer_config.json` tells it (`model_max_length`).
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// One more than the highest id; a model's embedding must have at least as many rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The files that make the tokenizer, by name: `tokenizer.json` always (byT5's has none), others as the source folder
    /// had them.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter()
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
    let Some(bytes) = files::read(&dir.join("config.json"), 1 << 20)? else { return Ok(false) };
    let model: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    Ok(model["tokenizer_class"] == byt5::CLASS)
}

/// Runs library code that may panic on hostile input.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the tokenizer library stopped on this input".into()))
}

/// Builds the pipeline of the vocabulary file `main`.
fn build(main: &str, files: &Files, names: &Names) -> Result<tokenizers::Tokenizer, String> {
    let bytes = files.get(main).unwrap_or_default();
    match main {
        JSON => json::build(bytes),
        SPIECE => {
            let extra =
                names.config["extra_ids"].as_u64().map_or(100, |n| usize::try_from(n).unwrap_or(usize::MAX));
            spiece::build(bytes, &names.t5(), extra)
        }
        XLM_ROBERTA => xlm_roberta::build(bytes, names),
        WORD_PIECES => word_pieces::build(bytes, names),
        _ => {
            let merges = files
                .get(MERGES)
                .ok_or_else(|| format!("expected {MERGES} beside it, found none; get that file too"))?;
            byte_pairs::build(bytes, merges, names)
        }
    }
}

/// `model_max_length`, where it is a bound.
fn longest(config: &Value) -> Option<usize> {
    config["model_max_length"].as_f64().filter(|&n| (1.0..NO_LIMIT).contains(&n)).map(|n| n as usize)
}
