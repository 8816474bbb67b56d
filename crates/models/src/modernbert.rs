//! ModernBERT: pre-norm encoder layers with rotary positions, attention that is local in most layers, and gated feed-forward layers.
//!
//! Source: Warner et al. (2024), and Hugging Face's `ModernBertModel`, whose folders it reads and writes. Texts are packed: one flat
//! row of tokens, a span per text; nothing is padded.

mod config;

use std::rc::Rc;

use rayon::prelude::*;
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{
    AttentionShape, Device, Hidden, LayerNorm, Layout, Param, ParamSpec, Rotary, Span, Tape, Var, positions,
};

pub use config::{MODEL_TYPE, ModernBertConfig};

/// A weight and, where the configuration has them, its bias.
#[derive(Clone, Copy)]
struct Linear {
    weight: Param,
    bias: Option<Param>,
}

struct Layer {
    /// The first layer has none: the embedding was normalised.
    attention_norm: Option<LayerNorm>,
    /// Query, key and value on top of each other.
    qkv: Linear,
    attention_output: Linear,
    feed_forward_norm: LayerNorm,
    /// What is activated, and its factor, on top of each other.
    input: Linear,
    output: Linear,
    sliding: bool,
}

/// The shapes of a ModernBERT encoder and where each parameter lies; the values are in an arena.
pub struct ModernBert {
    /// The configuration.
    pub config: ModernBertConfig,
    words: Param,
    embedding_norm: LayerNorm,
    layers: Vec<Layer>,
    final_norm: LayerNorm,
}

// Sites of dropout; a layer takes a block of four.
const SITES: u64 = 4;
const ATTENTION: u64 = 0;
const ATTENTION_OUT: u64 = 1;
const HIDDEN: u64 = 2;
const EMBEDDING: u64 = 1 << 19;

/// Standard deviations at which random initial values are cut.
const CUTOFF: f64 = 2.0;

impl ModernBert {
    /// Adds the parameters to a layout, in the order and with the names of Hugging Face's `ModernBertModel`.
    pub fn new(config: ModernBertConfig, layout: &mut Layout) -> ModernBert {
        let d = config.hidden_size;
        let norm = |layout: &mut Layout, name: &str| {
            let weight = layout.add(format!("{name}.weight"), &[d]);
            let bias = config.norm_bias.then(|| layout.add(format!("{name}.bias"), &[d]));
            LayerNorm::new(weight, bias, config.norm_eps)
        };
        let linear = |layout: &mut Layout, name: &str, rows: usize, columns: usize, bias: bool| {
            let weight = layout.add(format!("{name}.weight"), &[rows, columns]);
            Linear { weight, bias: bias.then(|| layout.add(format!("{name}.bias"), &[rows])) }
        };
        let words = layout.add("embeddings.tok_embeddings.weight", &[config.vocab_size, d]);
        let embedding_norm = norm(layout, "embeddings.norm");
        let mut layers = Vec::new();
        for (i, &sliding) in config.sliding.iter().enumerate() {
            let name = |part: &str| format!("layers.{i}.{part}");
            let wide = config.intermediate_size;
            layers.push(Layer {
                attention_norm: (i > 0).then(|| norm(layout, &name("attn_norm"))),
                qkv: linear(layout, &name("attn.Wqkv"), 3 * d, d, config.attention_bias),
                attention_output: linear(layout, &name("attn.Wo"), d, d, config.attention_bias),
                feed_forward_norm: norm(layout, &name("mlp_norm")),
                input: linear(layout, &name("mlp.Wi"), 2 * wide, d, config.mlp_bias),
                output: linear(layout, &name("mlp.Wo"), d, wide, config.mlp_bias),
                sliding,
            });
        }
        let final_norm = norm(layout, "final_norm");
        ModernBert { config, words, embedding_norm, layers, final_norm }
    }

