//! The operations of encoders: LayerNorm, biases, rotary positions, pooling; and a post-norm stack of them.

use std::rc::Rc;

use tercio_engine::ops::rotary::positions;
use tercio_engine::random::key;
use tercio_engine::{
    Activation, AttentionShape, Device, Dropout, Hidden, LayerNorm, MaxSimShape, Normed, Param, Rotary, Span,
    Tape, Var,
};

use super::cases::{Sizes, self_shape};
use super::{Case, EPS, Op, dropped};

/// `drop` is a dropout probability, keyed by the tape.
#[derive(Clone)]
pub enum EncoderOp {
    LayerNorm {
        drop: f64,
    },
    /// Linear layer with a bias, of the rows or of their LayerNorm.
    Linear {
        norm: bool,
    },
    /// Linear layer, dropout and residual, which may be a LayerNorm.
    SubLayerEnd {
        bias: bool,
        norm: bool,
        drop: f64,
    },
    FeedForwardEnd {
        kind: Activation,
        gated: bool,
        bias: bool,
        norm: bool,
        drop: f64,
    },
    EmbeddingSum {
        ids: [Vec<u32>; 3],
        /// For every table the row that gets no gradient.
        frozen: [Option<u32>; 3],
    },
    Rotary {
        heads: usize,
        spans: Vec<Span>,
        /// Somebody else holds the input too.
        shared: bool,
    },
    SpanMeans {
        spans: Vec<Span>,
    },
    Rows {
        picked: Vec<u32>,
    },
    Normalize {
        least: f64,
    },
    Sum,
    /// Of two tensors, or of one with itself.
    MaxSim {
        shape: MaxSimShape,
    },
    /// Two post-norm layers that share their parameters, after a norm and before one.
    PostNorm {
        shape: AttentionShape,
        drop: f64,
        recompute: bool,
    },
}

impl EncoderOp {
    pub fn apply<'p, D: Device>(&self, tape: &mut Tape<'p, D>, p: &[Param], x: &[Var<D>]) -> Var<D> {
        match self {
            EncoderOp::LayerNorm { drop } => tape.layer_norm(&x[0], norm_of(p[0]), tape.dropout(1, *drop)),
            EncoderOp::Linear { norm } => {
                let n = tape.normed(&x[0], norm.then(|| norm_of(p[2])));
                tape.linear_bias(&n, p[0], Some(p[1]))
            }
            EncoderOp::SubLayerEnd { bias, norm, drop } => {
                let (bias, norm) = (bias.then(|| p[1]), norm.then(|| norm_of(p[2])));
                let n = tape.normed(&x[1], norm);
                let dropout = tape.dropout(1, *drop);
                tape.linear_bias_residual(&x[0], p[0], bias, &n, dropout)
            }
            EncoderOp::FeedForwardEnd { kind, gated, bias, norm, drop } => {
                let hidden = Hidden {
                    bias: bias.then(|| p[2]),
                    kind: *kind,
                    gated: *gated,
                    dropout: tape.dropout(1, *drop),
                };
                let n = tape.normed(&x[1], norm.then(|| norm_of(p[3])));
                let dropout = tape.dropout(2, *drop);
                tape.feed_forward_end(&x[0], hidden, p[0], bias.then(|| p[1]), &n, dropout)
            }
            EncoderOp::EmbeddingSum { ids, frozen } => {
                let tables: Vec<(Param, &[u32], Option<u32>)> = p
                    .iter()
                    .zip(ids)
                    .zip(frozen)
                    .map(|((p, ids), frozen)| (*p, ids.as_slice(), *frozen))
                    .collect();
                tape.embedding_sum(&tables)
            }
            EncoderOp::Rotary { heads, spans, shared } => {
                let (rows, columns) = (x[0].tensor.rows, x[0].tensor.columns);
                let longest = spans.iter().map(Span::len).max().unwrap_or(0);
                let rotary = Rc::new(Rotary::new(100.0, columns / 3 / heads, longest));
                let given = match shared {
                    true => x[0].clone(),
                    // A value of its own, so that its memory may be written.
                    false => tape.rows(&x[0], &(0..rows as u32).collect::<Vec<_>>()),
                };
                tape.rotary(given, &rotary, &positions(spans, rows))
            }
            EncoderOp::SpanMeans { spans } => tape.span_means(&x[0], spans),
            EncoderOp::Rows { picked } => tape.rows(&x[0], picked),
            EncoderOp::Normalize { least } => tape.normalize(&x[0], *least),
            EncoderOp::Sum => tape.sum(&x[0], &x[1]),
            EncoderOp::MaxSim { shape } => {
                tape.max_sim(&x[0], x.last().expect("an input"), &Rc::new(shape.clone()))
            }
            EncoderOp::PostNorm { shape, drop, recompute } => {
                let mut h = tape.layer_norm(&x[0], norm_of(p[10]), tape.dropout(0, *drop));
                for layer in 0..2 {
                    // The first layer reads normalised rows, the next the sum of the one before.
                    let norm = (layer > 0).then(|| norm_of(p[9]));
                    let block = post_norm_layer(p, shape, layer, *drop, norm);
                    h = if *recompute { tape.recompute(&[&h], block) } else { block(tape, &[h]) };
                }
                tape.layer_norm(&h, norm_of(p[9]), None)
            }
        }
    }
}

