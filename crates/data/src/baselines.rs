//! Two honest baselines for questions on a field of something, which a reader has to beat: the field's commonest answer,
//! and the first words of the passage that shares the most words with the question.

use std::collections::{BTreeMap, BTreeSet};

use crate::answers::{exact_match, normalize};
use crate::error::DataError;
use crate::question::Question;
use crate::questions::Questions;

/// Most words that the overlap baseline answers with.
const WORDS: usize = 5;

/// Exact match of both baselines.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Baselines {
    /// Answering with the commonest training target of the question's `field`.
    pub majority: f64,
    /// Answering with the first `words` words of the best passage by overlap.
    pub overlap: f64,
    /// The number of words, chosen on the training questions.
    pub words: usize,
}

/// Learns both baselines on `train` and measures them on `eval`. Items have a key `field`; passages count in file order.
///
/// # Errors
/// If an item cannot be read.
pub fn measure(train: &Questions, eval: &Questions) -> Result<Baselines, DataError> {
    let mut counts: BTreeMap<String, BTreeMap<String, (usize, usize)>> = BTreeMap::new();
    let mut hits = [0usize; WORDS];
    for i in 0..train.len() {
        let question = train.get(i)?;
        let target = question.target.clone().unwrap_or_default();
        let entry = counts.entry(field(train, i)?).or_default().entry(target).or_insert((0, i));
        entry.0 += 1;
        for (k, hit) in hits.iter_mut().enumerate() {
            *hit += usize::from(is_right(&first_words(&question, k + 1), &question));
        }
    }
    let majority: BTreeMap<&String, &String> = counts
        .iter()
        .filter_map(|(field, targets)| {
            // The greatest count, the earliest seen among equals.
            let best = targets.iter().max_by_key(|(_, (count, first))| (*count, std::cmp::Reverse(*first)));
            best.map(|(target, _)| (field, target))
        })
        .collect();
    let words = 1 + (0..WORDS).max_by_key(|&k| (hits[k], std::cmp::Reverse(k))).unwrap_or(0);
    let (mut by_majority, mut by_overlap) = (0, 0);
    for i in 0..eval.len() {
        let question = eval.get(i)?;
        let answer = majority.get(&field(eval, i)?).map_or("", |t| t.as_str());
        by_majority += usize::from(is_right(answer, &question));
        by_overlap += usize::from(is_right(&first_words(&question, words), &question));
    }
    let share = |n: usize| n as f64 / eval.len().max(1) as f64;
    Ok(Baselines { majority: share(by_majority), overlap: share(by_overlap), words })
}

fn field(questions: &Questions, i: usize) -> Result<String, DataError> {
    let raw = questions.get_raw(i)?;
    Ok(raw.get("field").and_then(|f| f.as_str()).unwrap_or_default().to_owned())
}

fn is_right(answer: &str, question: &Question) -> bool {
    exact_match(answer, &question.answers).unwrap_or(false)
}

/// The first `k` words of the passage with the most different words of the question in title and text; the first of equals.
fn first_words(question: &Question, k: usize) -> String {
    let asked: BTreeSet<String> = normalize(&question.question).split(' ').map(str::to_owned).collect();
    let overlap = |title: &str, text: &str| {
        let words = normalize(&format!("{title} {text}"));
        words.split(' ').collect::<BTreeSet<_>>().into_iter().filter(|w| asked.contains(*w)).count()
    };
    let best = question
        .ctxs
        .iter()
        .enumerate()
        .max_by_key(|(i, c)| (overlap(&c.title, &c.text), std::cmp::Reverse(*i)))
        .map(|(_, c)| c);
    best.map_or(String::new(), |c| c.text.split_whitespace().take(k).collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_baselines_on_a_small_file() {
        let dir = tempfile::tempdir().unwrap();
        let item = |field: &str, target: &str, question: &str, text: &str| {
            serde_json::json!({
                "question": question, "target": target, "answers": [target], "field": field,
                "ctxs": [{"title": "x", "text": "nothing here"}, {"title": "t", "text": text}],
            })
            .to_string()
        };
        let train = [
            item("a", "1", "what is a of t", "1 is a of t"),
            item("a", "2", "what is a of u", "7 is a of u"),
            item("a", "2", "what is a of v", "2 is a of v"),
            item("b", "red", "what is b of t", "red b"),
        ];
        let eval = [
            item("a", "2", "what is a of w", "5 is a of w"),
            item("b", "blue", "what is b of w", "blue b of w"),
            item("c", "x", "what is c of w", "y c of w"),
        ];
        let write = |name: &str, lines: &[String]| {
            let path = dir.path().join(name);
            std::fs::write(&path, lines.join("\n")).unwrap();
            Questions::open(&path, dir.path()).unwrap()
        };
        let found = measure(&write("train.jsonl", &train), &write("eval.jsonl", &eval)).unwrap();
        assert_eq!(found, Baselines { majority: 1.0 / 3.0, overlap: 1.0 / 3.0, words: 1 });
    }
}
