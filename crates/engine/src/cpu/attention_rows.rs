//! The rows of an attention's score matrix: bias, softmax, dropout and their backward.

use super::lanes::{Isa, fma, kernel};
use super::math;
use crate::device::{AttentionShape, RelativeBuckets};

/// The bias of one head for one sequence: a value per distance, or per pair where keys have their own positions.
pub(super) struct Bias<'a> {
    table: Option<(&'a [f32], &'a RelativeBuckets)>,
    heads: usize,
    head: usize,
    queries: usize,
    first_query: usize,
    first_key: usize,
    /// Value of distance `t - (queries - 1) - first_query`.
    line: Vec<f32>,
    /// The same for gradients.
    gradient: Vec<f32>,
}

impl<'a> Bias<'a> {
    pub(super) fn new(
        shape: &'a AttentionShape,
        table: Option<&'a [f32]>,
        sequence: usize,
        head: usize,
    ) -> Self {
        let (q, k) = (shape.queries[sequence].len(), shape.keys[sequence].len());
        let table = table.zip(shape.buckets.as_deref());
        let mut bias = Bias {
            table,
            heads: shape.heads,
            head,
            queries: q,
            first_query: shape.first_query,
            first_key: shape.keys[sequence].start as usize,
            line: Vec::new(),
            gradient: Vec::new(),
        };
        if let Some((t, b)) = table
            && b.key_positions.is_none()
            && q > 0
        {
            bias.line = (0..q + k).map(|i| t[bias.bucket_of_line(b, i) * bias.heads + head]).collect();
        }
        bias
    }
    fn bucket_of_line(&self, b: &RelativeBuckets, t: usize) -> usize {
        // distance = t - (queries - 1) - first_query, as positions that are not negative
        b.of(self.queries - 1 + self.first_query, t)
    }
    fn positions<'b>(&self, b: &'b RelativeBuckets, keys: usize) -> Option<&'b [u32]> {
        b.key_positions.as_ref().map(|p| &p[self.first_key..self.first_key + keys])
    }
    /// `s = s * scale + bias` for query row `i`.
    pub(super) fn apply(&self, isa: Isa, i: usize, scale: f32, s: &mut [f32]) {
        let Some((t, b)) = self.table else {
            return scale_row(isa, s, scale);
        };
        match self.positions(b, s.len()) {
            None => bias_row(isa, s, &self.line[self.queries - 1 - i..][..s.len()], scale),
            Some(p) => {
                for (v, &p) in s.iter_mut().zip(p) {
                    let bucket = b.of(i + self.first_query, p as usize);
                    *v = *v * scale + t[bucket * self.heads + self.head];
                }
            }
        }
    }
    /// Adds a row's gradient.
    pub(super) fn collect(&mut self, isa: Isa, i: usize, ds: &[f32]) {
        let Some((_, b)) = self.table else { return };
        match self.positions(b, ds.len()) {
            None => {
                self.gradient.resize(self.line.len(), 0.0);
                add_row(isa, &mut self.gradient[self.queries - 1 - i..][..ds.len()], ds);
            }
            Some(p) => {
                self.gradient.resize(b.buckets, 0.0);
                for (&v, &p) in ds.iter().zip(p) {
                    self.gradient[b.of(i + self.first_query, p as usize)] += v;
                }
            }
        }
    }
    /// The gradient of this head's column of the table.
    pub(super) fn column(&self) -> Vec<f32> {
        let Some((_, b)) = self.table else {
            return Vec::new();
        };
        if b.key_positions.is_some() {
            let mut sum = self.gradient.clone();
            sum.resize(b.buckets, 0.0);
            return sum;
        }
        let mut sum = vec![0f32; b.buckets];
        for (t, &v) in self.gradient.iter().enumerate() {
            sum[self.bucket_of_line(b, t)] += v;
        }
        sum
    }
}

kernel! {
    pub(super) fn scale_row(s: &mut [f32], scale: f32) {
        for v in s {
            *v *= scale;
        }
    }
}
kernel! {
    pub(super) fn bias_row(s: &mut [f32], bias: &[f32], scale: f32) {
        for (v, b) in s.iter_mut().zip(bias) {
            *v = fma::<F>(*v, scale, *b);
        }
    }
}
kernel! {
    pub(super) fn add_row(s: &mut [f32], x: &[f32]) {
        for (v, x) in s.iter_mut().zip(x) {
            *v += *x;
        }
    }
}
/// Runs `f` over blocks of 32 elements; the last is completed with `pad` beside, so that short rows are vectors as well.
#[inline(always)]
fn blocks(s: &mut [f32], pad: f32, mut f: impl FnMut(&mut [f32; 32])) {
    let (full, rest) = s.as_chunks_mut::<32>();
    for block in full {
        f(block);
    }
    if !rest.is_empty() {
        let mut block = [pad; 32];
        block[..rest.len()].copy_from_slice(rest);
        f(&mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
}

kernel! {
    /// Softmax in place; returns the log-sum.
    pub(super) fn softmax_row(s: &mut [f32]) -> f32 {
        let mut most = [f32::NEG_INFINITY; 32];
        blocks(s, f32::NEG_INFINITY, |b| {
            for j in 0..32 {
                most[j] = if b[j] > most[j] { b[j] } else { most[j] };
            }
        });
        let m = most.into_iter().fold(f32::NEG_INFINITY, |m, v| if v > m { v } else { m });
        let mut sums = [0f32; 32];
        blocks(s, f32::NEG_INFINITY, |b| {
            for j in 0..32 {
                b[j] = math::exp::<F>(b[j] - m);
                sums[j] += b[j];
            }
        });
        let sum = math::tree(sums);
        let inverse = 1.0 / sum;
        for v in s.iter_mut() {
            *v *= inverse;
        }
        m + libm::logf(sum)
    }
}
kernel! {
    /// `s = exp(s - log_sum)`
    pub(super) fn weights_row(s: &mut [f32], log_sum: f32) {
        blocks(s, f32::NEG_INFINITY, |b| {
            for v in b {
                *v = math::exp::<F>(*v - log_sum);
            }
        });
    }
}
kernel! {
    pub(super) fn drop_row(s: &mut [f32], key: (u32, u32), threshold: u32, scale: f32) {
        for (i, v) in s.iter_mut().enumerate() {
            let f = if crate::random::hash32(key, i as u32) < threshold { 0.0 } else { scale };
            *v *= f;
        }
    }
}
kernel! {
    /// `dp = p * (dp - delta)`
    pub(super) fn slope_row(p: &[f32], dp: &mut [f32], delta: f32) {
        for (p, d) in p.iter().zip(dp) {
            *d = *p * (*d - delta);
        }
    }
}
kernel! {
    pub(super) fn dot_row(x: &[f32], y: &[f32]) -> f32 {
        math::sum(x.len(), |i, s| fma::<F>(x[i], y[i], s))
    }
}
