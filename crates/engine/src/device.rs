//! The trait of a device: the kernels that the operations of `ops` are made of, and views into its memory.
//!
//! Two devices are here: [`crate::Cpu`] (f32, fused, vectorised) and [`crate::Reference`] (f64, plain loops, the
//! oracle of every test); one for GPUs is a crate of its own. A device only computes; what is saved and in which order gradients flow is the tape's.

mod encoder;
mod max_sim;
mod optimizer;
mod shared;

use std::borrow::Cow;

use crate::random::Dropout;

pub use encoder::{EncoderKernels, Rotary};
pub use max_sim::{EMPTY_DOCUMENT, MaxSimShape, MaxSimSide, NO_ROW};
pub use optimizer::{AdafactorStep, AdamStep};
pub use shared::Shared;

/// A read-only stretch of a device's memory.
pub struct View<'a, D: Device> {
    /// The buffer that holds the elements.
    pub storage: &'a D::Storage,
    /// First element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl<D: Device> Clone for View<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for View<'_, D> {}

/// A writable stretch of a device's memory.
pub struct ViewMut<'a, D: Device> {
    /// The buffer that holds the elements.
    pub storage: &'a mut D::Storage,
    /// First element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl<D: Device> ViewMut<'_, D> {
    /// The same stretch, borrowed anew.
    pub fn reborrow(&mut self) -> ViewMut<'_, D> {
        ViewMut { storage: self.storage, start: self.start, len: self.len }
    }
}

/// A row-major matrix inside a view: element (i, j) at `i * stride + j`; `transposed` swaps the roles.
pub struct Matrix<'a, D: Device> {
    /// The elements.
    pub view: View<'a, D>,
    /// Rows as multiplied (after transposition).
    pub rows: usize,
    /// Columns as multiplied (after transposition).
    pub columns: usize,
    /// Distance of two stored rows, in elements.
    pub stride: usize,
    /// Whether the stored matrix is used transposed.
    pub transposed: bool,
}

impl<'a, D: Device> Matrix<'a, D> {
    /// A contiguous `rows x columns` matrix.
    pub fn new(view: View<'a, D>, rows: usize, columns: usize) -> Self {
        debug_assert_eq!(view.len, rows * columns);
        Matrix { view, rows, columns, stride: columns, transposed: false }
    }
    /// The transposed matrix.
    pub fn t(self) -> Self {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

/// Queries, keys and values of an attention, as they lie in memory.
pub enum Heads<'a, D: Device> {
    /// One row holds query, key and value: `[tokens, 3 * heads * head_dim]`.
    Fused(View<'a, D>),
    /// Queries `[query tokens, heads * head_dim]`, keys beside values `[key tokens, 2 * heads * head_dim]`.
    Split {
        /// The queries.
        query: View<'a, D>,
        /// The keys and values.
        key_value: View<'a, D>,
    },
}

/// Where the gradients of [`Heads`] go; the same layouts.
pub enum HeadsMut<'a, D: Device> {
    /// One row for query, key and value.
    Fused(ViewMut<'a, D>),
    /// Queries apart from keys and values.
    Split {
        /// The queries' gradient.
        query: ViewMut<'a, D>,
        /// The gradient of keys and values.
        key_value: ViewMut<'a, D>,
    },
}

/// Rows `[start, end)` of a packed tensor: one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row.
    pub start: u32,
    /// One past the last row.
    pub end: u32,
}

impl Span {
    /// Number of rows.
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }
    /// Whether the span holds no row.
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }
    /// The spans between consecutive offsets.
    pub fn from_offsets(offsets: &[u32]) -> Vec<Span> {
        offsets.windows(2).map(|w| Span { start: w[0], end: w[1] }).collect()
    }
}

/// T5's learned relative bias: which row of the table `[buckets, heads]` a pair of positions reads.
#[derive(Clone, Debug)]
pub struct RelativeBuckets {
    /// Bucket of the distance `key position - query position`, index `distance + zero`, clamped at both ends.
    pub bucket: Vec<u16>,
    /// Index of distance zero in `bucket`.
    pub zero: usize,
    /// Number of buckets (rows of the table).
    pub buckets: usize,
    /// Position of every packed key row; `None`: its row within its sequence.
    pub key_positions: Option<Vec<u32>>,
}

