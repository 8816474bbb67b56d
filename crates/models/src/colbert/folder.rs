//! A ColBERT model's values: from PyLate's or sentence-transformers' folder, from a checkpoint of Stanford's ColBERT, or from a plain
//! encoder's with a new projection; and PyLate's folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{Arena, Device, Param, ParamSpec};

use super::config::{DIMENSION, SETTINGS, bad};
use super::{Colbert, ColbertConfig};
use crate::encoder::{EncoderConfig, EncoderHeaders};
use crate::fields::Fields;
use crate::folder::ModelFolder;
use crate::model_file::{
    KeptTensor, ModelError, check_tensors, read_finite, read_json, read_parameters, save_parameters,
    write_json,
};
use crate::weights::{WeightsError, WeightsReader};

/// The architecture by which Stanford's checkpoints are known, the file of their settings, and their projection.
const STANFORD: &str = "HF_ColBERT";
const ARTIFACT: &str = "artifact.metadata";
const PROJECTION: &str = "linear.weight";

/// Where the values of a dense layer lie.
enum Source {
    /// A module's folder.
    Folder(PathBuf, WeightsReader),
    /// The encoder's own file: Stanford's projection.
    Encoder,
    /// Nowhere: they are drawn.
    New,
}

/// A folder of which configurations and headers are read.
pub struct ColbertHeaders {
    /// What follows the encoder, and how texts are made.
    pub config: ColbertConfig,
    /// The encoder's part.
    pub encoder: EncoderHeaders,
    /// The folder in which the tokenizer lies.
    pub tokenizer: PathBuf,
    /// Whether the folder is one of a ColBERT model: it has settings of queries and documents, or Stanford's.
    pub is_colbert: bool,
    root: PathBuf,
    sources: Vec<Source>,
}

impl ColbertHeaders {
    /// Reads configurations and headers of a folder. A plain encoder gets a projection to [`DIMENSION`], and one that ends in another
    /// width than the given `dimension` one more; PyLate does the same.
    ///
    /// # Errors
    /// A file that is missing or of other fields; dense layers whose widths do not follow each other.
    pub fn read(folder: &ModelFolder, dimension: Option<usize>) -> Result<ColbertHeaders, ModelError> {
        let root = folder.path().to_owned();
        let (mut config, encoder, is_colbert) = if root.join("modules.json").is_file() {
            let config = ColbertConfig::read(&root)?;
            let part = match config.transformer.as_str() {
                "" => folder.clone(),
                part => sub_folder(&root, part)?,
            };
            let known = config.settings.contains_key("query_length");
            (config, EncoderHeaders::read(&part, &[])?, known)
        } else {
            let own = [PROJECTION];
            let is_stanford = is_stanford(folder)?;
            let encoder = EncoderHeaders::read(folder, if is_stanford { &own } else { &[] })?;
            let config = if is_stanford { stanford(folder)? } else { ColbertConfig::default() };
            (config, encoder, is_stanford)
        };
        let mut sources = Vec::new();
        let mut width = encoder.config.width();
        for layer in &config.dense {
            if layer.inputs != width {
                let what = format!(
                    "`in_features`: expected {width}, the width of what comes before, found {}",
                    layer.inputs
                );
                return Err(bad(&root.join(&layer.folder).join("config.json"), what));
            }
            width = layer.outputs;
            let part = sub_folder(&root, &layer.folder)?;
            let mut weights = part.weights()?;
            weights.rename(|name| Some(format!("{}.{name}", layer.folder)))?;
            sources.push(Source::Folder(part.path().to_owned(), weights));
        }
        if config.dense.is_empty() {
            let source = match encoder.weights.contains(PROJECTION) {
                true => Source::Encoder,
                false => Source::New,
            };
            let outputs = match &source {
                Source::Encoder => match encoder.weights.shape(PROJECTION)? {
                    [outputs, _] => *outputs,
                    found => {
                        let what =
                            format!("tensor `{PROJECTION}`: expected a matrix, found the shape {found:?}");
                        return Err(bad(&root, what));
                    }
                },
                _ => dimension.unwrap_or(DIMENSION),
            };
            config.project(width, outputs);
            sources.push(source);
            width = outputs;
        }
        if let Some(dimension) = dimension.filter(|&d| d != width) {
            config.project(width, dimension);
            sources.push(Source::New);
        }
        let tokenizer = root.join(&config.transformer);
        Ok(ColbertHeaders { config, encoder, tokenizer, is_colbert, root, sources })
    }
}

