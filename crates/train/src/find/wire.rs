//! What ranks send each other of a search: hits, and lists of parts, as bytes.

use tercio_comm::CommError;
use tercio_search::Hit;

/// The error of bytes that are none of these.
pub fn strange(rank: usize) -> CommError {
    CommError::Protocol(format!("rank {rank} sent bytes that are no results of a search"))
}

/// Parts as one, each with its length in front.
pub fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    let with_length = |part: &Vec<u8>| [&(part.len() as u64).to_le_bytes()[..], part].concat();
    parts.iter().flat_map(with_length).collect()
}

/// Parts that were joined.
///
/// # Errors
/// Bytes that are none.
pub fn parted(mut bytes: &[u8], rank: usize) -> Result<Vec<Vec<u8>>, CommError> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let part = bytes
            .split_first_chunk::<8>()
            .and_then(|(len, rest)| rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?));
        let (part, rest) = part.ok_or_else(|| strange(rank))?;
        parts.push(part.to_vec());
        bytes = rest;
    }
    Ok(parts)
}

/// The bytes of hits.
pub fn bytes_of(hits: &[Hit]) -> Vec<u8> {
    hits.iter().flat_map(|hit| [&hit.row.to_le_bytes()[..], &hit.score.to_le_bytes()].concat()).collect()
}

/// The hits of bytes.
///
/// # Errors
/// Bytes that are none.
pub fn hits_of(bytes: &[u8], rank: usize) -> Result<Vec<Hit>, CommError> {
    let (hits, []) = bytes.as_chunks::<12>() else { return Err(strange(rank)) };
    let hit = |b: &[u8; 12]| {
        let row = u64::from_le_bytes(std::array::from_fn(|i| b[i]));
        Hit { row, score: f32::from_le_bytes(std::array::from_fn(|i| b[8 + i])) }
    };
    Ok(hits.iter().map(hit).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_comes_back_as_it_went() {
        let hits = vec![Hit { row: 3, score: 1.5 }, Hit { row: u64::MAX, score: -0.25 }];
        assert_eq!(hits_of(&bytes_of(&hits), 0).unwrap(), hits);
        assert!(hits_of(&[0; 13], 0).is_err());
        let parts = vec![bytes_of(&hits), Vec::new(), b"x".to_vec()];
        let bytes = joined(&parts);
        assert_eq!(parted(&bytes, 0).unwrap(), parts);
        for cut in [1, 7, 9, bytes.len() - 1] {
            assert!(parted(&bytes[..cut], 1).is_err(), "{cut}");
        }
        assert!(parted(&[0xff; 8], 1).is_err());
    }
}
