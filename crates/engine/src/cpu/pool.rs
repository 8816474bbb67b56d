//! Buffers of the CPU device, aligned to a cache line and kept for reuse: fresh pages cost more than most kernels.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

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

impl Block {
    fn new(capacity: usize) -> Block {
        let layout = Self::layout(capacity);
        let data = match Self::is_mapped(capacity) {
            true => Self::map(capacity),
            // SAFETY: the capacity is never zero.
            false => unsafe { alloc_zeroed(layout) as *mut f32 },
        };
        let data = NonNull::new(data).unwrap_or_else(|| handle_alloc_error(layout));
        ask_for_huge_pages(data.as_ptr(), capacity);
        Block { data, capacity }
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

/// Free blocks, each with the round of [`Pool::trim`] in which it came back.
#[derive(Default)]
pub(super) struct Pool {
    free: Mutex<(u64, Vec<(u64, Block)>)>,
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
                Block::new(want)
            }
        };
        (Buffer { block: Some(block), len, pool: pool.clone() }, fit.is_none())
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
        if let (Some(block), Ok(mut free)) = (self.block.take(), self.pool.free.lock()) {
            let round = free.0;
            free.1.push((round, block));
        }
    }
}
