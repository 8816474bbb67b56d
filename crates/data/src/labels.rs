//! The labels of a classifier: their names in order, and how often each occurred.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::index::hex;

/// No classifier has as many labels; a file that has is one whose column of labels is another one.
pub const MOST_LABELS: usize = 1 << 20;

/// Names of labels, numbered from 0 in the order of their first appearance (or as a model's configuration has them).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    names: Vec<String>,
    counts: Vec<u64>,
    ids: HashMap<String, u32>,
}

impl Labels {
    /// No labels yet.
    pub fn new() -> Labels {
        Labels::default()
    }

    /// Labels in this order, counted 0 times each.
    ///
    /// # Errors
    /// An empty name, one that comes twice, more than [`MOST_LABELS`].
    pub fn from_names(names: Vec<String>) -> Result<Labels, DataError> {
        let mut labels = Labels::new();
        for name in names {
            if name.is_empty() || labels.id(&name).is_some() {
                return Err(DataError::Setting(format!(
                    "labels: expected names that are not empty and differ, found {name:?}{}",
                    if name.is_empty() { "" } else { " twice" }
                )));
            }
            labels.number(&name)?;
        }
        Ok(labels)
    }

    /// Counts an occurrence, of a new label as of a known one; gives its number.
    ///
    /// # Errors
    /// More labels than [`MOST_LABELS`].
    pub fn count(&mut self, name: &str) -> Result<u32, DataError> {
        let id = match self.id(name) {
            Some(id) => id,
            None => self.number(name)?,
        };
        self.counts[id as usize] += 1;
        Ok(id)
    }

    fn number(&mut self, name: &str) -> Result<u32, DataError> {
        if self.len() == MOST_LABELS {
            return Err(DataError::Setting(format!(
                "labels: expected at most {MOST_LABELS} different ones, found more, {name:?} among them; is the column of labels the right one?"
            )));
        }
        let id = self.len() as u32;
        self.names.push(name.to_owned());
        self.counts.push(0);
        self.ids.insert(name.to_owned(), id);
        Ok(id)
    }

    /// The number of a label; `None` if it is not known.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// The name of a number below [`Labels::len`].
    pub fn name(&self, id: u32) -> &str {
        &self.names[id as usize]
    }

    /// All names, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// How often each occurred, in order.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// SHA-256 of the names in their order, as 64 hexadecimal digits: two models with the same give a number the same meaning.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        for name in &self.names {
            // With its length, so that no two lists run together into the same bytes.
            sum.update((name.len() as u64).to_le_bytes());
            sum.update(name);
        }
        hex(&sum.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_numbered_as_they_come() {
        let mut labels = Labels::new();
        let ids: Vec<u32> = ["b", "a", "b", "c", "a", "b"].iter().map(|l| labels.count(l).unwrap()).collect();
        assert_eq!(ids, [0, 1, 0, 2, 1, 0]);
        assert_eq!(
            (labels.names(), labels.counts()),
            (&["b", "a", "c"].map(String::from)[..], &[3, 2, 1][..])
        );
        assert_eq!((labels.id("c"), labels.id("d"), labels.name(1), labels.len()), (Some(2), None, "a", 3));
    }

    #[test]
    fn a_fingerprint_is_of_names_and_order() {
        let of = |names: &[&str]| {
            Labels::from_names(names.iter().map(|n| n.to_string()).collect()).unwrap().fingerprint()
        };
        assert_eq!(of(&["a", "b"]), of(&["a", "b"]));
        assert_ne!(of(&["a", "b"]), of(&["b", "a"]));
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        let many = (0..=MOST_LABELS).map(|i| i.to_string()).collect();
        assert!(Labels::from_names(many).unwrap_err().to_string().contains("the right one?"));
        let twice = Labels::from_names(vec!["a".into(), "a".into()]).unwrap_err().to_string();
        assert!(twice.contains("\"a\" twice"), "{twice}");
        assert!(Labels::from_names(vec![String::new()]).is_err());
    }
}
