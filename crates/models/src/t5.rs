//! T5 as a Fusion-in-Decoder reader: an encoder over passages, a decoder that attends to all passages of its question.
//!
//! Source: Raffel et al. (2020) for T5, Izacard and Grave (2021) for Fusion-in-Decoder. T5's attention has no 1/sqrt(d),
//! its norms no bias, its relative bias is one table for all layers of a stack. Passages are packed: one flat row of
//! tokens, a span per passage; nothing is padded.

mod buckets;
mod config;
mod generate;
mod weights;

use std::rc::Rc;
use std::sync::Arc;

use tercio_engine::{AttentionShape, Device, Layout, Param, RelativeBuckets, Span, Tape, Var};

pub use config::{ConfigError, T5Config, T5Family};
pub use generate::{Decoded, Decoding, EarlyStopping, Generation, GenerationRequest, MOST_BEAMS};
pub use weights::{Initialization, LoadedT5, T5Error, T5Headers, save};

struct Attention {
    query: Param,
    key: Param,
    value: Param,
    /// Key and value as one matrix.
    key_value: Param,
    /// Query, key and value as one matrix (self-attention).
    fused: Param,
    output: Param,
    norm: Param,
}

struct FeedForward {
    /// One matrix, or gate and value on top of each other.
    input: Param,
    output: Param,
    norm: Param,
}

struct EncoderLayer {
    attention: Attention,
    feed_forward: FeedForward,
}

struct DecoderLayer {
    attention: Attention,
    cross: Attention,
    feed_forward: FeedForward,
}

/// A T5 model: its shapes and where each parameter lies; the values are in an arena.
pub struct T5 {
    /// The configuration.
    pub config: T5Config,
    layout: Layout,
    shared: Param,
    encoder: Vec<EncoderLayer>,
    encoder_bias: Param,
    encoder_norm: Param,
    decoder: Vec<DecoderLayer>,
    decoder_bias: Param,
    decoder_norm: Param,
    /// Bias table of cross-attention, in readers trained with the 2020 library.
    cross_bias: Option<Param>,
    head: Param,
    encoder_buckets: Arc<RelativeBuckets>,
    decoder_buckets: Arc<RelativeBuckets>,
}

/// The targets of a shard: decoder inputs and labels of all questions, one after the other.
pub struct Targets<'a> {
    /// Token that the decoder reads at each position.
    pub inputs: &'a [u32],
    /// Token that it should predict there.
    pub labels: &'a [u32],
    /// Positions of each question.
    pub spans: &'a [Span],
    /// Encoder tokens of each question.
    pub keys: &'a [Span],
    /// Position of every encoder token for the cross-attention's bias table, where the model has one.
    pub key_positions: Option<Vec<u32>>,
    /// Weight of every token's loss: one over the number of target tokens of the whole update.
    pub weight: f64,
    /// Label smoothing, at least 0 and less than 1.
    pub smoothing: f64,
}

// Sites of dropout; a layer takes a block of eight.
const SITE_ENCODER: u64 = 0;
const SITE_DECODER: u64 = 1 << 20;
const SITES: u64 = 8;
const ATTENTION: u64 = 0;
const ATTENTION_OUT: u64 = 1;
const CROSS: u64 = 2;
const CROSS_OUT: u64 = 3;
const HIDDEN: u64 = 4;
const HIDDEN_OUT: u64 = 5;
const EMBEDDING: u64 = 1 << 19;
const FINAL: u64 = EMBEDDING + 1;

