//! Attention of the reference: one query row and one head at a time, the weights of a row held whole.
//! The backward computes the weights anew; it trusts neither the stored output nor the stored log-sums.

use super::{Reference, factor, rows};
use crate::device::{AttentionShape, Heads, HeadsMut};

/// Where query, key and value of a row begin.
struct Inputs<'a> {
    query: &'a [f64],
    key: &'a [f64],
    value: &'a [f64],
    query_stride: usize,
    key_stride: usize,
    dim: usize,
}

impl<'a> Inputs<'a> {
    fn new(x: Heads<'a, Reference>, shape: &AttentionShape) -> Self {
        assert_eq!(shape.queries.len(), shape.keys.len());
        let (inner, dim) = (shape.heads * shape.head_dim, shape.head_dim);
        match x {
            Heads::Fused(x) => {
                let x = x.slice();
                let part = |i: usize| x.get(i * inner..).unwrap_or(&[]);
                let (query_stride, key_stride) = (3 * inner, 3 * inner);
                Inputs { query: part(0), key: part(1), value: part(2), query_stride, key_stride, dim }
            }
            Heads::Split { query, key_value } => {
                let (query, key_value) = (query.slice(), key_value.slice());
                let value = key_value.get(inner..).unwrap_or(&[]);
                Inputs { query, key: key_value, value, query_stride: inner, key_stride: 2 * inner, dim }
            }
        }
    }
    fn query(&self, row: usize, head: usize) -> &'a [f64] {
        &self.query[row * self.query_stride + head * self.dim..][..self.dim]
    }
    fn key(&self, row: usize, head: usize) -> &'a [f64] {
        &self.key[row * self.key_stride + head * self.dim..][..self.dim]
    }
    fn value(&self, row: usize, head: usize) -> &'a [f64] {
        &self.value[row * self.key_stride + head * self.dim..][..self.dim]
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// One query row of one head: which packed rows it attends to, the entry of the bias table of each, and the scores.
struct Row {
    query: usize,
    head: usize,
    keys: Vec<usize>,
    table: Vec<Option<usize>>,
    scores: Vec<f64>,
}

/// Every row of every sequence and head, in order.
fn each_row(inputs: &Inputs<'_>, bias: Option<&[f64]>, shape: &AttentionShape, mut visit: impl FnMut(Row)) {
    for (queries, keys) in shape.queries.iter().zip(&shape.keys) {
        for i in 0..queries.len() {
            for head in 0..shape.heads {
                let query = queries.start as usize + i;
                let mut row = Row { query, head, keys: vec![], table: vec![], scores: vec![] };
                for j in 0..keys.len() {
                    let (here, there) = (i + shape.first_query, j);
                    if shape.causal && there > here || shape.window.is_some_and(|w| here.abs_diff(there) > w)
                    {
                        continue;
                    }
                    let key = keys.start as usize + j;
                    let entry = bias.map(|_| {
                        let buckets =
                            shape.buckets.as_ref().expect("a bias table is read through `shape.buckets`");
                        let position = buckets.key_positions.as_ref().map_or(j, |p| p[key] as usize);
                        buckets.of(i + shape.first_query, position) * shape.heads + head
                    });
                    let product = shape.scale * dot(inputs.query(query, head), inputs.key(key, head));
                    row.scores.push(product + bias.zip(entry).map_or(0.0, |(table, e)| table[e]));
                    row.table.push(entry);
                    row.keys.push(key);
                }
                visit(row);
            }
        }
    }
}

pub(super) fn forward(
    x: Heads<'_, Reference>,
    bias: Option<&[f64]>,
    shape: &AttentionShape,
    y: &mut [f64],
    log_sum: &mut [f64],
) {
    let inputs = Inputs::new(x, shape);
    let (heads, dim) = (shape.heads, shape.head_dim);
    each_row(&inputs, bias, shape, |row| {
        let total = rows::log_sum_exp(&row.scores);
        log_sum[row.query * heads + row.head] = total;
        let y = &mut y[(row.query * heads + row.head) * dim..][..dim];
        y.fill(0.0);
        for (score, &key) in row.scores.iter().zip(&row.keys) {
            let weight = libm::exp(score - total) * dropped(shape, &row, key);
            for (y, v) in y.iter_mut().zip(inputs.value(key, row.head)) {
                *y += weight * v;
            }
        }
    });
}

