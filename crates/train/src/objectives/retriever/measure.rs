//! How good a retriever is on held-out examples: how near its order of a question's passages is to the teacher's (FiD's
//! figures), and where it ranks the passages that are known to be positive.
//!
//! Figures of every question go to rank 0, which adds them in the order of the file: no figure depends on the ranks.

use tercio_search::ranking::{Metric, Ranked};

/// Depths of the comparison with the teacher's order.
const TOP: [usize; 3] = [1, 2, 5];
/// Depths of recall.
const RECALL: [usize; 4] = [1, 5, 20, 100];
/// Depth of the gain.
const GAIN: usize = 10;

/// Names of the figures, in the order of a [`QuestionFigures`].
pub const NAMES: [&str; 14] = [
    "loss",
    "inversions",
    "avg_top1",
    "avg_top2",
    "avg_top5",
    "idx_top1",
    "idx_top2",
    "idx_top5",
    "mrr",
    "ndcg_10",
    "recall_1",
    "recall_5",
    "recall_20",
    "recall_100",
];

/// What the first figure is called where it is the divergence from the file's scores alone, at temperature 1 and over the
/// number of passages: of a model whose own loss nobody has said.
pub const KL_ELEMENT_MEAN: &str = "kl_element_mean";

/// What one question gives; `None` where it has no such figure.
pub type QuestionFigures = [Option<f64>; NAMES.len()];

/// Places of the passages, best score first; of equal scores the later passage first, so that a model that cannot tell
/// passages apart gains nothing from the file's order.
pub fn ranking(scores: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(b.cmp(&a)));
    order
}

/// Compares the retriever's order with the teacher's, as FiD does. `x` is the list of the teacher's ranks in the retriever's
/// order. Inversions: pairs out of order. `avg_top` k: share of the retriever's first k that are among the teacher's
/// first k. `idx_top` k: how many of the retriever's first ones hold all of the teacher's first k.
pub fn compare_orders(scores: &[f64], gold: &[f64], figures: &mut QuestionFigures) {
    // The teacher's ranks; of equal scores the first passage first.
    let mut by_gold: Vec<usize> = (0..gold.len()).collect();
    by_gold.sort_by(|&a, &b| gold[b].total_cmp(&gold[a]).then(a.cmp(&b)));
    let in_order: Vec<f64> = by_gold.iter().map(|&p| scores[p]).collect();
    let x: Vec<usize> = ranking(&in_order);
    let inversions: usize =
        (0..x.len()).map(|i| x[i + 1..].iter().filter(|&&later| later < x[i]).count()).sum();
    figures[1] = Some(inversions as f64);
    for (i, k) in TOP.into_iter().enumerate().filter(|(_, k)| *k <= x.len()) {
        figures[2 + i] = Some(x[..k].iter().filter(|&&rank| rank < k).count() as f64 / k as f64);
        let last = x.iter().rposition(|&rank| rank < k).map_or(0, |place| place + 1);
        figures[5 + i] = Some(last as f64);
    }
}

/// Where the passages that are known to be positive come: reciprocal rank of the first, nDCG of the first ten, share of them
/// among the first k, as [`tercio_search::ranking`] has them, a positive being of grade 1.
pub fn rank_positives(scores: &[f64], positive: &[bool], figures: &mut QuestionFigures) {
    let all = positive.iter().filter(|&&p| p).count();
    // Where all are positive there is nothing to rank.
    if all == 0 || all == positive.len() {
        return;
    }
    let found: Vec<bool> = ranking(scores).into_iter().map(|p| positive[p]).collect();
    let ranked = Ranked::of_flags(&found);
    figures[8] = Some(ranked.value(Metric::Mrr(None)));
    figures[9] = Some(ranked.value(Metric::Ndcg(Some(GAIN))));
    for (i, k) in RECALL.into_iter().enumerate().filter(|(_, k)| *k <= found.len()) {
        figures[10 + i] = Some(ranked.value(Metric::Recall(k)));
    }
}

/// Means of the figures of many questions.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    sums: [f64; NAMES.len()],
    counts: [u64; NAMES.len()],
}