impl RelativeBuckets {
    /// Row of the table for a query and a key at these positions.
    pub fn of(&self, query: usize, key: usize) -> usize {
        let index = (self.zero + key).saturating_sub(query);
        self.bucket[index.min(self.bucket.len() - 1)] as usize
    }
}

/// Everything about an attention that is not a float.
#[derive(Clone)]
pub struct AttentionShape {
    /// Number of heads.
    pub heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Query rows of each sequence.
    pub queries: Vec<Span>,
    /// Key rows that the sequence of the same index attends to.
    pub keys: Vec<Span>,
    /// Position of the first query row of every sequence (0 but in step-by-step decoding).
    pub first_query: usize,
    /// Whether a query attends only to keys at positions up to its own.
    pub causal: bool,
    /// Greatest distance of the positions of a query and a key that it attends to; `None`: any. Not together with a bias.
    pub window: Option<usize>,
    /// Factor on the products before the bias (1 in T5).
    pub scale: f64,
    /// Relative bias, if the attention has one.
    pub buckets: Option<std::sync::Arc<RelativeBuckets>>,
    /// Dropout of the attention weights.
    pub dropout: Option<Dropout>,
}

impl AttentionShape {
    /// The key rows of `0..keys` that query row `i` of the sequence attends to.
    pub(crate) fn visible(&self, i: usize, keys: usize) -> std::ops::Range<usize> {
        let position = i + self.first_query;
        let from = self.window.map_or(0, |w| position.saturating_sub(w));
        let to = if self.causal { position + 1 } else { self.window.map_or(keys, |w| position + w + 1) };
        from.min(keys)..to.min(keys)
    }
}

/// The nonlinearity of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// max(0, x)
    Relu,
    /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): BERT's original form, `gelu_new` in Hugging Face.
    GeluTanh,
    /// 0.5 x (1 + erf(x / sqrt 2))
    GeluErf,
    /// x / (1 + exp(-x))
    Silu,
    /// tanh x
    Tanh,
}

