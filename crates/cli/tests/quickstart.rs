//! The quickstart as a user runs it, with few updates and few held-out questions.

use std::path::Path;
use std::process::{Command, Output};

fn quickstart(dir: &Path, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tercio"))
        .args(["quickstart", "--updates", "24", "--eval-questions", "30", "--dir", dir.to_str().unwrap()])
        .args(flags)
        .output()
        .expect("the binary runs")
}

fn figures(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "one line of JSON: {text}");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn trains_measures_draws_and_answers() {
    let folder = tempfile::tempdir().unwrap();
    let first = figures(&quickstart(folder.path(), &["--json"]));
    let number = |v: &serde_json::Value, key: &str| v[key].as_f64().unwrap_or_else(|| panic!("{key} in {v}"));
    assert_eq!((number(&first, "questions"), number(&first, "passages")), (30.0, 3.0));
    for key in ["exact_match_before", "exact_match", "f1", "majority", "overlap"] {
        assert!((0.0..=1.0).contains(&number(&first, key)), "{key} in {first}");
    }
    let run = folder.path().join("seed-1-updates-24");
    for file in ["loss.svg", "data/README.md", "1-one-passage/metrics.jsonl", "2-three-passages/config.toml"]
    {
        assert!(run.join(file).is_file(), "{file} is missing");
    }
    // The second phase began with what the first one learned: its loss is below that of a start from nothing.
    let losses = |phase: &str| -> Vec<f64> {
        let text = std::fs::read_to_string(run.join(phase).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        lines.filter(|l| l.get("event").is_none()).map(|l| l["loss"].as_f64().unwrap()).collect()
    };
    let (one, two) = (losses("1-one-passage"), losses("2-three-passages"));
    assert!(two.last().unwrap() < one.first().unwrap(), "{one:?} then {two:?}");

    // Started again it finds its work done, says the same, and answers three questions in words.
    let again = figures(&quickstart(folder.path(), &["--json"]));
    assert_eq!(again["exact_match"], first["exact_match"]);
    assert_eq!(again["f1"], first["f1"]);
    let words = quickstart(folder.path(), &[]);
    let text = String::from_utf8(words.stdout).unwrap();
    assert_eq!(text.matches("  answers: ").count(), 3, "{text}");
    assert!(text.contains("tercio answer --model_path") && text.contains("majority answer"), "{text}");

    // Another seed or length is another run: nothing goes on from the one that is there.
    let other = figures(&quickstart(folder.path(), &["--json", "--seed", "2", "--updates", "2"]));
    assert_eq!(number(&other, "seed"), 2.0);
    assert!(folder.path().join("seed-2-updates-2").is_dir());
    let shorter = figures(&quickstart(folder.path(), &["--json", "--updates", "3"]));
    assert_eq!(number(&shorter, "updates"), 3.0);
    let config = std::fs::read_to_string(run.join("1-one-passage/config.toml")).unwrap();
    assert!(config.contains("total_steps = 20\n"), "the first run is as it was: {config}");
}

#[test]
fn the_loop_goes_on_from_the_reader_and_can_be_done_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let first = figures(&quickstart(folder.path(), &["--json", "--loop"]));
    let rows = first["loop"]["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["passages"].as_str().unwrap()).collect();
    assert_eq!((names[0], names.len()), ("BM25", 8), "{names:?}");
    assert!(rows[0]["hits"][3].as_f64().unwrap() > 0.5, "words find most passages: {first}");
    assert!(rows.iter().all(|row| row["reader"].is_null() || row["exact_match"].is_f64()), "{first}");
    // Started again, or by the command that it names, there is nothing to do.
    let again = figures(&quickstart(folder.path(), &["--json", "--loop"]));
    assert_eq!(again["loop"], first["loop"]);
    let config = folder.path().join("seed-1-updates-24/loop/loop.toml");
    let by_hand = Command::new(env!("CARGO_BIN_EXE_tercio"))
        .args(["loop", "--config", config.to_str().unwrap(), "--dry-run"])
        .output()
        .unwrap();
    let text = String::from_utf8(by_hand.stdout).unwrap();
    assert_eq!(text.lines().count(), text.matches("  up to date (").count(), "{text}");
    // In words it ends with the table and what to do next.
    let words = quickstart(folder.path(), &["--loop"]);
    let text = String::from_utf8(words.stdout).unwrap();
    assert!(text.contains("| retriever of round 2 and BM25 "), "{text}");
    assert!(text.contains("--interactive") && text.contains("--rounds 3"), "{text}");
}
