//! `tercio train colbert` on one rank and several: the same bits for every loss and after a kill, odd documents, a live teacher, folders in
//! and out, what it refuses.

mod ranks_support;
mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use ranks_support::start;
use serde_json::{Value, json};
use support::*;

/// A [`Place`] with examples for a ColBERT model.
struct Corner {
    place: Place,
}

/// `n` queries with documents as JSONL, no two alike, made of the stored case's texts: triples, or documents with scores.
fn examples(n: usize, scored: bool) -> String {
    let text = std::fs::read_to_string(golden().join("colbert/input.json")).unwrap();
    let input: Value = serde_json::from_str(&text).unwrap();
    let (queries, documents) = (input["queries"].as_array().unwrap(), input["documents"].as_array().unwrap());
    let query = |i: usize| format!("{} {i}", queries[i % queries.len()].as_str().unwrap());
    let document = |i: usize| format!("{} {i}", documents[i % documents.len()].as_str().unwrap());
    let line = |i: usize| match scored {
        false => {
            let negatives: Vec<String> = (0..1 + i % 3).map(|k| document(7 * i + k + 1)).collect();
            json!({"query": query(i), "positive": document(i), "negatives": negatives})
        }
        true => {
            let ctx = |k: usize| {
                let score = 3.0 - k as f64 * 1.5 + (i % 3) as f64 * 0.2;
                json!({"title": "", "text": document(5 * i + k), "score": score, "hasanswer": k == 0})
            };
            json!({"question": query(i), "answers": [], "ctxs": (0..3).map(ctx).collect::<Vec<_>>()})
        }
    };
    (0..n).map(|i| format!("{}\n", line(i))).collect()
}

