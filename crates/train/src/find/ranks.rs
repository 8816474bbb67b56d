//! A search by all ranks: they take blocks of questions in turn, rank 0 gets what is found in the order of the questions.
//!
//! Blocks are the same whatever the number of ranks, so what is found is, too.

use std::cell::Cell;
use std::ops::Range;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use tercio_comm::{CommError, World};
use tercio_data::has_answer::{AnswerMatcher, AnswerMode};
use tercio_search::Hit;
use tercio_search::output::{Format, Found, ResultsFile, found_passages};

use super::Finder;
use super::queries::{Queries, Query};
use crate::error::TrainError;

/// Questions that are asked together.
pub const BLOCK: usize = 1024;

/// What is written of a search.
#[derive(Clone, Debug)]
pub struct FoundSettings {
    /// Passages of a question.
    pub depth: usize,
    /// The form of the file.
    pub format: Format,
    /// Names the system in a TREC run.
    pub tag: String,
    /// How answers are looked for in the passages, for `hasanswer`; `None`: they are not.
    pub answers: Option<AnswerMode>,
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FoundReport {
    /// Questions asked.
    pub questions: u64,
    /// Passages found for all of them.
    pub passages: u64,
    /// Questions that got fewer passages than were asked for: the index has no more for them (BM25: no others have a word of theirs).
    pub fewer: u64,
    /// Those of them that got none.
    pub without: u64,
    /// Seconds that rank 0 spent asking the index, without reading questions and passages and writing.
    pub search_seconds: f64,
}

/// Asks all questions by all ranks, each of which has opened the same index and the same questions. On rank 0 `each` gets every
/// question's number with what was found, in order; the others' is not called. Once `stop` is true on any rank all end.
///
/// # Errors
/// A question that cannot be read, damage, what `each` finds wrong; a rank was lost; [`TrainError::Stopped`], on all ranks.
pub fn search_among(
    world: &World,
    finder: &Finder,
    queries: &Queries,
    depth: usize,
    stop: &(dyn Fn() -> bool + Sync),
    each: &mut dyn FnMut(usize, Vec<Hit>) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let work = |block: Range<usize>| {
        let (_, found) = ask(finder, queries, block, depth, stop, &Cell::new(0.0))?;
        Ok(found.iter().map(|hits| bytes_of(hits)).collect())
    };
    among(world, queries.len(), &work, &mut |i, rank, bytes| each(i, hits_of(&bytes, rank)?))
}

/// As [`search_among`], and writes what was found: ranks read the passages of their questions and look for answers in them, rank 0 puts
/// everything into `out`. `progress` is told on rank 0 how many questions are done. The report is rank 0's; of others it is empty.
///
/// # Errors
/// Likewise; answers that are no regular expressions, with their question; two questions with one id, or a passage found twice, in a
/// TREC run; what the form cannot hold; a file that cannot be written.
pub fn write_found_among(
    world: &World,
    finder: &Finder,
    queries: &Queries,
    settings: &FoundSettings,
    mut out: Option<&mut ResultsFile>,
    stop: &(dyn Fn() -> bool + Sync),
    progress: &mut dyn FnMut(u64),
) -> Result<FoundReport, TrainError> {
    if settings.format == Format::Trec {
        let stopped = !queries.check_ids(stop)?;
        if world.all_gather_bytes(vec![u8::from(stopped)])?.concat().contains(&1) {
            return Err(TrainError::Stopped);
        }
    }
    let seconds = Cell::new(0.0);
    let work = |block: Range<usize>| {
        let (asked, found) = ask(finder, queries, block, settings.depth, stop, &seconds)?;
        let render = |(query, hits): (Query, Vec<Hit>)| {
            if stop() {
                return Err(TrainError::Stopped);
            }
            // How many, then the bytes.
            let mut bytes = (hits.len() as u64).to_le_bytes().to_vec();
            bytes.extend(render(finder, query, &hits, settings)?);
            Ok(bytes)
        };
        asked.into_par_iter().zip(found).map(render).collect()
    };
    let mut report = FoundReport::default();
    among(world, queries.len(), &work, &mut |_, rank, bytes| {
        let (count, rendered) = bytes.split_first_chunk::<8>().ok_or_else(|| strange(rank))?;
        let count = u64::from_le_bytes(*count);
        report.questions += 1;
        report.passages += count;
        report.fewer += u64::from(count < settings.depth as u64);
        report.without += u64::from(count == 0);
        if let Some(out) = &mut out {
            out.push(rendered)?;
        }
        if report.questions.is_multiple_of(BLOCK as u64) || report.questions == queries.len() as u64 {
            progress(report.questions);
        }
        Ok(())
    })?;
    report.search_seconds = seconds.get();
    Ok(report)
}

fn render(
    finder: &Finder,
    mut query: Query,
    hits: &[Hit],
    settings: &FoundSettings,
) -> Result<Vec<u8>, TrainError> {
    let answers: Vec<String> = match query.item.get("answers") {
        Some(Value::Array(list)) => list.iter().filter_map(|a| a.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    };
    let matcher = match settings.answers {
        Some(mode) if !answers.is_empty() => Some(AnswerMatcher::new(&answers, mode).map_err(|e| {
            TrainError::Unusable(format!("question {:?} ({}): its answers: {e}", query.id, query.text))
        })?),
        _ => None,
    };
    // A run does not show who has an answer, so nobody looks for it.
    let is_run = settings.format == Format::Trec;
    let passages = found_passages(finder.passages(), hits, matcher.as_ref().filter(|_| !is_run))?;
    if is_run {
        query.item.insert("id".into(), query.id.into());
    }
    Ok(settings.format.render(&Found { question: query.item, passages }, &settings.tag)?)
}

/// The questions of a block, and what is found for them.
fn ask(
    finder: &Finder,
    queries: &Queries,
    block: Range<usize>,
    depth: usize,
    stop: &(dyn Fn() -> bool + Sync),
    seconds: &Cell<f64>,
) -> Result<(Vec<Query>, Vec<Vec<Hit>>), TrainError> {
    let asked: Vec<Query> = block.map(|i| queries.get(i)).collect::<Result<_, _>>()?;
    let texts: Vec<&str> = asked.iter().map(|query| query.text.as_str()).collect();
    let since = Instant::now();
    let found = finder.search(&texts, depth, stop)?;
    seconds.set(seconds.get() + since.elapsed().as_secs_f64());
    Ok((asked, found))
}

/// Ranks do the blocks of `count` questions in turn; on rank 0 `each` gets what came of every question, and the rank that did it.
fn among(
    world: &World,
    count: usize,
    work: &dyn Fn(Range<usize>) -> Result<Vec<Vec<u8>>, TrainError>,
    each: &mut dyn FnMut(usize, usize, Vec<u8>) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let blocks: Vec<_> = (0..count).step_by(BLOCK).map(|start| start..(start + BLOCK).min(count)).collect();
    for round in blocks.chunks(world.size()) {
        let own = match round.get(world.rank()).map(|block| work(block.clone())) {
            None => Some(Vec::new()),
            Some(Err(TrainError::Stopped)) => None,
            Some(done) => Some(done?),
        };
        if world.all_gather_bytes(vec![u8::from(own.is_none())])?.concat().contains(&1) {
            return Err(TrainError::Stopped);
        }
        let own = own.unwrap_or_default();
        let all = match world.size() {
            1 => vec![own],
            _ => {
                let all = world.gather_bytes(joined(&own))?;
                all.iter().enumerate().map(|(rank, bytes)| parted(bytes, rank)).collect::<Result<_, _>>()?
            }
        };
        if !world.is_main() {
            continue;
        }
        for (rank, done) in all.into_iter().enumerate() {
            let block = round.get(rank).cloned().unwrap_or(0..0);
            if done.len() != block.len() {
                let what = format!("rank {rank} sent {} answers where {} were due", done.len(), block.len());
                return Err(CommError::Protocol(what).into());
            }
            for (i, bytes) in block.zip(done) {
                each(i, rank, bytes)?;
            }
        }
    }
    // Nobody is done before rank 0 has everything.
    Ok(world.barrier()?)
}

fn strange(rank: usize) -> CommError {
    CommError::Protocol(format!("rank {rank} sent bytes that are no results of a search"))
}

/// Parts as one, each with its length in front.
fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    let with_length = |part: &Vec<u8>| [&(part.len() as u64).to_le_bytes()[..], part].concat();
    parts.iter().flat_map(with_length).collect()
}

fn parted(mut bytes: &[u8], rank: usize) -> Result<Vec<Vec<u8>>, CommError> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let part = bytes
            .split_first_chunk::<8>()
            .and_then(|(len, rest)| rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?));
        let (part, rest) = part.ok_or_else(|| strange(rank))?;
        parts.push(part.to_vec());
        bytes = rest;
    }
    Ok(parts)
}

