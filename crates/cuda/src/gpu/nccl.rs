//! NCCL: sums over the GPUs of all ranks, in NCCL's own order, on a stream of their own beside the kernels.
//!
//! A rank that is gone leaves the others waiting inside NCCL, where nobody hears anything; so whoever waits here looks around,
//! and gives the communicator up when a rank was lost.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::{result, sys};
use libloading::Library;
use tercio_engine::Fault;

/// What rank 0 makes and all ranks meet by; `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Meeting(pub [u8; 128]);

/// `ncclFloat32` and `ncclSum`.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type Comm = *mut c_void;

/// The functions of the library.
struct Functions {
    get_unique_id: unsafe extern "C" fn(*mut Meeting) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Comm, c_int, Meeting, c_int) -> c_int,
    all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int,
    comm_abort: unsafe extern "C" fn(Comm) -> c_int,
    comm_destroy: unsafe extern "C" fn(Comm) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    _library: Library,
}

impl Functions {
    fn load() -> Option<Functions> {
        // SAFETY: NVIDIA's library; loading it runs its initialisation only. The signatures are those of nccl.h.
        unsafe {
            let library = ["libnccl.so.2", "libnccl.so"].iter().find_map(|name| Library::new(name).ok())?;
            Some(Functions {
                get_unique_id: *library.get(b"ncclGetUniqueId").ok()?,
                comm_init_rank: *library.get(b"ncclCommInitRank").ok()?,
                all_reduce: *library.get(b"ncclAllReduce").ok()?,
                comm_abort: *library.get(b"ncclCommAbort").ok()?,
                comm_destroy: *library.get(b"ncclCommDestroy").ok()?,
                comm_get_async_error: *library.get(b"ncclCommGetAsyncError").ok()?,
                get_error_string: *library.get(b"ncclGetErrorString").ok()?,
                _library: library,
            })
        }
    }
    fn check(&self, what: &str, status: c_int) -> Result<(), Fault> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a text of the library's own, which stays.
        let words = unsafe { CStr::from_ptr((self.get_error_string)(status)) };
        Err(Fault(format!("NCCL {what}: {} (NCCL_DEBUG=WARN tells more)", words.to_string_lossy())))
    }
}

fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(Functions::load).as_ref()
}

/// Whether the library is found.
pub fn is_present() -> bool {
    functions().is_some()
}

/// What rank 0 makes for all.
///
/// # Errors
/// No NCCL, or what it says.
pub fn meeting() -> Result<Meeting, Fault> {
    let f = functions().ok_or_else(missing)?;
    let mut meeting = Meeting([0; 128]);
    // SAFETY: 128 bytes, as the library takes them.
    f.check("makes no meeting", unsafe { (f.get_unique_id)(&mut meeting) })?;
    Ok(meeting)
}

fn missing() -> Fault {
    Fault("NCCL (libnccl.so.2) is not found".into())
}

/// Asked while this rank waits: the sentence of a loss, if a rank was lost.
pub type Lost = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// This rank among those that sum together.
pub(super) struct Communicator {
    comm: Comm,
    stream: sys::CUstream,
    ready: sys::CUevent,
    done: sys::CUevent,
    lost: Lost,
    /// Why it was given up: then there is no communicator any more.
    over: OnceLock<Fault>,
}

// SAFETY: used by one thread at a time, behind the lock of the driver.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Meets the others; the context is current. Waits until all are there.
    pub(super) fn new(
        meeting: Meeting,
        rank: usize,
        ranks: usize,
        lost: Lost,
    ) -> Result<Communicator, Fault> {
        let f = functions().ok_or_else(missing)?;
        let fault = |e: result::DriverError| Fault(format!("no stream for NCCL: {}", super::said(e)));
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(fault);
        // Before the kernels: a sum that begins late is a sum that is waited for.
        let kind = result::stream::StreamKind::NonBlocking;
        let (_, most) = result::stream::get_priority_range().map_err(fault)?;
        let stream = result::stream::create_with_priority(kind, most).map_err(fault)?;
        let (ready, done) = (event()?, event()?);
        let mut comm = std::ptr::null_mut();
        // SAFETY: the meeting is of all ranks; `comm` is written.
        let met = unsafe { (f.comm_init_rank)(&mut comm, ranks as c_int, meeting, rank as c_int) };
        f.check(&format!("does not join rank {rank} of {ranks}"), met)?;
        Ok(Communicator { comm, stream, ready, done, lost, over: OnceLock::new() })
    }
    /// Sums `len` floats over all ranks, in place, once the work of `after` so far is done.
    pub(super) fn sum(&self, at: u64, len: usize, after: sys::CUstream) -> Result<(), Fault> {
        self.alive()?;
        let f = functions().ok_or_else(missing)?;
        let fault = |e: result::DriverError| Fault(format!("no event for NCCL: {}", super::said(e)));
        // SAFETY: streams and events live; the caller's memory.
        unsafe {
            result::event::record(self.ready, after).map_err(fault)?;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(self.stream, self.ready, flags).map_err(fault)?;
            let place = at as *mut c_void;
            f.check("does not sum", (f.all_reduce)(place, place, len, FLOAT32, SUM, self.comm, self.stream))
        }
    }
    /// What `before` is asked for from now on comes after all sums so far.
    pub(super) fn end(&self, before: sys::CUstream) -> Result<(), Fault> {
        let fault = |e: result::DriverError| Fault(format!("no event for NCCL: {}", super::said(e)));
        // SAFETY: streams and events live.
        unsafe {
            result::event::record(self.done, self.stream).map_err(fault)?;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(before, self.done, flags).map_err(fault)
        }
    }
    /// Gives the communicator up where a rank was lost, or where NCCL says that something went wrong: then nothing waits any more.
    pub(super) fn look_around(&self) -> Result<(), Fault> {
        self.alive()?;
        let f = functions().ok_or_else(missing)?;
        let mut status = 0;
        // SAFETY: the communicator lives.
        unsafe { (f.comm_get_async_error)(self.comm, &mut status) };
        // ncclInProgress is no error.
        let wrong = if status == 7 { Ok(()) } else { f.check("failed", status) };
        let fault = match (self.lost)() {
            Some(sentence) => Fault(sentence),
            None => match wrong {
                Ok(()) => return Ok(()),
                Err(fault) => fault,
            },
        };
        // SAFETY: as above; `over` keeps everybody off it from now on.
        unsafe { (f.comm_abort)(self.comm) };
        let _ = self.over.set(fault.clone());
        Err(fault)
    }
    fn alive(&self) -> Result<(), Fault> {
        self.over.get().map_or(Ok(()), |fault| Err(fault.clone()))
    }
    /// Its stream.
    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }
    /// Closes it. `idle`: whether all its work is done.
    pub(super) fn release(&mut self, idle: bool) {
        if let (None, Some(f)) = (self.over.get(), functions()) {
            // What is not idle now may never be; then nobody is waited for.
            let close = if idle { f.comm_destroy } else { f.comm_abort };
            // SAFETY: made in `new`, and not used after this.
            unsafe { close(self.comm) };
        }
        // SAFETY: likewise.
        unsafe {
            let _ = result::event::destroy(self.ready);
            let _ = result::event::destroy(self.done);
            let _ = result::stream::destroy(self.stream);
        }
    }
}
