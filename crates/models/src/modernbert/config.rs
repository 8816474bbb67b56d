//! ModernBERT's `config.json`, as transformers 4 and 5 write it, and the fields it passes through.

use serde_json::{Map, Value, json};
use tercio_engine::Activation;

use crate::fields::{Fields, MOST_PARAMETERS, activation_name};

/// The `model_type` of its configuration.
pub const MODEL_TYPE: &str = "modernbert";

/// The shape of a ModernBERT encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModernBertConfig {
    /// Rows of the embedding (at least the tokenizer's size).
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width of the feed-forward layers, before the gate doubles it.
    pub intermediate_size: usize,
    /// Attention heads; their width is even.
    pub num_attention_heads: usize,
    /// For every layer, whether its attention is local.
    pub sliding: Vec<bool>,
    /// Tokens of the window of local attention: a query attends to keys up to half of it away.
    pub local_attention: usize,
    /// Base of the rotary angles of global attention.
    pub global_theta: f64,
    /// Base of the rotary angles of local attention.
    pub local_theta: f64,
    /// Longest text that the model was made for.
    pub max_position_embeddings: usize,
    /// Nonlinearity of the feed-forward layers.
    pub activation: Activation,
    /// Added to the variance in norms.
    pub norm_eps: f64,
    /// Whether norms have a bias.
    pub norm_bias: bool,
    /// Whether the linear layers of attention have biases.
    pub attention_bias: bool,
    /// Whether the linear layers of the feed-forward have biases.
    pub mlp_bias: bool,
    /// Dropout of attention weights and of what attention gives.
    pub attention_dropout: f64,
    /// Dropout of the normalised embeddings.
    pub embedding_dropout: f64,
    /// Dropout of the gated activations.
    pub mlp_dropout: f64,
    /// Id of padding: its embedding gets no gradient, as in PyTorch.
    pub pad_token_id: Option<u32>,
    /// Standard deviation of random initial values.
    pub initializer_range: f64,
}

const GLOBAL_THETA: f64 = 160_000.0;
const LOCAL_THETA: f64 = 10_000.0;

