//! What a model folder holds, told without loading it: kind, shape, tensors, layout, tokenizer, and the memory it takes.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::Map;
use tercio_data::Tokenizer;
use tercio_data::tokenizer::VOCABULARIES;
use tercio_models::folder::ModelFolder;
use tercio_models::t5::T5;
use tercio_models::weights::Dtype;

use crate::error::TrainError;
use crate::run::memory::human;
use crate::setup;

mod encoder;

pub use encoder::EncoderReport;

/// What [`inspect`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModelReport {
    /// A reader: a T5 model.
    Reader(ReaderReport),
    /// A text encoder, and what is behind it: a retriever, a classifier, a ColBERT model.
    Encoder(EncoderReport),
}

/// What is known of a reader.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReaderReport {
    /// The folder.
    pub path: String,
    /// The file of weights (the index of shards).
    pub weights: String,
    /// Always `reader`.
    pub kind: &'static str,
    /// Always `t5`.
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
    /// The file of its vocabulary (`tokenizer.json`, `spiece.model`, ...), `bytes` where the folder names byT5's; `None` where
    /// it has none.
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
    Ok(match encoder::is_encoder(&folder) {
        true => ModelReport::Encoder(encoder::inspect(&folder)?),
        false => ModelReport::Reader(inspect_reader(&folder)?),
    })
}

fn inspect_reader(folder: &ModelFolder) -> Result<ReaderReport, TrainError> {
    let headers = T5::read_headers(folder)?;
    let (model, weights) = (&headers.model, &headers.weights);
    let c = &model.config;
    let feed_forward = c.to_json(&Map::new())["feed_forward_proj"].as_str().unwrap_or_default().to_owned();
    let mut dtypes = BTreeSet::new();
    for spec in model.layout().specs() {
        dtypes.insert(dtype_name(weights.dtype(&spec.name)?));
    }
    let (tokenizer, tokenizer_size) = tokenizer_of(folder.path())?;
    let parameters = model.layout().len() as u64;
    Ok(ReaderReport {
        path: folder.path().display().to_string(),
        weights: file_name(weights.path()),
        kind: "reader",
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
        fid_layout: headers.fid_layout,
        cross_attention_bias: c.cross_attention_bias,
        dtypes: dtypes.into_iter().collect(),
        tokenizer,
        tokenizer_size,
        run_bytes: parameters * 4,
        train_bytes: parameters * 16,
    })
}

/// The file of a folder's vocabulary and how many ids it has; see [`ReaderReport::tokenizer`].
fn tokenizer_of(folder: &Path) -> Result<(Option<&'static str>, Option<usize>), TrainError> {
    let file = VOCABULARIES.into_iter().find(|f| folder.join(f).is_file());
    Ok(match (file, Tokenizer::load(folder)) {
        (Some(file), loaded) => (Some(file), Some(loaded?.vocab_size())),
        (None, Ok(bytes)) => (Some("bytes"), Some(bytes.vocab_size())),
        (None, Err(_)) => (None, None),
    })
}

fn write_tokenizer(f: &mut fmt::Formatter<'_>, tokenizer: Option<&str>, size: Option<usize>) -> fmt::Result {
    match (tokenizer, size) {
        (Some("bytes"), Some(size)) => writeln!(f, "  tokenizer      byT5's bytes, {size} ids"),
        (Some(file), Some(size)) => writeln!(f, "  tokenizer      {file}, {size} ids"),
        _ => writeln!(f, "  tokenizer      none in the folder: give --tokenizer to other commands"),
    }
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
        match self {
            ModelReport::Reader(report) => report.fmt(f),
            ModelReport::Encoder(report) => report.fmt(f),
        }
    }
}

impl fmt::Display for ReaderReport {
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
        write_tokenizer(f, self.tokenizer, self.tokenizer_size)?;
        writeln!(
            f,
            "  memory         {} to answer, {} to train, activations apart",
            human(self.run_bytes),
            human(self.train_bytes)
        )
    }
}
