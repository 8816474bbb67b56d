//! One operation (or a small stack of them) with shapes and values, runnable on any device: what the tests of the
//! operations have in common.

pub mod cases;
pub mod encoder;

use std::rc::Rc;

use tercio_engine::params::{Arena, Layout, Param};
use tercio_engine::random::{key, normal};
use tercio_engine::{Activation, AttentionShape, Device, Draw, Tape, Tensor, Var};

use encoder::EncoderOp;

/// What a case runs. `drop` is a dropout probability, keyed by the tape.
#[derive(Clone)]
pub enum Op {
    Embedding {
        ids: Vec<u32>,
        drop: f64,
    },
    RmsNorm {
        drop: f64,
    },
    NormLinear,
    Linear,
    LinearResidual {
        drop: f64,
    },
    Activation {
        kind: Activation,
        gated: bool,
        drop: f64,
    },
    SelfAttention {
        shape: AttentionShape,
    },
    CrossAttention {
        shape: AttentionShape,
    },
    /// Attention over hidden states; `plain`: the same with keys and values formed.
    StateAttention {
        shape: AttentionShape,
        plain: bool,
    },
    CrossEntropy {
        labels: Vec<u32>,
        factor: f64,
        /// Label smoothing.
        smoothing: f64,
    },
    /// Two layers that share their parameters, of norm, attention and gated feed-forward.
    Encoder {
        shape: AttentionShape,
        drop: f64,
        recompute: bool,
    },
    /// Two cross-attentions with shared parameters to the same keys and values.
    Decoder {
        shape: AttentionShape,
        drop: f64,
        recompute: bool,
    },
    /// An operation of encoders.
    Of(EncoderOp),
}

/// An operation, the sizes of its parameters and inputs, and a seed for their values.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub op: Op,
    pub parameters: Vec<(usize, usize)>,
    pub inputs: Vec<(usize, usize)>,
    pub seed: u64,
}

/// What a run gave: the loss, and by name the output and every gradient.
pub struct Outcome {
    pub loss: f64,
    pub tensors: Vec<(String, Vec<f64>)>,
}

impl Outcome {
    /// The bits of everything.
    pub fn bits(&self) -> Vec<u64> {
        let all = self.tensors.iter().flat_map(|(_, t)| t.iter().map(|v| v.to_bits()));
        all.chain([self.loss.to_bits()]).collect()
    }
}

/// How a case is run.
#[derive(Clone, Copy, Default)]
pub struct How {
    /// Adds the last number to element (second) of parameter or input (first; inputs follow parameters).
    pub nudge: Option<(usize, usize, f64)>,
    /// Leaves the backward out: no gradients in the outcome.
    pub forward_only: bool,
    /// What the arena of gradients holds before.
    pub gradients: f64,
}

const CROSS_ENTROPY_WEIGHT: f64 = 0.7;
const EPS: f64 = 1e-6;

/// Standard normals over the square root of the columns, exact in f32.
pub fn values(stream: u64, rows: usize, columns: usize) -> Vec<f32> {
    let scale = 1.0 / (columns.max(1) as f64).sqrt();
    (0..rows * columns).map(|i| (normal(stream, i as u64) * scale) as f32).collect()
}

fn stream(case: &Case, part: u64) -> u64 {
    key(&[case.seed, part])
}

