//! Rows and codes of all lists in memory, and their files.

use std::fs;
use std::ops::Range;
use std::path::Path;

use tercio_engine::cpu::lookup::{CODE_ROWS, LINE_BYTES, code_place};

use crate::error::SearchError;
use crate::manifest::{FileEntry, IndexFolder};

/// Bytes that begin at a cache line.
#[derive(Default)]
pub(super) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn zeros(len: usize) -> Aligned {
        let bytes = vec![0; len + LINE_BYTES];
        let start = bytes.as_ptr().align_offset(LINE_BYTES).min(LINE_BYTES);
        Aligned { bytes, start }
    }

    fn len(&self) -> usize {
        self.bytes.len().saturating_sub(LINE_BYTES)
    }

    fn get(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[self.start + range.start..self.start + range.end]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        let len = self.len();
        &mut self.bytes[self.start..self.start + len]
    }
}

/// The lists of an index: a list's rows in ascending order, and blocks of their codes.
pub(super) struct Lists {
    /// Parts of a code.
    parts: usize,
    /// Where rows of a list begin, and one more.
    rows_from: Vec<usize>,
    /// Where blocks of a list begin, and one more.
    blocks_from: Vec<usize>,
    rows: Vec<u32>,
    codes: Aligned,
}

/// Bytes of a block of codes.
fn block_bytes(parts: usize) -> usize {
    parts * CODE_ROWS / 2
}

impl Lists {
    /// Lists of these many rows; nothing in them yet.
    fn empty(parts: usize, counts: &[usize]) -> Lists {
        let sum = |of: &dyn Fn(usize) -> usize| {
            let mut from = vec![0];
            from.extend(counts.iter().scan(0, |at, &n| {
                *at += of(n);
                Some(*at)
            }));
            from
        };
        let (rows_from, blocks_from) = (sum(&|n| n), sum(&|n| n.div_ceil(CODE_ROWS)));
        let (rows, blocks) = (rows_from[counts.len()], blocks_from[counts.len()]);
        Lists {
            parts,
            rows_from,
            blocks_from,
            rows: vec![0; rows],
            codes: Aligned::zeros(blocks * block_bytes(parts)),
        }
    }

    /// What `earlier` lists have, then rows `first..` with the list and the codes (one a byte, `parts` a row) of each.
    pub fn with(
        earlier: Option<&Lists>,
        lists: usize,
        parts: usize,
        first: u64,
        of: &[u32],
        codes: &[u8],
    ) -> Lists {
        let mut counts = vec![0; lists];
        (0..lists).for_each(|l| counts[l] = earlier.map_or(0, |e| e.rows(l).len()));
        let mut filled = counts.clone();
        of.iter().for_each(|&l| counts[l as usize] += 1);
        let mut all = Lists::empty(parts, &counts);
        if let Some(earlier) = earlier {
            for (l, &count) in filled.iter().enumerate() {
                all.rows[all.rows_from[l]..][..count].copy_from_slice(earlier.rows(l));
                let blocks = earlier.codes(l);
                let at = all.blocks_from[l] * block_bytes(parts);
                all.codes.get_mut()[at..at + blocks.len()].copy_from_slice(blocks);
            }
        }
        for (r, (&list, codes)) in of.iter().zip(codes.chunks_exact(parts)).enumerate() {
            let l = list as usize;
            let place = filled[l];
            filled[l] += 1;
            all.rows[all.rows_from[l] + place] = (first + r as u64) as u32;
            let at = (all.blocks_from[l] + place / CODE_ROWS) * block_bytes(parts);
            let block = &mut all.codes.get_mut()[at..at + block_bytes(parts)];
            for (part, code) in codes.iter().enumerate() {
                let (byte, shift) = code_place(place % CODE_ROWS, part);
                block[byte] |= code << shift;
            }
        }
        all
    }

    /// How many lists there are.
    pub fn count(&self) -> usize {
        self.rows_from.len() - 1
    }

    /// Rows of a list.
    pub fn rows(&self, list: usize) -> &[u32] {
        &self.rows[self.rows_from[list]..self.rows_from[list + 1]]
    }

    /// Codes of a list, as `Cpu::look_up` reads them; the last block has room behind the last row.
    pub fn codes(&self, list: usize) -> &[u8] {
        let bytes = block_bytes(self.parts);
        self.codes.get(self.blocks_from[list] * bytes..self.blocks_from[list + 1] * bytes)
    }

