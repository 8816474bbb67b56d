//! T5's values: from a model folder, or random by name; and a folder that Hugging Face tools open.

use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{Arena, Device};

use super::{T5, T5Config};
use crate::folder::ModelFolder;
use crate::model_file::{ModelError, check_tensors, read_json, read_parameters, save_parameters, write_json};
use crate::weights::{WeightsReader, fid_layout};

/// Why a T5 model could not be read or written.
pub type T5Error = ModelError;

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
        let json = read_json(path)?;
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
        check_tensors(folder.path(), &weights, model.layout().specs(), &[], "T5")?;
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
        read_parameters(folder.path(), &weights, model.layout().specs(), device, &mut parameters)?;
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
    let config = model.config.to_json(json);
    let mut generation = Map::new();
    for key in ["decoder_start_token_id", "eos_token_id", "pad_token_id"] {
        generation.insert(key.into(), config[key].clone());
    }
    write_json(folder.join("generation_config.json"), generation)?;
    write_json(folder.join("config.json"), config)?;
    save_parameters(folder, model.layout().specs(), parameters, &[], str::to_owned, device)
}
