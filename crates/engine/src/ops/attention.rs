//! Packed attention: each sequence's queries over its own keys, `y = dropout(softmax(scale q k + bias)) v`.
//! Self-attention takes query, key and value from one tensor, cross-attention from two.
//! Weights are never kept: backward computes them again from the stored log-sums (Dao et al., 2022).

use std::rc::Rc;

use crate::device::{AttentionShape, Device, Heads, HeadsMut, Span};
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

enum Inputs<D: Device> {
    Fused(Var<D>),
    Split { query: Var<D>, key_value: Var<D> },
}

impl<D: Device> Inputs<D> {
    fn heads(&self) -> Heads<'_, D> {
        match self {
            Inputs::Fused(x) => Heads::Fused(x.tensor.view()),
            Inputs::Split { query, key_value } => {
                Heads::Split { query: query.tensor.view(), key_value: key_value.tensor.view() }
            }
        }
    }
}

struct Attention<D: Device> {
    inputs: Inputs<D>,
    bias: Option<Param>,
    shape: Rc<AttentionShape>,
    y: Var<D>,
    log_sum: Tensor<D>,
}

impl<'p, D: Device> Tape<'p, D> {
    /// Self-attention, where a sequence may have fewer keys than queries; `x` is `[tokens, 3 * heads * head_dim]` (query, key, value), `bias` a table
    /// `[buckets, heads]` read through `shape.buckets`. Result: `[tokens, heads * head_dim]`.
    pub fn self_attention(&mut self, x: &Var<D>, bias: Option<Param>, shape: &Rc<AttentionShape>) -> Var<D> {
        assert_eq!(x.tensor.columns, 3 * shape.heads * shape.head_dim);
        self.attend(Inputs::Fused(x.clone()), x.tensor.rows, bias, shape)
    }
    /// Cross-attention of `query` `[query tokens, heads * head_dim]` over `key_value`
    /// `[key tokens, 2 * heads * head_dim]`.
    pub fn cross_attention(
        &mut self,
        query: &Var<D>,
        key_value: &Var<D>,
        bias: Option<Param>,
        shape: &Rc<AttentionShape>,
    ) -> Var<D> {
        assert_eq!(2 * query.tensor.columns, key_value.tensor.columns);
        let inputs = Inputs::Split { query: query.clone(), key_value: key_value.clone() };
        self.attend(inputs, query.tensor.rows, bias, shape)
    }
    fn attend(
        &mut self,
        inputs: Inputs<D>,
        rows: usize,
        bias: Option<Param>,
        shape: &Rc<AttentionShape>,
    ) -> Var<D> {
        assert!(bias.is_none() || shape.buckets.is_some(), "a bias table is read through `shape.buckets`");
        let device = self.device.clone();
        let mut y = Tensor::scratch(&device, rows, shape.heads * shape.head_dim);
        let mut log_sum = Tensor::scratch(&device, rows, shape.heads);
        let table = bias.map(|b| self.parameter(b));
        device.attention(inputs.heads(), table, shape, y.view_mut(), log_sum.view_mut());
        let y = self.input(y);
        let kept = y.clone();
        self.push(|| Box::new(Attention { inputs, bias, shape: shape.clone(), y: kept, log_sum }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Attention<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        self.bias.into_iter().for_each(each);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.y.id) else {
            return;
        };
        let device = &tape.device;
        let table = self.bias.map(|b| tape.parameter(b));
        // The kernel writes the rows of spans; a row of none has no gradient.
        let (queries, keys) = (&self.shape.queries, &self.shape.keys);
        let fresh = |v: &Var<D>, whole: bool| {
            let t = &v.tensor;
            if whole {
                Tensor::scratch(device, t.rows, t.columns)
            } else {
                Tensor::zeros(device, t.rows, t.columns)
            }
        };
        let covers = |spans: &[Span], v: &Var<D>| spans.iter().map(Span::len).sum::<usize>() == v.tensor.rows;
        let mut grads: Vec<Tensor<D>> = match &self.inputs {
            Inputs::Fused(x) => vec![fresh(x, covers(queries, x) && covers(keys, x))],
            Inputs::Split { query, key_value } => {
                vec![fresh(query, covers(queries, query)), fresh(key_value, covers(keys, key_value))]
            }
        };
        let dx = match grads.as_mut_slice() {
            [x] => HeadsMut::Fused(x.view_mut()),
            [query, key_value] => {
                HeadsMut::Split { query: query.view_mut(), key_value: key_value.view_mut() }
            }
            _ => unreachable!("one or two inputs"),
        };
        device.attention_backward(
            self.inputs.heads(),
            table,
            &self.shape,
            self.y.tensor.view(),
            self.log_sum.view(),
            dy.view(),
            dx,
            self.bias.map(|b| gradients.parameters.view_mut(b)),
        );
        let vars = match &self.inputs {
            Inputs::Fused(x) => vec![x.id],
            Inputs::Split { query, key_value } => vec![query.id, key_value.id],
        };
        for (id, g) in vars.into_iter().zip(grads) {
            gradients.add(id, g);
        }
    }
}
