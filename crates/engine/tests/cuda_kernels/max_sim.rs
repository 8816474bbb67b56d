//! Launches of MaxSim, and of XTR's scores.

use tercio_engine::device::EMPTY_DOCUMENT;
use tercio_engine::{MaxSimShape, MaxSimSide, View, ViewMut};

use super::device::{OnHost, Operand, float, number, slice};
use super::encoder::list;
use super::library::Argument;
use super::memory::{Guarded, floats, words};

/// Spans, pairs, and where the best rows of each pair begin.
struct Plan {
    queries: Guarded<u32>,
    documents: Guarded<u32>,
    pairs: Guarded<u32>,
    places: Guarded<u64>,
    rows: usize,
}

impl Plan {
    fn new(shape: &MaxSimShape) -> Plan {
        let (mut places, mut rows) = (Vec::new(), 0);
        for &(q, _) in &shape.pairs {
            places.push(rows as u64);
            rows += shape.queries[q as usize].len();
        }
        Plan {
            queries: list(&shape.queries),
            documents: list(&shape.documents),
            pairs: words(shape.pairs.iter().flat_map(|&(q, d)| [q, d]).collect()),
            places: Guarded::new(places, u64::MAX),
            rows,
        }
    }
}

pub fn forward(
    device: &OnHost,
    queries: View<'_, OnHost>,
    documents: View<'_, OnHost>,
    width: usize,
    shape: &MaxSimShape,
    scores: ViewMut<'_, OnHost>,
) -> Vec<u32> {
    if shape.retrieved > 0 {
        return xtr(device, queries, documents, width, shape, scores);
    }
    let plan = Plan::new(shape);
    let floors = words(shape.floors.iter().map(|&f| f as u32).collect());
    let best = words(vec![0; plan.rows]);
    let arguments = [
        queries.real(),
        documents.real(),
        number(width),
        (&plan.queries).into(),
        (&plan.documents).into(),
        (&plan.pairs).into(),
        (&plan.places).into(),
        if shape.floors.is_empty() { Argument::Pointer(std::ptr::null()) } else { (&floors).into() },
        float(EMPTY_DOCUMENT),
        scores.pointer(),
        (&best).into(),
    ];
    device.launch("max_sim", [shape.pairs.len(), 1, 1], 128, 0, &arguments);
    best.values().to_vec()
}

pub fn backward(
    device: &OnHost,
    others: View<'_, OnHost>,
    width: usize,
    shape: &MaxSimShape,
    best: &[u32],
    slopes: View<'_, OnHost>,
    side: MaxSimSide,
    d: ViewMut<'_, OnHost>,
) {
    let plan = Plan::new(shape);
    let (kernel, texts) = match side {
        MaxSimSide::Queries => ("max_sim_queries", &shape.queries),
        MaxSimSide::Documents => ("max_sim_documents", &shape.documents),
    };
    let ((own, starts), best) = (grouped(shape, side), words(best.to_vec()));
    let divided = floats(vec![f32::NAN; slopes.len]);
    let slopes = if shape.retrieved > 0 {
        let known = [(&plan.queries).into(), (&plan.pairs).into(), (&plan.places).into()];
        let mut arguments = vec![slopes.pointer(), (&best).into()];
        arguments.extend(known);
        arguments.extend([number(slopes.len), (&divided).into()]);
        device.flat("xtr_slopes", slopes.len, &arguments);
        (&divided).into()
    } else {
        slopes.pointer()
    };
    let arguments = [
        others.real(),
        number(width),
        (&plan.queries).into(),
        (&plan.documents).into(),
        (&plan.pairs).into(),
        (&plan.places).into(),
        (&own).into(),
        (&starts).into(),
        (&best).into(),
        slopes,
        d.real(),
    ];
    let longest = texts.iter().map(|t| t.len()).max().unwrap_or(0);
    device.launch(kernel, [texts.len(), longest, 1], 128, 0, &arguments);
}

/// The pairs of every text of a side, in order, and where they begin.
fn grouped(shape: &MaxSimShape, side: MaxSimSide) -> (Guarded<u32>, Guarded<u32>) {
    let text = |i: u32| {
        let (q, d) = shape.pairs[i as usize];
        if side == MaxSimSide::Queries { q } else { d }
    };
    let texts = if side == MaxSimSide::Queries { &shape.queries } else { &shape.documents };
    let mut own: Vec<u32> = (0..shape.pairs.len() as u32).collect();
    own.sort_by_key(|&i| text(i));
    let starts = (0..=texts.len() as u32).map(|t| own.partition_point(|&i| text(i) < t) as u32).collect();
    (words(own), words(starts))
}

/// The products of every pair are plain loops here and a GPU's library there.
fn xtr(
    device: &OnHost,
    queries: View<'_, OnHost>,
    documents: View<'_, OnHost>,
    width: usize,
    shape: &MaxSimShape,
    scores: ViewMut<'_, OnHost>,
) -> Vec<u32> {
    let plan = Plan::new(shape);
    let (mut products, mut starts) = (Vec::new(), Vec::new());
    for &(q, d) in &shape.pairs {
        starts.push(products.len() as u64);
        let (q, d) = (shape.queries[q as usize], shape.documents[d as usize]);
        for i in q.start as usize..q.end as usize {
            for j in d.start as usize..d.end as usize {
                let (a, b) = (&slice(queries)[i * width..][..width], &slice(documents)[j * width..][..width]);
                let sum: f64 = a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum();
                products.push(sum as f32);
            }
        }
    }
    let (products, starts) = (floats(products), Guarded::new(starts, u64::MAX));
    let (own, own_starts) = grouped(shape, MaxSimSide::Queries);
    let (values, best) = (floats(vec![f32::NAN; plan.rows]), words(vec![0; plan.rows]));
    let arguments = [
        (&products).into(),
        (&starts).into(),
        (&plan.queries).into(),
        (&plan.documents).into(),
        (&plan.pairs).into(),
        (&plan.places).into(),
        (&own).into(),
        (&own_starts).into(),
        number(shape.retrieved),
        (&values).into(),
        (&best).into(),
    ];
    let longest = shape.queries.iter().map(|t| t.len()).max().unwrap_or(0);
    device.launch("xtr_rows", [shape.queries.len(), longest, 1], 256, 0, &arguments);
    let count = shape.pairs.len();
    let known = [(&plan.queries).into(), (&plan.pairs).into(), (&plan.places).into()];
    let mut arguments = vec![(&values).into(), (&best).into()];
    arguments.extend(known);
    arguments.extend([number(count), scores.pointer()]);
    device.flat("xtr_scores", count, &arguments);
    best.values().to_vec()
}
