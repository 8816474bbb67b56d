//! Asking a compressed index: lists, estimates, true scores.
//!
//! Estimates and true scores can be had one after the other, so that ranks that have a part of the rows each choose together which
//! rows are scored again: candidates of all parts, the best of them, true scores of all parts, the best of them.

use rayon::prelude::*;
use tercio_engine::cpu::StoredRows;
use tercio_engine::{Cpu, Device};

use super::codec::Table;
use super::{CompressedIndex, CompressedSearch};
use crate::error::SearchError;
use crate::flat::{Metric, check_queries, norm};
use crate::top::{Hit, Top};

/// Queries whose lists are chosen together.
const BATCH: usize = 512;
/// Queries that one thread takes at most before another may take some.
const TOGETHER: usize = 8;

impl CompressedIndex {
    /// The best rows for every query, best first: `depth` of them, or all where the index has fewer. `stop` is asked before every few
    /// hundred queries.
    ///
    /// # Errors
    /// Queries that are not rows of the dimension or whose numbers are none; re-scoring without vectors; [`SearchError::Stopped`].
    pub fn search(
        &self,
        cpu: &Cpu,
        queries: &[f32],
        how: CompressedSearch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        self.check(queries, how)?;
        let mut hits = Vec::new();
        for batch in queries.chunks(BATCH * self.settings.dimension) {
            go_on(stop)?;
            let candidates = self.estimates(cpu, batch, how)?;
            hits.extend(self.true_scores(cpu, batch, &candidates, how)?);
        }
        Ok(hits)
    }

    /// How many candidates of a query are kept.
    pub fn kept(&self, how: CompressedSearch) -> usize {
        let total = self.total as usize;
        how.depth.max(how.rescore).min(total)
    }

    /// The first half of a search: [`CompressedIndex::kept`] rows for every query with the best estimates.
    ///
    /// # Errors
    /// As [`CompressedIndex::search`].
    pub fn candidates(
        &self,
        cpu: &Cpu,
        queries: &[f32],
        how: CompressedSearch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        self.check(queries, how)?;
        let mut found = Vec::new();
        for batch in queries.chunks(BATCH * self.settings.dimension) {
            go_on(stop)?;
            found.extend(self.estimates(cpu, batch, how)?);
        }
        Ok(found)
    }

    /// The second half: the best of the candidates by their true scores, or by their estimates where none are wanted. Candidates that are no
    /// rows of the index's part are another rank's.
    ///
    /// # Errors
    /// As [`CompressedIndex::search`].
    pub fn rescored(
        &self,
        cpu: &Cpu,
        queries: &[f32],
        candidates: &[Vec<Hit>],
        how: CompressedSearch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let mut found = Vec::new();
        let batches = queries.chunks(BATCH * self.settings.dimension);
        for (batch, candidates) in batches.zip(candidates.chunks(BATCH)) {
            go_on(stop)?;
            found.extend(self.true_scores(cpu, batch, candidates, how)?);
        }
        Ok(found)
    }

    fn check(&self, queries: &[f32], how: CompressedSearch) -> Result<(), SearchError> {
        check_queries(queries, self.settings.dimension, 0)?;
        if how.rescore > 0 && self.originals.is_none() {
            return Err(SearchError::Unusable(
                "the index was opened without its vectors: search without re-scoring".into(),
            ));
        }
        Ok(())
    }

    /// The candidates of a batch of queries.
    fn estimates(
        &self,
        cpu: &Cpu,
        batch: &[f32],
        how: CompressedSearch,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let scores = self.centroids.products(cpu, batch);
        let queries = batch.par_chunks(self.settings.dimension).zip(scores.par_chunks(self.settings.lists));
        each(cpu, queries, |(query, scores)| self.estimated(cpu, query, scores, how))
    }

