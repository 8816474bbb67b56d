//! What follows the encoder of a ColBERT model and how its texts are made: the files of a PyLate folder, one by one.
//!
//! Source: the folders that PyLate 1.x writes, and sentence-transformers' of which it keeps the transformer and the dense layers.

use std::path::Path;

use serde_json::{Map, Value, json};
use tercio_engine::Activation;

use crate::fields::Fields;
use crate::model_file::{ModelError, read_as, read_json};

/// Width of a token's vector where nobody says another.
pub const DIMENSION: usize = 128;
/// Layers behind the encoder.
const MOST_DENSE: usize = 16;
/// Words that documents may leave out.
const MOST_WORDS: usize = 1 << 16;
/// Tokens of a query where nobody says otherwise, as PyLate has them.
const QUERY_LENGTH: usize = 32;
/// Tokens of a document.
const DOCUMENT_LENGTH: usize = 180;
/// What queries begin with; the space is part of the token.
const QUERY_PREFIX: &str = "[Q] ";
/// What documents begin with.
const DOCUMENT_PREFIX: &str = "[D] ";
/// The ASCII punctuation, which is left out of documents.
const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

/// The settings' file.
pub(super) const SETTINGS: &str = "config_sentence_transformers.json";

/// A dense layer on every token: `y = act(W x + b)`, and with a residual `y + x`, or `y + W_r x` where the widths differ.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseLayer {
    /// Its folder in the model's, such as `1_Dense`.
    pub folder: String,
    /// Width of its input.
    pub inputs: usize,
    /// Width of its output.
    pub outputs: usize,
    /// Whether a bias is added.
    pub bias: bool,
    /// What follows; `None`: nothing.
    pub activation: Option<Activation>,
    /// Whether its input is added to its output.
    pub residual: bool,
}

/// What follows the encoder, and how texts are made.
#[derive(Clone, Debug, PartialEq)]
pub struct ColbertConfig {
    /// Folder of the transformer in the model's; empty: the model's own.
    pub transformer: String,
    /// Dense layers, in their order; the last one's output is a token's vector, before it gets unit length.
    pub dense: Vec<DenseLayer>,
    /// The token behind a query's first one; empty: none.
    pub query_prefix: String,
    /// The token behind a document's first one; empty: none.
    pub document_prefix: String,
    /// Most tokens of a query, all special ones counted; with expansion every query has as many.
    pub query_length: usize,
    /// Most tokens of a document.
    pub document_length: usize,
    /// Whether queries are filled up with mask tokens, whose vectors count as the query's.
    pub expansion: bool,
    /// Whether the tokens of a query attend to those masks.
    pub attend_to_expansion: bool,
    /// Words whose tokens a document is not scored by.
    pub skiplist: Vec<String>,
    /// Whether texts are made lower case before the tokenizer gets them.
    pub lower_case: bool,
    /// Texts before others, by the name of the task (`query`, `document`).
    pub prompts: Vec<(String, String)>,
    /// `max_seq_length` of `sentence_bert_config.json`, which is written back.
    pub limits: Map<String, Value>,
    /// Fields of `config_sentence_transformers.json`, which are written back.
    pub settings: Map<String, Value>,
}

impl Default for ColbertConfig {
    /// PyLate's defaults, without any dense layer.
    fn default() -> ColbertConfig {
        ColbertConfig {
            transformer: String::new(),
            dense: Vec::new(),
            query_prefix: QUERY_PREFIX.into(),
            document_prefix: DOCUMENT_PREFIX.into(),
            query_length: QUERY_LENGTH,
            document_length: DOCUMENT_LENGTH,
            expansion: true,
            attend_to_expansion: false,
            skiplist: PUNCTUATION.chars().map(String::from).collect(),
            lower_case: false,
            prompts: Vec::new(),
            limits: Map::new(),
            settings: Map::new(),
        }
    }
}

