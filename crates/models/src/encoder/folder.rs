//! An encoder's values: from a model folder, or random by name; and a folder that Hugging Face tools open.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tercio_engine::{Arena, Device, Layout, ParamSpec};

use super::{Encoder, EncoderConfig};
use crate::folder::ModelFolder;
use crate::model_file::{
    KeptTensor, ModelError, check_tensors, read_finite, read_json, read_parameters, save_parameters,
    write_json,
};
use crate::weights::WeightsReader;

/// What Hugging Face's models with a head put before the encoder's names.
const PREFIXES: [&str; 4] = ["bert.", "roberta.", "distilbert.", "model."];
/// Beginnings of the encoder's own names, of all families.
const PARTS: [&str; 6] = ["embeddings.", "encoder.", "transformer.", "layers.", "final_norm.", "pooler."];
/// Beginnings of the names of heads: of language models and classifiers.
const HEADS: [&str; 12] = [
    "cls.",
    "classifier.",
    "lm_head.",
    "qa_outputs.",
    "pre_classifier.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "predictions.",
    "decoder.",
    "head.",
    "linear_head.",
];
/// Numbers that older files hold and that follow from the configuration.
const BUFFERS: [&str; 2] = ["embeddings.position_ids", "embeddings.token_type_ids"];
const POOLER: &str = "pooler.";

/// A folder of which configuration and headers are read: nothing is allocated on the word of its configuration before its
/// tensors are known to have these shapes.
pub struct EncoderHeaders {
    /// The shape.
    pub config: EncoderConfig,
    /// The fields of `config.json`.
    pub json: Map<String, Value>,
    /// The tensors, by the encoder's names without prefix, and those that the caller asked for by theirs.
    pub weights: WeightsReader,
    /// Names of tensors that were left out: heads of other tasks.
    pub ignored: Vec<String>,
    /// Names of tensors that are no parameters but are kept: the pooler of BERT, which nothing trains.
    pub kept: Vec<String>,
    path: PathBuf,
}

impl EncoderHeaders {
    /// Reads a folder's configuration and the headers of its weights. `own` are names of tensors outside of the encoder that the
    /// caller takes (FiD's `proj.weight`).
    ///
    /// # Errors
    /// A folder that is no encoder known here, or whose files cannot be read.
    pub fn read(folder: &ModelFolder, own: &[&str]) -> Result<EncoderHeaders, ModelError> {
        let path = folder.config_path();
        let json = read_json(&path)?;
        let config = EncoderConfig::from_json(&json).map_err(|what| ModelError::ConfigFile { path, what })?;
        let mut weights = folder.weights()?;
        let prefix = PREFIXES.into_iter().find(|prefix| {
            let first = format!("{prefix}embeddings.");
            weights.names().any(|name| name.starts_with(&first))
        });
        let gone = weights.rename(|name| plain_name(name, prefix, own))?;
        let ignored = gone.into_iter().filter(|name| !BUFFERS.iter().any(|b| name.ends_with(b))).collect();
        let kept = weights.names().filter(|n| n.starts_with(POOLER)).map(str::to_owned).collect();
        Ok(EncoderHeaders { config, json, weights, ignored, kept, path: folder.path().to_owned() })
    }
    /// Compares the tensors with parameters: the encoder's, and those that the caller takes. `also` are names of tensors that may be
    /// there and are not read.
    ///
    /// # Errors
    /// Tensors that are missing, have other shapes, or belong to no part of the model.
    pub fn check(&self, specs: &[ParamSpec], also: &[&str]) -> Result<(), ModelError> {
        let also: Vec<&str> = self.kept.iter().map(String::as_str).chain(also.iter().copied()).collect();
        check_tensors(&self.path, &self.weights, specs, &also, self.config.model_type())
    }
    /// Reads the values of parameters whose tensors were found to fit.
    ///
    /// # Errors
    /// Values that cannot be read, or are no numbers.
    pub fn read_parameters<D: Device>(
        &self,
        specs: &[ParamSpec],
        device: &D,
        parameters: &mut Arena<D>,
    ) -> Result<(), ModelError> {
        read_parameters(&self.path, &self.weights, specs, device, parameters)
    }
    /// Reads the tensors that are kept.
    ///
    /// # Errors
    /// As [`EncoderHeaders::read_parameters`].
    pub fn kept_tensors(&self) -> Result<Vec<KeptTensor>, ModelError> {
        let read = |name: &String| {
            let (name, shape) = (name.clone(), self.weights.shape(name)?.to_vec());
            let values = read_finite(&self.path, &self.weights, &name)?;
            Ok(KeptTensor { name, shape, values })
        };
        self.kept.iter().map(read).collect()
    }
    /// A line for the log about the tensors that were left out; `None` where there are none.
    pub fn note(&self) -> Option<String> {
        let first = self.ignored.first()?;
        let (count, path) = (self.ignored.len(), self.path.display());
        Some(format!(
            "{path}: left out {count} tensors that are no part of the encoder (the first is `{first}`)"
        ))
    }
}

