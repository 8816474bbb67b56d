//! A backward pass that tells when stretches of the gradients are done: same bits, each told once and in order, and nothing
//! is added to a stretch after it was told; also through blocks that are computed again.

use std::ops::Range;

use tercio_engine::{Arena, Buckets, Cpu, Device, Draw, Layout, Param, Tape, Var};

const WIDTH: usize = 24;

struct Model {
    layout: Layout,
    table: Param,
    layers: Vec<[Param; 3]>,
}

fn model() -> Model {
    let mut layout = Layout::default();
    let table = layout.add("table", &[30, WIDTH]);
    let layers = (0..3)
        .map(|i| {
            [
                layout.add(format!("{i}.norm"), &[WIDTH]),
                layout.add(format!("{i}.in"), &[2 * WIDTH, WIDTH]),
                layout.add(format!("{i}.out"), &[WIDTH, 2 * WIDTH]),
            ]
        })
        .collect();
    Model { layout, table, layers }
}

/// Embedding, layers, and cross-entropy over the same table: the first parameter is the last to be ready.
fn record<'p>(m: &'p Model, device: &Cpu, parameters: &'p Arena<Cpu>, recompute: bool) -> Tape<'p, Cpu> {
    let draw = Draw { seed: 1, update: 2, shard: 3 };
    let mut tape = Tape::recording(device, parameters, Some(draw));
    let mut x = tape.embedding(m.table, &[3, 1, 4, 1, 5, 9, 2, 6], None);
    for (i, layer) in m.layers.iter().enumerate() {
        let block = move |tape: &mut Tape<'p, Cpu>, v: &[Var<Cpu>]| {
            let u = tape.norm_linear(&v[0], layer[0], 1e-6, layer[1]);
            let drop = tape.dropout(i as u64, 0.2);
            tape.linear_residual(&u, layer[2], &v[0], drop)
        };
        // A block whose result nothing depends on never runs backward, and must not be waited for.
        if i == 1 && recompute {
            tape.recompute(&[&x], block);
        }
        x = if recompute { tape.recompute(&[&x], block) } else { block(&mut tape, &[x]) };
    }
    tape.cross_entropy(&x, m.table, 0.5, &[1, 4, 1, 5, 9, 2, 6, 5], 0.125);
    tape
}

#[test]
fn buckets_are_told_once_in_order_and_when_done() {
    let (m, device) = (model(), Cpu::new(1).unwrap());
    let mut parameters = Arena::zeros(&device, &m.layout);
    let values: Vec<f32> = (0..m.layout.len()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
    device.write(parameters.all_mut(), &values);
    for recompute in [false, true] {
        let mut plain = Arena::zeros(&device, &m.layout);
        record(&m, &device, &parameters, recompute).backward(&mut plain, &[]);
        let buckets = m.layout.buckets(16, 1000, 2000);
        assert!(buckets.len() >= 4, "{buckets:?}");
        let mut told: Vec<(Range<usize>, Vec<f32>, f64)> = Vec::new();
        let mut gradients = Arena::zeros(&device, &m.layout);
        let mut ready = |i: usize, g: &mut Arena<Cpu>| {
            assert_eq!(i, told.len());
            let range: Range<usize> = buckets[i].clone();
            let table = device.dot(g.view(m.table), g.view(m.table));
            told.push((range.clone(), device.read(g.range(range)), table));
        };
        let tape = record(&m, &device, &parameters, recompute);
        tape.backward_with(&mut gradients, Buckets { ranges: &buckets, ready: &mut ready });
        assert_eq!(told.len(), buckets.len());
        let bits = |a: &Arena<Cpu>| device.read(a.all()).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(bits(&plain) == bits(&gradients), "recompute {recompute}");
        for (range, then, _) in &told {
            assert!(!range.is_empty() && *then == device.read(gradients.range(range.clone())), "{range:?}");
        }
        let table = device.dot(gradients.view(m.table), gradients.view(m.table));
        assert!(told[0].2 != table && told.last().unwrap().2 == table, "the first ones are told early");
        assert!(device.read(gradients.all()).iter().filter(|v| **v != 0.0).count() > m.layout.len() / 2);
    }
}
