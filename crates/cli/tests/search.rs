//! `tercio index` and `tercio search` as processes: indexes of words and of vectors, forms of questions and results, ranks, kill -9, and
//! what is refused.

mod ranks_support;
mod search_support;
mod support;

use std::process::Stdio;

use search_support::{Place, run, succeed};
use serde_json::{Value, json};
use support::{failure, kill_dead, stderr, tercio, wait_for};

#[test]
fn what_is_found_comes_in_every_form() {
    let place = Place::new(60);
    let made: Value = serde_json::from_str(&succeed(&mut place.index("index", &["--json"]))).unwrap();
    assert_eq!((&made["passages"], &made["version"], &made["kind"]), (&json!(60), &json!(1), &json!("bm25")));
    let questions = place.questions(10);
    let fid = place.text("found.json");
    let told = run(&mut place.search(&["--data", &questions, "--n-docs", "5", "--output_path", &fid]));
    assert!(told.status.success(), "{}", stderr(&told));
    // The question about nothing has "of" nowhere; of every other group there are six.
    assert!(
        stderr(&told).contains("1 of 10 questions got fewer passages than 5, 1 of them none"),
        "{}",
        stderr(&told)
    );
    let found = place.json("found.json");
    assert_eq!(found.len(), 10);
    assert_eq!((&found[3]["more"], &found[3]["answers"]), (&json!(3), &json!(["W3"])), "the item stays");
    for (i, item) in found.iter().enumerate().filter(|(i, _)| *i != 7) {
        let ctxs = item["ctxs"].as_array().unwrap();
        assert_eq!(ctxs.len(), 5);
        assert_eq!((&ctxs[0]["id"], &ctxs[0]["hasanswer"]), (&json!(i.to_string()), &json!(true)), "{item}");
        assert_eq!(ctxs[0]["title"], json!(format!("title{}", i % 7)));
        assert!(ctxs[1..].iter().all(|c| c["hasanswer"] == json!(false)), "{item}");
        assert!(ctxs[0]["score"].as_f64() > ctxs[1]["score"].as_f64());
        // Those of the group, of equal scores the earlier ones.
        let ids: Vec<usize> = ctxs[1..].iter().map(|c| c["id"].as_str().unwrap().parse().unwrap()).collect();
        assert!(ids.is_sorted() && ids.iter().all(|id| id % 10 == i % 10), "{item}");
    }
    assert_eq!(found[7]["ctxs"], json!([]));

    // The same questions in other forms find the same.
    let list: String = (0..10).map(|i| format!("q{i}\twhich W{i} of group{i}?\n")).collect();
    let dprs: String = (0..10).map(|i| format!("\"which W{i} of \"\"group{i}\"\"?\"\t['W{i}']\n")).collect();
    let beir: String = (0..10)
        .map(|i| {
            json!({"_id": format!("q{i}"), "text": format!("which W{i} of group{i}?")}).to_string() + "\n"
        })
        .collect();
    let mut runs = Vec::new();
    for (name, content) in [("list.tsv", list), ("dprs.tsv", dprs), ("beir.jsonl", beir)] {
        let (file, output) = (place.write(name, &content), place.text(&format!("{name}.run")));
        let flags = [
            "--queries",
            &file,
            "--output",
            &output,
            "--format",
            "trec",
            "--n_docs",
            "3",
            "--tag",
            "t",
            "--quiet",
        ];
        succeed(&mut place.search(&flags));
        runs.push(std::fs::read_to_string(&output).unwrap());
    }
    assert_eq!(runs[0], runs[2]);
    // DPR's questions have no ids: their rows stand for them.
    assert_eq!(runs[0].lines().map(|l| &l[1..]).collect::<Vec<_>>(), runs[1].lines().collect::<Vec<_>>());
    let first: Vec<&str> = runs[0].lines().next().unwrap().split(' ').collect();
    assert_eq!((&first[..4], first[5]), (&["q0", "Q0", "0", "1"][..], "t"));
    assert_eq!(runs[0].lines().count(), 30);

    let printed = succeed(&mut place.search(&["--n-docs", "2", "--json", "W5", "group3 W4"]));
    let printed: Vec<Value> = printed.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        (printed[0]["ctxs"].as_array().unwrap().len(), &printed[0]["ctxs"][0]["id"]),
        (1, &json!("5"))
    );
    assert_eq!(printed[1]["question"], json!("group3 W4"));
    assert!(succeed(&mut place.search(&["W5"])).contains("[5] title5: the word w5"));
}

