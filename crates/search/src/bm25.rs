//! BM25 over an inverted index of our own, on disk and mapped into memory.
//!
//! A passage's score is the sum over the words of the query of
//!
//! ```text
//! times the word stands in the query · ln(1 + (N - n + 0.5) / (n + 0.5)) · f · (k1 + 1) / (f + k1 · (1 - b + b · length / mean length))
//! ```
//!
//! (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond", with 1 added under the logarithm, so that
//! no word counts against a passage.) N is the number of passages, n of those that have the word, f how often this one has it; lengths
//! are words. k1 and b can be given when a query is asked; the manifest has those that are taken otherwise. Nothing of them is in the other files,
//! and bounds by which passages are passed over hold for any.
//!
//! Scores are sums of f32 in the order of the words' weights, whatever threads, memory and appends there were; passing over never
//! changes what is found.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tercio_data::Passages;

use crate::error::SearchError;
use crate::manifest::Manifest;
use crate::part::Part;
use crate::top::Hit;

mod analysis;
mod build;
mod codec;
pub(crate) mod mapped;
mod query;
mod segment;
mod stem;
mod writer;

pub use analysis::Analyzer;
pub use build::{LEAST_MEMORY, MOST_SEGMENTS, Progress};
use segment::Segment;
pub use writer::SegmentEntry;

/// The name of this kind of index.
pub const KIND: &str = "bm25";

/// The two constants of the formula.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bm25Constants {
    /// How slowly a word's weight saturates as it stands again in a passage.
    pub k1: f64,
    /// How much long passages are held back: 0 not at all, 1 in full.
    pub b: f64,
}

impl Default for Bm25Constants {
    fn default() -> Self {
        Bm25Constants { k1: 0.9, b: 0.4 }
    }
}

impl Bm25Constants {
    /// Refuses numbers outside of the formula's range.
    ///
    /// # Errors
    /// k1 below 0 or above 1000, b outside 0 to 1, or no numbers.
    pub fn check(&self) -> Result<(), SearchError> {
        if (0.0..=1000.0).contains(&self.k1) && (0.0..=1.0).contains(&self.b) {
            return Ok(());
        }
        Err(SearchError::Unusable(format!(
            "k1 {} and b {}: expected k1 from 0 to 1000, b from 0 to 1",
            self.k1, self.b
        )))
    }
}

/// What of a passage is indexed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fields {
    /// Title and text, as one.
    #[default]
    TitleAndText,
    /// The text.
    Text,
    /// The title.
    Title,
}

/// How an index is made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bm25Settings {
    /// How text becomes words.
    pub analyzer: Analyzer,
    /// What of a passage is indexed.
    pub fields: Fields,
    /// The constants of searches that say none.
    pub constants: Bm25Constants,
}

impl Bm25Settings {
    fn check(&self) -> Result<(), SearchError> {
        self.constants.check()
    }
}

/// What the manifest remembers.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    settings: Bm25Settings,
    segments: Vec<SegmentEntry>,
}

impl Stored {
    fn read(dir: &Path, manifest: &Manifest) -> Result<Stored, SearchError> {
        let stored: Stored = manifest.settings(dir)?;
        // Where the segments end, if each begins where the one before ends and rows fit into 4 bytes.
        let end = stored.segments.iter().try_fold(0u64, |end, segment| {
            let next = end.checked_add(segment.passages).filter(|next| *next <= u64::from(u32::MAX));
            next.filter(|_| segment.first == end)
        });
        if end != Some(manifest.collection.count) {
            return Err(SearchError::file(
                dir,
                "the segments of its manifest do not make up the collection; index again",
            ));
        }
        Ok(stored)
    }
}

/// An open index. Shared between threads freely.
pub struct Bm25Index {
    manifest: Manifest,
    settings: Bm25Settings,
    constants: Bm25Constants,
    segments: Vec<Segment>,
    /// k1 · (1 - b + b · length / mean length) of every passage, a segment a list.
    norms: Vec<Vec<f32>>,
    shares: query::KnownShares,
    mean_length: f64,
    part: Part,
}

