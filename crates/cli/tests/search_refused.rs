//! What `tercio index` and `tercio search` refuse so that nothing wrong is found or lost in silence: vectors of another size, damaged
//! vectors, outputs over inputs, names that are not told apart, flags without effect.

mod search_support;
mod support;

use std::process::Command;

use search_support::{Place, run, succeed};
use support::{failure, stderr, tercio};
use tercio_data::Vectors;
use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, VectorsFolder};

/// The texts' vectors as another program would give them, which does not say its model: rows of as many numbers, all different.
fn imported(place: &Place, name: &str, count: u64, dimension: usize) -> String {
    let settings = VectorSettings {
        format: FORMAT,
        model: "another program".into(),
        model_fingerprint: None,
        dimension,
        dtype: VectorDtype::F32,
        precision: String::new(),
        pooling: String::new(),
        normalized: false,
        template: String::new(),
        maxlength: 0,
        batch_tokens: 0,
        batch_texts: 0,
        window: 0,
        source: "files".into(),
        source_fingerprint: None,
        count,
        per_shard: count,
    };
    let folder = VectorsFolder::open(&place.path(name), settings).unwrap();
    let mut shard = folder.shard(0).unwrap();
    for row in 0..count {
        let vector: Vec<f32> = (0..dimension).map(|d| ((row as usize * 31 + d * 7) % 97) as f32).collect();
        shard.push(&row.to_string(), &vector).unwrap();
    }
    shard.finish("").unwrap();
    folder.complete().unwrap();
    place.text(name)
}

#[test]
fn vectors_of_another_size_are_not_asked() {
    let place = Place::new(40);
    place.embed("own", &["--passages", &place.text("passages.tsv")]);
    let dimension = Vectors::open(&place.path("own")).unwrap().dimension();
    let questions = place.questions(10);
    for (name, numbers) in [("half", dimension / 2), ("double", 2 * dimension), ("as-many", dimension)] {
        let vectors = imported(&place, name, 40, numbers);
        for kind in ["flat", "compressed"] {
            succeed(&mut place.index("index", &["--kind", kind, "--vectors", &vectors]));
            let (model, output) = (place.model(), place.text("found.json"));
            let flags = ["--model_path", &model, "--queries", &questions, "--output", &output];
            let mut search = place.search(&flags);
            if numbers == dimension {
                succeed(&mut search);
                assert_eq!(place.json("found.json").len(), 10);
                continue;
            }
            let error = failure(&run(&mut search));
            let said = [format!("vectors of {numbers} numbers"), format!("as {dimension} numbers")];
            assert!(said.iter().all(|part| error.contains(part)), "{error}");
            assert!(!place.path("found.json").exists());
        }
    }
}

#[test]
fn verify_reads_the_vectors_too() {
    let place = Place::new(40);
    place.embed("vectors", &["--passages", &place.text("passages.tsv")]);
    let (vectors, model) = (place.text("vectors"), place.model());
    for kind in ["flat", "compressed"] {
        succeed(&mut place.index(kind, &["--kind", kind, "--vectors", &vectors]));
    }
    let search = |index: &str, flags: &[&str]| {
        let index = place.text(index);
        let base = ["search", "--threads", "1", "--index", &index, "--model_path", &model, "--verify", "w1"];
        let mut command = tercio(&base);
        command.args(flags);
        command
    };
    for kind in ["flat", "compressed"] {
        succeed(&mut search(kind, &[]));
    }
    let entries = std::fs::read_dir(place.path("vectors")).unwrap().flatten();
    let file = entries.max_by_key(|e| e.metadata().unwrap().len()).unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[9] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    for kind in ["flat", "compressed"] {
        let error = failure(&run(&mut search(kind, &[])));
        assert!(error.contains("SHA-256") && error.contains(file.to_str().unwrap()), "{error}");
    }
    // Estimates need no vectors.
    succeed(&mut search("compressed", &["--rescore", "0"]));
}

