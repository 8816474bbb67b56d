//! Memory that threads which move elements between processes work at while kernels are at work beside them.

/// A stretch of a device's memory as the host sees it: itself where the device's memory is the host's, a copy elsewhere.
pub struct Shared<E> {
    at: *mut E,
    copy: Option<Vec<E>>,
}

impl<E: Copy + Default> Shared<E> {
    /// The device's memory itself. Who reads or writes there answers for it.
    pub fn own(at: *mut E) -> Self {
        Shared { at, copy: None }
    }
    /// A copy of `len` elements, of no content yet.
    pub fn copy(len: usize) -> Self {
        let mut copy = vec![E::default(); len];
        Shared { at: copy.as_mut_ptr(), copy: Some(copy) }
    }
    /// The first element.
    pub fn pointer(&self) -> *mut E {
        self.at
    }
    /// Elements of the copy.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    ///
    /// # Panics
    /// When it is no copy, or does not have so many.
    #[allow(
        clippy::mut_from_ref,
        reason = "a pointer into memory that several threads share, each its own part"
    )]
    pub unsafe fn stretch(&self, start: usize, len: usize) -> &mut [E] {
        let all = self.copy.as_ref().map_or(0, Vec::len);
        assert!(start + len <= all, "a stretch beyond the {all} elements of a copy");
        // SAFETY: within the copy; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(start), len) }
    }
    /// The copy, when all others are done with it; `None` if it is none.
    pub fn into_copy(self) -> Option<Vec<E>> {
        self.copy
    }
}
