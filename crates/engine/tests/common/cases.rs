//! The list of cases: every operation with every variant, for given sizes.

use std::sync::Arc;

use tercio_engine::random::key;
use tercio_engine::{Activation, AttentionShape, Dropout, RelativeBuckets, Span};

use super::encoder::encoder_cases;
use super::{Case, Op};

/// Sizes that a list of cases is made for.
#[derive(Clone)]
pub struct Sizes {
    pub rows: usize,
    pub width: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// Rows of the sequences of self-attention.
    pub lengths: Vec<usize>,
    /// Query and key rows of the sequences of cross-attention.
    pub pairs: Vec<(usize, usize)>,
    pub classes: usize,
    pub seed: u64,
}

impl Sizes {
    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }
}

fn spans(lengths: impl Iterator<Item = usize>) -> Vec<Span> {
    let mut offsets = vec![0u32];
    offsets.extend(lengths.scan(0, |at, n| {
        *at += n as u32;
        Some(*at)
    }));
    Span::from_offsets(&offsets)
}

const BUCKETS: usize = 5;

/// A table that is read at distances -6 to 6 and clamped beyond, nearer keys and later keys in other buckets.
fn buckets(key_positions: Option<Vec<u32>>) -> Option<Arc<RelativeBuckets>> {
    let bucket = (0..13u16).map(|i| i * 7 % BUCKETS as u16).collect();
    Some(Arc::new(RelativeBuckets { bucket, zero: 6, buckets: BUCKETS, key_positions }))
}

pub fn self_shape(s: &Sizes) -> AttentionShape {
    AttentionShape {
        heads: s.heads,
        head_dim: s.head_dim,
        queries: spans(s.lengths.iter().copied()),
        keys: spans(s.lengths.iter().copied()),
        first_query: 0,
        causal: false,
        window: None,
        scale: 1.0,
        buckets: None,
        dropout: None,
    }
}

fn cross_shape(s: &Sizes) -> AttentionShape {
    AttentionShape {
        queries: spans(s.pairs.iter().map(|p| p.0)),
        keys: spans(s.pairs.iter().map(|p| p.1)),
        ..self_shape(s)
    }
}

/// Positions with gaps, as padding between passages leaves them.
fn positions(keys: &[Span]) -> Vec<u32> {
    keys.iter().flat_map(|s| (0..s.len() as u32).map(|j| j + 2 * (j / 3))).collect()
}

fn attentions(s: &Sizes) -> Vec<(String, Op, bool)> {
    let drop = |site: u64| Dropout::new(key(&[s.seed, site]), 0.3);
    let (own, cross) = (self_shape(s), cross_shape(s));
    let scale = 1.0 / (s.head_dim as f64).sqrt();
    let of = |shape| Op::SelfAttention { shape };
    let over = |shape| Op::CrossAttention { shape };
    let steps = AttentionShape {
        queries: spans(s.pairs.iter().map(|_| 1)),
        keys: spans(s.pairs.iter().map(|_| 5)),
        first_query: 3,
        causal: true,
        buckets: buckets(None),
        ..cross.clone()
    };
    let placed = buckets(Some(positions(&cross.keys)));
    vec![
        ("self-attention".into(), of(own.clone()), false),
        (
            "self-attention, scaled, dropout".into(),
            of(AttentionShape { scale, dropout: drop(1), ..own.clone() }),
            false,
        ),
        ("self-attention, causal".into(), of(AttentionShape { causal: true, ..own.clone() }), false),
        ("self-attention, bias".into(), of(AttentionShape { buckets: buckets(None), ..own.clone() }), true),
        (
            "self-attention, causal, bias, scaled, dropout".into(),
            of(AttentionShape {
                causal: true,
                buckets: buckets(None),
                scale,
                dropout: drop(2),
                ..own.clone()
            }),
            true,
        ),
        ("cross-attention".into(), over(cross.clone()), false),
        (
            "cross-attention, dropout".into(),
            over(AttentionShape { dropout: drop(3), ..cross.clone() }),
            false,
        ),
        (
            "cross-attention, bias".into(),
            over(AttentionShape { buckets: buckets(None), ..cross.clone() }),
            true,
        ),
        (
            "cross-attention, bias by key positions, dropout".into(),
            over(AttentionShape { buckets: placed, dropout: drop(4), scale, ..cross.clone() }),
            true,
        ),
        ("cross-attention, one step, causal, bias".into(), over(steps), true),
    ]
}

/// Attention over hidden states at these sizes, or the same mathematics with keys and values.
pub fn state_attentions(s: &Sizes, plain: bool) -> Vec<Case> {
    let cross = cross_shape(s);
    let inner = s.heads * s.head_dim;
    let rows = |spans: &[Span]| spans.last().map_or(0, |s| s.end as usize);
    let drop = Dropout::new(key(&[s.seed, 5]), 0.3);
    let placed = buckets(Some(positions(&cross.keys)));
    let scale = 1.0 / (s.head_dim as f64).sqrt();
    let shapes = [
        ("", AttentionShape { scale, ..cross.clone() }),
        (", dropout", AttentionShape { scale, dropout: drop, ..cross.clone() }),
        (", bias", AttentionShape { scale, buckets: buckets(None), first_query: 2, ..cross.clone() }),
        (
            ", bias by key positions, dropout",
            AttentionShape { scale, buckets: placed, dropout: drop, ..cross.clone() },
        ),
    ];
    let case = |(i, (name, shape)): (usize, (&str, AttentionShape))| {
        let mut parameters = vec![(inner, s.width); 2];
        parameters.extend(shape.buckets.is_some().then_some((BUCKETS, s.heads)));
        let inputs = vec![(rows(&shape.queries), inner), (rows(&shape.keys), s.width)];
        let name = format!("attention over states{name}, width {}, {} x {}", s.width, s.heads, s.head_dim);
        Case {
            name,
            op: Op::StateAttention { shape, plain },
            parameters,
            inputs,
            seed: key(&[s.seed, 50, i as u64]),
        }
    };
    shapes.into_iter().enumerate().map(case).collect()
}

