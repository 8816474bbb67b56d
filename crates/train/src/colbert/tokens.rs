//! Texts of a ColBERT model as token ids: `CLS prefix w1 .. wn SEP`, queries filled up with mask tokens, documents whose tokens of the
//! skip list get no vector.
//!
//! Source: PyLate's `tokenize`. Where it is wrong we differ: a word of the skip list that the vocabulary lacks hides nothing (there it hides
//! every unknown token), and a prefix stands behind the first token only where the tokenizer puts one before every text.

use tercio_data::Tokenizer;
use tercio_engine::Span;
use tercio_models::colbert::{ColbertConfig, TokenRows};

use crate::error::TrainError;

/// A text, encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedText {
    /// Its token ids.
    pub ids: Vec<u32>,
    /// How many of them are attended to: the first ones.
    pub real: usize,
    /// Places of those that get a vector.
    pub kept: Vec<u32>,
    /// Whether it is as long as its limit.
    pub full: bool,
    /// Whether PyLate, which fills texts up to their limit, would have masked a token of it.
    pub masked: bool,
}

impl AsRef<[u32]> for EncodedText {
    fn as_ref(&self) -> &[u32] {
        &self.ids
    }
}

/// How texts are encoded: the ids of a tokenizer for a model's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextTokens {
    query_prefix: Option<u32>,
    document_prefix: Option<u32>,
    query_prompt: String,
    document_prompt: String,
    query_length: usize,
    document_length: usize,
    expansion: Option<u32>,
    attend_to_expansion: bool,
    /// Sorted.
    skipped: Vec<u32>,
    lower_case: bool,
}

impl TextTokens {
    /// Of a model of `most` positions.
    ///
    /// # Errors
    /// A prefix that the vocabulary lacks; texts longer than the model takes.
    pub fn new(config: &ColbertConfig, tokenizer: &Tokenizer, most: usize) -> Result<TextTokens, TrainError> {
        for (flag, other, n) in [
            ("query_length", "question_maxlength", config.query_length),
            ("document_length", "passage_maxlength", config.document_length),
        ] {
            if n > most {
                return Err(TrainError::Options(format!(
                    "--{flag} {n} (or --{other}): the encoder takes at most {most} tokens; give a smaller one"
                )));
            }
        }
        let prefix = |token: &str| match token {
            "" => Ok(None),
            token => match tokenizer.token_id(token) {
                Some(id) => Ok(Some(id)),
                None => Err(TrainError::Unusable(format!(
                    "expected the prefix {token:?} in the vocabulary, found none; give the tokenizer of the model"
                ))),
            },
        };
        let mut skipped: Vec<u32> =
            config.skiplist.iter().filter_map(|word| tokenizer.token_id(word)).collect();
        skipped.sort_unstable();
        skipped.dedup();
        // PyLate's padding: the mask token, else the end token.
        let filler = tokenizer.mask_id().unwrap_or(tokenizer.eos_id());
        Ok(TextTokens {
            query_prefix: prefix(&config.query_prefix)?,
            document_prefix: prefix(&config.document_prefix)?,
            query_prompt: config.prompt("query").to_owned(),
            document_prompt: config.prompt("document").to_owned(),
            query_length: config.query_length,
            document_length: config.document_length,
            expansion: config.expansion.then_some(filler),
            attend_to_expansion: config.attend_to_expansion,
            skipped,
            lower_case: config.lower_case,
        })
    }

    /// Most tokens of a query, and of a document.
    pub fn lengths(&self) -> (usize, usize) {
        (self.query_length, self.document_length)
    }

    /// Encodes a query.
    ///
    /// # Errors
    /// A text that the tokenizer does not take, or a limit below what stands around every text.
    pub fn query(&self, text: &str, tokenizer: &Tokenizer) -> Result<EncodedText, TrainError> {
        let most = self.query_length;
        let mut ids = self.encode(&self.query_prompt, text, self.query_prefix, most, tokenizer)?;
        let full = ids.len() == most;
        let mut real = ids.len();
        if let Some(mask) = self.expansion {
            ids.resize(most, mask);
            if self.attend_to_expansion {
                real = most;
            }
        }
        Ok(EncodedText { kept: (0..ids.len() as u32).collect(), ids, real, full, masked: false })
    }

    /// Encodes a document.
    ///
    /// # Errors
    /// As [`TextTokens::query`].
    pub fn document(&self, text: &str, tokenizer: &Tokenizer) -> Result<EncodedText, TrainError> {
        let most = self.document_length;
        let ids = self.encode(&self.document_prompt, text, self.document_prefix, most, tokenizer)?;
        let shown = |i: &u32| self.skipped.binary_search(&ids[*i as usize]).is_err();
        let kept: Vec<u32> = (0..ids.len() as u32).filter(shown).collect();
        let (real, full) = (ids.len(), ids.len() == most);
        Ok(EncodedText { masked: !full || kept.len() < real, kept, ids, real, full })
    }

    fn encode(
        &self,
        prompt: &str,
        text: &str,
        prefix: Option<u32>,
        most: usize,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, TrainError> {
        let joined = format!("{prompt}{text}");
        let text = joined.trim();
        let lower = if self.lower_case { text.to_lowercase() } else { String::new() };
        let text = if self.lower_case { &lower } else { text };
        let Some(prefix) = prefix else { return Ok(tokenizer.encode_framed(text, most)?) };
        let mut ids = tokenizer.encode_framed(text, most.saturating_sub(1))?;
        ids.insert(tokenizer.frame().0.len().min(1), prefix);
        Ok(ids)
    }
}

/// Encoded texts in one flat row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedTexts {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where each text lies in `ids`.
    pub spans: Vec<Span>,
    /// The tokens of each that are attended to.
    pub keys: Vec<Span>,
    /// Rows of `ids` that get a vector.
    pub kept: Vec<u32>,
    /// Where the vectors of each text lie among all.
    pub vectors: Vec<Span>,
}

impl PackedTexts {
    /// Packs texts, one after the other. A text without tokens gives nothing to an encoder and is refused.
    ///
    /// # Errors
    /// More than 2^32 - 1 tokens; a text without tokens.
    pub fn new<'t>(texts: impl IntoIterator<Item = &'t EncodedText>) -> Result<PackedTexts, TrainError> {
        let mut packed = PackedTexts::default();
        for text in texts {
            if text.ids.is_empty() {
                return Err(TrainError::Unusable(
                    "a text gives no tokens; use a tokenizer that puts special tokens around every text"
                        .into(),
                ));
            }
            let (start, first) = (packed.ids.len() as u32, packed.kept.len() as u32);
            if packed.ids.len() + text.ids.len() > u32::MAX as usize {
                return Err(TrainError::Unusable(format!(
                    "expected a shard of at most {} tokens, found more; use a smaller --micro_batch_size",
                    u32::MAX
                )));
            }
            packed.ids.extend_from_slice(&text.ids);
            packed.kept.extend(text.kept.iter().map(|at| start + at));
            packed.spans.push(Span { start, end: packed.ids.len() as u32 });
            packed.keys.push(Span { start, end: start + text.real as u32 });
            packed.vectors.push(Span { start: first, end: packed.kept.len() as u32 });
        }
        Ok(packed)
    }

    /// As the model takes them.
    pub fn rows(&self) -> TokenRows<'_> {
        TokenRows { ids: &self.ids, spans: &self.spans, keys: &self.keys, kept: &self.kept }
    }
}