impl Case {
    /// Elements of parameter or input `t`.
    pub fn len(&self, t: usize) -> usize {
        let (rows, columns) = self.parameters.iter().chain(&self.inputs).nth(t).copied().unwrap();
        rows * columns
    }
    /// Whether element `i` of parameter or input `t` is in a row that gets no gradient.
    pub fn frozen(&self, t: usize, i: usize) -> bool {
        let Op::Of(EncoderOp::EmbeddingSum { frozen, .. }) = &self.op else { return false };
        frozen[t] == Some((i / self.parameters[t].1) as u32)
    }
    /// Runs forward and backward on `device`, within its threads.
    pub fn run<D: Device>(&self, device: &D, how: How) -> Outcome {
        device.run(|| self.run_here(device, how))
    }
    fn run_here<D: Device>(&self, device: &D, how: How) -> Outcome {
        let mut layout = Layout::default();
        let places: Vec<Param> = self
            .parameters
            .iter()
            .map(|&(rows, columns)| {
                let shape = [rows, columns];
                layout.add("p", if rows == 1 { &shape[1..] } else { &shape })
            })
            .collect();
        let mut arena = Arena::zeros(device, &layout);
        let nudged = |t: usize, values: &[f32]| match how.nudge {
            Some((tensor, element, h)) if tensor == t => Some((element, values[element] as f64 + h)),
            _ => None,
        };
        for (t, &p) in places.iter().enumerate() {
            let host = values(stream(self, t as u64), p.rows, p.columns);
            device.write(arena.view_mut(p), &host);
            if let Some((i, v)) = nudged(t, &host) {
                device.fill(arena.view_mut(Param { start: p.start + i, rows: 1, columns: 1 }), v);
            }
        }
        let draw = Draw { seed: self.seed, update: 3, shard: 1 };
        let mut tape = Tape::recording(device, &arena, Some(draw));
        let inputs: Vec<Var<D>> = (self.inputs.iter().enumerate())
            .map(|(i, &(rows, columns))| {
                let t = places.len() + i;
                let host = values(stream(self, t as u64), rows, columns);
                // Rows are scaled up again: activations are of order one.
                let host: Vec<f32> = host.iter().map(|v| v * (columns as f32).sqrt()).collect();
                let mut x = Tensor::from_values(device, rows, columns, &host);
                if let Some((i, v)) = nudged(t, &host) {
                    let mut view = x.view_mut();
                    (view.start, view.len) = (i, 1);
                    device.fill(view, v);
                }
                tape.input(x)
            })
            .collect();

        let mut tensors = Vec::new();
        let loss = if let Op::CrossEntropy { labels, factor, smoothing } = &self.op {
            let scale = CROSS_ENTROPY_WEIGHT;
            let losses =
                tape.cross_entropy_smoothed(&inputs[0], places[0], *factor, labels, scale, *smoothing);
            let sum = losses.iter().sum::<f64>() * scale;
            tensors.push(("losses".to_string(), losses));
            sum
        } else {
            let y = self.op.apply(&mut tape, &places, &inputs);
            let (rows, columns) = (y.tensor.rows, y.tensor.columns);
            let direction = (0..rows * columns).map(|i| normal(stream(self, 1000), i as u64) as f32);
            let direction = Tensor::from_values(device, rows, columns, &direction.collect::<Vec<_>>());
            tensors.push(("output".to_string(), device.read_f64(y.tensor.view())));
            tape.inject(&y, direction)
        };
        if how.forward_only {
            return Outcome { loss, tensors };
        }
        let mut gradients = Arena::zeros(device, &layout);
        device.fill(gradients.all_mut(), how.gradients);
        let input_gradients = tape.backward(&mut gradients, &inputs.iter().collect::<Vec<_>>());
        for (t, &p) in places.iter().enumerate() {
            tensors.push((format!("gradient of parameter {t}"), device.read_f64(gradients.view(p))));
        }
        for (i, g) in input_gradients.iter().enumerate() {
            tensors.push((format!("gradient of input {i}"), device.read_f64(g.view())));
        }
        Outcome { loss, tensors }
    }
}