/// A norm with as many rows of parameters as the case has.
fn norm_of(place: Param) -> LayerNorm {
    LayerNorm { place, eps: EPS }
}

/// Parameters: query, key and value with bias, output with bias, norm, input with bias, output with bias, norm.
fn post_norm_layer<'p, D: Device>(
    p: &[Param],
    shape: &AttentionShape,
    layer: u64,
    drop: f64,
    norm: Option<LayerNorm>,
) -> impl Fn(&mut Tape<'p, D>, &[Var<D>]) -> Var<D> + 'p + use<'p, D> {
    let (p, shape, site) = (p.to_vec(), shape.clone(), 10 * layer);
    move |tape, x| {
        let shape = dropped(tape, &shape, site, drop);
        let n: Normed<D> = tape.normed(&x[0], norm);
        let qkv = tape.linear_bias(&n, p[0], Some(p[1]));
        let a = tape.self_attention(&qkv, None, &shape);
        let dropout = tape.dropout(site + 1, drop);
        let s = tape.linear_bias_residual(&a, p[2], Some(p[3]), &n, dropout);
        let n = tape.normed(&s, Some(norm_of(p[4])));
        let u = tape.linear_bias(&n, p[5], None);
        let hidden = Hidden { bias: Some(p[6]), kind: Activation::GeluErf, gated: false, dropout: None };
        let dropout = tape.dropout(site + 2, drop);
        tape.feed_forward_end(&u, hidden, p[7], Some(p[8]), &n, dropout)
    }
}

/// Name, operation, sizes of parameters, sizes of inputs.
type Listed = (String, EncoderOp, Vec<(usize, usize)>, Vec<(usize, usize)>);

fn sub_layers(s: &Sizes) -> Vec<Listed> {
    let (rows, w, out) = (s.rows, s.width, s.width + 2);
    let mut list = Vec::new();
    for drop in [0.0, 0.3] {
        for (with, lines) in [("", 1), (" and bias", 2)] {
            let name = format!("layer norm with weight{with}, drop {drop}");
            list.push((name, EncoderOp::LayerNorm { drop }, vec![(lines, w)], vec![(rows, w)]));
        }
        for (bias, norm) in [(true, true), (true, false), (false, true), (false, false)] {
            let name = format!("linear, bias {bias}, with residual, norm {norm}, drop {drop}");
            let parameters =
                [(out, w), (1, out), (2, out)][..if norm { 3 } else { 1 + bias as usize }].to_vec();
            let inputs = vec![(rows, w), (rows, out)];
            list.push((name, EncoderOp::SubLayerEnd { bias, norm, drop }, parameters, inputs));
        }
        for (kind, gated, bias, norm) in [
            (Activation::GeluErf, false, true, true),
            (Activation::Relu, false, true, false),
            (Activation::GeluTanh, false, false, true),
            (Activation::GeluErf, true, false, false),
            (Activation::Silu, true, true, true),
        ] {
            let stored = if gated { 2 * w } else { w };
            let name =
                format!("feed-forward, {kind:?}, gated {gated}, bias {bias}, norm {norm}, drop {drop}");
            let parameters = vec![(out, w), (1, out), (1, stored), (2, out)];
            let op = EncoderOp::FeedForwardEnd { kind, gated, bias, norm, drop };
            list.push((name, op, parameters, vec![(rows, stored), (rows, out)]));
        }
    }
    for norm in [false, true] {
        let parameters = [(out, w), (1, out), (2, w)][..if norm { 3 } else { 2 }].to_vec();
        list.push((
            format!("linear with bias, norm {norm}"),
            EncoderOp::Linear { norm },
            parameters,
            vec![(rows, w)],
        ));
    }
    list
}

