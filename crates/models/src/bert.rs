//! BERT and its relatives as encoders: absolute positions, attention over the whole text, post-norm layers.
//!
//! Source: Devlin et al. (2019) for BERT, Sanh et al. (2019) for DistilBERT, Liu et al. (2019) and Conneau et al. (2020) for RoBERTa
//! and XLM-R; names as in Hugging Face. Texts are packed: one flat row of tokens, a span per text; nothing is padded. What flows
//! between layers is the sum before the norm: the norm is computed where it is read (`tercio_engine::Normed`).

mod config;
mod first;

use std::ops::Range;
use std::rc::Rc;

use rayon::prelude::*;
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{
    AttentionShape, Device, Hidden, LayerNorm, Layout, Normed, Param, ParamSpec, Span, Tape, Var, positions,
};

pub use config::{BertConfig, BertFamily};

#[derive(Clone, Copy)]
struct Linear {
    weight: Param,
    bias: Param,
}

struct Layer {
    /// Query, key and value on top of each other.
    qkv: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    input: Linear,
    output: Linear,
    norm: LayerNorm,
}

/// The shapes of an encoder and where each parameter lies; the values are in an arena.
pub struct Bert {
    /// The configuration.
    pub config: BertConfig,
    words: Param,
    positions: Param,
    types: Option<Param>,
    embedding_norm: LayerNorm,
    layers: Vec<Layer>,
}

// Sites of dropout; a layer takes a block of four.
const SITES: u64 = 4;
const ATTENTION: u64 = 0;
const ATTENTION_OUT: u64 = 1;
const OUT: u64 = 2;
const EMBEDDING: u64 = 1 << 19;

/// What Hugging Face calls the parts of a layer, in the order of [`Layer`]; query, key and value apart.
fn part_names(family: BertFamily) -> [&'static str; 8] {
    match family {
        BertFamily::DistilBert => [
            "attention.q_lin",
            "attention.k_lin",
            "attention.v_lin",
            "attention.out_lin",
            "sa_layer_norm",
            "ffn.lin1",
            "ffn.lin2",
            "output_layer_norm",
        ],
        _ => [
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "attention.output.LayerNorm",
            "intermediate.dense",
            "output.dense",
            "output.LayerNorm",
        ],
    }
}

impl Bert {
    /// Adds the parameters to a layout, with the names of Hugging Face's bare encoder.
    pub fn new(config: BertConfig, layout: &mut Layout) -> Bert {
        let (d, ff, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let table = |layout: &mut Layout, name: &str, rows: usize| {
            layout.add(format!("embeddings.{name}.weight"), &[rows, d])
        };
        let norm = |layout: &mut Layout, name: &str| {
            let weight = layout.add(format!("{name}.weight"), &[d]);
            let bias = layout.add(format!("{name}.bias"), &[d]);
            LayerNorm::new(weight, Some(bias), eps)
        };
        let linear = |layout: &mut Layout, name: &str, rows: usize, columns: usize| {
            let weight = layout.add(format!("{name}.weight"), &[rows, columns]);
            Linear { weight, bias: layout.add(format!("{name}.bias"), &[rows]) }
        };
        let words = table(layout, "word_embeddings", config.vocab_size);
        let positions = table(layout, "position_embeddings", config.max_position_embeddings);
        let types = (config.type_vocab_size > 0)
            .then(|| table(layout, "token_type_embeddings", config.type_vocab_size));
        let embedding_norm = norm(layout, "embeddings.LayerNorm");
        let stack = if config.family == BertFamily::DistilBert { "transformer" } else { "encoder" };
        let layers = (0..config.num_hidden_layers).map(|i| {
            let [q, k, v, attention_output, attention_norm, input, output, last_norm] =
                part_names(config.family).map(|part| format!("{stack}.layer.{i}.{part}"));
            let qkv = [q, k, v];
            // Weights lie together, so that they are one product; then the biases.
            let weights = qkv.each_ref().map(|name| layout.add(format!("{name}.weight"), &[d, d]));
            let biases = qkv.each_ref().map(|name| layout.add(format!("{name}.bias"), &[d]));
            Layer {
                qkv: Linear { weight: Param::adjacent(&weights), bias: Param::adjacent(&biases) },
                attention_output: linear(layout, &attention_output, d, d),
                attention_norm: norm(layout, &attention_norm),
                input: linear(layout, &input, ff, d),
                output: linear(layout, &output, d, ff),
                norm: norm(layout, &last_norm),
            }
        });
        let layers = layers.collect();
        Bert { words, positions, types, embedding_norm, layers, config }
    }

    /// Hidden states of every text, `[tokens, hidden_size]`. `spans` are the texts of the flat `ids`, none longer than
    /// [`BertConfig::max_tokens`]; `types` are token types, all 0 where there are none; `recompute` keeps only the input of each
    /// layer for the backward.
    pub fn encode<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        self.encode_keyed(tape, ids, types, spans, spans, recompute)
    }

