//! Reading a segment: terms are looked up where they lie, lists are read block by block. Whatever the bytes say is checked
//! before it is used: a damaged file is an error.

use std::path::{Path, PathBuf};

use super::codec::{BLOCK, Block, packed_bytes, take, take_u32, unpack};
use super::mapped::Mapped;
use super::writer::{GROUP, SKIP_BYTES, SegmentEntry, Skip};
use crate::error::SearchError;
use crate::manifest::Manifest;

/// Most bits of a frequency less 1: no passage has more words.
const MOST_FREQUENCY_BITS: u8 = 30;

/// An open segment.
pub struct Segment {
    postings: Mapped,
    terms: Mapped,
    lengths: Mapped,
    /// Where the groups of terms end and their starts begin.
    groups_end: usize,
    groups: usize,
    /// What the manifest says of it.
    pub entry: SegmentEntry,
    paths: [PathBuf; 3],
}

/// What is known of a term's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// Passages that have the term.
    pub count: u32,
    /// Where its list starts among all postings.
    pub start: u64,
    /// Bytes of the list.
    pub bytes: u64,
    /// Greatest frequency, shortest and longest passage; of lists of a full block or more.
    pub bounds: Option<[u32; 3]>,
}

impl Segment {
    /// Opens the segment of an entry of `manifest`.
    pub fn open(dir: &Path, manifest: &Manifest, entry: &SegmentEntry) -> Result<Segment, SearchError> {
        let paths = entry.files.each_ref().map(|name| dir.join(name));
        let size = |k: usize| {
            let file = manifest.files.iter().find(|f| f.name == entry.files[k]);
            file.map(|f| f.bytes).ok_or_else(|| damaged(&paths[k], "the manifest does not say its size"))
        };
        let sizes = [size(0)?, size(1)?, size(2)?];
        Segment::open_files(dir, sizes, entry)
    }

    /// Opens a segment whose files have these sizes.
    pub fn open_files(dir: &Path, sizes: [u64; 3], entry: &SegmentEntry) -> Result<Segment, SearchError> {
        let paths = entry.files.each_ref().map(|name| dir.join(name));
        let postings = Mapped::open(&paths[0], sizes[0])?;
        let terms = Mapped::open(&paths[1], sizes[1])?;
        let lengths = Mapped::open(&paths[2], sizes[2])?;
        if entry.passages.checked_mul(4) != Some(sizes[2]) || entry.passages > u64::from(u32::MAX) {
            return Err(damaged(&paths[2], "it has another number of passages than the manifest says"));
        }
        let footer = terms.last_chunk::<16>().map(|f| {
            let word = |k: usize| u64::from_le_bytes(std::array::from_fn(|i| f[8 * k + i]));
            (word(0), word(1))
        });
        let shape = footer.and_then(|(count, groups)| {
            let groups_end = (terms.len() - 16).checked_sub(usize::try_from(groups).ok()?.checked_mul(8)?)?;
            let fits = count == entry.terms && groups == count.div_ceil(GROUP as u64);
            fits.then_some((groups_end, groups as usize))
        });
        let Some((groups_end, groups)) = shape else {
            return Err(damaged(&paths[1], "its end is not that of a list of terms"));
        };
        Ok(Segment { postings, terms, lengths, groups_end, groups, entry: entry.clone(), paths })
    }

