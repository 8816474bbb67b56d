//! A device that passes every call on to another one and keeps its time.

use std::borrow::Cow;

use tercio_engine::device::{Heads, HeadsMut, Matrix, Shared};
use tercio_engine::{
    Activation, AdafactorStep, AdamStep, AttentionShape, Device, Dropout, EncoderKernels, MaxSimShape,
    MaxSimSide, Rotary, Span, View, ViewMut,
};

use super::{Operation, Profile};

/// Products of so many rows at most are called those of few rows: decoding, scores, heads.
const FEW_ROWS: usize = 16;

/// A device whose kernels are timed; the results are those of the device within. Memory that the system gives on first
/// use is counted where it is first written.
#[derive(Clone)]
pub struct Profiled<D: Device> {
    inner: D,
    profile: Profile,
}

impl<D: Device> Profiled<D> {
    /// The same device, its costs gathered in `profile`.
    pub fn new(device: &D, profile: Profile) -> Profiled<D> {
        Profiled { inner: device.clone(), profile }
    }
}

/// An operand as the device within takes it.
trait Inner {
    type Operand;
    fn inner(self) -> Self::Operand;
}

impl<'a, D: Device> Inner for View<'a, Profiled<D>> {
    type Operand = View<'a, D>;
    fn inner(self) -> View<'a, D> {
        View { storage: self.storage, start: self.start, len: self.len }
    }
}
impl<'a, D: Device> Inner for ViewMut<'a, Profiled<D>> {
    type Operand = ViewMut<'a, D>;
    fn inner(self) -> ViewMut<'a, D> {
        ViewMut { storage: self.storage, start: self.start, len: self.len }
    }
}
impl<'a, D: Device> Inner for Matrix<'a, Profiled<D>> {
    type Operand = Matrix<'a, D>;
    fn inner(self) -> Matrix<'a, D> {
        let Matrix { view, rows, columns, stride, transposed } = self;
        Matrix { view: view.inner(), rows, columns, stride, transposed }
    }
}
impl<'a, D: Device> Inner for Heads<'a, Profiled<D>> {
    type Operand = Heads<'a, D>;
    fn inner(self) -> Heads<'a, D> {
        match self {
            Heads::Fused(view) => Heads::Fused(view.inner()),
            Heads::Split { query, key_value } => {
                Heads::Split { query: query.inner(), key_value: key_value.inner() }
            }
        }
    }
}
impl<'a, D: Device> Inner for HeadsMut<'a, Profiled<D>> {
    type Operand = HeadsMut<'a, D>;
    fn inner(self) -> HeadsMut<'a, D> {
        match self {
            HeadsMut::Fused(view) => HeadsMut::Fused(view.inner()),
            HeadsMut::Split { query, key_value } => {
                HeadsMut::Split { query: query.inner(), key_value: key_value.inner() }
            }
        }
    }
}
impl<T: Inner> Inner for Option<T> {
    type Operand = Option<T::Operand>;
    fn inner(self) -> Self::Operand {
        self.map(T::inner)
    }
}
impl<T: Inner> Inner for (T, f64) {
    type Operand = (T::Operand, f64);
    fn inner(self) -> Self::Operand {
        (self.0.inner(), self.1)
    }
}
impl<T: ?Sized> Inner for &T {
    type Operand = Self;
    fn inner(self) -> Self {
        self
    }
}
macro_rules! plain {
    ($($type:ty),*) => {$(impl Inner for $type {
        type Operand = Self;
        fn inner(self) -> Self {
            self
        }
    })*};
}
plain!(usize, f64, bool, Activation, Dropout, AdamStep, AdafactorStep, MaxSimSide);

/// Kernels by what they are to be called in the table, and the operations of their products if they have any.
macro_rules! kernels {
    ($(
        $kind:literal $([$flops:expr])? fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)?;
    )*) => {$(
        fn $name(&self, $($arg: $type),*) $(-> $out)? {
            let flops = 0.0 $(+ $flops)?;
            self.profile.timed(Operation::Named($kind), flops, || {
                let done = self.inner.$name($($arg.inner()),*);
                self.inner.wait();
                done
            })
        }
    )*};
}

