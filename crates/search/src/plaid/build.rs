//! Making an index of documents' vectors, and adding documents to one.

use std::collections::HashSet;
use std::path::Path;

use rayon::prelude::*;
use tercio_data::TokenVectors;
use tercio_engine::cpu::Precision;
use tercio_engine::cpu::late::Buckets;
use tercio_engine::{Cpu, memory};

use super::piece::{PieceEntry, write_ids, write_members};
use super::{KIND, MOST_CENTROIDS, PlaidIndex, PlaidSettings, codec};
use crate::compressed::build::{spread, subtract};
use crate::compressed::clusters::{Centroids, Rounds, of_lists};
use crate::compressed::lists::write_numbers;
use crate::error::SearchError;
use crate::flat::{cpu_run, is_other_model};
use crate::manifest::{Collection, FileEntry, IndexFolder, Manifest};
use crate::max_sim::cut;

/// Vectors that are read and coded together, about.
const BLOCK: u64 = 1 << 14;
/// Vectors that k-means gets for every centroid.
const SAMPLE: usize = 32;
/// Vectors that buckets are learnt from.
const BUCKET_SAMPLE: usize = 1 << 13;
/// Added vectors lie this much farther from their centroids, on average, before it is worth a warning.
const DRIFT: f64 = 1.25;
/// How far the square of a length of 1 may be from 1: numbers of bf16 are not exact.
const UNIT: f64 = 0.02;
/// Keep these draws apart from others with the same seed.
const DRAWN: u64 = 0x706c_6169;
const OF_BUCKETS: u64 = 0x6275_636b;

/// Settings of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaidOptions {
    /// Bits of a number of a residual: 1, 2, 4 or 8.
    pub bits: usize,
    /// Centroids, at most 65536; 0: the power of two below 16 times the root of the number of vectors, as PLAID has it.
    pub centroids: usize,
    /// Vectors that centroids are learnt from; 0: 32 for every centroid.
    pub sample: usize,
    /// Rounds of k-means.
    pub rounds: usize,
    /// What draws are keyed by.
    pub seed: u64,
}

impl Default for PlaidOptions {
    fn default() -> Self {
        PlaidOptions { bits: 4, centroids: 0, sample: 0, rounds: 4, seed: 0 }
    }
}

/// What a build, an addition or a deletion did.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaidReport {
    /// The manifest that stands now.
    pub manifest: Manifest,
    /// What it remembers.
    pub settings: PlaidSettings,
    /// Things that a person should know.
    pub warnings: Vec<String>,
}

/// What is learnt from a sample.
struct Learnt {
    centroids: Vec<f32>,
    buckets: Buckets,
    unit: bool,
    sample: usize,
}

/// Who is told how far it is, and who says whether to stop.
pub(super) struct Watch<'a> {
    pub stop: &'a dyn Fn() -> bool,
    pub progress: &'a mut dyn FnMut(f64),
}

