//! What is known of long lists once a query has asked for them: the greatest shares, and of frequent words the share of every passage
//! in a byte. Shares depend on k1 and b, so the files do not have them: the first query with a word goes through its list.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use tercio_engine::cpu::weigh::CHUNK;

use super::words::share;
use crate::bm25::codec::BLOCK;
use crate::bm25::segment::{ListEntry, Postings, Segment};
use crate::error::SearchError;

/// A word is frequent that one passage in so many has: its bytes are then no more than some ten times its list.
const FREQUENT: u64 = 32;
/// Most bytes of shares that are kept, of all frequent words together. Words beyond it are looked up in their lists.
const MOST_BYTES: usize = 256 << 20;

/// The shares of a list, 4 bytes for 128 postings, and a byte for every passage if the word is frequent.
pub struct Shares {
    /// The greatest of all.
    pub greatest: f32,
    /// The greatest of each full block.
    pub blocks: Vec<f32>,
    /// The share of each passage in 255ths, rounded up; 0 where the word is not. Whole chunks.
    pub bytes: Option<Vec<u8>>,
}

/// A share as a byte: this many 255ths are not less.
#[inline]
pub fn byte(share: f32) -> u8 {
    let exact = share * 255.0;
    let below = exact as u8;
    below + u8::from(f32::from(below) < exact)
}

/// The shares of the lists that were asked for so far, by segment and place.
#[derive(Default)]
pub struct KnownShares {
    lists: RwLock<HashMap<(usize, u64), Arc<Shares>>>,
    bytes: AtomicUsize,
}

impl KnownShares {
    /// Those of a list of segment `k`.
    pub fn of(
        &self,
        k: usize,
        segment: &Segment,
        norms: &[f32],
        entry: &ListEntry,
    ) -> Result<Arc<Shares>, SearchError> {
        let key = (k, entry.start);
        if let Some(known) = self.lists.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(known));
        }
        let shares = Arc::new(self.read(segment, norms, entry)?);
        self.lists.write().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::clone(&shares));
        Ok(shares)
    }

    fn read(&self, segment: &Segment, norms: &[f32], entry: &ListEntry) -> Result<Shares, SearchError> {
        let frequent = u64::from(entry.count) * FREQUENT >= norms.len() as u64;
        // Two threads may count the same word: there is room enough for that.
        let fits = || self.bytes.fetch_add(norms.len(), Ordering::Relaxed) + norms.len() <= MOST_BYTES;
        let mut bytes = (frequent && fits()).then(|| vec![0u8; norms.len().next_multiple_of(CHUNK)]);
        let mut list = segment.list(entry)?;
        let mut block = Postings::empty();
        let mut shares = Shares { greatest: 0.0, blocks: Vec::new(), bytes: None };
        while !list.is_done() {
            list.read(&mut block).ok_or_else(|| segment.postings_damaged())?;
            let mut most = 0.0f32;
            for (&row, &frequency) in block.rows[..block.len].iter().zip(&block.frequencies) {
                let share = share(frequency, norms[row as usize]);
                most = most.max(share);
                if let Some(bytes) = &mut bytes {
                    bytes[row as usize] = byte(share);
                }
            }
            shares.greatest = shares.greatest.max(most);
            if block.len == BLOCK {
                shares.blocks.push(most);
            }
        }
        shares.bytes = bytes;
        Ok(shares)
    }
}
