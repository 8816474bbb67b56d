//! Models as Fusion-in-Decoder has them - the folder of a checkpoint, or a released `.tar.gz` of one - become folders of
//! Hugging Face's layout.
//!
//! A reader becomes a T5 that evaluation and answering open. A retriever becomes a BERT of safetensors with
//! Fusion-in-Decoder's settings kept in its `config.json`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::export::{TokenizerFiles, write_hugging_face};
use crate::folder::ModelFolder;
use crate::new_folder::NewFolder;
use crate::t5::{ConfigError, T5, T5Error};
use crate::weights::{Dtype, SafetensorsWriter, WeightsError};

mod archive;

pub use archive::ArchiveError;

/// Why a model could not be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The model, or the files written.
    #[error(transparent)]
    Model(#[from] T5Error),
    /// What was named is neither an archive nor a model's folder.
    #[error("{}: {what}", path.display())]
    Source {
        /// What was named.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
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

impl From<WeightsError> for ImportError {
    fn from(e: WeightsError) -> Self {
        ImportError::Model(e.into())
    }
}

/// What kind of model was imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportedKind {
    /// A T5.
    Reader,
    /// A BERT.
    Retriever,
}

/// What was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportReport {
    /// Reader or retriever.
    pub kind: ImportedKind,
    /// Values of the model.
    pub parameters: usize,
    /// Whether a reader has the bias table of cross-attention.
    pub cross_attention_bias: bool,
    /// Whether a tokenizer stands in the folder.
    pub tokenizer: bool,
    /// Files of the source that were left out.
    pub left_out: Vec<String>,
}

