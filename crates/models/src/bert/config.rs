//! The `config.json` of BERT and its relatives: what Hugging Face writes, what Tercio needs of it, and the fields it passes through.

use serde_json::{Map, Value, json};
use tercio_engine::Activation;

use crate::fields::{Fields, MOST_PARAMETERS, activation_name};

/// Which of the published relatives a model is: the same layers, other names and other positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertFamily {
    /// BERT (`model_type` "bert").
    Bert,
    /// DistilBERT ("distilbert"): no token types, no pooler, names of its own.
    DistilBert,
    /// RoBERTa ("roberta"): positions are counted from the id of padding on.
    Roberta,
    /// XLM-RoBERTa ("xlm-roberta"): RoBERTa with another vocabulary.
    XlmRoberta,
}

impl BertFamily {
    /// All of them.
    pub const ALL: [BertFamily; 4] =
        [BertFamily::Bert, BertFamily::DistilBert, BertFamily::Roberta, BertFamily::XlmRoberta];

    /// The `model_type` of its configuration.
    pub fn model_type(self) -> &'static str {
        match self {
            BertFamily::Bert => "bert",
            BertFamily::DistilBert => "distilbert",
            BertFamily::Roberta => "roberta",
            BertFamily::XlmRoberta => "xlm-roberta",
        }
    }
    /// Hugging Face's class of the bare encoder.
    pub fn architecture(self) -> &'static str {
        match self {
            BertFamily::Bert => "BertModel",
            BertFamily::DistilBert => "DistilBertModel",
            BertFamily::Roberta => "RobertaModel",
            BertFamily::XlmRoberta => "XLMRobertaModel",
        }
    }
    /// Whether positions are counted from the id of padding on.
    pub fn counts_from_padding(self) -> bool {
        matches!(self, BertFamily::Roberta | BertFamily::XlmRoberta)
    }
}

/// The shape of an encoder of BERT's kind.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// The relative.
    pub family: BertFamily,
    /// Rows of the word embedding (at least the tokenizer's size).
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Rows of the position embedding.
    pub max_position_embeddings: usize,
    /// Rows of the token type embedding; 0 where there is none.
    pub type_vocab_size: usize,
    /// Nonlinearity of the feed-forward layers.
    pub activation: Activation,
    /// Added to the variance in norms.
    pub layer_norm_eps: f64,
    /// Dropout of embeddings and sub-layers in training.
    pub hidden_dropout: f64,
    /// Dropout of attention weights in training.
    pub attention_dropout: f64,
    /// Id of padding: its word embedding gets no gradient, as in PyTorch.
    pub pad_token_id: Option<u32>,
    /// Standard deviation of random initial values.
    pub initializer_range: f64,
}

/// The names of BERT's fields, and DistilBERT's.
struct Names {
    hidden_size: &'static str,
    layers: &'static str,
    heads: &'static str,
    intermediate_size: &'static str,
    activation: &'static str,
    hidden_dropout: &'static str,
    attention_dropout: &'static str,
}

fn names(family: BertFamily) -> Names {
    match family {
        BertFamily::DistilBert => Names {
            hidden_size: "dim",
            layers: "n_layers",
            heads: "n_heads",
            intermediate_size: "hidden_dim",
            activation: "activation",
            hidden_dropout: "dropout",
            attention_dropout: "attention_dropout",
        },
        _ => Names {
            hidden_size: "hidden_size",
            layers: "num_hidden_layers",
            heads: "num_attention_heads",
            intermediate_size: "intermediate_size",
            activation: "hidden_act",
            hidden_dropout: "hidden_dropout_prob",
            attention_dropout: "attention_probs_dropout_prob",
        },
    }
}