fn post_norm(s: &Sizes, recompute: bool) -> Listed {
    let (w, inner, f) = (s.width, s.heads * s.head_dim, s.width + 1);
    let parameters = vec![
        (3 * inner, w),
        (1, 3 * inner),
        (w, inner),
        (1, w),
        (2, w),
        (f, w),
        (1, f),
        (w, f),
        (1, w),
        (2, w),
        (2, w),
    ];
    let shape = AttentionShape { scale: 1.0 / (s.head_dim as f64).sqrt(), ..self_shape(s) };
    let name = format!("{}post-norm layers", if recompute { "recomputed " } else { "" });
    let op = EncoderOp::PostNorm { shape, drop: 0.2, recompute };
    (name, op, parameters, vec![(s.lengths.iter().sum(), w)])
}

/// The first half of every span, at least a row.
fn first_halves(spans: &[Span]) -> Vec<Span> {
    spans.iter().map(|s| Span { end: s.start + (s.len() as u32).div_ceil(2), ..*s }).collect()
}

/// Self-attention as encoders with local layers, and those with tokens that only ask, have it.
fn attentions(s: &Sizes) -> Vec<(&'static str, AttentionShape)> {
    let dropout = |site: u64| Dropout::new(key(&[s.seed, site]), 0.3);
    let own = AttentionShape { scale: 1.0 / (s.head_dim as f64).sqrt(), ..self_shape(s) };
    let keys = first_halves(&own.keys);
    vec![
        ("window, dropout", AttentionShape { window: Some(2), dropout: dropout(6), ..own.clone() }),
        ("wide window", AttentionShape { window: Some(64), ..own.clone() }),
        ("window, causal", AttentionShape { window: Some(1), causal: true, ..own.clone() }),
        (
            "fewer keys than queries, dropout",
            AttentionShape { keys: keys.clone(), dropout: dropout(7), ..own.clone() },
        ),
        ("fewer keys than queries, window", AttentionShape { keys, window: Some(1), ..own.clone() }),
    ]
}

/// Late interaction: everything with everything, chosen pairs under a mask that leaves one document empty, and within one tensor.
fn max_sims(s: &Sizes) -> Vec<Listed> {
    let queries = self_shape(s).queries;
    let ends = s.pairs.iter().scan(0, |at, p| {
        let start = *at;
        *at += p.1 as u32;
        Some(Span { start, end: *at })
    });
    let documents: Vec<Span> = ends.collect();
    let tokens: usize = s.lengths.iter().sum();
    let rows = documents.last().map_or(0, |d| d.end as usize);
    let all = MaxSimShape::all(queries.clone(), documents.clone());
    let mut masked = first_halves(&documents);
    masked[1].end = masked[1].start;
    let (first, last) = (0, queries.len() as u32 - 1);
    let pairs = vec![(last, 0), (first, 1), (first, 2), (1, 0), (last, 2), (first, 1)];
    // The empty one has no floor.
    let floors = (0..masked.len()).map(|d| d != 1).collect();
    let retrieved = 0;
    let chosen = MaxSimShape { queries: queries.clone(), documents: masked, pairs, floors, retrieved };
    let (own, theirs) = queries.split_at(1);
    let within = MaxSimShape::all(own.to_vec(), theirs.to_vec());
    let xtr = |shape: &MaxSimShape, retrieved| MaxSimShape { floors: vec![], retrieved, ..shape.clone() };
    let xtrs =
        [("XTR, all", &all, 1 << 20, true), ("XTR, 2", &all, 2, true), ("XTR, chosen, 3", &chosen, 3, true)];
    let one = [("XTR, one tensor, 1", &within, 1, false)];
    let xtrs = xtrs.into_iter().chain(one).map(|(name, shape, count, two)| (name, xtr(shape, count), two));
    let xtrs: Vec<_> = xtrs.collect();
    [("all", all, true), ("chosen, floor", chosen, true), ("one tensor", within, false)]
        .into_iter()
        .chain(xtrs)
        .map(|(name, shape, two)| {
            let inputs = [(tokens, s.width), (rows, s.width)][..if two { 2 } else { 1 }].to_vec();
            (format!("MaxSim, {name}"), EncoderOp::MaxSim { shape }, vec![], inputs)
        })
        .collect()
}

