//! A running average of the parameters, which often generalises better than the last ones (Polyak and Juditsky, 1992): rank 0 keeps it beside
//! them, a checkpoint has it, and at the end of a run it is a model of its own.

use std::path::Path;

use tercio_engine::{Arena, Device, Layout};
use tercio_models::weights::{WeightsReader, save_safetensors};

use crate::error::TrainError;
use crate::objective::Objective;
use crate::optimizer::scaled_sum;
use crate::run::{RunError, replace_folder};

/// File of the average in a checkpoint.
pub const AVERAGE: &str = "average.safetensors";
/// Folder of the average as a model, in the run's folder.
pub const AVERAGE_MODEL: &str = "average-model";

/// The average of a run under way.
pub struct Average<D: Device> {
    values: Arena<D>,
    decay: f64,
}

impl<D: Device> Average<D> {
    /// At the start of a run: the parameters themselves.
    pub fn start(device: &D, decay: f64, parameters: &Arena<D>) -> Self {
        let mut values = Arena::of_len(device, parameters.len());
        device.copy(values.all_mut(), parameters.all());
        Average { values, decay }
    }

    /// That of a checkpoint.
    ///
    /// # Errors
    /// A file that is not there, or is of other parameters.
    pub fn read(device: &D, decay: f64, layout: &Layout, checkpoint: &Path) -> Result<Self, TrainError> {
        let file = WeightsReader::open(&checkpoint.join(AVERAGE))?;
        let mut values = Arena::zeros(device, layout);
        for spec in layout.specs() {
            let read = file.read(&spec.name)?;
            if read.len() != spec.place.len() {
                let (found, name) = (read.len(), &spec.name);
                return Err(TrainError::Unusable(format!(
                    "{}: the average of `{name}` has {found} values, the parameter has {}",
                    checkpoint.display(),
                    spec.place.len()
                )));
            }
            device.write(values.view_mut(spec.place), &read);
        }
        Ok(Average { values, decay })
    }

    /// Takes in the parameters after update `step`: `average = d average + (1 - d) parameters`, `d` the decay, or less at the start,
    /// `(1 + step) / (10 + step)`, so that the initial values are soon forgotten (TensorFlow's `ExponentialMovingAverage`).
    pub fn update(&mut self, device: &D, parameters: &Arena<D>, step: u64) {
        let decay = self.decay.min((1.0 + step as f64) / (10.0 + step as f64));
        let whole = 0..parameters.len();
        scaled_sum(device, &mut self.values, decay, parameters, 1.0 - decay, whole);
    }

    /// Writes it into a checkpoint.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, device: &D, layout: &Layout, checkpoint: &Path) -> Result<(), TrainError> {
        let values: Vec<_> = layout.specs().iter().map(|s| device.host(self.values.view(s.place))).collect();
        let tensors = layout.specs().iter().zip(&values);
        let tensors = tensors.map(|(s, values)| (s.name.as_str(), s.shape.as_slice(), values.as_ref()));
        Ok(save_safetensors(&checkpoint.join(AVERAGE), tensors, &[])?)
    }

    /// Writes it as a model into the run's folder, in place of an earlier one.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save<O: Objective<D>>(&self, device: &D, objective: &O, run_dir: &Path) -> Result<(), TrainError> {
        let (target, new) = (run_dir.join(AVERAGE_MODEL), run_dir.join(format!(".{AVERAGE_MODEL}.tmp")));
        // What a process that died left behind.
        let _ = std::fs::remove_dir_all(&new);
        std::fs::create_dir(&new).map_err(|e| RunError::from_io("create", &new, None, e))?;
        objective.save(device, &self.values, &new)?;
        Ok(replace_folder(&new, &target)?)
    }
}
