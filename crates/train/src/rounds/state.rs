//! What is known of a stage's work: of which inputs it is, whether it is finished, and what came out, by content.
//!
//! ```text
//! LOOP/round-1/reader.begun.json   the inputs of the work in the folder, written before it begins
//! LOOP/round-1/reader.json         inputs, results by content, figures: the stage is finished once this is there
//! LOOP/round-1/reader/             the work
//! LOOP/hashes.json                 SHA-256 of files by size and time of change, so that large ones are read once
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use super::stage::Stage;
use crate::error::TrainError;
use crate::run::{hex, write_atomic};

/// The form of the files of states.
const FORMAT: u32 = 1;
/// Larger ones are not ours.
const MAX_BYTES: u64 = 64 << 20;

/// What a stage is made of: names of settings, files and earlier stages, each with its value or fingerprint.
pub type Inputs = BTreeMap<String, String>;

/// A finished stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    format: u32,
    /// What it was made of.
    pub inputs: Inputs,
    /// Its results: files (below the stage's folder) and their SHA-256.
    pub results: BTreeMap<String, String>,
    /// Figures to show.
    pub figures: serde_json::Map<String, serde_json::Value>,
    /// Seconds of work, those of earlier starts included as far as they are known.
    pub seconds: f64,
}

#[derive(Serialize, Deserialize)]
struct Begun {
    format: u32,
    inputs: Inputs,
    seconds: f64,
}

/// How a stage stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// Its results are those of its inputs.
    UpToDate(Box<Done>),
    /// There is nothing yet.
    Missing,
    /// Work on these inputs was begun; it can go on.
    Begun,
    /// What is there is of other inputs: the name of the first that differs.
    Outdated(String),
}

/// The states of a loop's folder.
#[derive(Debug)]
pub struct States {
    dir: PathBuf,
    hashes: BTreeMap<PathBuf, Known>,
    changed: bool,
}

/// A file that was read before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    bytes: u64,
    nanoseconds: u64,
    sha256: String,
}

impl States {
    /// Of the loop in `dir`, which need not be there yet.
    pub fn of(dir: &Path) -> States {
        let known = read_json(&dir.join("hashes.json")).ok().flatten().unwrap_or_default();
        States { dir: dir.to_owned(), hashes: known, changed: false }
    }

    /// A stage's folder.
    pub fn folder(&self, stage: Stage) -> PathBuf {
        self.dir.join(stage.to_string())
    }

    fn file(&self, stage: Stage, ending: &str) -> PathBuf {
        self.dir.join(format!("{stage}{ending}"))
    }

    /// How a stage stands that is to be made of `inputs`.
    ///
    /// # Errors
    /// A state that cannot be read.
    pub fn standing(&mut self, stage: Stage, inputs: &Inputs) -> Result<Standing, TrainError> {
        let done: Option<Done> = read_json(&self.file(stage, ".json"))?;
        if let Some(done) = done {
            if let Some(name) = difference(&done.inputs, inputs) {
                return Ok(Standing::Outdated(name));
            }
            for (name, sum) in &done.results {
                let path = self.folder(stage).join(name);
                match path.is_file() {
                    true if self.hash(&path)? == *sum => {}
                    true => return Ok(Standing::Outdated(format!("{name} was changed"))),
                    false => return Ok(Standing::Outdated(format!("{name} is gone"))),
                }
            }
            return Ok(Standing::UpToDate(Box::new(done)));
        }
        let begun: Option<Begun> = read_json(&self.file(stage, ".begun.json"))?;
        Ok(match begun {
            None if self.folder(stage).exists() => Standing::Outdated("nothing says what it is of".into()),
            None => Standing::Missing,
            Some(begun) => difference(&begun.inputs, inputs).map_or(Standing::Begun, Standing::Outdated),
        })
    }

