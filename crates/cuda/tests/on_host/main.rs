//! The CUDA kernels of `kernels/`, run on the host and compared with the reference device.
//!
//! A C++ compiler builds the kernels' own sources with a shim for what CUDA adds to the language (`kernels/host.h`). Every
//! check runs with threads and blocks in ascending and in descending order, which may not change a bit, and with activations
//! stored as f32 and as bf16. All memory that kernels write has guards on both sides; fresh memory is NaN.

#[path = "../../../engine/tests/common/mod.rs"]
#[allow(dead_code)]
mod common;

mod driver;
mod gpu;
#[allow(dead_code)] // other tests use the rest of it
mod library;
mod memory;

mod test_attention;
mod test_encoder;
mod test_loss;
mod test_operations;
mod test_optimizer;
mod test_rows;
mod test_shim;

use tercio_engine::random::{key, normal};

/// Named results of a check.
pub type Results = Vec<(&'static str, Vec<f64>)>;

/// Standard normals that are exact in bf16, so that storing them loses nothing.
pub fn draw(parts: &[u64], len: usize) -> Vec<f32> {
    let stream = key(parts);
    let exact = |x: f64| f32::from_bits((library::to_bf16(x as f32) as u32) << 16);
    (0..len).map(|i| exact(normal(stream, i as u64))).collect()
}

/// Greatest error of an element, relative to the greatest of: itself, the root of the mean of squares of its array, the second number.
/// f32: a sum may have some thousand terms.
pub const F32: (f64, f64) = (2e-5, 0.05);
/// The same of results that were stored in bf16, whose numbers have eight bits, some times one after the other.
pub const BF16: (f64, f64) = (2e-2, 0.25);
/// The same of products whose factors a GPU rounded to TF32.
pub const TF32: (f64, f64) = (3e-3, 0.25);

/// Fails where a result is not the reference's within a tolerance.
pub fn compare(what: &str, got: &Results, want: &Results, (tolerance, least): (f64, f64)) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, got), (_, want)) in got.iter().zip(want) {
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        let finite = || want.iter().filter(|w| w.is_finite());
        let mean = finite().map(|w| w * w).sum::<f64>() / finite().count().max(1) as f64;
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            let allowed = tolerance * w.abs().max(mean.sqrt()).max(least);
            let same = g == w || (g.is_nan() && w.is_nan());
            assert!(
                same || (g - w).abs() <= allowed,
                "{what}: {name}[{i}] is {g}, not {w} (within {allowed:e})"
            );
        }
    }
}

/// The bits of all results.
pub fn bits(results: &Results) -> Vec<u64> {
    results.iter().flat_map(|(_, values)| values.iter().map(|v| v.to_bits())).collect()
}

/// Runs a body on the reference and on the kernels: both storage types, both orders of threads. The tolerance of bf16 may be given.
#[macro_export]
macro_rules! check {
    ($what:expr, |$device:ident| $body:expr) => {
        $crate::check!($what, $crate::BF16, |$device| $body)
    };
    ($what:expr, $bf16:expr, |$device:ident| $body:expr) => {{
        use $crate::driver::OnHost;
        use $crate::library::Storage;
        let what = &$what;
        let want: $crate::Results = {
            let $device = &tercio_engine::Reference;
            $body
        };
        if $crate::gpu::wanted() {
            use tercio_cuda::driver::Factors;
            let all = [(Factors::F32, $crate::F32), (Factors::Tf32, $crate::TF32), (Factors::Bf16, $bf16)];
            for (factors, tolerance) in all {
                let $device = &$crate::gpu::device(factors);
                let got: $crate::Results = $body;
                $crate::compare(&format!("{what}, GPU, {factors:?}"), &got, &want, tolerance);
            }
        }
        let host = [(Storage::F32, $crate::F32), (Storage::Bf16, $bf16)];
        for (storage, tolerance) in host.into_iter().filter(|_| !$crate::gpu::wanted()) {
            let run = |descending: bool| -> $crate::Results {
                let $device = &OnHost::device(storage, descending);
                $body
            };
            let got = run(false);
            $crate::compare(&format!("{what}, {storage:?}"), &got, &want, tolerance);
            assert!(
                $crate::bits(&run(true)) == $crate::bits(&got),
                "{what}, {storage:?}: other bits in descending order"
            );
        }
    }};
}

/// Runs a body on the kernels with f32 and on the CPU device: the same operations in the same order, so the same bits.
#[macro_export]
macro_rules! same_bits_as_cpu {
    ($what:expr, |$device:ident| $body:expr) => {{
        use tercio_engine::cpu::Isa;
        let fused = Isa::ALL.into_iter().find(|i| i.available() && i.fuses() && *i != Isa::Amx);
        match fused {
            None => println!("not compared with the CPU device: this processor does not fuse multiply-adds"),
            Some(isa) => {
                let want: $crate::Results = {
                    let $device = &tercio_engine::Cpu::with_isa(1, isa).unwrap();
                    $device.run(|| $body)
                };
                let got: $crate::Results = if $crate::gpu::wanted() {
                    let $device = &$crate::gpu::device(tercio_cuda::driver::Factors::F32);
                    $body
                } else {
                    let $device = &$crate::driver::OnHost::device($crate::library::Storage::F32, false);
                    $body
                };
                for ((name, got), (_, want)) in got.iter().zip(&want) {
                    let differs = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits());
                    assert_eq!(got.len(), want.len());
                    if let Some(i) = differs {
                        panic!("{}: {name}[{i}] is {}, on the CPU {}", $what, got[i], want[i]);
                    }
                }
            }
        }
    }};
}