fn bytes_of(hits: &[Hit]) -> Vec<u8> {
    hits.iter().flat_map(|hit| [&hit.row.to_le_bytes()[..], &hit.score.to_le_bytes()].concat()).collect()
}

fn hits_of(bytes: &[u8], rank: usize) -> Result<Vec<Hit>, CommError> {
    let (hits, []) = bytes.as_chunks::<12>() else { return Err(strange(rank)) };
    let hit = |b: &[u8; 12]| {
        let row = u64::from_le_bytes(std::array::from_fn(|i| b[i]));
        Hit { row, score: f32::from_le_bytes(std::array::from_fn(|i| b[8 + i])) }
    };
    Ok(hits.iter().map(hit).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_comes_back_as_it_went() {
        let hits = vec![Hit { row: 3, score: 1.5 }, Hit { row: u64::MAX, score: -0.25 }];
        assert_eq!(hits_of(&bytes_of(&hits), 0).unwrap(), hits);
        assert!(hits_of(&[0; 13], 0).is_err());
        let parts = vec![bytes_of(&hits), Vec::new(), b"x".to_vec()];
        let bytes = joined(&parts);
        assert_eq!(parted(&bytes, 0).unwrap(), parts);
        for cut in [1, 7, 9, bytes.len() - 1] {
            assert!(parted(&bytes[..cut], 1).is_err(), "{cut}");
        }
        assert!(parted(&[0xff; 8], 1).is_err());
    }
}
