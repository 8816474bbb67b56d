//! A classifier's values: from a folder of Hugging Face's `*ForSequenceClassification`, from a plain encoder's (with a random head), or
//! random; and its folder.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_engine::{Arena, Device, ParamSpec};

use super::config::{MOST_LABELS, unnamed};
use super::{Classifier, ClassifierConfig, HeadKind};
use crate::bert::BertFamily;
use crate::encoder::{EncoderConfig, EncoderHeaders};
use crate::folder::ModelFolder;
use crate::model_file::{KeptTensor, ModelError, read_json, save_parameters, write_json};

/// Names of the heads of all families, and of flair's; BERT's first layer has the name of its pooler, which is taken anyway.
const HEADS: [&str; 14] = [
    "classifier.weight",
    "classifier.bias",
    "classifier.dense.weight",
    "classifier.dense.bias",
    "classifier.out_proj.weight",
    "classifier.out_proj.bias",
    "pre_classifier.weight",
    "pre_classifier.bias",
    "head.dense.weight",
    "head.dense.bias",
    "head.norm.weight",
    "head.norm.bias",
    "linear_head.weight",
    "linear_head.bias",
];

/// Whether a `config.json` is a classifier's, and not that of an encoder or of another task.
pub fn is_classifier(json: &Map<String, Value>) -> bool {
    let classes = json.get("architectures").and_then(Value::as_array);
    let is_class = |v: &Value| v.as_str().is_some_and(|name| name.ends_with("ForSequenceClassification"));
    json.contains_key("tercio_classifier") || classes.is_some_and(|c| c.iter().any(is_class))
}

/// A folder of which configuration and headers are read.
pub struct ClassifierHeaders {
    /// The configuration: the classifier's, or Hugging Face's defaults over a plain encoder.
    pub config: ClassifierConfig,
    /// Whether the folder is a classifier's, so that labels, kind of problem and head are the folder's.
    pub is_classifier: bool,
    /// The encoder's part.
    pub encoder: EncoderHeaders,
}

impl ClassifierConfig {
    /// Reads a `config.json`, and whether it is a classifier's or a plain encoder's.
    ///
    /// # Errors
    /// A file that cannot be read or is too long; as [`ClassifierConfig::from_json`].
    pub fn read(path: &Path) -> Result<(ClassifierConfig, bool), ModelError> {
        let json = read_json(path)?;
        let wrong = |what: String| ModelError::ConfigFile { path: path.to_owned(), what };
        Ok((ClassifierConfig::from_json(&json).map_err(wrong)?.0, is_classifier(&json)))
    }
}

impl ClassifierHeaders {
    /// Reads a folder's configuration and the headers of its weights: a classifier, or an encoder as Hugging Face saves it.
    ///
    /// # Errors
    /// As [`EncoderHeaders::read`]; fields of a classifier that are not understood.
    pub fn read(folder: &ModelFolder) -> Result<ClassifierHeaders, ModelError> {
        let encoder = EncoderHeaders::read(folder, &HEADS)?;
        let wrong = |what: String| ModelError::ConfigFile { path: folder.config_path(), what };
        let (mut config, has_names) = ClassifierConfig::from_json(&encoder.json).map_err(wrong)?;
        config.check().map_err(wrong)?;
        let is_classifier = is_classifier(&encoder.json);
        if is_classifier && !has_names {
            // The tensor knows how many there are; names there are none.
            let output = super::head_names(&config).output;
            let rows = encoder.weights.shape(&format!("{output}.weight"))?.first().copied().unwrap_or(0);
            if !(1..=MOST_LABELS).contains(&rows) {
                return Err(wrong(format!(
                    "`{output}.weight`: expected 1 to {MOST_LABELS} labels, found {rows}"
                )));
            }
            config.labels = unnamed(rows);
        }
        Ok(ClassifierHeaders { config, is_classifier, encoder })
    }
}

/// A classifier with its values.
pub struct LoadedClassifier<D: Device> {
    /// Shapes and places.
    pub model: Classifier,
    /// The values.
    pub parameters: Arena<D>,
    /// The fields of the `config.json` it came from.
    pub json: Map<String, Value>,
    /// Tensors that are written back as they are: the pooler of BERT under flair's head, which no loss reaches.
    pub kept: Vec<KeptTensor>,
    /// A line for the log about tensors that were left out.
    pub note: Option<String>,
    /// Names of the head's parameters that were drawn and not read.
    pub drawn: Vec<String>,
}

