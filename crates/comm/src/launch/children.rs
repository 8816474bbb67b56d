//! The processes of one start: made, watched, signalled and reaped; none stays when they are dropped.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::{EXIT_INTERRUPTED, EXIT_LOST, EXIT_SAVED, Launch, Outcome, output};
use crate::control::speak_for;
use crate::error::CommError;
use crate::place::{
    LOCAL_RANK, LOCAL_SIZE, MEETING, Place, RANK, RESTART_COUNT, SECRET, Starter, WORLD_SIZE,
};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With an exit code.
    Code(u8),
    /// By a signal.
    Signal(i32),
}

impl End {
    /// As a shell counts: the exit code, or 128 and the signal's number.
    pub fn code(self) -> u8 {
        match self {
            End::Code(code) => code,
            End::Signal(signal) => 128u8.saturating_add(signal.clamp(0, 127) as u8),
        }
    }

    /// Whether the process neither did its work nor ended on request.
    pub(super) fn failed(self) -> bool {
        !matches!(self, End::Code(0 | EXIT_SAVED | EXIT_INTERRUPTED))
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            End::Code(EXIT_LOST) => write!(f, "exit code {EXIT_LOST}: another rank was lost or failed"),
            End::Code(EXIT_SAVED) => write!(f, "exit code {EXIT_SAVED}: saved after a signal"),
            End::Code(code) => write!(f, "exit code {code}"),
            End::Signal(signal) => match signal_hook::low_level::signal_name(signal) {
                Some(name) => write!(f, "killed by {name}"),
                None => write!(f, "killed by signal {signal}"),
            },
        }
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> End {
        match (status.code(), status.signal()) {
            (Some(code), _) => End::Code(code as u8),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => End::Code(1),
        }
    }
}

const PASSED_ON: [i32; 5] = [SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP];

/// This process's signals while it launches.
pub(super) struct Signals {
    queue: Mutex<Receiver<i32>>,
    ending: Arc<AtomicBool>,
    handle: signal_hook::iterator::Handle,
}

impl Signals {
    pub fn watch() -> Result<Signals, CommError> {
        let mut watched = signal_hook::iterator::Signals::new(PASSED_ON)
            .map_err(|source| CommError::Io { what: "watching signals".into(), source })?;
        let handle = watched.handle();
        let (send, queue) = channel();
        let ending = Arc::new(AtomicBool::new(false));
        let seen = ending.clone();
        thread(move || {
            for signal in watched.forever() {
                seen.fetch_or(matches!(signal, SIGTERM | SIGINT | SIGHUP), Ordering::SeqCst);
                if send.send(signal).is_err() {
                    return;
                }
            }
        })?;
        Ok(Signals { queue: Mutex::new(queue), ending, handle })
    }

    /// Whether somebody wants this process to end.
    pub fn asked_to_end(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    fn next(&self) -> Option<i32> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).try_recv().ok()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handle.close();
    }
}

/// One child; its process id is only used under the lock while it is not reaped, so no other process is ever hit.
struct Running {
    rank: usize,
    pid: Pid,
    /// Taken when it was reaped.
    child: Mutex<Option<Child>>,
}

impl Running {
    /// Signals the process; with `group` all processes of its group.
    fn signal(&self, signal: Signal, group: bool) {
        if self.child.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            // It may have ended in this moment.
            let _ = if group { kill_process_group(self.pid, signal) } else { kill_process(self.pid, signal) };
        }
    }

    /// Waits for its end, and takes with it what is left of its group.
    fn reap(&self) -> End {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while matches!(waitid(WaitId::Pid(self.pid), options), Err(rustix::io::Errno::INTR)) {}
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut ended) = child.take() else { return End::Code(1) };
        // Its number is not given to another process before it is reaped.
        let _ = kill_process_group(self.pid, Signal::KILL);
        ended.wait().map_or(End::Code(1), End::from)
    }
}

/// All children; those that are left are killed when this is dropped.
struct Crowd(Vec<Arc<Running>>);

