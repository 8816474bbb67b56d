//! The kernels that BERT-like encoders need beside those of T5: biases, LayerNorm, rotary positions, pooling, unit rows.

use super::{Activation, Device, MaxSimShape, MaxSimSide, Span, View, ViewMut};
use crate::random::Dropout;

/// Part of every [`Device`]. All matrices are row-major; `+=` is said where a kernel adds.
///
/// The parameters of a norm lie together, the weight and then the bias if there is one: `norm.len` is the width or twice that.
pub trait EncoderKernels: Sized {
    /// `rows += table[ids]`, `table` of `[_, width]`.
    fn gather_add(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>)
    where
        Self: Device;
    /// `x += bias` for every row of `bias.len` elements.
    fn add_bias(&self, x: ViewMut<'_, Self>, bias: View<'_, Self>)
    where
        Self: Device;
    /// `total += ` the sum of the rows of `x`, each of `total.len` elements; over fixed blocks of rows, in order.
    fn sum_rows(&self, x: View<'_, Self>, total: ViewMut<'_, Self>)
    where
        Self: Device;

    /// LayerNorm (Ba et al., 2016) of every row of `width` elements: `y = (x - mean) r weight + bias`,
    /// `r = 1 / sqrt(mean((x - mean)^2) + eps)`.
    fn layer_norm(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        y: ViewMut<'_, Self>,
    ) where
        Self: Device;
    /// Backward of [`EncoderKernels::layer_norm`]: `dx += ...`, `dnorm += ...`.
    fn layer_norm_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
        dnorm: ViewMut<'_, Self>,
    ) where
        Self: Device;
    /// The end of a sub-layer in one pass: `x = n + dropout(x + bias)`, where `n` is `residual`, or with `norm` (parameters
    /// and eps) LayerNorm of its rows.
    fn bias_residual(
        &self,
        x: ViewMut<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        residual: View<'_, Self>,
        norm: Option<(View<'_, Self>, f64)>,
        dropout: Option<Dropout>,
    ) where
        Self: Device;
    /// `d = dropout(dy)`, `dbias += ` the sum of the rows of `d`: what goes back into a sub-layer.
    fn bias_residual_backward(
        &self,
        dy: View<'_, Self>,
        width: usize,
        dropout: Dropout,
        d: ViewMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) where
        Self: Device;

    /// As [`Device::activation`] of `u + bias`.
    fn bias_activation(
        &self,
        u: View<'_, Self>,
        bias: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        y: ViewMut<'_, Self>,
    ) where
        Self: Device;
    /// Backward of [`EncoderKernels::bias_activation`]: `du = ...`, `dbias += ...`.
    fn bias_activation_backward(
        &self,
        u: View<'_, Self>,
        bias: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        dy: View<'_, Self>,
        du: ViewMut<'_, Self>,
        dbias: ViewMut<'_, Self>,
    ) where
        Self: Device;

    /// Rotates the first `columns` elements of every row of `stride` elements, head by head, by the angles of the row's
    /// position; by their negative when `back` (that is the backward).
    fn rotate(
        &self,
        x: ViewMut<'_, Self>,
        stride: usize,
        columns: usize,
        rotary: &Rotary,
        positions: &[u32],
        back: bool,
    ) where
        Self: Device;

    /// `y[s] = ` mean of the rows of span s, rows of `width` elements; zero where the span is empty.
    fn span_means(&self, x: View<'_, Self>, width: usize, spans: &[Span], y: ViewMut<'_, Self>)
    where
        Self: Device;
    /// Backward of [`EncoderKernels::span_means`]: `dx += ...`.
    fn span_means_backward(&self, dy: View<'_, Self>, width: usize, spans: &[Span], dx: ViewMut<'_, Self>)
    where
        Self: Device;
    /// Rows of unit length: `y = x / max(|x|, least)`.
    fn normalize(&self, x: View<'_, Self>, width: usize, least: f64, y: ViewMut<'_, Self>)
    where
        Self: Device;
    /// Backward of [`EncoderKernels::normalize`]: `dx += ...`.
    fn normalize_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        least: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
    ) where
        Self: Device;

    /// The scores of the pairs of `shape`, rows of `width` elements: sums over the query's rows, in order, of the greatest inner
    /// product with a row of the document. Gives for every pair and row of its query the first best row, counted from the document's
    /// first; [`super::NO_ROW`] where there is none, or where the document has a floor and 0 is
    /// greater.
    fn max_sim(
        &self,
        queries: View<'_, Self>,
        documents: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        scores: ViewMut<'_, Self>,
    ) -> Vec<u32>
    where
        Self: Device;
    /// Backward of [`EncoderKernels::max_sim`] for the rows of one side: `d += ...`, where `others` are the other side's rows, `slopes`
    /// the gradient of the scores and `best` what the forward gave. What reaches a row is added in the order of pairs.
    fn max_sim_backward(
        &self,
        others: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        best: &[u32],
        slopes: View<'_, Self>,
        side: MaxSimSide,
        d: ViewMut<'_, Self>,
    ) where
        Self: Device;
}

/// Angles of rotary positions (Su et al., 2021): element i of the first half of a head and element i of the second are turned
/// by `position / theta^(2 i / head_dim)`, as Hugging Face's models pair them.
pub struct Rotary {
    /// Half the width of a head.
    pub half: usize,
    /// Positions from 0 on that there are angles for.
    pub positions: usize,
    /// Cosines, `[positions, half]`.
    pub cos: Vec<f64>,
    /// Sines, `[positions, half]`.
    pub sin: Vec<f64>,
}

impl Rotary {
    /// Angles for positions 0 to `positions - 1` of heads of an even width `head_dim`.
    pub fn new(theta: f64, head_dim: usize, positions: usize) -> Rotary {
        assert!(head_dim.is_multiple_of(2), "rotary positions need heads of an even width");
        let half = head_dim / 2;
        let rates: Vec<f64> =
            (0..half).map(|i| libm::pow(theta, -2.0 * i as f64 / head_dim as f64)).collect();
        let angles = || (0..positions).flat_map(|p| rates.iter().map(move |r| p as f64 * r));
        let (cos, sin) = (angles().map(libm::cos).collect(), angles().map(libm::sin).collect());
        Rotary { half, positions, cos, sin }
    }
}
