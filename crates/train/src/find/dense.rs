//! Indexes of vectors: the model that embeds questions, and what is asked with their vectors.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tercio_data::template::TextTemplate;
use tercio_data::{Passages, Vectors};
use tercio_engine::{Cpu, Device};
use tercio_models::embedding_model::TextKind;
use tercio_search::compressed::{
    self, CompressedIndex, CompressedReport, CompressedSearch, CompressedSettings,
};
use tercio_search::flat::{FlatIndex, Metric, Resident};
use tercio_search::manifest::{Collection, IndexFolder, Manifest};
use tercio_search::{Hit, Part, SearchError};

use super::Exchange;

use crate::embed::{Embedder, TextEncoder, WINDOW};
use crate::error::TrainError;
use crate::mine::same_ids;

/// The kind of an index that is its vectors.
pub const FLAT: &str = "flat";
/// Tokens of a batch of questions at most.
const BATCH_TOKENS: usize = 8192;
/// Questions of a batch.
const BATCH_TEXTS: usize = 128;

/// How an index of vectors is opened and asked.
#[derive(Clone, Debug, Default)]
pub struct DenseSettings {
    /// The model that embeds questions: a folder, a hub name or a run's folder.
    pub model: Option<String>,
    /// Folder of the tokenizer; default: the model's.
    pub tokenizer: Option<PathBuf>,
    /// The text that is made of a question; default: the model's.
    pub template: Option<TextTemplate>,
    /// Tokens of a question at most; default: the model's.
    pub question_maxlength: Option<usize>,
    /// Keep the vectors in memory: for many questions, one after the other.
    pub resident: bool,
    /// Lists of a compressed index that a question looks into; 0: as the index says.
    pub probes: usize,
    /// Rows of a compressed index that are scored again; `None`: four times as many as are asked for; 0: none, scores are estimates.
    pub rescore: Option<usize>,
}

impl DenseSettings {
    /// Refuses what an index of words could not heed. The model and its tokens may be given: programs that ask indexes of both kinds, and
    /// the environment, name them for all.
    ///
    /// # Errors
    /// Naming the settings.
    pub fn check_of_words(&self) -> Result<(), TrainError> {
        match self.template.is_some() || self.probes > 0 || self.rescore.is_some() {
            true => {
                let what = "--template, --probes and --rescore are for indexes of vectors; this one is of words (bm25)";
                Err(TrainError::Options(what.into()))
            }
            false => Ok(()),
        }
    }
}

/// What the manifest of a flat index remembers: it has no files but the folder of vectors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FlatSettings {
    /// How passages are compared with questions.
    pub metric: Metric,
    /// The folder of vectors, absolute.
    pub vectors: PathBuf,
    /// What its rows are ([`Vectors::fingerprint`]).
    pub vectors_fingerprint: String,
    /// The model as it was named.
    pub model: String,
    /// Its fingerprint, where it is known.
    pub model_fingerprint: Option<String>,
}

/// The collection that vectors are of. Those that were imported do not say it: their ids must be those of the passages.
///
/// # Errors
/// Vectors of another collection, or of a part of it; [`TrainError::Stopped`].
pub fn collection_of(
    vectors: &Vectors,
    passages: &Passages,
    stop: &dyn Fn() -> bool,
) -> Result<Collection, TrainError> {
    let collection = Collection::of(passages);
    let of = vectors.settings();
    let imported = of.source_fingerprint.is_none() || of.model_fingerprint.is_none();
    let same = imported || of.source_fingerprint == collection.fingerprint;
    if vectors.len() != collection.count || !same {
        return Err(TrainError::Unusable(format!(
            "{}: its {} vectors are of {}, not of the {} passages of {}; embed the whole file that is given here",
            vectors.dir().display(),
            vectors.len(),
            of.source,
            collection.count,
            passages.path().display()
        )));
    }
    if imported {
        same_ids(vectors, passages.path(), |row| Ok(passages.get(row)?.id), stop)?;
    }
    Ok(collection)
}

/// Makes a flat index: a manifest that leads to the vectors.
///
/// # Errors
/// As [`collection_of`]; a folder that cannot be written, or holds something else.
pub fn build_flat(
    dir: &Path,
    vectors: &Vectors,
    passages: &Passages,
    metric: Metric,
    stop: &dyn Fn() -> bool,
) -> Result<Manifest, TrainError> {
    let collection = collection_of(vectors, passages, stop)?;
    let settings = FlatSettings {
        metric,
        vectors: std::path::absolute(vectors.dir()).unwrap_or_else(|_| vectors.dir().to_owned()),
        vectors_fingerprint: vectors.fingerprint(),
        model: vectors.settings().model.clone(),
        model_fingerprint: vectors.settings().model_fingerprint.clone(),
    };
    let json = serde_json::to_value(&settings).map_err(|e| TrainError::Unusable(e.to_string()))?;
    Ok(IndexFolder::open(dir)?.commit(FLAT, collection, json, Vec::new())?)
}

