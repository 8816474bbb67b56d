//! Figures of classifiers: each by its definition on small cases, undefined ones by the stated rules, parts that add up.

use proptest::prelude::*;
use tercio_data::Labels;
use tercio_data::classification::{ClassificationReport, ClassificationTally, SCORES, Scores};

fn labels(names: &[&str]) -> Labels {
    Labels::from_names(names.iter().map(|n| n.to_string()).collect()).unwrap()
}

/// A tally of pairs of labels between spaces.
fn tally(names: &[&str], documents: &[(&str, &str)]) -> ClassificationTally {
    let labels = labels(names);
    let mut tally = ClassificationTally::new(&labels);
    for (gold, predicted) in documents {
        let gold: Vec<String> = gold.split_whitespace().map(str::to_owned).collect();
        let predicted: Vec<u32> = predicted.split_whitespace().map(|l| labels.id(l).unwrap()).collect();
        tally.add(&gold, &predicted).unwrap();
    }
    tally
}

fn report(names: &[&str], documents: &[(&str, &str)]) -> ClassificationReport {
    tally(names, documents).report()
}

fn assert_scores(found: &Scores, want: [f64; 3]) {
    for (a, b) in [found.precision, found.recall, found.f1].into_iter().zip(want) {
        assert!((a - b).abs() < 1e-12, "{found:?} instead of {want:?}");
    }
}

