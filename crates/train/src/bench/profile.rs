//! Where the time of a benchmark's steps goes: time, operations and share of the peak of every kind of kernel.
//!
//! [`Profiled`] is a device that times the kernels of another one. Without `--profile` no such device is made.

mod device;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

pub use device::Profiled;

/// A kind of kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    /// By its name.
    Named(&'static str),
    /// `[T, inner] x [inner, columns]`, T being the tokens: products of one weight matrix.
    Product { inner: usize, columns: usize, right_transposed: bool, few_rows: bool },
    /// `[rows, T] x [T, columns]`, the left factor stored transposed: the gradient of a weight matrix.
    WeightGradient { rows: usize, columns: usize },
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Operation::Named(name) => f.write_str(name),
            Operation::Product { inner, columns, right_transposed, few_rows } => {
                let rows = if few_rows { "few" } else { "T" };
                let transposed = if right_transposed { ", right transposed" } else { "" };
                write!(f, "product {rows} x {inner} x {columns}{transposed}")
            }
            Operation::WeightGradient { rows, columns } => {
                write!(f, "product {rows} x T x {columns}, left transposed")
            }
        }
    }
}

/// What the calls of one kind took.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    calls: u64,
    time: Duration,
    /// Floating-point operations of products, a multiply-add counted as two.
    flops: f64,
}

/// Costs of kernels, gathered by every clone.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    costs: Arc<Mutex<BTreeMap<Operation, Cost>>>,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct ProfileLine {
    /// The kind of kernel. In the name of a product, T stands for the tokens and "few" for at most 16 rows.
    pub operation: String,
    /// Calls a step.
    pub calls_per_step: f64,
    /// Seconds a step.
    pub seconds_per_step: f64,
    /// Of the steps' time.
    pub share: f64,
    /// 10^9 operations of products a second; null where there are none.
    pub gflops: Option<f64>,
    /// The same over the device's peak.
    pub share_of_peak: Option<f64>,
}

