//! Making an index: passages are inverted in memory until it is full, each time that goes to disk as a segment, and in the end
//! the segments are merged. The bytes of the result do not depend on how often memory was full.

use std::collections::HashMap;
use std::path::Path;

use rayon::prelude::*;
use sha2::{Digest, Sha256};
use tercio_data::{Passage, Passages, hex};

use super::segment::{Postings, Segment, Terms};
use super::writer::{SegmentEntry, SegmentWriter};
use super::{Bm25Settings, Fields, KIND, Stored};
use crate::error::SearchError;
use crate::manifest::{Collection, FileEntry, IndexFolder, Manifest};

/// Passages that are read between two questions whether to stop, at most: fewer where they are long.
const CHUNK: usize = 2048;
/// Passages that one thread takes.
const PART: usize = 64;
/// Segments of an index; one more, and an append makes one of all.
pub const MOST_SEGMENTS: usize = 8;
/// Bytes of a posting in memory.
const POSTING: usize = 12;
/// What a term costs in memory beside its letters, about.
const TERM: usize = 96;
/// Least memory of a build: below, runs would be of a few passages.
pub const LEAST_MEMORY: u64 = 8 << 20;

/// How far a build is: passages done and to do.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// The passages of a folder's next version.
struct Source<'a> {
    passages: &'a Passages,
    settings: &'a Bm25Settings,
    memory: usize,
    stop: &'a dyn Fn() -> bool,
}

/// Builds an index of a whole collection, in place of whatever index stands in the folder.
pub fn build(
    dir: &Path,
    passages: &Passages,
    settings: &Bm25Settings,
    memory: u64,
    stop: &dyn Fn() -> bool,
    progress: Progress<'_>,
) -> Result<Manifest, SearchError> {
    let source = Source::new(passages, settings, memory, stop)?;
    let folder = IndexFolder::open(dir)?;
    let (entry, files) = source.segment(&folder, 0, 0, progress)?;
    commit(folder, passages, settings, vec![entry], files.to_vec())
}

/// Adds the passages that a collection has gained at its end. `None` where it has gained none.
pub fn append(
    dir: &Path,
    passages: &Passages,
    memory: u64,
    stop: &dyn Fn() -> bool,
    progress: Progress<'_>,
) -> Result<Option<Manifest>, SearchError> {
    let (folder, earlier) = IndexFolder::open_earlier(dir)?;
    earlier.expect_kind(dir, KIND)?;
    let Stored { settings, segments } = Stored::read(dir, &earlier)?;
    let source = Source::new(passages, &settings, memory, stop)?;
    let known = earlier.collection.count;
    if known > passages.len() as u64 {
        return Err(SearchError::file(
            passages.path(),
            format!(
                "it has {} passages, the index {} has {known}: passages can be appended, not taken away; index without --append",
                passages.len(),
                dir.display()
            ),
        ));
    }
    if earlier.collection.fingerprint.as_deref() != Some(passages.fingerprint()) {
        for segment in &segments {
            source.compare(dir, segment)?;
        }
    }
    if known == passages.len() as u64 && earlier.collection == Collection::of(passages) {
        return Ok(None);
    }
    let mut files = earlier.files.clone();
    let mut entries = segments;
    if known < passages.len() as u64 {
        let (entry, more) = source.segment(&folder, entries.len(), known as usize, progress)?;
        files.extend(more);
        entries.push(entry);
    }
    if entries.len() > MOST_SEGMENTS {
        let content = content_of(passages, 0..passages.len(), stop)?;
        let (entry, all) = merge(&folder, "all", &entries, &files, content, stop)?;
        (entries, files) = (vec![entry], all.to_vec());
    }
    commit(folder, passages, &settings, entries, files).map(Some)
}

fn commit(
    folder: IndexFolder,
    passages: &Passages,
    settings: &Bm25Settings,
    segments: Vec<SegmentEntry>,
    files: Vec<FileEntry>,
) -> Result<Manifest, SearchError> {
    let stored = Stored { settings: settings.clone(), segments };
    let stored = serde_json::to_value(stored).map_err(|e| SearchError::Unusable(e.to_string()))?;
    folder.commit(KIND, Collection::of(passages), stored, files)
}

