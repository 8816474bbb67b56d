//! Every operation: its backward against finite differences on the reference, the CPU against the reference, and the
//! CPU's bits over threads, instruction sets and recomputation.

mod common;

use common::cases::{Sizes, cases, state_attentions};
use common::encoder::EncoderOp;
use common::{Case, How, Op, Outcome};
use tercio_engine::cpu::Isa;
use tercio_engine::random::key;
use tercio_engine::{Cpu, Device, Reference};

fn small() -> Sizes {
    Sizes {
        rows: 5,
        width: 3,
        heads: 2,
        head_dim: 2,
        lengths: vec![4, 1, 3],
        pairs: vec![(2, 4), (0, 3), (1, 1), (3, 2)],
        classes: 6,
        seed: 11,
    }
}

/// Ragged sizes around the widths of vectors and tiles.
fn ragged() -> Vec<Sizes> {
    let mut list = Vec::new();
    for (i, width) in [1, 7, 17, 33, 64, 100].into_iter().enumerate() {
        let draw = |what: u64, below: u64| (key(&[5, width as u64, what]) % below) as usize;
        // One sequence is longer than a block of queries at some widths.
        let long = if i % 2 == 0 { 129 + draw(0, 40) } else { 1 + draw(0, 60) };
        list.push(Sizes {
            rows: 1 + draw(1, 150),
            width,
            heads: 1 + draw(2, 3),
            head_dim: width.min(40),
            lengths: vec![1 + draw(3, 30), 1, long, 0, 1 + draw(4, 20)],
            pairs: vec![
                (1 + draw(5, 9), long),
                (0, 1 + draw(6, 9)),
                (1, 1),
                (1 + draw(7, 140), 1 + draw(8, 50)),
            ],
            classes: 2 + draw(9, 300),
            seed: width as u64,
        });
    }
    list
}

/// Large enough that every kernel is cut into several tasks.
fn large() -> Sizes {
    Sizes {
        rows: 400,
        width: 100,
        heads: 3,
        head_dim: 32,
        lengths: vec![140, 1, 37, 200],
        pairs: vec![(135, 60), (0, 5), (7, 170), (30, 30)],
        classes: 700,
        seed: 23,
    }
}

