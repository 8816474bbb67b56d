//! T5's `config.json`: what Hugging Face writes, what Tercio needs of it, and the fields it passes through.

use serde_json::{Map, Value};
use tercio_engine::{Activation, Span};

use crate::fields::MOST_PARAMETERS;

/// Which of the published relatives a model is: the same architecture, other defaults and another name in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum T5Family {
    /// T5, T5 v1.1, Flan-T5, T5-efficient and byT5 (`model_type` "t5").
    T5,
    /// mT5 (`model_type` "mt5"): gated, and its output is never scaled.
    MT5,
}

/// The shape of a T5 model.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// The relative.
    pub family: T5Family,
    /// Rows of the embedding (at least the tokenizer's size).
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub d_model: usize,
    /// Width of one attention head.
    pub d_kv: usize,
    /// Width of the feed-forward layers.
    pub d_ff: usize,
    /// Encoder layers.
    pub num_layers: usize,
    /// Decoder layers.
    pub num_decoder_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Rows of the relative bias tables.
    pub relative_attention_num_buckets: usize,
    /// Distance from which all keys share a bucket.
    pub relative_attention_max_distance: usize,
    /// Added to the mean square in norms.
    pub layer_norm_epsilon: f64,
    /// Dropout in training.
    pub dropout_rate: f64,
    /// Nonlinearity of the feed-forward layers.
    pub activation: Activation,
    /// Whether feed-forward layers are gated (T5 v1.1).
    pub gated: bool,
    /// Whether the vocabulary head is the embedding (T5 v1.0). Decided by the tensors of a file, not by its config.
    pub tied: bool,
    /// Whether the decoder's output is scaled by d_model^-0.5 before the vocabulary head, where that is said apart from
    /// `tied`; `None`: it is where the head is the embedding.
    pub scale_decoder_outputs: Option<bool>,
    /// Whether cross-attention has a relative bias table (readers trained with the 2020 library).
    pub cross_attention_bias: bool,
    /// Id of padding, which also starts the decoder.
    pub decoder_start_token_id: u32,
    /// Id that ends a sequence.
    pub eos_token_id: u32,
    /// Factor on the standard deviations of random initial values.
    pub initializer_factor: f64,
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A field is missing or of the wrong kind.
    #[error("`{field}`: expected {expected}, found {found}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it should be.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// Another architecture.
    #[error("model_type is {0}, a reader needs a T5, byT5 or mT5 model (model_type \"t5\" or \"mt5\")")]
    Architecture(String),
    /// Sizes that each could be, and together are no model's.
    #[error("the sizes make a model of more than 2^40 values; the file is damaged")]
    TooLarge,
}

/// No width, vocabulary or number of heads of a model comes near it.
const LIMIT: u64 = 1 << 24;
/// A file may ask for layers at no cost to itself; each costs memory before its tensors are missed.
const MOST_LAYERS: u64 = 1 << 10;
/// A table of buckets is as long as the distance.
const MOST_DISTANCE: u64 = 1 << 20;

