//! The best of many scores in fixed memory.

/// A passage that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// Its row in the collection.
    pub row: u64,
    /// How well it fits the query: greater is better. Finite.
    pub score: f32,
}

/// The `depth` best hits among all that are offered, whatever their order; of equal scores the smaller row is better.
#[derive(Clone, Debug)]
pub struct Top {
    depth: usize,
    hits: Vec<Hit>,
    /// What is below it is not among the best: those that were kept already are enough.
    least: f32,
}

impl Top {
    /// Keeps at most `depth` hits, in memory for twice as many.
    pub fn new(depth: usize) -> Top {
        Top { depth, hits: Vec::new(), least: f32::NEG_INFINITY }
    }

    /// How many hits are kept at most.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// A score below this one cannot be among the best any more; negative infinity while there is room.
    pub fn least(&self) -> f32 {
        self.least
    }

    /// Without hits, but what was not among the best so far is not kept either: for other rows of the same search, whose best
    /// are then offered to this one.
    pub fn emptied(&self) -> Top {
        Top { hits: Vec::new(), ..*self }
    }

    /// Offers one hit. A score of -0 counts as 0, so that equal scores are ordered by their rows.
    #[inline]
    pub fn offer(&mut self, row: u64, score: f32) {
        if score < self.least || self.depth == 0 {
            return;
        }
        self.hits.push(Hit { row, score: score + 0.0 });
        if self.hits.len() >= self.depth.saturating_mul(2) {
            self.cut();
        }
    }

    /// Looks at what was offered since this was last done, unless it is little, so that [`Top::least`] is about as high as it can be.
    pub fn settle(&mut self) {
        if self.hits.len() > self.depth + self.depth / 8 || self.least == f32::NEG_INFINITY {
            self.cut();
        }
    }

    /// Leaves the best, in no order, and remembers the worst of them.
    fn cut(&mut self) {
        if self.hits.len() >= self.depth.max(1) {
            self.hits.select_nth_unstable_by(self.depth - 1, better);
            self.hits.truncate(self.depth);
            self.least = self.hits[self.depth - 1].score;
        }
    }

    /// The best, best first.
    pub fn into_sorted(mut self) -> Vec<Hit> {
        self.cut();
        self.hits.sort_unstable_by(better);
        self.hits
    }
}

fn better(a: &Hit, b: &Hit) -> std::cmp::Ordering {
    b.score.total_cmp(&a.score).then(a.row.cmp(&b.row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_kept_whatever_the_order() {
        let mut hits: Vec<Hit> = (0..300u64)
            .map(|row| Hit { row, score: (tercio_data::draw::keyed(&[1, row]) % 17) as f32 })
            .collect();
        for seed in 0..5 {
            hits.sort_by_key(|h| tercio_data::draw::keyed(&[seed, h.row]));
            let mut want = hits.clone();
            want.sort_unstable_by(better);
            for depth in [0, 1, 2, 7, 50, 299, 300, 400] {
                let mut top = Top::new(depth);
                hits.iter().for_each(|h| top.offer(h.row, h.score));
                assert_eq!(top.into_sorted(), want[..depth.min(300)], "{depth} of 300");
            }
        }
    }

    #[test]
    fn zeros_of_both_signs_are_equal_and_any_depth_is_one() {
        let mut top = Top::new(usize::MAX);
        for (row, score) in [(0, -0.0), (1, 0.0), (2, -0.0), (3, -1.0)] {
            top.offer(row, score);
        }
        let found: Vec<(u64, u32)> = top.into_sorted().iter().map(|h| (h.row, h.score.to_bits())).collect();
        let one = (-1f32).to_bits();
        assert_eq!(found, [(0, 0), (1, 0), (2, 0), (3, one)]);
    }
}
