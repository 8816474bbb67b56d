//! The CUDA device: [`Cuda`] is the engine's trait over the kernels of `kernels/`, a caching allocator and a [`Driver`].
//!
//! [`Gpu`] is the driver of a real GPU: it finds NVIDIA's libraries when it is opened, so that the same binary runs without them.

mod adafactor;
mod attention;
pub mod device;
pub mod driver;
mod encoder;
pub mod gpu;
mod launch;
mod max_sim;
pub mod memory;
pub mod sources;
mod states;

pub use device::Cuda;
pub use driver::Driver;
pub use gpu::Gpu;
pub use memory::Pool;
