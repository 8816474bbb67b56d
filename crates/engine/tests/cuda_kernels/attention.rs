//! Launches of packed attention: tiles, shapes, shared memory, and the order of the backward's kernels.

use tercio_engine::device::{Heads, HeadsMut};
use tercio_engine::{AttentionShape, Span, View, ViewMut};

use super::device::{OnHost, Operand, number, size};
use super::encoder::list;
use super::library::{Argument, DropoutArgument};
use super::memory::{Guarded, floats, words};

/// Rows of a tile, as `cuda/attention.h` has it.
const TILE: usize = 32;
/// Threads of a block.
const THREADS: usize = 128;

/// `Shape` of `cuda/attention.h`.
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

/// `Bias` of `cuda/attention.h`, and of `cuda/state_attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BiasArgument {
    pub table: *const f32,
    pub bucket: *const u16,
    pub positions: *const u32,
}

/// The relative bias in the device's memory.
pub struct BiasMemory {
    pub table: *const f32,
    pub bucket: Guarded<u16>,
    pub positions: Option<Guarded<u32>>,
    pub zero: u32,
    pub buckets: usize,
}

impl BiasMemory {
    pub fn new(shape: &AttentionShape, bias: Option<View<'_, OnHost>>) -> Option<BiasMemory> {
        let bias = bias?;
        let buckets = shape.buckets.as_ref().expect("a bias table is read through `shape.buckets`");
        assert_eq!(bias.len, buckets.buckets * shape.heads);
        Some(BiasMemory {
            table: bias.storage.pointer().wrapping_add(bias.start),
            bucket: Guarded::new(buckets.bucket.clone(), 0xdead),
            positions: buckets.key_positions.as_ref().map(|p| words(p.clone())),
            zero: buckets.zero as u32,
            buckets: buckets.buckets,
        })
    }
    /// With the positions from a key row on.
    pub fn argument(memory: &Option<BiasMemory>, first_key: usize) -> Argument {
        let null =
            BiasArgument { table: std::ptr::null(), bucket: std::ptr::null(), positions: std::ptr::null() };
        Argument::value(memory.as_ref().map_or(null, |m| BiasArgument {
            table: m.table,
            bucket: m.bucket.pointer(),
            positions: m.positions.as_ref().map_or(std::ptr::null(), |p| p.pointer().wrapping_add(first_key)),
        }))
    }
    pub fn buckets(memory: &Option<BiasMemory>) -> usize {
        memory.as_ref().map_or(0, |m| m.buckets)
    }
    /// Index of distance 0, number of distances, buckets.
    pub fn sizes(memory: &Option<BiasMemory>) -> [u32; 3] {
        memory.as_ref().map_or([0; 3], |m| [m.zero, m.bucket.len() as u32, m.buckets as u32])
    }
}

/// The kernel's name for a width of heads.
fn named(kernel: &str, dim: usize) -> String {
    let most = [32, 64, 128].into_iter().find(|&most| dim <= most);
    format!("{kernel}_{}", most.expect("heads are at most 128 wide"))
}

/// A sequence and a first row within it, for every tile of the spans.
fn tiles(spans: &[Span]) -> Guarded<u32> {
    let of = |(s, span): (usize, &Span)| {
        (0..span.len()).step_by(TILE).flat_map(move |first| [s as u32, first as u32]).collect::<Vec<_>>()
    };
    words(spans.iter().enumerate().flat_map(of).collect())
}

/// What all kernels of an attention are given.
struct Plan {
    shape: ShapeArgument,
    bias: Option<BiasMemory>,
    queries: Guarded<u32>,
    keys: Guarded<u32>,
}

impl Plan {
    fn new(shape: &AttentionShape, bias: Option<View<'_, OnHost>>, strides: (usize, usize)) -> Plan {
        assert!(
            shape.window.is_none() || shape.buckets.is_none(),
            "a window together with a bias is not known"
        );
        let bias = BiasMemory::new(shape, bias);
        let [zero, distances, buckets] = BiasMemory::sizes(&bias);
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
        Plan { shape: shape_argument, bias, queries: list(&shape.queries), keys: list(&shape.keys) }
    }
    /// Queries, keys, spans, tiles, bias, shape: how every kernel's list begins.
    fn arguments(&self, x: Heads<'_, OnHost>, tiles: &Guarded<u32>) -> Vec<Argument> {
        let inner = (self.shape.heads * self.shape.dim) as usize;
        let (q, kv) = match x {
            Heads::Fused(x) => (x, from(x, inner)),
            Heads::Split { query, key_value } => (query, key_value),
        };
        vec![
            q.real(),
            kv.real(),
            (&self.queries).into(),
            (&self.keys).into(),
            tiles.into(),
            BiasMemory::argument(&self.bias, 0),
            Argument::value(self.shape),
        ]
    }
}

