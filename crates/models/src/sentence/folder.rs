//! A sentence encoder's values: from the folder that sentence-transformers writes, or from a plain encoder's; and that folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tercio_engine::{Arena, Device};

use super::{DenseActivation, SentenceConfig, SentenceEncoder};
use crate::encoder::EncoderHeaders;
use crate::folder::ModelFolder;
use crate::model_file::{
    KeptTensor, ModelError, check_tensors, read_json, read_parameters, save_parameters, write_json,
};
use crate::retriever::Pooling;
use crate::weights::WeightsError;

/// Hugging Face's tools write a greater number where a tokenizer knows no longest text.
const NO_LIMIT: f64 = 1e9;

/// A sentence encoder with its values.
pub struct LoadedSentenceEncoder<D: Device> {
    /// Shapes and places.
    pub model: SentenceEncoder,
    /// The values.
    pub parameters: Arena<D>,
    /// The fields of the encoder's `config.json`.
    pub json: Map<String, Value>,
    /// Tensors that are written back as they are: BERT's pooler, which no loss reaches.
    pub kept: Vec<KeptTensor>,
    /// A line for the log about tensors that were left out.
    pub note: Option<String>,
    /// The folder in which the encoder's tokenizer lies.
    pub tokenizer: PathBuf,
    /// Most tokens of a text, special ones counted: `max_seq_length`, else what tokenizer and encoder take.
    pub max_tokens: usize,
}

impl<D: Device> LoadedSentenceEncoder<D> {
    /// The model of a folder that sentence-transformers wrote.
    ///
    /// # Errors
    /// As [`SentenceConfig::read`] and [`EncoderHeaders::read`]; tensors that do not fit, values that are no numbers.
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, ModelError> {
        let config = SentenceConfig::read(folder.path())?;
        let encoder = match config.transformer.as_str() {
            "" => folder.clone(),
            part => sub_folder(folder.path(), part)?,
        };
        Self::of_parts(folder.path(), encoder, config, device)
    }

    /// A plain encoder's folder under a configuration without dense layers.
    ///
    /// # Errors
    /// As [`LoadedSentenceEncoder::open`].
    pub fn of_encoder(folder: &ModelFolder, config: SentenceConfig, device: &D) -> Result<Self, ModelError> {
        Self::of_parts(folder.path(), folder.clone(), config, device)
    }

    fn of_parts(
        root: &Path,
        encoder: ModelFolder,
        config: SentenceConfig,
        device: &D,
    ) -> Result<Self, ModelError> {
        let headers = EncoderHeaders::read(&encoder, &[])?;
        let mut width = headers.config.width();
        for layer in &config.dense {
            if layer.inputs != width {
                let (path, found) = (root.join(&layer.folder).join("config.json"), layer.inputs);
                let what =
                    format!("`in_features`: expected {width}, the width of what comes before, found {found}");
                return Err(ModelError::ConfigFile { path, what });
            }
            width = layer.outputs;
        }
        let kind = headers.config.model_type();
        let model = SentenceEncoder::new(headers.config.clone(), config);
        let (own, dense) = model.layout.specs().split_at(model.encoder_parameters());
        headers.check(own, &[])?;
        let mut files = Vec::new();
        for layer in &model.config.dense {
            let part = sub_folder(root, &layer.folder)?;
            let mut weights = part.weights()?;
            weights.rename(|name| Some(format!("{}.{name}", layer.folder)))?;
            let before = format!("{}.", layer.folder);
            let specs: Vec<_> = dense.iter().filter(|s| s.name.starts_with(&before)).cloned().collect();
            check_tensors(part.path(), &weights, &specs, &[], kind)?;
            files.push((part, weights, specs));
        }
        let mut parameters = Arena::zeros(device, &model.layout);
        headers.read_parameters(own, device, &mut parameters)?;
        for (part, weights, specs) in &files {
            read_parameters(part.path(), weights, specs, device, &mut parameters)?;
        }
        let (kept, note) = (headers.kept_tensors()?, headers.note());
        let tokenizer = encoder.path().to_owned();
        let most = match model.config.max_seq_length {
            Some(most) => most,
            None => longest(&tokenizer)?.unwrap_or(usize::MAX),
        };
        let max_tokens = most.min(headers.config.max_tokens());
        Ok(LoadedSentenceEncoder { model, parameters, json: headers.json, kept, note, tokenizer, max_tokens })
    }

