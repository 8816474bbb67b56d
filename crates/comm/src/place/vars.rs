//! Variables of an environment, read with errors that name them.

use sha2::{Digest, Sha256};

use super::launch::{MEETING, SECRET};
use super::wrong;
use crate::error::CommError;
use crate::secret::hex;

/// An environment.
pub(super) struct Vars<'a>(pub &'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// A variable that is set and not empty.
    pub fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty())
    }

    /// Whether a variable is set and not empty.
    pub fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// A count or a number of a process.
    pub fn number(&self, name: &str) -> Result<Option<usize>, CommError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(wrong(format!("{name} is {text:?}: expected a whole number, 0 or more"))),
        }
    }

    /// A number that `starter` must have set.
    pub fn need(&self, name: &str, starter: &str) -> Result<usize, CommError> {
        self.number(name)?.ok_or_else(|| missing(name, starter))
    }

    /// A text that `starter` must have set.
    pub fn need_text(&self, name: &str, starter: &str) -> Result<String, CommError> {
        self.text(name).ok_or_else(|| missing(name, starter))
    }

    /// A port in a variable that `starter` must have set.
    pub fn need_port(&self, name: &str, starter: &str) -> Result<u16, CommError> {
        let text = self.need_text(name, starter)?;
        match text.parse() {
            Ok(port @ 1..) => Ok(port),
            _ => Err(wrong(format!("{name} is {text:?}: expected a port, 1 to 65535"))),
        }
    }

    /// What the user says about the meeting place, whoever starts the processes.
    pub fn meeting(&self) -> Result<Option<String>, CommError> {
        let Some(text) = self.text(MEETING) else { return Ok(None) };
        match valid_meeting(&text) {
            true => Ok(Some(text)),
            false => Err(wrong(format!(
                "{MEETING} is {text:?}: expected host:port, as in node1:15001 or [fe80::1]:15001"
            ))),
        }
    }

    /// The secret that is set, or else one that follows from `names` of the job.
    pub fn secret(&self, names: &[&str]) -> String {
        self.text(SECRET).unwrap_or_else(|| derived_secret(names))
    }
}

fn missing(name: &str, starter: &str) -> CommError {
    wrong(format!(
        "{name} is not set, although this process seems to be started by {starter}; set it, or unset the others' \
         variables to run alone"
    ))
}

/// Whether a text is `host:port`, an IPv6 address in brackets.
pub(crate) fn valid_meeting(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let bare = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
        !host.is_empty() && !bare && port.parse::<u16>().is_ok_and(|p| p > 0)
    })
}

/// A secret that follows from names of a job: SHA-256 of them, as hexadecimal digits.
pub(crate) fn derived_secret(names: &[&str]) -> String {
    let mut hash = Sha256::new();
    for name in names {
        // The length keeps ("a", "bc") and ("ab", "c") apart.
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
    }
    hex(&hash.finalize())
}

/// A number that follows from a name.
pub(super) fn seed(name: &str) -> u64 {
    let hash = Sha256::digest(name.as_bytes());
    hash.iter().take(8).fold(0, |seed, &b| seed << 8 | u64::from(b))
}
