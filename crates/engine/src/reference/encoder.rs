//! The reference's encoder kernels: LayerNorm, biases, rotary positions, pooling, unit rows, as their formulas say.

use super::{Reference, factor};
use crate::device::{
    Activation, Device, EncoderKernels, MaxSimShape, MaxSimSide, NO_ROW, Rotary, Span, View, ViewMut,
};
use crate::random::Dropout;

/// Mean and one over the deviation of a row.
fn moments(x: &[f64], eps: f64) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
    (mean, 1.0 / libm::sqrt(variance + eps))
}

fn normalised(x: &[f64], norm: &[f64], eps: f64) -> Vec<f64> {
    let (mean, r) = moments(x, eps);
    let bias = |j: usize| norm.get(x.len() + j).copied().unwrap_or(0.0);
    x.iter().enumerate().map(|(j, v)| (v - mean) * r * norm[j] + bias(j)).collect()
}

fn add_rows(x: &mut [f64], bias: &[f64]) {
    x.iter_mut().enumerate().for_each(|(i, v)| *v += bias[i % bias.len()]);
}

fn biased(u: View<'_, Reference>, bias: View<'_, Reference>) -> Vec<f64> {
    let mut x = u.slice().to_vec();
    add_rows(&mut x, bias.slice());
    x
}

fn view(x: &Vec<f64>) -> View<'_, Reference> {
    View { storage: x, start: 0, len: x.len() }
}

fn length(x: &[f64]) -> f64 {
    libm::sqrt(x.iter().map(|v| v * v).sum())
}

