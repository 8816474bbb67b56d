//! Asking an index: lists, estimates, scores.

use rayon::prelude::*;
use tercio_engine::Cpu;
use tercio_engine::cpu::late::{LANES, PackedRows, QueryTokens};

use super::{PlaidIndex, Rows};
use crate::error::SearchError;
use crate::flat::cpu_run;
use crate::max_sim::{asked, finite};
use crate::top::{Hit, Top};

/// Lists that every token of a query looks into unless a search says otherwise.
const PROBES: usize = 8;
/// Documents that are scored unless a search says otherwise: this many, and no fewer than this many times those that are asked for.
const CANDIDATES: usize = 512;
/// See [`CANDIDATES`].
const TIMES: usize = 4;
/// Vectors that are put together at once.
const PART: usize = 16;
/// Documents that one thread estimates before another may take some.
const TOGETHER: usize = 512;

/// How a search is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlaidSearch<'a> {
    /// Documents of a query.
    pub depth: usize,
    /// Lists to look into for every token; 0: 8.
    pub probes: usize,
    /// Documents to score, at least `depth`; 0: 512, or four times `depth` where that is more.
    pub candidates: usize,
    /// Only documents of these rows; an empty set finds nothing.
    pub only: Option<&'a Rows>,
}

impl PlaidSearch<'_> {
    /// How many candidates of a query are kept: they are scored.
    pub fn kept(&self) -> usize {
        match self.candidates {
            0 => CANDIDATES.max(self.depth.saturating_mul(TIMES)),
            given => given.max(self.depth),
        }
    }
}