/// Every operation at these sizes.
pub fn cases(s: &Sizes) -> Vec<Case> {
    let (rows, width, inner) = (s.rows, s.width, s.heads * s.head_dim);
    let mut cases = Vec::new();
    let mut add = |name: String, op: Op, parameters: Vec<(usize, usize)>, inputs: Vec<(usize, usize)>| {
        let seed = key(&[s.seed, cases.len() as u64]);
        let name = format!("{name}, rows {rows}, width {width}, {} x {}", s.heads, s.head_dim);
        cases.push(Case { name, op, parameters, inputs, seed });
    };
    let draw = |i: usize, below: usize| (key(&[s.seed, 77, i as u64]) % below as u64) as u32;
    let ids: Vec<u32> = (0..rows).map(|i| draw(i, s.classes)).collect();
    let out = width + 2;

    for drop in [0.0, 0.3] {
        let d = if drop > 0.0 { ", dropout" } else { "" };
        let embedding = Op::Embedding { ids: ids.clone(), drop };
        add(format!("embedding{d}"), embedding, vec![(s.classes, width)], vec![]);
        add(format!("rms norm{d}"), Op::RmsNorm { drop }, vec![(1, width)], vec![(rows, width)]);
        let inputs = vec![(rows, width), (rows, out)];
        add(format!("linear with residual{d}"), Op::LinearResidual { drop }, vec![(out, width)], inputs);
        // Later ones are in `encoder_cases`: a case's values come from its place in the list.
        for kind in [Activation::Relu, Activation::GeluTanh, Activation::GeluErf, Activation::Silu] {
            for gated in [false, true] {
                let stored = if gated { 2 * width } else { width };
                let name = format!("{kind:?}{}{d}", if gated { ", gated" } else { "" });
                add(name, Op::Activation { kind, gated, drop }, vec![], vec![(rows, stored)]);
            }
        }
    }
    add("norm and linear".into(), Op::NormLinear, vec![(1, width), (out, width)], vec![(rows, width)]);
    add("linear".into(), Op::Linear, vec![(out, width)], vec![(rows, width)]);
    for (name, op, bias) in attentions(s) {
        let inputs = match &op {
            Op::CrossAttention { shape } => {
                let rows = |spans: &[Span]| spans.last().map_or(0, |s| s.end as usize);
                vec![(rows(&shape.queries), inner), (rows(&shape.keys), 2 * inner)]
            }
            _ => vec![(s.tokens(), 3 * inner)],
        };
        add(name, op, if bias { vec![(BUCKETS, s.heads)] } else { vec![] }, inputs);
    }
    for case in state_attentions(s, false) {
        cases.push(case);
    }
    let mut add = |name: String, op: Op, parameters: Vec<(usize, usize)>, inputs: Vec<(usize, usize)>| {
        let seed = key(&[s.seed, cases.len() as u64]);
        let name = format!("{name}, rows {rows}, width {width}, {} x {}", s.heads, s.head_dim);
        cases.push(Case { name, op, parameters, inputs, seed });
    };
    // More rows than a block of logits, so that blocks meet.
    let many = rows.max(tercio_engine::ops::cross_entropy::BLOCK + 6);
    for (factor, smoothing) in [(1.0, 0.0), (0.6, 0.0), (0.6, 0.1), (1.0, 0.7)] {
        let labels = (0..many).map(|i| draw(i, s.classes)).collect();
        let name = format!("cross-entropy, factor {factor}, smoothing {smoothing}");
        add(
            name,
            Op::CrossEntropy { labels, factor, smoothing },
            vec![(s.classes, width)],
            vec![(many, width)],
        );
    }
    for recompute in [false, true] {
        let name = if recompute { "recomputed " } else { "" };
        add(
            format!("{name}encoder"),
            encoder(s, recompute),
            encoder_parameters(s),
            vec![(s.tokens(), width)],
        );
        let pair = |of: fn(&(usize, usize)) -> usize| s.pairs.iter().map(of).sum::<usize>();
        let inputs = vec![(pair(|p| p.0), width), (pair(|p| p.1), width)];
        add(format!("{name}decoder"), decoder(s, recompute), decoder_parameters(s), inputs);
    }
    cases.extend(encoder_cases(s));
    cases
}

fn encoder(s: &Sizes, recompute: bool) -> Op {
    let shape = AttentionShape { buckets: buckets(None), ..self_shape(s) };
    Op::Encoder { shape, drop: 0.2, recompute }
}
fn encoder_parameters(s: &Sizes) -> Vec<(usize, usize)> {
    let (w, inner, f) = (s.width, s.heads * s.head_dim, s.width + 1);
    vec![
        (1, w),
        (inner, w),
        (inner, w),
        (inner, w),
        (w, inner),
        (1, w),
        (2 * f, w),
        (w, f),
        (BUCKETS, s.heads),
    ]
}
fn decoder(s: &Sizes, recompute: bool) -> Op {
    let shape = cross_shape(s);
    let shape = AttentionShape { buckets: buckets(Some(positions(&shape.keys))), ..shape };
    Op::Decoder { shape, drop: 0.2, recompute }
}
fn decoder_parameters(s: &Sizes) -> Vec<(usize, usize)> {
    let (w, inner) = (s.width, s.heads * s.head_dim);
    vec![(2 * inner, w), (inner, w), (w, inner), (BUCKETS, s.heads)]
}
