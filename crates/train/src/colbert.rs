//! A ColBERT model at work: its texts as tokens, their vectors, exact scores, an index.
//!
//! ```
//! use tercio_comm::World;
//! use tercio_data::multi_vectors::TokensInMemory;
//! use tercio_engine::{Cpu, Device};
//! use tercio_models::embedding_model::TextKind;
//! use tercio_search::manifest::Collection;
//! use tercio_search::max_sim::MaxSim;
//! use tercio_search::plaid::{PlaidIndex, PlaidOptions, PlaidSearch};
//! use tercio_train::colbert::{ColbertEncoder, TokenPooling};
//! use tercio_train::options::ColbertTextOptions;
//! use tercio_train::setup::colbert::open_colbert_among;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/colbert/model");
//! let cpu = Cpu::new(2)?;
//! // A folder of PyLate, a checkpoint of Stanford's; an encoder without a projection has to be trained first.
//! let model = open_colbert_among(&World::alone(), folder, None, &ColbertTextOptions::default(), &cpu)?;
//! let tokens = model.tokens()?;
//! let encoder = |kind| ColbertEncoder {
//!     device: &cpu,
//!     model: &model.loaded.model,
//!     parameters: &model.loaded.parameters,
//!     tokenizer: &model.tokenizer,
//!     tokens: &tokens,
//!     kind,
//!     pooling: TokenPooling::NONE,
//!     batch_tokens: 8192,
//!     batch_texts: 128,
//!     window: 1024,
//! };
//! let documents = ["The old miller measured the stone bridge.", "Who repaired the church bell?"];
//! let documents = documents.map(String::from);
//! let vectors = cpu.run(|| encoder(TextKind::Passage).rows(&documents, &|| false))?.unwrap();
//! let (mut collection, mut rest) = (TokensInMemory::new(model.loaded.model.dimension()), &vectors.values[..]);
//! for (id, length) in ["miller", "bell"].iter().zip(&vectors.lengths) {
//!     let (own, tail) = rest.split_at(*length as usize * model.loaded.model.dimension());
//!     collection.push(id, own)?;
//!     rest = tail;
//! }
//! let query = ["who repaired the church bell?".to_owned()];
//! let query = cpu.run(|| encoder(TextKind::Question).rows(&query, &|| false))?.unwrap();
//! let search = MaxSim::load(&cpu, &collection, &|| false)?;
//! let best = &search.search(&cpu, &[&query.values], 1, &|| false)?[0][0];
//! assert_eq!(best.row, 1);
//!
//! // The same documents in an index on disk.
//! # let folder = tempfile::tempdir()?;
//! # let dir = folder.path();
//! let of = Collection { path: "passages.tsv".into(), fingerprint: None, count: 2 };
//! PlaidIndex::build(&cpu, &collection, of, dir, &PlaidOptions::default(), &|| false, &mut |_| {})?;
//! let how = PlaidSearch { depth: 1, ..PlaidSearch::default() };
//! let found = PlaidIndex::open(dir)?.search(&cpu, &[&query.values], how, &|| false)?;
//! assert_eq!(found[0][0].row, 1);
//! # Ok(())
//! # }
//! ```

use std::path::Path;

use tercio_data::Tokenizer;
use tercio_engine::Device;
use tercio_models::colbert::{ColbertConfig, ColbertHeaders, LoadedColbert};

use crate::embed::model_fingerprint;
use crate::error::TrainError;
use crate::setup::require_room;

pub mod collection;
pub mod encode;
pub mod rerank;
pub mod tokens;

pub use collection::{Collection, CollectionSearch};
pub use encode::{ColbertEncoder, TokenPooling};
pub use tokens::{EncodedText, PackedTexts, TextTokens};

/// A ColBERT model with its values and its tokenizer.
pub struct ColbertModel<D: Device> {
    /// The model.
    pub loaded: LoadedColbert<D>,
    /// Its tokenizer, which has the prefixes.
    pub tokenizer: Tokenizer,
}

impl<D: Device> ColbertModel<D> {
    /// Reads the values of a folder whose headers are read. `settle` may change the settings of texts and the encoder's dropout before.
    /// Prefixes that the vocabulary lacks are added to it: a tokenizer that came from `tokenizer`, or lies with the model.
    ///
    /// # Errors
    /// What does not fit; more memory than there is; a tokenizer of more ids than the model has embeddings, beside the prefixes.
    pub fn read(
        mut headers: ColbertHeaders,
        tokenizer: Option<&Path>,
        settle: impl FnOnce(&mut ColbertConfig),
        dropout: Option<f64>,
        seed: u64,
        device: &D,
    ) -> Result<ColbertModel<D>, TrainError> {
        let tokenizer = Tokenizer::load(tokenizer.unwrap_or(&headers.tokenizer))?;
        let mut config = headers.config.clone();
        settle(&mut config);
        let mut encoder = headers.encoder.config.clone();
        let (ids, rows) = (tokenizer.vocab_size(), encoder.vocab_size());
        if ids > rows {
            return Err(TrainError::Vocabulary { tokenizer: ids, model: rows });
        }
        let prefixes = [config.query_prefix.clone(), config.document_prefix.clone()];
        let named: Vec<&str> = prefixes.iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
        let tokenizer = tokenizer.with_tokens(&named)?;
        // PyLate would take the unknown token for a word that is not there, and hide all of its kind.
        config.skiplist.retain(|word| tokenizer.token_id(word).is_some());
        encoder.set_vocab_size(rows.max(tokenizer.vocab_size()));
        if let Some(p) = dropout {
            encoder.set_dropout(p);
        }
        require_room(encoder.parameters())?;
        headers.config = config.clone();
        let loaded = LoadedColbert::with_config(headers, encoder, config, seed, device)?;
        if let Some(note) = &loaded.note {
            tracing::info!("{note}");
        }
        if loaded.new_layers > 0 {
            tracing::info!("the projection is new: its values are drawn by the seed");
        }
        Ok(ColbertModel { loaded, tokenizer })
    }

    /// The model, if all of it was read: to use one whose projection was drawn by a seed just now would mean nothing.
    ///
    /// # Errors
    /// A projection that is new; `name` is the model in the message.
    pub fn trained(self, name: &str) -> Result<ColbertModel<D>, TrainError> {
        match self.loaded.new_layers {
            0 => Ok(self),
            _ => Err(TrainError::Unusable(format!(
                "{name}: expected a ColBERT model, found an encoder without the projection of one; train it first: tercio train \
                 colbert --model_path {name}"
            ))),
        }
    }

    /// What tells this model from others: its values, its tokenizer and its settings of texts.
    pub fn fingerprint(&self, device: &D) -> String {
        let model = &self.loaded.model;
        let encoder = serde_json::Value::Object(model.encoder.config().to_json(&serde_json::Map::new()));
        // How long texts may be is not the model: questions are asked with another length than passages were embedded with.
        let config = ColbertConfig { query_length: 0, document_length: 0, ..model.config.clone() };
        let rest = format!("{encoder} {config:?}");
        model_fingerprint(device, model.layout(), &self.loaded.parameters, &self.tokenizer, &rest)
    }

    /// How its texts are encoded.
    ///
    /// # Errors
    /// As [`TextTokens::new`].
    pub fn tokens(&self) -> Result<TextTokens, TrainError> {
        let model = &self.loaded.model;
        TextTokens::new(&model.config, &self.tokenizer, model.encoder.config().max_tokens())
    }
}
