//! The files of a sentence-transformers folder: `modules.json`, and each module's own configuration.
//!
//! Source: the folders that sentence-transformers 2 to 6 write. A module that is not known here is refused by its name: left out, it
//! would give other vectors without a word.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model_file::{ModelError, read_as};
use crate::retriever::Pooling;

/// Layers behind the pooling.
const MOST_DENSE: usize = 16;
/// No width of a model comes near it.
const MOST_WIDTH: u64 = 1 << 24;

/// What follows a dense layer's product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseActivation {
    /// Nothing.
    Identity,
    /// tanh
    Tanh,
}

/// A dense layer behind the pooling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseConfig {
    /// Its folder in the model's, such as `2_Dense`.
    pub folder: String,
    /// Width of its input.
    pub inputs: usize,
    /// Width of its output.
    pub outputs: usize,
    /// Whether a bias is added.
    pub bias: bool,
    /// What follows.
    pub activation: DenseActivation,
}

/// The modules of a folder.
#[derive(Clone, Debug, PartialEq)]
pub struct SentenceConfig {
    /// Folder of the transformer in the model's; empty: the model's own.
    pub transformer: String,
    /// Pooling.
    pub pooling: Pooling,
    /// Folder of the pooling's configuration.
    pub pooling_folder: String,
    /// Dense layers, in their order.
    pub dense: Vec<DenseConfig>,
    /// Whether the vectors are divided by their length.
    pub normalize: bool,
    /// Most tokens of a text, where the folder says it.
    pub max_seq_length: Option<usize>,
    /// Whether texts are made lower case before the tokenizer gets them.
    pub lower_case: bool,
    /// What is put before texts, by the name of the task (`query`, `document`), in the order of the file.
    pub prompts: Vec<(String, String)>,
    /// The prompt of texts for which none is named.
    pub default_prompt_name: Option<String>,
    /// The fields of the file of prompts, which are written back.
    pub settings: Map<String, Value>,
}

impl SentenceConfig {
    /// Pooling of an encoder's states, and nothing behind it.
    pub fn plain(pooling: Pooling) -> SentenceConfig {
        SentenceConfig {
            transformer: String::new(),
            pooling,
            pooling_folder: "1_Pooling".into(),
            dense: Vec::new(),
            normalize: false,
            max_seq_length: None,
            lower_case: false,
            prompts: Vec::new(),
            default_prompt_name: None,
            settings: Map::new(),
        }
    }

    /// What is put before texts: the prompt of this name, or without a name the default one, if there is one.
    ///
    /// # Errors
    /// A sentence that says which names there are.
    pub fn prompt(&self, name: Option<&str>) -> Result<&str, String> {
        let Some(name) = name.or(self.default_prompt_name.as_deref()) else { return Ok("") };
        match self.prompts.iter().find(|p| p.0 == name) {
            Some((_, text)) => Ok(text),
            None => {
                let names: Vec<&str> = self.prompts.iter().map(|p| p.0.as_str()).collect();
                Err(format!("there is no prompt {name:?}; expected one of {names:?}"))
            }
        }
    }

    /// Whether a folder is one of sentence-transformers.
    pub fn is_there(folder: &Path) -> bool {
        folder.join("modules.json").is_file()
    }

    /// Reads a folder that sentence-transformers wrote.
    ///
    /// # Errors
    /// A file that is missing, no JSON or of other fields; a module, pooling or activation that is not known here.
    pub fn read(folder: &Path) -> Result<SentenceConfig, ModelError> {
        let path = folder.join("modules.json");
        let modules = read_json(&path)?.ok_or_else(|| bad(&path, "expected this file, found none"))?;
        let Value::Array(modules) = modules else {
            return Err(bad(&path, "expected a list of modules"));
        };
        let mut config = SentenceConfig::plain(Pooling::Mean);
        for (n, module) in modules.iter().enumerate() {
            let kind = module["type"]
                .as_str()
                .ok_or_else(|| bad(&path, format!("module {n}: expected a `type`")))?;
            let part = part_of(module, n, &path)?;
            let name = kind.rsplit('.').next().unwrap_or(kind);
            let out_of_order = || {
                bad(
                    &path,
                    format!(
                        "module {n} is {kind:?}; expected Transformer, Pooling, any number of Dense, and at most one Normalize, in this order"
                    ),
                )
            };
            match name {
                "Transformer" if n == 0 => config.transformer(folder, part)?,
                "Pooling" if n == 1 => config.pooling(folder, part)?,
                "Dense" if n >= 2 && !config.normalize => config.dense(folder, part)?,
                "Normalize" if n >= 2 && !config.normalize => {
                    let path = folder.join(&part).join("config.json");
                    on_vectors(&read_json(&path)?.unwrap_or_default(), &path)?;
                    config.normalize = true;
                }
                "Transformer" | "Pooling" | "Dense" | "Normalize" => return Err(out_of_order()),
                _ => {
                    return Err(bad(
                        &path,
                        format!(
                            "module {n} is {kind:?}; expected Transformer, Pooling, Dense or Normalize: others are not known here"
                        ),
                    ));
                }
            }
        }
        if modules.len() < 2 {
            return Err(bad(
                &path,
                format!("expected a Transformer and a Pooling, found {} modules", modules.len()),
            ));
        }
        config.prompts(folder)?;
        Ok(config)
    }

