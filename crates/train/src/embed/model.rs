//! The model that embeds, with its tokenizer and the texts that it was made for.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_data::Tokenizer;
use tercio_data::template::TextTemplate;
use tercio_engine::Device;
use tercio_models::embedding_model::{EmbeddingModel, TextKind};
use tercio_models::retriever::{Pooling, RetrieverConfig};

use super::model_fingerprint;
use crate::error::TrainError;
use crate::setup::model_folder;

/// The template of texts that a retriever was trained with, where its configuration says it.
///
/// # Errors
/// One without the places that it needs.
pub fn stored_template(config: &RetrieverConfig, kind: TextKind) -> Result<Option<TextTemplate>, TrainError> {
    let (name, stored, place) = match kind {
        TextKind::Passage => ("passage_template", &config.passage_template, "{text}"),
        TextKind::Question => ("question_template", &config.question_template, "{question}"),
    };
    let Some(stored) = stored else { return Ok(None) };
    let template: TextTemplate = stored
        .parse()
        .map_err(|e| TrainError::Unusable(format!("`{name}` of the model's config.json: {e}")))?;
    if template.is_for_questions() != (kind == TextKind::Question) {
        return Err(TrainError::Unusable(format!(
            "`{name}` of the model's config.json: expected a place for {place}, found {stored:?}"
        )));
    }
    Ok(Some(template))
}

/// A retriever's template of texts: the stored one, else FiD's.
fn of_retriever(
    config: &RetrieverConfig,
    kind: TextKind,
    no_title: bool,
) -> Result<TextTemplate, TrainError> {
    let fids = match kind {
        TextKind::Passage => TextTemplate::passage(no_title),
        TextKind::Question => TextTemplate::question(),
    };
    let Some(template) = stored_template(config, kind)? else { return Ok(fids) };
    // FiD's texts are those of a run without templates, in which the flag does what it always did.
    let is_fids = template == TextTemplate::passage(false);
    if kind == TextKind::Passage && no_title && template != fids && !is_fids {
        let stored = template.to_string();
        return Err(TrainError::Options(format!(
            "--no_title: the retriever was trained with passages as {stored:?}; leave the flag out, or name another text with \
             --template"
        )));
    }
    Ok(if is_fids { fids } else { template })
}

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
        let tokenizer = Tokenizer::load(tokenizer.unwrap_or(model.tokenizer_folder(&folder)))?;
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

    /// The template of texts, where nobody says otherwise: for a retriever the one that it was trained with, where its folder has
    /// it, else FiD's; for others the bare texts, title first, with the prompt that the folder has for such texts.
    ///
    /// # Errors
    /// A prompt with braces; a stored template without the places that it needs; `no_title` against a stored one.
    pub fn template(&self, kind: TextKind, no_title: bool) -> Result<TextTemplate, TrainError> {
        let m = match &self.model {
            EmbeddingModel::Retriever(m) => return of_retriever(&m.model.config, kind, no_title),
            EmbeddingModel::Sentence(m) => m,
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

#[cfg(test)]
mod tests {
    use std::fs;

    use tercio_data::Passage;
    use tercio_engine::Cpu;

    use super::*;
    use crate::embed::TextEncoder;

    /// A cased model of sentence-transformers whose tokenizer sees spaces in front of words.
    const CASED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/data/sentence/cls");

    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
            let target = to.join(entry.file_name());
            match entry.path().is_dir() {
                true => copy(&entry.path(), &target),
                false => drop(fs::copy(entry.path(), target).unwrap()),
            }
        }
    }

    fn rows(embedder: &Embedder<Cpu>, device: &Cpu, texts: &[&str]) -> Vec<f32> {
        let encoder = TextEncoder {
            device,
            model: &embedder.model,
            tokenizer: &embedder.tokenizer,
            maxlength: 64,
            padding: None,
            batch_tokens: 1024,
            batch_texts: 8,
            window: 8,
        };
        let texts: Vec<String> = texts.iter().map(|&t| t.into()).collect();
        device.run(|| encoder.rows(&texts, &|| false)).unwrap().unwrap().values
    }

    #[test]
    fn texts_are_made_lower_case_where_the_folder_says_so() {
        let device = Cpu::new(1).unwrap();
        let dir = tempfile::tempdir().unwrap();
        copy(Path::new(CASED), dir.path());
        let path = dir.path().join("sentence_bert_config.json");
        let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config.insert("do_lower_case".into(), true.into());
        fs::write(&path, Value::Object(config).to_string()).unwrap();
        let open = |path: &str| Embedder::open(path, None, None, &device).unwrap();
        let (cased, lower) = (open(CASED), open(dir.path().to_str().unwrap()));
        let (written, lowered) =
            (["The OLD Road, \u{39f}\u{394}\u{39f}\u{3a3}"], ["the old road, \u{3bf}\u{3b4}\u{3bf}\u{3c2}"]);
        assert_eq!(rows(&lower, &device, &written), rows(&cased, &device, &lowered));
        assert_ne!(rows(&cased, &device, &written), rows(&cased, &device, &lowered));
        assert_ne!(cased.fingerprint(&device), lower.fingerprint(&device));
    }

    #[test]
    fn a_passage_without_a_title_begins_with_its_text() {
        let device = Cpu::new(1).unwrap();
        let embedder = Embedder::open(CASED, None, None, &device).unwrap();
        let passage = Passage {
            id: "1".into(),
            title: String::new(),
            text: "old roads".into(),
            score: None,
            file_position: 0,
        };
        let template: TextTemplate = "{title} {text}".parse().unwrap();
        let found = template.of_passage(&passage);
        assert_eq!(rows(&embedder, &device, &[&found]), rows(&embedder, &device, &["old roads"]));
        // Else it would be seen.
        assert_ne!(rows(&embedder, &device, &[" old roads"]), rows(&embedder, &device, &["old roads"]));
        let own = embedder.template(TextKind::Passage, false).unwrap();
        assert!(own.to_string().ends_with("{title} {text}"), "{own}");
    }
}
