//! Evaluation and answering by several ranks: what one rank gives, in the order of the input, once.

mod ranks_support;
mod support;

use ranks_support::*;
use support::*;

fn files(place: &Place, ranks: usize, n: usize, batch: &str) -> (String, [String; 3]) {
    let model = golden().join("fid_reader_t5v10/model");
    let name = format!("eval-{ranks}-{n}-{batch}");
    let out = place.path(&format!("{name}.jsonl"));
    let ranks = start(&place.path(""), ranks, |_| {
        let mut command =
            tercio(&["eval", "reader", "--model", model.to_str().unwrap(), "--json", "--name", &name]);
        command.args(["--checkpoint_dir".as_ref(), place.path("results").as_os_str()]);
        command.args([
            "--eval_data".as_ref(),
            place.path("q.jsonl").as_os_str(),
            "--output".as_ref(),
            out.as_os_str(),
        ]);
        let flags = "--write_results --write_crossattention_scores --scores --n_context 3 --text_maxlength 64 \
                     --generation_max_length 8 --threads 1";
        command.args(flags.split_whitespace()).args(["--per_gpu_batch_size", batch]);
        command.args(["--maxload", &n.to_string()]);
        command
    });
    let ends = ranks.finish();
    assert!(ends.iter().all(|e| e.code == Some(0)), "{}", ends[0].stderr);
    assert!(ends[1..].iter().all(|e| e.stdout.is_empty()), "only rank 0 prints");
    let report: serde_json::Value = serde_json::from_str(&ends[0].stdout).unwrap();
    let figures = format!("{} {} {}", report["questions"], report["exact_match"], report["f1"]);
    let folder = place.path("results").join(&name);
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap();
    (figures, [read(out), read(folder.join("final_output.txt")), read(folder.join("dataset_wscores.json"))])
}

#[test]
fn results_are_those_of_one_rank_in_order_and_once() {
    let place = Place::new();
    place.write("q.jsonl", &questions(23));
    for (n, batch) in [(5, "1"), (5, "2"), (23, "1"), (1, "1")] {
        let one = files(&place, 1, n, batch);
        assert_eq!(one.1[1].lines().count(), n);
        for ranks in [2, 4] {
            assert!(
                files(&place, ranks, n, batch) == one,
                "{ranks} ranks, {n} questions in batches of {batch}"
            );
        }
    }
}

#[test]
fn answers_come_from_all_ranks_in_order() {
    let place = Place::new();
    place.write("q.jsonl", &questions(9));
    let model = golden().join("fid_reader_t5v10/model");
    let answer = |ranks: usize| {
        start(&place.path(""), ranks, |_| {
            let mut command = tercio(&["answer", "--model", model.to_str().unwrap(), "--json", "--scores"]);
            command.args(["--n_context", "2", "--generation_max_length", "6", "--threads", "1"]);
            command.arg(place.path("q.jsonl"));
            command
        })
        .succeed()
    };
    let one = answer(1);
    assert_eq!(one.lines().count(), 9);
    assert_eq!(answer(3), one);
}

#[test]
fn a_bad_question_ends_all_and_leaves_no_file() {
    let place = Place::new();
    let good = questions(12);
    let bad: String = good
        .lines()
        .enumerate()
        .map(|(i, line)| match i {
            7 => "{\"question\": 5}\n".to_owned(),
            _ => format!("{line}\n"),
        })
        .collect();
    place.write("q.jsonl", &bad);
    let model = golden().join("fid_reader_t5v10/model");
    let out = place.path("out.jsonl");
    let ends = start(&place.path(""), 3, |_| {
        let mut command =
            tercio(&["eval", "reader", "--model", model.to_str().unwrap(), "--generation_max_length", "6"]);
        command.args([
            "--eval_data".as_ref(),
            place.path("q.jsonl").as_os_str(),
            "--output".as_ref(),
            out.as_os_str(),
        ]);
        command
    })
    .finish();
    assert_eq!(ends[0].code, Some(1));
    assert!(ends[0].stderr.contains("q.jsonl, line 8"), "{}", ends[0].stderr);
    assert!(ends[1..].iter().all(|e| e.code == Some(76) && e.stdout.is_empty()), "{:?}", codes(&ends));
    assert!(!out.exists());
}