    /// The best of the candidates of a batch of queries.
    fn true_scores(
        &self,
        cpu: &Cpu,
        batch: &[f32],
        candidates: &[Vec<Hit>],
        how: CompressedSearch,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let own = self.part.rows(self.total);
        each(cpu, batch.par_chunks(self.settings.dimension).zip(candidates), |(query, candidates)| {
            let own = candidates.iter().filter(|hit| own.contains(&hit.row));
            let mut top = Top::new(how.depth.min(self.total as usize));
            match self.originals.as_ref().filter(|_| how.rescore > 0) {
                None => own.for_each(|hit| top.offer(hit.row, hit.score)),
                Some(originals) => {
                    let norm = norm_of(cpu, query)?;
                    let mut rows: Vec<u64> = own.map(|hit| hit.row).collect();
                    rows.sort_unstable();
                    for row in rows {
                        top.offer(row, originals.score(cpu, query, norm, row)?);
                    }
                }
            }
            Ok(top.into_sorted())
        })
    }

    /// The best rows by their estimates for one query, whose inner products with the centroids are known.
    fn estimated(
        &self,
        cpu: &Cpu,
        query: &[f32],
        scores: &[f32],
        how: CompressedSearch,
    ) -> Result<Vec<Hit>, SearchError> {
        let wanted = self.kept(how);
        let probes = if how.probes == 0 { self.settings.probes } else { how.probes };
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        let better = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        if probes < order.len() {
            order.select_nth_unstable_by(probes.saturating_sub(1), better);
        }
        let first = probes.min(order.len());
        order[..first].sort_unstable_by(better);
        let rows = |lists: &[u32]| lists.iter().map(|&l| self.lists.rows(l as usize).len()).sum::<usize>();
        let mut seen = rows(&order[..first]);
        let mut end = first;
        if seen < wanted {
            // Not enough of them: the lists that are next best, until there are.
            order[first..].sort_unstable_by(better);
            while seen < wanted && end < order.len() {
                seen += rows(&order[end..=end]);
                end += 1;
            }
        }
        let norm = norm_of(cpu, query)?;
        // The codes of cosines are of rows of length 1.
        let factor = match self.settings.metric {
            Metric::Cosine if norm > 0.0 => 1.0 / norm,
            _ => 1.0,
        };
        let table = self.codec.table(query);
        let mut top = Top::new(wanted);
        for &list in &order[..end] {
            self.scan(cpu, &table, list as usize, scores[list as usize], factor, &mut top);
        }
        Ok(top.into_sorted())
    }

    /// Offers the rows of a list that are of the index's part, with estimated scores.
    fn scan(&self, cpu: &Cpu, table: &Table, list: usize, of_centroid: f32, factor: f32, top: &mut Top) {
        let own = self.part.rows(self.total);
        let (rows, codes) = self.lists.blocks_with(list, &own);
        let start = of_centroid + table.least;
        // The least sum whose score could be among the best; one less for what rounding takes.
        let bar = |top: &Top| {
            let least = ((top.least() / factor - start) * table.factor - 1.0).max(0.0);
            (least <= 65535.0).then_some(least as u16)
        };
        let Some(least) = bar(top) else { return };
        cpu.look_up(&table.entries, codes, least, &mut |place, sum| {
            if let Some(row) = rows.get(place).map(|row| u64::from(*row)).filter(|row| own.contains(row)) {
                top.offer(row, (start + f32::from(sum) / table.factor) * factor);
            }
        });
    }
}

fn go_on(stop: &dyn Fn() -> bool) -> Result<(), SearchError> {
    if stop() { Err(SearchError::Stopped) } else { Ok(()) }
}

/// Does something for every query, on all threads; the first error in their order.
fn each<Q: Send>(
    cpu: &Cpu,
    queries: impl IndexedParallelIterator<Item = Q>,
    of: impl Fn(Q) -> Result<Vec<Hit>, SearchError> + Sync + Send,
) -> Result<Vec<Vec<Hit>>, SearchError> {
    let found: Vec<Result<Vec<Hit>, SearchError>> =
        cpu.run(|| queries.with_max_len(TOGETHER).map(of).collect());
    found.into_iter().collect()
}

fn norm_of(cpu: &Cpu, query: &[f32]) -> Result<f32, SearchError> {
    let bytes: Vec<[u8; 4]> = query.iter().map(|v| v.to_le_bytes()).collect();
    let mut square = [0.0];
    cpu.dots(query, StoredRows::F32(&bytes), &mut square);
    norm(square[0]).ok_or_else(|| SearchError::Unusable("a query has a norm beyond the range of f32".into()))
}
