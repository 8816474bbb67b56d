//! Launches of attention over hidden states, a question at a time; the products around them are plain loops here and a GPU's
//! library there.

use tercio_engine::{AttentionShape, Span, View, ViewMut};

use super::attention::BiasMemory;
use super::device::{OnHost, Operand, number, size, slice};
use super::library::{Argument, DropoutArgument};
use super::memory::{Guarded, floats};
use tercio_engine::Device;

/// `StateShape` of `cuda/state_attention.cu`.
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

/// A row-major matrix.
struct Rows<'a> {
    data: &'a [f32],
    columns: usize,
}

/// `c = a b`, or with `b` transposed, or with `a`.
fn product(a: &Rows<'_>, a_transposed: bool, b: &Rows<'_>, b_transposed: bool) -> Vec<f32> {
    let at = |m: &Rows<'_>, t: bool, i: usize, j: usize| {
        m.data[if t { j * m.columns + i } else { i * m.columns + j }] as f64
    };
    let size = |m: &Rows<'_>, t: bool| {
        let rows = m.data.len() / m.columns.max(1);
        if t { (m.columns, rows) } else { (rows, m.columns) }
    };
    let ((rows, depth), (_, columns)) = (size(a, a_transposed), size(b, b_transposed));
    let element = |e: usize| {
        let (i, j) = (e / columns, e % columns);
        let sum: f64 = (0..depth).map(|k| at(a, a_transposed, i, k) * at(b, b_transposed, k, j)).sum();
        sum as f32
    };
    (0..rows * columns).map(element).collect()
}

/// As [`tercio_engine::Device::heads_expand`], or `heads_reduce` with `transposed`.
pub fn heads_product(x: &[f32], weight: &[f32], heads: usize, width: usize, transposed: bool, y: &mut [f32]) {
    let dim = weight.len() / width / heads;
    let (from, to) = if transposed { (width, dim) } else { (dim, width) };
    for (e, y) in y.iter_mut().enumerate() {
        let (row, h, j) = (e / (heads * to), e / to % heads, e % to);
        let w = |i: usize| if transposed { (j, i) } else { (i, j) };
        let term = |i: usize| {
            let (a, b) = w(i);
            x[(row * heads + h) * from + i] as f64 * weight[(h * dim + a) * width + b] as f64
        };
        *y = (0..from).map(term).sum::<f64>() as f32;
    }
}

/// As [`tercio_engine::Device::heads_gradient`].
pub fn heads_gradient(x: &[f32], c: &[f32], heads: usize, width: usize, dweight: &mut [f32]) {
    let dim = dweight.len() / width / heads;
    let rows = x.len() / (heads * dim);
    for (e, w) in dweight.iter_mut().enumerate() {
        let (h, i, j) = (e / width / dim, e / width % dim, e % width);
        let term = |r: usize| x[(r * heads + h) * dim + i] as f64 * c[(r * heads + h) * width + j] as f64;
        *w += (0..rows).map(term).sum::<f64>() as f32;
    }
}

/// One question: its rows among all (queries times heads), its keys, what its kernels are given.
struct Question {
    rows: std::ops::Range<usize>,
    keys: Span,
    shape: Argument,
}

fn questions(shape: &AttentionShape, bias: &Option<BiasMemory>) -> Vec<Question> {
    let [zero, distances, buckets] = BiasMemory::sizes(bias);
    let of = |(queries, &keys): (&Span, &Span)| {
        let rows = queries.start as usize * shape.heads..queries.end as usize * shape.heads;
        let argument = StateShape {
            dropout: shape.dropout.into(),
            first: rows.start as u64,
            heads: shape.heads as u32,
            keys: keys.len() as u32,
            first_query: shape.first_query as u32,
            zero,
            distances,
            buckets,
            scale: shape.scale as f32,
            unused: 0,
        };
        Question { rows, keys, shape: Argument::value(argument) }
    };
    shape.queries.iter().zip(&shape.keys).map(of).collect()
}

