//! The CUDA device with a driver that runs the kernels' sources on the host, as the tests of that device have it.

#[allow(dead_code)]
#[path = "../../../cuda/tests/on_host/driver.rs"]
mod driver;
#[allow(dead_code)]
#[path = "../../../cuda/tests/on_host/library.rs"]
mod library;
#[allow(dead_code)]
#[path = "../../../cuda/tests/on_host/memory.rs"]
mod memory;

use tercio_cuda::Cuda;

/// The device, f32.
pub fn cuda_on_host() -> Cuda<driver::OnHost> {
    driver::OnHost::device(library::Storage::F32, false)
}
