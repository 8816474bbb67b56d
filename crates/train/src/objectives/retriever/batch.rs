//! A retriever's examples as token ids, and a shard of them: questions and passages in one packed row, what a teacher
//! says of the passages, and which of them is the positive.

use tercio_data::retrieval::{ContrastiveChoice, Relevance};
use tercio_data::template::TextTemplate;
use tercio_data::{
    DataError, EncodedExample, PackedReaderBatch, Passage, Question, ReaderEncoding, RetrievalExample,
    Tokenizer,
};
use tercio_engine::Span;

use crate::error::TrainError;

/// How a retriever's inputs are made; FiD's flags of the same names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetrieverEncoding {
    /// Tokens of a question at most, those around it counted.
    pub question_maxlength: usize,
    /// Tokens of a passage at most, those around it counted.
    pub passage_maxlength: usize,
    /// Text of a question.
    pub question_template: TextTemplate,
    /// Text of a passage.
    pub passage_template: TextTemplate,
    /// Whether questions are filled up to their maximum with padding that counts as text: a model without their mask.
    pub pad_questions: bool,
    /// The same of passages.
    pub pad_passages: bool,
}

impl RetrieverEncoding {
    /// Token ids of a question, and whether they reach the maximum.
    ///
    /// # Errors
    /// A text that the tokenizer does not take, or a maximum below what it puts around every text.
    pub fn question(&self, text: &str, tokenizer: &Tokenizer) -> Result<(Vec<u32>, bool), TrainError> {
        let text = self.question_template.of_question(text);
        encode(&text, self.question_maxlength, self.pad_questions, tokenizer)
    }
    /// Token ids of a passage, and whether they reach the maximum.
    ///
    /// # Errors
    /// As [`RetrieverEncoding::question`].
    pub fn passage(&self, passage: &Passage, tokenizer: &Tokenizer) -> Result<(Vec<u32>, bool), TrainError> {
        let text = self.passage_template.of_passage(passage);
        encode(&text, self.passage_maxlength, self.pad_passages, tokenizer)
    }
}

fn encode(text: &str, most: usize, pad: bool, tokenizer: &Tokenizer) -> Result<(Vec<u32>, bool), TrainError> {
    let mut ids = tokenizer.encode_framed(text, most)?;
    let full = ids.len() == most;
    if pad {
        ids.resize(most, tokenizer.pad_id());
    }
    Ok((ids, full))
}

/// Which passages of an example are compared with its question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassageChoice {
    /// Passages that are distilled from a teacher's scores, best first; 0: none are.
    pub scored: usize,
    /// Whether the teacher scores them itself, so that the file need not.
    pub live: bool,
    /// Passages of contrastive training, where there is any.
    pub contrastive: Option<ContrastiveChoice>,
}

/// The passages of an example that are used.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen<'a> {
    /// First those that have a teacher's scores, then others.
    pub passages: Vec<&'a Passage>,
    /// How many have a teacher's scores.
    pub scored: usize,
    /// Their scores, where the file has them.
    pub gold: Vec<f64>,
    /// Place of the positive among `passages`.
    pub positive: Option<usize>,
    /// Places of others that answer the question too: no negatives of it.
    pub other_positives: Vec<usize>,
}

impl Chosen<'_> {
    /// What a live teacher reads of the passages that it is to score; `None` without a teacher, or without such passages.
    ///
    /// # Errors
    /// A text that its tokenizer does not take.
    pub fn taught(
        &self,
        example: &RetrievalExample,
        teacher: Option<(&ReaderEncoding, &Tokenizer)>,
    ) -> Result<Option<EncodedExample>, TrainError> {
        let Some((encoding, tokenizer)) = teacher.filter(|_| self.scored > 0) else { return Ok(None) };
        let question = Question {
            id: example.id.clone(),
            question: example.question.clone(),
            target: None,
            answers: Vec::new(),
            ctxs: self.passages[..self.scored].iter().map(|&p| p.clone()).collect(),
            place: example.place.clone(),
        };
        let encoding = ReaderEncoding { n_context: self.scored, ..*encoding };
        Ok(Some(encoding.encode_for_answering(&question, tokenizer)?))
    }
}

/// What is wrong with an example that has no passages for a live teacher.
pub(super) fn nothing_to_score(example: &RetrievalExample) -> DataError {
    let hint = "the teacher scores the passages of a question; leave the item out";
    example.place.error("a question with passages", "none", hint)
}

impl PassageChoice {
    /// The passages of `example` in an epoch; draws are of (seed, epoch, row).
    ///
    /// # Errors
    /// An example that lacks scores or a positive; it says its line.
    pub fn of<'a>(
        &self,
        example: &'a RetrievalExample,
        seed: u64,
        epoch: u64,
    ) -> Result<Chosen<'a>, TrainError> {
        let mut chosen = Chosen {
            passages: Vec::new(),
            scored: 0,
            gold: Vec::new(),
            positive: None,
            other_positives: Vec::new(),
        };
        if self.scored > 0 && self.live {
            chosen.passages = example.passages.iter().take(self.scored).map(|p| &p.passage).collect();
            if chosen.passages.is_empty() {
                return Err(nothing_to_score(example).into());
            }
        } else if self.scored > 0 {
            (chosen.passages, chosen.gold) = example.scored(self.scored)?.into_iter().unzip();
        }
        chosen.scored = chosen.passages.len();
        let Some(choice) = &self.contrastive else { return Ok(chosen) };
        for (i, passage) in example.contrastive(choice, seed, epoch)?.into_iter().enumerate() {
            let known = chosen.passages.iter().position(|p| std::ptr::eq(*p, passage));
            if known.is_none() {
                chosen.passages.push(passage);
            }
            if i == 0 {
                chosen.positive = Some(known.unwrap_or(chosen.passages.len() - 1));
            }
        }
        // The scored passages are the example's first ones, whatever they are.
        let answers = |&i: &usize| example.passages[i].relevance == Relevance::Positive;
        let others = (0..chosen.scored).filter(answers).filter(|&i| Some(i) != chosen.positive);
        chosen.other_positives = others.collect();
        Ok(chosen)
    }
}