impl PlaidIndex {
    /// The best documents for every query (the vectors of its tokens, one after the other), best first: `depth` of them, or all that have
    /// vectors where the index, or `only`, has fewer. `stop` is asked before every query.
    ///
    /// # Errors
    /// Queries of another dimension, without vectors, or whose numbers are none; scores beyond f32; [`SearchError::Stopped`].
    pub fn search(
        &self,
        cpu: &Cpu,
        queries: &[&[f32]],
        how: PlaidSearch<'_>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let of = |_: usize, query: &QueryTokens| {
            self.scores_of(cpu, query, &self.candidates_of(cpu, query, how), how.depth)
        };
        self.each(cpu, queries, &of, stop)
    }

    /// The first half of a search: [`PlaidSearch::kept`] rows for every query with the best estimates.
    ///
    /// # Errors
    /// As [`PlaidIndex::search`].
    pub fn candidates(
        &self,
        cpu: &Cpu,
        queries: &[&[f32]],
        how: PlaidSearch<'_>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        self.each(cpu, queries, &|_, query| Ok(self.candidates_of(cpu, query, how)), stop)
    }

    /// The second half: the best of the candidates by their scores. Candidates that are no rows of the index's part are another rank's.
    ///
    /// # Errors
    /// As [`PlaidIndex::search`].
    pub fn scored(
        &self,
        cpu: &Cpu,
        queries: &[&[f32]],
        candidates: &[Vec<Hit>],
        depth: usize,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let of = |n: usize, query: &QueryTokens| self.scores_of(cpu, query, &candidates[n], depth);
        self.each(cpu, queries, &of, stop)
    }

    /// Does something for every query, on all threads; `of` is told its number.
    fn each(
        &self,
        cpu: &Cpu,
        queries: &[&[f32]],
        of: &(dyn Fn(usize, &QueryTokens) -> Result<Vec<Hit>, SearchError> + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let asked = asked(queries, self.settings.dimension)?;
        let one = |(n, query): (usize, &QueryTokens)| match stop() {
            true => Err(SearchError::Stopped),
            false => of(n, query),
        };
        let found: Vec<Result<Vec<Hit>, SearchError>> =
            cpu_run(cpu, || asked.par_iter().enumerate().with_max_len(1).map(one).collect());
        found.into_iter().collect()
    }

    /// The candidates of a query among the rows of the index's part, with their estimates; 0 where all are wanted.
    fn candidates_of(&self, cpu: &Cpu, query: &QueryTokens, how: PlaidSearch<'_>) -> Vec<Hit> {
        let allowed = |row: u32| !self.deleted.has(row) && how.only.is_none_or(|only| only.has(row));
        let kept = how.kept();
        let most = how.only.map_or(usize::MAX, Rows::len).min(self.len() as usize);
        if how.depth == 0 || most == 0 {
            return Vec::new();
        }
        let all_alike = |mut rows: Vec<u32>| {
            let own = self.part.rows(self.total);
            rows.retain(|row| own.contains(&u64::from(*row)));
            rows.into_iter().map(|row| Hit { row: u64::from(row), score: 0.0 }).collect()
        };
        // Few documents of a filter: all of them are scored, and no list is needed.
        if most <= kept {
            return all_alike(self.all(allowed));
        }
        let scores = cpu.products_of_lanes(query, &self.centroids);
        let probes = if how.probes == 0 { PROBES } else { how.probes };
        // Of the whole index: whether the lists hold enough does not hang on the part.
        let mut found = self.probed(cpu, query, &scores, probes, &allowed);
        if found.len() < how.depth.min(most) {
            // The lists hold too few.
            found = self.all(allowed);
        }
        match found.len() > kept {
            true => self.estimated(cpu, query, &scores, &found, kept),
            false => all_alike(found),
        }
    }

    /// The best of the candidates that are of the index's part.
    fn scores_of(
        &self,
        cpu: &Cpu,
        query: &QueryTokens,
        candidates: &[Hit],
        depth: usize,
    ) -> Result<Vec<Hit>, SearchError> {
        let score = |(best, rows): &mut (Vec<f32>, Vec<f32>), row: &u32| -> Result<Hit, SearchError> {
            best.clear();
            best.resize(query.lanes(), f32::NEG_INFINITY);
            self.each_part(cpu, *row, rows, |rows| cpu.raise_to_products(query, rows, best));
            Ok(Hit { row: u64::from(*row), score: finite(query.sum(best), u64::from(*row))? })
        };
        let own = self.part.rows(self.total);
        let chosen = candidates.iter().filter(|hit| own.contains(&hit.row)).map(|hit| hit.row as u32);
        // In the order in which they lie.
        let mut chosen: Vec<u32> = chosen.collect();
        chosen.sort_unstable();
        let hits: Vec<Result<Hit, SearchError>> =
            chosen.par_iter().with_min_len(8).map_init(Default::default, score).collect();
        let mut top = Top::new(depth);
        for hit in hits {
            let hit = hit?;
            top.offer(hit.row, hit.score);
        }
        Ok(top.into_sorted())
    }

    /// All rows that are allowed and have vectors, ascending.
    fn all(&self, allowed: impl Fn(u32) -> bool) -> Vec<u32> {
        let with_vectors = |piece: &super::Piece| {
            let starts = piece.starts.windows(2).zip(piece.first..);
            starts.filter(|(pair, _)| pair[0] < pair[1]).map(|(_, row)| row).collect::<Vec<u32>>()
        };
        self.pieces.iter().flat_map(with_vectors).filter(|row| allowed(*row)).collect()
    }

    /// The rows in the lists of the centroids that are best for a token, ascending.
    fn probed(
        &self,
        cpu: &Cpu,
        query: &QueryTokens,
        scores: &[f32],
        probes: usize,
        allowed: &impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        let best = cpu.best_of_lanes(scores, query.lanes(), query.tokens(), probes);
        let centroids = Rows::of(best.into_iter().flatten());
        let mut found = Rows::default();
        for piece in self.pieces.iter().filter(|piece| piece.documents() > 0) {
            for centroid in centroids.iter() {
                piece.list(centroid).for_each(|document| found.insert(piece.first + document));
            }
        }
        found.iter().filter(|row| allowed(*row)).collect()
    }

    /// The `count` rows of the index's part with the best estimates, best first.
    fn estimated(
        &self,
        cpu: &Cpu,
        query: &QueryTokens,
        scores: &[f32],
        rows: &[u32],
        count: usize,
    ) -> Vec<Hit> {
        let own = self.part.rows(self.total);
        let place = |row: u64| rows.partition_point(|r| u64::from(*r) < row);
        let rows = &rows[place(own.start)..place(own.end)];
        let (lanes, tokens) = (query.lanes(), query.tokens());
        let table = table(scores, lanes, tokens);
        let of = |rows: &[u32]| -> Vec<u32> {
            let estimate = |row: &u32| {
                let (piece, document) = self.place(*row);
                cpu.max_sim_of_codes(&table, lanes / LANES, piece.codes(document))
            };
            rows.iter().map(estimate).collect()
        };
        let estimates: Vec<Vec<u32>> = rows.par_chunks(TOGETHER).map(of).collect();
        let mut top = Top::new(count);
        for (estimate, row) in estimates.into_iter().flatten().zip(rows) {
            // Sums of some thousand bytes: f32 has them all.
            top.offer(u64::from(*row), estimate as f32);
        }
        top.into_sorted()
    }

    /// Puts the vectors of a row together, a few at a time, so that they are in the first cache when they are looked at.
    fn each_part(&self, cpu: &Cpu, row: u32, out: &mut Vec<f32>, mut with: impl FnMut(&[f32])) {
        let (piece, document) = self.place(row);
        let dimension = self.settings.dimension;
        let width = self.buckets.row_bytes(dimension);
        let residuals = piece.residuals(document, width).chunks(PART * width);
        for (codes, residuals) in piece.codes(document).chunks(PART).zip(residuals) {
            out.resize(codes.len() * dimension, 0.0);
            let (centroids, unit) = (&self.centroids[..], self.settings.unit);
            cpu.unpack_rows(&self.buckets, PackedRows { codes, residuals, centroids, dimension, unit }, out);
            with(out);
        }
    }

    /// All vectors of a row.
    pub(super) fn unpacked(&self, cpu: &Cpu, row: u32) -> Vec<f32> {
        let (mut all, mut part) = (Vec::new(), Vec::new());
        self.each_part(cpu, row, &mut part, |rows| all.extend_from_slice(rows));
        all
    }
}

