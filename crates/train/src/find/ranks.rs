//! A search by all ranks: they take blocks of questions in turn, rank 0 gets what is found in the order of the questions. Where each rank
//! has a part of the index, all of them search for every block, and take the writing of the blocks in turn.
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
use super::parts::search_parts;
use super::queries::{Queries, Query};
use super::wire::{bytes_of, hits_of, joined, parted, strange};
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

/// Asks all questions by all ranks, each of which has opened the same index, or its part of it, and the same questions. On rank 0 `each` gets every
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
    let find = |round: &[Range<usize>]| ask(world, finder, queries, round, depth, stop, &Cell::new(0.0));
    let work = |(_, found): Asked| Ok(found.iter().map(|hits| bytes_of(hits)).collect());
    among(world, queries.len(), &find, &work, &mut |i, rank, bytes| each(i, hits_of(&bytes, rank)?))
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
    let find = |round: &[Range<usize>]| ask(world, finder, queries, round, settings.depth, stop, &seconds);
    let work = |(asked, found): Asked| {
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
    among(world, queries.len(), &find, &work, &mut |_, rank, bytes| {
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

/// Questions, and what is found for them.
type Asked = (Vec<Query>, Vec<Vec<Hit>>);

/// The questions of this rank's block of a round, and what is found for them; nothing where the round has no block for it.
fn ask(
    world: &World,
    finder: &Finder,
    queries: &Queries,
    round: &[Range<usize>],
    depth: usize,
    stop: &(dyn Fn() -> bool + Sync),
    seconds: &Cell<f64>,
) -> Result<Asked, TrainError> {
    let mut own = Asked::default();
    for (rank, block) in round.iter().enumerate() {
        let whole = finder.part().is_whole();
        if whole && rank != world.rank() {
            continue;
        }
        let asked: Vec<Query> = block.clone().map(|i| queries.get(i)).collect::<Result<_, _>>()?;
        let texts: Vec<&str> = asked.iter().map(|query| query.text.as_str()).collect();
        let since = Instant::now();
        let found = match whole {
            true => finder.search(&texts, depth, stop)?,
            false => search_parts(world, finder, &texts, depth, stop)?,
        };
        seconds.set(seconds.get() + since.elapsed().as_secs_f64());
        if rank == world.rank() {
            own = (asked, found);
        }
    }
    Ok(own)
}

/// Ranks do the blocks of `count` questions in turn: what `find` gives of a round, `work` makes ready. On rank 0 `each` gets what came of
/// every question, and the rank that did it.
fn among(
    world: &World,
    count: usize,
    find: &dyn Fn(&[Range<usize>]) -> Result<Asked, TrainError>,
    work: &dyn Fn(Asked) -> Result<Vec<Vec<u8>>, TrainError>,
    each: &mut dyn FnMut(usize, usize, Vec<u8>) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let blocks: Vec<_> = (0..count).step_by(BLOCK).map(|start| start..(start + BLOCK).min(count)).collect();
    for round in blocks.chunks(world.size()) {
        let own = match find(round).and_then(work) {
            Err(TrainError::Stopped) => None,
            done => Some(done?),
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
