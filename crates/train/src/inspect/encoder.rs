//! What a folder of a text encoder holds: a plain one, FiD's retriever, sentence-transformers' model, a ColBERT model, a classifier.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};
use tercio_engine::Layout;
use tercio_models::classifier::{Classifier, ClassifierHeaders, is_classifier};
use tercio_models::colbert::{Colbert, ColbertHeaders};
use tercio_models::encoder::{Encoder, EncoderHeaders};
use tercio_models::folder::ModelFolder;
use tercio_models::model_file::read_json;
use tercio_models::retriever::{Pooling, Retriever, RetrieverHeaders};
use tercio_models::sentence::{SentenceConfig, SentenceEncoder};

use super::{dtype_name, file_name, tokenizer_of, write_tokenizer};
use crate::error::TrainError;
use crate::run::memory::human;

/// Labels that are printed.
const SHOWN: usize = 12;

/// What is known of an encoder and what is behind it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EncoderReport {
    /// The folder.
    pub path: String,
    /// The encoder's file of weights (the index of shards).
    pub weights: String,
    /// `encoder`, `retriever` (FiD's), `sentence-encoder`, `colbert` or `classifier`.
    pub kind: &'static str,
    /// The encoder's family: `bert`, `roberta`, ...
    pub architecture: &'static str,
    /// Values of all parameters.
    pub parameters: u64,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Most tokens of a text that the encoder takes.
    pub max_tokens: usize,
    /// Width of the vectors of a text, or of a token of a ColBERT model; `None` of what gives none.
    pub dimension: Option<usize>,
    /// How states become one vector: `mean` or `first`.
    pub pooling: Option<&'static str>,
    /// Whether vectors have length one; `None` of what gives none.
    pub normalized: Option<bool>,
    /// A classifier's labels.
    pub labels: Option<Vec<String>>,
    /// Whether a text may have several of them.
    pub multi_label: Option<bool>,
    /// Tokens of a query and of a document of a ColBERT model.
    pub lengths: Option<[usize; 2]>,
    /// Tensors of the file that are no part of the model: heads of other tasks.
    pub ignored: usize,
    /// Number formats of the tensors.
    pub dtypes: Vec<String>,
    /// The file of its vocabulary; `None` where it has none.
    pub tokenizer: Option<&'static str>,
    /// Ids of the tokenizer.
    pub tokenizer_size: Option<usize>,
    /// Bytes of the parameters in memory (f32), which running needs beside its activations.
    pub run_bytes: u64,
    /// Bytes of parameters, gradients and both moments (f32), which training needs beside its activations.
    pub train_bytes: u64,
}

/// Whether a folder is one of an encoder: sentence-transformers', or its `config.json` names another architecture than T5.
pub fn is_encoder(folder: &ModelFolder) -> bool {
    let other = |json: Map<String, Value>| {
        json.get("model_type").and_then(Value::as_str).is_some_and(|kind| !matches!(kind, "t5" | "mt5"))
    };
    SentenceConfig::is_there(folder.path()) || read_json(&folder.config_path()).is_ok_and(other)
}

/// Reads configurations and headers, and compares them.
///
/// # Errors
/// A folder that is no model, tensors that do not fit the configuration, a damaged tokenizer.
pub fn inspect(folder: &ModelFolder) -> Result<EncoderReport, TrainError> {
    if SentenceConfig::is_there(folder.path()) {
        let headers = ColbertHeaders::read(folder, None)?;
        return if headers.is_colbert { colbert(folder, headers) } else { sentence(folder) };
    }
    let plain = EncoderHeaders::read(folder, &[])?;
    if is_classifier(&plain.json) {
        return classifier(folder);
    }
    let headers = RetrieverHeaders::read(folder)?;
    if headers.fid {
        let model = Retriever::new(headers.config.clone());
        headers.encoder.check(model.layout().specs(), &[])?;
        let mut report = report("retriever", folder, &headers.encoder, model.layout(), folder.path())?;
        report.dimension = Some(headers.config.dimension());
        report.pooling = Some(name_of(headers.config.pooling));
        report.normalized = Some(headers.config.normalize);
        return Ok(report);
    }
    let headers = ColbertHeaders::read(folder, None)?;
    if headers.is_colbert {
        return colbert(folder, headers);
    }
    let layout = layout_of(&plain);
    plain.check(layout.specs(), &[])?;
    report("encoder", folder, &plain, &layout, folder.path())
}

fn classifier(folder: &ModelFolder) -> Result<EncoderReport, TrainError> {
    let headers = ClassifierHeaders::read(folder)?;
    let model = Classifier::new(headers.config.clone());
    headers.encoder.check(model.layout().specs(), &[])?;
    let mut report = report("classifier", folder, &headers.encoder, model.layout(), folder.path())?;
    report.pooling = Some(name_of(headers.config.pooling));
    report.multi_label = Some(headers.config.multi_label);
    report.labels = Some(headers.config.labels);
    Ok(report)
}

