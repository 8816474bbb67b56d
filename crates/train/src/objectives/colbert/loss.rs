//! The losses of a ColBERT model on scores of the host, in 64 bits.
//!
//! Contrastive: cross-entropy of the positive document among all documents of the update (PyLate's `Contrastive`). Distillation:
//! Kullback-Leibler divergence from the softmax of a teacher's scores to the softmax of the model's, which are first brought to the range 0
//! to 1 (PyLate's `Distillation`), or not.

use crate::objectives::retriever::loss::{divergence, log_sum_exp};

/// Added to the range of scores that are brought to 0 to 1, as PyLate does.
const LEAST_RANGE: f64 = 1e-8;

/// How a query's row of scores becomes a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contrast {
    /// Factor of a score: 1 / temperature.
    pub scale: f64,
    /// Share of a query's target that is spread over all documents.
    pub smoothing: f64,
    /// Weight of a query's loss.
    pub weight: f64,
}

impl Contrast {
    /// The logarithm of the sum of exponentials of a row of scores.
    pub fn normalizer(&self, scores: &[f64]) -> f64 {
        let scaled: Vec<f64> = scores.iter().map(|s| s * self.scale).collect();
        log_sum_exp(&scaled)
    }
    fn target(&self, is_positive: bool, documents: usize) -> f64 {
        let even = self.smoothing / documents as f64;
        if is_positive { 1.0 - self.smoothing + even } else { even }
    }
    /// The weighted loss of a query.
    pub fn loss(&self, scores: &[f64], positive: usize, normalizer: f64) -> f64 {
        let mut loss = 0.0;
        for (d, score) in scores.iter().enumerate() {
            let target = self.target(d == positive, scores.len());
            if target > 0.0 {
                loss -= self.weight * target * (score * self.scale - normalizer);
            }
        }
        loss
    }
    /// Its derivative with respect to the score of one document, of `documents` in the row.
    pub fn slope(&self, score: f64, is_positive: bool, normalizer: f64, documents: usize) -> f64 {
        let share = libm::exp(score * self.scale - normalizer);
        self.weight * (share - self.target(is_positive, documents)) * self.scale
    }
}

/// How a query's scores are compared with a teacher's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distillation {
    /// Whether the scores are brought to the range 0 to 1 before.
    pub normalize: bool,
    /// Factor of the scores, brought to a range or not: 1 / temperature.
    pub scale: f64,
    /// Factor of a teacher's scores: 1 / its temperature.
    pub gold: f64,
}

impl Distillation {
    /// The divergence of a query's scores, and its derivative with respect to them. Of equal scores the first is the least and the
    /// greatest.
    pub fn divergence(&self, scores: &[f64], gold: &[f64]) -> (f64, Vec<f64>) {
        let gold: Vec<f64> = gold.iter().map(|g| g * self.gold).collect();
        if !self.normalize {
            let scaled: Vec<f64> = scores.iter().map(|s| s * self.scale).collect();
            let (loss, slope) = divergence(&scaled, &gold);
            return (loss, slope.into_iter().map(|s| s * self.scale).collect());
        }
        let place = |better: fn(f64, f64) -> bool| {
            let mut at = 0;
            (1..scores.len()).for_each(|i| at = if better(scores[i], scores[at]) { i } else { at });
            at
        };
        let (least, most) = (place(|a, b| a < b), place(|a, b| a > b));
        let range = scores[most] - scores[least] + LEAST_RANGE;
        let part = |i: usize| (scores[i] - scores[least]) / range;
        let scaled: Vec<f64> = (0..scores.len()).map(|i| part(i) * self.scale).collect();
        let (loss, slope) = divergence(&scaled, &gold);
        let mut slopes: Vec<f64> = slope.iter().map(|s| s * self.scale / range).collect();
        // The least and the greatest score move all others.
        let (mut all, mut along) = (0.0, 0.0);
        for (i, slope) in slopes.iter().enumerate() {
            all += slope;
            along += slope * part(i);
        }
        slopes[least] += along - all;
        slopes[most] -= along;
        (loss, slopes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slopes(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        let h = 1e-5;
        let at = |i: usize, d: f64| {
            let mut moved = x.to_vec();
            moved[i] += d;
            f(&moved)
        };
        (0..x.len()).map(|i| (at(i, h) - at(i, -h)) / (2.0 * h)).collect()
    }

    fn assert_alike(found: &[f64], expected: &[f64], what: &str) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 1e-7 * (1.0 + e.abs()), "{what}: {found:?} {expected:?}");
        }
    }

    #[test]
    fn contrast_has_the_slopes_of_its_loss() {
        let scores = [3.1, -0.5, 2.9, 7.0];
        for (scale, smoothing) in [(1.0, 0.0), (4.0, 0.0), (0.7, 0.2)] {
            let c = Contrast { scale, smoothing, weight: 0.5 };
            let loss = |s: &[f64]| c.loss(s, 2, c.normalizer(s));
            let n = c.normalizer(&scores);
            let found: Vec<f64> =
                scores.iter().enumerate().map(|(d, &s)| c.slope(s, d == 2, n, scores.len())).collect();
            assert!(loss(&scores) > 0.0);
            assert_alike(&found, &slopes(&scores, loss), &format!("{scale} {smoothing}"));
        }
        let sharp = Contrast { scale: 50.0, smoothing: 0.0, weight: 1.0 };
        let n = sharp.normalizer(&[32.0, -32.0]);
        assert!((sharp.loss(&[32.0, -32.0], 1, n) - 3200.0).abs() < 1e-9);
    }

    #[test]
    fn distillation_has_the_slopes_of_its_loss() {
        let (scores, gold) = ([12.0, 14.5, 13.1, 9.0], [0.5, 2.0, -1.0, 0.1]);
        for normalize in [true, false] {
            let d = Distillation { normalize, scale: 1.3, gold: 0.8 };
            let (loss, found) = d.divergence(&scores, &gold);
            assert!(loss > 0.0);
            assert_alike(&found, &slopes(&scores, |s| d.divergence(s, &gold).0), &format!("{normalize}"));
        }
        let d = Distillation { normalize: true, scale: 1.0, gold: 1.0 };
        let (loss, slope) = d.divergence(&[5.0; 3], &gold[..3]);
        assert!(loss.is_finite() && slope.iter().all(|s| s.is_finite()), "equal scores: {loss} {slope:?}");
        assert_eq!(d.divergence(&[5.0], &[1.0]), (0.0, vec![0.0]));
    }
}
