//! Queries against pieces of rows: the screen leaves few rows, whose scores are computed and offered.

use rayon::prelude::*;
use tercio_engine::Cpu;
use tercio_engine::cpu::StoredRows;
use tercio_engine::cpu::screen::{GROUP, Group};

use super::{Metric, Piece, cpu_run, norm};
use crate::error::SearchError;
use crate::top::Top;

/// Panels of 32 rows that are screened before the scores of what was found are computed: those raise the bar for the next.
const STEP: usize = 8;
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
        let groups = groups.collect();
        Ok(Asked { values, dimension, norms, groups })
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
    // Groups of a task: its rows come from memory once for all of them.
    let parts = 2 * cpu.threads();
    let groups = asked.groups.len().div_ceil(parts).max(1);
    if cpu.threads() == 1 || asked.groups.len() >= parts {
        let tasks = || -> Result<(), SearchError> {
            let found: Vec<Result<(), SearchError>> = tops
                .par_chunks_mut(groups * GROUP)
                .enumerate()
                .with_max_len(1)
                .map(|(t, tops)| {
                    let mut work = Work { cpu, asked, first: t * groups, tops, found: Vec::new() };
                    pieces.iter().try_for_each(|piece| work.piece(piece, 0, piece.count.div_ceil(32)))
                })
                .collect();
            found.into_iter().collect()
        };
        return cpu_run(cpu, tasks);
    }
    // The rows of all pieces, by panels, one part for every thread.
    let panels = |piece: &Piece| piece.count.div_ceil(32);
    let all: usize = pieces.iter().map(panels).sum();
    let threads = cpu.threads();
    let part = |t: usize| -> Result<Vec<Top>, SearchError> {
        let (from, to) = (all * t / threads, all * (t + 1) / threads);
        let mut own: Vec<Top> = tops.iter().map(Top::emptied).collect();
        let mut work = Work { cpu, asked, first: 0, tops: &mut own, found: Vec::new() };
        let mut before = 0;
        for piece in pieces {
            let range = from.max(before)..to.min(before + panels(piece));
            if !range.is_empty() {
                work.piece(piece, range.start - before, range.end - before)?;
            }
            before += panels(piece);
        }
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
    first: usize,
    tops: &'a mut [Top],
    found: Vec<(u32, u32)>,
}

impl Work<'_, '_> {
    /// Rows of the panels `from..to` of a piece, for all queries of this thread.
    fn piece(&mut self, piece: &Piece, from: usize, to: usize) -> Result<(), SearchError> {
        let Some(screen) = &piece.screen else {
            return self.rows(piece, from * 32, (to * 32).min(piece.count));
        };
        for start in (from..to).step_by(STEP) {
            let panels = start..to.min(start + STEP);
            for (g, tops) in self.tops.chunks_mut(GROUP).enumerate() {
                let group = self.first + g;
                let mut least = [0f32; GROUP];
                least.iter_mut().zip(&*tops).for_each(|(least, top)| *least = top.least());
                self.found.clear();
                let asked = &self.asked.groups[group];
                self.cpu.may_reach(asked, screen, panels.clone(), &least[..tops.len()], &mut self.found);
                for &(i, row) in &self.found {
                    let (query, norm) = self.asked.query(group * GROUP + i as usize);
                    let mut score = [0.0];
                    piece.scores(self.cpu, query, norm, row as usize, &mut score)?;
                    tops[i as usize].offer(piece.first + u64::from(row), score[0]);
                }
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
