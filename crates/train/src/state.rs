//! The training state in a checkpoint: the model as its own folder, the optimizer's moments beside it, and the loop's counters.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_engine::{Arena, Device, Layout};
use tercio_models::weights::{SafetensorsWriter, WeightsReader};

use crate::error::TrainError;
use crate::objective::Objective;
use crate::optimizer::moments;
use crate::options::Optim;
use crate::ranks::RankDevice;
use crate::ranks::parts::Parts;
use crate::schedule::Plateau;
use crate::step::TrainState;

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
    /// Sum of the losses of all inputs since the last evaluation.
    #[serde(default)]
    pub input_loss: f64,
    /// Those inputs.
    #[serde(default)]
    pub inputs: u64,
    /// Where annealing on a plateau stands.
    #[serde(default)]
    pub plateau: Plateau,
}

impl Counters {
    /// Begins the search for the best evaluation anew: the next ones are of another measure. The rate that a plateau has left stays.
    pub fn forget_scores(&mut self) {
        (self.best, self.without_gain) = (None, 0);
        self.plateau.forget_scores();
    }
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

/// Bytes that a checkpoint of these parameters takes at most: values and moments, a tokenizer and headers.
pub fn checkpoint_bytes(optim: Optim, layout: &Layout) -> u64 {
    let kept: usize = moments(optim, layout).iter().map(Layout::len).sum();
    (layout.len() + kept) as u64 * 4 + (4 << 20)
}

/// Writes model and moments into a folder, on rank 0; the other ranks hand over their parts of the moments
/// ([`give_moments`]).
///
/// # Errors
/// A file that cannot be written; a rank was lost.
pub fn save<D: RankDevice, O: Objective<D>>(
    world: &World,
    parts: &Parts,
    device: &D,
    objective: &O,
    optim: Optim,
    state: &TrainState<D>,
    folder: &Path,
) -> Result<(), TrainError> {
    objective.save(device, &state.parameters, folder)?;
    let layouts = moments(optim, objective.layout());
    let specs = layouts.iter().flat_map(Layout::specs);
    let heads = specs.map(|spec| (spec.name.as_str(), spec.shape.as_slice()));
    let mut out = SafetensorsWriter::create(&folder.join(MOMENTS), heads, &[])?;
    // The specs lie one after the other in the arena, so its order is that of the file.
    for moments in [&state.first, &state.second] {
        parts.gather(world, device, moments, &mut |values| Ok(out.append(values)?))?;
    }
    Ok(out.finish()?)
}

/// This rank's part in a [`save`] by rank 0.
///
/// # Errors
/// A rank was lost, or rank 0 failed.
pub fn give_moments<D: RankDevice>(
    world: &World,
    parts: &Parts,
    device: &D,
    state: &TrainState<D>,
) -> Result<(), TrainError> {
    for moments in [&state.first, &state.second] {
        parts.gather(world, device, moments, &mut |_| Ok(()))?;
    }
    Ok(())
}

/// Reads the optimizer's moments back.
pub fn load_moments<D: Device>(
    device: &D,
    optim: Optim,
    layout: &Layout,
    folder: &Path,
) -> Result<[Arena<D>; 2], TrainError> {
    let reader = WeightsReader::open(&folder.join(MOMENTS))?;
    let read = |layout: &Layout| -> Result<Arena<D>, TrainError> {
        let mut arena = Arena::zeros(device, layout);
        for spec in layout.specs() {
            let values = reader.read(&spec.name)?;
            if values.len() != spec.place.len() {
                return Err(TrainError::Unusable(format!(
                    "{}: the optimizer's `{}` has {} values, the parameter needs {}",
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
    let [first, second] = moments(optim, layout);
    Ok([read(&first)?, read(&second)?])
}
