//! `--dry-run`: a plan whose figures hold, and a run folder that nobody touched.

mod support;

use serde_json::Value;
use support::*;

fn plan(place: &Place, name: &str, flags: &[&str]) -> Value {
    let output = place.train(name, &[flags, &["--dry-run", "--json"]].concat());
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_plan_of_a_new_run_is_that_of_the_run() {
    let place = Place::new();
    let flags = ["--bit_groups", "4", "--total_steps", "6"];
    let plan = plan(&place, "a", &flags);
    assert!(!place.path("runs").exists(), "a plan leaves no folder");
    let number = |key: &str| plan[key].as_f64().unwrap_or_else(|| panic!("{key}: {plan}"));
    assert_eq!((number("examples"), number("updates"), number("updates_per_epoch")), (24.0, 6.0, 3.0));
    assert_eq!((number("epochs"), number("sample_updates"), number("shards")), (2.0, 6.0, 4.0));
    assert!(number("seconds_per_update") > 0.0 && number("measured_updates") == 2.0);
    assert!((number("seconds") / number("seconds_per_update") - 6.0).abs() < 1e-6);
    assert_eq!(plan["warnings"], Value::Array(Vec::new()));

    place.train("a", &flags);
    let run = place.run_dir("a");
    let lines = metrics(&run);
    let updates: Vec<_> = lines.iter().filter(|line| line.get("event").is_none()).collect();
    let tokens = updates.iter().map(|line| line["tokens"].as_f64().unwrap()).sum::<f64>() / 6.0;
    assert!((tokens - number("tokens_per_update")).abs() < 1e-6, "{tokens} {plan}");
    let padding = number("padding_saved");
    assert!(updates.iter().any(|line| line["padding_saved"].as_f64().unwrap() >= padding - 1e-3));
    assert!(updates.iter().any(|line| line["padding_saved"].as_f64().unwrap() <= padding + 1e-3));
    let folder = std::fs::read_dir(run.join("checkpoint/step-6")).unwrap();
    let size: u64 = folder.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(number("checkpoint") >= size as f64, "{size} {plan}");

    let memory = |key: &str| plan["memory"][key].as_u64().unwrap_or_else(|| panic!("{key}: {plan}"));
    let model = bits(&run, "step-6").model.len() as u64;
    assert!(memory("parameters").abs_diff(model) < model / 20, "{model} {plan}");
    assert_eq!(memory("moments"), 2 * memory("parameters"));
    assert_eq!((memory("gradient_arenas"), memory("gradients")), (3, 3 * memory("parameters")));
    assert!(memory("activations") > 0 && memory("total") < memory("available"), "{plan}");
}

#[test]
fn the_plan_of_a_run_that_goes_on_only_looks() {
    let place = Place::new();
    place.train("a", &["--total_steps", "5"]);
    let run = place.run_dir("a");
    let seen = || {
        let mut seen = Vec::new();
        let mut folders = vec![run.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                let meta = entry.metadata().unwrap();
                seen.push((entry.path(), meta.len(), meta.modified().unwrap()));
                if meta.is_dir() {
                    folders.push(entry.path());
                }
            }
        }
        seen.sort();
        seen
    };
    let before = seen();
    let plan = plan(&place, "a", &["--scheduler", "fixed", "--total_steps", "11"]);
    assert_eq!(
        (&plan["done"], &plan["updates"], &plan["sample_updates"]),
        (&5.into(), &11.into(), &6.into())
    );
    let message = failure(&place.run("a", &["--lr", "1", "--dry-run"]));
    assert!(message.contains("lr"), "{message}");
    assert_eq!(seen(), before);
}

#[test]
fn people_are_told_and_warned() {
    let place = Place::new();
    let flags =
        ["--dry-run", "--quiet", "--scheduler", "linear", "--warmup_steps", "100", "--keep_last", "0"];
    // Three million checkpoints do not fit on any disk.
    let output =
        place.train("a", &[&flags[..], &["--total_steps", "3000000000", "--save_freq", "1"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["examples ", "updates ", "tokens ", "padding ", "truncation ", "memory ", "time ", "disk "] {
        assert!(text.lines().any(|line| line.starts_with(part)), "{part}: {text}");
    }
    assert!(text.contains("warning: 3000000000 checkpoints of"), "{text}");
    let output = place.train("a", &[&flags[..], &["--total_steps", "50"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("warning: the warm-up of 100 updates does not fit into the run's 50"), "{text}");
}