#[test]
fn constants_reach_the_scores() {
    let place = Place::new(30);
    succeed(&mut place.index("index", &["--k1", "1.2", "--b", "0.75"]));
    let score = |flags: &[&str]| {
        let printed = succeed(&mut place.search(&[flags, &["--json", "W5"]].concat()));
        serde_json::from_str::<Value>(&printed).unwrap()["ctxs"][0]["score"].as_f64().unwrap()
    };
    // Every passage has as many words as the mean, so that k1 = 1.2 gives idf · 2.2 / 2.2, whatever k1.
    let idf = (1.0f64 + 29.5 / 1.5).ln();
    assert!((score(&[]) - idf).abs() < 1e-4, "{}", score(&[]));
    assert!((score(&["--k1", "0"]) - idf).abs() < 1e-4);
    let other = run(&mut place.search(&["--b", "1.5", "W5"]));
    assert_eq!(other.status.code(), Some(2), "{}", stderr(&other));
    assert!(stderr(&other).contains("b from 0 to 1"), "{}", stderr(&other));
}

#[test]
fn two_ranks_write_what_one_process_writes() {
    let place = Place::new(200);
    succeed(&mut place.index("index", &[]));
    // Three blocks of questions, so that both ranks have some and one has more.
    let questions = place.questions(2500);
    for name in ["found.json", "found.jsonl", "found.run"] {
        let (one, two) = (place.text(&format!("one-{name}")), place.text(&format!("two-{name}")));
        let flags = |output| ["--queries", &questions, "--n-docs", "7", "--output", output];
        succeed(&mut place.search(&flags(&one)));
        let ranks = ranks_support::start(place.root.path(), 2, |_| place.search(&flags(&two)));
        ranks.succeed();
        assert!(std::fs::read(&one).unwrap() == std::fs::read(&two).unwrap(), "{name}");
        assert!(std::fs::metadata(&one).unwrap().len() > 100_000);
        // Three ranks with a part of the index each.
        let three = place.text(&format!("three-{name}"));
        let flags = [&flags(&three)[..], &["--share", "index"]].concat();
        ranks_support::start(place.root.path(), 3, |_| place.search(&flags)).succeed();
        assert!(std::fs::read(&one).unwrap() == std::fs::read(&three).unwrap(), "{name}");
    }
    // A question of the command line, too: rank 0 prints it.
    let alone = succeed(&mut place.search(&["--json", "which W5 of group5?"]));
    let ranks = ranks_support::start(place.root.path(), 2, |_| {
        place.search(&["--json", "--share", "index", "which W5 of group5?"])
    });
    let ends = ranks.finish();
    assert_eq!((ends[0].code, ends[0].stdout.as_str(), ends[1].stdout.as_str()), (Some(0), &alone[..], ""));
    // Ranks that do not ask the same are told.
    let other = place.write("other.jsonl", "{\"question\": \"W1\"}\n");
    let output = place.text("three.json");
    let ranks = ranks_support::start(place.root.path(), 2, |rank| {
        place.search(&["--queries", if rank == 0 { &questions } else { &other }, "--output", &output])
    });
    let ends = ranks.finish();
    assert_eq!(ranks_support::codes(&ends), [Some(1), Some(1)]);
    assert!(!place.path("three.json").exists());
}

#[test]
fn a_killed_build_leaves_the_old_index_and_goes_on() {
    let place = Place::new(300);
    succeed(&mut place.index("index", &[]));
    let before = succeed(&mut place.search(&["--json", "group3"]));
    let old = std::fs::read_to_string(place.path("passages.tsv")).unwrap();
    // Long enough that it is killed at work, and in runs, so that several kinds of files are there.
    place.collection(60_000);
    for part in ["v2-run-0.postings", "v2-0.lengths"] {
        let mut child =
            place.index("index", &["--memory", "8", "--threads", "1"]).stderr(Stdio::null()).spawn().unwrap();
        let there = || {
            let entries = std::fs::read_dir(place.path("index")).unwrap();
            entries.flatten().any(|e| e.file_name().to_string_lossy().contains(part))
        };
        wait_for(&mut child, there);
        let at_work = kill_dead(child);
        assert!(at_work, "it ended before it could be killed");
        let manifest = std::fs::read_to_string(place.path("index/manifest.json")).unwrap();
        assert!(manifest.contains("\"version\": 1"));
        // Of the collection as it was the old index still answers; of the new one it says that it does not know it.
        let other = run(&mut place.search(&["--json", "group3"]));
        assert!(failure(&other).contains("is not the collection of the index"), "{}", stderr(&other));
        let kept = place.write("old.tsv", &old);
        let again = succeed(&mut place.search(&["--json", "--passages", &kept, "--verify", "group3"]));
        assert_eq!(again, before);
    }
    succeed(&mut place.index("index", &["--memory", "8"]));
    let names = std::fs::read_dir(place.path("index")).unwrap().flatten().map(|e| e.file_name());
    let left: Vec<_> = names.filter(|n| !n.to_string_lossy().starts_with("v2-0.")).collect();
    assert_eq!(left.len(), 2, "the manifest and the lock: {left:?}");
    succeed(&mut place.index("whole", &[]));
    for part in ["postings", "terms", "lengths"] {
        let of = |name: &str| std::fs::read(place.path(name)).unwrap();
        assert!(of(&format!("index/v2-0.{part}")) == of(&format!("whole/v1-0.{part}")), "{part}");
    }
}

