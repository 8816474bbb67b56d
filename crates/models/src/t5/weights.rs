//! T5's values: from a model folder, or random by name; and a folder that Hugging Face tools open.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value};
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{Arena, Device};

use super::{ConfigError, T5, T5Config};
use crate::folder::ModelFolder;
use crate::weights::{WeightsError, WeightsReader, fid_layout, save_safetensors};

/// Why a T5 model could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum T5Error {
    /// The configuration.
    #[error("{}: {source}", path.display())]
    Config {
        /// The model folder.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The configuration file cannot be read.
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
                (0..spec.place.len() as u64).into_par_iter().map(|i| (deviation * normal(key, i)) as f32).collect()
            };
            device.write(parameters.view_mut(spec.place), &values);
        }
    }
}

/// Reads a folder's `config.json`.
pub(crate) fn read_config(path: &Path) -> Result<Map<String, Value>, T5Error> {
    let wrong = |what: String| T5Error::ConfigFile { path: path.to_owned(), what };
    let text = std::fs::read_to_string(path).map_err(|e| wrong(format!("cannot read it: {e}")))?;
    match serde_json::from_str(&text) {
        Ok(Value::Object(json)) => Ok(json),
        Ok(_) => Err(wrong("expected a JSON object".into())),
        Err(e) => Err(wrong(format!("expected a JSON object: {e}"))),
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
    /// A folder's model. Whether the head is tied and cross-attention has a bias table is decided by the tensors.
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, T5Error> {
        let path = folder.path().to_owned();
        let json = read_config(&folder.config_path())?;
        let mut config =
            T5Config::from_json(&json).map_err(|source| T5Error::Config { path: path.clone(), source })?;
        let mut reader = folder.weights()?;
        let found = fid_layout::normalize(&mut reader)?;
        config.tied = found.tied;
        config.cross_attention_bias = found.cross_attention_bias;
        let model = T5::new(config);
        let parameters = read_parameters(&model, &reader, &path, device)?;
        Ok(LoadedT5 { model, parameters, json })
    }
    /// Writes `config.json`, `generation_config.json` and `model.safetensors` into `folder`.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), T5Error> {
        save(&self.model, &self.parameters, &self.json, folder, device)
    }
}

fn read_parameters<D: Device>(
    model: &T5,
    reader: &WeightsReader,
    path: &Path,
    device: &D,
) -> Result<Arena<D>, T5Error> {
    let specs = model.layout().specs();
    if let Some(name) = reader.names().find(|n| !specs.iter().any(|s| s.name == *n)) {
        return Err(T5Error::Unknown { path: path.to_owned(), name: name.to_owned() });
    }
    // All shapes first: a wrong file costs no arena.
    for spec in specs {
        let found = reader.shape(&spec.name)?;
        if found != spec.shape {
            let (name, found, expected) = (spec.name.clone(), found.to_vec(), spec.shape.clone());
            return Err(T5Error::Shape { path: path.to_owned(), name, found, expected });
        }
    }
    let mut parameters = Arena::zeros(device, model.layout());
    for spec in specs {
        device.write(parameters.view_mut(spec.place), &reader.read(&spec.name)?);
    }
    Ok(parameters)
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
