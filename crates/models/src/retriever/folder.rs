//! A retriever's values: from FiD's folder, from a plain encoder's (with a random head), or random; and FiD's folder.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_engine::{Arena, Device, ParamSpec};

use super::{Retriever, RetrieverConfig, is_fid};
use crate::encoder::EncoderHeaders;
use crate::folder::ModelFolder;
use crate::model_file::{KeptTensor, ModelError, read_json, save_parameters, write_json};

/// The head's parameters, as FiD's files call them.
pub(super) const HEAD: [&str; 4] = ["proj.weight", "proj.bias", "norm.weight", "norm.bias"];
/// What FiD's files put before the encoder's names.
const PREFIX: &str = "model.";

pub(super) fn is_head(spec: &ParamSpec) -> bool {
    HEAD.contains(&spec.name.as_str())
}

impl RetrieverConfig {
    /// Reads a `config.json`, and whether it is FiD's retriever's or a plain encoder's.
    ///
    /// # Errors
    /// A file that cannot be read or is too long; as [`RetrieverConfig::from_json`].
    pub fn read(path: &Path) -> Result<(RetrieverConfig, bool), ModelError> {
        let json = read_json(path)?;
        let wrong = |what: String| ModelError::ConfigFile { path: path.to_owned(), what };
        Ok((RetrieverConfig::from_json(&json).map_err(wrong)?, is_fid(&json)))
    }
}

/// A folder of which configuration and headers are read.
pub struct RetrieverHeaders {
    /// The configuration: FiD's, or that of a plain encoder.
    pub config: RetrieverConfig,
    /// Whether the file holds a head.
    pub head: bool,
    /// Whether the configuration is FiD's, so that pooling, masks and lengths are the folder's.
    pub fid: bool,
    /// The encoder's part.
    pub encoder: EncoderHeaders,
}

impl RetrieverHeaders {
    /// Reads a folder's configuration and the headers of its weights: FiD's retriever, or an encoder as Hugging Face saves it.
    ///
    /// # Errors
    /// As [`EncoderHeaders::read`].
    pub fn read(folder: &ModelFolder) -> Result<RetrieverHeaders, ModelError> {
        let encoder = EncoderHeaders::read(folder, &HEAD)?;
        let wrong = |what: String| ModelError::ConfigFile { path: folder.config_path(), what };
        let config = RetrieverConfig::from_json(&encoder.json).map_err(wrong)?;
        let head = encoder.weights.contains(HEAD[0]);
        if config.projection && !head {
            let what =
                format!("`projection`: expected false, since the weights hold no `{}`, found true", HEAD[0]);
            return Err(wrong(what));
        }
        Ok(RetrieverHeaders { config, head, fid: is_fid(&encoder.json), encoder })
    }
}

/// A retriever with its values.
pub struct LoadedRetriever<D: Device> {
    /// Shapes and places.
    pub model: Retriever,
    /// The values.
    pub parameters: Arena<D>,
    /// The fields of the `config.json` it came from.
    pub json: Map<String, Value>,
    /// Tensors that are written back as they are: BERT's pooler, which no loss reaches.
    pub kept: Vec<KeptTensor>,
    /// A line for the log about tensors that were left out.
    pub note: Option<String>,
    /// Whether the head was drawn and not read.
    pub random_head: bool,
}

impl<D: Device> LoadedRetriever<D> {
    /// The retriever of a folder as it is.
    ///
    /// # Errors
    /// As [`RetrieverHeaders::read`]; tensors that do not fit, values that are no numbers.
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, ModelError> {
        Self::of(RetrieverHeaders::read(folder)?, device)
    }
    /// The retriever of headers as they are.
    ///
    /// # Errors
    /// As [`LoadedRetriever::open`].
    pub fn of(headers: RetrieverHeaders, device: &D) -> Result<Self, ModelError> {
        let config = headers.config.clone();
        Self::with_config(headers, config, 0, device)
    }
    /// The folder's encoder under another configuration (dimension, pooling, masks, lengths, dropout). The head is the folder's where it
    /// has one and the dimension is the same, else random.
    ///
    /// # Errors
    /// As [`LoadedRetriever::open`].
    pub fn with_config(
        headers: RetrieverHeaders,
        config: RetrieverConfig,
        seed: u64,
        device: &D,
    ) -> Result<Self, ModelError> {
        let (encoder, model) = (&headers.encoder, Retriever::new(config));
        let same = headers.config.indexing_dimension == model.config.indexing_dimension;
        let random_head = model.config.projection && !(headers.head && same);
        let specs: Vec<ParamSpec> =
            model.layout.specs().iter().filter(|s| !(random_head && is_head(s))).cloned().collect();
        encoder.check(&specs, &HEAD)?;
        let mut parameters = Arena::zeros(device, &model.layout);
        encoder.read_parameters(&specs, device, &mut parameters)?;
        if random_head {
            model.fill_head(seed, device, &mut parameters);
        }
        let (kept, note) = (encoder.kept_tensors()?, encoder.note());
        Ok(LoadedRetriever { model, parameters, json: headers.encoder.json, kept, note, random_head })
    }
    /// A retriever of random values.
    pub fn random(config: RetrieverConfig, seed: u64, device: &D) -> Self {
        let model = Retriever::new(config);
        let mut parameters = Arena::zeros(device, model.layout());
        let encoder: Vec<ParamSpec> = model.layout.specs().iter().filter(|s| !is_head(s)).cloned().collect();
        model.encoder.fill(&encoder, seed, device, &mut parameters);
        model.fill_head(seed, device, &mut parameters);
        LoadedRetriever {
            model,
            parameters,
            json: Map::new(),
            kept: Vec::new(),
            note: None,
            random_head: true,
        }
    }
    /// Writes `config.json` and `model.safetensors` as FiD has them.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), ModelError> {
        save(&self.model, &self.parameters, &self.json, &self.kept, folder, device)
    }
}

/// Writes a retriever's folder (without tokenizer): FiD's names and configuration. `json` holds the fields of an earlier
/// `config.json`, which are kept; `kept` the tensors that are no parameters.
///
/// # Errors
/// A file that cannot be written.
pub fn save<D: Device>(
    model: &Retriever,
    parameters: &Arena<D>,
    json: &Map<String, Value>,
    kept: &[KeptTensor],
    folder: &Path,
    device: &D,
) -> Result<(), ModelError> {
    write_json(folder.join("config.json"), model.config.to_json(json))?;
    let name = |n: &str| if HEAD.contains(&n) { n.to_owned() } else { format!("{PREFIX}{n}") };
    save_parameters(folder, model.layout().specs(), parameters, kept, name, device)
}