/// Every operation at these sizes.
pub fn encoder_cases(s: &Sizes) -> Vec<Case> {
    let (rows, w) = (s.rows, s.width);
    let mut list = sub_layers(s);
    let draw = |what: u64, i: usize, below: usize| (key(&[s.seed, what, i as u64]) % below as u64) as u32;
    let ids = [s.classes, 3, 1];
    let drawn = [0, 1, 2].map(|t| (0..rows).map(|i| draw(t, i, ids[t as usize])).collect());
    let tables: Vec<_> = ids.iter().map(|&n| (n, w)).collect();
    let mut padded: [Vec<u32>; 3] = drawn.clone();
    for row in [0, rows / 2, (rows / 2 + 1).min(rows - 1), rows - 1] {
        padded[0][row] = 1;
    }
    let sum = EncoderOp::EmbeddingSum { ids: drawn, frozen: [None; 3] };
    list.push(("sum of embeddings".into(), sum, tables.clone(), vec![]));

    let spans = self_shape(s).queries;
    let tokens: usize = s.lengths.iter().sum();
    let even = 3 * s.heads * 2 * s.head_dim.div_ceil(2);
    for shared in [false, true] {
        let op = EncoderOp::Rotary { heads: s.heads, spans: spans.clone(), shared };
        list.push((format!("rotary, shared {shared}"), op, vec![], vec![(tokens, even)]));
    }
    list.push(("means of spans".into(), EncoderOp::SpanMeans { spans }, vec![], vec![(tokens, w)]));
    let picked = (0..rows).map(|i| draw(9, i, rows)).collect();
    list.push(("picked rows".into(), EncoderOp::Rows { picked }, vec![], vec![(rows, w)]));
    for least in [1e-12, 4.0] {
        list.push((format!("unit rows, {least}"), EncoderOp::Normalize { least }, vec![], vec![(rows, w)]));
    }
    list.extend([post_norm(s, false), post_norm(s, true)]);
    let mut list: Vec<_> = list.into_iter().map(|(name, op, p, x)| (name, Op::Of(op), p, x)).collect();
    for (gated, drop) in [(false, 0.0), (true, 0.3)] {
        let (stored, kind) = (if gated { 2 * w } else { w }, Activation::Tanh);
        let name = format!("{kind:?}, gated {gated}, drop {drop}");
        list.push((name, Op::Activation { kind, gated, drop }, vec![], vec![(rows, stored)]));
    }
    let inputs = vec![(tokens, 3 * s.heads * s.head_dim)];
    for (name, shape) in attentions(s) {
        list.push((name.into(), Op::SelfAttention { shape }, vec![], inputs.clone()));
    }
    // New cases end the list: a case's values come from its place.
    let sum = EncoderOp::EmbeddingSum { ids: padded, frozen: [Some(1), Some(2), Some(0)] };
    list.push(("sum of embeddings, frozen rows".into(), Op::Of(sum), tables, vec![]));
    list.push(("sum".into(), Op::Of(EncoderOp::Sum), vec![], vec![(rows, w); 2]));
    list.extend(max_sims(s).into_iter().map(|(name, op, p, x)| (name, Op::Of(op), p, x)));
    let case = |(i, (name, op, parameters, inputs)): (usize, (String, Op, _, _))| Case {
        name: format!("{name}, rows {rows}, width {w}, {} x {}", s.heads, s.head_dim),
        op,
        parameters,
        inputs,
        seed: key(&[s.seed, 1000 + i as u64]),
    };
    list.into_iter().enumerate().map(case).collect()
}
