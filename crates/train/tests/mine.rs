//! What is taken for a hard negative.

use std::path::Path;

use serde_json::{Value, json};
use tercio_data::has_answer::AnswerMode;
use tercio_data::retrieval::{Relevance, RetrievalExample, RetrievalExamples, RunFile};
use tercio_data::{Passage, Passages};
use tercio_train::TrainError;
use tercio_train::mine::{Candidates, Collection, MineForm, MineReport, MineRules, Mined, mine};

fn rules() -> MineRules {
    MineRules {
        first_rank: 1,
        last_rank: 100,
        negatives: 30,
        positives: 1,
        margin: None,
        relative_margin: None,
        answers: Some(AnswerMode::Words),
        seed: None,
    }
}

fn file(dir: &Path, items: &[Value]) -> RetrievalExamples {
    let text: String = items.iter().map(|v| format!("{v}\n")).collect();
    let path = dir.join("q.jsonl");
    std::fs::write(&path, text).unwrap();
    RetrievalExamples::open(&path, &dir.join("cache")).unwrap()
}

fn example(item: Value) -> RetrievalExample {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), &[item]).get(0).unwrap()
}

/// Candidates a, b, c, ... with scores 10, 9, 8, ...
fn candidates(texts: &[&str]) -> Vec<Passage> {
    let of = |(i, text): (usize, &&str)| Passage {
        id: char::from(b'a' + i as u8).to_string(),
        title: String::new(),
        text: (*text).to_owned(),
        score: Some(10.0 - i as f64),
        file_position: i,
    };
    texts.iter().enumerate().map(of).collect()
}

fn ids(passages: &[Passage]) -> String {
    passages.iter().map(|p| p.id.as_str()).collect()
}

fn choose(rules: &MineRules, item: Value, texts: &[&str]) -> (Option<Mined>, MineReport) {
    let mut report = MineReport::default();
    let mined = rules.choose(&example(item), &candidates(texts), &mut report).unwrap();
    (mined, report)
}

const TEXTS: [&str; 6] = ["x one", "the answer", "x two", "Answer again", "x three", "x four"];

#[test]
fn candidates_with_an_answer_are_positives_or_nothing() {
    let item = json!({"question": "q", "answers": ["Answer"], "ctxs": []});
    let (mined, report) = choose(&rules(), item.clone(), &TEXTS);
    let mined = mined.unwrap();
    assert_eq!((ids(&mined.positives), ids(&mined.negatives)), ("b".into(), "acef".into()));
    assert_eq!((report.with_answer, report.known_positive, report.written, report.negatives), (2, 0, 1, 4));
    let two = MineRules { positives: 2, negatives: 3, ..rules() };
    let mined = choose(&two, item, &TEXTS).0.unwrap();
    assert_eq!((ids(&mined.positives), ids(&mined.negatives)), ("bd".into(), "ace".into()));
}

#[test]
fn known_positives_stay_and_are_never_negatives() {
    // By id, and by text where the file has no ids.
    for positive in [json!({"id": "c", "text": "other words"}), json!({"text": "x two", "title": ""})] {
        let item = json!({"question": "q", "positive_ctxs": [positive]});
        let (mined, report) = choose(&rules(), item, &TEXTS);
        let mined = mined.unwrap();
        assert_eq!((mined.positives.len(), ids(&mined.negatives)), (1, "abdef".into()));
        assert_eq!((report.known_positive, report.with_answer), (1, 0));
    }
    let item = json!({"question": "q", "answers": ["one"], "positive_ctxs": [{"text": "elsewhere"}]});
    let (mined, _) = choose(&rules(), item, &TEXTS);
    assert_eq!(ids(&mined.unwrap().negatives), "bcdef");
}

#[test]
fn window_and_margins_cut() {
    let item = || json!({"question": "q", "answers": ["one"]});
    let chosen = |rules: MineRules| choose(&rules, item(), &TEXTS).0.map(|m| ids(&m.negatives));
    assert_eq!(chosen(MineRules { first_rank: 3, last_rank: 5, ..rules() }).unwrap(), "cde");
    assert_eq!(chosen(MineRules { margin: Some(2.0), ..rules() }).unwrap(), "cdef");
    assert_eq!(chosen(MineRules { relative_margin: Some(0.35), ..rules() }).unwrap(), "ef");
    assert_eq!(chosen(MineRules { first_rank: 7, last_rank: 9, ..rules() }), None);
    let (_, report) = choose(&MineRules { margin: Some(2.0), ..rules() }, item(), &TEXTS);
    assert_eq!((report.within_margin, report.without_score), (1, 0));
    // The known positive is not among the candidates: its score is not known.
    let item = json!({"question": "q", "positive_ctxs": [{"id": "z", "text": "z"}]});
    let (mined, report) = choose(&MineRules { margin: Some(2.0), ..rules() }, item, &TEXTS);
    assert_eq!((ids(&mined.unwrap().negatives), report.without_score), ("abcdef".into(), 1));
}

