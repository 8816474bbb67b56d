//! Comparison with flair's evaluation: its figures from its gold and predicted labels.
//!
//! Everything comes from the files of the folder that TERCIO_GOLDEN names (default: tests/golden of the workspace).

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use golden_folder::golden_folder;
use serde_json::Value;
use tercio_data::Labels;
use tercio_data::classification::{ClassificationTally, Scores};

/// One label a document, or a list of them.
fn labels_of(value: &Value) -> Vec<String> {
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    value.as_array().map_or_else(|| vec![text(value)], |list| list.iter().map(text).collect())
}

fn close(found: f64, want: &Value, what: &str) {
    let want = want.as_f64().unwrap_or_else(|| panic!("{what} is no number"));
    assert!((found - want).abs() <= 1e-12, "{what}: {found} instead of {want}");
}

fn compare(found: &Scores, want: &Value, what: &str) {
    close(found.precision, &want["precision"], &format!("precision of {what}"));
    close(found.recall, &want["recall"], &format!("recall of {what}"));
    close(found.f1, &want["f1-score"], &format!("F1 of {what}"));
    close(found.support as f64, &want["support"], &format!("support of {what}"));
}

#[test]
fn golden_flair_evaluation() {
    let path = golden_folder().join("flair_classifier/expected.json");
    let expected: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut parts = 0;
    for (name, case) in expected.as_object().unwrap().iter().filter(|(k, _)| k.starts_with("evaluation_")) {
        parts += 1;
        let labels = Labels::from_names(labels_of(&expected["labels"])).unwrap();
        let mut tally = ClassificationTally::new(&labels);
        let (gold, predicted) = (case["gold"].as_array().unwrap(), case["predicted"].as_array().unwrap());
        assert_eq!(gold.len(), predicted.len());
        for (gold, predicted) in gold.iter().zip(predicted) {
            let ids: Vec<u32> = labels_of(predicted).iter().map(|l| labels.id(l).unwrap()).collect();
            tally.add(&labels_of(gold), &ids).unwrap();
        }
        let report = tally.report();
        let scores = &case["scores"];
        for (average, found) in [("micro", &report.micro), ("macro", &report.macro_)] {
            close(found.f1, &scores[format!("{average} avg/f1-score")], &format!("{name}, {average} F1"));
            close(
                found.precision,
                &scores[format!("{average} avg/precision")],
                &format!("{name}, {average}"),
            );
            close(found.recall, &scores[format!("{average} avg/recall")], &format!("{name}, {average}"));
        }
        let rounded = (report.accuracy * 1e4).round() / 1e4;
        close(rounded, &scores["accuracy"], &format!("{name}, accuracy"));
        close(report.score("micro_f1").unwrap(), &case["main_score"], &format!("{name}, main score"));
        let want = case["classification_report"].as_object().unwrap();
        let averages =
            [("micro avg", &report.micro), ("macro avg", &report.macro_), ("weighted avg", &report.weighted)];
        for (key, value) in want.iter().filter(|(_, value)| value.is_object()) {
            let found = averages.iter().find(|(average, _)| average == key).map(|(_, found)| *found);
            let found = found.or_else(|| report.labels.iter().find(|l| l.label == *key).map(|l| &l.scores));
            compare(found.unwrap_or_else(|| panic!("{key} is missing")), value, &format!("{name}, {key}"));
        }
        // The labels come in flair's order, where it is not left to chance among equally frequent ones.
        let often =
            |l: &str| gold.iter().chain(predicted).filter(|v| labels_of(v).contains(&l.to_owned())).count();
        let ordered: Vec<usize> = report.labels.iter().map(|l| often(&l.label)).collect();
        assert!(ordered.is_sorted_by(|a, b| a >= b), "{ordered:?}");
        assert_eq!(report.labels.len(), want.keys().filter(|k| labels.id(k).is_some()).count());
    }
    assert!(parts > 0);
}
