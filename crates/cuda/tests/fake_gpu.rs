//! The real driver layer ([`Gpu`]) on a GPU that is the host: NVIDIA's functions under their own names, kernels by the shim
//! (`fake_gpu/fake_gpu.cpp`). Libraries are found once for a process, so every test is this program started again beside them.

#[allow(dead_code)]
#[path = "on_host/library.rs"]
mod library;
#[allow(dead_code)]
#[path = "on_host/memory.rs"]
mod memory;

use std::process::Command;

use tercio_cuda::driver::Factors;
use tercio_cuda::{Cuda, Gpu, Pool, gpu};
use tercio_engine::device::Matrix;
use tercio_engine::random::{key, normal};
use tercio_engine::{Device, Fault, Reference, Tensor};

/// What starts a test's other half.
const BESIDE: &str = "TERCIO_TEST_BESIDE_FAKE_GPU";

/// Whether this is the process beside the fake libraries; otherwise it is started, with these variables, and must end well.
fn beside(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(BESIDE).is_some() {
        return true;
    }
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(BESIDE, "1")
        .env("LD_LIBRARY_PATH", library::fake_gpu())
        .env("TERCIO_CACHE", cache.path())
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(said.contains("1 passed"), "{test} is not the test's name: {said}");
    false
}

fn open(factors: Factors) -> Cuda {
    Cuda::new(Pool::new(Gpu::open(0, factors).unwrap(), u64::MAX))
}

fn draw(what: u64, len: usize) -> Vec<f32> {
    (0..len).map(|i| normal(key(&[what]), i as u64) as f32).collect()
}

/// All that the layer does, on any device: products of every kind, copies of any size, clearing, kernels, values back.
fn work<D: Device>(d: &D) -> Vec<Vec<f64>> {
    let tensor = |what, rows, columns| Tensor::from_values(d, rows, columns, &draw(what, rows * columns));
    let mut results = Vec::new();
    // Sizes and starts that are multiples of nothing.
    for (rows, depth, columns) in [(1, 1, 1), (5, 7, 3), (33, 65, 31), (64, 64, 64)] {
        let (a, b) = (tensor(1, rows, depth), tensor(2, depth, columns));
        let (at, bt) = (tensor(3, depth, rows), tensor(4, columns, depth));
        let mut c = tensor(5, rows, columns);
        d.product(a.matrix(), b.matrix(), c.view_mut(), false);
        d.product(at.matrix().t(), b.matrix(), c.view_mut(), true);
        d.product(a.matrix(), bt.matrix().t(), c.view_mut(), true);
        d.product(at.matrix().t(), bt.matrix().t(), c.view_mut(), true);
        let part = Matrix::new(a.rows_view(rows / 2, rows), rows - rows / 2, depth);
        let mut lower = tensor(6, rows, columns);
        d.product(part, b.matrix(), lower.rows_view_mut(rows / 2, rows), true);
        results.extend([d.read_f64(c.view()), d.read_f64(lower.view())]);
    }
    // A batch of products with gaps between their rows: heads.
    let (heads, dim, width, rows) = (3, 5, 8, 11);
    let (x, weight) = (tensor(7, rows, heads * dim), tensor(8, heads * dim, width));
    let (mut wide, mut back) =
        (Tensor::scratch(d, rows, heads * width), Tensor::scratch(d, rows, heads * dim));
    d.heads_expand(x.view(), weight.view(), heads, width, wide.view_mut());
    d.heads_reduce(wide.view(), weight.view(), heads, width, back.view_mut());
    let mut dweight = tensor(9, heads * dim, width);
    d.heads_gradient(x.view(), wide.view(), heads, width, dweight.view_mut());
    results.extend([&wide, &back, &dweight].map(|t| d.read_f64(t.view())));
    // Many small lists and three large ones go through the pinned memory, and come out as they went in.
    let table = tensor(10, 300, 16);
    let mut sum = Tensor::zeros(d, 1000, 16);
    for round in 0..200u32 {
        let ids: Vec<u32> = (0..1000).map(|i| (i * 7 + round) % 300).collect();
        let mut rows = Tensor::scratch(d, 1000, 16);
        d.gather(table.view(), 16, &ids, rows.view_mut());
        d.add(sum.view_mut(), rows.view());
    }
    results.push(d.read_f64(sum.view()));
    for what in 11..14 {
        let large = tensor(what, 3, 1_100_000);
        let ends = [0..40, 1_000_000..1_000_040, 3_299_960..3_300_000];
        let all = d.read_f64(large.view());
        results.extend(ends.map(|range| all[range].to_vec()));
    }
    let mut filled = Tensor::zeros(d, 2, 70_000);
    d.fill(filled.rows_view_mut(1, 2), 0.5);
    results.push(vec![d.dot(filled.view(), filled.view())]);
    results
}