impl Tally {
    /// Adds the next question.
    pub fn add(&mut self, figures: &QuestionFigures) {
        for (i, value) in figures.iter().enumerate().filter_map(|(i, v)| Some((i, (*v)?))) {
            self.sums[i] += value;
            self.counts[i] += 1;
        }
    }
    /// The mean of each figure that some question had.
    pub fn figures(&self) -> Vec<(&'static str, f64)> {
        let all = NAMES.into_iter().zip(self.sums).zip(self.counts);
        all.filter(|(_, count)| *count > 0).map(|((name, sum), count)| (name, sum / count as f64)).collect()
    }
    /// The mean of the first figure, the loss.
    pub fn loss(&self) -> Option<f64> {
        (self.counts[0] > 0).then(|| self.sums[0] / self.counts[0] as f64)
    }
}

/// Appends a question's figures to a message.
pub fn write(figures: &QuestionFigures, out: &mut Vec<u8>) {
    for figure in figures {
        out.push(u8::from(figure.is_some()));
        out.extend(figure.unwrap_or(0.0).to_le_bytes());
    }
}

/// Reads the figures of all questions of a message; `None` where it is none.
pub fn read(bytes: &[u8]) -> Option<Vec<QuestionFigures>> {
    let (figures, []) = bytes.as_chunks::<9>() else { return None };
    let values: Vec<Option<f64>> =
        figures.iter().map(|[has, value @ ..]| (*has == 1).then(|| f64::from_le_bytes(*value))).collect();
    let (questions, []) = values.as_chunks::<{ NAMES.len() }>() else { return None };
    Some(questions.to_vec())
}

/// The figures as a person reads them: losses and counts as they are, shares in percent, as FiD's line has them.
pub fn text(figures: &[(&'static str, f64)]) -> String {
    let shown = figures.iter().map(|(name, v)| match *name {
        "loss" | KL_ELEMENT_MEAN => format!("{name} {v:.6}"),
        name if name == "inversions" || name.starts_with("idx") => format!("{name} {v:.1}"),
        name => format!("{name} {:.1}", 100.0 * v),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_compared_as_fid_does() {
        let mut f = QuestionFigures::default();
        // Gold order: passages 1, 0, 3, 2; the retriever's: 1, 3, 2, 0. Ranks in its order: 0, 2, 3, 1.
        compare_orders(&[0.1, 4.0, 0.2, 0.3], &[2.0, 3.0, 0.0, 1.0], &mut f);
        assert_eq!(f[..8], [None, Some(2.0), Some(1.0), Some(0.5), None, Some(1.0), Some(4.0), None]);
        // A model that cannot tell passages apart is at the worst order, not the best.
        compare_orders(&[1.0; 3], &[3.0, 2.0, 1.0], &mut f);
        assert_eq!((f[1], f[2], f[5]), (Some(3.0), Some(0.0), Some(3.0)));
    }

    #[test]
    fn positives_are_ranked() {
        let mut f = QuestionFigures::default();
        rank_positives(&[0.5, 0.9, 0.1, 0.7, 0.2, 0.3], &[true, false, false, false, true, false], &mut f);
        // Order 1, 3, 0, 5, 4, 2: positives at the third and fifth place.
        let gain = 1.0 / libm::log2(4.0) + 1.0 / libm::log2(6.0);
        let ideal = 1.0 + 1.0 / libm::log2(3.0);
        assert_eq!(f[8..], [Some(1.0 / 3.0), Some(gain / ideal), Some(0.0), Some(1.0), None, None]);
        let mut none = QuestionFigures::default();
        rank_positives(&[1.0, 2.0], &[false, false], &mut none);
        rank_positives(&[1.0, 2.0], &[true, true], &mut none);
        assert_eq!(none, QuestionFigures::default());
    }

    #[test]
    fn figures_come_back_as_they_went_and_are_averaged() {
        let mut a = QuestionFigures::default();
        (a[0], a[3]) = (Some(2.0), Some(-0.0));
        let b = [Some(1.0); NAMES.len()];
        let mut bytes = Vec::new();
        write(&a, &mut bytes);
        write(&b, &mut bytes);
        assert_eq!(read(&bytes), Some(vec![a, b]));
        assert_eq!(read(&bytes[1..]), None);
        let mut tally = Tally::default();
        [a, b].iter().for_each(|f| tally.add(f));
        let figures = tally.figures();
        assert_eq!(
            (figures.len(), figures[0], figures[1]),
            (NAMES.len(), ("loss", 1.5), ("inversions", 1.0))
        );
        assert_eq!(Tally::default().loss(), None);
        assert_eq!(text(&figures[..3]), "loss 1.500000, inversions 1.0, avg_top1 100.0");
    }
}