impl BertConfig {
    /// Reads the fields of a `config.json` of this family.
    ///
    /// # Errors
    /// A sentence that names the field: one that is missing, out of range, or asks for what is not known here; sizes that
    /// together are no model's.
    pub fn from_json(json: &Map<String, Value>, family: BertFamily) -> Result<BertConfig, String> {
        let (f, n) = (Fields(json), names(family));
        let kind = f.text("position_embedding_type", "absolute")?;
        if kind != "absolute" {
            return Err(format!(
                "`position_embedding_type`: expected \"absolute\", found {kind:?}: not known here"
            ));
        }
        for field in ["is_decoder", "add_cross_attention"] {
            if f.boolean(field, false)? {
                return Err(format!("`{field}`: expected false, found true: only encoders are known here"));
            }
        }
        let vocab_size = f.size("vocab_size", None)?;
        let pad_token_id = match json.get("pad_token_id") {
            None => Some(if family.counts_from_padding() { 1 } else { 0 }),
            Some(Value::Null) if !family.counts_from_padding() => None,
            Some(v) => {
                let id = v.as_u64().filter(|&n| n < vocab_size as u64);
                Some(
                    id.ok_or_else(|| format!("`pad_token_id`: expected an id below vocab_size, found {v}"))?
                        as u32,
                )
            }
        };
        let config = BertConfig {
            family,
            vocab_size,
            hidden_size: f.size(n.hidden_size, None)?,
            num_hidden_layers: f.layers(n.layers, None)?,
            num_attention_heads: f.size(n.heads, None)?,
            intermediate_size: f.size(n.intermediate_size, None)?,
            max_position_embeddings: f.size("max_position_embeddings", Some(512))?,
            type_vocab_size: match family {
                BertFamily::DistilBert => 0,
                _ => f.size("type_vocab_size", Some(2))?,
            },
            activation: f.activation(n.activation)?,
            layer_norm_eps: f.real("layer_norm_eps", 1e-12, 0.0..1.0)?,
            hidden_dropout: f.real(n.hidden_dropout, 0.1, 0.0..1.0)?,
            attention_dropout: f.real(n.attention_dropout, 0.1, 0.0..1.0)?,
            pad_token_id,
            initializer_range: f.real("initializer_range", 0.02, 0.0..1e3)?,
        };
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        if width % heads != 0 {
            return Err(format!("`{}`: expected a divisor of the width {width}, found {heads}", n.heads));
        }
        if config.max_tokens() == 0 {
            return Err("`max_position_embeddings`: expected more than the id of padding plus one".into());
        }
        if config.parameters() > MOST_PARAMETERS {
            return Err("the sizes make a model of more than 2^40 values; the file is damaged".into());
        }
        Ok(config)
    }

    /// Tokens of the longest text: one position each.
    pub fn max_tokens(&self) -> usize {
        match self.pad_token_id {
            Some(pad) if self.family.counts_from_padding() => {
                self.max_position_embeddings.saturating_sub(pad as usize + 1)
            }
            _ => self.max_position_embeddings,
        }
    }

    /// Values of all parameters. No sizes make it overflow.
    pub fn parameters(&self) -> u128 {
        let [d, ff, layers] =
            [self.hidden_size, self.intermediate_size, self.num_hidden_layers].map(|n| n as u128);
        let rows = (self.vocab_size + self.max_position_embeddings + self.type_vocab_size) as u128;
        rows * d + 2 * d + layers * (4 * (d * d + d) + 2 * d * ff + ff + d + 4 * d)
    }

    /// The `config.json` that Hugging Face reads; fields of `base` that Tercio does not know are kept.
    pub fn to_json(&self, base: &Map<String, Value>) -> Map<String, Value> {
        let (mut json, n) = (base.clone(), names(self.family));
        let mut set = |key: &str, value: Value| {
            json.insert(key.into(), value);
        };
        set("architectures", json!([self.family.architecture()]));
        set("model_type", self.family.model_type().into());
        set("vocab_size", self.vocab_size.into());
        set(n.hidden_size, self.hidden_size.into());
        set(n.layers, self.num_hidden_layers.into());
        set(n.heads, self.num_attention_heads.into());
        set(n.intermediate_size, self.intermediate_size.into());
        set("max_position_embeddings", self.max_position_embeddings.into());
        set(n.activation, activation_name(self.activation).into());
        set(n.hidden_dropout, self.hidden_dropout.into());
        set(n.attention_dropout, self.attention_dropout.into());
        set("initializer_range", self.initializer_range.into());
        set("pad_token_id", self.pad_token_id.into());
        set("dtype", "float32".into());
        if self.family != BertFamily::DistilBert {
            set("type_vocab_size", self.type_vocab_size.into());
            set("layer_norm_eps", self.layer_norm_eps.into());
        }
        json
    }

    /// BERT-base, uncased: the published shape.
    pub fn base() -> BertConfig {
        BertConfig {
            family: BertFamily::Bert,
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            activation: Activation::GeluErf,
            layer_norm_eps: 1e-12,
            hidden_dropout: 0.1,
            attention_dropout: 0.1,
            pad_token_id: Some(0),
            initializer_range: 0.02,
        }
    }
}
