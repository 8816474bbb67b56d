//! Exact late interaction: the documents whose vectors have the greatest MaxSim with a query, all of them compared.
//!
//! The score of a document is the sum, over the query's tokens in order, of the greatest inner product with one of its vectors
//! (`tercio_engine::Cpu::max_sim`): the same bits for one query or many, whatever the threads, with every instruction set that fuses multiply-add. A
//! document without vectors is found by no query. Of equal scores the earlier document is better.
//!
//! Where the processor multiplies bytes, 8-bit copies prove of most documents that they are not among the best, and only the others get
//! their true score: the result is the same.

use rayon::prelude::*;
use tercio_data::TokenVectors;
use tercio_engine::cpu::late::{QueryTokens, TokenCopies};
use tercio_engine::{Cpu, memory};

use crate::error::SearchError;
use crate::flat::cpu_run;
use crate::top::{Hit, Top};

/// Vectors of a block, about: with their copies they stay in the second-level cache while all queries meet them.
const BLOCK: u64 = 2048;
/// Queries that are compared together.
const BATCH: usize = 64;

/// Documents that lie together.
struct Block {
    first: u64,
    /// Vectors of the block before each document, and all.
    starts: Vec<usize>,
    rows: Vec<f32>,
    copies: Option<TokenCopies>,
    /// What bounds the error of each document's score from its copies.
    terms: Vec<(f32, f32)>,
}

impl Block {
    /// Numbers of its documents that have vectors.
    fn documents(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.starts.len() - 1).filter(|&d| self.starts[d] < self.starts[d + 1])
    }
}

/// Documents in memory, to be compared with queries.
pub struct MaxSim {
    dimension: usize,
    documents: u64,
    blocks: Vec<Block>,
}

