//! What goes over the control connections: small messages, each with its length and a checksum before it.

use crate::error::CommError;
use crate::secret::{Mac, Nonce};

/// Version of the ranks' talk, control and data; only equal ones talk.
pub(crate) const PROTOCOL: u32 = 2;
/// Bytes before a message: length and CRC-32.
pub(crate) const PREFIX: usize = 8;
/// Longest message of one who has not proved the secret yet.
pub(crate) const STRANGER_LIMIT: usize = 4 << 10;
/// Longest message of a rank.
pub(crate) const RANK_LIMIT: usize = 256 << 20;

const GREETING: &[u8] = b"tercio ranks";

/// Why a newcomer is refused, as far as it decides what it does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Of another run, by its secret: maybe one that is just ending.
    Secret,
    /// For good.
    Final,
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Message {
    Hello {
        protocol: u32,
        nonce: Nonce,
    },
    Challenge {
        nonce: Nonce,
    },
    Proof {
        mac: Mac,
        identity: Vec<u8>,
    },
    Welcome {
        mac: Mac,
    },
    Refused {
        refusal: Refusal,
        reason: String,
    },
    /// A sign of life, with the update at work and the last collective that the sender came to.
    Beat {
        update: u64,
        sequence: u64,
    },
    /// A rank's bytes for an exchange of all ranks.
    Put {
        step: u32,
        bytes: Vec<u8>,
    },
    /// All ranks' bytes.
    Result {
        step: u32,
        all: Vec<Vec<u8>>,
    },
    /// A rank was lost (or failed, by its own word): the run is over.
    Verdict {
        failed: bool,
        rank: u32,
        host: String,
        update: u64,
        what: String,
    },
    /// The sender ends with an error.
    Fail {
        what: String,
    },
    /// The sender lost its connection to `rank`.
    Report {
        rank: u32,
        what: String,
    },
    /// The sender waited too long in collective `sequence`, for `peer`.
    Late {
        sequence: u64,
        peer: u32,
        what: String,
    },
    /// The sender knows that the run is over.
    Ack,
    /// `rank` ended well.
    Bye {
        rank: u32,
    },
}

impl Message {
    /// Appends the message to `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; PREFIX]);
        match self {
            Message::Hello { protocol, nonce } => {
                out.push(1);
                out.extend_from_slice(GREETING);
                put_u32(out, *protocol);
                out.extend_from_slice(nonce);
            }
            Message::Challenge { nonce } => {
                out.push(2);
                out.extend_from_slice(nonce);
            }
            Message::Proof { mac, identity } => {
                out.push(3);
                out.extend_from_slice(mac);
                put_bytes(out, identity);
            }
            Message::Welcome { mac } => {
                out.push(4);
                out.extend_from_slice(mac);
            }
            Message::Refused { refusal, reason } => {
                out.push(5);
                out.push(u8::from(*refusal == Refusal::Final));
                put_bytes(out, reason.as_bytes());
            }
            Message::Beat { update, sequence } => {
                out.push(6);
                put_u64(out, *update);
                put_u64(out, *sequence);
            }
            Message::Put { step, bytes } => {
                out.push(7);
                put_u32(out, *step);
                put_bytes(out, bytes);
            }
            Message::Result { step, all } => {
                out.push(8);
                put_u32(out, *step);
                put_u32(out, all.len() as u32);
                for bytes in all {
                    put_bytes(out, bytes);
                }
            }
            Message::Verdict { failed, rank, host, update, what } => {
                out.push(9);
                out.push(u8::from(*failed));
                put_u32(out, *rank);
                put_bytes(out, host.as_bytes());
                put_u64(out, *update);
                put_bytes(out, what.as_bytes());
            }
            Message::Fail { what } => {
                out.push(10);
                put_bytes(out, what.as_bytes());
            }
            Message::Report { rank, what } => {
                out.push(11);
                put_u32(out, *rank);
                put_bytes(out, what.as_bytes());
            }
            Message::Late { sequence, peer, what } => {
                out.push(14);
                put_u64(out, *sequence);
                put_u32(out, *peer);
                put_bytes(out, what.as_bytes());
            }
            Message::Ack => out.push(12),
            Message::Bye { rank } => {
                out.push(13);
                put_u32(out, *rank);
            }
        }
        let length = (out.len() - start - PREFIX) as u32;
        let crc = crc32fast::hash(&out[start + PREFIX..]);
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
        out[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
    }

    /// A message from its bytes without the prefix; nothing when they are no message.
    pub(crate) fn read(bytes: &[u8]) -> Option<Message> {
        let mut take = Take(bytes);
        let message = match take.u8()? {
            1 => {
                if take.slice(GREETING.len())? != GREETING {
                    return None;
                }
                Message::Hello { protocol: take.u32()?, nonce: take.array()? }
            }
            2 => Message::Challenge { nonce: take.array()? },
            3 => Message::Proof { mac: take.array()?, identity: take.bytes()?.to_vec() },
            4 => Message::Welcome { mac: take.array()? },
            5 => {
                let refusal = if take.u8()? == 1 { Refusal::Final } else { Refusal::Secret };
                Message::Refused { refusal, reason: take.text()? }
            }
            6 => Message::Beat { update: take.u64()?, sequence: take.u64()? },
            7 => Message::Put { step: take.u32()?, bytes: take.bytes()?.to_vec() },
            8 => {
                let step = take.u32()?;
                let count = take.u32()?;
                // No room on the count's word alone: every entry takes bytes of the message.
                let all = (0..count).map(|_| take.bytes().map(<[u8]>::to_vec)).collect::<Option<_>>()?;
                Message::Result { step, all }
            }
            9 => Message::Verdict {
                failed: take.u8()? == 1,
                rank: take.u32()?,
                host: take.text()?,
                update: take.u64()?,
                what: take.text()?,
            },
            10 => Message::Fail { what: take.text()? },
            11 => Message::Report { rank: take.u32()?, what: take.text()? },
            12 => Message::Ack,
            13 => Message::Bye { rank: take.u32()? },
            14 => Message::Late { sequence: take.u64()?, peer: take.u32()?, what: take.text()? },
            _ => return None,
        };
        take.0.is_empty().then_some(message)
    }
}

