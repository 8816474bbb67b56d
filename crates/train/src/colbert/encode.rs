//! Vectors of the tokens of texts: queries or documents, pooled or not.

use rayon::prelude::*;
use tercio_data::Tokenizer;
use tercio_engine::{Arena, Device, Span, Tape, memory};
use tercio_models::colbert::{Colbert, pooling};
use tercio_models::embedding_model::TextKind;

use super::tokens::{EncodedText, PackedTexts, TextTokens};
use crate::embed::{EncodeTexts, Rows, batches};
use crate::error::TrainError;

/// Bytes of distances of a document up to which documents are pooled side by side.
const SIDE_BY_SIDE: u64 = 1 << 24;

/// How many vectors a document keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPooling {
    /// Of so many tokens one vector; 1: all.
    pub factor: usize,
    /// Tokens from the first on that keep theirs.
    pub protected: usize,
    /// Whether pooled vectors get unit length; PyLate leaves them means.
    pub unit: bool,
}

impl TokenPooling {
    /// All tokens keep their vectors.
    pub const NONE: TokenPooling = TokenPooling { factor: 1, protected: 1, unit: false };
}

/// A ColBERT model with what it takes to give it texts.
pub struct ColbertEncoder<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a Colbert,
    /// Its values.
    pub parameters: &'a Arena<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How texts become tokens.
    pub tokens: &'a TextTokens,
    /// Which kind of texts they are.
    pub kind: TextKind,
    /// Pooling of documents.
    pub pooling: TokenPooling,
    /// Most tokens of a batch; a longer text is a batch by itself.
    pub batch_tokens: usize,
    /// Most texts of a batch.
    pub batch_texts: usize,
    /// Texts that are encoded, sorted and cut into batches together, by one rank.
    pub window: usize,
}

impl<D: Device> ColbertEncoder<'_, D> {
    /// Vectors of the tokens of `texts`, in their order; `None` as soon as `stop` says so, which is asked before every batch. Call it within
    /// the device's pool ([`Device::run`]).
    ///
    /// # Errors
    /// A text that cannot be tokenized; a document of more vectors than can be pooled; no memory for it.
    pub fn rows(&self, texts: &[String], stop: &dyn Fn() -> bool) -> Result<Option<Rows>, TrainError> {
        let encode = |text: &String| match self.kind {
            TextKind::Question => self.tokens.query(text, self.tokenizer),
            TextKind::Passage => self.tokens.document(text, self.tokenizer),
        };
        let encoded: Vec<EncodedText> = texts.par_iter().map(encode).collect::<Result<_, _>>()?;
        encoded.iter().try_for_each(|text| self.check(text.kept.len()))?;
        let width = self.model.dimension();
        let mut of: Vec<Vec<f32>> = vec![Vec::new(); texts.len()];
        let mut tokens = 0;
        for batch in batches(&encoded, self.batch_tokens, self.batch_texts) {
            if stop() {
                return Ok(None);
            }
            let packed = PackedTexts::new(batch.iter().map(|&i| &encoded[i]))?;
            tokens += packed.ids.len() as u64;
            let mut tape = Tape::inference(self.device, self.parameters);
            let vectors = self.model.embed(&mut tape, packed.rows(), false).tensor.to_vec(self.device);
            let of_span =
                |span: &Span| self.pooled(&vectors[span.start as usize * width..span.end as usize * width]);
            // Long documents take turns: each has the distances between all its tokens in memory.
            let long = |span: &Span| self.pooling_bytes((span.end - span.start) as usize) > SIDE_BY_SIDE;
            let own: Vec<Vec<f32>> = match packed.vectors.iter().any(long) {
                false => packed.vectors.par_iter().map(of_span).collect(),
                true => packed.vectors.iter().map(of_span).collect(),
            };
            batch.into_iter().zip(own).for_each(|(i, own)| of[i] = own);
        }
        let lengths = of.iter().map(|own| (own.len() / width) as u32).collect();
        Ok(Some(Rows { values: of.concat(), lengths, tokens }))
    }

    /// Bytes that pooling takes for a text of so many vectors.
    fn pooling_bytes(&self, vectors: usize) -> u64 {
        match self.kind {
            TextKind::Passage => pooling::bytes(vectors, self.pooling.factor, self.pooling.protected),
            TextKind::Question => 0,
        }
    }

    /// Refuses a document of more vectors than are pooled, or than there is memory for.
    fn check(&self, vectors: usize) -> Result<(), TrainError> {
        let bytes = self.pooling_bytes(vectors);
        if bytes > SIDE_BY_SIDE {
            let room = memory::available();
            poolable(vectors, bytes, room)?;
        }
        Ok(())
    }

    fn pooled(&self, vectors: &[f32]) -> Vec<f32> {
        let TokenPooling { factor, protected, unit } = self.pooling;
        match factor > 1 && self.kind == TextKind::Passage {
            true => pooling::pool(vectors, self.model.dimension(), factor, protected, unit),
            false => vectors.to_vec(),
        }
    }
}

/// Refuses a document of `vectors` vectors, which take `bytes` to pool, where there is `room` for less.
fn poolable(vectors: usize, bytes: u64, room: Option<u64>) -> Result<(), TrainError> {
    let less = "give a smaller --passage_maxlength, or no --pool_factor";
    if vectors > pooling::MOST_TOKENS {
        return Err(TrainError::Unusable(format!(
            "a document has vectors of {vectors} tokens, of at most {} they are pooled; {less}",
            pooling::MOST_TOKENS
        )));
    }
    match room {
        Some(room) if bytes > room => Err(TrainError::Unusable(format!(
            "pooling a document of {vectors} tokens takes {} of memory, found {}; {less}",
            memory::human(bytes),
            memory::human(room)
        ))),
        _ => Ok(()),
    }
}

impl<D: Device> EncodeTexts for ColbertEncoder<'_, D> {
    fn encode(&self, texts: &[String], stop: &dyn Fn() -> bool) -> Result<Option<Rows>, TrainError> {
        self.rows(texts, stop)
    }
    fn dimension(&self) -> usize {
        self.model.dimension()
    }
    fn window(&self) -> usize {
        self.window.max(1)
    }
    fn arithmetic(&self) -> String {
        self.device.arithmetic()
    }
    fn trim(&self) {
        self.device.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_that_cannot_be_pooled_are_refused() {
        let most = pooling::MOST_TOKENS;
        let taken = |vectors: usize| pooling::bytes(vectors, 2, 1);
        assert!(
            poolable(most, taken(most), Some(2 << 30)).is_ok() && poolable(most, taken(most), None).is_ok()
        );
        let more = poolable(most + 1, taken(most + 1), None).unwrap_err().to_string();
        assert!(more.contains("16385 tokens, of at most 16384"), "{more}");
        let full = poolable(4097, taken(4097), Some(100 << 20)).unwrap_err().to_string();
        assert!(full.contains("takes 128.0 MiB of memory, found 100.0 MiB"), "{full}");
    }
}
