//! Launches of Adafactor: all that one kernel tells the next stays in the device's memory.

use tercio_engine::{AdafactorStep, View, ViewMut};

use crate::device::{Cuda, DOT_BLOCK};
use crate::driver::{Argument, Driver};
use crate::launch::{Operand, number, size};
use crate::memory::Buffer;

/// `FactorConstants` of `kernels/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FactorConstants {
    lr: f64,
    eps: f64,
    parameter_eps: f64,
    clip_threshold: f64,
    beta2: f64,
    weight_decay: f64,
    gradient_scale: f32,
    scale_parameter: u32,
}

fn total<R: Driver>(device: &Cuda<R>, blocks: &Buffer<R>, count: usize) -> Buffer<R> {
    let total = device.doubles(1);
    device.rows("fold_dots", 1, &[blocks.pointer(), size(count), total.pointer()]);
    total
}

pub(crate) fn step<R: Driver>(
    device: &Cuda<R>,
    p: ViewMut<'_, Cuda<R>>,
    g: View<'_, Cuda<R>>,
    columns: Option<usize>,
    statistics: ViewMut<'_, Cuda<R>>,
    s: AdafactorStep,
) {
    let n = p.len;
    let constants = Argument::value(FactorConstants {
        lr: s.lr,
        eps: s.eps,
        parameter_eps: s.parameter_eps.unwrap_or(0.0),
        clip_threshold: s.clip_threshold,
        beta2: 1.0 - libm::pow(s.step as f64, s.decay_rate),
        weight_decay: s.weight_decay,
        gradient_scale: s.gradient_scale as f32,
        scale_parameter: s.parameter_eps.is_some() as u32,
    });
    let (p, g) = (p.pointer(), g.pointer());
    let blocks = device.doubles(n.div_ceil(DOT_BLOCK));
    device.rows("dot_blocks", n.div_ceil(DOT_BLOCK), &[p, p, size(n), blocks.pointer()]);
    let values = total(device, &blocks, n.div_ceil(DOT_BLOCK));
    let Some(columns) = columns else {
        let (count, v) = (n.div_ceil(256), statistics.pointer());
        let squares = device.doubles(count);
        device.flat("vector_squares", n, &[g, size(n), constants, v, squares.pointer()]);
        let steps = total(device, &squares, count);
        let arguments = [p, g, size(n), constants, v, values.pointer(), steps.pointer()];
        device.flat("vector_step", n, &arguments);
        return;
    };
    let rows = n / columns;
    let of_rows = statistics.pointer();
    let of_columns = Argument::Pointer(statistics.at() + 4 * rows as u64);
    device.rows("factor_rows", rows, &[g, number(columns), constants, of_rows]);
    let (part, grid) = device.partial(rows, columns, columns);
    let sizes = [size(rows), number(columns), constants];
    let [r, c, k] = sizes;
    device.launch("factor_columns", grid, 256, 0, &[g, r, c, k, part.pointer()]);
    device.flat("fold_factor_columns", columns, &[part.pointer(), r, c, k, of_columns]);
    let mean = device.doubles(1);
    device.rows("mean_factor_rows", 1, &[of_rows, r, mean.pointer()]);
    let squares = device.doubles(rows);
    let known = [of_rows, of_columns, mean.pointer()];
    let arguments: Vec<_> = [g, c, k].into_iter().chain(known).chain([squares.pointer()]).collect();
    device.rows("factored_squares", rows, &arguments);
    let steps = total(device, &squares, rows);
    let end = [values.pointer(), steps.pointer()];
    let arguments: Vec<_> = [p, g, size(n), c, k].into_iter().chain(known).chain(end).collect();
    device.rows("factored_step", rows, &arguments);
}