    fn transformer(&mut self, folder: &Path, part: String) -> Result<(), ModelError> {
        let file = |family: &str| folder.join(&part).join(format!("sentence_{family}_config.json"));
        // Releases before 1.0 named the file after the family.
        let older = ["roberta", "distilbert", "xlm-roberta"].map(file).into_iter().find(|path| path.exists());
        let path = Some(file("bert")).filter(|path| path.exists() || older.is_none()).or(older);
        let path = path.expect("the first, or one of the others");
        self.transformer = part;
        let Some(json) = read_json(&path)? else { return Ok(()) };
        self.max_seq_length = match &json["max_seq_length"] {
            Value::Null => None,
            found => match found.as_u64().filter(|n| (1..MOST_WIDTH).contains(n)) {
                Some(n) => Some(n as usize),
                None => {
                    return Err(bad(
                        &path,
                        format!("`max_seq_length`: expected a positive number, found {found}"),
                    ));
                }
            },
        };
        self.lower_case = boolean(&json, "do_lower_case", false, &path)?;
        // What newer folders say of it, and the only thing that is known here.
        for (key, known) in
            [("transformer_task", "feature-extraction"), ("module_output_name", "token_embeddings")]
        {
            if !json[key].is_null() && json[key] != known {
                return Err(bad(
                    &path,
                    format!("`{key}`: expected {known:?}, found {}: others are not known here", json[key]),
                ));
            }
        }
        for key in ["query_length", "document_length", "query_expansion"] {
            if !json[key].is_null() {
                return Err(bad(
                    &path,
                    format!("`{key}` is set; expected an encoder of one vector a text, found one of many"),
                ));
            }
        }
        Ok(())
    }