    /// Hidden states of every text, `[tokens, hidden_size]`, after the final norm. `spans` are the texts of the flat `ids`;
    /// `recompute` keeps only the input of each layer for the backward.
    pub fn encode<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        self.encode_keyed(tape, ids, spans, spans, recompute)
    }

    /// As [`ModernBert::encode`], where the tokens of a text attend to its rows `keys` only, which are its first ones.
    pub fn encode_keyed<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        keys: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let c = &self.config;
        let longest = spans.iter().map(Span::len).max().unwrap_or(0);
        let rotary = |theta| Rc::new(Rotary::new(theta, c.head_dim(), longest.max(1)));
        let (everywhere, near) = (rotary(c.global_theta), rotary(c.local_theta));
        let positions = positions(spans, ids.len());
        let shape = Rc::new(AttentionShape {
            heads: c.num_attention_heads,
            head_dim: c.head_dim(),
            queries: spans.to_vec(),
            keys: keys.to_vec(),
            first_query: 0,
            causal: false,
            window: None,
            scale: 1.0 / libm::sqrt(c.head_dim() as f64),
            buckets: None,
            dropout: None,
        });
        let x = tape.embedding_sum(&[(self.words, ids, c.pad_token_id)]);
        let drop = tape.dropout(EMBEDDING, c.embedding_dropout);
        let mut x = tape.layer_norm(&x, self.embedding_norm, drop);
        for (i, layer) in self.layers.iter().enumerate() {
            let site = i as u64 * SITES;
            let (shape, positions) = (shape.clone(), positions.clone());
            let rotary = if layer.sliding { near.clone() } else { everywhere.clone() };
            let block = move |tape: &mut Tape<'p, D>, v: &[Var<D>]| {
                self.layer(tape, layer, &v[0], &shape, &rotary, &positions, site)
            };
            x = if recompute { tape.recompute(&[&x], block) } else { block(tape, &[x]) };
        }
        tape.layer_norm(&x, self.final_norm, None)
    }

    fn layer<'p, D: Device>(
        &self,
        tape: &mut Tape<'p, D>,
        layer: &Layer,
        x: &Var<D>,
        shape: &AttentionShape,
        rotary: &Rc<Rotary>,
        positions: &Rc<[u32]>,
        site: u64,
    ) -> Var<D> {
        let c = &self.config;
        let normed = tape.normed(x, layer.attention_norm);
        let qkv = tape.linear_bias(&normed, layer.qkv.weight, layer.qkv.bias);
        let qkv = tape.rotary(qkv, rotary, positions);
        let shape = AttentionShape {
            window: layer.sliding.then_some(c.local_attention / 2),
            dropout: tape.dropout(site + ATTENTION, c.attention_dropout),
            ..shape.clone()
        };
        let a = tape.self_attention(&qkv, None, &Rc::new(shape));
        // The backward may not need it; then its memory serves the next product.
        drop(qkv);
        let dropout = tape.dropout(site + ATTENTION_OUT, c.attention_dropout);
        let Linear { weight, bias } = layer.attention_output;
        let x = tape.linear_bias_residual(&a, weight, bias, &x.into(), dropout);
        drop(a);
        let normed = tape.normed(&x, Some(layer.feed_forward_norm));
        let u = tape.linear_bias(&normed, layer.input.weight, None);
        let dropout = tape.dropout(site + HIDDEN, c.mlp_dropout);
        let hidden = Hidden { bias: layer.input.bias, kind: c.activation, gated: true, dropout };
        tape.feed_forward_end(&u, hidden, layer.output.weight, layer.output.bias, &(&x).into(), None)
    }

    /// Random initial values of a parameter: normal, cut at two standard deviations, as Hugging Face's `ModernBertModel` draws
    /// them; each from the parameter's name and the seed, so that they depend on no order of creation.
    pub fn initial(&self, spec: &ParamSpec, seed: u64) -> Vec<f32> {
        let len = spec.place.len();
        if spec.name.ends_with(".bias") {
            return vec![0.0; len];
        }
        if spec.shape.len() == 1 {
            return vec![1.0; len];
        }
        let c = &self.config;
        let deviation = if spec.name.ends_with(".Wo.weight") {
            c.initializer_range / libm::sqrt(2.0 * self.layers.len() as f64)
        } else {
            c.initializer_range
        };
        let key = key_of_name(seed, &spec.name);
        let draw = |i: u64| {
            // A draw beyond the cut is drawn again, from numbers that belong to no other element.
            let tries = (0..).map(|t: u64| normal(key, i + t * len as u64));
            tries.into_iter().find(|v| libm::fabs(*v) <= CUTOFF).expect("one of many draws is near")
        };
        let mut values: Vec<f32> =
            (0..len as u64).into_par_iter().map(|i| (deviation * draw(i)) as f32).collect();
        if let Some(pad) = c.pad_token_id.filter(|_| spec.place == self.words) {
            values[pad as usize * c.hidden_size..][..c.hidden_size].fill(0.0);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_layout() {
        let base = ModernBertConfig::base();
        let every =
            ModernBertConfig { norm_bias: true, attention_bias: true, mlp_bias: true, ..base.clone() };
        for config in [base.clone(), every] {
            let mut layout = Layout::default();
            ModernBert::new(config.clone(), &mut layout);
            assert_eq!(config.parameters(), layout.len() as u128);
        }
        // 149 million (Warner et al., 2024), of which the head of its language model has 0.64 million.
        assert_eq!(base.parameters() / 100_000, 1490);
    }

    #[test]
    fn initial_values_are_cut_and_belong_to_their_name() {
        let config = ModernBertConfig { vocab_size: 300, pad_token_id: Some(7), ..ModernBertConfig::base() };
        let mut layout = Layout::default();
        let model = ModernBert::new(config, &mut layout);
        let words = model.initial(&layout.specs()[0], 5);
        assert!(words.iter().all(|v| v.abs() <= 0.04) && words.iter().any(|v| v.abs() > 0.035));
        assert!(words[7 * 768..8 * 768].iter().all(|&v| v == 0.0) && words[0] != 0.0);
        assert_eq!(words, model.initial(&layout.specs()[0], 5));
        assert_ne!(words, model.initial(&layout.specs()[0], 6));
        let output = layout.specs().iter().find(|s| s.name == "layers.3.attn.Wo.weight").unwrap();
        let most = model.initial(output, 5).into_iter().fold(0.0f32, |m, v| m.max(v.abs()));
        assert!(most <= 0.04 / 44f32.sqrt() * 1.0001, "{most}");
    }
}
