//! Ranking metrics compared with trec_eval's, hits at k with those of Fusion-in-Decoder's own code.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use golden_folder::golden_folder;
use serde_json::Value;
use tercio_data::has_answer::AnswerMode;
use tercio_data::retrieval::RunFile;
use tercio_data::{Qrels, Questions};
use tercio_search::ranking::{self, Evaluation, Lacking, Metric, Rules, hits};

fn expected(name: &str) -> Value {
    let path = golden_folder().join("eval").join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

fn evaluate(names: &[&String], missing: Lacking) -> Evaluation {
    let folder = golden_folder().join("eval");
    let metrics: Vec<Metric> = names.iter().map(|name| name.parse().unwrap()).collect();
    let run = RunFile::open(&folder.join("run.txt"), usize::MAX).unwrap();
    let qrels = Qrels::open(&folder.join("qrels.txt")).unwrap();
    ranking::evaluate(&run, &qrels, &Rules { metrics, missing, ..Rules::default() }).unwrap()
}

/// Compares every query that trec_eval has; gives the number of values.
fn compare(per_query: &Value, is_known: impl Fn(&str) -> bool) -> usize {
    let per_query = per_query.as_object().unwrap();
    let first = per_query.values().next().unwrap().as_object().unwrap();
    let names: Vec<&String> = first.keys().filter(|name| is_known(name)).collect();
    let found = evaluate(&names, Lacking::Zero).figures;
    let mut compared = 0;
    for (query, values) in &found.queries {
        let Some(expected) = per_query.get(query) else {
            assert!(values.iter().all(|v| *v == 0.0), "{query} is not in the run");
            continue;
        };
        for (name, value) in names.iter().zip(values) {
            let expected = expected[*name].as_f64().unwrap();
            assert!((value - expected).abs() < 1e-9, "{query} {name}: {value}, trec_eval has {expected}");
            compared += 1;
        }
    }
    assert_eq!(compared, names.len() * per_query.len(), "every query of trec_eval was compared");
    compared
}

#[test]
fn golden_metrics_of_every_query_are_trec_evals() {
    let file = expected("ranking_expected.json");
    assert!(compare(&file["per_query"], |_| true) > 0);
    // Everything that trec_eval has and we have, too: precision, cuts of MAP and nDCG at other depths.
    let full = &file["pytrec_eval_full"];
    assert!(
        compare(full, |name| name.parse::<Metric>().is_ok()) > compare(full, |name| name.starts_with("P_"))
    );
}

#[test]
fn golden_means_with_and_without_missing_queries() {
    let file = expected("ranking_expected.json");
    for (key, missing) in [
        ("mean_over_queries_in_both", Lacking::Skip),
        ("mean_counting_absent_queries_as_zero", Lacking::Zero),
    ] {
        let expected = file[key].as_object().unwrap();
        let found = evaluate(&expected.keys().collect::<Vec<_>>(), missing);
        for ((name, expected), mean) in expected.iter().zip(found.figures.means()) {
            let expected = expected.as_f64().unwrap();
            assert!((mean - expected).abs() < 1e-9, "{key} {name}: {mean}, trec_eval has {expected}");
        }
        assert_eq!(found.missing as usize, file["queries_in_qrels_only"].as_array().unwrap().len());
        assert_eq!(found.not_judged_queries as usize, file["queries_in_run_only"].as_array().unwrap().len());
    }
}

#[test]
fn golden_hits_are_those_that_fid_prints() {
    let stored = &expected("has_answer.json")["hit_at_k"];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("retrieved.jsonl");
    let list = stored["questions"].as_array().unwrap();
    let lines: String = list
        .iter()
        .map(|question| {
            let mut question = question.clone();
            question["question"] = "q".into();
            question.to_string() + "\n"
        })
        .collect();
    std::fs::write(&path, lines).unwrap();
    let questions = Questions::open(&path, dir.path()).unwrap();
    let found = hits::count(&questions, AnswerMode::Words, &|| false).unwrap();
    let counts: Vec<u64> =
        stored["top_k_hits"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
    assert_eq!(found.counts(), counts);
    assert_eq!(found.first.len(), list.len());
}
