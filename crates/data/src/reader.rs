//! Encodes questions for a Fusion-in-Decoder reader: a token sequence per passage, and the target's labels.

use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::question::Question;
use crate::template;
use crate::tokenizer::Tokenizer;

/// How a reader's inputs and targets are made; FiD's flags of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderEncoding {
    /// Most tokens of one "question + title + passage"; what is longer loses its end. 1 or more.
    pub text_maxlength: usize,
    /// Most tokens of a target, its `</s>` included; a target that is cut loses its `</s>`. `None` or 0: no limit.
    pub answer_maxlength: Option<usize>,
    /// How many passages are used; 0 asks the bare question.
    pub n_context: usize,
    /// Leave the title part out of the template.
    pub no_title: bool,
    /// End every encoder sequence with `</s>` (cut to `text_maxlength - 1` tokens first). FiD's released models are without.
    pub passage_eos: bool,
}

/// Token ids of one example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedExample {
    /// Row number in the data file.
    pub row: usize,
    /// One sequence per passage, each of 1 to `text_maxlength` tokens; at least one sequence.
    pub passages: Vec<Vec<u32>>,
    /// Decoder labels; empty where there is nothing to train on.
    pub target: Vec<u32>,
}

impl ReaderEncoding {
    /// Refuses settings that make no sense.
    ///
    /// # Errors
    /// If `text_maxlength` is 0.
    pub fn validate(&self) -> Result<(), DataError> {
        if self.text_maxlength == 0 {
            return Err(DataError::Setting(
                "expected a text_maxlength of 1 or more, found 0; set --text_maxlength".into(),
            ));
        }
        Ok(())
    }

    /// The encoder's sequences for a question, passages in the question's order.
    ///
    /// # Errors
    /// If the settings make no sense, or the tokenizer fails on a text or gives no tokens for it.
    pub fn encode_question(
        &self,
        question: &Question,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Vec<u32>>, DataError> {
        self.encode_counting(question, tokenizer, &mut |_| {})
    }

    /// As [`ReaderEncoding::encode_question`]; tells each sequence's length before it was cut (`</s>` counted).
    pub(crate) fn encode_counting(
        &self,
        question: &Question,
        tokenizer: &Tokenizer,
        full_length: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<u32>>, DataError> {
        self.validate()?;
        template::reader_texts(question, self.n_context, self.no_title)
            .iter()
            .map(|text| {
                let mut ids = tokenizer
                    .encode(text)
                    .map_err(|e| question.place.error("a text that can be tokenized", e.to_string(), ""))?;
                full_length(ids.len() + usize::from(self.passage_eos));
                ids.truncate(self.text_maxlength - usize::from(self.passage_eos));
                if self.passage_eos {
                    ids.push(tokenizer.eos_id());
                }
                if ids.is_empty() {
                    let hint = "use a tokenizer that knows the words of the texts";
                    return Err(question.place.error("a text that gives tokens", "none", hint));
                }
                Ok(ids)
            })
            .collect()
    }

    /// Decoder labels of an answer: its pieces and `</s>`, cut to `answer_maxlength`.
    ///
    /// # Errors
    /// If the tokenizer fails on the text.
    pub fn encode_target(&self, text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, DataError> {
        let mut ids = tokenizer.encode(text)?;
        ids.push(tokenizer.eos_id());
        if let Some(length) = self.answer_maxlength.filter(|&n| n > 0) {
            ids.truncate(length);
        }
        Ok(ids)
    }

    /// Encodes a question to train on; its target is [`Question::training_target`] of (seed, epoch).
    ///
    /// # Errors
    /// If the question has neither `target` nor `answers`, or cannot be encoded.
    pub fn encode_for_training(
        &self,
        question: &Question,
        tokenizer: &Tokenizer,
        seed: u64,
        epoch: u64,
    ) -> Result<EncodedExample, DataError> {
        let Some(target) = question.training_target(seed, epoch) else {
            let hint = "training needs one; add an answer or remove the item";
            return Err(question.place.error("a `target` or a non-empty list of `answers`", "neither", hint));
        };
        let target = self.encode_target(target, tokenizer)?;
        Ok(EncodedExample {
            row: question.place.row,
            passages: self.encode_question(question, tokenizer)?,
            target,
        })
    }

    /// Encodes a question to answer; it needs no answers, and its target is empty.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn encode_for_answering(
        &self,
        question: &Question,
        tokenizer: &Tokenizer,
    ) -> Result<EncodedExample, DataError> {
        Ok(EncodedExample {
            row: question.place.row,
            passages: self.encode_question(question, tokenizer)?,
            target: Vec::new(),
        })
    }
}
