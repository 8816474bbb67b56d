//! A batch of reader examples laid out without padding.

use crate::error::DataError;
use crate::reader::EncodedExample;

/// Token ids of a batch in flat rows, with offsets that say where each sequence starts.
///
/// `S` sequences (passages) of `Q` questions. Sequence `s` is `ids[offsets[s]..offsets[s + 1]]`; question `q` has the
/// sequences `question_sequences[q]..question_sequences[q + 1]` and the labels `targets[target_offsets[q]..target_offsets[q + 1]]`.
/// Questions may have different numbers of passages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedReaderBatch {
    /// Encoder token ids of all sequences, one after the other.
    pub ids: Vec<u32>,
    /// `S + 1` starts in `ids`, the last one its length.
    pub offsets: Vec<u32>,
    /// `Q + 1` starts in the sequences, the last one `S`.
    pub question_sequences: Vec<u32>,
    /// Decoder labels of all questions, one after the other.
    pub targets: Vec<u32>,
    /// `Q + 1` starts in `targets`, the last one its length.
    pub target_offsets: Vec<u32>,
    /// `Q` row numbers in the data file.
    pub examples: Vec<usize>,
}

impl PackedReaderBatch {
    /// Packs examples in their order.
    ///
    /// # Errors
    /// If the batch has more than 2^32 - 1 tokens.
    pub fn new(examples: &[EncodedExample]) -> Result<PackedReaderBatch, DataError> {
        let mut batch = PackedReaderBatch {
            offsets: vec![0],
            question_sequences: vec![0],
            target_offsets: vec![0],
            ..Default::default()
        };
        for example in examples {
            for sequence in &example.passages {
                batch.ids.extend_from_slice(sequence);
                batch.offsets.push(checked(batch.ids.len())?);
            }
            batch.question_sequences.push(checked(batch.offsets.len() - 1)?);
            batch.targets.extend_from_slice(&example.target);
            batch.target_offsets.push(checked(batch.targets.len())?);
            batch.examples.push(example.row);
        }
        Ok(batch)
    }

    /// How many questions.
    pub fn questions(&self) -> usize {
        self.examples.len()
    }

    /// How many encoder sequences.
    pub fn sequences(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Decoder inputs for teacher forcing, laid out as `targets`: each question's labels moved right by one, `start`
    /// (T5: the padding id) before them and the last label left out.
    pub fn decoder_inputs(&self, start: u32) -> Vec<u32> {
        let mut inputs = Vec::with_capacity(self.targets.len());
        for bounds in self.target_offsets.windows(2) {
            let labels = &self.targets[bounds[0] as usize..bounds[1] as usize];
            if let Some((_, but_last)) = labels.split_last() {
                inputs.push(start);
                inputs.extend_from_slice(but_last);
            }
        }
        inputs
    }

    /// Token places that a rectangle of `questions x most passages x text_maxlength` would have had, as FiD pads.
    pub fn padded_tokens(&self, text_maxlength: usize) -> u64 {
        let most = self.question_sequences.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        (self.questions() as u64).saturating_mul(u64::from(most)).saturating_mul(text_maxlength as u64)
    }
}

fn checked(n: usize) -> Result<u32, DataError> {
    u32::try_from(n).map_err(|_| {
        DataError::Setting(format!(
            "expected a batch of at most {} tokens, found more; use a smaller micro batch",
            u32::MAX
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ragged_questions_are_packed_without_padding() {
        let examples = [
            EncodedExample { row: 7, passages: vec![vec![1, 2, 3], vec![4]], target: vec![9, 8, 1] },
            EncodedExample { row: 2, passages: vec![vec![5, 6]], target: vec![] },
            EncodedExample { row: 3, passages: vec![vec![7]], target: vec![1] },
        ];
        let b = PackedReaderBatch::new(&examples).unwrap();
        assert_eq!(b.ids, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(b.offsets, [0, 3, 4, 6, 7]);
        assert_eq!(b.question_sequences, [0, 2, 3, 4]);
        assert_eq!(
            (b.targets.as_slice(), b.target_offsets.as_slice()),
            (&[9, 8, 1, 1][..], &[0, 3, 3, 4][..])
        );
        assert_eq!(b.examples, [7, 2, 3]);
        assert_eq!(b.decoder_inputs(0), [0, 9, 8, 0]);
        assert_eq!((b.questions(), b.sequences(), b.padded_tokens(3)), (3, 4, 18));
        assert_eq!(PackedReaderBatch::new(&[]).unwrap().offsets, [0]);
    }
}