/// SHA-256 over the SHA-256 of every passage.
fn content_of(
    passages: &Passages,
    rows: std::ops::Range<usize>,
    stop: &dyn Fn() -> bool,
) -> Result<String, SearchError> {
    let mut sum = Sha256::new();
    for start in rows.clone().step_by(CHUNK) {
        if stop() {
            return Err(SearchError::Stopped);
        }
        let digests: Vec<[u8; 32]> = (start..(start + CHUNK).min(rows.end))
            .into_par_iter()
            .map(|i| passages.get(i).map(|p| digest(&p)))
            .collect::<Result<_, _>>()?;
        sum.update(digests.as_flattened());
    }
    Ok(hex(&sum.finalize()))
}

fn digest(passage: &Passage) -> [u8; 32] {
    let mut sum = Sha256::new();
    for part in [&passage.id, &passage.title, &passage.text] {
        sum.update((part.len() as u64).to_le_bytes());
        sum.update(part);
    }
    sum.finalize().into()
}

impl<'a> Source<'a> {
    fn new(
        passages: &'a Passages,
        settings: &'a Bm25Settings,
        memory: u64,
        stop: &'a dyn Fn() -> bool,
    ) -> Result<Self, SearchError> {
        settings.check()?;
        if memory < LEAST_MEMORY {
            return Err(SearchError::Unusable(format!(
                "{memory} bytes of memory for building an index: expected {LEAST_MEMORY} or more"
            )));
        }
        if passages.len() > u32::MAX as usize {
            return Err(SearchError::file(
                passages.path(),
                format!(
                    "{} passages: expected at most {}; cut the file into parts",
                    passages.len(),
                    u32::MAX
                ),
            ));
        }
        Ok(Source { passages, settings, memory: usize::try_from(memory).unwrap_or(usize::MAX), stop })
    }

    /// Refuses passages of a segment that are not what they were.
    fn compare(&self, dir: &Path, segment: &SegmentEntry) -> Result<(), SearchError> {
        let rows = segment.first as usize..(segment.first + segment.passages) as usize;
        if content_of(self.passages, rows.clone(), self.stop)? == segment.content {
            return Ok(());
        }
        Err(SearchError::file(
            self.passages.path(),
            format!(
                "passages {} to {} are not those that the index {} has; --append is for passages at the end of the file, index \
                 without it",
                rows.start,
                rows.end - 1,
                dir.display()
            ),
        ))
    }

    /// One segment of the passages from `first` to the end.
    fn segment(
        &self,
        folder: &IndexFolder,
        number: usize,
        first: usize,
        progress: Progress<'_>,
    ) -> Result<(SegmentEntry, [FileEntry; 3]), SearchError> {
        let total = (self.passages.len() - first) as u64;
        let mut batch = Batch::new(self.memory);
        let mut runs: Vec<(SegmentEntry, [FileEntry; 3])> = Vec::new();
        let mut content = Sha256::new();
        let mut begun = first;
        progress(0, total);
        let (mut start, mut size) = (first, PART);
        while start < self.passages.len() {
            if (self.stop)() {
                return Err(SearchError::Stopped);
            }
            let rows: Vec<usize> = (start..start.saturating_add(size).min(self.passages.len())).collect();
            let parts: Vec<Part> = rows
                .par_chunks(PART)
                .map(|rows| Part::read(self.passages, rows, self.settings))
                .collect::<Result<_, _>>()?;
            // What is read next takes about an eighth of the memory beside the batch, if its passages are like these.
            let one = parts.iter().map(Part::bytes).sum::<usize>() / rows.len() + 1;
            size = (self.memory / 8 / one).min(2 * size).clamp(PART, CHUNK);
            for part in parts {
                if batch.is_full_with(&part) {
                    let run = batch.write(
                        folder,
                        &format!("run-{}", runs.len()),
                        (begun - first) as u64,
                        String::new(),
                    )?;
                    begun += run.0.passages as usize;
                    runs.push(run);
                }
                content.update(part.digests.as_flattened());
                batch.add(part)?;
            }
            start += rows.len();
            progress((start - first) as u64, total);
        }
        let content = hex(&content.finalize());
        let name = number.to_string();
        if runs.is_empty() {
            return batch.write(folder, &name, first as u64, content);
        }
        let run =
            batch.write(folder, &format!("run-{}", runs.len()), (begun - first) as u64, String::new())?;
        drop(batch);
        runs.push(run);
        let (entries, files): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
        let files = files.concat();
        let (mut entry, merged) = merge(folder, &name, &entries, &files, content, self.stop)?;
        entry.first = first as u64;
        for file in &files {
            let path = folder.dir().join(&file.name);
            std::fs::remove_file(&path).map_err(SearchError::io(&path, "remove a file of the build"))?;
        }
        Ok((entry, merged))
    }
}

