//! `tercio embed` and `tercio mine` as processes: the stored vectors, ranks, parts, kill -9, and what is refused.

mod ranks_support;
mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use support::{failure, finish, golden, kill_dead, stderr, tercio, wait_for};
use tercio_data::Vectors;
use tercio_data::retrieval::{Relevance, RetrievalExamples};
use tercio_models::weights::WeightsReader;

/// A folder with a collection and whatever comes of it.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { root: tempfile::tempdir().unwrap() }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
    fn write(&self, name: &str, content: &str) -> String {
        std::fs::write(self.path(name), content).unwrap();
        self.text(name)
    }
    /// The command that embeds the collection `passages.tsv` into `output`.
    fn embed(&self, output: &str, flags: &[&str]) -> Command {
        let model = golden().join("fid_retriever/model");
        let mut command = tercio(&["embed", "--threads", "1", "--model_path", model.to_str().unwrap()]);
        command.args(["--passages", &self.text("passages.tsv"), "--output", &self.text(output)]);
        // Five windows a shard, so that several ranks have work.
        command.args(["--passages_per_shard", "300", "--window", "64"]).args(flags);
        command
    }
    /// The stored retriever with other values in its config.json.
    fn model(&self, name: &str, fields: &[(&str, Value)]) -> String {
        let other = self.path(name);
        std::fs::create_dir(&other).unwrap();
        for entry in std::fs::read_dir(golden().join("fid_retriever/model")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
        }
        let path = other.join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for (field, value) in fields {
            config[*field] = value.clone();
        }
        std::fs::write(&path, config.to_string()).unwrap();
        self.text(name)
    }
    /// Names and bytes of a folder's files of vectors and ids, and the manifest.
    fn files(&self, output: &str) -> Vec<(String, Vec<u8>)> {
        let mut files: Vec<_> = std::fs::read_dir(self.path(output))
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
            .collect();
        files.sort();
        files
    }
}

