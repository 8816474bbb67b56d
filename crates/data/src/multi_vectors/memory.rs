//! Vectors of tokens that lie in memory.

use super::{Origin, TokenVectors};
use crate::error::DataError;

/// Documents in memory, as they were just computed.
#[derive(Clone, Debug)]
pub struct TokensInMemory {
    dimension: usize,
    values: Vec<f32>,
    starts: Vec<u64>,
    ids: Vec<String>,
}

impl TokensInMemory {
    /// None yet, of vectors of `dimension` numbers.
    pub fn new(dimension: usize) -> TokensInMemory {
        TokensInMemory { dimension: dimension.max(1), values: Vec::new(), starts: vec![0], ids: Vec::new() }
    }

    /// Adds a document: the vectors of its tokens, one after the other; there may be none.
    ///
    /// # Errors
    /// Numbers that are no whole vectors, or are none, named by the document's id.
    pub fn push(&mut self, id: &str, vectors: &[f32]) -> Result<(), DataError> {
        if !vectors.len().is_multiple_of(self.dimension) {
            let what =
                format!("document {id:?}: {} numbers are no vectors of {}", vectors.len(), self.dimension);
            return Err(DataError::Text(what));
        }
        if let Some(at) = vectors.iter().position(|v| !v.is_finite()) {
            return Err(DataError::Text(format!(
                "document {id:?}: vector {} has {} as number {}",
                at / self.dimension,
                vectors[at],
                at % self.dimension
            )));
        }
        self.values.extend_from_slice(vectors);
        self.starts.push((self.values.len() / self.dimension) as u64);
        self.ids.push(id.to_owned());
        Ok(())
    }
}

impl TokenVectors for TokensInMemory {
    fn dimension(&self) -> usize {
        self.dimension
    }
    fn documents(&self) -> u64 {
        self.ids.len() as u64
    }
    fn start(&self, document: u64) -> u64 {
        self.starts[document as usize]
    }
    fn read(&self, first: u64, out: &mut [f32]) -> Result<(), DataError> {
        let from = (first as usize).checked_mul(self.dimension);
        match from.and_then(|from| self.values.get(from..from.checked_add(out.len())?)) {
            Some(values) => out.copy_from_slice(values),
            None => {
                let have = self.values.len() / self.dimension;
                let what = format!(
                    "{} numbers from vector {first} were asked for, there are {have} vectors",
                    out.len()
                );
                return Err(DataError::Setting(what));
            }
        }
        Ok(())
    }
    fn ids(&self) -> Result<Vec<String>, DataError> {
        Ok(self.ids.clone())
    }
    fn origin(&self) -> Origin {
        Origin { path: "memory".into(), ..Origin::default() }
    }
}
