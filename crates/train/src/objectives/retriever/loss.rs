//! The losses of a retriever, on vectors of the host in 64 bits: they are small beside the model, and their sums run in one
//! order whoever computes them.
//!
//! Distillation: Kullback-Leibler divergence from the softmax of a reader's scores to the softmax of the retriever's, over a
//! question's own passages (Izacard and Grave, 2021: "Distilling knowledge from reader to retriever"). Contrastive:
//! cross-entropy of the positive passage among all passages of the update (Karpukhin et al., 2020).

use std::ops::Range;

use rayon::prelude::*;

/// The inner product, in eight running sums whose places are fixed.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for ((s, x), y) in sums.iter_mut().zip(a).zip(b) {
            *s += x * y;
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(0.0, |s, (x, y)| s + x * y);
    sums.iter().fold(0.0, |s, x| s + x) + rest
}

fn add_scaled(sum: &mut [f64], factor: f64, x: &[f64]) {
    sum.iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
}

/// Logarithm of the sum of exponentials.
pub(crate) fn log_sum_exp(x: &[f64]) -> f64 {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    most + libm::log(x.iter().fold(0.0, |s, v| s + libm::exp(v - most)))
}

/// How scores are made of inner products, and how sharp both sides of a distillation are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Factor of an inner product: 1 / (divisor temperature).
    pub score: f64,
    /// Factor of a teacher's score: 1 / its temperature.
    pub gold: f64,
}

impl Scale {
    /// `divisor` is that of the model's scores.
    pub fn new(divisor: f64, temperature: f64, teacher_temperature: f64) -> Scale {
        Scale { score: 1.0 / (divisor * temperature), gold: 1.0 / teacher_temperature }
    }
}

/// The divergence of a question's `scores` from its `gold`, both scaled, and its derivative with respect to the scores.
pub fn divergence(scores: &[f64], gold: &[f64]) -> (f64, Vec<f64>) {
    let (own, theirs) = (log_sum_exp(scores), log_sum_exp(gold));
    let mut loss = 0.0;
    let slope = scores.iter().zip(gold).map(|(s, g)| {
        let (log_q, log_p) = (s - own, g - theirs);
        let p = libm::exp(log_p);
        loss += p * (log_p - log_q);
        libm::exp(log_q) - p
    });
    let slope = slope.collect();
    (loss, slope)
}

/// The vectors of a question and of the passages it is compared with, and their gradients.
pub struct Rows<'a> {
    /// The question's.
    pub question: &'a [f64],
    /// The passages', one after the other; those beyond the teacher's scores have no part.
    pub passages: &'a [f64],
    /// Gradient of the question's, added to.
    pub question_gradient: &'a mut [f64],
    /// Gradients of the passages', added to.
    pub passage_gradients: &'a mut [f64],
}

/// `weight` times the divergence of a question; its gradients are added to `rows`.
pub fn distil(rows: Rows<'_>, gold: &[f64], scale: Scale, weight: f64) -> f64 {
    let width = rows.question.len();
    let passages = || rows.passages.chunks_exact(width).take(gold.len());
    let scores: Vec<f64> = passages().map(|p| dot(rows.question, p) * scale.score).collect();
    let gold: Vec<f64> = gold.iter().map(|g| g * scale.gold).collect();
    let (loss, slopes) = divergence(&scores, &gold);
    let gradients = rows.passage_gradients.chunks_exact_mut(width);
    for ((slope, passage), gradient) in slopes.iter().zip(passages()).zip(gradients) {
        let factor = weight * slope * scale.score;
        add_scaled(rows.question_gradient, factor, passage);
        add_scaled(gradient, factor, rows.question);
    }
    weight * loss
}

/// All questions and passages of an update, in the order of shards.
pub struct Pool<'a> {
    /// The questions' vectors.
    pub questions: Vec<&'a [f64]>,
    /// The passages' vectors.
    pub passages: Vec<&'a [f64]>,
    /// For each question the place of its positive in `passages`.
    pub positives: Vec<usize>,
    /// For each passage the question whose row it is left out of: it answers that one without being its positive.
    pub left_out: Vec<Option<usize>>,
    /// Factor of an inner product.
    pub scale: f64,
    /// Share of a question's target that is spread over all passages of its row.
    pub smoothing: f64,
    /// Weight of a question's loss.
    pub weight: f64,
}

