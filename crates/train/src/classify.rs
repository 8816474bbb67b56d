//! A classifier at work: the labels of texts with their probabilities, by all ranks, in the order of the input.
//!
//! Documents are cut into windows, which ranks take in turn; within a window texts go by length into batches, packed. So batches are a
//! function of the input alone, memory is a window's of each rank, and rank 0 hands results on in order.

use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use serde_json::Value;
use tercio_comm::World;
use tercio_data::corpus::{Columns, Split};
use tercio_data::{DataError, Document, Place, Tokenizer};
use tercio_engine::{Arena, Device, Span, Tape};
use tercio_models::classifier::{Classifier, LoadedClassifier};

use crate::answer::next_line;
use crate::embed::{batches, model_fingerprint};
use crate::error::TrainError;
use crate::ranks::start::same_among;
use crate::setup::model_folder;
use crate::shortage::guarded;

mod faults;
mod measure;

pub use faults::Faults;
pub use measure::{Measured, Prediction, gold_loss, measure_among, predicted};

/// Texts of a window where nobody says otherwise.
pub const WINDOW: usize = 256;

/// A classifier with its values and its tokenizer.
pub struct OpenedClassifier<D: Device> {
    /// The model.
    pub loaded: LoadedClassifier<D>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
}

impl<D: Device> OpenedClassifier<D> {
    /// Opens a classifier on every rank, and makes sure that all have the same: `name` is a folder of Hugging Face's
    /// `*ForSequenceClassification` (or Tercio's), a hub name, or a run's folder. The tokenizer is that of the folder, or the one in
    /// `tokenizer`.
    ///
    /// # Errors
    /// What is missing or does not fit; a tokenizer with more ids than the model has embeddings; ranks that differ.
    pub fn open_among(
        world: &World,
        name: &str,
        tokenizer: Option<&Path>,
        device: &D,
    ) -> Result<Self, TrainError> {
        let folder = model_folder(name)?;
        let open = || Ok(LoadedClassifier::open(&folder, device)?);
        let loaded = guarded("while the model was read", &["a smaller model"], open)?;
        if let Some(note) = &loaded.note {
            tracing::info!("{note}");
        }
        let tokenizer = Tokenizer::load(tokenizer.unwrap_or(folder.path()))?;
        let known = loaded.model.config.encoder.vocab_size();
        if tokenizer.vocab_size() > known {
            return Err(TrainError::Vocabulary { tokenizer: tokenizer.vocab_size(), model: known });
        }
        let opened = OpenedClassifier { loaded, tokenizer };
        if world.size() > 1 {
            let (model, loaded) = (&opened.loaded.model, &opened.loaded);
            let config = Value::Object(model.config.to_json(&serde_json::Map::new())).to_string();
            let own = device.run(|| {
                model_fingerprint(device, model.layout(), &loaded.parameters, &opened.tokenizer, &config)
            });
            same_among(world, "--model_path", &own)?;
        }
        Ok(opened)
    }

    /// Tokens of a text at most: as asked for, else as the classifier was trained, else as many as it has positions.
    ///
    /// # Errors
    /// More than it has positions.
    pub fn maxlength(&self, asked: Option<usize>) -> Result<usize, TrainError> {
        let config = &self.loaded.model.config;
        let most = config.encoder.max_tokens();
        match asked {
            Some(asked) if asked > most => Err(TrainError::Options(format!(
                "--text_maxlength {asked}: the model has positions for {most} tokens"
            ))),
            asked => Ok(asked.or(config.max_length).unwrap_or(most).min(most)),
        }
    }
}

/// A classifier with what it takes to give it texts.
pub struct TextClassifier<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a Classifier,
    /// Its values.
    pub parameters: &'a Arena<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Most tokens of a text, special ones included.
    pub maxlength: usize,
    /// Most tokens of a batch; a longer text is a batch by itself.
    pub batch_tokens: usize,
    /// Most texts of a batch.
    pub batch_texts: usize,
    /// Texts that are sorted and cut into batches together, by one rank; at least 1.
    pub window: usize,
}

