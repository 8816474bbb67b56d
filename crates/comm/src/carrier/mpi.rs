//! Bytes through MPI's point-to-point messages: for networks that only an MPI library drives well.
//!
//! Moves bytes only; no sum and no collective of MPI is used, so results do not depend on the library. Works with Open MPI and
//! MPICH, whichever `mpicc` (or `MPICC`) names when it is built. One open carrier per process: MPI starts and ends once.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::ffi;
use mpi::{Rank, Threading};

use super::{Carrier, Opening};
use crate::error::CommError;

/// Bytes of one message at most: large enough for an MPI library to reach its speed.
const PIECE: usize = 256 << 10;
/// Messages on their way to one peer at most, and as many from it.
const MESSAGES: usize = 4;
/// The only tag; the communicator is our own.
const TAG: i32 = 0;
/// How long a rank looks without a pause before it sleeps between looks: MPI has no waiting with a time limit.
const SPIN: Duration = Duration::from_micros(50);
/// Longest sleep between two looks.
const NAP: Duration = Duration::from_micros(200);
/// How long the end waits for the other ranks' end.
const FAREWELL: Duration = Duration::from_secs(60);

/// A buffer in MPI's hands until its request is done; `len` is what of it counts.
struct Message {
    request: ffi::MPI_Request,
    bytes: Box<[u8]>,
    len: usize,
}

/// What is on its way to and from one rank.
#[derive(Default)]
struct Peer {
    sends: VecDeque<Message>,
    /// In the order in which they were matched, which is the order in which they were sent.
    receives: VecDeque<Message>,
    /// Bytes of the first of `receives` that the caller has.
    taken: usize,
    /// Buffers that are not in use.
    spare: Vec<Box<[u8]>>,
}

struct Mpi {
    comm: ffi::MPI_Comm,
    peers: Vec<Peer>,
    abandoned: bool,
    /// Ends MPI when it is dropped.
    universe: Option<Universe>,
}

// SAFETY: MPI is started with at least `MPI_THREAD_SERIALIZED`: any thread may call it, one at a time. `&mut self` of the only
// carrier of the process sees to the latter; requests are plain handles.
unsafe impl Send for Mpi {}

/// The carrier through MPI. MPI's numbers of ranks must be those of the run.
///
/// # Errors
/// MPI was started before in this process; it cannot be called from several threads; it knows another number of ranks, or
/// this one by another number.
pub fn open(opening: &Opening) -> Result<Box<dyn Carrier>, CommError> {
    if opening.size > 1 && only_slurm(&|name| std::env::var_os(name).is_some()) {
        return Err(CommError::Rendezvous(format!("srun did not tell MPI of the ranks: {SRUN}")));
    }
    let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
        .ok_or_else(|| CommError::Rendezvous("MPI was already started in this process".into()))?;
    let peers = (0..opening.size).map(|_| Peer::default()).collect();
    // SAFETY: a constant of the library.
    let world = unsafe { ffi::RSMPI_COMM_WORLD };
    let mut carrier = Mpi { comm: world, peers, abandoned: true, universe: Some(universe) };
    if threading < Threading::Serialized {
        return Err(CommError::Rendezvous(format!(
            "this MPI library offers {threading:?} where calls from any thread are needed (MPI_THREAD_SERIALIZED)"
        )));
    }
    let (mut size, mut rank) = (0, 0);
    // SAFETY: MPI is started; the results are plain numbers.
    check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(world, &mut size) })?;
    // SAFETY: as above.
    check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(world, &mut rank) })?;
    if size as usize != opening.size || rank as usize != opening.rank {
        let advice = match size {
            1 => format!("; MPI was not told of the others: start them by mpirun; under Slurm {SRUN}"),
            _ => ": one launcher should number both".into(),
        };
        return Err(CommError::Rendezvous(format!(
            "MPI counts rank {rank} of {size}, but this is rank {} of {}{advice}",
            opening.rank, opening.size
        )));
    }
    // A communicator of our own, whose errors come back; the world's end the process.
    // SAFETY: all ranks of the world are in this call: each opens its carrier now.
    check("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(world, &mut carrier.comm) })?;
    // SAFETY: a communicator and a constant of the library.
    check("MPI_Comm_set_errhandler", unsafe {
        ffi::MPI_Comm_set_errhandler(carrier.comm, ffi::RSMPI_ERRORS_RETURN)
    })?;
    carrier.abandoned = false;
    Ok(Box::new(carrier))
}

