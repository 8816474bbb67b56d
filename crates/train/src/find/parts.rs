//! A search by all ranks together: each looks at its part of the index, and what the parts find becomes one answer on all ranks, the
//! same bits as of a search of the whole.
//!
//! All ranks embed the questions; of an index whose search has two halves (`compressed`, `plaid`) the candidates of all parts are merged
//! in between, so that those are scored that a search of the whole would score.

use tercio_comm::World;
use tercio_search::Hit;
use tercio_search::part::merged;

use super::Finder;
use super::wire::{bytes_of, hits_of, joined, parted, strange};
use crate::error::TrainError;

/// The best `depth` passages for each question, on every rank; all give the same questions. Once `stop` is true on any rank all end.
///
/// # Errors
/// As [`Finder::search`]; a rank was lost; [`TrainError::Stopped`], on all ranks.
pub fn search_parts<S: AsRef<str> + Sync>(
    world: &World,
    finder: &Finder,
    questions: &[S],
    depth: usize,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<Vec<Hit>>, TrainError> {
    let mut agreed = false;
    let mut exchange = |found: Vec<Vec<Hit>>, kept: usize| {
        let all = exchanged(world, Some(found), kept);
        agreed |= matches!(all, Err(TrainError::Stopped));
        all
    };
    let found = finder.index().search_with(questions, depth, stop, &mut exchange);
    match found.and_then(|own| exchange(own, depth)) {
        // The others wait for what this rank has found.
        Err(TrainError::Stopped) if !agreed => exchanged(world, None, depth),
        other => other,
    }
}

/// The best of what all ranks have found for each question; `None` of a rank that was stopped.
fn exchanged(world: &World, own: Option<Vec<Vec<Hit>>>, kept: usize) -> Result<Vec<Vec<Hit>>, TrainError> {
    let questions = own.as_ref().map_or(0, Vec::len);
    let bytes = match own {
        None => Vec::new(),
        Some(found) => {
            let parts: Vec<Vec<u8>> = found.iter().map(|hits| bytes_of(hits)).collect();
            [vec![1], joined(&parts)].concat()
        }
    };
    let mut of_ranks = Vec::new();
    for (rank, bytes) in world.all_gather_bytes(bytes)?.iter().enumerate() {
        let Some((_, bytes)) = bytes.split_first() else { return Err(TrainError::Stopped) };
        let parts = parted(bytes, rank)?;
        if parts.len() != questions {
            return Err(strange(rank).into());
        }
        let hits = parts.iter().map(|bytes| hits_of(bytes, rank)).collect::<Result<Vec<_>, _>>()?;
        of_ranks.push(hits);
    }
    let of_question = |q: usize| merged(of_ranks.iter_mut().map(|hits| std::mem::take(&mut hits[q])), kept);
    Ok((0..questions).map(of_question).collect())
}
