//! An index of late interaction: the ColBERT model that encodes questions, and what is asked with the vectors of their tokens.

use std::path::Path;

use tercio_data::multi_vectors::MultiVectors;
use tercio_data::template::TextTemplate;
use tercio_data::{Passages, TokenVectors};
use tercio_engine::{Cpu, Device};
use tercio_models::colbert::ColbertHeaders;
use tercio_models::embedding_model::TextKind;
use tercio_search::manifest::{Collection, IndexFolder, Manifest};
use tercio_search::plaid::{PlaidIndex, PlaidOptions, PlaidReport, PlaidSearch, Rows};
use tercio_search::{Hit, SearchError};

use super::{DenseSettings, Exchange, FindSettings};
use crate::colbert::{ColbertEncoder, ColbertModel, TextTokens, TokenPooling};
use crate::embed::WINDOW;
use crate::error::TrainError;
use crate::options::ColbertTextOptions;
use crate::setup::model_folder;

/// Tokens of a batch of questions at most.
const BATCH_TOKENS: usize = 8192;
/// Questions of a batch.
const BATCH_TEXTS: usize = 128;

/// An index of late interaction with what encodes its questions.
pub struct Late {
    device: Cpu,
    model: ColbertModel<Cpu>,
    tokens: TextTokens,
    template: TextTemplate,
    index: PlaidIndex,
    only: Option<Rows>,
    settings: DenseSettings,
}

impl Late {
    /// Opens an index, or a part of it, and its model; with `only`, a file of ids, one a line, for searches that find these passages alone.
    /// Ids that the index does not have are counted and said.
    ///
    /// # Errors
    /// No model, or another than that of the vectors; settings that do not go with the kind; damage.
    pub fn open(
        device: &Cpu,
        dir: &Path,
        manifest: Manifest,
        settings: &FindSettings,
    ) -> Result<Late, TrainError> {
        let (only, part, settings) = (settings.only.as_deref(), settings.part, &settings.dense);
        if settings.resident {
            let what = "--resident is for indexes of one vector a passage; the files of this one are mapped into memory";
            return Err(TrainError::Options(what.into()));
        }
        if settings.rescore == Some(0) {
            let what = "--rescore 0: an index of late interaction has no scores but those of the passages that are scored";
            return Err(TrainError::Options(what.into()));
        }
        let index = PlaidIndex::of_manifest(dir, manifest)?.only(part);
        let of = index.settings();
        let named = if of.model.is_empty() { "a model that is not known" } else { &of.model };
        let Some(name) = &settings.model else {
            return Err(TrainError::Options(format!(
                "{}: an index of vectors of {named}; name the model that encodes the questions with --model_path",
                dir.display()
            )));
        };
        let model = device.run(|| -> Result<_, TrainError> {
            let headers = ColbertHeaders::read(&model_folder(name)?, None)?;
            ColbertModel::read(headers, settings.tokenizer.as_deref(), |_| (), None, 0, device)?.trained(name)
        })?;
        let (own, dimension) = (device.run(|| model.fingerprint(device)), model.loaded.model.dimension());
        match &of.model_fingerprint {
            Some(print) if *print != own => {
                return Err(TrainError::Unusable(format!(
                    "{}: the index has vectors of {named} (fingerprint {}), --model_path {name} is another model (fingerprint {}); name \
                     that one, or embed and index the passages again",
                    dir.display(),
                    print.get(..12).unwrap_or(print),
                    &own[..12]
                )));
            }
            _ if dimension != of.dimension => {
                return Err(TrainError::Unusable(format!(
                    "{}: the index has vectors of {} numbers (of {named}), --model_path {name} gives tokens {dimension}; name the model \
                     that embedded the passages",
                    dir.display(),
                    of.dimension
                )));
            }
            Some(_) => {}
            None => tracing::warn!(
                "{}: its vectors (of {named}) do not say their model, so that {name} is theirs is taken for granted",
                dir.display()
            ),
        }
        let mut config = model.loaded.model.config.clone();
        config.query_length = settings.question_maxlength.unwrap_or(config.query_length);
        let most = model.loaded.model.encoder.config().max_tokens();
        let tokens = TextTokens::new(&config, &model.tokenizer, most)?;
        let template = match &settings.template {
            Some(template) => template.clone(),
            None => ColbertTextOptions::default().templates().map_err(TrainError::Options)?.0,
        };
        let only = match only {
            None => None,
            Some(path) => Some(rows_of(&index, path)?),
        };
        Ok(Late { device: device.clone(), model, tokens, template, index, only, settings: settings.clone() })
    }

    /// The index.
    pub fn index(&self) -> &PlaidIndex {
        &self.index
    }

