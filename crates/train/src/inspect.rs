//! What a model folder holds, told without loading it: shape, tensors, layout, tokenizer, and the memory it takes.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use tercio_data::Tokenizer;
use tercio_models::t5::{T5, T5Config};
use tercio_models::weights::{Dtype, fid_layout};

use crate::error::TrainError;
use crate::run::memory::human;
use crate::setup;

/// What [`inspect`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelReport {
    /// The folder.
    pub path: String,
    /// The file of weights (the index of shards).
    pub weights: String,
    /// Always `t5`: what this build reads.
    pub architecture: &'static str,
    /// Values of all parameters; a tied head counts once.
    pub parameters: u64,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub d_model: usize,
    /// Width of the feed-forward layers.
    pub d_ff: usize,
    /// Width of a head.
    pub d_kv: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Encoder layers.
    pub num_layers: usize,
    /// Decoder layers.
    pub num_decoder_layers: usize,
    /// `feed_forward_proj` of the configuration: `relu`, `gated-gelu`, ...
    pub feed_forward: String,
    /// Whether the vocabulary head is the embedding, by the tensors.
    pub tied: bool,
    /// Whether names of tensors are Fusion-in-Decoder's own.
    pub fid_layout: bool,
    /// Whether cross-attention has the bias table of the 2020 library.
    pub cross_attention_bias: bool,
    /// Number formats of the tensors.
    pub dtypes: Vec<String>,
    /// `tokenizer.json` or `spiece.model`; `None` where the folder has neither.
    pub tokenizer: Option<&'static str>,
    /// Ids of the tokenizer.
    pub tokenizer_size: Option<usize>,
    /// Bytes of the parameters in memory (f32), which answering needs beside its activations.
    pub run_bytes: u64,
    /// Bytes of parameters, gradients and both moments (f32), which training needs beside its activations.
    pub train_bytes: u64,
}

/// Reads the configuration and the headers of the weights, and compares them.
///
/// # Errors
/// A folder that is no model, tensors that do not fit the configuration, a damaged tokenizer.
pub fn inspect(name: &str) -> Result<ModelReport, TrainError> {
    let folder = setup::model_folder(name)?;
    let path = folder.path().display().to_string();
    let wrong = |what: String| TrainError::Evaluation(format!("{path}: {what}"));
    let config_path = folder.config_path();
    let text = std::fs::read_to_string(&config_path)
        .map_err(|e| wrong(format!("config.json: cannot read it: {e}")))?;
    let json: Map<String, Value> = serde_json::from_str(&text)
        .map_err(|e| wrong(format!("config.json: expected a JSON object: {e}")))?;
    let mut config = T5Config::from_json(&json).map_err(|e| wrong(e.to_string()))?;
    let mut reader = folder.weights()?;
    let found = fid_layout::normalize(&mut reader)?;
    config.tied = found.tied;
    config.cross_attention_bias = found.cross_attention_bias;
    let names: Vec<String> = reader.names().map(String::from).collect();
    // A layer has many tensors: more layers than tensors would cost memory before they are missed.
    let layers = config.num_layers.saturating_add(config.num_decoder_layers);
    if layers > names.len() {
        return Err(wrong(format!(
            "config.json asks for {layers} layers, the file has {} tensors; one of them is of another model",
            names.len()
        )));
    }
    let largest = [(config.vocab_size, 1), (config.num_heads, config.d_kv), (config.d_ff, 1)];
    let fits = |(a, b): (usize, usize)| {
        a.checked_mul(b).and_then(|n| n.checked_mul(config.d_model)).is_some_and(|n| n < 1 << 40)
    };
    if !largest.into_iter().all(fits) {
        return Err(wrong("config.json asks for matrices of more than 2^40 values; it is damaged".into()));
    }
    let feed_forward =
        config.to_json(&Map::new())["feed_forward_proj"].as_str().unwrap_or_default().to_owned();
    let model = T5::new(config);
    let mut dtypes = BTreeSet::new();
    for spec in model.layout().specs() {
        let shape = reader.shape(&spec.name)?;
        if shape != spec.shape {
            return Err(wrong(format!(
                "tensor `{}` has shape {shape:?}, the configuration asks for {:?}",
                spec.name, spec.shape
            )));
        }
        dtypes.insert(dtype_name(reader.dtype(&spec.name)?));
    }
    let known: BTreeSet<&str> = model.layout().specs().iter().map(|s| s.name.as_str()).collect();
    if let Some(extra) = names.iter().find(|n| !known.contains(n.as_str())) {
        return Err(wrong(format!(
            "tensor `{extra}` belongs to no part of a T5 model of this configuration"
        )));
    }
    let tokenizer = ["tokenizer.json", "spiece.model"].into_iter().find(|f| folder.file(f).is_some());
    let tokenizer_size =
        tokenizer.map(|_| Tokenizer::load(folder.path()).map(|t| t.vocab_size())).transpose()?;
    let parameters = model.layout().len() as u64;
    let c = &model.config;
    Ok(ModelReport {
        weights: file_name(reader.path()),
        architecture: "t5",
        parameters,
        vocab_size: c.vocab_size,
        d_model: c.d_model,
        d_ff: c.d_ff,
        d_kv: c.d_kv,
        num_heads: c.num_heads,
        num_layers: c.num_layers,
        num_decoder_layers: c.num_decoder_layers,
        feed_forward,
        tied: c.tied,
        fid_layout: found.fid,
        cross_attention_bias: c.cross_attention_bias,
        dtypes: dtypes.into_iter().collect(),
        tokenizer,
        tokenizer_size,
        run_bytes: parameters * 4,
        train_bytes: parameters * 16,
        path,
    })
}

fn file_name(path: &std::path::Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn dtype_name(dtype: &Dtype) -> String {
    match dtype {
        Dtype::F64 => "f64".into(),
        Dtype::F32 => "f32".into(),
        Dtype::F16 => "f16".into(),
        Dtype::BF16 => "bf16".into(),
        Dtype::Other(name, _) => name.to_lowercase(),
    }
}

impl fmt::Display for ModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.path, self.weights)?;
        writeln!(
            f,
            "  architecture   T5, {} + {} layers, width {}, feed-forward {} ({}), {} heads of {}",
            self.num_layers,
            self.num_decoder_layers,
            self.d_model,
            self.d_ff,
            self.feed_forward,
            self.num_heads,
            self.d_kv
        )?;
        writeln!(
            f,
            "  parameters     {} ({}), stored as {}",
            self.parameters,
            if self.tied { "head tied to the embedding" } else { "head of its own" },
            self.dtypes.join(", ")
        )?;
        writeln!(f, "  vocabulary     {} ids", self.vocab_size)?;
        writeln!(
            f,
            "  names          {}{}",
            if self.fid_layout { "Fusion-in-Decoder's" } else { "Hugging Face's" },
            if self.cross_attention_bias {
                ", with the cross-attention bias of the 2020 library"
            } else {
                ""
            }
        )?;
        match (self.tokenizer, self.tokenizer_size) {
            (Some(file), Some(size)) => writeln!(f, "  tokenizer      {file}, {size} ids")?,
            _ => writeln!(f, "  tokenizer      none in the folder: give --tokenizer to other commands")?,
        }
        writeln!(
            f,
            "  memory         {} to answer, {} to train, activations apart",
            human(self.run_bytes),
            human(self.train_bytes)
        )
    }
}
