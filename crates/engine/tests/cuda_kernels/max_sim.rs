//! Launches of MaxSim.

use tercio_engine::device::EMPTY_DOCUMENT;
use tercio_engine::{MaxSimShape, MaxSimSide, View, ViewMut};

use super::device::{OnHost, Operand, float, number};
use super::encoder::list;
use super::library::Argument;
use super::memory::{Guarded, words};

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
    let text = |i: u32| {
        let (q, d) = shape.pairs[i as usize];
        if side == MaxSimSide::Queries { q } else { d }
    };
    let mut own: Vec<u32> = (0..shape.pairs.len() as u32).collect();
    own.sort_by_key(|&i| text(i));
    let starts = (0..=texts.len() as u32).map(|t| own.partition_point(|&i| text(i) < t) as u32).collect();
    let (own, starts, best) = (words(own), words(starts), words(best.to_vec()));
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
        slopes.pointer(),
        d.real(),
    ];
    let longest = texts.iter().map(|t| t.len()).max().unwrap_or(0);
    device.launch(kernel, [texts.len(), longest, 1], 128, 0, &arguments);
}