/// The words of some passages.
struct Part {
    terms: Vec<String>,
    /// Term and frequency, passage after passage.
    postings: Vec<(u32, u32)>,
    /// Where each passage's postings end, and its words.
    passages: Vec<(usize, u32)>,
    digests: Vec<[u8; 32]>,
}

impl Part {
    fn read(passages: &Passages, rows: &[usize], settings: &Bm25Settings) -> Result<Part, SearchError> {
        let mut part =
            Part { terms: Vec::new(), postings: Vec::new(), passages: Vec::new(), digests: Vec::new() };
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let (mut room, mut found) = (String::new(), Vec::new());
        for &row in rows {
            let passage = passages.get(row)?;
            part.digests.push(digest(&passage));
            found.clear();
            let mut word = |word: &str| match numbers.get(word) {
                Some(&number) => found.push(number),
                None => {
                    let number = part.terms.len() as u32;
                    part.terms.push(word.to_owned());
                    numbers.insert(word.to_owned(), number);
                    found.push(number);
                }
            };
            if settings.fields != Fields::Text {
                settings.analyzer.words(&passage.title, &mut room, &mut word);
            }
            if settings.fields != Fields::Title {
                settings.analyzer.words(&passage.text, &mut room, &mut word);
            }
            let words = found.len() as u32;
            found.sort_unstable();
            part.postings.extend(found.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)));
            part.passages.push((part.postings.len(), words));
        }
        Ok(part)
    }

    /// Bytes that it takes, about.
    fn bytes(&self) -> usize {
        let terms: usize = self.terms.iter().map(|term| term.len() + size_of::<String>()).sum();
        terms
            + size_of_val(&self.postings[..])
            + size_of_val(&self.passages[..])
            + size_of_val(&self.digests[..])
    }
}

/// Passages that are inverted in memory.
struct Batch {
    numbers: HashMap<String, u32>,
    /// Bytes of all terms, about.
    term_bytes: usize,
    /// Term, row, frequency.
    postings: Vec<[u32; 3]>,
    lengths: Vec<u32>,
    memory: usize,
}

impl Batch {
    fn new(memory: usize) -> Batch {
        let (numbers, postings, lengths) = (HashMap::new(), Vec::new(), Vec::new());
        Batch { numbers, term_bytes: 0, postings, lengths, memory }
    }

    /// Whether it has no room for a part. Half of the memory is for a list that grows, and is copied when it does.
    fn is_full_with(&self, part: &Part) -> bool {
        let postings = (self.postings.len() + part.postings.len()) * POSTING;
        let lengths = (self.lengths.len() + part.passages.len()) * 4;
        !self.lengths.is_empty() && postings + lengths + self.term_bytes > self.memory / 2
    }

