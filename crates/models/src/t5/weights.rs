//! T5's values: from a model folder, or random by name; and a folder that Hugging Face tools open.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value};
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{Arena, Device};

use super::{ConfigError, T5, T5Config};
use crate::folder::ModelFolder;
use crate::weights::{DataFile, WeightsError, WeightsReader, fid_layout, save_safetensors};

/// No configuration comes near this many bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// Why a T5 model could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum T5Error {
    /// The configuration.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The configuration file is no JSON object, or cannot be written.
    #[error("{}: {what}", path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The tensors do not have the shapes of the configuration.
    #[error("{}: tensor `{name}` has shape {found:?}, the configuration asks for {expected:?}", path.display())]
    Shape {
        /// The model folder.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A weight that is infinite or not a number: nothing could be computed with the model.
    #[error("{}: tensor `{name}`: element {at} is {value}, expected finite numbers; the model is damaged or its training \
             diverged", path.display())]
    NotFinite {
        /// The model folder.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Index of the first such element.
        at: usize,
        /// What stands there.
        value: f32,
    },
    /// A tensor that no part of the model takes.
    #[error("{}: tensor `{name}` belongs to no part of a T5 model of this configuration", path.display())]
    Unknown {
        /// The model folder.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
}

/// A model with its values.
pub struct LoadedT5<D: Device> {
    /// Shapes and places.
    pub model: T5,
    /// The values.
    pub parameters: Arena<D>,
    /// The fields of the `config.json` it came from.
    pub json: Map<String, Value>,
}

/// Random initial values: standard deviations of Hugging Face's T5, drawn per parameter from its name and the seed, so
/// that they depend on no order of creation.
#[derive(Clone, Copy, Debug)]
pub struct Initialization {
    /// The seed.
    pub seed: u64,
}

impl Initialization {
    /// Fills the parameters of `model`.
    pub fn fill<D: Device>(&self, model: &T5, device: &D, parameters: &mut Arena<D>) {
        let c = &model.config;
        for spec in model.layout().specs() {
            let values: Vec<f32> = if spec.shape.len() == 1 {
                vec![c.initializer_factor as f32; spec.place.len()]
            } else {
                let part = spec.name.rsplit('.').nth(1).expect("a dotted name");
                let d = c.d_model as f64;
                let variance = match part {
                    "q" => 1.0 / (d * c.d_kv as f64),
                    "o" => 1.0 / (c.num_heads * c.d_kv) as f64,
                    "wo" => 1.0 / c.d_ff as f64,
                    "shared" | "lm_head" => 1.0,
                    _ => 1.0 / d,
                };
                let deviation = c.initializer_factor * libm::sqrt(variance);
                let key = key_of_name(self.seed, &spec.name);
                (0..spec.place.len() as u64)
                    .into_par_iter()
                    .map(|i| (deviation * normal(key, i)) as f32)
                    .collect()
            };
            device.write(parameters.view_mut(spec.place), &values);
        }
    }
}

impl T5Config {
    /// Reads a `config.json`: the shape, and all fields of the file.
    ///
    /// # Errors
    /// A file that cannot be read, is no JSON object, or gives no shape ([`T5Config::from_json`]).
    pub fn read(path: &Path) -> Result<(T5Config, Map<String, Value>), T5Error> {
        let wrong = |what: String| T5Error::ConfigFile { path: path.to_owned(), what };
        let file = DataFile::open(path)?;
        if file.len > MAX_CONFIG {
            return Err(wrong(format!("expected at most {MAX_CONFIG} bytes of JSON, found {}", file.len)));
        }
        let json: Map<String, Value> = serde_json::from_slice(&file.head(MAX_CONFIG)?)
            .map_err(|e| wrong(format!("expected a JSON object: {e}")))?;
        let config =
            T5Config::from_json(&json).map_err(|source| T5Error::Config { path: path.to_owned(), source })?;
        Ok((config, json))
    }
}

/// A model folder of which the headers are read: nothing is allocated on the word of its configuration before its
/// tensors are known to have these shapes.
pub struct T5Headers {
    /// The model, by configuration and tensors.
    pub model: T5,
    /// The fields of `config.json`.
    pub json: Map<String, Value>,
    /// The tensors, by the names of the model's layout; no other tensor is there.
    pub weights: WeightsReader,
    /// Whether the names were Fusion-in-Decoder's own.
    pub fid_layout: bool,
}

impl T5 {
    /// Reads a folder's configuration and the headers of its weights. Whether the head is tied and cross-attention has
    /// a bias table is decided by the tensors.
    ///
    /// # Errors
    /// A folder that is no model, tensors that are missing, have other shapes, or belong to no part of the model.
    pub fn read_headers(folder: &ModelFolder) -> Result<T5Headers, T5Error> {
        let (mut config, json) = T5Config::read(&folder.config_path())?;
        let mut weights = folder.weights()?;
        let found = fid_layout::normalize(&mut weights)?;
        config.tied = found.tied;
        // What Hugging Face saves of an untied model whose head happens to be the embedding: it does not scale.
        if found.tied && json.get("tie_word_embeddings") == Some(&Value::Bool(false)) {
            config.scale_decoder_outputs.get_or_insert(false);
        }
        config.cross_attention_bias = found.cross_attention_bias;
        let model = T5::new(config);
        let path = || folder.path().to_owned();
        let specs = model.layout().specs();
        let known: BTreeSet<&str> = specs.iter().map(|s| s.name.as_str()).collect();
        if let Some(name) = weights.names().find(|n| !known.contains(n)) {
            return Err(T5Error::Unknown { path: path(), name: name.to_owned() });
        }
        for spec in specs {
            let found = weights.shape(&spec.name)?;
            if found != spec.shape {
                let (name, found, expected) = (spec.name.clone(), found.to_vec(), spec.shape.clone());
                return Err(T5Error::Shape { path: path(), name, found, expected });
            }
        }
        Ok(T5Headers { model, json, weights, fid_layout: found.fid })
    }
}

impl<D: Device> LoadedT5<D> {
    /// A model of random values.
    pub fn random(config: T5Config, initialization: Initialization, device: &D) -> Self {
        let model = T5::new(config);
        let mut parameters = Arena::zeros(device, model.layout());
        initialization.fill(&model, device, &mut parameters);
        LoadedT5 { model, parameters, json: Map::new() }
    }
    /// A folder's model.
    ///
    /// # Errors
    /// As [`T5::read_headers`]; values that cannot be read, or are no numbers.
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, T5Error> {
        let T5Headers { model, json, weights, .. } = T5::read_headers(folder)?;
        let mut parameters = Arena::zeros(device, model.layout());
        for spec in model.layout().specs() {
            let values = weights.read(&spec.name)?;
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                let (path, name) = (folder.path().to_owned(), spec.name.clone());
                return Err(T5Error::NotFinite { path, name, at, value: values[at] });
            }
            device.write(parameters.view_mut(spec.place), &values);
        }
        Ok(LoadedT5 { model, parameters, json })
    }
    /// Writes `config.json`, `generation_config.json` and `model.safetensors` into `folder`.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), T5Error> {
        save(&self.model, &self.parameters, &self.json, folder, device)
    }
}

