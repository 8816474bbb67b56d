//! A T5 model as a folder of another layout: Hugging Face's, or the one that Fusion-in-Decoder's own code loads.
//!
//! Tensors go from file to file one by one, so that no model needs its memory.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_engine::Activation;

use crate::folder::ModelFolder;
use crate::new_folder::NewFolder;
use crate::t5::{T5, T5Config, T5Error, T5Family, T5Headers};
use crate::weights::fid_layout::{ALIASES, CROSS_ATTENTION_BIAS, LM_HEAD, SHARED, to_fid};
use crate::weights::{SafetensorsWriter, TorchTensor, TorchWriter, WeightsError};

/// How a folder of a model is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelLayout {
    /// `config.json`, `generation_config.json`, `model.safetensors`: what Hugging Face tools and Tercio read and write.
    HuggingFace,
    /// `config.json`, `pytorch_model.bin` with the names of a wrapped encoder: what Fusion-in-Decoder reads and writes.
    Fid(FidOptions),
}

/// What Fusion-in-Decoder's layout leaves open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FidOptions {
    /// Leave the bias table of cross-attention out where the model has none. By default it is written as zeros: the
    /// library that Fusion-in-Decoder pins has one, and fills it with random numbers where it is missing.
    pub no_cross_attention_bias: bool,
    /// Write models, too, that the pinned library cannot compute: for ports of Fusion-in-Decoder to newer libraries.
    pub newer_library: bool,
}

/// The files of a tokenizer that go into a model's folder.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// One more than the highest id.
    pub size: usize,
    /// Names and contents.
    pub files: Vec<(String, Vec<u8>)>,
}

/// Why a model could not be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The model, or the files written.
    #[error(transparent)]
    Model(#[from] T5Error),
    /// Fusion-in-Decoder's own code would compute something else.
    #[error(
        "Fusion-in-Decoder's pinned library (Transformers 3.0.2) knows T5 v1.0 only, and this model has {0}; export it with \
         the layout of Hugging Face, or, for a port of Fusion-in-Decoder to a newer library, say that it is newer"
    )]
    TooNew(String),
    /// The tokenizer has ids that the model has no embeddings for.
    #[error(
        "the tokenizer has {tokenizer} ids, the model embeddings for {model}; expected the model's own tokenizer"
    )]
    Vocabulary {
        /// Ids of the tokenizer.
        tokenizer: usize,
        /// Rows of the embedding.
        model: usize,
    },
}

impl From<WeightsError> for ExportError {
    fn from(e: WeightsError) -> Self {
        ExportError::Model(e.into())
    }
}

/// What was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// Tensors of the file, copies counted.
    pub tensors: usize,
    /// Values of the model.
    pub parameters: usize,
    /// Whether the file has the bias table of cross-attention.
    pub cross_attention_bias: bool,
}

/// Writes the model of `folder` as the new folder `output`, which appears when all of it is written.
///
/// # Errors
/// `folder` is no T5 model; `output` is there already; the disk is full; the layout cannot hold the model.
pub fn export(
    folder: &ModelFolder,
    layout: ModelLayout,
    tokenizer: &TokenizerFiles,
    output: &Path,
) -> Result<ExportReport, ExportError> {
    let headers = T5::read_headers(folder)?;
    let config = &headers.model.config;
    if tokenizer.size > config.vocab_size {
        return Err(ExportError::Vocabulary { tokenizer: tokenizer.size, model: config.vocab_size });
    }
    if let ModelLayout::Fid(FidOptions { newer_library: false, .. }) = layout
        && let Some(what) = newer_than_fid(config)
    {
        return Err(ExportError::TooNew(what));
    }
    let new = NewFolder::create(output)?;
    for (name, bytes) in &tokenizer.files {
        new.write(name, bytes)?;
    }
    let report = match layout {
        ModelLayout::HuggingFace => write_hugging_face(&headers, &new)?,
        ModelLayout::Fid(options) => write_fid(&headers, options, &new)?,
    };
    new.keep()?;
    Ok(report)
}

