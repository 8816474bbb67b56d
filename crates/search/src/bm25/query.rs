//! Asking an index: the best passages of a query without looking at most of those that have its words.
//!
//! MaxScore (Turtle and Flood 1995, "Query evaluation: strategies and optimizations") over windows of rows. The words are in the
//! order of their weights. Those whose bounds together cannot lift a passage above the worst that is kept are *light*: their lists
//! are not gone through, they are only asked about passages that have one of the others. The lists of the others, the *heavy* words, are
//! added up window by window in an array.
//!
//! A score is added up in the order of the words in either case, so its bits are those of a plain sum.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use rayon::prelude::*;

use super::Bm25Index;
use super::codec::BLOCK;
use super::segment::{List, ListEntry, Postings, Segment};
use crate::error::SearchError;
use crate::top::{Hit, Top};

/// Rows of a window.
const WINDOW: usize = 4096;
/// A light word's list is gone through where its rows of the window are fewer than this many times those that are asked for.
const DENSE: u64 = 16;
/// Bounds are compared with this much room for rounding: a sum of n numbers errs by n · 2^-24 of itself at most.
fn slack(words: usize) -> f32 {
    1.0 + (words as f32 + 16.0) / (1 << 22) as f32
}

/// A word of a query.
struct Word {
    text: String,
    /// Times in the query · idf · (k1 + 1).
    weight: f32,
    /// Its list in each segment.
    lists: Vec<Option<ListEntry>>,
}

/// What a thread works in.
struct Room {
    scores: Vec<f32>,
    touched: Vec<u64>,
    candidates: Vec<(u32, f32)>,
    text: String,
}

impl Room {
    fn new() -> Room {
        Room {
            scores: vec![0.0; WINDOW],
            touched: vec![0; WINDOW / 64],
            candidates: Vec::new(),
            text: String::new(),
        }
    }
}

/// See [`Bm25Index::search`].
pub fn search<S: AsRef<str> + Sync>(
    index: &Bm25Index,
    queries: &[S],
    depth: usize,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<Vec<Hit>>, SearchError> {
    let one = |room: &mut Room, query: &S| match stop() {
        true => Err(SearchError::Stopped),
        false => search_one(index, query.as_ref(), depth, room),
    };
    match queries {
        // One query is not worth a way through the pool.
        [query] => Ok(vec![one(&mut Room::new(), query)?]),
        _ => queries.par_iter().map_init(Room::new, one).collect(),
    }
}

/// The words of a query in the order in which a score is added up, those alone that the index has.
fn words(index: &Bm25Index, query: &str, room: &mut String) -> Result<Vec<Word>, SearchError> {
    let mut all = index.settings.analyzer.query_words(query, room);
    all.sort_unstable();
    let mut words = Vec::new();
    for same in all.chunk_by(|a, b| a == b) {
        let lists: Vec<_> =
            index.segments.iter().map(|s| s.find(same[0].as_bytes())).collect::<Result<_, _>>()?;
        let having: f64 = lists.iter().flatten().map(|list| f64::from(list.count)).sum();
        if having > 0.0 {
            let idf = libm::log1p(((index.len() as f64 - having).max(0.0) + 0.5) / (having + 0.5));
            let weight = (same.len() as f64 * idf * (index.constants.k1 + 1.0)) as f32;
            words.push(Word { text: same[0].clone(), weight, lists });
        }
    }
    // The order of equal weights is that of the words, so that it is one.
    words.sort_by(|a, b| b.weight.total_cmp(&a.weight).then_with(|| a.text.cmp(&b.text)));
    Ok(words)
}

/// How much a word that stands `frequency` times gives, of its weight.
#[inline]
fn share(frequency: u32, norm: f32) -> f32 {
    // Frequencies have 31 bits: so the conversion is one instruction.
    let frequency = frequency as i32 as f32;
    frequency / (frequency + norm)
}

/// The greatest shares of a list: of all its postings, and of each full block.
pub struct Shares {
    greatest: f32,
    blocks: Vec<f32>,
}

/// The greatest shares of the lists that were asked for so far. They depend on k1 and b, so the files do not have them: the first
/// query with a word goes through its list. 4 bytes for 128 postings.
#[derive(Default)]
pub struct KnownShares(RwLock<HashMap<(usize, u64), Arc<Shares>>>);

impl KnownShares {
    fn of(
        &self,
        k: usize,
        segment: &Segment,
        norms: &[f32],
        entry: &ListEntry,
    ) -> Result<Arc<Shares>, SearchError> {
        let key = (k, entry.start);
        if let Some(known) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(known));
        }
        let mut list = segment.list(entry)?;
        let mut block = Postings::empty();
        let mut shares = Shares { greatest: 0.0, blocks: Vec::new() };
        while !list.is_done() {
            list.read(&mut block).ok_or_else(|| segment.postings_damaged())?;
            let postings = block.rows[..block.len].iter().zip(&block.frequencies);
            let most = postings.map(|(&row, &f)| share(f, norms[row as usize])).fold(0.0, f32::max);
            shares.greatest = shares.greatest.max(most);
            if block.len == BLOCK {
                shares.blocks.push(most);
            }
        }
        let shares = Arc::new(shares);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::clone(&shares));
        Ok(shares)
    }
}

