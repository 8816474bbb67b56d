//! `--precision`: a setting of the run that a resume may not change, that all ranks share, and that the plan names.

mod ranks_support;
mod support;

use ranks_support::start;
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

#[test]
fn it_may_stand_in_a_file_of_settings_under_both_names() {
    let place = Place::new();
    let of = |name: &str, settings: &str, flags: &[&str]| {
        place.write(name, settings);
        let file = place.path(name);
        let words = ["config", "print", "--config", file.to_str().unwrap()];
        let output = tercio(&words).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let table: toml::Table = String::from_utf8(output.stdout).unwrap().parse().unwrap();
        assert!(!table.contains_key("bf16"), "one setting has one name in a run's folder");
        table["precision"].as_str().unwrap().to_owned()
    };
    assert_eq!(of("a.toml", "precision = \"bf16\"\n", &[]), "bf16");
    assert_eq!(of("b.toml", "bf16 = true\n", &[]), "bf16");
    assert_eq!(of("c.toml", "bf16 = false\n", &[]), "f32");
    assert_eq!(of("d.toml", "bf16 = true\n", &["--precision", "f32"]), "f32", "flags win");
    assert_eq!(of("e.toml", "precision = \"f32\"\n", &["--bf16"]), "bf16", "flags win");
}

/// What `eval reader` prints with flags of each rank.
fn eval(
    place: &Place,
    name: &str,
    ranks: usize,
    own: impl Fn(usize) -> Vec<&'static str>,
) -> ranks_support::Ranks {
    let model = golden().join("fid_reader_t5v10/model");
    start(&place.path(""), ranks, |rank| {
        let mut command = tercio(&["eval", "reader", "--model", model.to_str().unwrap(), "--scores"]);
        command.arg("--eval_data").arg(place.path("eval.jsonl")).arg("--output").arg(place.path(name));
        command.args("--n_context 3 --text_maxlength 64 --generation_max_length 8 --threads 1".split(' '));
        command.args(own(rank));
        command
    })
}

#[test]
fn an_evaluation_in_bf16_is_the_same_on_several_ranks_and_near_that_in_f32() {
    let place = Place::new();
    let lines = |name: &str, ranks: usize, flags: &'static [&'static str]| {
        eval(&place, name, ranks, |_| flags.to_vec()).succeed();
        std::fs::read_to_string(place.path(name)).unwrap()
    };
    let (exact, rounded) = (lines("f32", 1, &[]), lines("bf16", 1, &["--precision", "bf16"]));
    assert!(rounded == lines("ranks", 2, &["--bf16"]), "two ranks find something else");
    let numbers = |text: &str| -> Vec<f64> {
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let scores = lines.map(|line| line["scores"].as_array().unwrap().clone());
        scores.flatten().map(|score| score.as_f64().unwrap()).collect()
    };
    let (exact, rounded) = (numbers(&exact), numbers(&rounded));
    assert!(exact.len() == rounded.len() && exact.len() >= 6, "{exact:?} {rounded:?}");
    let size = exact.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
    let off = exact.iter().zip(&rounded).fold(0.0, |most: f64, (e, r)| most.max((e - r).abs()));
    assert!(off > 0.0 && off < 0.05 * size, "{off} of {size}");
}

#[test]
fn ranks_of_different_precision_do_not_begin() {
    let place = Place::new();
    let own = |rank: usize| if rank == 1 { vec!["--precision", "bf16"] } else { Vec::new() };
    let ends = eval(&place, "out.jsonl", 2, own).finish();
    assert!(ends.iter().all(|end| end.code == Some(1)), "{:?}", ranks_support::codes(&ends));
    let said = &ends[0].stderr;
    assert!(
        said.contains("rank 1") && said.contains("--precision is bf16 there and f32 on rank 0"),
        "{said}"
    );
    assert!(!place.path("out.jsonl").exists(), "nothing was answered");
    let flags = |rank: usize| own(rank).into_iter().map(String::from).collect();
    let ends = ranks_support::train_with(&place, "r", 2, &[], flags).finish();
    assert!(ends.iter().all(|end| end.code == Some(1)), "{:?}", ranks_support::codes(&ends));
    let said = &ends[0].stderr;
    assert!(said.contains("--precision is \"bf16\" there and \"f32\" on rank 0"), "{said}");
}
