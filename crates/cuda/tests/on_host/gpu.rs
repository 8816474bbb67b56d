//! A real GPU in the place of the host, where TERCIO_TEST_GPU=1 asks for it: what `bench/gpu-check` runs, and the reason why nothing
//! else asks for one: a test that needs a GPU says "not run" where there is none.

use tercio_cuda::driver::Factors;
use tercio_cuda::{Cuda, Gpu, Pool};

/// Whether a real GPU is asked for.
pub fn wanted() -> bool {
    std::env::var_os("TERCIO_TEST_GPU").is_some_and(|v| v == "1")
}

/// GPU 0.
pub fn device(factors: Factors) -> Cuda {
    let gpu = Gpu::open(0, factors).unwrap_or_else(|e| panic!("TERCIO_TEST_GPU=1: {e}"));
    Cuda::new(Pool::new(gpu, u64::MAX))
}