/// A module's folder, which has a `config.json` as a model's has.
fn sub_folder(root: &Path, part: &str) -> Result<ModelFolder, ModelError> {
    let path = root.join(part);
    let name = path.to_str().ok_or_else(|| WeightsError::invalid(&path, "expected a path of UTF-8"))?;
    Ok(ModelFolder::open(name)?)
}

fn is_stanford(folder: &ModelFolder) -> Result<bool, ModelError> {
    let json = read_json(&folder.config_path())?;
    let names = json.get("architectures").and_then(Value::as_array);
    Ok(names.is_some_and(|names| names.iter().any(|name| name == STANFORD)))
}

/// The settings of a checkpoint of Stanford's ColBERT.
fn stanford(folder: &ModelFolder) -> Result<ColbertConfig, ModelError> {
    let mut config = ColbertConfig::default();
    let Some(path) = folder.file(ARTIFACT) else { return Ok(config) };
    let json = read_json(&path)?;
    let f = Fields(&json);
    let mut read = || {
        config.query_prefix = f.text("query_token_id", "[unused0]")?.to_owned();
        config.document_prefix = f.text("doc_token_id", "[unused1]")?.to_owned();
        config.query_length = f.size("query_maxlen", Some(config.query_length))?;
        config.document_length = f.size("doc_maxlen", Some(config.document_length))?;
        config.attend_to_expansion = f.boolean("attend_to_mask_tokens", false)?;
        if !f.boolean("mask_punctuation", true)? {
            config.skiplist.clear();
        }
        Ok::<(), String>(())
    };
    read().map_err(|what| bad(&path, what))?;
    Ok(config)
}

/// A ColBERT model with its values.
pub struct LoadedColbert<D: Device> {
    /// Shapes and places.
    pub model: Colbert,
    /// The values.
    pub parameters: Arena<D>,
    /// The fields of the encoder's `config.json`.
    pub json: Map<String, Value>,
    /// Tensors that are written back as they are: BERT's pooler, which no loss reaches.
    pub kept: Vec<KeptTensor>,
    /// A line for the log about tensors that were left out.
    pub note: Option<String>,
    /// The folder in which the tokenizer lies.
    pub tokenizer: PathBuf,
    /// Dense layers whose values were drawn and not read.
    pub new_layers: usize,
}

impl<D: Device> LoadedColbert<D> {
    /// The model of a folder as it is.
    ///
    /// # Errors
    /// As [`ColbertHeaders::read`]; tensors that do not fit, values that are no numbers.
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, ModelError> {
        let headers = ColbertHeaders::read(folder, None)?;
        let (encoder, config) = (headers.encoder.config.clone(), headers.config.clone());
        Self::with_config(headers, encoder, config, 0, device)
    }

    /// The folder's values under another encoder's configuration (dropout, more words) and other settings of texts. Words that the file
    /// does not have get the mean of all others plus a little of their own, drawn by name; new layers are drawn by `seed`.
    ///
    /// # Errors
    /// As [`LoadedColbert::open`]; fewer words than the file has.
    pub fn with_config(
        headers: ColbertHeaders,
        encoder: EncoderConfig,
        config: ColbertConfig,
        seed: u64,
        device: &D,
    ) -> Result<Self, ModelError> {
        let ColbertHeaders { encoder: file, tokenizer, root, sources, .. } = headers;
        let kind = encoder.model_type();
        let (known, initializer) = (file.config.vocab_size(), encoder.initializer_range());
        if encoder.vocab_size() < known {
            let what = format!("expected no fewer words than the {known} of the file");
            return Err(bad(&root.join("config.json"), what));
        }
        let model = Colbert::new(encoder, config);
        let (own, dense) = model.layout.specs().split_at(model.encoder_parameters);
        // The table of words is the first parameter of every encoder.
        let words = own[0].place;
        let mut specs = own.to_vec();
        let stored = ParamSpec {
            shape: vec![known, words.columns],
            place: Param { rows: known, ..words },
            ..own[0].clone()
        };
        specs[0] = stored;
        file.check(&specs, &[PROJECTION])?;
        let of = |layer: &super::DenseLayer| {
            let before = format!("{}.", layer.folder);
            dense.iter().filter(|s| s.name.starts_with(&before)).cloned().collect::<Vec<ParamSpec>>()
        };
        for (layer, source) in model.config.dense.iter().zip(&sources) {
            match source {
                Source::Folder(path, weights) => check_tensors(path, weights, &of(layer), &[], kind)?,
                Source::Encoder => {
                    let (found, expected) = (file.weights.shape(PROJECTION)?, [layer.outputs, layer.inputs]);
                    if found != expected {
                        return Err(ModelError::Shape {
                            path: root.clone(),
                            name: PROJECTION.into(),
                            found: found.to_vec(),
                            expected: expected.to_vec(),
                        });
                    }
                }
                Source::New => {}
            }
        }
        let mut parameters = Arena::zeros(device, &model.layout);
        file.read_parameters(&specs, device, &mut parameters)?;
        new_words(words, known, initializer, &own[0].name, seed, device, &mut parameters);
        let mut new_layers = 0;
        for (i, (layer, source)) in model.config.dense.iter().zip(&sources).enumerate() {
            match source {
                Source::Folder(path, weights) => {
                    read_parameters(path, weights, &of(layer), device, &mut parameters)?;
                }
                Source::Encoder => {
                    let values = read_finite(&root, &file.weights, PROJECTION)?;
                    device.write(parameters.view_mut(of(layer)[0].place), &values);
                }
                Source::New => {
                    model.fill_dense(i, seed, device, &mut parameters);
                    new_layers += 1;
                }
            }
        }
        let (kept, note) = (file.kept_tensors()?, file.note());
        Ok(LoadedColbert { model, parameters, json: file.json, kept, note, tokenizer, new_layers })
    }

