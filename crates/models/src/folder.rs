//! A model's folder: given as a path, or by its hub name and found in the local Hugging Face cache.
//!
//! With the cargo feature `hub` a model that is not in the cache is downloaded into it, in the layout that Hugging Face's
//! own tools use, so either side finds what the other fetched.

use std::path::{Path, PathBuf};

use crate::weights::{Result, WeightsError, WeightsReader};

/// Files that can hold the weights, in the order in which they are looked for.
pub const WEIGHT_FILES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// A folder with at least `config.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFolder {
    path: PathBuf,
}

impl ModelFolder {
    /// Finds a model: `name` is a folder, or a hub name such as `t5-base` or `google/flan-t5-small`. A folder wins.
    ///
    /// # Errors
    /// Neither is there; the message says what was looked for, where, and how to get it.
    pub fn open(name: &str) -> Result<Self> {
        Self::open_with(name, &hub_cache(|variable| std::env::var_os(variable).map(PathBuf::from)))
    }

    /// [`Self::open`] with the folder of the hub cache given.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(name: &str, cache: &Path) -> Result<Self> {
        let path = Path::new(name);
        if path.is_dir() {
            if !path.join("config.json").is_file() {
                return Err(WeightsError::Folder(format!(
                    "the folder {name} has no config.json; expected a model as Hugging Face tools save it: {EXPECTED}"
                )));
            }
            return Ok(Self { path: path.to_owned() });
        }
        if path.exists() {
            return Err(WeightsError::Folder(format!("{name} is a file; expected the folder that it is in")));
        }
        if !is_hub_name(name) {
            return Err(WeightsError::Folder(format!(
                "there is no folder `{name}`, and it is not a hub name such as t5-base or google/flan-t5-small"
            )));
        }
        let cached = snapshot(name, cache);
        match cached {
            Ok(folder) if folder.weights_path().is_ok() => Ok(folder),
            cached => fetch(name, cache, cached),
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of a file of the folder, where it is there.
    pub fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.path.join(name)).filter(|path| path.is_file())
    }

    /// Path of `config.json`.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.json")
    }

    /// The first of [`WEIGHT_FILES`] that is there.
    ///
    /// # Errors
    /// None of them is.
    pub fn weights_path(&self) -> Result<PathBuf> {
        WEIGHT_FILES.iter().find_map(|name| self.file(name)).ok_or_else(|| {
            WeightsError::Folder(format!(
                "the folder {} has no weights; expected one of {}",
                self.path.display(),
                WEIGHT_FILES.join(", ")
            ))
        })
    }

    /// Opens the weights; only headers are read.
    ///
    /// # Errors
    /// There are none, or they cannot be read; see [`WeightsReader::open`].
    pub fn weights(&self) -> Result<WeightsReader> {
        WeightsReader::open(&self.weights_path()?)
    }
}

const EXPECTED: &str =
    "config.json, model.safetensors (or pytorch_model.bin), and tokenizer.json or spiece.model";

/// The hub cache that Hugging Face's tools would use, from their environment variables.
fn hub_cache(variable: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let variable = |name| variable(name).filter(|path| !path.as_os_str().is_empty());
    if let Some(cache) = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")) {
        return cache;
    }
    let home = variable("HF_HOME").unwrap_or_else(|| {
        let base = variable("XDG_CACHE_HOME");
        base.unwrap_or_else(|| variable("HOME").unwrap_or_default().join(".cache")).join("huggingface")
    });
    home.join("hub")
}

/// `name` or `organisation/name`, of the characters that the hub allows.
fn is_hub_name(name: &str) -> bool {
    let part = |part: &str| {
        part.len() <= 96
            && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
            && !part.contains("..")
            && !part.contains("--")
    };
    name.split('/').count() <= 2 && name.split('/').all(part)
}

