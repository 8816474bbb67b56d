//! Buffers of the CPU device, aligned to a cache line and kept for reuse: fresh pages cost more than most kernels.
//!
//! A buffer that would not fit into memory is refused while the process still can say so ([`OutOfMemory`]): Linux gives
//! addresses freely, and kills whoever touches more pages than there are.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::memory::{OutOfMemory, room_beside};

const ALIGN: usize = 64;
/// Size of a huge page where there are any; blocks at least as large begin at one.
const HUGE: usize = 2 << 20;

/// Asks for huge pages: a product walks many rows at once, and a miss of the address translation costs more than one of
/// the cache. Where the system has none nothing changes.
pub(super) fn ask_for_huge_pages(data: *mut f32, len: usize) {
    let (start, end) = (data as usize, data as usize + len * size_of::<f32>());
    let (first, last) = (start.next_multiple_of(HUGE), end / HUGE * HUGE);
    #[cfg(target_os = "linux")]
    if first < last {
        use rustix::mm::{Advice, madvise};
        // SAFETY: the range lies within the caller's allocation; the advice does not change its content.
        let _ = unsafe { madvise(first as *mut std::ffi::c_void, last - first, Advice::LinuxHugepage) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (first, last);
}

/// Uniquely owned memory, zero when it is new.
struct Block {
    data: NonNull<f32>,
    capacity: usize,
}
// The block is uniquely owned memory.
unsafe impl Send for Block {}
unsafe impl Sync for Block {}

/// Blocks of at least this many bytes come from the system page by page: whoever touches one first pays for it, and what
/// nobody touches costs nothing.
const MAPPED: usize = 1 << 20;

/// Bytes that must be left beside a new buffer of at least [`MAPPED`]: for all that is not a buffer.
const SPARE: u64 = 32 << 20;

impl Block {
    /// `None` where the system has none.
    fn new(capacity: usize) -> Option<Block> {
        let data = match Self::is_mapped(capacity) {
            true => Self::map(capacity),
            // SAFETY: the capacity is never zero.
            false => unsafe { alloc_zeroed(Self::layout(capacity)) as *mut f32 },
        };
        let data = NonNull::new(data)?;
        ask_for_huge_pages(data.as_ptr(), capacity);
        Some(Block { data, capacity })
    }
    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity * size_of::<f32>(), ALIGN)
            .expect("a buffer beyond the address space")
    }
    fn is_mapped(capacity: usize) -> bool {
        cfg!(target_os = "linux") && capacity * size_of::<f32>() >= MAPPED
    }
    #[cfg(target_os = "linux")]
    fn map(capacity: usize) -> *mut f32 {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the system's choice.
        let mapped = unsafe {
            mmap_anonymous(std::ptr::null_mut(), capacity * size_of::<f32>(), access, MapFlags::PRIVATE)
        };
        mapped.map_or(std::ptr::null_mut(), |data| data.cast())
    }
    #[cfg(not(target_os = "linux"))]
    fn map(_: usize) -> *mut f32 {
        std::ptr::null_mut()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if Self::is_mapped(self.capacity) {
            // SAFETY: mapped in `new` with this size, and nobody has it any more.
            let _ =
                unsafe { rustix::mm::munmap(self.data.as_ptr().cast(), self.capacity * size_of::<f32>()) };
            return;
        }
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.data.as_ptr() as *mut u8, Self::layout(self.capacity)) }
    }
}

/// Free blocks, each with the round of [`Pool::trim`] in which it came back; and the count of bytes.
pub(super) struct Pool {
    free: Mutex<(u64, Vec<(u64, Block)>)>,
    /// Bytes of all buffers, as they were asked for.
    used: AtomicU64,
    /// The most of `used`.
    peak: AtomicU64,
    /// Bytes that may be taken before the system is asked again.
    granted: AtomicU64,
    /// Bytes that can be had beside those in use.
    room: fn(u64) -> Option<u64>,
}

impl Default for Pool {
    fn default() -> Pool {
        let [used, peak, granted] = [const { AtomicU64::new(0) }; 3];
        Pool { free: Mutex::default(), used, peak, granted, room: room_beside }
    }
}

/// Bytes of `len` elements.
fn bytes(len: usize) -> u64 {
    (len as u64).saturating_mul(size_of::<f32>() as u64)
}