/// The lists of a word in one segment, on the way through it.
struct Cursor<'a> {
    weight: f32,
    /// Passages of the list.
    count: u32,
    /// No passage gets more.
    bound: f32,
    /// The same of every full block, as shares of the weight; of a short list there are none.
    shares: Option<Arc<Shares>>,
    list: List<'a>,
    block: Postings,
    /// Scores of the block; of a light word's they are not computed.
    scores: [f32; BLOCK],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(
        index: &Bm25Index,
        k: usize,
        segment: &'a Segment,
        norms: &[f32],
        weight: f32,
        entry: &ListEntry,
    ) -> Result<Self, SearchError> {
        let (block, scores) = (Postings::empty(), [0.0; BLOCK]);
        let list = segment.list(entry)?;
        let mut cursor =
            Cursor { weight, count: entry.count, bound: 0.0, shares: None, list, block, scores, at: 0 };
        if entry.bounds.is_some() {
            let shares = index.shares.of(k, segment, norms, entry)?;
            cursor.bound = weight * shares.greatest;
            cursor.shares = Some(shares);
        } else {
            // A short list is read at once, and knows its bound itself.
            cursor.read_scored(segment, norms)?;
            cursor.bound = cursor.scores[..cursor.block.len].iter().fold(0.0, |a, &b| a.max(b));
        }
        Ok(cursor)
    }

    /// The next block; of none at the end.
    fn read(&mut self, segment: &Segment) -> Result<(), SearchError> {
        self.list.read(&mut self.block).ok_or_else(|| segment.postings_damaged())?;
        self.at = 0;
        Ok(())
    }

    /// The next block with its scores.
    fn read_scored(&mut self, segment: &Segment, norms: &[f32]) -> Result<(), SearchError> {
        self.read(segment)?;
        self.score(norms);
        Ok(())
    }

    fn score(&mut self, norms: &[f32]) {
        let len = self.block.len;
        let rows = self.block.rows[..len].iter().zip(&self.block.frequencies[..len]);
        for (score, (&row, &frequency)) in self.scores.iter_mut().zip(rows) {
            *score = self.weight * share(frequency, norms[row as usize]);
        }
    }

    /// The next row; `None` at the end.
    fn next_row(&mut self, segment: &Segment, norms: &[f32]) -> Result<Option<u32>, SearchError> {
        if self.at == self.block.len {
            if self.list.is_done() {
                return Ok(None);
            }
            self.read_scored(segment, norms)?;
        }
        Ok(Some(self.block.rows[self.at]))
    }
}

