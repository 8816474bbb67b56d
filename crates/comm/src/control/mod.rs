//! The control plane: always TCP, a star at rank 0. It brings the ranks together, notices who is lost, and tells everyone.
//!
//! A thread of its own on every rank sends a sign of life each second whatever the others compute; rank 0 alone decides
//! who is lost, so that all name the same one.

mod board;
pub(crate) mod conn;
pub(crate) mod handshake;
mod hub;
mod losses;
pub(crate) mod message;
mod pulse;
mod speaker;
mod spoke;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use board::{Board, Verdict};
use conn::{LOOK, Wake};
use message::host_name;
pub(crate) use speaker::speak_for;

use crate::carrier::Alive;
use crate::error::CommError;
use crate::place::Place;
use crate::settings::Settings;

/// What the control thread is asked to do.
enum Command {
    Put { step: u32, bytes: Vec<u8> },
    Fail(String),
    Report { rank: usize, what: String },
    Late { sequence: u64, peer: usize, what: String },
    Leave,
}

/// A queue that wakes who waits on it.
struct Commands {
    queue: Mutex<VecDeque<Command>>,
    wake: Wake,
}

impl Commands {
    fn push(&self, command: Command) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        self.wake.ring();
    }
    fn take(&self) -> VecDeque<Command> {
        self.wake.clear();
        std::mem::take(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A rank's end of the control plane.
pub(crate) struct Control {
    pub board: Arc<Board>,
    commands: Arc<Commands>,
    thread: Option<JoinHandle<()>>,
    rank: usize,
    host: String,
    /// The address of this rank's control connection here, and of rank 0 as seen from here; unspecified on rank 0.
    pub here: IpAddr,
    pub there: IpAddr,
}

impl Control {
    /// Meets the others: rank 0 listens, the others find it. Rank 0 returns at once, the others when it took them in.
    ///
    /// # Errors
    /// The port is in use; rank 0 is not found, or does not want this rank; what `alive` says.
    pub(crate) fn meet(
        place: &Place,
        settings: &Settings,
        deadline: Instant,
        alive: Alive<'_>,
    ) -> Result<Control, CommError> {
        let board = Arc::new(Board::default());
        let commands = Arc::new(Commands { queue: Mutex::default(), wake: Wake::new()? });
        let (body, here, there): (Box<dyn FnOnce() + Send>, IpAddr, IpAddr) = if place.rank == 0 {
            let hub = hub::Hub::listen(place, settings, deadline, board.clone(), commands.clone(), alive)?;
            let any = IpAddr::from([0, 0, 0, 0]);
            (Box::new(move || hub.run()), any, any)
        } else {
            let spoke =
                spoke::Spoke::find(place, settings, deadline, board.clone(), commands.clone(), alive)?;
            let (here, there) = spoke.addresses();
            (Box::new(move || spoke.run()), here, there)
        };
        let thread =
            std::thread::Builder::new()
                .name(format!("tercio-control-{}", place.rank))
                .spawn(body)
                .map_err(|source| CommError::Io { what: "starting the control thread".into(), source })?;
        Ok(Control {
            board,
            commands,
            thread: Some(thread),
            rank: place.rank,
            host: host_name(),
            here,
            there,
        })
    }

    /// All ranks' bytes, through rank 0. Only while joining: small things.
    ///
    /// # Errors
    /// The run is over; not all came before `deadline`; what `alive` says.
    pub(crate) fn exchange(
        &self,
        step: u32,
        bytes: Vec<u8>,
        deadline: Instant,
        alive: Alive<'_>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        self.commands.push(Command::Put { step, bytes });
        // Rank 0 knows who is missing: its word is waited for a little longer than the deadline.
        let last = deadline + Duration::from_secs(5);
        loop {
            if let Some(all) = self.board.await_result(step, last.min(Instant::now() + LOOK))? {
                return Ok(all);
            }
            alive()?;
            if Instant::now() >= last {
                let what = "the other ranks did not come to an end of joining in time".to_string();
                self.fail(&what);
                return Err(CommError::Rendezvous(what));
            }
        }
    }

    /// Ends the run for all ranks because this one failed; returns when they were told (two seconds at most).
    pub(crate) fn fail(&self, what: &str) {
        let update = self.board.update.load(Ordering::Relaxed);
        let own = Verdict::Failed { rank: self.rank, host: self.host.clone(), update, what: what.into() };
        self.end(own, what);
    }
    /// The same with an error of the ranks' talk that this rank saw.
    pub(crate) fn end(&self, verdict: Verdict, what: &str) {
        if self.board.end(verdict) {
            self.commands.push(Command::Fail(what.into()));
            self.board.await_told(Duration::from_secs(2));
        }
    }

    /// The connection to `rank` is gone: who is to blame? Waits for rank 0's word; without one, it was that rank.
    pub(crate) fn lost(&self, rank: usize, host: &str, what: &str) -> CommError {
        if self.board.await_verdict(Duration::from_secs(2)).is_none() {
            self.commands.push(Command::Report { rank, what: what.into() });
        }
        self.judged(rank, host, what)
    }
    /// Nothing moved in collective `sequence` between this rank and `peer`, which gives signs of life, for too long: rank 0
    /// knows who did not come to it.
    pub(crate) fn late(&self, sequence: u64, peer: usize, host: &str, what: &str) -> CommError {
        self.commands.push(Command::Late { sequence, peer, what: what.into() });
        self.judged(peer, host, what)
    }
    /// Rank 0's word; if it does not come, that `rank` was lost.
    fn judged(&self, rank: usize, host: &str, what: &str) -> CommError {
        self.board.await_verdict(Duration::from_secs(4));
        let update = self.board.update.load(Ordering::Relaxed);
        self.board.end(Verdict::Lost { rank, host: host.into(), update, what: what.into() });
        self.board.check().err().unwrap_or_else(|| CommError::Protocol("the run is over".into()))
    }
}

impl Drop for Control {
    /// Says goodbye; rank 0 waits a while for the others' so that it still hears of a loss.
    fn drop(&mut self) {
        self.commands.push(Command::Leave);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Host and port of a meeting place.
///
/// # Errors
/// When it is no `host:port`.
pub(crate) fn parse_meeting(meeting: &str) -> Result<(String, u16), CommError> {
    let wrong = || {
        CommError::Place(format!(
            "the meeting place of the ranks is {meeting:?}: expected host:port, as node1:29500 or [::1]:29500"
        ))
    };
    let (host, port) = meeting.rsplit_once(':').ok_or_else(wrong)?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let port: u16 = port.parse().map_err(|_| wrong())?;
    if host.is_empty() || port == 0 {
        return Err(wrong());
    }
    Ok((host.into(), port))
}

/// The own address that the setting `interface` names, if it is set: an address, or an interface's first one (IPv4 first).
///
/// # Errors
/// When there is no such interface or address here.
pub(crate) fn own_address(settings: &Settings) -> Result<Option<IpAddr>, CommError> {
    let Some(name) = &settings.interface else { return Ok(None) };
    let all = if_addrs::get_if_addrs()
        .map_err(|source| CommError::Io { what: "listing the network interfaces".into(), source })?;
    let usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let mut own: Vec<IpAddr> = match name.parse::<IpAddr>() {
        Ok(ip) => all.iter().map(|i| i.ip()).filter(|own| *own == ip).collect(),
        Err(_) => all.iter().filter(|i| i.name == *name).map(|i| i.ip()).filter(usable).collect(),
    };
    own.sort();
    if let Some(ip) = own.first() {
        return Ok(Some(*ip));
    }
    let mut known: Vec<String> = all.iter().map(|i| format!("{} ({})", i.name, i.ip())).collect();
    known.sort();
    known.dedup();
    Err(CommError::Place(format!(
        "the interface {name:?} is not one of this host ({}), which has {}",
        host_name(),
        known.join(", ")
    )))
}

/// Where rank 0 listens, of its own addresses; none: on all. Only an explicit loopback keeps others out: a host's own name often
/// means 127.0.1.1 on the host itself. The setting `interface` is for the data: the meeting place is where the others look.
fn own_side(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        other => other.parse().ok().filter(IpAddr::is_loopback),
    }
}

/// An address as a person writes it with its port.
fn show(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Listens on `address`, on both families where it is unspecified.
fn listen(address: Option<IpAddr>, port: u16) -> std::io::Result<std::net::TcpListener> {
    let bind = |ip: IpAddr| std::net::TcpListener::bind(SocketAddr::new(ip, port));
    match address {
        Some(ip) => bind(ip),
        // Linux takes IPv4 there too, unless it has no IPv6 at all.
        None => match bind(IpAddr::from([0u16; 8])) {
            Err(e) if e.kind() != std::io::ErrorKind::AddrInUse => bind(IpAddr::from([0, 0, 0, 0])),
            other => other,
        },
    }
}

/// A listening socket on any free port, for the data plane.
pub(crate) fn listen_anywhere(settings: &Settings) -> Result<std::net::TcpListener, CommError> {
    listen(own_address(settings)?, 0)
        .map_err(|source| CommError::Io { what: "listening for the other ranks' connections".into(), source })
}
