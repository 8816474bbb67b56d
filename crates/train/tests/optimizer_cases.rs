//! Adafactor against the steps of Hugging Face's in 64 bits, stored by `tools/make_optimizer_cases.py`, on both devices; and
//! weight decay with exemptions.

use clap::Parser;
use serde_json::Value;
use tercio_comm::World;
use tercio_engine::{Arena, Cpu, Device, Layout, Reference};
use tercio_train::optimizer::{Optimizer, check_names, no_moments};
use tercio_train::options::OptimOptions;
use tercio_train::ranks::parts::Parts;
use tercio_train::step::TrainState;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    optim: OptimOptions,
}

fn options(flags: &[String]) -> OptimOptions {
    let optim = Flags::parse_from(std::iter::once(&"test".to_owned()).chain(flags)).optim;
    optim.check().unwrap();
    optim
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Values, as a device holds them: the stored ones are of 64 bits.
fn write<D: Device>(device: &D, layout: &Layout, arena: &mut Arena<D>, values: &Value) {
    for spec in layout.specs() {
        for (i, v) in numbers(&values[&spec.name]).into_iter().enumerate() {
            let at = spec.place.start + i;
            device.fill(arena.range_mut(at..at + 1), v);
        }
    }
}

fn follows<D: Device>(device: &D, tolerance: f64) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/adafactor.json");
    let stored: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut layout = Layout::default();
    for (name, shape) in stored["shapes"].as_object().unwrap() {
        let shape: Vec<usize> = numbers(shape).into_iter().map(|n| n as usize).collect();
        layout.add(name, &shape);
    }
    let parts = Parts::new::<Reference>(&World::alone(), &layout, false);
    let near = |found: f64, wanted: f64, what: &dyn Fn() -> String| {
        let off = (found - wanted).abs();
        assert!(off <= tolerance * (1.0 + wanted.abs()), "{}: {found}, not {wanted}", what());
    };
    for (number, case) in stored["cases"].as_array().unwrap().iter().enumerate() {
        let settings = &case["settings"];
        let mut flags = vec!["--optim=adafactor".to_owned(), "--clip=0".into()];
        for (flag, key) in [
            ("weight-decay", "weight_decay"),
            ("clip-threshold", "clip_threshold"),
            ("decay-rate", "decay_rate"),
        ] {
            flags.push(format!("--{flag}={}", settings[key]));
        }
        flags.extend(settings["lr"].as_f64().map(|lr| format!("--lr={lr}")));
        flags.extend((settings["scale_parameter"] == true).then(|| "--scale-parameter".into()));
        flags.extend((settings["relative_step"] == true).then(|| "--relative-step".into()));
        let optim = options(&flags);
        let optimizer = Optimizer::new(&optim, &layout);
        let [first, second] = no_moments(device, optim.optim, &layout, None);
        assert_eq!((first.len(), second.len()), (0, 5 + 7 + 1 + 4 + 19 + 2 + 11));
        let mut state = TrainState { step: 0, parameters: Arena::zeros(device, &layout), first, second };
        write(device, &layout, &mut state.parameters, &case["start"]);
        let mut gradients = Arena::zeros(device, &layout);
        for (of_step, values) in
            case["gradients"].as_array().unwrap().iter().zip(case["values"].as_array().unwrap())
        {
            write(device, &layout, &mut gradients, of_step);
            device.run(|| optimizer.apply(device, &parts, &mut state, &gradients, 1.0));
            state.step += 1;
            for spec in layout.specs() {
                let found = device.read_f64(state.parameters.view(spec.place));
                for (f, w) in found.iter().zip(numbers(&values[&spec.name])) {
                    near(*f, w, &|| format!("case {number}, update {}: {}", state.step, spec.name));
                }
            }
        }
        let found = device.read_f64(state.second.all());
        let wanted = layout.specs().iter().flat_map(|spec| numbers(&case["statistics"][&spec.name]));
        assert_eq!(found.len(), wanted.clone().count());
        for (f, w) in found.iter().zip(wanted) {
            near(*f, w, &|| format!("case {number}: statistics"));
        }
    }
}

#[test]
fn adafactor_takes_the_steps_of_transformers() {
    follows(&Reference, 1e-12);
    follows(&Cpu::new(2).unwrap(), 3e-6);
}

#[test]
fn exempt_parameters_do_not_decay() {
    let mut layout = Layout::default();
    for (name, shape) in
        [("a.weight", &[3, 4][..]), ("a.layer_norm.weight", &[4]), ("b.bias", &[5]), ("c.weight", &[2, 2])]
    {
        layout.add(name, shape);
    }
    let device = Cpu::new(1).unwrap();
    let parts = Parts::new::<Cpu>(&World::alone(), &layout, false);
    for optim in ["adamw", "adafactor", "adam"] {
        let flags = ["--lr=0.5", "--weight-decay=0.5", "--no-decay=bias, layer_norm"].map(String::from);
        let optim = options(&[&flags[..], &[format!("--optim={optim}")]].concat());
        check_names(&optim, &layout).unwrap();
        let optimizer = Optimizer::new(&optim, &layout);
        let [first, second] = no_moments(&device, optim.optim, &layout, None);
        let mut state = TrainState { step: 0, parameters: Arena::zeros(&device, &layout), first, second };
        device.fill(state.parameters.all_mut(), 8.0);
        // No gradient: what changes is decay.
        optimizer.apply(&device, &parts, &mut state, &Arena::zeros(&device, &layout), 0.0);
        for spec in layout.specs() {
            let decays = spec.name.ends_with("a.weight") || spec.name.starts_with('c');
            let want = if decays && optim.optim != tercio_train::options::Optim::Adam { 6.0 } else { 8.0 };
            let found = device.read_f64(state.parameters.view(spec.place));
            assert!(
                found.iter().all(|&v| v == want),
                "{:?}: {}: {found:?}, not {want}",
                optim.optim,
                spec.name
            );
        }
        let unknown = OptimOptions { no_decay: "bias,LayerNorm".into(), ..optim };
        let said = check_names(&unknown, &layout).unwrap_err().to_string();
        assert!(said.contains("--no_decay LayerNorm") && said.contains("a.layer_norm.weight"), "{said}");
    }
}