impl ModernBertConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// A sentence that names the field: one that is missing, out of range, or asks for what is not known here; sizes that together
    /// are no model's.
    pub fn from_json(json: &Map<String, Value>) -> Result<ModernBertConfig, String> {
        let f = Fields(json);
        let layers = f.layers("num_hidden_layers", Some(22))?;
        let (global_theta, local_theta) = thetas(&f)?;
        let vocab_size = f.size("vocab_size", None)?;
        let config = ModernBertConfig {
            vocab_size,
            hidden_size: f.size("hidden_size", None)?,
            intermediate_size: f.size("intermediate_size", None)?,
            num_attention_heads: f.size("num_attention_heads", None)?,
            sliding: sliding(&f, layers)?,
            local_attention: f.size("local_attention", Some(128))?,
            global_theta,
            local_theta,
            max_position_embeddings: f.size("max_position_embeddings", Some(8192))?,
            activation: f.activation("hidden_activation")?,
            norm_eps: f.real("norm_eps", 1e-5, 0.0..1.0)?,
            norm_bias: f.boolean("norm_bias", false)?,
            attention_bias: f.boolean("attention_bias", false)?,
            mlp_bias: f.boolean("mlp_bias", false)?,
            attention_dropout: f.real("attention_dropout", 0.0, 0.0..1.0)?,
            embedding_dropout: f.real("embedding_dropout", 0.0, 0.0..1.0)?,
            mlp_dropout: f.real("mlp_dropout", 0.0, 0.0..1.0)?,
            pad_token_id: padding(&f, vocab_size)?,
            initializer_range: f.real("initializer_range", 0.02, 0.0..1e3)?,
        };
        let (d, heads) = (config.hidden_size, config.num_attention_heads);
        if d % heads != 0 || (d / heads) % 2 != 0 {
            return Err(format!(
                "`num_attention_heads`: expected heads of an even width, found {heads} heads in a hidden_size of {d}"
            ));
        }
        if config.parameters() > MOST_PARAMETERS {
            return Err("the sizes make a model of more than 2^40 values; the file is damaged".into());
        }
        Ok(config)
    }

    /// The published base model: 149 million values.
    pub fn base() -> ModernBertConfig {
        ModernBertConfig {
            vocab_size: 50368,
            hidden_size: 768,
            intermediate_size: 1152,
            num_attention_heads: 12,
            sliding: (0..22).map(|i| i % 3 != 0).collect(),
            local_attention: 128,
            global_theta: GLOBAL_THETA,
            local_theta: LOCAL_THETA,
            max_position_embeddings: 8192,
            activation: Activation::GeluErf,
            norm_eps: 1e-5,
            norm_bias: false,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            embedding_dropout: 0.0,
            mlp_dropout: 0.0,
            pad_token_id: Some(50283),
            initializer_range: 0.02,
        }
    }

    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Values of all parameters. No sizes make it overflow.
    pub fn parameters(&self) -> u128 {
        let [d, wide, vocabulary] =
            [self.hidden_size, self.intermediate_size, self.vocab_size].map(|n| n as u128);
        let norm = if self.norm_bias { 2 * d } else { d };
        let linear = |rows: u128, columns: u128, bias: bool| rows * columns + if bias { rows } else { 0 };
        let attention = linear(3 * d, d, self.attention_bias) + linear(d, d, self.attention_bias);
        let feed_forward = linear(2 * wide, d, self.mlp_bias) + linear(d, wide, self.mlp_bias);
        let layers = self.sliding.len() as u128 * (attention + feed_forward + 2 * norm) - norm;
        vocabulary * d + norm + layers + norm
    }

    /// The `config.json` that Hugging Face reads; fields of `base` that Tercio does not know are kept.
    pub fn to_json(&self, base: &Map<String, Value>) -> Map<String, Value> {
        let mut json = base.clone();
        // One way to say it is enough; these are older ones.
        for key in ["global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "rope_scaling"] {
            json.shift_remove(key);
        }
        let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        let kind = |&sliding: &bool| if sliding { SLIDING } else { FULL };
        let fields = json!({
            "architectures": ["ModernBertModel"],
            "model_type": MODEL_TYPE,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.sliding.len(),
            "num_attention_heads": self.num_attention_heads,
            "layer_types": self.sliding.iter().map(kind).collect::<Vec<_>>(),
            "local_attention": self.local_attention,
            "rope_parameters": {FULL: rope(self.global_theta), SLIDING: rope(self.local_theta)},
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_activation": activation_name(self.activation),
            "norm_eps": self.norm_eps,
            "norm_bias": self.norm_bias,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "attention_dropout": self.attention_dropout,
            "embedding_dropout": self.embedding_dropout,
            "mlp_dropout": self.mlp_dropout,
            "pad_token_id": self.pad_token_id,
            "initializer_range": self.initializer_range,
            "dtype": "float32",
        });
        if let Value::Object(fields) = fields {
            json.extend(fields);
        }
        // Defaults of these name tokens of the published vocabulary, which a smaller one has not.
        for key in ["bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"] {
            json.entry(key).or_insert(Value::Null);
        }
        json
    }
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Which layers are local: `layer_types`, else all but every n-th from the first on.
fn sliding(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>, String> {
    let Some(types) = f.get("layer_types") else {
        let n = f.size("global_attn_every_n_layers", Some(3))?;
        return Ok((0..layers).map(|i| i % n != 0).collect());
    };
    let types = types.as_array().filter(|t| t.len() == layers).ok_or_else(|| {
        format!(
            "`layer_types`: expected a list of {layers} names, as many as `num_hidden_layers`, found {types}"
        )
    })?;
    let one = |v: &Value| match v.as_str() {
        Some(FULL) => Ok(false),
        Some(SLIDING) => Ok(true),
        _ => Err(format!("`layer_types`: expected {FULL:?} or {SLIDING:?}, found {v}")),
    };
    types.iter().map(one).collect()
}

/// The bases of the angles of global and local attention: `rope_parameters` of transformers 5, else the two fields of 4.
fn thetas(f: &Fields<'_>) -> Result<(f64, f64), String> {
    let range = 1.0..1e12;
    if let Some(scaling) = f.get("rope_scaling") {
        return Err(format!("`rope_scaling`: expected none, found {scaling}: it is not known here"));
    }
    let mut global = f.real("global_rope_theta", GLOBAL_THETA, range.clone())?;
    let mut local = match f.0.get("local_rope_theta") {
        // Said to be none: the global one serves both.
        Some(Value::Null) => global,
        _ => f.real("local_rope_theta", LOCAL_THETA, range.clone())?,
    };
    if let Some(parameters) = f.get("rope_parameters") {
        // Anything else would leave the thetas of another model in place, unseen.
        let other = || {
            let expected = format!("an object of {FULL:?} and {SLIDING:?}, each an object");
            format!("`rope_parameters`: expected {expected}, found {parameters}")
        };
        for (key, one) in parameters.as_object().ok_or_else(other)? {
            let theta = match key.as_str() {
                FULL => &mut global,
                SLIDING => &mut local,
                _ => return Err(other()),
            };
            let rope = Fields(one.as_object().ok_or_else(other)?);
            // The second is the first's older name.
            for kind in ["rope_type", "type"].into_iter().filter_map(|name| rope.get(name)) {
                if kind != "default" {
                    let unknown = "others are not known here";
                    return Err(format!(
                        "`rope_parameters`: expected the rope_type \"default\", found {kind}: {unknown}"
                    ));
                }
            }
            *theta = rope.real("rope_theta", *theta, range.clone())?;
        }
    }
    Ok((global, local))
}

/// Hugging Face's default is the id of the published vocabulary.
fn padding(f: &Fields<'_>, vocab_size: usize) -> Result<Option<u32>, String> {
    const PUBLISHED: u32 = 50283;
    match f.0.get("pad_token_id") {
        None => Ok(Some(PUBLISHED).filter(|&id| (id as usize) < vocab_size)),
        Some(Value::Null) => Ok(None),
        Some(v) => match v.as_u64().filter(|&id| id < vocab_size as u64) {
            Some(id) => Ok(Some(id as u32)),
            None => Err(format!("`pad_token_id`: expected an id below vocab_size, found {v}")),
        },
    }
}