impl EncoderKernels for Reference {
    fn gather_add(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        let (table, rows) = (table.slice(), rows.slice());
        assert_eq!(rows.len(), ids.len() * width);
        for (i, &id) in ids.iter().enumerate() {
            for j in 0..width {
                rows[i * width + j] += table[id as usize * width + j];
            }
        }
    }
    fn add_bias(&self, x: ViewMut<'_, Self>, bias: View<'_, Self>) {
        add_rows(x.slice(), bias.slice());
    }
    fn sum_rows(&self, x: View<'_, Self>, total: ViewMut<'_, Self>) {
        let total = total.slice();
        let width = total.len();
        x.slice().iter().enumerate().for_each(|(i, v)| total[i % width] += v);
    }
    fn layer_norm(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        y: ViewMut<'_, Self>,
    ) {
        for (x, y) in x.slice().chunks(width).zip(y.slice().chunks_mut(width)) {
            y.copy_from_slice(&normalised(x, norm.slice(), eps));
        }
    }
    /// With h = (x - mean) r: dh/dx_k = r (1 - 1/n - h_k h / n), so
    /// dx_k = r (t_k - mean(t) - h_k mean(t h)) with t = weight dy.
    fn layer_norm_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
        dnorm: ViewMut<'_, Self>,
    ) {
        let (dx, dnorm, norm) = (dx.slice(), dnorm.slice(), norm.slice());
        let n = width as f64;
        for (i, (x, dy)) in x.slice().chunks(width).zip(dy.slice().chunks(width)).enumerate() {
            let (mean, r) = moments(x, eps);
            let h: Vec<f64> = x.iter().map(|v| (v - mean) * r).collect();
            let t: Vec<f64> = dy.iter().zip(norm).map(|(d, w)| d * w).collect();
            let along_one = t.iter().sum::<f64>() / n;
            let along_h = t.iter().zip(&h).map(|(t, h)| t * h).sum::<f64>() / n;
            for k in 0..width {
                dx[i * width + k] += r * (t[k] - along_one - h[k] * along_h);
                dnorm[k] += dy[k] * h[k];
                if let Some(d) = dnorm.get_mut(width + k) {
                    *d += dy[k];
                }
            }
        }
    }
    fn bias_residual(
        &self,
        x: ViewMut<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        residual: View<'_, Self>,
        norm: Option<(View<'_, Self>, f64)>,
        dropout: Option<Dropout>,
    ) {
        let x = x.slice();
        for (i, s) in residual.slice().chunks(width).enumerate() {
            let n = norm.map_or(s.to_vec(), |(norm, eps)| normalised(s, norm.slice(), eps));
            for j in 0..width {
                let b = bias.map_or(0.0, |b| b.slice()[j]);
                let v = &mut x[i * width + j];
                *v = n[j] + (*v + b) * factor(dropout, i, j);
            }
        }
    }
    fn bias_residual_backward(
        &self,
        dy: View<'_, Self>,
        width: usize,
        dropout: Dropout,
        d: ViewMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        let (d, mut dbias) = (d.slice(), dbias.map(|b| b.slice()));
        for (i, dy) in dy.slice().iter().enumerate() {
            d[i] = dy * factor(Some(dropout), i / width, i % width);
            if let Some(dbias) = &mut dbias {
                dbias[i % width] += d[i];
            }
        }
    }
    fn bias_activation(
        &self,
        u: View<'_, Self>,
        bias: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        y: ViewMut<'_, Self>,
    ) {
        self.activation(view(&biased(u, bias)), width, kind, gated, dropout, y);
    }
    fn bias_activation_backward(
        &self,
        u: View<'_, Self>,
        bias: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        dy: View<'_, Self>,
        mut du: ViewMut<'_, Self>,
        dbias: ViewMut<'_, Self>,
    ) {
        let u = biased(u, bias);
        self.activation_backward(view(&u), width, kind, gated, dropout, dy, du.reborrow());
        let dbias = dbias.slice();
        let stored = dbias.len();
        du.slice().iter().enumerate().for_each(|(i, d)| dbias[i % stored] += *d);
    }
    fn rotate(
        &self,
        x: ViewMut<'_, Self>,
        stride: usize,
        columns: usize,
        rotary: &Rotary,
        positions: &[u32],
        back: bool,
    ) {
        let (x, half) = (x.slice(), rotary.half);
        assert_eq!(x.len(), positions.len() * stride);
        let sign = if back { -1.0 } else { 1.0 };
        for (row, &position) in positions.iter().enumerate() {
            for head in 0..columns / (2 * half) {
                for i in 0..half {
                    let angle = position as usize * half + i;
                    let (c, s) = (rotary.cos[angle], sign * rotary.sin[angle]);
                    let first = row * stride + head * 2 * half + i;
                    let (a, b) = (x[first], x[first + half]);
                    x[first] = a * c - b * s;
                    x[first + half] = b * c + a * s;
                }
            }
        }
    }
    fn span_means(&self, x: View<'_, Self>, width: usize, spans: &[Span], y: ViewMut<'_, Self>) {
        let (x, y) = (x.slice(), y.slice());
        for (s, span) in spans.iter().enumerate() {
            for j in 0..width {
                let rows = span.start as usize..span.end as usize;
                let sum: f64 = rows.map(|r| x[r * width + j]).sum();
                y[s * width + j] = sum / span.len().max(1) as f64;
            }
        }
    }
    fn span_means_backward(&self, dy: View<'_, Self>, width: usize, spans: &[Span], dx: ViewMut<'_, Self>) {
        let (dy, dx) = (dy.slice(), dx.slice());
        for (s, span) in spans.iter().enumerate() {
            for r in span.start as usize..span.end as usize {
                for j in 0..width {
                    dx[r * width + j] += dy[s * width + j] / span.len() as f64;
                }
            }
        }
    }
    fn normalize(&self, x: View<'_, Self>, width: usize, least: f64, y: ViewMut<'_, Self>) {
        let y = y.slice();
        for (i, x) in x.slice().chunks(width).enumerate() {
            let l = length(x).max(least);
            x.iter().enumerate().for_each(|(j, v)| y[i * width + j] = v / l);
        }
    }
    /// d(x/|x|): (dy - x (x dy) / |x|^2) / |x|.
    fn normalize_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        least: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
    ) {
        let dx = dx.slice();
        for (i, (x, dy)) in x.slice().chunks(width).zip(dy.slice().chunks(width)).enumerate() {
            let l = length(x);
            let along: f64 = x.iter().zip(dy).map(|(x, d)| x * d).sum();
            for j in 0..width {
                dx[i * width + j] +=
                    if l > least { (dy[j] - x[j] * along / (l * l)) / l } else { dy[j] / least };
            }
        }
    }
    fn max_sim(
        &self,
        queries: View<'_, Self>,
        documents: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        scores: ViewMut<'_, Self>,
    ) -> Vec<u32> {
        let (queries, documents, scores) = (queries.slice(), documents.slice(), scores.slice());
        shape.check(queries.len() / width, documents.len() / width);
        if shape.retrieved > 0 {
            return xtr(queries, documents, width, shape, scores);
        }
        let mut best = Vec::new();
        for (pair, &(q, d)) in shape.pairs.iter().enumerate() {
            let (has_floor, none) = (shape.has_floor(d as usize), shape.without_rows(d as usize));
            let (q, d) = (shape.queries[q as usize], shape.documents[d as usize]);
            scores[pair] = 0.0;
            for i in q.start as usize..q.end as usize {
                let (mut most, mut row) = (f64::NEG_INFINITY, NO_ROW);
                for j in d.start as usize..d.end as usize {
                    let dot: f64 =
                        (0..width).map(|k| queries[i * width + k] * documents[j * width + k]).sum();
                    if dot > most {
                        (most, row) = (dot, j as u32 - d.start);
                    }
                }
                if row == NO_ROW || has_floor && most < 0.0 {
                    (most, row) = (none, NO_ROW);
                }
                scores[pair] += most;
                best.push(row);
            }
        }
        best
    }
    fn max_sim_backward(
        &self,
        others: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        best: &[u32],
        slopes: View<'_, Self>,
        side: MaxSimSide,
        d: ViewMut<'_, Self>,
    ) {
        let (others, slopes, out) = (others.slice(), slopes.slice(), d.slice());
        let mut rows = best.iter();
        for (&(q, d), slope) in shape.pairs.iter().zip(slopes) {
            let (q, d) = (shape.queries[q as usize], shape.documents[d as usize]);
            let own: Vec<u32> = rows.by_ref().take(q.len()).copied().collect();
            let slope = slope / shape.divisor(&own);
            for (i, &row) in (q.start..q.end).zip(&own).filter(|(_, row)| **row != NO_ROW) {
                let (own, other) = match side {
                    MaxSimSide::Queries => (i, d.start + row),
                    MaxSimSide::Documents => (d.start + row, i),
                };
                for k in 0..width {
                    out[own as usize * width + k] += slope * others[other as usize * width + k];
                }
            }
        }
    }
}

