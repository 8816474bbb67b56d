//! The search for one question's answers: which beams run on, which answers were found, when it ends. No tensors.
//!
//! The rules are those of transformers' beam search (version 5): of all continuations of all beams the best
//! `2 * num_beams` are looked at; those among the first `num_beams` that end are answers, the first `num_beams` that do not
//! end run on. With one beam this is greedy decoding. Scores are sums in f64; of equal scores the lower beam comes
//! first, then the smaller token, and an answer that was found earlier.

use std::cmp::Ordering;
use std::ops::Range;

use super::decoding::{Decoding, EarlyStopping};

/// An answer that was decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// Its tokens, without the start token, with the end token where it came.
    pub tokens: Vec<u32>,
    /// Sum of its tokens' log probabilities, of all tokens of the vocabulary (an end token that was not allowed yet too).
    pub log_probability: f64,
    /// The log probability divided by `length^length_penalty`, what beam search compares.
    pub score: f64,
}

impl Decoded {
    /// The log probability over the number of tokens; 0 for no token.
    pub fn mean_log_probability(&self) -> f64 {
        if self.tokens.is_empty() { 0.0 } else { self.log_probability / self.tokens.len() as f64 }
    }
}

/// A beginning of an answer.
pub(super) struct Beam {
    /// Where its keys and values lie.
    pub slot: usize,
    pub tokens: Vec<u32>,
    log_probability: f64,
}

/// The search for the answers to one question.
pub(super) struct Search {
    /// The beams that run, best first.
    pub beams: Vec<Beam>,
    pub done: bool,
    slots: Range<usize>,
    found: Vec<Decoded>,
}

struct Candidate {
    log_probability: f64,
    beam: usize,
    token: u32,
}

/// Greatest first; what is not a number last.
fn descending(a: f64, b: f64) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

impl Search {
    /// One beam, which has read the start token only; `slots` are the places of this question's beams.
    pub fn new(slots: Range<usize>) -> Search {
        let beam = Beam { slot: slots.start, tokens: Vec::new(), log_probability: 0.0 };
        Search { beams: vec![beam], done: false, slots, found: Vec::new() }
    }

    /// Takes the likeliest next tokens of every beam, with their log probabilities, and goes one token on. Returns which
    /// slots must be copied to which others, so that every beam finds its past in its own.
    pub fn advance(
        &mut self,
        rule: &Decoding,
        end: u32,
        continuations: impl Iterator<Item = (usize, u32, f64)>,
    ) -> Vec<(usize, usize)> {
        let length = self.beams.first().map_or(0, |b| b.tokens.len()) + 1;
        let last = length + 1 >= rule.max_length;
        let mut candidates: Vec<Candidate> = continuations
            .map(|(beam, token, step)| Candidate {
                log_probability: self.beams[beam].log_probability + step,
                beam,
                token,
            })
            .collect();
        candidates.sort_by(|a, b| {
            let by_score = descending(a.log_probability, b.log_probability);
            by_score.then(a.beam.cmp(&b.beam)).then(a.token.cmp(&b.token))
        });
        candidates.truncate(2 * rule.num_beams);
        let mut next: Vec<Candidate> = Vec::new();
        for (rank, c) in candidates.into_iter().enumerate() {
            if c.token != end && !last {
                if next.len() < rule.num_beams {
                    next.push(c);
                }
            } else if rank < rule.num_beams {
                let score = rule.score(c.log_probability, length);
                self.found.push(Decoded {
                    tokens: self.tokens(&c),
                    log_probability: c.log_probability,
                    score,
                });
            }
        }
        self.found.sort_by(|a, b| descending(a.score, b.score));
        self.found.truncate(rule.num_beams);
        self.done = last || next.is_empty() || self.nothing_to_gain(rule, &next[0], length);
        if self.done {
            return Vec::new();
        }
        self.run_on(next)
    }

    /// Whether answers enough were found, and no running beam is expected to beat the worst of them.
    fn nothing_to_gain(&self, rule: &Decoding, best: &Candidate, length: usize) -> bool {
        let full = self.found.len() == rule.num_beams;
        let Some(worst) = self.found.last().filter(|_| full) else {
            return false;
        };
        let length = match rule.early_stopping {
            EarlyStopping::True => return true,
            EarlyStopping::Never if rule.length_penalty > 0.0 => rule.max_length - 1,
            _ => length,
        };
        // Written so that what is not a number ends the search.
        let improvable = rule.score(best.log_probability, length) > worst.score;
        !improvable
    }

    /// The chosen continuations become the beams. The first child of a beam takes over its slot, others get free ones.
    fn run_on(&mut self, next: Vec<Candidate>) -> Vec<(usize, usize)> {
        let mut heirs: Vec<Option<usize>> = vec![None; self.beams.len()];
        for (i, c) in next.iter().enumerate() {
            heirs[c.beam].get_or_insert(i);
        }
        let inherited: Vec<usize> =
            self.beams.iter().zip(&heirs).filter(|(_, h)| h.is_some()).map(|(b, _)| b.slot).collect();
        let mut free = self.slots.clone().filter(|slot| !inherited.contains(slot));
        let mut copies = Vec::new();
        let mut beams = Vec::new();
        for (i, c) in next.iter().enumerate() {
            let from = self.beams[c.beam].slot;
            let slot = if heirs[c.beam] == Some(i) {
                from
            } else {
                let to = free.next().expect("as many slots as beams");
                copies.push((from, to));
                to
            };
            beams.push(Beam { slot, tokens: self.tokens(c), log_probability: c.log_probability });
        }
        self.beams = beams;
        copies
    }