fn search_one(
    index: &Bm25Index,
    query: &str,
    depth: usize,
    room: &mut Room,
) -> Result<Vec<Hit>, SearchError> {
    let words = words(index, query, &mut room.text)?;
    let mut top = Top::new(depth);
    if depth == 0 || words.is_empty() {
        return Ok(Vec::new());
    }
    // Before anything is found: of a word that `depth` passages have, all of these get this at least.
    let mut least = 0.0f32;
    for word in &words {
        let having: u64 = word.lists.iter().flatten().map(|l| u64::from(l.count)).sum();
        let longest = word.lists.iter().flatten().map(|l| l.bounds.map_or(u32::MAX, |b| b[2])).max();
        if having >= depth as u64 {
            least = least.max(word.weight * share(1, index.norm(longest.unwrap_or(u32::MAX))));
        }
    }
    for (k, segment) in index.segments.iter().enumerate() {
        search_segment(index, k, segment, &words, &mut top, least, room)?;
    }
    Ok(top.into_sorted())
}

fn search_segment(
    index: &Bm25Index,
    k: usize,
    segment: &Segment,
    words: &[Word],
    top: &mut Top,
    least: f32,
    room: &mut Room,
) -> Result<(), SearchError> {
    let norms = &index.norms[k][..];
    let mut cursors = Vec::with_capacity(words.len());
    for word in words {
        let Some(entry) = &word.lists[k] else { continue };
        cursors.push(Cursor::new(index, k, segment, norms, word.weight, entry)?);
    }
    // What the words from each on can give together at most.
    let mut rest = vec![0.0f32; cursors.len() + 1];
    for i in (0..cursors.len()).rev() {
        rest[i] = rest[i + 1] + cursors[i].bound;
    }
    let mut heavy = cursors.len();
    let slack = slack(words.len());
    let passages = segment.entry.passages as usize;
    let first = segment.entry.first;
    loop {
        let least = top.least().max(least);
        while heavy > 0 && rest[heavy - 1] * slack < least {
            heavy -= 1;
        }
        let (heavies, lights) = cursors.split_at_mut(heavy);
        let mut start = usize::MAX;
        for cursor in heavies.iter_mut() {
            if let Some(row) = cursor.next_row(segment, norms)? {
                start = start.min(row as usize);
            }
        }
        if start == usize::MAX {
            return Ok(());
        }
        let end = (start + WINDOW).min(passages);
        for cursor in heavies {
            add::<true>(cursor, segment, norms, start, end, room)?;
        }
        // Those of the window in the order of their rows, without those that the light words cannot lift any more.
        room.candidates.clear();
        for (w, touched) in room.touched[..(end - start).div_ceil(64)].iter_mut().enumerate() {
            let mut bits = std::mem::take(touched);
            while bits != 0 {
                let i = w * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let score = room.scores[i];
                if (score + rest[heavy]) * slack >= least {
                    room.candidates.push(((start + i) as u32, score));
                }
            }
        }
        for (cursor, rest) in lights.iter_mut().zip(&rest[heavy + 1..]) {
            // Where a good part of a list is asked for, going through it is the shorter way.
            let here = u64::from(cursor.count) * (end - start) as u64 / passages as u64;
            if room.candidates.len() as u64 * DENSE > here {
                go_through(cursor, segment, norms, start, end, room)?;
                room.candidates.retain(|(_, score)| (score + rest) * slack >= least);
            } else {
                ask(cursor, segment, norms, *rest, least / slack, &mut room.candidates)?;
            }
        }
        room.scores[..end - start].fill(0.0);
        for &(row, score) in &room.candidates {
            top.offer(first + u64::from(row), score);
        }
    }
}

/// Adds a word's scores of the rows from `start` to `end`, and notes them, if `NOTE`.
fn add<const NOTE: bool>(
    cursor: &mut Cursor<'_>,
    segment: &Segment,
    norms: &[f32],
    start: usize,
    end: usize,
    room: &mut Room,
) -> Result<(), SearchError> {
    let scores = &mut room.scores[..end - start];
    loop {
        let block = &cursor.block;
        let mut at = cursor.at;
        while at < block.len && (block.rows[at] as usize) < end {
            let i = block.rows[at] as usize - start;
            scores[i] += cursor.scores[at];
            if NOTE {
                room.touched[i / 64] |= 1 << (i % 64);
            }
            at += 1;
        }
        cursor.at = at;
        if at < block.len || cursor.list.is_done() {
            return Ok(());
        }
        cursor.read_scored(segment, norms)?;
    }
}

