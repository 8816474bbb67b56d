//! Finding passages: an index folder of any kind, opened, and asked with the texts of questions.
//!
//! ```text
//! build_bm25(dir, &passages, &settings, memory, stop, progress)      append_bm25(...)       make or extend an index
//! Finder::open_on(&device, dir, &FindSettings { .. })                the index and its passages; open(dir, ..) of words alone
//! finder.search(&["who ...?"], depth, stop)  ->  Vec<Vec<Hit>>       best first; a hit is a row and a score
//! finder.passages().get(hit.row as usize)                            the passage of a row, with its id
//! queries::Queries::open(path, cache)                                questions of a file, whatever its form
//! search_among(world, &finder, &queries, depth, stop, each)          the same by all ranks; rank 0 has it all
//! search_parts(world, &finder, &questions, depth, stop)               by ranks that have opened a part of the index each
//! write_found_among(world, &finder, &queries, &settings, out, ..)    and into a file: FiD's JSON, JSON lines, a TREC run
//! ```
//!
//! Indexes of vectors take a model that embeds the questions; BM25 takes none.

use std::path::{Path, PathBuf};

use tercio_data::Passages;
use tercio_engine::Cpu;
use tercio_search::bm25::{self, Bm25Constants, Bm25Index, Bm25Settings, Progress};
use tercio_search::manifest::Manifest;
use tercio_search::plaid;
use tercio_search::{Hit, Part, SearchError};

use crate::error::TrainError;
use crate::scratch::ScratchFolder;

mod dense;
mod late;
mod parts;
pub mod queries;
mod ranks;
mod wire;

pub use dense::{Dense, DenseSettings, FLAT, FlatSettings, append_compressed, build_flat, collection_of};
pub use late::{Late, append_late, build_late, delete_late, read_ids};
pub use parts::search_parts;
pub use ranks::{FoundReport, FoundSettings, search_among, write_found_among};

/// How often an index is opened that is replaced meanwhile.
const REOPENED: usize = 3;

/// How an index is opened and asked.
#[derive(Clone, Debug, Default)]
pub struct FindSettings {
    /// The collection, where it is not where it was when it was indexed.
    pub passages: Option<PathBuf>,
    /// Folder for the index of the collection's file; default: a temporary one.
    pub cache_dir: Option<PathBuf>,
    /// BM25's constants, where they are not to be those of the index: k1 and b.
    pub k1: Option<f64>,
    /// See `k1`.
    pub b: Option<f64>,
    /// How an index of vectors is asked.
    pub dense: DenseSettings,
    /// File of the ids of the passages that may be found, one a line; of an index of late interaction.
    pub only: Option<PathBuf>,
    /// The part of the index that is looked at: see [`search_parts`].
    pub part: Part,
}

/// What a search does between its halves: candidates for each question and how many of them are kept, for those of all parts.
pub(crate) type Exchange<'a> = &'a mut dyn FnMut(Vec<Vec<Hit>>, usize) -> Result<Vec<Vec<Hit>>, TrainError>;

/// An open index of any kind.
pub enum AnyIndex {
    /// By words.
    Bm25(Box<Bm25Index>),
    /// By vectors of passages and questions: exact, or compressed.
    Dense(Box<Dense>),
    /// By the vectors of their tokens.
    Late(Box<Late>),
}

impl AnyIndex {
    /// Opens the index of a folder. `device` embeds questions and computes with vectors; an index of words does without.
    ///
    /// # Errors
    /// No finished index, damage, a kind that this version does not know, settings that do not go with the kind.
    pub fn open(dir: &Path, settings: &FindSettings, device: Option<&Cpu>) -> Result<AnyIndex, TrainError> {
        // Files of two versions must not meet: what was opened counts if the manifest is still the one that was read before.
        for _ in 0..REOPENED {
            let before = Manifest::read_if_there(dir)?;
            let opened = Manifest::read(dir)
                .map_err(TrainError::from)
                .and_then(|manifest| AnyIndex::open_version(dir, manifest, settings, device));
            if Manifest::read_if_there(dir)? == before {
                return opened;
            }
        }
        Err(TrainError::Unusable(format!(
            "{}: the index was replaced {REOPENED} times while it was opened; wait until it is finished",
            dir.display()
        )))
    }