impl ColbertConfig {
    /// Reads the modules of a folder of PyLate or sentence-transformers. Pooling and normalization have no part in a ColBERT model and
    /// are left out, as PyLate does; a module that is not known here is refused by its name.
    ///
    /// # Errors
    /// A file that is missing, no JSON or of other fields.
    pub(super) fn read(folder: &Path) -> Result<ColbertConfig, ModelError> {
        let path = folder.join("modules.json");
        let modules: Vec<Map<String, Value>> = read_as(&path, "a list of modules")?;
        let mut config = ColbertConfig::default();
        for (n, module) in modules.iter().enumerate() {
            let module = Fields(module);
            let wrong = |what: String| bad(&path, format!("module {n}: {what}"));
            let kind = module.text("type", "").map_err(wrong)?;
            let part = module.text("path", "").map_err(wrong)?;
            if part.contains(['/', '\\', '\0']) || part == "." || part == ".." {
                return Err(wrong(format!("expected the name of a folder beside this file, found {part:?}")));
            }
            match kind.rsplit('.').next().unwrap_or(kind) {
                "Transformer" if n == 0 => config.transformer = part.to_owned(),
                "Dense" if n > 0 => config.dense.push(dense(folder, part)?),
                "Pooling" | "Normalize" if n > 0 => {}
                _ => {
                    return Err(wrong(format!(
                        "expected Transformer first, then Dense (and Pooling and Normalize, which are left out), found {kind:?}"
                    )));
                }
            }
        }
        if modules.is_empty() || config.dense.len() > MOST_DENSE {
            return Err(bad(&path, format!("expected a Transformer and at most {MOST_DENSE} dense layers")));
        }
        let path = folder.join(SETTINGS);
        if path.exists() {
            let json = read_json(&path)?;
            config.take_settings(json).map_err(|what| bad(&path, what))?;
        }
        let path = folder.join(&config.transformer).join("sentence_bert_config.json");
        if path.exists() {
            let json = read_json(&path)?;
            config.lower_case =
                Fields(&json).boolean("do_lower_case", false).map_err(|what| bad(&path, what))?;
            // What newer releases write beside it is refused by those that PyLate stands on.
            config.limits = json.into_iter().filter(|(key, _)| key == "max_seq_length").collect();
        }
        Ok(config)
    }

    /// Takes the fields of `config_sentence_transformers.json`.
    fn take_settings(&mut self, json: Map<String, Value>) -> Result<(), String> {
        let f = Fields(&json);
        let own = ColbertConfig::default();
        self.query_prefix = f.text("query_prefix", &own.query_prefix)?.to_owned();
        self.document_prefix = f.text("document_prefix", &own.document_prefix)?.to_owned();
        self.query_length = f.size("query_length", Some(own.query_length))?;
        self.document_length = f.size("document_length", Some(own.document_length))?;
        self.expansion = f.boolean("do_query_expansion", true)?;
        self.attend_to_expansion = f.boolean("attend_to_expansion_tokens", false)? && self.expansion;
        if let Some(words) = f.get("skiplist_words") {
            let list = words.as_array().filter(|list| list.len() <= MOST_WORDS);
            let list = list.and_then(|list| list.iter().map(|w| w.as_str().map(str::to_owned)).collect());
            self.skiplist = list.ok_or("`skiplist_words`: expected a list of words, found another")?;
        }
        match f.get("prompts") {
            None => {}
            Some(Value::Object(prompts)) => {
                for (name, text) in prompts {
                    let text = text.as_str().ok_or_else(|| format!("prompt {name:?}: expected a text"))?;
                    self.prompts.push((name.clone(), text.to_owned()));
                }
            }
            Some(found) => return Err(format!("`prompts`: expected an object of texts, found {found}")),
        }
        self.settings = json;
        Ok(())
    }

    /// The content of `config_sentence_transformers.json`; fields of the earlier one that Tercio does not know are kept.
    pub(super) fn settings_json(&self) -> Map<String, Value> {
        let mut json = self.settings.clone();
        let mut set = |key: &str, value: Value| {
            json.insert(key.into(), value);
        };
        set("model_type", "ColBERT".into());
        set("similarity_fn_name", "MaxSim".into());
        set("query_prefix", self.query_prefix.as_str().into());
        set("document_prefix", self.document_prefix.as_str().into());
        set("query_length", self.query_length.into());
        set("document_length", self.document_length.into());
        set("do_query_expansion", self.expansion.into());
        set("attend_to_expansion_tokens", self.attend_to_expansion.into());
        set("skiplist_words", self.skiplist.clone().into());
        let prompts: Map<String, Value> =
            self.prompts.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
        set("prompts", prompts.into());
        json.entry("default_prompt_name").or_insert(Value::Null);
        json
    }

    /// Everything as one value, for [`ColbertConfig::from_json`].
    pub fn to_json(&self) -> Value {
        let dense = self.dense.iter().map(|d| json!({"folder": d.folder, "config": d.to_json()}));
        json!({
            "transformer": self.transformer,
            "dense": dense.collect::<Vec<Value>>(),
            "settings": self.settings_json(),
            "kept": self.settings,
            "limits": self.limits,
            "lower_case": self.lower_case,
        })
    }