/// What of a configuration Transformers 3.0.2 does not know, as the end of a sentence.
fn newer_than_fid(c: &T5Config) -> Option<String> {
    let has = |what: &str, is: bool| is.then(|| what.to_owned());
    let all = [
        has("the architecture of mT5", c.family == T5Family::MT5),
        has("a gated feed-forward", c.gated),
        has("a feed-forward other than relu", !c.gated && c.activation != Activation::Relu),
        has("a vocabulary head of its own", !c.tied),
        has("an output that is not scaled", c.tied && c.scale_decoder_outputs == Some(false)),
        has("another number of decoder than encoder layers", c.num_layers != c.num_decoder_layers),
        has("a relative_attention_max_distance other than 128", c.relative_attention_max_distance != 128),
    ];
    let found: Vec<String> = all.into_iter().flatten().collect();
    (!found.is_empty()).then(|| found.join(", "))
}

/// The files of `config.json` and `generation_config.json`.
fn write_configs(config: &Map<String, Value>, new: &NewFolder) -> Result<(), WeightsError> {
    let mut generation = Map::new();
    for key in ["decoder_start_token_id", "eos_token_id", "pad_token_id"] {
        generation.insert(key.into(), config[key].clone());
    }
    new.write("generation_config.json", &pretty(&generation))?;
    new.write("config.json", &pretty(config))
}

fn pretty(json: &Map<String, Value>) -> Vec<u8> {
    (serde_json::to_string_pretty(json).expect("JSON of JSON values") + "\n").into_bytes()
}

pub(crate) fn write_hugging_face(headers: &T5Headers, new: &NewFolder) -> Result<ExportReport, WeightsError> {
    let T5Headers { model, json, weights, .. } = headers;
    write_configs(&model.config.to_json(json), new)?;
    let specs = model.layout().specs();
    let heads = specs.iter().map(|s| (s.name.as_str(), s.shape.as_slice()));
    let path = new.path().join("model.safetensors");
    let mut writer = SafetensorsWriter::create(&path, heads, &[("format", "pt")])?;
    for spec in specs {
        writer.append(&weights.read(&spec.name)?)?;
    }
    writer.finish()?;
    let cross_attention_bias = model.config.cross_attention_bias;
    Ok(ExportReport { tensors: specs.len(), parameters: model.layout().len(), cross_attention_bias })
}

fn write_fid(
    headers: &T5Headers,
    options: FidOptions,
    new: &NewFolder,
) -> Result<ExportReport, WeightsError> {
    let T5Headers { model, json, weights, .. } = headers;
    let mut config = model.config.to_json(json);
    config.insert("architectures".into(), vec!["FiDT5"].into());
    new.write("config.json", &pretty(&config))?;
    let mut tensors: Vec<TorchTensor> = Vec::new();
    for (storage, spec) in model.layout().specs().iter().enumerate() {
        tensors.push(TorchTensor { name: to_fid(&spec.name), shape: spec.shape.clone(), storage });
    }
    // What shares the embedding's storage, as torch saves it.
    let shared = tensors.iter().find(|t| t.name == SHARED).expect("every T5 has an embedding").clone();
    let own = tensors.len();
    for alias in ALIASES.into_iter().chain(model.config.tied.then_some(LM_HEAD)) {
        tensors.push(TorchTensor { name: to_fid(alias), ..shared.clone() });
    }
    let zeros = !model.config.cross_attention_bias && !options.no_cross_attention_bias;
    let table = vec![model.config.relative_attention_num_buckets, model.config.num_heads];
    let table_len: usize = table.iter().product();
    if zeros {
        tensors.push(TorchTensor { name: CROSS_ATTENTION_BIAS.into(), shape: table, storage: own });
    }
    let mut writer = TorchWriter::create(&new.path().join("pytorch_model.bin"), &tensors)?;
    for spec in model.layout().specs() {
        writer.append(&weights.read(&spec.name)?)?;
    }
    if zeros {
        writer.append(&vec![0.0; table_len])?;
    }
    writer.finish()?;
    Ok(ExportReport {
        tensors: tensors.len(),
        parameters: model.layout().len() + if zeros { table_len } else { 0 },
        cross_attention_bias: zeros || model.config.cross_attention_bias,
    })
}