    /// Makes the folder ready for work on `inputs`: what is of others goes, what is of these stays, to go on with. Several
    /// processes may do so at once.
    ///
    /// # Errors
    /// Files that cannot be changed; a folder that is none of a stage's.
    pub fn begin(&mut self, stage: Stage, inputs: &Inputs) -> Result<(), TrainError> {
        let folder = self.folder(stage);
        let above = folder.parent().unwrap_or(&self.dir);
        fs::create_dir_all(above).map_err(write_error(above))?;
        let lock = self.file(stage, ".lock");
        let lock = File::create(&lock).map_err(write_error(&lock))?;
        // Where a file system knows no locks there is none: one process at a time is the rule anyway.
        let _ = rustix::fs::flock(&lock, FlockOperation::LockExclusive);
        if matches!(self.standing(stage, inputs)?, Standing::Begun | Standing::UpToDate(_)) {
            return Ok(());
        }
        let (begun, done) = (self.file(stage, ".begun.json"), self.file(stage, ".json"));
        if folder.exists() && !begun.exists() && !done.exists() {
            return Err(TrainError::Unusable(format!(
                "{}: the folder is there, but nothing says what it is of; move it away, or give the loop another folder",
                folder.display()
            )));
        }
        // The state first: work without one is never believed.
        remove(&done)?;
        // Of nothing from here on, until the folder is gone.
        let nothing = Begun { format: FORMAT, inputs: Inputs::new(), seconds: 0.0 };
        write_json(&begun, &nothing)?;
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(write_error(&folder))?;
        }
        fs::create_dir_all(&folder).map_err(write_error(&folder))?;
        write_json(&begun, &Begun { inputs: inputs.clone(), ..nothing })
    }

    /// Notes that `seconds` more were spent on a stage that is not finished.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn spent(&self, stage: Stage, seconds: f64) -> Result<(), TrainError> {
        let path = self.file(stage, ".begun.json");
        match read_json::<Begun>(&path)? {
            Some(begun) => write_json(&path, &Begun { seconds: begun.seconds + seconds, ..begun }),
            None => Ok(()),
        }
    }

    /// Writes that a stage is finished; `results` are files below its folder.
    ///
    /// # Errors
    /// A result that is not there, or the state cannot be written.
    pub fn finish(
        &mut self,
        stage: Stage,
        inputs: Inputs,
        results: &[PathBuf],
        figures: serde_json::Map<String, serde_json::Value>,
        seconds: f64,
    ) -> Result<Done, TrainError> {
        let folder = self.folder(stage);
        let mut sums = BTreeMap::new();
        for path in results {
            let name = path.strip_prefix(&folder).map_err(|_| {
                TrainError::Unusable(format!("{}: a result outside of {}", path.display(), folder.display()))
            })?;
            sums.insert(name.to_string_lossy().into_owned(), self.hash(path)?);
        }
        let before = read_json::<Begun>(&self.file(stage, ".begun.json"))?.map_or(0.0, |b| b.seconds);
        let seconds = ((before + seconds) * 10.0).round() / 10.0;
        let done = Done { format: FORMAT, inputs, results: sums, figures, seconds };
        write_json(&self.file(stage, ".json"), &done)?;
        self.save()?;
        Ok(done)
    }

    /// SHA-256 of a file's content. One of the same size and time of change is not read again.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn hash(&mut self, path: &Path) -> Result<String, TrainError> {
        let read = |source| TrainError::Read { path: path.display().to_string(), source };
        let absolute = std::path::absolute(path).map_err(read)?;
        let mut file = File::open(path).map_err(read)?;
        let meta = file.metadata().map_err(read)?;
        let changed = meta.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let nanoseconds = changed.map_or(0, |d| d.as_nanos() as u64);
        if let Some(known) = self.hashes.get(&absolute)
            && (known.bytes, known.nanoseconds) == (meta.len(), nanoseconds)
        {
            return Ok(known.sha256.clone());
        }
        let mut sum = Sha256::new();
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece).map_err(read)? {
                0 => break,
                n => sum.update(&piece[..n]),
            }
        }
        let sha256 = hex(&sum.finalize());
        let known = Known { bytes: meta.len(), nanoseconds, sha256: sha256.clone() };
        self.hashes.insert(absolute, known);
        self.changed = true;
        Ok(sha256)
    }

    /// Keeps what was read for the next start.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&mut self) -> Result<(), TrainError> {
        if self.changed && self.dir.is_dir() {
            write_json(&self.dir.join("hashes.json"), &self.hashes)?;
            self.changed = false;
        }
        Ok(())
    }
}

/// SHA-256 of bytes.
pub fn sum_of_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of texts with names.
pub fn sum_of(texts: impl IntoIterator<Item = (String, String)>) -> String {
    let mut sum = Sha256::new();
    for (name, text) in texts {
        for part in [name, text] {
            sum.update((part.len() as u64).to_le_bytes());
            sum.update(part.as_bytes());
        }
    }
    hex(&sum.finalize())
}