    /// Writes a folder (without tokenizer) that PyLate opens; the encoder lies in the folder itself.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), ModelError> {
        save(&self.model, &self.parameters, &self.json, &self.kept, folder, device)
    }
}

/// Values of words that came after the model was trained.
fn new_words<D: Device>(
    words: Param,
    known: usize,
    deviation: f64,
    name: &str,
    seed: u64,
    device: &D,
    parameters: &mut Arena<D>,
) {
    if words.rows == known {
        return;
    }
    let old = device.read_f64(parameters.view(Param { rows: known, ..words }));
    let mut mean = vec![0f64; words.columns];
    for row in old.chunks_exact(words.columns) {
        mean.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
    }
    mean.iter_mut().for_each(|v| *v /= known.max(1) as f64);
    let key = key_of_name(seed, name);
    let value = |i: usize| (mean[i % words.columns] + deviation * normal(key, i as u64)) as f32;
    let all = known * words.columns..words.len();
    let values: Vec<f32> = all.map(value).collect();
    let place = Param {
        start: words.start + known * words.columns,
        rows: words.rows - known,
        columns: words.columns,
    };
    device.write(parameters.view_mut(place), &values);
}

/// Writes a ColBERT model's folder (without tokenizer) as PyLate has it. `json` holds the fields of an earlier `config.json` of the
/// encoder, which are kept; `kept` the tensors that are no parameters.
///
/// # Errors
/// A file that cannot be written.
pub fn save<D: Device>(
    model: &Colbert,
    parameters: &Arena<D>,
    json: &Map<String, Value>,
    kept: &[KeptTensor],
    folder: &Path,
    device: &D,
) -> Result<(), ModelError> {
    let config = &model.config;
    let (own, dense) = model.layout.specs().split_at(model.encoder_parameters);
    write_json(folder.join("config.json"), model.encoder.config().to_json(json))?;
    save_parameters(folder, own, parameters, kept, str::to_owned, device)?;
    let mut modules =
        vec![json!({"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"})];
    for (i, layer) in config.dense.iter().enumerate() {
        let path = folder.join(&layer.folder);
        fs::create_dir_all(&path).map_err(|e| WeightsError::io(&path, "create the folder", e))?;
        write_json(path.join("config.json"), layer.to_json())?;
        let before = format!("{}.", layer.folder);
        let specs: Vec<_> = dense.iter().filter(|s| s.name.starts_with(&before)).cloned().collect();
        save_parameters(&path, &specs, parameters, &[], |n| n[before.len()..].to_owned(), device)?;
        let n = i + 1;
        modules.push(
            json!({"idx": n, "name": n.to_string(), "path": layer.folder, "type": "pylate.models.Dense.Dense"}),
        );
    }
    write_json(folder.join("modules.json"), modules)?;
    let mut limits = config.limits.clone();
    limits.entry("max_seq_length").or_insert(Value::Null);
    limits.insert("do_lower_case".into(), config.lower_case.into());
    write_json(folder.join("sentence_bert_config.json"), limits)?;
    write_json(folder.join(SETTINGS), config.settings_json())
}