    fn open_version(
        dir: &Path,
        manifest: Manifest,
        settings: &FindSettings,
        device: Option<&Cpu>,
    ) -> Result<AnyIndex, TrainError> {
        if settings.only.is_some() && manifest.kind != plaid::KIND {
            let what =
                format!("--only is for an index of late interaction; this one is of kind {}", manifest.kind);
            return Err(TrainError::Options(what));
        }
        match manifest.kind.as_str() {
            bm25::KIND => {
                settings.dense.check_of_words()?;
                let mut index = Bm25Index::open(dir, None)?;
                let own = index.constants();
                let given =
                    Bm25Constants { k1: settings.k1.unwrap_or(own.k1), b: settings.b.unwrap_or(own.b) };
                if given != own {
                    given.check().map_err(|e| TrainError::Options(e.to_string()))?;
                    index.set_constants(given)?;
                }
                Ok(AnyIndex::Bm25(Box::new(index.only(settings.part))))
            }
            kind if dense::is_dense(kind) || kind == plaid::KIND => {
                let device = device.ok_or_else(|| {
                    let what =
                        format!("{}: an index of vectors needs a device to be opened on", dir.display());
                    TrainError::Options(what)
                })?;
                if settings.k1.or(settings.b).is_some() {
                    let what = "--k1 and --b are constants of BM25; the index is one of vectors";
                    return Err(TrainError::Options(what.into()));
                }
                if kind == plaid::KIND {
                    let late = Late::open(device, dir, manifest, settings)?;
                    return Ok(AnyIndex::Late(Box::new(late)));
                }
                Ok(AnyIndex::Dense(Box::new(Dense::open(
                    device,
                    dir,
                    manifest,
                    &settings.dense,
                    settings.part,
                )?)))
            }
            other => Err(TrainError::Unusable(format!(
                "{}: an index of kind {other:?}, which this version of Tercio does not know; it knows bm25, flat, compressed and plaid",
                dir.display()
            ))),
        }
    }

    /// What the folder says of itself.
    pub fn manifest(&self) -> &Manifest {
        match self {
            AnyIndex::Bm25(index) => index.manifest(),
            AnyIndex::Dense(index) => index.manifest(),
            AnyIndex::Late(index) => index.index().manifest(),
        }
    }

    /// The best `depth` passages for each question among those of the index's part, best first. BM25 finds passages with a word of the question only, so there may be fewer.
    ///
    /// # Errors
    /// Damage; [`TrainError::Stopped`].
    pub fn search<S: AsRef<str> + Sync>(
        &self,
        questions: &[S],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, TrainError> {
        self.search_with(questions, depth, stop, &mut |candidates, _| Ok(candidates))
    }

    /// The same; an index whose search has two halves asks `exchange` in between.
    pub(crate) fn search_with<S: AsRef<str> + Sync>(
        &self,
        questions: &[S],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
        exchange: Exchange<'_>,
    ) -> Result<Vec<Vec<Hit>>, TrainError> {
        match self {
            AnyIndex::Bm25(index) => Ok(index.search(questions, depth, stop)?),
            AnyIndex::Dense(index) => index.search(questions, depth, stop, exchange),
            AnyIndex::Late(index) => index.search(questions, depth, stop, exchange),
        }
    }
}

/// Compares the checksums of all files of an index of any kind, and with `vectors` those of the vectors that it was made of and reads
/// when it is asked.
///
/// # Errors
/// The first file that is not what was written; [`TrainError::Stopped`].
pub fn verify(dir: &Path, vectors: bool, stop: &dyn Fn() -> bool) -> Result<(), TrainError> {
    let manifest = Manifest::read(dir)?;
    manifest.verify(dir, stop)?;
    match vectors && dense::is_dense(&manifest.kind) {
        true => dense::verify_vectors(dir, &manifest, stop),
        false => Ok(()),
    }
}

/// An index with its passages.
pub struct Finder {
    index: AnyIndex,
    passages: Passages,
    part: Part,
    /// Where the index of the passages' file lies, unless it has a folder.
    _scratch: Option<ScratchFolder>,
}

impl Finder {
    /// Opens an index of words and its collection; see [`Finder::open_on`] for any kind.
    ///
    /// # Errors
    /// As [`AnyIndex::open`]; a collection that is gone, or is not the one that was indexed.
    pub fn open(dir: &Path, settings: &FindSettings) -> Result<Finder, TrainError> {
        Finder::of(AnyIndex::open(dir, settings, None)?, dir, settings)
    }