/// Scores of centroids as bytes, from the least of all to the greatest; 0 in lanes without a token. An estimate from them errs far less than one from
/// centroids does anyway.
fn table(scores: &[f32], lanes: usize, tokens: usize) -> Vec<[u8; LANES]> {
    let real = || scores.chunks_exact(lanes).flat_map(|row| &row[..tokens]);
    let least = real().fold(f32::INFINITY, |least, v| if *v < least { *v } else { least });
    let most = real().fold(f32::NEG_INFINITY, |most, v| if *v > most { *v } else { most });
    let span = most - least;
    let factor = if span > 0.0 && span.is_finite() { 255.0 / span } else { 0.0 };
    let mut table = vec![[0u8; LANES]; scores.len() / LANES];
    for (n, (bytes, row)) in table.iter_mut().zip(scores.chunks_exact(LANES)).enumerate() {
        let lane = n % (lanes / LANES) * LANES;
        for (byte, v) in bytes.iter_mut().zip(&row[..LANES.min(tokens - lane)]) {
            *byte = ((v - least) * factor + 0.5) as u8;
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_table_are_in_order_and_padding_counts_nothing() {
        // Two centroids, 40 tokens in 64 lanes.
        let scores: Vec<f32> = (0..128).map(|i| if i % 64 < 40 { i as f32 - 64.0 } else { 1e9 }).collect();
        let table = table(&scores, 64, 40);
        assert_eq!(table.len(), 4);
        assert_eq!((table[0][0], table[3][7]), (0, 255));
        assert!(table[1][8..].iter().chain(&table[3][8..]).all(|b| *b == 0));
        let first: Vec<u8> = table[0].iter().chain(&table[1][..8]).copied().collect();
        assert!(first.windows(2).all(|pair| pair[0] < pair[1]));
        // All equal: no order, no division by zero.
        assert!(super::table(&[3.0; 32], 32, 5)[0].iter().all(|b| *b == 0));
    }
}