impl T5 {
    /// The model of a configuration, its parameters laid out in the order and with the names of Hugging Face.
    pub fn new(config: T5Config) -> T5 {
        let mut layout = Layout::default();
        let inner = config.num_heads * config.d_kv;
        let (d, ff) = (config.d_model, config.d_ff);
        let table = [config.relative_attention_num_buckets, config.num_heads];
        let shared = layout.add("shared.weight", &[config.vocab_size, d]);
        let attention = |layout: &mut Layout, prefix: String, bias: bool| {
            let name = |part: &str| format!("{prefix}.{part}.weight");
            let q = layout.add(name("q"), &[inner, d]);
            let k = layout.add(name("k"), &[inner, d]);
            let v = layout.add(name("v"), &[inner, d]);
            let output = layout.add(name("o"), &[d, inner]);
            let bias = bias.then(|| layout.add(name("relative_attention_bias"), &table));
            let layer = prefix.rsplit_once('.').expect("a dotted name").0;
            let norm = layout.add(format!("{layer}.layer_norm.weight"), &[d]);
            let key_value = Param::adjacent(&[k, v]);
            (
                Attention {
                    query: q,
                    key: k,
                    value: v,
                    key_value,
                    fused: Param::adjacent(&[q, k, v]),
                    output,
                    norm,
                },
                bias,
            )
        };
        let feed_forward = |layout: &mut Layout, layer: String| {
            let name = |part: &str| format!("{layer}.DenseReluDense.{part}.weight");
            let input = if config.gated {
                let parts = [layout.add(name("wi_0"), &[ff, d]), layout.add(name("wi_1"), &[ff, d])];
                Param::adjacent(&parts)
            } else {
                layout.add(name("wi"), &[ff, d])
            };
            let output = layout.add(name("wo"), &[d, ff]);
            FeedForward { input, output, norm: layout.add(format!("{layer}.layer_norm.weight"), &[d]) }
        };
        let (mut encoder_bias, mut decoder_bias, mut cross_bias) = (None, None, None);
        let mut encoder = Vec::new();
        for i in 0..config.num_layers {
            let (a, bias) =
                attention(&mut layout, format!("encoder.block.{i}.layer.0.SelfAttention"), i == 0);
            encoder_bias = encoder_bias.or(bias);
            let f = feed_forward(&mut layout, format!("encoder.block.{i}.layer.1"));
            encoder.push(EncoderLayer { attention: a, feed_forward: f });
        }
        let encoder_norm = layout.add("encoder.final_layer_norm.weight", &[d]);
        let mut decoder = Vec::new();
        for i in 0..config.num_decoder_layers {
            let (a, bias) =
                attention(&mut layout, format!("decoder.block.{i}.layer.0.SelfAttention"), i == 0);
            decoder_bias = decoder_bias.or(bias);
            let has_table = i == 0 && config.cross_attention_bias;
            let (c, bias) =
                attention(&mut layout, format!("decoder.block.{i}.layer.1.EncDecAttention"), has_table);
            cross_bias = cross_bias.or(bias);
            let f = feed_forward(&mut layout, format!("decoder.block.{i}.layer.2"));
            decoder.push(DecoderLayer { attention: a, cross: c, feed_forward: f });
        }
        let decoder_norm = layout.add("decoder.final_layer_norm.weight", &[d]);
        let head = if config.tied { shared } else { layout.add("lm_head.weight", &[config.vocab_size, d]) };
        let (buckets, distance) = (table[0], config.relative_attention_max_distance);
        T5 {
            layout,
            shared,
            encoder,
            encoder_bias: encoder_bias.expect("at least one encoder layer"),
            encoder_norm,
            decoder,
            decoder_bias: decoder_bias.expect("at least one decoder layer"),
            decoder_norm,
            cross_bias,
            head,
            encoder_buckets: Arc::new(buckets::relative(true, buckets, distance)),
            decoder_buckets: Arc::new(buckets::relative(false, buckets, distance)),
            config,
        }
    }
    /// Names, shapes and places of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// Whether cross-attention has its own bias table, so that encoder tokens need positions.
    pub fn needs_key_positions(&self) -> bool {
        self.cross_bias.is_some()
    }
    fn logit_factor(&self) -> f64 {
        self.config.logit_factor()
    }

    fn shape(
        &self,
        queries: &[Span],
        keys: &[Span],
        causal: bool,
        buckets: Option<&Arc<RelativeBuckets>>,
    ) -> AttentionShape {
        AttentionShape {
            heads: self.config.num_heads,
            head_dim: self.config.d_kv,
            queries: queries.to_vec(),
            keys: keys.to_vec(),
            first_query: 0,
            causal,
            window: None,
            scale: 1.0,
            buckets: buckets.cloned(),
            dropout: None,
        }
    }