    /// The blocks of a list that hold rows of a range: their rows, others among them, and their codes.
    pub fn blocks_with(&self, list: usize, range: &Range<u64>) -> (&[u32], &[u8]) {
        let (rows, codes) = (self.rows(list), self.codes(list));
        let place = |row: u64| rows.partition_point(|&r| u64::from(r) < row);
        let (first, end) = (place(range.start) / CODE_ROWS, place(range.end).div_ceil(CODE_ROWS));
        let bytes = block_bytes(self.parts);
        (&rows[first * CODE_ROWS..(end * CODE_ROWS).min(rows.len())], &codes[first * bytes..end * bytes])
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        let offsets = (self.rows_from.len() + self.blocks_from.len()) * size_of::<usize>();
        (offsets + self.rows.len() * 4 + self.codes.bytes.len()) as u64
    }

    /// Writes the files of lists: counts, rows, codes.
    pub fn write(&self, folder: &IndexFolder) -> Result<Vec<FileEntry>, SearchError> {
        let mut counts = folder.create("counts")?;
        let mut rows = folder.create("rows")?;
        for list in 0..self.count() {
            let bytes: Vec<u8> = self.rows(list).iter().flat_map(|r| r.to_le_bytes()).collect();
            counts.write(&(self.rows(list).len() as u64).to_le_bytes())?;
            rows.write(&bytes)?;
        }
        let mut codes = folder.create("codes")?;
        for chunk in self.codes.get(0..self.codes.len()).chunks(1 << 20) {
            codes.write(chunk)?;
        }
        Ok(vec![counts.finish()?, rows.finish()?, codes.finish()?])
    }

    /// Reads them; `total` rows in all.
    ///
    /// # Errors
    /// Files that contradict each other or the manifest.
    pub fn read(
        dir: &Path,
        files: [&str; 3],
        lists: usize,
        parts: usize,
        total: u64,
    ) -> Result<Lists, SearchError> {
        let [counts, rows, codes] = files.map(|name| dir.join(name));
        let wrong = |path: &Path, what: String| SearchError::file(path, format!("{what}; index again"));
        let bytes = read(&counts)?;
        let (numbers, rest) = bytes.as_chunks::<8>();
        let numbers: Vec<u64> = numbers.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let sum = numbers.iter().try_fold(0u64, |sum, &n| sum.checked_add(n));
        if numbers.len() != lists || !rest.is_empty() || sum != Some(total) {
            let what = format!("expected the sizes of {lists} lists that sum to {total}, found others");
            return Err(wrong(&counts, what));
        }
        let found = read(&rows)?;
        if found.len() as u64 != total * 4 {
            return Err(wrong(&rows, format!("expected {total} rows, found {} bytes", found.len())));
        }
        // Of this size are the rows: what is allocated for the codes is no more than a few times theirs.
        let counts: Vec<usize> = numbers.iter().map(|&n| n as usize).collect();
        let blocks: usize = counts.iter().map(|n| n.div_ceil(CODE_ROWS)).sum();
        let size = fs::metadata(&codes).map_err(SearchError::io(&codes, "open the file of an index"))?.len();
        if size != (blocks * block_bytes(parts)) as u64 {
            return Err(wrong(&codes, format!("expected {blocks} blocks of codes, found {size} bytes")));
        }
        let mut all = Lists::empty(parts, &counts);
        let bytes = read(&codes)?;
        if bytes.len() != all.codes.len() {
            let what = format!("expected {blocks} blocks of codes, found {} bytes", bytes.len());
            return Err(wrong(&codes, what));
        }
        all.codes.get_mut().copy_from_slice(&bytes);
        for (row, bytes) in all.rows.iter_mut().zip(found.as_chunks::<4>().0) {
            *row = u32::from_le_bytes(*bytes);
        }
        let mut seen = vec![false; total as usize];
        for &row in &all.rows {
            match seen.get_mut(row as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    let what = format!("expected each of {total} rows once, found row {row} otherwise");
                    return Err(wrong(&rows, what));
                }
            }
        }
        Ok(all)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, SearchError> {
    fs::read(path).map_err(SearchError::io(path, "read the file of an index"))
}

/// Writes numbers as little-endian f32.
pub(crate) fn write_numbers(
    folder: &IndexFolder,
    part: &str,
    values: &[f32],
) -> Result<FileEntry, SearchError> {
    let mut file = folder.create(part)?;
    for chunk in values.chunks(1 << 16) {
        let bytes: Vec<u8> = chunk.iter().flat_map(|v| v.to_le_bytes()).collect();
        file.write(&bytes)?;
    }
    file.finish()
}

/// Reads `count` numbers.
///
/// # Errors
/// More or fewer, or some that are none.
pub(crate) fn read_numbers(path: &Path, count: usize) -> Result<Vec<f32>, SearchError> {
    let bytes = read(path)?;
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    if values.len() != count || bytes.len() != count * 4 || values.iter().any(|v| !v.is_finite()) {
        let found = bytes.len();
        let what =
            format!("expected {count} finite numbers of f32, found others ({found} bytes); index again");
        return Err(SearchError::file(path, what));
    }
    Ok(values)
}
