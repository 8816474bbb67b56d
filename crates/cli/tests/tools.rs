//! The commands that look at data, models, settings and speed, and flags that nobody should give.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;
use support::*;

fn run(words: &[&str]) -> Output {
    let mut command = tercio(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap())
}

fn stdout(words: &[&str]) -> String {
    let output = run(words);
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn json(words: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[words, &["--json"]].concat())).unwrap()
}

fn model(case: &str) -> String {
    golden().join(case).to_str().unwrap().to_owned()
}

#[test]
fn data_check_counts_and_names_every_bad_line() {
    let place = Place::new();
    let tokenizer = model("fid_reader_t5v10/model");
    let good = place.path("train.jsonl").to_str().unwrap().to_owned();
    let report = json(&["data", "check", &good, "--tokenizer", &tokenizer, "--n_context", "2"]);
    assert_eq!((&report["items"], &report["bad"]), (&24.into(), &0.into()));
    assert_eq!(report["tokens"]["passages"]["sequences"], 48);
    let lines = fs::read_to_string(&good).unwrap();
    place.write("bad.jsonl", &format!("{{\"question\": 1}}\n{lines}not json\n"));
    let bad = place.path("bad.jsonl").to_str().unwrap().to_owned();
    let output = run(&["data", "check", &bad]);
    let text = failure(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("bad.jsonl, line 1 ") && text.contains("bad.jsonl, line 26 "), "{text}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("26 items, 2 faults"));
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 3, "no index beside the data");
}

#[test]
fn model_inspect_tells_layouts_apart() {
    let plain = json(&["model", "inspect", &model("fid_reader_t5v10/model")]);
    let legacy = json(&["model", "inspect", &model("fid_reader_t5v10/model_fid_layout")]);
    let gated = json(&["model", "inspect", &model("fid_reader_t5v11/model")]);
    let of = |r: &Value| ["tied", "fid_layout", "cross_attention_bias"].map(|k| r[k].as_bool().unwrap());
    assert_eq!(of(&plain), [true, false, false]);
    assert_eq!(of(&legacy), [true, true, true]);
    assert_eq!(of(&gated), [false, false, false]);
    assert_eq!(gated["feed_forward"], "gated-gelu");
    let table = plain["num_heads"].as_u64().unwrap() * 32;
    let count = |r: &Value| r["parameters"].as_u64().unwrap();
    assert_eq!(count(&legacy), count(&plain) + table, "the bias table of cross-attention");
    assert_eq!(plain["run_bytes"], 4 * count(&plain));
    assert_eq!((&plain["dtypes"][0], &plain["tokenizer"]), (&"f32".into(), &"tokenizer.json".into()));
    assert!(legacy["tokenizer"].is_null());
}

#[test]
fn model_inspect_knows_encoders_and_what_is_behind_them() {
    let of = |case: &str, kind: &str| {
        let report = json(&["model", "inspect", &model(case)]);
        assert_eq!(report["kind"], kind, "{report}");
        assert_eq!(report["run_bytes"], 4 * report["parameters"].as_u64().unwrap(), "{report}");
        report
    };
    let retriever = of("fid_retriever/model", "retriever");
    assert_eq!((&retriever["architecture"], &retriever["pooling"]), (&"bert".into(), &"mean".into()));
    assert_eq!(retriever["normalized"], false, "{retriever}");
    let colbert = of("colbert/model", "colbert");
    let config = fs::read_to_string(Path::new(&model("colbert/model")).join("1_Dense/config.json")).unwrap();
    let dense: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(colbert["dimension"], dense["out_features"]);
    assert!(
        colbert["lengths"].as_array().unwrap().len() == 2 && !colbert["tokenizer"].is_null(),
        "{colbert}"
    );
    let encoder = of("flair_classifier/model", "encoder");
    assert!(encoder["labels"].is_null() && encoder["dimension"].is_null(), "{encoder}");
    // The encoder's own count, and what a classifier has beyond it.
    let place = Place::new();
    let copy = place.path("copy");
    fs::create_dir(&copy).unwrap();
    let mut config: Value = serde_json::from_str(
        &fs::read_to_string(Path::new(&model("flair_classifier/model")).join("config.json")).unwrap(),
    )
    .unwrap();
    config["architectures"] = serde_json::json!(["BertForSequenceClassification"]);
    fs::write(copy.join("config.json"), config.to_string()).unwrap();
    let file = "model.safetensors";
    fs::copy(Path::new(&model("flair_classifier/model")).join(file), copy.join(file)).unwrap();
    let text = failure(&run(&["model", "inspect", copy.to_str().unwrap()]));
    assert!(text.contains("classifier.weight"), "a classifier without its head: {text}");
    config["architectures"] = serde_json::json!(["BertModel"]);
    config["num_hidden_layers"] = (config["num_hidden_layers"].as_u64().unwrap() + 1).into();
    fs::write(copy.join("config.json"), config.to_string()).unwrap();
    let text = failure(&run(&["model", "inspect", copy.to_str().unwrap()]));
    assert!(text.contains("encoder.layer."), "a layer that is not there: {text}");
}

