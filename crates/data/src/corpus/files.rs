//! Which files of a folder are train, dev and test, by their names: flair's rule.

use std::path::{Path, PathBuf};

use crate::error::DataError;

/// The files, or folders with a folder per label, of a corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorpusFiles {
    /// What is learnt from.
    pub train: PathBuf,
    /// What choices rest on.
    pub dev: Option<PathBuf>,
    /// What is measured at the end.
    pub test: Option<PathBuf>,
}

/// What the parts are called; of two rules that fit a name the earlier one counts.
const RULES: [(&str, usize); 6] =
    [("train", 0), ("dev", 1), ("testa", 1), ("valid", 1), ("testb", 2), ("test", 2)];
const PARTS: [&str; 3] = ["train", "dev", "test"];

impl CorpusFiles {
    /// Finds them in a folder: a name with `train` in it; with `dev`, `testa` or `valid`; with `testb`, or `test`. Hidden files are passed over, and
    /// so is a name without any of these. Of the folder's own folders, those count that are called so.
    ///
    /// # Errors
    /// No train, two candidates for a part, a folder that cannot be read.
    pub fn find(dir: &Path) -> Result<CorpusFiles, DataError> {
        let mut found: [Option<PathBuf>; 3] = Default::default();
        let entries = std::fs::read_dir(dir).map_err(DataError::io(dir, "read the folder"))?;
        let mut names = entries
            .map(|entry| entry.map(|e| e.file_name()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(DataError::io(dir, "read the folder"))?;
        names.sort_unstable();
        for name in names {
            let lower = name.to_string_lossy().to_lowercase();
            if lower.starts_with('.') || lower.ends_with(".swp") {
                continue;
            }
            let Some((_, part)) = RULES.into_iter().find(|(rule, _)| lower.contains(rule)) else { continue };
            if let Some(first) = &found[part] {
                return Err(DataError::file(
                    dir,
                    format!(
                        "expected one file for {}, found {} and {}; name the files one by one",
                        PARTS[part],
                        first.file_name().unwrap_or_default().display(),
                        name.display()
                    ),
                ));
            }
            found[part] = Some(dir.join(name));
        }
        let [train, dev, test] = found;
        match train {
            Some(train) => Ok(CorpusFiles { train, dev, test }),
            None => Err(DataError::file(
                dir,
                "expected a file or a folder with `train` in its name, found none; name the files one by one",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(names: &[&str]) -> Result<CorpusFiles, String> {
        let dir = tempfile::tempdir().unwrap();
        names.iter().for_each(|name| std::fs::write(dir.path().join(name), "x").unwrap());
        let files = CorpusFiles::find(dir.path()).map_err(|e| e.to_string())?;
        let base = |path: PathBuf| PathBuf::from(path.file_name().unwrap());
        let (dev, test) = (files.dev.map(base), files.test.map(base));
        Ok(CorpusFiles { train: base(files.train), dev, test })
    }

    #[test]
    fn parts_are_known_by_their_names() {
        let files = |train: &str, dev: Option<&str>, test: Option<&str>| CorpusFiles {
            train: train.into(),
            dev: dev.map(PathBuf::from),
            test: test.map(PathBuf::from),
        };
        let all = find(&["README", "TRAIN.txt", "dev.txt", "test.txt", ".train.swp"]).unwrap();
        assert_eq!(all, files("TRAIN.txt", Some("dev.txt"), Some("test.txt")));
        let conll = find(&["eng.train.txt", "eng.testa.txt", "eng.testb.txt"]).unwrap();
        assert_eq!(conll, files("eng.train.txt", Some("eng.testa.txt"), Some("eng.testb.txt")));
        assert_eq!(find(&["train.csv"]).unwrap(), files("train.csv", None, None));
        let twice = find(&["train.csv", "train2.csv"]).unwrap_err();
        assert!(twice.contains("one file for train, found train.csv and train2.csv"), "{twice}");
        assert!(find(&["dev.txt"]).unwrap_err().contains("`train` in its name"));
    }
}
