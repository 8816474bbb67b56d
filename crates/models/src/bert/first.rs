//! States of some layers; and the states of first tokens alone: what a classifier reads of the last layer. That layer needs keys and values of all tokens, but queries,
//! and all that follows attention, of one token a text: about three quarters of its work are saved, in the backward too.

use std::rc::Rc;

use tercio_engine::{AttentionShape, Device, LayerNorm, Param, Span, Tape, Var};

use super::{ATTENTION, Bert, Layer, SITES};

impl Bert {
    /// Hidden states after each of the layers `counts` (0: the embedding), which rise; `[tokens, hidden_size]` each. Layers beyond the last of
    /// these are not computed.
    pub fn encode_states<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        counts: &[usize],
        recompute: bool,
    ) -> Vec<Var<D>> {
        let shape = self.shape(spans, spans);
        let (mut x, mut done, mut states) = (self.begin(tape, ids, None, spans), 0, Vec::new());
        for &count in counts {
            x = self.through(tape, x, done..count, &shape, recompute);
            done = count;
            states.push(match count.checked_sub(1) {
                Some(last) => tape.layer_norm(&x, self.layers[last].norm, None),
                None => x.clone(),
            });
        }
        states
    }

    /// The last layer's state of every text's first token, `[spans, hidden_size]`: the same as those rows of [`Bert::encode`], without
    /// dropout bit for bit. No text may be empty.
    pub fn encode_first<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let first: Rc<[u32]> = spans.iter().map(|s| s.start).collect();
        let Some((last, before)) = self.layers.split_last() else {
            let states = self.encode(tape, ids, None, spans, recompute);
            return tape.rows(&states, &first);
        };
        let x = self.encode_layers(tape, ids, None, spans, spans, before.len(), recompute);
        let norm = before.last().map(|layer| layer.norm);
        let site = before.len() as u64 * SITES;
        let keys: Rc<[Span]> = spans.into();
        let block = move |tape: &mut Tape<'p, D>, v: &[Var<D>]| {
            self.last_layer(tape, last, norm, &v[0], &keys, &first, site)
        };
        let x = if recompute { tape.recompute(&[&x], block) } else { block(tape, &[x]) };
        tape.layer_norm(&x, last.norm, None)
    }

    /// As a layer, with queries at the rows `first` only.
    fn last_layer<D: Device>(
        &self,
        tape: &mut Tape<'_, D>,
        layer: &Layer,
        norm: Option<LayerNorm>,
        x: &Var<D>,
        keys: &[Span],
        first: &[u32],
        site: u64,
    ) -> Var<D> {
        let c = &self.config;
        let d = c.hidden_size;
        // Query, key and value lie on top of each other.
        let part = |p: Param, elements: usize, from: usize, to: usize| Param {
            start: p.start + from * elements,
            rows: (to - from) * elements / p.columns,
            ..p
        };
        let (weight, bias) = (layer.qkv.weight, layer.qkv.bias);
        let of = |from: usize, to: usize| (part(weight, d * d, from, to), part(bias, d, from, to));
        let ((query_weight, query_bias), (weight, bias)) = (of(0, 1), of(1, 3));
        let all = tape.normed(x, norm);
        let key_value = tape.linear_bias(&all, weight, Some(bias));
        drop(all);
        let x = tape.rows(x, first);
        let n = tape.normed(&x, norm);
        let query = tape.linear_bias(&n, query_weight, Some(query_bias));
        let head_dim = d / c.num_attention_heads;
        let shape = AttentionShape {
            heads: c.num_attention_heads,
            head_dim,
            queries: (0..first.len() as u32).map(|i| Span { start: i, end: i + 1 }).collect(),
            keys: keys.to_vec(),
            first_query: 0,
            causal: false,
            window: None,
            scale: 1.0 / libm::sqrt(head_dim as f64),
            buckets: None,
            dropout: tape.dropout(site + ATTENTION, c.attention_dropout),
        };
        let a = tape.cross_attention(&query, &key_value, None, &Rc::new(shape));
        drop((query, key_value));
        self.after_attention(tape, layer, &a, &n, site)
    }
}