impl<D: Device> TextClassifier<'_, D> {
    /// The logits of every text, one row of labels a text, in the order of the texts; `None` as soon as `stop` says so, which is
    /// asked before every batch. Call it within the device's pool ([`Device::run`]).
    ///
    /// # Errors
    /// A text that cannot be tokenized or gives no tokens, by its beginning; no more memory.
    pub fn logits(&self, texts: &[&str], stop: &dyn Fn() -> bool) -> Result<Option<Vec<f32>>, TrainError> {
        let flags = ["--batch_texts", "--batch_tokens", "--text_maxlength"];
        guarded("in the labels of texts", &flags, || self.logits_here(texts, stop))
    }

    fn logits_here(&self, texts: &[&str], stop: &dyn Fn() -> bool) -> Result<Option<Vec<f32>>, TrainError> {
        let ids: Vec<Vec<u32>> = texts
            .par_iter()
            .map(|text| self.tokenizer.encode_framed(text, self.maxlength))
            .collect::<Result<_, _>>()?;
        if let Some(empty) = ids.iter().position(Vec::is_empty) {
            return Err(TrainError::Unusable(format!(
                "the text {:?} gives no tokens; use a tokenizer that knows its words",
                texts[empty].chars().take(60).collect::<String>()
            )));
        }
        let labels = self.model.config.labels.len();
        let mut all = vec![0.0; texts.len() * labels];
        for batch in batches(&ids, self.batch_tokens, self.batch_texts) {
            if stop() {
                return Ok(None);
            }
            let packed: Vec<u32> = batch.iter().flat_map(|&i| ids[i].iter().copied()).collect();
            let mut spans = Vec::with_capacity(batch.len());
            let mut end = 0;
            for &i in &batch {
                spans.push(Span { start: end, end: end + ids[i].len() as u32 });
                end += ids[i].len() as u32;
            }
            let mut tape = Tape::inference(self.device, self.parameters);
            let logits = self.model.logits(&mut tape, &packed, &spans, false).tensor.to_vec(self.device);
            for (&i, row) in batch.iter().zip(logits.chunks_exact(labels)) {
                all[i * labels..(i + 1) * labels].copy_from_slice(row);
            }
        }
        Ok(Some(all))
    }

    /// The logits of documents; refuses those that are no numbers.
    fn logits_of(
        &self,
        documents: &[Document],
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<f32>>, TrainError> {
        let texts: Vec<&str> = documents.iter().map(|d| d.text.as_str()).collect();
        let logits = self.logits(&texts, stop)?;
        self.device.trim();
        if let Some(logits) = &logits {
            let labels = self.model.config.labels.len();
            if let Some(at) = logits.iter().position(|v| !v.is_finite()) {
                let Place { path, line, .. } = &documents[at / labels].place;
                return Err(TrainError::Unusable(format!(
                    "{}, line {line}: a logit of the text is {}; the model's weights are damaged or its values overflow",
                    path.display(),
                    logits[at]
                )));
            }
        }
        Ok(logits)
    }
}

/// Classifies all documents of a split by all ranks. On rank 0, and there only, `take` gets each with its logits, in order; with `skip_bad`
/// a faulty one goes to `on_fault` there instead of ending the work. `stop` is asked before every batch.
///
/// # Errors
/// A faulty document, after those before it were handed on; what `take` returns; [`TrainError::Interrupted`] on all ranks soon after
/// `stop` says so on one; a rank was lost.
pub fn classify_among<D: Device>(
    world: &World,
    classifier: &TextClassifier<'_, D>,
    split: &Split,
    skip_bad: bool,
    stop: &dyn Fn() -> bool,
    on_fault: &mut dyn FnMut(&DataError),
    take: &mut dyn FnMut(&Document, &[f32]) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let (size, labels) = (classifier.window.max(1), classifier.model.config.labels.len());
    let windows: usize = split.len().div_ceil(size);
    let rows = |w: usize| w * size..((w + 1) * size).min(split.len());
    for start in (0..windows).step_by(world.size()) {
        let end = (start + world.size()).min(windows);
        let own = start + world.rank();
        let mine = if own < end { read(split, rows(own), skip_bad) } else { Window::default() };
        let logits = classifier.logits_of(&mine.documents, stop)?;
        if world.all_gather_bytes(vec![u8::from(logits.is_none())])?.concat().contains(&1) {
            return Err(TrainError::Interrupted);
        }
        let logits = logits.unwrap_or_default();
        let bytes = if world.is_main() { Vec::new() } else { to_bytes(&logits) };
        let all = world.gather_bytes(bytes)?;
        if !world.is_main() {
            continue;
        }
        let (mut mine, mut logits) = (Some(mine), Some(logits));
        for w in start..end {
            let (window, logits) = match w - start {
                0 => (mine.take().unwrap_or_default(), logits.take().unwrap_or_default()),
                rank => (read(split, rows(w), skip_bad), from_bytes(&all[rank])),
            };
            if logits.len() != window.documents.len() * labels {
                return Err(TrainError::Unusable(format!(
                    "{}: rank {} classified {} documents of {:?}, rank 0 found {}: give all ranks the same file",
                    split.documents().path().display(),
                    w - start,
                    logits.len() / labels,
                    rows(w),
                    window.documents.len()
                )));
            }
            window.skipped.iter().for_each(&mut *on_fault);
            for (document, logits) in window.documents.iter().zip(logits.chunks_exact(labels)) {
                take(document, logits)?;
            }
            if let Some(fault) = window.fault {
                return Err(fault.into());
            }
        }
    }
    Ok(())
}

