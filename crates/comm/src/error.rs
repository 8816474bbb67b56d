//! What goes wrong between ranks, said with rank, host and update.

/// An error of the ranks' work together. Every one ends the process; none can be waited out.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// Another rank gives no sign of life any more, or its connection ended.
    #[error("rank {rank} on host {host} was lost {when}: {what}")]
    Lost {
        /// The lost rank.
        rank: usize,
        /// Where it ran.
        host: String,
        /// "at update 17", or "before the first update".
        when: String,
        /// What was seen: "its connection was closed", "no sign of life for 30 s".
        what: String,
    },
    /// Another rank ended with an error of its own.
    #[error("rank {rank} on host {host} failed {when}: {what}")]
    Failed {
        /// The rank.
        rank: usize,
        /// Where it ran.
        host: String,
        /// "at update 17", or "before the first update".
        when: String,
        /// Its own error.
        what: String,
    },
    /// A rank lives but does not come to what the others wait in.
    #[error("{0}")]
    Timeout(String),
    /// The environment or the settings do not say where this process stands.
    #[error("{0}")]
    Place(String),
    /// The ranks did not find each other.
    #[error("{0}")]
    Rendezvous(String),
    /// This process was asked to end before the ranks had met ([`crate::World::join_unless`]); nothing is lost.
    #[error("{0}")]
    Stopped(String),
    /// A rank sent what it should not: versions differ, or ranks are not in step.
    #[error("{0}")]
    Protocol(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Its answer.
        source: std::io::Error,
    },
}
