//! The texts that a Fusion-in-Decoder reader sees, space for space as FiD writes them.

use crate::question::{Passage, Question};

/// `question: {q}`: the whole input where there are no passages (closed book).
pub fn question_text(question: &str) -> String {
    format!("question: {question}")
}

/// `question: {q} title: {t} context: {p}`, or without the title part.
pub fn passage_text(question: &str, passage: &Passage, no_title: bool) -> String {
    if no_title {
        format!("question: {question} context: {}", passage.text)
    } else {
        format!("question: {question} title: {} context: {}", passage.title, passage.text)
    }
}

/// The texts to encode for a question: one for each of its first `n_context` passages.
///
/// With fewer passages there are fewer texts. With none, or `n_context` 0, it is the bare question alone.
pub fn reader_texts(question: &Question, n_context: usize, no_title: bool) -> Vec<String> {
    let passages = &question.ctxs[..question.ctxs.len().min(n_context)];
    if passages.is_empty() {
        return vec![question_text(&question.question)];
    }
    passages.iter().map(|p| passage_text(&question.question, p, no_title)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::question::Place;

    #[test]
    fn spaces_and_counts_are_fids() {
        let json =
            br#"{"question": "who?", "ctxs": [{"title": "T", "text": "one"}, {"title": "", "text": "two"}]}"#;
        let q = Question::from_json(json, &Place::new("q".as_ref(), 0, 1)).unwrap();
        assert_eq!(
            reader_texts(&q, 5, false),
            ["question: who? title: T context: one", "question: who? title:  context: two"]
        );
        assert_eq!(reader_texts(&q, 1, true), ["question: who? context: one"]);
        assert_eq!(reader_texts(&q, 0, false), ["question: who?"]);
        let bare = Question { ctxs: vec![], ..q };
        assert_eq!(reader_texts(&bare, 5, false), ["question: who?"]);
    }
}
