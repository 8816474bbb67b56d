//! A piece of an index: the documents of one build or one addition, in files that never change.
//!
//! ```text
//! v1-lengths     little-endian u32, one a document: its vectors
//! v1-codes       little-endian u16, one a vector: its centroid
//! v1-residuals   the buckets of each vector's residual
//! v1-members     little-endian u32, one a centroid: the documents of its list; then the lists, one after the other: documents of the
//!                piece (u32, from 0), ascending
//! v1-ids         a JSON string a line, the document's id
//! ```

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tercio_data::multi_vectors::Origin;

use crate::bm25::mapped::Mapped;
use crate::error::SearchError;
use crate::manifest::{FileEntry, IndexFolder, Manifest};

/// What the manifest says of a piece.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PieceEntry {
    /// The version of the index that it came with; its files' names begin with it.
    pub version: u64,
    /// Its documents.
    pub documents: u64,
    /// Their vectors.
    pub tokens: u64,
    /// Mean square of the distance between a vector and its centroid.
    pub distance: f64,
    /// Where its vectors came from.
    pub origin: Origin,
}

/// A piece whose files are mapped.
pub(super) struct Piece {
    /// Row of the index that is its first document.
    pub first: u32,
    /// Vectors before each document, and all.
    pub starts: Vec<u64>,
    codes: Mapped,
    residuals: Mapped,
    /// Where the documents of a list begin, and one more.
    list_starts: Vec<u64>,
    /// Bytes of the counts before the lists.
    head: usize,
    members: Mapped,
    ids: PathBuf,
}

/// A file of the index that the manifest names.
pub(super) fn file_of(
    dir: &Path,
    manifest: &Manifest,
    version: u64,
    part: &str,
) -> Result<FileEntry, SearchError> {
    let name = format!("v{version}-{part}");
    manifest.files.iter().find(|f| f.name == name).cloned().ok_or_else(|| {
        SearchError::file(dir, format!("expected the file {name} in the manifest, found none; index again"))
    })
}

impl Piece {
    /// Maps the files of a piece and compares what they say with each other.
    ///
    /// # Errors
    /// Naming the file that is not there, or contradicts the others.
    pub fn open(
        dir: &Path,
        manifest: &Manifest,
        entry: &PieceEntry,
        first: u32,
        centroids: usize,
        row_bytes: usize,
    ) -> Result<Piece, SearchError> {
        let path = |part: &str| -> Result<(PathBuf, u64), SearchError> {
            let file = file_of(dir, manifest, entry.version, part)?;
            Ok((dir.join(&file.name), file.bytes))
        };
        let wrong = |path: &Path, what: String| {
            SearchError::file(path, format!("{what}; the file was damaged: index again"))
        };
        let sized = |part: &str, count: u64, each: usize| -> Result<Mapped, SearchError> {
            let (path, bytes) = path(part)?;
            if count.checked_mul(each as u64) != Some(bytes) {
                return Err(wrong(
                    &path,
                    format!("expected {each} bytes for each of {count}, found {bytes} bytes"),
                ));
            }
            Mapped::open(&path, bytes)
        };
        let lengths = sized("lengths", entry.documents, 4)?;
        let mut starts = Vec::with_capacity(entry.documents as usize + 1);
        starts.push(0u64);
        let mut all = 0u64;
        for length in lengths.as_chunks::<4>().0 {
            all += u64::from(u32::from_le_bytes(*length));
            starts.push(all);
        }
        if all != entry.tokens {
            let what = format!("expected lengths that sum to {}, found {all}", entry.tokens);
            return Err(wrong(&path("lengths")?.0, what));
        }
        let codes = sized("codes", entry.tokens, 2)?;
        let most = codes.as_chunks::<2>().0.iter().fold(0, |most, code| u16::from_le_bytes(*code).max(most));
        if entry.tokens > 0 && usize::from(most) >= centroids {
            let what = format!("expected numbers of {centroids} centroids, found {most}");
            return Err(wrong(&path("codes")?.0, what));
        }
        let residuals = sized("residuals", entry.tokens, row_bytes)?;
        let (list_path, bytes) = path("members")?;
        let members = Mapped::open(&list_path, bytes)?;
        let head = centroids * 4;
        let mut list_starts = vec![0u64];
        let mut all = 0u64;
        for count in members.get(..head).unwrap_or_default().as_chunks::<4>().0 {
            all += u64::from(u32::from_le_bytes(*count));
            list_starts.push(all);
        }
        let lists = members.get(head..).unwrap_or_default();
        // Without vectors there are no lists, of whatever centroids: these may have been learnt later.
        if entry.tokens == 0 {
            list_starts = vec![0; centroids + 1];
        } else if list_starts.len() != centroids + 1 || lists.len() as u64 != all * 4 {
            let what = format!("expected {centroids} lists, found {bytes} bytes of something else");
            return Err(wrong(&list_path, what));
        }
        let most = lists.as_chunks::<4>().0.iter().map(|d| u32::from_le_bytes(*d)).max();
        if let Some(most) = most.filter(|most| entry.tokens > 0 && u64::from(*most) >= entry.documents) {
            let what = format!("expected numbers of {} documents, found {most}", entry.documents);
            return Err(wrong(&list_path, what));
        }
        Ok(Piece { first, starts, codes, residuals, list_starts, head, members, ids: path("ids")?.0 })
    }