impl Corner {
    fn new() -> Corner {
        let place = Place::new();
        place.write("train.jsonl", &examples(24, false));
        place.write("eval.jsonl", &examples(7, false));
        place.write("scored.jsonl", &examples(24, true));
        Corner { place }
    }
    fn path(&self, name: &str) -> String {
        self.place.path(name).to_str().unwrap().to_owned()
    }
    fn command(&self, name: &str, flags: &[&str]) -> Command {
        let model = golden().join("colbert/model");
        let mut command =
            tercio(&["train", "colbert", "--name", name, "--model_path", model.to_str().unwrap()]);
        command.args(["--checkpoint_dir", &self.path("runs"), "--train_data", &self.path("train.jsonl")]);
        let settings = "--dropout 0.1 --global_batch_size 8 --micro_batch_size 1 --save_freq 5 --log_freq 1 --n_context 3 \
                        --hard_negatives 2 --lr 1e-3 --threads 1 --keep_last 0 --total_steps 8";
        command.args(settings.split_whitespace()).args(flags);
        command
    }
    fn run(&self, name: &str, flags: &[&str]) -> Output {
        finish(self.command(name, flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }
    fn train(&self, name: &str, flags: &[&str]) -> Output {
        let output = self.run(name, flags);
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }
    /// Trains by some ranks; what is left of it.
    fn among(&self, name: &str, ranks: usize, flags: &[&str]) -> Left {
        start(&self.place.path(""), ranks, |_| self.command(name, flags)).succeed();
        left(&self.place.run_dir(name), 8)
    }
}

/// Bits of the encoder and the moments, of the projection, and all losses.
type Left = (Bits, Vec<u8>, Vec<(u64, u64)>);

fn left(run: &Path, step: u64) -> Left {
    let folder = format!("step-{step}");
    let dense = std::fs::read(run.join("checkpoint").join(&folder).join("1_Dense/model.safetensors"));
    (bits(run, &folder), dense.unwrap(), losses(run))
}

fn evaluations(run: &Path) -> Vec<Value> {
    let mut lines = metrics(run);
    lines.retain(|line| line.get("event").is_some_and(|event| event == "eval"));
    for line in &mut lines {
        line.as_object_mut().unwrap().retain(|key, _| key != "time" && key != "seconds");
    }
    lines
}

#[test]
fn two_and_four_ranks_give_the_bits_of_one() {
    let corner = Corner::new();
    let scored = corner.path("scored.jsonl");
    let losses: [&[&str]; 5] = [
        &["--loss", "contrastive", "--temperature", "0.5"],
        &["--loss", "kl", "--train_data", &scored],
        &["--loss", "kl", "--raw_scores", "--zero_floor", "--train_data", &scored],
        &["--loss", "contrastive", "--temperature", "0.05", "--xtr_k", "200", "--lr", "3e-3"],
        &["--loss", "kl", "--xtr_k", "60", "--lr", "3e-3", "--train_data", &scored],
    ];
    for (i, loss) in losses.into_iter().enumerate() {
        let run = |name: &str, ranks: usize, more: &[&str]| {
            corner.among(&format!("{name}-{i}"), ranks, &[loss, more].concat())
        };
        let one = run("one", 1, &[]);
        for (name, ranks, more) in [
            ("two", 2, &["--threads", "2"][..]),
            ("four", 4, &["--shard", "optimizer"]),
            ("again", 1, &["--recompute"]),
        ] {
            assert!(run(name, ranks, more) == one, "{loss:?}, {ranks} ranks {more:?}: other bits");
        }
        let bf16 = run("bf16", 1, &["--bf16", "--bit_groups", "4"]);
        assert!(bf16.0 != one.0, "{loss:?}: bf16 has no effect");
        assert!(run("bf16-four", 4, &["--bf16", "--bit_groups", "4"]) == bf16, "{loss:?} in bf16");
        let of = |i: usize| f64::from_bits(one.2[i].1);
        assert!((1..one.2.len()).any(|i| of(i) < 0.95 * of(0)), "{loss:?}: nothing was learned: {:?}", one.2);
    }
}

#[test]
fn negatives_of_other_shards_are_negatives_and_the_last_batch_may_be_short() {
    let corner = Corner::new();
    let flags = ["--dropout", "0", "--global_batch_size", "10", "--last_batch", "keep", "--total_steps", "6"];
    let of = |name: &str, micro: &str, more: &[&str]| {
        corner.train(name, &[&flags[..], &["--micro_batch_size", micro], more].concat());
        losses(&corner.place.run_dir(name)).into_iter().map(|l| f64::from_bits(l.1)).collect::<Vec<_>>()
    };
    // 24 queries in batches of 10, 10 and 4. What XTR retrieves is of the whole update, too.
    for (i, more) in [&[][..], &["--xtr_k", "30", "--temperature", "0.2"]].into_iter().enumerate() {
        let whole = of(&format!("whole-{i}"), "10", more);
        for micro in ["5", "1"] {
            for (a, b) in whole.iter().zip(&of(&format!("cut-{i}-{micro}"), micro, more)) {
                assert!((a - b).abs() < 1e-3 * a.abs(), "{more:?}: one shard {whole:?}, shards of {micro}");
            }
        }
    }
    let run = |name: &str, ranks: usize| {
        let flags = [&flags[..], &["--micro_batch_size", "1", "--bit_groups", "2"]].concat();
        start(&corner.place.path(""), ranks, |_| corner.command(name, &flags)).succeed();
        left(&corner.place.run_dir(name), 6)
    };
    assert!(run("one", 1) == run("two", 2), "two ranks: other bits");
}

#[test]
fn killed_it_goes_on_to_the_same_bits() {
    let corner = Corner::new();
    let eval = corner.path("eval.jsonl");
    let flags: Vec<&str> =
        "--total_steps 30 --eval_freq 10 --optim adamw --scheduler linear --warmup_steps 3 --draw_negatives"
            .split_whitespace()
            .chain(["--eval_data", &eval])
            .collect();
    corner.train("whole", &flags);
    let (whole, run) = (corner.place.run_dir("whole"), corner.place.run_dir("killed"));
    for after in [2, 4] {
        let begun = begins(&run) + 1;
        let mut ranks = start(&corner.place.path(""), after, |_| {
            corner.command("killed", &[&flags[..], &["--save_freq", "3"]].concat())
        });
        let ready = ranks.wait_for(|| updates_of(&run, begun) >= 4 + after);
        assert!(ready && losses(&run).len() < 30, "it was done before it was killed: {}", ranks.talk());
        drop(ranks);
    }
    corner.train("killed", &flags);
    assert!(events(&run, "resume").iter().any(|&step| step > 0), "{:?}", events(&run, "resume"));
    assert!(left(&run, 30) == left(&whole, 30), "losses, parameters or moments differ");
    assert_eq!(evaluations(&run), evaluations(&whole), "figures do not depend on the number of ranks");
    let last = evaluations(&run).pop().unwrap();
    for name in ["loss", "mrr", "ndcg_10", "recall_1", "triplet_accuracy"] {
        assert!(last[name].is_number(), "{name}: {last}");
    }
    // The same figures of the saved model, by the command.
    let measure = |ranks: usize| {
        let saved = whole.join("checkpoint/step-30");
        let words = ["eval", "colbert", "--model_path", saved.to_str().unwrap(), "--eval_data", &eval];
        let more = ["--json", "--threads", "1", "--per_gpu_batch_size", "1"];
        let text = start(&corner.place.path(""), ranks, |_| tercio(&[&words[..], &more].concat())).succeed();
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let (one, two) = (measure(1), measure(2));
    assert_eq!(one, two, "two ranks");
    for name in ["loss", "mrr", "ndcg_10", "recall_1", "triplet_accuracy"] {
        assert_eq!(one[name], last[name], "{name}: {one} {last}");
    }
}

#[test]
fn odd_documents() {
    let corner = Corner::new();
    let long = "a wooden boat near the river ".repeat(40);
    let texts = ["", "!", "... !? ;", "x", long.as_str(), "日本語 é\u{301} 𝔘 \u{200b}", "[MASK] [D] [SEP]"];
    let line = |i: usize| {
        let query = ["who?", "é 日本", "", long.as_str()][i % 4];
        // A query without words has its special tokens.
        let query = if query.is_empty() { "?" } else { query };
        let text = |k: usize| texts[(i + k) % texts.len()];
        format!("{}\n", json!({"query": query, "positive": text(0), "negatives": [text(1), text(2)]}))
    };
    corner.place.write("odd.jsonl", &(0..16).map(line).collect::<String>());
    let data = corner.path("odd.jsonl");
    for (name, more) in [
        ("plain", &[][..]),
        ("floor", &["--zero_floor", "--attend_to_expansion"]),
        ("own-length", &["--no_expansion", "--no_skiplist"]),
        ("without", &["--query_prefix", "none", "--document_prefix", "none"]),
    ] {
        let flags = [&["--train_data", &data, "--total_steps", "3"], more].concat();
        let run = |name: &str, ranks: usize| {
            start(&corner.place.path(""), ranks, |_| corner.command(name, &flags)).succeed();
            left(&corner.place.run_dir(name), 3)
        };
        let one = run(name, 1);
        assert!(one.2.iter().all(|l| f64::from_bits(l.1) > 0.0), "{name}: {:?}", one.2);
        assert!(run(&format!("{name}-two"), 2) == one, "{name}: two ranks: other bits");
    }
}

#[test]
fn a_teacher_scores_on_the_fly() {
    let corner = Corner::new();
    let reader = golden().join("fid_reader_t5v10/model");
    let scored = corner.path("scored.jsonl");
    let flags = ["--loss", "kl", "--teacher", reader.to_str().unwrap(), "--train_data", &scored];
    let more = ["--eval_data", &scored, "--eval_freq", "8"];
    let one = corner.among("one", 1, &[&flags[..], &more].concat());
    assert!(corner.among("two", 2, &[&flags[..], &more].concat()) == one, "two ranks: other bits");
    assert_eq!(evaluations(&corner.place.run_dir("one")), evaluations(&corner.place.run_dir("two")));
    // The file's scores are others.
    let file = corner.among("file", 1, &["--loss", "kl", "--train_data", &scored]);
    assert_ne!(file.2, one.2);
}

#[test]
fn a_new_projection_and_a_saved_model() {
    let corner = Corner::new();
    // FiD's retriever has an encoder inside; the prefixes and the projection are new.
    let encoder = golden().join("fid_retriever/model");
    let first = ["--model_path", encoder.to_str().unwrap(), "--embedding_size", "12", "--total_steps", "2"];
    let lengths = ["--query_length", "16", "--document_length", "24"];
    corner.train("first", &[&first[..], &lengths].concat());
    let saved = corner.place.run_dir("first").join("checkpoint/step-2");
    let read =
        |name: &str| -> Value { serde_json::from_slice(&std::fs::read(saved.join(name)).unwrap()).unwrap() };
    let settings = read("config_sentence_transformers.json");
    assert_eq!(
        (&settings["query_length"], &settings["document_length"], &settings["query_prefix"]),
        (&16.into(), &24.into(), &"[Q] ".into())
    );
    assert_eq!(read("1_Dense/config.json")["out_features"], 12);
    let before: Value = serde_json::from_slice(&std::fs::read(encoder.join("config.json")).unwrap()).unwrap();
    let grown = read("config.json")["vocab_size"].as_u64().unwrap();
    assert!(grown >= before["vocab_size"].as_u64().unwrap(), "{grown}");
    let added = read("tokenizer.json")["added_tokens"].to_string();
    assert!(added.contains("\"[Q] \"") && added.contains("\"[D] \""), "{added}");
    // Lengths and prefixes are the saved model's where none are given; one more projection where another width is asked for.
    let saved = saved.to_str().unwrap();
    corner.train("second", &["--model_path", saved, "--total_steps", "1", "--embedding_size", "8"]);
    let second = corner.place.run_dir("second").join("checkpoint/step-1");
    let modules = std::fs::read_to_string(second.join("modules.json")).unwrap();
    assert!(modules.contains("1_Dense") && modules.contains("2_Dense"), "{modules}");
    // Nobody is given vectors of a projection that was never trained.
    corner.place.write("texts.jsonl", "{\"id\": \"1\", \"text\": \"the bell\"}\n");
    let passages = corner.path("texts.jsonl");
    let output = corner.path("random");
    let embed =
        ["embed", "--multi-vector", "--model_path", encoder.to_str().unwrap(), "--passages", &passages];
    let said = failure(&tercio(&[&embed[..], &["--output", &output]].concat()).output().unwrap());
    assert!(said.contains("without the projection of one; train it first"), "{said}");
    assert!(!Path::new(&output).exists());
    // A run goes on from its own folder, which has both layers.
    corner.train("second", &["--model_path", saved, "--total_steps", "2", "--embedding_size", "8"]);
}

/// The stored case's retrieval as a folder of BEIR: a query's first exact documents are its relevant ones.
fn collection(corner: &Corner) -> String {
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(golden().join("colbert").join(name)).unwrap()).unwrap()
    };
    let (input, expected) = (read("input.json"), read("expected.json"));
    let line = |v: Value| format!("{v}\n");
    let documents = input["retrieval_documents"].as_object().unwrap().iter();
    let corpus: String =
        documents.map(|(id, text)| line(json!({"_id": id, "title": "", "text": text}))).collect();
    let texts = input["retrieval_queries"].as_array().unwrap();
    let queries: String = texts
        .iter()
        .enumerate()
        .map(|(i, text)| line(json!({"_id": format!("q{i}"), "text": text})))
        .collect();
    let mut qrels = "query-id\tcorpus-id\tscore\n".to_owned();
    for (i, found) in expected["retrieval"]["exact_top10"].as_array().unwrap().iter().enumerate() {
        found
            .as_array()
            .unwrap()
            .iter()
            .for_each(|id| qrels += &format!("q{i}\t{}\t1\n", id.as_str().unwrap()));
    }
    std::fs::create_dir_all(corner.place.path("beir/qrels")).unwrap();
    corner.place.write("beir/corpus.jsonl", &corpus);
    corner.place.write("beir/queries.jsonl", &queries);
    corner.place.write("beir/qrels/test.tsv", &qrels);
    corner.path("beir")
}

#[test]
fn golden_colbert_search_of_a_collection_and_reranking() {
    let corner = Corner::new();
    let beir = collection(&corner);
    let model = golden().join("colbert/model");
    let model = model.to_str().unwrap();
    let measure = |ranks: usize| {
        let words = ["eval", "colbert", "--model_path", model, "--beir", &beir, "--json", "--threads", "1"];
        start(&corner.place.path(""), ranks, |_| tercio(&words)).succeed()
    };
    let one = measure(1);
    assert_eq!(one, measure(2), "two ranks");
    let figures: Value = serde_json::from_str(&one).unwrap();
    // The exact order is the stored one, up to ties at its end.
    for name in ["ndcg_10", "mrr_10", "recall_10", "accuracy_1"] {
        assert!(figures["beir"][name].as_f64().unwrap() > 0.999, "{name}: {figures}");
    }
    // While training it chooses the best checkpoint.
    corner.train("searched", &["--eval_beir", &beir, "--total_steps", "2", "--eval_freq", "1"]);
    let run = corner.place.run_dir("searched");
    assert!(evaluations(&run).iter().all(|e| e["beir_ndcg_10"].is_number()), "{:?}", evaluations(&run));
    assert!(run.join("checkpoint/best_dev").exists());
    // Scores by other judgements are of another measure: the best one is sought anew, even if it is worse.
    let judgements = std::fs::read_to_string(corner.place.path("beir/qrels/test.tsv")).unwrap();
    let rows: Vec<&str> = judgements.lines().skip(1).collect();
    let last_of = |query: &str| *rows.iter().rfind(|row| row.starts_with(&format!("{query}\t"))).unwrap();
    let fewer = format!("query-id\tcorpus-id\tscore\n{}\n{}\n", last_of("q0"), last_of("q1"));
    corner.place.write("beir/qrels/fewer.tsv", &fewer);
    let flags = ["--eval_beir", &beir, "--total_steps", "3", "--eval_freq", "1", "--json"];
    let output = corner.train("searched", &[&flags[..], &["--eval_beir_split", "fewer"]].concat());
    assert!(stderr(&output).contains("the evaluation data is not that of the checkpoint"));
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcome["best"]["step"], 3, "{outcome}");
    let score = |e: &Value| e["beir_ndcg_10"].as_f64().unwrap();
    let scores: Vec<f64> = evaluations(&run).iter().map(score).collect();
    assert!(scores[2] < scores[0], "the test shows nothing: {scores:?}");
    assert!(std::fs::read_link(run.join("checkpoint/best_dev")).unwrap().ends_with("step-3"));
    // Ranks with other judgements have no figures in common.
    std::fs::create_dir_all(corner.place.path("unlike/qrels")).unwrap();
    for name in ["corpus.jsonl", "queries.jsonl"] {
        std::fs::copy(corner.place.path("beir").join(name), corner.place.path("unlike").join(name)).unwrap();
    }
    corner.place.write("unlike/qrels/test.tsv", &fewer);
    let ends = start(&corner.place.path(""), 2, |rank| {
        let dir = if rank == 1 { corner.path("unlike") } else { beir.clone() };
        tercio(&["eval", "colbert", "--model_path", model, "--beir", &dir, "--threads", "1"])
    })
    .finish();
    let said: String = ends.iter().map(|e| e.stderr.as_str()).collect();
    assert!(
        ends.iter().all(|end| end.code != Some(0)) && said.contains("not the same there as on rank 0"),
        "{said}"
    );

