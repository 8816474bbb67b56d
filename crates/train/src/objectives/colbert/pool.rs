//! The contrastive loss over the vectors of a whole update, exact, in bounded memory beside them: every query's tokens meet every
//! document's, and what a token's gradient is leaves at once (GradCache; Gao et al., 2021).
//!
//! Each rank has the losses of its own queries and the gradients of its own texts. Scores are the same bits wherever they are computed,
//! and what reaches a vector is added in the order of queries, or of documents: the bits depend on no cut.

use std::ops::Range;

use tercio_comm::{CommError, World};
use tercio_engine::{Device, MaxSimShape, MaxSimSide, Span, Tensor};

use super::batch::ColbertShard;
use super::loss::Contrast;
use crate::error::TrainError;
use crate::objective::Shown;

/// Best rows that are kept at a time, about: 4 bytes each.
const KEPT: usize = 1 << 22;
/// Stands for no positive.
const NONE: u64 = u64::MAX;

/// What a shard shows to the others: the numbers of its queries and documents, each query's positive, each text's vectors, the floors,
/// and the vectors, two numbers of 32 bits in one of 64.
pub(super) fn show<D: Device>(shard: &ColbertShard, vectors: &Tensor<D>, device: &D) -> Shown {
    let values = device.read(vectors.view());
    let mut counts = vec![shard.queries as u64, shard.documents() as u64, values.len() as u64];
    counts.extend(shard.positives.iter().map(|p| p.map_or(NONE, |p| p as u64)));
    counts.extend(shard.texts.vectors.iter().map(|v| v.len() as u64));
    counts.extend((0..shard.documents()).map(|d| u64::from(shard.floors.get(d) == Some(&true))));
    let bits = |v: Option<&f32>| u64::from(v.map_or(0, |v| v.to_bits()));
    counts.extend(values.chunks(2).map(|two| bits(two.first()) | bits(two.get(1)) << 32));
    Shown { counts, values: Vec::new() }
}

/// The texts of all shards, as one list of queries and one of documents.
#[derive(Default)]
pub(super) struct WholeUpdate {
    queries: Vec<Span>,
    documents: Vec<Span>,
    positives: Vec<usize>,
    floors: Vec<bool>,
    query_values: Vec<f32>,
    document_values: Vec<f32>,
    /// Of each shard and the end: queries and documents before it.
    query_starts: Vec<usize>,
    document_starts: Vec<usize>,
}

impl WholeUpdate {
    /// `None` where what a rank has sent does not fit together.
    pub(super) fn new(shown: &[Shown], width: usize) -> Option<WholeUpdate> {
        let mut update = WholeUpdate::default();
        (update.query_starts, update.document_starts) = (vec![0], vec![0]);
        for Shown { counts, .. } in shown {
            let (&[queries, documents, numbers], rest) = counts.split_first_chunk::<3>()?;
            let size = |n: u64| usize::try_from(n).ok();
            let (queries, documents, numbers) = (size(queries)?, size(documents)?, size(numbers)?);
            let (positives, rest) = rest.split_at_checked(queries)?;
            let (lengths, rest) = rest.split_at_checked(queries.checked_add(documents)?)?;
            let (floors, rest) = rest.split_at_checked(documents)?;
            let mut values: Vec<f32> =
                rest.iter().flat_map(|two| [*two as u32, (two >> 32) as u32]).map(f32::from_bits).collect();
            if rest.len() != numbers.div_ceil(2) {
                return None;
            }
            values.truncate(numbers);
            for &p in positives {
                update.positives.push(update.documents.len() + size(p).filter(|&p| p < documents)?);
            }
            let mut from = 0usize;
            for (i, &length) in lengths.iter().enumerate() {
                let (spans, all) = match i < queries {
                    true => (&mut update.queries, &mut update.query_values),
                    false => (&mut update.documents, &mut update.document_values),
                };
                let end = from.checked_add(size(length)?.checked_mul(width)?)?;
                let start = u32::try_from(all.len() / width).ok()?;
                all.extend(values.get(from..end)?);
                spans.push(Span { start, end: u32::try_from(all.len() / width).ok()? });
                from = end;
            }
            if from != numbers {
                return None;
            }
            update.floors.extend(floors.iter().map(|&f| f != 0));
            update.query_starts.push(update.queries.len());
            update.document_starts.push(update.documents.len());
        }
        Some(update)
    }

