//! Ranks of the calling program itself, and rank 0's result back in it.

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Launch;
use crate::error::CommError;
use crate::place::{Flags, Place, Starter};

/// Variable: the pipe for rank 0's result, as a number of a file.
const RESULT: &str = "TERCIO_RESULT_FD";

static CALLED: AtomicBool = AtomicBool::new(false);

/// Runs `work` on `nproc` ranks, each a process of its own on this host, and returns what it gave on rank 0.
///
/// The processes are this program, started again with the same arguments: they come by the same way to this call, run
/// `work` there and end. So a program calls this once, and early: what comes before it, every rank does too. A process
/// that is a rank already (under torchrun, srun, mpirun or `tercio launch`) starts nothing, but runs `work` and returns
/// its own result. The result may be of any size.
///
/// ```no_run
/// use tercio_comm::launch::launch_distributed;
///
/// let result = launch_distributed(4, |place| {
///     // World::join(place, ...), then training; every rank comes here.
///     Ok::<_, std::io::Error>(format!("{} ranks", place.world_size).into_bytes())
/// })?;
/// assert_eq!(result, b"4 ranks");
/// # Ok::<(), tercio_comm::CommError>(())
/// ```
///
/// # Errors
/// As [`Launch::run`]; [`CommError::Failed`] when `work` failed on a rank, or a rank died.
pub fn launch_distributed<E: std::fmt::Display>(
    nproc: usize,
    work: impl FnOnce(Place) -> Result<Vec<u8>, E>,
) -> Result<Vec<u8>, CommError> {
    let program = std::env::current_exe()
        .map_err(|source| CommError::Io { what: "finding this program's own file".into(), source })?;
    let launch = Launch::new(program, std::env::args_os().skip(1).collect(), nproc);
    launch.distributed(work)
}

impl Launch {
    /// As [`launch_distributed`], with settings of one's own; the program must come to this very call too.
    ///
    /// # Errors
    /// As [`launch_distributed`].
    pub fn distributed<E: std::fmt::Display>(
        mut self,
        work: impl FnOnce(Place) -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, CommError> {
        if CALLED.swap(true, Ordering::SeqCst) {
            return Err(CommError::Place(
                "launch_distributed was called a second time in this program: its ranks, which are this program started \
                 again, could not tell the calls apart; do all work in one call"
                    .into(),
            ));
        }
        let place = Place::from_env(Flags::default())?;
        if place.starter != Starter::Alone {
            return in_rank(place, work);
        }
        self.wants_result = true;
        let outcome = self.run()?;
        match outcome.cause() {
            Some((rank, end)) => Err(CommError::Failed {
                rank,
                host: "this host".into(),
                when: "in launch_distributed".into(),
                what: end.to_string(),
            }),
            None => Ok(outcome.result),
        }
    }
}

/// The two ends of a pipe for a rank's result: read, write.
pub(super) fn pipe(command: &mut Command, main: bool) -> Result<(OwnedFd, OwnedFd), CommError> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| CommError::Io { what: "making a pipe".into(), source: e.into() })?;
    let fd = write.as_raw_fd();
    command.env(RESULT, fd.to_string());
    if main {
        let keep = move || {
            // SAFETY: the parent holds this file open until the child runs its program.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            Ok(rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?)
        };
        // SAFETY: between fork and exec only one system call is made.
        unsafe { command.pre_exec(keep) };
    }
    Ok((read, write))
}

/// Runs the work of a rank; one that [`Launch::distributed`] started ends here.
fn in_rank<E: std::fmt::Display>(
    place: Place,
    work: impl FnOnce(Place) -> Result<Vec<u8>, E>,
) -> Result<Vec<u8>, CommError> {
    let rank = place.rank;
    let fd = std::env::var(RESULT).ok().and_then(|fd| fd.parse::<RawFd>().ok());
    let pipe = match fd {
        // SAFETY: the parent left this file open for this process, which comes here once.
        Some(fd) if rank == 0 => Some(std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) })),
        _ => None,
    };
    if let Some(pipe) = &pipe {
        // What the work starts should not keep the parent waiting.
        let _ = rustix::io::fcntl_setfd(pipe, rustix::io::FdFlags::CLOEXEC);
    }
    let done = work(place).map_err(|e| e.to_string());
    if fd.is_none() {
        return done.map_err(|what| CommError::Failed {
            rank,
            host: "this host".into(),
            when: "in its work".into(),
            what,
        });
    }
    let sent = done.and_then(|bytes| match pipe {
        Some(mut pipe) => pipe.write_all(&bytes).map_err(|e| format!("handing over the result: {e}")),
        None => Ok(()),
    });
    match sent {
        Ok(()) => std::process::exit(0),
        Err(what) => {
            eprintln!("rank {rank}: {what}");
            std::process::exit(1)
        }
    }
}
