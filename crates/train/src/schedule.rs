//! The course of the learning rate over updates.

use serde::{Deserialize, Serialize};

use crate::options::{OptimOptions, Scheduler};

/// Learning rate of update `u`, counted from 0.
///
/// `linear`: `u / warmup` up to the warm-up (the first update has rate 0), then with
/// `x = (u - warmup) / (scheduler_steps - warmup)` the factor `1 - x` down to 0, or 1 with `fixed_lr`. Source: FiD's
/// schedules. `cosine`: the same warm-up, then `(1 + cos(pi x)) / 2` down to 0, where it stays. Source: SGDR (Loshchilov
/// and Hutter, 2017) without restarts, as `get_cosine_schedule_with_warmup` of Hugging Face has it.
/// `relative_step`: `min(0.01, 1 / sqrt(u + 1))`, whatever `lr`. Source: Adafactor (Shazeer and Stern, 2018).
pub fn learning_rate(o: &OptimOptions, u: u64) -> f64 {
    if o.relative_step {
        return (1.0 / ((u + 1) as f64).sqrt()).min(1e-2);
    }
    let end = o.scheduler_steps.unwrap_or(o.total_steps);
    let span = end.saturating_sub(o.warmup_steps).max(1) as f64;
    let gone = |u: u64| ((u - o.warmup_steps) as f64 / span).min(1.0);
    let factor = match o.scheduler {
        Scheduler::Fixed => 1.0,
        _ if u < o.warmup_steps => u as f64 / o.warmup_steps as f64,
        Scheduler::Linear if o.fixed_lr => 1.0,
        Scheduler::Linear => 1.0 - gone(u),
        Scheduler::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * gone(u))),
    };
    o.lr * factor
}

/// Settings of annealing on a plateau; flair's defaults are those of its `train`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlateauOptions {
    /// What the rate is multiplied by.
    pub factor: f64,
    /// Evaluations without gain that are borne.
    pub patience: u64,
    /// As many more before the first time.
    pub extra_patience: u64,
    /// The run ends when the rate falls below.
    pub min_lr: f64,
}

/// Where annealing on a plateau stands. Source: PyTorch's `ReduceLROnPlateau`, and flair's `AnnealOnPlateau`, in which the loss decides
/// between equal scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    /// What the rate has been multiplied by so far.
    pub rate: f64,
    /// Evaluations since the last gain or the last fall of the rate.
    pub bad: u64,
    best: Option<f64>,
    best_loss: Option<f64>,
    has_fallen: bool,
}

impl Default for Plateau {
    /// At the start of a run.
    fn default() -> Plateau {
        Plateau { rate: 1.0, bad: 0, best: None, best_loss: None, has_fallen: false }
    }
}

impl Plateau {
    /// Takes an evaluation in: a score, of which more is better, and a loss. Whether the rate fell.
    pub fn evaluated(&mut self, o: &PlateauOptions, score: f64, loss: Option<f64>) -> bool {
        let is_better = match self.best {
            None => true,
            Some(best) => {
                let less = loss.zip(self.best_loss).is_some_and(|(loss, best)| loss < best);
                score > best || (score == best && less)
            }
        };
        if is_better {
            (self.best, self.best_loss, self.bad) = (Some(score), loss, 0);
            return false;
        }
        self.bad += 1;
        if self.bad <= o.patience + if self.has_fallen { 0 } else { o.extra_patience } {
            return false;
        }
        (self.rate, self.bad, self.has_fallen) = (self.rate * o.factor, 0, true);
        true
    }

    /// Takes the next evaluation for the first: it is of another measure. The rate stays as it has fallen.
    pub fn forget_scores(&mut self) {
        (self.best, self.best_loss, self.bad) = (None, None, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        optim: OptimOptions,
    }

    fn rates(flags: &str, updates: &[u64]) -> Vec<f64> {
        let o = Flags::parse_from(["test"].into_iter().chain(flags.split(' '))).optim;
        o.check().unwrap();
        updates.iter().map(|&u| learning_rate(&o, u)).collect()
    }

    fn close(found: &[f64], wanted: &[f64]) {
        assert_eq!(found.len(), wanted.len());
        let near = found.iter().zip(wanted).all(|(f, w)| (f - w).abs() < 1e-14);
        assert!(near, "{found:?}, not {wanted:?}");
    }

    #[test]
    fn linear_rises_and_falls() {
        let flags = "--scheduler linear --lr 2 --warmup-steps 4 --total-steps 12";
        close(&rates(flags, &[0, 1, 4, 8, 11, 12, 40]), &[0.0, 0.5, 2.0, 1.0, 0.25, 0.0, 0.0]);
        close(&rates(&format!("{flags} --fixed-lr"), &[3, 4, 11]), &[1.5, 2.0, 2.0]);
        close(&rates("--scheduler fixed --lr 2 --warmup-steps 4", &[0, 9_999]), &[2.0, 2.0]);
    }

    #[test]
    fn cosine_rises_and_falls() {
        let flags = "--scheduler cosine --lr 2 --warmup-steps 4 --total-steps 99 --scheduler-steps 16";
        // Twelfths of a half turn: cos of 0, 30, 60, 90, 120 and 180 degrees.
        let want = [0.0, 1.0, 2.0, 1.0 + 0.75f64.sqrt(), 1.5, 1.0, 0.5, 0.0, 0.0];
        close(&rates(flags, &[0, 2, 4, 6, 8, 10, 12, 16, 40]), &want);
        // All warm-up, no fall.
        close(
            &rates("--scheduler cosine --lr 2 --warmup-steps 4 --total-steps 4", &[3, 4, 5]),
            &[1.5, 2.0, 0.0],
        );
    }

    #[test]
    fn a_plateau_lets_the_rate_fall() {
        let o = PlateauOptions { factor: 0.5, patience: 1, extra_patience: 1, min_lr: 0.0 };
        let mut plateau = Plateau::default();
        let mut falls = |evaluations: &[(f64, f64)]| -> Vec<bool> {
            evaluations.iter().map(|&(score, loss)| plateau.evaluated(&o, score, Some(loss))).collect()
        };
        // Two without gain are borne once more than later; an equal score with less loss is a gain.
        assert_eq!(falls(&[(0.5, 1.0), (0.4, 0.1), (0.5, 1.0), (0.5, 1.1)]), [false, false, false, true]);
        assert_eq!(falls(&[(0.5, 0.9), (0.5, 0.9), (0.5, 2.0)]), [false, false, true]);
        assert_eq!(falls(&[(0.6, 3.0)]), [false]);
        assert_eq!(falls(&[(0.5, 9.0)]), [false]);
        assert_eq!((plateau.rate, plateau.bad), (0.25, 1));
        // Of another measure: worse than all before, and the first.
        plateau.forget_scores();
        assert_eq!((plateau.rate, plateau.bad), (0.25, 0));
        assert!(!plateau.evaluated(&o, 0.1, None) && plateau.bad == 0);
    }

    #[test]
    fn a_cosine_that_is_held_is_refused() {
        let words = ["test", "--scheduler", "cosine", "--fixed-lr"];
        let said = Flags::parse_from(words).optim.check().unwrap_err();
        assert!(said.contains("--scheduler linear"), "{said}");
    }
}