#[test]
fn drawn_negatives_are_drawn_by_the_seed() {
    let item = || json!({"question": "q", "answers": ["one"]});
    let drawn = |seed| {
        let rules = MineRules { seed: Some(seed), negatives: 2, ..rules() };
        ids(&choose(&rules, item(), &TEXTS).0.unwrap().negatives)
    };
    let all: Vec<String> = (0..20).map(drawn).collect();
    assert_eq!(all, (0..20).map(drawn).collect::<Vec<_>>());
    assert!("bcdef".chars().all(|c| all.concat().contains(c)), "{all:?}");
}

#[test]
fn answers_say_nothing_where_they_have_no_words_or_are_not_asked() {
    let item = json!({"question": "q", "answers": ["", " "], "positive_ctxs": [{"text": "p"}]});
    let (mined, _) = choose(&rules(), item, &TEXTS);
    assert_eq!(ids(&mined.unwrap().negatives), "abcdef");
    let item = json!({"question": "q", "answers": ["Answer"]});
    let (mined, report) = choose(&MineRules { answers: None, ..rules() }, item, &TEXTS);
    assert_eq!((mined, report.without_positive), (None, 1));
    let regex = MineRules { answers: Some(AnswerMode::Regex), ..rules() };
    let item = json!({"question": "q", "answers": ["(one|two)$"]});
    let mined = choose(&regex, item, &TEXTS).0.unwrap();
    assert_eq!((ids(&mined.positives), ids(&mined.negatives)), ("a".into(), "bdef".into()));
    let bad = example(json!({"question": "q", "answers": ["("]}));
    let error = regex.choose(&bad, &candidates(&TEXTS), &mut MineReport::default()).unwrap_err().to_string();
    assert!(error.contains("q.jsonl, line 1") && error.contains("a regular expression"), "{error}");
}

#[test]
fn files_come_out_as_training_data() {
    let dir = tempfile::tempdir().unwrap();
    let passages = dir.path().join("p.tsv");
    std::fs::write(&passages, "1\tone\tA\n2\ttwo\tB\n3\tthree\t\"C\"\"c\"\n").unwrap();
    let run = dir.path().join("run");
    std::fs::write(&run, "5 Q0 1 1 3 t\n5 Q0 2 2 2 t\n5 Q0 3 3 1 t\n").unwrap();
    let examples =
        file(dir.path(), &[json!({"id": 5, "question": "q", "answers": ["two"]}), json!({"question": "r"})]);
    let candidates = || {
        let run = RunFile::open(&run, 10).unwrap();
        let collection = Passages::open(&passages, &dir.path().join("cache")).unwrap();
        let collection = Collection::of(collection, run.ids(), &|| false).unwrap();
        Candidates::Run(run, collection)
    };
    let collection = Passages::open(&passages, &dir.path().join("cache")).unwrap();
    let stopped = Collection::of(collection, ["1"].into_iter(), &|| true).map(|_| ());
    assert!(matches!(stopped, Err(TrainError::Stopped)), "{stopped:?}");
    for form in [MineForm::Dpr, MineForm::Triples] {
        let output = dir.path().join("out.jsonl");
        let report = mine(&examples, &candidates(), &rules(), form, &output, &|| false).unwrap();
        assert_eq!((report.questions, report.written, report.without_positive), (2, 1, 1));
        let written = RetrievalExamples::open(&output, &dir.path().join("cache")).unwrap();
        let e = written.get(0).unwrap();
        let of = |r| e.of(r).map(|p| (p.passage.id.as_str(), p.passage.title.as_str())).collect::<Vec<_>>();
        assert_eq!((e.id.clone(), e.question.as_str(), written.len()), (json!(5), "q", 1));
        assert_eq!(
            (of(Relevance::Positive), of(Relevance::HardNegative)),
            (vec![("2", "B")], vec![("1", "A"), ("3", "C\"c")])
        );
    }
    let nothing = MineRules { first_rank: 50, ..rules() };
    let output = dir.path().join("none.jsonl");
    let error =
        mine(&examples, &candidates(), &nothing, MineForm::Dpr, &output, &|| false).unwrap_err().to_string();
    assert!(error.contains("none of 2 questions") && !output.exists(), "{error}");
    let error =
        mine(&examples, &candidates(), &rules(), MineForm::Dpr, examples.path(), &|| false).unwrap_err();
    assert!(error.to_string().contains("would replace the file"), "{error}");
    for wrong in [
        MineRules { first_rank: 0, ..rules() },
        MineRules { last_rank: 0, ..rules() },
        MineRules { margin: Some(f64::NAN), ..rules() },
        MineRules { relative_margin: Some(-1.0), ..rules() },
        MineRules { negatives: 0, ..rules() },
    ] {
        assert!(wrong.check().is_err(), "{wrong:?}");
    }
}
