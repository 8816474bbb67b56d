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

#[allow(dead_code)]
#[path = "../../../cuda/tests/on_host/gpu.rs"]
pub mod gpu;

use tercio_cuda::Cuda;

/// The device, f32.
pub fn cuda_on_host() -> Cuda<driver::OnHost> {
    driver::OnHost::device(library::Storage::F32, false)
}

/// Does work on the CUDA device: on the host, or on a real GPU where TERCIO_TEST_GPU=1 asks for it.
#[macro_export]
macro_rules! on_cuda {
    (|$device:ident| $work:expr) => {
        if $crate::golden_support::on_host::gpu::wanted() {
            let $device = &$crate::golden_support::on_host::gpu::device(tercio_cuda::driver::Factors::F32);
            $work
        } else {
            let $device = &$crate::golden_support::on_host::cuda_on_host();
            $work
        }
    };
}
