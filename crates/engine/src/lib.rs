//! Tercio's engine: packed tensors, fused differentiable operations, the tape, parameter arenas and optimizer kernels.
//!
//! Models call the operations of [`ops`] on a [`Tape`]; an operation calls the kernels of a [`Device`].
//! Two devices stand behind one trait: [`Cpu`] (f32) and [`Reference`] (f64, plain loops, the oracle of the tests).

pub mod cpu;
pub mod device;
pub mod fault;
pub mod memory;
pub mod ops;
pub mod params;
pub mod random;
pub mod reference;
pub mod tape;
pub mod tensor;

pub use cpu::Cpu;
pub use device::{
    Activation, AdafactorStep, AdamStep, AttentionShape, Device, EncoderKernels, MaxSimShape, MaxSimSide,
    RelativeBuckets, Rotary, Span, View, ViewMut,
};
pub use fault::Fault;
pub use ops::feed_forward_end::Hidden;
pub use ops::layer_norm::{LayerNorm, Normed};
pub use ops::rotary::positions;
pub use params::{Arena, Layout, Param, ParamSpec};
pub use random::Dropout;
pub use reference::Reference;
pub use tape::{Buckets, Draw, Tape, Var};
pub use tensor::Tensor;
