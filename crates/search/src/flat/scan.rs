//! Queries against pieces of rows: the screen leaves few rows, whose scores are computed and offered.

use rayon::prelude::*;
use tercio_engine::Cpu;
use tercio_engine::cpu::StoredRows;
use tercio_engine::cpu::screen::{Candidate, GROUP, Group, PANEL, Screen};

use super::{Metric, Piece, cpu_run, norm};
use crate::error::SearchError;
use crate::top::Top;

/// Panels of 32 rows that are screened for a group of queries before the next group's turn: they stay in the cache.
const STEP: usize = 8;
/// Rows whose scores wait at most; then those that cannot reach the bar any more go.
const MOST_PENDING: usize = 1 << 12;
/// Scores that are computed together where rows are not screened.
const TOGETHER: usize = 256;

/// Refuses queries that are not rows of `dimension` finite numbers; the first is query `first` in messages.
pub(crate) fn check_queries(values: &[f32], dimension: usize, first: usize) -> Result<(), SearchError> {
    if !values.len().is_multiple_of(dimension) {
        return Err(SearchError::Unusable(format!(
            "expected queries of {dimension} numbers as the vectors have, found {} numbers in all; embed them with the same \
             model",
            values.len()
        )));
    }
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(at) => Err(SearchError::Unusable(format!(
            "query {} has {} as number {}; expected finite numbers",
            first + at / dimension,
            values[at],
            at % dimension
        ))),
    }
}

/// Queries as a scan needs them.
pub(super) struct Asked<'a> {
    values: &'a [f32],
    dimension: usize,
    /// Norms for cosines, else empty.
    norms: Vec<f32>,
    groups: Vec<Group>,
    /// At least the norm of each.
    longest: f32,
}

impl<'a> Asked<'a> {
    /// Looks at queries and copies them; the first is query `first` in messages.
    pub fn new(
        cpu: &Cpu,
        values: &'a [f32],
        dimension: usize,
        metric: Metric,
        first: usize,
    ) -> Result<Asked<'a>, SearchError> {
        check_queries(values, dimension, first)?;
        let mut norms = Vec::new();
        if metric == Metric::Cosine {
            for (i, query) in values.chunks_exact(dimension).enumerate() {
                let bytes: Vec<[u8; 4]> = query.iter().map(|v| v.to_le_bytes()).collect();
                let mut square = [0.0];
                cpu.dots(query, StoredRows::F32(&bytes), &mut square);
                let beyond = || {
                    let query = first + i;
                    SearchError::Unusable(format!("query {query} has a norm beyond the range of f32"))
                };
                norms.push(norm(square[0]).ok_or_else(beyond)?);
            }
        }
        let factors: Vec<f32> = norms.iter().map(|n| if *n > 0.0 { 1.0 / n } else { 0.0 }).collect();
        let groups = values.chunks(GROUP * dimension).enumerate().map(|(g, part)| {
            let factors = factors.get(g * GROUP..).map(|f| &f[..f.len().min(GROUP)]);
            cpu.screened(part, dimension, factors.filter(|_| metric == Metric::Cosine))
        });
        let groups: Vec<Group> = groups.collect();
        let longest = groups.iter().map(Group::longest);
        let longest = longest.fold(0.0, |a: f32, b| if b.is_nan() || b > a { b } else { a });
        Ok(Asked { values, dimension, norms, groups, longest })
    }

    /// How many queries there are.
    pub fn count(&self) -> usize {
        self.values.len() / self.dimension
    }

    fn query(&self, number: usize) -> (&[f32], f32) {
        let values = &self.values[number * self.dimension..][..self.dimension];
        (values, self.norms.get(number).copied().unwrap_or(0.0))
    }
}

/// Room for the best rows of every query; no more than there are rows.
pub(super) fn tops(queries: usize, depth: usize, rows: u64) -> Vec<Top> {
    let depth = depth.min(usize::try_from(rows).unwrap_or(usize::MAX));
    vec![Top::new(depth); queries]
}