/// Adds vectors of the passages that a collection has gained at its end to its compressed index: [`CompressedIndex::append`].
///
/// # Errors
/// Likewise; vectors that are not those of the passages that are new, by their number and their ids; a collection whose earlier
/// passages are not, by their ids, those that were indexed, or whose vectors are gone, so that nothing says so.
pub fn append_compressed(
    device: &Cpu,
    dir: &Path,
    vectors: &Vectors,
    passages: &Passages,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(f64),
) -> Result<CompressedReport, TrainError> {
    // The folder is locked from here on: what is compared below is what is added to.
    let (folder, earlier) = IndexFolder::open_earlier(dir)?;
    earlier.expect_kind(dir, compressed::KIND)?;
    let settings: CompressedSettings = earlier.settings(dir)?;
    let known = earlier.collection.count;
    let total = passages.len() as u64;
    let mut first = 0u64;
    let mut compare = |vectors: &Vectors| -> Result<(), TrainError> {
        let id = |row: usize| match usize::try_from(first).ok().and_then(|first| first.checked_add(row)) {
            Some(row) if row < passages.len() => Ok(passages.get(row)?.id),
            _ => Err(TrainError::Unusable(format!(
                "{}: expected passages for all {known} rows of the index {}, found {total}; index the file again",
                passages.path().display(),
                dir.display()
            ))),
        };
        same_ids(vectors, passages.path(), id, stop)?;
        first = first.saturating_add(vectors.len());
        Ok(())
    };
    for source in &settings.sources {
        let vectors = Vectors::open(&source.path).map_err(|e| {
            TrainError::Unusable(format!(
                "{}: the vectors of its passages are needed, to compare their ids with those of {}: {e}; index again",
                dir.display(),
                passages.path().display()
            ))
        })?;
        compare(&vectors)?;
    }
    if known.checked_add(vectors.len()) == Some(total) {
        compare(vectors)?;
    }
    let collection = Collection::of(passages);
    Ok(CompressedIndex::append_to(device, vectors, collection, (folder, earlier), stop, progress)?)
}

/// An index of vectors with what embeds its questions.
pub struct Dense {
    device: Cpu,
    embedder: Embedder<Cpu>,
    template: TextTemplate,
    maxlength: usize,
    index: Index,
    manifest: Manifest,
    settings: DenseSettings,
}

enum Index {
    Flat(FlatIndex),
    Resident(Resident),
    Compressed(Box<CompressedIndex>),
}

impl Index {
    /// With its vectors in memory, where that is wanted.
    fn kept(self, device: &Cpu, settings: &DenseSettings) -> Result<Index, SearchError> {
        Ok(match self {
            Index::Flat(index) if settings.resident => Index::Resident(index.load(device, &|| false)?),
            Index::Compressed(mut index) if settings.resident && settings.rescore != Some(0) => {
                index.keep_vectors(device)?;
                Index::Compressed(index)
            }
            other => other,
        })
    }
}

impl Dense {
    /// Opens an index of vectors, or a part of it, and its model.
    ///
    /// # Errors
    /// No model, or another than that of the vectors; vectors that are gone or changed; damage.
    pub fn open(
        device: &Cpu,
        dir: &Path,
        manifest: Manifest,
        settings: &DenseSettings,
        part: Part,
    ) -> Result<Dense, TrainError> {
        let (index, model, fingerprint, dimension) = match manifest.kind.as_str() {
            FLAT => {
                let flat: FlatSettings = manifest.settings(dir)?;
                let vectors = Vectors::open(&flat.vectors)?;
                if vectors.len() != manifest.collection.count
                    || vectors.fingerprint() != flat.vectors_fingerprint
                {
                    return Err(TrainError::Unusable(format!(
                        "{}: its vectors are no longer those of the index {}; index again",
                        flat.vectors.display(),
                        dir.display()
                    )));
                }
                if settings.probes > 0 || settings.rescore.is_some() {
                    let what = "--probes and --rescore are for a compressed index; this one is flat, all of it is compared";
                    return Err(TrainError::Options(what.into()));
                }
                let dimension = vectors.dimension();
                let index = Index::Flat(FlatIndex::of(vectors, flat.metric).only(part));
                (index, flat.model, flat.model_fingerprint, dimension)
            }
            _ => {
                let index = CompressedIndex::open(device, dir, settings.rescore != Some(0))?.only(part);
                let of = index.settings();
                let (model, fingerprint) = (of.model.clone(), of.model_fingerprint.clone());
                let dimension = of.dimension;
                (Index::Compressed(Box::new(index)), model, fingerprint, dimension)
            }
        };
        let Some(name) = &settings.model else {
            return Err(TrainError::Options(format!(
                "{}: an index of vectors of {model}; name the model that embeds the questions with --model_path",
                dir.display()
            )));
        };
        let embedder = device.run(|| Embedder::open(name, settings.tokenizer.as_deref(), None, device))?;
        let own = device.run(|| embedder.fingerprint(device));
        match fingerprint {
            Some(print) if print != own => {
                return Err(TrainError::Unusable(format!(
                    "{}: the index has vectors of {model} (fingerprint {}), --model_path {name} is another model (fingerprint {}); \
                     name that one, or embed and index the passages again",
                    dir.display(),
                    print.get(..12).unwrap_or(&print),
                    &own[..12]
                )));
            }
            // Imported vectors do not say their model: at least it must give vectors of the same size.
            _ if embedder.model.dimension() != dimension => {
                return Err(TrainError::Unusable(format!(
                    "{}: the index has vectors of {dimension} numbers (of {model}), --model_path {name} embeds questions as {} \
                     numbers; name the model that embedded the passages",
                    dir.display(),
                    embedder.model.dimension()
                )));
            }
            Some(_) => {}
            None => tracing::warn!(
                "{}: its vectors (of {model}) were imported, so nothing says that {name} is their model: it is taken for granted",
                dir.display()
            ),
        }
        let template = match &settings.template {
            Some(template) => template.clone(),
            None => embedder.template(TextKind::Question, false)?,
        };
        let maxlength =
            settings.question_maxlength.unwrap_or_else(|| embedder.model.max_tokens(TextKind::Question));
        if maxlength > embedder.model.encoder().max_tokens() {
            let most = embedder.model.encoder().max_tokens();
            return Err(TrainError::Options(format!(
                "{maxlength} tokens of a question: the model has positions for {most}"
            )));
        }
        let index = index.kept(device, settings)?;
        let settings = settings.clone();
        Ok(Dense { device: device.clone(), embedder, template, maxlength, index, manifest, settings })
    }