/// What to do when Slurm started the ranks.
const SRUN: &str =
    "start them by srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH), or choose --backend tcp";

/// Whether srun started this process and set nothing that an MPI library reads: Open MPI would end the process.
fn only_slurm(has: &dyn Fn(&str) -> bool) -> bool {
    has("SLURM_PROCID") && !["PMIX_RANK", "PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK"].into_iter().any(has)
}

/// An MPI function's answer.
fn check(what: &str, code: i32) -> Result<(), CommError> {
    if code == ffi::MPI_SUCCESS as i32 {
        return Ok(());
    }
    let mut text = [0u8; 1024]; // MPI_MAX_ERROR_STRING is 256 with Open MPI, 512 with MPICH
    let mut len = 0;
    // SAFETY: the buffer is longer than any library's message.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = String::from_utf8_lossy(&text[..(len.max(0) as usize).min(text.len())]).into_owned();
    Err(CommError::Io { what: what.into(), source: std::io::Error::other(text) })
}

/// Whether a request is done.
fn done(request: &mut ffi::MPI_Request) -> Result<bool, CommError> {
    let mut flag = 0;
    // SAFETY: a request of this process; its buffer lives in the same `Message`.
    check("MPI_Test", unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
    Ok(flag != 0)
}

impl Peer {
    fn buffer(&mut self) -> Box<[u8]> {
        self.spare.pop().unwrap_or_else(|| vec![0; PIECE].into_boxed_slice())
    }

    /// Takes back the buffers of messages that went.
    fn reap(&mut self) -> Result<(), CommError> {
        while let Some(first) = self.sends.front_mut() {
            if !done(&mut first.request)? {
                break;
            }
            if let Some(message) = self.sends.pop_front() {
                self.spare.push(message.bytes);
            }
        }
        Ok(())
    }

    /// Matches messages that are there, and says whether the first one's bytes came.
    fn arrived(&mut self, comm: ffi::MPI_Comm, rank: usize) -> Result<bool, CommError> {
        while self.receives.len() < MESSAGES {
            let (mut flag, mut len) = (0, 0);
            // SAFETY: constants of the library and places for its answers; the status is read only when it was written.
            let message = unsafe {
                let mut message = ffi::RSMPI_MESSAGE_NULL;
                let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
                let code =
                    ffi::MPI_Improbe(rank as Rank, TAG, comm, &mut flag, &mut message, status.as_mut_ptr());
                check("MPI_Improbe", code)?;
                if flag != 0 {
                    let code = ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut len);
                    check("MPI_Get_count", code)?;
                }
                message
            };
            if flag == 0 {
                break;
            }
            let len = usize::try_from(len).ok().filter(|len| (1..=PIECE).contains(len)).ok_or_else(|| {
                CommError::Protocol(format!(
                    "rank {rank} sent an MPI message of {len} bytes, expected 1 to {PIECE}"
                ))
            })?;
            let mut bytes = self.buffer();
            // SAFETY: a constant of the library.
            let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
            let mut message = message;
            // SAFETY: the buffer holds `len` bytes and stays in place (boxed, in `receives`) until the request is done.
            check("MPI_Imrecv", unsafe {
                let at = bytes.as_mut_ptr().cast();
                ffi::MPI_Imrecv(at, len as i32, ffi::RSMPI_UINT8_T, &mut message, &mut request)
            })?;
            self.receives.push_back(Message { request, bytes, len });
        }
        match self.receives.front_mut() {
            Some(first) => done(&mut first.request), // a request that is done stays so
            None => Ok(false),
        }
    }
}

