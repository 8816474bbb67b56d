//! Whether a passage holds an answer, as Fusion-in-Decoder and DPR decide it when they count hits.
//!
//! Text and answer are decomposed (NFD), cut into runs of letters, numbers and marks or single other characters, and
//! lower-cased; the answer's words have to stand in the passage one after the other. DPR's other way takes answers for
//! regular expressions. Only the text counts, not the title.

use std::sync::LazyLock;

use regex::{Regex, RegexBuilder};
use tokenizers::NormalizedString;

use crate::error::DataError;

/// Bytes that a compiled answer may take: patterns come from data files.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// DPR's SimpleTokenizer: words, or any character that is neither separator nor control.
static WORDS: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]").expect("a fixed pattern"));

/// How answers are compared with a passage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnswerMode {
    /// As words, upper and lower case alike.
    #[default]
    Words,
    /// As regular expressions, upper and lower case alike (CuratedTREC's answers).
    Regex,
}

/// The answers of one question, ready to be looked for in many passages.
#[derive(Clone, Debug)]
pub struct AnswerMatcher(Answers);

#[derive(Clone, Debug)]
enum Answers {
    Words(Vec<Vec<String>>),
    Regex(Vec<Regex>),
}

impl AnswerMatcher {
    /// Prepares answers. An answer without any word stands in every passage, as it does for the others' programs:
    /// [`words`] tells such answers, for a caller that wants to leave them out.
    ///
    /// # Errors
    /// An answer that is no regular expression, in that mode; look-around and references back are none here.
    pub fn new<S: AsRef<str>>(answers: &[S], mode: AnswerMode) -> Result<AnswerMatcher, DataError> {
        let answers = answers.iter().map(AsRef::as_ref);
        Ok(AnswerMatcher(match mode {
            AnswerMode::Words => Answers::Words(answers.map(words).collect()),
            AnswerMode::Regex => Answers::Regex(answers.map(pattern).collect::<Result<_, _>>()?),
        }))
    }

    /// Whether one of the answers stands in a passage's text.
    pub fn found_in(&self, text: &str) -> bool {
        match &self.0 {
            Answers::Words(answers) => {
                let text = words(text);
                answers.iter().any(|answer| {
                    // `windows` has no length 0.
                    answer.is_empty() || text.windows(answer.len()).any(|part| part == answer)
                })
            }
            Answers::Regex(patterns) => {
                let text = decomposed(text);
                patterns.iter().any(|pattern| pattern.is_match(&text))
            }
        }
    }
}

/// The words of a text, lower-cased.
pub fn words(text: &str) -> Vec<String> {
    let text = decomposed(text);
    WORDS.find_iter(&text).map(|word| word.as_str().to_lowercase()).collect()
}

fn pattern(answer: &str) -> Result<Regex, DataError> {
    RegexBuilder::new(&decomposed(answer))
        .case_insensitive(true)
        .multi_line(true)
        .size_limit(MAX_PATTERN_BYTES)
        .build()
        .map_err(|e| {
            let reason = e.to_string();
            let reason = reason.lines().last().unwrap_or_default().trim_start_matches("error: ");
            DataError::Text(format!(
                "expected a regular expression as answer, found {answer:?} ({reason}); correct it, or compare answers as words"
            ))
        })
}

/// Unicode's canonical decomposition (NFD).
fn decomposed(text: &str) -> std::borrow::Cow<'_, str> {
    if text.is_ascii() {
        return text.into();
    }
    let mut normalized = NormalizedString::from(text);
    normalized.nfd();
    normalized.get().to_owned().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_found_whatever_the_case() {
        let found = |answers: &[&str], text: &str| {
            AnswerMatcher::new(answers, AnswerMode::Regex).unwrap().found_in(text)
        };
        assert!(found(&["19\\d\\d", "x"], "in 1987."));
        assert!(found(&["Gr(a|e)y"], "GREY area"));
        assert!(found(&["^café$"], "one\ncafe\u{301}\ntwo"));
        assert!(!found(&["^two"], "one two"));
        assert!(!found(&[], "anything"));
    }

    #[test]
    fn bad_patterns_are_named() {
        for (pattern, part) in
            [("a(b", "unclosed group"), ("(?=x)y", "look-around"), ("(a{1000}){1000}", "size")]
        {
            let error = AnswerMatcher::new(&[pattern], AnswerMode::Regex).unwrap_err().to_string();
            assert!(error.contains(&format!("{pattern:?}")) && error.contains(part), "{error}");
        }
    }
}
