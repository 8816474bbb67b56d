//! The error of a run that can get no more memory: what takes it, the largest part first, and which flags take less.

use std::fmt;

use tercio_engine::memory::{OutOfMemory, caught, human};

use crate::error::TrainError;

/// A part of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// More about it, in brackets; empty: nothing.
    pub note: String,
    /// Flags that make it smaller, as they would be given.
    pub flags: Vec<String>,
}

/// Why work ended for lack of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    doing: String,
    out: OutOfMemory,
    parts: Vec<Part>,
}

impl Shortage {
    /// The lack of memory `out` while `doing` something (`in update 3`). What the device's buffers held beside `known` parts
    /// was `rest`, whose bytes are filled in here.
    pub fn new(doing: String, out: OutOfMemory, known: Vec<Part>, rest: Part) -> Shortage {
        let sum = known.iter().map(|part| part.bytes).sum();
        let bytes = out.used.saturating_sub(sum);
        let most = out.peak.saturating_sub(sum);
        let note = if most > bytes { format!("{} at most", human(most)) } else { rest.note.clone() };
        let mut parts = known;
        parts.push(Part { bytes, note, ..rest });
        // What was asked for is mostly of the rest, which cannot be small then.
        let size = |part: &Part| part.bytes + if part.name == rest.name { out.asked } else { 0 };
        parts.sort_by_key(|part| std::cmp::Reverse(size(part)));
        Shortage { doing, out, parts }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory {}: {} more were needed, ", self.doing, human(self.out.asked))?;
        match self.out.room {
            Some(room) => write!(f, "{} can be had", human(room))?,
            None => write!(f, "the system has none")?,
        }
        let shown = self.parts.iter().filter(|part| part.bytes > 0);
        let part = |part: &Part| {
            let note = if part.note.is_empty() { String::new() } else { format!(" ({})", part.note) };
            format!("{} {}{note}", part.name, human(part.bytes))
        };
        let taken: Vec<String> = shown.map(part).collect();
        if !taken.is_empty() {
            write!(f, ". Taken by {}", taken.join(", "))?;
        }
        let flags: Vec<&str> = self.parts.iter().flat_map(|p| &p.flags).map(String::as_str).collect();
        if !flags.is_empty() {
            write!(f, ". What takes less, the most promising first: {}", flags.join(", "))?;
        }
        Ok(())
    }
}

/// Does work outside of updates and answers, where what is taken are the values of a model and all that belongs to them.
///
/// # Errors
/// What the work returns; [`TrainError::OutOfMemory`], with `flags` as what takes less.
pub fn guarded<T>(
    doing: &str,
    flags: &[&str],
    work: impl FnOnce() -> Result<T, TrainError>,
) -> Result<T, TrainError> {
    caught(work).unwrap_or_else(|out| {
        let flags = flags.iter().map(|flag| flag.to_string()).collect();
        let rest = Part { name: "values", bytes: 0, note: String::new(), flags };
        Err(TrainError::OutOfMemory(Box::new(Shortage::new(doing.to_owned(), out, Vec::new(), rest))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn part(name: &'static str, mib: u64, flags: &[&str]) -> Part {
        let flags = flags.iter().map(|flag| flag.to_string()).collect();
        Part { name, bytes: mib * MIB, note: String::new(), flags }
    }

    #[test]
    fn the_largest_part_and_its_flags_come_first() {
        let out = OutOfMemory { asked: 8 * MIB, room: Some(3 * MIB), used: 70 * MIB, peak: 75 * MIB };
        let known = vec![part("parameters", 10, &[]), part("moments", 20, &["--b"])];
        let shortage =
            Shortage::new("in update 3".into(), out, known.clone(), part("activations", 0, &["--a", "--c"]));
        assert_eq!(
            shortage.to_string(),
            "out of memory in update 3: 8.0 MiB more were needed, 3.0 MiB can be had. Taken by activations 40.0 MiB (45.0 MiB at \
             most), moments 20.0 MiB, parameters 10.0 MiB. What takes less, the most promising first: --a, --c, --b"
        );
        let out = OutOfMemory { asked: 8 * MIB, room: None, used: 0, peak: 0 };
        let shortage = Shortage::new("here".into(), out, known, part("activations", 0, &["--a"]));
        assert_eq!(
            shortage.to_string(),
            "out of memory here: 8.0 MiB more were needed, the system has none. Taken by moments 20.0 MiB, parameters 10.0 MiB. \
             What takes less, the most promising first: --b, --a"
        );
    }

    #[test]
    fn other_work_is_guarded_too() {
        let out = OutOfMemory { asked: 8 * MIB, room: Some(0), used: 70 * MIB, peak: 75 * MIB };
        let error =
            guarded("while the model was read", &["a smaller model"], || -> Result<(), _> { out.raise() });
        let said = error.unwrap_err().to_string();
        assert!(said.starts_with("out of memory while the model was read: 8.0 MiB"), "{said}");
        assert!(
            said.contains("values 70.0 MiB (75.0 MiB at most)") && said.ends_with("first: a smaller model"),
            "{said}"
        );
        assert_eq!(guarded("here", &[], || Ok(7)).unwrap(), 7);
    }
}
