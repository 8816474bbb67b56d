//! What an optimizer keeps beside the parameters, and its step over the arenas.
//!
//! Adam keeps two moments of every element. Adafactor (Shazeer and Stern, 2018) keeps, of a matrix, one value a row and one a
//! column, and of a vector one an element: next to nothing, but no rank can step a part of a matrix by itself. SGD keeps nothing.

use std::ops::Range;

use tercio_engine::{AdafactorStep, AdamStep, Arena, Device, Layout, Tensor};

use crate::error::TrainError;
use crate::options::{Optim, OptimOptions};
use crate::ranks::parts::Parts;
use crate::schedule::learning_rate;
use crate::step::TrainState;

/// Adafactor's constants: added to squares of gradients, and the least size of a parameter that a rate is scaled by.
const ADAFACTOR_EPS: (f64, f64) = (1e-30, 1e-3);
/// Elements of a sum of arenas at a time: a part of the source is copied, for the source is not to change.
const SUM_BLOCK: usize = 1 << 20;

/// Names and shapes of the two arenas of moments, [`TrainState::first`] and [`TrainState::second`], as a checkpoint has them.
pub fn moments(optim: Optim, parameters: &Layout) -> [Layout; 2] {
    let (mut first, mut second) = (Layout::default(), Layout::default());
    for spec in parameters.specs() {
        let name = &spec.name;
        match (optim, spec.shape.as_slice()) {
            (Optim::Sgd, _) => {}
            (Optim::Adam | Optim::Adamw, shape) => {
                first.add(format!("first.{name}"), shape);
                second.add(format!("second.{name}"), shape);
            }
            (Optim::Adafactor, &[rows, columns]) => {
                second.add(format!("row.{name}"), &[rows]);
                second.add(format!("column.{name}"), &[columns]);
            }
            (Optim::Adafactor, shape) => {
                second.add(format!("second.{name}"), shape);
            }
        }
    }
    [first, second]
}

/// Arenas of zeros for [`moments`]; of a rank's part of them where the ranks share them out.
pub fn no_moments<D: Device>(
    device: &D,
    optim: Optim,
    parameters: &Layout,
    parts: Option<&Parts>,
) -> [Arena<D>; 2] {
    moments(optim, parameters).map(|whole| {
        let own = parts.filter(|p| p.is_split()).map(Parts::moments);
        Arena::of_len(device, own.unwrap_or(whole.len()))
    })
}

/// Entries of `--no_decay`.
fn exempt(o: &OptimOptions) -> impl Iterator<Item = &str> {
    o.no_decay.split(',').map(str::trim).filter(|entry| !entry.is_empty())
}

/// Refuses an entry of `--no_decay` that no parameter's name has.
///
/// # Errors
/// The entry, and a few names.
pub fn check_names(o: &OptimOptions, parameters: &Layout) -> Result<(), TrainError> {
    let specs = parameters.specs();
    match exempt(o).find(|entry| !specs.iter().any(|s| s.name.contains(entry))) {
        Some(entry) => {
            let few: Vec<&str> = specs.iter().skip(1).step_by(3).take(3).map(|s| s.name.as_str()).collect();
            Err(TrainError::Options(format!(
                "--no_decay {entry}: expected a part of a parameter's name, found it in none; names are like {}",
                few.join(", ")
            )))
        }
        None => Ok(()),
    }
}

/// Takes the steps of one run.
pub struct Optimizer {
    options: OptimOptions,
    /// What the schedule's rate is multiplied by.
    pub rate_factor: f64,
    /// Parameters that lie together and are treated alike: where, and their weight decay.
    runs: Vec<(Range<usize>, f64)>,
    /// Of Adafactor: each parameter, its columns if it is a matrix, its statistics and its weight decay.
    factored: Vec<(Range<usize>, Option<usize>, Range<usize>, f64)>,
}

