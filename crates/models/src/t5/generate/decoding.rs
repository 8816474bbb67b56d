//! How an answer is decoded: how long it may be, and how many beams look for it.

use std::fmt;
use std::str::FromStr;

/// Most beams that are believed to be meant: memory and time grow with them.
pub const MOST_BEAMS: usize = 64;
/// Greatest length penalty, either way, for which no length of an answer leaves the numbers.
const MOST_PENALTY: f64 = 10.0;

/// When a beam search ends before the greatest length, with `num_beams` answers found. transformers' `early_stopping`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// `false`: once the best running beam, scored as if it ended now, is no better than the worst answer found.
    #[default]
    False,
    /// `true`: at once.
    True,
    /// `never`: as `false`, but where the length penalty is above zero the best running beam is scored as if it lost
    /// nothing up to the greatest length.
    Never,
}

impl FromStr for EarlyStopping {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "false" => Ok(EarlyStopping::False),
            "true" => Ok(EarlyStopping::True),
            "never" => Ok(EarlyStopping::Never),
            other => Err(format!("expected true, false or never, found `{other}`")),
        }
    }
}

impl fmt::Display for EarlyStopping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EarlyStopping::False => "false",
            EarlyStopping::True => "true",
            EarlyStopping::Never => "never",
        })
    }
}

/// How to decode; names and meanings are those of transformers' `generate`.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoding {
    /// Tokens of an answer at most, the start token counted (Fusion-in-Decoder's default: 50).
    pub max_length: usize,
    /// The end token is not chosen before the answer has so many tokens, the start token counted, the end token not.
    pub min_length: usize,
    /// Beams of a question; 1: the likeliest token is taken at every step.
    pub num_beams: usize,
    /// Answers to each question, best first.
    pub num_return_sequences: usize,
    /// Exponent of the length (tokens without the start token, with the end token) that an answer's log probability is
    /// divided by to give its score; above zero favours long answers.
    pub length_penalty: f64,
    /// When a beam search ends.
    pub early_stopping: EarlyStopping,
}

impl Decoding {
    /// One answer, the likeliest token at every step.
    pub fn greedy(max_length: usize) -> Decoding {
        Decoding {
            max_length,
            min_length: 0,
            num_beams: 1,
            num_return_sequences: 1,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::False,
        }
    }

    /// Whether the numbers can be meant; `max_length` is its owner's to check.
    ///
    /// # Errors
    /// What was expected of which number, by the flag's name.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: usize, least: usize, most: usize, hint: &str| match value {
            v if (least..=most).contains(&v) => Ok(()),
            v => Err(format!("--{name} {v}: expected {least} to {most}{hint}")),
        };
        let of_length = ", the greatest length (--generation_max_length)";
        within("generation_min_length", self.min_length, 0, self.max_length, of_length)?;
        within("num_beams", self.num_beams, 1, MOST_BEAMS, "")?;
        let of_beams = ": each answer comes from a beam of its own, of --num_beams";
        within("num_return_sequences", self.num_return_sequences, 1, self.num_beams, of_beams)?;
        if !(-MOST_PENALTY..=MOST_PENALTY).contains(&self.length_penalty) {
            return Err(format!(
                "--length_penalty {}: expected a number from -{MOST_PENALTY} to {MOST_PENALTY}",
                self.length_penalty
            ));
        }
        Ok(())
    }

    /// The score of a log probability at a length: `log_probability / length^length_penalty`; 0 for no token.
    pub fn score(&self, log_probability: f64, length: usize) -> f64 {
        if length == 0 { 0.0 } else { log_probability / libm::pow(length as f64, self.length_penalty) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_be_meant() {
        let good = Decoding { min_length: 20, num_beams: 4, num_return_sequences: 4, ..Decoding::greedy(20) };
        good.check().unwrap();
        let bad = [
            (Decoding { min_length: 21, ..good.clone() }, "--generation_min_length 21: expected 0 to 20"),
            (Decoding { num_beams: 0, ..good.clone() }, "--num_beams 0: expected 1 to 64"),
            (
                Decoding { num_return_sequences: 5, ..good.clone() },
                "--num_return_sequences 5: expected 1 to 4",
            ),
            (
                Decoding { length_penalty: f64::NAN, ..good.clone() },
                "--length_penalty NaN: expected a number",
            ),
        ];
        for (decoding, message) in bad {
            let error = decoding.check().unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
        for name in ["false", "true", "never"] {
            assert_eq!(name.parse::<EarlyStopping>().unwrap().to_string(), name);
        }
        assert!("yes".parse::<EarlyStopping>().unwrap_err().contains("found `yes`"));
    }
}
