//! The reference device: every kernel as a plain loop in f64 with the functions of `libm`, written from the formulas
//! and not from the CPU's code. It is the oracle of the tests, and small enough to be checked by reading.

mod attention;
mod encoder;
mod optimizer;
mod rows;
mod state_attention;

use std::borrow::Cow;

use crate::device::*;
use crate::random::Dropout;

/// f64, one thread, no tricks. Fresh memory is NaN, so that an operation which reads what it never wrote is found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl<'a> View<'a, Reference> {
    fn slice(self) -> &'a [f64] {
        &self.storage[self.start..self.start + self.len]
    }
}
impl<'a> ViewMut<'a, Reference> {
    fn slice(self) -> &'a mut [f64] {
        assert!(self.start.checked_add(self.len).is_some_and(|end| end <= self.storage.len()));
        // SAFETY: within the buffer; by pointer, since a reference to all of it would stand for elements that another
        // thread may be summing.
        unsafe { std::slice::from_raw_parts_mut(self.storage.as_mut_ptr().add(self.start), self.len) }
    }
}
impl Matrix<'_, Reference> {
    /// The elements row by row, as multiplied.
    fn dense(&self) -> Vec<f64> {
        let stored = self.view.slice();
        let at = |i, j| {
            if self.transposed { stored[j * self.stride + i] } else { stored[i * self.stride + j] }
        };
        (0..self.rows * self.columns).map(|e| at(e / self.columns, e % self.columns)).collect()
    }
}

impl Device for Reference {
    type Storage = Vec<f64>;
    type Element = f64;
    const BLOCK: usize = 1 << 14;

