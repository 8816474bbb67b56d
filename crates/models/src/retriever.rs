//! FiD's retriever: one encoder for questions and passages, a projection of every token, a mean or the first token as the vector of
//! a text. The score of a question and a passage is `q . p / sqrt(dimension)`; where vectors are made one long, as those of most of
//! sentence-transformers' models are, it is their cosine.
//!
//! Source: Izacard and Grave (2021), "Distilling Knowledge from Reader to Retriever", and what FiD's released folders hold. Texts
//! are packed. Where a model attends to padding (`--no_passage_mask`), the padding is packed as tokens: its attention and its mean
//! take in all positions.

mod folder;

use serde_json::{Map, Value};
use tercio_engine::random::{key_of_name, normal};
use tercio_engine::{Arena, Device, LayerNorm, Layout, Param, Span, Tape, Var};

use crate::encoder::{Encoder, EncoderConfig, LEAST_LENGTH};
use crate::fields::Fields;

pub use folder::{LoadedRetriever, RetrieverHeaders, save};

/// PyTorch's default, which FiD's norm behind the projection has.
const EPS: f64 = 1e-5;

/// How the states of a text become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all packed tokens, special ones too.
    Mean,
    /// The first token, `[CLS]`.
    First,
}

/// What FiD's configuration adds to the encoder's.
#[derive(Clone, Debug, PartialEq)]
pub struct RetrieverConfig {
    /// The encoder.
    pub encoder: EncoderConfig,
    /// Width of a projected vector.
    pub indexing_dimension: usize,
    /// Whether states are projected and normalised; else they are the encoder's.
    pub projection: bool,
    /// Pooling.
    pub pooling: Pooling,
    /// Whether vectors are divided by their length; FiD has nothing like it.
    pub normalize: bool,
    /// Whether a question's padding is left out; else questions are packed padded to their greatest length.
    pub apply_question_mask: bool,
    /// The same for passages.
    pub apply_passage_mask: bool,
    /// Most tokens of a question, special ones counted.
    pub question_maxlength: usize,
    /// Most tokens of a passage.
    pub passage_maxlength: usize,
    /// How the text of a question is made, with `{question}`; `None` where the folder does not say: then it is FiD's.
    pub question_template: Option<String>,
    /// The same for passages, with `{title}` and `{text}`.
    pub passage_template: Option<String>,
}

impl RetrieverConfig {
    /// FiD's defaults over an encoder: projection to 768, means, no padding.
    pub fn new(encoder: EncoderConfig) -> RetrieverConfig {
        RetrieverConfig {
            encoder,
            indexing_dimension: 768,
            projection: true,
            pooling: Pooling::Mean,
            normalize: false,
            apply_question_mask: true,
            apply_passage_mask: true,
            question_maxlength: 40,
            passage_maxlength: 200,
            question_template: None,
            passage_template: None,
        }
    }
    /// Reads a `config.json` as FiD's retriever has it. An encoder's own, without FiD's fields, is read as one without projection
    /// whose padding is left out.
    ///
    /// # Errors
    /// As [`EncoderConfig::from_json`].
    pub fn from_json(json: &Map<String, Value>) -> Result<RetrieverConfig, String> {
        let (f, encoder) = (Fields(json), EncoderConfig::from_json(json)?);
        // FiD's own defaults hold where the configuration is FiD's; released ones say everything.
        let fid = is_fid(json);
        let cls = f.boolean("extract_cls", false)?;
        let template = |field: &str| f.get(field).map(|_| f.text(field, "").map(str::to_owned)).transpose();
        Ok(RetrieverConfig {
            indexing_dimension: f.size("indexing_dimension", Some(768))?,
            projection: f.boolean("projection", fid)?,
            pooling: if cls { Pooling::First } else { Pooling::Mean },
            normalize: fid && f.boolean("normalize", false)?,
            apply_question_mask: f.boolean("apply_question_mask", !fid)?,
            apply_passage_mask: f.boolean("apply_passage_mask", !fid)?,
            question_maxlength: f.size("question_maxlength", Some(40))?,
            passage_maxlength: f.size("passage_maxlength", Some(200))?,
            question_template: template("question_template")?,
            passage_template: template("passage_template")?,
            encoder,
        })
    }
    /// The `config.json` that FiD reads; fields of `base` that Tercio does not know are kept.
    pub fn to_json(&self, base: &Map<String, Value>) -> Map<String, Value> {
        let mut json = self.encoder.to_json(base);
        let mut set = |key: &str, value: Value| {
            json.insert(key.into(), value);
        };
        set("architectures", vec!["Retriever"].into());
        // Without a projection FiD insists on 768 here, and never reads it.
        let dimension = if self.projection { self.indexing_dimension } else { 768 };
        set("indexing_dimension", dimension.into());
        set("projection", self.projection.into());
        set("extract_cls", (self.pooling == Pooling::First).into());
        set("apply_question_mask", self.apply_question_mask.into());
        set("apply_passage_mask", self.apply_passage_mask.into());
        set("question_maxlength", self.question_maxlength.into());
        set("passage_maxlength", self.passage_maxlength.into());
        // FiD keeps fields that it does not know, and never reads them.
        match self.normalize {
            true => json.insert("normalize".into(), true.into()),
            false => json.remove("normalize"),
        };
        for (key, template) in
            [("question_template", &self.question_template), ("passage_template", &self.passage_template)]
        {
            match template {
                Some(template) => json.insert(key.into(), template.as_str().into()),
                None => json.remove(key),
            };
        }
        json
    }
    /// Width of a text's vector.
    pub fn dimension(&self) -> usize {
        if self.projection { self.indexing_dimension } else { self.encoder.width() }
    }
}

