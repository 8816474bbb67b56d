//! `tercio train retriever` on one rank and several: the same bits for every loss, after a kill too; a live teacher; what it
//! refuses.

mod ranks_support;
mod retriever_support;
mod support;

use std::path::Path;

use ranks_support::start;
use retriever_support::*;
use support::*;

/// Losses in which passages of the whole update meet, and the one in which they do not.
const LOSSES: [&[&str]; 3] = [
    &["--loss", "kl"],
    &["--loss", "contrastive", "--normalize", "--temperature", "0.05"],
    &["--loss", "both", "--kl_mean", "batch"],
];

#[test]
fn two_and_four_ranks_give_the_bits_of_one() {
    let corner = Corner::new();
    for (i, loss) in LOSSES.into_iter().enumerate() {
        let run = |name: &str, ranks: usize, more: &[&str]| {
            let name = format!("{name}-{i}");
            let flags = [loss, more].concat();
            start(&corner.place.path(""), ranks, |_| corner.command(&name, &flags)).succeed();
            let dir = corner.place.run_dir(&name);
            (bits(&dir, "step-8"), losses(&dir))
        };
        let one = run("one", 1, &[]);
        for (name, ranks, more) in [
            ("two", 2, &["--threads", "2"][..]),
            ("four", 4, &["--shard", "optimizer"]),
            ("again", 1, &["--recompute"]),
        ] {
            let many = run(name, ranks, more);
            assert_eq!(many.1, one.1, "{loss:?}, {ranks} ranks: losses");
            assert!(many.0 == one.0, "{loss:?}, {ranks} ranks: parameters and moments differ");
        }
        let bf16 = run("bf16", 1, &["--bf16", "--bit_groups", "4"]);
        assert!(bf16.0 != one.0, "{loss:?}: bf16 has no effect");
        assert!(
            run("bf16-four", 4, &["--bf16", "--bit_groups", "4"]) == bf16,
            "{loss:?} in bf16: other bits"
        );
        let first = f64::from_bits(one.1[0].1);
        assert!(one.1.iter().any(|l| f64::from_bits(l.1) < 0.9 * first), "{loss:?}: nothing was learned");
    }
}

#[test]
fn negatives_of_other_shards_are_negatives() {
    let corner = Corner::new();
    let of = |name: &str, flags: &[&str]| {
        let flags = [&["--loss", "contrastive", "--dropout", "0", "--total_steps", "3"], flags].concat();
        corner.train(name, &flags);
        losses(&corner.place.run_dir(name)).into_iter().map(|l| f64::from_bits(l.1)).collect::<Vec<_>>()
    };
    let (whole, cut) = (of("whole", &["--micro_batch_size", "8"]), of("cut", &["--micro_batch_size", "1"]));
    for (a, b) in whole.iter().zip(&cut) {
        assert!((a - b).abs() < 1e-4 * a.abs(), "one big batch {whole:?}, shards of one question {cut:?}");
    }
    // Against its own two passages alone a question has less to lose.
    let alone = of("alone", &["--micro_batch_size", "1", "--global_batch_size", "1"]);
    assert!(alone[0] < 0.6 * whole[0], "{alone:?} {whole:?}");
}

