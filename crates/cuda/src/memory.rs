//! Buffers of the device, kept for reuse: a GPU takes and gives memory slowly, and waits for all work before it does.
//!
//! One stream does all work in order, so a block may be given to the next buffer as soon as the last one is dropped: what the
//! next buffer's kernels do comes after what the last one's did.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tercio_engine::Fault;
use tercio_engine::memory::OutOfMemory;

use crate::driver::{Address, Driver};

/// Sizes are multiples of this many bytes, at least.
const GRAIN: u64 = 512;
/// Blocks of at least this many bytes are used for buffers of about their size only.
const LARGE: u64 = 1 << 20;
/// A free block that so many rounds of [`Pool::trim`] did not need is given back.
const ROUNDS: u64 = 16;

/// The device's memory: a driver, its free blocks, and the count of bytes.
pub struct Pool<R: Driver> {
    pub(crate) driver: R,
    limit: u64,
    exact: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Free blocks by size, each with the round in which it came back.
    free: BTreeMap<u64, Vec<(u64, Address)>>,
    round: u64,
    /// Bytes of all blocks, free ones too.
    held: u64,
    /// Bytes of all buffers, as blocks.
    used: u64,
    peak: u64,
}

impl<R: Driver> Pool<R> {
    /// The memory of a driver, `limit` bytes at most.
    pub fn new(driver: R, limit: u64) -> Arc<Pool<R>> {
        Arc::new(Pool { driver, limit, exact: false, state: Mutex::default() })
    }
    /// Memory in which every buffer is a block of its own, of its very size: slow, and what is written beyond a buffer can be seen.
    pub fn exact(driver: R, limit: u64) -> Arc<Pool<R>> {
        Arc::new(Pool { driver, limit, exact: true, state: Mutex::default() })
    }
    /// The most bytes that it takes.
    pub fn limit(&self) -> u64 {
        self.limit
    }
    /// Bytes that buffers hold.
    pub fn bytes_in_use(&self) -> u64 {
        self.lock().used
    }
    /// The most that buffers ever held.
    pub fn peak_bytes(&self) -> u64 {
        self.lock().peak
    }
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it is held leaves counts that are only told to people.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
    /// A buffer of arbitrary content. Without a byte it has no memory.
    ///
    /// # Panics
    /// As [`OutOfMemory`], or as [`Fault`].
    pub fn take(self: &Arc<Self>, bytes: u64) -> Buffer<R> {
        let (at, size) = match bytes {
            0 => (0, 0),
            _ => self.block(bytes),
        };
        Buffer { pool: self.clone(), at, bytes, size }
    }
    /// A buffer of zeros.
    ///
    /// # Panics
    /// As [`Pool::take`].
    pub fn zeros(self: &Arc<Self>, bytes: u64) -> Buffer<R> {
        let buffer = self.take(bytes);
        if bytes > 0 {
            self.driver.zero(buffer.at, bytes).unwrap_or_else(|fault| fault.raise());
        }
        buffer
    }
    fn block(&self, bytes: u64) -> (Address, u64) {
        let size = if self.exact { bytes } else { rounded(bytes) };
        let mut state = self.lock();
        if let Some((at, size)) = state.reuse(size) {
            state.count(size);
            return (at, size);
        }
        let made = self.make(&mut state, size).unwrap_or_else(|fault| fault.raise());
        let Some(at) = made else {
            let room = self.driver.room().unwrap_or(u64::MAX).min(self.limit.saturating_sub(state.held));
            OutOfMemory { asked: bytes, room: Some(room), used: state.used, peak: state.peak }.raise()
        };
        state.held += size;
        state.count(size);
        (at, size)
    }
    /// A new block; where there is no room for it, what is free is given back first.
    fn make(&self, state: &mut State, size: u64) -> Result<Option<Address>, Fault> {
        if state.held.saturating_add(size) <= self.limit
            && let Some(at) = self.driver.allocate(size)?
        {
            return Ok(Some(at));
        }
        self.give_back(state, |_| true)?;
        if state.held.saturating_add(size) > self.limit {
            return Ok(None);
        }
        self.driver.allocate(size)
    }
    fn give_back(&self, state: &mut State, old: impl Fn(u64) -> bool) -> Result<(), Fault> {
        let State { free, held, .. } = state;
        for (&size, blocks) in free.iter_mut() {
            while let Some(i) = blocks.iter().position(|&(round, _)| old(round)) {
                let (_, at) = blocks.swap_remove(i);
                *held -= size;
                self.driver.release(at, size)?;
            }
        }
        free.retain(|_, blocks| !blocks.is_empty());
        Ok(())
    }
    /// Ends a round: gives back what was free for long.
    ///
    /// # Errors
    /// A GPU that does not answer.
    pub fn trim(&self) -> Result<(), Fault> {
        let mut state = self.lock();
        state.round += 1;
        let round = state.round;
        self.give_back(&mut state, |since| since + ROUNDS < round)
    }
}

impl<R: Driver> Drop for Pool<R> {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut *self.lock());
        // A GPU that does not answer any more has nothing to give back.
        let _ = self.give_back(&mut state, |_| true);
    }
}

impl State {
    /// The smallest free block that fits and is not much too large, the one that came back last.
    fn reuse(&mut self, size: u64) -> Option<(Address, u64)> {
        let most = if size >= LARGE { size + size / 4 } else { 2 * size };
        let (&found, _) = self.free.range(size..=most).next()?;
        let blocks = self.free.get_mut(&found)?;
        let (_, at) = blocks.pop()?;
        if blocks.is_empty() {
            self.free.remove(&found);
        }
        Some((at, found))
    }
    fn count(&mut self, size: u64) {
        self.used += size;
        self.peak = self.peak.max(self.used);
    }
}

/// A multiple of an eighth of the greatest power of two within, so that batches of similar lengths use each other's blocks.
fn rounded(bytes: u64) -> u64 {
    let step = (1u64 << bytes.max(1).ilog2()) / 8;
    bytes.next_multiple_of(step.max(GRAIN))
}

/// Memory of the device, which goes back to its pool when it is dropped.
pub struct Buffer<R: Driver> {
    pool: Arc<Pool<R>>,
    at: Address,
    bytes: u64,
    size: u64,
}

impl<R: Driver> Buffer<R> {
    /// The first byte; 0 where there is none.
    pub fn at(&self) -> Address {
        self.at
    }
    /// Number of bytes, as asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl<R: Driver> Drop for Buffer<R> {
    fn drop(&mut self) {
        if self.size > 0 {
            let mut state = self.pool.lock();
            state.used -= self.size;
            let round = state.round;
            state.free.entry(self.size).or_default().push((round, self.at));
            if self.pool.exact {
                // Nobody waits for an answer here; a GPU that gives none says so at its next call.
                let _ = self.pool.give_back(&mut state, |_| true);
            }
        }
    }
}
