//! What may be set of the ranks' work together. None of it reaches a result; all of it may change on resume.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::CommError;

/// Which way bytes go between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Shared memory where all ranks are on one host and really share it, else TCP.
    #[default]
    Auto,
    /// Shared memory; all ranks are on one host.
    Local,
    /// TCP.
    Tcp,
    /// MPI's point-to-point messages; needs the cargo feature `mpi`.
    Mpi,
}

impl Backend {
    /// Its name as a setting.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Local => "local",
            Backend::Tcp => "tcp",
            Backend::Mpi => "mpi",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for Backend {
    type Err = CommError;
    fn from_str(text: &str) -> Result<Backend, CommError> {
        [Backend::Auto, Backend::Local, Backend::Tcp, Backend::Mpi]
            .into_iter()
            .find(|b| b.name() == text)
            .ok_or_else(|| {
                CommError::Place(format!("the backend {text:?} is not known: use auto, local, tcp or mpi"))
            })
    }
}

/// The settings of [`crate::World::join`].
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Which way bytes go.
    pub backend: Backend,
    /// How long the ranks may take to find each other.
    pub join_timeout: Duration,
    /// Silence after which a rank counts as lost.
    pub lost_after: Duration,
    /// Longest wait within one collective: a rank that lives but hangs is found by it.
    pub collective_timeout: Duration,
    /// Network interface (`eth0`) or own address (`10.0.0.5`) for the data between ranks; none: what the route to rank 0 says.
    pub interface: Option<String>,
}

impl Default for Settings {
    /// `auto`; 300 s to join, 30 s of silence, 1800 s in a collective.
    fn default() -> Settings {
        Settings {
            backend: Backend::Auto,
            join_timeout: Duration::from_secs(300),
            lost_after: Duration::from_secs(30),
            collective_timeout: Duration::from_secs(1800),
            interface: None,
        }
    }
}
