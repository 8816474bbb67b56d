//! A device whose kernels are those of `cuda/`, run on the host: what a CUDA device will launch, in the same order and with the same
//! grids. Products, which a GPU's library will do, are plain loops. Memory is f32 on this side; with [`Storage::Bf16`] it is
//! rounded to bf16 on the way into a kernel and out of it, where the kernel takes the storage type.

use tercio_engine::device::{Heads, HeadsMut, Matrix};
use tercio_engine::*;

use super::attention;
use super::factored;
use super::library::{Argument, Library, Storage};
use super::memory::{Guarded, floats, words};
use super::states;

/// Rows of a partial sum, as `cuda/rows.h` has it.
const PARTIAL_ROWS: usize = 128;
/// Elements of a block of an inner product, as `cuda/sums.cu` has it.
const DOT_BLOCK: usize = 16384;

/// The device; `descending`: blocks and threads run in the other order, which may not change a bit.
#[derive(Clone, Copy)]
pub struct OnHost {
    pub library: &'static Library,
    pub descending: bool,
}

impl OnHost {
    pub fn new(storage: Storage, descending: bool) -> OnHost {
        OnHost { library: Library::of(storage), descending }
    }
    /// Launches a kernel, or fails with what the shim says.
    pub fn launch(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        arguments: &[Argument],
    ) {
        let done = self.library.launch(kernel, grid, threads, shared, arguments, self.descending);
        done.unwrap_or_else(|e| panic!("{e}"));
    }
    /// One block of 256 threads for each of `blocks`.
    pub fn rows(&self, kernel: &str, blocks: usize, arguments: &[Argument]) {
        self.launch(kernel, [blocks, 1, 1], 256, 0, arguments);
    }
    /// A thread for each of `n` elements.
    pub fn flat(&self, kernel: &str, n: usize, arguments: &[Argument]) {
        self.rows(kernel, n.div_ceil(256), arguments);
    }
    /// A warp for each of `n` rows.
    pub fn warps(&self, kernel: &str, n: usize, arguments: &[Argument]) {
        self.launch(kernel, [n.div_ceil(4), 1, 1], 128, 0, arguments);
    }
    /// Scratch for the partial sums of the columns of `rows` rows, and the grid that fills it.
    pub fn partial(rows: usize, width: usize, columns: usize) -> (Guarded<f32>, [usize; 3]) {
        let blocks = rows.div_ceil(PARTIAL_ROWS);
        (floats(vec![f32::NAN; blocks * width]), [columns.div_ceil(32), blocks, 1])
    }
    /// `total += ` the rows of `part`.
    pub fn fold(&self, part: &Guarded<f32>, mut total: ViewMut<'_, Self>) {
        let width = total.len;
        let parts = part.len().checked_div(width).unwrap_or(0);
        let arguments = [part.into(), size(parts), number(width), total.reborrow().pointer()];
        self.rows("fold_rows", width.div_ceil(32), &arguments);
    }
}

/// A `u64` argument.
pub fn size(n: usize) -> Argument {
    Argument::from(n as u64)
}
/// A `u32` argument.
pub fn number(n: usize) -> Argument {
    Argument::from(u32::try_from(n).expect("a width fits 32 bits"))
}
/// An f32 argument.
pub fn float(x: f64) -> Argument {
    Argument::from(x as f32)
}

/// A view as an argument: of the storage type, or f32 in any case.
pub trait Operand: Sized {
    fn real(self) -> Argument;
    fn pointer(self) -> Argument;
}
impl Operand for View<'_, OnHost> {
    fn real(self) -> Argument {
        assert!(self.start + self.len <= self.storage.len());
        Argument::Real(self.storage.pointer().wrapping_add(self.start), self.len)
    }
    fn pointer(self) -> Argument {
        assert!(self.start + self.len <= self.storage.len());
        Argument::Pointer(self.storage.pointer().wrapping_add(self.start).cast())
    }
}
impl Operand for ViewMut<'_, OnHost> {
    fn real(self) -> Argument {
        assert!(self.start + self.len <= self.storage.len());
        Argument::RealMut(self.storage.pointer().wrapping_add(self.start), self.len)
    }
    fn pointer(self) -> Argument {
        assert!(self.start + self.len <= self.storage.len());
        Argument::Pointer(self.storage.pointer().wrapping_add(self.start).cast())
    }
}
/// An optional f32 array.
pub fn optional(view: Option<View<'_, OnHost>>) -> Argument {
    view.map_or(Argument::Pointer(std::ptr::null()), Operand::pointer)
}
/// The same stretch for reading, beside its being written.
pub fn alias(view: &ViewMut<'_, OnHost>) -> Argument {
    Argument::Real(view.storage.pointer().wrapping_add(view.start), view.len)
}

pub fn slice<'a>(view: View<'a, OnHost>) -> &'a [f32] {
    &view.storage.values()[view.start..view.start + view.len]
}