/// One example, encoded.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedQuestion {
    /// Token ids of the question.
    pub question: Vec<u32>,
    /// Token ids of its passages.
    pub passages: Vec<Vec<u32>>,
    /// How many of these, questions and passages, reach their maximum.
    pub full: u64,
    /// How many of the passages have a teacher's scores, from the first.
    pub scored: usize,
    /// Their scores; empty until a live teacher has given them.
    pub gold: Vec<f64>,
    /// Place of the positive among the passages.
    pub positive: Option<usize>,
    /// Places of the others that answer the question too.
    pub other_positives: Vec<usize>,
    /// What a live teacher reads.
    pub taught: Option<EncodedExample>,
}

impl EncodedQuestion {
    /// Encodes the chosen passages of an example; `teacher` says how a live teacher reads them.
    ///
    /// # Errors
    /// A text that a tokenizer does not take.
    pub fn new(
        example: &RetrievalExample,
        chosen: &Chosen<'_>,
        (encoding, tokenizer): (&RetrieverEncoding, &Tokenizer),
        teacher: Option<(&ReaderEncoding, &Tokenizer)>,
    ) -> Result<EncodedQuestion, TrainError> {
        let (question, full) = encoding.question(&example.question, tokenizer)?;
        let mut full = u64::from(full);
        let mut passages = Vec::with_capacity(chosen.passages.len());
        for passage in &chosen.passages {
            let (ids, at_most) = encoding.passage(passage, tokenizer)?;
            full += u64::from(at_most);
            passages.push(ids);
        }
        let taught = chosen.taught(example, teacher)?;
        let (scored, gold, positive) = (chosen.scored, chosen.gold.clone(), chosen.positive);
        let other_positives = chosen.other_positives.clone();
        Ok(EncodedQuestion { question, passages, full, scored, gold, positive, other_positives, taught })
    }
}

/// What a pass over the whole update has found for a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// Its part of the loss.
    pub loss: f64,
    /// Gradients of its vectors, questions first.
    pub gradients: Vec<f64>,
}

/// Questions with their passages, packed: the sequences of all questions, then those of all passages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RetrieverShard {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where each sequence lies in `ids`.
    pub spans: Vec<Span>,
    /// Questions.
    pub questions: usize,
    /// `questions + 1` starts in the list of passages.
    pub passage_offsets: Vec<usize>,
    /// How many passages of each question have a teacher's scores, from its first.
    pub scored: Vec<usize>,
    /// A teacher's scores of them.
    pub gold: Vec<Vec<f64>>,
    /// Place of each question's positive in the list of passages.
    pub positives: Vec<Option<usize>>,
    /// For each passage the question that it answers without being its positive: no negative of that one.
    pub left_out: Vec<Option<usize>>,
    /// Sequences that reach their maximum.
    pub full: u64,
    /// What a live teacher reads.
    pub taught: Option<PackedReaderBatch>,
    /// What the first pass over the update has found.
    pub settled: Option<Settled>,
}

impl RetrieverShard {
    /// Packs examples.
    ///
    /// # Errors
    /// More than 2^32 - 1 tokens.
    pub fn new(examples: Vec<EncodedQuestion>) -> Result<RetrieverShard, TrainError> {
        let mut shard = RetrieverShard {
            questions: examples.len(),
            passage_offsets: vec![0],
            ..RetrieverShard::default()
        };
        let sequences = examples.iter().map(|e| &e.question).chain(examples.iter().flat_map(|e| &e.passages));
        for sequence in sequences {
            let start = shard.ids.len();
            shard.ids.extend_from_slice(sequence);
            let place = |n: usize| {
                u32::try_from(n).map_err(|_| {
                    TrainError::Unusable(format!(
                        "expected a shard of at most {} tokens, found more; use a smaller --micro_batch_size",
                        u32::MAX
                    ))
                })
            };
            shard.spans.push(Span { start: place(start)?, end: place(shard.ids.len())? });
        }
        let mut taught = Vec::new();
        for (question, e) in examples.into_iter().enumerate() {
            let first = *shard.passage_offsets.last().expect("it begins with one");
            shard.passage_offsets.push(first + e.passages.len());
            shard.scored.push(e.scored);
            shard.gold.push(e.gold);
            shard.positives.push(e.positive.map(|p| first + p));
            shard.left_out.resize(first + e.passages.len(), None);
            e.other_positives.iter().for_each(|&p| shard.left_out[first + p] = Some(question));
            shard.full += e.full;
            taught.extend(e.taught);
        }
        if !taught.is_empty() {
            shard.taught = Some(PackedReaderBatch::new(&taught)?);
        }
        Ok(shard)
    }
    /// Passages.
    pub fn passages(&self) -> usize {
        self.spans.len() - self.questions
    }
    /// Passages that have a teacher's scores.
    pub fn scored_passages(&self) -> usize {
        self.scored.iter().sum()
    }
}
