//! Text encoders of any supported family: which one a folder holds is decided by `model_type` in its `config.json`.
//!
//! An encoder adds its parameters to the layout of whoever owns it (a retriever adds its head behind them); their names are those of
//! Hugging Face's bare encoder, without a prefix.

mod folder;

use serde_json::{Map, Value};
use tercio_engine::{Arena, Device, Layout, ParamSpec, Span, Tape, Var};

use crate::bert::{Bert, BertConfig, BertFamily};
use crate::modernbert::{MODEL_TYPE as MODERN_BERT, ModernBert, ModernBertConfig};

pub use folder::{EncoderHeaders, LoadedEncoder};

/// Vectors that are shorter are divided by this instead of their length (PyTorch's `normalize`).
pub(crate) const LEAST_LENGTH: f64 = 1e-12;

/// The shape of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub enum EncoderConfig {
    /// BERT, DistilBERT, RoBERTa, XLM-RoBERTa.
    Bert(BertConfig),
    /// ModernBERT.
    ModernBert(ModernBertConfig),
}

impl EncoderConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// A sentence that names the field: another architecture, a field that is missing or out of range.
    pub fn from_json(json: &Map<String, Value>) -> Result<EncoderConfig, String> {
        let kind = json.get("model_type").unwrap_or(&Value::Null);
        if kind == MODERN_BERT {
            return ModernBertConfig::from_json(json).map(EncoderConfig::ModernBert);
        }
        let family = BertFamily::ALL.into_iter().find(|f| kind == f.model_type());
        match family {
            Some(family) => BertConfig::from_json(json, family).map(EncoderConfig::Bert),
            None => {
                let known = BertFamily::ALL.map(BertFamily::model_type).join(", ");
                Err(format!("model_type is {kind}; the text encoders known here are {known}, {MODERN_BERT}"))
            }
        }
    }
    /// The `config.json` that Hugging Face reads; fields of `base` that Tercio does not know are kept.
    pub fn to_json(&self, base: &Map<String, Value>) -> Map<String, Value> {
        match self {
            EncoderConfig::Bert(c) => c.to_json(base),
            EncoderConfig::ModernBert(c) => c.to_json(base),
        }
    }
    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        match self {
            EncoderConfig::Bert(c) => c.hidden_size,
            EncoderConfig::ModernBert(c) => c.hidden_size,
        }
    }
    /// Rows of the word embedding: every token id is below.
    pub fn vocab_size(&self) -> usize {
        match self {
            EncoderConfig::Bert(c) => c.vocab_size,
            EncoderConfig::ModernBert(c) => c.vocab_size,
        }
    }
    /// Sets the rows of the word embedding: a vocabulary has grown.
    pub fn set_vocab_size(&mut self, size: usize) {
        match self {
            EncoderConfig::Bert(c) => c.vocab_size = size,
            EncoderConfig::ModernBert(c) => c.vocab_size = size,
        }
    }
    /// Most tokens of a text.
    pub fn max_tokens(&self) -> usize {
        match self {
            EncoderConfig::Bert(c) => c.max_tokens(),
            EncoderConfig::ModernBert(c) => c.max_position_embeddings,
        }
    }
    /// Layers.
    pub fn layers(&self) -> usize {
        match self {
            EncoderConfig::Bert(c) => c.num_hidden_layers,
            EncoderConfig::ModernBert(c) => c.sliding.len(),
        }
    }
    /// Values of all parameters.
    pub fn parameters(&self) -> u128 {
        match self {
            EncoderConfig::Bert(c) => c.parameters(),
            EncoderConfig::ModernBert(c) => c.parameters(),
        }
    }
    /// Sets the dropout of everything, as FiD's `--dropout` does at a fresh start.
    pub fn set_dropout(&mut self, p: f64) {
        match self {
            EncoderConfig::Bert(c) => (c.hidden_dropout, c.attention_dropout) = (p, p),
            EncoderConfig::ModernBert(c) => {
                (c.attention_dropout, c.embedding_dropout, c.mlp_dropout) = (p, p, p);
            }
        }
    }
    /// Standard deviation of random initial values.
    pub fn initializer_range(&self) -> f64 {
        match self {
            EncoderConfig::Bert(c) => c.initializer_range,
            EncoderConfig::ModernBert(c) => c.initializer_range,
        }
    }
    /// `model_type` of its configuration.
    pub fn model_type(&self) -> &'static str {
        match self {
            EncoderConfig::Bert(c) => c.family.model_type(),
            EncoderConfig::ModernBert(_) => MODERN_BERT,
        }
    }
}

/// An encoder: its shapes and where each parameter lies; the values are in an arena.
pub enum Encoder {
    /// BERT, DistilBERT, RoBERTa, XLM-RoBERTa.
    Bert(Bert),
    /// ModernBERT.
    ModernBert(ModernBert),
}

impl Encoder {
    /// Adds the encoder's parameters to a layout.
    pub fn new(config: EncoderConfig, layout: &mut Layout) -> Encoder {
        match config {
            EncoderConfig::Bert(c) => Encoder::Bert(Bert::new(c, layout)),
            EncoderConfig::ModernBert(c) => Encoder::ModernBert(ModernBert::new(c, layout)),
        }
    }
    /// The configuration.
    pub fn config(&self) -> EncoderConfig {
        match self {
            Encoder::Bert(m) => EncoderConfig::Bert(m.config.clone()),
            Encoder::ModernBert(m) => EncoderConfig::ModernBert(m.config.clone()),
        }
    }
    /// Hidden states of every text, `[tokens, width]`, as the last layer gives them.
    ///
    /// `spans` are the texts of the flat `ids`, none longer than [`EncoderConfig::max_tokens`]; `types` are token types (all 0 where
    /// there are none; not read by families without them); `recompute` keeps only the input of each layer for the backward.
    pub fn encode<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        self.encode_keyed(tape, ids, types, spans, spans, recompute)
    }
    /// As [`Encoder::encode`], where the tokens of a text attend to its rows `keys` only, which are its first ones: the others ask and
    /// are not asked, as ColBERT's expansion tokens. A text without keys attends to nothing.
    pub fn encode_keyed<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
        keys: &[Span],
        recompute: bool,
    ) -> Var<D> {
        match self {
            Encoder::Bert(m) => m.encode_keyed(tape, ids, types, spans, keys, recompute),
            Encoder::ModernBert(m) => m.encode_keyed(tape, ids, spans, keys, recompute),
        }
    }
    /// The last layer's state of every text's first token, `[spans, width]`; no text may be empty. Less work than [`Encoder::encode`], where
    /// the family allows it.
    pub fn encode_first<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        match self {
            Encoder::Bert(m) => m.encode_first(tape, ids, spans, recompute),
            Encoder::ModernBert(m) => {
                let states = m.encode(tape, ids, spans, recompute);
                let first: Vec<u32> = spans.iter().map(|s| s.start).collect();
                tape.rows(&states, &first)
            }
        }
    }
    /// Random initial values of one of the encoder's parameters, keyed by the parameter's name and the seed.
    pub fn initial(&self, spec: &ParamSpec, seed: u64) -> Vec<f32> {
        match self {
            Encoder::Bert(m) => m.initial(spec, seed),
            Encoder::ModernBert(m) => m.initial(spec, seed),
        }
    }
    /// Writes random initial values of the parameters `specs`, all of them the encoder's.
    pub fn fill<D: Device>(&self, specs: &[ParamSpec], seed: u64, device: &D, parameters: &mut Arena<D>) {
        for spec in specs {
            device.write(parameters.view_mut(spec.place), &self.initial(spec, seed));
        }
    }
}
