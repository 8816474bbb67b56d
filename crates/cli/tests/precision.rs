//! `--precision`: a setting of the run that a resume may not change, that all ranks share, and that the plan names.

mod support;

use support::*;

#[test]
fn bf16_is_part_of_the_run() {
    let place = Place::new();
    let short = ["--total_steps", "3"];
    place.train("f32", &short);
    place.train("bf16", &[&short[..], &["--precision", "bf16"]].concat());
    place.train("alias", &[&short[..], &["--bf16"]].concat());
    let of = |name: &str| bits(&place.run_dir(name), "step-3");
    assert!(of("bf16") != of("f32"), "nothing was rounded");
    assert!(of("bf16") == of("alias"), "--bf16 is not --precision bf16");
    let config = std::fs::read_to_string(place.run_dir("alias").join("config.toml")).unwrap();
    assert!(config.contains("precision = \"bf16\""), "{config}");
    // The last of the two flags counts.
    let longer = ["--total_steps", "4", "--bf16", "--precision", "f32"];
    let output = place.run("bf16", &longer);
    let said = failure(&output);
    assert!(said.contains("precision  \"bf16\"  \"f32\""), "{said}");
    place.train("bf16", &["--total_steps", "4", "--precision", "f32", "--bf16"]);
}

#[test]
fn a_run_of_before_there_was_the_setting_goes_on() {
    let place = Place::new();
    place.train("old", &["--total_steps", "2"]);
    let path = place.run_dir("old").join("config.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("precision = \"f32\"\n", "")).unwrap();
    let said = failure(&place.run("old", &["--total_steps", "3", "--bf16"]));
    assert!(said.contains("\"f32\"") && said.contains("\"bf16\""), "{said}");
    place.train("old", &["--total_steps", "3"]);
}

#[test]
fn the_plan_and_the_answers_know_it() {
    let place = Place::new();
    let output = place.run("planned", &["--dry_run", "--bf16", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(plan["arithmetic"].as_str().unwrap().contains("bf16"), "{plan}");
    let model = golden().join("fid_reader_t5v10/model");
    let data = place.path("eval.jsonl");
    let probability = |flags: &[&str]| {
        let words = ["answer", data.to_str().unwrap(), "--model_path", model.to_str().unwrap()];
        let output =
            tercio(&words).args(["--json", "--scores", "--threads", "1"]).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let first = String::from_utf8(output.stdout).unwrap().lines().next().unwrap().to_owned();
        let answer: serde_json::Value = serde_json::from_str(&first).unwrap();
        answer["scores"][0].as_f64().unwrap()
    };
    let (exact, rounded) = (probability(&[]), probability(&["--bf16"]));
    assert!(exact != rounded, "nothing was rounded");
    assert!((exact - rounded).abs() < 0.05 * exact.abs(), "{exact} {rounded}");
}
