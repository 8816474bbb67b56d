//! Adam with the CPU's bits, and Adafactor.

use tercio_engine::device::Device;
use tercio_engine::{AdafactorStep, AdamStep, Tensor};

use super::{check, draw, same_bits_as_cpu};

fn adam(i: u64) -> AdamStep {
    AdamStep {
        lr: 1e-2 / i as f64,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: i,
        gradient_scale: if i == 2 { 0.25 } else { 1.0 },
    }
}

#[test]
fn adam_takes_the_steps_of_its_formula_with_the_bits_of_the_cpu() {
    for n in [0, 1, 255, 256, 1001] {
        check!(format!("{n} parameters"), |d| {
            let mut p = Tensor::from_values(d, 1, n, &draw(&[1], n));
            let (mut m, mut v) = (Tensor::zeros(d, 1, n), Tensor::zeros(d, 1, n));
            for i in 1..=4 {
                let g = Tensor::from_values(d, 1, n, &draw(&[2, i], n));
                d.adam(p.view_mut(), g.view(), m.view_mut(), v.view_mut(), adam(i));
            }
            let parts = [&p, &m, &v].map(|t| d.read_f64(t.view()));
            ["parameters", "first", "second"].into_iter().zip(parts).collect()
        });
        same_bits_as_cpu!(format!("{n} parameters"), |d| {
            let mut p = Tensor::from_values(d, 1, n, &draw(&[1], n));
            let (mut m, mut v) = (Tensor::zeros(d, 1, n), Tensor::zeros(d, 1, n));
            for i in 1..=4 {
                let g = Tensor::from_values(d, 1, n, &draw(&[2, i], n));
                d.adam(p.view_mut(), g.view(), m.view_mut(), v.view_mut(), adam(i));
            }
            let parts = [&p, &m, &v].map(|t| d.read_f64(t.view()));
            ["parameters", "first", "second"].into_iter().zip(parts).collect()
        });
    }
}

#[test]
fn adafactor_takes_the_steps_of_its_formula() {
    for (rows, columns) in [(1, 1), (5, 300), (270, 33), (0, 257), (0, 1)] {
        for scaled in [false, true] {
            let (n, statistics) =
                if rows == 0 { (columns, columns) } else { (rows * columns, rows + columns) };
            let step = |i: u64| AdafactorStep {
                lr: 1e-2,
                eps: 1e-30,
                parameter_eps: scaled.then_some(1e-3),
                clip_threshold: if i == 2 { 0.5 } else { 1.0 },
                decay_rate: -0.8,
                weight_decay: 0.1,
                step: i,
                gradient_scale: if i == 3 { 0.25 } else { 1.0 },
            };
            check!(format!("{rows} x {columns}, scaled {scaled}"), |d| {
                let mut p = Tensor::from_values(d, 1, n, &draw(&[1], n));
                let mut s = Tensor::zeros(d, 1, statistics);
                for i in 1..=3 {
                    let g = Tensor::from_values(d, 1, n, &draw(&[2, i], n));
                    let width = (rows > 0).then_some(columns);
                    d.adafactor(p.view_mut(), g.view(), width, s.view_mut(), step(i));
                }
                vec![("parameters", d.read_f64(p.view())), ("statistics", d.read_f64(s.view()))]
            });
        }
    }
}