#[test]
fn what_was_read_is_not_written_over_and_names_are_told_apart() {
    let place = Place::new(20);
    succeed(&mut place.index("index", &[]));
    let questions = place.questions(5);
    let before = std::fs::read(&questions).unwrap();
    for (source, flags) in [("questions.jsonl", &[][..]), ("passages.tsv", &["--format", "trec"])] {
        let output = place.text(source);
        let mut search = place.search(&["--queries", &questions, "--output", &output]);
        let error = failure(&run(search.args(flags)));
        assert!(error.contains("would replace the file that they are made from"), "{error}");
    }
    assert_eq!(std::fs::read(&questions).unwrap(), before);

    // Two questions of one id, and two passages: a run cannot tell them apart, a list can.
    let twice = place.write(
        "twice.jsonl",
        "{\"id\": \"a\", \"question\": \"w1\"}\n{\"id\": \"b\", \"question\": \"w2\"}\n{\"id\": \"a\", \"question\": \"w3\"}\n",
    );
    let (list, run_file) = (place.text("found.json"), place.text("found.run"));
    let error = failure(&run(&mut place.search(&["--queries", &twice, "--output", &run_file])));
    assert!(error.contains("item 2") && error.contains("\"a\" again, the id of item 0"), "{error}");
    succeed(&mut place.search(&["--queries", &twice, "--output", &list]));
    assert_eq!(place.json("found.json").len(), 3);
    place.write("passages.tsv", "id\ttext\ttitle\n1\tthe word w1\tt\n1\tanother w1\tt\n2\tno\tt\n");
    succeed(&mut place.index("index", &[]));
    let error = failure(&run(&mut place.search(&["--queries", &questions, "--output", &run_file])));
    assert!(error.contains("query q1: the document 1 was found twice"), "{error}");
    assert!(!place.path("found.run").exists());
    succeed(&mut place.search(&["--queries", &questions, "--output", &list]));

    let wrong = place.write("wrong.jsonl", "{\"id\": \"x\", \"question\": \"w1\", \"answers\": [\"(\"]}\n");
    let flags = ["--queries", &wrong, "--output", &list, "--answer-match", "regex"];
    let error = failure(&run(&mut place.search(&flags)));
    assert!(error.contains("question \"x\"") && error.contains('('), "{error}");
}

#[test]
fn flags_that_would_do_nothing_are_usage_errors() {
    let place = Place::new(20);
    let refused = |mut command: Command, part: &str| {
        let output = run(&mut command);
        assert_eq!(output.status.code(), Some(2), "{part}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{part}: {}", stderr(&output));
    };
    for flags in [["--vectors", "v"], ["--metric", "cosine"], ["--lists", "3"], ["--recall-vectors", "v"]] {
        refused(place.index("index", &flags), flags[0]);
    }
    for kind in ["flat", "compressed"] {
        for flags in [["--analyzer", "english"], ["--fields", "text"], ["--k1", "2"], ["--memory", "64"]] {
            let base = ["--kind", kind, "--vectors", "v"];
            refused(place.index("index", &[&base[..], &flags].concat()), flags[0]);
        }
    }
    refused(place.index("index", &["--kind", "flat", "--vectors", "v", "--sample", "9"]), "--sample");
    let append = ["--kind", "compressed", "--vectors", "v", "--append", "--metric", "cosine"];
    refused(place.index("index", &append), "--metric");
    assert!(!place.path("index").exists());

    succeed(&mut place.index("index", &[]));
    for flags in [&["--probes", "8"][..], &["--rescore", "0"], &["--resident"], &["--template", "{question}"]]
    {
        refused(place.search(&[flags, &["w1"]].concat()), flags[0]);
    }
    for flags in [["--format", "trec"], ["--tag", "x"], ["--answer-match", "none"]] {
        refused(place.search(&[&flags[..], &["w1"]].concat()), flags[0]);
    }
    let (questions, output) = (place.questions(2), place.text("found.json"));
    refused(place.search(&["--queries", &questions, "--output", &output, "--tag", "x"]), "--tag");
    // What the environment names for all commands is no mistake.
    let mut search = place.search(&["w1"]);
    succeed(search.env("TERCIO_MODEL_PATH", "none").env("TERCIO_QUESTION_MAXLENGTH", "9"));
}
