//! LayerNorm (Ba et al., 2016): `y = dropout((x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias)`.
//!
//! [`Normed`] stands for normalised rows that are not kept: the operations that read them compute them again from `x`, add to one
//! gradient, and LayerNorm's backward runs once. So a post-norm model keeps its un-normalised sums, one tensor a sub-layer.

use std::rc::Rc;

use crate::device::{Device, View};
use crate::params::Param;
use crate::random::Dropout;
use crate::tape::{Gradients, Node, Tape, Var};
use crate::tensor::Tensor;

/// The parameters of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// Weight and bias as a matrix of two rows, or the weight alone.
    pub place: Param,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    /// A norm whose bias, if it has one, lies right behind its weight.
    ///
    /// # Panics
    /// When it does not (an error of the model's code).
    pub fn new(weight: Param, bias: Option<Param>, eps: f64) -> LayerNorm {
        let place = bias.map_or(weight, |bias| Param::adjacent(&[weight, bias]));
        LayerNorm { place, eps }
    }
}

/// Rows `x`, or their LayerNorm; the latter is computed where it is read and kept nowhere.
pub struct Normed<D: Device> {
    pub(crate) x: Var<D>,
    pub(crate) norm: Option<LayerNorm>,
    /// The value that gradients are added to.
    pub(crate) id: usize,
}

impl<D: Device> Clone for Normed<D> {
    fn clone(&self) -> Self {
        Normed { x: self.x.clone(), norm: self.norm, id: self.id }
    }
}

impl<D: Device> From<&Var<D>> for Normed<D> {
    fn from(x: &Var<D>) -> Self {
        Normed { x: x.clone(), norm: None, id: x.id }
    }
}

impl<D: Device> Normed<D> {
    /// The rows' values.
    pub(crate) fn value(&self, tape: &Tape<'_, D>) -> Rc<Tensor<D>> {
        let Some(norm) = self.norm else { return self.x.tensor.clone() };
        Rc::new(normalised(tape, &self.x.tensor, norm))
    }
    /// Parameters and eps of the norm, where there is one.
    pub(crate) fn parameters<'p>(&self, tape: &Tape<'p, D>) -> Option<(View<'p, D>, f64)> {
        self.norm.map(|norm| (tape.parameter(norm.place), norm.eps))
    }
}

fn normalised<D: Device>(tape: &Tape<'_, D>, x: &Tensor<D>, norm: LayerNorm) -> Tensor<D> {
    let mut y = Tensor::scratch(&tape.device, x.rows, x.columns);
    tape.device.layer_norm(x.view(), x.columns, tape.parameter(norm.place), norm.eps, y.view_mut());
    y
}

struct Norm<D: Device> {
    x: Var<D>,
    norm: LayerNorm,
    dropout: Option<Dropout>,
    output: usize,
}

impl<'p, D: Device> Tape<'p, D> {
    /// LayerNorm of every row, to be read by operations that take [`Normed`]; `None`: the rows as they are.
    pub fn normed(&mut self, x: &Var<D>, norm: Option<LayerNorm>) -> Normed<D> {
        let Some(given) = norm else { return x.into() };
        let output = self.slot();
        self.push(|| Box::new(Norm { x: x.clone(), norm: given, dropout: None, output }));
        Normed { x: x.clone(), norm, id: output }
    }
    /// LayerNorm of every row, then dropout, as a tensor.
    pub fn layer_norm(&mut self, x: &Var<D>, norm: LayerNorm, dropout: Option<Dropout>) -> Var<D> {
        let mut y = normalised(self, &x.tensor, norm);
        if let Some(d) = dropout {
            self.device.dropout(y.view_mut(), x.tensor.columns, d);
        }
        let y = self.input(y);
        let output = y.id;
        self.push(|| Box::new(Norm { x: x.clone(), norm, dropout, output }));
        y
    }
}

impl<'p, D: Device> Node<'p, D> for Norm<D> {
    fn writes(&self, each: &mut dyn FnMut(Param)) {
        each(self.norm.place);
    }
    fn backward(self: Box<Self>, tape: &Tape<'p, D>, gradients: &mut Gradients<'_, D>) {
        let Some(mut dy) = gradients.take(self.output) else {
            return;
        };
        let (device, x) = (&tape.device, &self.x.tensor);
        if let Some(d) = self.dropout {
            device.dropout(dy.view_mut(), x.columns, d);
        }
        // The slot is taken out and put back so that values and parameters can be borrowed side by side.
        let mut dx = gradients.take(self.x.id).unwrap_or_else(|| Tensor::zeros(device, x.rows, x.columns));
        let LayerNorm { place, eps } = self.norm;
        device.layer_norm_backward(
            x.view(),
            x.columns,
            tape.parameter(place),
            eps,
            dy.view(),
            dx.view_mut(),
            gradients.parameters.view_mut(place),
        );
        gradients.add(self.x.id, dx);
    }
}
