//! Launches of attention over hidden states: for each question its products with its states, and the kernel between them. And the
//! products of single heads.

use tercio_engine::{AttentionShape, Span, View, ViewMut};

use crate::attention::Bias;
use crate::device::Cuda;
use crate::driver::{Address, Argument, Driver, DropoutArgument, Factor, Product};
use crate::launch::{Operand, number, rows_of, size, turned};

/// `StateShape` of `kernels/state_attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct StateShape {
    dropout: DropoutArgument,
    first: u64,
    heads: u32,
    keys: u32,
    first_query: u32,
    zero: u32,
    distances: u32,
    buckets: u32,
    scale: f32,
    unused: u32,
}

/// As [`tercio_engine::Device::heads_expand`], or `heads_reduce` with `back`: a product for each head.
pub(crate) fn heads_product<R: Driver>(
    device: &Cuda<R>,
    x: View<'_, Cuda<R>>,
    weight: View<'_, Cuda<R>>,
    heads: usize,
    width: usize,
    back: bool,
    y: ViewMut<'_, Cuda<R>>,
) {
    let dim = weight.len / width / heads;
    let (from, to) = if back { (width, dim) } else { (dim, width) };
    let part = |at: Address, columns: usize| Factor {
        at,
        stride: heads * columns,
        step: columns,
        transposed: false,
    };
    let b = Factor { at: weight.at(), stride: width, step: dim * width, transposed: back };
    device.multiply(Product {
        rows: y.len / (heads * to),
        columns: to,
        depth: from,
        batch: heads,
        a: part(x.at(), from),
        b,
        bf16: false,
        c: part(y.at(), to),
        accumulate: false,
    });
}

/// As [`tercio_engine::Device::heads_gradient`].
pub(crate) fn heads_gradient<R: Driver>(
    device: &Cuda<R>,
    x: View<'_, Cuda<R>>,
    c: View<'_, Cuda<R>>,
    heads: usize,
    width: usize,
    dweight: ViewMut<'_, Cuda<R>>,
) {
    let dim = dweight.len / width / heads;
    device.multiply(Product {
        rows: dim,
        columns: width,
        depth: x.len / (heads * dim),
        batch: heads,
        a: Factor { at: x.at(), stride: heads * dim, step: dim, transposed: true },
        b: Factor { at: c.at(), stride: heads * width, step: width, transposed: false },
        bf16: false,
        c: Factor { at: dweight.at(), stride: width, step: dim * width, transposed: false },
        accumulate: true,
    });
}

/// One question: its rows among all (queries times heads), its keys, what its kernels are given.
struct Question {
    first: usize,
    rows: usize,
    keys: Span,
    shape: Argument,
}

impl Question {
    /// The question's first row of an array with rows of `width` elements.
    fn row(&self, at: Address, width: usize) -> Address {
        at + 4 * (self.first * width) as u64
    }
    /// The same of its keys.
    fn key(&self, at: Address, width: usize) -> Address {
        at + 4 * (self.keys.start as usize * width) as u64
    }
}

fn questions<R: Driver>(shape: &AttentionShape, bias: &Option<Bias<R>>) -> Vec<Question> {
    let [zero, distances, buckets] = Bias::sizes(bias);
    let of = |(queries, &keys): (&Span, &Span)| {
        let first = queries.start as usize * shape.heads;
        let argument = StateShape {
            dropout: shape.dropout.into(),
            first: first as u64,
            heads: shape.heads as u32,
            keys: keys.len() as u32,
            first_query: shape.first_query as u32,
            zero,
            distances,
            buckets,
            scale: shape.scale as f32,
            unused: 0,
        };
        Question { first, rows: queries.len() * shape.heads, keys, shape: Argument::value(argument) }
    };
    shape.queries.iter().zip(&shape.keys).map(of).collect()
}

