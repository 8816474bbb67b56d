//! From text to the words that are indexed; a query goes the same way.
//!
//! Words are runs of letters and digits as Unicode has them, in lower case. `stopped` indexes all of them, but does not ask for the most
//! frequent ones; `english` leaves those out everywhere, and takes endings off the others (`stem.rs`).

use serde::{Deserialize, Serialize};

use super::stem::stem;

/// Longest word in bytes; of a longer one its beginning stands for it.
const MOST_BYTES: usize = 255;

/// How text becomes words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Analyzer {
    /// Words in lower case, nothing else.
    Plain,
    /// The same words; of a query the words that are in every English text are left out, unless it has no others.
    #[default]
    Stopped,
    /// Without the words that are in every English text, and with endings taken off.
    English,
}

/// Words without which an English text means the same: articles, prepositions, pronouns, words that
/// ask, forms of "to be", and what an apostrophe leaves of a word.
const STOPWORDS: [&str; 95] = [
    "a", "about", "after", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be", "because",
    "been", "being", "but", "by", "can", "could", "did", "do", "does", "each", "for", "from", "had", "has",
    "have", "he", "her", "him", "his", "how", "i", "if", "in", "into", "is", "it", "its", "me", "more",
    "most", "my", "no", "not", "of", "off", "on", "only", "or", "other", "our", "out", "over", "s", "she",
    "so", "some", "such", "t", "than", "that", "the", "their", "them", "then", "there", "these", "they",
    "this", "through", "to", "too", "under", "up", "us", "very", "was", "we", "were", "what", "when",
    "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you", "your",
];

/// Of these `stopped` asks for all the same. Chosen by what is found: in questions like "what is the capital of ..." these words still tell
/// passages apart, and without them hits fell below those of all words (figures in docs/retrieval.md).
const ASKED: [&str; 5] = ["are", "in", "is", "was", "were"];

fn is_asked(word: &str) -> bool {
    STOPWORDS.binary_search(&word).is_err() || ASKED.contains(&word)
}

impl Analyzer {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Analyzer::Plain => "plain",
            Analyzer::Stopped => "stopped",
            Analyzer::English => "english",
        }
    }

    /// The words of a query that are asked for, in their order. `room` is only memory to work in.
    pub fn query_words(self, query: &str, room: &mut String) -> Vec<String> {
        let mut all = Vec::new();
        self.words(query, room, |word| all.push(word.to_owned()));
        // "The Who" asks for nothing else: then they count.
        if self == Analyzer::Stopped && all.iter().any(|word| is_asked(word)) {
            all.retain(|word| is_asked(word));
        }
        all
    }

    /// Gives the words of a text to `word`, in their order. `room` is only memory to work in.
    pub fn words(self, text: &str, room: &mut String, mut word: impl FnMut(&str)) {
        // Runs of letters and digits; the common case, a byte of ASCII, is decided without decoding.
        let bytes = text.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            let start = at;
            let mut ascii = true;
            while at < bytes.len() {
                if bytes[at].is_ascii() {
                    if !bytes[at].is_ascii_alphanumeric() {
                        break;
                    }
                    at += 1;
                } else {
                    // A byte that is not ASCII begins a character here: `at` only ever goes by whole ones.
                    let Some(c) = text[at..].chars().next().filter(|c| c.is_alphanumeric()) else { break };
                    ascii = false;
                    at += c.len_utf8();
                }
            }
            if at > start {
                self.word(&text[start..at], ascii, room, &mut word);
            }
            // Past the character that ended it.
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }

    fn word(self, found: &str, ascii: bool, room: &mut String, word: &mut impl FnMut(&str)) {
        room.clear();
        if ascii {
            room.push_str(found);
            room.make_ascii_lowercase();
        } else {
            room.push_str(&found.to_lowercase());
        }
        if room.len() > MOST_BYTES {
            let end = (0..=MOST_BYTES).rev().find(|&i| room.is_char_boundary(i)).unwrap_or(0);
            room.truncate(end);
        }
        if self == Analyzer::English {
            if STOPWORDS.binary_search(&room.as_str()).is_ok() {
                return;
            }
            stem(room);
        }
        word(room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(analyzer: Analyzer, text: &str) -> Vec<String> {
        let mut all = Vec::new();
        analyzer.words(text, &mut String::new(), |w| all.push(w.to_owned()));
        all
    }

    #[test]
    fn words_are_runs_of_letters_and_digits() {
        let plain = |text| words(Analyzer::Plain, text);
        assert_eq!(
            plain("The U.S.'s 1st—Ärger, \u{39f}\u{394}\u{39f}\u{3a3}!"),
            ["the", "u", "s", "s", "1st", "ärger", "οδος"]
        );
        assert_eq!(plain("東京 2020年"), ["東京", "2020年"]);
        for none in ["", " ", "—…\u{1f600}", "\u{301}"] {
            assert!(plain(none).is_empty(), "{none:?}");
        }
        // Cut between characters.
        assert_eq!(words(Analyzer::Plain, &"é".repeat(200)), ["é".repeat(127)]);
        assert_eq!(words(Analyzer::Plain, &"x".repeat(300)), ["x".repeat(255)]);
    }

    #[test]
    fn stopped_asks_for_frequent_words_only_where_there_are_no_others() {
        let text = "Which capital of The Who?";
        assert_eq!(words(Analyzer::Stopped, text), words(Analyzer::Plain, text));
        let asked = |analyzer: Analyzer, query| analyzer.query_words(query, &mut String::new());
        assert_eq!(asked(Analyzer::Stopped, text), ["capital"]);
        assert_eq!(asked(Analyzer::Stopped, "The Who"), ["the", "who"]);
        assert_eq!(
            asked(Analyzer::Stopped, "what is the running of capitals"),
            ["is", "running", "capitals"]
        );
        assert_eq!(asked(Analyzer::Plain, "the capital"), ["the", "capital"]);
        assert!(asked(Analyzer::Stopped, "?").is_empty());
    }

    #[test]
    fn english_leaves_out_stopwords_and_endings() {
        let english = |text| words(Analyzer::English, text);
        assert_eq!(english("The capitals of the nation's states"), ["capit", "nation", "state"]);
        assert!(english("It is not in there").is_empty());
        assert!(STOPWORDS.is_sorted());
        assert!(ASKED.iter().all(|word| STOPWORDS.contains(word)));
    }
}
