//! `tercio doctor`: whether ranks can work here, what will hold them up, and what to change.
//!
//! [`host_findings`] looks at one host; [`examine`] joins the ranks, gathers what each host found, and measures what lies
//! between them.

mod host;
mod ranks;

use std::fmt;

pub use host::{Limits, host_findings};
pub use ranks::examine;

use crate::control::message::{Take, put_bytes};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grade {
    /// As it should be.
    Ok,
    /// Works, but slower or with less room than it might.
    Warn,
    /// Runs will fail.
    Bad,
}

impl Grade {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Grade::Ok => "ok",
            Grade::Warn => "warn",
            Grade::Bad => "bad",
        }
    }
}

/// What was looked at, and what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at: "names", "ports", "clock", ...
    pub topic: String,
    /// How bad it is.
    pub grade: Grade,
    /// What was seen.
    pub what: String,
    /// What to change; empty where all is well.
    pub advice: String,
    /// Hosts that say so; empty where it is about all ranks.
    pub hosts: Vec<String>,
}

impl Finding {
    /// What was found, and what to change.
    pub fn new(topic: &str, grade: Grade, what: impl Into<String>, advice: &str) -> Finding {
        let advice = advice.to_owned();
        Finding { topic: topic.into(), grade, what: what.into(), advice, hosts: Vec::new() }
    }

    /// What is as it should be.
    pub fn ok(topic: &str, what: impl Into<String>) -> Finding {
        Finding::new(topic, Grade::Ok, what, "")
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<4}  {}: {}", self.grade.name(), self.topic, self.what)?;
        match self.hosts.as_slice() {
            [] => {}
            [first] => write!(f, " [{first}]")?,
            [first, .., last] => write!(f, " [{} hosts, {first} to {last}]", self.hosts.len())?,
        }
        if !self.advice.is_empty() {
            write!(f, "\n      -> {}", self.advice)?;
        }
        Ok(())
    }
}

/// Findings as bytes for another rank.
fn write(findings: &[Finding]) -> Vec<u8> {
    let mut out = Vec::new();
    for f in findings {
        for text in [&f.topic, f.grade.name(), &f.what, &f.advice] {
            put_bytes(&mut out, text.as_bytes());
        }
    }
    out
}

/// The opposite of [`write`]; what is damaged is left out.
fn read(bytes: &[u8]) -> Vec<Finding> {
    let mut take = Take(bytes);
    let mut next = || {
        let (topic, grade, what, advice) = (take.text()?, take.text()?, take.text()?, take.text()?);
        let grade = [Grade::Ok, Grade::Warn, Grade::Bad].into_iter().find(|g| g.name() == grade)?;
        Some(Finding { topic, grade, what, advice, hosts: Vec::new() })
    };
    std::iter::from_fn(&mut next).collect()
}

/// One finding for all hosts that say the same, in the order of the first of each topic.
fn merge(by_host: Vec<(String, Vec<Finding>)>) -> Vec<Finding> {
    let mut merged: Vec<Finding> = Vec::new();
    for (host, findings) in by_host {
        for mut finding in findings {
            let same = |m: &&mut Finding| {
                (&m.topic, m.grade, &m.what, &m.advice)
                    == (&finding.topic, finding.grade, &finding.what, &finding.advice)
            };
            match merged.iter_mut().find(same) {
                Some(known) => known.hosts.push(host.clone()),
                None => {
                    finding.hosts = vec![host.clone()];
                    // Beside the others of its topic.
                    let at =
                        merged.iter().rposition(|m| m.topic == finding.topic).map_or(merged.len(), |i| i + 1);
                    merged.insert(at, finding);
                }
            }
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_travel_and_are_told_once() {
        let shm = |grade, what: &str| Finding::new("shm", grade, what, "more");
        let a = vec![Finding::ok("names", "fine"), shm(Grade::Bad, "64 MiB")];
        let b = vec![Finding::ok("names", "fine"), shm(Grade::Ok, "2 GiB")];
        assert_eq!(read(&write(&a)), a);
        assert_eq!(read(&write(&a)[..10]), []);
        let merged = merge(vec![("n1".into(), a.clone()), ("n2".into(), b), ("n3".into(), a)]);
        let lines: Vec<String> = merged.iter().map(Finding::to_string).collect();
        assert_eq!(
            lines,
            [
                "ok    names: fine [3 hosts, n1 to n3]",
                "bad   shm: 64 MiB [2 hosts, n1 to n3]\n      -> more",
                "ok    shm: 2 GiB [n2]\n      -> more",
            ]
        );
    }
}