    // The documents of each query in another order, and back by their scores.
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(golden().join("colbert").join(name)).unwrap()).unwrap()
    };
    let (input, expected) = (read("input.json"), read("expected.json"));
    let documents = input["documents"].as_array().unwrap();
    let mut data = String::new();
    for (text, candidates) in
        input["queries"].as_array().unwrap().iter().zip(expected["rerank"]["candidates"].as_array().unwrap())
    {
        let ctx = |id: &Value| {
            let at: usize = id.as_str().unwrap()[1..].parse().unwrap();
            json!({"id": id, "title": "", "text": documents[at]})
        };
        let ctxs: Vec<Value> = candidates.as_array().unwrap().iter().map(ctx).collect();
        data += &format!("{}\n", json!({"question": text, "answers": ["a"], "ctxs": ctxs}));
    }
    corner.place.write("found.jsonl", &data);
    let rerank = |ranks: usize, output: &str| {
        let (data, output) = (corner.path("found.jsonl"), corner.path(output));
        let words = ["rerank", "--model_path", model, "--data", &data, "--output", &output, "--threads", "1"];
        start(&corner.place.path(""), ranks, |_| tercio(&words)).succeed();
        std::fs::read_to_string(output).unwrap()
    };
    let found = rerank(1, "one.jsonl");
    assert_eq!(found, rerank(2, "two.jsonl"), "two ranks");
    for (line, stored) in found.lines().zip(expected["rerank"]["result"].as_array().unwrap()) {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["answers"], json!(["a"]));
        let (found, stored) = (line["ctxs"].as_array().unwrap(), stored.as_array().unwrap());
        assert_eq!(found.len(), stored.len());
        for (f, s) in found.iter().zip(stored) {
            assert_eq!(f["id"], s["id"], "{line}");
            let (f, s) = (f["score"].as_f64().unwrap(), s["score"].as_f64().unwrap());
            assert!((f - s).abs() < 1e-4 * s.abs(), "{f} {s}");
        }
    }
}

