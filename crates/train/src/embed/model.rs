//! The model that embeds, with its tokenizer and the texts that it was made for.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_data::Tokenizer;
use tercio_data::template::TextTemplate;
use tercio_engine::Device;
use tercio_models::embedding_model::{EmbeddingModel, TextKind};
use tercio_models::retriever::Pooling;

use super::model_fingerprint;
use crate::error::TrainError;
use crate::setup::model_folder;

/// A model with its values and its tokenizer.
pub struct Embedder<D: Device> {
    /// The model.
    pub model: EmbeddingModel<D>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
}

impl<D: Device> Embedder<D> {
    /// Opens a model: `name` is a folder, a hub name, or a run's folder. The tokenizer is that of the folder, or the one in
    /// `tokenizer`. `plain` is how the states of a plain encoder become one vector.
    ///
    /// # Errors
    /// What is missing or does not fit; a tokenizer with more ids than the model has embeddings.
    pub fn open(
        name: &str,
        tokenizer: Option<&Path>,
        plain: Option<Pooling>,
        device: &D,
    ) -> Result<Self, TrainError> {
        let folder = model_folder(name)?;
        let model = EmbeddingModel::open(&folder, plain, device)?;
        if let Some(note) = model.note() {
            tracing::info!("{note}");
        }
        let mut tokenizer = Tokenizer::load(tokenizer.unwrap_or(model.tokenizer_folder(&folder)))?;
        if model.lower_case() {
            tokenizer = tokenizer.lower_cased();
        }
        let known = model.encoder().vocab_size();
        if tokenizer.vocab_size() > known {
            return Err(TrainError::Vocabulary { tokenizer: tokenizer.vocab_size(), model: known });
        }
        Ok(Embedder { model, tokenizer })
    }

    /// How token states become a vector, in a word.
    pub fn pooling(&self) -> &'static str {
        match self.model.pooling() {
            Pooling::Mean => "mean",
            Pooling::First => "first",
        }
    }

    /// The token that texts are filled up with, where the model attends to padding.
    pub fn padding(&self, kind: TextKind) -> Option<u32> {
        self.model.pads(kind).then(|| self.tokenizer.pad_id())
    }

    /// The template of texts, where nobody says otherwise: FiD's for a retriever; for others the bare texts, title first, with the
    /// prompt that the folder has for such texts.
    ///
    /// # Errors
    /// A prompt with braces.
    pub fn template(&self, kind: TextKind, no_title: bool) -> Result<TextTemplate, TrainError> {
        let EmbeddingModel::Sentence(m) = &self.model else {
            return Ok(match kind {
                TextKind::Passage => TextTemplate::passage(no_title),
                TextKind::Question => TextTemplate::question(),
            });
        };
        // The names that sentence-transformers gives them.
        let names: &[&str] = match kind {
            TextKind::Passage => &["document", "passage", "corpus"],
            TextKind::Question => &["query"],
        };
        let name = names.iter().find(|name| m.model.config.prompts.iter().any(|(n, _)| n == *name));
        let prompt = self.model.prompt(name.copied()).map_err(TrainError::Unusable)?;
        let places = match (kind, no_title) {
            (TextKind::Question, _) => "{question}",
            (TextKind::Passage, true) => "{text}",
            (TextKind::Passage, false) => "{title} {text}",
        };
        Ok(format!("{prompt}{places}").parse()?)
    }

    /// What tells this model from others.
    pub fn fingerprint(&self, device: &D) -> String {
        let none = Map::new();
        let config = match &self.model {
            EmbeddingModel::Retriever(m) => Value::Object(m.model.config.to_json(&none)).to_string(),
            EmbeddingModel::Sentence(m) => {
                format!("{} {:?}", Value::Object(self.model.encoder().to_json(&none)), m.model.config)
            }
        };
        model_fingerprint(device, self.model.layout(), self.model.parameters(), &self.tokenizer, &config)
    }
}
