//! The error of a device that failed: not for lack of memory ([`crate::memory`]), but because it does not work (any more).

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// What a device did not do, and what the user can do about it. Kernels have no error to return: it travels up the stack as a
/// panic that prints nothing, to the next [`caught`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fault(pub String);

impl Fault {
    /// Leaves the work for the next [`caught`] up the stack.
    pub fn raise(self) -> ! {
        resume_unwind(Box::new(self))
    }
}

/// Does work that a device may fail in. What it left half done must not be used again.
///
/// # Errors
/// The fault. Any other panic goes on.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| match panic.downcast::<Fault>() {
        Ok(fault) => *fault,
        Err(other) => resume_unwind(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_caught_and_nothing_else() {
        let fault = Fault("gone".into());
        assert_eq!(caught(|| -> u8 { fault.clone().raise() }), Err(fault));
        assert_eq!(caught(|| 7), Ok(7));
        let other = std::panic::catch_unwind(|| caught(|| -> u8 { resume_unwind(Box::new("other")) }));
        assert_eq!(*other.unwrap_err().downcast::<&str>().unwrap(), "other");
    }
}
