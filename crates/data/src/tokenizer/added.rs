//! Tokens by their text, and tokens that a vocabulary gets beside its own.

use tokenizers::AddedToken;

use super::files::JSON;
use super::{Inner, MAX_PIECE_BYTES, Tokenizer, guarded};
use crate::error::DataError;

impl Tokenizer {
    /// The id of a token by its text, as the vocabulary writes it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.inner {
            Inner::Pipeline(pipeline) => pipeline.token_to_id(token),
            Inner::Bytes(bytes) => bytes.id(token),
        }
    }

    /// The tokenizer with `tokens` in its vocabulary: those that it does not have get the next ids, and are found in texts, as Hugging
    /// Face's `add_tokens` has it. `tokenizer.json` among the files then says so.
    ///
    /// # Errors
    /// A tokenizer that takes no tokens (byT5's), or a text that is empty or too long.
    pub fn with_tokens(mut self, tokens: &[&str]) -> Result<Tokenizer, DataError> {
        let missing: Vec<&str> = tokens.iter().copied().filter(|t| self.token_id(t).is_none()).collect();
        if missing.is_empty() {
            return Ok(self);
        }
        if let Some(bad) = missing.iter().find(|t| t.is_empty() || t.len() > MAX_PIECE_BYTES) {
            let bytes = bad.len();
            return Err(DataError::Setting(format!(
                "expected a token of 1 to {MAX_PIECE_BYTES} bytes, found one of {bytes}"
            )));
        }
        let Inner::Pipeline(pipeline) = &mut self.inner else {
            return Err(DataError::Setting(format!(
                "expected a tokenizer that takes new tokens ({}), found byT5's bytes; name tokens that it has, or none",
                missing.join(", ")
            )));
        };
        let added: Vec<AddedToken> = missing.iter().map(|&token| AddedToken::from(token, false)).collect();
        let json = guarded(|| {
            pipeline.add_tokens(&added);
            pipeline.to_string(true).map_err(|e| e.to_string())
        });
        self.vocab_size = pipeline.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let json = json.map_err(|e| DataError::Setting(format!("cannot add the tokens {missing:?}: {e}")))?;
        self.files.set(JSON, json.into_bytes());
        Ok(self)
    }
}
