//! Which queries and documents a MaxSim compares, and what an empty document is worth.

use super::Span;

/// Stands for "no row" among the best rows of [`super::EncoderKernels::max_sim`].
pub const NO_ROW: u32 = u32::MAX;
/// What a query row gets from a document without rows: the least inner product of two rows of unit length. So a document of which
/// nothing is left behind its mask is no better than any other, and its score is a finite number.
pub const EMPTY_DOCUMENT: f64 = -1.0;

/// Late interaction (Khattab and Zaharia, 2020): for each pair of a query and a document the sum over the query's rows of the greatest
/// inner product with a row of the document; or XTR's (Lee et al., 2023), see [`MaxSimShape::retrieved`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaxSimShape {
    /// Rows of each query.
    pub queries: Vec<Span>,
    /// Rows of each document; what a mask excludes has no row here.
    pub documents: Vec<Span>,
    /// The pairs that are scored, as places in the two lists.
    pub pairs: Vec<(u32, u32)>,
    /// Of each document whether no query row gets less than 0 from it, as PyLate's masks have it: what they exclude stands as a product
    /// of 0 beside the real ones. Empty: no document has a floor.
    pub floors: Vec<bool>,
    /// XTR's score where it is above 0: of each query row only as many rows of all documents that its query is paired with count as are
    /// retrieved so, those of the greatest products (of equal ones the earlier pair's, then the earlier row); a document gets the sum of the
    /// greatest that count, divided by the number of query rows that have one, and 0 where none has. No floors then.
    pub retrieved: usize,
}

impl MaxSimShape {
    /// Every query with every document: pair `q * documents + d`.
    pub fn all(queries: Vec<Span>, documents: Vec<Span>) -> MaxSimShape {
        let count = documents.len() as u32;
        let pairs = (0..queries.len() as u32).flat_map(|q| (0..count).map(move |d| (q, d))).collect();
        MaxSimShape { queries, documents, pairs, ..MaxSimShape::default() }
    }

    /// Where each pair's best rows begin, and their number at the end: one row for every row of its query.
    pub(crate) fn places(&self) -> Vec<usize> {
        let mut places = vec![0];
        for &(q, _) in &self.pairs {
            places.push(places[places.len() - 1] + self.queries[q as usize].len());
        }
        places
    }

    /// The numbers of the pairs of each query, or of each document, in the order of pairs.
    pub(crate) fn grouped(&self, by: MaxSimSide) -> Vec<Vec<u32>> {
        let count = match by {
            MaxSimSide::Queries => self.queries.len(),
            MaxSimSide::Documents => self.documents.len(),
        };
        let mut groups = vec![Vec::new(); count];
        for (i, &(q, d)) in self.pairs.iter().enumerate() {
            let at = if by == MaxSimSide::Queries { q } else { d };
            groups[at as usize].push(i as u32);
        }
        groups
    }

    /// Refuses spans beyond tensors of so many rows, and spans that share a row: tasks write theirs without locks.
    pub(crate) fn check(&self, query_rows: usize, document_rows: usize) {
        for (spans, rows) in [(&self.queries, query_rows), (&self.documents, document_rows)] {
            let mut sorted: Vec<&Span> = spans.iter().filter(|s| !s.is_empty()).collect();
            sorted.sort_by_key(|s| s.start);
            assert!(
                spans.iter().all(|s| s.start <= s.end && s.end as usize <= rows),
                "a span is beyond its tensor"
            );
            assert!(sorted.windows(2).all(|w| w[0].end <= w[1].start), "two texts share a row");
        }
        let (q, d) = (self.queries.len(), self.documents.len());
        assert!(self.floors.is_empty() || self.floors.len() == d, "floors are of all documents or of none");
        let floored = self.floors.contains(&true);
        assert!(!floored || self.retrieved == 0, "what is not retrieved has no floor");
        assert!(self.pairs.iter().all(|p| (p.0 as usize) < q && (p.1 as usize) < d), "a pair of no texts");
    }

    /// What a pair's score and slope are divided by, from the best rows of its query's rows.
    pub(crate) fn divisor(&self, best: &[u32]) -> f64 {
        match self.retrieved {
            0 => 1.0,
            _ => best.iter().filter(|row| **row != NO_ROW).count().max(1) as f64,
        }
    }

    /// Whether a document has the floor.
    pub(crate) fn has_floor(&self, document: usize) -> bool {
        self.floors.get(document) == Some(&true)
    }
    /// What a query row gets from no row of a document.
    pub(crate) fn without_rows(&self, document: usize) -> f64 {
        if self.has_floor(document) { 0.0 } else { EMPTY_DOCUMENT }
    }
}

/// Whose rows a gradient belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxSimSide {
    /// The queries'.
    Queries,
    /// The documents'.
    Documents,
}
