//! Rank 0's side of the control plane: takes the ranks in, hears them all, and says who was lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::board::{Board, Verdict};
use super::conn::{Conn, LOOK, sleep_or_rest};
use super::handshake::{Door, Newcomer};
use super::message::{Identity, Message, Purpose, host_name};
use super::pulse::Pulse;
use super::{Command, Commands, listen, own_side, parse_meeting, show};
use crate::carrier::Alive;
use crate::error::CommError;
use crate::place::Place;
use crate::settings::Settings;

/// How long a port that is in use is waited for: an older attempt of the same run may be ending.
const PORT_PATIENCE: Duration = Duration::from_secs(5);
/// How long rank 0 waits at its end for the others' goodbyes, and for their word that they know of a verdict.
const FAREWELL: Duration = Duration::from_secs(10);
const TOLD: Duration = Duration::from_secs(2);

pub(super) struct Peer {
    pub(super) conn: Conn,
    pub(super) host: String,
    pid: u32,
    pub(super) update: u64,
    pub(super) sequence: u64,
    pub(super) left: bool,
    /// Knows the verdict, or is gone.
    told: bool,
}

/// Rank 0 of the control plane.
pub(super) struct Hub {
    pub(super) board: Arc<Board>,
    commands: Arc<Commands>,
    door: Door,
    pub(super) meeting: String,
    pub(super) host: String,
    pub(super) size: usize,
    pub(super) settings: Settings,
    pub(super) deadline: Instant,
    /// By rank; none for rank 0, and for those who are not here yet.
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) puts: BTreeMap<u32, Vec<Option<Vec<u8>>>>,
    pub(super) verdict: Option<Verdict>,
    told_at: Option<Instant>,
    leaving: Option<Instant>,
    /// Who waited too long, in which collective, for whom; judged when the signs of life since then are here.
    pub(super) late: Option<(Instant, u64, usize, String)>,
    /// When this process was last seen to have stood still, and for how long.
    pub(super) stood: Option<(Instant, Duration)>,
}

impl Hub {
    /// Takes the meeting port.
    pub(super) fn listen(
        place: &Place,
        settings: &Settings,
        deadline: Instant,
        board: Arc<Board>,
        commands: Arc<Commands>,
        alive: Alive<'_>,
    ) -> Result<Hub, CommError> {
        let (host, port) = parse_meeting(&place.meeting)?;
        let since = Instant::now();
        let listener = loop {
            match listen(own_side(&host), port) {
                Ok(listener) => break listener,
                Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => {
                    if since.elapsed() < PORT_PATIENCE && Instant::now() < deadline {
                        alive()?;
                        std::thread::sleep(LOOK);
                        continue;
                    }
                    return Err(CommError::Rendezvous(format!(
                        "port {port} on {} is in use, so rank 0 cannot listen on it: another run or program has it; choose another port for this run ({} was its meeting place)",
                        host_name(),
                        place.meeting
                    )));
                }
                Err(source) => {
                    let what = format!("rank 0 cannot listen on port {port} of {}", host_name());
                    return Err(CommError::Io { what, source });
                }
            }
        };
        Ok(Hub {
            board,
            commands,
            door: Door::new(listener, &place.secret)?,
            meeting: show(&host, port),
            host: host_name(),
            size: place.world_size,
            settings: settings.clone(),
            deadline,
            peers: (0..place.world_size).map(|_| None).collect(),
            puts: BTreeMap::new(),
            verdict: None,
            told_at: None,
            leaving: None,
            late: None,
            stood: None,
        })
    }

    /// The control thread.
    pub(super) fn run(mut self) {
        let mut pulse = Pulse::new(&self.settings);
        let mut next_word = Instant::now() + Duration::from_secs(20);
        while !self.finished() {
            self.sleep(pulse.left());
            let still = pulse.stood_still();
            self.hear_all();
            if let Some(still) = still {
                let now = Instant::now();
                self.stood = Some((now, still));
                self.peers.iter_mut().flatten().for_each(|peer| peer.conn.heard = now);
            }
            for newcomer in self.door.newcomers() {
                self.take_in(newcomer);
            }
            for command in self.commands.take() {
                self.obey(command);
            }
            self.look_for_lost();
            if pulse.is_due() {
                let beat = self.board.beat();
                self.tell(&beat, None);
            }
            if self.missing().next().is_some() && Instant::now() >= next_word && self.verdict.is_none() {
                next_word = Instant::now() + Duration::from_secs(30);
                tracing::info!("rank 0 waits at {} for {}", self.meeting, self.name_missing());
            }
            self.peers.iter_mut().flatten().for_each(|peer| peer.conn.flush());
        }
    }