impl Mpi {
    fn something(&mut self, send: &[usize], recv: &[usize]) -> Result<bool, CommError> {
        for peer in send {
            self.peers[*peer].reap()?;
            if self.peers[*peer].sends.len() < MESSAGES {
                return Ok(true);
            }
        }
        for peer in recv {
            if self.peers[*peer].arrived(self.comm, *peer)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until all that was sent went and all ranks say the same; whether that came in time.
    fn farewell(&mut self) -> Result<bool, CommError> {
        let until = Instant::now() + FAREWELL;
        // SAFETY: a constant of the library.
        let mut barrier = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the communicator is ours.
        check("MPI_Ibarrier", unsafe { ffi::MPI_Ibarrier(self.comm, &mut barrier) })?;
        loop {
            let mut went = done(&mut barrier)?;
            for peer in &mut self.peers {
                peer.reap()?;
                went &= peer.sends.is_empty();
            }
            if went || Instant::now() >= until {
                return Ok(went);
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Carrier for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn try_send(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, CommError> {
        let state = &mut self.peers[peer];
        state.reap()?;
        let mut sent = 0;
        while sent < bytes.len() && state.sends.len() < MESSAGES {
            let len = PIECE.min(bytes.len() - sent);
            let mut buffer = state.buffer();
            buffer[..len].copy_from_slice(&bytes[sent..sent + len]);
            // SAFETY: a constant of the library.
            let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
            // SAFETY: the buffer holds `len` bytes and stays in place (boxed, in `sends`) until the request is done.
            check("MPI_Isend", unsafe {
                let at = buffer.as_ptr().cast();
                ffi::MPI_Isend(at, len as i32, ffi::RSMPI_UINT8_T, peer as Rank, TAG, self.comm, &mut request)
            })?;
            state.sends.push_back(Message { request, bytes: buffer, len });
            sent += len;
        }
        Ok(sent)
    }

    fn try_recv(&mut self, peer: usize, bytes: &mut [u8]) -> Result<usize, CommError> {
        let comm = self.comm;
        let state = &mut self.peers[peer];
        let mut got = 0;
        while got < bytes.len() && state.arrived(comm, peer)? {
            let Some(first) = state.receives.front() else { break };
            let count = (first.len - state.taken).min(bytes.len() - got);
            bytes[got..got + count].copy_from_slice(&first.bytes[state.taken..state.taken + count]);
            got += count;
            state.taken += count;
            if state.taken == first.len {
                state.taken = 0;
                if let Some(message) = state.receives.pop_front() {
                    state.spare.push(message.bytes);
                }
            }
        }
        Ok(got)
    }

    fn wait(&mut self, send: &[usize], recv: &[usize], most: Duration) -> Result<(), CommError> {
        let start = Instant::now();
        let mut nap = Duration::from_micros(5);
        loop {
            if self.something(send, recv)? || start.elapsed() >= most {
                return Ok(());
            }
            if start.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (nap * 2).min(NAP);
            }
        }
    }

    fn abandon(&mut self) {
        self.abandoned = true;
    }
}

impl Drop for Mpi {
    /// Ends MPI in step with the others; without them (after an error) not at all, since its end would wait for them.
    fn drop(&mut self) {
        let together = !self.abandoned && !std::thread::panicking() && self.farewell().unwrap_or(false);
        if !together {
            // MPI may still write to buffers of messages that did not come.
            std::mem::forget((self.universe.take(), std::mem::take(&mut self.peers)));
        } else {
            // SAFETY: our own communicator, without messages on their way.
            unsafe { ffi::MPI_Comm_free(&mut self.comm) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn srun_without_a_word_to_mpi_is_seen_before_mpi_starts() {
        let given = |names: &'static [&str]| move |name: &str| names.contains(&name);
        assert!(only_slurm(&given(&["SLURM_PROCID"])));
        assert!(!only_slurm(&given(&["SLURM_PROCID", "PMIX_RANK"])));
        assert!(!only_slurm(&given(&["SLURM_PROCID", "PMI_RANK"])));
        assert!(!only_slurm(&given(&["OMPI_COMM_WORLD_RANK"])));
        assert!(!only_slurm(&given(&[])));
    }
}
