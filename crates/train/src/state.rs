//! The training state in a checkpoint: the model as its own folder, Adam's moments beside it, and the loop's counters.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_engine::{Arena, Device, Layout};
use tercio_models::weights::{WeightsReader, save_safetensors};

use crate::error::TrainError;
use crate::objective::Objective;

/// File of the moments in a checkpoint.
pub const MOMENTS: &str = "optimizer.safetensors";

/// The best evaluation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Updates done then.
    pub step: u64,
    /// Its score.
    pub score: f64,
}

/// What the loop counts, stored so that a run that goes on writes the same log as one that never stopped.
/// No times: two runs of the same bits have the same counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// The best evaluation.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub without_gain: u64,
    /// Sum of the losses since the last line of the log.
    pub loss_sum: f64,
    /// Updates since the last line of the log.
    pub loss_updates: u64,
    /// Whether an evaluation of this step was interrupted: the run that goes on makes up for it.
    #[serde(default)]
    pub evaluation_due: bool,
}

/// The `state` of a checkpoint's manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredState {
    /// The counters.
    pub counters: Counters,
    /// Fingerprints of the data.
    pub data: Map<String, Value>,
    /// What the bits depend on beside configuration and data.
    pub arithmetic: String,
}

/// Bytes that a checkpoint of these parameters takes at most: values and two moments, a tokenizer and headers.
pub fn checkpoint_bytes(layout: &Layout) -> u64 {
    layout.len() as u64 * 12 + (4 << 20)
}

/// Writes model and moments into a folder.
pub fn save<D: Device, O: Objective<D>>(
    device: &D,
    objective: &O,
    parameters: &Arena<D>,
    moments: (&Arena<D>, &Arena<D>),
    folder: &Path,
) -> Result<(), TrainError> {
    objective.save(device, parameters, folder)?;
    let mut names = Vec::new();
    for (prefix, arena) in [("first", moments.0), ("second", moments.1)] {
        for spec in objective.layout().specs() {
            names.push((format!("{prefix}.{}", spec.name), spec, device.host(arena.view(spec.place))));
        }
    }
    let tensors = names.iter().map(|(name, spec, v)| (name.as_str(), spec.shape.as_slice(), v.as_ref()));
    save_safetensors(&folder.join(MOMENTS), tensors, &[])?;
    Ok(())
}

/// Reads Adam's moments back.
pub fn load_moments<D: Device>(
    device: &D,
    layout: &Layout,
    folder: &Path,
) -> Result<(Arena<D>, Arena<D>), TrainError> {
    let reader = WeightsReader::open(&folder.join(MOMENTS))?;
    let read = |prefix: &str| -> Result<Arena<D>, TrainError> {
        let mut arena = Arena::zeros(device, layout);
        for spec in layout.specs() {
            let values = reader.read(&format!("{prefix}.{}", spec.name))?;
            if values.len() != spec.place.len() {
                return Err(TrainError::Unusable(format!(
                    "{}: the moments of `{}` have {} values, the parameter {}",
                    folder.display(),
                    spec.name,
                    values.len(),
                    spec.place.len()
                )));
            }
            device.write(arena.view_mut(spec.place), &values);
        }
        Ok(arena)
    };
    Ok((read("first")?, read("second")?))
}