#[test]
fn killed_it_goes_on_to_the_same_bits() {
    let corner = Corner::new();
    let eval = corner.place.path("eval.jsonl");
    let flags = [
        "--loss",
        "both",
        "--total_steps",
        "30",
        "--eval_data",
        eval.to_str().unwrap(),
        "--eval_freq",
        "10",
        "--optim",
        "adamw",
        "--scheduler",
        "linear",
        "--warmup_steps",
        "3",
    ];
    corner.train("whole", &flags);
    let (whole, run) = (corner.place.run_dir("whole"), corner.place.run_dir("killed"));
    for after in [2, 4] {
        let begun = begins(&run) + 1;
        let mut ranks = start(&corner.place.path(""), after, |_| {
            corner.command("killed", &[&flags[..], &["--save_freq", "3"]].concat())
        });
        let ready = ranks.wait_for(|| updates_of(&run, begun) >= 4 + after);
        assert!(ready && logged(&run) < 30, "it was done before it was killed: {}", ranks.talk());
        drop(ranks);
    }
    corner.train("killed", &flags);
    assert!(events(&run, "resume").iter().any(|&step| step > 0), "{:?}", events(&run, "resume"));
    assert_eq!(losses(&run), losses(&whole), "every update is logged once, with the same loss");
    assert!(bits(&run, "step-30") == bits(&whole, "step-30"), "parameters, head and moments differ");
    assert_eq!(events(&run, "eval"), [10, 20, 30]);
    assert_eq!(evaluations(&run), evaluations(&whole), "figures do not depend on the number of ranks");
    let last = evaluations(&run).pop().unwrap();
    for name in ["loss", "inversions", "avg_top1", "idx_top2", "mrr", "ndcg_10", "recall_1"] {
        assert!(last[name].is_number(), "{name}: {last}");
    }
    assert!(last["mrr"].as_f64().unwrap() > 0.8, "what it was trained on is not learned: {last}");

    // The same figures of the saved model, by the command; more of it where all passages are measured.
    let measure = |ranks: usize, flags: &[&str]| {
        let run = corner.place.run_dir("whole").join("checkpoint/step-30");
        let words = [
            "eval",
            "retriever",
            "--model_path",
            run.to_str().unwrap(),
            "--eval_data",
            eval.to_str().unwrap(),
        ];
        let more = ["--json", "--threads", "1", "--per_gpu_batch_size", "2"];
        let text =
            start(&corner.place.path(""), ranks, |_| tercio(&[&words[..], &more, flags].concat())).succeed();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let (one, two) = (measure(1, &["--n_context", "3"]), measure(2, &["--n_context", "3"]));
    assert_eq!(one, two, "two ranks");
    for name in ["inversions", "avg_top1", "idx_top2", "mrr", "ndcg_10", "recall_1"] {
        assert_eq!(one[name], last[name], "{name}: {one} {last}");
    }
    // Which loss the model was trained with its folder does not say.
    assert!(one["kl_element_mean"].is_number() && one.get("loss").is_none(), "{one}");
    assert!(measure(1, &[])["inversions"].as_f64() >= one["inversions"].as_f64());
}

fn logged(run: &std::path::Path) -> usize {
    losses(run).len()
}

#[test]
fn a_teacher_gives_the_scores_that_it_would_write() {
    let corner = Corner::new();
    let reader = golden().join("fid_reader_t5v10/model");
    let reader = reader.to_str().unwrap();
    let unscored = corner.place.path("unscored.jsonl");
    let path = |name: &str| corner.place.path(name).to_str().unwrap().to_owned();
    let data = unscored.to_str().unwrap();
    let output = tercio(&["eval", "reader", "--model_path", reader, "--eval_data", data, "--n_context", "4"])
        .args([
            "--write_crossattention_scores",
            "--name",
            "scores",
            "--checkpoint_dir",
            &path("runs"),
            "--threads",
            "1",
        ])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let written = path("runs/scores/dataset_wscores.json");
    let flags = ["--n_context", "4", "--dropout", "0", "--total_steps", "3", "--eval_freq", "2"];
    corner.train("file", &[&flags[..], &["--train_data", &written, "--eval_data", &written]].concat());
    let live = [&flags[..], &["--train_data", data, "--eval_data", data, "--teacher", reader]].concat();
    corner.train("live", &live);
    start(&corner.place.path(""), 2, |_| corner.command("ranks", &live)).succeed();
    let run = |name: &str| corner.place.run_dir(name);
    for (a, b) in losses(&run("file")).into_iter().zip(losses(&run("live"))) {
        let (a, b) = (f64::from_bits(a.1), f64::from_bits(b.1));
        assert!(a > 0.0 && (a - b).abs() < 1e-3 * a, "file {a}, live {b}");
    }
    assert!(bits(&run("ranks"), "step-3") == bits(&run("live"), "step-3"), "two ranks: other bits");
    assert_eq!(evaluations(&run("ranks")), evaluations(&run("live")));
    // Another teacher is another run.
    let other = golden().join("fid_reader_t5v11/model");
    let flags = [&live[..], &["--teacher", other.to_str().unwrap(), "--total_steps", "4"]].concat();
    let text = failure(&corner.run("live", &flags));
    assert!(text.contains("is not that of the checkpoint"), "{text}");
}

#[test]
fn a_question_without_passages_gets_no_other_ones_scores() {
    let corner = Corner::new();
    let reader = golden().join("fid_reader_t5v10/model");
    let lines = examples(6, true);
    let empty = "{\"question\": \"nothing was found\", \"answers\": [], \"ctxs\": []}\n";
    let second = lines.find('\n').unwrap() + 1;
    corner.place.write("full.jsonl", &lines);
    corner.place.write("gap.jsonl", &format!("{}{empty}{}", &lines[..second], &lines[second..]));
    let run = |name: &str, file: &str, flags: &[&str]| {
        let data = corner.place.path(file);
        let both = ["--loss", "both", "--total_steps", "1", "--eval_freq", "1", "--micro_batch_size", "4"];
        let more = ["--teacher", reader.to_str().unwrap(), "--eval_data", data.to_str().unwrap()];
        corner.run(name, &[&both[..], &more, flags].concat())
    };
    let distilled = run("distilled", "gap.jsonl", &[]);
    let text = failure(&distilled);
    assert_eq!(distilled.status.code(), Some(1), "{text}");
    assert!(["gap.jsonl", "line 2", "a question with passages"].iter().all(|w| text.contains(w)), "{text}");
    // Where no scores are learned it has no figures, and the others have theirs.
    for (name, file) in [("gap", "gap.jsonl"), ("full", "full.jsonl")] {
        let output = run(name, file, &["--kl_weight", "0"]);
        assert!(output.status.success(), "{file}: {}", stderr(&output));
    }
    let of = |name: &str| evaluations(&corner.place.run_dir(name)).pop().unwrap();
    let (gap, full) = (of("gap"), of("full"));
    assert!(full["inversions"].is_number(), "{full}");
    assert_eq!(gap, full);
}

#[test]
fn other_answers_of_a_question_are_no_negatives_of_it() {
    let corner = Corner::new();
    corner
        .place
        .write("answers.jsonl", &examples(8, true).replace("\"hasanswer\":false", "\"hasanswer\":true"));
    let data = corner.place.path("answers.jsonl");
    let flags = ["--loss", "both", "--train_data", data.to_str().unwrap(), "--total_steps", "2"];
    // Alone in its update a question has its positive and nothing to tell it from.
    let alone = ["--kl_weight", "0", "--global_batch_size", "1"];
    corner.train("alone", &[&flags[..], &alone].concat());
    let lost: Vec<f64> = losses(&corner.place.run_dir("alone")).iter().map(|l| f64::from_bits(l.1)).collect();
    assert!(lost.len() == 2 && lost.iter().all(|&l| l == 0.0), "{lost:?}");
    let run = |name: &str, ranks: usize| {
        let smoothed = [&flags[..], &["--label_smoothing", "0.1"]].concat();
        start(&corner.place.path(""), ranks, |_| corner.command(name, &smoothed)).succeed();
        let dir = corner.place.run_dir(name);
        (bits(&dir, "step-2"), losses(&dir))
    };
    let (one, two) = (run("one", 1), run("two", 2));
    assert_eq!(one.1, two.1);
    assert!(one.0 == two.0, "parameters and moments differ");
    assert!(f64::from_bits(one.1[0].1) > 0.0, "{:?}", one.1);
}

#[test]
fn lengths_are_the_retrievers_where_none_are_given() {
    let corner = Corner::new();
    corner.train("first", &["--total_steps", "1"]);
    let run = corner.place.run_dir("first");
    let settings = std::fs::read_to_string(run.join("config.toml")).unwrap();
    let lengths =
        |line: &&str| ["question_maxlength", "passage_maxlength"].iter().any(|k| line.starts_with(k));
    assert_eq!(settings.lines().filter(lengths).count(), 2, "{settings}");
    let without: Vec<&str> = settings.lines().filter(|line| !lengths(line)).collect();
    corner.place.write("without.toml", &without.join("\n"));
    let (config, saved) = (corner.place.path("without.toml"), run.join("checkpoint/step-1"));
    // The second time it goes on from what the first has saved.
    for (steps, model) in [("1", &saved), ("2", &golden().join("fid_retriever/model"))] {
        let words = ["train", "retriever", "--config", config.to_str().unwrap(), "--name", "second"];
        let more = ["--total_steps", steps, "--model_path", model.to_str().unwrap()];
        let output = tercio(&[&words[..], &more].concat()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let path = corner.place.run_dir("second").join(format!("checkpoint/step-{steps}/config.json"));
        let shape: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let lengths = (&shape["question_maxlength"], &shape["passage_maxlength"]);
        assert_eq!(lengths, (&24.into(), &48.into()), "step {steps}");
    }
}

#[test]
fn the_stored_settings_give_the_run_again() {
    let corner = Corner::new();
    let flags = [
        "--loss",
        "both",
        "--hard_negatives",
        "2",
        "--draw_negatives",
        "--seed",
        "7",
        "--temperature",
        "0.5",
    ];
    corner.train("first", &flags);
    let config = corner.place.run_dir("first").join("config.toml");
    let words = ["train", "retriever", "--config", config.to_str().unwrap(), "--name", "again"];
    let output = tercio(&words).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let (first, again) = (corner.place.run_dir("first"), corner.place.run_dir("again"));
    assert!(bits(&first, "step-8") == bits(&again, "step-8"), "parameters and moments differ");
    let text = |run: &std::path::Path| std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert_eq!(text(&first).replace("\"first\"", "\"again\""), text(&again));
    let printed =
        tercio(&["config", "print-retriever", "--config", config.to_str().unwrap()]).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap().trim_end(), text(&first).trim_end());
}

#[test]
fn forms_of_training_data() {
    let corner = Corner::new();
    let dpr = "{\"question\": \"q one\", \"answers\": [], \"positive_ctxs\": [{\"title\": \"a\", \"text\": \"b\"}], \
               \"negative_ctxs\": [], \"hard_negative_ctxs\": [{\"title\": \"\", \"text\": \"c\"}]}\n";
    corner.place.write("dpr.jsonl", &dpr.repeat(8));
    corner.place.write("rows.tsv", &"what is it\tit is a river\tno \"quote\"\tthree\n".repeat(8));
    corner.place.write(
        "triples.jsonl",
        &"{\"query\": \"é 日本\", \"positive\": \"x\", \"negatives\": [\"\"]}\n".repeat(8),
    );
    for name in ["dpr.jsonl", "rows.tsv", "triples.jsonl"] {
        let path = corner.place.path(name);
        let flags = ["--loss", "contrastive", "--total_steps", "1", "--train_data", path.to_str().unwrap()];
        corner.train(name, &flags);
        assert!(f64::from_bits(losses(&corner.place.run_dir(name))[0].1) > 0.0, "{name}");
    }
}

#[test]
fn what_cannot_be_trained_is_named() {
    let corner = Corner::new();
    let path = |name: &str| corner.place.path(name).to_str().unwrap().to_owned();
    let unscored = path("unscored.jsonl");
    corner
        .place
        .write("negative.jsonl", &"{\"query\": \"a\", \"positive\": [], \"negatives\": [\"b\"]}\n".repeat(8));
    corner.place.write("rows.tsv", "a\tb\tc\nonly\ttwo\n");
    corner
        .place
        .write("nan.jsonl", "{\"question\": \"a\", \"ctxs\": [{\"text\": \"b\", \"score\": \"nan\"}]}\n");
    let reader = golden().join("fid_reader_t5v10/model");
    let cases: [(&[&str], i32, &[&str]); 16] = [
        (&["--eval_data", &unscored, "--total_steps", "1"], 1, &["unscored.jsonl", "line 1", "score"]),
        (&["--n_context", "1"], 2, &["--n_context 1", "at least 2"]),
        (&["--temperature", "0"], 2, &["--temperature"]),
        (&["--teacher_temperature", "nan"], 2, &["--teacher_temperature"]),
        (&["--indexing_dimension", "0"], 2, &["--indexing_dimension 0"]),
        (&["--label_smoothing", "0.1"], 2, &["--label_smoothing", "--loss contrastive"]),
        (&["--loss", "contrastive", "--teacher", "x"], 2, &["--teacher"]),
        (&["--passage_template", "{body}"], 2, &["{text}"]),
        (
            &["--loss", "both", "--kl_weight", "0", "--contrastive_weight", "0"],
            2,
            &["--kl_weight 0", "--contrastive_weight 0"],
        ),
        (
            &["--loss", "contrastive", "--hard_negatives", "0", "--global_batch_size", "1"],
            2,
            &["--hard_negatives"],
        ),
        (&["--train_data", &unscored], 1, &["unscored.jsonl", "line ", "score"]),
        (
            &["--train_data", &path("negative.jsonl"), "--loss", "contrastive"],
            1,
            &["negative.jsonl", "line ", "positive"],
        ),
        (
            &["--train_data", &path("rows.tsv"), "--loss", "contrastive", "--global_batch_size", "2"],
            1,
            &["line 2", "3 or more fields"],
        ),
        (&["--train_data", &path("nan.jsonl"), "--global_batch_size", "1"], 1, &["line 1", "finite number"]),
        (&["--model_path", reader.to_str().unwrap()], 1, &["t5"]),
        (&["--question_maxlength", "1"], 1, &["2 tokens"]),
    ];
    for (i, (flags, code, words)) in cases.into_iter().enumerate() {
        let output = corner.run(&format!("bad-{i}"), flags);
        let text = failure(&output);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {text}");
        assert!(words.iter().all(|w| text.contains(w)), "{flags:?}: expected {words:?} in: {text}");
    }
    // Another loss is another run.
    corner.train("kl", &["--total_steps", "1"]);
    let text = failure(&corner.run("kl", &["--total_steps", "2", "--loss", "both"]));
    assert!(text.contains("loss") && text.contains("--new-run"), "{text}");
}

#[test]
fn a_plan_and_a_saved_model() {
    let corner = Corner::new();
    let output = corner.train("plan", &["--loss", "both", "--dry-run", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&plan["examples"], &plan["shards"], &plan["measured_updates"]),
        (&24.into(), &8.into(), &2.into())
    );
    assert!(!corner.place.run_dir("plan").exists());

    // A new head on an encoder, in bf16; then a run of its own from what was saved.
    let flags = ["--total_steps", "2", "--no_projection", "--bf16", "--extract_cls"];
    corner.train("first", &flags);
    let saved = corner.place.run_dir("first").join("checkpoint/step-2");
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["projection"], &config["extract_cls"]), (&false.into(), &true.into()), "{config}");
    corner
        .train("second", &["--total_steps", "1", "--model_path", saved.to_str().unwrap(), "--no_projection"]);
    let text = failure(&corner.run("third", &["--indexing_dimension", "17"]));
    assert!(text.contains("--indexing_dimension 17") && text.contains("24"), "{text}");
}

