//! Launches of MaxSim, and of XTR's scores.

use tercio_engine::device::EMPTY_DOCUMENT;
use tercio_engine::{MaxSimShape, MaxSimSide, View, ViewMut};

use crate::device::Cuda;
use crate::driver::{Argument, Driver, Product};
use crate::launch::{Operand, float, number, rows_of, turned};
use crate::memory::Buffer;

/// Spans, pairs, and where the best rows of each pair begin.
struct Plan<R: Driver> {
    queries: Buffer<R>,
    documents: Buffer<R>,
    pairs: Buffer<R>,
    places: Buffer<R>,
    rows: usize,
}

impl<R: Driver> Plan<R> {
    fn new(device: &Cuda<R>, shape: &MaxSimShape) -> Self {
        let (mut places, mut rows) = (Vec::new(), 0);
        for &(q, _) in &shape.pairs {
            places.push(rows as u64);
            rows += shape.queries[q as usize].len();
        }
        let pairs: Vec<u32> = shape.pairs.iter().flat_map(|&(q, d)| [q, d]).collect();
        Plan {
            queries: device.spans(&shape.queries),
            documents: device.spans(&shape.documents),
            pairs: device.list(&pairs),
            places: device.list(&places),
            rows,
        }
    }
    /// Both sides' spans, pairs and places, as the kernels take them.
    fn arguments(&self) -> [Argument; 4] {
        [&self.queries, &self.documents, &self.pairs, &self.places].map(|list| list.pointer())
    }
}

pub(crate) fn forward<R: Driver>(
    device: &Cuda<R>,
    queries: View<'_, Cuda<R>>,
    documents: View<'_, Cuda<R>>,
    width: usize,
    shape: &MaxSimShape,
    scores: ViewMut<'_, Cuda<R>>,
) -> Vec<u32> {
    if shape.retrieved > 0 {
        return xtr(device, queries, documents, width, shape, scores);
    }
    let plan = Plan::new(device, shape);
    let floors = device.list(&shape.floors.iter().map(|&f| f as u32).collect::<Vec<u32>>());
    let best = device.scratch_of(plan.rows);
    let [q, d, pairs, places] = plan.arguments();
    let arguments = [
        queries.real(),
        documents.real(),
        number(width),
        q,
        d,
        pairs,
        places,
        floors.pointer(),
        float(EMPTY_DOCUMENT),
        scores.pointer(),
        best.pointer(),
    ];
    device.launch("max_sim", [shape.pairs.len(), 1, 1], 128, 0, &arguments);
    device.content(&best, plan.rows)
}

pub(crate) fn backward<R: Driver>(
    device: &Cuda<R>,
    others: View<'_, Cuda<R>>,
    width: usize,
    shape: &MaxSimShape,
    best: &[u32],
    slopes: View<'_, Cuda<R>>,
    side: MaxSimSide,
    target: ViewMut<'_, Cuda<R>>,
) {
    let plan = Plan::new(device, shape);
    let (kernel, texts) = match side {
        MaxSimSide::Queries => ("max_sim_queries", &shape.queries),
        MaxSimSide::Documents => ("max_sim_documents", &shape.documents),
    };
    let ((own, starts), best) = (grouped(device, shape, side), device.list(best));
    let [q, d, pairs, places] = plan.arguments();
    let divided = device.scratch_of(if shape.retrieved > 0 { slopes.len } else { 0 });
    let slopes = if shape.retrieved > 0 {
        let count = number(slopes.len);
        let arguments = [slopes.pointer(), best.pointer(), q, pairs, places, count, divided.pointer()];
        device.flat("xtr_slopes", slopes.len, &arguments);
        divided.pointer()
    } else {
        slopes.pointer()
    };
    let arguments = [
        others.real(),
        number(width),
        q,
        d,
        pairs,
        places,
        own.pointer(),
        starts.pointer(),
        best.pointer(),
        slopes,
        target.real(),
    ];
    let longest = texts.iter().map(|t| t.len()).max().unwrap_or(0);
    device.launch(kernel, [texts.len(), longest, 1], 128, 0, &arguments);
}

/// The pairs of every text of a side, in order, and where they begin.
fn grouped<R: Driver>(device: &Cuda<R>, shape: &MaxSimShape, side: MaxSimSide) -> (Buffer<R>, Buffer<R>) {
    let text = |i: u32| {
        let (q, d) = shape.pairs[i as usize];
        if side == MaxSimSide::Queries { q } else { d }
    };
    let texts = if side == MaxSimSide::Queries { &shape.queries } else { &shape.documents };
    let mut own: Vec<u32> = (0..shape.pairs.len() as u32).collect();
    own.sort_by_key(|&i| text(i));
    let starts: Vec<u32> =
        (0..=texts.len() as u32).map(|t| own.partition_point(|&i| text(i) < t) as u32).collect();
    (device.list(&own), device.list(&starts))
}

/// A product for every pair, and what is retrieved of all.
fn xtr<R: Driver>(
    device: &Cuda<R>,
    queries: View<'_, Cuda<R>>,
    documents: View<'_, Cuda<R>>,
    width: usize,
    shape: &MaxSimShape,
    scores: ViewMut<'_, Cuda<R>>,
) -> Vec<u32> {
    let plan = Plan::new(device, shape);
    let spans = |&(q, d): &(u32, u32)| (shape.queries[q as usize], shape.documents[d as usize]);
    let (mut count, mut starts) = (0, Vec::new());
    for (q, d) in shape.pairs.iter().map(spans) {
        starts.push(count as u64);
        count += q.len() * d.len();
    }
    let products = device.scratch_of(count);
    for ((q, d), start) in shape.pairs.iter().map(spans).zip(&starts) {
        let row = |at: u64, first: u32| rows_of(at + 4 * first as u64 * width as u64, width);
        device.multiply(Product {
            rows: q.len(),
            columns: d.len(),
            depth: width,
            batch: 1,
            a: row(queries.at(), q.start),
            b: turned(row(documents.at(), d.start)),
            bf16: false,
            c: rows_of(products.at() + 4 * start, d.len()),
            accumulate: false,
        });
    }
    let starts = device.list(&starts);
    let (own, own_starts) = grouped(device, shape, MaxSimSide::Queries);
    let (values, best) = (device.scratch_of(plan.rows), device.scratch_of(plan.rows));
    let [q, d, pairs, places] = plan.arguments();
    let arguments = [
        products.pointer(),
        starts.pointer(),
        q,
        d,
        pairs,
        places,
        own.pointer(),
        own_starts.pointer(),
        number(shape.retrieved),
        values.pointer(),
        best.pointer(),
    ];
    let longest = shape.queries.iter().map(|t| t.len()).max().unwrap_or(0);
    device.launch("xtr_rows", [shape.queries.len(), longest, 1], 256, 0, &arguments);
    let count = shape.pairs.len();
    let arguments = [values.pointer(), best.pointer(), q, pairs, places, number(count), scores.pointer()];
    device.flat("xtr_scores", count, &arguments);
    device.content(&best, plan.rows)
}