    /// See [`super::AnyIndex::search`]. Questions that are asked together are encoded together, in windows of [`WINDOW`].
    ///
    /// # Errors
    /// A question that cannot be encoded; damage; [`TrainError::Stopped`].
    pub fn search<S: AsRef<str>>(
        &self,
        questions: &[S],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
        exchange: Exchange<'_>,
    ) -> Result<Vec<Vec<Hit>>, TrainError> {
        let loaded = &self.model.loaded;
        let encoder = ColbertEncoder {
            device: &self.device,
            model: &loaded.model,
            parameters: &loaded.parameters,
            tokenizer: &self.model.tokenizer,
            tokens: &self.tokens,
            kind: TextKind::Question,
            pooling: TokenPooling::NONE,
            batch_tokens: BATCH_TOKENS,
            batch_texts: BATCH_TEXTS,
            window: WINDOW,
        };
        let dimension = loaded.model.dimension();
        let (probes, candidates) = (self.settings.probes, self.settings.rescore.unwrap_or(0));
        let how = PlaidSearch { depth, probes, candidates, only: self.only.as_ref() };
        let mut found = Vec::new();
        for window in questions.chunks(WINDOW) {
            let texts: Vec<String> = window.iter().map(|q| self.template.of_question(q.as_ref())).collect();
            let rows = self.device.run(|| encoder.rows(&texts, &stop))?.ok_or(TrainError::Stopped)?;
            self.device.trim();
            let (mut queries, mut rest): (Vec<&[f32]>, _) = (Vec::new(), &rows.values[..]);
            for length in &rows.lengths {
                let (query, others) = rest.split_at(*length as usize * dimension);
                queries.push(query);
                rest = others;
            }
            let own = self.index.candidates(&self.device, &queries, how, stop)?;
            let all = exchange(own, how.kept())?;
            found.extend(self.index.scored(&self.device, &queries, &all, depth, stop)?);
        }
        Ok(found)
    }
}

/// The rows of the ids of a file, one a line.
fn rows_of(index: &PlaidIndex, path: &Path) -> Result<Rows, TrainError> {
    let ids = read_ids(path)?;
    let known = index.ids()?;
    let (rows, unknown) = known.rows(&ids);
    if !unknown.is_empty() {
        tracing::warn!(
            "{}: {} of {} ids are of no passage of the index, the first of them {:?}; they find nothing",
            path.display(),
            unknown.len(),
            ids.len(),
            unknown[0]
        );
    }
    Ok(rows)
}

/// The ids of a file, one a line; empty lines are none.
///
/// # Errors
/// A file that cannot be read, or is no text.
pub fn read_ids(path: &Path) -> Result<Vec<String>, TrainError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| TrainError::Read { path: path.display().to_string(), source })?;
    Ok(text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

/// Makes an index of late interaction of a collection.
///
/// # Errors
/// Vectors of another collection, by its content or by the ids; as [`PlaidIndex::build`].
pub fn build_late(
    device: &Cpu,
    dir: &Path,
    vectors: &MultiVectors,
    passages: &Passages,
    options: &PlaidOptions,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(f64),
) -> Result<PlaidReport, TrainError> {
    let collection = Collection::of(passages);
    let of = vectors.settings();
    if of.source_fingerprint.is_some() && of.source_fingerprint != collection.fingerprint {
        return Err(TrainError::Unusable(format!(
            "{}: its vectors are of {}, not of the passages of {}; embed the file that is given here",
            vectors.dir().display(),
            of.source,
            passages.path().display()
        )));
    }
    if of.source_fingerprint.is_none() {
        same_ids(&vectors.ids()?, 0, vectors.dir(), passages, stop)?;
    }
    Ok(PlaidIndex::build(device, vectors, collection, dir, options, stop, progress)?)
}

/// Adds vectors of the passages that a collection has gained at its end to its index.
///
/// # Errors
/// Passages that are, by their ids, not those that were indexed, or not those of the vectors; as [`PlaidIndex::add`].
pub fn append_late(
    device: &Cpu,
    dir: &Path,
    vectors: &MultiVectors,
    passages: &Passages,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(f64),
) -> Result<PlaidReport, TrainError> {
    // The folder is locked from here on: what is compared below is what is added to.
    let taken = IndexFolder::open_earlier(dir)?;
    let known = PlaidIndex::of_manifest(dir, taken.1.clone())?.ids()?;
    let earlier: Vec<String> = (0..).map_while(|row| known.id(row).map(str::to_owned)).collect();
    same_ids(&earlier, 0, dir, passages, stop)?;
    same_ids(&vectors.ids()?, earlier.len(), vectors.dir(), passages, stop)?;
    Ok(PlaidIndex::add_to(device, vectors, Collection::of(passages), taken, stop, progress)?)
}

/// Refuses ids that are not those of the passages from row `first` on.
fn same_ids(
    ids: &[String],
    first: usize,
    of: &Path,
    passages: &Passages,
    stop: &dyn Fn() -> bool,
) -> Result<(), TrainError> {
    for (n, id) in ids.iter().enumerate() {
        if n % 4096 == 0 && stop() {
            return Err(TrainError::Stopped);
        }
        let expected = match first + n < passages.len() {
            true => Some(passages.get(first + n)?.id),
            false => None,
        };
        if expected.as_ref() != Some(id) {
            return Err(TrainError::Unusable(format!(
                "{}: document {} has the id {id:?}, passage {} of {} {}; give the file that it is of, in its order",
                of.display(),
                n + 1,
                first + n + 1,
                passages.path().display(),
                expected.map_or("is not there".into(), |e| format!("the id {e:?}"))
            )));
        }
    }
    Ok(())
}

/// Deletes passages from an index of late interaction by their ids.
///
/// # Errors
/// As [`PlaidIndex::delete`].
pub fn delete_late(dir: &Path, ids: &[String]) -> Result<PlaidReport, SearchError> {
    PlaidIndex::delete(dir, ids)
}