impl Optimizer {
    /// The optimizer of these settings for these parameters.
    pub fn new(options: &OptimOptions, parameters: &Layout) -> Self {
        let (mut runs, mut factored): (Vec<(Range<usize>, f64)>, Vec<_>) = (Vec::new(), Vec::new());
        let mut statistics = 0;
        for spec in parameters.specs() {
            let place = spec.place.start..spec.place.start + spec.place.len();
            let decays = options.optim != Optim::Adam && !exempt(options).any(|e| spec.name.contains(e));
            let decay = if decays { options.weight_decay } else { 0.0 };
            match runs.last_mut() {
                Some((run, of_run)) if run.end == place.start && *of_run == decay => run.end = place.end,
                _ => runs.push((place.clone(), decay)),
            }
            if options.optim == Optim::Adafactor {
                let columns = (spec.shape.len() == 2).then_some(spec.place.columns);
                let len = columns.map_or(place.len(), |columns| spec.place.rows + columns);
                factored.push((place, columns, statistics..statistics + len, decay));
                statistics += len;
            }
        }
        Optimizer { options: options.clone(), rate_factor: 1.0, runs, factored }
    }
    /// Clips by the global `norm` and takes the step of update `state.step + 1` on this rank's parts; returns the learning
    /// rate.
    pub fn apply<D: Device>(
        &self,
        device: &D,
        parts: &Parts,
        state: &mut TrainState<D>,
        gradients: &Arena<D>,
        norm: f64,
    ) -> f64 {
        let o = &self.options;
        let lr = learning_rate(o, state.step) * self.rate_factor;
        let gradient_scale = if o.clip > 0.0 { (o.clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let step = state.step + 1;
        let (p, m, v) = (&mut state.parameters, &mut state.first, &mut state.second);
        for (place, columns, statistics, weight_decay) in &self.factored {
            let step = AdafactorStep {
                lr,
                eps: ADAFACTOR_EPS.0,
                parameter_eps: o.scale_parameter.then_some(ADAFACTOR_EPS.1),
                clip_threshold: o.clip_threshold,
                decay_rate: o.decay_rate,
                weight_decay: *weight_decay,
                step,
                gradient_scale,
            };
            let (p, v) = (p.range_mut(place.clone()), v.range_mut(statistics.clone()));
            device.adafactor(p, gradients.range(place.clone()), *columns, v, step);
        }
        if !self.factored.is_empty() {
            return lr;
        }
        for (part, at) in parts.own() {
            for (run, weight_decay) in &self.runs {
                let both = part.start.max(run.start)..part.end.min(run.end);
                if both.is_empty() {
                    continue;
                }
                if o.optim == Optim::Sgd {
                    scaled_sum(device, p, 1.0 - lr * weight_decay, gradients, -lr * gradient_scale, both);
                    continue;
                }
                let from = at + both.start - part.start;
                let moments = from..from + both.len();
                let (m, v) = (m.range_mut(moments.clone()), v.range_mut(moments));
                let (beta1, beta2, eps, weight_decay) = (0.9, 0.999, 1e-8, *weight_decay);
                let step = AdamStep { lr, beta1, beta2, eps, weight_decay, step, gradient_scale };
                device.adam(p.range_mut(both.clone()), gradients.range(both), m, v, step);
            }
        }
        lr
    }
}

/// `target = a target + b source` on a stretch of the arenas.
pub(crate) fn scaled_sum<D: Device>(
    device: &D,
    target: &mut Arena<D>,
    a: f64,
    source: &Arena<D>,
    b: f64,
    stretch: Range<usize>,
) {
    let mut start = stretch.start;
    while start < stretch.end {
        let block = start..stretch.end.min(start + SUM_BLOCK);
        start = block.end;
        let mut step = Tensor::scratch(device, 1, block.len());
        device.copy(step.view_mut(), source.range(block.clone()));
        device.scale(step.view_mut(), b);
        if a != 1.0 {
            device.scale(target.range_mut(block.clone()), a);
        }
        device.add(target.range_mut(block), step.view());
    }
}

#[cfg(test)]
mod tests {
    use tercio_comm::World;
    use tercio_engine::Cpu;

    use super::*;

    #[test]
    fn sgd_steps_along_the_clipped_gradient_and_decays() {
        let device = Cpu::new(1).unwrap();
        let mut layout = Layout::default();
        let places = [layout.add("a.weight", &[2, 2]), layout.add("a.bias", &[2])];
        let options = OptimOptions {
            optim: Optim::Sgd,
            lr: 0.5,
            clip: 1.0,
            weight_decay: 0.1,
            no_decay: "bias".into(),
            ..OptimOptions::default()
        };
        let mut parameters = Arena::zeros(&device, &layout);
        let mut gradients = Arena::zeros(&device, &layout);
        for place in places {
            device.write(parameters.view_mut(place), &vec![2.0; place.len()]);
            device.write(gradients.view_mut(place), &vec![4.0; place.len()]);
        }
        let [first, second] = no_moments(&device, Optim::Sgd, &layout, None);
        assert_eq!((first.len(), second.len()), (0, 0));
        let mut state = TrainState { step: 0, parameters, first, second };
        let mut optimizer = Optimizer::new(&options, &layout);
        optimizer.rate_factor = 0.5;
        let parts = Parts::new::<Cpu>(&World::alone(), &layout, false);
        // A norm of 4 is clipped to 1.
        let lr = optimizer.apply(&device, &parts, &mut state, &gradients, 4.0 - 1e-6);
        assert_eq!(lr, 0.25);
        let of = |place| device.read(state.parameters.view(place));
        // 2 (1 - 0.25 * 0.1) - 0.25 * 4 / 4, and the same without decay.
        assert!(of(places[0]).iter().all(|p| (p - 1.7).abs() < 1e-6), "{:?}", of(places[0]));
        assert!(of(places[1]).iter().all(|p| (p - 1.75).abs() < 1e-6), "{:?}", of(places[1]));
    }
}
