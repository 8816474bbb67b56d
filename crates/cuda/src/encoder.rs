//! The encoders' part of the engine's trait: biases, LayerNorm, rotary positions, pooling, unit rows, MaxSim.

use tercio_engine::*;

use crate::device::Cuda;
use crate::driver::{Argument, Driver};
use crate::launch::{Operand, float, kind_of, number, optional, size};
use crate::max_sim;

impl<R: Driver> Cuda<R> {
    /// `activation` with or without a bias.
    pub(crate) fn activate(
        &self,
        u: View<'_, Self>,
        bias: Option<View<'_, Self>>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        y: ViewMut<'_, Self>,
    ) {
        let (rows, gated) = (y.len / width, Argument::from(gated as u32));
        let (bias, width) = (optional(bias), number(width));
        let arguments = [u.real(), bias, width, kind_of(kind), gated, dropout.into(), y.real()];
        self.rows("activation", rows, &arguments);
    }
    /// `activation_backward` with or without a bias.
    pub(crate) fn activate_backward(
        &self,
        u: View<'_, Self>,
        bias: Option<View<'_, Self>>,
        width: usize,
        kind: Activation,
        gated: bool,
        dropout: Option<Dropout>,
        dy: View<'_, Self>,
        du: &ViewMut<'_, Self>,
    ) {
        let (rows, gated) = (dy.len / width, Argument::from(gated as u32));
        let (bias, width) = (optional(bias), number(width));
        let arguments = [u.real(), bias, width, kind_of(kind), gated, dropout.into(), dy.real(), du.real()];
        self.rows("activation_backward", rows, &arguments);
    }
}

impl<R: Driver> EncoderKernels for Cuda<R> {
    fn gather_add(&self, table: View<'_, Self>, width: usize, ids: &[u32], rows: ViewMut<'_, Self>) {
        let list = self.list(ids);
        self.rows("gather_add", ids.len(), &[table.pointer(), list.pointer(), number(width), rows.real()]);
    }
    fn add_bias(&self, x: ViewMut<'_, Self>, bias: View<'_, Self>) {
        let (rows, width) = (x.len / bias.len, number(bias.len));
        self.rows("add_bias", rows, &[x.real(), bias.pointer(), width]);
    }
    fn sum_rows(&self, x: View<'_, Self>, total: ViewMut<'_, Self>) {
        let (rows, width) = (x.len / total.len, total.len);
        let (part, grid) = self.partial(rows, width, width);
        self.launch("sum_rows", grid, 256, 0, &[x.real(), size(rows), number(width), part.pointer()]);
        self.fold(&part, &total);
    }
    fn layer_norm(
        &self,
        x: View<'_, Self>,
        width: usize,
        norm: View<'_, Self>,
        eps: f64,
        y: ViewMut<'_, Self>,
    ) {
        let (rows, has_bias) = (x.len / width, Argument::from((norm.len > width) as u32));
        let arguments = [x.real(), norm.pointer(), has_bias, float(eps), y.real(), size(rows), number(width)];
        self.warps("layer_norm", rows, &arguments);
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
        let rows = x.len / width;
        let stats = self.scratch_of(2 * rows);
        let (n, w) = (size(rows), number(width));
        let arguments = [x.real(), norm.pointer(), float(eps), dy.real(), dx.real(), stats.pointer(), n, w];
        self.warps("layer_norm_backward", rows, &arguments);
        let (part, grid) = self.partial(rows, dnorm.len, width);
        let has_bias = Argument::from((dnorm.len > width) as u32);
        let (n, w) = (size(rows), number(width));
        let arguments = [x.real(), dy.real(), stats.pointer(), has_bias, n, w, part.pointer()];
        self.launch("layer_norm_weight", grid, 256, 0, &arguments);
        self.fold(&part, &dnorm);
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
        let rows = x.len / width;
        let has_bias = Argument::from(norm.is_some_and(|(n, _)| n.len > width) as u32);
        let eps = float(norm.map_or(0.0, |n| n.1));
        let arguments = [
            x.real(),
            optional(bias),
            residual.real(),
            optional(norm.map(|n| n.0)),
            has_bias,
            eps,
            dropout.into(),
            size(rows),
            number(width),
        ];
        self.warps("bias_residual", rows, &arguments);
    }
    fn bias_residual_backward(
        &self,
        dy: View<'_, Self>,
        width: usize,
        dropout: Dropout,
        d: ViewMut<'_, Self>,
        dbias: Option<ViewMut<'_, Self>>,
    ) {
        let rows = dy.len / width;
        let arguments = [dy.real(), d.real(), number(width), Some(dropout).into()];
        self.rows("dropout", rows, &arguments);
        if let Some(dbias) = dbias {
            let d = View { storage: d.storage, start: d.start, len: d.len };
            self.sum_rows(d, dbias);
        }
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
        self.activate(u, Some(bias), width, kind, gated, dropout, y);
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
        self.activate_backward(u, Some(bias), width, kind, gated, dropout, dy, &du);
        self.sum_rows(View { storage: du.storage, start: du.start, len: du.len }, dbias);
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
        assert_eq!(x.len, positions.len() * stride);
        let angles = |list: &[f64]| self.list(&list.iter().map(|&v| v as f32).collect::<Vec<f32>>());
        let (cos, sin, places) = (angles(&rotary.cos), angles(&rotary.sin), self.list(positions));
        let arguments = [
            x.real(),
            number(stride),
            number(columns),
            cos.pointer(),
            sin.pointer(),
            number(rotary.half),
            places.pointer(),
            Argument::from(back as u32),
        ];
        self.rows("rotate", positions.len(), &arguments);
    }
    fn span_means(&self, x: View<'_, Self>, width: usize, spans: &[Span], y: ViewMut<'_, Self>) {
        let places = self.spans(spans);
        let grid = [spans.len(), width.div_ceil(32), 1];
        self.launch("span_means", grid, 256, 0, &[x.real(), number(width), places.pointer(), y.real()]);
    }
    fn span_means_backward(&self, dy: View<'_, Self>, width: usize, spans: &[Span], dx: ViewMut<'_, Self>) {
        let places = self.spans(spans);
        let grid = [spans.len(), width.div_ceil(32), 1];
        let arguments = [dy.real(), number(width), places.pointer(), dx.real()];
        self.launch("span_means_backward", grid, 256, 0, &arguments);
    }
    fn normalize(&self, x: View<'_, Self>, width: usize, least: f64, y: ViewMut<'_, Self>) {
        let rows = x.len / width;
        self.warps("normalize", rows, &[x.real(), float(least), y.real(), size(rows), number(width)]);
    }
    fn normalize_backward(
        &self,
        x: View<'_, Self>,
        width: usize,
        least: f64,
        dy: View<'_, Self>,
        dx: ViewMut<'_, Self>,
    ) {
        let rows = x.len / width;
        let arguments = [x.real(), float(least), dy.real(), dx.real(), size(rows), number(width)];
        self.warps("normalize_backward", rows, &arguments);
    }
    fn max_sim(
        &self,
        queries: View<'_, Self>,
        documents: View<'_, Self>,
        width: usize,
        shape: &MaxSimShape,
        scores: ViewMut<'_, Self>,
    ) -> Vec<u32> {
        max_sim::forward(self, queries, documents, width, shape, scores)
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
        max_sim::backward(self, others, width, shape, best, slopes, side, d);
    }
}
