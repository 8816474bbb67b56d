//! Exact match and token F1 of answers.
//!
//! Normalising is FiD's (and the SQuAD script's): lower case, ASCII punctuation removed, the words a, an, the
//! replaced by a space, white space collapsed. The best of all accepted answers counts.

/// An answer as it is compared.
pub fn normalize(text: &str) -> String {
    let kept: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let mut spaced = String::with_capacity(kept.len());
    let mut word = String::new();
    for c in kept.chars() {
        if c.is_alphanumeric() {
            word.push(c);
        } else {
            push_word(&mut spaced, &mut word);
            spaced.push(if is_space(c) { ' ' } else { c });
        }
    }
    push_word(&mut spaced, &mut word);
    spaced.split(' ').filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A run of letters and digits is a word in the sense of the articles' rule, whatever stands round it.
fn push_word(out: &mut String, word: &mut String) {
    out.push_str(if matches!(word.as_str(), "a" | "an" | "the") { " " } else { word });
    word.clear();
}

/// White space as Python's `str.split` sees it: Unicode's, and four control characters.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Whether the prediction equals one of the answers after [`normalize`]; `None` without answers.
pub fn exact_match(prediction: &str, answers: &[String]) -> Option<bool> {
    let prediction = normalize(prediction);
    (!answers.is_empty()).then(|| answers.iter().any(|a| normalize(a) == prediction))
}

/// Which script's rule holds when one side has no words left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum F1Rule {
    /// SQuAD 1.1: two empty sides give 0.
    Squad1,
    /// SQuAD 2.0: two empty sides give 1.
    Squad2,
}

/// Harmonic mean of precision and recall over normalised words (as multisets), best over the answers, in 0..=1;
/// `None` without answers. Formula: the evaluation scripts of SQuAD.
pub fn f1(prediction: &str, answers: &[String], rule: F1Rule) -> Option<f64> {
    let prediction = normalize(prediction);
    answers.iter().map(|a| f1_one(&prediction, &normalize(a), rule)).reduce(f64::max)
}

fn f1_one(prediction: &str, answer: &str, rule: F1Rule) -> f64 {
    let words = |text: &'_ str| -> Vec<String> {
        let mut words: Vec<String> = text.split(' ').filter(|w| !w.is_empty()).map(String::from).collect();
        words.sort_unstable();
        words
    };
    let (p, a) = (words(prediction), words(answer));
    if p.is_empty() && a.is_empty() && rule == F1Rule::Squad2 {
        return 1.0;
    }
    let (mut i, mut j, mut same) = (0, 0, 0usize);
    while i < p.len() && j < a.len() {
        match p[i].cmp(&a[j]) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                same += 1;
                i += 1;
                j += 1;
            }
        }
    }
    if same == 0 {
        return 0.0;
    }
    let precision = same as f64 / p.len() as f64;
    let recall = same as f64 / a.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

/// Sums of metrics over questions; add them in input order, so that the sums are the same bits every time.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct AnswerTally {
    /// Questions that have answers.
    pub counted: u64,
    /// Questions without answers: no metric can be had for them.
    pub without_answers: u64,
    /// Exact matches.
    pub exact_matches: u64,
    /// Sum of F1 (SQuAD 1.1's rule).
    pub f1_sum: f64,
}

impl AnswerTally {
    /// Counts one prediction.
    pub fn add(&mut self, prediction: &str, answers: &[String]) {
        match (exact_match(prediction, answers), f1(prediction, answers, F1Rule::Squad1)) {
            (Some(em), Some(f1)) => {
                self.counted += 1;
                self.exact_matches += u64::from(em);
                self.f1_sum += f1;
            }
            _ => self.without_answers += 1,
        }
    }

    /// Share of exact matches in 0..=1; `None` if nothing was counted.
    pub fn exact_match(&self) -> Option<f64> {
        (self.counted > 0).then(|| self.exact_matches as f64 / self.counted as f64)
    }

    /// Mean F1 in 0..=1; `None` if nothing was counted.
    pub fn f1(&self) -> Option<f64> {
        (self.counted > 0).then(|| self.f1_sum / self.counted as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalising_follows_the_order_of_its_steps() {
        for (text, normal) in [
            ("The  Silver\u{a0}River.", "silver river"),
            ("a.n apple", "apple"), // punctuation goes first, then articles
            ("theatre an the", "theatre"),
            ("x\u{2014}the\u{2014}y", "x\u{2014} \u{2014}y"),
            ("A\u{1c}B", "b"),
            ("", ""),
        ] {
            assert_eq!(normalize(text), normal, "{text:?}");
        }
    }

    #[test]
    fn questions_without_answers_are_not_counted() {
        let mut tally = AnswerTally::default();
        assert_eq!((tally.exact_match(), tally.f1()), (None, None));
        tally.add("x", &[]);
        tally.add("the red fox", &["fox".into(), "red fox".into()]);
        tally.add("red dog", &["red fox".into()]);
        assert_eq!((tally.counted, tally.without_answers, tally.exact_matches), (2, 1, 1));
        assert_eq!((tally.exact_match(), tally.f1()), (Some(0.5), Some(0.75)));
    }
}
