//! The CPU device: f32, rayon threads, kernels compiled for AVX-512, AVX2 and the portable baseline, chosen at run time.
//!
//! Bits do not depend on the number of threads: work is cut into fixed blocks and every sum has one order.
//! Products and kernels use fused multiply-add in the same order on AVX2, AVX-512 and AArch64, so these agree bit
//! for bit; the portable x86 path rounds twice and is another arithmetic ([`Device::arithmetic`] names it).

mod adafactor;
mod attention;
mod attention_rows;
mod bias;
mod dot;
mod elementwise;
mod encoder;
#[cfg(target_arch = "x86_64")]
mod few_rows;
mod lanes;
pub mod late;
mod layer_norm;
pub mod lookup;
mod loss;
pub mod math;
mod max_sim;
mod norm;
mod optimizer;
mod packing;
mod pool;
mod pooling;
mod product;
#[cfg(target_arch = "x86_64")]
mod product_amx;
pub mod screen;
mod state_attention;
pub mod weigh;

use std::borrow::Cow;
use std::sync::Arc;

use crate::device::*;
use crate::random::Dropout;
pub use dot::StoredRows;
use lanes::Arithmetic;
pub use lanes::{Isa, Precision};
pub use pool::Buffer;

/// Elements of a fixed block of an elementwise kernel or reduction.
const BLOCK: usize = 1 << 14;

/// The CPU with a number of threads and an instruction set.
#[derive(Clone)]
pub struct Cpu {
    threads: Arc<rayon::ThreadPool>,
    pool: Arc<pool::Pool>,
    arithmetic: Arithmetic,
}

/// Why a CPU device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// `TERCIO_ISA` asks for what is not there.
    #[error("TERCIO_ISA={0}: {1}")]
    Isa(String, &'static str),
    /// The operating system gave no threads.
    #[error("cannot start {0} threads: {1}")]
    Threads(usize, rayon::ThreadPoolBuildError),
}

impl Cpu {
    /// A CPU device with `threads` threads (at least 1) and the best instruction set of this processor, or the one
    /// that the environment variable `TERCIO_ISA` names (`amx`, `avx512bf16`, `avx512`, `avx2`, `portable`).
    pub fn new(threads: usize) -> Result<Cpu, CpuError> {
        let isa = match std::env::var("TERCIO_ISA") {
            Err(_) => Isa::best(),
            Ok(name) => {
                let isa = Isa::named(&name).ok_or_else(|| {
                    CpuError::Isa(name.clone(), "expected amx, avx512bf16, avx512, avx2 or portable")
                })?;
                if !isa.available() {
                    return Err(CpuError::Isa(name, "this processor does not have it"));
                }
                isa
            }
        };
        Self::with_isa(threads, isa)
    }
    /// A CPU device with a given instruction set, which must be [`Isa::available`].
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Cpu, CpuError> {
        assert!(isa.available(), "the processor does not have {isa:?}");
        let threads = threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("tercio-{i}"))
            .build()
            .map_err(|e| CpuError::Threads(threads, e))?;
        let arithmetic = Arithmetic { isa, precision: Precision::F32 };
        Ok(Cpu { threads: Arc::new(pool), pool: Arc::new(pool::Pool::default()), arithmetic })
    }
    /// The same device with the factors of products in another precision.
    pub fn with_precision(self, precision: Precision) -> Cpu {
        Cpu { arithmetic: Arithmetic { precision, ..self.arithmetic }, ..self }
    }
    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.current_num_threads()
    }
    /// The instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.arithmetic.isa
    }
}

impl<'a> View<'a, Cpu> {
    pub(crate) fn slice(self) -> &'a [f32] {
        self.storage.part(self.start, self.len)
    }
}
impl<'a> ViewMut<'a, Cpu> {
    pub(crate) fn slice(self) -> &'a mut [f32] {
        self.storage.part_mut(self.start, self.len)
    }
}

impl Device for Cpu {
    type Storage = Buffer;
    type Element = f32;
    const BLOCK: usize = BLOCK;