    fn name(&self) -> &'static str {
        "reference"
    }
    fn arithmetic(&self) -> String {
        "f64".into()
    }
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        f()
    }
    fn zeros(&self, len: usize) -> Vec<f64> {
        vec![0.0; len]
    }
    fn scratch(&self, len: usize) -> Vec<f64> {
        vec![f64::NAN; len]
    }
    fn write(&self, target: ViewMut<'_, Self>, values: &[f32]) {
        let target = target.slice();
        assert_eq!(target.len(), values.len());
        for (t, &v) in target.iter_mut().zip(values) {
            *t = v as f64;
        }
    }
    fn read(&self, source: View<'_, Self>) -> Vec<f32> {
        source.slice().iter().map(|&v| v as f32).collect()
    }
    fn elements<'a>(&self, source: View<'a, Self>) -> Cow<'a, [f64]> {
        source.slice().into()
    }
    fn change<T>(&self, target: ViewMut<'_, Self>, work: impl FnOnce(&mut [f64]) -> T) -> T {
        work(target.slice())
    }
    fn shared(&self, target: ViewMut<'_, Self>) -> Shared<f64> {
        Shared::own(target.slice().as_mut_ptr())
    }
    fn read_f64(&self, source: View<'_, Self>) -> Vec<f64> {
        source.slice().to_vec()
    }
    fn fill(&self, target: ViewMut<'_, Self>, value: f64) {
        target.slice().fill(value);
    }
    fn copy(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        target.slice().copy_from_slice(source.slice());
    }
    fn add(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        let (target, source) = (target.slice(), source.slice());
        assert_eq!(target.len(), source.len());
        for (t, s) in target.iter_mut().zip(source) {
            *t += s;
        }
    }
    fn scale(&self, target: ViewMut<'_, Self>, factor: f64) {
        for t in target.slice() {
            *t *= factor;
        }
    }
    fn dot_blocks(&self, a: View<'_, Self>, b: View<'_, Self>) -> Vec<f64> {
        assert_eq!(a.len, b.len);
        let blocks = a.slice().chunks(Self::BLOCK).zip(b.slice().chunks(Self::BLOCK));
        blocks.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum()).collect()
    }
    fn product(&self, a: Matrix<'_, Self>, b: Matrix<'_, Self>, c: ViewMut<'_, Self>, accumulate: bool) {
        assert_eq!(a.columns, b.rows, "inner sizes of a product differ");
        let c = c.slice();
        assert_eq!(c.len(), a.rows * b.columns);
        let (depth, n) = (a.columns, b.columns);
        let (left, right) = (a.dense(), b.t().dense());
        for (e, target) in c.iter_mut().enumerate() {
            let (row, column) = (&left[e / n * depth..][..depth], &right[e % n * depth..][..depth]);
            let sum: f64 = row.iter().zip(column).map(|(x, y)| x * y).sum();
            *target = if accumulate { *target + sum } else { sum };
        }
    }
    fn gather(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        let (table, rows) = (table.slice(), rows.slice());
        assert_eq!(rows.len(), ids.len() * width);
        for (i, &id) in ids.iter().enumerate() {
            for j in 0..width {
                rows[i * width + j] = table[id as usize * width + j];
            }
        }
    }
    fn scatter_add(&self, rows: View<'_, Self>, width: usize, ids: &[u32], table: ViewMut<'_, Self>) {
        let (rows, table) = (rows.slice(), table.slice());
        assert_eq!(rows.len(), ids.len() * width);
        for (i, &id) in ids.iter().enumerate() {
            for j in 0..width {
                table[id as usize * width + j] += rows[i * width + j];
            }
        }
    }
    fn dropout(&self, x: ViewMut<'_, Self>, width: usize, dropout: Dropout) {
        for (i, x) in x.slice().iter_mut().enumerate() {
            *x *= factor(Some(dropout), i / width, i % width);
        }
    }
    fn residual(
        &self,
        x: ViewMut<'_, Self>,
        residual: View<'_, Self>,
        width: usize,
        dropout: Option<Dropout>,
    ) {
        let (x, residual) = (x.slice(), residual.slice());
        assert_eq!(x.len(), residual.len());
        for i in 0..x.len() {
            x[i] = residual[i] + x[i] * factor(dropout, i / width, i % width);
        }
    }
    fn rms_norm(&self, x: View<'_, Self>, weight: View<'_, Self>, eps: f64, y: ViewMut<'_, Self>) {
        rows::rms_norm(x.slice(), weight.slice(), eps, y.slice());
    }
    fn rms_norm_backward(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        eps: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
        dweight: ViewMut<'_, Self>,
    ) {
        rows::rms_norm_backward(x.slice(), weight.slice(), eps, dy.slice(), dx.slice(), dweight.slice());
    }
    fn activation(
        &self,
        u: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        y: ViewMut<'_, Self>,
    ) {
        let (u, y) = (u.slice(), y.slice());
        let stored = if gated { 2 * width } else { width };
        assert_eq!(u.len() * width, y.len() * stored);
        for (k, y) in y.iter_mut().enumerate() {
            let (row, column) = (k / width, k % width);
            let gate = if gated { u[row * stored + width + column] } else { 1.0 };
            *y = rows::activation(kind, u[row * stored + column]) * gate * factor(dropout, row, column);
        }
    }
    fn activation_backward(
        &self,
        u: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        dy: View<'_, Self>,
        du: ViewMut<'_, Self>,
    ) {
        let (u, dy, du) = (u.slice(), dy.slice(), du.slice());
        let stored = if gated { 2 * width } else { width };
        assert_eq!((u.len() * width, du.len()), (dy.len() * stored, u.len()));
        for (k, dy) in dy.iter().enumerate() {
            let (row, column) = (k / width, k % width);
            let (at, d) = (row * stored + column, dy * factor(dropout, row, column));
            let slope = rows::activation_slope(kind, u[at]);
            if gated {
                du[at] = d * slope * u[at + width];
                du[at + width] = d * rows::activation(kind, u[at]);
            } else {
                du[at] = d * slope;
            }
        }
    }
    fn attention(
        &self,
        x: Heads<'_, Self>,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        y: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        attention::forward(x, bias.map(|b| b.slice()), shape, y.slice(), log_sum.slice());
    }
    fn attention_backward(
        &self,
        x: Heads<'_, Self>,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        _: View<'_, Self>,
        _: View<'_, Self>,
        dy: View<'_, Self>,
        dx: HeadsMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        attention::backward(x, bias.map(|b| b.slice()), shape, dy.slice(), dx, dbias.map(|b| b.slice()));
    }
    fn heads_expand(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        state_attention::heads_product(x.slice(), weight.slice(), heads, width, false, y.slice());
    }
    fn heads_reduce(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        state_attention::heads_product(x.slice(), weight.slice(), heads, width, true, y.slice());
    }
    fn heads_gradient(
        &self,
        x: View<'_, Self>,
        c: View<'_, Self>,
        heads: usize,
        width: usize,
        dweight: ViewMut<'_, Self>,
    ) {
        state_attention::heads_gradient(x.slice(), c.slice(), heads, width, dweight.slice());
    }
    fn state_attention(
        &self,
        u: View<'_, Self>,
        states: View<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        c: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        let bias = bias.map(|b| b.slice());
        let (u, states) = (u.slice(), states.slice());
        state_attention::forward(u, states, width, bias, shape, c.slice(), log_sum.slice());
    }
    fn state_attention_backward(
        &self,
        u: View<'_, Self>,
        states: View<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        _: View<'_, Self>,
        _: View<'_, Self>,
        dc: View<'_, Self>,
        du: ViewMut<'_, Self>,
        dstates: ViewMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        state_attention::backward(
            u.slice(),
            states.slice(),
            width,
            bias.map(|b| b.slice()),
            shape,
            dc.slice(),
            du.slice(),
            dstates.slice(),
            dbias.map(|b| b.slice()),
        );
    }
    fn cross_entropy(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        losses: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        rows::cross_entropy(logits.slice(), labels, losses.slice(), log_sum.slice());
    }
    fn cross_entropy_backward(
        &self,
        logits: ViewMut<'_, Self>,
        labels: &[u32],
        log_sum: View<'_, Self>,
        scale: f64,
    ) {
        rows::cross_entropy_backward(logits.slice(), labels, log_sum.slice(), scale);
    }
    fn smooth_losses(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        smoothing: f64,
        losses: ViewMut<'_, Self>,
    ) {
        rows::smooth(logits.slice(), labels, smoothing, losses.slice());
    }
    fn smooth_gradient(&self, gradient: ViewMut<'_, Self>, labels: &[u32], amount: f64) {
        rows::smooth_backward(gradient.slice(), labels, amount);
    }
    fn argmax(&self, x: View<'_, Self>, width: usize) -> Vec<u32> {
        let x = x.slice();
        let rows = x.len().checked_div(width).unwrap_or(0);
        let greatest =
            |row: &[f64]| (1..width).fold(0, |best, j| if row[j] > row[best] { j } else { best }) as u32;
        (0..rows).map(|i| greatest(&x[i * width..(i + 1) * width])).collect()
    }
    fn top_k(&self, x: View<'_, Self>, width: usize, k: usize) -> Vec<(u32, f64)> {
        rows::top_k(x.slice(), width, k)
    }
    fn adam(
        &self,
        parameters: ViewMut<'_, Self>,
        gradients: View<'_, Self>,
        first: ViewMut<'_, Self>,
        second: ViewMut<'_, Self>,
        step: AdamStep,
    ) {
        optimizer::adam(parameters.slice(), gradients.slice(), first.slice(), second.slice(), step);
    }
    fn adafactor(
        &self,
        parameter: ViewMut<'_, Self>,
        gradient: View<'_, Self>,
        columns: Option<usize>,
        statistics: ViewMut<'_, Self>,
        step: AdafactorStep,
    ) {
        optimizer::adafactor(parameter.slice(), gradient.slice(), columns, statistics.slice(), step);
    }
}

/// What dropout multiplies element `column` of row `row` by.
fn factor(dropout: Option<Dropout>, row: usize, column: usize) -> f64 {
    dropout.map_or(1.0, |d| d.factor(d.row(row), column as u32) as f64)
}
