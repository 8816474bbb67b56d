//! Hits as Fusion-in-Decoder and DPR count them, compared with what their code gives.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use golden_folder::golden_folder;
use serde_json::Value;
use tercio_data::has_answer::{AnswerMatcher, AnswerMode, words};

fn cases() -> Value {
    let path = golden_folder().join("eval/has_answer.json");
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect()
}

fn matcher(answers: &Value) -> AnswerMatcher {
    AnswerMatcher::new(&strings(answers), AnswerMode::Words).unwrap()
}

#[test]
fn golden_words_and_answers() {
    let file = cases();
    let list = file["cases"].as_array().unwrap();
    assert!(!list.is_empty());
    for case in list {
        let text = case["passage"].as_str().unwrap();
        assert_eq!(words(text), strings(&case["passage_tokens"]), "{text:?}");
        for (answer, tokens) in
            strings(&case["answers"]).iter().zip(case["answer_tokens"].as_array().unwrap())
        {
            assert_eq!(words(answer), strings(tokens), "{answer:?}");
        }
        assert_eq!(matcher(&case["answers"]).found_in(text), case["has_answer"].as_bool().unwrap(), "{case}");
    }
}

#[test]
fn golden_hits_at_k() {
    let file = cases();
    let hits = &file["hit_at_k"];
    let mut first_hits = Vec::new();
    for (question, expected) in
        hits["questions"].as_array().unwrap().iter().zip(hits["hits"].as_array().unwrap())
    {
        let matcher = matcher(&question["answers"]);
        let found: Vec<bool> = question["ctxs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|ctx| matcher.found_in(ctx["text"].as_str().unwrap()))
            .collect();
        let expected: Vec<bool> = expected.as_array().unwrap().iter().map(|v| v.as_bool().unwrap()).collect();
        assert_eq!(found, expected, "{question}");
        first_hits.push(found.iter().position(|&hit| hit));
    }
    for (k, count) in hits["top_k_hits"].as_array().unwrap().iter().enumerate() {
        let found = first_hits.iter().flatten().filter(|&&hit| hit <= k).count();
        assert_eq!(found as u64, count.as_u64().unwrap(), "hits at {}", k + 1);
    }
}