    /// As [`Bert::encode`], where the tokens of a text attend to its rows `keys` only.
    pub fn encode_keyed<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
        keys: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let x = self.encode_layers(tape, ids, types, spans, keys, self.layers.len(), recompute);
        match self.layers.last() {
            Some(layer) => tape.layer_norm(&x, layer.norm, None),
            None => x,
        }
    }

    /// What the layers below `end` give, before the last one's norm.
    fn encode_layers<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
        keys: &[Span],
        end: usize,
        recompute: bool,
    ) -> Var<D> {
        let x = self.begin(tape, ids, types, spans);
        self.through(tape, x, 0..end, &self.shape(spans, keys), recompute)
    }

    fn shape(&self, spans: &[Span], keys: &[Span]) -> Rc<AttentionShape> {
        let c = &self.config;
        let head_dim = c.hidden_size / c.num_attention_heads;
        Rc::new(AttentionShape {
            heads: c.num_attention_heads,
            head_dim,
            queries: spans.to_vec(),
            keys: keys.to_vec(),
            first_query: 0,
            causal: false,
            window: None,
            scale: 1.0 / libm::sqrt(head_dim as f64),
            buckets: None,
            dropout: None,
        })
    }

    /// What the first layer reads.
    fn begin<D: Device>(
        &self,
        tape: &mut Tape<'_, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
    ) -> Var<D> {
        let x = self.embed(tape, ids, types, spans);
        let drop = tape.dropout(EMBEDDING, self.config.hidden_dropout);
        tape.layer_norm(&x, self.embedding_norm, drop)
    }

    /// From what the layers before `range` gave to what its last one gives, before its norm.
    fn through<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        mut x: Var<D>,
        range: Range<usize>,
        shape: &Rc<AttentionShape>,
        recompute: bool,
    ) -> Var<D> {
        for i in range {
            // The first layer reads the embedding, the others the sum of the layer before.
            let norm = i.checked_sub(1).map(|before| self.layers[before].norm);
            let (layer, shape, site) = (&self.layers[i], shape.clone(), i as u64 * SITES);
            let block = move |tape: &mut Tape<'p, D>, v: &[Var<D>]| {
                self.layer(tape, layer, norm, &v[0], &shape, site)
            };
            x = if recompute { tape.recompute(&[&x], block) } else { block(tape, &[x]) };
        }
        x
    }

    fn embed<D: Device>(
        &self,
        tape: &mut Tape<'_, D>,
        ids: &[u32],
        types: Option<&[u32]>,
        spans: &[Span],
    ) -> Var<D> {
        let pad = self.config.pad_token_id;
        let places = match pad.filter(|_| self.config.family.counts_from_padding()) {
            Some(pad) => positions_from(pad, ids, spans).into(),
            None => positions(spans, ids.len()),
        };
        let first = vec![0; if types.is_none() && self.types.is_some() { ids.len() } else { 0 }];
        let mut tables = vec![(self.words, ids, pad)];
        tables.extend(self.types.map(|table| (table, types.unwrap_or(&first), None)));
        let frozen = pad.filter(|_| self.config.family.counts_from_padding());
        tables.push((self.positions, &places, frozen));
        tape.embedding_sum(&tables)
    }

    fn layer<D: Device>(
        &self,
        tape: &mut Tape<'_, D>,
        layer: &Layer,
        norm: Option<LayerNorm>,
        x: &Var<D>,
        shape: &AttentionShape,
        site: u64,
    ) -> Var<D> {
        let c = &self.config;
        let n = tape.normed(x, norm);
        let qkv = tape.linear_bias(&n, layer.qkv.weight, Some(layer.qkv.bias));
        let shape =
            AttentionShape { dropout: tape.dropout(site + ATTENTION, c.attention_dropout), ..shape.clone() };
        let a = tape.self_attention(&qkv, None, &Rc::new(shape));
        // The backward may not need it; then its memory serves the next product.
        drop(qkv);
        self.after_attention(tape, layer, &a, &n, site)
    }

    /// The layer behind attention, which gave `a`; `n` is what attention read.
    fn after_attention<D: Device>(
        &self,
        tape: &mut Tape<'_, D>,
        layer: &Layer,
        a: &Var<D>,
        n: &Normed<D>,
        site: u64,
    ) -> Var<D> {
        let c = &self.config;
        // DistilBERT drops nothing here.
        let p = if c.family == BertFamily::DistilBert { 0.0 } else { c.hidden_dropout };
        let dropout = tape.dropout(site + ATTENTION_OUT, p);
        let Linear { weight, bias } = layer.attention_output;
        let s = tape.linear_bias_residual(a, weight, Some(bias), n, dropout);
        let n = tape.normed(&s, Some(layer.attention_norm));
        let u = tape.linear_bias(&n, layer.input.weight, None);
        let hidden = Hidden { bias: Some(layer.input.bias), kind: c.activation, gated: false, dropout: None };
        let dropout = tape.dropout(site + OUT, c.hidden_dropout);
        tape.feed_forward_end(&u, hidden, layer.output.weight, Some(layer.output.bias), &n, dropout)
    }

    /// Random initial values of a parameter: normal, norms one, biases and the row of padding zero, as Hugging Face draws them;
    /// each from the parameter's name and the seed, so that they depend on no order of creation.
    pub fn initial(&self, spec: &ParamSpec, seed: u64) -> Vec<f32> {
        let (len, c) = (spec.place.len(), &self.config);
        if spec.shape.len() == 1 {
            let value = if spec.name.ends_with(".bias") { 0.0 } else { 1.0 };
            return vec![value; len];
        }
        let key = key_of_name(seed, &spec.name);
        let mut values: Vec<f32> =
            (0..len as u64).into_par_iter().map(|i| (c.initializer_range * normal(key, i)) as f32).collect();
        let padded =
            spec.place == self.words || (spec.place == self.positions && c.family.counts_from_padding());
        if let Some(pad) = c.pad_token_id.filter(|_| padded) {
            let d = c.hidden_size;
            // A position table may be shorter than the vocabulary.
            values.chunks_mut(d).skip(pad as usize).take(1).for_each(|row| row.fill(0.0));
        }
        values
    }
}

