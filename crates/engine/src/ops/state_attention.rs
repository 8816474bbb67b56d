//! Cross-attention over hidden states that forms neither keys nor values:
//! `y_h = dropout(softmax(scale (q_h K_h) states^T + bias)) states V_h^T`, `K_h`, `V_h` the heads' weights.
//!
//! The mathematics of keys `states K^T` and values `states V^T`, in another order of products: a few queries meet the states
//! themselves, instead of all states meeting the weights. With t queries of h heads of d columns that is
//! about d / t times less work, and no tensor of keys and values is kept.

use std::rc::Rc;

use crate::device::{AttentionShape, Device};
use crate::params::Param;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

struct StateAttention<D: Device> {
    query: Var<D>,
    states: Var<D>,
    key: Param,
    value: Param,
    bias: Option<Param>,
    shape: Rc<AttentionShape>,
    context: Tensor<D>,
    log_sum: Tensor<D>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// `query` is `[query tokens, heads * head_dim]`, `states` `[key tokens, width]`; `key` and `value` are
    /// `[heads * head_dim, width]`. Result: `[query tokens, heads * head_dim]`. Spans of keys must not overlap.
    pub fn state_attention(
        &mut self,
        query: &Var<D>,
        states: &Var<D>,
        key: Param,
        value: Param,
        bias: Option<Param>,
        shape: &Rc<AttentionShape>,
    ) -> Var<D> {
        let (device, heads, width) = (self.device.clone(), shape.heads, states.tensor.columns);
        let rows = query.tensor.rows;
        assert_eq!(query.tensor.columns, heads * shape.head_dim);
        assert!(key.columns == width && value.columns == width && key.rows == query.tensor.columns);
        assert!(bias.is_none() || shape.buckets.is_some(), "a bias table is read through `shape.buckets`");
        let mut u = Tensor::scratch(&device, rows, heads * width);
        device.heads_expand(query.tensor.view(), self.parameter(key), heads, width, u.view_mut());
        let mut context = Tensor::scratch(&device, rows, heads * width);
        let mut log_sum = Tensor::scratch(&device, rows, heads);
        let (c, l) = (context.view_mut(), log_sum.view_mut());
        let table = bias.map(|b| self.parameter(b));
        device.state_attention(u.view(), states.tensor.view(), width, table, shape, c, l);
        drop(u);
        let mut y = Tensor::scratch(&device, rows, query.tensor.columns);
        device.heads_reduce(context.view(), self.parameter(value), heads, width, y.view_mut());
        let y = self.input(y);
        let output = y.id;
        self.push(|| {
            let (query, states, shape) = (query.clone(), states.clone(), shape.clone());
            Box::new(StateAttention { query, states, key, value, bias, shape, context, log_sum, output })
        });
        y
    }
}

impl<'p, D: Device> Node<'p, D> for StateAttention<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        [self.key, self.value].into_iter().chain(self.bias).for_each(each);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(dy) = gradients.take(self.output) else { return };
        let (device, heads, width) = (&tape.device, self.shape.heads, self.states.tensor.columns);
        let q = &self.query.tensor;
        let mut dc = Tensor::scratch(device, q.rows, heads * width);
        device.heads_expand(dy.view(), tape.parameter(self.value), heads, width, dc.view_mut());
        let dvalue = gradients.parameters.view_mut(self.value);
        device.heads_gradient(dy.view(), self.context.view(), heads, width, dvalue);
        let mut u = Tensor::scratch(device, q.rows, heads * width);
        device.heads_expand(q.view(), tape.parameter(self.key), heads, width, u.view_mut());
        let mut du = Tensor::scratch(device, q.rows, heads * width);
        // The slot is taken out and put back so that values and parameters can be borrowed side by side.
        let states = &self.states.tensor;
        let mut dstates = gradients
            .take(self.states.id)
            .unwrap_or_else(|| Tensor::zeros(device, states.rows, states.columns));
        device.state_attention_backward(
            u.view(),
            states.view(),
            width,
            self.bias.map(|b| tape.parameter(b)),
            &self.shape,
            self.context.view(),
            self.log_sum.view(),
            dc.view(),
            du.view_mut(),
            dstates.view_mut(),
            self.bias.map(|b| gradients.parameters.view_mut(b)),
        );
        gradients.add(self.states.id, dstates);
        device.heads_gradient(q.view(), du.view(), heads, width, gradients.parameters.view_mut(self.key));
        let mut dq = Tensor::scratch(device, q.rows, q.columns);
        device.heads_reduce(du.view(), tape.parameter(self.key), heads, width, dq.view_mut());
        gradients.add(self.query.id, dq);
    }
}