impl Profile {
    fn costs(&self) -> MutexGuard<'_, BTreeMap<Operation, Cost>> {
        // Sums of numbers are whole whatever happened to the thread that added to them.
        self.costs.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Forgets what was gathered: the steps that count begin.
    pub fn clear(&self) {
        self.costs().clear();
    }
    /// What was gathered so far, apart from what will be.
    pub(super) fn so_far(&self) -> Profile {
        Profile { costs: Arc::new(Mutex::new(self.costs().clone())) }
    }
    /// Runs a kernel of so many operations.
    fn timed<R>(&self, operation: Operation, flops: f64, kernel: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = kernel();
        let time = start.elapsed();
        let mut costs = self.costs();
        let cost = costs.entry(operation).or_default();
        cost.calls += 1;
        cost.time += time;
        cost.flops += flops;
        result
    }
    /// The table of `steps` steps that took `seconds` together, most time first, and last what no kernel took; `peak` in
    /// operations a second.
    pub fn lines(&self, steps: usize, seconds: f64, peak: f64) -> Vec<ProfileLine> {
        let per_step = 1.0 / steps.max(1) as f64;
        let line = |operation: String, calls: u64, time: f64, flops: f64| ProfileLine {
            operation,
            calls_per_step: calls as f64 * per_step,
            seconds_per_step: time * per_step,
            share: time / seconds,
            gflops: (flops > 0.0).then_some(flops / time / 1e9),
            share_of_peak: (flops > 0.0).then_some(flops / time / peak),
        };
        let mut costs: Vec<(Operation, Cost)> = self.costs().iter().map(|(o, c)| (*o, *c)).collect();
        costs.sort_by_key(|&(operation, cost)| (std::cmp::Reverse(cost.time), operation));
        let kernels: f64 = costs.iter().map(|(_, cost)| cost.time.as_secs_f64()).sum();
        let lines = costs.iter().map(|(o, c)| line(o.to_string(), c.calls, c.time.as_secs_f64(), c.flops));
        lines.chain([line("between kernels".into(), 0, (seconds - kernels).max(0.0), 0.0)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use tercio_engine::random::{key, uniform};
    use tercio_engine::{Arena, Cpu, Device, Span, Tape, Tensor};
    use tercio_models::bert::BertConfig;
    use tercio_models::encoder::{EncoderConfig, LoadedEncoder};

    use super::*;

    #[test]
    fn kinds_operations_and_shares_are_told() {
        let profile = Profile::default();
        let device = Profiled::new(&Cpu::new(1).unwrap(), profile.clone());
        let random = |rows, columns| {
            let name = key(&[rows as u64, columns as u64]);
            let values: Vec<f32> = (0..rows * columns).map(|i| uniform(name, i as u64) as f32).collect();
            Tensor::from_values(&device, rows, columns, &values)
        };
        let (x, w) = (random(40, 8), random(8, 24));
        let (mut y, mut dw) = (Tensor::zeros(&device, 40, 24), Tensor::zeros(&device, 8, 24));
        profile.clear();
        let start = Instant::now();
        for _ in 0..2 {
            device.product(x.matrix(), w.matrix(), y.view_mut(), false);
            device.product(x.matrix().t(), y.matrix(), dw.view_mut(), false);
        }
        device.add(dw.view_mut(), w.view());
        let seconds = start.elapsed().as_secs_f64();
        let lines = profile.lines(2, seconds, 1e9);
        let of = |name: &str| {
            let line = lines.iter().find(|line| line.operation == name);
            line.unwrap_or_else(|| panic!("{name} in {lines:?}"))
        };
        let (forward, gradient) = (of("product T x 8 x 24"), of("product 8 x T x 24, left transposed"));
        assert_eq!((forward.calls_per_step, gradient.calls_per_step), (1.0, 1.0));
        for line in [forward, gradient] {
            let flops = line.gflops.unwrap() * 1e9 * line.seconds_per_step;
            assert!((flops - 2.0 * 40.0 * 8.0 * 24.0).abs() < 1e-3, "{line:?}");
            assert!((line.share_of_peak.unwrap() - line.gflops.unwrap()).abs() < 1e-9 * line.gflops.unwrap());
        }
        assert!(of("sums, copies").gflops.is_none() && of("sums, copies").calls_per_step == 0.5);
        assert_eq!(lines.last().unwrap().operation, "between kernels");
        let all: f64 = lines.iter().map(|line| line.share).sum();
        assert!((all - 1.0).abs() < 1e-9, "{all}");
    }

    /// Gradients of a tiny encoder's squared states.
    fn step<D: Device>(device: &D) -> Vec<f32> {
        let config = BertConfig {
            vocab_size: 30,
            hidden_size: 16,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            intermediate_size: 32,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            ..BertConfig::base()
        };
        let loaded = LoadedEncoder::random(EncoderConfig::Bert(config), 0, device);
        let mut gradients = Arena::zeros(device, &loaded.layout);
        let mut tape = Tape::recording(device, &loaded.parameters, None);
        let ids: Vec<u32> = (0..20).collect();
        let states = loaded.encoder.encode(&mut tape, &ids, None, &[Span { start: 0, end: 20 }], false);
        let slope = states.tensor.duplicate(device);
        tape.inject(&states, slope);
        drop(states);
        tape.backward(&mut gradients, &[]);
        device.read(gradients.all())
    }

    #[test]
    fn a_profiled_step_has_the_bits_of_a_plain_one_and_counts_the_operations_of_the_model() {
        let (plain, profile) = (Cpu::new(1).unwrap(), Profile::default());
        assert!(step(&Profiled::new(&plain, profile.clone())) == step(&plain));
        let lines = profile.lines(1, 1.0, 1e9);
        let flops = |start: &str| -> f64 {
            let of_kind = lines.iter().filter(|line| line.operation.starts_with(start));
            of_kind.map(|line| line.gflops.unwrap() * 1e9 * line.seconds_per_step).sum()
        };
        // Two layers of four projections and a feed-forward; the backward pass takes twice the forward's.
        let products = 3.0 * 2.0 * 2.0 * 20.0 * (4.0 * 16.0 * 16.0 + 2.0 * 16.0 * 32.0);
        // Two products of every pair of tokens, five more backward.
        let attention = 2.0 * 7.0 * 2.0 * 20.0 * 20.0 * 16.0;
        for (start, wanted) in [("product ", products), ("attention", attention)] {
            assert!((flops(start) / wanted - 1.0).abs() < 1e-6, "{start}: {}, {wanted}", flops(start));
        }
        assert!(lines.iter().any(|line| line.operation == "norms" && line.gflops.is_none()), "{lines:?}");
    }
}
