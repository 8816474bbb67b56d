//! One control connection: never blocks, keeps what has not gone yet and what is no whole message yet.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::message::{Message, PREFIX, STRANGER_LIMIT};
use crate::carrier::Alive;
use crate::error::CommError;

/// How often a rank that waits looks whether it still should.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// A connection that speaks [`Message`]s.
pub(crate) struct Conn {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    written: usize,
    /// Came with a message that was waited for.
    early: Vec<Message>,
    /// Longest message that is taken.
    pub limit: usize,
    /// When something came last.
    pub heard: Instant,
    /// Why nothing comes any more.
    pub ended: Option<String>,
}

impl Conn {
    /// Takes a connected stream.
    pub(crate) fn new(stream: TcpStream) -> std::io::Result<Conn> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Conn {
            stream,
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            early: Vec::new(),
            limit: STRANGER_LIMIT,
            heard: Instant::now(),
            ended: None,
        })
    }

    /// The stream, for what comes after the handshake.
    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Queues a message and sends what goes.
    pub(crate) fn send(&mut self, message: &Message) {
        message.write(&mut self.output);
        self.flush();
    }

    /// Whether everything was handed to the system.
    pub(crate) fn flushed(&self) -> bool {
        self.output.is_empty() || self.ended.is_some()
    }

    /// What a poll has to look for.
    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        let out = if self.flushed() { PollFlags::empty() } else { PollFlags::OUT };
        let input = if self.ended.is_some() { PollFlags::empty() } else { PollFlags::IN };
        PollFd::new(&self.stream, input | out)
    }

    /// Sends what goes without waiting.
    pub(crate) fn flush(&mut self) {
        while self.ended.is_none() && self.written < self.output.len() {
            match self.stream.write(&self.output[self.written..]) {
                Ok(n) => self.written += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    // What the peer said before it went may still wait to be read: the reader ends the connection.
                    tracing::trace!("a control connection takes nothing more: {e}");
                    break;
                }
            }
        }
        self.output.clear();
        self.written = 0;
    }

    /// Reads what is there; the whole messages of it. After the last of them `ended` says whether the connection did.
    pub(crate) fn receive(&mut self) -> Vec<Message> {
        let mut messages = std::mem::take(&mut self.early);
        let mut buffer = [0u8; 16 << 10];
        // Bounded, so that one connection cannot keep the others from being read.
        for _ in 0..64 {
            if self.ended.is_some() {
                break;
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = Some("its connection was closed".into()),
                Ok(n) => {
                    self.heard = Instant::now();
                    self.input.extend_from_slice(&buffer[..n]);
                    self.parse(&mut messages);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => self.ended = Some(format!("its connection broke: {e}")),
            }
        }
        messages
    }

    fn parse(&mut self, messages: &mut Vec<Message>) {
        let mut at = 0;
        while let Some(prefix) = self.input[at..].first_chunk::<PREFIX>() {
            let [a, b, c, d, e, f, g, h] = *prefix;
            let length = u32::from_le_bytes([a, b, c, d]) as usize;
            if length > self.limit {
                self.ended = Some("it sent what is no message of a rank".into());
                break;
            }
            let Some(body) = self.input.get(at + PREFIX..at + PREFIX + length) else { break };
            let crc = u32::from_le_bytes([e, f, g, h]);
            let Some(message) = Message::read(body).filter(|_| crc32fast::hash(body) == crc) else {
                self.ended = Some("it sent what is no message of a rank".into());
                break;
            };
            messages.push(message);
            at += PREFIX + length;
        }
        self.input.drain(..at);
    }

    /// Waits for the next message, at most until `deadline`; for the handshake of one who connects, where one message
    /// follows the other.
    ///
    /// # Errors
    /// In words: closed, broken, silent; what `alive` says.
    pub(crate) fn next(&mut self, deadline: Instant, alive: Alive<'_>) -> Result<Message, String> {
        loop {
            self.flush();
            let mut messages = self.receive();
            if !messages.is_empty() {
                let first = messages.remove(0);
                self.early = messages;
                return Ok(first);
            }
            if let Some(why) = &self.ended {
                return Err(why.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("it does not answer".into());
            }
            alive().map_err(|e| e.to_string())?;
            let mut fds = [self.poll_fd()];
            sleep_on(&mut fds, left.min(LOOK)).map_err(|e| e.to_string())?;
        }
    }
}

/// Waits until one of `fds` is ready, at most `most`.
pub(crate) fn sleep_on(fds: &mut [PollFd<'_>], most: Duration) -> Result<(), CommError> {
    // A wait of less than nothing to see would spin.
    let most = most.max(Duration::from_millis(1)).min(Duration::from_secs(3600));
    let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    match poll(fds, Some(&most)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(CommError::Io { what: "waiting for the other ranks".into(), source: e.into() }),
    }
}

/// As [`sleep_on`], for a thread that cannot end: where the system refuses, it says so and rests a little.
pub(crate) fn sleep_or_rest(fds: &mut [PollFd<'_>], most: Duration) {
    if let Err(e) = sleep_on(fds, most) {
        tracing::warn!("{e}");
        std::thread::sleep(LOOK);
    }
}

/// Wakes a thread that sleeps on it.
pub(crate) struct Wake(rustix::fd::OwnedFd);

impl Wake {
    pub(crate) fn new() -> Result<Wake, CommError> {
        use rustix::event::{EventfdFlags, eventfd};
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Wake)
            .map_err(|e| CommError::Io { what: "making an event descriptor".into(), source: e.into() })
    }
    pub(crate) fn ring(&self) {
        // A full counter is awake already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)
    }
}