/// The instruction sets of this processor; says which are not tested.
fn available() -> Vec<Isa> {
    let (have, lack): (Vec<Isa>, Vec<Isa>) = Isa::ALL.into_iter().partition(|i| i.available());
    for isa in lack {
        println!("not tested on this processor: {}", isa.name());
    }
    have
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Compares by norm; `slack` is the absolute error of an element that is let pass (where the truth is zero).
fn compare(what: &str, got: &Outcome, want: &Outcome, relative: f64, slack: f64) {
    assert_eq!(got.tensors.len(), want.tensors.len());
    for ((name, g), (_, w)) in got.tensors.iter().zip(&want.tensors) {
        assert_eq!(g.len(), w.len(), "{what}: {name}");
        let error = norm(&g.iter().zip(w).map(|(g, w)| g - w).collect::<Vec<_>>());
        let allowed = relative * norm(w) + slack * (w.len() as f64).sqrt();
        assert!(error <= allowed, "{what}: {name}: error {error:e} beyond {allowed:e}");
    }
}

/// Elements to probe: all of a small tensor, else some drawn.
fn probes(case: &Case, t: usize) -> Vec<usize> {
    let len = case.len(t);
    if len <= 48 {
        return (0..len).collect();
    }
    (0..48).map(|i| (key(&[case.seed, t as u64, i]) % len as u64) as usize).collect()
}

#[test]
fn backward_agrees_with_finite_differences() {
    const H: f64 = 1e-5;
    const BEFORE: f64 = 0.25;
    let mut frozen = 0;
    for case in cases(&small()) {
        let run = |nudge| case.run(&Reference, How { nudge, forward_only: true, ..How::default() }).loss;
        let found = case.run(&Reference, How { gradients: BEFORE, ..How::default() });
        assert!(
            found.tensors.iter().all(|(_, t)| t.iter().all(|v| v.is_finite())),
            "{}: not finite",
            case.name
        );
        let parameters = case.parameters.len();
        let mut greatest = 0f64;
        for t in 0..parameters + case.inputs.len() {
            let (name, gradient) = &found.tensors[1 + t];
            // Gradients of parameters are added to what the arena held.
            let before = if t < parameters { BEFORE } else { 0.0 };
            for i in probes(&case, t) {
                let got = gradient[i] - before;
                if case.frozen(t, i) {
                    assert_eq!(got, 0.0, "{}: {name}[{i}] is frozen", case.name);
                    frozen += 1;
                    continue;
                }
                let want = (run(Some((t, i, H))) - run(Some((t, i, -H)))) / (2.0 * H);
                let allowed = 1e-6 * want.abs().max(1e-1);
                assert!(
                    (got - want).abs() <= allowed,
                    "{}: {name}[{i}]: {got}, by differences {want}",
                    case.name
                );
                greatest = greatest.max(want.abs());
            }
        }
        assert!(greatest > 1e-2, "{}: the probed gradients are all but zero", case.name);
    }
    // A row of each of the three tables of the one case that has them.
    assert_eq!(frozen, 3 * small().width);
}

#[test]
fn cpu_agrees_with_the_reference() {
    let devices: Vec<Cpu> = available().into_iter().map(|isa| Cpu::with_isa(2, isa).unwrap()).collect();
    for case in ragged().iter().flat_map(cases) {
        let want = case.run(&Reference, How::default());
        for device in &devices {
            let what = format!("{} on {}", case.name, device.isa().name());
            compare(&what, &case.run(device, How::default()), &want, 2e-5, 1e-6);
        }
    }
}

#[test]
fn cpu_adds_to_parameter_gradients() {
    let device = Cpu::new(1).unwrap();
    for case in cases(&small()) {
        let (from_zero, from_two) =
            (case.run(&device, How::default()), case.run(&device, How { gradients: 2.0, ..How::default() }));
        for t in 1..1 + case.parameters.len() {
            for (a, b) in from_zero.tensors[t].1.iter().zip(&from_two.tensors[t].1) {
                assert!((b - a - 2.0).abs() < 1e-5, "{}: {} after 2, {} after 0", case.name, b, a);
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for isa in available() {
        let devices: Vec<Cpu> = (1..=3).map(|n| Cpu::with_isa(n, isa).unwrap()).collect();
        for case in [large(), small()].iter().flat_map(cases) {
            let one = case.run(&devices[0], How::default()).bits();
            for device in &devices[1..] {
                let same = case.run(device, How::default()).bits() == one;
                assert!(same, "{} on {}: {} threads", case.name, isa.name(), device.threads());
            }
        }
    }
}

#[test]
fn fused_instruction_sets_give_the_same_bits() {
    // AMX adds in another order, and says so.
    let fused: Vec<Isa> = available().into_iter().filter(|i| i.fuses() && *i != Isa::Amx).collect();
    let [first, rest @ ..] = fused.as_slice() else {
        return println!("not tested: no fused instruction set");
    };
    if rest.is_empty() {
        println!("not tested on this processor: {} alone fuses", first.name());
    }
    let first = Cpu::with_isa(2, *first).unwrap();
    for isa in rest {
        let other = Cpu::with_isa(2, *isa).unwrap();
        assert_eq!(first.arithmetic(), other.arithmetic());
        for case in [large()].iter().chain(&ragged()).flat_map(cases) {
            let same = case.run(&other, How::default()).bits() == case.run(&first, How::default()).bits();
            assert!(same, "{}: {} and {} differ", case.name, first.isa().name(), isa.name());
        }
    }
}

#[test]
fn recomputation_gives_the_same_bits() {
    let device = Cpu::new(2).unwrap();
    let mut seen = 0;
    for mut case in [small(), large()].iter().flat_map(cases) {
        let recomputed = case.run(&device, How::default()).bits();
        let (Op::Encoder { recompute, .. }
        | Op::Decoder { recompute, .. }
        | Op::Of(EncoderOp::PostNorm { recompute, .. })) = &mut case.op
        else {
            continue;
        };
        if std::mem::take(recompute) {
            assert!(case.run(&device, How::default()).bits() == recomputed, "{}", case.name);
            seen += 1;
        }
    }
    assert_eq!(seen, 6);
}

/// On the reference to its precision: attention over states is attention with keys and values.
#[test]
fn attention_over_states_is_cross_attention() {
    let sizes: Vec<Sizes> = ragged().into_iter().chain([small()]).collect();
    for s in &sizes {
        for (states, plain) in state_attentions(s, false).iter().zip(state_attentions(s, true)) {
            let how = How::default();
            let (got, want) = (states.run(&Reference, how), plain.run(&Reference, how));
            compare(&states.name, &got, &want, 1e-11, 1e-12);
        }
    }
}
