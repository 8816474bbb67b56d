//! Products in bf16 on the stored cases: how far logits, loss and gradient lie from those of f32.
//!
//! Rounding to bf16 errs by up to 2^-9 of a factor, a product of two rounded factors by about 2^-8 of its size. Errors of
//! a layer pass through the residual stream to the next, so the stated distance grows with the layers of encoder and
//! decoder: **2^-8 a layer**, of the greatest absolute logit for logits, of the loss for the loss. A gradient passes every
//! layer twice, and its error is taken over all parameters, as the norm of the difference by the norm: **2^-7 a layer**.

mod golden_support;

use golden_support::{Case, DRAW, Opened, Opening, TargetParts, cases, legacy_cases};
use tercio_engine::cpu::{Isa, Precision};
use tercio_engine::{Arena, Cpu, Device, Span, Tape};

const LOGITS: f64 = 1.0 / 256.0;
const GRADIENT: f64 = 1.0 / 128.0;

fn logits(opened: &Opened<Cpu>) -> Vec<f64> {
    let (device, batch, model) = (&opened.device, opened.batch(), &opened.run.objective.model);
    let parts = TargetParts::new(opened, &batch);
    device.run(|| {
        let mut tape = Tape::inference(device, &opened.run.state.parameters);
        let states = model.encode(&mut tape, &batch.ids, &Span::from_offsets(&batch.offsets), false);
        device.read_f64(model.logits(&mut tape, &states, &parts.targets(&batch)).view())
    })
}

fn greatest(values: impl Iterator<Item = f64>) -> f64 {
    values.map(f64::abs).inspect(|v| assert!(v.is_finite(), "not finite")).fold(0.0, f64::max)
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

fn near(case: &Case, opening: Opening, what: &str) {
    let exact = case.open(&Cpu::new(2).unwrap(), opening);
    let config = &exact.run.objective.model.config;
    let layers = (config.num_layers + config.num_decoder_layers) as f64;
    let wanted = logits(&exact);
    let (loss, gradient) = exact.gradient(DRAW);
    let values = |device: &Cpu, arena: &Arena<Cpu>| device.read_f64(arena.all());
    let gradient = values(&exact.device, &gradient);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let what = format!("{what} on {}", isa.name());
        let rounded = Cpu::with_isa(2, isa).unwrap().with_precision(Precision::Bf16);
        let opened = case.open(&rounded, opening);
        let found = logits(&opened);
        let size = greatest(wanted.iter().copied());
        let off = greatest(found.iter().zip(&wanted).map(|(f, w)| f - w)) / size;
        let (found_loss, found_gradient) = opened.gradient(DRAW);
        let loss_off = (found_loss - loss).abs() / loss;
        let difference = values(&rounded, &found_gradient).into_iter().zip(&gradient).map(|(f, w)| f - w);
        let gradient_off = norm(difference) / norm(gradient.iter().copied());
        println!(
            "{what}: {layers} layers, logits {off:.2e}, loss {loss_off:.2e}, gradient {gradient_off:.2e}"
        );
        assert!(found != wanted, "{what}: nothing was rounded");
        assert!(off <= LOGITS * layers, "{what}: logits are {off:.2e} of {size:.2e} off");
        assert!(loss_off <= LOGITS * layers, "{what}: loss is {found_loss}, in f32 {loss}");
        assert!(gradient_off <= GRADIENT * layers, "{what}: gradient is {gradient_off:.2e} of its norm off");
    }
}

#[test]
fn golden_bf16_lies_near_f32() {
    for case in cases() {
        for (variant, eos) in case.variants() {
            near(&case, Opening { eos, ..Opening::default() }, &format!("{}: {variant}", case.name()));
        }
    }
}

#[test]
fn golden_bf16_lies_near_f32_with_the_old_bias_table() {
    for case in legacy_cases() {
        near(&case, Opening { legacy: true, ..case.plain() }, &format!("{}: legacy", case.name()));
    }
}