/// The kernels' number of an activation.
pub fn kind_of(kind: Activation) -> Argument {
    Argument::from(match kind {
        Activation::Relu => 0u32,
        Activation::GeluTanh => 1,
        Activation::GeluErf => 2,
        Activation::Silu => 3,
        Activation::Tanh => 4,
    })
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

/// What `adam` of `cuda/optimizer.cu` takes.
#[repr(C)]
#[derive(Clone, Copy)]
struct AdamConstants {
    values: [f32; 9],
}

impl Device for OnHost {
    type Storage = Guarded<f32>;
    type Element = f32;
    const BLOCK: usize = DOT_BLOCK;

    fn name(&self) -> &'static str {
        "the CUDA kernels on the host"
    }
    fn arithmetic(&self) -> String {
        "f32".into()
    }
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        f()
    }
    fn zeros(&self, len: usize) -> Guarded<f32> {
        floats(vec![0.0; len])
    }
    fn scratch(&self, len: usize) -> Guarded<f32> {
        floats(vec![f32::NAN; len])
    }
    fn write(&self, target: ViewMut<'_, Self>, values: &[f32]) {
        self.elements_mut(target).copy_from_slice(values);
    }
    fn read(&self, source: View<'_, Self>) -> Vec<f32> {
        slice(source).to_vec()
    }
    fn elements<'a>(&self, source: View<'a, Self>) -> &'a [f32] {
        slice(source)
    }
    fn elements_mut<'a>(&self, target: ViewMut<'a, Self>) -> &'a mut [f32] {
        assert!(target.start + target.len <= target.storage.len());
        // SAFETY: within the buffer, which the view holds alone.
        unsafe { std::slice::from_raw_parts_mut(target.storage.pointer().add(target.start), target.len) }
    }
    fn pointer(&self, target: ViewMut<'_, Self>) -> *mut f32 {
        self.elements_mut(target).as_mut_ptr()
    }
    fn read_f64(&self, source: View<'_, Self>) -> Vec<f64> {
        slice(source).iter().map(|&v| v as f64).collect()
    }

    fn fill(&self, target: ViewMut<'_, Self>, value: f64) {
        let n = target.len;
        self.flat("fill", n, &[target.real(), size(n), float(value)]);
    }
    fn copy(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        self.elements_mut(target).copy_from_slice(slice(source));
    }
    fn add(&self, target: ViewMut<'_, Self>, source: View<'_, Self>) {
        let n = target.len;
        assert_eq!(n, source.len);
        self.flat("add", n, &[target.real(), source.real(), size(n)]);
    }
    fn scale(&self, target: ViewMut<'_, Self>, factor: f64) {
        let n = target.len;
        self.flat("scale", n, &[target.real(), size(n), float(factor)]);
    }
    fn dot_blocks(&self, a: View<'_, Self>, b: View<'_, Self>) -> Vec<f64> {
        assert_eq!(a.len, b.len);
        let blocks = a.len.div_ceil(DOT_BLOCK);
        let out = Guarded::new(vec![f64::NAN; blocks], 1e300);
        self.rows("dot_blocks", blocks, &[a.pointer(), b.pointer(), size(a.len), (&out).into()]);
        out.values().to_vec()
    }
    fn product(&self, a: Matrix<'_, Self>, b: Matrix<'_, Self>, c: ViewMut<'_, Self>, accumulate: bool) {
        let at = |m: &Matrix<'_, Self>, i: usize, j: usize| {
            let (i, j) = if m.transposed { (j, i) } else { (i, j) };
            slice(m.view)[i * m.stride + j] as f64
        };
        let (columns, depth) = (b.columns, a.columns);
        for (e, target) in self.elements_mut(c).iter_mut().enumerate() {
            let (i, j) = (e / columns, e % columns);
            let sum: f64 = (0..depth).map(|k| at(&a, i, k) * at(&b, k, j)).sum();
            *target = if accumulate { *target + sum as f32 } else { sum as f32 };
        }
    }
    fn gather(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        let list = words(ids.to_vec());
        self.rows("gather", ids.len(), &[table.pointer(), (&list).into(), number(width), rows.real()]);
    }
    fn scatter_add(&self, rows: View<'_, Self>, width: usize, ids: &[u32], table: ViewMut<'_, Self>) {
        let (order, starts) = by_id(ids);
        let grid = [starts.len() - 1, width.div_ceil(256), 1];
        let (ids, order, starts) = (words(ids.to_vec()), words(order), words(starts));
        let (ids, order, starts) = ((&ids).into(), (&order).into(), (&starts).into());
        let arguments = [rows.real(), ids, order, starts, number(width), table.pointer()];
        self.launch("scatter_add", grid, 256, 0, &arguments);
    }
    fn dropout(&self, x: ViewMut<'_, Self>, width: usize, dropout: Dropout) {
        let (rows, from) = (x.len / width, alias(&x));
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
        let sizes = [size(rows), number(width)];
        let arguments: [Argument; 4] = [x.real(), weight.pointer(), float(eps), y.real()];
        self.warps("rms_norm", rows, &arguments.into_iter().chain(sizes).collect::<Vec<_>>());
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
        let stats = floats(vec![f32::NAN; rows]);
        let (r, sizes) = (|| (&stats).into(), || [size(rows), number(width)]);
        let [n, w] = sizes();
        let arguments = [x.real(), weight.pointer(), float(eps), dy.real(), dx.real(), r(), n, w];
        self.warps("rms_norm_backward", rows, &arguments);
        let (part, grid) = Self::partial(rows, width, width);
        let [n, w] = sizes();
        let arguments = [x.real(), dy.real(), r(), n, w, (&part).into()];
        self.launch("rms_norm_weight", grid, 256, 0, &arguments);
        self.fold(&part, dweight);
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
        self.activate_backward(u, None, width, kind, gated, dropout, dy, du);
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
        states::heads_product(slice(x), slice(weight), heads, width, false, self.elements_mut(y));
    }
    fn heads_reduce(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    ) {
        states::heads_product(slice(x), slice(weight), heads, width, true, self.elements_mut(y));
    }
    fn heads_gradient(
        &self,
        x: View<'_, Self>,
        c: View<'_, Self>,
        heads: usize,
        width: usize,
        dweight: ViewMut<'_, Self>,
    ) {
        states::heads_gradient(slice(x), slice(c), heads, width, self.elements_mut(dweight));
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
        let (rows, list) = (labels.len(), words(labels.to_vec()));
        let classes = number(logits.len.checked_div(rows).unwrap_or(0));
        let arguments = [logits.pointer(), (&list).into(), classes, losses.pointer(), log_sum.pointer()];
        self.rows("cross_entropy", rows, &arguments);
    }
    fn cross_entropy_backward(
        &self,
        mut logits: ViewMut<'_, Self>,
        labels: &[u32],
        log_sum: View<'_, Self>,
        scale: f64,
    ) {
        let (rows, list) = (labels.len(), words(labels.to_vec()));
        let classes = number(logits.len.checked_div(rows).unwrap_or(0));
        let from = logits.reborrow().pointer();
        let arguments = [from, (&list).into(), log_sum.pointer(), classes, float(scale), logits.real()];
        self.rows("cross_entropy_backward", rows, &arguments);
    }
    fn smooth_losses(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        smoothing: f64,
        losses: ViewMut<'_, Self>,
    ) {
        let (rows, list) = (labels.len(), words(labels.to_vec()));
        let classes = number(logits.len.checked_div(rows).unwrap_or(0));
        let arguments = [logits.pointer(), (&list).into(), classes, float(smoothing), losses.pointer()];
        self.rows("smooth_losses", rows, &arguments);
    }
    fn smooth_gradient(&self, gradient: ViewMut<'_, Self>, labels: &[u32], amount: f64) {
        let (rows, list) = (labels.len(), words(labels.to_vec()));
        let classes = number(gradient.len.checked_div(rows).unwrap_or(0));
        self.rows("smooth_gradient", rows, &[gradient.real(), (&list).into(), classes, float(amount)]);
    }
    fn argmax(&self, x: View<'_, Self>, width: usize) -> Vec<u32> {
        let rows = x.len.checked_div(width).unwrap_or(0);
        let places = words(vec![0; rows]);
        self.rows("argmax", rows, &[x.pointer(), number(width), (&places).into()]);
        places.values().to_vec()
    }
    fn top_k(&self, x: View<'_, Self>, width: usize, k: usize) -> Vec<(u32, f64)> {
        let (rows, k) = (x.len.checked_div(width).unwrap_or(0), k.min(width));
        let (places, values) = (words(vec![0; rows * k]), floats(vec![f32::NAN; rows * k]));
        let out = [(&places).into(), (&values).into()];
        let arguments: Vec<_> = [x.pointer(), number(width), number(k)].into_iter().chain(out).collect();
        self.rows("top_k", rows, &arguments);
        places.values().iter().copied().zip(values.values().iter().map(|&v| v as f64)).collect()
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
        let copy = floats(vec![f32::NAN; n]);
        let p = parameters.storage.pointer().wrapping_add(parameters.start);
        let arguments = [
            parameters.pointer(),
            gradients.pointer(),
            first.pointer(),
            second.pointer(),
            size(n),
            constants,
            Argument::RealMut(copy.pointer(), n),
        ];
        self.flat("adam", n, &arguments);
        for i in 0..n {
            // SAFETY: the parameters, which the view holds alone.
            let (value, copied) = (unsafe { p.add(i).read() }, copy.values()[i]);
            let rounded = f32::from_bits((super::library::to_bf16(value) as u32) << 16);
            let wanted = if self.library.storage() == Storage::Bf16 { rounded } else { value };
            assert_eq!(copied.to_bits(), wanted.to_bits(), "the copy of parameter {i}");
        }
    }
    fn adafactor(
        &self,
        parameter: ViewMut<'_, Self>,
        gradient: View<'_, Self>,
        columns: Option<usize>,
        statistics: ViewMut<'_, Self>,
        step: AdafactorStep,
    ) {
        factored::step(self, parameter, gradient, columns, statistics, step);
    }
}