    /// Opens an index of any kind and its collection.
    ///
    /// # Errors
    /// Likewise.
    pub fn open_on(device: &Cpu, dir: &Path, settings: &FindSettings) -> Result<Finder, TrainError> {
        Finder::of(AnyIndex::open(dir, settings, Some(device))?, dir, settings)
    }

    fn of(index: AnyIndex, dir: &Path, settings: &FindSettings) -> Result<Finder, TrainError> {
        let collection = &index.manifest().collection;
        let path = settings.passages.as_deref().unwrap_or(&collection.path);
        if !path.exists() {
            return Err(TrainError::Unusable(format!(
                "{}: the passages of the index {} are not there; name their file with --passages",
                path.display(),
                dir.display()
            )));
        }
        let scratch = match settings.cache_dir {
            Some(_) => None,
            None => Some(ScratchFolder::new()?),
        };
        let cache = settings.cache_dir.as_deref().or(scratch.as_ref().map(ScratchFolder::path));
        let passages = Passages::open(path, cache.unwrap_or(Path::new(".")))?;
        collection.check(dir, &passages)?;
        Ok(Finder { index, passages, part: settings.part, _scratch: scratch })
    }

    /// The index.
    pub fn index(&self) -> &AnyIndex {
        &self.index
    }

    /// The part of the index that is looked at.
    pub fn part(&self) -> Part {
        self.part
    }

    /// The collection: a hit's row is a passage of it.
    pub fn passages(&self) -> &Passages {
        &self.passages
    }

    /// See [`AnyIndex::search`].
    ///
    /// # Errors
    /// Likewise.
    pub fn search<S: AsRef<str> + Sync>(
        &self,
        questions: &[S],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, TrainError> {
        self.index.search(questions, depth, stop)
    }
}

/// Builds a BM25 index of a collection: [`Bm25Index::build`].
///
/// # Errors
/// Likewise.
pub fn build_bm25(
    dir: &Path,
    passages: &Passages,
    settings: &Bm25Settings,
    memory: u64,
    stop: &dyn Fn() -> bool,
    progress: Progress<'_>,
) -> Result<Manifest, TrainError> {
    Ok(Bm25Index::build(dir, passages, settings, memory, stop, progress)?)
}

/// Adds what a collection has gained at its end to its BM25 index: [`Bm25Index::append`].
///
/// # Errors
/// Likewise.
pub fn append_bm25(
    dir: &Path,
    passages: &Passages,
    memory: u64,
    stop: &dyn Fn() -> bool,
    progress: Progress<'_>,
) -> Result<Option<Manifest>, TrainError> {
    Ok(Bm25Index::append(dir, passages, memory, stop, progress)?)
}

impl From<SearchError> for TrainError {
    fn from(error: SearchError) -> TrainError {
        match error {
            SearchError::Stopped => TrainError::Stopped,
            SearchError::Data(error) => TrainError::Data(error),
            other => TrainError::Unusable(other.to_string()),
        }
    }
}
