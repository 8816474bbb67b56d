//! The device: the engine's trait over the kernels of `kernels/` and a driver. Products are the driver's; the kernels of encoders
//! and the longer launches are in the files beside this one.
//!
//! All memory is f32. Nothing here waits for the GPU but what gives values to the host.

use std::borrow::Cow;
use std::sync::Arc;

use tercio_engine::device::{Heads, HeadsMut, Matrix, Shared};
use tercio_engine::{Activation, AdafactorStep, AdamStep, AttentionShape, Device, Dropout, View, ViewMut};

use crate::driver::{Argument, Driver, Factor, Product};
use crate::launch::{Operand, bytes_of, float, number, size};
use crate::memory::{Buffer, Pool};
use crate::{adafactor, attention, states};

/// Elements of a block of an inner product, as `kernels/sums.cu` has it.
pub(crate) const DOT_BLOCK: usize = 16384;

/// A GPU, or what stands for one.
pub struct Cuda<R: Driver = crate::Gpu> {
    pub(crate) pool: Arc<Pool<R>>,
}

impl<R: Driver> Clone for Cuda<R> {
    fn clone(&self) -> Self {
        Cuda { pool: self.pool.clone() }
    }
}

impl<R: Driver> Cuda<R> {
    /// A device with this memory, and with the driver behind it.
    pub fn new(pool: Arc<Pool<R>>) -> Self {
        Cuda { pool }
    }
    /// The driver.
    pub fn driver(&self) -> &R {
        &self.pool.driver
    }
}

/// Places sorted by id, equal ids in their order, and where each distinct id begins.
fn by_id(ids: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|&i| ids[i as usize]);
    let id = |k: usize| ids[order[k] as usize];
    let mut starts: Vec<u32> =
        (0..order.len()).filter(|&k| k == 0 || id(k) != id(k - 1)).map(|k| k as u32).collect();
    starts.push(order.len() as u32);
    (order, starts)
}

/// What `adam` of `kernels/optimizer.cu` takes.
#[repr(C)]
#[derive(Clone, Copy)]
struct AdamConstants {
    values: [f32; 9],
}

fn factor<R: Driver>(matrix: &Matrix<'_, Cuda<R>>) -> Factor {
    Factor { at: matrix.view.at(), stride: matrix.stride, step: 0, transposed: matrix.transposed }
}

impl<R: Driver> Device for Cuda<R> {
    type Storage = Buffer<R>;
    type Element = f32;
    const BLOCK: usize = DOT_BLOCK;

