//! A collection with judged queries, as BEIR lays it out, searched whole by exact MaxSim: documents pass by once, batch by batch, on all
//! ranks; no vector of a document stays.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};
use tercio_comm::{CommError, World};
use tercio_data::retrieval::RunFile;
use tercio_data::{Passages, Qrels, Tokenizer, hex};
use tercio_engine::{Arena, Device, MaxSimShape, Span, Tape, Tensor};
use tercio_models::colbert::Colbert;
use tercio_search::Top;
use tercio_search::ranking::{Metric, Rules, evaluate};

use super::tokens::{EncodedText, PackedTexts};
use crate::error::TrainError;
use crate::find::queries::Queries;
use crate::objectives::colbert::batch::ColbertEncoding;
use crate::ranks::in_order::{Batches, items_among};
use crate::ranks::start::same_among;
use crate::scratch::ScratchFolder;

/// What is measured: its name, its name among the figures of a training, and the metric.
pub const FIGURES: [(&str, &str, Metric); 8] = [
    ("ndcg_10", "beir_ndcg_10", Metric::Ndcg(Some(10))),
    ("mrr_10", "beir_mrr_10", Metric::Mrr(Some(10))),
    ("map_100", "beir_map_100", Metric::Map(Some(100))),
    ("recall_10", "beir_recall_10", Metric::Recall(10)),
    ("recall_100", "beir_recall_100", Metric::Recall(100)),
    ("accuracy_1", "beir_accuracy_1", Metric::Success(1)),
    ("accuracy_5", "beir_accuracy_5", Metric::Success(5)),
    ("accuracy_10", "beir_accuracy_10", Metric::Success(10)),
];
/// Documents of a query that are kept.
const DEPTH: usize = 100;
/// Documents whose scores are in memory together, at most.
const BLOCK: usize = 8192;
/// Scores in memory together, where that are not too few documents to keep all ranks busy.
const SCORES: usize = 1 << 24;
/// Documents that are embedded at a time, at least.
const DOCUMENTS: usize = 16;
/// Queries that are embedded at a time.
const QUERIES: usize = 64;

/// An open collection.
pub struct Collection {
    dir: PathBuf,
    corpus: Passages,
    /// The judged ones: id and text.
    queries: Vec<(String, String)>,
    qrels: Qrels,
    fingerprint: String,
}

impl Collection {
    /// Opens `corpus.jsonl`, `queries.jsonl` (also `.gz`, `.zst`) and `qrels/SPLIT.tsv` of a folder.
    ///
    /// # Errors
    /// A file that is missing or cannot be read; no query that is judged.
    pub fn open(dir: &Path, split: &str) -> Result<Collection, TrainError> {
        let file = |name: &str| {
            let paths = ["", ".gz", ".zst"].map(|end| dir.join(format!("{name}{end}")));
            let there = paths.iter().find(|path| path.is_file()).cloned();
            there.ok_or_else(|| {
                TrainError::Unusable(format!(
                    "{}: expected {name} (also .gz or .zst) in this folder of a collection as BEIR has it, found none",
                    dir.display()
                ))
            })
        };
        // What is open can be read after its name is gone.
        let scratch = ScratchFolder::new()?;
        let corpus = Passages::open(&file("corpus.jsonl")?, scratch.path())?;
        let all = Queries::open(&file("queries.jsonl")?, scratch.path())?;
        let qrels = Qrels::open(&file(&format!("qrels/{split}.tsv"))?)?;
        let mut queries = Vec::new();
        for i in 0..all.len() {
            let query = all.get(i)?;
            if qrels.has(&query.id) {
                queries.push((query.id, query.text));
            }
        }
        if queries.is_empty() {
            let what = "no query of queries.jsonl has judgements; compare how the two files name queries";
            return Err(TrainError::Unusable(format!("{}: {what}", dir.display())));
        }
        let fingerprint = fingerprint(&corpus, &queries, &qrels);
        Ok(Collection { dir: dir.to_owned(), corpus, queries, qrels, fingerprint })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A hash of all that figures rest on: documents, judged queries and judgements.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Documents, and judged queries.
    pub fn sizes(&self) -> (usize, usize) {
        (self.corpus.len(), self.queries.len())
    }
}

/// SHA-256, in hexadecimal digits, of the corpus' own and of each judged query with its judgements.
fn fingerprint(corpus: &Passages, queries: &[(String, String)], qrels: &Qrels) -> String {
    let judged: BTreeMap<&str, BTreeMap<&String, &i64>> =
        qrels.queries().map(|(query, grades)| (query, grades.iter().collect())).collect();
    let mut sum = Sha256::new();
    let mut add = |part: serde_json::Value| sum.update(format!("{part}\n"));
    add(corpus.fingerprint().into());
    for (id, text) in queries {
        add(serde_json::json!([id, text]));
    }
    for (query, grades) in judged {
        add(serde_json::json!([query, grades]));
    }
    hex(&sum.finalize())
}

/// Documents whose scores with `queries` are kept at a time, of which `batch` are computed together.
fn block(queries: usize, batch: usize) -> usize {
    (SCORES / queries.max(1)).min(BLOCK).max(batch)
}

/// A model that searches collections.
pub struct CollectionSearch<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a Colbert,
    /// Its values.
    pub parameters: &'a Arena<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How inputs are made.
    pub encoding: &'a ColbertEncoding,
    /// Whether masked tokens of documents count as products of 0.
    pub zero_floor: bool,
    /// Documents at a time; few are too few, so that there is a least number.
    pub batch: usize,
}

