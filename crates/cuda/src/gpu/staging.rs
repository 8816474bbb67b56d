//! Pinned memory of the host that small copies to the GPU go through: the GPU fetches them while the host goes on.

use cudarc::driver::{result, sys};

/// Bytes of each of the two halves: one is filled while the GPU reads the other.
const HALF: usize = 4 << 20;

/// Two halves of pinned memory, each with an event that says when the GPU is done with it.
pub(super) struct Staging {
    memory: *mut u8,
    events: [sys::CUevent; 2],
    half: usize,
    filled: usize,
}

// SAFETY: uniquely owned memory; events belong to the context, not to a thread.
unsafe impl Send for Staging {}

impl Staging {
    pub(super) fn new() -> Result<Staging, result::DriverError> {
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let events = [event()?, event()?];
        // SAFETY: the context is current; the memory is written before it is read.
        let memory = unsafe { result::malloc_host(2 * HALF, 0)? };
        Ok(Staging { memory: memory.cast(), events, half: 0, filled: 0 })
    }
    /// Whether so many bytes need memory that the GPU may still be reading.
    pub(super) fn must_wait(&self, bytes: usize) -> bool {
        self.filled + bytes > HALF
    }
    /// Copies to the GPU, in the order of the stream.
    pub(super) fn upload(
        &mut self,
        to: sys::CUdeviceptr,
        from: &[u8],
        stream: sys::CUstream,
    ) -> Result<(), result::DriverError> {
        let mut done = 0;
        while done < from.len() {
            if self.filled == HALF {
                // SAFETY: event and stream live as long as this.
                unsafe { result::event::record(self.events[self.half], stream)? };
                self.half = 1 - self.half;
                self.filled = 0;
                // An event that was never recorded is done.
                unsafe { result::event::synchronize(self.events[self.half])? };
            }
            let piece = &from[done..from.len().min(done + HALF - self.filled)];
            // SAFETY: within the half, which the GPU is done with; the copy reads it before the half is used again.
            unsafe {
                let at = self.memory.add(self.half * HALF + self.filled);
                at.copy_from_nonoverlapping(piece.as_ptr(), piece.len());
                let pinned = std::slice::from_raw_parts(at.cast_const(), piece.len());
                result::memcpy_htod_async(to + done as u64, pinned, stream)?;
            }
            done += piece.len();
            // Pieces begin at lines of the cache.
            self.filled = (self.filled + piece.len()).next_multiple_of(64).min(HALF);
        }
        Ok(())
    }
    /// Gives the memory back; all copies are done.
    pub(super) fn release(&mut self) {
        // SAFETY: made in `new`, and not used after this.
        unsafe {
            let _ = result::free_host(self.memory.cast());
            for event in self.events {
                let _ = result::event::destroy(event);
            }
        }
    }
}
