//! `--device cuda`, on a GPU that is the host (crates/cuda/tests/fake_gpu): the same mathematics as on the processor, the same bits at any
//! number of ranks and after a kill, and errors that name the GPU.

#[allow(dead_code)]
#[path = "../../cuda/tests/on_host/library.rs"]
mod library;
#[allow(dead_code)]
#[path = "../../cuda/tests/on_host/memory.rs"]
mod memory;
mod ranks_support;
mod support;

use std::process::{Command, Stdio};

use ranks_support::start;
use support::*;

/// The command with the fake libraries, and a cache of its own for what is compiled.
fn beside(place: &Place, mut command: Command) -> Command {
    command.env("LD_LIBRARY_PATH", library::fake_gpu()).env("TERCIO_CACHE", place.path("cache"));
    command
}

/// Trains the run on the fake GPU; `variables` say how it is.
fn train(place: &Place, name: &str, flags: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = beside(place, place.command(name, &[&["--device", "cuda"], flags].concat()));
    command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap())
}

fn loss_of(place: &Place, name: &str) -> Vec<f64> {
    losses(&place.run_dir(name)).iter().map(|(_, bits)| f64::from_bits(*bits)).collect()
}

#[test]
fn a_run_is_the_processors_within_rounding_and_its_own_after_a_kill() {
    let place = Place::new();
    let short = ["--total_steps", "4", "--save_freq", "2"];
    place.train("processor", &short);
    let output = train(&place, "whole", &short, &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("computing on GPU 0 (fake GPU 0)"), "{}", stderr(&output));
    let (ours, theirs) = (loss_of(&place, "whole"), loss_of(&place, "processor"));
    assert_eq!(ours.len(), 4);
    for (step, (a, b)) in ours.iter().zip(&theirs).enumerate() {
        assert!((a - b).abs() <= 1e-4 * b, "update {step}: {a}, on the processor {b}");
    }
    // Killed in an update after the first checkpoint, then started again with the same command.
    let output = train(&place, "killed", &short, &[("FAKE_GPU_FAIL", "adam:4")]);
    let said = failure(&output);
    assert!(said.contains("GPU 0 (fake GPU 0) failed: CUDA_ERROR_ILLEGAL_ADDRESS"), "{said}");
    assert!(checkpoints(&place.run_dir("killed")).contains(&"step-2".to_owned()));
    let output = train(&place, "killed", &short, &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let of = |name: &str| bits(&place.run_dir(name), "step-4");
    assert!(of("killed") == of("whole"), "other bits after a kill");
    // The same run may go on elsewhere.
    place.train("whole", &["--total_steps", "5", "--save_freq", "2"]);
}

#[test]
fn ranks_have_a_gpu_each_and_the_bits_of_one() {
    let place = Place::new();
    let flags = ["--device", "cuda", "--micro_batch_size", "1", "--total_steps", "4"];
    let two = [("FAKE_GPU_COUNT", "2")];
    let output = train(&place, "one", &flags[2..], &two);
    assert!(output.status.success(), "{}", stderr(&output));
    let ranks = |name: &str, more: &[&str], variables: &[(&str, &str)]| {
        start(&place.path(""), 2, |rank| {
            let mut command = beside(&place, place.command(name, &[&flags, more].concat()));
            command.envs(two).envs(if rank == 1 { variables } else { &[] }.iter().copied());
            command
        })
        .finish()
    };
    let of = |name: &str| bits(&place.run_dir(name), "step-4");
    for (name, more) in
        [("many", &["--reproducible"][..]), ("split", &["--reproducible", "--shard", "optimizer"])]
    {
        let ends = ranks(name, more, &[]);
        assert!(ends.iter().all(|e| e.code == Some(0)), "{}\n{}", ends[0].stderr, ends[1].stderr);
        assert!(of(name) == of("one"), "{name}: other bits than one rank's");
    }
    // NCCL: another order of sums, the same mathematics; again the same bits for the same ranks.
    let ends = ranks("nccl", &[], &[]);
    assert!(ends.iter().all(|e| e.code == Some(0)), "{}\n{}", ends[0].stderr, ends[1].stderr);
    assert!(ends[0].stderr.contains("gradients are added by NCCL"), "{}", ends[0].stderr);
    let (ours, theirs) = (loss_of(&place, "nccl"), loss_of(&place, "one"));
    assert!(
        ours.len() == 4 && ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= 1e-4 * b),
        "{ours:?} {theirs:?}"
    );
    let ends = ranks("nccl-split", &["--shard", "optimizer"], &[]);
    assert!(ends.iter().all(|e| e.code == Some(0)), "{}\n{}", ends[0].stderr, ends[1].stderr);
    assert!(of("nccl-split") == of("nccl"), "other bits where the moments are shared out");
    // A GPU that fails on rank 1: both end, and both say whose it was.
    let ends = ranks("failed", &[], &[("FAKE_GPU_FAIL", "adam:2")]);
    assert!(ends.iter().all(|e| e.code != Some(0)), "{}", ends[0].stderr);
    assert!(
        ends[1].stderr.contains("GPU 1 (fake GPU 1) failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{}",
        ends[1].stderr
    );
    assert!(ends[0].stderr.contains("rank 1") && ends[0].stderr.contains("fake GPU 1"), "{}", ends[0].stderr);
    // More ranks than GPUs.
    let ends = start(&place.path(""), 3, |_| {
        let mut command = beside(&place, place.command("three", &flags));
        command.envs(two);
        command
    })
    .finish();
    assert!(ends[2].stderr.contains("3 ranks on this host and 2 GPUs"), "{}", ends[2].stderr);
    assert!(ends.iter().all(|e| e.code != Some(0)));
}

/// Whoever waits for a rank inside NCCL hears nothing of its end by itself.
#[test]
fn a_rank_that_is_killed_ends_those_that_wait_for_it_in_nccl() {
    let place = Place::new();
    let flags = ["--device", "cuda", "--micro_batch_size", "1", "--total_steps", "1000"];
    let mut ranks = start(&place.path(""), 2, |_| {
        let mut command = beside(&place, place.command("lost", &flags));
        command.env("FAKE_GPU_COUNT", "2");
        command
    });
    let run = place.run_dir("lost");
    assert!(ranks.wait_for(|| losses(&run).len() >= 3), "{}", ranks.talk());
    ranks.children[1].kill().unwrap();
    let ends = ranks.finish();
    assert!(
        ends[0].stderr.contains("rank 1 on host") && ends[0].stderr.contains("was lost"),
        "{}",
        ends[0].stderr
    );
    assert_eq!(ends[0].code, Some(76), "{}", ends[0].stderr);
}

#[test]
fn too_little_memory_is_said_as_it_is_of_the_processor() {
    let place = Place::new();
    let output = train(&place, "small", &[], &[("FAKE_GPU_MEMORY", "36000000")]);
    let said = failure(&output);
    assert!(said.contains("out of memory") && said.contains("What takes less"), "{said}");
    let output = train(&place, "limited", &["--device-memory", "0.001"], &[]);
    let said = failure(&output);
    assert!(said.contains("1.0 MiB for tensors at most") && said.contains("out of memory"), "{said}");
}

#[test]
fn answers_and_their_measure_come_from_a_gpu_too() {
    let place = Place::new();
    let model = golden().join("fid_reader_t5v10/model");
    let (data, model) = (place.path("eval.jsonl"), model.to_str().unwrap());
    let run = |words: &[&str], device: &[&str]| {
        let output = beside(&place, tercio(words)).args(["--threads", "1"]).args(device).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let words = ["answer", data.to_str().unwrap(), "--model_path", model, "--json"];
    for more in [&[][..], &["--num-beams", "3"]] {
        let words = [&words[..], more].concat();
        assert_eq!(run(&words, &["--device", "cuda"]), run(&words, &[]), "{more:?}");
    }
    assert_eq!(run(&words, &["--device", "auto"]), run(&words, &[]));
    let words =
        ["eval", "reader", "--eval_data", data.to_str().unwrap(), "--model_path", model, "--json", "--quiet"];
    let measured = |device: &[&str]| {
        let report: serde_json::Value = serde_json::from_str(&run(&words, device)).unwrap();
        (report["exact_match"].clone(), report["f1"].clone(), report["questions"].clone())
    };
    assert_eq!(measured(&["--device", "cuda", "--bf16"]).2, 6);
    assert_eq!(measured(&["--device", "cuda"]), measured(&[]));
}

#[test]
fn texts_become_vectors_and_labels_on_a_gpu_too() {
    let place = Place::new();
    let run = |words: &[&str]| {
        let output = beside(&place, tercio(words)).args(["--threads", "1"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let case = golden().join("flair_classifier");
    let (encoder, texts) = (case.join("model"), case.join("corpus/dev.txt"));
    let (runs, train) = (place.path("runs"), case.join("corpus/train.txt"));
    let path = |p: &std::path::Path| p.to_str().unwrap().to_owned();
    let flags = "train classifier --name c --missing-splits none --epochs 1 --lr 1e-3 --downsample 0.2 --quiet --device cuda";
    let mut words: Vec<String> = flags.split(' ').map(str::to_owned).collect();
    for (flag, path) in
        [("--checkpoint-dir", path(&runs)), ("--train-data", path(&train)), ("--model-path", path(&encoder))]
    {
        words.extend([flag.to_owned(), path]);
    }
    run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let model = runs.join("c");
    let words = ["predict", texts.to_str().unwrap(), "--model_path", model.to_str().unwrap()];
    let labels = |device: &[&str]| {
        let lines = run(&[&words, device].concat());
        let label = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["label"].clone();
        lines.lines().map(label).collect::<Vec<_>>()
    };
    let (ours, theirs) = (labels(&["--device", "cuda"]), labels(&[]));
    assert!(ours == theirs && !ours.is_empty(), "{ours:?} {theirs:?}");

    place.write("passages.tsv", "id\ttext\ttitle\n1\tone two three\tfirst\n2\tfour five\tsecond\n");
    let retriever = golden().join("fid_retriever/model");
    let embed = |device: &str| {
        let (passages, output) = (place.path("passages.tsv"), place.path(device));
        run(&[
            "embed",
            "--model_path",
            retriever.to_str().unwrap(),
            "--passages",
            passages.to_str().unwrap(),
            "--output",
            output.to_str().unwrap(),
            "--quiet",
            "--device",
            device,
        ]);
        let bytes = std::fs::read(output.join("shard-00000.vectors")).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
    };
    let (ours, theirs) = (embed("cuda"), embed("cpu"));
    assert!(ours.len() == theirs.len() && !ours.is_empty());
    assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < 1e-4));
}

#[test]
fn what_is_there_is_told() {
    let place = Place::new();
    let output = beside(&place, tercio(&["doctor"])).env("FAKE_GPU_CAPABILITY", "75").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("gpu: cuda:0 is fake GPU 0, 1.0 GiB, compute capability 7.5"), "{said}");
    let said = String::from_utf8(tercio(&["doctor"]).output().unwrap().stdout).unwrap();
    assert!(said.contains("gpu: ") || said.contains("cuda:0"), "{said}");
    let output = train(&place, "refused", &["--bf16", "--tf32"], &[]);
    assert!(failure(&output).contains("--bf16 and --tf32 round the same factors"));
}