/// XTR's scores, as plainly as they are written.
fn xtr(
    queries: &[f64],
    documents: &[f64],
    width: usize,
    shape: &MaxSimShape,
    scores: &mut [f64],
) -> Vec<u32> {
    let mut best: Vec<Vec<u32>> = Vec::new();
    for (pair, &(q, _)) in shape.pairs.iter().enumerate() {
        let own = shape.queries[q as usize];
        let dot = |i: u32, j: u32| -> f64 {
            let (i, j) = (i as usize * width, j as usize * width);
            // 0 for -0: they are equal products.
            (0..width).map(|k| queries[i + k] * documents[j + k]).sum::<f64>() + 0.0
        };
        let (mut sum, mut rows) = (0.0, Vec::new());
        for i in own.start..own.end {
            // All rows that this one meets, best first; the sort keeps the order of equal ones.
            let others = shape.pairs.iter().enumerate().filter(|(_, other)| other.0 == q);
            let mut all: Vec<(f64, usize, u32)> = Vec::new();
            for (other, &(_, d)) in others {
                let d = shape.documents[d as usize];
                all.extend((d.start..d.end).map(|j| (dot(i, j), other, j - d.start)));
            }
            all.sort_by(|a, b| b.0.total_cmp(&a.0));
            let found = all.iter().take(shape.retrieved).find(|(_, other, _)| *other == pair);
            sum += found.map_or(0.0, |found| found.0);
            rows.push(found.map_or(NO_ROW, |found| found.2));
        }
        scores[pair] = sum / shape.divisor(&rows);
        best.push(rows);
    }
    best.concat()
}