    fn tokens(&self, c: &Candidate) -> Vec<u32> {
        let past = &self.beams[c.beam].tokens;
        past.iter().copied().chain([c.token]).collect()
    }

    /// The answers, best first: at most `num_return_sequences`, at least one. Fewer where fewer were found, which takes a
    /// vocabulary smaller than the beams are many; the running beams, as they stand, where none was.
    pub fn into_answers(self, rule: &Decoding) -> Vec<Decoded> {
        let mut answers = self.found;
        if answers.is_empty() {
            let running = self.beams.into_iter();
            answers.extend(running.map(|Beam { tokens, log_probability, .. }| Decoded {
                score: rule.score(log_probability, tokens.len()),
                tokens,
                log_probability,
            }));
        }
        answers.truncate(rule.num_return_sequences);
        answers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 1;

    fn rule(num_beams: usize, early_stopping: EarlyStopping) -> Decoding {
        let num_return_sequences = num_beams;
        Decoding { num_beams, num_return_sequences, early_stopping, ..Decoding::greedy(5) }
    }

    fn tokens(search: &Search) -> Vec<(Vec<u32>, usize)> {
        search.beams.iter().map(|b| (b.tokens.clone(), b.slot)).collect()
    }

    #[test]
    fn beams_keep_their_slots_and_equals_their_order() {
        let rule = rule(2, EarlyStopping::False);
        let mut s = Search::new(6..8);
        let first = [(0, 9, -1.0), (0, 4, -1.0), (0, 5, -2.0), (0, 6, -3.0)];
        assert_eq!(s.advance(&rule, END, first.into_iter()), [(6, 7)]);
        assert_eq!(tokens(&s), [(vec![4], 6), (vec![9], 7)]);
        // Both go on from the second beam: its first child stays in its slot, the other's past is copied there.
        let second = [(0, 3, -5.0), (0, END, -6.0), (1, 8, -1.0), (1, 7, -1.0)];
        assert_eq!(s.advance(&rule, END, second.into_iter()), [(7, 6)]);
        assert_eq!(tokens(&s), [(vec![9, 7], 7), (vec![9, 8], 6)]);
    }

    #[test]
    fn only_the_first_candidates_may_end() {
        let rule = rule(2, EarlyStopping::True);
        let mut s = Search::new(0..2);
        s.advance(&rule, END, [(0, 4, -1.0), (0, 5, -1.5), (0, END, -2.0)].into_iter());
        assert!(s.found.is_empty(), "third of two beams");
        s.advance(&rule, END, [(0, END, -0.5), (1, 7, -1.0), (0, 6, -2.5), (1, END, -3.0)].into_iter());
        assert_eq!(s.found, [Decoded { tokens: vec![4, END], log_probability: -1.5, score: -0.75 }]);
        assert_eq!((tokens(&s).len(), s.done), (2, false));
        s.advance(&rule, END, [(0, END, -0.1), (0, 8, -0.2), (1, 8, -0.3), (1, 9, -0.4)].into_iter());
        assert!(s.done, "two are found");
        let answers = s.into_answers(&rule);
        assert_eq!(answers[0].tokens, [4, END]);
        assert_eq!(answers[1].tokens, [5, 7, END]);
    }

    /// The same beams; only the setting decides whether the search goes on.
    #[test]
    fn early_stopping_decides_when_it_is_over() {
        let ends = |early_stopping, length_penalty, running: f64| {
            let rule = Decoding { length_penalty, ..rule(1, early_stopping) };
            let mut s = Search::new(0..1);
            s.advance(&rule, END, [(0, END, -1.0), (0, 4, running)].into_iter());
            s.done
        };
        assert!(ends(EarlyStopping::True, 1.0, -1.2));
        assert!(ends(EarlyStopping::False, 1.0, -1.2));
        // Up to four tokens: -1.2 / 4 beats -1.
        assert!(!ends(EarlyStopping::Never, 1.0, -1.2));
        assert!(ends(EarlyStopping::Never, 1.0, -4.0));
        assert!(ends(EarlyStopping::Never, 0.0, -1.2));
    }

    #[test]
    fn what_is_not_a_number_ends_too() {
        let rule = rule(2, EarlyStopping::Never);
        let mut s = Search::new(0..2);
        for _ in 0..4 {
            assert!(!s.done);
            let beams = s.beams.len();
            let continuations = (0..beams).flat_map(|b| [3u32, 4].map(|t| (b, t, f64::NAN)));
            s.advance(&rule, END, continuations.collect::<Vec<_>>().into_iter());
        }
        assert!(s.done);
        let answers = s.into_answers(&rule);
        assert_eq!(answers[0].tokens, [3, 3, 3, 3]);
        assert!(answers[0].score.is_nan());
        let mut s = Search::new(0..2);
        s.advance(&rule, END, std::iter::empty());
        assert!(s.done && s.into_answers(&rule)[0].tokens.is_empty());
    }
}
