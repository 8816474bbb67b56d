//! Making a compressed index of vectors, and adding vectors to one.

use std::path::Path;

use rayon::prelude::*;
use tercio_data::{Vectors, draw};
use tercio_engine::{Cpu, Device};

use super::clusters::{self, Centroids, Rounds};
use super::codec::Codec;
use super::lists::{Lists, write_numbers};
use super::originals::{Originals, Source};
use super::{CompressedIndex, CompressedSettings, KIND, MOST_LISTS, check_parts, recall};
use crate::error::SearchError;
use crate::flat::{Metric, fits, is_other_model, norm};
use crate::manifest::{Collection, IndexFolder, Manifest};
use crate::part::Part;

/// Rows that are read and coded together.
const BLOCK: usize = 8192;
/// Most rows that codebooks are learnt from: each has only 16 entries.
const CODE_SAMPLE: usize = 1 << 15;
/// A row of an append lies this much farther from its centroid, on average, before it is worth a warning.
const DRIFT: f64 = 1.25;
/// Keeps these draws apart from others with the same seed.
const SAMPLE: u64 = 0x7361_6d70;

/// Settings of a build; 0 chooses by the number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedOptions {
    /// How rows are compared.
    pub metric: Metric,
    /// Lists; 0: twice the root of the number of rows.
    pub lists: usize,
    /// Bytes of a row's code, an even number; 0: a bit a number of the vector, half a byte for four of them.
    pub code_bytes: usize,
    /// Rows to learn from; 0: 64 for every list.
    pub sample: usize,
    /// Rounds of k-means.
    pub rounds: usize,
    /// What draws are keyed by.
    pub seed: u64,
    /// Queries to measure recall with, rows of the vectors' dimension. None: rows of the vectors that were held out of the
    /// sample, which find themselves more easily than queries find passages; a row itself does not count.
    pub queries: Option<Vec<f32>>,
}

impl Default for CompressedOptions {
    fn default() -> Self {
        let metric = Metric::default();
        CompressedOptions { metric, lists: 0, code_bytes: 0, sample: 0, rounds: 10, seed: 0, queries: None }
    }
}

/// What a build or an append did.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedReport {
    /// The manifest that stands now.
    pub manifest: Manifest,
    /// What it remembers.
    pub settings: CompressedSettings,
    /// Things that a person should know.
    pub warnings: Vec<String>,
}