fn part<'a>(x: &'a [f32], rows: &std::ops::Range<usize>, columns: usize) -> Rows<'a> {
    Rows { data: &x[rows.start * columns..rows.end * columns], columns }
}
fn key_rows<'a>(states: &'a [f32], keys: Span, width: usize) -> Rows<'a> {
    part(states, &(keys.start as usize..keys.end as usize), width)
}
fn real(memory: &Guarded<f32>) -> Argument {
    Argument::RealMut(memory.pointer(), memory.len())
}

pub fn forward(
    device: &OnHost,
    u: View<'_, OnHost>,
    states: View<'_, OnHost>,
    width: usize,
    bias: Option<View<'_, OnHost>>,
    shape: &AttentionShape,
    c: ViewMut<'_, OnHost>,
    mut log_sum: ViewMut<'_, OnHost>,
) {
    let bias = BiasMemory::new(shape, bias);
    let c = device.elements_mut(c);
    for question in questions(shape, &bias) {
        let own = key_rows(slice(states), question.keys, width);
        let scores = floats(product(&part(slice(u), &question.rows, width), false, &own, true));
        let weights = floats(vec![f32::NAN; scores.len()]);
        let arguments = [
            (&scores).into(),
            BiasMemory::argument(&bias, question.keys.start as usize),
            question.shape,
            log_sum.reborrow().pointer(),
            real(&weights),
        ];
        device.rows("state_weights", question.rows.len(), &arguments);
        let weights = Rows { data: weights.values(), columns: question.keys.len() };
        let context = product(&weights, false, &own, false);
        c[question.rows.start * width..question.rows.end * width].copy_from_slice(&context);
    }
}

pub fn backward(
    device: &OnHost,
    u: View<'_, OnHost>,
    states: View<'_, OnHost>,
    width: usize,
    bias: Option<View<'_, OnHost>>,
    shape: &AttentionShape,
    c: View<'_, OnHost>,
    log_sum: View<'_, OnHost>,
    dc: View<'_, OnHost>,
    du: ViewMut<'_, OnHost>,
    dstates: ViewMut<'_, OnHost>,
    mut dbias: Option<ViewMut<'_, OnHost>>,
) {
    let bias = BiasMemory::new(shape, bias);
    let buckets = BiasMemory::buckets(&bias);
    let rows = c.len / width;
    let delta = floats(vec![f32::NAN; rows]);
    device.warps("attention_delta", rows, &[c.real(), dc.real(), size(rows), number(width), (&delta).into()]);
    let (du, dstates) = (device.elements_mut(du), device.elements_mut(dstates));
    for question in questions(shape, &bias) {
        let own = key_rows(slice(states), question.keys, width);
        let (query, d) = (part(slice(u), &question.rows, width), part(slice(dc), &question.rows, width));
        let (scores, g) =
            (floats(product(&query, false, &own, true)), floats(product(&d, false, &own, true)));
        let (weights, slopes) = (floats(vec![f32::NAN; scores.len()]), floats(vec![f32::NAN; scores.len()]));
        let sums = floats(vec![f32::NAN; question.rows.len() * buckets]);
        let arguments = [
            (&scores).into(),
            (&g).into(),
            BiasMemory::argument(&bias, question.keys.start as usize),
            question.shape,
            log_sum.pointer(),
            (&delta).into(),
            real(&weights),
            real(&slopes),
            (&sums).into(),
        ];
        device.launch("state_slopes", [question.rows.len(), 1, 1], 256, 257 * buckets * 4, &arguments);
        if let Some(dbias) = &mut dbias {
            device.fold(&sums, dbias.reborrow());
        }
        let columns = question.keys.len();
        let (weights, slopes) =
            (Rows { data: weights.values(), columns }, Rows { data: slopes.values(), columns });
        let target = &mut du[question.rows.start * width..question.rows.end * width];
        target.copy_from_slice(&product(&slopes, false, &own, false));
        let target = &mut dstates[question.keys.start as usize * width..question.keys.end as usize * width];
        let (by_value, by_key) = (product(&weights, true, &d, false), product(&slopes, true, &query, false));
        // With no query, the transposed products have no elements: nothing is added.
        target.iter_mut().zip(by_value.iter().zip(&by_key)).for_each(|(t, (a, b))| *t += a + b);
    }
}