/// Dropout's factor on the weight of packed row `key`; its column counts from the first key that is seen.
fn dropped(shape: &AttentionShape, row: &Row, key: usize) -> f64 {
    factor(shape.dropout, row.query * shape.heads + row.head, key - row.keys[0])
}

pub(super) fn backward(
    x: Heads<'_, Reference>,
    bias: Option<&[f64]>,
    shape: &AttentionShape,
    dy: &[f64],
    dx: HeadsMut<'_, Reference>,
    mut dbias: Option<&mut [f64]>,
) {
    let inputs = Inputs::new(x, shape);
    let (heads, dim) = (shape.heads, shape.head_dim);
    let inner = heads * dim;
    let rows_of = |spans: &[crate::device::Span]| spans.iter().map(|s| s.end as usize).max().unwrap_or(0);
    let (query_rows, key_rows) = (rows_of(&shape.queries), rows_of(&shape.keys));
    let (mut dq, mut dk, mut dv) =
        (vec![0.0; query_rows * inner], vec![0.0; key_rows * inner], vec![0.0; key_rows * inner]);
    each_row(&inputs, bias, shape, |row| {
        let total = rows::log_sum_exp(&row.scores);
        let p: Vec<f64> = row.scores.iter().map(|s| libm::exp(s - total)).collect();
        let q_at = (row.query * heads + row.head) * dim;
        let dy = &dy[q_at..][..dim];
        // y = sum_j p_j f_j v_j: dp_j = f_j v_j dy; softmax: ds_j = p_j (dp_j - sum_k p_k dp_k).
        let f: Vec<f64> = row.keys.iter().map(|&key| dropped(shape, &row, key)).collect();
        let dp: Vec<f64> =
            row.keys.iter().zip(&f).map(|(&key, f)| f * dot(inputs.value(key, row.head), dy)).collect();
        let mean = dot(&p, &dp);
        for (j, &key) in row.keys.iter().enumerate() {
            let ds = p[j] * (dp[j] - mean);
            if let (Some(table), Some(entry)) = (dbias.as_mut(), row.table[j]) {
                table[entry] += ds;
            }
            let k_at = (key * heads + row.head) * dim;
            for c in 0..dim {
                dq[q_at + c] += shape.scale * ds * inputs.key(key, row.head)[c];
                dk[k_at + c] += shape.scale * ds * inputs.query(row.query, row.head)[c];
                dv[k_at + c] += p[j] * f[j] * dy[c];
            }
        }
    });
    let queries = shape.queries.iter().flat_map(|s| s.start as usize..s.end as usize);
    let keys = shape.keys.iter().flat_map(|s| s.start as usize..s.end as usize);
    let row = |x: &[f64], r: usize| x[r * inner..(r + 1) * inner].to_vec();
    match dx {
        HeadsMut::Fused(dx) => {
            let dx = dx.slice();
            queries.for_each(|r| dx[r * 3 * inner..][..inner].copy_from_slice(&row(&dq, r)));
            keys.for_each(|r| {
                dx[r * 3 * inner + inner..][..inner].copy_from_slice(&row(&dk, r));
                dx[r * 3 * inner + 2 * inner..][..inner].copy_from_slice(&row(&dv, r));
            });
        }
        HeadsMut::Split { query, key_value } => {
            let (query, key_value) = (query.slice(), key_value.slice());
            queries.for_each(|r| query[r * inner..][..inner].copy_from_slice(&row(&dq, r)));
            keys.for_each(|r| {
                key_value[r * 2 * inner..][..inner].copy_from_slice(&row(&dk, r));
                key_value[r * 2 * inner + inner..][..inner].copy_from_slice(&row(&dv, r));
            });
        }
    }
}
