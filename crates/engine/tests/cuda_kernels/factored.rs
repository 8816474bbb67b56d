//! Launches of Adafactor: all that one kernel tells the next stays in the device's memory.

use tercio_engine::{AdafactorStep, View, ViewMut};

use super::device::{OnHost, Operand, number, size};
use super::library::Argument;
use super::memory::Guarded;

/// `FactorConstants` of `cuda/optimizer.cu`.
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

fn numbers(len: usize) -> Guarded<f64> {
    Guarded::new(vec![f64::NAN; len], 1e300)
}

fn total(device: &OnHost, blocks: &Guarded<f64>) -> Guarded<f64> {
    let total = numbers(1);
    device.rows("fold_dots", 1, &[blocks.into(), size(blocks.len()), (&total).into()]);
    total
}

pub fn step(
    device: &OnHost,
    mut p: ViewMut<'_, OnHost>,
    g: View<'_, OnHost>,
    columns: Option<usize>,
    mut statistics: ViewMut<'_, OnHost>,
    s: AdafactorStep,
) {
    let n = p.len;
    let constants = || {
        Argument::value(FactorConstants {
            lr: s.lr,
            eps: s.eps,
            parameter_eps: s.parameter_eps.unwrap_or(0.0),
            clip_threshold: s.clip_threshold,
            beta2: 1.0 - libm::pow(s.step as f64, s.decay_rate),
            weight_decay: s.weight_decay,
            gradient_scale: s.gradient_scale as f32,
            scale_parameter: s.parameter_eps.is_some() as u32,
        })
    };
    let blocks = numbers(n.div_ceil(16384));
    let values = || p.storage.pointer().wrapping_add(p.start);
    let (a, b) = (Argument::Pointer(values().cast()), Argument::Pointer(values().cast()));
    device.rows("dot_blocks", blocks.len(), &[a, b, size(n), (&blocks).into()]);
    let values = total(device, &blocks);
    let none = || Argument::RealMut(std::ptr::null_mut(), 0);
    let Some(columns) = columns else {
        let squares = numbers(n.div_ceil(256));
        let v = || Argument::Pointer(statistics.storage.pointer().wrapping_add(statistics.start).cast());
        let arguments = [g.pointer(), size(n), constants(), v(), (&squares).into()];
        device.flat("vector_squares", n, &arguments);
        let steps = total(device, &squares);
        let (values, steps) = ((&values).into(), (&steps).into());
        let arguments = [p.pointer(), g.pointer(), size(n), constants(), v(), values, steps, none()];
        device.flat("vector_step", n, &arguments);
        return;
    };
    let rows = n / columns;
    let all = statistics.reborrow();
    let place = all.storage.pointer().wrapping_add(all.start);
    let of_rows = || Argument::Pointer(place.cast());
    let of_columns = || Argument::Pointer(place.wrapping_add(rows).cast());
    device.rows("factor_rows", rows, &[g.pointer(), number(columns), constants(), of_rows()]);
    let (part, grid) = OnHost::partial(rows, columns, columns);
    let arguments = [g.pointer(), size(rows), number(columns), constants(), (&part).into()];
    device.launch("factor_columns", grid, 256, 0, &arguments);
    let arguments = [(&part).into(), size(rows), number(columns), constants(), of_columns()];
    device.flat("fold_factor_columns", columns, &arguments);
    let mean = numbers(1);
    device.rows("mean_factor_rows", 1, &[of_rows(), size(rows), (&mean).into()]);
    let squares = numbers(rows);
    let known = || [of_rows(), of_columns(), (&mean).into()];
    let mut arguments = vec![g.pointer(), number(columns), constants()];
    arguments.extend(known());
    arguments.push((&squares).into());
    device.rows("factored_squares", rows, &arguments);
    let steps = total(device, &squares);
    let mut arguments = vec![p.reborrow().pointer(), g.pointer(), size(n), number(columns), constants()];
    arguments.extend(known());
    arguments.extend([(&values).into(), (&steps).into(), none()]);
    device.rows("factored_step", rows, &arguments);
}
