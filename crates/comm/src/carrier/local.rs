//! Bytes between processes of one host, through rings in shared memory.
//!
//! Every ordered pair of ranks has a ring with one writer and one reader. A rank sleeps on one word, its bell, that every
//! peer rings after it wrote to or read from a ring of theirs. A dead peer is not seen here: the control plane sees it.
//!
//! Why no wake-up is lost: a sleeper stores 1 in its bell, then looks at its rings once more, then sleeps while the bell is 1;
//! a peer moves a ring's mark, then looks at the bell. Between store and look both have a sequentially consistent fence, so
//! at least one of them sees what the other did.

mod segment;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

use super::{Alive, Carrier, Opening};
use crate::error::CommError;
use segment::{Mapping, Segment};

/// Bytes of one ring. Small enough that both sides' ring stays in the processors' caches.
const RING: usize = 1 << 20;
/// Bytes after which the other side is told, so that it reads while more is written.
const PIECE: usize = 64 << 10;
/// A full ring's writer is woken when a fourth of it is free, not for every few bytes.
const fn enough(ring: usize) -> usize {
    ring / 4
}
/// Longest time to meet: all ranks come at the same time, so whoever is not there then is not on this host.
const MEETING: Duration = Duration::from_secs(20);
/// How long a rank looks before it sleeps, where processors are left over.
const SPIN: Duration = Duration::from_micros(20);

/// One end of a ring, and how far it is at this end.
#[derive(Default)]
struct End {
    ring: Option<Mapping>,
    mark: u64,
}

/// The carrier of the ranks of one host.
pub(super) struct Local {
    rank: usize,
    slot: usize,
    /// The ranks of this host, ascending; a rank's place here is its slot.
    ranks: Vec<usize>,
    segment: Segment,
    sends: Vec<End>,
    receives: Vec<End>,
    spin: bool,
}

/// The carrier of ranks that are all on one host.
///
/// # Errors
/// They are not; shared memory is missing, too small, or not shared by all of them. Where one rank gets an error the others
/// may not: they must tell each other before they rely on it.
pub fn open(opening: &Opening, alive: Alive<'_>) -> Result<Box<dyn Carrier>, CommError> {
    let host = &opening.hosts[opening.rank];
    if let Some(other) = opening.hosts.iter().position(|other| other != host) {
        return Err(CommError::Place(format!(
            "--backend local needs all ranks on one host, but rank {} is on {host} and rank {other} on {}: choose auto or tcp",
            opening.rank, opening.hosts[other]
        )));
    }
    Ok(Box::new(Local::of_host(opening, alive)?))
}

impl Local {
    /// Meets the ranks of this rank's host.
    pub(super) fn of_host(opening: &Opening, alive: Alive<'_>) -> Result<Local, CommError> {
        let host = &opening.hosts[opening.rank];
        let ranks: Vec<usize> = (0..opening.size).filter(|rank| opening.hosts[*rank] == *host).collect();
        let until = opening.deadline.min(Instant::now() + MEETING);
        let session = [&*opening.secret, &*opening.start];
        let partners = &opening.partners;
        Local::join(Path::new("/dev/shm"), session, opening.rank, &ranks, partners, RING, until, alive)
    }

    /// Rings to `partners` are reserved here, so that too little shared memory is seen now and not in mid-run.
    fn join(
        folder: &Path,
        session: [&str; 2],
        rank: usize,
        ranks: &[usize],
        partners: &[usize],
        ring: usize,
        until: Instant,
        alive: Alive<'_>,
    ) -> Result<Local, CommError> {
        let Ok(slot) = ranks.binary_search(&rank) else {
            return Err(CommError::Place(format!(
                "rank {rank} is not among the ranks of its host, {ranks:?}"
            )));
        };
        let ends = || ranks.iter().map(|_| End::default()).collect::<Vec<_>>();
        let spin = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > ranks.len());
        let segment = Segment::open(folder, session, rank, ranks, ring, until, alive)?;
        let mut local =
            Local { rank, slot, ranks: ranks.to_vec(), segment, sends: ends(), receives: ends(), spin };
        let ready = local.reserve(partners);
        local.segment.meet(ready, ranks, until, alive)?;
        Ok(local)
    }

    fn reserve(&mut self, partners: &[usize]) -> Result<(), CommError> {
        for peer in partners {
            if let Ok(peer) = self.ranks.binary_search(peer) {
                self.sends[peer].ring = Some(self.segment.ring(self.slot, peer, true)?);
            }
        }
        Ok(())
    }

    /// Whether `peer` is on this host.
    pub(super) fn reaches(&self, peer: usize) -> bool {
        peer != self.rank && self.ranks.binary_search(&peer).is_ok()
    }

    fn slot_of(&self, peer: usize) -> Result<usize, CommError> {
        match self.ranks.binary_search(&peer) {
            Ok(slot) if slot != self.slot => Ok(slot),
            _ => {
                Err(CommError::Protocol(format!("rank {} has no shared memory with rank {peer}", self.rank)))
            }
        }
    }

    /// Bytes in a ring by its marks; they come from another process, so they are checked.
    fn held(&self, written: u64, read: u64, peer: usize) -> Result<usize, CommError> {
        let held = written.wrapping_sub(read);
        if held > self.segment.ring_size() as u64 {
            return Err(CommError::Protocol(format!(
                "shared memory between ranks {} and {peer} is damaged: {written} bytes written, {read} read",
                self.rank
            )));
        }
        Ok(held as usize)
    }

    /// Wakes the rank at `slot` if it sleeps; call it after a mark was moved.
    fn ring_bell(&self, slot: usize) {
        let bell = self.segment.bell(slot);
        fence(Ordering::SeqCst);
        if bell.load(Ordering::Relaxed) == 1 && bell.swap(0, Ordering::Relaxed) == 1 {
            let _ = futex::wake(bell, futex::Flags::empty(), 1);
        }
    }

    fn something(&self, send: &[usize], recv: &[usize]) -> bool {
        let (own, ring) = (self.slot, self.segment.ring_size());
        let room = |peer: &usize| {
            let Ok(slot) = self.slot_of(*peer) else { return true };
            let marks = self.segment.marks(own, slot);
            // A damaged mark counts as something, so that the next call finds it.
            let held = self.sends[slot].mark.wrapping_sub(marks.read.load(Ordering::Relaxed));
            held > ring as u64 || ring - held as usize >= enough(ring)
        };
        let bytes = |peer: &usize| {
            let Ok(slot) = self.slot_of(*peer) else { return true };
            self.segment.marks(slot, own).written.load(Ordering::Relaxed) != self.receives[slot].mark
        };
        send.iter().any(room) || recv.iter().any(bytes)
    }
}

