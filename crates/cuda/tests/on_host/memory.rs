//! Memory of the kernels' tests: values between guards that nobody may write.

use std::cell::UnsafeCell;

use tercio_cuda::driver::Argument;

/// Elements of a guard.
const GUARD: usize = 32;

/// Values with a guard before and one behind; dropping it looks at both.
pub struct Guarded<T: Copy + PartialEq> {
    all: UnsafeCell<Vec<T>>,
    len: usize,
    guard: T,
}

// SAFETY: shared for reading; who writes holds it alone, or writes through a pointer to elements that nobody else uses.
unsafe impl<T: Copy + PartialEq + Send> Sync for Guarded<T> {}

impl<T: Copy + PartialEq> Guarded<T> {
    pub fn new(values: Vec<T>, guard: T) -> Self {
        let len = values.len();
        let mut all = vec![guard; GUARD];
        all.extend(values);
        all.extend([guard; GUARD]);
        Guarded { all: UnsafeCell::new(all), len, guard }
    }
    /// The first element.
    pub fn pointer(&self) -> *mut T {
        // SAFETY: a pointer alone; it stays within the vector.
        unsafe { (*self.all.get()).as_mut_ptr().add(GUARD) }
    }
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn values(&self) -> &[T] {
        // SAFETY: nobody writes while a kernel does not run.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.len) }
    }
}

impl<T: Copy + PartialEq> Drop for Guarded<T> {
    fn drop(&mut self) {
        let (guard, len) = (self.guard, self.len);
        let all = self.all.get_mut();
        let whole = all[..GUARD].iter().chain(&all[GUARD + len..]).all(|v| *v == guard);
        if !std::thread::panicking() {
            assert!(whole, "a kernel wrote beyond an array of {len} elements");
        }
    }
}

/// Words: ids, places, offsets.
pub fn words(values: Vec<u32>) -> Guarded<u32> {
    Guarded::new(values, 0xdead_beef)
}

/// Floats; the guard is finite and so great that who reads it gives infinities.
pub fn floats(values: Vec<f32>) -> Guarded<f32> {
    Guarded::new(values, 3.0e38)
}

impl<T: Copy + PartialEq> From<&Guarded<T>> for Argument {
    fn from(memory: &Guarded<T>) -> Self {
        Argument::Pointer(memory.pointer() as u64)
    }
}
