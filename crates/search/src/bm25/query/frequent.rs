//! The frequent words of a query that weigh least: bounds of all their scores in a passage come from bytes in memory, a window of
//! passages at once, and the scores themselves from the same bytes, for the few passages whose bound is high enough.

use std::sync::Arc;

use tercio_engine::cpu::Isa;
use tercio_engine::cpu::weigh::{CHUNK, weigh};

use super::shares::{Shares, byte};
use super::words::share;
use crate::bm25::segment::{ListEntry, Segment};
use crate::error::SearchError;

/// Most words that are asked in this way; a weight has then 193 steps at least.
pub const MOST_WORDS: usize = 64;

/// Words in the order of their weights, of one segment.
pub struct Frequent<'a> {
    isa: Isa,
    words: Vec<FrequentWord<'a>>,
    /// What a sum of 1 is worth.
    step: f32,
    /// No passage gets more.
    pub bound: f32,
}

struct FrequentWord<'a> {
    weight: f32,
    /// The weight in steps, rounded up.
    steps: u16,
    entry: &'a ListEntry,
    shares: Arc<Shares>,
}

impl<'a> Frequent<'a> {
    /// Of weights, lists and their shares, which have bytes.
    pub fn new(isa: Isa, words: Vec<(f32, &'a ListEntry, Arc<Shares>)>) -> Frequent<'a> {
        let all: f32 = words.iter().map(|(weight, ..)| weight).sum();
        // Every weight may be rounded up: together they stay at 257 steps, and so sums in 16 bits.
        let step = all / (256 - words.len()) as f32;
        let bound = words.iter().map(|(weight, _, shares)| weight * shares.greatest).sum();
        let words = words.into_iter().map(|(weight, entry, shares)| FrequentWord {
            weight,
            steps: (weight / step).ceil() as u16,
            entry,
            shares,
        });
        Frequent { isa, words: words.collect(), step: step / 255.0, bound }
    }

    /// Marks the passages of some chunks from `start` on that may get `enough` with the scores that they have; `bounds` becomes what the words give at
    /// most, in [`Frequent::worth`] of a score each.
    pub fn mark(
        &self,
        start: usize,
        chunks: u64,
        enough: f32,
        scores: &[[f32; CHUNK]],
        bounds: &mut [[u16; CHUNK]],
        marks: &mut [u64],
    ) {
        let mut columns = [(&[][..], 0); MOST_WORDS];
        for (column, word) in columns.iter_mut().zip(&self.words) {
            *column = (&word.bytes()[start..start + scores.len() * CHUNK], word.steps);
        }
        weigh(
            self.isa,
            &columns[..self.words.len()],
            chunks,
            scores,
            (self.step, enough),
            &mut bounds[..scores.len()],
            marks,
        );
    }

    /// A sum as a score.
    #[inline]
    pub fn worth(&self, sum: u16) -> f32 {
        f32::from(sum) * self.step
    }

    /// `score` and the scores of all words in a passage, one after the other.
    #[inline]
    pub fn add_to(&self, mut score: f32, row: u32, norm: f32, segment: &Segment) -> Result<f32, SearchError> {
        for word in &self.words {
            let known = word.bytes()[row as usize];
            if known > 0 {
                let frequency = match frequency(known, norm) {
                    Some(frequency) => frequency,
                    None => segment.frequency(word.entry, row)?,
                };
                score += word.weight * share(frequency, norm);
            }
        }
        Ok(score)
    }
}

impl FrequentWord<'_> {
    #[inline]
    fn bytes(&self) -> &[u8] {
        self.shares.bytes.as_deref().unwrap_or_default()
    }
}

/// The only frequency whose share is this byte; `None` where there are several.
#[inline]
fn frequency(known: u8, norm: f32) -> Option<u32> {
    // Shares rise with the frequency.
    let mut frequency = 1;
    let mut here = byte(share(1, norm));
    loop {
        let next = byte(share(frequency + 1, norm));
        if here >= known || next == here {
            return (here == known && next > here).then_some(frequency);
        }
        (frequency, here) = (frequency + 1, next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frequency_is_told_from_its_byte_or_not_at_all() {
        for norm in [0.0, 1e-3, 0.3, 0.54, 0.9, 1.7, 40.0, 1000.0] {
            for f in (1..40).chain([100, 1000, 70_000, 1 << 30]) {
                let found = frequency(byte(share(f, norm)), norm);
                assert!(found.is_none() || found == Some(f), "{f} at {norm}: {found:?}");
            }
        }
        // The frequencies of most words of most passages.
        for f in 1..10 {
            assert_eq!(frequency(byte(share(f, 0.9)), 0.9), Some(f));
        }
    }
}
