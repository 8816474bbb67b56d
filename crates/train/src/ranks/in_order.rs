//! Work on many items by all ranks, whose outcome comes back in the order of the items. Batches are cut without regard to the ranks, so
//! that nothing depends on their number.

use std::ops::Range;

use tercio_comm::{CommError, World};

use crate::error::TrainError;

/// Batches of each rank between two questions whether to stop.
const ROUND: usize = 8;

/// How items are cut.
#[derive(Clone, Copy, Debug)]
pub struct Batches {
    /// Items.
    pub len: usize,
    /// Items of a batch.
    pub size: usize,
    /// Batches between lines of progress.
    pub print_freq: u64,
}

/// What `work` says of each item, a message of bytes, on rank 0; elsewhere nothing. `work` gets the items of a batch and gives as many
/// messages; `stop` is asked before every batch.
///
/// # Errors
/// Those of `work`; [`TrainError::Interrupted`] on all ranks soon after `stop` says so on one; a rank was lost.
pub fn items_among(
    world: &World,
    batches: Batches,
    stop: &dyn Fn() -> bool,
    work: &mut dyn FnMut(Range<usize>) -> Result<Vec<Vec<u8>>, TrainError>,
) -> Result<Vec<Vec<u8>>, TrainError> {
    let (size, len) = (batches.size.max(1), batches.len);
    let (count, ranks) = (len.div_ceil(size), world.size());
    let rows = |b: usize| b * size..b.saturating_add(1).saturating_mul(size).min(len);
    let mut own: Vec<u8> = Vec::new();
    for start in (0..count).step_by(ROUND.saturating_mul(ranks)) {
        let end = start.saturating_add(ROUND.saturating_mul(ranks)).min(count);
        let mut stopped = false;
        for b in (start..end).filter(|b| b % ranks == world.rank()) {
            stopped = stop();
            if stopped {
                break;
            }
            for message in work(rows(b))? {
                own.extend((message.len() as u64).to_le_bytes());
                own.extend(message);
            }
            if (b as u64 + 1).is_multiple_of(batches.print_freq.max(1)) {
                tracing::info!("evaluation: {} of {count} batches", b + 1);
            }
        }
        if world.all_gather_bytes(vec![u8::from(stopped)])?.concat().contains(&1) {
            return Err(TrainError::Interrupted);
        }
    }
    let all = world.gather_bytes(own)?;
    if !world.is_main() {
        return Ok(Vec::new());
    }
    let mut rest: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    let mut messages = Vec::with_capacity(len);
    for b in 0..count {
        let rank = b % ranks;
        for _ in rows(b) {
            let (message, tail) = split(rest[rank]).ok_or_else(|| {
                CommError::Protocol(format!("rank {rank} sent too few messages of an evaluation"))
            })?;
            messages.push(message.to_vec());
            rest[rank] = tail;
        }
    }
    match rest.iter().position(|rest| !rest.is_empty()) {
        None => Ok(messages),
        Some(rank) => {
            Err(CommError::Protocol(format!("rank {rank} sent too many messages of an evaluation")).into())
        }
    }
}

/// The first message of some bytes, and the rest.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_in_the_order_of_items() {
        let batches = Batches { len: 7, size: 3, print_freq: 1 };
        let mut work = |rows: Range<usize>| Ok(rows.map(|i| vec![i as u8; i]).collect());
        let found = items_among(&World::alone(), batches, &|| false, &mut work).unwrap();
        assert_eq!(found, (0..7).map(|i| vec![i as u8; i]).collect::<Vec<_>>());
        let stopped = items_among(&World::alone(), batches, &|| true, &mut work);
        assert!(matches!(stopped, Err(TrainError::Interrupted)));
    }
}
