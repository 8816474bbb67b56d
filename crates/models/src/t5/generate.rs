//! Decoding of many questions at once, greedily or by beam search. Each step reads one token of every beam of every question
//! that is still searched; beams of one question share what is known of its passages.

mod beams;
mod decoding;

use std::rc::Rc;
use std::sync::Arc;

use tercio_engine::device::{Heads, Matrix};
use tercio_engine::{Arena, AttentionShape, Device, RelativeBuckets, Span, Tape, Tensor, Var, View, ViewMut};

use super::{DecoderLayer, T5};
pub use beams::Decoded;
use beams::Search;
pub use decoding::{Decoding, EarlyStopping, MOST_BEAMS};

/// Rows whose logits exist at once.
const LOGIT_ROWS: usize = 256;

/// What to decode.
pub struct GenerationRequest<'a> {
    /// Encoder tokens of each question.
    pub keys: &'a [Span],
    /// Position of every encoder token, where the model has a bias table in cross-attention.
    pub key_positions: Option<Vec<u32>>,
    /// Beams and lengths.
    pub decoding: Decoding,
    /// Whether to collect Fusion-in-Decoder's cross-attention scores.
    pub scores: bool,
}

/// What was decoded.
pub struct Generation {
    /// The answers to each question, best first: at least one, at most `num_return_sequences`.
    pub answers: Vec<Vec<Decoded>>,
    /// For every encoder token: its product with the first decoder query, not scaled, before the softmax, bias
    /// included, averaged over layers and heads (peers call the mean of it over a passage its score).
    pub raw_scores: Option<Vec<f32>>,
}

/// Keys and values of one layer.
struct Cache<D: Device> {
    /// Of the decoder itself: `max_length - 1` rows a slot, a slot a beam.
    own: Tensor<D>,
    /// Of the passages.
    cross: Var<D>,
}

/// The beams that read a token in this step, the beams of a question one after the other.
struct Rows {
    /// The token that each reads.
    inputs: Vec<u32>,
    /// The step's row of each beam's slot, and those before it.
    own: AttentionShape,
    /// The passages.
    cross: AttentionShape,
}