/// Documents that are classified together.
#[derive(Default)]
struct Window {
    documents: Vec<Document>,
    /// Faults of those that are left out.
    skipped: Vec<DataError>,
    /// The fault that ends the work.
    fault: Option<DataError>,
}

fn read(split: &Split, rows: Range<usize>, skip_bad: bool) -> Window {
    let read: Vec<_> = rows.into_par_iter().map(|k| split.get(k)).collect();
    let mut window = Window::default();
    for document in read {
        match document {
            Ok(document) => window.documents.push(document),
            Err(e @ DataError::Item { .. }) if skip_bad => window.skipped.push(e),
            Err(e) => {
                window.fault = Some(e);
                break;
            }
        }
    }
    window
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// How the lines of a pipe are read.
#[derive(Clone, Debug, PartialEq)]
pub enum LineForm {
    /// A text a line, after FastText's labels if there are any.
    Text,
    /// An object of JSON a line.
    Json(Columns),
}

/// Whether a line has arrived whole that [`next_line`] gives back; it passes over empty ones, and waits for more.
fn has_line(arrived: &[u8]) -> bool {
    let mut whole = arrived.split_inclusive(|&b| b == b'\n').filter(|line| line.ends_with(b"\n"));
    whole.any(|line| !line.trim_ascii().is_empty())
}

/// Classifies lines as they come, one rank alone: those that have arrived together are classified together, so that whoever writes one line and
/// waits gets its labels. Empty lines are passed over. `name` stands for the source in messages. With `skip_bad` a faulty line goes to
/// `on_fault`.
///
/// # Errors
/// A faulty line, after those before it were handed on; a source that cannot be read; what `take` returns; [`TrainError::Interrupted`].
pub fn classify_lines<D: Device>(
    classifier: &TextClassifier<'_, D>,
    source: &mut BufReader<impl Read>,
    name: &Path,
    form: &LineForm,
    skip_bad: bool,
    stop: &dyn Fn() -> bool,
    on_fault: &mut dyn FnMut(&DataError),
    take: &mut dyn FnMut(&Document, &[f32]) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let (mut line, mut row) = (0, 0);
    let labels = classifier.model.config.labels.len();
    let mut ended = None;
    while ended.is_none() {
        let mut documents: Vec<Document> = Vec::new();
        while documents.len() < classifier.window.max(1) {
            if !documents.is_empty() && !has_line(source.buffer()) {
                break; // nobody waits for a line that may never come
            }
            let document = match next_line(source, name, &mut line, row) {
                Ok(None) => {
                    ended = Some(Ok(()));
                    break;
                }
                Ok(Some((bytes, place))) => {
                    row += 1;
                    match form {
                        LineForm::Text => Document::from_line(&bytes, place),
                        LineForm::Json(columns) => Document::from_json(columns, &bytes, place),
                    }
                }
                Err(e) => {
                    ended = Some(Err(e));
                    break;
                }
            };
            match document {
                Ok(document) => documents.push(document),
                Err(e @ DataError::Item { .. }) if skip_bad => on_fault(&e),
                Err(e) => {
                    ended = Some(Err(e.into()));
                    break;
                }
            }
        }
        if stop() {
            return Err(TrainError::Interrupted);
        }
        if documents.is_empty() {
            continue;
        }
        // A window's work ends soon enough by itself.
        let logits =
            classifier.device.run(|| classifier.logits_of(&documents, &|| false))?.unwrap_or_default();
        for (document, logits) in documents.iter().zip(logits.chunks_exact(labels)) {
            take(document, logits)?;
        }
    }
    ended.unwrap_or(Ok(()))
}
