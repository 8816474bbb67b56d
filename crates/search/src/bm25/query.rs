//! Asking an index: the best passages of a query without looking at most of those that have its words.
//!
//! MaxScore (Turtle and Flood 1995, "Query evaluation: strategies and optimizations") over windows of rows. The words are in the
//! order of their weights. Those whose bounds together cannot lift a passage above the worst that is kept are *light*: their lists
//! are not gone through, they are only asked about passages that have one of the others. The lists of the others, the *heavy* words, are
//! added up window by window in an array.
//!
//! The last words are mostly frequent ones, whose lists would be long. Of these a byte a passage is kept ([`frequent`]): what they
//! give together at most is summed for a whole window at once, and few passages are left for which it is looked up exactly.
//!
//! A score is added up in the order of the words in any case, so its bits are those of a plain sum.

use std::ops::Range;

use rayon::prelude::*;
use tercio_engine::cpu::Isa;
use tercio_engine::cpu::weigh::CHUNK;

use super::Bm25Index;
use super::segment::Postings;
use crate::error::SearchError;
use crate::part::within;
use crate::top::{Hit, Top};

mod cursor;
mod frequent;
mod shares;
mod words;

use cursor::{Cursor, Place};
use frequent::{Frequent, MOST_WORDS};
pub use shares::KnownShares;
use words::{Word, share, words};

/// Rows of a window.
const WINDOW: usize = 64 * CHUNK;
/// A light word's list is gone through where its rows of the window are fewer than this many times those that are asked for.
const DENSE: u64 = 16;

/// Bounds are compared with this much room for rounding: a sum of n numbers errs by n · 2^-24 of itself at most.
fn slack(words: usize) -> f32 {
    1.0 + (words as f32 + 16.0) / (1 << 22) as f32
}

/// A passage that may be among the best.
#[derive(Clone, Copy)]
struct Candidate {
    row: u32,
    score: f32,
    /// What the frequent words give at most.
    later: f32,
}

/// What a thread works in.
struct Room {
    /// Of a window's rows; 0 between windows.
    scores: Vec<[f32; CHUNK]>,
    /// What the frequent words give the rows at most.
    bounds: Vec<[u16; CHUNK]>,
    marks: Vec<u64>,
    candidates: Vec<Candidate>,
    text: String,
}

