//! Bytes of all ranks, each of any length, to rank 0 or to everyone.

use super::Cube;
use super::link::Link;
use super::stream::{Incoming, Outgoing, Sink};
use crate::control::message::Take;
use crate::error::CommError;
use crate::frame::Kind;

/// What a rank holds so far, by rank.
type Held = Vec<Option<Vec<u8>>>;

/// All ranks' bytes, on every rank.
pub(crate) fn all_gather(link: &mut Link, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
    let cube = Cube::of(link);
    let call = link.begin(Kind::AllGather);
    let mut held: Held = vec![None; cube.size];
    held[cube.rank] = Some(own);
    let mut came = Vec::new();
    if let Some(to) = cube.stand_in() {
        link.step(call, Cube::FOLD, &mut [Outgoing::new(to, &pack(&held))], &mut [])?;
        link.step(call, Cube::UNFOLD, &mut [], &mut [Incoming::new(to, Sink::Grow(&mut came))])?;
        unpack(link, to, &came, &mut held)?;
        return whole(held);
    }
    if let Some(guest) = cube.guest() {
        link.step(call, Cube::FOLD, &mut [], &mut [Incoming::new(guest, Sink::Grow(&mut came))])?;
        unpack(link, guest, &came, &mut held)?;
    }
    for k in 0..cube.bits {
        let peer = cube.partner(k);
        came.clear();
        let packed = pack(&held);
        link.step(
            call,
            k,
            &mut [Outgoing::new(peer, &packed)],
            &mut [Incoming::new(peer, Sink::Grow(&mut came))],
        )?;
        unpack(link, peer, &came, &mut held)?;
    }
    if let Some(guest) = cube.guest() {
        link.step(call, Cube::UNFOLD, &mut [Outgoing::new(guest, &pack(&held))], &mut [])?;
    }
    whole(held)
}

/// All ranks' bytes on rank 0; nothing elsewhere.
pub(crate) fn gather(link: &mut Link, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
    let cube = Cube::of(link);
    let call = link.begin(Kind::Gather);
    let mut held: Held = vec![None; cube.size];
    held[cube.rank] = Some(own);
    let mut came = Vec::new();
    if let Some(to) = cube.stand_in() {
        link.step(call, Cube::FOLD, &mut [Outgoing::new(to, &pack(&held))], &mut [])?;
        return Ok(Vec::new());
    }
    if let Some(guest) = cube.guest() {
        link.step(call, Cube::FOLD, &mut [], &mut [Incoming::new(guest, Sink::Grow(&mut came))])?;
        unpack(link, guest, &came, &mut held)?;
    }
    for k in 0..cube.bits {
        let peer = cube.partner(k);
        if !cube.is_low(k) {
            link.step(call, k, &mut [Outgoing::new(peer, &pack(&held))], &mut [])?;
            return Ok(Vec::new());
        }
        came.clear();
        link.step(call, k, &mut [], &mut [Incoming::new(peer, Sink::Grow(&mut came))])?;
        unpack(link, peer, &came, &mut held)?;
    }
    whole(held)
}

/// Everyone waits for everyone.
pub(crate) fn barrier(link: &mut Link) -> Result<(), CommError> {
    let cube = Cube::of(link);
    let call = link.begin(Kind::Barrier);
    let nothing = |peer| (Outgoing::new(peer, &[]), Incoming::new(peer, Sink::Fill(&mut [])));
    if let Some(to) = cube.stand_in() {
        let (out, into) = nothing(to);
        link.step(call, Cube::FOLD, &mut [out], &mut [])?;
        return link.step(call, Cube::UNFOLD, &mut [], &mut [into]);
    }
    if let Some(guest) = cube.guest() {
        link.step(call, Cube::FOLD, &mut [], &mut [nothing(guest).1])?;
    }
    for k in 0..cube.bits {
        let (out, into) = nothing(cube.partner(k));
        link.step(call, k, &mut [out], &mut [into])?;
    }
    match cube.guest() {
        Some(guest) => link.step(call, Cube::UNFOLD, &mut [nothing(guest).0], &mut []),
        None => Ok(()),
    }
}

fn whole(held: Held) -> Result<Vec<Vec<u8>>, CommError> {
    held.into_iter()
        .enumerate()
        .map(|(rank, bytes)| {
            bytes.ok_or_else(|| {
                CommError::Protocol(format!("a gather ended without the bytes of rank {rank}"))
            })
        })
        .collect()
}

/// Rank, length and bytes of each.
fn pack(held: &Held) -> Vec<u8> {
    let here = || held.iter().enumerate().filter_map(|(rank, bytes)| Some((rank, bytes.as_ref()?)));
    let mut out = Vec::with_capacity(here().map(|(_, bytes)| bytes.len() + 16).sum());
    for (rank, bytes) in here() {
        out.extend_from_slice(&(rank as u64).to_le_bytes());
        out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(bytes);
    }
    out
}

fn unpack(link: &Link, peer: usize, packed: &[u8], held: &mut Held) -> Result<(), CommError> {
    let mut take = Take(packed);
    while !take.0.is_empty() {
        let (rank, bytes) = one(&mut take).filter(|(rank, _)| *rank < held.len()).ok_or_else(|| {
            CommError::Protocol(format!(
                "rank {peer} on host {} sent a gather that cannot be read",
                link.hosts[peer]
            ))
        })?;
        held[rank] = Some(bytes.to_vec());
    }
    Ok(())
}

fn one<'a>(take: &mut Take<'a>) -> Option<(usize, &'a [u8])> {
    let rank = usize::try_from(take.u64()?).ok()?;
    let length = usize::try_from(take.u64()?).ok()?;
    Some((rank, take.slice(length)?))
}