/// A view without its first elements; an empty one stays so.
fn from<'a>(x: View<'a, OnHost>, first: usize) -> View<'a, OnHost> {
    let first = first.min(x.len);
    View { start: x.start + first, len: x.len - first, ..x }
}

fn strides(x: &Heads<'_, OnHost>, shape: &AttentionShape) -> (usize, usize) {
    let inner = shape.heads * shape.head_dim;
    match x {
        Heads::Fused(_) => (3 * inner, 3 * inner),
        Heads::Split { .. } => (inner, 2 * inner),
    }
}

fn again<'a>(x: &Heads<'a, OnHost>) -> Heads<'a, OnHost> {
    match x {
        Heads::Fused(x) => Heads::Fused(*x),
        Heads::Split { query, key_value } => Heads::Split { query: *query, key_value: *key_value },
    }
}

pub fn forward(
    device: &OnHost,
    x: Heads<'_, OnHost>,
    bias: Option<View<'_, OnHost>>,
    shape: &AttentionShape,
    y: ViewMut<'_, OnHost>,
    log_sum: ViewMut<'_, OnHost>,
) {
    let plan = Plan::new(shape, bias, strides(&x, shape));
    let tiles = tiles(&shape.queries);
    let mut arguments = plan.arguments(x, &tiles);
    arguments.extend([y.real(), log_sum.pointer()]);
    let dim = shape.head_dim;
    let shared = (2 * TILE * (dim + 1) + TILE * (TILE + 1)) * 4;
    let grid = [tiles.len() / 2, shape.heads, 1];
    device.launch(&named("attention", dim), grid, THREADS as u32, shared, &arguments);
}

pub fn backward(
    device: &OnHost,
    x: Heads<'_, OnHost>,
    bias: Option<View<'_, OnHost>>,
    shape: &AttentionShape,
    y: View<'_, OnHost>,
    log_sum: View<'_, OnHost>,
    dy: View<'_, OnHost>,
    dx: HeadsMut<'_, OnHost>,
    dbias: Option<ViewMut<'_, OnHost>>,
) {
    let plan = Plan::new(shape, bias, strides(&x, shape));
    let (heads, dim) = (shape.heads, shape.head_dim);
    let rows = y.len / dim;
    let delta = floats(vec![f32::NAN; rows]);
    device.warps("attention_delta", rows, &[y.real(), dy.real(), size(rows), number(dim), (&delta).into()]);

    let (mut dx_query, dx_key, key_first) = match dx {
        HeadsMut::Fused(dx) => (dx, None, heads * dim),
        HeadsMut::Split { query, key_value } => (query, Some(key_value), 0),
    };
    let (queries, buckets) = (tiles(&shape.queries), BiasMemory::buckets(&plan.bias));
    let grid = [queries.len() / 2, heads, 1];
    let part = floats(vec![f32::NAN; grid[0] * buckets * heads]);
    let known = || [dy.real(), log_sum.pointer(), (&delta).into()];
    let mut arguments = plan.arguments(again(&x), &queries);
    arguments.extend(known());
    arguments.extend([dx_query.reborrow().real(), (&part).into()]);
    let area = TILE * (dim + 1);
    let shared = (4 * area + TILE * (TILE + 1) + (THREADS + 1) * buckets) * 4;
    device.launch(&named("attention_queries", dim), grid, THREADS as u32, shared, &arguments);
    if let Some(dbias) = dbias {
        device.fold(&part, dbias);
    }

    let keys = tiles(&shape.keys);
    let mut arguments = plan.arguments(x, &keys);
    arguments.extend(known());
    let target = dx_key.unwrap_or(dx_query);
    let first = key_first.min(target.len);
    let target = ViewMut { start: target.start + first, len: target.len - first, ..target };
    arguments.push(target.real());
    let shared = (4 * area + 2 * TILE * (TILE + 1)) * 4;
    let grid = [keys.len() / 2, heads, 1];
    device.launch(&named("attention_keys", dim), grid, THREADS as u32, shared, &arguments);
}