/// Files that make a tokenizer.
const TOKENIZER_FILES: [&str; 5] =
    ["tokenizer.json", "spiece.model", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"];

/// Whether a file of this name is of use: configuration, weights, tokenizer.
fn is_of_use(name: &str) -> bool {
    let weights = ["pytorch_model", "model"].iter().any(|stem| {
        name.strip_prefix(stem).is_some_and(|rest| {
            [".bin", ".safetensors", ".bin.index.json", ".safetensors.index.json"]
                .iter()
                .any(|e| rest.ends_with(e))
        })
    });
    name == "config.json" || weights || TOKENIZER_FILES.contains(&name)
}

/// Writes the model of `source` (a folder, `.tar` or `.tar.gz`) as the new folder `output`, which appears when all of it is
/// written. The files of `tokenizer` stand in for those of the source.
///
/// # Errors
/// A damaged or hostile archive; no model, or several, in it; `output` is there already; the disk is full.
pub fn import(source: &Path, tokenizer: &TokenizerFiles, output: &Path) -> Result<ImportReport, ImportError> {
    let new = NewFolder::create(output)?;
    let meta = fs::metadata(source).map_err(|e| WeightsError::io(source, "open", e))?;
    // Beside the result: that disk has to hold it anyway.
    let scratch = NewFolder::create(&new.path().join("unpacked"))?;
    let (folder, left_out) = if meta.is_dir() {
        (source.to_owned(), left_out_of(source)?)
    } else {
        let found = archive::unpack(source, scratch.path(), is_of_use)?;
        (found.folder, found.left_out)
    };
    let config_path = folder.join("config.json");
    let config = fs::read(&config_path).ok().filter(|bytes| bytes.len() < 1 << 20).unwrap_or_default();
    let json: Map<String, Value> = serde_json::from_slice(&config).map_err(|e| ImportError::Source {
        path: source.to_owned(),
        what: format!("expected a model with a config.json that is a JSON object: {e}"),
    })?;
    let retriever =
        json.contains_key("indexing_dimension") || json.get("model_type").is_some_and(|t| t == "bert");
    let model = ModelFolder::open(&folder.to_string_lossy())?;
    let mut report = if retriever {
        import_retriever(&model, json, &new)?
    } else {
        import_reader(&model, tokenizer, &new)?
    };
    report.left_out = left_out;
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    if tokenizer.files.is_empty() {
        for name in TOKENIZER_FILES {
            if let Some(path) = model.file(name) {
                files.push((name.into(), fs::read(&path).map_err(|e| WeightsError::io(&path, "read", e))?));
            }
        }
    }
    for (name, bytes) in files.iter().chain(&tokenizer.files) {
        new.write(name, bytes)?;
        report.tokenizer |= TOKENIZER_FILES[..3].contains(&name.as_str());
    }
    drop(scratch);
    new.keep()?;
    Ok(report)
}

fn left_out_of(folder: &Path) -> Result<Vec<String>, WeightsError> {
    let entries = fs::read_dir(folder).map_err(|e| WeightsError::io(folder, "list", e))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut left_out: Vec<String> = names.filter(|name| !is_of_use(name)).collect();
    left_out.sort();
    Ok(left_out)
}

fn import_reader(
    folder: &ModelFolder,
    tokenizer: &TokenizerFiles,
    new: &NewFolder,
) -> Result<ImportReport, ImportError> {
    let headers = T5::read_headers(folder)?;
    let model = headers.model.config.vocab_size;
    if tokenizer.size > model {
        return Err(ImportError::Vocabulary { tokenizer: tokenizer.size, model });
    }
    let written = write_hugging_face(&headers, new)?;
    Ok(ImportReport {
        kind: ImportedKind::Reader,
        parameters: written.parameters,
        cross_attention_bias: written.cross_attention_bias,
        tokenizer: false,
        left_out: Vec::new(),
    })
}

/// `model.` wraps BERT's own names; `proj.` and `norm.` stand beside it.
fn import_retriever(
    folder: &ModelFolder,
    mut json: Map<String, Value>,
    new: &NewFolder,
) -> Result<ImportReport, ImportError> {
    let path = folder.config_path();
    let field = |field, expected, found: Option<&Value>| {
        let found = found.map_or("nothing".into(), Value::to_string);
        T5Error::Config { path: path.clone(), source: ConfigError::Field { field, expected, found } }
    };
    let size = |name: &'static str| {
        let found = json.get(name);
        let value = found.and_then(Value::as_u64).filter(|n| (1..1 << 24).contains(n));
        value.map(|n| n as usize).ok_or_else(|| field(name, "a positive number below 2^24", found))
    };
    let (vocabulary, width) = (size("vocab_size")?, size("hidden_size")?);
    let weights = folder.weights()?;
    let plain = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
    // A buffer of whole numbers, 0, 1, 2, ..., that older libraries saved and newer ones make.
    let kept: Vec<String> =
        weights.names().filter(|n| !n.ends_with("position_ids")).map(str::to_owned).collect();
    let mut shapes = Vec::new();
    for name in &kept {
        if let Dtype::Other(dtype, _) = weights.dtype(name)? {
            let what = format!("expected floats, found {dtype}");
            return Err(WeightsError::tensor(weights.path(), name, what).into());
        }
        shapes.push((plain(name), weights.shape(name)?.to_vec()));
    }
    let embeddings = "embeddings.word_embeddings.weight";
    let found = shapes.iter().find(|(name, _)| name == embeddings).map(|(_, shape)| shape);
    if found != Some(&vec![vocabulary, width]) {
        let what = match found {
            Some(shape) => {
                format!("expected the shape [{vocabulary}, {width}] of config.json, found {shape:?}")
            }
            None => "it is not there; expected a BERT".into(),
        };
        return Err(WeightsError::tensor(weights.path(), embeddings, what).into());
    }
    let heads = shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
    let mut writer =
        SafetensorsWriter::create(&new.path().join("model.safetensors"), heads, &[("format", "pt")])?;
    for name in &kept {
        writer.append(&weights.read(name)?)?;
    }
    writer.finish()?;
    json.insert("architectures".into(), vec!["BertModel"].into());
    json.insert("model_type".into(), "bert".into());
    let text = serde_json::to_string_pretty(&json).expect("JSON of JSON values") + "\n";
    new.write("config.json", text.as_bytes())?;
    Ok(ImportReport {
        kind: ImportedKind::Retriever,
        parameters: shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum(),
        cross_attention_bias: false,
        tokenizer: false,
        left_out: Vec::new(),
    })
}