impl<D: Device> LoadedClassifier<D> {
    /// The classifier of a folder as it is.
    ///
    /// # Errors
    /// As [`ClassifierHeaders::read`]; a folder that is no classifier's; tensors that are missing or do not fit, values that are no numbers.
    pub fn open(folder: &ModelFolder, device: &D) -> Result<Self, ModelError> {
        let headers = ClassifierHeaders::read(folder)?;
        if !headers.is_classifier {
            let (path, expected) = (folder.config_path(), headers.config.architecture());
            let what = format!(
                "`architectures`: expected a classifier's, {expected}, found {}; `tercio train classifier` makes one of an encoder",
                headers.encoder.json.get("architectures").unwrap_or(&Value::Null)
            );
            return Err(ModelError::ConfigFile { path, what });
        }
        let config = headers.config.clone();
        let model = Classifier::new(config.clone());
        // What is to be read must be there.
        for spec in model.head_specs() {
            headers.encoder.weights.shape(&spec.name)?;
        }
        headers.encoder.check(model.layout().specs(), &HEADS)?;
        Self::with_config(headers, config, 0, device)
    }

    /// The folder's encoder under another configuration (labels, head, dropout, pooling). What of the head is in the folder, in the same
    /// shape, is kept; the layer of the logits only if the folder is a classifier of the same labels. The rest is drawn by `seed`.
    ///
    /// # Errors
    /// As [`LoadedClassifier::open`].
    pub fn with_config(
        headers: ClassifierHeaders,
        config: ClassifierConfig,
        seed: u64,
        device: &D,
    ) -> Result<Self, ModelError> {
        let (encoder, model) = (&headers.encoder, Classifier::new(config));
        let same = headers.is_classifier && headers.config.labels == model.config.labels;
        let outputs = model.output_specs();
        let is_there = |spec: &ParamSpec| {
            let fits = encoder.weights.contains(&spec.name)
                && encoder.weights.shape(&spec.name).is_ok_and(|shape| shape == spec.shape);
            fits && (same || outputs.iter().all(|o| o.name != spec.name))
        };
        let (read, drawn): (Vec<_>, Vec<_>) = model.head_specs().iter().cloned().partition(is_there);
        let head = model.head_specs().len();
        let own = &model.layout().specs()[..model.layout().specs().len() - head];
        let specs: Vec<ParamSpec> = own.iter().cloned().chain(read).collect();
        encoder.check(&specs, &HEADS)?;
        let mut parameters = Arena::zeros(device, model.layout());
        encoder.read_parameters(&specs, device, &mut parameters)?;
        model.fill_head(&drawn, seed, device, &mut parameters);
        let mut kept = if keeps_pooler(&model.config) { encoder.kept_tensors()? } else { Vec::new() };
        kept.retain(|k| model.head_specs().iter().all(|s| s.name != k.name));
        let (note, drawn) = (encoder.note(), drawn.into_iter().map(|s| s.name).collect());
        Ok(LoadedClassifier { model, parameters, json: headers.encoder.json, kept, note, drawn })
    }

    /// A classifier of random values.
    pub fn random(config: ClassifierConfig, seed: u64, device: &D) -> Self {
        let model = Classifier::new(config);
        let mut parameters = Arena::zeros(device, model.layout());
        let (head, all) = (model.head_specs(), model.layout().specs());
        model.encoder.fill(&all[..all.len() - head.len()], seed, device, &mut parameters);
        model.fill_head(head, seed, device, &mut parameters);
        let drawn = head.iter().map(|s| s.name.clone()).collect();
        LoadedClassifier { model, parameters, json: Map::new(), kept: Vec::new(), note: None, drawn }
    }

    /// Writes `config.json` and `model.safetensors`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, folder: &Path, device: &D) -> Result<(), ModelError> {
        save(&self.model, &self.parameters, &self.json, &self.kept, folder, device)
    }
}

/// Whether a pooler that came with the encoder is written back: the classes with a head of their own have none.
fn keeps_pooler(config: &ClassifierConfig) -> bool {
    let is_bert = matches!(&config.encoder, EncoderConfig::Bert(c) if c.family == BertFamily::Bert);
    config.head == HeadKind::Linear || is_bert
}

/// Writes a classifier's folder (without tokenizer). `json` holds the fields of an earlier `config.json`, which are kept; `kept` the
/// tensors that are no parameters.
///
/// # Errors
/// A file that cannot be written.
pub fn save<D: Device>(
    model: &Classifier,
    parameters: &Arena<D>,
    json: &Map<String, Value>,
    kept: &[KeptTensor],
    folder: &Path,
    device: &D,
) -> Result<(), ModelError> {
    let config = &model.config;
    write_json(folder.join("config.json"), config.to_json(json))?;
    let prefix = match (config.head, &config.encoder) {
        // A bare encoder's names, for what opens it knows no such head.
        (HeadKind::Linear, _) => "",
        (_, EncoderConfig::ModernBert(_)) => "model.",
        (_, EncoderConfig::Bert(c)) => match c.family {
            BertFamily::Bert => "bert.",
            BertFamily::DistilBert => "distilbert.",
            BertFamily::Roberta | BertFamily::XlmRoberta => "roberta.",
        },
    };
    let name = |n: &str| {
        let is_head = HEADS.contains(&n);
        if is_head { n.to_owned() } else { format!("{prefix}{n}") }
    };
    save_parameters(folder, model.layout().specs(), parameters, kept, name, device)
}