/// Who a rank says it is, once it proved the secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// What the connection is for.
    pub purpose: Purpose,
    pub rank: u32,
    /// The rank that it wants to talk to.
    pub to: u32,
    pub size: u32,
    /// Tercio's version.
    pub version: String,
    pub host: String,
    pub pid: u32,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Control,
    Data,
}

impl Identity {
    /// This process as `rank` of `size`.
    pub(crate) fn own(purpose: Purpose, rank: usize, size: usize) -> Result<Identity, CommError> {
        let small =
            |n: usize| u32::try_from(n).map_err(|_| CommError::Place(format!("{n} ranks are too many")));
        Ok(Identity {
            purpose,
            rank: small(rank)?,
            to: 0,
            size: small(size)?,
            version: env!("CARGO_PKG_VERSION").to_string(),
            host: host_name(),
            pid: std::process::id(),
        })
    }
    pub(crate) fn write(&self) -> Vec<u8> {
        let mut out = vec![u8::from(self.purpose == Purpose::Data)];
        put_u32(&mut out, self.rank);
        put_u32(&mut out, self.to);
        put_u32(&mut out, self.size);
        put_bytes(&mut out, self.version.as_bytes());
        put_bytes(&mut out, self.host.as_bytes());
        put_u32(&mut out, self.pid);
        out
    }
    pub(crate) fn read(bytes: &[u8]) -> Option<Identity> {
        let mut take = Take(bytes);
        let purpose = if take.u8()? == 1 { Purpose::Data } else { Purpose::Control };
        Some(Identity {
            purpose,
            rank: take.u32()?,
            to: take.u32()?,
            size: take.u32()?,
            version: take.text()?,
            host: take.text()?,
            pid: take.u32()?,
        })
    }
}

/// This host's name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

pub(crate) fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_u32(out, bytes.len() as u32);
    out.extend_from_slice(bytes);
}

/// Takes values from the front of bytes, as long as there are any.
pub(crate) struct Take<'a>(pub(crate) &'a [u8]);

impl<'a> Take<'a> {
    pub(crate) fn slice(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(length)?;
        self.0 = tail;
        Some(head)
    }
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.slice(N)?.try_into().ok()
    }
    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|b| b[0])
    }
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.slice(length as usize)
    }
    pub(crate) fn text(&mut self) -> Option<String> {
        self.bytes().map(|b| String::from_utf8_lossy(b).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        vec![
            Message::Hello { protocol: 9, nonce: [3; 32] },
            Message::Challenge { nonce: [4; 32] },
            Message::Proof { mac: [5; 32], identity: vec![1, 2, 3] },
            Message::Welcome { mac: [6; 32] },
            Message::Refused { refusal: Refusal::Final, reason: "no".into() },
            Message::Beat { update: 1 << 40, sequence: 5 },
            Message::Late { sequence: 7, peer: 2, what: "all-reduce 7".into() },
            Message::Put { step: 2, bytes: vec![0; 300] },
            Message::Result { step: 2, all: vec![vec![], vec![7; 3]] },
            Message::Verdict {
                failed: true,
                rank: 3,
                host: "b".into(),
                update: 17,
                what: "disk full".into(),
            },
            Message::Fail { what: "x".into() },
            Message::Report { rank: 1, what: "closed".into() },
            Message::Ack,
            Message::Bye { rank: 4 },
        ]
    }

    #[test]
    fn messages_come_back_and_cut_ones_do_not() {
        for message in all() {
            let mut out = Vec::new();
            message.write(&mut out);
            assert_eq!(Message::read(&out[PREFIX..]).as_ref(), Some(&message));
            for end in PREFIX..out.len() {
                assert_eq!(Message::read(&out[PREFIX..end]), None, "{message:?} cut at {end}");
            }
        }
    }

    #[test]
    fn a_count_alone_allocates_nothing() {
        let mut body = vec![8];
        put_u32(&mut body, 1);
        put_u32(&mut body, u32::MAX);
        assert_eq!(Message::read(&body), None);
    }

    #[test]
    fn any_bytes_are_a_message_or_nothing() {
        let mut state = 1u64;
        let mut body = Vec::new();
        let mut read = 0;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            body.clear();
            body.push((state >> 60) as u8);
            body.extend((0..state >> 56 & 63).map(|i| if i % 4 == 0 { (state >> i & 15) as u8 } else { 0 }));
            if let Some(message) = Message::read(&body) {
                let mut out = Vec::new();
                message.write(&mut out);
                assert_eq!(Message::read(&out[PREFIX..]), Some(message));
                read += 1;
            }
            let _ = Identity::read(&body);
        }
        assert!(read > 0, "no case was a message");
    }

    #[test]
    fn an_identity_comes_back() {
        let own = Identity::own(Purpose::Data, 3, 8).unwrap();
        assert_eq!(Identity::read(&own.write()), Some(own));
    }
}