    /// Words of every passage.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.lengths.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b))
    }

    /// Words of one passage.
    pub fn length(&self, row: u32) -> u32 {
        self.lengths.as_chunks::<4>().0.get(row as usize).map_or(0, |b| u32::from_le_bytes(*b))
    }

    fn terms_damaged(&self) -> SearchError {
        damaged(&self.paths[1], "its terms cannot be read")
    }

    /// An error of the postings.
    pub fn postings_damaged(&self) -> SearchError {
        damaged(&self.paths[0], "a list of postings cannot be read")
    }

    fn group(&self, k: usize) -> Option<&[u8]> {
        let starts = self.terms.get(self.groups_end..)?;
        let at = |k: usize| -> Option<usize> {
            if k == self.groups {
                return Some(self.groups_end);
            }
            let bytes = starts.get(k * 8..)?.first_chunk::<8>()?;
            usize::try_from(u64::from_le_bytes(*bytes)).ok()
        };
        self.terms[..self.groups_end].get(at(k)?..at(k + 1)?)
    }

    /// The first term of a group.
    fn head(&self, k: usize) -> Option<&[u8]> {
        let mut bytes = self.group(k)?;
        take(&mut bytes)?;
        take(&mut bytes).filter(|&shared| shared == 0)?;
        let len = usize::try_from(take(&mut bytes)?).ok()?;
        bytes.get(..len)
    }

    /// The list of a term, where there is one.
    pub fn find(&self, term: &[u8]) -> Result<Option<ListEntry>, SearchError> {
        self.find_in(term).ok_or_else(|| self.terms_damaged())
    }

    fn find_in(&self, term: &[u8]) -> Option<Option<ListEntry>> {
        // The last group whose first term is not greater.
        let (mut low, mut high) = (0, self.groups);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.head(middle)? <= term { low = middle + 1 } else { high = middle }
        }
        let Some(k) = low.checked_sub(1) else { return Some(None) };
        let mut group = Group::new(self.group(k)?)?;
        while !group.bytes.is_empty() {
            let list = group.next()?;
            if group.term.as_slice() >= term {
                return Some((group.term == term).then_some(list));
            }
        }
        Some(None)
    }

    /// All terms and their lists, in order.
    pub fn terms(&self) -> Terms<'_> {
        Terms { segment: self, next_group: 0, group: Group::default(), postings: 0 }
    }

    /// A cursor at the start of a list.
    pub fn list(&self, entry: &ListEntry) -> Result<List<'_>, SearchError> {
        self.list_of(entry).ok_or_else(|| self.postings_damaged())
    }

    /// How often a term stands in a passage that has it.
    pub fn frequency(&self, entry: &ListEntry, row: u32) -> Result<u32, SearchError> {
        let mut list = self.list(entry)?;
        let mut block = Postings::empty();
        list.skip_to(row);
        list.read(&mut block).ok_or_else(|| self.postings_damaged())?;
        let at = block.rows[..block.len].binary_search(&row).map_err(|_| self.postings_damaged())?;
        Ok(block.frequencies[at])
    }

    fn list_of(&self, entry: &ListEntry) -> Option<List<'_>> {
        let start = usize::try_from(entry.start).ok()?;
        let bytes = self.postings.get(start..start.checked_add(usize::try_from(entry.bytes).ok()?)?)?;
        let blocks = entry.count as usize / BLOCK;
        let (bytes, skips) = bytes.split_at_checked(bytes.len().checked_sub(blocks * SKIP_BYTES)?)?;
        let skips = skips.as_chunks::<SKIP_BYTES>().0;
        let tail = match skips.last().map(Skip::read) {
            None => 0,
            Some(last) => last.end(),
        };
        let tail = bytes.get(tail..)?;
        let passages = self.entry.passages as u32;
        Some(List { bytes, skips, tail, left: entry.count as usize % BLOCK, passages, block: 0, next: 0 })
    }
}

impl Skip {
    fn end(&self) -> usize {
        self.start as usize + packed_bytes(self.gap_bits.into()) + packed_bytes(self.frequency_bits.into())
    }
}

/// The terms of a segment, in order.
pub struct Terms<'a> {
    segment: &'a Segment,
    next_group: usize,
    group: Group<'a>,
    postings: u64,
}

impl Terms<'_> {
    /// The next term's list; its bytes are in [`Terms::term`].
    pub fn next(&mut self) -> Result<Option<ListEntry>, SearchError> {
        if self.group.bytes.is_empty() {
            if self.next_group == self.segment.groups {
                return Ok(None);
            }
            let group = self.segment.group(self.next_group).and_then(Group::new);
            self.group =
                group.filter(|g| g.postings == self.postings).ok_or_else(|| self.segment.terms_damaged())?;
            self.next_group += 1;
        }
        let list = self.group.next().ok_or_else(|| self.segment.terms_damaged())?;
        self.postings = self.group.postings;
        Ok(Some(list))
    }

    /// The term that was read last.
    pub fn term(&self) -> &[u8] {
        &self.group.term
    }
}

/// The terms of a group.
#[derive(Default)]
struct Group<'a> {
    bytes: &'a [u8],
    term: Vec<u8>,
    postings: u64,
}

