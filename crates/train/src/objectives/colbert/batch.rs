//! A ColBERT model's examples as token ids, and a shard of them: queries and documents in one packed row, what a teacher says of the
//! documents, and which of them is the positive.

use tercio_data::template::TextTemplate;
use tercio_data::{EncodedExample, PackedReaderBatch, ReaderEncoding, RetrievalExample, Tokenizer};
use tercio_engine::{MaxSimShape, Span};

use crate::colbert::{EncodedText, PackedTexts, TextTokens};
use crate::error::TrainError;
use crate::objectives::retriever::batch::Chosen;

/// How texts become tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColbertEncoding {
    /// Text of a query.
    pub query_template: TextTemplate,
    /// Text of a document.
    pub document_template: TextTemplate,
    /// Their tokens.
    pub tokens: TextTokens,
}

/// One example, encoded.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedQuery {
    /// The query.
    pub query: EncodedText,
    /// Its documents.
    pub documents: Vec<EncodedText>,
    /// How many of them have a teacher's scores, from the first.
    pub scored: usize,
    /// Their scores; empty until a live teacher has given them.
    pub gold: Vec<f64>,
    /// Place of the positive among the documents.
    pub positive: Option<usize>,
    /// What a live teacher reads.
    pub taught: Option<EncodedExample>,
}

impl EncodedQuery {
    /// Encodes the chosen documents of an example; `teacher` says how a live teacher reads them.
    ///
    /// # Errors
    /// A text that a tokenizer does not take.
    pub fn new(
        example: &RetrievalExample,
        chosen: &Chosen<'_>,
        (encoding, tokenizer): (&ColbertEncoding, &Tokenizer),
        teacher: Option<(&ReaderEncoding, &Tokenizer)>,
    ) -> Result<EncodedQuery, TrainError> {
        let tokens = &encoding.tokens;
        let query = tokens.query(&encoding.query_template.of_question(&example.question), tokenizer)?;
        let text = |passage| tokens.document(&encoding.document_template.of_passage(passage), tokenizer);
        let documents: Vec<EncodedText> =
            chosen.passages.iter().map(|&passage| text(passage)).collect::<Result<_, _>>()?;
        let taught = chosen.taught(example, teacher)?;
        let (scored, gold, positive) = (chosen.scored, chosen.gold.clone(), chosen.positive);
        Ok(EncodedQuery { query, documents, scored, gold, positive, taught })
    }
}

/// What a pass over the whole update has found for a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// Its part of the loss.
    pub loss: f64,
    /// Gradients of its vectors, in their order.
    pub gradients: Vec<f32>,
}

/// Queries with their documents, packed: the texts of all queries, then those of all documents.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColbertShard {
    /// The texts.
    pub texts: PackedTexts,
    /// Queries.
    pub queries: usize,
    /// `queries + 1` starts in the list of documents.
    pub document_offsets: Vec<usize>,
    /// How many documents of each query have a teacher's scores, from its first.
    pub scored: Vec<usize>,
    /// A teacher's scores of them.
    pub gold: Vec<Vec<f64>>,
    /// Place of each query's positive in the list of documents.
    pub positives: Vec<Option<usize>>,
    /// Of each document whether no token of a query gets less than 0 from it; empty: none has such a floor.
    pub floors: Vec<bool>,
    /// Texts that reach their maximum.
    pub full: u64,
    /// What a live teacher reads.
    pub taught: Option<PackedReaderBatch>,
    /// What the first pass over the update has found.
    pub settled: Option<Settled>,
}

impl ColbertShard {
    /// Packs examples; with `floor` documents of which PyLate would have masked a token get a floor.
    ///
    /// # Errors
    /// More than 2^32 - 1 tokens.
    pub fn new(examples: Vec<EncodedQuery>, floor: bool) -> Result<ColbertShard, TrainError> {
        let documents = || examples.iter().flat_map(|e| &e.documents);
        let texts = || examples.iter().map(|e| &e.query).chain(documents());
        let mut shard = ColbertShard {
            texts: PackedTexts::new(texts())?,
            queries: examples.len(),
            document_offsets: vec![0],
            floors: if floor { documents().map(|d| d.masked).collect() } else { Vec::new() },
            full: texts().filter(|text| text.full).count() as u64,
            ..ColbertShard::default()
        };
        let mut taught = Vec::new();
        for e in examples {
            let first = *shard.document_offsets.last().expect("it begins with one");
            shard.document_offsets.push(first + e.documents.len());
            shard.scored.push(e.scored);
            shard.gold.push(e.gold);
            shard.positives.push(e.positive.map(|p| first + p));
            taught.extend(e.taught);
        }
        if !taught.is_empty() {
            shard.taught = Some(PackedReaderBatch::new(&taught)?);
        }
        Ok(shard)
    }
    /// Documents.
    pub fn documents(&self) -> usize {
        self.texts.spans.len() - self.queries
    }
    /// Where the vectors of queries and of documents lie.
    pub fn vectors(&self) -> (&[Span], &[Span]) {
        self.texts.vectors.split_at(self.queries)
    }
    /// Every query with every document.
    pub fn all_pairs(&self) -> MaxSimShape {
        let (queries, documents) = self.vectors();
        MaxSimShape { floors: self.floors.clone(), ..MaxSimShape::all(queries.to_vec(), documents.to_vec()) }
    }
    /// Each query with the first documents of its own, as many as `count` says of it.
    pub fn own_pairs(&self, count: impl Fn(usize) -> usize) -> MaxSimShape {
        let (queries, documents) = self.vectors();
        let mut pairs = Vec::new();
        for (q, bounds) in self.document_offsets.windows(2).enumerate() {
            let end = bounds[1].min(bounds[0].saturating_add(count(q)));
            pairs.extend((bounds[0]..end).map(|d| (q as u32, d as u32)));
        }
        MaxSimShape {
            queries: queries.to_vec(),
            documents: documents.to_vec(),
            pairs,
            floors: self.floors.clone(),
            ..MaxSimShape::default()
        }
    }
}
