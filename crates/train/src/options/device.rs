//! Where a command computes: a setting of those that can do it on a GPU.

use std::fmt;
use std::str::FromStr;

use clap::Args;

/// A device, as a flag says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The processor.
    #[default]
    Cpu,
    /// The GPU of this rank, or the one of this number among those that are visible.
    Cuda(Option<usize>),
    /// The GPU of this rank where every rank has one, the processor otherwise.
    Auto,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| digits.parse().ok().map(|n| DeviceChoice::Cuda(Some(n)));
        match text {
            "cpu" => Some(DeviceChoice::Cpu),
            "cuda" => Some(DeviceChoice::Cuda(None)),
            "auto" => Some(DeviceChoice::Auto),
            other => other.strip_prefix("cuda:").and_then(number),
        }
        .ok_or_else(|| "expected cpu, cuda, cuda:N (N from 0) or auto".to_owned())
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(None) => f.write_str("cuda"),
            DeviceChoice::Cuda(Some(n)) => write!(f, "cuda:{n}"),
            DeviceChoice::Auto => f.write_str("auto"),
        }
    }
}

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Args)]
pub struct DeviceOptions {
    /// Where to compute: cpu, cuda (the GPU of this rank), cuda:N, or auto (a GPU where every rank has one)
    #[arg(long, env = "TERCIO_DEVICE", default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,
    /// Most memory to take of a GPU for tensors, in GiB; without it, 15 of 16 parts of what is free at the start
    #[arg(long, env = "TERCIO_DEVICE_MEMORY", value_parser = gibibytes)]
    pub device_memory: Option<f64>,
    /// Add the gradients of several GPUs in the one order that gives the bits of one rank, through the hosts' memory; without it NCCL adds
    /// them, in its own order, where it is found: the same mathematics, faster
    #[arg(long, env = "TERCIO_REPRODUCIBLE")]
    pub reproducible: bool,
    /// Let a GPU round the factors of f32 products to TF32, ten bits of significand: faster, and no more f32
    #[arg(long, env = "TERCIO_TF32")]
    pub tf32: bool,
}

fn gibibytes(text: &str) -> Result<f64, String> {
    let good = |n: &f64| n.is_finite() && *n > 0.0;
    text.parse().ok().filter(good).ok_or_else(|| "expected a number of GiB above 0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_said_as_they_are_read() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:7", "auto"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda 0", "CUDA"] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
        assert!(gibibytes("0").is_err() && gibibytes("inf").is_err() && gibibytes("x").is_err());
        assert_eq!(gibibytes("1.5"), Ok(1.5));
    }
}