impl T5 {
    /// Decodes; of equal logits the smaller id wins. `encoded` is what [`T5::encode`] gave on an inference tape.
    pub fn generate<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        parameters: &'p Arena<D>,
        encoded: &Var<D>,
        request: &GenerationRequest<'_>,
    ) -> Generation {
        let device = tape.device.clone();
        let decoding = &request.decoding;
        let (questions, beams) = (request.keys.len(), decoding.num_beams.max(1));
        let steps = decoding.max_length.saturating_sub(1);
        let mut searches: Vec<Search> =
            (0..questions).map(|q| Search::new(q * beams..(q + 1) * beams)).collect();
        let mut caches: Vec<Cache<D>> = Vec::new();
        for layer in &self.decoder {
            let width = layer.attention.key_value.rows;
            let own = Tensor::scratch(&device, questions * beams * steps.max(1), width);
            caches.push(Cache { own, cross: tape.linear(encoded, layer.cross.key_value) });
        }
        let mut raw = request.scores.then(|| vec![0f64; encoded.tensor.rows]);
        let buckets = self.cross_buckets(request.key_positions.clone());
        let mut active: Vec<usize> = (0..questions).collect();
        for step in 0..steps {
            if active.is_empty() {
                break;
            }
            let rows = self.rows(&searches, &active, request, step, buckets.as_ref());
            let cross = Rc::new(rows.cross);
            let mut y = tape.embedding(self.shared, &rows.inputs, None);
            for (layer, cache) in self.decoder.iter().zip(&mut caches) {
                y = self.step_own(tape, parameters, layer, cache, &y, &rows.own);
                let eps = self.config.layer_norm_epsilon;
                let query = tape.norm_linear(&y, layer.cross.norm, eps, layer.cross.query);
                if step == 0
                    && let Some(raw) = &mut raw
                {
                    self.add_scores(&device, parameters, &query, cache, &cross, raw);
                }
                let a = tape.cross_attention(&query, &cache.cross, self.cross_bias, &cross);
                y = tape.linear_residual(&a, layer.cross.output, &y, None);
                y = self.feed_forward(tape, &layer.feed_forward, &y, 0);
            }
            let y = tape.rms_norm(&y, self.decoder_norm, self.config.layer_norm_epsilon, None);
            let next = self.likeliest(tape, &y, decoding, step);
            let (mut row, mut copies) = (0, Vec::new());
            for &q in &active {
                let n = searches[q].beams.len();
                let of_beam = |(i, tokens): (usize, &Vec<(u32, f64)>)| {
                    tokens.iter().map(move |&(id, v)| (i, id, v)).collect::<Vec<_>>()
                };
                let continuations = next[row..row + n].iter().enumerate().flat_map(of_beam);
                copies.extend(searches[q].advance(decoding, self.config.eos_token_id, continuations));
                row += n;
            }
            caches.iter_mut().for_each(|cache| copy_slots(&device, &mut cache.own, &copies, steps, step + 1));
            active.retain(|&q| !searches[q].done);
        }
        let n = (self.config.num_heads * self.decoder.len()) as f64;
        let raw_scores = raw.map(|r| r.into_iter().map(|v| (v / n) as f32).collect());
        Generation { answers: searches.into_iter().map(|s| s.into_answers(decoding)).collect(), raw_scores }
    }

    fn rows(
        &self,
        searches: &[Search],
        active: &[usize],
        request: &GenerationRequest<'_>,
        step: usize,
        buckets: Option<&Arc<RelativeBuckets>>,
    ) -> Rows {
        let steps = request.decoding.max_length.saturating_sub(1);
        let (mut inputs, mut own_keys, mut queries, mut keys) = (vec![], vec![], vec![], vec![]);
        for &q in active {
            let first = inputs.len() as u32;
            for beam in &searches[q].beams {
                inputs.push(beam.tokens.last().copied().unwrap_or(self.config.decoder_start_token_id));
                let start = beam.slot * steps;
                own_keys.push(Span { start: start as u32, end: (start + step + 1) as u32 });
            }
            let rows = Span { start: first, end: inputs.len() as u32 };
            // All beams of a question meet its passages in one product; but a bias is by position, which is the same
            // for all of them, while rows of a span stand for one position after the other.
            if buckets.is_none() {
                queries.push(rows);
                keys.push(request.keys[q]);
            } else {
                queries.extend((rows.start..rows.end).map(one));
                keys.extend(std::iter::repeat_n(request.keys[q], rows.len()));
            }
        }
        let each: Vec<Span> = (0..inputs.len() as u32).map(one).collect();
        let mut own = self.shape(&each, &own_keys, true, Some(&self.decoder_buckets));
        own.first_query = step;
        let mut cross = self.shape(&queries, &keys, false, buckets);
        cross.first_query = step;
        Rows { inputs, own, cross }
    }

    /// The likeliest next tokens of every row of decoder states, with their log probabilities: one where decoding is greedy.
    fn likeliest<'p, D: Device>(
        &'p self,
        tape: &Tape<'p, D>,
        y: &Var<D>,
        decoding: &Decoding,
        step: usize,
    ) -> Vec<Vec<(u32, f64)>> {
        let (device, rows) = (&tape.device, y.tensor.rows);
        let k = if decoding.num_beams > 1 { 2 * decoding.num_beams } else { 1 };
        let mut likeliest = Vec::with_capacity(rows);
        for start in (0..rows).step_by(LOGIT_ROWS) {
            let end = rows.min(start + LOGIT_ROWS);
            let mut z = tape.logits(y, self.head, self.logit_factor(), start, end);
            let mut log_sum = Tensor::scratch(device, 1, end - start);
            let mut losses = Tensor::scratch(device, 1, end - start);
            let any = vec![0; end - start];
            device.cross_entropy(z.view(), &any, losses.view_mut(), log_sum.view_mut());
            let log_sum = device.read_f64(log_sum.view());
            if step + 1 < decoding.min_length {
                self.forbid_end(device, &mut z);
            }
            let top = device.top_k(z.view(), self.config.vocab_size, k);
            let each = k.min(self.config.vocab_size);
            likeliest.extend(top.chunks(each).zip(log_sum).map(|(row, sum)| {
                // What cannot be is no continuation, unless nothing else is there to be chosen.
                let possible = |v: f64| k == 1 || v > f64::NEG_INFINITY || v.is_nan();
                row.iter().filter(|(_, v)| possible(*v)).map(|&(id, v)| (id, v - sum)).collect()
            }));
        }
        likeliest
    }

    /// Causal self-attention of the newest token of every beam, its key and value stored first.
    fn step_own<'p, D: Device>(
        &self,
        tape: &mut Tape<'p, D>,
        parameters: &Arena<D>,
        layer: &DecoderLayer,
        cache: &mut Cache<D>,
        x: &Var<D>,
        shape: &AttentionShape,
    ) -> Var<D> {
        let device = tape.device.clone();
        let a = &layer.attention;
        let eps = self.config.layer_norm_epsilon;
        let query = tape.norm_linear(x, a.norm, eps, a.query);
        let fresh = tape.norm_linear(x, a.norm, eps, a.key_value);
        for (i, span) in shape.keys.iter().enumerate() {
            let row = span.end as usize - 1;
            device.copy(cache.own.rows_view_mut(row, row + 1), fresh.tensor.rows_view(i, i + 1));
        }
        let mut y = Tensor::scratch(&device, x.tensor.rows, query.tensor.columns);
        let mut log_sum = Tensor::scratch(&device, x.tensor.rows, shape.heads);
        let heads = Heads::Split { query: query.tensor.view(), key_value: cache.own.view() };
        let bias = Some(parameters.view(self.decoder_bias));
        device.attention(heads, bias, shape, y.view_mut(), log_sum.view_mut());
        let y = tape.input(y);
        tape.linear_residual(&y, a.output, x, None)
    }

    /// Adds a layer's raw products of the first query with every key; a sum over heads is a product over all columns.
    fn add_scores<D: Device>(
        &self,
        device: &D,
        parameters: &Arena<D>,
        query: &Var<D>,
        cache: &Cache<D>,
        shape: &AttentionShape,
        raw: &mut [f64],
    ) {
        let (q, kv) = (&query.tensor, &cache.cross.tensor);
        let table = self.cross_bias.map(|b| device.read_f64(parameters.view(b)));
        for (i, span) in shape.keys.iter().enumerate() {
            if span.is_empty() {
                continue;
            }
            let (start, end) = (span.start as usize, span.end as usize);
            let keys = Matrix {
                view: kv.rows_view(start, end),
                rows: end - start,
                columns: q.columns,
                stride: kv.columns,
                transposed: false,
            };
            let mut scores = Tensor::scratch(device, 1, end - start);
            let row: View<'_, D> = q.rows_view(i, i + 1);
            let target: ViewMut<'_, D> = scores.view_mut();
            device.product(Matrix::new(row, 1, q.columns), keys.t(), target, false);
            let bias = |key: usize| match (&table, &shape.buckets) {
                (Some(t), Some(b)) => {
                    let positions = b.key_positions.as_ref().expect("set by cross_buckets");
                    let bucket = b.of(shape.first_query, positions[key] as usize);
                    t[bucket * shape.heads..][..shape.heads].iter().sum()
                }
                _ => 0.0,
            };
            for (j, v) in device.read_f64(scores.view()).into_iter().enumerate() {
                raw[start + j] += v + bias(start + j);
            }
        }
    }

    fn forbid_end<D: Device>(&self, device: &D, z: &mut Tensor<D>) {
        let (rows, eos) = (z.rows, self.config.eos_token_id as usize);
        for r in 0..rows {
            let mut row = z.rows_view_mut(r, r + 1);
            row.start += eos;
            row.len = 1;
            device.fill(row, f64::NEG_INFINITY);
        }
    }
}

fn one(row: u32) -> Span {
    Span { start: row, end: row + 1 }
}

/// Copies the first `rows` rows of slots; no slot is both read and written.
fn copy_slots<D: Device>(
    device: &D,
    own: &mut Tensor<D>,
    copies: &[(usize, usize)],
    slot_rows: usize,
    rows: usize,
) {
    if copies.is_empty() {
        return;
    }
    let mut beside = Tensor::scratch(device, rows, own.columns);
    for (from, to) in copies.iter().map(|(from, to)| (from * slot_rows, to * slot_rows)) {
        device.copy(beside.view_mut(), own.rows_view(from, from + rows));
        device.copy(own.rows_view_mut(to, to + rows), beside.view());
    }
}
