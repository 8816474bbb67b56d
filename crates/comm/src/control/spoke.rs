//! Every other rank's side of the control plane: finds rank 0, and hears from it who was lost.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::board::{Board, Verdict};
use super::conn::{Conn, sleep_or_rest};
use super::handshake::{self, Miss};
use super::message::{Identity, Message, Purpose};
use super::pulse::Pulse;
use super::{Command, Commands, parse_meeting, show};
use crate::carrier::Alive;
use crate::error::CommError;
use crate::place::Place;
use crate::settings::Settings;

/// How long a run with another secret at the meeting place is put up with: an older attempt may be ending.
const SECRET_PATIENCE: Duration = Duration::from_secs(10);

/// One rank of the control plane.
pub(super) struct Spoke {
    board: Arc<Board>,
    commands: Arc<Commands>,
    conn: Conn,
    rank: usize,
    settings: Settings,
    /// Rank 0 ended well.
    alone: bool,
    leaving: Option<Instant>,
}

impl Spoke {
    /// Looks for rank 0 until it is there.
    pub(super) fn find(
        place: &Place,
        settings: &Settings,
        deadline: Instant,
        board: Arc<Board>,
        commands: Arc<Commands>,
        alive: Alive<'_>,
    ) -> Result<Spoke, CommError> {
        let (host, port) = parse_meeting(&place.meeting)?;
        let meeting = show(&host, port);
        let identity = Identity::own(Purpose::Control, place.rank, place.world_size)?;
        let since = Instant::now();
        let mut other_secret: Option<Instant> = None;
        let mut pause = Duration::from_millis(20);
        let mut next_word = since + Duration::from_secs(20);
        loop {
            alive()?;
            let miss = match attempt(&host, port, &place.secret, &identity, deadline, alive) {
                Ok(conn) => {
                    return Ok(Spoke {
                        board,
                        commands,
                        conn,
                        rank: place.rank,
                        settings: settings.clone(),
                        alone: false,
                        leaving: None,
                    });
                }
                Err(miss) => miss,
            };
            let why = match miss {
                Miss::Final(why) => {
                    return Err(CommError::Rendezvous(format!(
                        "rank 0 at {meeting} refused rank {}: {why}",
                        place.rank
                    )));
                }
                Miss::Secret(why) => {
                    let first = *other_secret.get_or_insert_with(Instant::now);
                    if first.elapsed() > SECRET_PATIENCE || Instant::now() > deadline {
                        return Err(CommError::Rendezvous(format!(
                            "rank {} was refused at {meeting}: {why}; either another run has that port (choose another one), or the secrets differ (give all ranks the same TERCIO_SECRET)",
                            place.rank
                        )));
                    }
                    why
                }
                Miss::Later(why) => {
                    other_secret = None;
                    why
                }
            };
            if Instant::now() + pause > deadline {
                return Err(CommError::Rendezvous(format!(
                    "rank {} did not find rank 0 at {meeting} within {} s ({why}): look whether rank 0 was started, whether the name is right, and whether a firewall is between",
                    place.rank,
                    settings.join_timeout.as_secs_f64()
                )));
            }
            if Instant::now() > next_word {
                next_word = Instant::now() + Duration::from_secs(60);
                tracing::warn!("rank {} still looks for rank 0 at {meeting}: {why}", place.rank);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// The connection's address here, and rank 0's.
    pub(super) fn addresses(&self) -> (IpAddr, IpAddr) {
        let ip = |address: std::io::Result<SocketAddr>| {
            // An IPv4 address on a socket of both families is one of IPv4.
            address.map_or(IpAddr::from([0, 0, 0, 0]), |a| a.ip().to_canonical())
        };
        (ip(self.conn.stream().local_addr()), ip(self.conn.stream().peer_addr()))
    }

    /// The control thread.
    pub(super) fn run(mut self) {
        let mut pulse = Pulse::new(&self.settings);
        loop {
            let mut fds = vec![self.commands.wake.poll_fd()];
            if self.conn.ended.is_none() {
                fds.push(self.conn.poll_fd());
            }
            sleep_or_rest(&mut fds, pulse.left());
            let still = pulse.stood_still();
            self.hear();
            if still.is_some() {
                self.conn.heard = Instant::now();
            }
            for command in self.commands.take() {
                self.obey(command);
            }
            self.look_for_lost();
            if pulse.is_due() {
                let beat = self.board.beat();
                self.send(&beat);
            }
            self.conn.flush();
            if let Some(since) = self.leaving
                && (self.conn.flushed() || since.elapsed() > Duration::from_secs(1))
            {
                return;
            }
        }
    }

    fn send(&mut self, message: &Message) {
        if self.conn.ended.is_none() {
            self.conn.send(message);
        }
    }

    fn hear(&mut self) {
        if self.conn.ended.is_some() {
            return;
        }
        for message in self.conn.receive() {
            match message {
                Message::Beat { .. } => {}
                Message::Result { step, all } => self.board.put_result(step, all),
                Message::Verdict { failed, rank, host, update, what } => {
                    self.board.end(Verdict::from_message(self.rank, failed, rank, host, update, what));
                    self.send(&Message::Ack);
                    self.board.tell();
                }
                Message::Ack => self.board.tell(),
                Message::Bye { rank } => {
                    self.alone |= rank == 0;
                    self.board.leave(rank as usize);
                }
                other => tracing::debug!("rank 0 sent {other:?} at a wrong time"),
            }
        }
        if let Some(what) = self.conn.ended.clone() {
            if !self.alone {
                self.lost(what);
            }
            self.board.tell();
        }
    }

    fn look_for_lost(&mut self) {
        let limit = self.settings.lost_after;
        if self.conn.ended.is_none() && !self.alone && self.conn.heard.elapsed() > limit {
            let verdict = self.lost(format!("no sign of life for {} s", limit.as_secs_f64()));
            // For when it wakes up.
            self.conn.send(&verdict.message(self.rank, "", 0));
            self.conn.ended = Some("it was given up".into());
            self.board.tell();
        }
    }

    fn lost(&mut self, what: String) -> Verdict {
        let update = self.board.update.load(Ordering::Relaxed);
        let host = self.board.host_of_main();
        let verdict = Verdict::Lost { rank: 0, host, update, what };
        self.board.end(verdict.clone());
        verdict
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Put { step, bytes } => self.send(&Message::Put { step, bytes }),
            Command::Fail(what) => self.send(&Message::Fail { what }),
            Command::Report { rank, what } => self.send(&Message::Report { rank: rank as u32, what }),
            Command::Late { sequence, peer, what } => {
                // The latest of all, so that this rank does not count as behind.
                let beat = self.board.beat();
                self.send(&beat);
                self.send(&Message::Late { sequence, peer: peer as u32, what });
            }
            Command::Leave => {
                self.leaving = Some(Instant::now());
                if self.board.verdict().is_none() {
                    self.send(&Message::Bye { rank: self.rank as u32 });
                }
            }
        }
        if self.conn.ended.is_some() {
            self.board.tell();
        }
    }
}

pub(super) fn attempt(
    host: &str,
    port: u16,
    secret: &str,
    identity: &Identity,
    deadline: Instant,
    alive: Alive<'_>,
) -> Result<Conn, Miss> {
    // Looked up each time: a name may get known late.
    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|e| Miss::Later(format!("the name {host} is not known here: {e}")))?;
    let mut last = Miss::Later(format!("the name {host} has no address"));
    for address in addresses {
        match handshake::connect(address, secret, identity, deadline, alive) {
            Err(Miss::Later(why)) => last = Miss::Later(why),
            other => return other,
        }
    }
    Err(last)
}