fn compare(got: &[Vec<f64>], want: &[Vec<f64>], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "result {i}");
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() <= tolerance * w.abs().max(1.0), "result {i}: {g}, not {w}");
        }
    }
}

#[test]
fn the_layer_computes_what_the_reference_does() {
    if beside("the_layer_computes_what_the_reference_does", &[]) {
        let want = work(&Reference);
        for (factors, tolerance) in [(Factors::F32, 1e-4), (Factors::Tf32, 1e-4), (Factors::Bf16, 0.3)] {
            let device = open(factors);
            compare(&work(&device), &want, tolerance);
            assert_eq!(device.bytes_in_use(), 0);
        }
    }
}

#[test]
fn several_threads_use_one_gpu() {
    if beside("several_threads_use_one_gpu", &[]) {
        let device = open(Factors::F32);
        let sums: Vec<f64> = std::thread::scope(|scope| {
            let run = |n: usize| {
                let device = &device;
                move || {
                    let x = Tensor::from_values(device, 1, n, &vec![1.0; n]);
                    (0..20).map(|_| device.dot(x.view(), x.view())).sum()
                }
            };
            let threads = [100, 2000, 40_000].map(|n| scope.spawn(run(n)));
            threads.map(|t| t.join().unwrap()).to_vec()
        });
        assert_eq!(sums, [2000.0, 40_000.0, 800_000.0]);
    }
}

#[test]
fn what_is_missing_is_said() {
    let opened = || Gpu::open(0, Factors::F32).map(|_| ()).unwrap_err().0;
    let name = "what_is_missing_is_said";
    let cases: [(&[(&str, &str)], &str); 4] = [
        (&[("FAKE_GPU_COUNT", "0")], "no GPU can be used: NVIDIA's driver says CUDA_ERROR_NO_DEVICE"),
        (
            &[("FAKE_GPU_CAPABILITY", "75")],
            "(fake GPU 0) has compute capability 7.5; 8.0 (A100 and later) is the least",
        ),
        (&[("FAKE_GPU_LACKS", "products")], "cuBLASLt cannot be used"),
        (&[("FAKE_GPU_LACKS", "compiler")], "does not take attention.cu for sm_90"),
    ];
    if std::env::var_os(BESIDE).is_some() {
        let (said, wanted) = (opened(), std::env::var("WANTED").unwrap());
        assert!(said.contains(&wanted), "{said}");
        return;
    }
    for (variables, wanted) in cases {
        let all: Vec<_> = variables.iter().copied().chain([("WANTED", wanted)]).collect();
        assert!(!beside(name, &all));
    }
}

#[test]
fn gpus_are_counted_and_described() {
    if beside("gpus_are_counted_and_described", &[("FAKE_GPU_COUNT", "2"), ("FAKE_GPU_MEMORY", "1000000000")])
    {
        let survey = gpu::survey();
        let cards = survey.cards.unwrap();
        assert!(survey.products && survey.compiler && cards.len() == 2);
        assert_eq!(
            (cards[1].name.as_str(), cards[1].capability, cards[1].memory),
            ("fake GPU 1", (9, 0), 1_000_000_000)
        );
        let fault = Gpu::open(2, Factors::F32).map(|_| ()).unwrap_err();
        assert!(fault.0.starts_with("there is no GPU 2: numbers 0 to 1"), "{fault}");
    }
}

#[test]
fn a_kernel_that_fails_is_seen_by_who_waits_and_by_nobody_else_twice() {
    let test = "a_kernel_that_fails_is_seen_by_who_waits_and_by_nobody_else_twice";
    let fails = ("FAKE_GPU_FAIL", "add:2");
    let run = || {
        let device = open(Factors::F32);
        let mut x = Tensor::zeros(&device, 1, 10);
        let y = Tensor::zeros(&device, 1, 10);
        device.add(x.view_mut(), y.view());
        device.read(x.view());
        tercio_engine::fault::caught(|| {
            device.add(x.view_mut(), y.view());
            device.read(x.view());
        })
        .unwrap_err()
    };
    if std::env::var_os(BESIDE).is_some() {
        let Fault(said) = run();
        let named = said.starts_with("GPU 0 (fake GPU 0) failed in add: CUDA_ERROR_ILLEGAL_ADDRESS");
        let later = said.starts_with("GPU 0 (fake GPU 0) failed: CUDA_ERROR_ILLEGAL_ADDRESS")
            && said.ends_with("with TERCIO_CUDA_WAIT=1 the error names its kernel");
        assert!(if std::env::var_os("TERCIO_CUDA_WAIT").is_some() { named } else { later }, "{said}");
        return;
    }
    assert!(!beside(test, &[fails]));
    assert!(!beside(test, &[fails, ("TERCIO_CUDA_WAIT", "1")]));
}
