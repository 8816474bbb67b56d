//! The numbers that ranks add and exchange, and how they lie in bytes.

/// A value that ranks add and exchange: `f32`, `f64`. Its bytes travel as they lie in memory.
pub trait Number:
    Copy + Send + Sync + Default + std::ops::Add<Output = Self> + sealed::Sealed + 'static
{
}
impl Number for f32 {}
impl Number for f64 {}

mod sealed {
    /// Any bytes are a value, and a value has no padding: the promise that the casts of this file rest on.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// The bytes of values.
pub(crate) fn bytes_of<T: Number>(values: &[T]) -> &[u8] {
    // SAFETY: a sealed Number has no padding, and u8 has no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values)) }
}

/// The bytes of values, to be written.
pub(crate) fn bytes_of_mut<T: Number>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; and any bytes are a value of a sealed Number.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), std::mem::size_of_val(values)) }
}