impl MaxSim {
    /// Reads all vectors into memory.
    ///
    /// # Errors
    /// Vectors that do not fit, cannot be read, or are none; [`SearchError::Stopped`].
    pub fn load(
        cpu: &Cpu,
        vectors: &dyn TokenVectors,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<MaxSim, SearchError> {
        let (dimension, documents) = (vectors.dimension(), vectors.documents());
        let number = if cpu.has_near_max_sim() { 5 } else { 4 };
        let bytes = vectors.tokens().saturating_mul(dimension as u64 * number);
        if let Some(room) = memory::available().filter(|room| *room < bytes) {
            return Err(SearchError::Unusable(format!(
                "{}: {} of vectors do not fit into memory, of which {} are free; make an index of them (tercio index --kind plaid)",
                vectors.origin().path,
                memory::human(bytes),
                memory::human(room)
            )));
        }
        let read = |(first, end): &(u64, u64)| -> Result<Block, SearchError> {
            if stop() {
                return Err(SearchError::Stopped);
            }
            let start = vectors.start(*first);
            let starts: Vec<usize> = (*first..=*end).map(|d| (vectors.start(d) - start) as usize).collect();
            let mut rows = vec![0.0; starts[starts.len() - 1] * dimension];
            vectors.read(start, &mut rows)?;
            let copies = cpu.has_near_max_sim().then(|| cpu.copy_tokens(&rows, dimension));
            let of = |copies: &TokenCopies| starts.windows(2).map(|p| copies.terms(p[0], p[1])).collect();
            let terms = copies.as_ref().map(of).unwrap_or_default();
            Ok(Block { first: *first, starts, rows, copies, terms })
        };
        let pieces = cut(vectors, BLOCK);
        let blocks: Vec<Result<Block, SearchError>> = cpu_run(cpu, || pieces.par_iter().map(read).collect());
        Ok(MaxSim { dimension, documents, blocks: blocks.into_iter().collect::<Result<_, _>>()? })
    }

    /// How many documents there are.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// Bytes of memory of vectors and copies.
    pub fn bytes(&self) -> u64 {
        self.blocks
            .iter()
            .map(|b| b.rows.len() as u64 * 4 + b.copies.as_ref().map_or(0, TokenCopies::bytes))
            .sum()
    }

    /// The `depth` best documents for every query (the vectors of its tokens, one after the other), best first; all that have vectors
    /// where there are not so many. `stop` is asked before every few queries.
    ///
    /// # Errors
    /// Queries of another dimension, without vectors, or whose numbers are none; scores beyond f32; [`SearchError::Stopped`].
    pub fn search(
        &self,
        cpu: &Cpu,
        queries: &[&[f32]],
        depth: usize,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let asked = asked(queries, self.dimension)?;
        let mut found = Vec::new();
        for batch in asked.chunks(BATCH) {
            if stop() {
                return Err(SearchError::Stopped);
            }
            found.extend(match cpu.has_near_max_sim() {
                true => self.screened(cpu, batch, depth)?,
                false => self.scored(cpu, batch, depth)?,
            });
        }
        Ok(found)
    }

    /// The true score of a document of a block.
    fn score(
        &self,
        cpu: &Cpu,
        query: &QueryTokens,
        block: &Block,
        document: usize,
    ) -> Result<f32, SearchError> {
        let (start, end) = (block.starts[document], block.starts[document + 1]);
        let score = cpu.max_sim(query, &block.rows[start * self.dimension..end * self.dimension]);
        finite(score, block.first + document as u64)
    }

    /// All documents get their score.
    fn scored(&self, cpu: &Cpu, batch: &[QueryTokens], depth: usize) -> Result<Vec<Vec<Hit>>, SearchError> {
        let of = |block: &Block| -> Result<Vec<Top>, SearchError> {
            let mut tops = vec![Top::new(depth); batch.len()];
            for (query, top) in batch.iter().zip(&mut tops) {
                for d in block.documents() {
                    top.offer(block.first + d as u64, self.score(cpu, query, block, d)?);
                }
            }
            Ok(tops)
        };
        let found: Vec<Result<Vec<Top>, SearchError>> =
            cpu_run(cpu, || self.blocks.par_iter().map(of).collect());
        let mut tops = vec![Top::new(depth); batch.len()];
        for found in found {
            for (top, found) in tops.iter_mut().zip(found?) {
                found.into_sorted().into_iter().for_each(|hit| top.offer(hit.row, hit.score));
            }
        }
        Ok(tops.into_iter().map(Top::into_sorted).collect())
    }

    /// The same, but only documents that may be among the best get their score.
    fn screened(&self, cpu: &Cpu, batch: &[QueryTokens], depth: usize) -> Result<Vec<Vec<Hit>>, SearchError> {
        // For each query the near scores of a block's documents.
        let near = |block: &Block| -> Vec<Vec<f32>> {
            let of =
                |query: &QueryTokens, d: usize| match (&block.copies, block.starts[d], block.starts[d + 1]) {
                    (Some(copies), first, end) if first < end => cpu.near_max_sim(query, copies, first, end),
                    _ => f32::NAN,
                };
            batch.iter().map(|query| (0..block.starts.len() - 1).map(|d| of(query, d)).collect()).collect()
        };
        let near: Vec<Vec<Vec<f32>>> = cpu_run(cpu, || self.blocks.par_iter().map(near).collect());
        let best = |(n, query): (usize, &QueryTokens)| -> Result<Vec<Hit>, SearchError> {
            let bound =
                |block: &Block, d: usize| block.terms.get(d).map_or(f32::NAN, |terms| query.bound(*terms));
            // Those that seem the best: whatever is not below the worst of their true scores may be among the best.
            let mut likely = Top::new(depth);
            for (block, near) in self.blocks.iter().zip(&near) {
                // What is no number, where there is no copy or it is beyond f32, says nothing.
                let known = block.documents().filter(|d| near[n][*d].is_finite());
                known.for_each(|d| likely.offer(block.first + d as u64, near[n][d]));
            }
            let likely = likely.into_sorted();
            let mut least = if likely.len() < depth { f32::NEG_INFINITY } else { f32::INFINITY };
            for hit in likely {
                let block = &self.blocks[self.blocks.partition_point(|block| block.first <= hit.row) - 1];
                least = least.min(self.score(cpu, query, block, (hit.row - block.first) as usize)?);
            }
            let of = |(block, near): (&Block, &Vec<Vec<f32>>)| -> Result<Vec<Hit>, SearchError> {
                let may = |d: &usize| {
                    let most = near[n][*d] + bound(block, *d);
                    most.is_nan() || most >= least
                };
                let hit = |d: usize| {
                    Ok(Hit { row: block.first + d as u64, score: self.score(cpu, query, block, d)? })
                };
                block.documents().filter(may).map(hit).collect()
            };
            let hits: Vec<Result<Vec<Hit>, SearchError>> =
                self.blocks.par_iter().zip(&near).with_min_len(8).map(of).collect();
            let mut top = Top::new(depth);
            for hits in hits {
                hits?.into_iter().for_each(|hit| top.offer(hit.row, hit.score));
            }
            Ok(top.into_sorted())
        };
        let found: Vec<Result<Vec<Hit>, SearchError>> =
            cpu_run(cpu, || batch.par_iter().enumerate().map(best).collect());
        found.into_iter().collect()
    }
}

/// Documents that are read together: at most about `tokens` vectors, at least one document. First document, and the one behind the last.
pub(crate) fn cut(vectors: &dyn TokenVectors, tokens: u64) -> Vec<(u64, u64)> {
    let mut cuts = Vec::new();
    let mut first = 0;
    for d in 0..vectors.documents() {
        if d > first && vectors.start(d + 1) - vectors.start(first) > tokens {
            cuts.push((first, d));
            first = d;
        }
    }
    if first < vectors.documents() {
        cuts.push((first, vectors.documents()));
    }
    cuts
}

/// Queries as the kernels read them.
///
/// # Errors
/// Naming the first query that has no vectors, or vectors of another dimension, or numbers that are none.
pub(crate) fn asked(queries: &[&[f32]], dimension: usize) -> Result<Vec<QueryTokens>, SearchError> {
    let one = |(n, query): (usize, &&[f32])| {
        let wrong = |what: String| Err(SearchError::Unusable(format!("query {n}: {what}")));
        if query.is_empty() || !query.len().is_multiple_of(dimension) {
            return wrong(format!(
                "{} numbers are no vectors of {dimension} numbers; encode it with the model of the documents",
                query.len()
            ));
        }
        if let Some(at) = query.iter().position(|v| !v.is_finite()) {
            return wrong(format!(
                "vector {} has {} as number {}",
                at / dimension,
                query[at],
                at % dimension
            ));
        }
        Ok(QueryTokens::new(query, dimension))
    };
    queries.iter().enumerate().map(one).collect()
}

/// Refuses a score that is none.
pub(crate) fn finite(score: f32, row: u64) -> Result<f32, SearchError> {
    match score.is_finite() {
        true => Ok(score),
        false => Err(SearchError::Unusable(format!(
            "a query and document {row} have a score beyond the range of f32; scale the vectors"
        ))),
    }
}