    /// Queries of the update.
    pub(super) fn len(&self) -> usize {
        self.queries.len()
    }

    /// Loss of each shard in `own`, and the gradients of its vectors: of its queries, then of its documents.
    ///
    /// # Errors
    /// A rank was lost.
    pub(super) fn settle<D: Device>(
        &self,
        world: &World,
        device: &D,
        width: usize,
        (contrast, retrieved): (Contrast, usize),
        own: Range<usize>,
    ) -> Result<Vec<(f64, Vec<f32>)>, TrainError> {
        let queries = self.query_starts[own.start]..self.query_starts[own.end];
        let documents = self.document_starts[own.start]..self.document_starts[own.end];
        let tensor = |values: &[f32]| Tensor::from_values(device, values.len() / width, width, values);
        let (q, d) = (tensor(&self.query_values), tensor(&self.document_values));
        let mut pass = Pass {
            update: self,
            device,
            contrast,
            retrieved,
            dq: Tensor::zeros(device, q.rows, width),
            dd: Tensor::zeros(device, d.rows, width),
            q,
            d,
        };
        let whole = documents == (0..self.documents.len());
        let mut found = Vec::with_capacity(queries.len());
        for chunk in pass.chunks(queries.clone(), self.documents.len()) {
            found.extend(pass.rows(chunk, whole));
        }
        let normalizers: Vec<f64> = found.iter().map(|f| f.1).collect();
        let normalizers = world.all_gather(&normalizers)?.concat();
        if normalizers.len() != self.queries.len() {
            let what = "a rank sent another number of queries than before";
            return Err(CommError::Protocol(what.into()).into());
        }
        if !whole && !documents.is_empty() {
            // Which tokens of a document are retrieved hangs on all documents.
            let met = if retrieved > 0 { self.documents.len() } else { documents.len() };
            for chunk in pass.chunks(0..self.queries.len(), met) {
                pass.columns(chunk, documents.clone(), &normalizers);
            }
        }
        let rows = |tensor: &Tensor<D>, spans: &[Span], of: Range<usize>| match &spans[of] {
            [] => Vec::new(),
            list => device.read(tensor.rows_view(list[0].start as usize, list[list.len() - 1].end as usize)),
        };
        let mut losses = found.iter().map(|f| f.0);
        let of = |shard: usize| {
            let own = self.query_starts[shard]..self.query_starts[shard + 1];
            let loss = losses.by_ref().take(own.len()).fold(0.0, |sum, loss| sum + loss);
            let mut gradients = rows(&pass.dq, &self.queries, own);
            let own = self.document_starts[shard]..self.document_starts[shard + 1];
            gradients.extend(rows(&pass.dd, &self.documents, own));
            (loss, gradients)
        };
        Ok(own.map(of).collect())
    }
}

/// The vectors of an update and their gradients on a device.
struct Pass<'a, D: Device> {
    update: &'a WholeUpdate,
    device: &'a D,
    contrast: Contrast,
    /// See [`MaxSimShape::retrieved`].
    retrieved: usize,
    q: Tensor<D>,
    d: Tensor<D>,
    dq: Tensor<D>,
    dd: Tensor<D>,
}