impl Bm25Index {
    /// Builds an index of a collection into a folder; one that stands there is replaced once the new one is whole. Memory is about
    /// `memory` bytes, at least [`LEAST_MEMORY`], and whatever the longest passage takes. `stop` is asked now and then.
    ///
    /// # Errors
    /// A passage that cannot be read; a folder that holds something else, or that another process writes into; a full disk;
    /// [`SearchError::Stopped`]. Nothing of the new index is left then.
    pub fn build(
        dir: &Path,
        passages: &Passages,
        settings: &Bm25Settings,
        memory: u64,
        stop: &dyn Fn() -> bool,
        progress: Progress<'_>,
    ) -> Result<Manifest, SearchError> {
        build::build(dir, passages, settings, memory, stop, progress)
    }

    /// Adds the passages that the collection has gained at its end; `None` where there are none. Those that were there are compared
    /// by their checksum. Beyond [`MOST_SEGMENTS`] all becomes one segment.
    ///
    /// # Errors
    /// As [`Bm25Index::build`]; passages that are not those that were indexed; no index.
    pub fn append(
        dir: &Path,
        passages: &Passages,
        memory: u64,
        stop: &dyn Fn() -> bool,
        progress: Progress<'_>,
    ) -> Result<Option<Manifest>, SearchError> {
        build::append(dir, passages, memory, stop, progress)
    }

    /// Opens an index, with other constants than it was made with where they are given. Takes 4 bytes a passage.
    ///
    /// # Errors
    /// A folder that holds no finished index of this kind; files of another size; constants out of range.
    pub fn open(dir: &Path, constants: Option<Bm25Constants>) -> Result<Bm25Index, SearchError> {
        let manifest = Manifest::read(dir)?;
        manifest.expect_kind(dir, KIND)?;
        let Stored { settings, segments } = Stored::read(dir, &manifest)?;
        let segments: Vec<Segment> =
            segments.iter().map(|entry| Segment::open(dir, &manifest, entry)).collect::<Result<_, _>>()?;
        let words: f64 = segments.iter().map(|s| s.entry.words as f64).sum();
        let count = manifest.collection.count;
        // Where no passage has a word, nothing is found, and the mean is not asked for.
        let mean_length = if words > 0.0 { words / count as f64 } else { 1.0 };
        let constants = constants.unwrap_or(settings.constants);
        let mut index = Bm25Index {
            manifest,
            settings,
            constants,
            segments,
            norms: Vec::new(),
            shares: Default::default(),
            mean_length,
            part: Part::WHOLE,
        };
        index.set_constants(constants)?;
        Ok(index)
    }

    /// Takes other constants from now on.
    ///
    /// # Errors
    /// Constants out of range.
    pub fn set_constants(&mut self, constants: Bm25Constants) -> Result<(), SearchError> {
        constants.check()?;
        self.constants = constants;
        self.shares = Default::default();
        self.norms =
            self.segments.iter().map(|s| s.lengths().map(|words| self.norm(words)).collect()).collect();
        Ok(())
    }

    /// Searches a part of the passages only.
    pub fn only(self, part: Part) -> Bm25Index {
        Bm25Index { part, ..self }
    }

    fn norm(&self, words: u32) -> f32 {
        let Bm25Constants { k1, b } = self.constants;
        (k1 * (1.0 - b + b * f64::from(words) / self.mean_length)) as f32
    }

    /// What the folder says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// How it was made.
    pub fn settings(&self) -> &Bm25Settings {
        &self.settings
    }

    /// The constants of the formula.
    pub fn constants(&self) -> Bm25Constants {
        self.constants
    }

    /// Its passages.
    pub fn len(&self) -> u64 {
        self.manifest.collection.count
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its segments.
    pub fn segments(&self) -> impl Iterator<Item = &SegmentEntry> {
        self.segments.iter().map(|s| &s.entry)
    }

    /// The best `depth` passages for each query, best first: those alone that have a word of it, so there may be fewer. Queries are
    /// shared out to the threads of rayon's pool.
    ///
    /// # Errors
    /// A file that is damaged; [`SearchError::Stopped`].
    pub fn search<S: AsRef<str> + Sync>(
        &self,
        queries: &[S],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        // Room is made for as many hits as are asked for.
        let depth = depth.min(usize::try_from(self.len()).unwrap_or(usize::MAX));
        query::search(self, queries, depth, stop)
    }

    /// As [`Bm25Index::search`], by looking at every passage that has a word: what tests and doubts are settled with.
    ///
    /// # Errors
    /// Likewise.
    pub fn search_all<S: AsRef<str> + Sync>(
        &self,
        queries: &[S],
        depth: usize,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        query::search_all(self, queries, depth)
    }
}