#[test]
fn appends_go_on_where_the_index_ends() {
    let place = Place::new(100);
    succeed(&mut place.index("index", &["--fields", "text"]));
    let told = succeed(&mut place.index("index", &["--append"]));
    assert!(told.contains("nothing to add"), "{told}");
    place.collection(150);
    let told = succeed(&mut place.index("index", &["--append"]));
    assert!(told.contains("150 passages") && told.contains("version 2"), "{told}");
    assert!(succeed(&mut place.search(&["W149"])).contains("[149]"));
    place.collection(120);
    let error = failure(&run(&mut place.index("index", &["--append"])));
    assert!(error.contains("not taken away"), "{error}");
    let error = failure(&run(&mut place.index("none", &["--append"])));
    assert!(error.contains("found none"), "{error}");
}

#[test]
fn indexes_of_vectors_find_what_a_plain_product_finds() {
    let place = Place::new(300);
    let passages = place.text("passages.tsv");
    let questions = place.questions(60);
    place.embed("vectors", &["--passages", &passages]);
    place.embed("asked", &["--questions", &questions]);
    let want = place.products("asked", "vectors");
    let vectors = place.text("vectors");
    let flat = ["--kind", "flat", "--vectors", &vectors];
    succeed(&mut place.index("index", &flat));
    let compressed =
        ["--kind", "compressed", "--vectors", &vectors, "--lists", "8", "--code-bytes", "4", "--json"];
    let made: Value = serde_json::from_str(&succeed(&mut place.index("small", &compressed))).unwrap();
    assert_eq!((&made["kind"], &made["passages"]), (&json!("compressed"), &json!(300)));

    let model = place.model();
    let search = |index: &str, output: &str, flags: &[&str]| {
        let (index, output) = (place.text(index), place.text(output));
        let mut command = tercio(&["search", "--threads", "1", "--index", &index, "--model_path", &model]);
        command.args(["--queries", &questions, "--output", &output, "--n-docs", "6"]).args(flags);
        command
    };
    succeed(&mut search("index", "flat.json", &[]));
    let found = place.json("flat.json");
    assert_eq!(found.len(), 60);
    for (item, want) in found.iter().zip(&want) {
        let ctxs = item["ctxs"].as_array().unwrap();
        let mut best = want.clone();
        best.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(ctxs.len(), 6);
        for (context, best) in ctxs.iter().zip(best) {
            // A passage's id is its row.
            let row: usize = context["id"].as_str().unwrap().parse().unwrap();
            let (score, near) = (context["score"].as_f64().unwrap(), 1e-5 * best.abs().max(1.0));
            assert!((score - want[row]).abs() < near, "row {row}: {score}, {} by hand", want[row]);
            assert!((score - best).abs() < near, "row {row}: {score}, but {best} at this rank");
            assert!(context["text"].as_str().unwrap().contains(&format!("w{row} ")), "{context}");
        }
    }
    // Kept in memory, and compressed when all is looked at and scored again, the same bytes.
    let same = |one: &str, two: &str| {
        std::fs::read(place.path(one)).unwrap() == std::fs::read(place.path(two)).unwrap()
    };
    succeed(&mut search("index", "kept.json", &["--resident"]));
    assert!(same("flat.json", "kept.json"));
    succeed(&mut search("small", "small.json", &["--probes", "8", "--rescore", "300"]));
    assert!(same("flat.json", "small.json"));
    // Of one list other passages may be found, but the scores are true; without a second scoring they are estimates.
    succeed(&mut search("small", "one.json", &["--probes", "1", "--rescore", "300"]));
    for (item, want) in place.json("one.json").iter().zip(&want) {
        for context in item["ctxs"].as_array().unwrap() {
            let row: usize = context["id"].as_str().unwrap().parse().unwrap();
            let score = context["score"].as_f64().unwrap();
            assert!((score - want[row]).abs() < 1e-5 * score.abs().max(1.0), "{context}");
        }
    }
    succeed(&mut search("small", "estimates.json", &["--probes", "8", "--rescore", "0"]));
    assert!(!same("flat.json", "estimates.json"));
    for (index, one) in [("index", "flat.json"), ("small", "small.json")] {
        let flags: &[&str] = if index == "small" { &["--probes", "8", "--rescore", "300"] } else { &[] };
        let ranks = ranks_support::start(place.root.path(), 2, |_| search(index, "two.json", flags));
        ranks.succeed();
        assert!(same(one, "two.json"), "{index}");
        let flags = [flags, &["--share", "index", "--resident"]].concat();
        ranks_support::start(place.root.path(), 3, |_| search(index, "three.json", &flags)).succeed();
        assert!(same(one, "three.json"), "{index}, a part a rank");
    }
}

