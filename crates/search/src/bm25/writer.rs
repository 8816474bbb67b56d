//! Writing a segment: three files, in one pass over terms in their order.
//!
//! ```text
//! postings   one list after the other. A list is full blocks of 128 postings (gaps of rows less 1, then frequencies less 1,
//!            each packed), what is left as variable bytes, then 16 bytes for each full block
//! terms      groups of 16 terms with what is to know of their lists, terms as what they add to the one before; then where the
//!            groups start; then how many terms and groups there are
//! lengths    the words of every passage, 32 bits each
//! ```
//!
//! Numbers are little-endian. The bytes are a function of the postings alone.

use serde::{Deserialize, Serialize};

use super::codec::{BLOCK, Block, bits, pack, put};
use crate::error::SearchError;
use crate::manifest::{FileEntry, IndexFile, IndexFolder};

/// Terms of a group.
pub const GROUP: usize = 16;
/// Bytes that are known of a full block: [`Skip`].
pub const SKIP_BYTES: usize = 16;

/// What is known of a full block without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skip {
    /// Its last row.
    pub last: u32,
    /// Where it starts in its list.
    pub start: u32,
    /// Bits of its gaps.
    pub gap_bits: u8,
    /// Bits of its frequencies.
    pub frequency_bits: u8,
    /// Its greatest frequency; [`u16::MAX`] stands for any.
    pub most_often: u16,
    /// Words of its shortest passage; [`u16::MAX`] stands for that many or more.
    pub shortest: u16,
}

impl Skip {
    fn bytes(self) -> [u8; SKIP_BYTES] {
        let mut bytes = [0; SKIP_BYTES];
        bytes[..4].copy_from_slice(&self.last.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.start.to_le_bytes());
        bytes[8] = self.gap_bits;
        bytes[9] = self.frequency_bits;
        bytes[10..12].copy_from_slice(&self.most_often.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.shortest.to_le_bytes());
        bytes
    }

    /// Reads one.
    #[inline]
    pub fn read(bytes: &[u8; SKIP_BYTES]) -> Skip {
        let word = |k: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[k + i]));
        let half = |k: usize| u16::from_le_bytes([bytes[k], bytes[k + 1]]);
        Skip {
            last: word(0),
            start: word(4),
            gap_bits: bytes[8],
            frequency_bits: bytes[9],
            most_often: half(10),
            shortest: half(12),
        }
    }
}

/// A segment, as the manifest has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentEntry {
    /// Names of its files: postings, terms, lengths.
    pub files: [String; 3],
    /// Row of the collection that is its first.
    pub first: u64,
    /// Its passages.
    pub passages: u64,
    /// Words of all its passages.
    pub words: u64,
    /// Different ones.
    pub terms: u64,
    /// Passages of every term, summed.
    pub postings: u64,
    /// SHA-256 of ids, titles and texts of its passages, by which an append knows that they are still the same.
    pub content: String,
}

/// A segment that is being written.
pub struct SegmentWriter {
    postings: IndexFile,
    terms: IndexFile,
    lengths: IndexFile,
    passages: u64,
    words: u64,
    term_count: u64,
    posting_count: u64,
    groups: Vec<u64>,
    previous: Vec<u8>,
    list: ListWriter,
    bytes: Vec<u8>,
}

impl SegmentWriter {
    /// Begins a segment of this name, unlike any other of the index's version.
    pub fn create(folder: &IndexFolder, name: &str) -> Result<SegmentWriter, SearchError> {
        Ok(SegmentWriter {
            postings: folder.create(&format!("{name}.postings"))?,
            terms: folder.create(&format!("{name}.terms"))?,
            lengths: folder.create(&format!("{name}.lengths"))?,
            passages: 0,
            words: 0,
            term_count: 0,
            posting_count: 0,
            groups: Vec::new(),
            previous: Vec::new(),
            list: ListWriter::default(),
            bytes: Vec::new(),
        })
    }

    /// Adds the length of the next passage, in words.
    pub fn length(&mut self, words: u32) -> Result<(), SearchError> {
        self.passages += 1;
        self.words += u64::from(words);
        self.lengths.write(&words.to_le_bytes())
    }

    /// Adds a posting of the term that is at work; rows rise.
    pub fn posting(&mut self, row: u32, frequency: u32, length: u32) -> Result<(), SearchError> {
        self.list.push(row, frequency, length, &mut self.postings)
    }