/// `c = a b`, or `c += a b`, of contiguous matrices; a factor that is `turned` is used transposed.
fn multiply<R: Driver>(
    device: &Cuda<R>,
    sizes: [usize; 3],
    a: Factor,
    b: Factor,
    c: Address,
    accumulate: bool,
) {
    let [rows, depth, columns] = sizes;
    device.multiply(Product {
        rows,
        columns,
        depth,
        batch: 1,
        a,
        b,
        bf16: false,
        c: rows_of(c, columns),
        accumulate,
    });
}

pub(crate) fn forward<R: Driver>(
    device: &Cuda<R>,
    u: View<'_, Cuda<R>>,
    states: View<'_, Cuda<R>>,
    width: usize,
    bias: Option<View<'_, Cuda<R>>>,
    shape: &AttentionShape,
    c: ViewMut<'_, Cuda<R>>,
    log_sum: ViewMut<'_, Cuda<R>>,
) {
    let bias = Bias::new(device, shape, bias);
    for question in questions(shape, &bias) {
        let (rows, keys) = (question.rows, question.keys.len());
        let own = rows_of(question.key(states.at(), width), width);
        let (scores, weights) = (device.scratch_of(rows * keys), device.scratch_of(rows * keys));
        let query = rows_of(question.row(u.at(), width), width);
        multiply(device, [rows, width, keys], query, turned(own), scores.at(), false);
        let bias = Bias::argument(&bias, question.keys.start as usize);
        let arguments = [scores.pointer(), bias, question.shape, log_sum.pointer(), weights.real()];
        device.rows("state_weights", rows, &arguments);
        let target = question.row(c.at(), width);
        multiply(device, [rows, keys, width], rows_of(weights.at(), keys), own, target, false);
    }
}

pub(crate) fn backward<R: Driver>(
    device: &Cuda<R>,
    u: View<'_, Cuda<R>>,
    states: View<'_, Cuda<R>>,
    width: usize,
    bias: Option<View<'_, Cuda<R>>>,
    shape: &AttentionShape,
    c: View<'_, Cuda<R>>,
    log_sum: View<'_, Cuda<R>>,
    dc: View<'_, Cuda<R>>,
    du: ViewMut<'_, Cuda<R>>,
    dstates: ViewMut<'_, Cuda<R>>,
    dbias: Option<ViewMut<'_, Cuda<R>>>,
) {
    let bias = Bias::new(device, shape, bias);
    let buckets = Bias::buckets(&bias);
    let all = c.len / width;
    let delta = device.scratch_of(all);
    device.warps("attention_delta", all, &[c.real(), dc.real(), size(all), number(width), delta.pointer()]);
    for question in questions(shape, &bias) {
        let (rows, keys) = (question.rows, question.keys.len());
        let own = rows_of(question.key(states.at(), width), width);
        let query = rows_of(question.row(u.at(), width), width);
        let d = rows_of(question.row(dc.at(), width), width);
        let room = || device.scratch_of(rows * keys);
        let (scores, g, weights, slopes) = (room(), room(), room(), room());
        multiply(device, [rows, width, keys], query, turned(own), scores.at(), false);
        multiply(device, [rows, width, keys], d, turned(own), g.at(), false);
        let sums = device.scratch_of(rows * buckets);
        let arguments = [
            scores.pointer(),
            g.pointer(),
            Bias::argument(&bias, question.keys.start as usize),
            question.shape,
            log_sum.pointer(),
            delta.pointer(),
            weights.real(),
            slopes.real(),
            sums.pointer(),
        ];
        device.launch("state_slopes", [rows, 1, 1], 256, 257 * buckets * 4, &arguments);
        if let Some(dbias) = &dbias {
            device.fold(&sums, dbias);
        }
        let (weights, slopes) = (rows_of(weights.at(), keys), rows_of(slopes.at(), keys));
        multiply(device, [rows, keys, width], slopes, own, question.row(du.at(), width), false);
        let target = question.key(dstates.at(), width);
        multiply(device, [keys, rows, width], turned(weights), d, target, true);
        multiply(device, [keys, rows, width], turned(slopes), query, target, true);
    }
}
