//! Where the time of an update goes: spans of data, computing, waiting for other ranks, and the optimizer.

use std::time::Instant;

/// What a rank was at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reading and encoding examples.
    Data,
    /// Forward and backward.
    Compute,
    /// Waiting for other ranks, for their work or for their bytes.
    Waiting,
    /// Clipping and the optimizer's step.
    Optimizer,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Data, Kind::Compute, Kind::Waiting, Kind::Optimizer];
    /// Its name in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Data => "data",
            Kind::Compute => "forward_backward",
            Kind::Waiting => "waiting",
            Kind::Optimizer => "optimizer",
        }
    }
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// What it was.
    pub kind: Kind,
    /// Begin and end.
    pub at: (Instant, Instant),
}

/// The spans of one update, in their order.
#[derive(Clone, Debug, Default)]
pub struct Spans(pub Vec<Span>);

impl Spans {
    /// Runs `work` as a span.
    pub fn of<T>(&mut self, kind: Kind, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(Span { kind, at: (start, Instant::now()) });
        result
    }
    /// Seconds of all spans of a kind.
    pub fn seconds(&self, kind: Kind) -> f64 {
        let of_kind = self.0.iter().filter(|s| s.kind == kind);
        of_kind.map(|s| s.at.1.duration_since(s.at.0).as_secs_f64()).sum()
    }
}