/// RoBERTa's positions: tokens count from `pad + 1` on, padding stands at `pad` and does not count.
fn positions_from(pad: u32, ids: &[u32], spans: &[Span]) -> Vec<u32> {
    let mut places = vec![pad; ids.len()];
    for span in spans {
        let mut next = pad;
        for i in span.start as usize..span.end as usize {
            if ids[i] != pad {
                next += 1;
                places[i] = next;
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_layout() {
        for family in BertFamily::ALL {
            let types = if family == BertFamily::DistilBert { 0 } else { 2 };
            let config =
                BertConfig { family, type_vocab_size: types, num_hidden_layers: 3, ..BertConfig::base() };
            let mut layout = Layout::default();
            Bert::new(config.clone(), &mut layout);
            assert_eq!(config.parameters(), layout.len() as u128);
        }
        // BERT-base has 109.5 million, of which the pooler's 0.59 million are not here (Devlin et al., 2019: "110M").
        assert_eq!(BertConfig::base().parameters(), 108_891_648);
    }

    #[test]
    fn positions_of_roberta_skip_padding() {
        let spans = Span::from_offsets(&[0, 4, 6]);
        assert_eq!(positions_from(1, &[0, 7, 1, 9, 0, 2], &spans), [2, 3, 1, 4, 2, 3]);
    }
}
