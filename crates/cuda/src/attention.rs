//! Launches of packed attention: tiles, shapes, shared memory, and the order of the backward's kernels.

use tercio_engine::device::{Heads, HeadsMut};
use tercio_engine::{AttentionShape, Span, View, ViewMut};

use crate::device::Cuda;
use crate::driver::{Address, Argument, Driver, DropoutArgument};
use crate::launch::{Operand, number, size};
use crate::memory::Buffer;

/// Rows of a tile, as `kernels/attention.h` has it.
const TILE: usize = 32;
/// Threads of a block.
const THREADS: usize = 128;
/// Widths of heads that the kernels are built for; a narrower head takes the next.
const WIDTHS: [(usize, [&str; 3]); 3] = [
    (32, ["attention_32", "attention_queries_32", "attention_keys_32"]),
    (64, ["attention_64", "attention_queries_64", "attention_keys_64"]),
    (128, ["attention_128", "attention_queries_128", "attention_keys_128"]),
];

/// `Shape` of `kernels/attention.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ShapeArgument {
    dropout: DropoutArgument,
    heads: u32,
    dim: u32,
    query_stride: u32,
    key_stride: u32,
    first_query: u32,
    window: u32,
    causal: u32,
    zero: u32,
    distances: u32,
    buckets: u32,
    scale: f32,
}

/// `Bias` of `kernels/attention.h`, and of `kernels/state_attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BiasArgument {
    table: Address,
    bucket: Address,
    positions: Address,
}

/// The relative bias in the device's memory.
pub(crate) struct Bias<R: Driver> {
    table: Address,
    bucket: Buffer<R>,
    positions: Option<Buffer<R>>,
    sizes: [u32; 3],
}

impl<R: Driver> Bias<R> {
    pub(crate) fn new(
        device: &Cuda<R>,
        shape: &AttentionShape,
        bias: Option<View<'_, Cuda<R>>>,
    ) -> Option<Bias<R>> {
        let bias = bias?;
        let buckets = shape.buckets.as_ref().expect("a bias table is read through `shape.buckets`");
        assert_eq!(bias.len, buckets.buckets * shape.heads, "a bias table has a row for each bucket");
        Some(Bias {
            table: bias.at(),
            bucket: device.list(&buckets.bucket),
            positions: buckets.key_positions.as_ref().map(|p| device.list(p)),
            sizes: [buckets.zero as u32, buckets.bucket.len() as u32, buckets.buckets as u32],
        })
    }
    /// With the positions from a key row on.
    pub(crate) fn argument(bias: &Option<Bias<R>>, first_key: usize) -> Argument {
        let nothing = BiasArgument { table: 0, bucket: 0, positions: 0 };
        Argument::value(bias.as_ref().map_or(nothing, |b| BiasArgument {
            table: b.table,
            bucket: b.bucket.at(),
            positions: b.positions.as_ref().map_or(0, |p| p.at() + 4 * first_key as u64),
        }))
    }
    pub(crate) fn buckets(bias: &Option<Bias<R>>) -> usize {
        Self::sizes(bias)[2] as usize
    }
    /// Index of distance 0, number of distances, buckets.
    pub(crate) fn sizes(bias: &Option<Bias<R>>) -> [u32; 3] {
        bias.as_ref().map_or([0; 3], |b| b.sizes)
    }
}

/// The kernels for a width of heads: forward, backward to the queries, backward to the keys.
fn kernels(dim: usize) -> [&'static str; 3] {
    let (_, names) = WIDTHS.into_iter().find(|(most, _)| dim <= *most).expect("heads are at most 128 wide");
    names
}

/// A sequence and a first row within it, for every tile of the spans.
struct Tiles<R: Driver> {
    list: Buffer<R>,
    count: usize,
}

impl<R: Driver> Tiles<R> {
    fn new(device: &Cuda<R>, spans: &[Span]) -> Self {
        let of = |(s, span): (usize, &Span)| {
            (0..span.len()).step_by(TILE).map(move |first| [s as u32, first as u32]).collect::<Vec<_>>()
        };
        let tiles: Vec<[u32; 2]> = spans.iter().enumerate().flat_map(of).collect();
        Tiles { list: device.list(tiles.as_flattened()), count: tiles.len() }
    }
}

/// What all kernels of an attention are given.
struct Plan<R: Driver> {
    shape: ShapeArgument,
    bias: Option<Bias<R>>,
    queries: Buffer<R>,
    keys: Buffer<R>,
    query: Argument,
    key_value: Argument,
}