    fn name(&self) -> &'static str {
        "cpu"
    }
    fn arithmetic(&self) -> String {
        let Arithmetic { isa, precision } = self.arithmetic;
        let vectors = if isa.fuses() { "f32 fused" } else { "f32 unfused" };
        match (precision, isa) {
            (Precision::F32, Isa::Amx) => format!("{vectors}, products of three bf16 parts"),
            (Precision::F32, _) => vectors.into(),
            (Precision::Bf16, Isa::Amx) => format!("{vectors}, products in bf16 tiles"),
            (Precision::Bf16, Isa::Avx512Bf16) => format!("{vectors}, products of pairs of bf16"),
            (Precision::Bf16, _) => format!("{vectors}, products of factors rounded to bf16"),
        }
    }
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.threads.install(f)
    }
    fn zeros(&self, len: usize) -> Buffer {
        pool::Pool::zeros(&self.pool, len)
    }
    fn scratch(&self, len: usize) -> Buffer {
        pool::Pool::take(&self.pool, len)
    }
    fn write(&self, target: ViewMut<'_, Self>, values: &[f32]) {
        target.slice().copy_from_slice(values);
    }
    fn read(&self, source: View<'_, Self>) -> Vec<f32> {
        source.slice().to_vec()
    }
    fn host<'a>(&self, source: View<'a, Self>) -> Cow<'a, [f32]> {
        source.slice().into()
    }
    fn elements<'a>(&self, source: View<'a, Self>) -> Cow<'a, [f32]> {
        source.slice().into()
    }
    fn change<T>(&self, target: ViewMut<'_, Self>, work: impl FnOnce(&mut [f32]) -> T) -> T {
        work(target.slice())
    }
    fn shared(&self, target: ViewMut<'_, Self>) -> Shared<f32> {
        Shared::own(target.storage.pointer(target.start, target.len))
    }
    fn read_f64(&self, source: View<'_, Self>) -> Vec<f64> {
        source.slice().iter().map(|&v| v as f64).collect()
    }
    fn trim(&self) {
        self.pool.trim();
    }
    fn bytes_in_use(&self) -> u64 {
        self.pool.bytes_in_use()
    }
    fn fill(&self, target: ViewMut<'_, Self>, value: f64) {
        elementwise::fill(target.slice(), value as f32);
    }
    fn copy(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        elementwise::copy(target.slice(), source.slice());
    }
    fn add(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        elementwise::add(self.arithmetic.isa, target.slice(), source.slice());
    }
    fn scale(&self, target: ViewMut<'_, Self>, factor: f64) {
        elementwise::scale(self.arithmetic.isa, target.slice(), factor as f32);
    }
    fn dot_blocks(&self, a: View<'_, Self>, b: View<'_, Self>) -> Vec<f64> {
        elementwise::dot_blocks(self.arithmetic.isa, a.slice(), b.slice())
    }
    fn product(&self, a: Matrix<'_, Self>, b: Matrix<'_, Self>, c: ViewMut<'_, Self>, accumulate: bool) {
        assert_eq!(a.columns, b.rows, "inner sizes of a product differ");
        let n = b.columns;
        let c = c.slice();
        assert_eq!(c.len(), a.rows * n);
        product::product(
            self.arithmetic,
            product::Operand::of(&a),
            product::Operand::of(&b),
            c,
            n,
            accumulate,
        );
    }
    fn gather(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        elementwise::gather(table.slice(), width, ids, rows.slice());
    }
    fn scatter_add(&self, rows: View<'_, Self>, width: usize, ids: &[u32], table: ViewMut<'_, Self>) {
        elementwise::scatter_add(self.arithmetic.isa, rows.slice(), width, ids, table.slice());
    }
    fn dropout(&self, x: ViewMut<'_, Self>, width: usize, dropout: Dropout) {
        elementwise::dropout(self.arithmetic.isa, x.slice(), width, dropout);
    }
    fn residual(
        &self,
        x: ViewMut<'_, Self>,
        residual: View<'_, Self>,
        width: usize,
        dropout: Option<Dropout>,
    ) {
        elementwise::residual(self.arithmetic.isa, x.slice(), residual.slice(), width, dropout);
    }
    fn rms_norm(&self, x: View<'_, Self>, weight: View<'_, Self>, eps: f64, y: ViewMut<'_, Self>) {
        norm::forward(self.arithmetic.isa, x.slice(), weight.slice(), eps as f32, y.slice());
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
        let (dx, dweight) = (dx.slice(), dweight.slice());
        norm::backward(self.arithmetic.isa, x.slice(), weight.slice(), eps as f32, dy.slice(), dx, dweight);
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
        elementwise::activation(self.arithmetic.isa, u.slice(), width, kind, gated, dropout, y.slice());
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
        elementwise::activation_backward(
            self.arithmetic.isa,
            u.slice(),
            width,
            kind,
            gated,
            dropout,
            dy.slice(),
            du.slice(),
        );
    }
    fn attention(
        &self,
        x: Heads<'_, Self>,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        y: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        attention::forward(self.arithmetic, x, bias.map(View::slice), shape, y.slice(), log_sum.slice());
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
        attention::backward(
            self.arithmetic,
            x,
            bias.map(View::slice),
            shape,
            y.slice(),
            log_sum.slice(),
            dy.slice(),
            dx,
            dbias.map(ViewMut::slice),
        );
    }
    fn heads_expand(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        state_attention::expand(self.arithmetic, x.slice(), weight.slice(), heads, width, y.slice());
    }
    fn heads_reduce(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        state_attention::reduce(self.arithmetic, x.slice(), weight.slice(), heads, width, y.slice());
    }
    fn heads_gradient(
        &self,
        x: View<'_, Self>,
        c: View<'_, Self>,
        heads: usize,
        width: usize,
        dweight: ViewMut<'_, Self>,
    ) {
        state_attention::weight_gradient(
            self.arithmetic,
            x.slice(),
            c.slice(),
            heads,
            width,
            dweight.slice(),
        );
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
        let bias = bias.map(View::slice);
        let (u, states) = (u.slice(), states.slice());
        state_attention::forward(self.arithmetic, u, states, width, bias, shape, c.slice(), log_sum.slice());
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
        state_attention::backward(
            self.arithmetic,
            u.slice(),
            states.slice(),
            width,
            bias.map(View::slice),
            shape,
            c.slice(),
            log_sum.slice(),
            dc.slice(),
            du.slice(),
            dstates.slice(),
            dbias.map(ViewMut::slice),
        );
    }
    fn cross_entropy(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        losses: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    ) {
        loss::cross_entropy(self.arithmetic.isa, logits.slice(), labels, losses.slice(), log_sum.slice());
    }
    fn cross_entropy_backward(
        &self,
        logits: ViewMut<'_, Self>,
        labels: &[u32],
        log_sum: View<'_, Self>,
        scale: f64,
    ) {
        loss::cross_entropy_backward(
            self.arithmetic.isa,
            logits.slice(),
            labels,
            log_sum.slice(),
            scale as f32,
        );
    }
    fn smooth_losses(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        smoothing: f64,
        losses: ViewMut<'_, Self>,
    ) {
        let (isa, logits, losses) = (self.arithmetic.isa, logits.slice(), losses.slice());
        loss::smooth(isa, logits, labels, smoothing as f32, losses);
    }
    fn smooth_gradient(&self, gradient: ViewMut<'_, Self>, labels: &[u32], amount: f64) {
        loss::smooth_backward(self.arithmetic.isa, gradient.slice(), labels, amount as f32);
    }
    fn argmax(&self, x: View<'_, Self>, width: usize) -> Vec<u32> {
        loss::argmax(x.slice(), width)
    }
    fn top_k(&self, x: View<'_, Self>, width: usize, k: usize) -> Vec<(u32, f64)> {
        loss::top_k(x.slice(), width, k)
    }
    fn adam(
        &self,
        parameters: ViewMut<'_, Self>,
        gradients: View<'_, Self>,
        first: ViewMut<'_, Self>,
        second: ViewMut<'_, Self>,
        step: AdamStep,
    ) {
        let (p, m, v) = (parameters.slice(), first.slice(), second.slice());
        optimizer::adam(self.arithmetic.isa, p, gradients.slice(), m, v, step);
    }
    fn adafactor(
        &self,
        parameter: ViewMut<'_, Self>,
        gradient: View<'_, Self>,
        columns: Option<usize>,
        statistics: ViewMut<'_, Self>,
        step: AdafactorStep,
    ) {
        let (isa, p, g, stats) =
            (self.arithmetic.isa, parameter.slice(), gradient.slice(), statistics.slice());
        match columns {
            Some(columns) => adafactor::matrix(isa, p, g, columns, stats, &step),
            None => adafactor::vector(isa, p, g, stats, &step),
        }
    }
}
