//! The CPU's side of [`EncoderKernels`]: from views to slices.

use super::{Cpu, bias, elementwise, layer_norm, max_sim, pooling};
use crate::device::{Activation, EncoderKernels, MaxSimShape, MaxSimSide, Rotary, Span, View, ViewMut};
use crate::random::Dropout;

impl EncoderKernels for Cpu {
    fn gather_add(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        elementwise::gather_add(self.isa(), table.slice(), width, ids, rows.slice());
    }
    fn add_bias(&self, x: ViewMut<'_, Self>, bias: View<'_, Self>) {
        bias::add_bias(self.isa(), x.slice(), bias.slice());
    }
    fn sum_rows(&self, x: View<'_, Self>, total: ViewMut<'_, Self>) {
        bias::sum_rows(self.isa(), x.slice(), total.slice());
    }
    fn layer_norm(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        y: ViewMut<'_, Self>,
    ) {
        layer_norm::forward(self.isa(), x.slice(), width, norm.slice(), eps as f32, y.slice());
    }
    fn layer_norm_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
        dnorm: ViewMut<'_, Self>,
    ) {
        let (x, norm, dy) = (x.slice(), norm.slice(), dy.slice());
        layer_norm::backward(self.isa(), x, width, norm, eps as f32, dy, dx.slice(), dnorm.slice());
    }
    fn bias_residual(
        &self,
        x: ViewMut<'_, Self>,
        width: usize,
        bias: Option<View<'_, Self>>,
        residual: View<'_, Self>,
        norm: Option<(View<'_, Self>, f64)>,
        dropout: Option<Dropout>,
    ) {
        let norm = norm.map(|(norm, eps)| (norm.slice(), eps as f32));
        let (bias, residual) = (bias.map(View::slice), residual.slice());
        layer_norm::bias_residual(self.isa(), x.slice(), width, bias, residual, norm, dropout);
    }
    fn bias_residual_backward(
        &self,
        dy: View<'_, Self>,
        width: usize,
        dropout: Dropout,
        d: ViewMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        let dbias = dbias.map(ViewMut::slice);
        bias::residual_backward(self.isa(), dy.slice(), width, dropout, d.slice(), dbias);
    }
    fn bias_activation(
        &self,
        u: View<'_, Self>,
        bias: View<'_, Self>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        y: ViewMut<'_, Self>,
    ) {
        bias::activation(self.isa(), u.slice(), bias.slice(), width, kind, gated, dropout, y.slice());
    }
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
    ) {
        let (u, bias, dy) = (u.slice(), bias.slice(), dy.slice());
        let (du, dbias) = (du.slice(), dbias.slice());
        bias::activation_backward(self.isa(), u, bias, width, kind, gated, dropout, dy, du, dbias);
    }
    fn rotate(
        &self,
        x: ViewMut<'_, Self>,
        stride: usize,
        columns: usize,
        rotary: &Rotary,
        positions: &[u32],
        back: bool,
    ) {
        pooling::rotate(self.isa(), x.slice(), stride, columns, rotary, positions, back);
    }
    fn span_means(&self, x: View<'_, Self>, width: usize, spans: &[Span], y: ViewMut<'_, Self>) {
        pooling::means(self.isa(), x.slice(), width, spans, y.slice());
    }
    fn span_means_backward(&self, dy: View<'_, Self>, width: usize, spans: &[Span], dx: ViewMut<'_, Self>) {
        pooling::means_backward(self.isa(), dy.slice(), width, spans, dx.slice());
    }
    fn normalize(&self, x: View<'_, Self>, width: usize, least: f64, y: ViewMut<'_, Self>) {
        pooling::normalize(self.isa(), x.slice(), width, least as f32, y.slice());
    }
    fn normalize_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        least: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
    ) {
        pooling::normalize_backward(self.isa(), x.slice(), width, least as f32, dy.slice(), dx.slice());
    }
    fn max_sim(
        &self,
        queries: View<'_, Self>,
        documents: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        scores: ViewMut<'_, Self>,
    ) -> Vec<u32> {
        max_sim::forward(self.isa(), queries.slice(), documents.slice(), width, shape, scores.slice())
    }
    fn max_sim_backward(
        &self,
        others: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        best: &[u32],
        slopes: View<'_, Self>,
        side: MaxSimSide,
        d: ViewMut<'_, Self>,
    ) {
        max_sim::backward(self.isa(), others.slice(), width, shape, best, slopes.slice(), side, d.slice());
    }
}