#[test]
fn a_runs_folder_stands_for_its_best_checkpoint_and_wrong_shapes_are_told() {
    let place = Place::new();
    let target = fs::canonicalize(model("fid_reader_t5v10/model")).unwrap();
    let links = place.run_dir("r").join("checkpoint");
    fs::create_dir_all(&links).unwrap();
    std::os::unix::fs::symlink(&target, links.join("best_dev")).unwrap();
    let report = json(&["model", "inspect", place.run_dir("r").to_str().unwrap()]);
    assert!(report["path"].as_str().unwrap().ends_with("checkpoint/best_dev"), "{report}");

    let copy = place.path("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(target.join("model.safetensors"), copy.join("model.safetensors")).unwrap();
    let config = fs::read_to_string(target.join("config.json")).unwrap();
    for (field, value, want) in [
        ("d_ff", "127", "asks for [127"),
        ("num_layers", "16777215", "`num_layers`: expected at most 1024 layers"),
        ("d_model", "16777215", "more than 2^40 values"),
        ("num_heads", "0", "`num_heads`: expected a positive number"),
    ] {
        let mut changed: Value = serde_json::from_str(&config).unwrap();
        changed[field] = value.parse::<u64>().unwrap().into();
        if field == "d_model" {
            changed["d_kv"] = changed[field].clone();
        }
        fs::write(copy.join("config.json"), changed.to_string()).unwrap();
        let text = failure(&run(&["model", "inspect", copy.to_str().unwrap()]));
        assert!(text.contains(want), "{text}");
    }
}

#[test]
fn printed_settings_give_themselves_again() {
    let place = Place::new();
    let flags = ["--lr", "3e-4", "--per_gpu_batch_size", "4", "--accumulation_steps", "2", "--no_title"];
    let printed = stdout(&[&["config", "print"], &flags[..]].concat());
    for line in
        ["lr = 0.0003", "global_batch_size = 8", "micro_batch_size = 4", "no_title = true", "clip = 1.0"]
    {
        assert!(printed.lines().any(|l| l == line), "{line}: {printed}");
    }
    place.write("c.toml", &printed);
    let again = stdout(&["config", "print", "--config", place.path("c.toml").to_str().unwrap()]);
    assert_eq!(again, printed);
    let text = failure(&run(&["config", "print", "--global_batch_size", "3", "--micro_batch_size", "2"]));
    assert!(text.contains("not a multiple"), "{text}");
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&["completions", shell]);
        assert!(script.contains("inspect") && script.contains("write-crossattention-scores"), "{shell}");
    }
}

#[test]
fn bench_has_the_peers_fields() {
    let place = Place::new();
    let folder = model("fid_reader_t5v11/model");
    let (input, config) = (place.path("train.jsonl"), format!("{folder}/config.json"));
    let common = ["--input", input.to_str().unwrap(), "--tokenizer", &folder, "--model_config", &config];
    let sizes =
        ["--questions", "2", "--passages", "2", "--steps", "2", "--threads", "2", "--text_maxlength", "40"];
    let ours = |mode: &str, more: &[&str]| {
        json(&[&["bench", "reader", mode][..], &common[..], &sizes[..], more].concat())
    };
    let train = ours("train", &[]);
    for field in
        ["seconds_per_step", "real_tokens_per_second", "real_fraction", "peak_rss_gb", "share_of_peak"]
    {
        assert!(train[field].as_f64().unwrap() > 0.0, "{field}: {train}");
    }
    assert_eq!((&train["questions"], &train["passages"]), (&2.into(), &2.into()));
    assert!(train["real_fraction"].as_f64().unwrap() <= 1.0);
    let losses = |r: &Value| r["losses"].as_array().unwrap().clone();
    assert_eq!(losses(&train).len(), 3, "the warm-up and two steps");
    assert_eq!(losses(&ours("train", &["--recompute"])), losses(&train), "recomputing changes no bit");
    assert!(losses(&ours("generate", &[])).is_empty());
    let profiled = ours("train", &["--profile"]);
    assert_eq!(losses(&profiled), losses(&train), "looking changes no bit");
    assert!(train.get("profile").is_none());
    let lines = profiled["profile"].as_array().unwrap();
    let kinds: Vec<&str> = lines.iter().map(|line| line["operation"].as_str().unwrap()).collect();
    for kind in ["attention", "attention, backward", "norms", "loss", "optimizer", "between kernels"] {
        assert!(kinds.contains(&kind), "{kind}: {kinds:?}");
    }
    assert!(kinds.iter().any(|kind| kind.starts_with("product T x ")), "{kinds:?}");
    let share: f64 = lines.iter().map(|line| line["share"].as_f64().unwrap()).sum();
    assert!((share - 1.0).abs() < 1e-6, "{share}");
    let table = stdout(&[&["bench", "reader", "generate"][..], &common[..], &sizes[..]].concat());
    assert!(table.contains("seconds per step") && table.contains("share of peak"), "{table}");
    assert!(!table.contains("where time goes"), "{table}");
    let table =
        stdout(&[&["bench", "reader", "generate", "--profile"][..], &common[..], &sizes[..]].concat());
    assert!(table.contains("where time goes") && table.contains("  choice of tokens "), "{table}");
    let text =
        failure(&run(&[&["bench", "reader", "train"][..], &common[..], &["--passages", "99"]].concat()));
    assert!(text.contains("item 0 has 3 passages, --passages asks for 99"), "{text}");
}

