//! Training on several ranks: the bits of one, whatever the number, the way of bytes, the threads, and what is shared out.

mod ranks_support;
mod support;

use std::sync::OnceLock;

use ranks_support::*;
use support::*;

const EXACT: &str = "parameters and moments differ";

/// What one rank leaves after 12 updates: bits and losses.
fn one_rank() -> &'static (Bits, Vec<(u64, u64)>) {
    static RUN: OnceLock<(Bits, Vec<(u64, u64)>)> = OnceLock::new();
    RUN.get_or_init(|| {
        let place = Place::new();
        place.train("one", &SETTINGS);
        let run = place.run_dir("one");
        assert_eq!(shards(&run), vec![vec![8]; 12]);
        (bits(&run, "step-12"), losses(&run))
    })
}

fn check(ranks: usize, flags: &[&str]) {
    let place = Place::new();
    train(&place, "many", ranks, flags).succeed();
    let run = place.run_dir("many");
    assert_eq!(losses(&run), one_rank().1, "{ranks} ranks, {flags:?}: losses");
    assert!(bits(&run, "step-12") == one_rank().0, "{ranks} ranks, {flags:?}: {EXACT}");
    assert_eq!(
        shards(&run),
        vec![vec![8 / ranks as u64; ranks]; 12],
        "each rank computes its own shards only"
    );
    let last = metrics(&run).into_iter().rfind(|line| line.get("event").is_none()).unwrap();
    assert_eq!(last["ranks"], ranks);
    let exposed = last["exposed_communication"].as_f64().unwrap();
    assert!(
        (0.0..=1.0).contains(&exposed) && last["slowest_rank"].as_u64().unwrap() < ranks as u64,
        "{last}"
    );
    assert!(last["tokens_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn two_ranks_over_tcp() {
    check(2, &["--backend", "tcp"]);
    check(2, &["--backend", "tcp", "--threads", "2", "--shard", "optimizer"]);
}

#[test]
fn two_ranks_over_shared_memory() {
    check(2, &["--backend", "local", "--threads", "2"]);
}

#[test]
fn four_ranks() {
    check(4, &["--backend", "tcp"]);
    check(4, &["--backend", "local", "--shard", "optimizer"]);
}

/// A model whose gradients travel in several buckets, with recomputed blocks.
#[test]
fn several_buckets_and_a_short_last_batch() {
    let place = Place::new();
    place.write("train.jsonl", &questions(19));
    let shape = serde_json::json!({
        "model_type": "t5", "vocab_size": 60_000, "d_model": 40, "d_kv": 10, "d_ff": 64, "num_layers": 2,
        "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu",
        "tie_word_embeddings": false, "dropout_rate": 0.1, "decoder_start_token_id": 0, "eos_token_id": 1,
    });
    place.write("shape.json", &shape.to_string());
    let (shape, tokenizer) = (place.path("shape.json"), golden().join("tokenizers/t5"));
    let flags = [
        "--init",
        "random",
        "--model_path",
        "none",
        "--model_config",
        shape.to_str().unwrap(),
        "--tokenizer",
        tokenizer.to_str().unwrap(),
        "--last_batch",
        "keep",
        "--total_steps",
        "4",
        "--recompute",
        "--optim",
        "adamw",
    ];
    train(&place, "one", 1, &flags).succeed();
    let run = place.run_dir("one");
    for (name, ranks, more) in [("a", 2, "none"), ("b", 4, "optimizer"), ("c", 8, "none")] {
        train(&place, name, ranks, &[&flags[..], &["--shard", more]].concat()).succeed();
        let many = place.run_dir(name);
        assert_eq!(losses(&many), losses(&run), "{ranks} ranks");
        assert!(bits(&many, "step-4") == bits(&run, "step-4"), "{ranks} ranks: {EXACT}");
    }
    // Three questions are three shards: the last ranks have nothing to compute.
    assert_eq!(shards(&place.run_dir("b"))[2], [2, 1, 0, 0]);
    assert_eq!(shards(&place.run_dir("c"))[2], [1, 1, 1, 0, 0, 0, 0, 0]);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn all_ranks_compute_with_what_all_have() {
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        return eprintln!("not tested here: this processor has one instruction set only");
    }
    let place = Place::new();
    let with = |name: &'static str, of: &'static [&'static str]| {
        let ranks = start(&place.path(""), of.len(), |rank| {
            let mut command = place.command(name, &SETTINGS);
            command.env("TERCIO_ISA", of[rank]);
            command
        });
        ranks.succeed();
        place.run_dir(name)
    };
    let (mixed, portable) = (with("mixed", &["portable", "avx2"]), with("portable", &["portable"]));
    assert!(bits(&mixed, "step-12") == bits(&portable, "step-12"), "{EXACT}");
    let log = std::fs::read_to_string(mixed.join("run.log")).unwrap();
    assert!(
        log.contains("rank 1 computes with avx2 by itself") && log.contains("all ranks use portable"),
        "{log}"
    );
}

#[test]
fn three_ranks_say_that_bits_are_not_promised() {
    let place = Place::new();
    train(&place, "three", 3, &["--shard", "optimizer"]).succeed();
    let run = place.run_dir("three");
    assert_eq!(shards(&run), vec![vec![2, 3, 3]; 12]);
    let log = std::fs::read_to_string(run.join("run.log")).unwrap();
    assert!(log.contains("the same bits are not promised"), "{log}");
    let value = |l: &(u64, u64)| f64::from_bits(l.1);
    for (three, one) in losses(&run).iter().zip(&one_rank().1) {
        assert!((value(three) - value(one)).abs() < 1e-3, "{} {}", value(three), value(one));
    }
}

#[test]
fn killed_and_resumed_at_other_numbers_of_ranks() {
    let place = Place::new();
    let run = place.run_dir("killed");
    let flags = ["--total_steps", "40"];
    train(&place, "whole", 1, &flags).succeed();
    let whole = place.run_dir("whole");

    // All four at once, in mid-epoch.
    let mut four = train(&place, "killed", 4, &flags);
    assert!(four.wait_for(|| logged(&run) >= 7), "{}", four.talk());
    drop(four);
    let done = logged(&run);
    assert!(done < 40, "it was done before it was killed");

    // One of two: the other one says who was lost, and at which update.
    let mut two = train(&place, "killed", 2, &[&flags[..], &["--shard", "optimizer"]].concat());
    assert!(two.wait_for(|| updates_of(&run, 2) >= 6), "{}", two.talk());
    two.children[1].kill().unwrap();
    let ends = two.finish();
    assert_eq!(codes(&ends), [Some(76), None], "{}", ends[0].stderr);
    let log = std::fs::read_to_string(run.join("run.log")).unwrap();
    assert!(log.contains("ERROR rank 1 on host ") && log.contains("was lost at update "), "{log}");

    train(&place, "killed", 2, &[&flags[..], &["--backend", "tcp"]].concat()).succeed();
    assert_eq!(losses(&run), losses(&whole), "every update is logged once, with the same loss");
    assert!(events(&run, "resume").iter().all(|&step| step >= 5), "{:?}", events(&run, "resume"));
    assert!(bits(&run, "step-40") == bits(&whole, "step-40"), "{EXACT}");
}