/// The encoder's name of a tensor of the file; `None` for one that it does not take.
fn plain_name(name: &str, prefix: Option<&str>, own: &[&str]) -> Option<String> {
    if own.contains(&name) {
        return Some(name.to_owned());
    }
    let inner = match prefix {
        Some(prefix) => name.strip_prefix(prefix)?,
        None => name,
    };
    let part = PARTS.iter().any(|part| inner.starts_with(part));
    if BUFFERS.contains(&inner) || (!part && HEADS.iter().any(|head| inner.starts_with(head))) {
        return None;
    }
    // What TensorFlow's BERT called a norm's weight and bias.
    for (old, new) in [(".gamma", ".weight"), (".beta", ".bias")] {
        if let Some(start) = inner.strip_suffix(old) {
            return Some(format!("{start}{new}"));
        }
    }
    Some(inner.to_owned())
}

/// An encoder with its values, and nothing behind it.
pub struct LoadedEncoder<D: Device> {
    /// Shapes and places.
    pub encoder: Encoder,
    /// Names, shapes and places of the parameters.
    pub layout: Layout,
    /// The values.
    pub parameters: Arena<D>,
    /// The fields of the `config.json` it came from.
    pub json: Map<String, Value>,
    /// Tensors that are written back as they are.
    pub kept: Vec<KeptTensor>,
    /// A line for the log about tensors that were left out.
    pub note: Option<String>,
}

impl<D: Device> LoadedEncoder<D> {
    /// A folder's encoder.
    ///
    /// # Errors
    /// As [`EncoderHeaders::read`], [`EncoderHeaders::check`] and [`EncoderHeaders::read_parameters`].
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, ModelError> {
        let headers = EncoderHeaders::read(folder, &[])?;
        let mut layout = Layout::default();
        let encoder = Encoder::new(headers.config.clone(), &mut layout);
        headers.check(layout.specs(), &[])?;
        let mut parameters = Arena::zeros(device, &layout);
        headers.read_parameters(layout.specs(), device, &mut parameters)?;
        let (kept, note) = (headers.kept_tensors()?, headers.note());
        Ok(LoadedEncoder { encoder, layout, parameters, json: headers.json, kept, note })
    }
    /// An encoder of random values.
    pub fn random(config: EncoderConfig, seed: u64, device: &D) -> Self {
        let mut layout = Layout::default();
        let encoder = Encoder::new(config, &mut layout);
        let mut parameters = Arena::zeros(device, &layout);
        encoder.fill(layout.specs(), seed, device, &mut parameters);
        LoadedEncoder { encoder, layout, parameters, json: Map::new(), kept: Vec::new(), note: None }
    }
    /// Writes `config.json` and `model.safetensors` into `folder`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), ModelError> {
        write_json(folder.join("config.json"), self.encoder.config().to_json(&self.json))?;
        save_parameters(folder, self.layout.specs(), &self.parameters, &self.kept, str::to_owned, device)
    }
}