    /// Reads what [`ColbertConfig::to_json`] gives.
    ///
    /// # Errors
    /// A sentence that names the field.
    pub fn from_json(json: &Value) -> Result<ColbertConfig, String> {
        let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let transformer = json["transformer"].as_str().unwrap_or_default().to_owned();
        let mut config = ColbertConfig { transformer, ..ColbertConfig::default() };
        for layer in json["dense"].as_array().into_iter().flatten() {
            let folder = layer["folder"].as_str().unwrap_or_default();
            config.dense.push(DenseLayer::from_json(folder, &object(&layer["config"]))?);
        }
        config.take_settings(object(&json["settings"]))?;
        config.settings = object(&json["kept"]);
        config.limits = object(&json["limits"]);
        config.lower_case = json["lower_case"] == true;
        Ok(config)
    }

    /// The prompt of a task, empty where there is none.
    pub fn prompt(&self, task: &str) -> &str {
        self.prompts.iter().find(|(name, _)| name == task).map_or("", |(_, text)| text)
    }

    /// Width of a token's vector behind an encoder of a width.
    pub fn dimension(&self, width: usize) -> usize {
        self.dense.last().map_or(width, |d| d.outputs)
    }

    /// Adds a projection without bias at the end, from `inputs`, in a folder of a name of its own.
    pub(super) fn project(&mut self, inputs: usize, outputs: usize) {
        let taken = |name: &String| self.dense.iter().any(|d| d.folder == *name);
        let first = (1..).map(|n| format!("{n}_Dense")).find(|name| !taken(name));
        let folder = first.expect("some number is free");
        self.dense.push(DenseLayer {
            folder,
            inputs,
            outputs,
            bias: false,
            activation: None,
            residual: false,
        });
    }
}

/// PyTorch's classes of activations.
const ACTIVATIONS: [(&str, Option<Activation>); 5] = [
    ("torch.nn.modules.linear.Identity", None),
    ("torch.nn.modules.activation.Tanh", Some(Activation::Tanh)),
    ("torch.nn.modules.activation.ReLU", Some(Activation::Relu)),
    ("torch.nn.modules.activation.GELU", Some(Activation::GeluErf)),
    ("torch.nn.modules.activation.SiLU", Some(Activation::Silu)),
];

fn dense(folder: &Path, part: &str) -> Result<DenseLayer, ModelError> {
    let path = folder.join(part).join("config.json");
    let json = read_json(&path)?;
    DenseLayer::from_json(part, &json).map_err(|what| bad(&path, what))
}

impl DenseLayer {
    /// Whether its residual has a matrix of its own.
    pub(super) fn has_residual_matrix(&self) -> bool {
        self.residual && self.inputs != self.outputs
    }
    /// Reads a layer's `config.json`.
    fn from_json(folder: &str, json: &Map<String, Value>) -> Result<DenseLayer, String> {
        let f = Fields(json);
        // sentence-transformers' own default.
        let name = f.text("activation_function", "torch.nn.modules.activation.Tanh")?;
        let class = |known: &str| known.rsplit('.').next() == name.rsplit('.').next();
        let known = ACTIVATIONS.iter().find(|(known, _)| class(known));
        let (_, activation) = known.ok_or_else(|| {
            format!("`activation_function`: expected Identity, Tanh, ReLU, GELU or SiLU of PyTorch, found {name:?}")
        })?;
        Ok(DenseLayer {
            folder: folder.to_owned(),
            inputs: f.size("in_features", None)?,
            outputs: f.size("out_features", None)?,
            bias: f.boolean("bias", true)?,
            activation: *activation,
            residual: f.boolean("use_residual", false)?,
        })
    }
    /// The layer's `config.json`.
    pub(super) fn to_json(&self) -> Map<String, Value> {
        let known = ACTIVATIONS.iter().find(|(_, activation)| *activation == self.activation);
        let mut json = Map::new();
        json.insert("in_features".into(), self.inputs.into());
        json.insert("out_features".into(), self.outputs.into());
        json.insert("bias".into(), self.bias.into());
        json.insert("activation_function".into(), known.map_or("", |(name, _)| name).into());
        json.insert("use_residual".into(), self.residual.into());
        json
    }
}

pub(super) fn bad(path: &Path, what: impl Into<String>) -> ModelError {
    ModelError::ConfigFile { path: path.to_owned(), what: what.into() }
}