/// The first input that differs, in words.
fn difference(before: &Inputs, now: &Inputs) -> Option<String> {
    let names: std::collections::BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let name = names.into_iter().find(|name| before.get(*name) != now.get(*name))?;
    // Settings are short and worth reading, fingerprints are not.
    let short = |value: Option<&String>| match value {
        None => Some("not there".to_owned()),
        Some(value) if value.len() <= 40 => Some(value.clone()),
        Some(_) => None,
    };
    Some(match (short(before.get(name)), short(now.get(name))) {
        (Some(before), Some(now)) => format!("{name} was {before}, is {now}"),
        _ => format!("{name} changed"),
    })
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TrainError> {
    let read = |source| TrainError::Read { path: path.display().to_string(), source };
    let file = match File::open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(read)?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(read)?;
    serde_json::from_slice(&bytes).map(Some).map_err(|e| {
        TrainError::Unusable(format!(
            "{}: expected what a loop notes of a stage, found a fault: {e}; remove the file to do the stage anew",
            path.display()
        ))
    })
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), TrainError> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain JSON");
    bytes.push(b'\n');
    Ok(write_atomic(path, &bytes)?)
}

fn remove(path: &Path) -> Result<(), TrainError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(write_error(path)(e)),
        _ => Ok(()),
    }
}

fn write_error(path: &Path) -> impl Fn(std::io::Error) -> TrainError {
    let path = path.display().to_string();
    move |source| TrainError::Write { path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::super::stage::Step;
    use super::*;

    const STAGE: Stage = Stage { part: super::super::stage::Part::Round(1), step: Step::Scores };

    fn inputs(a: &str) -> Inputs {
        Inputs::from([("a".into(), a.into()), ("b".into(), "same".into())])
    }

    #[test]
    fn work_is_believed_of_its_own_inputs_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut states = States::of(dir.path());
        assert_eq!(states.standing(STAGE, &inputs("1")).unwrap(), Standing::Missing);
        states.begin(STAGE, &inputs("1")).unwrap();
        assert_eq!(states.standing(STAGE, &inputs("1")).unwrap(), Standing::Begun);
        let result = states.folder(STAGE).join("out/x.json");
        fs::create_dir_all(result.parent().unwrap()).unwrap();
        fs::write(&result, "one").unwrap();
        states.begin(STAGE, &inputs("1")).unwrap();
        assert!(result.exists(), "work on the same inputs goes on");
        states.spent(STAGE, 1.5).unwrap();
        let figures = serde_json::Map::from_iter([("n".to_owned(), 1.into())]);
        let done = states.finish(STAGE, inputs("1"), std::slice::from_ref(&result), figures, 2.0).unwrap();
        assert_eq!(done.seconds, 3.5);
        let mut states = States::of(dir.path());
        assert_eq!(states.standing(STAGE, &inputs("1")).unwrap(), Standing::UpToDate(Box::new(done)));
        let outdated = states.standing(STAGE, &inputs("2")).unwrap();
        assert_eq!(outdated, Standing::Outdated("a was 1, is 2".into()));
        fs::write(&result, "another").unwrap();
        let outdated = states.standing(STAGE, &inputs("1")).unwrap();
        assert_eq!(outdated, Standing::Outdated("out/x.json was changed".into()));
        fs::remove_file(&result).unwrap();
        let outdated = states.standing(STAGE, &inputs("1")).unwrap();
        assert_eq!(outdated, Standing::Outdated("out/x.json is gone".into()));
        fs::write(&result, "one").unwrap();
        states.begin(STAGE, &inputs("2")).unwrap();
        assert!(!result.exists() && states.folder(STAGE).is_dir(), "work on other inputs is gone");
        assert_eq!(states.standing(STAGE, &inputs("2")).unwrap(), Standing::Begun);
    }

    #[test]
    fn folders_of_others_and_broken_states_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut states = States::of(dir.path());
        fs::create_dir_all(states.folder(STAGE)).unwrap();
        let error = states.begin(STAGE, &inputs("1")).unwrap_err().to_string();
        assert!(error.contains("nothing says what it is of; move it away"), "{error}");
        fs::write(dir.path().join("round-1/scores.json"), "{").unwrap();
        let error = states.standing(STAGE, &inputs("1")).unwrap_err().to_string();
        assert!(error.contains("scores.json: expected what a loop notes of a stage"), "{error}");
    }

    #[test]
    fn files_are_read_again_where_they_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut states, file) = (States::of(dir.path()), dir.path().join("x"));
        fs::write(&file, "one").unwrap();
        let one = states.hash(&file).unwrap();
        states.save().unwrap();
        fs::write(&file, "longer").unwrap();
        let two = States::of(dir.path()).hash(&file).unwrap();
        assert_ne!(one, two);
        // The note is used: a wrong one would be believed.
        let path = dir.path().join("hashes.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&file, "one").unwrap();
        let mut states = States::of(dir.path());
        states.hash(&file).unwrap();
        states.save().unwrap();
        let text = fs::read_to_string(&path).unwrap_or(text).replace(&one, "noted");
        fs::write(&path, text).unwrap();
        assert_eq!(States::of(dir.path()).hash(&file).unwrap(), "noted");
    }
}
