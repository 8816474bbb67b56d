//! TCP between partners: one connection for both ways, made while joining by whoever has the greater rank.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{Alive, Carrier, Opening};
use crate::control::conn::sleep_on;
use crate::control::handshake::{self, Door, Miss};
use crate::control::message::{Identity, Purpose};
use crate::error::CommError;

/// Connections to the partners, by rank.
struct Tcp {
    streams: BTreeMap<usize, TcpStream>,
}

/// Connects to the partners of lower ranks, which listen at `address`, and takes in those of higher ranks at `listener`.
///
/// # Errors
/// A partner is not reached before the deadline; the run is over.
pub(crate) fn open(
    opening: &Opening,
    alive: Alive<'_>,
    listener: TcpListener,
    address: &dyn Fn(usize) -> SocketAddr,
) -> Result<Box<dyn Carrier>, CommError> {
    let mut streams = BTreeMap::new();
    let identity = Identity::own(Purpose::Data, opening.rank, opening.size)?;
    for peer in opening.partners.iter().copied().filter(|peer| *peer < opening.rank) {
        streams.insert(peer, connect(opening, alive, peer, address(peer), &identity)?);
    }
    let mut door = Door::new(listener, &opening.secret)?;
    let missing = |streams: &BTreeMap<usize, TcpStream>| {
        opening.partners.iter().copied().find(|peer| !streams.contains_key(peer))
    };
    while let Some(peer) = missing(&streams) {
        alive()?;
        if Instant::now() > opening.deadline {
            return Err(CommError::Rendezvous(format!(
                "rank {peer} on host {} did not connect to rank {} on host {}: look whether a firewall is between them, and at the setting interface",
                opening.hosts[peer], opening.rank, opening.hosts[opening.rank]
            )));
        }
        for newcomer in door.newcomers() {
            let who = newcomer.identity.clone();
            let peer = who.rank as usize;
            let fits = who.purpose == Purpose::Data
                && who.to as usize == opening.rank
                && who.size as usize == opening.size
                && opening.partners.contains(&peer)
                && peer > opening.rank
                && !streams.contains_key(&peer);
            if fits {
                streams.insert(peer, newcomer.welcome().into_stream());
            } else {
                newcomer.refuse(&format!(
                    "this is the data port of rank {}, which does not wait for rank {peer}",
                    opening.rank
                ));
            }
        }
        let mut fds = Vec::new();
        door.poll_fds(&mut fds);
        sleep_on(&mut fds, Duration::from_millis(100))?;
    }
    Ok(Box::new(Tcp { streams }))
}

fn connect(
    opening: &Opening,
    alive: Alive<'_>,
    peer: usize,
    address: SocketAddr,
    identity: &Identity,
) -> Result<TcpStream, CommError> {
    let identity = Identity { to: peer as u32, ..identity.clone() };
    let mut pause = Duration::from_millis(10);
    loop {
        alive()?;
        let why = match handshake::connect(address, &opening.secret, &identity, opening.deadline, alive) {
            Ok(conn) => return Ok(conn.into_stream()),
            Err(Miss::Later(why) | Miss::Secret(why) | Miss::Final(why)) => why,
        };
        if Instant::now() + pause > opening.deadline {
            return Err(CommError::Rendezvous(format!(
                "rank {} on host {} cannot connect to rank {peer} on host {} at {address} ({why}): look whether a firewall is between them, and at the setting interface",
                opening.rank, opening.hosts[opening.rank], opening.hosts[peer]
            )));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn lost(rank: usize, what: String) -> CommError {
    CommError::Lost { rank, host: "unknown".into(), when: String::new(), what }
}

impl Tcp {
    fn stream(&mut self, peer: usize) -> Result<&mut TcpStream, CommError> {
        self.streams
            .get_mut(&peer)
            .ok_or_else(|| CommError::Protocol(format!("rank {peer} is no partner of this rank")))
    }
}

impl Carrier for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn try_send(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, CommError> {
        let stream = self.stream(peer)?;
        loop {
            return match stream.write(bytes) {
                Ok(n) => Ok(n),
                Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(0),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => Err(lost(peer, format!("its connection broke: {e}"))),
            };
        }
    }

    fn try_recv(&mut self, peer: usize, bytes: &mut [u8]) -> Result<usize, CommError> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let stream = self.stream(peer)?;
        loop {
            return match stream.read(bytes) {
                Ok(0) => Err(lost(peer, "its connection was closed".into())),
                Ok(n) => Ok(n),
                Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(0),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => Err(lost(peer, format!("its connection broke: {e}"))),
            };
        }
    }

    fn wait(&mut self, send: &[usize], recv: &[usize], most: Duration) -> Result<(), CommError> {
        let mut wanted: BTreeMap<usize, PollFlags> = BTreeMap::new();
        for peer in send {
            *wanted.entry(*peer).or_insert(PollFlags::empty()) |= PollFlags::OUT;
        }
        for peer in recv {
            *wanted.entry(*peer).or_insert(PollFlags::empty()) |= PollFlags::IN;
        }
        let mut fds: Vec<PollFd<'_>> = wanted
            .iter()
            .filter_map(|(peer, flags)| Some(PollFd::new(self.streams.get(peer)?, *flags)))
            .collect();
        sleep_on(&mut fds, most)
    }
}