/// Finds `CACHE/models--ORG--NAME/snapshots/REVISION` of the revision in `refs/main`. The error is a sentence's end.
fn snapshot(name: &str, cache: &Path) -> std::result::Result<ModelFolder, String> {
    let model = cache.join(format!("models--{}", name.replace('/', "--")));
    if !model.is_dir() {
        return Err(format!("there is no {}", model.display()));
    }
    let reference = model.join("refs/main");
    let revision =
        std::fs::read_to_string(&reference).map_err(|e| format!("{}: {e}", reference.display()))?;
    let revision = revision.trim();
    if revision.is_empty() || !revision.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(format!("{} does not hold a revision", reference.display()));
    }
    let path = model.join("snapshots").join(revision);
    if !path.join("config.json").is_file() {
        return Err(format!("{} has no config.json", path.display()));
    }
    Ok(ModelFolder { path })
}

/// What is missing in the cache, and the ways to get it.
fn missing(name: &str, cache: &Path, cached: &std::result::Result<ModelFolder, String>) -> String {
    let found = match cached {
        Ok(folder) => format!("{} has no weights", folder.path.display()),
        Err(found) => found.clone(),
    };
    format!(
        "`{name}` is neither a folder here nor a complete model in the Hugging Face cache {}: {found}",
        cache.display()
    )
}

#[cfg(not(feature = "hub"))]
fn fetch(name: &str, cache: &Path, cached: std::result::Result<ModelFolder, String>) -> Result<ModelFolder> {
    Err(WeightsError::Folder(format!(
        "{}; give the path of a folder with {EXPECTED}, or fetch it with `hf download {name}`, or build with \
         `--features hub`, which downloads it",
        missing(name, cache, &cached)
    )))
}

/// Downloads what is missing: configuration, tokenizer, and the first kind of weights that the model has.
#[cfg(feature = "hub")]
fn fetch(name: &str, cache: &Path, cached: std::result::Result<ModelFolder, String>) -> Result<ModelFolder> {
    let absent = missing(name, cache, &cached);
    let error = |what: String| WeightsError::Folder(format!("{absent}; {what}"));
    if std::env::var_os("HF_HUB_OFFLINE").is_some_and(|v| !v.is_empty() && v != "0") {
        return Err(error("HF_HUB_OFFLINE is set, so it was not downloaded".to_owned()));
    }
    let failed = |e: hf_hub::api::sync::ApiError| error(format!("the download failed: {e}"));
    let mut builder = hf_hub::api::sync::ApiBuilder::from_cache(hf_hub::Cache::new(cache.to_owned()));
    if let Ok(endpoint) = std::env::var("HF_ENDPOINT") {
        builder = builder.with_endpoint(endpoint);
    }
    let model = builder.build().map_err(failed)?.model(name.to_owned());
    let there: Vec<String> =
        model.info().map_err(failed)?.siblings.into_iter().map(|file| file.rfilename).collect();
    let has = |file: &str| there.iter().any(|t| t == file);
    let Some(weights) = WEIGHT_FILES.into_iter().find(|file| has(file)) else {
        return Err(error(format!("on the hub it has none of {} either", WEIGHT_FILES.join(", "))));
    };
    for file in TOKENIZER_FILES.into_iter().filter(|file| has(file)) {
        model.get(file).map_err(failed)?;
    }
    let sentence = has("modules.json");
    for file in there.iter().filter(|file| sentence && is_sentence_file(file)) {
        model.get(file).map_err(failed)?;
    }
    let path = model.get(weights).map_err(failed)?;
    if weights.ends_with(".index.json") {
        let shards = crate::weights::shards(&path)?;
        for shard in shards {
            model.get(&shard).map_err(failed)?;
        }
    }
    // Last, so that an interrupted download is not taken for a complete model.
    model.get("config.json").map_err(failed)?;
    snapshot(name, cache).map_err(error)
}

#[cfg(feature = "hub")]
const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
];

