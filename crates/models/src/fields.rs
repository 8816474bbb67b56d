//! The fields of a `config.json`, each read with its default and its range.

use serde_json::{Map, Value};
use tercio_engine::Activation;

/// Values of a model, a hundred times those of the largest.
pub(crate) const MOST_PARAMETERS: u128 = 1 << 40;
/// No width, vocabulary or number of heads of a model comes near it.
const LIMIT: u64 = 1 << 24;
/// A file may ask for layers at no cost to itself; each costs memory before its tensors are missed.
const MOST_LAYERS: usize = 1 << 10;

/// A JSON object; an error is a sentence that names the field. `null` is as good as nothing.
pub(crate) struct Fields<'a>(pub &'a Map<String, Value>);

impl Fields<'_> {
    /// The field, unless it is not there or null.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }
    /// A positive number of at most 24 bits.
    pub fn size(&self, field: &str, default: Option<usize>) -> Result<usize, String> {
        let Some(v) = self.get(field) else {
            return default.ok_or_else(|| format!("`{field}`: expected a positive number, found nothing"));
        };
        let n = v.as_u64().filter(|n| (1..LIMIT).contains(n));
        n.map(|n| n as usize)
            .ok_or_else(|| format!("`{field}`: expected a positive number below 2^24, found {v}"))
    }
    /// A number of layers.
    pub fn layers(&self, field: &str, default: Option<usize>) -> Result<usize, String> {
        match self.size(field, default)? {
            n if n <= MOST_LAYERS => Ok(n),
            n => Err(format!("`{field}`: expected at most {MOST_LAYERS} layers, found {n}")),
        }
    }
    /// A finite number of a range.
    pub fn real(&self, field: &str, default: f64, range: std::ops::Range<f64>) -> Result<f64, String> {
        let Some(v) = self.get(field) else { return Ok(default) };
        let n = v.as_f64().filter(|n| range.contains(n));
        n.ok_or_else(|| {
            format!("`{field}`: expected a number from {} to below {}, found {v}", range.start, range.end)
        })
    }
    /// True or false.
    pub fn boolean(&self, field: &str, default: bool) -> Result<bool, String> {
        let Some(v) = self.get(field) else { return Ok(default) };
        v.as_bool().ok_or_else(|| format!("`{field}`: expected true or false, found {v}"))
    }
    /// A text.
    pub fn text<'a>(&'a self, field: &str, default: &'a str) -> Result<&'a str, String> {
        let Some(v) = self.get(field) else { return Ok(default) };
        v.as_str().ok_or_else(|| format!("`{field}`: expected a text, found {v}"))
    }
    /// An encoder's nonlinearity, gelu where none is named.
    pub fn activation(&self, field: &str) -> Result<Activation, String> {
        match self.text(field, "gelu")? {
            "gelu" => Ok(Activation::GeluErf),
            "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            "relu" => Ok(Activation::Relu),
            "silu" | "swish" => Ok(Activation::Silu),
            "tanh" => Ok(Activation::Tanh),
            other => Err(format!("`{field}`: expected gelu, gelu_new, relu, silu or tanh, found {other:?}")),
        }
    }
}

/// Hugging Face's name of a nonlinearity, which [`Fields::activation`] reads.
pub(crate) fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::GeluErf => "gelu",
        Activation::GeluTanh => "gelu_new",
        Activation::Relu => "relu",
        Activation::Silu => "silu",
        Activation::Tanh => "tanh",
    }
}