impl Crowd {
    fn signal(&self, signal: Signal, group: bool) {
        self.0.iter().for_each(|c| c.signal(signal, group));
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.signal(Signal::KILL, true);
        // Their own threads reap them.
        let gone = |c: &Arc<Running>| c.child.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        let start = Instant::now();
        while !self.0.iter().all(gone) && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

enum Event {
    Ended(usize, End),
    Drained,
}

/// What is read while the processes run.
struct Streams {
    events: Sender<Event>,
    open: usize,
    stdout: Arc<Mutex<Vec<u8>>>,
    result: Arc<Mutex<Vec<u8>>>,
}

impl Streams {
    /// Collects what comes, so that a writer never waits for a reader.
    fn collect(
        &mut self,
        from: impl Read + Send + 'static,
        to: Arc<Mutex<Vec<u8>>>,
    ) -> Result<(), CommError> {
        self.open += 1;
        let events = self.events.clone();
        thread(move || {
            output::collect(from, &to);
            let _ = events.send(Event::Drained);
        })
    }

    fn prefix(&mut self, from: impl Read + Send + 'static, rank: usize) -> Result<(), CommError> {
        self.open += 1;
        let events = self.events.clone();
        thread(move || {
            let prefix = if rank == 0 { String::new() } else { format!("[rank {rank}] ") };
            output::prefix_lines(from, &prefix, &mut std::io::stderr());
            let _ = events.send(Event::Drained);
        })
    }
}

fn thread(work: impl FnOnce() + Send + 'static) -> Result<(), CommError> {
    let started = std::thread::Builder::new().spawn(work);
    started.map(|_| ()).map_err(|source| CommError::Io { what: "starting a thread".into(), source })
}

fn take(bytes: &Mutex<Vec<u8>>) -> Vec<u8> {
    std::mem::take(&mut bytes.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Starts all processes of this host and waits until they have ended.
pub(super) fn run(
    launch: &Launch,
    meeting: &str,
    secret: &str,
    restarts: u32,
    signals: &Signals,
) -> Result<Outcome, CommError> {
    let (send, events) = channel();
    let (stdout, result) = Default::default();
    let mut streams = Streams { events: send.clone(), open: 0, stdout, result };
    let mut crowd = Crowd(Vec::new());
    for local_rank in 0..launch.nproc_per_node {
        let running = Arc::new(start(launch, local_rank, meeting, secret, restarts, &mut streams)?);
        let (send, reaped) = (send.clone(), running.clone());
        let watched = thread(move || {
            let end = reaped.reap();
            let _ = send.send(Event::Ended(reaped.rank, end));
        });
        if let Err(error) = watched {
            running.signal(Signal::KILL, true);
            running.reap();
            return Err(error);
        }
        crowd.0.push(running);
    }
    let place = |rank| place_of(launch, rank, meeting, secret);
    let mut outcome = watch(launch, &crowd, signals, &events, streams.open, &place);
    outcome.stdout = take(&streams.stdout);
    outcome.result = take(&streams.result);
    Ok(outcome)
}

fn watch(
    launch: &Launch,
    crowd: &Crowd,
    signals: &Signals,
    events: &Receiver<Event>,
    streams: usize,
    place: &dyn Fn(usize) -> Place,
) -> Outcome {
    let mut speakers: Vec<Speaker> = Vec::new();
    let mut outcome = Outcome::default();
    let mut open = streams;
    let (mut first_failure, mut asked, mut killed) = (None::<Instant>, false, false);
    let mut all_ended = None::<Instant>;
    // A process that left its group may hold a stream open; what it says then is nobody's any more.
    while outcome.ends.len() < crowd.0.len()
        || (open > 0 && all_ended.is_some_and(|at| at.elapsed() < Duration::from_secs(2)))
    {
        match events.recv_timeout(Duration::from_millis(50)) {
            Ok(Event::Ended(rank, end)) => {
                outcome.ends.push((rank, end));
                if end.failed() {
                    tracing::error!("rank {rank} ended: {end}");
                    first_failure.get_or_insert_with(Instant::now);
                    // Rank 0 itself knows of those that it has lost; who still looks for it does not know of its end.
                    let news = rank == 0 || end != End::Code(EXIT_LOST);
                    if news && speakers.iter().all(|s| s.for_main != (rank == 0)) && !signals.asked_to_end() {
                        speakers.extend(Speaker::start(place(rank), end, launch.patience));
                    }
                }
                if outcome.ends.len() == crowd.0.len() {
                    all_ended = Some(Instant::now());
                }
            }
            Ok(Event::Drained) => open -= 1,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        while let Some(signal) = signals.next() {
            if let Some(signal) = Signal::from_named_raw(signal) {
                crowd.signal(signal, false);
            }
        }
        let since = first_failure.map_or(Duration::ZERO, |at| at.elapsed());
        if since > launch.patience && !asked && all_ended.is_none() {
            asked = true;
            tracing::warn!("the other ranks did not end by themselves; asking them to (SIGTERM)");
            crowd.signal(Signal::TERM, false);
        }
        if since > launch.patience.saturating_add(launch.grace) && !killed && all_ended.is_none() {
            killed = true;
            tracing::warn!("killing the ranks that are left (SIGKILL)");
            crowd.signal(Signal::KILL, true);
        }
    }
    // Ranks of other hosts may still look for the one that ended, unless one of this host has heard of it.
    let known = outcome.ends.iter().any(|(_, end)| *end == End::Code(EXIT_LOST));
    speakers.into_iter().for_each(|speaker| speaker.end(launch.nnodes > 1 && !known));
    outcome.code = outcome.cause().map_or_else(
        || outcome.ends.iter().map(|(_, end)| end.code()).max().unwrap_or(0),
        |(_, end)| end.code(),
    );
    outcome
}

/// Tells the ranks that are elsewhere, or still look for each other, of one that ended ([`speak_for`]).
struct Speaker {
    for_main: bool,
    over: Arc<AtomicBool>,
    patience: Duration,
    done: Receiver<()>,
}

impl Speaker {
    /// `None` where there is nobody to tell.
    fn start(place: Place, end: End, patience: Duration) -> Option<Speaker> {
        if place.world_size == 1 {
            return None;
        }
        let for_main = place.rank == 0;
        let over = Arc::new(AtomicBool::new(false));
        let (send, done) = channel();
        let (stop, until) = (over.clone(), Instant::now() + patience);
        let started = thread(move || {
            speak_for(&place, &end.to_string(), &|| stop.load(Ordering::SeqCst) || Instant::now() > until);
            let _ = send.send(());
        });
        started.is_ok().then_some(Speaker { for_main, over, patience, done })
    }

    /// Ends it; `stay`: not before it has said its word, or its time is up.
    fn end(self, stay: bool) {
        if stay {
            let _ = self.done.recv_timeout(self.patience);
        }
        self.over.store(true, Ordering::SeqCst);
        // It holds rank 0's port, which the next start needs.
        let _ = self.done.recv_timeout(Duration::from_secs(1));
    }
}

/// Where a rank of this host stands.
fn place_of(launch: &Launch, rank: usize, meeting: &str, secret: &str) -> Place {
    Place {
        rank,
        world_size: launch.nnodes * launch.nproc_per_node,
        local_rank: rank % launch.nproc_per_node,
        local_size: launch.nproc_per_node,
        meeting: meeting.into(),
        secret: secret.into(),
        starter: Starter::Launch,
    }
}

/// Starts one process.
fn start(
    launch: &Launch,
    local_rank: usize,
    meeting: &str,
    secret: &str,
    restarts: u32,
    streams: &mut Streams,
) -> Result<Running, CommError> {
    let rank = launch.node_rank * launch.nproc_per_node + local_rank;
    let place = place_of(launch, rank, meeting, secret);
    let main = rank == 0;
    let mut command = Command::new(&launch.program);
    command
        .args(&launch.args)
        .env(RANK, rank.to_string())
        .env(WORLD_SIZE, place.world_size.to_string())
        .env(LOCAL_RANK, place.local_rank.to_string())
        .env(LOCAL_SIZE, place.local_size.to_string())
        .env(MEETING, &place.meeting)
        .env(SECRET, &place.secret)
        .env(RESTART_COUNT, restarts.to_string())
        .process_group(0)
        // A terminal would stop a process of another group that reads from it.
        .stdin(match main && !std::io::IsTerminal::is_terminal(&std::io::stdin()) {
            true => Stdio::inherit(),
            false => Stdio::null(),
        })
        .stdout(match (main, launch.capture) {
            (true, true) => Stdio::piped(),
            (true, false) => Stdio::inherit(),
            (false, _) => Stdio::null(),
        })
        // A terminal's progress bars are rank 0's own; elsewhere whole lines keep those of the ranks apart.
        .stderr(match main && std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            true => Stdio::inherit(),
            false => Stdio::piped(),
        });
    die_with_parent(&mut command);
    let pipe = match launch.wants_result {
        true => Some(super::distributed::pipe(&mut command, main)?),
        false => None,
    };
    let mut child = command.spawn().map_err(|source| CommError::Io {
        what: format!("starting rank {rank}, {}", launch.program.display()),
        source,
    })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let running = Running { rank, pid: Pid::from_child(&child), child: Mutex::new(Some(child)) };
    let read = || {
        if let Some(pipe) = pipe {
            // The writing end is closed here, so that the end of the rank is the end of its result.
            streams.collect(std::fs::File::from(pipe.0), streams.result.clone())?;
        }
        if let Some(stdout) = stdout {
            streams.collect(stdout, streams.stdout.clone())?;
        }
        stderr.map_or(Ok(()), |stderr| streams.prefix(stderr, rank))
    };
    read().inspect_err(|_| {
        running.signal(Signal::KILL, true);
        running.reap();
    })?;
    Ok(running)
}

/// Lets a child be killed when this process dies, however that happens.
#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have died before the wish was known.
        match rustix::process::getppid() == Some(parent) {
            true => Ok(()),
            false => Err(std::io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error())),
        }
    };
    // SAFETY: between fork and exec only two system calls are made; nothing is allocated and no lock is taken.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_command: &mut Command) {}