fn colbert(folder: &ModelFolder, headers: ColbertHeaders) -> Result<EncoderReport, TrainError> {
    let (encoder, config) = (&headers.encoder, headers.config.clone());
    let model = Colbert::new(encoder.config.clone(), config);
    // Of the encoder's tensors: Stanford's files have the projection among them.
    let own = layout_of(encoder);
    let behind: Vec<&str> =
        encoder.weights.names().filter(|name| own.specs().iter().all(|spec| spec.name != *name)).collect();
    encoder.check(own.specs(), &behind)?;
    let mut report = report("colbert", folder, encoder, model.layout(), &headers.tokenizer)?;
    report.dimension = Some(model.dimension());
    report.normalized = Some(true);
    report.lengths = Some([model.config.query_length, model.config.document_length]);
    Ok(report)
}

fn sentence(folder: &ModelFolder) -> Result<EncoderReport, TrainError> {
    let config = SentenceConfig::read(folder.path())?;
    let part = match config.transformer.as_str() {
        "" => folder.clone(),
        part => ModelFolder::open(&folder.path().join(part).to_string_lossy())?,
    };
    let encoder = EncoderHeaders::read(&part, &[])?;
    encoder.check(layout_of(&encoder).specs(), &[])?;
    let model = SentenceEncoder::new(encoder.config.clone(), config);
    let mut report = report("sentence-encoder", folder, &encoder, model.layout(), part.path())?;
    report.dimension = Some(model.dimension());
    report.pooling = Some(name_of(model.config.pooling));
    report.normalized = Some(model.config.normalize);
    report.max_tokens = model.config.max_seq_length.unwrap_or(usize::MAX).min(report.max_tokens);
    Ok(report)
}

/// Names and shapes of an encoder's parameters alone.
fn layout_of(headers: &EncoderHeaders) -> Layout {
    let mut layout = Layout::default();
    Encoder::new(headers.config.clone(), &mut layout);
    layout
}

fn name_of(pooling: Pooling) -> &'static str {
    match pooling {
        Pooling::Mean => "mean",
        Pooling::First => "first",
    }
}

fn report(
    kind: &'static str,
    folder: &ModelFolder,
    encoder: &EncoderHeaders,
    layout: &Layout,
    tokenizer: &Path,
) -> Result<EncoderReport, TrainError> {
    let mut dtypes = BTreeSet::new();
    for name in encoder.weights.names() {
        dtypes.insert(dtype_name(encoder.weights.dtype(name)?));
    }
    let (tokenizer, tokenizer_size) = tokenizer_of(tokenizer)?;
    let (c, parameters) = (&encoder.config, layout.len() as u64);
    Ok(EncoderReport {
        path: folder.path().display().to_string(),
        weights: file_name(encoder.weights.path()),
        kind,
        architecture: c.model_type(),
        parameters,
        vocab_size: c.vocab_size(),
        hidden_size: c.width(),
        num_layers: c.layers(),
        max_tokens: c.max_tokens(),
        dimension: None,
        pooling: None,
        normalized: None,
        labels: None,
        multi_label: None,
        lengths: None,
        ignored: encoder.ignored.len(),
        dtypes: dtypes.into_iter().collect(),
        tokenizer,
        tokenizer_size,
        run_bytes: parameters * 4,
        train_bytes: parameters * 16,
    })
}

impl fmt::Display for EncoderReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.path, self.weights)?;
        let kind = match self.kind {
            "retriever" => "Fusion-in-Decoder's retriever",
            "sentence-encoder" => "a model of sentence-transformers",
            "colbert" => "a ColBERT model",
            "classifier" => "a text classifier",
            _ => "a text encoder without a head",
        };
        writeln!(f, "  kind           {kind}")?;
        let (layers, width) = (self.num_layers, self.hidden_size);
        writeln!(f, "  architecture   {}, {layers} layers, width {width}", self.architecture)?;
        write!(f, "  parameters     {}, stored as {}", self.parameters, self.dtypes.join(", "))?;
        match self.ignored {
            0 => writeln!(f)?,
            ignored => writeln!(f, "; {ignored} tensors are no part of it")?,
        }
        writeln!(f, "  vocabulary     {} ids", self.vocab_size)?;
        match self.lengths {
            Some([query, document]) => {
                writeln!(f, "  tokens         {query} of a query, {document} of a document")?;
            }
            None => writeln!(f, "  tokens         {} of a text at most", self.max_tokens)?,
        }
        if let Some(dimension) = self.dimension {
            let of = if self.lengths.is_some() { "a token" } else { "a text" };
            let length = if self.normalized == Some(true) { ", of length one" } else { "" };
            writeln!(f, "  vectors        {dimension} numbers {of}{length}")?;
        }
        if let Some(pooling) = self.pooling {
            let how = if pooling == "mean" { "the mean of all tokens" } else { "the first token" };
            writeln!(f, "  pooling        {how}")?;
        }
        if let Some(labels) = &self.labels {
            let more = if labels.len() > SHOWN { ", ..." } else { "" };
            let names = labels.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
            let several = if self.multi_label == Some(true) { ", several of a text" } else { "" };
            writeln!(f, "  labels         {}{several}: {names}{more}", labels.len())?;
        }
        write_tokenizer(f, self.tokenizer, self.tokenizer_size)?;
        writeln!(
            f,
            "  memory         {} to run, {} to train, activations apart",
            human(self.run_bytes),
            human(self.train_bytes)
        )
    }
}