impl<R: Driver> Plan<R> {
    fn new(
        device: &Cuda<R>,
        x: &Heads<'_, Cuda<R>>,
        shape: &AttentionShape,
        bias: Option<View<'_, Cuda<R>>>,
    ) -> Self {
        let windowed = shape.window.is_some() && shape.buckets.is_some();
        assert!(!windowed, "a window together with a bias is not known");
        let bias = Bias::new(device, shape, bias);
        let [zero, distances, buckets] = Bias::sizes(&bias);
        let inner = shape.heads * shape.head_dim;
        let (query, key_value, strides) = match x {
            Heads::Fused(x) => (x.real(), behind(*x, inner).real(), (3 * inner, 3 * inner)),
            Heads::Split { query, key_value } => (query.real(), key_value.real(), (inner, 2 * inner)),
        };
        let shape_argument = ShapeArgument {
            dropout: shape.dropout.into(),
            heads: shape.heads as u32,
            dim: shape.head_dim as u32,
            query_stride: strides.0 as u32,
            key_stride: strides.1 as u32,
            first_query: shape.first_query as u32,
            window: shape.window.map_or(u32::MAX, |w| w as u32),
            causal: shape.causal as u32,
            zero,
            distances,
            buckets,
            scale: shape.scale as f32,
        };
        let (queries, keys) = (device.spans(&shape.queries), device.spans(&shape.keys));
        Plan { shape: shape_argument, bias, queries, keys, query, key_value }
    }
    /// How every kernel's list begins, and then `more`.
    fn arguments(&self, tiles: &Tiles<R>, more: &[Argument]) -> Vec<Argument> {
        let known = [
            self.query,
            self.key_value,
            self.queries.pointer(),
            self.keys.pointer(),
            tiles.list.pointer(),
            Bias::argument(&self.bias, 0),
            Argument::value(self.shape),
        ];
        known.into_iter().chain(more.iter().copied()).collect()
    }
}

/// A view without its first elements; an empty one stays so.
fn behind<'a, R: Driver>(x: View<'a, Cuda<R>>, first: usize) -> View<'a, Cuda<R>> {
    let first = first.min(x.len);
    View { start: x.start + first, len: x.len - first, ..x }
}

pub(crate) fn forward<R: Driver>(
    device: &Cuda<R>,
    x: Heads<'_, Cuda<R>>,
    bias: Option<View<'_, Cuda<R>>>,
    shape: &AttentionShape,
    y: ViewMut<'_, Cuda<R>>,
    log_sum: ViewMut<'_, Cuda<R>>,
) {
    let plan = Plan::new(device, &x, shape, bias);
    let tiles = Tiles::new(device, &shape.queries);
    let arguments = plan.arguments(&tiles, &[y.real(), log_sum.pointer()]);
    let dim = shape.head_dim;
    let shared = (2 * TILE * (dim + 1) + TILE * (TILE + 1)) * 4;
    let [kernel, _, _] = kernels(dim);
    device.launch(kernel, [tiles.count, shape.heads, 1], THREADS as u32, shared, &arguments);
}

pub(crate) fn backward<R: Driver>(
    device: &Cuda<R>,
    x: Heads<'_, Cuda<R>>,
    bias: Option<View<'_, Cuda<R>>>,
    shape: &AttentionShape,
    y: View<'_, Cuda<R>>,
    log_sum: View<'_, Cuda<R>>,
    dy: View<'_, Cuda<R>>,
    dx: HeadsMut<'_, Cuda<R>>,
    dbias: Option<ViewMut<'_, Cuda<R>>>,
) {
    let plan = Plan::new(device, &x, shape, bias);
    let (heads, dim) = (shape.heads, shape.head_dim);
    let [_, of_queries, of_keys] = kernels(dim);
    let rows = y.len / dim;
    let delta = device.scratch_of(rows);
    let arguments = [y.real(), dy.real(), size(rows), number(dim), delta.pointer()];
    device.warps("attention_delta", rows, &arguments);

    let known = [dy.real(), log_sum.pointer(), delta.pointer()];
    let (dx_query, dx_key) = match dx {
        HeadsMut::Fused(dx) => {
            let first = (heads * dim).min(dx.len);
            let (query, key) = (dx.real(), ViewMut { start: dx.start + first, len: dx.len - first, ..dx });
            (query, key.real())
        }
        HeadsMut::Split { query, key_value } => (query.real(), key_value.real()),
    };
    let (queries, buckets) = (Tiles::new(device, &shape.queries), Bias::buckets(&plan.bias));
    let part = device.scratch_of(queries.count * buckets * heads);
    let [dy, sums, deltas] = known;
    let arguments = plan.arguments(&queries, &[dy, sums, deltas, dx_query, part.pointer()]);
    let area = TILE * (dim + 1);
    let shared = (4 * area + TILE * (TILE + 1) + (THREADS + 1) * buckets) * 4;
    device.launch(of_queries, [queries.count, heads, 1], THREADS as u32, shared, &arguments);
    if let Some(dbias) = dbias {
        device.fold(&part, &dbias);
    }

    let keys = Tiles::new(device, &shape.keys);
    let arguments = plan.arguments(&keys, &[dy, sums, deltas, dx_key]);
    let shared = (4 * area + 2 * TILE * (TILE + 1)) * 4;
    device.launch(of_keys, [keys.count, heads, 1], THREADS as u32, shared, &arguments);
}