#[test]
fn one_label_a_document() {
    let r =
        report(&["a", "b", "c"], &[("a", "a"), ("a", "b"), ("b", "b"), ("b", "b"), ("b", "a"), ("a", "a")]);
    assert_eq!((r.documents, r.multi_label, r.labels.len()), (6, false, 2));
    assert_eq!(r.labels.iter().map(|l| l.label.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let two_thirds = 2.0 / 3.0;
    assert_scores(&r.micro, [two_thirds; 3]);
    assert_scores(&r.macro_, [two_thirds; 3]); // c takes no part: nobody has it, nobody predicted it
    assert_eq!((r.accuracy, r.samples), (4.0 / 6.0, None));
    let r = report(&["a", "b", "c"], &[("a", "a"), ("a", "c")]);
    assert_scores(&r.labels[0].scores, [1.0, 0.5, two_thirds]);
    assert_scores(&r.labels[1].scores, [0.0, 0.0, 0.0]); // predicted only: recall would divide by 0
    assert_scores(&r.macro_, [0.5, 0.25, 1.0 / 3.0]);
    assert_scores(&r.weighted, [1.0, 0.5, two_thirds]);
}

#[test]
fn undefined_figures_are_zero() {
    let r = report(&["a"], &[]);
    assert_scores(&r.micro, [0.0; 3]);
    assert_scores(&r.macro_, [0.0; 3]);
    assert_scores(&r.weighted, [0.0; 3]);
    assert_eq!(r.accuracy, 0.0);
    assert!(r.to_string().contains("nothing to measure"), "{r}");
    let r = report(&["a", "b"], &[("", "a"), ("", "")]);
    assert_eq!((r.accuracy, r.micro.support, r.micro.f1), (0.5, 0, 0.0));
    let one = report(&["a"], &[("a", "a"), ("a", "")]);
    assert_eq!(one.micro, one.macro_, "of one label both means are the same");
}

#[test]
fn several_labels_a_document() {
    // By hand: a: tp 2 of 2 gold, 3 predicted; b: tp 1 of 2 gold, 1 predicted; c: tp 0 of 1 gold, 0 predicted.
    let documents = [("a b", "a b"), ("a c", "a"), ("b", "a"), ("", "")];
    let r = report(&["a", "b", "c"], &documents);
    assert!(r.multi_label && r.confusion.is_none());
    assert_eq!(r.accuracy, 0.5, "exactly the same labels, none and none included");
    assert_scores(&r.labels[0].scores, [2.0 / 3.0, 1.0, 0.8]);
    assert_scores(&r.micro, [3.0 / 4.0, 3.0 / 5.0, 6.0 / 9.0]);
    assert_scores(&r.macro_, [(2.0 / 3.0 + 1.0) / 3.0, 1.5 / 3.0, (0.8 + 2.0 / 3.0) / 3.0]);
    assert_scores(&r.samples.unwrap(), [2.0 / 4.0, 1.5 / 4.0, (1.0 + 2.0 / 3.0) / 4.0]);
    assert_eq!(r.score("samples_f1"), Some(r.samples.unwrap().f1));
    for name in SCORES {
        assert!(r.score(name).is_some(), "{name}");
    }
    assert_eq!((r.score("f1"), r.score("micro_f2"), r.score("other_f1")), (None, None, None));
}

#[test]
fn labels_that_the_classifier_does_not_know_count_as_missed() {
    let r = report(&["a", "b"], &[("a", "a"), ("z", "a"), ("b", "b")]);
    assert_eq!((r.unknown, r.accuracy), (1, 2.0 / 3.0));
    let z = r.labels.iter().find(|l| l.label == "z").unwrap();
    assert!(!z.known);
    assert_scores(&z.scores, [0.0; 3]);
    assert_eq!(z.scores.support, 1);
    assert_scores(&r.macro_, [1.5 / 3.0, 2.0 / 3.0, (2.0 / 3.0 + 1.0) / 3.0]);
    assert!(r.to_string().contains("1 documents have a label that the classifier does not know (z)"), "{r}");
    assert!(ClassificationTally::new(&labels(&["a"])).add(&[], &[1]).is_err());
}

#[test]
fn confusion_as_text_as_a_picture_and_as_json() {
    let names = ["<b> & \"q\"", "two\nlines", "c"];
    let labels = labels(&names);
    let mut tally = ClassificationTally::new(&labels);
    for (gold, predicted, times) in [(0, 0, 120), (0, 1, 3), (1, 1, 7), (2, 0, 1)] {
        (0..times).for_each(|_| tally.add(&[names[gold].to_owned()], &[predicted]).unwrap());
    }
    tally.add(&[names[2].to_owned()], &[]).unwrap();
    let r = tally.report();
    let confusion = r.confusion.as_ref().unwrap();
    assert_eq!(confusion.labels, [names[0], names[1], names[2], "(none)"]);
    let text = confusion.text();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split("  ").collect()).collect();
    assert_eq!(text.lines().count(), 5);
    assert_eq!(
        rows[1].iter().map(|c| c.trim()).filter(|c| !c.is_empty()).collect::<Vec<_>>(),
        [names[0], "120", "3", "0", "0"]
    );
    assert!(text.lines().nth(2).unwrap().starts_with("two lines"), "{text}");
    let svg = confusion.svg().unwrap();
    assert_eq!(svg.matches("<rect ").count(), 1 + 16);
    assert!(
        svg.contains("&lt;b&gt; &amp; &quot;q&quot;")
            && svg.contains(">120</text>")
            && svg.contains("two\u{fffd}lines")
    );
    assert!(svg.contains("taken for two\u{fffd}lines: 3 of 123"), "{svg}");
    assert!(svg.contains("fill=\"#083") || svg.contains("fill=\"#0d"), "the greatest share is dark: {svg}");
    // Every tag is closed: as many opening as closing ones of each kind.
    for tag in ["svg", "text", "title", "rect"] {
        let selfclosed = svg
            .split(&format!("<{tag} "))
            .skip(1)
            .filter(|t| t.split('>').next().unwrap().ends_with('/'))
            .count();
        let opened = svg.matches(&format!("<{tag} ")).count() + svg.matches(&format!("<{tag}>")).count();
        assert_eq!(opened - selfclosed, svg.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    let json = serde_json::to_value(&r).unwrap();
    assert_eq!(
        json["confusion"]["pairs"][0],
        serde_json::json!({"gold": 0, "predicted": 0, "documents": 120})
    );
    assert_eq!(json["labels"][0]["support"], 123);
    assert!(json["macro"]["f1-score"].is_f64() && json.get("samples").is_none());

    let many: Vec<String> = (0..30).map(|i| format!("label{i}")).collect();
    let labels = Labels::from_names(many.clone()).unwrap();
    let mut tally = ClassificationTally::new(&labels);
    for (i, name) in many.iter().enumerate() {
        tally.add(std::slice::from_ref(name), &[(i as u32 + u32::from(i > 27)) % 30]).unwrap();
    }
    let text = tally.report().confusion.unwrap().text();
    assert!(text.contains("of 2 kinds") && text.contains("label28 taken for label29"), "{text}");
}

proptest! {
    #[test]
    fn parts_add_up_in_any_order(
        documents in proptest::collection::vec((0usize..5, 0u32..4, 0usize..5, 0f32..1.0, 0usize..3), 1..60),
        several: bool,
    ) {
        let names = ["a", "b", "c", "d"];
        let golds = ["a", "b", "c", "y", "z"];
        let labels = labels(&names);
        let mut whole = ClassificationTally::new(&labels);
        let mut parts = vec![ClassificationTally::new(&labels); 3];
        for (gold, predicted, other, confidence, rank) in documents {
            let mut gold = vec![golds[gold].to_owned()];
            if several && gold[0] != golds[other] {
                gold.push(golds[other].to_owned());
            }
            for tally in [&mut whole, &mut parts[rank]] {
                tally.add(&gold, &[predicted]).unwrap();
                tally.add_confidence(confidence, confidence > 0.3).unwrap();
            }
        }
        let mut merged = ClassificationTally::new(&labels);
        for part in parts.iter().rev() {
            merged.merge(&ClassificationTally::from_bytes(&part.to_bytes()).unwrap()).unwrap();
        }
        let (a, b) = (whole.report(), merged.report());
        prop_assert_eq!((a.accuracy, a.micro, a.weighted.support), (b.accuracy, b.micro, b.weighted.support));
        prop_assert_eq!((a.samples, &a.calibration), (b.samples, &b.calibration));
        // Labels nobody knows may come in another order among equally frequent ones.
        let sorted = |r: &ClassificationReport| {
            let mut labels: Vec<String> = r.labels.iter().map(|l| format!("{l:?}")).collect();
            labels.sort();
            labels
        };
        prop_assert_eq!(sorted(&a), sorted(&b));
    }
}

#[test]
fn tallies_of_other_labels_do_not_mix() {
    let mut one = tally(&["a", "b"], &[("a", "a")]);
    assert!(one.merge(&tally(&["b", "a"], &[])).is_err());
    assert!(one.merge(&tally(&["a"], &[])).is_err());
    assert!(ClassificationTally::from_bytes(b"{}").is_err() && ClassificationTally::from_bytes(b"").is_err());
}