#[test]
fn vectors_are_asked_by_their_model_alone() {
    let place = Place::new(40);
    let passages = place.text("passages.tsv");
    place.embed("vectors", &["--passages", &passages]);
    let vectors = place.text("vectors");
    // The same weights, another pooling.
    let other = place.path("other");
    std::fs::create_dir(&other).unwrap();
    for entry in std::fs::read_dir(place.model()).unwrap().flatten() {
        std::fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
    }
    let config = std::fs::read(other.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let before = config["extract_cls"].as_bool().unwrap_or(false);
    config["extract_cls"] = json!(!before);
    std::fs::write(other.join("config.json"), config.to_string()).unwrap();
    for kind in ["flat", "compressed"] {
        succeed(&mut place.index("index", &["--kind", kind, "--vectors", &vectors]));
        let found = succeed(&mut place.search(&["--model_path", &place.model(), "--n-docs", "2", "w1"]));
        assert_eq!(found.lines().count(), 3, "{found}");
        let error = failure(&run(&mut place.search(&["--model_path", other.to_str().unwrap(), "w1"])));
        assert!(error.contains("is another model") && error.contains("--model_path"), "{error}");
        let none = run(&mut place.search(&["w1"]));
        assert_eq!(none.status.code(), Some(2), "{}", stderr(&none));
        assert!(stderr(&none).contains("--model_path"), "{}", stderr(&none));
        let constants = run(&mut place.search(&["--model_path", &place.model(), "--k1", "1", "w1"]));
        assert_eq!(constants.status.code(), Some(2), "{}", stderr(&constants));
    }
    // Vectors of other passages, and none.
    place.collection(41);
    let error = failure(&run(&mut place.index("more", &["--kind", "flat", "--vectors", &vectors])));
    assert!(error.contains("40 vectors") && error.contains("41 passages"), "{error}");
    let none = run(&mut place.index("more", &["--kind", "compressed"]));
    assert_eq!(none.status.code(), Some(2), "{}", stderr(&none));
}

#[test]
fn what_cannot_be_is_said() {
    let place = Place::new(20);
    let error = failure(&run(&mut place.search(&["W1"])));
    assert!(error.contains("expected the folder of an index"), "{error}");
    std::fs::create_dir(place.path("index")).unwrap();
    let error = failure(&run(&mut place.search(&["W1"])));
    assert!(error.contains("no index was finished here"), "{error}");
    std::fs::remove_dir(place.path("index")).unwrap();
    succeed(&mut place.index("index", &[]));
    for (name, content, what) in [
        ("a.jsonl", "{\"queston\": \"x\"}\n", "the keys queston"),
        ("b.jsonl", "{\"question\": 3}\n", "a string in `question`"),
        ("c.tsv", "no tab here\n", "an id, a tab and a question"),
        ("d.tsv", "1\tx\n1\ty\n", "an id of its own"),
        ("e.csv", "1,x\n", ".jsonl"),
    ] {
        let file = place.write(name, content);
        let error =
            failure(&run(&mut place.search(&["--queries", &file, "--output", &place.text("x.json")])));
        assert!(error.contains(what) && error.contains(name), "{error}");
        assert!(!place.path("x.json").exists());
    }
    for flags in [&["--n-docs", "0", "W1"][..], &["--queries", "x"], &[], &["--k1", "-1", "W1"]] {
        let output = run(&mut place.search(flags));
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", stderr(&output));
    }
    let output = run(&mut place.index("index", &["--memory", "1"]));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let path = place.path("index/v1-0.postings");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[3] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = failure(&run(&mut place.search(&["--verify", "W1"])));
    assert!(error.contains("v1-0.postings") && error.contains("damaged"), "{error}");
    std::fs::remove_file(place.path("passages.tsv")).unwrap();
    let error = failure(&run(&mut place.search(&["W1"])));
    assert!(error.contains("--passages"), "{error}");
}
