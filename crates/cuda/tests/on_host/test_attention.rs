//! Attention at the limits of its kernels: widths of heads, tiles, windows, fewer keys than queries, no keys, one token.

use std::sync::Arc;

use tercio_engine::device::{Device, Heads, HeadsMut};
use tercio_engine::random::key;
use tercio_engine::{AttentionShape, Dropout, RelativeBuckets, Span, Tensor};

use super::{check, draw};

fn spans(lengths: &[usize]) -> Vec<Span> {
    let mut offsets = vec![0u32];
    lengths.iter().for_each(|n| offsets.push(offsets[offsets.len() - 1] + *n as u32));
    Span::from_offsets(&offsets)
}

fn shape(heads: usize, head_dim: usize, queries: &[usize], keys: &[usize]) -> AttentionShape {
    AttentionShape {
        heads,
        head_dim,
        queries: spans(queries),
        keys: spans(keys),
        first_query: 0,
        causal: false,
        window: None,
        scale: 1.0 / (head_dim as f64).sqrt(),
        buckets: None,
        dropout: None,
    }
}

/// T5's own number of buckets, over more distances than a tile has.
fn buckets(key_positions: Option<Vec<u32>>) -> Option<Arc<RelativeBuckets>> {
    let bucket = (0..81u16).map(|i| (i * 7) % 32).collect();
    Some(Arc::new(RelativeBuckets { bucket, zero: 40, buckets: 32, key_positions }))
}

fn tensor<D: Device>(d: &D, what: u64, rows: usize, columns: usize) -> Tensor<D> {
    Tensor::from_values(d, rows, columns, &draw(&[what, rows as u64, columns as u64], rows * columns))
}

fn rows(spans: &[Span]) -> usize {
    spans.last().map_or(0, |s| s.end as usize)
}

/// Forward and backward, of rows [query, key, value] or of queries beside keys and values.
fn run(what: &str, shape: &AttentionShape, fused: bool) {
    let inner = shape.heads * shape.head_dim;
    let (nq, nk) = (rows(&shape.queries), rows(&shape.keys));
    let widths = if fused { vec![(nq, 3 * inner)] } else { vec![(nq, inner), (nk, 2 * inner)] };
    let table = shape.buckets.as_ref().map_or(0, |b| b.buckets);
    // The slopes of scores are differences from y dy, whose y was rounded.
    check!(what, (6e-2, 0.5), |d| {
        let x: Vec<_> = (0..).zip(&widths).map(|(i, &(rows, width))| tensor(d, i, rows, width)).collect();
        let heads = || match &x[..] {
            [x] => Heads::Fused(x.view()),
            [q, kv] => Heads::Split { query: q.view(), key_value: kv.view() },
            _ => unreachable!("one or two inputs"),
        };
        let bias = tensor(d, 7, table, shape.heads);
        let bias = (table > 0).then(|| bias.view());
        let (mut y, mut log_sum) = (Tensor::zeros(d, nq, inner), Tensor::zeros(d, nq, shape.heads));
        d.attention(heads(), bias, shape, y.view_mut(), log_sum.view_mut());
        let dy = tensor(d, 8, nq, inner);
        let mut dx: Vec<_> = widths.iter().map(|&(rows, width)| Tensor::zeros(d, rows, width)).collect();
        let out = match &mut dx[..] {
            [x] => HeadsMut::Fused(x.view_mut()),
            [q, kv] => HeadsMut::Split { query: q.view_mut(), key_value: kv.view_mut() },
            _ => unreachable!("one or two inputs"),
        };
        let mut dbias = tensor(d, 9, table, shape.heads);
        let target = (table > 0).then(|| dbias.view_mut());
        d.attention_backward(heads(), bias, shape, y.view(), log_sum.view(), dy.view(), out, target);
        let mut results = vec![
            ("y", d.read_f64(y.view())),
            ("log sum", d.read_f64(log_sum.view())),
            ("dbias", d.read_f64(dbias.view())),
        ];
        results.extend(dx.iter().map(|t| ("dx", d.read_f64(t.view()))));
        results
    });
}

/// Every width of a kernel's name, the widths beside it, and a single column; sequences of one token, of none, of a tile and
/// one row more.
#[test]
fn widths_of_heads() {
    for dim in [1, 7, 32, 33, 64, 65, 128] {
        let lengths = [1, 0, 32, 33, 5];
        let dropout = Dropout::new(key(&[dim as u64]), 0.2);
        let s = AttentionShape { dropout, ..shape(2, dim, &lengths, &lengths) };
        run(&format!("heads of {dim}"), &s, true);
    }
}

#[test]
fn windows_and_causality() {
    let lengths = [70, 3, 0, 33];
    for window in [None, Some(0), Some(5), Some(40)] {
        for causal in [false, true] {
            let dropout = Dropout::new(key(&[3]), 0.3).filter(|_| window != Some(5));
            let s = AttentionShape { window, causal, dropout, ..shape(1, 8, &lengths, &lengths) };
            run(&format!("window {window:?}, causal {causal}"), &s, true);
        }
    }
}

/// ColBERT's expansion tokens ask but are not attended to: a sequence may have fewer keys than queries, and none at all.
#[test]
fn fewer_keys_than_queries() {
    let mut s = shape(2, 16, &[40, 3, 36], &[40, 3, 36]);
    s.keys = vec![Span { start: 0, end: 33 }, Span { start: 40, end: 40 }, Span { start: 43, end: 44 }];
    run("fewer keys", &s, true);
    run("fewer keys, windowed", &AttentionShape { window: Some(2), ..s }, true);
}

#[test]
fn relative_bias() {
    let lengths = [50, 1, 0, 34];
    let own = AttentionShape { buckets: buckets(None), scale: 1.0, ..shape(3, 12, &lengths, &lengths) };
    run("bias", &own, true);
    run("bias, causal", &AttentionShape { causal: true, dropout: Dropout::new(1, 0.2), ..own }, true);
    let cross = shape(2, 64, &[9, 0, 33, 1], &[100, 4, 0, 1]);
    run("cross", &cross, false);
    // Positions with gaps, as padding between passages leaves them.
    let positions = (0..105u32).map(|j| (j % 100) + 3 * (j % 100 / 9)).collect();
    let placed = AttentionShape { buckets: buckets(Some(positions)), ..cross };
    run("cross, bias by positions", &placed, false);
    let step = AttentionShape {
        buckets: buckets(None),
        first_query: 36,
        causal: true,
        ..shape(2, 16, &[1, 1], &[37, 20])
    };
    run("one step of decoding", &step, false);
}

/// The widest heads with T5's buckets take the most shared memory, which the shim refuses beyond what GPUs have.
#[test]
fn widest_heads_with_a_bias() {
    let s = AttentionShape { buckets: buckets(None), ..shape(1, 128, &[35], &[40]) };
    run("widest", &s, false);
}
