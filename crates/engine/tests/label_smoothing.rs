//! Label smoothing against PyTorch's in 64 bits, stored by `tools/make_smoothing_cases.py`: losses and gradients, on the
//! reference device and on every instruction set.

use serde_json::Value;
use tercio_engine::cpu::Isa;
use tercio_engine::{Arena, Cpu, Device, Layout, Reference, Tape, Tensor};

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn near(found: &[f64], wanted: &Value, tolerance: f64, what: &str) {
    let wanted = numbers(wanted);
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (f, w)) in found.iter().zip(&wanted).enumerate() {
        assert!((f - w).abs() <= tolerance * (1.0 + w.abs()), "{what}[{i}]: {f}, not {w}");
    }
}

fn follows<D: Device>(device: &D, tolerance: f64, name: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/label_smoothing.json");
    let stored: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = stored["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for (number, case) in cases.iter().enumerate() {
        let size = |key: &str| case[key].as_u64().unwrap() as usize;
        let float = |key: &str| case[key].as_f64().unwrap();
        let floats = |key: &str| numbers(&case[key]).into_iter().map(|v| v as f32).collect::<Vec<_>>();
        let (rows, width, classes) = (size("rows"), size("width"), size("classes"));
        let labels: Vec<u32> = numbers(&case["labels"]).into_iter().map(|v| v as u32).collect();
        let mut layout = Layout::default();
        let place = layout.add("w", &[classes, width]);
        let (mut values, mut gradients) = (Arena::zeros(device, &layout), Arena::zeros(device, &layout));
        device.write(values.view_mut(place), &floats("w"));
        let mut tape = Tape::recording(device, &values, None);
        let x = tape.input(Tensor::from_values(device, rows, width, &floats("x")));
        let (factor, weight, smoothing) = (float("factor"), float("weight"), float("smoothing"));
        let losses = tape.cross_entropy_smoothed(&x, place, factor, &labels, weight, smoothing);
        let dx = tape.backward(&mut gradients, &[&x]).remove(0);
        let what = |part: &str| format!("{name}, case {number}: {part}");
        near(&losses, &case["losses"], tolerance, &what("losses"));
        near(&device.read_f64(dx.view()), &case["dx"], tolerance, &what("gradient of x"));
        near(&device.read_f64(gradients.view(place)), &case["dw"], tolerance, &what("gradient of w"));
    }
}

#[test]
fn label_smoothing_is_pytorchs() {
    follows(&Reference, 1e-12, "reference");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        // Logits of about 60 are rounded by 4e-6.
        follows(&Cpu::with_isa(2, isa).unwrap(), 1e-5, isa.name());
    }
}