/// What a question's own row of scores gives.
pub struct QuestionLoss {
    /// Its part of the loss.
    pub loss: f64,
    /// Logarithm of the sum of exponentials of its scores.
    pub normalizer: f64,
    /// Gradient of its vector.
    pub gradient: Vec<f64>,
}

impl Pool<'_> {
    /// Passages in each question's row.
    fn row_sizes(&self) -> Vec<usize> {
        let mut sizes = vec![self.passages.len(); self.questions.len()];
        self.left_out.iter().flatten().for_each(|&q| sizes[q] -= 1);
        sizes
    }
    fn target(&self, question: usize, passage: usize, row_size: usize) -> f64 {
        let even = self.smoothing / row_size as f64;
        if self.positives[question] == passage { 1.0 - self.smoothing + even } else { even }
    }
    /// Loss and gradient of each question in `own`, over the passages of its row in their order.
    pub fn questions(&self, own: Range<usize>) -> Vec<QuestionLoss> {
        let sizes = self.row_sizes();
        let of = |q: usize| {
            let vector = self.questions[q];
            let row: Vec<usize> = (0..self.passages.len()).filter(|&p| self.left_out[p] != Some(q)).collect();
            let scores: Vec<f64> = row.iter().map(|&p| dot(vector, self.passages[p]) * self.scale).collect();
            let normalizer = log_sum_exp(&scores);
            let mut gradient = vec![0.0; vector.len()];
            let mut loss = 0.0;
            for (&p, score) in row.iter().zip(&scores) {
                let (log, target) = (score - normalizer, self.target(q, p, sizes[q]));
                if target > 0.0 {
                    loss -= self.weight * target * log;
                }
                add_scaled(
                    &mut gradient,
                    self.weight * (libm::exp(log) - target) * self.scale,
                    self.passages[p],
                );
            }
            QuestionLoss { loss, normalizer, gradient }
        };
        own.into_par_iter().map(of).collect()
    }
    /// Gradient of each passage in `own`, over the questions whose row has it, in their order; `normalizers` are the questions'.
    pub fn passages(&self, own: Range<usize>, normalizers: &[f64]) -> Vec<Vec<f64>> {
        let sizes = self.row_sizes();
        let of = |p: usize| {
            let vector = self.passages[p];
            let mut gradient = vec![0.0; vector.len()];
            let rows = self.questions.iter().zip(normalizers).enumerate();
            for (q, (question, normalizer)) in rows.filter(|(q, _)| self.left_out[p] != Some(*q)) {
                let share = libm::exp(dot(question, vector) * self.scale - normalizer);
                add_scaled(
                    &mut gradient,
                    self.weight * (share - self.target(q, p, sizes[q])) * self.scale,
                    question,
                );
            }
            gradient
        };
        own.into_par_iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_engine::random::{key, normal};

    fn vector(name: u64, width: usize) -> Vec<f64> {
        (0..width as u64).map(|i| normal(key(&[name]), i)).collect()
    }

    /// The slope of `f` at each element of `x`, by central differences.
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
            assert!((f - e).abs() < 1e-7 * (1.0 + e.abs()), "{what}: {f} {e}");
        }
    }

    #[test]
    fn distillation_has_the_slopes_of_its_loss() {
        let (width, gold) = (11, [0.5, -2.0, 1.0]);
        let (question, passages) = (vector(1, width), vector(2, 4 * width));
        let scale = Scale::new(libm::sqrt(width as f64), 0.7, 1.5);
        let run = |question: &[f64], passages: &[f64]| {
            let (mut dq, mut dp) = (vec![0.0; width], vec![0.0; 4 * width]);
            let rows = Rows { question, passages, question_gradient: &mut dq, passage_gradients: &mut dp };
            (distil(rows, &gold, scale, 0.25), dq, dp)
        };
        let (loss, dq, dp) = run(&question, &passages);
        assert!(loss > 0.0);
        assert_alike(&dq, &slopes(&question, |q| run(q, &passages).0), "question");
        assert_alike(&dp, &slopes(&passages, |p| run(&question, p).0), "passages");
        assert!(dp[3 * width..].iter().all(|&d| d == 0.0), "a passage without a score has no part");
        // Equal scores up to a constant: nothing to learn.
        let (loss, slope) = divergence(&[1.0, 2.0, 3.0], &[-4.0, -3.0, -2.0]);
        assert!(loss.abs() < 1e-12 && slope.iter().all(|s| s.abs() < 1e-12), "{loss} {slope:?}");
    }

    #[test]
    fn contrast_has_the_slopes_of_its_loss() {
        let (width, questions, passages) = (5, 3, 7);
        let all = vector(3, width * (questions + passages));
        let nobody = [None; 7];
        // Passage 1 answers the question 0, 5 and 6 the question 2.
        let some = [None, Some(0), None, None, None, Some(2), Some(2)];
        for (smoothing, left_out) in [(0.0, nobody), (0.3, nobody), (0.0, some), (0.3, some)] {
            let run = |all: &[f64]| {
                let (q, p) = all.split_at(width * questions);
                let pool = Pool {
                    questions: q.chunks_exact(width).collect(),
                    passages: p.chunks_exact(width).collect(),
                    positives: vec![0, 4, 2],
                    left_out: left_out.to_vec(),
                    scale: 1.3,
                    smoothing,
                    weight: 0.5,
                };
                let rows = pool.questions(0..questions);
                let normalizers: Vec<f64> = rows.iter().map(|r| r.normalizer).collect();
                let columns = pool.passages(0..passages, &normalizers);
                let gradients: Vec<f64> =
                    rows.iter().map(|r| r.gradient.clone()).chain(columns).flatten().collect();
                (rows.iter().map(|r| r.loss).sum::<f64>(), gradients)
            };
            let (loss, gradients) = run(&all);
            assert!(loss > 0.0);
            assert_alike(&gradients, &slopes(&all, |x| run(x).0), &format!("smoothing {smoothing}"));
        }
    }

    #[test]
    fn what_answers_a_question_is_no_negative_of_it() {
        let pool = |left_out: &[Option<usize>], positives: &[usize], smoothing: f64| {
            let passages: Vec<&[f64]> = [&[1.0, 0.0], &[5.0, 1.0], &[0.0, 1.0]].map(|p| &p[..]).to_vec();
            let questions: Vec<&[f64]> = [&[1.0, 0.5], &[0.5, -1.0]].map(|q| &q[..]).to_vec();
            let (left_out, positives) = (left_out.to_vec(), positives.to_vec());
            let pool = Pool { questions, passages, positives, left_out, scale: 1.0, smoothing, weight: 1.0 };
            pool.questions(0..2).iter().map(|row| row.loss).collect::<Vec<f64>>()
        };
        let all = pool(&[None, None, None], &[0, 2], 0.0);
        let without = pool(&[None, Some(0), None], &[0, 2], 0.0);
        // Of the scores 1, 5.5, 0.5 the second is out; the other question still has it.
        assert!((without[0] - libm::log1p(libm::exp(-0.5))).abs() < 1e-12, "{without:?}");
        assert_eq!((without[1], without[0] < all[0]), (all[1], true));
        // A smoothed target is of the row, whose shares are 1 in all.
        let smoothed = pool(&[None, Some(0), None], &[0, 2], 0.5);
        assert!((smoothed[0] - without[0] - 0.25 * 0.5).abs() < 1e-12, "{smoothed:?}");
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let (loss, slope) = divergence(&[900.0, -900.0], &[-900.0, 900.0]);
        assert!(loss.is_finite() && slope.iter().all(|s| s.is_finite()), "{loss} {slope:?}");
        assert_eq!(log_sum_exp(&[1e4, 1e4]), 1e4 + libm::log(2.0));
    }
}