impl<'a> Group<'a> {
    fn new(mut bytes: &'a [u8]) -> Option<Group<'a>> {
        let postings = take(&mut bytes)?;
        Some(Group { bytes, term: Vec::new(), postings })
    }

    fn next(&mut self) -> Option<ListEntry> {
        let shared = usize::try_from(take(&mut self.bytes)?).ok().filter(|&n| n <= self.term.len())?;
        let len = usize::try_from(take(&mut self.bytes)?).ok()?;
        let (suffix, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        self.term.truncate(shared);
        self.term.extend_from_slice(suffix);
        let count = take_u32(&mut self.bytes).filter(|&n| n > 0)?;
        let bytes = take(&mut self.bytes)?;
        let bounds = match count as usize >= BLOCK {
            true => {
                let mut number = || take_u32(&mut self.bytes);
                Some([number()?, number()?, number()?])
            }
            false => None,
        };
        let entry = ListEntry { count, start: self.postings, bytes, bounds };
        self.postings = self.postings.checked_add(bytes)?;
        Some(entry)
    }
}

/// A list of postings, read block by block: full blocks, then what is left.
pub struct List<'a> {
    bytes: &'a [u8],
    skips: &'a [[u8; SKIP_BYTES]],
    tail: &'a [u8],
    left: usize,
    passages: u32,
    block: usize,
    /// The least row that the next block may have.
    next: u32,
}

/// Rows and frequencies of a block.
pub struct Postings {
    /// How many there are.
    pub len: usize,
    /// Their rows, rising.
    pub rows: [u32; BLOCK],
    /// Their frequencies, 1 or more.
    pub frequencies: [u32; BLOCK],
}

impl Postings {
    /// None.
    pub fn empty() -> Postings {
        Postings { len: 0, rows: [0; BLOCK], frequencies: [0; BLOCK] }
    }
}

impl List<'_> {
    /// What is known of the next block; `None` where that is what is left, or nothing.
    fn peek(&self) -> Option<Skip> {
        self.skips.get(self.block).map(Skip::read)
    }

    /// The number of the next block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Whether nothing is left.
    pub fn is_done(&self) -> bool {
        self.block > self.skips.len() || (self.block == self.skips.len() && self.left == 0)
    }

    /// Goes on to the first block that may have `row` or one behind it.
    #[inline]
    pub fn skip_to(&mut self, row: u32) {
        let last = |k: usize| Skip::read(&self.skips[k]).last;
        let start = self.block;
        // Twice as far with every step, then halves: rows that are asked for are mostly near.
        let mut step = 1;
        while self.block < self.skips.len() && last(self.block) < row {
            let far = self.block + step;
            if far < self.skips.len() && last(far) < row {
                self.block = far;
                step *= 2;
            } else if step > 1 {
                step = 1;
            } else {
                self.block += 1;
            }
        }
        if self.block > start {
            self.next = last(self.block - 1).saturating_add(1);
        }
    }

    /// Reads the next block; `None` if it is damaged, a block of none at the end.
    #[inline]
    pub fn read(&mut self, out: &mut Postings) -> Option<()> {
        let Some(skip) = self.peek() else { return self.read_tail(out) };
        if skip.frequency_bits > MOST_FREQUENCY_BITS || skip.last >= self.passages {
            return None;
        }
        let bytes = self.bytes.get(skip.start as usize..)?;
        let (mut gaps, mut frequencies): (Block, Block) = ([[0; 4]; 32], [[0; 4]; 32]);
        unpack(bytes, skip.gap_bits.into(), &mut gaps)?;
        unpack(
            bytes.get(packed_bytes(skip.gap_bits.into())..)?,
            skip.frequency_bits.into(),
            &mut frequencies,
        )?;
        // In 64 bits, so that what is too large shows at the end.
        let mut next = u64::from(self.next);
        for (row, gap) in out.rows.iter_mut().zip(gaps.as_flattened()) {
            next += u64::from(*gap);
            *row = next as u32;
            next += 1;
        }
        for (frequency, less) in out.frequencies.iter_mut().zip(frequencies.as_flattened()) {
            *frequency = less + 1;
        }
        if next != u64::from(skip.last) + 1 {
            return None;
        }
        (out.len, self.next, self.block) = (BLOCK, skip.last + 1, self.block + 1);
        Some(())
    }

    fn read_tail(&mut self, out: &mut Postings) -> Option<()> {
        out.len = 0;
        if self.is_done() {
            return Some(());
        }
        let mut next = u64::from(self.next);
        for k in 0..self.left {
            let first = take(&mut self.tail)?;
            next = next.checked_add(first >> 1)?;
            out.rows[k] = u32::try_from(next).ok().filter(|&row| row < self.passages)?;
            next += 1;
            out.frequencies[k] = match first & 1 {
                0 => 1,
                _ => take_u32(&mut self.tail).filter(|&n| n > 1 && n >> MOST_FREQUENCY_BITS == 0)?,
            };
        }
        (out.len, self.block) = (self.left, self.block + 1);
        Some(())
    }
}

fn damaged(path: &Path, what: &str) -> SearchError {
    SearchError::file(
        path,
        format!("{what}: the file is damaged; `tercio search --verify` tells which are, index again"),
    )
}
