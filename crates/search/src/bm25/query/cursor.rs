//! A word's list in one segment, on the way through it: added up window by window, or asked about the passages that matter.

use std::sync::Arc;

use tercio_engine::cpu::weigh::CHUNK;

use super::shares::{KnownShares, Shares};
use super::words::share;
use super::{Candidate, Room};
use crate::bm25::codec::BLOCK;
use crate::bm25::segment::{List, ListEntry, Postings, Segment};
use crate::error::SearchError;

/// What all lists of a segment share.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The number of the segment.
    pub number: usize,
    /// Itself.
    pub segment: &'a Segment,
    /// k1 · (1 - b + b · length / mean length) of its passages.
    pub norms: &'a [f32],
}

/// A place in a list.
pub struct Cursor<'a> {
    place: Place<'a>,
    weight: f32,
    /// Passages of the list.
    pub count: u32,
    /// No passage gets more.
    pub bound: f32,
    /// The same of every full block, as shares of the weight; of a short list there are none.
    shares: Option<Arc<Shares>>,
    list: List<'a>,
    block: Postings,
    /// Scores of the block; of a light word's they are not computed.
    scores: [f32; BLOCK],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// At the start of a list.
    pub fn new(
        place: Place<'a>,
        known: &KnownShares,
        weight: f32,
        entry: &ListEntry,
    ) -> Result<Self, SearchError> {
        let (block, scores) = (Postings::empty(), [0.0; BLOCK]);
        let list = place.segment.list(entry)?;
        let (count, shares) = (entry.count, None);
        let mut cursor = Cursor { place, weight, count, bound: 0.0, shares, list, block, scores, at: 0 };
        if entry.bounds.is_some() {
            let shares = known.of(place.number, place.segment, place.norms, entry)?;
            cursor.bound = weight * shares.greatest;
            cursor.shares = Some(shares);
        } else {
            // A short list is read at once, and knows its bound itself.
            cursor.read_scored()?;
            cursor.bound = cursor.scores[..cursor.block.len].iter().fold(0.0, |a, &b| a.max(b));
        }
        Ok(cursor)
    }

    /// The next block; of none at the end.
    fn read(&mut self) -> Result<(), SearchError> {
        self.list.read(&mut self.block).ok_or_else(|| self.place.segment.postings_damaged())?;
        self.at = 0;
        Ok(())
    }

    /// The next block with its scores.
    fn read_scored(&mut self) -> Result<(), SearchError> {
        self.read()?;
        self.score();
        Ok(())
    }

    fn score(&mut self) {
        let len = self.block.len;
        let rows = self.block.rows[..len].iter().zip(&self.block.frequencies[..len]);
        for (score, (&row, &frequency)) in self.scores.iter_mut().zip(rows) {
            *score = self.weight * share(frequency, self.place.norms[row as usize]);
        }
    }

    /// The next row; `None` at the end.
    pub fn next_row(&mut self) -> Result<Option<u32>, SearchError> {
        if self.at == self.block.len {
            if self.list.is_done() {
                return Ok(None);
            }
            self.read_scored()?;
        }
        Ok(Some(self.block.rows[self.at]))
    }

    /// Adds the scores of the rows from `start` to `end` to `scores`, whose first is that of `start`; gives the chunks that have some of these
    /// rows, a bit each.
    pub fn add(&mut self, start: usize, end: usize, scores: &mut [f32]) -> Result<u64, SearchError> {
        let scores = &mut scores[..end - start];
        let mut chunks = 0;
        loop {
            let block = &self.block;
            let mut at = self.at;
            while at < block.len && (block.rows[at] as usize) < end {
                let i = block.rows[at] as usize - start;
                scores[i] += self.scores[at];
                chunks |= 1 << (i / CHUNK);
                at += 1;
            }
            self.at = at;
            if at < block.len || self.list.is_done() {
                return Ok(chunks);
            }
            self.read_scored()?;
        }
    }

    /// Goes on to the first row from `start` on; the scores of its block are there then.
    pub fn seek(&mut self, start: usize) -> Result<(), SearchError> {
        let len = self.block.len;
        if self.at < len && self.block.rows[len - 1] as usize >= start {
            self.score();
        } else {
            self.list.skip_to(start as u32);
            self.read_scored()?;
        }
        let block = &self.block;
        self.at += block.rows[self.at..block.len].partition_point(|&r| (r as usize) < start);
        Ok(())
    }

    /// Adds a light word's scores of the rows from `start` to `end` to all that have it; the candidates among them are wanted. Scores of
    /// the window stay behind.
    pub fn go_through(&mut self, start: usize, end: usize, room: &mut Room) -> Result<(), SearchError> {
        let scores = room.scores.as_flattened_mut();
        for candidate in &room.candidates {
            scores[candidate.row as usize - start] = candidate.score;
        }
        self.seek(start)?;
        self.add(start, end, scores)?;
        for candidate in &mut room.candidates {
            candidate.score = scores[candidate.row as usize - start];
        }
        Ok(())
    }

    /// Adds a light word's scores to the candidates that have it, and leaves out those that cannot be among the best any more: even with all
    /// of `rest` and what comes later they stay below `least`.
    pub fn ask(&mut self, rest: f32, least: f32, candidates: &mut Vec<Candidate>) -> Result<(), SearchError> {
        let mut kept = 0;
        for i in 0..candidates.len() {
            let Candidate { row, mut score, later } = candidates[i];
            let rest = rest + later;
            if (score + (self.bound + rest)) < least {
                continue;
            }
            let inside = self.at < self.block.len && self.block.rows[self.block.len - 1] >= row;
            if !inside {
                self.list.skip_to(row);
                // What a block is known to give at most is mostly less than the list.
                let share = self.shares.as_ref().and_then(|shares| shares.blocks.get(self.list.block()));
                let bound = share.map_or(self.bound, |share| self.weight * share);
                if (score + (bound + rest)) < least {
                    continue;
                }
                self.read()?;
            }
            let block = &self.block;
            self.at += block.rows[self.at..block.len].partition_point(|&r| r < row);
            if self.at < block.len && block.rows[self.at] == row {
                score += self.weight * share(block.frequencies[self.at], self.place.norms[row as usize]);
            }
            if (score + rest) >= least {
                candidates[kept] = Candidate { row, score, later };
                kept += 1;
            }
        }
        candidates.truncate(kept);
        Ok(())
    }
}