fn run(command: &mut Command) -> Output {
    finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

fn succeed(command: &mut Command) -> Output {
    let output = run(command);
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

fn stored() -> Value {
    let text = std::fs::read_to_string(golden().join("fid_retriever/input.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// `n` passages of the stored case, no two alike, after some that are awkward: empty, one word, unicode, odd ids.
fn collection(n: usize) -> String {
    let stored = stored();
    let passages: Vec<&Value> =
        stored["questions"].as_array().unwrap().iter().flat_map(|q| q["ctxs"].as_array().unwrap()).collect();
    let mut text = "id\ttext\ttitle\na\t\t\nb\tword\t\n\"c\t\"\"1\"\"\"\tnaïve 東京 😀\tÜber\n".to_owned();
    for i in 0..n {
        let p = passages[i % passages.len()];
        let body = p["text"].as_str().unwrap();
        // Longer or shorter every time, so that lengths differ within a window.
        let body: String =
            body.split_inclusive(' ').take(3 + i % 17).chain([i.to_string().as_str()]).collect();
        text += &format!("{i}\t{}\t{}\n", quoted(&body), quoted(p["title"].as_str().unwrap()));
    }
    text
}

fn all_ids(vectors: &Vectors) -> Vec<String> {
    (0..vectors.shards()).flat_map(|n| vectors.shard(n).unwrap().ids().unwrap()).collect()
}

fn all_rows(vectors: &Vectors) -> Vec<f32> {
    let mut rows = Vec::new();
    for number in 0..vectors.shards() {
        let shard = vectors.shard(number).unwrap();
        let mut part = vec![0.0; shard.len() * vectors.dimension()];
        shard.rows(0, &mut part).unwrap();
        rows.extend(part);
    }
    rows
}

#[test]
fn golden_vectors_of_passages_and_questions() {
    let (place, stored) = (Place::new(), stored());
    let questions = stored["questions"].as_array().unwrap();
    let passages: Vec<&Value> = questions.iter().flat_map(|q| q["ctxs"].as_array().unwrap()).collect();
    let lines = passages.iter().enumerate().map(|(i, p)| {
        format!("{}\n", json!({"_id": format!("p{i}"), "title": p["title"], "text": p["text"]}))
    });
    let passages_file = place.write("passages.jsonl", &lines.collect::<String>());
    let lines = questions.iter().map(|q| format!("{}\n", json!({"question": q["question"]})));
    let questions_file = place.write("questions.jsonl", &lines.collect::<String>());
    let expected = WeightsReader::open(&golden().join("fid_retriever/expected.safetensors")).unwrap();
    for (flag, file, length, name) in [
        ("--passages", &passages_file, "passage_maxlength", "default/passage_embeddings"),
        ("--questions", &questions_file, "question_maxlength", "default/question_embeddings"),
    ] {
        let want = expected.read(name).unwrap();
        let output = place.text(length);
        let model = golden().join("fid_retriever/model");
        succeed(tercio(&["embed", "--threads", "2", "--model_path", model.to_str().unwrap()]).args([
            flag,
            file,
            "--output",
            &output,
            &format!("--{length}"),
            &stored[length].to_string(),
        ]));
        let vectors = Vectors::open(Path::new(&output)).unwrap();
        vectors.verify().unwrap();
        let rows = all_rows(&vectors);
        assert_eq!(rows.len(), want.len(), "{name}");
        for (i, (a, b)) in rows.iter().zip(&want).enumerate() {
            assert!((a - b).abs() <= 1e-4 * b.abs() + 1e-5, "{name}, number {i}: {a} instead of {b}");
        }
    }
}

#[test]
fn ranks_parts_and_restarts_give_the_same_files() {
    let place = Place::new();
    place.write("passages.tsv", &collection(2000));
    let whole = succeed(&mut place.embed("whole", &["--json"]));
    let report: Value = serde_json::from_slice(&whole.stdout).unwrap();
    assert_eq!(
        (&report["texts"], &report["shards"], &report["complete"]),
        (&json!(2003), &json!(7), &json!(true))
    );
    let want = place.files("whole");
    let vectors = Vectors::open(&place.path("whole")).unwrap();
    vectors.verify().unwrap();
    let ids = all_ids(&vectors);
    assert_eq!((ids.len(), &ids[..4]), (2003, &["a", "b", "c\t\"1\"", "0"].map(String::from)[..]));
    assert!(all_rows(&vectors).iter().any(|&v| v != 0.0));

    // Ranks.
    for ranks in [2, 3] {
        let name = format!("ranks-{ranks}");
        let report =
            ranks_support::start(&place.path(""), ranks, |_| place.embed(&name, &["--json"])).succeed();
        let report: Value = serde_json::from_str(&report).unwrap();
        let tokens: Vec<u64> = serde_json::from_value(report["rank_tokens"].clone()).unwrap();
        assert!(tokens.len() == ranks && tokens.iter().all(|&n| n > 1000), "{ranks} ranks: {tokens:?}");
        assert_eq!(json!(tokens.iter().sum::<u64>()), report["tokens"]);
        assert_eq!(place.files(&name), want, "{ranks} ranks");
    }
    // Parts: the second one completes the set.
    for part in ["0", "1", "2"] {
        let output = succeed(&mut place.embed("parts", &["--num_shards", "3", "--shard_id", part, "--json"]));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["complete"], json!(part == "2"), "{report}");
    }
    assert_eq!(place.files("parts"), want);

    // Killed in the middle of a shard, then again, then to the end.
    let name = |n: usize| place.path("killed").join(format!("shard-{n:05}.json"));
    let mut kept = Vec::new();
    for until in [1, 4] {
        let log = std::fs::File::create(place.path("stderr")).unwrap();
        let mut child = place.embed("killed", &[]).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        assert!(wait_for(&mut child, || name(until).exists()));
        kill_dead(child);
        let entries: Vec<_> = (0..=until).map(|n| std::fs::metadata(name(n)).unwrap()).collect();
        kept.push(entries.iter().map(|m| m.modified().unwrap()).collect::<Vec<_>>());
    }
    let last = succeed(&mut place.embed("killed", &["--json"]));
    let report: Value = serde_json::from_slice(&last.stdout).unwrap();
    assert!(report["found"].as_u64().unwrap() >= 5, "{report}");
    for times in kept {
        let now = (0..times.len()).map(|n| std::fs::metadata(name(n)).unwrap().modified().unwrap());
        assert_eq!(now.collect::<Vec<_>>(), times, "a finished shard was written again");
    }
    assert_eq!(place.files("killed"), want);
    let again = succeed(&mut place.embed("killed", &["--json"]));
    let report: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!((&report["texts"], &report["found"]), (&json!(0), &json!(7)));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let place = Place::new();
    place.write("passages.tsv", &collection(20));
    succeed(&mut place.embed("vectors", &["--dtype", "f16"]));
    let refused = |flags: &[&str], part: &str| {
        let error = failure(&run(&mut place.embed("vectors", flags)));
        assert!(error.contains(part), "{flags:?}: {error} lacks {part}");
    };
    refused(&[], "another dtype: f16 there, f32 here");
    refused(&["--dtype", "f16", "--no_title"], "another template");
    refused(&["--dtype", "f16", "--bf16"], "another precision: f32 there, bf16 here");
    refused(&["--dtype", "f16", "--batch_tokens", "100"], "another batch_tokens: 8192 there, 100 here");
    refused(
        &["--dtype", "f16", "--per_gpu_batch_size", "9"],
        "another per_gpu_batch_size: 128 there, 9 here",
    );
    refused(&["--dtype", "f16", "--window", "65"], "another window: 64 there, 65 here");
    // Another model: the same weights, another pooling.
    let other = place.model("other", &[("extract_cls", json!(true))]);
    refused(&["--dtype", "f16", "--model_path", &other], "another model: ");
    let good = collection(20);
    place.write("passages.tsv", &(good.clone() + "21\tonly two\n"));
    let error = failure(&run(&mut place.embed("new", &[])));
    assert!(error.contains("passages.tsv, line 25 (item 23): expected 3 fields"), "{error}");
    place.write("passages.tsv", &good.replace("word", "another word"));
    refused(&["--dtype", "f16"], "other texts: ");
    for (flags, part) in [
        (&["--num_shards", "2", "--shard_id", "2"][..], "--shard_id 2 of --num_shards 2"),
        (&["--dtype", "f8"], "expected f32, f16 or bf16"),
        (&["--template", "{body}"], "no other braces"),
        (&["--template", "question: {question}"], "{question} is for --questions"),
        (&["--batch_tokens", "0"], "--batch_tokens 0: expected 1"),
        (&["--passage_maxlength", "129"], "positions for 128"),
    ] {
        let output = run(&mut place.embed("usage", flags));
        let error = failure(&output);
        assert!(output.status.code() == Some(2) && error.contains(part), "{flags:?}: {error} lacks {part}");
    }
}

#[test]
fn a_retriever_gets_the_texts_that_it_was_trained_with() {
    let place = Place::new();
    place.write("passages.tsv", &collection(5));
    let fields = [("passage_template", json!("{title} {text}")), ("question_template", json!("{question}?"))];
    let own = place.model("own", &fields);
    succeed(&mut place.embed("stored", &["--model_path", &own]));
    succeed(&mut place.embed("named", &["--template", "{title} {text}"]));
    succeed(&mut place.embed("fids", &[]));
    let open = |name: &str| Vectors::open(&place.path(name)).unwrap();
    assert_eq!(open("stored").settings().template, "{title} {text}");
    assert_eq!(all_rows(&open("stored")), all_rows(&open("named")));
    assert_ne!(all_rows(&open("stored")), all_rows(&open("fids")));
    let questions = place.write("q.jsonl", "{\"question\": \"who\"}\n");
    let output = place.text("q");
    succeed(&mut tercio(&["embed", "--model_path", &own, "--questions", &questions, "--output", &output]));
    assert_eq!(open("q").settings().template, "{question}?");
    let error = failure(&run(&mut place.embed("x", &["--model_path", &own, "--no_title"])));
    assert!(error.contains("was trained with passages as"), "{error}");
    let wrong = place.model("wrong", &[("passage_template", json!("{question}"))]);
    let error = failure(&run(&mut place.embed("x", &["--model_path", &wrong])));
    assert!(error.contains("`passage_template` of the model's config.json: expected a place for"), "{error}");
}

#[test]
fn other_instructions_than_those_of_finished_shards_are_said() {
    let place = Place::new();
    place.write("passages.tsv", &collection(400));
    succeed(&mut place.embed("vectors", &[]));
    let again = || {
        for name in ["shard-00001.json", "manifest.json"] {
            std::fs::remove_file(place.path("vectors").join(name)).unwrap();
        }
        stderr(&succeed(&mut place.embed("vectors", &[])))
    };
    let said = again();
    assert!(!said.contains("was computed with"), "{said}");
    let path = place.path("vectors").join("shard-00000.json");
    let mut entry: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    entry["arithmetic"] = json!("an abacus");
    std::fs::write(&path, entry.to_string()).unwrap();
    let said = again();
    assert!(said.contains("shard 0 was computed with an abacus"), "{said}");
}

#[test]
fn pickled_vectors_are_taken_over() {
    let place = Place::new();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/vectors");
    let [a, b] = ["fid-float16-4.pickle", "dpr-5.pickle"].map(|n| data.join(n).to_str().unwrap().to_owned());
    let output = place.text("vectors");
    let words = ["embed", "--import", &a, &b, "--output", &output, "--passages_per_shard", "5"];
    succeed(&mut tercio(&words));
    let vectors = Vectors::open(&place.path("vectors")).unwrap();
    vectors.verify().unwrap();
    assert_eq!((vectors.len(), vectors.shards(), vectors.dimension()), (12, 3, 5));
    let row = |r: usize| (0..5).map(move |c| r as f32 - c as f32 / 8.0);
    assert_eq!(all_rows(&vectors), (0..12).flat_map(|i| row(i % 6)).collect::<Vec<f32>>());
    assert_eq!(all_ids(&vectors)[6..9], ["1", "two words", "tab\there"]);
    succeed(&mut tercio(&words));
    // Other files, and other bytes in a file of the same name, are no part of it.
    let swapped = ["embed", "--import", &b, &a, "--output", &output, "--passages_per_shard", "5"];
    let error = failure(&run(&mut tercio(&swapped)));
    assert!(error.contains("other texts: "), "{error}");
    let copy = place.text("copy.pickle");
    let copied = place.text("copied");
    for (file, good) in [("fid-float16-4.pickle", true), ("fid-float32-4.pickle", false)] {
        std::fs::copy(data.join(file), &copy).unwrap();
        let done = run(&mut tercio(&["embed", "--import", &copy, "--output", &copied]));
        assert_eq!(done.status.success(), good, "{file}: {}", stderr(&done));
    }
    let bad = place.write("bad.pickle", "cos\nsystem\n.");
    let error = failure(&run(&mut tercio(&["embed", "--import", &bad, "--output", &place.text("x")])));
    assert!(error.contains("`os.system`"), "{error}");
}

#[test]
fn imported_vectors_are_known_by_their_ids() {
    let place = Place::new();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/vectors/dpr-5.pickle");
    let vectors = place.text("vectors");
    succeed(&mut tercio(&["embed", "--import", data.to_str().unwrap(), "--output", &vectors]));
    // A collection has no empty ids, the stored pickle has one.
    let path = place.path("vectors/shard-00000.ids");
    let text = std::fs::read_to_string(&path).unwrap().replace("\"\"\n", "\"six\"\n");
    std::fs::write(&path, text).unwrap();
    let mut ids = all_ids(&Vectors::open(Path::new(&vectors)).unwrap());
    let mine = |ids: &[String]| {
        let items =
            |of: &dyn Fn(&String) -> Value| ids.iter().map(|id| format!("{}\n", of(id))).collect::<String>();
        let passages = items(&|id| json!({"id": id, "title": "", "text": format!("text of {id}")}));
        let passages = place.write("passages.jsonl", &passages);
        let asked =
            items(&|id| json!({"id": id, "question": "q", "positive_ctxs": [{"id": id, "text": "t"}]}));
        let (asked, output) = (place.write("q.jsonl", &asked), place.text("mined.jsonl"));
        let mut command = tercio(&["mine", "--data", &asked, "--output", &output, "--passages", &passages]);
        run(command.args(["--vectors", &vectors, "--question_vectors", &vectors, "--threads", "1"]))
    };
    let done = mine(&ids);
    assert!(done.status.success() && stderr(&done).contains("taken for granted"), "{}", stderr(&done));
    ids.swap(1, 2);
    let error = failure(&mine(&ids));
    assert!(error.contains("vector 2 has the id") && error.contains("in their order"), "{error}");
}

#[test]
fn negatives_are_mined_from_a_search_a_run_and_the_items_themselves() {
    let place = Place::new();
    let names = ["Anna", "Bert", "Carl", "Dora", "Emil", "Fred"];
    let passages: String = names.iter().map(|n| format!("{n}\t{n} lives in a house.\t{n}\n")).collect();
    let passages = place.write("passages.tsv", &passages);
    let question = |n: &str| json!({"id": n, "question": format!("who is {n}"), "answers": [n], "ctxs": []});
    let questions =
        place.write("q.jsonl", &names[..3].iter().map(|n| format!("{}\n", question(n))).collect::<String>());
    let model = golden().join("fid_retriever/model");
    let model = model.to_str().unwrap();
    succeed(&mut place.embed("p", &[]));
    let q = place.text("q");
    succeed(&mut tercio(&[
        "embed",
        "--model",
        model,
        "--questions",
        &questions,
        "--output",
        &q,
        "--threads",
        "1",
    ]));

    let mined = |flags: &[&str]| {
        let output = place.text("mined.jsonl");
        let output =
            succeed(tercio(&["mine", "--json", "--data", &questions, "--output", &output]).args(flags));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (report, RetrievalExamples::open(&place.path("mined.jsonl"), &place.path("cache")).unwrap())
    };
    let p = place.text("p");
    let (report, found) =
        mined(&["--vectors", &p, "--question_vectors", &q, "--passages", &passages, "--threads", "1"]);
    assert_eq!(
        (&report["written"], &report["negatives"], &report["with_answer"]),
        (&json!(3), &json!(15), &json!(3))
    );
    for (i, name) in names[..3].iter().enumerate() {
        let e = found.get(i).unwrap();
        let positives: Vec<_> = e.of(Relevance::Positive).map(|p| p.passage.id.as_str()).collect();
        assert_eq!((positives, e.of(Relevance::HardNegative).count()), (vec![*name], 5));
        assert!(e.of(Relevance::HardNegative).all(|p| p.passage.id != *name));
    }

    let run_file: String = names[..2]
        .iter()
        .flat_map(|q| {
            names.iter().enumerate().map(move |(r, d)| format!("{q} Q0 {d} {} {} x\n", r + 1, 10 - r))
        })
        .collect();
    let run_file = place.write("run.trec", &run_file);
    let window = ["--first_rank", "2", "--last_rank", "4", "--form", "triples", "--margin", "2"];
    let (report, found) = mined(&[&["--run", &run_file, "--passages", &passages], &window[..]].concat());
    // Anna is first of both: the margin of 2 takes Bert (for Anna); Bert's own margin takes Carl.
    let negatives = |i: usize| -> Vec<String> {
        found.get(i).unwrap().of(Relevance::HardNegative).map(|p| p.passage.id.clone()).collect()
    };
    assert_eq!((negatives(0), negatives(1)), (vec!["Carl".into(), "Dora".into()], vec!["Dora".into()]));
    assert_eq!((&report["within_margin"], &report["without_positive"]), (&json!(2), &json!(1)));

    let own: String = names[..2]
        .iter()
        .map(|n| {
            let mut q = question(n);
            q["ctxs"] =
                names.iter().map(|n| json!({"id": n, "text": format!("{n} sleeps"), "title": ""})).collect();
            format!("{q}\n")
        })
        .collect();
    place.write("q.jsonl", &own);
    let (report, found) = mined(&["--negatives", "2", "--seed", "7"]);
    assert_eq!(
        (&report["written"], found.get(1).unwrap().of(Relevance::HardNegative).count()),
        (&json!(2), 2)
    );

    let mined_file = place.text("mined.jsonl");
    let checked = succeed(&mut tercio(&["data", "check", "--retrieval", &mined_file]));
    let text = String::from_utf8(checked.stdout).unwrap();
    assert!(text.contains("2 items, 0 faults") && text.contains("with a positive    all"), "{text}");

    // The questions have changed since they were embedded.
    let output = place.text("x.jsonl");
    let stale = ["--vectors", &p, "--question_vectors", &q, "--passages", &passages];
    let error = failure(&run(tercio(&["mine", "--data", &questions, "--output", &output]).args(stale)));
    assert!(error.contains("embed the file that is given here"), "{error}");
    let error = failure(&run(
        tercio(&["mine", "--data", &questions, "--output", &output]).args(["--first_rank", "0"])
    ));
    assert!(error.contains("window of ranks"), "{error}");
    let short = place.write("short.tsv", "Anna\ta\tb\n");
    let error = failure(&run(tercio(&["mine", "--data", &questions, "--output", &output]).args([
        "--run",
        &run_file,
        "--passages",
        &short,
    ])));
    assert!(error.contains("has no passage with the id \"Bert\""), "{error}");

    // Several processes would write the same file.
    let torchrun = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ];
    let refused = run(tercio(&["mine", "--data", &questions, "--output", &output]).envs(torchrun));
    assert_eq!(refused.status.code(), Some(2));
    assert!(failure(&refused).contains("one process, found rank 1 of 2"), "{}", stderr(&refused));
    assert!(!place.path("x.jsonl").exists());
}
