//! One rank's bytes to all, along a binary tree of the cube, passed on while they still come.

use super::Cube;
use super::link::Link;
use super::stream::{Incoming, Outgoing, Sink};
use crate::error::CommError;
use crate::frame::{Kind, PIECE};

/// What is received before it is passed on.
const CHUNK: usize = 4 * PIECE;

/// From whom a rank gets what `root` sends, and to whom it passes that on.
fn family(cube: &Cube, root: usize) -> (Option<usize>, Vec<usize>) {
    if cube.rank == root && cube.stand_in().is_some() {
        return (None, cube.stand_in().into_iter().collect());
    }
    if let Some(parent) = cube.stand_in() {
        return (Some(parent), Vec::new());
    }
    // Seen from the root of the cube, a rank's parent lacks its lowest bit.
    let top = root % cube.power;
    let seen = cube.rank ^ top;
    let lowest = if seen == 0 { cube.bits } else { seen.trailing_zeros() as u16 };
    let parent =
        if seen != 0 { Some(cube.rank ^ (1 << lowest)) } else { (root != cube.rank).then_some(root) };
    // The farthest first: it has the most to pass on.
    let mut children: Vec<usize> = (0..lowest).rev().map(|k| cube.partner(k)).collect();
    children.extend(cube.guest().filter(|guest| *guest != root));
    (parent, children)
}

/// Everyone's `data` becomes `root`'s, of the same length.
pub(crate) fn broadcast(link: &mut Link, root: usize, data: &mut [u8]) -> Result<(), CommError> {
    let cube = Cube::of(link);
    if root >= cube.size {
        return Err(CommError::Protocol(format!("a broadcast from rank {root} of {}", cube.size)));
    }
    let (parent, children) = family(&cube, root);
    let call = link.begin(Kind::Broadcast);
    // One chunk at least, so that a length that differs is seen even if it is 0 here.
    let chunks = data.len().div_ceil(CHUNK).max(1);
    let lengths_seen = data.len();
    let mut before: usize = 0;
    for chunk in 0..=chunks {
        // Chunk `chunk` comes while the one before it is passed on; the root has all from the start.
        let start = lengths_seen.min(chunk * CHUNK);
        let end = lengths_seen.min(start + CHUNK);
        let (old, new) = data.split_at_mut(start);
        let passed = &old[before..];
        before = start;
        let mut out: Vec<Outgoing<'_>> = match chunk {
            0 => Vec::new(),
            _ => children.iter().map(|child| Outgoing::new(*child, passed)).collect(),
        };
        let mut into: Vec<Incoming<'_>> = match parent {
            Some(parent) if chunk < chunks => {
                vec![Incoming::new(parent, Sink::Fill(&mut new[..end - start]))]
            }
            _ => Vec::new(),
        };
        // The step's number is the same for who sends a chunk and who gets it, one call apart; so it is left out.
        link.step(call, 0, &mut out, &mut into)?;
    }
    Ok(())
}

/// Everyone gets `root`'s bytes, of any length.
pub(crate) fn broadcast_bytes(link: &mut Link, root: usize, own: Vec<u8>) -> Result<Vec<u8>, CommError> {
    let mut length = (own.len() as u64).to_le_bytes();
    broadcast(link, root, &mut length)?;
    let mut data = own;
    if link.rank != root {
        let length = u64::from_le_bytes(length);
        data = Vec::new();
        let room = usize::try_from(length).ok().filter(|length| data.try_reserve_exact(*length).is_ok());
        let Some(length) = room else {
            return Err(CommError::Protocol(format!(
                "rank {root} sends {length} bytes to all, more than there is memory for here"
            )));
        };
        data.resize(length, 0);
    }
    broadcast(link, root, &mut data)?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::partners;

    #[test]
    fn everyone_is_reached_once_by_a_partner() {
        for size in [1, 2, 3, 4, 5, 7, 8, 12] {
            for root in 0..size {
                let mut reached = vec![0; size];
                for rank in 0..size {
                    let (parent, children) = family(&Cube::new(rank, size), root);
                    assert_eq!(parent.is_none(), rank == root);
                    for child in children {
                        reached[child] += 1;
                        assert!(partners(rank, size).contains(&child));
                        assert_eq!(
                            family(&Cube::new(child, size), root).0,
                            Some(rank),
                            "{size} {root} {rank} {child}"
                        );
                    }
                }
                assert!((0..size).all(|rank| reached[rank] == usize::from(rank != root)), "{size} {root}");
            }
        }
    }
}