/// Files of sentence-transformers: the list of modules, limits of texts (`sentence_roberta_config.json`; the name goes by the
/// model), and the settings, tokenizer and weights in a module's folder such as `0_Transformer`, `1_Pooling` or `2_Dense`.
#[cfg(feature = "hub")]
fn is_sentence_file(name: &str) -> bool {
    let limits = |file: &str| file.starts_with("sentence_") && file.ends_with("_config.json");
    let Some((folder, file)) = name.split_once('/') else {
        return name == "modules.json" || name == "config_sentence_transformers.json" || limits(name);
    };
    let numbered =
        folder.split_once('_').is_some_and(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let read = file == "config.json" || WEIGHT_FILES.contains(&file) || TOKENIZER_FILES.contains(&file);
    numbered && (read || limits(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn cache_with(name: &str, files: &[&str]) -> tempfile::TempDir {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join(name);
        let snapshot = model.join("snapshots/0123abc");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::write(model.join("refs/main"), "0123abc").unwrap();
        for file in files {
            fs::write(snapshot.join(file), "{}").unwrap();
        }
        cache
    }

    #[test]
    fn hub_names_resolve_in_the_cache() {
        let cache = cache_with(
            "models--google--flan-t5-small",
            &["config.json", "pytorch_model.bin", "model.safetensors"],
        );
        let folder = ModelFolder::open_with("google/flan-t5-small", cache.path()).unwrap();
        assert!(folder.path().ends_with("models--google--flan-t5-small/snapshots/0123abc"));
        assert_eq!(folder.weights_path().unwrap(), folder.path().join("model.safetensors"));
        assert_eq!(folder.file("spiece.model"), None);
        let cache = cache_with("models--t5-base", &["config.json", "pytorch_model.bin"]);
        let folder = ModelFolder::open_with("t5-base", cache.path()).unwrap();
        assert!(folder.weights_path().unwrap().ends_with("pytorch_model.bin"));
    }

    #[cfg(not(feature = "hub"))]
    #[test]
    fn a_missing_model_says_where_it_was_looked_for() {
        let cache = cache_with("models--t5-base", &["config.json"]);
        let error = |name: &str| ModelFolder::open_with(name, cache.path()).unwrap_err().to_string();
        let place = cache.path().display().to_string();
        let unknown = error("t5-huge");
        assert!(
            unknown.contains(&place)
                && unknown.contains("models--t5-huge")
                && unknown.contains("--features hub")
        );
        assert!(error("t5-base").contains("has no weights"));
        fs::write(cache.path().join("models--t5-base/refs/main"), "../../..").unwrap();
        assert!(error("t5-base").contains("does not hold a revision"));
        assert!(error("./nowhere").contains("not a hub name"));
        assert!(error("a/b/c").contains("not a hub name"));
        assert!(error("..").contains("has no config.json"));
    }

    #[cfg(feature = "hub")]
    #[test]
    fn files_of_sentence_transformers_are_known_by_their_names() {
        for fetched in [
            "modules.json",
            "config_sentence_transformers.json",
            "sentence_bert_config.json",
            "sentence_xlm-roberta_config.json",
            "0_Transformer/sentence_distilbert_config.json",
            "0_Transformer/tokenizer.json",
            "0_Transformer/vocab.txt",
            "0_Transformer/config.json",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
        ] {
            assert!(is_sentence_file(fetched), "{fetched}");
        }
        for other in [
            "README.md",
            "onnx/config.json",
            "onnx/model.onnx",
            "0_Transformer/rust_model.ot",
            "_x/config.json",
        ] {
            assert!(!is_sentence_file(other), "{other}");
        }
    }

    #[test]
    fn a_folder_needs_its_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().to_str().unwrap();
        assert!(ModelFolder::open(name).unwrap_err().to_string().contains("has no config.json"));
        let config = folder.path().join("config.json");
        fs::write(&config, "{}").unwrap();
        let opened = ModelFolder::open(name).unwrap();
        assert_eq!(opened.config_path(), config);
        assert!(opened.weights().unwrap_err().to_string().contains("has no weights"));
        assert!(ModelFolder::open(config.to_str().unwrap()).unwrap_err().to_string().contains("is a file"));
    }

    #[test]
    fn the_cache_is_where_hugging_face_tools_have_it() {
        let with = |set: &[(&str, &str)]| {
            hub_cache(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v)))
        };
        assert_eq!(with(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(with(&[("HF_HOME", "/f"), ("HOME", "/h")]), Path::new("/f/hub"));
        assert_eq!(with(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")]), Path::new("/c"));
        assert_eq!(with(&[("HF_HUB_CACHE", ""), ("HF_HOME", "/f")]), Path::new("/f/hub"));
    }
}
