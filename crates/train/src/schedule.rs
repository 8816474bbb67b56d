//! The course of the learning rate over updates.

use crate::options::{OptimOptions, Scheduler};

/// Learning rate of update `u`, counted from 0.
///
/// `linear`: `u / warmup` up to the warm-up (the first update has rate 0), then
/// `1 - (u - warmup) / (scheduler_steps - warmup)` down to 0, or 1 with `fixed_lr`. Source: FiD's schedules.
pub fn learning_rate(o: &OptimOptions, u: u64) -> f64 {
    let factor = match o.scheduler {
        Scheduler::Fixed => 1.0,
        Scheduler::Linear if u < o.warmup_steps => u as f64 / o.warmup_steps as f64,
        Scheduler::Linear if o.fixed_lr => 1.0,
        Scheduler::Linear => {
            let end = o.scheduler_steps.unwrap_or(o.total_steps);
            let span = end.saturating_sub(o.warmup_steps).max(1) as f64;
            (1.0 - (u - o.warmup_steps) as f64 / span).max(0.0)
        }
    };
    o.lr * factor
}