/// The vectors of texts, and which rows are whose.
struct Vectors<D: Device> {
    rows: Tensor<D>,
    spans: Vec<Span>,
    masked: Vec<bool>,
}

impl<D: Device> CollectionSearch<'_, D> {
    /// The figures of a collection, in the order of [`FIGURES`], on rank 0; elsewhere none. A document that has the id of a query is not
    /// among its results. `stop` is asked before every batch.
    ///
    /// # Errors
    /// A text that cannot be read; [`TrainError::Interrupted`] on all ranks soon after `stop` says so on one; a rank was lost.
    pub fn measure_among(
        &self,
        world: &World,
        collection: &Collection,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<f64>, TrainError> {
        same_among(world, &collection.dir.display().to_string(), &collection.fingerprint)?;
        let queries = self.queries(collection)?;
        let count = collection.queries.len();
        let mut best: Vec<Top> = vec![Top::new(DEPTH + 1); count];
        let batch = self.batch.max(DOCUMENTS);
        let block = block(count, batch);
        for start in (0..collection.corpus.len()).step_by(block) {
            let len = block.min(collection.corpus.len() - start);
            let mut work = |rows: Range<usize>| {
                let rows = start + rows.start..start + rows.end;
                let scores = self.scores(collection, &queries, rows)?;
                self.device.trim();
                Ok(scores)
            };
            let batches = Batches { len, size: batch, print_freq: u64::MAX };
            for (i, message) in items_among(world, batches, stop, &mut work)?.into_iter().enumerate() {
                let (scores, rest) = message.as_chunks::<4>();
                if scores.len() != count || !rest.is_empty() {
                    let what = "a rank sent another number of scores than there are queries";
                    return Err(CommError::Protocol(what.into()).into());
                }
                for (top, score) in best.iter_mut().zip(scores) {
                    top.offer((start + i) as u64, f32::from_le_bytes(*score));
                }
            }
        }
        if !world.is_main() {
            return Ok(Vec::new());
        }
        let mut run = Vec::with_capacity(count);
        for ((id, _), top) in collection.queries.iter().zip(best) {
            let mut documents = Vec::new();
            for hit in top.into_sorted() {
                let document = collection.corpus.get(hit.row as usize)?.id;
                if document != *id && documents.len() < DEPTH {
                    documents.push((document, f64::from(hit.score)));
                }
            }
            run.push((id.clone(), documents));
        }
        let rules = Rules { metrics: FIGURES.map(|(.., metric)| metric).to_vec(), ..Rules::default() };
        let found = evaluate(&RunFile::of(run), &collection.qrels, &rules)?;
        Ok(found.figures.means())
    }

    fn vectors(&self, texts: &[EncodedText]) -> Result<Vectors<D>, TrainError> {
        let packed = PackedTexts::new(texts)?;
        let mut tape = Tape::inference(self.device, self.parameters);
        let vectors = self.model.embed(&mut tape, packed.rows(), false);
        let rows = vectors.tensor.duplicate(self.device);
        Ok(Vectors { rows, spans: packed.vectors, masked: texts.iter().map(|t| t.masked).collect() })
    }

    /// All queries, in parts that fit together.
    fn queries(&self, collection: &Collection) -> Result<Vec<Vectors<D>>, TrainError> {
        let part = |queries: &[(String, String)]| {
            let encode = |(_, text): &(String, String)| {
                self.encoding.tokens.query(&self.encoding.query_template.of_question(text), self.tokenizer)
            };
            let encoded: Vec<EncodedText> = queries.par_iter().map(encode).collect::<Result<_, _>>()?;
            self.vectors(&encoded)
        };
        collection.queries.chunks(QUERIES).map(part).collect()
    }

    /// Of each document in `rows` its score with every query, as bytes.
    fn scores(
        &self,
        collection: &Collection,
        queries: &[Vectors<D>],
        rows: Range<usize>,
    ) -> Result<Vec<Vec<u8>>, TrainError> {
        let encode = |i: usize| {
            let text = self.encoding.document_template.of_passage(&collection.corpus.get(i)?);
            self.encoding.tokens.document(&text, self.tokenizer)
        };
        let encoded: Vec<EncodedText> = rows.into_par_iter().map(encode).collect::<Result<_, _>>()?;
        let documents = self.vectors(&encoded)?;
        let count = documents.spans.len();
        let mut messages = vec![Vec::new(); count];
        for part in queries {
            let shape = MaxSimShape {
                floors: if self.zero_floor { documents.masked.clone() } else { Vec::new() },
                ..MaxSimShape::all(part.spans.clone(), documents.spans.clone())
            };
            let mut scores = Tensor::scratch(self.device, shape.pairs.len(), 1);
            let (q, d) = (part.rows.view(), documents.rows.view());
            self.device.max_sim(q, d, part.rows.columns, &shape, scores.view_mut());
            for row in scores.to_vec(self.device).chunks(count.max(1)) {
                messages.iter_mut().zip(row).for_each(|(m, score)| m.extend(score.to_le_bytes()));
            }
        }
        Ok(messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_queries_make_small_blocks() {
        assert_eq!(block(0, 16), 8192);
        assert_eq!(block(323, 16), 8192);
        // 1 << 24 scores: 64 MiB, whatever the number of queries; but a batch is always whole.
        assert_eq!(block(1 << 14, 16), 1 << 10);
        assert_eq!(block(1 << 23, 16), 16);
        assert_eq!(block(10, 10_000), 10_000);
    }

    #[test]
    fn queries_and_judgements_belong_to_a_collection() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("qrels")).unwrap();
        let open = |text: &str, queries: &str, grade: u8| {
            let write = |name: &str, content: String| std::fs::write(dir.path().join(name), content).unwrap();
            write("corpus.jsonl", format!("{{\"_id\": \"d\", \"title\": \"\", \"text\": \"{text}\"}}\n"));
            write("queries.jsonl", format!("{{\"_id\": \"q\", \"text\": \"{queries}\"}}\n"));
            write("qrels/test.tsv", format!("query-id\tcorpus-id\tscore\nq\td\t{grade}\n"));
            Collection::open(dir.path(), "test").unwrap().fingerprint().to_owned()
        };
        let all = [open("a", "b", 1), open("x", "b", 1), open("a", "x", 1), open("a", "b", 2)];
        assert_eq!(all[0], open("a", "b", 1));
        let different: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), 4, "{all:?}");
    }
}