    fn sleep(&self, most: Duration) {
        let mut fds = vec![self.commands.wake.poll_fd()];
        self.door.poll_fds(&mut fds);
        fds.extend(self.peers.iter().flatten().filter(|p| p.conn.ended.is_none()).map(|p| p.conn.poll_fd()));
        // Waits for strangers, goodbyes and answers run out between beats too.
        let short = self.door.busy() || self.leaving.is_some();
        sleep_or_rest(&mut fds, if short { most.min(LOOK) } else { most });
    }

    /// Whether this thread may end.
    fn finished(&mut self) -> bool {
        let gone = |peer: &Peer| peer.left || peer.told || peer.conn.ended.is_some();
        if let Some(at) = self.told_at
            && (self.peers.iter().flatten().all(gone) || at.elapsed() > TOLD)
        {
            self.board.tell();
        }
        match (self.leaving, self.told_at) {
            (None, _) => false,
            (Some(_), Some(at)) => self.peers.iter().flatten().all(gone) || at.elapsed() > TOLD,
            (Some(since), None) => {
                self.peers.iter().flatten().all(gone)
                    || since.elapsed() > FAREWELL.min(self.settings.lost_after)
            }
        }
    }

    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        (1..self.size).filter(|rank| self.peers[*rank].is_none())
    }

    pub(super) fn name_missing(&self) -> String {
        let mut names: Vec<String> = self.missing().take(9).map(|rank| rank.to_string()).collect();
        let count = self.missing().count();
        if names.len() > 8 {
            names.truncate(8);
            names.push("...".into());
        }
        let plural = if count == 1 { "rank" } else { "ranks" };
        format!("{plural} {} ({count} of {})", names.join(", "), self.size)
    }

    fn take_in(&mut self, newcomer: Newcomer) {
        let Identity { purpose, rank, size, version, host, pid, .. } = newcomer.identity.clone();
        let who = format!("rank {rank} on host {host} (process {pid})");
        let rank = rank as usize;
        let own = env!("CARGO_PKG_VERSION");
        let wrong = if purpose != Purpose::Control {
            newcomer.refuse("this is the ranks' meeting place, not a rank's data port");
            return;
        } else if size as usize != self.size {
            format!(
                "{who} believes in {size} ranks, rank 0 on host {} in {}: start all with the same number",
                self.host, self.size
            )
        } else if version != own {
            format!(
                "{who} runs tercio {version}, rank 0 on host {} runs {own}: run the same tercio everywhere",
                self.host
            )
        } else if rank == 0 || rank >= self.size {
            format!(
                "{who} came, but rank {rank} is not to be met here: of {} ranks, number 0 is on host {} already",
                self.size, self.host
            )
        } else if let Some(first) = &self.peers[rank] {
            format!(
                "rank {rank} is here twice: from host {} (process {}) and from host {host} (process {pid})",
                first.host, first.pid
            )
        } else {
            if self.verdict.is_some() || self.leaving.is_some() {
                let why = self.verdict.as_ref().map(|v| format!(": {}", v.error())).unwrap_or_default();
                newcomer.refuse(&format!("the run is over{why}"));
                return;
            }
            tracing::debug!("{who} is here");
            let mut conn = newcomer.welcome();
            conn.heard = Instant::now();
            self.peers[rank] =
                Some(Peer { conn, host, pid, update: 0, sequence: 0, left: false, told: false });
            return;
        };
        newcomer.refuse(&wrong);
        if self.verdict.is_some() {
            // A launcher that speaks for a rank whose loss was seen already.
            tracing::debug!("after the run's end: {wrong}");
        } else if self.missing().next().is_some() {
            // Nothing was computed yet, and it cannot become right.
            self.declare(Verdict::Rendezvous(wrong));
        } else {
            tracing::warn!("a process that wanted to join was refused: {wrong}");
        }
    }

    fn hear_all(&mut self) {
        for rank in 1..self.size {
            let Some(peer) = &mut self.peers[rank] else { continue };
            if peer.conn.ended.is_some() {
                continue;
            }
            for message in peer.conn.receive() {
                self.hear(rank, message);
            }
            let Some(peer) = &self.peers[rank] else { continue };
            if let (Some(what), false) = (&peer.conn.ended, peer.left) {
                let verdict = self.lost(rank, what.clone());
                self.declare(verdict);
            }
        }
    }

    fn hear(&mut self, rank: usize, message: Message) {
        let Some(peer) = &mut self.peers[rank] else { return };
        match message {
            Message::Beat { update, sequence } => (peer.update, peer.sequence) = (update, sequence),
            Message::Late { sequence, peer, what } => self.hear_late(sequence, peer as usize, what),
            Message::Put { step, bytes } => self.put(rank, step, bytes),
            Message::Ack => peer.told = true,
            Message::Bye { .. } => {
                peer.left = true;
                self.board.leave(rank);
                self.tell(&Message::Bye { rank: rank as u32 }, Some(rank));
            }
            Message::Fail { what } => {
                peer.told = true;
                let (host, update) = (peer.host.clone(), peer.update);
                peer.conn.send(&Message::Ack);
                let update = update.max(self.board.update.load(Ordering::Relaxed));
                self.declare(Verdict::Failed { rank, host, update, what });
            }
            Message::Report { rank: other, what } => {
                let what = match self.peers.get(other as usize) {
                    Some(Some(peer)) if peer.left => {
                        format!("it had ended, and rank {rank} still waited for it")
                    }
                    _ => format!(
                        "{what} (seen by rank {rank} on host {})",
                        peer_host(&self.peers, &self.host, rank)
                    ),
                };
                let verdict = self.lost(other as usize, what);
                self.declare(verdict);
            }
            // A rank gave this one up, while it stood still.
            Message::Verdict { failed, rank, host, update, what } => {
                self.declare(Verdict::from_message(0, failed, rank, host, update, what));
            }
            other => tracing::debug!("rank {rank} sent {other:?} at a wrong time"),
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Put { step, bytes } => self.put(0, step, bytes),
            Command::Fail(what) => {
                let update = self.board.update.load(Ordering::Relaxed);
                self.declare(Verdict::Failed { rank: 0, host: self.host.clone(), update, what });
            }
            Command::Report { rank, what } => {
                let verdict = self.lost(rank, what);
                self.declare(verdict);
            }
            Command::Late { sequence, peer, what } => self.hear_late(sequence, peer, what),
            Command::Leave => {
                self.leaving = Some(Instant::now());
                if self.verdict.is_none() {
                    self.tell(&Message::Bye { rank: 0 }, None);
                }
            }
        }
    }

    fn put(&mut self, rank: usize, step: u32, bytes: Vec<u8>) {
        let size = self.size;
        let all = self.puts.entry(step).or_insert_with(|| vec![None; size]);
        all[rank] = Some(bytes);
        if all.iter().all(Option::is_some) {
            let all: Vec<Vec<u8>> = self.puts.remove(&step).into_iter().flatten().flatten().collect();
            self.tell(&Message::Result { step, all: all.clone() }, None);
            self.board.put_result(step, all);
        }
    }

    /// Ends the run: tells the others first, so that this process may end at once when it hears of it.
    pub(super) fn declare(&mut self, verdict: Verdict) {
        if self.verdict.is_some() {
            return;
        }
        let update = self.board.update.load(Ordering::Relaxed);
        let message = verdict.message(0, &self.host, update);
        self.tell(&message, None);
        self.verdict = Some(verdict.clone());
        self.told_at = Some(Instant::now());
        self.board.end(verdict);
    }

    fn tell(&mut self, message: &Message, except: Option<usize>) {
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if let Some(peer) =
                peer.as_mut().filter(|p| Some(rank) != except && p.conn.ended.is_none() && !p.left)
            {
                peer.conn.send(message);
            }
        }
    }
}

pub(super) fn peer_host(peers: &[Option<Peer>], own: &str, rank: usize) -> String {
    match peers.get(rank) {
        Some(Some(peer)) => peer.host.clone(),
        _ if rank == 0 => own.into(),
        _ => "unknown".into(),
    }
}