#[test]
fn hostile_flags_cost_a_sentence() {
    let place = Place::new();
    let folder = model("fid_reader_t5v10/model");
    let file = place.path("eval.jsonl").to_str().unwrap().to_owned();
    let big = "18446744073709551615";
    let eval = |more: &[&str]| {
        run(&[&["eval", "reader", "--model", &folder, "--eval_data", &file][..], more].concat())
    };
    for (flags, want) in [
        (&["--threads", big][..], "--threads"),
        (&["--text_maxlength", big], "--text_maxlength"),
        (&["--text_maxlength", "0"], "--text_maxlength 0: expected 1 to"),
        (&["--per_gpu_batch_size", big], "--per_gpu_batch_size"),
        (&["--generation_max_length", big], "--generation_max_length"),
        (&["--generation_max_length", "1"], "expected 2 to"),
        (&["--n_context", "-1"], "'-1'"),
        (&["--maxload", "0"], "--maxload must be -1"),
        (&["--eval_print_freq", "0"], "--eval_print_freq must be at least 1"),
        (&["--name", "../elsewhere", "--write_results"], "must be the name of a folder"),
        (&["--local_rank", "0"], "RANK is not set"),
        (&["--scores"], "name a file there"),
        (&["--n_context", "0", "--write_crossattention_scores"], "needs passages"),
        (&["--nonsense"], "unexpected argument"),
    ] {
        let output = eval(flags);
        let text = failure(&output);
        assert!(output.status.code() == Some(2) && text.contains(want), "{flags:?}: {text}");
    }
    for (words, code, want) in [
        (&["answer", "--model", &folder][..], 2, "required"),
        (&["answer", "--model", &folder, "--passage", "x"], 2, "--question"),
        (&["answer", "--model", &folder, "--question", "x", &file], 2, "cannot be used with"),
        (&["answer", "--model", &folder, "--question", "x", "--scores"], 2, "--json"),
        (&["answer", "--model", "none", "--question", "x"], 2, "expected the folder or hub name"),
        (&["answer", "--model", "/nowhere", "--question", "x"], 1, "no folder `/nowhere`"),
        (&["answer", "--model", &file, "--question", "x"], 1, "is a file"),
        (&["answer", "--model", &folder, "/nowhere.jsonl"], 1, "check the path"),
        (&["data", "check", "/nowhere.jsonl"], 1, "check the path"),
        (&["data", "check", &folder], 1, "expected a name that ends in .json"),
        (
            &["bench", "reader", "train", "--input", &file, "--tokenizer", &folder, "--size", "huge"],
            2,
            "expected small",
        ),
        (&["bench", "reader", "train", "--input", &file, "--tokenizer", "/nowhere"], 1, "/nowhere"),
        (&["completions", "cmd"], 2, "invalid value"),
        (&["eval", "reader", "--config", "/nowhere.toml"], 2, "cannot read it"),
        (&["config"], 2, "print"),
    ] {
        let output = run(words);
        let text = failure(&output);
        assert!(output.status.code() == Some(code) && text.contains(want), "{words:?}: {text}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = tercio(&["completions", "bash"]);
    let output = finish(command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap());
    assert!(failure(&output).is_empty());
}