/// A device: memory and kernels. All matrices are row-major; `+=` is said where a kernel adds.
pub trait Device: EncoderKernels + Clone + Send + Sync + Sized + 'static {
    /// A buffer of this device.
    type Storage: Send + Sync + 'static;
    /// An element of a buffer.
    type Element: Copy + Send + Sync + Default + std::ops::Add<Output = Self::Element> + 'static;

    /// Elements of a block of [`Device::dot_blocks`].
    const BLOCK: usize;

    /// Short name, for logs and checkpoints: `cpu`, `reference`.
    fn name(&self) -> &'static str;
    /// What the bits of a result depend on beside the inputs: instruction set and the like.
    fn arithmetic(&self) -> String;
    /// Runs `f` inside this device's thread pool; kernels called within use its threads.
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R;
    /// A buffer of `len` zeros.
    fn zeros(&self, len: usize) -> Self::Storage;
    /// A buffer with arbitrary finite or non-finite content, to be overwritten whole.
    fn scratch(&self, len: usize) -> Self::Storage;
    /// Copies host values in.
    fn write(&self, target: ViewMut<'_, Self>, values: &[f32]);
    /// Copies values out, rounded to f32.
    fn read(&self, source: View<'_, Self>) -> Vec<f32>;
    /// Values in f32 for the host, without a copy where the device's memory is the host's.
    fn host<'a>(&self, source: View<'a, Self>) -> Cow<'a, [f32]> {
        self.read(source).into()
    }
    /// The elements, for those who move them between processes: without a copy where the device's memory is the host's.
    fn elements<'a>(&self, source: View<'a, Self>) -> Cow<'a, [Self::Element]>;
    /// Lets `work` change elements on the host.
    fn change<T>(&self, target: ViewMut<'_, Self>, work: impl FnOnce(&mut [Self::Element]) -> T) -> T;
    /// Memory of the host that stands for a stretch while other threads are at parts of it: read and write there what
    /// [`Device::show`] brought, and give it to [`Device::take_back`] in the end.
    fn shared(&self, target: ViewMut<'_, Self>) -> Shared<Self::Element>;
    /// Brings a stretch that kernels are done with to element `start` and on of its shared memory. No thread is at that part.
    fn show(&self, _source: View<'_, Self>, _shared: &Shared<Self::Element>, _start: usize) {}
    /// Makes what was done in shared memory the stretch's content.
    fn take_back(&self, _shared: Shared<Self::Element>, _target: ViewMut<'_, Self>) {}
    /// Whether devices of several ranks sum among themselves, in an order of their own ([`Device::sum`]).
    fn sums(&self) -> bool {
        false
    }
    /// Begins to sum a stretch over the ranks, in place, beside what comes next; all ranks sum the same stretches in one order.
    fn sum(&self, _target: ViewMut<'_, Self>) {}
    /// What comes next comes after all sums so far.
    fn end_sums(&self) {}
    /// Copies values out at full precision.
    fn read_f64(&self, source: View<'_, Self>) -> Vec<f64>;
    /// Waits until all kernels so far are done: who takes the time needs it, nobody else.
    fn wait(&self) {}
    /// Releases buffers kept for reuse that recent work did not need.
    fn trim(&self) {}
    /// Bytes that the device's buffers hold now, as they were asked for; 0 where it does not count them.
    fn bytes_in_use(&self) -> u64 {
        0
    }
    /// The most bytes that the buffers of a device with a memory of its own ever held; `None`: its memory is the host's.
    fn peak_bytes(&self) -> Option<u64> {
        None
    }

    /// `target[i] = value`
    fn fill(&self, target: ViewMut<'_, Self>, value: f64);
    /// `target = source`
    fn copy(&self, target: ViewMut<'_, Self>, source: View<'_, Self>);
    /// `target += source`
    fn add(&self, target: ViewMut<'_, Self>, source: View<'_, Self>);
    /// `target *= factor`
    fn scale(&self, target: ViewMut<'_, Self>, factor: f64);
    /// Sums of `a[i] * b[i]` over the blocks of [`Device::BLOCK`] elements, in their order; the last may be shorter.
    fn dot_blocks(&self, a: View<'_, Self>, b: View<'_, Self>) -> Vec<f64>;
    /// Sum of `a[i] * b[i]`: the sums of the fixed blocks, added in their order.
    fn dot(&self, a: View<'_, Self>, b: View<'_, Self>) -> f64 {
        self.dot_blocks(a, b).iter().sum()
    }

    /// `c = a b`, or `c += a b` when `accumulate`; `c` is contiguous, `a.rows x b.columns`.
    fn product(&self, a: Matrix<'_, Self>, b: Matrix<'_, Self>, c: ViewMut<'_, Self>, accumulate: bool);
    /// Rows `ids` of `table` (`[_, width]`) one after the other into `rows`.
    fn gather(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>);
    /// `table[ids[i]] += rows[i]`, in the order of i.
    fn scatter_add(&self, rows: View<'_, Self>, width: usize, ids: &[u32], table: ViewMut<'_, Self>);
    /// Inverted dropout in place; `width` elements a row, the row number keys the draw.
    fn dropout(&self, x: ViewMut<'_, Self>, width: usize, dropout: Dropout);
    /// `x = residual + dropout(x)`
    fn residual(
        &self,
        x: ViewMut<'_, Self>,
        residual: View<'_, Self>,
        width: usize,
        dropout: Option<Dropout>,
    );

    /// Root-mean-square norm (Zhang and Sennrich, 2019) without bias: `y = x * r * weight`,
    /// `r = 1 / sqrt(mean(x^2) + eps)` per row of `weight.len` elements.
    fn rms_norm(&self, x: View<'_, Self>, weight: View<'_, Self>, eps: f64, y: ViewMut<'_, Self>);
    /// Backward of [`Device::rms_norm`]: `dx += ...`, `dweight += ...`.
    fn rms_norm_backward(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        eps: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
        dweight: ViewMut<'_, Self>,
    );

    /// `y = dropout(act(u))`, or `y = dropout(act(u[:, ..width]) * u[:, width..])` when `gated`
    /// (then `u` has rows of `2 * width`).
    fn activation(
        &self,
        u: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        y: ViewMut<'_, Self>,
    );
    /// Backward of [`Device::activation`]: `du = ...`.
    fn activation_backward(
        &self,
        u: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        dy: View<'_, Self>,
        du: ViewMut<'_, Self>,
    );

    /// Softmax attention of every sequence's queries over its keys:
    /// `y = dropout(softmax(scale * q k + bias)) v`, `[query tokens, heads * head_dim]`.
    /// `log_sum`: log of the softmax's denominator per (query token, head), kept for the backward.
    fn attention(
        &self,
        x: Heads<'_, Self>,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        y: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    );
    /// Backward of [`Device::attention`]: `dx = ...` (every row that belongs to a span is overwritten), `dbias += ...`.
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
    );

    /// Products of single heads: `y_h = x_h W_h`, from `[rows, heads * dim]` to `[rows, heads * width]`, where `weight` holds
    /// `W_h`, `dim x width`, one under the other.
    fn heads_expand(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    );
    /// The way back, `y_h = x_h W_h^T`: from `[rows, heads * width]` to `[rows, heads * dim]`.
    fn heads_reduce(
        &self,
        x: View<'_, Self>,
        weight: View<'_, Self>,
        heads: usize,
        width: usize,
        y: ViewMut<'_, Self>,
    );
    /// `dW_h += x_h^T c_h`, `x` of `[rows, heads * dim]`, `c` of `[rows, heads * width]`.
    fn heads_gradient(
        &self,
        x: View<'_, Self>,
        c: View<'_, Self>,
        heads: usize,
        width: usize,
        dweight: ViewMut<'_, Self>,
    );
    /// Attention over hidden states: `c = dropout(softmax(scale u states^T + bias)) states` for every head of every query
    /// row, `u` and `c` of `[query tokens, heads * width]`, `states` of `[key tokens, width]`; `log_sum` as in
    /// [`Device::attention`]. `shape.head_dim` is not used.
    fn state_attention(
        &self,
        u: View<'_, Self>,
        states: View<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        shape: &AttentionShape,
        c: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    );
    /// Backward of [`Device::state_attention`]: `du = ...`, `dstates += ...`, `dbias += ...`.
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
    );

    /// Per row of `logits` (`[labels.len(), classes]`): the cross-entropy of its label into `losses`, log of the sum of exponentials into `log_sum`.
    fn cross_entropy(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        losses: ViewMut<'_, Self>,
        log_sum: ViewMut<'_, Self>,
    );
    /// `logits = scale * (softmax(logits) - onehot(labels))`, in place.
    fn cross_entropy_backward(
        &self,
        logits: ViewMut<'_, Self>,
        labels: &[u32],
        log_sum: View<'_, Self>,
        scale: f64,
    );
    /// `losses[i] += smoothing * (logits[i][labels[i]] - mean(logits[i]))`: from the cross-entropy with the label to that with a
    /// target of `1 - smoothing` on the label and `smoothing` spread over all classes.
    fn smooth_losses(
        &self,
        logits: View<'_, Self>,
        labels: &[u32],
        smoothing: f64,
        losses: ViewMut<'_, Self>,
    );
    /// The same of the gradient of the logits, in place: `amount / classes` off every class, `amount` on the label's.
    fn smooth_gradient(&self, gradient: ViewMut<'_, Self>, labels: &[u32], amount: f64);
    /// Index of the greatest element of each row of `width` elements; the first of equals.
    fn argmax(&self, x: View<'_, Self>, width: usize) -> Vec<u32>;
    /// Index and value of the `k` greatest elements of each row of `width` elements, greatest first, of equals the first
    /// one first, what is not a number last; the rows one after the other, `k` (or `width`, if that is less) entries each.
    fn top_k(&self, x: View<'_, Self>, width: usize, k: usize) -> Vec<(u32, f64)>;

    /// One optimizer step over a stretch of the arenas.
    fn adam(
        &self,
        parameters: ViewMut<'_, Self>,
        gradients: View<'_, Self>,
        first: ViewMut<'_, Self>,
        second: ViewMut<'_, Self>,
        step: AdamStep,
    );
    /// One step of Adafactor over one parameter. Of a matrix, `columns` is its width, and `statistics` holds one value a row
    /// and then one a column; of a vector (`columns` is `None`), one value an element.
    fn adafactor(
        &self,
        parameter: ViewMut<'_, Self>,
        gradient: View<'_, Self>,
        columns: Option<usize>,
        statistics: ViewMut<'_, Self>,
        step: AdafactorStep,
    );
}
