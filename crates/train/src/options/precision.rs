//! The precision of products: a setting of every command that computes.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

/// What the factors of products are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Not rounded.
    #[default]
    F32,
    /// bf16: eight bits of significand, the range of f32.
    Bf16,
}

impl Precision {
    /// As in `config.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        }
    }
}

impl From<Precision> for tercio_engine::cpu::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => tercio_engine::cpu::Precision::F32,
            Precision::Bf16 => tercio_engine::cpu::Precision::Bf16,
        }
    }
}

/// How products are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct PrecisionOptions {
    /// What the factors of products are rounded to; sums, parameters and all else stay f32
    #[arg(long, value_enum, env = "TERCIO_PRECISION", default_value_t = Precision::F32, overrides_with = "bf16")]
    pub precision: Precision,
    /// The same as --precision bf16
    #[arg(long, overrides_with = "precision")]
    #[serde(skip)]
    pub bf16: bool,
}

impl PrecisionOptions {
    /// What both flags say.
    pub fn get(self) -> Precision {
        if self.bf16 { Precision::Bf16 } else { self.precision }
    }
    /// As one flag would say it.
    pub fn settled(self) -> PrecisionOptions {
        PrecisionOptions { precision: self.get(), bf16: false }
    }
}