    fn add(&mut self, part: Part) -> Result<(), SearchError> {
        let numbers: Vec<u32> = part
            .terms
            .into_iter()
            .map(|term| {
                let new = self.numbers.len() as u32;
                let bytes = term.len() + TERM;
                *self.numbers.entry(term).or_insert_with(|| {
                    self.term_bytes += bytes;
                    new
                })
            })
            .collect();
        self.postings.try_reserve(part.postings.len()).map_err(|_| {
            SearchError::Unusable("no memory for building the index; give it less with --memory".into())
        })?;
        let mut start = 0;
        for (end, words) in part.passages {
            let row = self.lengths.len() as u32;
            let postings = &part.postings[start..end];
            self.postings.extend(postings.iter().map(|&(term, n)| [numbers[term as usize], row, n]));
            self.lengths.push(words);
            start = end;
        }
        Ok(())
    }

    /// Writes all that is there as a segment, and is empty.
    fn write(
        &mut self,
        folder: &IndexFolder,
        name: &str,
        first: u64,
        content: String,
    ) -> Result<(SegmentEntry, [FileEntry; 3]), SearchError> {
        let mut terms: Vec<(String, u32)> = self.numbers.drain().collect();
        terms.par_sort_unstable();
        let mut ranks = vec![0; terms.len()];
        for (rank, (_, number)) in terms.iter().enumerate() {
            ranks[*number as usize] = rank as u32;
        }
        self.postings.par_iter_mut().for_each(|p| p[0] = ranks[p[0] as usize]);
        self.postings.par_sort_unstable();
        let mut out = SegmentWriter::create(folder, name)?;
        for &words in &self.lengths {
            out.length(words)?;
        }
        for list in self.postings.chunk_by(|a, b| a[0] == b[0]) {
            for &[_, row, frequency] in list {
                out.posting(row, frequency, self.lengths[row as usize])?;
            }
            out.term(terms[list[0][0] as usize].0.as_bytes())?;
        }
        self.postings.clear();
        self.lengths.clear();
        self.term_bytes = 0;
        out.finish(first, content)
    }
}

/// One segment of several that follow one another, which lie in the folder.
fn merge(
    folder: &IndexFolder,
    name: &str,
    entries: &[SegmentEntry],
    files: &[FileEntry],
    content: String,
    stop: &dyn Fn() -> bool,
) -> Result<(SegmentEntry, [FileEntry; 3]), SearchError> {
    let mut segments = Vec::new();
    for entry in entries {
        let size = |name: &String| files.iter().find(|f| f.name == *name).map_or(0, |f| f.bytes);
        segments.push(Segment::open_files(folder.dir(), entry.files.each_ref().map(size), entry)?);
    }
    let mut out = SegmentWriter::create(folder, name)?;
    for segment in &segments {
        for words in segment.lengths() {
            out.length(words)?;
        }
    }
    let mut inputs: Vec<(Terms<'_>, Option<_>)> = Vec::new();
    for segment in &segments {
        let mut terms = segment.terms();
        let list = terms.next()?;
        inputs.push((terms, list));
    }
    let mut postings = Postings::empty();
    let (mut term, mut count) = (Vec::new(), 0u64);
    loop {
        let least = inputs.iter().filter(|(_, list)| list.is_some()).map(|(terms, _)| terms.term()).min();
        let Some(least) = least else { break };
        term.clear();
        term.extend_from_slice(least);
        count += 1;
        if count.is_multiple_of(4096) && stop() {
            return Err(SearchError::Stopped);
        }
        let mut first = 0;
        for (segment, (terms, entry)) in segments.iter().zip(&mut inputs) {
            if let Some(found) = entry.filter(|_| terms.term() == term) {
                let mut list = segment.list(&found)?;
                while !list.is_done() {
                    list.read(&mut postings).ok_or_else(|| segment.postings_damaged())?;
                    for (&row, &frequency) in
                        postings.rows.iter().zip(&postings.frequencies).take(postings.len)
                    {
                        out.posting(first + row, frequency, segment.length(row))?;
                    }
                }
                *entry = terms.next()?;
                if entry.is_some() && terms.term() <= term.as_slice() {
                    return Err(segment.postings_damaged());
                }
            }
            first += segment.entry.passages as u32;
        }
        out.term(&term)?;
    }
    out.finish(0, content)
}