    /// Hidden states of every passage, `[tokens, d_model]`, after the final norm.
    /// `spans` are the passages of the flat `ids`; `recompute` keeps only the input of each layer for the backward.
    pub fn encode<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let p = self.config.dropout_rate;
        let shape = Rc::new(self.shape(spans, spans, false, Some(&self.encoder_buckets)));
        let drop = tape.dropout(SITE_ENCODER + EMBEDDING, p);
        let mut x = tape.embedding(self.shared, ids, drop);
        for (i, layer) in self.encoder.iter().enumerate() {
            let site = SITE_ENCODER + i as u64 * SITES;
            let shape = shape.clone();
            let block = move |tape: &mut Tape<'p, D>, v: &[Var<D>]| {
                let x = self.self_attention(tape, &layer.attention, self.encoder_bias, &v[0], &shape, site);
                self.feed_forward(tape, &layer.feed_forward, &x, site)
            };
            x = if recompute { tape.recompute(&[&x], block) } else { block(tape, &[x]) };
        }
        let drop = tape.dropout(SITE_ENCODER + FINAL, p);
        tape.rms_norm(&x, self.encoder_norm, self.config.layer_norm_epsilon, drop)
    }

    /// Hidden states of the decoder at every target position, `[target tokens, d_model]`, after the final norm.
    pub fn decode<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        encoded: &Var<D>,
        t: &Targets<'_>,
    ) -> Var<D> {
        let p = self.config.dropout_rate;
        let own = Rc::new(self.shape(t.spans, t.spans, true, Some(&self.decoder_buckets)));
        let buckets = self.cross_buckets(t.key_positions.clone());
        let cross = self.shape(t.spans, t.keys, false, buckets.as_ref());
        let few = self.config.attends_to_states(t.spans, t.keys);
        let drop = tape.dropout(SITE_DECODER + EMBEDDING, p);
        let mut y = tape.embedding(self.shared, t.inputs, drop);
        for (i, layer) in self.decoder.iter().enumerate() {
            let site = SITE_DECODER + i as u64 * SITES;
            y = self.self_attention(tape, &layer.attention, self.decoder_bias, &y, &own, site);
            let query =
                tape.norm_linear(&y, layer.cross.norm, self.config.layer_norm_epsilon, layer.cross.query);
            let shape = AttentionShape { dropout: tape.dropout(site + CROSS, p), ..cross.clone() };
            let shape = Rc::new(shape);
            let a = if few {
                let (key, value) = (layer.cross.key, layer.cross.value);
                tape.state_attention(&query, encoded, key, value, self.cross_bias, &shape)
            } else {
                let key_value = tape.linear(encoded, layer.cross.key_value);
                tape.cross_attention(&query, &key_value, self.cross_bias, &shape)
            };
            let drop = tape.dropout(site + CROSS_OUT, p);
            y = tape.linear_residual(&a, layer.cross.output, &y, drop);
            y = self.feed_forward(tape, &layer.feed_forward, &y, site);
        }
        let drop = tape.dropout(SITE_DECODER + FINAL, p);
        tape.rms_norm(&y, self.decoder_norm, self.config.layer_norm_epsilon, drop)
    }

    /// Records the loss of the targets given the encoded passages; returns each target token's cross-entropy (with smoothed
    /// labels).
    pub fn loss<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        encoded: &Var<D>,
        t: &Targets<'_>,
    ) -> Vec<f64> {
        let y = self.decode(tape, encoded, t);
        let factor = self.logit_factor();
        tape.cross_entropy_smoothed(&y, self.head, factor, t.labels, t.weight, t.smoothing)
    }

    /// Logits at every target position, `[target tokens, vocab_size]`: for tests and small inputs.
    pub fn logits<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        encoded: &Var<D>,
        t: &Targets<'_>,
    ) -> tercio_engine::Tensor<D> {
        let y = self.decode(tape, encoded, t);
        tape.logits(&y, self.head, self.logit_factor(), 0, y.tensor.rows)
    }

    fn cross_buckets(&self, key_positions: Option<Vec<u32>>) -> Option<Arc<RelativeBuckets>> {
        self.cross_bias?;
        let positions =
            key_positions.expect("a model with a cross-attention bias table is given key positions");
        let plain: &RelativeBuckets = &self.decoder_buckets;
        Some(Arc::new(RelativeBuckets { key_positions: Some(positions), ..plain.clone() }))
    }

    fn self_attention<'p, D: Device>(
        &self,
        tape: &mut Tape<'p, D>,
        layer: &Attention,
        bias: Param,
        x: &Var<D>,
        shape: &Rc<AttentionShape>,
        site: u64,
    ) -> Var<D> {
        let p = self.config.dropout_rate;
        let qkv = tape.norm_linear(x, layer.norm, self.config.layer_norm_epsilon, layer.fused);
        let plain: &AttentionShape = shape;
        let shape = AttentionShape { dropout: tape.dropout(site + ATTENTION, p), ..plain.clone() };
        let a = tape.self_attention(&qkv, Some(bias), &Rc::new(shape));
        let drop = tape.dropout(site + ATTENTION_OUT, p);
        tape.linear_residual(&a, layer.output, x, drop)
    }

    fn feed_forward<'p, D: Device>(
        &self,
        tape: &mut Tape<'p, D>,
        layer: &FeedForward,
        x: &Var<D>,
        site: u64,
    ) -> Var<D> {
        let p = self.config.dropout_rate;
        let u = tape.norm_linear(x, layer.norm, self.config.layer_norm_epsilon, layer.input);
        let dropout = tape.dropout(site + HIDDEN, p);
        let h = tape.activation(&u, self.config.activation, self.config.gated, dropout);
        // The backward may not need it; then its memory serves the next product.
        drop(u);
        let dropout = tape.dropout(site + HIDDEN_OUT, p);
        tape.linear_residual(&h, layer.output, x, dropout)
    }
}
