//! One step of a collective: messages to and from some ranks at once, cut into checked frames.
//!
//! All sends and receives of a step run in one loop that never blocks on any one of them, so no order can lock. Between waits
//! the loop looks whether the run is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::flags::Flags;
use crate::carrier::Carrier;
use crate::control::{Control, Verdict};
use crate::error::CommError;
use crate::frame::{HEADER, Header, Kind, PIECE};

/// Longest sleep before the loop looks again whether the run is over.
const GLANCE: Duration = Duration::from_millis(100);
/// How long bytes of a rank that ended well may still be on their way.
const LATE_BYTES: Duration = Duration::from_secs(5);
/// A piece up to this length goes in one call with its header.
const SMALL: usize = 16 << 10;

/// What collectives cost, counted by whoever works.
#[derive(Default)]
pub(crate) struct Costs {
    pub waited_ns: AtomicU64,
    pub busy_ns: AtomicU64,
    pub sent: AtomicU64,
}

/// The data plane of one rank.
pub(crate) struct Link {
    pub rank: usize,
    pub size: usize,
    pub carrier: Box<dyn Carrier>,
    pub control: Arc<Control>,
    pub hosts: Arc<Vec<String>>,
    pub timeout: Duration,
    pub costs: Arc<Costs>,
    /// Room for a piece that is to be added; words, so that it is aligned for every number.
    pub staging: Vec<u64>,
    /// The reduction at work, for when it is given up.
    pub flags: Option<Arc<Flags>>,
    sequence: u64,
}

/// One collective under way.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    kind: Kind,
    sequence: u64,
}

impl Link {
    pub(crate) fn new(
        rank: usize,
        carrier: Box<dyn Carrier>,
        control: Arc<Control>,
        hosts: Arc<Vec<String>>,
        timeout: Duration,
        costs: Arc<Costs>,
    ) -> Link {
        let size = hosts.len();
        Link {
            rank,
            size,
            carrier,
            control,
            hosts,
            timeout,
            costs,
            staging: Vec::new(),
            flags: None,
            sequence: 0,
        }
    }

    /// Begins a collective; ranks count them alike.
    pub(crate) fn begin(&mut self, kind: Kind) -> Call {
        self.sequence += 1;
        Call { kind, sequence: self.sequence }
    }