/// Offers the rows of the pieces to all queries. Threads share the queries, or the rows where there are few queries; what is
/// found depends on neither.
pub(super) fn scan(
    cpu: &Cpu,
    asked: &Asked<'_>,
    pieces: &[Piece],
    tops: &mut [Top],
) -> Result<(), SearchError> {
    if tops.iter().all(|top| top.depth() == 0) {
        return Ok(());
    }
    // Groups of a task: its rows come from memory once for all of them.
    let parts = 2 * cpu.threads();
    let groups = asked.groups.len().div_ceil(parts).max(1);
    let panels = |piece: &Piece| piece.count.div_ceil(PANEL);
    if cpu.threads() == 1 || asked.groups.len() >= parts {
        let task = |(t, tops): (usize, &mut [Top])| {
            let mut work = Work::new(cpu, asked, pieces, t * groups, tops);
            (0..pieces.len()).try_for_each(|n| work.piece(n, 0, panels(&pieces[n])))?;
            work.finish()
        };
        // The first error in the order of queries.
        let found: Vec<Result<(), SearchError>> = cpu_run(cpu, || {
            tops.par_chunks_mut(groups * GROUP).enumerate().with_max_len(1).map(task).collect()
        });
        return found.into_iter().collect();
    }
    // The rows of all pieces, by panels, one part for every thread.
    let all: usize = pieces.iter().map(panels).sum();
    let threads = cpu.threads();
    let part = |t: usize| -> Result<Vec<Top>, SearchError> {
        let (from, to) = (all * t / threads, all * (t + 1) / threads);
        let mut own: Vec<Top> = tops.iter().map(Top::emptied).collect();
        let mut work = Work::new(cpu, asked, pieces, 0, &mut own);
        let mut before = 0;
        for (n, piece) in pieces.iter().enumerate() {
            let range = from.max(before)..to.min(before + panels(piece));
            if !range.is_empty() {
                work.piece(n, range.start - before, range.end - before)?;
            }
            before += panels(piece);
        }
        work.finish()?;
        Ok(own)
    };
    let found: Vec<_> = cpu_run(cpu, || (0..threads).into_par_iter().with_max_len(1).map(part).collect());
    for own in found {
        for (top, own) in tops.iter_mut().zip(own?) {
            own.into_sorted().into_iter().for_each(|hit| top.offer(hit.row, hit.score));
        }
    }
    Ok(())
}

/// One thread's queries, from group `first` on.
struct Work<'a, 'b> {
    cpu: &'a Cpu,
    asked: &'a Asked<'b>,
    pieces: &'a [Piece],
    first: usize,
    tops: &'a mut [Top],
    /// The greatest of the scores that rows have at least: what cannot reach the least of those is not among the best.
    lows: Vec<Top>,
    /// Rows of each query whose scores are to be computed: piece, row, the score that it has at most.
    pending: Vec<Vec<(u32, u32, f32)>>,
    found: Vec<Candidate>,
}

impl<'a, 'b> Work<'a, 'b> {
    fn new(
        cpu: &'a Cpu,
        asked: &'a Asked<'b>,
        pieces: &'a [Piece],
        first: usize,
        tops: &'a mut [Top],
    ) -> Work<'a, 'b> {
        let lows = tops.iter().map(Top::emptied).collect();
        let pending = vec![Vec::new(); tops.len()];
        Work { cpu, asked, pieces, first, tops, lows, pending, found: Vec::new() }
    }

