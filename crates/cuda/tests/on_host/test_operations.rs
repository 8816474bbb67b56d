//! Every operation of the tape with every variant, forward and backward, over the kernels: the cases of `tests/operations.rs`.

use tercio_engine::Reference;
use tercio_engine::random::key;

use super::common::cases::{Sizes, cases, state_attentions};
use super::common::{Case, How, Outcome};
use super::driver::OnHost;
use super::gpu;
use super::library::Storage;
use tercio_cuda::driver::Factors;

const HOW: How = How { nudge: None, forward_only: false, gradients: 0.25 };

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// By norm: an operation is many kernels, and gradients that should be zero are what rounding leaves.
fn compare(case: &Case, what: &str, got: &Outcome, relative: f64, slack: f64) {
    let want = case.run(&Reference, HOW);
    for ((name, g), (_, w)) in got.tensors.iter().zip(&want.tensors) {
        assert_eq!(g.len(), w.len(), "{}: {name}", case.name);
        let error = norm(&g.iter().zip(w).map(|(g, w)| g - w).collect::<Vec<_>>());
        let allowed = relative * norm(w) + slack * (w.len() as f64).sqrt();
        assert!(error <= allowed, "{}, {what}: {name}: error {error:e} beyond {allowed:e}", case.name);
    }
}

fn on_host(case: &Case, storage: Storage, relative: f64, slack: f64) {
    let got = case.run(&OnHost::device(storage, false), HOW);
    compare(case, &format!("{storage:?}"), &got, relative, slack);
    let other = case.run(&OnHost::device(storage, true), HOW);
    assert!(other.bits() == got.bits(), "{}, {storage:?}: other bits in descending order", case.name);
}

fn all(sizes: &Sizes) {
    let list = cases(sizes).into_iter().chain(state_attentions(sizes, false));
    for case in list {
        // Which row is the best of a MaxSim is another one where inputs are rounded; test_encoder.rs has it with inputs that are not.
        let rounds = !case.name.starts_with("MaxSim");
        if gpu::wanted() {
            let run = |factors, relative, slack| {
                let got = case.run(&gpu::device(factors), HOW);
                compare(&case, &format!("GPU, {factors:?}"), &got, relative, slack);
            };
            run(Factors::F32, 1e-5, 1e-6);
            if rounds {
                run(Factors::Tf32, 6e-3, 1e-3);
                run(Factors::Bf16, 6e-2, 1e-2);
            }
            continue;
        }
        on_host(&case, Storage::F32, 1e-5, 1e-6);
        if rounds {
            on_host(&case, Storage::Bf16, 6e-2, 1e-2);
        }
    }
}

#[test]
fn operations_small() {
    all(&Sizes {
        rows: 5,
        width: 3,
        heads: 2,
        head_dim: 2,
        lengths: vec![4, 1, 3],
        pairs: vec![(2, 4), (0, 3), (1, 1), (3, 2)],
        classes: 6,
        seed: 11,
    });
}

#[test]
fn operations_around_tiles() {
    all(&Sizes {
        rows: 33,
        width: 34,
        heads: 2,
        head_dim: 17,
        lengths: vec![31, 1, 33, 0, 4],
        pairs: vec![(5, 33), (0, 6), (1, 1), (33, 7)],
        classes: 257,
        seed: 23 + key(&[1]) % 5,
    });
}