    /// Moves all of `out` and `into`, which name every peer once at most.
    ///
    /// # Errors
    /// The run is over, whoever ended it; this ends it for all.
    pub(crate) fn step(
        &mut self,
        call: Call,
        step: u16,
        out: &mut [Outgoing<'_>],
        into: &mut [Incoming<'_>],
    ) -> Result<(), CommError> {
        let started = Instant::now();
        let result = self.run(call, step, out, into);
        self.costs.busy_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result.map_err(|trouble| self.judge(call, trouble))
    }

    fn run(
        &mut self,
        call: Call,
        step: u16,
        out: &mut [Outgoing<'_>],
        into: &mut [Incoming<'_>],
    ) -> Result<(), Trouble> {
        let mut moved_at = Instant::now();
        let (mut send, mut recv) = (Vec::new(), Vec::new());
        loop {
            self.control.board.check().map_err(Trouble::Over)?;
            if self.flags.as_ref().is_some_and(|flags| flags.given_up()) {
                return Err(Trouble::GivenUp);
            }
            let mut moved = false;
            send.clear();
            recv.clear();
            for one in out.iter_mut().filter(|one| !one.done) {
                let sent = one.push(&mut *self.carrier, call, step)?;
                self.costs.sent.fetch_add(sent as u64, Ordering::Relaxed);
                moved |= sent > 0;
                if !one.done {
                    send.push(one.peer);
                }
            }
            for one in into.iter_mut().filter(|one| !one.done) {
                moved |= one.pull(&mut *self.carrier, call, step)?;
                if !one.done {
                    recv.push(one.peer);
                }
            }
            if send.is_empty() && recv.is_empty() {
                return Ok(());
            }
            if moved {
                moved_at = Instant::now();
                continue;
            }
            let idle = moved_at.elapsed();
            if idle > self.timeout {
                return Err(Trouble::Late(if recv.is_empty() { send } else { recv }));
            }
            if idle > LATE_BYTES
                && let Some(peer) = recv.iter().chain(&send).find(|peer| self.control.board.has_left(**peer))
            {
                return Err(Trouble::Lost(*peer, "it had ended, and this rank still waited for it".into()));
            }
            self.carrier.wait(&send, &recv, GLANCE.min(self.timeout)).map_err(Trouble::from_carrier)?;
        }
    }

    /// Ends the run for what was seen; the error that everyone will name.
    fn judge(&self, call: Call, trouble: Trouble) -> CommError {
        let at = format!("{} {}", call.kind.name(), call.sequence);
        let verdict = match trouble {
            Trouble::Over(error) => return error,
            Trouble::Lost(peer, what) => {
                let host = self.hosts.get(peer).map_or("unknown", String::as_str);
                return self.control.lost(peer, host, &what);
            }
            Trouble::Other(error) => Verdict::Protocol(error.to_string()),
            Trouble::Wrong(peer, what) => Verdict::Protocol(format!(
                "{} {what} (seen by {} in {at}): the run cannot go on; started again, it goes on from its last checkpoint",
                self.name(peer),
                self.name(self.rank)
            )),
            Trouble::Late(peers) => {
                let names: Vec<String> = peers.iter().map(|peer| self.name(*peer)).collect();
                Verdict::Timeout(format!(
                    "{} waited {} s in {at} for {}, which gives signs of life but does not come to it",
                    self.name(self.rank),
                    self.timeout.as_secs_f64(),
                    names.join(" and ")
                ))
            }
            Trouble::GivenUp => Verdict::Protocol(format!(
                "{} dropped a reduction before it was finished, in {at}",
                self.name(self.rank)
            )),
        };
        let error = verdict.error();
        self.control.end(verdict, &error.to_string());
        // Whoever was first is named by all.
        self.control.board.check().err().unwrap_or(error)
    }

    fn name(&self, rank: usize) -> String {
        format!("rank {rank} on host {}", self.hosts.get(rank).map_or("unknown", String::as_str))
    }
}

/// What stops a step.
enum Trouble {
    Over(CommError),
    Lost(usize, String),
    Wrong(usize, String),
    Late(Vec<usize>),
    GivenUp,
    Other(CommError),
}

impl Trouble {
    /// Carriers do not know hosts and updates; the control plane does.
    fn from_carrier(error: CommError) -> Trouble {
        match error {
            CommError::Lost { rank, what, .. } => Trouble::Lost(rank, what),
            other => Trouble::Other(other),
        }
    }
}

/// A message to a rank.
pub(crate) struct Outgoing<'a> {
    peer: usize,
    bytes: &'a [u8],
    absent: bool,
    /// Header of the piece at work, with the piece itself if it is small.
    front: Vec<u8>,
    front_sent: usize,
    /// The rest of the piece at work.
    piece: &'a [u8],
    /// Where the next piece begins.
    at: usize,
    begun: bool,
    done: bool,
}

impl<'a> Outgoing<'a> {
    /// `bytes` for `peer`.
    pub(crate) fn new(peer: usize, bytes: &'a [u8]) -> Outgoing<'a> {
        Outgoing {
            peer,
            bytes,
            absent: false,
            front: Vec::new(),
            front_sent: 0,
            piece: &[],
            at: 0,
            begun: false,
            done: false,
        }
    }
    /// Says to `peer` that this rank has nothing to add.
    pub(crate) fn absent(peer: usize) -> Outgoing<'a> {
        Outgoing { absent: true, ..Outgoing::new(peer, &[]) }
    }

    /// Sends what goes; how many bytes that were.
    fn push(&mut self, carrier: &mut dyn Carrier, call: Call, step: u16) -> Result<usize, Trouble> {
        let mut sent = 0;
        loop {
            if self.front_sent == self.front.len() && self.piece.is_empty() {
                if self.begun && self.at == self.bytes.len() {
                    self.done = true;
                    return Ok(sent);
                }
                self.cut(call, step);
            }
            let rest =
                if self.front_sent < self.front.len() { &self.front[self.front_sent..] } else { self.piece };
            let n = carrier.try_send(self.peer, rest).map_err(Trouble::from_carrier)?;
            if n == 0 {
                return Ok(sent);
            }
            sent += n;
            if self.front_sent < self.front.len() {
                self.front_sent += n;
            } else {
                self.piece = &self.piece[n..];
            }
        }
    }

    /// Makes the next piece.
    fn cut(&mut self, call: Call, step: u16) {
        let end = self.bytes.len().min(self.at + PIECE);
        let piece = &self.bytes[self.at..end];
        let header = Header {
            kind: call.kind,
            absent: self.absent,
            step,
            sequence: call.sequence,
            total: self.bytes.len() as u64,
            at: self.at as u64,
            length: piece.len() as u32,
            crc: crc32fast::hash(piece),
        };
        self.front.clear();
        self.front_sent = 0;
        self.front.extend_from_slice(&header.encode());
        if piece.len() <= SMALL {
            self.front.extend_from_slice(piece);
            self.piece = &[];
        } else {
            self.piece = piece;
        }
        self.at = end;
        self.begun = true;
    }
}

/// Where a message goes.
pub(crate) enum Sink<'a> {
    /// Into these bytes; the message is as long.
    Fill(&'a mut [u8]),
    /// Into a vector; of any length.
    Grow(&'a mut Vec<u8>),
    /// Is added to something as long as it.
    Add(&'a mut dyn Add),
}

/// Takes pieces and adds them.
pub(crate) trait Add {
    /// Bytes of the whole message.
    fn bytes(&self) -> usize;
    /// Room for a piece.
    fn room(&mut self, length: usize) -> &mut [u8];
    /// Adds the piece of `length` bytes that lies in `room`, at byte `at`.
    fn add(&mut self, at: usize, length: usize);
}

/// A message from a rank.
pub(crate) struct Incoming<'a> {
    peer: usize,
    sink: Sink<'a>,
    /// The peer had nothing to add.
    pub absent: bool,
    head: [u8; HEADER],
    head_got: usize,
    header: Option<Header>,
    got: usize,
    at: usize,
    done: bool,
}

impl<'a> Incoming<'a> {
    /// A message from `peer`.
    pub(crate) fn new(peer: usize, sink: Sink<'a>) -> Incoming<'a> {
        Incoming {
            peer,
            sink,
            absent: false,
            head: [0; HEADER],
            head_got: 0,
            header: None,
            got: 0,
            at: 0,
            done: false,
        }
    }

    /// Receives what is there; whether that was anything.
    fn pull(&mut self, carrier: &mut dyn Carrier, call: Call, step: u16) -> Result<bool, Trouble> {
        let mut moved = false;
        while !self.done {
            let Some(header) = self.header else {
                let n = carrier
                    .try_recv(self.peer, &mut self.head[self.head_got..])
                    .map_err(Trouble::from_carrier)?;
                if n == 0 {
                    return Ok(moved);
                }
                moved = true;
                self.head_got += n;
                if self.head_got == HEADER {
                    self.begin(call, step)?;
                }
                continue;
            };
            let length = header.length as usize;
            let room = match &mut self.sink {
                Sink::Fill(bytes) => &mut bytes[self.at..self.at + length],
                Sink::Grow(bytes) => &mut bytes[self.at..self.at + length],
                Sink::Add(adder) => adder.room(length),
            };
            let n = carrier.try_recv(self.peer, &mut room[self.got..]).map_err(Trouble::from_carrier)?;
            if n == 0 {
                return Ok(moved);
            }
            moved = true;
            self.got += n;
            if self.got == length {
                if crc32fast::hash(room) != header.crc {
                    return Err(
                        self.wrong("sent a piece that was damaged on its way (its checksum does not match)")
                    );
                }
                if let Sink::Add(adder) = &mut self.sink {
                    adder.add(self.at, length);
                }
                self.end_piece(&header);
            }
        }
        Ok(moved)
    }

    fn end_piece(&mut self, header: &Header) {
        self.at += header.length as usize;
        self.got = 0;
        self.head_got = 0;
        self.header = None;
        self.done = self.at as u64 == header.total;
    }

    fn wrong(&self, what: impl Into<String>) -> Trouble {
        Trouble::Wrong(self.peer, what.into())
    }

    /// Checks a whole header and makes room for its piece.
    fn begin(&mut self, call: Call, step: u16) -> Result<(), Trouble> {
        let header =
            Header::decode(&self.head).map_err(|what| self.wrong(format!("sent a frame that {what}")))?;
        if (header.kind, header.sequence, header.step) != (call.kind, call.sequence, step) {
            return Err(self.wrong(format!(
                "is not in step: it is in step {} of {} {}, this rank in step {step} of {} {}; all ranks have to call the same collectives in the same order",
                header.step,
                header.kind.name(),
                header.sequence,
                call.kind.name(),
                call.sequence
            )));
        }
        if header.absent {
            if !matches!(self.sink, Sink::Grow(_)) && header.total == 0 {
                self.absent = true;
                self.done = true;
                return Ok(());
            }
            return Err(self.wrong("sent nothing where something has to be"));
        }
        let expected = match &self.sink {
            Sink::Fill(bytes) => bytes.len() as u64,
            Sink::Add(adder) => adder.bytes() as u64,
            Sink::Grow(_) => header.total,
        };
        if header.total != expected {
            return Err(self.wrong(format!(
                "sends {} bytes where this rank expects {expected}: all ranks have to pass equal lengths",
                header.total
            )));
        }
        // The last piece alone may be short, and only it may be empty: a message always comes to an end.
        let end = header.at + u64::from(header.length);
        if header.at != self.at as u64 || (header.length as usize != PIECE && end != header.total) {
            return Err(self.wrong("sent a piece out of order"));
        }
        if let Sink::Grow(bytes) = &mut self.sink {
            // Room as pieces come, never on a length's word alone.
            if bytes.try_reserve(header.length as usize).is_err() {
                return Err(
                    self.wrong(format!("sends {} bytes, more than there is memory for here", header.total))
                );
            }
            bytes.resize(self.at + header.length as usize, 0);
        }
        if header.length == 0 {
            self.end_piece(&header);
        } else {
            self.header = Some(header);
        }
        Ok(())
    }
}