/// Adds a light word's scores of the rows from `start` to `end` to all that have it; the candidates among them are wanted.
fn go_through(
    cursor: &mut Cursor<'_>,
    segment: &Segment,
    norms: &[f32],
    start: usize,
    end: usize,
    room: &mut Room,
) -> Result<(), SearchError> {
    for &(row, score) in &room.candidates {
        room.scores[row as usize - start] = score;
    }
    let len = cursor.block.len;
    if cursor.at < len && cursor.block.rows[len - 1] as usize >= start {
        cursor.score(norms);
    } else {
        cursor.list.skip_to(start as u32);
        cursor.read_scored(segment, norms)?;
    }
    let block = &cursor.block;
    cursor.at += block.rows[cursor.at..block.len].partition_point(|&r| (r as usize) < start);
    add::<false>(cursor, segment, norms, start, end, room)?;
    for (row, score) in &mut room.candidates {
        *score = room.scores[*row as usize - start];
    }
    Ok(())
}

/// Adds a light word's scores to the candidates that have it, and leaves out those that cannot be among the best any more: even with all
/// of `rest` they stay below `least`.
fn ask(
    cursor: &mut Cursor<'_>,
    segment: &Segment,
    norms: &[f32],
    rest: f32,
    least: f32,
    candidates: &mut Vec<(u32, f32)>,
) -> Result<(), SearchError> {
    let mut kept = 0;
    for i in 0..candidates.len() {
        let (row, mut score) = candidates[i];
        if (score + (cursor.bound + rest)) < least {
            continue;
        }
        let inside = cursor.at < cursor.block.len && cursor.block.rows[cursor.block.len - 1] >= row;
        if !inside {
            cursor.list.skip_to(row);
            // What a block is known to give at most is mostly less than the list.
            let share = cursor.shares.as_ref().and_then(|shares| shares.blocks.get(cursor.list.block()));
            let bound = share.map_or(cursor.bound, |share| cursor.weight * share);
            if (score + (bound + rest)) < least {
                continue;
            }
            cursor.read(segment)?;
        }
        let block = &cursor.block;
        cursor.at += block.rows[cursor.at..block.len].partition_point(|&r| r < row);
        if cursor.at < block.len && block.rows[cursor.at] == row {
            score += cursor.weight * share(block.frequencies[cursor.at], norms[row as usize]);
        }
        if (score + rest) >= least {
            candidates[kept] = (row, score);
            kept += 1;
        }
    }
    candidates.truncate(kept);
    Ok(())
}

/// See [`Bm25Index::search_all`].
pub fn search_all<S: AsRef<str> + Sync>(
    index: &Bm25Index,
    queries: &[S],
    depth: usize,
) -> Result<Vec<Vec<Hit>>, SearchError> {
    let one = |query: &S| {
        let words = words(index, query.as_ref(), &mut String::new())?;
        let mut top = Top::new(depth);
        for (k, segment) in index.segments.iter().enumerate() {
            let norms = &index.norms[k];
            let mut scores = vec![0.0f32; norms.len()];
            for word in &words {
                let Some(entry) = &word.lists[k] else { continue };
                let mut list = segment.list(entry)?;
                let mut block = Postings::empty();
                while !list.is_done() {
                    list.read(&mut block).ok_or_else(|| segment.postings_damaged())?;
                    for (&row, &frequency) in block.rows.iter().zip(&block.frequencies).take(block.len) {
                        scores[row as usize] += word.weight * share(frequency, norms[row as usize]);
                    }
                }
            }
            for (row, &score) in scores.iter().enumerate().filter(|(_, score)| **score > 0.0) {
                top.offer(segment.entry.first + row as u64, score);
            }
        }
        Ok(top.into_sorted())
    };
    queries.par_iter().map(one).collect()
}