    fn name(&self) -> &'static str {
        "cuda"
    }
    fn arithmetic(&self) -> String {
        self.pool.driver.arithmetic()
    }
    fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        f()
    }
    fn zeros(&self, len: usize) -> Buffer<R> {
        self.pool.zeros(4 * len as u64)
    }
    fn scratch(&self, len: usize) -> Buffer<R> {
        self.scratch_of(len)
    }
    fn write(&self, target: ViewMut<'_, Self>, values: &[f32]) {
        assert_eq!(target.len, values.len(), "a stretch takes as many values as it has elements");
        if !values.is_empty() {
            self.done(self.pool.driver.upload(target.at(), bytes_of(values)));
        }
    }
    fn read(&self, source: View<'_, Self>) -> Vec<f32> {
        let mut values = vec![0.0; source.len];
        self.fetch(source.at(), &mut values);
        values
    }
    fn elements<'a>(&self, source: View<'a, Self>) -> Cow<'a, [f32]> {
        self.read(source).into()
    }
    fn change<T>(&self, mut target: ViewMut<'_, Self>, work: impl FnOnce(&mut [f32]) -> T) -> T {
        let mut values = self.read(View { storage: target.storage, start: target.start, len: target.len });
        let done = work(&mut values);
        self.write(target.reborrow(), &values);
        done
    }
    fn shared(&self, target: ViewMut<'_, Self>) -> Shared<f32> {
        Shared::copy(target.len)
    }
    fn show(&self, source: View<'_, Self>, shared: &Shared<f32>, start: usize) {
        // SAFETY: the caller's contract: nobody else is at this stretch of the copy now.
        let values = unsafe { shared.stretch(start, source.len) };
        self.fetch(source.at(), values);
    }
    fn take_back(&self, shared: Shared<f32>, target: ViewMut<'_, Self>) {
        if let Some(values) = shared.into_copy() {
            self.write(target, &values);
        }
    }
    fn sums(&self) -> bool {
        self.pool.driver.sums()
    }
    fn sum(&self, target: ViewMut<'_, Self>) {
        if target.len > 0 {
            self.done(self.pool.driver.sum(target.at(), target.len));
        }
    }
    fn end_sums(&self) {
        self.done(self.pool.driver.end_sums());
    }
    fn read_f64(&self, source: View<'_, Self>) -> Vec<f64> {
        self.read(source).iter().map(|&v| v as f64).collect()
    }
    fn wait(&self) {
        self.done(self.pool.driver.wait());
    }
    fn peak_bytes(&self) -> Option<u64> {
        Some(self.pool.peak_bytes())
    }
    fn trim(&self) {
        self.done(self.pool.trim());
    }
    fn bytes_in_use(&self) -> u64 {
        self.pool.bytes_in_use()
    }

    fn fill(&self, target: ViewMut<'_, Self>, value: f64) {
        let n = target.len;
        self.flat("fill", n, &[target.real(), size(n), float(value)]);
    }
    fn copy(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        assert_eq!(target.len, source.len, "a copy is as long as what is copied");
        if source.len > 0 {
            self.done(self.pool.driver.copy(target.at(), source.at(), 4 * source.len as u64));
        }
    }
    fn add(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        let n = target.len;
        assert_eq!(n, source.len, "what is added is as long as what it is added to");
        self.flat("add", n, &[target.real(), source.real(), size(n)]);
    }
    fn scale(&self, target: ViewMut<'_, Self>, factor: f64) {
        let n = target.len;
        self.flat("scale", n, &[target.real(), size(n), float(factor)]);
    }
    fn dot_blocks(&self, a: View<'_, Self>, b: View<'_, Self>) -> Vec<f64> {
        assert_eq!(a.len, b.len, "an inner product is of vectors of one length");
        let blocks = a.len.div_ceil(DOT_BLOCK);
        let out = self.doubles(blocks);
        self.rows("dot_blocks", blocks, &[a.pointer(), b.pointer(), size(a.len), out.pointer()]);
        self.content::<u64>(&out, blocks).into_iter().map(f64::from_bits).collect()
    }
    fn product(&self, a: Matrix<'_, Self>, b: Matrix<'_, Self>, c: ViewMut<'_, Self>, accumulate: bool) {
        assert_eq!(a.columns, b.rows, "inner sizes of a product differ");
        assert_eq!(c.len, a.rows * b.columns, "a product has as many elements as its place");
        let (rows, columns, depth) = (a.rows, b.columns, a.columns);
        let to = Factor { at: c.at(), stride: columns, step: 0, transposed: false };
        let (a, b) = (factor(&a), factor(&b));
        self.multiply(Product { rows, columns, depth, batch: 1, a, b, bf16: false, c: to, accumulate });
    }
    fn gather(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        let list = self.list(ids);
        self.rows("gather", ids.len(), &[table.pointer(), list.pointer(), number(width), rows.real()]);
    }
    fn scatter_add(&self, rows: View<'_, Self>, width: usize, ids: &[u32], table: ViewMut<'_, Self>) {
        let (order, starts) = by_id(ids);
        let grid = [starts.len() - 1, width.div_ceil(256), 1];
        let (ids, order, starts) = (self.list(ids), self.list(&order), self.list(&starts));
        let (ids, order, starts) = (ids.pointer(), order.pointer(), starts.pointer());
        let arguments = [rows.real(), ids, order, starts, number(width), table.pointer()];
        self.launch("scatter_add", grid, 256, 0, &arguments);
    }
    fn dropout(&self, x: ViewMut<'_, Self>, width: usize, dropout: Dropout) {
        let (rows, from) = (x.len / width, Argument::Real(x.at(), x.len));
        self.rows("dropout", rows, &[from, x.real(), number(width), Some(dropout).into()]);
    }
    fn residual(
        &self,
        x: ViewMut<'_, Self>,
        residual: View<'_, Self>,
        width: usize,
        dropout: Option<Dropout>,
    ) {
        let rows = x.len / width;
        self.rows("residual", rows, &[x.real(), residual.real(), number(width), dropout.into()]);
    }
    fn rms_norm(&self, x: View<'_, Self>, weight: View<'_, Self>, eps: f64, y: ViewMut<'_, Self>) {
        let (width, rows) = (weight.len, x.len / weight.len);
        let arguments = [x.real(), weight.pointer(), float(eps), y.real(), size(rows), number(width)];
        self.warps("rms_norm", rows, &arguments);
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
        let (width, rows) = (weight.len, x.len / weight.len);
        let (stats, n, w) = (self.scratch_of(rows), size(rows), number(width));
        let r = stats.pointer();
        let arguments = [x.real(), weight.pointer(), float(eps), dy.real(), dx.real(), r, n, w];
        self.warps("rms_norm_backward", rows, &arguments);
        let (part, grid) = self.partial(rows, width, width);
        self.launch("rms_norm_weight", grid, 256, 0, &[x.real(), dy.real(), r, n, w, part.pointer()]);
        self.fold(&part, &dweight);
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
        self.activate(u, None, width, kind, gated, dropout, y);
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
        self.activate_backward(u, None, width, kind, gated, dropout, dy, &du);
    }
    fn attention(
        &self,
        x: Heads<'_, Self>,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        y: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        attention::forward(self, x, bias, shape, y, log_sum);
    }
    fn attention_backward(
        &self,
        x: Heads<'_, Self>,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        y: View<'_, Self>,
        log_sum: View<'_, Self>,
        dy: View<'_, Self>,
        dx: HeadsMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        attention::backward(self, x, bias, shape, y, log_sum, dy, dx, dbias);
    }
    fn heads_expand(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        states::heads_product(self, x, weight, heads, width, false, y);
    }
    fn heads_reduce(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        states::heads_product(self, x, weight, heads, width, true, y);
    }
    fn heads_gradient(
        &self,
        x: View<'_, Self>,
        c: View<'_, Self>,
        heads: usize,
        width: usize,
        dweight: ViewMut<'_, Self>,
    ) {
        states::heads_gradient(self, x, c, heads, width, dweight);
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
        states::forward(self, u, states, width, bias, shape, c, log_sum);
    }
    fn state_attention_backward(
        &self,
        u: View<'_, Self>,
        states: View<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        c: View<'_, Self>,
        log_sum: View<'_, Self>,
        dc: View<'_, Self>,
        du: ViewMut<'_, Self>,
        dstates: ViewMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        states::backward(self, u, states, width, bias, shape, c, log_sum, dc, du, dstates, dbias);
    }
    fn cross_entropy(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        losses: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        let (list, classes) = self.labels(labels, logits.len);
        let arguments = [logits.pointer(), list.pointer(), classes, losses.pointer(), log_sum.pointer()];
        self.rows("cross_entropy", labels.len(), &arguments);
    }
    fn cross_entropy_backward(
        &self,
        logits: ViewMut<'_, Self>,
        labels: &[u32],
        log_sum: View<'_, Self>,
        scale: f64,
    ) {
        let (list, classes) = self.labels(labels, logits.len);
        let (from, list, scale) = (logits.pointer(), list.pointer(), float(scale));
        let arguments = [from, list, log_sum.pointer(), classes, scale, logits.real()];
        self.rows("cross_entropy_backward", labels.len(), &arguments);
    }
    fn smooth_losses(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        smoothing: f64,
        losses: ViewMut<'_, Self>,
    ) {
        let (list, classes) = self.labels(labels, logits.len);
        let arguments = [logits.pointer(), list.pointer(), classes, float(smoothing), losses.pointer()];
        self.rows("smooth_losses", labels.len(), &arguments);
    }
    fn smooth_gradient(&self, gradient: ViewMut<'_, Self>, labels: &[u32], amount: f64) {
        let (list, classes) = self.labels(labels, gradient.len);
        let arguments = [gradient.real(), list.pointer(), classes, float(amount)];
        self.rows("smooth_gradient", labels.len(), &arguments);
    }
    fn argmax(&self, x: View<'_, Self>, width: usize) -> Vec<u32> {
        let rows = x.len.checked_div(width).unwrap_or(0);
        let places = self.scratch_of(rows);
        self.rows("argmax", rows, &[x.pointer(), number(width), places.pointer()]);
        self.content(&places, rows)
    }
    fn top_k(&self, x: View<'_, Self>, width: usize, k: usize) -> Vec<(u32, f64)> {
        let (rows, k) = (x.len.checked_div(width).unwrap_or(0), k.min(width));
        let (places, values) = (self.scratch_of(rows * k), self.scratch_of(rows * k));
        let arguments = [x.pointer(), number(width), number(k), places.pointer(), values.pointer()];
        self.rows("top_k", rows, &arguments);
        let values = self.content::<f32>(&values, rows * k).into_iter().map(f64::from);
        self.content(&places, rows * k).into_iter().zip(values).collect()
    }
    fn adam(
        &self,
        parameters: ViewMut<'_, Self>,
        gradients: View<'_, Self>,
        first: ViewMut<'_, Self>,
        second: ViewMut<'_, Self>,
        s: AdamStep,
    ) {
        let (n, t) = (parameters.len, s.step as f64);
        let values = [
            1.0 - s.lr * s.weight_decay,
            s.beta1,
            s.beta2,
            1.0 - s.beta1,
            1.0 - s.beta2,
            s.lr / (1.0 - libm::pow(s.beta1, t)),
            1.0 / (1.0 - libm::pow(s.beta2, t)).sqrt(),
            s.eps,
            s.gradient_scale,
        ];
        let constants = Argument::value(AdamConstants { values: values.map(|v| v as f32) });
        let known = [parameters.pointer(), gradients.pointer(), first.pointer(), second.pointer()];
        let [p, g, m, v] = known;
        self.flat("adam", n, &[p, g, m, v, size(n), constants]);
    }
    fn adafactor(
        &self,
        parameter: ViewMut<'_, Self>,
        gradient: View<'_, Self>,
        columns: Option<usize>,
        statistics: ViewMut<'_, Self>,
        step: AdafactorStep,
    ) {
        adafactor::step(self, parameter, gradient, columns, statistics, step);
    }
}

impl<R: Driver> Cuda<R> {
    /// Labels on the device, and the number of classes of so many logits.
    fn labels(&self, labels: &[u32], logits: usize) -> (Buffer<R>, Argument) {
        (self.list(labels), number(logits.checked_div(labels.len()).unwrap_or(0)))
    }
}
