//! `tercio embed --multi-vector`: a vector for every token of passages or questions, by a ColBERT model.

use tercio_comm::World;
use tercio_data::multi_vectors::MultiVectorsFolder;
use tercio_data::vectors::VectorSettings;
use tercio_models::embedding_model::TextKind;
use tercio_train::TrainError;
use tercio_train::colbert::{ColbertEncoder, TokenPooling};
use tercio_train::embed::EmbedReport;
use tercio_train::options::ColbertTextOptions;
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::start::same_among;
use tercio_train::run::Signals;
use tercio_train::setup::colbert::open_colbert_among;

use super::embed::{Embed, Work};

impl Embed {
    pub(super) fn embed_tokens<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        signals: &Signals,
    ) -> Result<EmbedReport, TrainError> {
        let name = self.model_path.as_deref().unwrap_or_default();
        let text = ColbertTextOptions {
            query_length: self.question_maxlength,
            document_length: self.passage_maxlength,
            ..ColbertTextOptions::default()
        };
        let opened =
            device.run(|| open_colbert_among(world, name, self.tokenizer.as_deref(), &text, device))?;
        let fingerprint = device.run(|| opened.fingerprint(device));
        same_among(world, "--model_path", &fingerprint)?;
        let (kind, texts) = self.texts(world, &|kind| {
            let (query, document) = text.templates().map_err(TrainError::Options)?;
            Ok(match kind {
                TextKind::Question => query,
                TextKind::Passage if self.no_title => "{text}".parse()?,
                TextKind::Passage => document,
            })
        })?;
        let tokens = opened.tokens()?;
        let pooling = TokenPooling {
            factor: self.pool_factor,
            protected: self.protected_tokens,
            unit: self.normalize_pooled,
        };
        let pools = pooling.factor > 1 && kind == TextKind::Passage;
        let (query, document) = tokens.lengths();
        let settings = VectorSettings {
            model_fingerprint: Some(fingerprint),
            dimension: opened.loaded.model.dimension(),
            pooling: match pools {
                true => format!("tokens, {} to one but for the first {}", pooling.factor, pooling.protected),
                false => "tokens".to_owned(),
            },
            normalized: !pools || pooling.unit,
            maxlength: if kind == TextKind::Question { query } else { document },
            ..self.settings(&texts)
        };
        let folder = match world.is_main() {
            true => Some(MultiVectorsFolder::open(&self.output, settings.clone())?),
            false => None,
        };
        let model = &opened.loaded.model;
        let encoder = ColbertEncoder {
            device,
            model,
            parameters: &opened.loaded.parameters,
            tokenizer: &opened.tokenizer,
            tokens: &tokens,
            kind,
            pooling,
            batch_tokens: self.batch_tokens,
            batch_texts: self.per_gpu_batch_size,
            window: self.window,
        };
        let work = Work {
            encoder: &encoder,
            texts: &texts,
            settings: &settings,
            folder: folder.as_ref().map(|f| f as _),
            parameters: model.layout().len(),
            vectors: settings.maxlength,
        };
        device.run(|| self.among(world, work, signals))
    }
}
