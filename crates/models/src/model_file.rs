//! What every model's folder has in common: a `config.json`, and tensors that must be those of a layout.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tercio_engine::{Arena, Device, ParamSpec};

use crate::t5::ConfigError;
use crate::weights::{DataFile, WeightsError, WeightsReader, save_safetensors};

/// No configuration comes near this many bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// Why a model could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The configuration of a T5.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The configuration file is no JSON object, is that of no model known here, or cannot be written.
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
    #[error("{}: tensor `{name}` belongs to no part of a {kind} model of this configuration", path.display())]
    Unknown {
        /// The model folder.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Name of the architecture.
        kind: &'static str,
    },
}

/// Reads a `config.json`.
///
/// # Errors
/// A file that cannot be read, is too long, or is no JSON object.
pub fn read_json(path: &Path) -> Result<Map<String, Value>, ModelError> {
    read_as(path, "a JSON object")
}

/// Reads a file of settings; `expected` says what it holds.
///
/// # Errors
/// A file that cannot be read, is too long, or holds something else.
pub(crate) fn read_as<T: DeserializeOwned>(path: &Path, expected: &str) -> Result<T, ModelError> {
    let wrong = |what: String| ModelError::ConfigFile { path: path.to_owned(), what };
    let file = DataFile::open(path)?;
    if file.len > MAX_CONFIG {
        return Err(wrong(format!("expected at most {MAX_CONFIG} bytes of JSON, found {}", file.len)));
    }
    serde_json::from_slice(&file.head(MAX_CONFIG)?).map_err(|e| wrong(format!("expected {expected}: {e}")))
}

/// Writes a JSON file of a model folder.
pub(crate) fn write_json(path: PathBuf, json: impl Into<Value>) -> Result<(), ModelError> {
    let text = serde_json::to_string_pretty(&json.into()).expect("JSON of numbers and strings") + "\n";
    std::fs::write(&path, text)
        .map_err(|e| ModelError::ConfigFile { path, what: format!("cannot write it: {e}") })
}

/// Compares names and shapes of all tensors with parameters; `also` are names of tensors that are none.
pub(crate) fn check_tensors(
    folder: &Path,
    weights: &WeightsReader,
    specs: &[ParamSpec],
    also: &[&str],
    kind: &'static str,
) -> Result<(), ModelError> {
    let path = || folder.to_owned();
    let mut known: BTreeSet<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    known.extend(also);
    if let Some(name) = weights.names().find(|n| !known.contains(n)) {
        return Err(ModelError::Unknown { path: path(), name: name.to_owned(), kind });
    }
    for spec in specs {
        let found = weights.shape(&spec.name)?;
        if found != spec.shape {
            let (name, found, expected) = (spec.name.clone(), found.to_vec(), spec.shape.clone());
            return Err(ModelError::Shape { path: path(), name, found, expected });
        }
    }
    Ok(())
}

/// A tensor's numbers, all of them finite.
pub(crate) fn read_finite(
    folder: &Path,
    weights: &WeightsReader,
    name: &str,
) -> Result<Vec<f32>, ModelError> {
    let values = weights.read(name)?;
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(at) => {
            let (path, name) = (folder.to_owned(), name.to_owned());
            Err(ModelError::NotFinite { path, name, at, value: values[at] })
        }
    }
}

/// Reads the values of parameters, from tensors that [`check_tensors`] found to fit.
pub(crate) fn read_parameters<D: Device>(
    folder: &Path,
    weights: &WeightsReader,
    specs: &[ParamSpec],
    device: &D,
    parameters: &mut Arena<D>,
) -> Result<(), ModelError> {
    for spec in specs {
        let values = read_finite(folder, weights, &spec.name)?;
        device.write(parameters.view_mut(spec.place), &values);
    }
    Ok(())
}

/// A tensor of a model that is no parameter: it is kept as it was read and written back.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptTensor {
    /// Its name among the parameters' names.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its numbers, row-major.
    pub values: Vec<f32>,
}

/// Writes `model.safetensors`: the parameters and the kept tensors, each by the name that `name` gives it.
pub(crate) fn save_parameters<D: Device>(
    folder: &Path,
    specs: &[ParamSpec],
    parameters: &Arena<D>,
    kept: &[KeptTensor],
    name: impl Fn(&str) -> String,
    device: &D,
) -> Result<(), ModelError> {
    let values: Vec<_> = specs.iter().map(|s| device.host(parameters.view(s.place))).collect();
    let names: Vec<String> =
        specs.iter().map(|s| &s.name).chain(kept.iter().map(|k| &k.name)).map(|n| name(n)).collect();
    let own = specs.iter().zip(&values).map(|(s, v)| (s.shape.as_slice(), v.as_ref()));
    let all = own.chain(kept.iter().map(|k| (k.shape.as_slice(), k.values.as_slice())));
    let tensors = names.iter().zip(all).map(|(name, (shape, values))| (name.as_str(), shape, values));
    save_safetensors(&folder.join("model.safetensors"), tensors, &[("format", "pt")])?;
    Ok(())
}