    /// Writes a folder (without tokenizer) that sentence-transformers opens, as its releases 2 to 5 wrote it; the encoder lies in the
    /// folder itself.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), ModelError> {
        let (model, config) = (&self.model, &self.model.config);
        let (own, dense) = model.layout.specs().split_at(model.encoder_parameters());
        write_json(folder.join("config.json"), model.encoder.config().to_json(&self.json))?;
        save_parameters(folder, own, &self.parameters, &self.kept, str::to_owned, device)?;
        let part = |name: &str| {
            let path = folder.join(name);
            fs::create_dir_all(&path).map_err(|e| WeightsError::io(&path, "create the folder", e))?;
            Ok::<PathBuf, ModelError>(path)
        };
        let mut modules = vec![("Transformer", String::new()), ("Pooling", config.pooling_folder.clone())];
        write_json(
            part(&config.pooling_folder)?.join("config.json"),
            pooling(config.pooling, model.encoder.config().width()),
        )?;
        for layer in &config.dense {
            let path = part(&layer.folder)?;
            let activation = match layer.activation {
                DenseActivation::Identity => "torch.nn.modules.linear.Identity",
                DenseActivation::Tanh => "torch.nn.modules.activation.Tanh",
            };
            let fields = json!({
                "in_features": layer.inputs,
                "out_features": layer.outputs,
                "bias": layer.bias,
                "activation_function": activation,
            });
            write_json(path.join("config.json"), fields)?;
            let before = format!("{}.", layer.folder);
            let specs: Vec<_> = dense.iter().filter(|s| s.name.starts_with(&before)).cloned().collect();
            save_parameters(&path, &specs, &self.parameters, &[], |n| n[before.len()..].to_owned(), device)?;
            modules.push(("Dense", layer.folder.clone()));
        }
        if config.normalize {
            let name = format!("{}_Normalize", modules.len());
            part(&name)?;
            modules.push(("Normalize", name));
        }
        let modules = modules.iter().enumerate().map(|(i, (kind, path))| {
            json!({"idx": i, "name": i.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}")})
        });
        write_json(folder.join("modules.json"), modules.collect::<Vec<Value>>())?;
        let settings = json!({"max_seq_length": config.max_seq_length, "do_lower_case": config.lower_case});
        write_json(folder.join("sentence_bert_config.json"), settings)?;
        let prompts: Map<String, Value> =
            config.prompts.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
        let mut settings = config.settings.clone();
        settings.insert("prompts".into(), prompts.into());
        settings.insert("default_prompt_name".into(), config.default_prompt_name.clone().into());
        write_json(folder.join("config_sentence_transformers.json"), settings)
    }
}

/// The longest text by a folder's `tokenizer_config.json`, if it says one; a huge number stands for none.
fn longest(folder: &Path) -> Result<Option<usize>, ModelError> {
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(None);
    }
    let length = read_json(&path)?.get("model_max_length").and_then(Value::as_f64);
    Ok(length.filter(|n| (1.0..NO_LIMIT).contains(n)).map(|n| n as usize))
}

/// A module's folder, which has a `config.json` as a model's has.
fn sub_folder(root: &Path, part: &str) -> Result<ModelFolder, ModelError> {
    let path = root.join(part);
    let name = path.to_str().ok_or_else(|| WeightsError::invalid(&path, "expected a path of UTF-8"))?;
    Ok(ModelFolder::open(name)?)
}

/// The pooling's settings.
fn pooling(pooling: Pooling, width: usize) -> Map<String, Value> {
    let mut json = Map::new();
    json.insert("word_embedding_dimension".into(), width.into());
    for (way, on) in [
        ("cls_token", pooling == Pooling::First),
        ("mean_tokens", pooling == Pooling::Mean),
        ("max_tokens", false),
        ("mean_sqrt_len_tokens", false),
        ("weightedmean_tokens", false),
        ("lasttoken", false),
    ] {
        json.insert(format!("pooling_mode_{way}"), on.into());
    }
    json.insert("include_prompt".into(), true.into());
    json
}
