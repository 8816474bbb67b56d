//! A model that gives a text one vector, whichever folder it is in: FiD's retriever, sentence-transformers', or a plain encoder's.

use std::path::Path;

use tercio_engine::{Arena, Device, Layout, Span, Tape, Var};

use crate::encoder::EncoderConfig;
use crate::folder::ModelFolder;
use crate::model_file::ModelError;
use crate::retriever::{LoadedRetriever, Pooling, RetrieverHeaders};
use crate::sentence::{LoadedSentenceEncoder, SentenceConfig};

/// Which of the two kinds of texts one is: some models treat them differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextKind {
    /// What is asked.
    Question,
    /// What is searched.
    Passage,
}

/// An embedding model with its values.
pub enum EmbeddingModel<D: Device> {
    /// A retriever as FiD saves it.
    Retriever(LoadedRetriever<D>),
    /// An encoder with pooling, as sentence-transformers saves it; or a plain one.
    Sentence(LoadedSentenceEncoder<D>),
}

impl<D: Device> EmbeddingModel<D> {
    /// Opens a folder: sentence-transformers' where it has `modules.json`, FiD's where its `config.json` has FiD's fields, else a plain
    /// encoder, whose states are pooled by `plain`.
    ///
    /// # Errors
    /// As [`LoadedSentenceEncoder::open`] and [`LoadedRetriever::open`]; a plain encoder where `plain` is none.
    pub fn open(folder: &ModelFolder, plain: Option<Pooling>, device: &D) -> Result<Self, ModelError> {
        if SentenceConfig::is_there(folder.path()) {
            return LoadedSentenceEncoder::open(folder, device).map(EmbeddingModel::Sentence);
        }
        let headers = RetrieverHeaders::read(folder)?;
        if headers.fid {
            return LoadedRetriever::of(headers, device).map(EmbeddingModel::Retriever);
        }
        let Some(pooling) = plain else {
            let what = "expected a retriever or a folder of sentence-transformers (modules.json), found a plain encoder; say how its states \
                        become one vector: mean or first";
            return Err(ModelError::ConfigFile { path: folder.config_path(), what: what.into() });
        };
        let sentence = LoadedSentenceEncoder::of_encoder(folder, SentenceConfig::plain(pooling), device)?;
        Ok(EmbeddingModel::Sentence(sentence))
    }

    /// The shape of the encoder inside.
    pub fn encoder(&self) -> EncoderConfig {
        match self {
            EmbeddingModel::Retriever(m) => m.model.encoder.config(),
            EmbeddingModel::Sentence(m) => m.model.encoder.config(),
        }
    }

    /// Width of a text's vector.
    pub fn dimension(&self) -> usize {
        match self {
            EmbeddingModel::Retriever(m) => m.model.config.dimension(),
            EmbeddingModel::Sentence(m) => m.model.dimension(),
        }
    }

    /// Names, shapes and places of the parameters.
    pub fn layout(&self) -> &Layout {
        match self {
            EmbeddingModel::Retriever(m) => m.model.layout(),
            EmbeddingModel::Sentence(m) => m.model.layout(),
        }
    }

    /// The values.
    pub fn parameters(&self) -> &Arena<D> {
        match self {
            EmbeddingModel::Retriever(m) => &m.parameters,
            EmbeddingModel::Sentence(m) => &m.parameters,
        }
    }

    /// How the states of a text become one vector.
    pub fn pooling(&self) -> Pooling {
        match self {
            EmbeddingModel::Retriever(m) => m.model.config.pooling,
            EmbeddingModel::Sentence(m) => m.model.config.pooling,
        }
    }

    /// Whether vectors have unit length.
    pub fn normalizes(&self) -> bool {
        match self {
            EmbeddingModel::Retriever(m) => m.model.config.normalize,
            EmbeddingModel::Sentence(m) => m.model.config.normalize,
        }
    }

    /// Most tokens of a text that the model was made for, special ones counted.
    pub fn max_tokens(&self, kind: TextKind) -> usize {
        let most = match (self, kind) {
            (EmbeddingModel::Retriever(m), TextKind::Question) => m.model.config.question_maxlength,
            (EmbeddingModel::Retriever(m), TextKind::Passage) => m.model.config.passage_maxlength,
            (EmbeddingModel::Sentence(m), _) => m.max_tokens,
        };
        most.min(self.encoder().max_tokens())
    }

    /// Whether texts are packed padded to their greatest length, because the model attends to padding.
    pub fn pads(&self, kind: TextKind) -> bool {
        match (self, kind) {
            (EmbeddingModel::Retriever(m), TextKind::Question) => !m.model.config.apply_question_mask,
            (EmbeddingModel::Retriever(m), TextKind::Passage) => !m.model.config.apply_passage_mask,
            (EmbeddingModel::Sentence(_), _) => false,
        }
    }

    /// What is put before texts: the prompt of this name, or the model's default one. FiD's retrievers have none.
    ///
    /// # Errors
    /// A sentence that says which names there are.
    pub fn prompt(&self, name: Option<&str>) -> Result<&str, String> {
        match (self, name) {
            (EmbeddingModel::Retriever(_), None) => Ok(""),
            (EmbeddingModel::Retriever(_), Some(name)) => {
                Err(format!("a retriever of FiD has no prompts, so none is called {name:?}"))
            }
            (EmbeddingModel::Sentence(m), name) => m.model.config.prompt(name),
        }
    }

    /// Whether texts are made lower case before the tokenizer gets them.
    pub fn lower_case(&self) -> bool {
        match self {
            EmbeddingModel::Retriever(_) => false,
            EmbeddingModel::Sentence(m) => m.model.config.lower_case,
        }
    }

    /// The folder in which the tokenizer lies, of the `folder` that was opened.
    pub fn tokenizer_folder<'a>(&'a self, folder: &'a ModelFolder) -> &'a Path {
        match self {
            EmbeddingModel::Retriever(_) => folder.path(),
            EmbeddingModel::Sentence(m) => &m.tokenizer,
        }
    }

    /// A line for the log about tensors that were left out.
    pub fn note(&self) -> Option<&str> {
        match self {
            EmbeddingModel::Retriever(m) => m.note.as_deref(),
            EmbeddingModel::Sentence(m) => m.note.as_deref(),
        }
    }

    /// The vector of every text, `[spans, dimension]`. `spans` are the texts of the flat `ids`, none empty, none longer than
    /// [`EncoderConfig::max_tokens`]; `recompute` keeps only the input of each layer for the backward.
    pub fn embed<'p>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        match self {
            EmbeddingModel::Retriever(m) => m.model.embed(tape, ids, spans, recompute),
            EmbeddingModel::Sentence(m) => m.model.embed(tape, ids, spans, recompute),
        }
    }
}