/// Whether a `config.json` has fields of FiD's retriever.
fn is_fid(json: &Map<String, Value>) -> bool {
    json.contains_key("indexing_dimension") || json.contains_key("projection")
}

struct Head {
    weight: Param,
    bias: Param,
    norm: LayerNorm,
}

/// A retriever: its shapes and where each parameter lies; the values are in an arena.
pub struct Retriever {
    /// The configuration.
    pub config: RetrieverConfig,
    /// The encoder.
    pub encoder: Encoder,
    layout: Layout,
    head: Option<Head>,
}

impl Retriever {
    /// The model of a configuration. The encoder's parameters have its own names (FiD's files put `model.` before them), the head's
    /// are `proj.weight`, `proj.bias`, `norm.weight`, `norm.bias`.
    pub fn new(config: RetrieverConfig) -> Retriever {
        let mut layout = Layout::default();
        let encoder = Encoder::new(config.encoder.clone(), &mut layout);
        let (width, d) = (config.encoder.width(), config.indexing_dimension);
        let head = config.projection.then(|| {
            let weight = layout.add(folder::HEAD[0], &[d, width]);
            let bias = layout.add(folder::HEAD[1], &[d]);
            let norm = [layout.add(folder::HEAD[2], &[d]), layout.add(folder::HEAD[3], &[d])];
            Head { weight, bias, norm: LayerNorm::new(norm[0], Some(norm[1]), EPS) }
        });
        Retriever { config, encoder, layout, head }
    }
    /// Names, shapes and places of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// The vector of every text, `[spans, dimension]`. `spans` are the texts of the flat `ids`, none empty, none longer than
    /// [`EncoderConfig::max_tokens`]; `recompute` keeps only the input of each layer for the backward.
    pub fn embed<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let mut states = self.encoder.encode(tape, ids, None, spans, recompute);
        let first: Vec<u32> = spans.iter().map(|s| s.start).collect();
        if self.config.pooling == Pooling::First {
            states = tape.rows(&states, &first);
        }
        if let Some(head) = &self.head {
            let projected = tape.linear_bias(&(&states).into(), head.weight, Some(head.bias));
            states = tape.layer_norm(&projected, head.norm, None);
        }
        let vectors = match self.config.pooling {
            Pooling::Mean => tape.span_means(&states, spans),
            Pooling::First => states,
        };
        if self.config.normalize { tape.normalize(&vectors, LEAST_LENGTH) } else { vectors }
    }
    /// What an inner product of two vectors is divided by to be a score, before any temperature.
    pub fn score_divisor(&self) -> f64 {
        if self.config.normalize { 1.0 } else { libm::sqrt(self.config.dimension() as f64) }
    }
    /// Random initial values of the head: normal with the encoder's standard deviation, bias zero, norm one, as FiD draws them; each
    /// from the parameter's name and the seed.
    pub fn fill_head<D: Device>(&self, seed: u64, device: &D, parameters: &mut Arena<D>) {
        for spec in self.layout.specs().iter().filter(|s| folder::is_head(s)) {
            let deviation = self.config.encoder.initializer_range();
            let key = key_of_name(seed, &spec.name);
            let value = |i| match (spec.shape.len(), spec.name.as_str()) {
                (2, _) => (deviation * normal(key, i)) as f32,
                (_, "norm.weight") => 1.0,
                _ => 0.0,
            };
            let values: Vec<f32> = (0..spec.place.len() as u64).map(value).collect();
            device.write(parameters.view_mut(spec.place), &values);
        }
    }
}
