//! Adafactor's kernel on every instruction set against the reference device, over shapes at the borders of its blocks.

use tercio_engine::cpu::Isa;
use tercio_engine::random::{key, normal};
use tercio_engine::{AdafactorStep, Cpu, Device, Reference, Tensor};

fn draw(parts: &[u64], len: usize) -> Vec<f32> {
    let stream = key(parts);
    (0..len).map(|i| normal(stream, i as u64) as f32).collect()
}

/// Gradients as they are: rows of very different size, and rows that an embedding never saw.
fn gradient(rows: usize, columns: usize, update: u64) -> Vec<f32> {
    let mut g = draw(&[2, rows as u64, columns as u64, update], rows * columns);
    for (i, row) in g.chunks_mut(columns).enumerate() {
        let size = if rows > 4 { [0.0, 1e-6, 1.0, 30.0][(i + update as usize) % 4] } else { 1.0 };
        row.iter_mut().for_each(|v| *v *= size);
    }
    g
}

/// Values and statistics after some updates.
fn steps<D: Device>(device: &D, rows: usize, columns: Option<usize>, scaled: bool) -> [Vec<f64>; 2] {
    let width = columns.unwrap_or(1);
    let start = draw(&[1, rows as u64], rows * width);
    let mut p = Tensor::from_values(device, rows, width, &start);
    let mut stats = Tensor::zeros(device, 1, columns.map_or(rows, |c| rows + c));
    for t in 1..=5 {
        let g = Tensor::from_values(device, rows, width, &gradient(rows, width, t));
        let step = AdafactorStep {
            lr: 1e-2,
            eps: 1e-30,
            parameter_eps: scaled.then_some(1e-3),
            clip_threshold: 1.0,
            decay_rate: -0.8,
            weight_decay: 0.1,
            step: t,
            gradient_scale: if t == 2 { 0.25 } else { 1.0 },
        };
        device.run(|| device.adafactor(p.view_mut(), g.view(), columns, stats.view_mut(), step));
    }
    [&p, &stats].map(|t| device.read_f64(t.view()))
}

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    let shapes = [
        (1, Some(1)),
        (3, Some(5)),
        (255, Some(33)),
        (257, Some(64)),
        (520, Some(70)),
        (2, Some(3_000)),
        (7, None),
        (17_000, None),
    ];
    for (rows, columns) in shapes {
        for scaled in [false, true] {
            let want = steps(&Reference, rows, columns, scaled);
            let mut fused: Option<[Vec<f64>; 2]> = None;
            for isa in Isa::ALL.into_iter().filter(|i| i.available()) {
                let got = steps(&Cpu::with_isa(1, isa).unwrap(), rows, columns, scaled);
                for (what, (got, want)) in ["values", "statistics"].iter().zip(got.iter().zip(&want)) {
                    for (i, (g, w)) in got.iter().zip(want).enumerate() {
                        let off = (g - w).abs();
                        assert!(
                            off <= 2e-6 + 5e-6 * w.abs(),
                            "{isa:?}, {rows} x {columns:?}: {what}[{i}] is {g}, not {w}"
                        );
                    }
                }
                let three = steps(&Cpu::with_isa(3, isa).unwrap(), rows, columns, scaled);
                assert!(three == got, "{isa:?}, {rows} x {columns:?}: other bits with 3 threads");
                if isa.fuses() {
                    let first = fused.get_or_insert_with(|| got.clone());
                    assert!(*first == got, "{isa:?}, {rows} x {columns:?}: other bits than the first");
                }
            }
        }
    }
}