/// Writes a model folder (without tokenizer) that Hugging Face's `T5ForConditionalGeneration` opens.
/// `json` holds the fields of an earlier `config.json`, which are kept.
pub fn save<D: Device>(
    model: &T5,
    parameters: &Arena<D>,
    json: &Map<String, Value>,
    folder: &Path,
    device: &D,
) -> Result<(), T5Error> {
    let write = |name: &str, json: Map<String, Value>| {
        let path = folder.join(name);
        let text =
            serde_json::to_string_pretty(&Value::Object(json)).expect("JSON of numbers and strings") + "\n";
        std::fs::write(&path, text)
            .map_err(|e| T5Error::ConfigFile { path, what: format!("cannot write it: {e}") })
    };
    let config = model.config.to_json(json);
    let mut generation = Map::new();
    for key in ["decoder_start_token_id", "eos_token_id", "pad_token_id"] {
        generation.insert(key.into(), config[key].clone());
    }
    write("generation_config.json", generation)?;
    write("config.json", config)?;
    let specs = model.layout().specs();
    let values: Vec<_> = specs.iter().map(|s| device.host(parameters.view(s.place))).collect();
    let tensors = specs.iter().zip(&values).map(|(s, v)| (s.name.as_str(), s.shape.as_slice(), v.as_ref()));
    save_safetensors(&folder.join("model.safetensors"), tensors, &[("format", "pt")])?;
    Ok(())
}