    /// What the folder says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// See [`super::AnyIndex::search`]. Questions that are asked together are embedded together, in windows of [`WINDOW`].
    ///
    /// # Errors
    /// A question that cannot be embedded; damage; [`TrainError::Stopped`].
    pub fn search<S: AsRef<str>>(
        &self,
        questions: &[S],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
        exchange: Exchange<'_>,
    ) -> Result<Vec<Vec<Hit>>, TrainError> {
        let encoder = TextEncoder {
            device: &self.device,
            model: &self.embedder.model,
            tokenizer: &self.embedder.tokenizer,
            maxlength: self.maxlength,
            padding: self.embedder.padding(TextKind::Question),
            batch_tokens: BATCH_TOKENS,
            batch_texts: BATCH_TEXTS,
            window: WINDOW,
        };
        let mut found = Vec::new();
        for window in questions.chunks(WINDOW) {
            let texts: Vec<String> = window.iter().map(|q| self.template.of_question(q.as_ref())).collect();
            let rows = self.device.run(|| encoder.rows(&texts, &stop))?.ok_or(TrainError::Stopped)?;
            self.device.trim();
            found.extend(self.ask(&rows.values, depth, stop, exchange)?);
        }
        // What is found is put beside the questions one by one.
        if found.len() != questions.len() {
            let what = format!("{} questions were asked, {} answers came", questions.len(), found.len());
            return Err(TrainError::Unusable(what));
        }
        Ok(found)
    }

    fn ask(
        &self,
        rows: &[f32],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
        exchange: Exchange<'_>,
    ) -> Result<Vec<Vec<Hit>>, TrainError> {
        match &self.index {
            Index::Flat(index) => Ok(index.search(&self.device, rows, depth, &stop, &mut |_| {})?),
            Index::Resident(index) => Ok(index.search(&self.device, rows, depth, &stop)?),
            Index::Compressed(index) => {
                let rescore = self.settings.rescore.unwrap_or(depth.saturating_mul(4));
                let how = CompressedSearch { depth, probes: self.settings.probes, rescore };
                let own = index.candidates(&self.device, rows, how, &stop)?;
                let all = exchange(own, index.kept(how))?;
                Ok(index.rescored(&self.device, rows, &all, how, &stop)?)
            }
        }
    }
}

/// Compares the checksums of the vectors that an index was made of, which a flat one searches and a compressed one scores again with.
///
/// # Errors
/// Vectors that are gone, changed or damaged; [`TrainError::Stopped`].
pub fn verify_vectors(dir: &Path, manifest: &Manifest, stop: &dyn Fn() -> bool) -> Result<(), TrainError> {
    let folders = match manifest.kind.as_str() {
        FLAT => vec![manifest.settings::<FlatSettings>(dir)?.vectors],
        _ => {
            let settings: CompressedSettings = manifest.settings(dir)?;
            settings.sources.into_iter().map(|source| source.path).collect()
        }
    };
    for folder in folders {
        if !Vectors::open(&folder)?.verify_until(stop)? {
            return Err(TrainError::Stopped);
        }
    }
    Ok(())
}

/// Whether a kind of index is one of vectors.
pub fn is_dense(kind: &str) -> bool {
    matches!(kind, FLAT | compressed::KIND)
}