impl Op {
    fn apply<'p, D: Device>(&self, tape: &mut Tape<'p, D>, p: &[Param], x: &[Var<D>]) -> Var<D> {
        match self {
            Op::Embedding { ids, drop } => tape.embedding(p[0], ids, tape.dropout(1, *drop)),
            Op::RmsNorm { drop } => tape.rms_norm(&x[0], p[0], EPS, tape.dropout(1, *drop)),
            Op::NormLinear => tape.norm_linear(&x[0], p[0], EPS, p[1]),
            Op::Linear => tape.linear(&x[0], p[0]),
            Op::LinearResidual { drop } => tape.linear_residual(&x[0], p[0], &x[1], tape.dropout(1, *drop)),
            Op::Activation { kind, gated, drop } => {
                tape.activation(&x[0], *kind, *gated, tape.dropout(1, *drop))
            }
            Op::SelfAttention { shape } => {
                tape.self_attention(&x[0], p.first().copied(), &Rc::new(shape.clone()))
            }
            Op::CrossAttention { shape } => {
                tape.cross_attention(&x[0], &x[1], p.first().copied(), &Rc::new(shape.clone()))
            }
            Op::StateAttention { shape, plain } => {
                let (bias, shape) = (p.get(2).copied(), Rc::new(shape.clone()));
                if *plain {
                    let key_value = tape.linear(&x[1], Param::adjacent(&p[..2]));
                    tape.cross_attention(&x[0], &key_value, bias, &shape)
                } else {
                    tape.state_attention(&x[0], &x[1], p[0], p[1], bias, &shape)
                }
            }
            Op::Of(op) => op.apply(tape, p, x),
            Op::CrossEntropy { .. } => unreachable!("is a root"),
            Op::Encoder { shape, drop, recompute } => {
                let (mut h, drop) = (x[0].clone(), *drop);
                for layer in 0..2 {
                    let block = encoder_layer(p, shape, layer, drop);
                    h = if *recompute { tape.recompute(&[&h], block) } else { block(tape, &[h]) };
                }
                h
            }
            Op::Decoder { shape, drop, recompute } => {
                let (mut h, drop) = (x[0].clone(), *drop);
                let key_value = tape.linear(&x[1], p[0]);
                for layer in 0..2 {
                    let block = decoder_layer(p, shape, layer, drop);
                    h = match recompute {
                        true => tape.recompute(&[&h, &key_value], block),
                        false => block(tape, &[h, key_value.clone()]),
                    };
                }
                h
            }
        }
    }
}

/// The shape with the tape's dropout of a site.
fn dropped<D: Device>(
    tape: &Tape<'_, D>,
    shape: &AttentionShape,
    site: u64,
    drop: f64,
) -> Rc<AttentionShape> {
    Rc::new(AttentionShape { dropout: tape.dropout(site, drop), ..shape.clone() })
}

/// Parameters: norm, query, key, value, output, second norm, both halves of the gated input, output, bias table.
fn encoder_layer<'p, D: Device>(
    p: &[Param],
    shape: &AttentionShape,
    layer: u64,
    drop: f64,
) -> impl Fn(&mut Tape<'p, D>, &[Var<D>]) -> Var<D> + 'p + use<'p, D> {
    let (p, shape, site) = (p.to_vec(), shape.clone(), 10 * layer);
    move |tape, x| {
        let shape = dropped(tape, &shape, site, drop);
        let qkv = tape.norm_linear(&x[0], p[0], EPS, Param::adjacent(&p[1..4]));
        let a = tape.self_attention(&qkv, Some(p[8]), &shape);
        let h = tape.linear_residual(&a, p[4], &x[0], tape.dropout(site + 1, drop));
        let u = tape.norm_linear(&h, p[5], EPS, p[6]);
        let f = tape.activation(&u, Activation::GeluTanh, true, tape.dropout(site + 2, drop));
        tape.linear_residual(&f, p[7], &h, tape.dropout(site + 3, drop))
    }
}

/// Inputs: rows, keys and values. Parameters: keys and values (not used here), query, output, bias table.
fn decoder_layer<'p, D: Device>(
    p: &[Param],
    shape: &AttentionShape,
    layer: u64,
    drop: f64,
) -> impl Fn(&mut Tape<'p, D>, &[Var<D>]) -> Var<D> + 'p + use<'p, D> {
    let (p, shape, site) = (p.to_vec(), shape.clone(), 10 * layer);
    move |tape, x| {
        let shape = dropped(tape, &shape, site, drop);
        let q = tape.linear(&x[0], p[1]);
        let a = tape.cross_attention(&q, &x[1], Some(p[3]), &shape);
        tape.linear_residual(&a, p[2], &x[0], tape.dropout(site + 1, drop))
    }
}