impl T5Config {
    /// Reads the fields of a `config.json`; `tied` and `cross_attention_bias` are what the config says and may be
    /// corrected by the tensors.
    ///
    /// # Errors
    /// Another architecture, a field that is missing or out of range, sizes that together are no model's.
    pub fn from_json(json: &Map<String, Value>) -> Result<T5Config, ConfigError> {
        let bad = |field, expected, found: Option<&Value>| ConfigError::Field {
            field,
            expected,
            found: found.map_or("nothing".into(), |v| v.to_string()),
        };
        let family = match json.get("model_type") {
            None => T5Family::T5,
            Some(Value::String(kind)) if kind == "t5" => T5Family::T5,
            Some(Value::String(kind)) if kind == "mt5" => T5Family::MT5,
            Some(kind) => return Err(ConfigError::Architecture(kind.to_string())),
        };
        let size = |field: &'static str, default: Option<u64>| match json.get(field) {
            None | Some(Value::Null) => default.ok_or_else(|| bad(field, "a positive number", None)),
            Some(v) => v
                .as_u64()
                .filter(|n| (1..LIMIT).contains(n))
                .ok_or_else(|| bad(field, "a positive number below 2^24", Some(v))),
        };
        let layers = |field: &'static str, default: Option<u64>| match size(field, default)? {
            n if n <= MOST_LAYERS => Ok(n),
            _ => Err(bad(field, "at most 1024 layers", json.get(field))),
        };
        let vocab_size = size("vocab_size", None)?;
        let id = |field: &'static str, default: u64| match json.get(field) {
            None | Some(Value::Null) => Ok(default as u32),
            Some(v) => v
                .as_u64()
                .filter(|&n| n < vocab_size)
                .map(|n| n as u32)
                .ok_or_else(|| bad(field, "a token id below vocab_size", Some(v))),
        };
        let real = |field: &'static str, default: f64, range: std::ops::Range<f64>| match json.get(field) {
            None | Some(Value::Null) => Ok(default),
            Some(v) => v
                .as_f64()
                .filter(|n| range.contains(n))
                .ok_or_else(|| bad(field, "a number in its range", Some(v))),
        };
        let projection = match json.get("feed_forward_proj") {
            None | Some(Value::Null) if family == T5Family::MT5 => "gated-gelu",
            None | Some(Value::Null) => "relu",
            Some(v) => v.as_str().ok_or_else(|| bad("feed_forward_proj", "a name", Some(v)))?,
        };
        let (gated, name) = match projection.strip_prefix("gated-") {
            Some(name) => (true, name),
            None => (false, projection),
        };
        let activation = match name {
            "relu" => Activation::Relu,
            // Hugging Face reads "gated-gelu" as the tanh form, for T5 v1.1.
            "gelu" if gated => Activation::GeluTanh,
            "gelu_new" => Activation::GeluTanh,
            "gelu" => Activation::GeluErf,
            "silu" | "swish" => Activation::Silu,
            "tanh" => Activation::Tanh,
            _ => {
                let expected = "relu, gelu, gelu_new, silu or tanh, with or without gated-";
                return Err(bad("feed_forward_proj", expected, json.get("feed_forward_proj")));
            }
        };
        let num_layers = layers("num_layers", None)?;
        let buckets = size("relative_attention_num_buckets", Some(32))?;
        let max_distance = size("relative_attention_max_distance", Some(128))?;
        if max_distance > MOST_DISTANCE {
            let found = json.get("relative_attention_max_distance");
            return Err(bad("relative_attention_max_distance", "at most 2^20", found));
        }
        if buckets < 4 || buckets > u16::MAX as u64 || max_distance <= buckets / 2 {
            let found = json.get("relative_attention_num_buckets");
            return Err(bad(
                "relative_attention_num_buckets",
                "4 to 65535, below twice the max distance",
                found,
            ));
        }
        let config = T5Config {
            family,
            vocab_size: vocab_size as usize,
            d_model: size("d_model", None)? as usize,
            d_kv: size("d_kv", None)? as usize,
            d_ff: size("d_ff", None)? as usize,
            num_layers: num_layers as usize,
            num_decoder_layers: layers("num_decoder_layers", Some(num_layers))? as usize,
            num_heads: size("num_heads", None)? as usize,
            relative_attention_num_buckets: buckets as usize,
            relative_attention_max_distance: max_distance as usize,
            layer_norm_epsilon: real("layer_norm_epsilon", 1e-6, 0.0..1.0)?,
            dropout_rate: real("dropout_rate", 0.1, 0.0..1.0)?,
            activation,
            gated,
            tied: json.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(true),
            // Hugging Face's mT5 never scales; its T5 does unless the file says otherwise.
            scale_decoder_outputs: match (json.get("scale_decoder_outputs"), family) {
                (Some(Value::Bool(scaled)), _) => Some(*scaled),
                (None | Some(Value::Null), T5Family::T5) => None,
                (None | Some(Value::Null), T5Family::MT5) => Some(false),
                (other, _) => return Err(bad("scale_decoder_outputs", "true or false", other)),
            },
            cross_attention_bias: false,
            decoder_start_token_id: id("decoder_start_token_id", 0)?,
            eos_token_id: id("eos_token_id", 1)?,
            initializer_factor: real("initializer_factor", 1.0, 0.0..1e6)?,
        };
        if config.parameters() > MOST_PARAMETERS {
            return Err(ConfigError::TooLarge);
        }
        Ok(config)
    }

    /// Values of all parameters; a tied head counts once. No sizes make it overflow.
    pub fn parameters(&self) -> u128 {
        let [d, inner, ff] = [self.d_model, self.num_heads * self.d_kv, self.d_ff].map(|n| n as u128);
        let table = (self.relative_attention_num_buckets * self.num_heads) as u128;
        let attention = 4 * inner * d + d;
        let feed_forward = if self.gated { 3 } else { 2 } * ff * d + d;
        let encoder = self.num_layers as u128 * (attention + feed_forward);
        let decoder = self.num_decoder_layers as u128 * (2 * attention + feed_forward);
        let tables = if self.cross_attention_bias { 3 } else { 2 } * table;
        let embeddings = if self.tied { 1 } else { 2 } * self.vocab_size as u128 * d;
        embeddings + encoder + decoder + 2 * d + tables
    }

    /// Factor on the decoder's output before the vocabulary head: d_model^-0.5 or 1.
    pub fn logit_factor(&self) -> f64 {
        let scaled = self.scale_decoder_outputs.unwrap_or(self.tied);
        if scaled { 1.0 / libm::sqrt(self.d_model as f64) } else { 1.0 }
    }

    /// Whether the targets are so short that attending to the encoder's states themselves is cheaper than forming keys and
    /// values of them: seven products of query rows with states against six of states with weights, with some margin.
    /// `queries` and `keys`: target positions and encoder tokens of each question. A function of the shard alone, like all
    /// that decides on bits.
    pub fn attends_to_states(&self, queries: &[Span], keys: &[Span]) -> bool {
        let work = queries.iter().zip(keys).map(|(q, k)| q.len() * self.num_heads * k.len());
        let states: usize = keys.iter().map(Span::len).sum();
        2 * work.sum::<usize>() < states * self.num_heads * self.d_kv
    }

    /// The published shape of a size: `small`, `base`, `large`, `3b`, `11b` (T5 v1.0, relu, tied).
    pub fn of_size(size: &str) -> Option<T5Config> {
        let (d_model, d_kv, d_ff, num_layers, num_heads) = match size {
            "small" => (512, 64, 2048, 6, 8),
            "base" => (768, 64, 3072, 12, 12),
            "large" => (1024, 64, 4096, 24, 16),
            "3b" => (1024, 128, 16384, 24, 32),
            "11b" => (1024, 128, 65536, 24, 128),
            _ => return None,
        };
        Some(T5Config {
            family: T5Family::T5,
            vocab_size: 32128,
            d_model,
            d_kv,
            d_ff,
            num_layers,
            num_decoder_layers: num_layers,
            num_heads,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            layer_norm_epsilon: 1e-6,
            dropout_rate: 0.1,
            activation: Activation::Relu,
            gated: false,
            tied: true,
            scale_decoder_outputs: None,
            cross_attention_bias: false,
            decoder_start_token_id: 0,
            eos_token_id: 1,
            initializer_factor: 1.0,
        })
    }

    /// The `config.json` that Hugging Face reads; fields of `base` that Tercio does not know are kept.
    pub fn to_json(&self, base: &Map<String, Value>) -> Map<String, Value> {
        let mut json = base.clone();
        let projection = match (self.gated, self.activation) {
            (false, Activation::Relu) => "relu",
            (false, Activation::GeluTanh) => "gelu_new",
            (false, Activation::GeluErf) => "gelu",
            (false, Activation::Silu) => "silu",
            (false, Activation::Tanh) => "tanh",
            (true, Activation::Relu) => "gated-relu",
            (true, Activation::GeluTanh | Activation::GeluErf) => "gated-gelu",
            (true, Activation::Silu) => "gated-silu",
            (true, Activation::Tanh) => "gated-tanh",
        };
        let mut set = |key: &str, value: Value| {
            json.insert(key.into(), value);
        };
        let (architecture, kind) = match self.family {
            T5Family::T5 => ("T5ForConditionalGeneration", "t5"),
            T5Family::MT5 => ("MT5ForConditionalGeneration", "mt5"),
        };
        set("architectures", vec![architecture].into());
        set("model_type", kind.into());
        set("is_encoder_decoder", true.into());
        set("vocab_size", self.vocab_size.into());
        set("d_model", self.d_model.into());
        set("d_kv", self.d_kv.into());
        set("d_ff", self.d_ff.into());
        set("num_layers", self.num_layers.into());
        set("num_decoder_layers", self.num_decoder_layers.into());
        set("num_heads", self.num_heads.into());
        set("relative_attention_num_buckets", self.relative_attention_num_buckets.into());
        set("relative_attention_max_distance", self.relative_attention_max_distance.into());
        set("layer_norm_epsilon", self.layer_norm_epsilon.into());
        set("dropout_rate", self.dropout_rate.into());
        set("feed_forward_proj", projection.into());
        // Hugging Face derives these two from feed_forward_proj and must not find others here.
        json.remove("dense_act_fn");
        json.remove("is_gated_act");
        json.shift_remove("scale_decoder_outputs");
        let mut set = |key: &str, value: Value| {
            json.insert(key.into(), value);
        };
        set("tie_word_embeddings", self.tied.into());
        match (self.family, self.scale_decoder_outputs) {
            (_, None) | (T5Family::MT5, Some(false)) => {}
            (_, Some(scaled)) => set("scale_decoder_outputs", scaled.into()),
        }
        set("decoder_start_token_id", self.decoder_start_token_id.into());
        set("eos_token_id", self.eos_token_id.into());
        set("initializer_factor", self.initializer_factor.into());
        set("dtype", "float32".into());
        json.entry("pad_token_id").or_insert_with(|| self.decoder_start_token_id.into());
        json
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::t5::T5;

    fn with(changes: &[(&str, u64)]) -> Result<T5Config, ConfigError> {
        let mut json = T5Config::of_size("small").unwrap().to_json(&Map::new());
        for (field, value) in changes {
            json.insert((*field).into(), (*value).into());
        }
        T5Config::from_json(&json)
    }

    #[test]
    fn parameters_are_those_of_the_layout() {
        let small = T5Config::of_size("small").unwrap();
        for (gated, tied, cross_attention_bias) in [(false, true, false), (true, false, true)] {
            let config =
                T5Config { gated, tied, cross_attention_bias, num_decoder_layers: 4, ..small.clone() };
            assert_eq!(config.parameters(), T5::new(config).layout().len() as u128);
        }
        // t5-small has 60.5 million parameters (Raffel et al., 2020).
        assert_eq!(small.parameters() / 100_000, 605);
    }

    #[test]
    fn hostile_sizes_are_refused() {
        let largest = (1 << 24) - 1;
        for (changes, part) in [
            (&[("num_layers", largest)][..], "`num_layers`: expected at most 1024 layers, found 16777215"),
            (&[("num_decoder_layers", 1025)], "`num_decoder_layers`: expected at most 1024"),
            (&[("d_model", largest), ("d_kv", largest), ("num_heads", largest)], "more than 2^40"),
            (&[("vocab_size", 1 << 24)], "`vocab_size`: expected a positive number below 2^24"),
            (&[("vocab_size", 100), ("eos_token_id", 100)], "`eos_token_id`: expected a token id below"),
            (&[("decoder_start_token_id", 32128)], "`decoder_start_token_id`"),
            (&[("relative_attention_max_distance", largest)], "`relative_attention_max_distance`"),
        ] {
            let error = with(changes).unwrap_err().to_string();
            assert!(error.contains(part), "{changes:?}: {error}");
        }
        with(&[("num_layers", 1024), ("num_decoder_layers", 1024)]).unwrap();
    }
}