    /// Rows of the panels `from..to` of a piece, for all queries of this thread.
    fn piece(&mut self, number: usize, from: usize, to: usize) -> Result<(), SearchError> {
        let piece = &self.pieces[number];
        // Where a sum of products could leave the range of f32, all scores are computed: such a score is an error, whether its row could
        // be among the best or not.
        let within = |screen: &&Screen| self.asked.longest * screen.longest() < f32::MAX / 2.0;
        let Some(screen) = piece.screen.as_ref().filter(within) else {
            return self.rows(piece, from * PANEL, (to * PANEL).min(piece.count));
        };
        for start in (from..to).step_by(STEP) {
            let panels = start..to.min(start + STEP);
            for of_group in (0..self.tops.len()).step_by(GROUP) {
                let queries = of_group..self.tops.len().min(of_group + GROUP);
                let mut least = [0f32; GROUP];
                let lows = &mut self.lows[queries.clone()];
                least.iter_mut().zip(&*lows).for_each(|(least, low)| *least = low.least());
                self.found.clear();
                let asked = &self.asked.groups[self.first + of_group / GROUP];
                self.cpu.may_reach(asked, screen, panels.clone(), &least[..lows.len()], &mut self.found);
                for c in &self.found {
                    if c.least.is_finite() {
                        lows[c.query as usize].offer(piece.first + u64::from(c.row), c.least);
                    }
                    self.pending[of_group + c.query as usize].push((number as u32, c.row, c.most));
                }
                queries.into_iter().try_for_each(|query| self.relieve(query))?;
            }
        }
        Ok(())
    }

    /// Lets go of rows that cannot reach the bar any more, where many wait.
    fn relieve(&mut self, query: usize) -> Result<(), SearchError> {
        let (bar, pending) = (self.lows[query].least(), &mut self.pending[query]);
        if pending.len() >= MOST_PENDING {
            pending.retain(|p| is_above(p.2, bar));
            // Nearly all may be as good as the best, as in a set of equal vectors: their scores are computed now.
            if pending.len() >= MOST_PENDING / 2 {
                let rows = std::mem::take(pending);
                self.score(query, &rows)?;
            }
        }
        Ok(())
    }

    /// Computes the scores of what was found.
    fn finish(mut self) -> Result<(), SearchError> {
        for (i, low) in std::mem::take(&mut self.lows).into_iter().enumerate() {
            let (bar, depth) = (low.least(), low.depth());
            let lows = low.into_sorted();
            let last = if lows.len() >= depth { lows.last().map(|hit| hit.score) } else { None };
            let bar = last.map_or(bar, |last| last.max(bar));
            let mut rows = std::mem::take(&mut self.pending[i]);
            rows.retain(|p| is_above(p.2, bar));
            self.score(i, &rows)?;
        }
        Ok(())
    }

    /// Offers rows to query `i` of this thread.
    fn score(&mut self, i: usize, rows: &[(u32, u32, f32)]) -> Result<(), SearchError> {
        let (query, norm) = self.asked.query(self.first * GROUP + i);
        let top = &mut self.tops[i];
        for &(piece, row, most) in rows {
            if is_above(most, top.least()) {
                let piece = &self.pieces[piece as usize];
                let mut score = [0.0];
                piece.scores(self.cpu, query, norm, row as usize, &mut score)?;
                top.offer(piece.first + u64::from(row), score[0]);
            }
        }
        Ok(())
    }

    /// The same without a screen.
    fn rows(&mut self, piece: &Piece, from: usize, to: usize) -> Result<(), SearchError> {
        let mut scores = [0f32; TOGETHER];
        for start in (from..to).step_by(TOGETHER) {
            let scores = &mut scores[..TOGETHER.min(to - start)];
            for (i, top) in self.tops.iter_mut().enumerate() {
                let (query, norm) = self.asked.query(self.first * GROUP + i);
                piece.scores(self.cpu, query, norm, start, scores)?;
                for (row, &score) in (start..).zip(&*scores) {
                    top.offer(piece.first + row as u64, score);
                }
            }
        }
        Ok(())
    }
}

/// Whether a score of at most `most` may reach the bar; what is no number may.
fn is_above(most: f32, bar: f32) -> bool {
    most.is_nan() || most >= bar
}