    fn pooling(&mut self, folder: &Path, part: String) -> Result<(), ModelError> {
        let path = folder.join(&part).join("config.json");
        self.pooling_folder = part;
        let json =
            read_json(&path)?.ok_or_else(|| bad(&path, "expected the pooling's settings, found no file"))?;
        // Newer folders have one name, older ones a switch for each way.
        let mut ways: Vec<String> = match &json["pooling_mode"] {
            Value::Null => Vec::new(),
            Value::Array(ways) => {
                ways.iter().map(|way| way.as_str().unwrap_or_default().to_string()).collect()
            }
            way => vec![way.as_str().unwrap_or_default().to_string()],
        };
        for (key, value) in json.as_object().into_iter().flatten() {
            if let Some(way) = key.strip_prefix("pooling_mode_").filter(|_| *value == true) {
                ways.push(way.trim_end_matches("_tokens").trim_end_matches("_token").to_string());
            }
        }
        self.pooling = match ways.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["mean"] => Pooling::Mean,
            ["cls"] => Pooling::First,
            _ => {
                return Err(bad(
                    &path,
                    format!("expected pooling by mean or cls, found {ways:?}: others are not known here"),
                ));
            }
        };
        if !boolean(&json, "include_prompt", true, &path)? {
            return Err(bad(
                &path,
                "`include_prompt` is false; expected pooling over all tokens, those of the prompt too",
            ));
        }
        Ok(())
    }

    fn dense(&mut self, folder: &Path, part: String) -> Result<(), ModelError> {
        let path = folder.join(&part).join("config.json");
        let json =
            read_json(&path)?.ok_or_else(|| bad(&path, "expected the layer's settings, found no file"))?;
        let width = |key: &str| {
            let found = &json[key];
            let width = found.as_u64().filter(|n| (1..MOST_WIDTH).contains(n));
            width.map(|n| n as usize).ok_or_else(|| {
                bad(&path, format!("`{key}`: expected a positive number below 2^24, found {found}"))
            })
        };
        on_vectors(&json, &path)?;
        if boolean(&json, "use_residual", false, &path)? {
            return Err(bad(
                &path,
                "`use_residual` is true; expected a dense layer without: others are not known here",
            ));
        }
        let activation = &json["activation_function"];
        let layer = DenseConfig {
            folder: part,
            inputs: width("in_features")?,
            outputs: width("out_features")?,
            bias: boolean(&json, "bias", true, &path)?,
            activation: match activation.as_str().and_then(|name| name.rsplit('.').next()) {
                Some("Identity") => DenseActivation::Identity,
                Some("Tanh") => DenseActivation::Tanh,
                // sentence-transformers' own default
                None if activation.is_null() => DenseActivation::Tanh,
                _ => {
                    return Err(bad(
                        &path,
                        format!(
                            "`activation_function`: expected Identity or Tanh of PyTorch, found {activation}: others are not known here"
                        ),
                    ));
                }
            },
        };
        if self.dense.len() == MOST_DENSE {
            return Err(bad(&path, format!("expected at most {MOST_DENSE} dense layers")));
        }
        self.dense.push(layer);
        Ok(())
    }

    fn prompts(&mut self, folder: &Path) -> Result<(), ModelError> {
        let path = folder.join("config_sentence_transformers.json");
        let Some(json) = read_json(&path)? else { return Ok(()) };
        let prompts = match &json["prompts"] {
            Value::Null => Map::new(),
            Value::Object(prompts) => prompts.clone(),
            found => {
                return Err(bad(&path, format!("`prompts`: expected an object of texts, found {found}")));
            }
        };
        for (name, text) in prompts {
            let text = text
                .as_str()
                .ok_or_else(|| bad(&path, format!("prompt {name:?}: expected a text, found {text}")))?;
            self.prompts.push((name, text.to_string()));
        }
        self.default_prompt_name = match &json["default_prompt_name"] {
            Value::Null => None,
            Value::String(name) => Some(name.clone()),
            found => {
                return Err(bad(&path, format!("`default_prompt_name`: expected a name, found {found}")));
            }
        };
        self.prompt(None).map_err(|what| bad(&path, format!("`default_prompt_name`: {what}")))?;
        if let Value::Object(settings) = json {
            self.settings = settings;
        }
        Ok(())
    }
}

/// A module's folder: one name below the model's folder, or none.
fn part_of(module: &Value, n: usize, path: &Path) -> Result<String, ModelError> {
    let part = match &module["path"] {
        Value::Null => "",
        found => found
            .as_str()
            .ok_or_else(|| bad(path, format!("module {n}: expected a name as `path`, found {found}")))?,
    };
    if part.contains(['/', '\\', '\0']) || part == "." || part == ".." {
        return Err(bad(
            path,
            format!("module {n}: expected the name of a folder beside this file, found {part:?}"),
        ));
    }
    Ok(part.to_string())
}

/// Checks that a module works on the vectors of texts, not on tokens.
fn on_vectors(json: &Value, path: &Path) -> Result<(), ModelError> {
    for key in ["module_input_name", "module_output_name"] {
        if !json[key].is_null() && json[key] != "sentence_embedding" {
            return Err(bad(
                path,
                format!(
                    "`{key}`: expected \"sentence_embedding\", found {}: others are not known here",
                    json[key]
                ),
            ));
        }
    }
    Ok(())
}

fn boolean(json: &Value, key: &str, default: bool, path: &Path) -> Result<bool, ModelError> {
    match &json[key] {
        Value::Null => Ok(default),
        Value::Bool(value) => Ok(*value),
        found => Err(bad(path, format!("`{key}`: expected true or false, found {found}"))),
    }
}

pub(super) fn bad(path: &Path, what: impl Into<String>) -> ModelError {
    ModelError::ConfigFile { path: path.to_owned(), what: what.into() }
}

/// What a JSON file holds, if it is there.
fn read_json(path: &Path) -> Result<Option<Value>, ModelError> {
    if path.exists() { read_as(path, "JSON").map(Some) } else { Ok(None) }
}