    /// How many documents it has.
    pub fn documents(&self) -> u32 {
        (self.starts.len() - 1) as u32
    }

    /// The centroids of a document's vectors.
    pub fn codes(&self, document: u32) -> &[[u8; 2]] {
        let (start, end) = self.range(document);
        &self.codes.as_chunks::<2>().0[start..end]
    }

    /// The buckets of a document's vectors.
    pub fn residuals(&self, document: u32, row_bytes: usize) -> &[u8] {
        let (start, end) = self.range(document);
        &self.residuals[start * row_bytes..end * row_bytes]
    }

    fn range(&self, document: u32) -> (usize, usize) {
        (self.starts[document as usize] as usize, self.starts[document as usize + 1] as usize)
    }

    /// The documents with a vector nearest to a centroid, of this piece, ascending.
    pub fn list(&self, centroid: u32) -> impl Iterator<Item = u32> + '_ {
        let (start, end) = (self.list_starts[centroid as usize], self.list_starts[centroid as usize + 1]);
        let bytes = self
            .members
            .get(self.head + start as usize * 4..self.head + end as usize * 4)
            .unwrap_or_default();
        bytes.as_chunks::<4>().0.iter().map(|d| u32::from_le_bytes(*d))
    }

    /// The ids of its documents.
    ///
    /// # Errors
    /// A file that has more or fewer, or lines that are no JSON strings.
    pub fn ids(&self) -> Result<Vec<String>, SearchError> {
        let file = File::open(&self.ids).map_err(SearchError::io(&self.ids, "open the file of an index"))?;
        let mut ids = Vec::with_capacity(self.starts.len() - 1);
        for line in BufReader::new(file).lines() {
            let line = line.map_err(SearchError::io(&self.ids, "read the file of an index"))?;
            ids.push(serde_json::from_str::<String>(&line).map_err(|e| {
                let what = format!(
                    "line {}: expected a JSON string, found another ({e}); index again",
                    ids.len() + 1
                );
                SearchError::file(&self.ids, what)
            })?);
        }
        if ids.len() != self.starts.len() - 1 {
            let what = format!("expected {} ids, found {}; index again", self.starts.len() - 1, ids.len());
            return Err(SearchError::file(&self.ids, what));
        }
        Ok(ids)
    }
}

/// Writes the lists of a piece from its codes: a document once in the list of every centroid that it has a vector at.
pub(super) fn write_members(
    folder: &IndexFolder,
    centroids: usize,
    lengths: &[u32],
    codes: &[u16],
) -> Result<FileEntry, SearchError> {
    let mut counts = vec![0u32; centroids];
    each_member(lengths, codes, |centroid, _| counts[centroid] += 1);
    let mut at: Vec<usize> =
        counts.iter().scan(0, |at, &n| Some(std::mem::replace(at, *at + n as usize))).collect();
    let mut members = vec![0u32; counts.iter().map(|n| *n as usize).sum()];
    each_member(lengths, codes, |centroid, document| {
        members[at[centroid]] = document;
        at[centroid] += 1;
    });
    let mut file = folder.create("members")?;
    for numbers in [counts, members] {
        for chunk in numbers.chunks(1 << 16) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|n| n.to_le_bytes()).collect();
            file.write(&bytes)?;
        }
    }
    file.finish()
}

/// Calls with every centroid of a document once, the documents in order.
fn each_member(lengths: &[u32], codes: &[u16], mut with: impl FnMut(usize, u32)) {
    let mut start = 0;
    let mut own = Vec::new();
    for (document, &length) in lengths.iter().enumerate() {
        own.clear();
        own.extend_from_slice(&codes[start..start + length as usize]);
        own.sort_unstable();
        own.dedup();
        own.iter().for_each(|code| with(usize::from(*code), document as u32));
        start += length as usize;
    }
}

/// Writes ids, one a line.
pub(super) fn write_ids(folder: &IndexFolder, ids: &[String]) -> Result<FileEntry, SearchError> {
    let mut file = folder.create("ids")?;
    for chunk in ids.chunks(1 << 12) {
        let mut bytes = Vec::new();
        for id in chunk {
            serde_json::to_writer(&mut bytes, id).map_err(|e| SearchError::Unusable(e.to_string()))?;
            bytes.push(b'\n');
        }
        file.write(&bytes)?;
    }
    file.finish()
}

/// Reads rows as little-endian u32, ascending, below `total`.
pub(super) fn read_rows(path: &Path, total: u64) -> Result<Vec<u32>, SearchError> {
    let bytes = fs::read(path).map_err(SearchError::io(path, "read the file of an index"))?;
    let rows: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let ordered = rows.windows(2).all(|pair| pair[0] < pair[1]);
    if bytes.len() != rows.len() * 4 || !ordered || rows.last().is_some_and(|row| u64::from(*row) >= total) {
        let what = format!(
            "expected ascending rows below {total}, found something else; the file was damaged: index again"
        );
        return Err(SearchError::file(path, what));
    }
    Ok(rows)
}