impl Room {
    fn new() -> Room {
        Room {
            scores: vec![[0.0; CHUNK]; WINDOW / CHUNK],
            bounds: vec![[0; CHUNK]; WINDOW / CHUNK],
            marks: vec![0; WINDOW / CHUNK],
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
    let isa = Isa::best();
    for (number, segment) in index.segments.iter().enumerate() {
        let place = Place { number, segment, norms: &index.norms[number] };
        search_segment(index, place, isa, &words, &mut top, least, room)?;
    }
    Ok(top.into_sorted())
}

/// The rows of a segment that are of the index's part. They begin and end with whole chunks, so that the parts meet.
fn own_rows(index: &Bm25Index, place: Place<'_>) -> Range<usize> {
    let passages = place.norms.len();
    let own = within(&index.part.rows(index.len()), place.segment.entry.first, passages as u64);
    let whole = |row: u64| if row == passages as u64 { passages } else { row as usize / CHUNK * CHUNK };
    whole(own.start)..whole(own.end)
}

/// The words of a segment: lists that are gone through, and after them the frequent ones.
fn lists<'a>(
    index: &Bm25Index,
    place: Place<'a>,
    isa: Isa,
    words: &'a [Word],
) -> Result<(Vec<Cursor<'a>>, Frequent<'a>), SearchError> {
    let mut all: Vec<_> =
        words.iter().filter_map(|word| Some((word.weight, word.lists[place.number].as_ref()?))).collect();
    let mut frequent = Vec::new();
    while let Some(&(weight, entry)) = all.last()
        && entry.bounds.is_some()
        && frequent.len() < MOST_WORDS
    {
        let shares = index.shares.of(place.number, place.segment, place.norms, entry)?;
        if shares.bytes.is_none() {
            break;
        }
        frequent.push((weight, entry, shares));
        all.pop();
    }
    frequent.reverse();
    let cursors = all.into_iter().map(|(weight, entry)| Cursor::new(place, &index.shares, weight, entry));
    Ok((cursors.collect::<Result<_, _>>()?, Frequent::new(isa, frequent)))
}

fn search_segment(
    index: &Bm25Index,
    place: Place<'_>,
    isa: Isa,
    words: &[Word],
    top: &mut Top,
    least: f32,
    room: &mut Room,
) -> Result<(), SearchError> {
    let own = own_rows(index, place);
    if own.is_empty() {
        return Ok(());
    }
    let (mut cursors, frequent) = lists(index, place, isa, words)?;
    if own.start > 0 {
        cursors.iter_mut().try_for_each(|cursor| cursor.seek(own.start))?;
    }
    // What the lists from each on can give together at most, without the frequent words.
    let mut rest = vec![0.0f32; cursors.len() + 1];
    for i in (0..cursors.len()).rev() {
        rest[i] = rest[i + 1] + cursors[i].bound;
    }
    let mut heavy = cursors.len();
    let slack = slack(words.len());
    let passages = place.norms.len();
    let mut end = own.start;
    loop {
        let least = top.least().max(least);
        while heavy > 0 && (rest[heavy - 1] + frequent.bound) * slack < least {
            heavy -= 1;
        }
        // Whether frequent words alone may do: then no list tells where to look.
        let anywhere = heavy == cursors.len() && frequent.bound > 0.0 && frequent.bound * slack >= least;
        let (heavies, lights) = cursors.split_at_mut(heavy);
        let start = if anywhere { end } else { first_row(heavies)?.unwrap_or(own.end) };
        if start >= own.end {
            return Ok(());
        }
        // Whole chunks, so that bytes and scores meet.
        let start = start / CHUNK * CHUNK;
        end = (start + WINDOW).min(own.end);
        let mut chunks = if anywhere { u64::MAX } else { 0 };
        for cursor in heavies {
            chunks |= cursor.add(start, end, room.scores.as_flattened_mut())?;
        }
        // Those of the window in the order of their rows, without those that the other words cannot lift any more.
        let window = (end - start).div_ceil(CHUNK);
        // One rounding more than sums have; and rows that have no word are none of those that are wanted.
        let enough = (least / (slack * slack) - rest[heavy]).max(f32::MIN_POSITIVE);
        frequent.mark(
            start,
            chunks,
            enough,
            &room.scores[..window],
            &mut room.bounds,
            &mut room.marks[..window],
        );
        room.candidates.clear();
        for (w, &marks) in room.marks[..window].iter().enumerate() {
            let mut marks = marks;
            while marks != 0 {
                let i = marks.trailing_zeros() as usize;
                marks &= marks - 1;
                let (row, later) = ((start + w * CHUNK + i) as u32, frequent.worth(room.bounds[w][i]));
                room.candidates.push(Candidate { row, score: room.scores[w][i], later });
            }
            if chunks >> w & 1 == 1 {
                room.scores[w] = [0.0; CHUNK];
            }
        }
        for (cursor, rest) in lights.iter_mut().zip(&rest[heavy + 1..]) {
            // Where a good part of a list is asked for, going through it is the shorter way.
            let here = u64::from(cursor.count) * (end - start) as u64 / passages as u64;
            if room.candidates.len() as u64 * DENSE > here {
                cursor.go_through(start, end, room)?;
                room.candidates.retain(|c| (c.score + (rest + c.later)) * slack >= least);
                room.scores[..window].as_flattened_mut().fill(0.0);
            } else {
                cursor.ask(*rest, least / slack, &mut room.candidates)?;
            }
        }
        offer(&frequent, place, slack, least, top, &mut room.candidates)?;
    }
}

/// The first row that any of the lists has next.
fn first_row(cursors: &mut [Cursor<'_>]) -> Result<Option<usize>, SearchError> {
    let mut first = None;
    for cursor in cursors {
        if let Some(row) = cursor.next_row()? {
            first = Some(first.map_or(row, |first: u32| first.min(row)));
        }
    }
    Ok(first.map(|row| row as usize))
}

/// Offers the candidates of a window with their whole scores.
fn offer(
    frequent: &Frequent<'_>,
    place: Place<'_>,
    slack: f32,
    least: f32,
    top: &mut Top,
    candidates: &mut [Candidate],
) -> Result<(), SearchError> {
    let depth = top.depth();
    if candidates.len() / 2 > depth {
        // Those of the greatest bounds first: what they get passes most of the others over.
        candidates.select_nth_unstable_by(depth, |a, b| (b.score + b.later).total_cmp(&(a.score + a.later)));
    }
    for (i, c) in candidates.iter().enumerate() {
        if i == depth {
            top.settle();
        }
        if (c.score + c.later) * slack * slack >= top.least().max(least) {
            let norm = place.norms[c.row as usize];
            let score = frequent.add_to(c.score, c.row, norm, place.segment)?;
            // A bound may be that of a passage that has none of the words.
            if score > 0.0 {
                top.offer(place.segment.entry.first + u64::from(c.row), score);
            }
        }
    }
    top.settle();
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