impl<D: Device> Pass<'_, D> {
    /// Queries that meet `documents` documents at a time.
    fn chunks(&self, queries: Range<usize>, documents: usize) -> Vec<Range<usize>> {
        let longest = self.update.queries[queries.clone()].iter().map(Span::len).max().unwrap_or(0);
        let step = (KEPT / (longest * documents).max(1)).max(1);
        let end = queries.end;
        queries.step_by(step).map(|start| start..end.min(start + step)).collect()
    }
    fn shape(&self, queries: Range<usize>, documents: Range<usize>) -> MaxSimShape {
        let u = self.update;
        MaxSimShape {
            floors: u.floors[documents.clone()].to_vec(),
            retrieved: self.retrieved,
            ..MaxSimShape::all(u.queries[queries].to_vec(), u.documents[documents].to_vec())
        }
    }
    fn scores(&self, shape: &MaxSimShape) -> (Vec<f64>, Vec<u32>) {
        let mut scores = Tensor::scratch(self.device, shape.pairs.len(), 1);
        let (q, d) = (self.q.view(), self.d.view());
        let best = self.device.max_sim(q, d, self.q.columns, shape, scores.view_mut());
        (self.device.read_f64(scores.view()), best)
    }
    fn backward(&mut self, shape: &MaxSimShape, best: &[u32], slopes: &[f64], side: MaxSimSide) {
        let slopes: Vec<f32> = slopes.iter().map(|&s| s as f32).collect();
        let slopes = Tensor::from_values(self.device, slopes.len(), 1, &slopes);
        let width = self.q.columns;
        let (others, own) = match side {
            MaxSimSide::Queries => (&self.d, &mut self.dq),
            MaxSimSide::Documents => (&self.q, &mut self.dd),
        };
        let (others, own) = (others.view(), own.view_mut());
        self.device.max_sim_backward(others, width, shape, best, slopes.view(), side, own);
    }
    /// Loss and normalizer of each query, against all documents; adds to the gradients of the queries, and of the `documents` too.
    fn rows(&mut self, queries: Range<usize>, documents: bool) -> Vec<(f64, f64)> {
        let (count, c) = (self.update.documents.len(), self.contrast);
        let shape = self.shape(queries.clone(), 0..count);
        let (scores, best) = self.scores(&shape);
        let (mut found, mut slopes) = (Vec::with_capacity(queries.len()), Vec::with_capacity(scores.len()));
        for (row, q) in scores.chunks(count.max(1)).zip(queries) {
            let (positive, normalizer) = (self.update.positives[q], c.normalizer(row));
            found.push((c.loss(row, positive, normalizer), normalizer));
            slopes.extend(row.iter().enumerate().map(|(d, &s)| c.slope(s, d == positive, normalizer, count)));
        }
        self.backward(&shape, &best, &slopes, MaxSimSide::Queries);
        if documents {
            self.backward(&shape, &best, &slopes, MaxSimSide::Documents);
        }
        found
    }
    /// Adds to the gradients of `documents` what comes from `queries`.
    fn columns(&mut self, queries: Range<usize>, documents: Range<usize>, normalizers: &[f64]) {
        let (count, c) = (self.update.documents.len(), self.contrast);
        let met = if self.retrieved > 0 { 0..count } else { documents.clone() };
        let mut shape = self.shape(queries.clone(), met.clone());
        let (scores, mut best) = self.scores(&shape);
        let mut slopes = Vec::with_capacity(scores.len());
        for (row, q) in scores.chunks(met.len()).zip(queries) {
            let positive = self.update.positives[q];
            let of = |(d, &s): (usize, &f64)| c.slope(s, met.start + d == positive, normalizers[q], count);
            slopes.extend(row.iter().enumerate().map(of));
        }
        if met != documents {
            (best, slopes) = only(&mut shape, &documents, &best, &slopes);
        }
        self.backward(&shape, &best, &slopes, MaxSimSide::Documents);
    }
}

/// Leaves only the pairs of some documents, with their best rows and slopes.
fn only(
    shape: &mut MaxSimShape,
    documents: &Range<usize>,
    best: &[u32],
    slopes: &[f64],
) -> (Vec<u32>, Vec<f64>) {
    let (mut pairs, mut rows, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = best;
    for (&(q, d), &slope) in shape.pairs.iter().zip(slopes) {
        let (own, others) = rest.split_at(shape.queries[q as usize].len());
        rest = others;
        if documents.contains(&(d as usize)) {
            pairs.push((q, d));
            rows.extend_from_slice(own);
            kept.push(slope);
        }
    }
    shape.pairs = pairs;
    (rows, kept)
}