impl Pool {
    /// A buffer of `len` zeros; a new block's are the system's.
    pub(super) fn zeros(pool: &Arc<Pool>, len: usize) -> Buffer {
        let (mut buffer, new) = Self::take_or_make(pool, len);
        if !new {
            super::elementwise::fill(&mut buffer[..], 0.0);
        }
        buffer
    }
    /// A buffer of `len` elements of unspecified (but initialised) content: the smallest free block that is at most twice
    /// as large, or a new one. Sizes are rounded up to an eighth of their power of two, so that batches of similar
    /// lengths use each other's blocks; pages that nobody touched cost no memory.
    pub(super) fn take(pool: &Arc<Pool>, len: usize) -> Buffer {
        Self::take_or_make(pool, len).0
    }
    /// A buffer, and whether its block is new.
    fn take_or_make(pool: &Arc<Pool>, len: usize) -> (Buffer, bool) {
        let line = ALIGN / size_of::<f32>();
        let step = (len.max(1).next_power_of_two() / 16).max(line);
        let want = len.max(1).next_multiple_of(step);
        let mut free = pool.free.lock().expect("no panic while the lock is held");
        let fit = (0..free.1.len())
            .filter(|&i| (want..=2 * want).contains(&free.1[i].1.capacity))
            .min_by_key(|&i| free.1[i].1.capacity);
        let block = match fit {
            Some(i) => free.1.swap_remove(i).1,
            None => {
                drop(free);
                pool.new_block(want, len)
            }
        };
        let used = pool.used.fetch_add(bytes(len), Relaxed) + bytes(len);
        pool.peak.fetch_max(used, Relaxed);
        (Buffer { block: Some(block), len, pool: pool.clone() }, fit.is_none())
    }
    /// A new block of `capacity` elements, of which `len` will be used; where there is no room for it, free ones are given
    /// back to the system first.
    fn new_block(&self, capacity: usize, len: usize) -> Block {
        let take = || self.grants(bytes(len)).then(|| Block::new(capacity)).flatten();
        let again = || {
            let kept = std::mem::take(&mut self.free.lock().expect("no panic while the lock is held").1);
            drop(kept);
            take()
        };
        take().or_else(again).unwrap_or_else(|| self.refuse(bytes(len)))
    }
    /// Whether a large buffer fits into memory. The system is asked anew when half of what it had has been taken.
    fn grants(&self, bytes: u64) -> bool {
        if bytes < MAPPED as u64 {
            return true;
        }
        if self.granted.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok() {
            return true;
        }
        let Some(room) = (self.room)(self.bytes_in_use()) else { return true };
        let Some(left) = room.checked_sub(bytes.saturating_add(SPARE)) else { return false };
        self.granted.store(left / 2, Relaxed);
        true
    }
    fn refuse(&self, asked: u64) -> ! {
        let (used, peak) = (self.bytes_in_use(), self.peak.load(Relaxed));
        let room = (self.room)(used).map(|room| room.saturating_sub(SPARE));
        OutOfMemory { asked, room, used, peak }.raise()
    }
    /// Bytes of all buffers.
    pub(super) fn bytes_in_use(&self) -> u64 {
        self.used.load(Relaxed)
    }
    /// Starts a new round and releases what was not used in the last two.
    pub(super) fn trim(&self) {
        let mut free = self.free.lock().expect("no panic while the lock is held");
        free.0 += 1;
        let round = free.0;
        free.1.retain(|(last, _)| last + 2 >= round);
    }
}

/// A buffer of f32; goes back to its device's pool when dropped.
pub struct Buffer {
    block: Option<Block>,
    len: usize,
    pool: Arc<Pool>,
}

impl Buffer {
    /// Elements `start..start + len`, by their own pointer: a reference to the whole buffer would stand for elements that
    /// another thread may be summing.
    pub(super) fn part(&self, start: usize, len: usize) -> &[f32] {
        let at = self.pointer(start, len);
        // SAFETY: within the buffer (checked), whose elements are initialised.
        unsafe { std::slice::from_raw_parts(at, len) }
    }
    /// As [`Buffer::part`], writable.
    pub(super) fn part_mut(&mut self, start: usize, len: usize) -> &mut [f32] {
        let at = self.pointer(start, len);
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(at, len) }
    }
    pub(super) fn pointer(&self, start: usize, len: usize) -> *mut f32 {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "a view beyond its buffer");
        let block = self.block.as_ref().expect("present until dropped");
        // SAFETY: within the block.
        unsafe { block.data.as_ptr().add(start) }
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        let block = self.block.as_ref().expect("present until dropped");
        // SAFETY: the block holds at least `len` initialised elements.
        unsafe { std::slice::from_raw_parts(block.data.as_ptr(), self.len) }
    }
}
impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        let block = self.block.as_mut().expect("present until dropped");
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(block.data.as_ptr(), self.len) }
    }
}
impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.used.fetch_sub(bytes(self.len), Relaxed);
        if let (Some(block), Ok(mut free)) = (self.block.take(), self.pool.free.lock()) {
            let round = free.0;
            free.1.push((round, block));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::caught;

    /// Room for 100 MiB of buffers.
    fn small() -> Arc<Pool> {
        let room = |used: u64| Some(((100 << 20) + SPARE).saturating_sub(used));
        Arc::new(Pool { room, ..Pool::default() })
    }

    const MIB: usize = (1 << 20) / size_of::<f32>();

    #[test]
    fn a_buffer_that_would_not_fit_is_refused() {
        let pool = small();
        let held = Pool::take(&pool, 60 * MIB);
        drop(Pool::take(&pool, 30 * MIB));
        let out = caught(|| drop(Pool::zeros(&pool, 50 * MIB))).unwrap_err();
        let wanted = OutOfMemory { asked: 50 << 20, room: Some(40 << 20), used: 60 << 20, peak: 90 << 20 };
        assert_eq!(out, wanted);
        drop(held);
        assert_eq!(pool.bytes_in_use(), 0);
        assert_eq!(Pool::zeros(&pool, 50 * MIB).len(), 50 * MIB, "there is room now");
    }

    #[test]
    fn free_blocks_make_room() {
        let pool = small();
        drop((Pool::take(&pool, 30 * MIB), Pool::take(&pool, 30 * MIB)));
        assert_eq!(pool.free.lock().unwrap().1.len(), 2);
        assert!(caught(|| drop(Pool::take(&pool, 1 << 60))).is_err());
        assert!(pool.free.lock().unwrap().1.is_empty());
    }

    #[test]
    fn the_refusal_comes_through_the_threads() {
        let pool = small();
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let ask = |len: usize| threads.join(|| (), || drop(Pool::take(&pool, len)));
        assert_eq!(caught(|| ask(200 * MIB)).map(drop).unwrap_err().asked, 200 << 20);
        caught(|| ask(20 * MIB)).unwrap();
    }
}