/// Operations of `products` products of a row of `width` elements and another, for every pair that an attention of
/// all heads forms.
fn attended(shape: &AttentionShape, width: usize, products: usize) -> f64 {
    let pairs = |(queries, keys): (&Span, &Span)| -> usize {
        if !shape.causal && shape.window.is_none() {
            return queries.len() * keys.len();
        }
        let visible = |i: usize| {
            let position = i + shape.first_query;
            let from = shape.window.map_or(0, |w| position.saturating_sub(w));
            let ahead = if shape.causal { 0 } else { shape.window.unwrap_or(keys.len()) };
            let to = position + ahead + 1;
            to.min(keys.len()).saturating_sub(from)
        };
        (0..queries.len()).map(visible).sum()
    };
    let pairs: usize = shape.queries.iter().zip(&shape.keys).map(pairs).sum();
    2.0 * (products * shape.heads * width) as f64 * pairs as f64
}

/// Operations of a product of rows of `x` elements in all with a matrix for each head, of `width` columns.
fn by_heads(x: usize, width: usize) -> f64 {
    2.0 * x as f64 * width as f64
}

impl<D: Device> Device for Profiled<D> {
    type Storage = D::Storage;
    type Element = D::Element;
    const BLOCK: usize = D::BLOCK;

    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn arithmetic(&self) -> String {
        self.inner.arithmetic()
    }
    fn sums(&self) -> bool {
        self.inner.sums()
    }
    fn sum(&self, target: ViewMut<'_, Self>) {
        self.inner.sum(target.inner());
    }
    fn end_sums(&self) {
        self.inner.end_sums();
    }
    fn wait(&self) {
        self.inner.wait();
    }
    fn peak_bytes(&self) -> Option<u64> {
        self.inner.peak_bytes()
    }
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.inner.run(f)
    }
    fn host<'a>(&self, source: View<'a, Self>) -> Cow<'a, [f32]> {
        self.inner.host(source.inner())
    }
    fn elements<'a>(&self, source: View<'a, Self>) -> Cow<'a, [Self::Element]> {
        self.inner.elements(source.inner())
    }
    fn change<T>(&self, target: ViewMut<'_, Self>, work: impl FnOnce(&mut [Self::Element]) -> T) -> T {
        self.inner.change(target.inner(), work)
    }
    fn shared(&self, target: ViewMut<'_, Self>) -> Shared<Self::Element> {
        self.inner.shared(target.inner())
    }
    fn show(&self, source: View<'_, Self>, shared: &Shared<Self::Element>, start: usize) {
        self.inner.show(source.inner(), shared, start);
    }
    fn take_back(&self, shared: Shared<Self::Element>, target: ViewMut<'_, Self>) {
        self.inner.take_back(shared, target.inner());
    }
    fn bytes_in_use(&self) -> u64 {
        self.inner.bytes_in_use()
    }
    fn product(&self, a: Matrix<'_, Self>, b: Matrix<'_, Self>, c: ViewMut<'_, Self>, accumulate: bool) {
        let (rows, inner, columns) = (a.rows, a.columns, b.columns);
        let operation = match a.transposed {
            true => Operation::WeightGradient { rows, columns },
            false => {
                let (right_transposed, few_rows) = (b.transposed, rows <= FEW_ROWS);
                Operation::Product { inner, columns, right_transposed, few_rows }
            }
        };
        let flops = 2.0 * rows as f64 * inner as f64 * columns as f64;
        let kernel = || self.inner.product(a.inner(), b.inner(), c.inner(), accumulate);
        self.profile.timed(operation, flops, || {
            kernel();
            self.inner.wait();
        });
    }

    kernels! {
        "buffers" fn zeros(len: usize) -> Self::Storage;
        "buffers" fn scratch(len: usize) -> Self::Storage;
        "buffers" fn trim();
        "copies to and from the host" fn write(target: ViewMut<'_, Self>, values: &[f32]);
        "copies to and from the host" fn read(source: View<'_, Self>) -> Vec<f32>;
        "copies to and from the host" fn read_f64(source: View<'_, Self>) -> Vec<f64>;
        "sums, copies" fn fill(target: ViewMut<'_, Self>, value: f64);
        "sums, copies" fn copy(target: ViewMut<'_, Self>, source: View<'_, Self>);
        "sums, copies" fn add(target: ViewMut<'_, Self>, source: View<'_, Self>);
        "sums, copies" fn scale(target: ViewMut<'_, Self>, factor: f64);
        "sums, copies" fn dot_blocks(a: View<'_, Self>, b: View<'_, Self>) -> Vec<f64>;
        "sums, copies" fn dot(a: View<'_, Self>, b: View<'_, Self>) -> f64;
        "embeddings" fn gather(table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>);
        "embeddings" fn scatter_add(
            rows: View<'_, Self>, width: usize, ids: &[u32], table: ViewMut<'_, Self>,
        );
        "dropout, residuals" fn dropout(x: ViewMut<'_, Self>, width: usize, dropout: Dropout);
        "dropout, residuals" fn residual(
            x: ViewMut<'_, Self>, residual: View<'_, Self>, width: usize, dropout: Option<Dropout>,
        );
        "norms" fn rms_norm(x: View<'_, Self>, weight: View<'_, Self>, eps: f64, y: ViewMut<'_, Self>);
        "norms" fn rms_norm_backward(
            x: View<'_, Self>, weight: View<'_, Self>, eps: f64, dy: View<'_, Self>, dx: ViewMut<'_, Self>,
            dweight: ViewMut<'_, Self>,
        );
        "activations" fn activation(
            u: View<'_, Self>, width: usize, kind: Activation, gated: bool, dropout: Option<Dropout>,
            y: ViewMut<'_, Self>,
        );
        "activations" fn activation_backward(
            u: View<'_, Self>, width: usize, kind: Activation, gated: bool, dropout: Option<Dropout>,
            dy: View<'_, Self>, du: ViewMut<'_, Self>,
        );
        "attention" [attended(shape, shape.head_dim, 2)] fn attention(
            x: Heads<'_, Self>, bias: Option<View<'_, Self>>, shape: &AttentionShape, y: ViewMut<'_, Self>,
            log_sum: ViewMut<'_, Self>,
        );
        // The weights are formed again, which is the fifth product.
        "attention, backward" [attended(shape, shape.head_dim, 5)] fn attention_backward(
            x: Heads<'_, Self>, bias: Option<View<'_, Self>>, shape: &AttentionShape, y: View<'_, Self>,
            log_sum: View<'_, Self>, dy: View<'_, Self>, dx: HeadsMut<'_, Self>,
            dbias: Option<ViewMut<'_, Self>>,
        );
        "products of heads" [by_heads(x.len, width)] fn heads_expand(
            x: View<'_, Self>, weight: View<'_, Self>, heads: usize, width: usize, y: ViewMut<'_, Self>,
        );
        "products of heads" [by_heads(y.len, width)] fn heads_reduce(
            x: View<'_, Self>, weight: View<'_, Self>, heads: usize, width: usize, y: ViewMut<'_, Self>,
        );
        "products of heads" [by_heads(x.len, width)] fn heads_gradient(
            x: View<'_, Self>, c: View<'_, Self>, heads: usize, width: usize, dweight: ViewMut<'_, Self>,
        );
        "attention to states" [attended(shape, width, 2)] fn state_attention(
            u: View<'_, Self>, states: View<'_, Self>, width: usize, bias: Option<View<'_, Self>>,
            shape: &AttentionShape, c: ViewMut<'_, Self>, log_sum: ViewMut<'_, Self>,
        );
        "attention to states, backward" [attended(shape, width, 5)] fn state_attention_backward(
            u: View<'_, Self>, states: View<'_, Self>, width: usize, bias: Option<View<'_, Self>>,
            shape: &AttentionShape, c: View<'_, Self>, log_sum: View<'_, Self>, dc: View<'_, Self>,
            du: ViewMut<'_, Self>, dstates: ViewMut<'_, Self>, dbias: Option<ViewMut<'_, Self>>,
        );
        "loss" fn cross_entropy(
            logits: View<'_, Self>, labels: &[u32], losses: ViewMut<'_, Self>, log_sum: ViewMut<'_, Self>,
        );
        "loss" fn cross_entropy_backward(
            logits: ViewMut<'_, Self>, labels: &[u32], log_sum: View<'_, Self>, scale: f64,
        );
        "loss" fn smooth_losses(
            logits: View<'_, Self>, labels: &[u32], smoothing: f64, losses: ViewMut<'_, Self>,
        );
        "loss" fn smooth_gradient(gradient: ViewMut<'_, Self>, labels: &[u32], amount: f64);
        "choice of tokens" fn argmax(x: View<'_, Self>, width: usize) -> Vec<u32>;
        "choice of tokens" fn top_k(x: View<'_, Self>, width: usize, k: usize) -> Vec<(u32, f64)>;
        "optimizer" fn adam(
            parameters: ViewMut<'_, Self>, gradients: View<'_, Self>, first: ViewMut<'_, Self>,
            second: ViewMut<'_, Self>, step: AdamStep,
        );
        "optimizer" fn adafactor(
            parameter: ViewMut<'_, Self>, gradient: View<'_, Self>, columns: Option<usize>,
            statistics: ViewMut<'_, Self>, step: AdafactorStep,
        );
    }
}

/// Operations of the inner products of every row of a query with every row of a document, of all pairs.
fn compared(shape: &MaxSimShape, width: usize) -> f64 {
    let rows = |&(q, d): &(u32, u32)| shape.queries[q as usize].len() * shape.documents[d as usize].len();
    2.0 * width as f64 * shape.pairs.iter().map(rows).sum::<usize>() as f64
}

impl<D: Device> EncoderKernels for Profiled<D> {
    kernels! {
        "embeddings" fn gather_add(table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>);
        "biases" fn add_bias(x: ViewMut<'_, Self>, bias: View<'_, Self>);
        "biases" fn sum_rows(x: View<'_, Self>, total: ViewMut<'_, Self>);
        "norms" fn layer_norm(
            x: View<'_, Self>, width: usize, norm: View<'_, Self>, eps: f64, y: ViewMut<'_, Self>,
        );
        "norms" fn layer_norm_backward(
            x: View<'_, Self>, width: usize, norm: View<'_, Self>, eps: f64, dy: View<'_, Self>,
            dx: ViewMut<'_, Self>, dnorm: ViewMut<'_, Self>,
        );
        "dropout, residuals" fn bias_residual(
            x: ViewMut<'_, Self>, width: usize, bias: Option<View<'_, Self>>, residual: View<'_, Self>,
            norm: Option<(View<'_, Self>, f64)>, dropout: Option<Dropout>,
        );
        "dropout, residuals" fn bias_residual_backward(
            dy: View<'_, Self>, width: usize, dropout: Dropout, d: ViewMut<'_, Self>,
            dbias: Option<ViewMut<'_, Self>>,
        );
        "activations" fn bias_activation(
            u: View<'_, Self>, bias: View<'_, Self>, width: usize, kind: Activation, gated: bool,
            dropout: Option<Dropout>, y: ViewMut<'_, Self>,
        );
        "activations" fn bias_activation_backward(
            u: View<'_, Self>, bias: View<'_, Self>, width: usize, kind: Activation, gated: bool,
            dropout: Option<Dropout>, dy: View<'_, Self>, du: ViewMut<'_, Self>, dbias: ViewMut<'_, Self>,
        );
        "rotary positions" fn rotate(
            x: ViewMut<'_, Self>, stride: usize, columns: usize, rotary: &Rotary, positions: &[u32],
            back: bool,
        );
        "pooling" fn span_means(x: View<'_, Self>, width: usize, spans: &[Span], y: ViewMut<'_, Self>);
        "pooling" fn span_means_backward(
            dy: View<'_, Self>, width: usize, spans: &[Span], dx: ViewMut<'_, Self>,
        );
        "pooling" fn normalize(x: View<'_, Self>, width: usize, least: f64, y: ViewMut<'_, Self>);
        "pooling" fn normalize_backward(
            x: View<'_, Self>, width: usize, least: f64, dy: View<'_, Self>, dx: ViewMut<'_, Self>,
        );
        "late interaction" [compared(shape, width)] fn max_sim(
            queries: View<'_, Self>, documents: View<'_, Self>, width: usize, shape: &MaxSimShape,
            scores: ViewMut<'_, Self>,
        ) -> Vec<u32>;
        "late interaction" fn max_sim_backward(
            others: View<'_, Self>, width: usize, shape: &MaxSimShape, best: &[u32], slopes: View<'_, Self>,
            side: MaxSimSide, d: ViewMut<'_, Self>,
        );
    }
}
