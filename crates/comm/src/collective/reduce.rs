//! Sums over ranks, along one binary tree, nearest first: (0+1)+(2+3), then the fours.
//!
//! Step k meets rank ^ 2^k and halves what is left: the lower rank keeps the lower half. What comes is added to what is here
//! as `low + high`, so every element is summed along the tree whoever ends up with it. A rank that has nothing to add takes
//! what comes as it is.

use std::ops::Range;

use super::Cube;
use super::link::Link;
use super::parts::{gather_parts, two, way_down};
use super::stream::{Add, Incoming, Outgoing, Sink};
use crate::error::CommError;
use crate::frame::{Kind, PIECE};
use crate::number::{Number, bytes_of, bytes_of_mut};
use crate::reduction::Leave;

/// Adds what comes to what is here.
struct AddInto<'a, T> {
    target: &'a mut [T],
    room: &'a mut Vec<u64>,
    /// Whether what is here is the lower rank's.
    low: bool,
}

impl<T: Number> Add for AddInto<'_, T> {
    fn bytes(&self) -> usize {
        size_of_val(self.target)
    }
    fn room(&mut self, length: usize) -> &mut [u8] {
        if self.room.len() < PIECE / 8 {
            self.room.resize(PIECE / 8, 0);
        }
        // SAFETY: u64 has no padding, any bytes are a u64, and a u8 has no alignment.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.room.as_mut_ptr().cast::<u8>(), PIECE) };
        &mut bytes[..length]
    }
    fn add(&mut self, at: usize, length: usize) {
        let count = length / size_of::<T>();
        // SAFETY: the room holds PIECE bytes, aligned for u64 and so for T, and any bytes are a sealed Number.
        let came = unsafe {
            std::slice::from_raw_parts(self.room.as_ptr().cast::<T>(), count.min(PIECE / size_of::<T>()))
        };
        let here = &mut self.target[at / size_of::<T>()..][..count];
        if self.low {
            here.iter_mut().zip(came).for_each(|(here, came)| *here = *here + *came);
        } else {
            here.iter_mut().zip(came).for_each(|(here, came)| *here = *came + *here);
        }
    }
}

/// Sums `data`, the bucket alone, which lies at `bucket` of the caller's buffer; `present`: whether this rank adds anything.
/// When nobody does, the sum is 0.
pub(crate) fn reduce<T: Number>(
    link: &mut Link,
    data: &mut [T],
    bucket: &Range<usize>,
    grain: usize,
    leave: Leave,
    present: bool,
) -> Result<(), CommError> {
    let mut room = std::mem::take(&mut link.staging);
    let result = down(link, data, bucket, grain, present, &mut room);
    link.staging = room;
    if !result? {
        // Nobody had anything.
        data.fill(T::default());
    }
    match leave {
        Leave::Everywhere => gather_parts(link, Kind::Reduce, data, bucket, grain),
        Leave::Owned => Ok(()),
    }
}

/// Down the cube; whether anyone had anything.
fn down<T: Number>(
    link: &mut Link,
    data: &mut [T],
    bucket: &Range<usize>,
    grain: usize,
    mut present: bool,
    room: &mut Vec<u64>,
) -> Result<bool, CommError> {
    let cube = Cube::of(link);
    let call = link.begin(Kind::Reduce);
    if let Some(to) = cube.stand_in() {
        let out = if present { Outgoing::new(to, bytes_of(data)) } else { Outgoing::absent(to) };
        link.step(call, Cube::FOLD, &mut [out], &mut [])?;
        // The stand-in knows; whoever asks for the sum gets it from there.
        return Ok(true);
    }
    if let Some(guest) = cube.guest() {
        present |= take(link, call, Cube::FOLD, None, guest, data, present, true, room)?;
    }
    let near = |range: &Range<usize>| range.start - bucket.start..range.end - bucket.start;
    for (k, (keep, give)) in way_down(&cube, bucket, grain).into_iter().enumerate() {
        let k = k as u16;
        let peer = cube.partner(k);
        let (here, away) = two(data, near(&keep), near(&give));
        let out = if present { Outgoing::new(peer, bytes_of(away)) } else { Outgoing::absent(peer) };
        present |= take(link, call, k, Some(out), peer, here, present, cube.is_low(k), room)?;
    }
    Ok(present)
}

/// Sends `out`, and takes what comes from `peer` to `here`; whether anything came.
fn take<T: Number>(
    link: &mut Link,
    call: super::link::Call,
    step: u16,
    out: Option<Outgoing<'_>>,
    peer: usize,
    here: &mut [T],
    present: bool,
    low: bool,
    room: &mut Vec<u64>,
) -> Result<bool, CommError> {
    let mut out: Vec<Outgoing<'_>> = out.into_iter().collect();
    let mut adder;
    let sink = if present {
        adder = AddInto { target: here, room, low };
        Sink::Add(&mut adder)
    } else {
        Sink::Fill(bytes_of_mut(here))
    };
    let mut into = [Incoming::new(peer, sink)];
    link.step(call, step, &mut out, &mut into)?;
    Ok(!into[0].absent)
}