impl Carrier for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn try_send(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, CommError> {
        let slot = self.slot_of(peer)?;
        let size = self.segment.ring_size();
        let mut sent = 0;
        // At most one ring at a time: the caller has other peers to serve.
        let bytes = &bytes[..bytes.len().min(size)];
        while sent < bytes.len() {
            let mark = self.sends[slot].mark;
            // Acquire: the reader was done with the bytes that are written over now.
            let read = self.segment.marks(self.slot, slot).read.load(Ordering::Acquire);
            let free = size - self.held(mark, read, peer)?;
            let at = mark as usize & (size - 1);
            let count = free.min(PIECE).min(bytes.len() - sent).min(size - at);
            if count == 0 {
                break;
            }
            if self.sends[slot].ring.is_none() {
                self.sends[slot].ring = Some(self.segment.ring(self.slot, slot, true)?);
            }
            let Some(ring) = &self.sends[slot].ring else { unreachable!("mapped above") };
            // SAFETY: `at + count` lies within the ring; these bytes are free, so the reader does not touch them.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(sent), ring.bytes().add(at), count) };
            self.sends[slot].mark = mark + count as u64;
            // Release: whoever sees the mark sees the bytes.
            self.segment.marks(self.slot, slot).written.store(mark + count as u64, Ordering::Release);
            self.ring_bell(slot);
            sent += count;
        }
        Ok(sent)
    }

    fn try_recv(&mut self, peer: usize, bytes: &mut [u8]) -> Result<usize, CommError> {
        let slot = self.slot_of(peer)?;
        let size = self.segment.ring_size();
        let mut got = 0;
        let most = bytes.len().min(size);
        while got < most {
            let mark = self.receives[slot].mark;
            // Acquire: with the mark come the bytes.
            let written = self.segment.marks(slot, self.slot).written.load(Ordering::Acquire);
            let held = self.held(written, mark, peer)?;
            let at = mark as usize & (size - 1);
            let count = held.min(PIECE).min(most - got).min(size - at);
            if count == 0 {
                break;
            }
            if self.receives[slot].ring.is_none() {
                self.receives[slot].ring = Some(self.segment.ring(slot, self.slot, false)?);
            }
            let Some(ring) = &self.receives[slot].ring else { unreachable!("mapped above") };
            // SAFETY: `at + count` lies within the ring; these bytes were written and are not written over before `read` says so.
            unsafe {
                std::ptr::copy_nonoverlapping(ring.bytes().add(at), bytes.as_mut_ptr().add(got), count)
            };
            self.receives[slot].mark = mark + count as u64;
            // Release: the bytes were read before the writer may write there again.
            self.segment.marks(slot, self.slot).read.store(mark + count as u64, Ordering::Release);
            got += count;
            if size - (held - count) >= enough(size) {
                self.ring_bell(slot);
            }
        }
        Ok(got)
    }

    fn wait(&mut self, send: &[usize], recv: &[usize], most: Duration) -> Result<(), CommError> {
        let until = Instant::now() + most;
        if self.spin {
            let end = until.min(Instant::now() + SPIN);
            while Instant::now() < end {
                for _ in 0..16 {
                    if self.something(send, recv) {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
            }
        }
        let bell: &AtomicU32 = self.segment.bell(self.slot);
        bell.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.something(send, recv) {
            let left = until.saturating_duration_since(Instant::now());
            let left = futex::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match futex::wait(bell, futex::Flags::empty(), 1, Some(&left)) {
                // Rung, rung before we slept, a signal, or time: the caller looks again in each.
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(errno) => {
                    return Err(CommError::Io {
                        what: "cannot wait on shared memory".into(),
                        source: errno.into(),
                    });
                }
            }
        }
        bell.store(0, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
