//! Messages on their way to or from one rank, cut into checked pieces.

use super::link::{Call, Trouble};
use crate::carrier::Carrier;
use crate::frame::{HEADER, Header, PIECE};

/// A piece up to this length goes in one call with its header.
const SMALL: usize = 16 << 10;

/// A message to a rank.
pub(crate) struct Outgoing<'a> {
    pub(super) peer: usize,
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
    pub(super) done: bool,
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
    pub(super) fn push(
        &mut self,
        carrier: &mut dyn Carrier,
        call: Call,
        step: u16,
    ) -> Result<usize, Trouble> {
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
    pub(super) peer: usize,
    sink: Sink<'a>,
    /// The peer had nothing to add.
    pub absent: bool,
    head: [u8; HEADER],
    head_got: usize,
    header: Option<Header>,
    got: usize,
    at: usize,
    pub(super) done: bool,
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
    pub(super) fn pull(&mut self, carrier: &mut dyn Carrier, call: Call, step: u16) -> Result<bool, Trouble> {
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
