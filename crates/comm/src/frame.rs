//! A frame of the data plane: forty bytes that say what follows, then a piece of a message.
//!
//! A message (one rank's bytes for another in one step of one collective) is cut into pieces, so that a piece is checked
//! and added while the next one arrives.

/// Bytes of a frame's header.
pub(crate) const HEADER: usize = 40;
/// Most bytes of a piece: it stays in the second cache between its arrival, its check and its sum. A multiple of every
/// number's width.
pub(crate) const PIECE: usize = 256 << 10;

const MAGIC: u32 = u32::from_le_bytes(*b"TrcF");

/// What a rank was doing when it sent a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Barrier,
    Broadcast,
    Gather,
    AllGather,
    Reduce,
    Parts,
}

impl Kind {
    const ALL: [Kind; 6] =
        [Kind::Barrier, Kind::Broadcast, Kind::Gather, Kind::AllGather, Kind::Reduce, Kind::Parts];

    /// Its name, for errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Barrier => "barrier",
            Kind::Broadcast => "broadcast",
            Kind::Gather => "gather",
            Kind::AllGather => "all-gather",
            Kind::Reduce => "all-reduce",
            Kind::Parts => "all-gather of parts",
        }
    }
}

/// What a frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// What the sender is doing.
    pub kind: Kind,
    /// The sender has nothing to add: no payload follows.
    pub absent: bool,
    /// Step within the collective.
    pub step: u16,
    /// Number of the collective since the start.
    pub sequence: u64,
    /// Bytes of the whole message.
    pub total: u64,
    /// Where this piece lies in it.
    pub at: u64,
    /// Bytes of this piece.
    pub length: u32,
    /// CRC-32 of the piece.
    pub crc: u32,
}

impl Header {
    /// Its bytes.
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0u8; HEADER];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = u8::from(self.absent);
        bytes[6..8].copy_from_slice(&self.step.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.total.to_le_bytes());
        // Pieces are numbered by place; a message of more than 2^32 pieces (a petabyte) does not occur.
        bytes[24..28].copy_from_slice(&((self.at / PIECE as u64) as u32).to_le_bytes());
        bytes[28..32].copy_from_slice(&self.length.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..36]);
        bytes[36..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// A header from its bytes; in words what is wrong with them.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Header, &'static str> {
        let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let long = |i: usize| u64::from(word(i)) | u64::from(word(i + 4)) << 32;
        if word(0) != MAGIC {
            return Err("does not begin as a frame");
        }
        if word(36) != crc32fast::hash(&bytes[..36]) {
            return Err("has a damaged header (its checksum does not match)");
        }
        let kind = *Kind::ALL.get(bytes[4] as usize).ok_or("is of an unknown kind")?;
        let header = Header {
            kind,
            absent: bytes[5] == 1,
            step: u16::from_le_bytes([bytes[6], bytes[7]]),
            sequence: long(8),
            total: long(16),
            at: u64::from(word(24)) * PIECE as u64,
            length: word(28),
            crc: word(32),
        };
        let end = header.at.checked_add(u64::from(header.length)).ok_or("has impossible lengths")?;
        if bytes[5] > 1 || header.length as usize > PIECE || end > header.total {
            return Err("has impossible lengths");
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            kind: Kind::Gather,
            absent: false,
            step: 3,
            sequence: 1 << 40,
            total: 3 * PIECE as u64 + 5,
            at: 3 * PIECE as u64,
            length: 5,
            crc: 77,
        }
    }

    #[test]
    fn a_header_comes_back() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
        for (i, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i);
        }
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let whole = header().encode();
        for bit in 0..8 * HEADER {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_beyond_the_message_are_refused() {
        for bad in [Header { length: 6, ..header() }, Header { total: 2, ..header() }] {
            assert_eq!(Header::decode(&bad.encode()), Err("has impossible lengths"));
        }
    }
}