#[test]
fn golden_colbert_vectors_on_disk() {
    let corner = Corner::new();
    let input: Value =
        serde_json::from_slice(&std::fs::read(golden().join("colbert/input.json")).unwrap()).unwrap();
    let texts = input["documents"].as_array().unwrap();
    let line =
        |(i, text): (usize, &Value)| format!("{}\n", json!({"id": i.to_string(), "title": "", "text": text}));
    corner.place.write("passages.jsonl", &texts.iter().enumerate().map(line).collect::<String>());
    let (model, passages) = (golden().join("colbert/model"), corner.path("passages.jsonl"));
    let embed = |name: &str, ranks: usize, more: &[&str]| {
        let output = corner.path(name);
        let words =
            ["embed", "--multi-vector", "--model_path", model.to_str().unwrap(), "--passages", &passages];
        let rest = ["--output", &output, "--threads", "1", "--passages_per_shard", "5", "--window", "2"];
        start(&corner.place.path(""), ranks, |_| tercio(&[&words[..], &rest, more].concat())).succeed();
        tercio_data::multi_vectors::MultiVectors::open(Path::new(&output)).unwrap()
    };
    use tercio_data::multi_vectors::TokenVectors;
    let all = |vectors: &tercio_data::multi_vectors::MultiVectors| {
        let mut values = vec![0f32; vectors.tokens() as usize * vectors.dimension()];
        vectors.read(0, &mut values).unwrap();
        values
    };
    let one = embed("one", 1, &[]);
    let expected: Value =
        serde_json::from_slice(&std::fs::read(golden().join("colbert/expected.json")).unwrap()).unwrap();
    let counts = |vectors: &dyn TokenVectors| -> Vec<u64> {
        (0..vectors.documents()).map(|d| vectors.start(d + 1) - vectors.start(d)).collect()
    };
    let stored = |name: &str| -> Vec<u64> {
        expected[name].as_array().unwrap().iter().map(|s| s[0].as_u64().unwrap()).collect()
    };
    assert_eq!(counts(&one), stored("documents_shapes"));
    assert!(all(&one).chunks(one.dimension()).all(|v| {
        let square: f32 = v.iter().map(|x| x * x).sum();
        (square - 1.0).abs() < 1e-5
    }));
    assert_eq!(all(&embed("two", 2, &[])), all(&one), "two ranks");
    let pooled = embed("pooled", 1, &["--pool_factor", "2"]);
    assert_eq!(counts(&pooled), stored("documents_pooled2_shapes"));
}

