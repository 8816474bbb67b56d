//! Greedy decoding of many questions at once: keys and values of the passages are computed once per question, each
//! step reads one token of every question that has not ended, and questions that ended take no part in a step.

use tercio_engine::device::{Heads, Matrix};
use tercio_engine::{Arena, AttentionShape, Device, Span, Tape, Tensor, Var, View, ViewMut};

use super::{DecoderLayer, T5};

/// What to decode.
pub struct GenerationRequest<'a> {
    /// Encoder tokens of each question.
    pub keys: &'a [Span],
    /// Position of every encoder token, where the model has a bias table in cross-attention.
    pub key_positions: Option<Vec<u32>>,
    /// Tokens at most, the start token counted (Fusion-in-Decoder's default: 50).
    pub max_length: usize,
    /// Tokens at least, the start token counted: the end token is not chosen before.
    pub min_length: usize,
    /// Whether to collect Fusion-in-Decoder's cross-attention scores.
    pub scores: bool,
}

/// What was decoded.
pub struct Generation {
    /// Tokens of each question, without the start token, with the end token where it came.
    pub tokens: Vec<Vec<u32>>,
    /// For every encoder token: its product with the first decoder query, not scaled, before the softmax, bias
    /// included, averaged over layers and heads (peers call the mean of it over a passage its score).
    pub raw_scores: Option<Vec<f32>>,
}

/// Keys and values of one layer.
struct Cache<D: Device> {
    /// Of the decoder itself: `max_length` rows a question.
    own: Tensor<D>,
    /// Of the passages.
    cross: Var<D>,
}

impl T5 {
    /// Decodes greedily; of equal logits the smaller id wins. `encoded` is what [`T5::encode`] gave on an inference tape.
    pub fn generate<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        parameters: &'p Arena<D>,
        encoded: &Var<D>,
        request: &GenerationRequest<'_>,
    ) -> Generation {
        let device = tape.device.clone();
        let questions = request.keys.len();
        let steps = request.max_length.saturating_sub(1);
        let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); questions];
        let mut caches: Vec<Cache<D>> = Vec::new();
        for layer in &self.decoder {
            let width = layer.attention.key_value.rows;
            let own = Tensor::scratch(&device, questions * steps.max(1), width);
            caches.push(Cache { own, cross: tape.linear(encoded, layer.cross.key_value) });
        }
        let mut raw = request.scores.then(|| vec![0f64; encoded.tensor.rows]);
        let buckets = self.cross_buckets(request.key_positions.clone());
        let mut active: Vec<usize> = (0..questions).collect();
        for step in 0..steps {
            if active.is_empty() {
                break;
            }
            let last = |q: &usize| tokens[*q].last().copied().unwrap_or(self.config.decoder_start_token_id);
            let inputs: Vec<u32> = active.iter().map(last).collect();
            let one = |i: usize| Span { start: i as u32, end: i as u32 + 1 };
            let queries: Vec<Span> = (0..active.len()).map(one).collect();
            let past = |&q: &usize| Span { start: (q * steps) as u32, end: (q * steps + step + 1) as u32 };
            let own_keys: Vec<Span> = active.iter().map(past).collect();
            let keys: Vec<Span> = active.iter().map(|&q| request.keys[q]).collect();
            let mut own = self.shape(&queries, &own_keys, true, Some(&self.decoder_buckets));
            own.first_query = step;
            let mut cross = self.shape(&queries, &keys, false, buckets.as_ref());
            cross.first_query = step;
            let mut y = tape.embedding(self.shared, &inputs, None);
            for (layer, cache) in self.decoder.iter().zip(&mut caches) {
                y = self.step_own(tape, parameters, layer, cache, &y, &own);
                let eps = self.config.layer_norm_epsilon;
                let query = tape.norm_linear(&y, layer.cross.norm, eps, layer.cross.query);
                if step == 0
                    && let Some(raw) = &mut raw
                {
                    self.add_scores(&device, parameters, &query, cache, &cross, raw);
                }
                let shape = std::rc::Rc::new(cross.clone());
                let a = tape.cross_attention(&query, &cache.cross, self.cross_bias, &shape);
                y = tape.linear_residual(&a, layer.cross.output, &y, None);
                y = self.feed_forward(tape, &layer.feed_forward, &y, 0);
            }
            let y = tape.rms_norm(&y, self.decoder_norm, self.config.layer_norm_epsilon, None);
            let mut z = tape.logits(&y, self.head, self.logit_factor(), 0, active.len());
            if step + 2 < request.min_length {
                self.forbid_end(&device, &mut z);
            }
            let next = device.argmax(z.view(), self.config.vocab_size);
            for (&q, &id) in active.iter().zip(&next) {
                tokens[q].push(id);
            }
            let eos = self.config.eos_token_id;
            active.retain(|&q| tokens[q].last() != Some(&eos));
        }
        let n = (self.config.num_heads * self.decoder.len()) as f64;
        let raw_scores = raw.map(|r| r.into_iter().map(|v| (v / n) as f32).collect());
        Generation { tokens, raw_scores }
    }

    /// Causal self-attention of the newest token of every active question, its key and value stored first.
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