impl CompressedIndex {
    /// Makes an index of `vectors` in `dir`. Memory: the sample, and the codes of all rows twice. `progress` is told the share that is
    /// done. An index that stood in `dir` is replaced when the new one is whole.
    ///
    /// # Errors
    /// Options that cannot be; rows that cannot be read; a folder that cannot be written; [`SearchError::Stopped`].
    pub fn build(
        cpu: &Cpu,
        vectors: &Vectors,
        collection: Collection,
        dir: &Path,
        options: &CompressedOptions,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<CompressedReport, SearchError> {
        let (dimension, total) = (vectors.dimension(), vectors.len());
        let mut warnings = Vec::new();
        check_rows(total)?;
        if collection.count != total {
            return Err(SearchError::Unusable(format!(
                "{}: {total} vectors for {} passages of {}; embed all of them, and nothing else",
                vectors.dir().display(),
                collection.count,
                collection.path.display()
            )));
        }
        let code_bytes = match options.code_bytes {
            0 => (dimension / 8).next_multiple_of(2).clamp(2, 128).min(dimension / 4 * 2),
            given => given,
        };
        check_parts(code_bytes, dimension).map_err(SearchError::Unusable)?;
        let rows = total as usize;
        let lists = match options.lists {
            0 => 2 * (total as f64).sqrt() as usize,
            given => given,
        };
        if lists > MOST_LISTS {
            return Err(SearchError::Unusable(format!("{lists} lists: expected at most {MOST_LISTS}")));
        }
        let lists = lists.clamp(1, rows.max(1));
        if options.lists > lists {
            warnings.push(format!("{} lists were asked for, {rows} rows give {lists}", options.lists));
        }
        let sample =
            if options.sample == 0 { 64 * lists } else { options.sample }.clamp(lists.min(rows), rows);
        let how = Rounds { seed: options.seed, rounds: options.rounds, stop };
        let folder = IndexFolder::open(dir)?;

        let drawn = spread(options.seed, SAMPLE, rows, sample);
        let mut values = pick(vectors, options.metric, &drawn)?;
        let (centroids, codec) = match rows {
            0 => (
                vec![0.0; dimension],
                Codec { dimension, parts: 2 * code_bytes, entries: vec![0.0; 16 * dimension] },
            ),
            _ => {
                let learnt = &mut |share: f64| progress(0.4 * share);
                let centroids = clusters::of_lists(cpu, &values, dimension, lists, how, learnt)?;
                let few = CODE_SAMPLE.min(sample);
                let some: Vec<f32> = (0..few)
                    .flat_map(|i| values[i * sample / few * dimension..][..dimension].iter().copied())
                    .collect();
                values = some;
                let nearest = Centroids::new(cpu, &centroids, dimension).nearest(cpu, &values);
                subtract(&mut values, &nearest, &centroids);
                let codec = Codec::learn(cpu, &values, dimension, 2 * code_bytes, how)?;
                (centroids, codec)
            }
        };
        drop(values);
        let mut coder = Coder::new(cpu, &codec, &centroids, options.metric);
        coder.add(cpu, vectors, stop, &mut |share| progress(0.4 + 0.4 * share))?;
        let lists_made = Lists::with(None, lists, codec.parts, 0, &coder.lists, &coder.codes);
        let settings = CompressedSettings {
            metric: options.metric,
            dimension,
            lists,
            code_bytes,
            sample,
            rounds: options.rounds,
            seed: options.seed,
            model: vectors.settings().model.clone(),
            model_fingerprint: vectors.settings().model_fingerprint.clone(),
            sources: vec![Source::of(vectors)],
            distance: coder.distance(),
            lacking: coder.lacking(),
            recall: Vec::new(),
            recall_queries: String::new(),
            probes: 1,
        };
        let mut files = vec![write_numbers(&folder, "centroids", &centroids)?];
        files.push(write_numbers(&folder, "codebooks", &codec.entries)?);
        files.extend(lists_made.write(&folder)?);
        let originals = Originals::open(dir, &settings.sources, settings.metric)?;
        let mut index = CompressedIndex {
            centroids: Centroids::new(cpu, &centroids, dimension),
            codec,
            lists: lists_made,
            settings,
            total,
            originals: Some(originals),
            part: Part::WHOLE,
        };
        if rows > 0 {
            recall::measure(cpu, vectors, &mut index, options, &drawn, stop)?;
        }
        progress(1.0);
        let settings = index.settings;
        let json = serde_json::to_value(&settings).map_err(|e| SearchError::Unusable(e.to_string()))?;
        let manifest = folder.commit(KIND, collection, json, files)?;
        Ok(CompressedReport { manifest, settings, warnings })
    }

    /// Adds the rows of `vectors` behind those of the index in `dir`, into the lists that it has; nothing is learnt anew. `collection`: the
    /// grown one. Memory: the index twice. Who is killed meanwhile leaves the index as it was. Nothing is added, with a warning, where
    /// the index has these vectors and the whole collection already.
    ///
    /// # Errors
    /// No index there, or one of another model or dimension; another number of vectors than of passages that are new; as
    /// [`CompressedIndex::build`].
    pub fn append(
        cpu: &Cpu,
        vectors: &Vectors,
        collection: Collection,
        dir: &Path,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<CompressedReport, SearchError> {
        let (folder, earlier) = IndexFolder::open_earlier(dir)?;
        CompressedIndex::append_to(cpu, vectors, collection, (folder, earlier), stop, progress)
    }

    /// As [`CompressedIndex::append`], for who has taken the folder and has looked at its manifest.
    ///
    /// # Errors
    /// Likewise.
    pub fn append_to(
        cpu: &Cpu,
        vectors: &Vectors,
        collection: Collection,
        (folder, earlier): (IndexFolder, Manifest),
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<CompressedReport, SearchError> {
        let dir = &folder.dir().to_owned();
        let index = CompressedIndex::of_manifest(cpu, dir, &earlier)?;
        let (mut settings, own) = (index.settings.clone(), vectors.settings());
        let new = Source::of(vectors);
        let has_them = settings.sources.iter().any(|s| s.fingerprint == new.fingerprint);
        let same = (earlier.collection.count, &earlier.collection.fingerprint);
        if has_them && same == (collection.count, &collection.fingerprint) {
            let all = index.total;
            let warnings =
                vec![format!("nothing to add: the index {} has all {all} passages", dir.display())];
            return Ok(CompressedReport { manifest: earlier, settings, warnings });
        }
        let other_model = is_other_model(&settings.model_fingerprint, &own.model_fingerprint);
        if settings.dimension != own.dimension || other_model {
            return Err(SearchError::Unusable(format!(
                "{}: its vectors ({} numbers, of {}) cannot be added to the index {} ({} numbers, of {}); embed them with its model",
                vectors.dir().display(),
                own.dimension,
                own.model,
                dir.display(),
                settings.dimension,
                settings.model
            )));
        }
        if index.total.checked_add(vectors.len()) != Some(collection.count) {
            return Err(SearchError::Unusable(format!(
                "{}: it has {} vectors, but {} has {} passages, of which the index {} has {}; embed the new passages alone",
                vectors.dir().display(),
                vectors.len(),
                collection.path.display(),
                collection.count,
                dir.display(),
                index.total
            )));
        }
        check_rows(index.total.saturating_add(vectors.len()))?;
        let mut warnings = Vec::new();
        if settings.model_fingerprint.is_none() || own.model_fingerprint.is_none() {
            warnings.push("vectors were imported, so nothing says that they are of the index's model: it is taken for granted".into());
        }
        let centroids = index.centroids.values.to_vec(cpu);
        let mut coder = Coder::new(cpu, &index.codec, &centroids, settings.metric);
        coder.add(cpu, vectors, stop, progress)?;
        let drift = coder.distance() / settings.distance;
        if drift > DRIFT || (settings.distance == 0.0 && coder.distance() > 0.0) {
            warnings.push(format!(
                "the new rows lie {drift:.2} times as far from the lists' centroids as those it was built of (mean square): lists and \
                 codes suit them badly; build the index again for better recall"
            ));
        }
        let lists = Lists::with(
            Some(&index.lists),
            settings.lists,
            index.codec.parts,
            index.total,
            &coder.lists,
            &coder.codes,
        );
        settings.sources.push(new);
        let kept = ["-centroids", "-codebooks"];
        let kept = earlier.files.into_iter().filter(|f| kept.iter().any(|end| f.name.ends_with(end)));
        let mut files: Vec<_> = kept.collect();
        files.extend(lists.write(&folder)?);
        let json = serde_json::to_value(&settings).map_err(|e| SearchError::Unusable(e.to_string()))?;
        let manifest = folder.commit(KIND, collection, json, files)?;
        Ok(CompressedReport { manifest, settings, warnings })
    }
}

fn check_rows(total: u64) -> Result<(), SearchError> {
    match total <= u64::from(u32::MAX) {
        true => Ok(()),
        false => Err(SearchError::Unusable(format!("{total} rows: an index holds at most {}", u32::MAX))),
    }
}

/// `count` different rows of `0..rows`, ascending, spread evenly, each drawn within its share.
pub(crate) fn spread(seed: u64, tag: u64, rows: usize, count: usize) -> Vec<usize> {
    let cut = |i: usize| (rows as u128 * i as u128 / count as u128) as usize;
    let one = |i: usize| cut(i) + draw::index(&[tag, seed, i as u64], cut(i + 1) - cut(i)).unwrap_or(0);
    (0..count).map(one).collect()
}

/// Reads rows; for cosines, scaled to length 1.
pub(super) fn pick(vectors: &Vectors, metric: Metric, rows: &[usize]) -> Result<Vec<f32>, SearchError> {
    let dimension = vectors.dimension();
    fits(vectors, (rows.len() as u64).saturating_mul(dimension as u64 * 4))?;
    let mut values = vec![0.0; rows.len() * dimension];
    let mut open = None;
    let per_shard = vectors.settings().per_shard.max(1) as usize;
    for (row, out) in rows.iter().zip(values.chunks_exact_mut(dimension)) {
        let number = row / per_shard;
        if open.as_ref().is_none_or(|(n, _)| *n != number) {
            open = Some((number, vectors.shard(number)?));
        }
        if let Some((_, shard)) = &open {
            shard.rows(row % per_shard, out)?;
        }
    }
    scale(metric, dimension, &mut values);
    Ok(values)
}

/// For cosines: rows of length 1, zeros as they are.
fn scale(metric: Metric, dimension: usize, rows: &mut [f32]) {
    if metric == Metric::Cosine {
        for row in rows.chunks_exact_mut(dimension) {
            let length = norm(row.iter().map(|v| v * v).sum()).filter(|n| *n > 0.0).unwrap_or(1.0);
            row.iter_mut().for_each(|v| *v /= length);
        }
    }
}

/// Takes its centroid from every row.
pub(crate) fn subtract(rows: &mut [f32], nearest: &[(u32, f32)], centroids: &[f32]) {
    let Some(dimension) = (rows.len()).checked_div(nearest.len()) else { return };
    for (row, (list, _)) in rows.chunks_exact_mut(dimension).zip(nearest) {
        let centroid = &centroids[*list as usize * dimension..][..dimension];
        row.iter_mut().zip(centroid).for_each(|(v, c)| *v -= c);
    }
}

/// Gives rows their lists and codes.
struct Coder<'a> {
    codec: &'a Codec,
    values: &'a [f32],
    centroids: Centroids,
    metric: Metric,
    lists: Vec<u32>,
    codes: Vec<u8>,
    squares: (f64, f64),
}

impl<'a> Coder<'a> {
    fn new(cpu: &Cpu, codec: &'a Codec, values: &'a [f32], metric: Metric) -> Coder<'a> {
        let centroids = Centroids::new(cpu, values, codec.dimension);
        Coder { codec, values, centroids, metric, lists: Vec::new(), codes: Vec::new(), squares: (0.0, 0.0) }
    }

    fn add(
        &mut self,
        cpu: &Cpu,
        vectors: &Vectors,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<(), SearchError> {
        let (dimension, parts) = (self.codec.dimension, self.codec.parts);
        for number in 0..vectors.shards() {
            let shard = vectors.shard(number)?;
            for start in (0..shard.len()).step_by(BLOCK) {
                if stop() {
                    return Err(SearchError::Stopped);
                }
                let count = BLOCK.min(shard.len() - start);
                let mut rows = vec![0.0; count * dimension];
                shard.rows(start, &mut rows)?;
                scale(self.metric, dimension, &mut rows);
                let nearest = self.centroids.nearest(cpu, &rows);
                subtract(&mut rows, &nearest, self.values);
                let mut codes = vec![0u8; count * parts];
                let lacking: Vec<f32> = cpu.run(|| {
                    let coded = codes.par_chunks_mut(parts).zip(rows.par_chunks(dimension)).with_min_len(64);
                    coded.map(|(codes, row)| self.codec.encode(row, codes)).collect()
                });
                self.lists.extend(nearest.iter().map(|(list, _)| *list));
                self.codes.extend(codes);
                // In the order of rows.
                nearest.iter().for_each(|(_, square)| self.squares.0 += f64::from(*square));
                lacking.iter().for_each(|square| self.squares.1 += f64::from(*square));
                progress((shard.first() as usize + start + count) as f64 / vectors.len().max(1) as f64);
            }
        }
        Ok(())
    }

    fn distance(&self) -> f64 {
        self.squares.0 / self.lists.len().max(1) as f64
    }

    fn lacking(&self) -> f64 {
        self.squares.1 / self.lists.len().max(1) as f64
    }
}