#[test]
fn what_cannot_be_trained_is_named() {
    let corner = Corner::new();
    corner.place.write("rows.tsv", "a\tb\tc\nonly\ttwo\n");
    let (rows, train) = (corner.path("rows.tsv"), corner.path("train.jsonl"));
    let reader = golden().join("fid_reader_t5v10/model");
    let cases: [(&[&str], i32, &[&str]); 13] = [
        (&["--loss", "kl"], 1, &["train.jsonl", "line ", "score"]),
        (&["--loss", "kl", "--n_context", "1"], 2, &["--n_context 1", "at least 2"]),
        (&["--temperature", "0"], 2, &["--temperature"]),
        (&["--embedding_size", "0"], 2, &["--embedding_size 0"]),
        (&["--raw_scores"], 2, &["--raw_scores", "--loss kl"]),
        (&["--teacher", "x"], 2, &["--teacher"]),
        (&["--no_expansion", "--attend_to_expansion"], 2, &["--no_expansion"]),
        (&["--loss", "kl", "--label_smoothing", "0.1"], 2, &["--label_smoothing"]),
        (&["--passage_template", "{body}"], 2, &["{text}"]),
        (&["--hard_negatives", "0", "--global_batch_size", "1"], 2, &["--hard_negatives"]),
        (&["--document_length", "65"], 2, &["--document_length 65", "64"]),
        (&["--train_data", &rows, "--global_batch_size", "2"], 1, &["line 2", "3 or more fields"]),
        (&["--model_path", reader.to_str().unwrap()], 1, &["t5"]),
    ];
    for (i, (flags, code, words)) in cases.into_iter().enumerate() {
        let output = corner.run(&format!("bad-{i}"), flags);
        let text = failure(&output);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {text}");
        assert!(words.iter().all(|w| text.contains(w)), "{flags:?}: expected {words:?} in: {text}");
    }
    // Another temperature is another run.
    corner.train("first", &["--total_steps", "1"]);
    let flags = ["--total_steps", "2", "--temperature", "0.5", "--train_data", &train];
    let text = failure(&corner.run("first", &flags));
    assert!(text.contains("temperature") && text.contains("--new-run"), "{text}");
}