    /// Ends the list of a term, greater than all before.
    pub fn term(&mut self, term: &[u8]) -> Result<(), SearchError> {
        self.bytes.clear();
        if self.term_count.is_multiple_of(GROUP as u64) {
            self.groups.push(self.terms.bytes());
            self.previous.clear();
            put(self.postings.bytes() - self.list.written, &mut self.bytes);
        }
        let shared = self.previous.iter().zip(term).take_while(|(a, b)| a == b).count();
        put(shared as u64, &mut self.bytes);
        put((term.len() - shared) as u64, &mut self.bytes);
        self.bytes.extend_from_slice(&term[shared..]);
        self.previous.truncate(shared);
        self.previous.extend_from_slice(&term[shared..]);
        let list = std::mem::take(&mut self.list);
        self.posting_count += list.count;
        list.finish(&mut self.postings, &mut self.bytes)?;
        self.term_count += 1;
        self.terms.write(&self.bytes)
    }

    /// Ends the segment. `first` is its first row, `content` the checksum of its passages.
    pub fn finish(
        mut self,
        first: u64,
        content: String,
    ) -> Result<(SegmentEntry, [FileEntry; 3]), SearchError> {
        for start in &self.groups {
            self.terms.write(&start.to_le_bytes())?;
        }
        self.terms.write(&self.term_count.to_le_bytes())?;
        self.terms.write(&(self.groups.len() as u64).to_le_bytes())?;
        let files = [self.postings.finish()?, self.terms.finish()?, self.lengths.finish()?];
        let entry = SegmentEntry {
            files: files.each_ref().map(|f| f.name.clone()),
            first,
            passages: self.passages,
            words: self.words,
            terms: self.term_count,
            postings: self.posting_count,
            content,
        };
        Ok((entry, files))
    }
}

/// The list of one term, on its way.
#[derive(Default)]
struct ListWriter {
    /// Postings that are no full block yet: row, frequency, length.
    waiting: Vec<[u32; 3]>,
    skips: Vec<u8>,
    count: u64,
    /// Row that the next gap counts from, plus 1; 0 at the start.
    next: u32,
    written: u64,
    most_often: u32,
    shortest: u32,
    longest: u32,
    bytes: Vec<u8>,
}

impl ListWriter {
    fn push(
        &mut self,
        row: u32,
        frequency: u32,
        length: u32,
        out: &mut IndexFile,
    ) -> Result<(), SearchError> {
        if self.count == 0 {
            self.shortest = u32::MAX;
        }
        self.count += 1;
        self.most_often = self.most_often.max(frequency);
        self.shortest = self.shortest.min(length);
        self.longest = self.longest.max(length);
        self.waiting.push([row, frequency, length]);
        if self.waiting.len() == BLOCK { self.block(out) } else { Ok(()) }
    }

    fn block(&mut self, out: &mut IndexFile) -> Result<(), SearchError> {
        let (mut gaps, mut frequencies): (Block, Block) = ([[0; 4]; 32], [[0; 4]; 32]);
        let (mut most_often, mut shortest) = (0, u32::MAX);
        for (i, &[row, frequency, length]) in self.waiting.iter().enumerate() {
            gaps[i / 4][i % 4] = row - self.next;
            self.next = row + 1;
            frequencies[i / 4][i % 4] = frequency - 1;
            most_often = most_often.max(frequency);
            shortest = shortest.min(length);
        }
        let skip = Skip {
            last: self.waiting[BLOCK - 1][0],
            start: u32::try_from(self.written).map_err(|_| {
                SearchError::Unusable("a list of postings of 4 GiB; cut the collection into parts".into())
            })?,
            gap_bits: bits(&gaps) as u8,
            frequency_bits: bits(&frequencies) as u8,
            most_often: u16::try_from(most_often).unwrap_or(u16::MAX),
            shortest: u16::try_from(shortest).unwrap_or(u16::MAX),
        };
        self.skips.extend(skip.bytes());
        self.waiting.clear();
        self.bytes.clear();
        pack(&gaps, bits(&gaps), &mut self.bytes);
        pack(&frequencies, bits(&frequencies), &mut self.bytes);
        self.written += self.bytes.len() as u64;
        out.write(&self.bytes)
    }

    /// Ends the list; what is to know of it goes to `about`.
    fn finish(mut self, out: &mut IndexFile, about: &mut Vec<u8>) -> Result<(), SearchError> {
        self.bytes.clear();
        for &[row, frequency, _] in &self.waiting {
            let gap = u64::from(row - self.next);
            self.next = row + 1;
            // Most words stand once in a passage.
            put(gap << 1 | u64::from(frequency > 1), &mut self.bytes);
            if frequency > 1 {
                put(u64::from(frequency), &mut self.bytes);
            }
        }
        let bytes = self.written + (self.bytes.len() + self.skips.len()) as u64;
        out.write(&self.bytes)?;
        out.write(&self.skips)?;
        put(self.count, about);
        put(bytes, about);
        if self.count >= BLOCK as u64 {
            put(u64::from(self.most_often), about);
            put(u64::from(self.shortest), about);
            put(u64::from(self.longest), about);
        }
        Ok(())
    }
}
