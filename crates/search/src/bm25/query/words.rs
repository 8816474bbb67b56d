//! The words of a query: what each weighs, and where its lists are.

use crate::bm25::Bm25Index;
use crate::bm25::segment::ListEntry;
use crate::error::SearchError;

/// A word of a query.
pub struct Word {
    text: String,
    /// Times in the query · idf · (k1 + 1).
    pub weight: f32,
    /// Its list in each segment.
    pub lists: Vec<Option<ListEntry>>,
}

/// The words of a query in the order in which a score is added up, those alone that the index has.
pub fn words(index: &Bm25Index, query: &str, room: &mut String) -> Result<Vec<Word>, SearchError> {
    let mut all = index.settings.analyzer.query_words(query, room);
    all.sort_unstable();
    let mut words = Vec::new();
    for same in all.chunk_by(|a, b| a == b) {
        let lists: Vec<_> =
            index.segments.iter().map(|s| s.find(same[0].as_bytes())).collect::<Result<_, _>>()?;
        let having: f64 = lists.iter().flatten().map(|list| f64::from(list.count)).sum();
        if having > 0.0 {
            let idf = libm::log1p(((index.len() as f64 - having).max(0.0) + 0.5) / (having + 0.5));
            let weight = (same.len() as f64 * idf * (index.constants.k1 + 1.0)) as f32;
            words.push(Word { text: same[0].clone(), weight, lists });
        }
    }
    // The order of equal weights is that of the words, so that it is one.
    words.sort_by(|a, b| b.weight.total_cmp(&a.weight).then_with(|| a.text.cmp(&b.text)));
    Ok(words)
}

/// How much a word that stands `frequency` times gives, of its weight.
#[inline]
pub fn share(frequency: u32, norm: f32) -> f32 {
    // Frequencies have 31 bits: so the conversion is one instruction.
    let frequency = frequency as i32 as f32;
    frequency / (frequency + norm)
}
