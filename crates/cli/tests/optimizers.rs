//! Optimizers, schedules and precisions through the command: killed and gone on, and on two ranks, to the same bits; what does
//! not go together is refused.

mod ranks_support;
mod support;

use support::*;

const TWELVE: [&str; 2] = ["--total_steps", "12"];
const ADAFACTOR: [&str; 6] = ["--optim", "adafactor", "--scale_parameter", "--bf16", "--lr", "1e-2"];
const COSINE: [&str; 14] = [
    "--optim",
    "adamw",
    "--scheduler",
    "cosine",
    "--warmup_steps",
    "3",
    "--no_decay",
    "layer_norm,bias",
    "--label_smoothing",
    "0.1",
    "--precision",
    "bf16",
    "--scheduler_steps",
    "12",
];

/// Killed after some updates, the run goes on to the bits of one that was not; and two ranks have them too.
fn keeps_its_bits(settings: &[&str]) {
    let place = Place::new();
    let settings = [&["--micro_batch_size", "1"], settings, &TWELVE].concat();
    place.train("whole", &settings);
    let whole = place.run_dir("whole");
    let first = losses(&whole)[0].1;
    let last = losses(&whole)[11].1;
    assert!(f64::from_bits(last) < f64::from_bits(first), "nothing was learned");
    let run = place.run_dir("killed");
    let mut kills = 0;
    for updates in [7, 2] {
        let mut child = place.start("killed", &settings);
        assert!(wait_for(&mut child, || updates_of(&run, kills + 1) >= updates));
        if !kill_dead(child) {
            break;
        }
        kills += 1;
    }
    assert!(kills > 0, "no kill is no test");
    place.train("killed", &settings);
    assert_eq!(losses(&run), losses(&whole));
    assert!(bits(&run, "step-12") == bits(&whole, "step-12"), "killed: parameters and moments differ");
    // Ranks are told to go on from a checkpoint that one process wrote.
    ranks_support::train(&place, "ranks", 2, &[&settings[..], &["--total_steps", "5"]].concat()).succeed();
    ranks_support::train(&place, "ranks", 2, &settings).succeed();
    assert!(bits(&place.run_dir("ranks"), "step-12") == bits(&whole, "step-12"), "two ranks: bits differ");
}

#[test]
fn adafactor_in_bf16_keeps_its_bits() {
    keeps_its_bits(&ADAFACTOR);
}

#[test]
fn adamw_on_a_cosine_keeps_its_bits() {
    keeps_its_bits(&COSINE);
}

#[test]
fn every_setting_has_an_effect() {
    let place = Place::new();
    let of = |name: &str, flags: &[&str]| {
        place.train(name, &[flags, &["--total_steps", "3", "--warmup_steps", "1"]].concat());
        bits(&place.run_dir(name), "step-3").model
    };
    let adamw = of("adamw", &["--optim", "adamw", "--weight_decay", "5"]);
    assert!(
        of("no-decay", &["--optim", "adamw", "--weight_decay", "5", "--no_decay", "layer_norm"]) != adamw
    );
    assert!(of("smooth", &["--optim", "adamw", "--weight_decay", "5", "--label_smoothing", "0.2"]) != adamw);
    assert!(of("cosine", &["--optim", "adamw", "--weight_decay", "5", "--scheduler", "cosine"]) != adamw);
    let adafactor = of("adafactor", &["--optim", "adafactor"]);
    assert!(of("scaled", &["--optim", "adafactor", "--scale_parameter"]) != adafactor);
    assert!(of("relative", &["--optim", "adafactor", "--relative_step"]) != adafactor);
    assert!(of("threshold", &["--optim", "adafactor", "--clip_threshold", "0.1"]) != adafactor);
    // The moments of Adafactor are a small part of Adam's.
    let moments = |name: &str| bits(&place.run_dir(name), "step-3").moments.len();
    assert!(moments("adafactor") * 8 < moments("adamw"), "{} {}", moments("adafactor"), moments("adamw"));
}

#[test]
fn what_does_not_go_together_is_refused() {
    let place = Place::new();
    for (flags, said) in [
        (&["--optim", "adafactor", "--shard", "optimizer"][..], "leave --shard out"),
        (&["--scale_parameter"], "--optim adafactor"),
        (&["--optim", "adafactor", "--relative_step", "--scheduler", "cosine"], "--scheduler fixed"),
        (&["--scheduler", "cosine", "--fixed_lr"], "--scheduler linear"),
        (&["--label_smoothing", "1"], "less than 1"),
        (&["--clip_threshold", "0"], "above 0"),
        (&["--no_decay", "LayerNorm"], "names are like"),
    ] {
        let output = place.run("refused", flags);
        let text = failure(&output);
        assert!(output.status.code() == Some(2) && text.contains(said), "{flags:?}: {text}");
    }
}

#[test]
fn norms_of_layers_are_logged() {
    let place = Place::new();
    let flags = ["--stats_freq", "2", "--total_steps", "5"];
    place.train("logged", &flags);
    let run = place.run_dir("logged");
    assert_eq!(events(&run, "layers"), [2, 4]);
    let lines = metrics(&run);
    let of = |step: u64| lines.iter().filter(move |l| l["step"] == step);
    let layers = of(4).find(|l| l["event"] == "layers").unwrap();
    let squares = |kind: &str| -> f64 {
        let norms = layers[kind].as_object().unwrap();
        assert!(norms.contains_key("encoder.block.1") && norms.contains_key("shared"), "{norms:?}");
        norms.values().map(|v| v.as_f64().unwrap().powi(2)).sum()
    };
    let whole = of(4).find(|l| l.get("event").is_none()).unwrap()["gradient_norm"].as_f64().unwrap();
    assert!((squares("gradient_norm").sqrt() - whole).abs() < 1e-9 * whole, "layers make up the whole");
    assert!(squares("parameter_norm") > 0.0);
    // They reach no bit, and a run may be given them later.
    place.train("plain", &["--total_steps", "5"]);
    assert!(bits(&run, "step-5") == bits(&place.run_dir("plain"), "step-5"));
    place.train("plain", &["--stats_freq", "1", "--total_steps", "6"]);
    assert_eq!(events(&place.run_dir("plain"), "layers"), [6]);
    // Ranks that share the optimizer out log the same norms, but for the last digits.
    let ranks =
        ["--stats_freq", "2", "--total_steps", "5", "--micro_batch_size", "2", "--shard", "optimizer"];
    ranks_support::train(&place, "ranks", 2, &ranks).succeed();
    let lines = metrics(&place.run_dir("ranks"));
    let of_ranks = lines.iter().find(|l| l["event"] == "layers" && l["step"] == 4).unwrap();
    for (layer, norm) in layers["gradient_norm"].as_object().unwrap() {
        let (a, b) = (norm.as_f64().unwrap(), of_ranks["gradient_norm"][layer].as_f64().unwrap());
        assert!((a - b).abs() <= 1e-9 * a, "{layer}: {a} {b}");
    }
}
