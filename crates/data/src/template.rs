//! The texts that a Fusion-in-Decoder reader or retriever sees, space for space as FiD writes them, and templates of others.

use std::fmt;
use std::str::FromStr;

use crate::error::DataError;
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

/// How a retriever's text is made of a passage or a question: a text with `{title}` and `{text}`, or with `{question}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextTemplate(String);

const PLACES: [&str; 3] = ["{title}", "{text}", "{question}"];

/// Title and text with nothing but a space between them.
const JOINED: &str = "{title} {text}";

impl TextTemplate {
    /// FiD's of a passage, `title: {title} context: {text}`; `no_title` leaves the first part out.
    pub fn passage(no_title: bool) -> TextTemplate {
        TextTemplate(if no_title { "context: {text}" } else { "title: {title} context: {text}" }.into())
    }

    /// FiD's of a question, `question: {question}`.
    pub fn question() -> TextTemplate {
        TextTemplate("question: {question}".into())
    }

    /// The text of a passage. Where the template joins title and text by nothing but a space, as BEIR does, the space goes with an
    /// empty title.
    pub fn of_passage(&self, passage: &Passage) -> String {
        if passage.title.is_empty() && self.0.contains(JOINED) {
            return TextTemplate(self.0.replace(JOINED, "{text}")).fill(["", &passage.text, ""]);
        }
        self.fill([&passage.title, &passage.text, ""])
    }

    /// The text of a question.
    pub fn of_question(&self, question: &str) -> String {
        self.fill(["", "", question])
    }

    /// Whether the template has a place for a question; else it is one for passages.
    pub fn is_for_questions(&self) -> bool {
        self.0.contains("{question}")
    }

    /// Puts texts into their places. What a text has of braces stays as it is.
    fn fill(&self, texts: [&str; 3]) -> String {
        let mut out = String::new();
        let mut rest = self.0.as_str();
        while let Some((at, k)) =
            PLACES.iter().enumerate().filter_map(|(k, p)| Some((rest.find(p)?, k))).min()
        {
            out.push_str(&rest[..at]);
            out.push_str(texts[k]);
            rest = &rest[at + PLACES[k].len()..];
        }
        out + rest
    }
}

impl fmt::Display for TextTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for TextTemplate {
    type Err = DataError;

    /// # Errors
    /// Without a place for text or question; with places for both; with other names in braces.
    fn from_str(template: &str) -> Result<TextTemplate, DataError> {
        let without = PLACES.iter().fold(template.to_owned(), |t, p| t.replace(p, ""));
        let has = |place: &str| template.contains(place);
        let fits = has("{question}") != (has("{text}") || has("{title}")) && !without.contains(['{', '}']);
        if !fits {
            return Err(DataError::Setting(format!(
                "expected a template with {{text}} (and {{title}}) for passages, or with {{question}} for questions, and no \
                 other braces, found {template:?}"
            )));
        }
        Ok(TextTemplate(template.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::question::Place;

    #[test]
    fn templates_of_retrievers() {
        let passage = Passage {
            id: "1".into(),
            title: "{text}".into(),
            text: "b {title}".into(),
            score: None,
            file_position: 0,
        };
        assert_eq!(TextTemplate::passage(false).of_passage(&passage), "title: {text} context: b {title}");
        assert_eq!(TextTemplate::passage(true).of_passage(&passage), "context: b {title}");
        assert_eq!(TextTemplate::question().of_question("who?"), "question: who?");
        let own: TextTemplate = "{title} {text}!".parse().unwrap();
        let untitled = Passage { title: String::new(), ..passage.clone() };
        assert_eq!(own.of_passage(&untitled), "b {title}!");
        assert_eq!(TextTemplate::passage(false).of_passage(&untitled), "title:  context: b {title}");
        assert_eq!((own.of_passage(&passage).as_str(), own.is_for_questions()), ("{text} b {title}!", false));
        for template in [TextTemplate::passage(false), TextTemplate::question()] {
            assert_eq!(template.to_string().parse::<TextTemplate>().unwrap(), template);
        }
        for bad in ["", "passage", "{text} {question}", "{text} {body}", "{text}}"] {
            assert!(
                bad.parse::<TextTemplate>().unwrap_err().to_string().contains("no other braces"),
                "{bad}"
            );
        }
    }

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
