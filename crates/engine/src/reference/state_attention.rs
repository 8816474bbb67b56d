//! Attention over hidden states, and the products of single heads, of the reference.

use super::factor;
use crate::device::AttentionShape;

/// `y_h = x_h W_h` (`transposed`: `x_h W_h^T`), W_h being `dim` rows of `width`.
pub(super) fn heads_product(
    x: &[f64],
    weight: &[f64],
    heads: usize,
    width: usize,
    transposed: bool,
    y: &mut [f64],
) {
    let dim = weight.len() / width / heads;
    let (from, to) = if transposed { (width, dim) } else { (dim, width) };
    for r in 0..x.len() / (heads * from) {
        for h in 0..heads {
            for j in 0..to {
                y[(r * heads + h) * to + j] = (0..from)
                    .map(|i| {
                        let (row, column) = if transposed { (j, i) } else { (i, j) };
                        x[(r * heads + h) * from + i] * weight[(h * dim + row) * width + column]
                    })
                    .sum();
            }
        }
    }
}

/// `dW_h += x_h^T c_h`
pub(super) fn heads_gradient(x: &[f64], c: &[f64], heads: usize, width: usize, dweight: &mut [f64]) {
    let dim = dweight.len() / width / heads;
    for r in 0..x.len() / (heads * dim) {
        for h in 0..heads {
            for i in 0..dim {
                for j in 0..width {
                    dweight[(h * dim + i) * width + j] +=
                        x[(r * heads + h) * dim + i] * c[(r * heads + h) * width + j];
                }
            }
        }
    }
}

/// One row: a query of a head of a question, the entries of the bias table, and the weights before and after dropout.
struct Row {
    row: usize,
    keys: std::ops::Range<usize>,
    entries: Vec<Option<usize>>,
    weights: Vec<f64>,
    dropped: Vec<f64>,
    factors: Vec<f64>,
    log_sum: f64,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn each_row(
    u: &[f64],
    states: &[f64],
    width: usize,
    bias: Option<&[f64]>,
    shape: &AttentionShape,
    mut visit: impl FnMut(Row),
) {
    for (queries, span) in shape.queries.iter().zip(&shape.keys) {
        let keys = span.start as usize..span.end as usize;
        for i in 0..queries.len() {
            for head in 0..shape.heads {
                let row = (queries.start as usize + i) * shape.heads + head;
                let entries: Vec<Option<usize>> = keys
                    .clone()
                    .enumerate()
                    .map(|(j, key)| {
                        bias?;
                        let buckets =
                            shape.buckets.as_ref().expect("a bias table is read through `shape.buckets`");
                        let position = buckets.key_positions.as_ref().map_or(j, |p| p[key] as usize);
                        Some(buckets.of(i + shape.first_query, position) * shape.heads + head)
                    })
                    .collect();
                let query = &u[row * width..][..width];
                let scores: Vec<f64> = keys
                    .clone()
                    .zip(&entries)
                    .map(|(key, entry)| {
                        let b = bias.zip(*entry).map_or(0.0, |(table, e)| table[e]);
                        shape.scale * dot(query, &states[key * width..][..width]) + b
                    })
                    .collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let log_sum = most + libm::log(scores.iter().map(|s| libm::exp(s - most)).sum::<f64>());
                let weights: Vec<f64> = scores.iter().map(|s| libm::exp(s - log_sum)).collect();
                let factors: Vec<f64> = (0..keys.len()).map(|j| factor(shape.dropout, row, j)).collect();
                let dropped = weights.iter().zip(&factors).map(|(w, f)| w * f).collect();
                visit(Row { row, keys: keys.clone(), entries, weights, dropped, factors, log_sum });
            }
        }
    }
}

pub(super) fn forward(
    u: &[f64],
    states: &[f64],
    width: usize,
    bias: Option<&[f64]>,
    shape: &AttentionShape,
    c: &mut [f64],
    log_sum: &mut [f64],
) {
    each_row(u, states, width, bias, shape, |r| {
        log_sum[r.row] = r.log_sum;
        for j in 0..width {
            c[r.row * width + j] =
                r.keys.clone().zip(&r.dropped).map(|(k, w)| w * states[k * width + j]).sum();
        }
    });
}

#[allow(clippy::too_many_arguments)]
pub(super) fn backward(
    u: &[f64],
    states: &[f64],
    width: usize,
    bias: Option<&[f64]>,
    shape: &AttentionShape,
    dc: &[f64],
    du: &mut [f64],
    dstates: &mut [f64],
    mut dbias: Option<&mut [f64]>,
) {
    each_row(u, states, width, bias, shape, |r| {
        let (query, d) = (&u[r.row * width..][..width], &dc[r.row * width..][..width]);
        let dweights: Vec<f64> =
            r.keys.clone().zip(&r.factors).map(|(k, f)| f * dot(d, &states[k * width..][..width])).collect();
        let mean = dot(&r.weights, &dweights);
        du[r.row * width..][..width].fill(0.0);
        for (n, k) in r.keys.clone().enumerate() {
            let ds = r.weights[n] * (dweights[n] - mean);
            if let (Some(table), Some(e)) = (dbias.as_deref_mut(), r.entries[n]) {
                table[e] += ds;
            }
            for j in 0..width {
                du[r.row * width + j] += shape.scale * ds * states[k * width + j];
                dstates[k * width + j] += r.dropped[n] * d[j] + shape.scale * ds * query[j];
            }
        }
    });
}