impl PlaidIndex {
    /// Makes an index of `vectors` in `dir`. Memory: the sample (32 vectors a centroid), a block of vectors, and about 6 bytes a vector for the
    /// lists. `progress` is told the share that is done. An index that stood in `dir` is replaced when the new one is whole. `collection` is what
    /// a row is a passage of.
    ///
    /// # Errors
    /// Options that cannot be; ids that are there twice; vectors that cannot be read or are none; a folder that cannot be written;
    /// [`SearchError::Stopped`].
    pub fn build(
        cpu: &Cpu,
        vectors: &dyn TokenVectors,
        collection: Collection,
        dir: &Path,
        options: &PlaidOptions,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<PlaidReport, SearchError> {
        codec::check_bits(options.bits)?;
        if options.centroids > MOST_CENTROIDS {
            let what = format!("{} centroids: expected at most {MOST_CENTROIDS}", options.centroids);
            return Err(SearchError::Unusable(what));
        }
        counted(vectors, 0, &collection)?;
        let ids = new_ids(vectors, |_| false)?;
        let folder = IndexFolder::open(dir)?;
        let mut warnings = Vec::new();
        let watch = &mut Watch { stop, progress };
        let learnt = Learnt::of(cpu, vectors, options, watch, &mut warnings)?;
        let mut files = learnt.write(&folder)?;
        let piece = coded(cpu, vectors, &learnt, &ids, &folder, &mut files, watch, &mut warnings)?;
        let origin = vectors.origin();
        let settings = PlaidSettings {
            dimension: vectors.dimension(),
            bits: options.bits,
            centroids: learnt.centroids.len() / vectors.dimension(),
            unit: learnt.unit,
            sample: learnt.sample,
            rounds: options.rounds,
            seed: options.seed,
            model: origin.model,
            model_fingerprint: origin.model_fingerprint,
            distance: piece.distance,
            learnt: folder.version(),
            pieces: vec![piece],
            deleted: 0,
            deleted_version: 0,
        };
        commit(folder, collection, settings, files, warnings)
    }

    /// Adds the documents of `vectors` behind those of the index in `dir`, under the centroids that it has; nothing is learnt anew, unless the
    /// index had no vectors. `collection`: the grown one, whose count is that of all rows, deleted ones included. Who is killed meanwhile leaves the
    /// index as it was.
    ///
    /// # Errors
    /// No index there, or one of another model or dimension; an id that the index has already (a deleted one may come again); another
    /// number of documents than the collection has gained; as [`PlaidIndex::build`].
    pub fn add(
        cpu: &Cpu,
        vectors: &dyn TokenVectors,
        collection: Collection,
        dir: &Path,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<PlaidReport, SearchError> {
        let taken = IndexFolder::open_earlier(dir)?;
        PlaidIndex::add_to(cpu, vectors, collection, taken, stop, progress)
    }

    /// As [`PlaidIndex::add`], for who has taken the folder and has looked at its manifest.
    ///
    /// # Errors
    /// Likewise.
    pub fn add_to(
        cpu: &Cpu,
        vectors: &dyn TokenVectors,
        collection: Collection,
        (folder, earlier): (IndexFolder, Manifest),
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<PlaidReport, SearchError> {
        let dir = &folder.dir().to_owned();
        let index = PlaidIndex::of_manifest(dir, earlier.clone())?;
        let (mut settings, origin) = (index.settings.clone(), vectors.origin());
        if settings.dimension != vectors.dimension()
            || is_other_model(&settings.model_fingerprint, &origin.model_fingerprint)
        {
            return Err(SearchError::Unusable(format!(
                "{}: its vectors ({} numbers, of {}) cannot be added to the index {} ({} numbers, of {}); encode them with its model",
                origin.path,
                vectors.dimension(),
                named(&origin.model),
                dir.display(),
                settings.dimension,
                named(&settings.model)
            )));
        }
        counted(vectors, index.total, &collection)?;
        let known = index.ids()?;
        let ids = new_ids(vectors, |id| known.row(id).is_some())?;
        let mut warnings = Vec::new();
        let watch = &mut Watch { stop, progress };
        let mut files = earlier.files.clone();
        let first = settings.pieces.iter().all(|piece| piece.tokens == 0);
        let learnt = match first {
            false => Learnt {
                centroids: index.centroids.clone(),
                buckets: index.buckets.clone(),
                unit: settings.unit,
                sample: settings.sample,
            },
            true => {
                let (bits, rounds, seed) = (settings.bits, settings.rounds, settings.seed);
                let options = PlaidOptions { bits, centroids: 0, sample: 0, rounds, seed };
                Learnt::of(cpu, vectors, &options, watch, &mut warnings)?
            }
        };
        if first {
            let old = [format!("v{}-centroids", settings.learnt), format!("v{}-buckets", settings.learnt)];
            files.retain(|file| !old.contains(&file.name));
            files.extend(learnt.write(&folder)?);
            settings.learnt = folder.version();
            settings.unit = learnt.unit;
            settings.centroids = learnt.centroids.len() / settings.dimension;
            settings.sample = learnt.sample;
        }
        let piece = coded(cpu, vectors, &learnt, &ids, &folder, &mut files, watch, &mut warnings)?;
        let drift = piece.distance / settings.distance;
        if first {
            settings.distance = piece.distance;
        } else if drift > DRIFT || (settings.distance == 0.0 && piece.distance > 0.0) {
            warnings.push(format!(
                "the new vectors lie {drift:.2} times as far from the centroids as those these were learnt from (mean square): centroids \
                 and buckets suit them badly; build the index again for better recall"
            ));
        }
        settings.pieces.push(piece);
        commit(folder, collection, settings, files, warnings)
    }
}

/// Makes a version the index of its folder.
pub(super) fn commit(
    folder: IndexFolder,
    collection: Collection,
    settings: PlaidSettings,
    files: Vec<FileEntry>,
    warnings: Vec<String>,
) -> Result<PlaidReport, SearchError> {
    let json = serde_json::to_value(&settings).map_err(|e| SearchError::Unusable(e.to_string()))?;
    let manifest = folder.commit(KIND, collection, json, files)?;
    Ok(PlaidReport { manifest, settings, warnings })
}

fn named(model: &str) -> &str {
    if model.is_empty() { "a model that is not known" } else { model }
}

/// Refuses documents that are not those that a collection has behind its first `before`.
fn counted(vectors: &dyn TokenVectors, before: u64, collection: &Collection) -> Result<(), SearchError> {
    let (count, path) = (vectors.documents(), vectors.origin().path);
    let total = before.checked_add(count).filter(|total| *total <= u64::from(u32::MAX));
    let Some(total) = total else {
        let what = format!("{path}: {before} and {count} documents: an index holds at most {}", u32::MAX);
        return Err(SearchError::Unusable(what));
    };
    match total == collection.count {
        true => Ok(()),
        false => Err(SearchError::Unusable(format!(
            "{path}: {count} documents, and the index has {before}, but {} has {} passages; encode the passages that the index does not \
             have, and nothing else",
            collection.path.display(),
            collection.count
        ))),
    }
}

/// The ids of documents, each once and none that is known.
fn new_ids(vectors: &dyn TokenVectors, known: impl Fn(&str) -> bool) -> Result<Vec<String>, SearchError> {
    let ids = vectors.ids()?;
    let path = || vectors.origin().path;
    if ids.len() as u64 != vectors.documents() {
        let what = format!("{}: {} ids for {} documents", path(), ids.len(), vectors.documents());
        return Err(SearchError::Unusable(what));
    }
    let mut seen = HashSet::with_capacity(ids.len());
    for (row, id) in ids.iter().enumerate() {
        let what = match (known(id), seen.insert(id)) {
            (false, true) => continue,
            (true, _) => "the index has this id already; delete it there first, or leave the document out",
            (_, false) => "an earlier document has the same id; an id names one document",
        };
        return Err(SearchError::Unusable(format!("{}: document {row} ({id:?}): {what}", path())));
    }
    Ok(ids)
}

/// Reads vectors by their numbers, ascending.
fn pick(vectors: &dyn TokenVectors, tokens: &[usize]) -> Result<Vec<f32>, SearchError> {
    let dimension = vectors.dimension();
    let bytes = (tokens.len() as u64).saturating_mul(dimension as u64 * 4);
    if let Some(room) = memory::available().filter(|room| *room < bytes) {
        return Err(SearchError::Unusable(format!(
            "a sample of {} does not fit into memory, of which {} are free; learn from fewer vectors (--sample) or fewer centroids",
            memory::human(bytes),
            memory::human(room)
        )));
    }
    let mut values = vec![0.0; tokens.len() * dimension];
    let mut start = 0;
    for end in 1..=tokens.len() {
        // Neighbours are read together.
        if end == tokens.len() || tokens[end] != tokens[end - 1] + 1 {
            vectors.read(tokens[start] as u64, &mut values[start * dimension..end * dimension])?;
            start = end;
        }
    }
    Ok(values)
}

fn square(row: &[f32]) -> f64 {
    row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum()
}

impl Learnt {
    fn of(
        cpu: &Cpu,
        vectors: &dyn TokenVectors,
        options: &PlaidOptions,
        watch: &mut Watch<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<Learnt, SearchError> {
        let (dimension, tokens) = (vectors.dimension(), vectors.tokens() as usize);
        let wanted = match options.centroids {
            // The greatest power of two that is not above 16 times the root.
            0 => 1 << ((16.0 * (tokens as f64).sqrt()).max(1.0) as usize).ilog2(),
            given => given,
        };
        let lists = wanted.min(MOST_CENTROIDS).clamp(1, tokens.max(1));
        if options.centroids > lists {
            warnings.push(format!(
                "{} centroids were asked for, {tokens} vectors give {lists}",
                options.centroids
            ));
        }
        if tokens == 0 {
            let buckets = codec::learn(options.bits, Vec::new())?;
            return Ok(Learnt { centroids: vec![0.0; dimension], buckets, unit: false, sample: 0 });
        }
        let sample = if options.sample == 0 { SAMPLE * lists } else { options.sample }.clamp(lists, tokens);
        let values = pick(vectors, &spread(options.seed, DRAWN, tokens, sample))?;
        let unit = values.chunks_exact(dimension).all(|row| (square(row) - 1.0).abs() < UNIT);
        // The nearest of many centroids need not be found to the last bit: products in bf16 find one that is as near.
        let fast = cpu.clone().with_precision(Precision::Bf16);
        let how = Rounds { seed: options.seed, rounds: options.rounds, stop: watch.stop };
        let share = &mut |share: f64| (watch.progress)(0.5 * share);
        let centroids = of_lists(&fast, &values, dimension, lists, how, share)?;
        drop(values);
        let some = BUCKET_SAMPLE.min(tokens);
        let mut values = pick(vectors, &spread(options.seed, OF_BUCKETS, tokens, some))?;
        let nearest = Centroids::new(cpu, &centroids, dimension).nearest(&fast, &values);
        subtract(&mut values, &nearest, &centroids);
        Ok(Learnt { centroids, buckets: codec::learn(options.bits, values)?, unit, sample })
    }

    fn write(&self, folder: &IndexFolder) -> Result<Vec<FileEntry>, SearchError> {
        Ok(vec![write_numbers(folder, "centroids", &self.centroids)?, codec::write(folder, &self.buckets)?])
    }
}

/// Codes all documents and writes the files of their piece.
fn coded(
    cpu: &Cpu,
    vectors: &dyn TokenVectors,
    learnt: &Learnt,
    ids: &[String],
    folder: &IndexFolder,
    files: &mut Vec<FileEntry>,
    watch: &mut Watch<'_>,
    warnings: &mut Vec<String>,
) -> Result<PieceEntry, SearchError> {
    let (dimension, buckets) = (vectors.dimension(), &learnt.buckets);
    let width = buckets.row_bytes(dimension);
    let fast = cpu.clone().with_precision(Precision::Bf16);
    let centroids = Centroids::new(cpu, &learnt.centroids, dimension);
    let (mut lengths_file, mut codes_file) = (folder.create("lengths")?, folder.create("codes")?);
    let mut residuals_file = folder.create("residuals")?;
    let (mut lengths, mut codes): (Vec<u32>, Vec<u16>) = (Vec::new(), Vec::new());
    let (mut distance, mut other) = (0f64, 0u64);
    for (first, end) in cut(vectors, BLOCK) {
        if (watch.stop)() {
            return Err(SearchError::Stopped);
        }
        for d in first..end {
            let length = u32::try_from(vectors.start(d + 1) - vectors.start(d));
            let length = length.map_err(|_| {
                SearchError::Unusable(format!("document {d} has more than {} vectors", u32::MAX))
            })?;
            lengths.push(length);
            lengths_file.write(&length.to_le_bytes())?;
        }
        let start = vectors.start(first);
        let mut rows = vec![0.0; (vectors.start(end) - start) as usize * dimension];
        vectors.read(start, &mut rows)?;
        if learnt.unit {
            let is_other = |row: &[f32]| (square(row) - 1.0).abs() >= UNIT;
            other += cpu_run(cpu, || rows.par_chunks(dimension).filter(|row| is_other(row)).count()) as u64;
        }
        let nearest = centroids.nearest(&fast, &rows);
        subtract(&mut rows, &nearest, &learnt.centroids);
        let mut packed = vec![0u8; nearest.len() * width];
        let squares: Vec<f64> = cpu_run(cpu, || {
            let of = |numbers: &mut Vec<u8>, (row, packed): (&[f32], &mut [u8])| {
                cpu.pack_residual(buckets, row, numbers, packed);
                square(row)
            };
            let all = rows.par_chunks(dimension).zip(packed.par_chunks_mut(width)).with_min_len(256);
            all.map_init(Vec::new, of).collect()
        });
        // In the order of vectors.
        distance = squares.iter().fold(distance, |sum, square| sum + square);
        residuals_file.write(&packed)?;
        let own = codes.len();
        codes.extend(nearest.iter().map(|(centroid, _)| *centroid as u16));
        let bytes: Vec<u8> = codes[own..].iter().flat_map(|code| code.to_le_bytes()).collect();
        codes_file.write(&bytes)?;
        (watch.progress)(0.5 + 0.5 * end as f64 / vectors.documents() as f64);
    }
    if other > 0 {
        warnings.push(format!(
            "{}: {other} vectors have another length than 1, though those of the sample have not: their length is lost; normalise them",
            vectors.origin().path
        ));
    }
    let count = learnt.centroids.len() / dimension;
    files.extend([lengths_file.finish()?, codes_file.finish()?, residuals_file.finish()?]);
    files.extend([write_members(folder, count, &lengths, &codes)?, write_ids(folder, ids)?]);
    Ok(PieceEntry {
        version: folder.version(),
        documents: lengths.len() as u64,
        tokens: codes.len() as u64,
        distance: distance / codes.len().max(1) as f64,
        origin: vectors.origin(),
    })
}