#[test]
fn vectors_of_length_one_are_asked_for_or_taken_over_from_sentence_transformers() {
    let corner = Corner::new();
    let config_of = |name: &str| -> serde_json::Value {
        let saved = corner.place.run_dir(name).join("checkpoint/step-2/config.json");
        serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap()
    };
    let flags = ["--total_steps", "2", "--loss", "both", "--temperature", "0.05"];
    corner.train("any", &flags);
    assert_eq!(config_of("any").get("normalize"), None, "FiD's folders know nothing of it");
    corner.train("one", &[&flags[..], &["--normalize"]].concat());
    assert_eq!(config_of("one")["normalize"], true);
    assert_ne!(losses(&corner.place.run_dir("any")), losses(&corner.place.run_dir("one")));
    // Whoever opens it afterwards gets such vectors.
    corner.place.write("passages.tsv", "id\ttext\ttitle\n1\ta lake\tone\n2\tthe sea, the sea\ttwo\n");
    let passages = corner.place.path("passages.tsv");
    let out = corner.place.path("vectors");
    let run = corner.place.run_dir("one");
    let output =
        tercio(&["embed", "--model_path", run.to_str().unwrap(), "--passages", passages.to_str().unwrap()])
            .args(["--output".as_ref(), out.as_os_str()])
            .output()
            .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let bytes = std::fs::read(out.join("shard-00000.vectors")).unwrap();
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    for vector in values.chunks_exact(values.len() / 2) {
        let square: f32 = vector.iter().map(|v| v * v).sum();
        assert!((square - 1.0).abs() < 1e-5, "{square}");
    }

    // sentence-transformers' folders say it themselves.
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/sentence");
    let text = failure(&corner.run("dense", &["--model_path", cases.join("dense").to_str().unwrap()]));
    assert!(text.contains("Dense") && text.contains("modules.json"), "{text}");
    let folder = corner.place.path("cls");
    copy(&cases.join("cls"), &folder);
    let modules = std::fs::read_to_string(folder.join("modules.json")).unwrap();
    let norm = r#", {"idx": 2, "name": "2", "path": "2_Normalize", "type": "a.Normalize"}]"#;
    let modules = modules.trim_end().trim_end_matches(']').to_owned() + norm;
    std::fs::write(folder.join("modules.json"), modules).unwrap();
    let flags =
        ["--total_steps", "2", "--no_projection", "--question_maxlength", "12", "--passage_maxlength", "12"];
    corner.train("own", &[&flags[..], &["--model_path", folder.to_str().unwrap()]].concat());
    let config = config_of("own");
    assert_eq!((&config["extract_cls"], &config["normalize"]), (&true.into(), &true.into()), "{config}");
}

/// Copies a folder with those in it.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}
