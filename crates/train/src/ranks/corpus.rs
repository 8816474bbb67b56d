//! The same data on all ranks: compared in whole at the start, and sent by rank 0 to those that have none.

use std::fs::File;
use std::hash::Hasher;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tercio_comm::World;
use tercio_data::{DataError, Documents, Passages, Questions, RetrievalExamples};

use super::start::differs;
use crate::error::TrainError;
use crate::scratch::ScratchFolder;

/// Examples whose hashes are compared together at first.
const BLOCK: usize = 1024;
/// Bytes of a file that are sent at a time.
const PIECE: usize = 4 << 20;

/// A file of examples that every rank opens: what it takes to see whether two of them hold the same.
pub trait ExampleFile: Sized {
    /// Opens a file, with its index in the folder `cache`.
    ///
    /// # Errors
    /// As the kind of file has it.
    fn open(path: &Path, cache: &Path) -> Result<Self, DataError>;
    /// How many examples it has.
    fn len(&self) -> usize;
    /// Whether it has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The file.
    fn path(&self) -> &Path;
    /// SHA-256 of its content, in hexadecimal digits.
    fn fingerprint(&self) -> &str;
    /// An example's content in one form, white space apart.
    ///
    /// # Errors
    /// It is no good example.
    fn content(&self, i: usize) -> Result<String, DataError>;
    /// The line on which an example starts, from 1; `None` where it cannot be read.
    fn line(&self, i: usize) -> Option<u64>;
}

impl ExampleFile for Passages {
    fn open(path: &Path, cache: &Path) -> Result<Self, DataError> {
        Passages::open(path, cache)
    }
    fn len(&self) -> usize {
        self.len()
    }
    fn path(&self) -> &Path {
        self.path()
    }
    fn fingerprint(&self) -> &str {
        self.fingerprint()
    }
    fn content(&self, i: usize) -> Result<String, DataError> {
        let passage = self.get(i)?;
        Ok(serde_json::json!([passage.id, passage.title, passage.text]).to_string())
    }
    fn line(&self, i: usize) -> Option<u64> {
        self.get_placed(i).ok().map(|(_, line)| line)
    }
}

impl ExampleFile for Questions {
    fn open(path: &Path, cache: &Path) -> Result<Self, DataError> {
        Questions::open(path, cache)
    }
    fn len(&self) -> usize {
        self.len()
    }
    fn path(&self) -> &Path {
        self.path()
    }
    fn fingerprint(&self) -> &str {
        self.fingerprint()
    }
    fn content(&self, i: usize) -> Result<String, DataError> {
        Ok(serde_json::Value::Object(self.get_raw(i)?).to_string())
    }
    fn line(&self, i: usize) -> Option<u64> {
        self.get(i).ok().map(|question| question.place.line)
    }
}

impl ExampleFile for Documents {
    fn open(path: &Path, cache: &Path) -> Result<Self, DataError> {
        Documents::open(path, cache)
    }
    fn len(&self) -> usize {
        self.len()
    }
    fn path(&self) -> &Path {
        self.path()
    }
    fn fingerprint(&self) -> &str {
        self.fingerprint()
    }
    fn content(&self, i: usize) -> Result<String, DataError> {
        Ok(one_form(&self.raw(i)?))
    }
    fn line(&self, i: usize) -> Option<u64> {
        self.get(i).ok().map(|document| document.place.line)
    }
}

impl ExampleFile for RetrievalExamples {
    fn open(path: &Path, cache: &Path) -> Result<Self, DataError> {
        RetrievalExamples::open(path, cache)
    }
    fn len(&self) -> usize {
        self.len()
    }
    fn path(&self) -> &Path {
        self.path()
    }
    fn fingerprint(&self) -> &str {
        self.fingerprint()
    }
    fn content(&self, i: usize) -> Result<String, DataError> {
        Ok(one_form(&self.raw(i)?))
    }
    fn line(&self, i: usize) -> Option<u64> {
        self.get(i).ok().map(|example| example.place.line)
    }
}

/// An item of JSON without its white space; of a line of text or fields there is one form only.
fn one_form(bytes: &[u8]) -> String {
    match serde_json::from_slice::<serde_json::Value>(bytes) {
        Ok(item) => item.to_string(),
        Err(_) => String::from_utf8_lossy(bytes).into_owned(),
    }
}

/// Opens a file of examples on every rank and makes sure that all have the same. The index lies in `cache` (rank 0's run
/// folder), or where it is gone with the process. With `broadcast` a rank that has no file of this name gets rank 0's.
///
/// # Errors
/// As [`ExampleFile::open`]; [`TrainError::NotAlike`], on all ranks, names the rank, the file and the first example that
/// differs; a rank was lost.
pub fn open_among<F: ExampleFile>(
    world: &World,
    path: &Path,
    cache: Option<&Path>,
    broadcast: bool,
) -> Result<F, TrainError> {
    // What is open can be read after its name is gone, so that nothing of it outlives the process.
    let scratch = ScratchFolder::new()?;
    let sent = match broadcast && world.size() > 1 {
        true => send_file(world, path, scratch.path())?,
        false => None,
    };
    let examples = match &sent {
        Some(copy) => F::open(copy, scratch.path())?,
        None => F::open(path, cache.unwrap_or(scratch.path()))?,
    };
    compare(world, &examples)?;
    Ok(examples)
}

#[derive(Serialize, Deserialize)]
struct Head {
    name: PathBuf,
    bytes: u64,
}

/// Rank 0's file, in `scratch`, on a rank that has none itself; the ranks that have one take part.
fn send_file(world: &World, path: &Path, scratch: &Path) -> Result<Option<PathBuf>, TrainError> {
    // Rank 0 without a file says so by its own error.
    let lacks = !world.is_main() && !path.exists();
    let all = world.all_gather_bytes(vec![u8::from(lacks)])?;
    if !all.concat().contains(&1) {
        return Ok(None);
    }
    let read = |e| TrainError::Read { path: path.display().to_string(), source: e };
    let mut source = None;
    let mut head = Vec::new();
    if world.is_main() {
        let file = File::open(path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        let name = path.file_name().unwrap_or_default().into();
        head = serde_json::to_vec(&Head { name, bytes }).expect("a name and a number are plain JSON");
        source = Some(file);
        tracing::info!(
            "sending {} to {} ranks that have no copy",
            path.display(),
            all.concat().iter().filter(|&&l| l == 1).count()
        );
    }
    let head = world.broadcast_bytes(0, head)?;
    let head: Head = serde_json::from_slice(&head)
        .map_err(|e| TrainError::Unusable(format!("rank 0 sent no head of a file: {e}")))?;
    let name =
        head.name.file_name().filter(|n| Path::new(n) == head.name).ok_or_else(|| {
            TrainError::Unusable(format!("rank 0 sent the file name {}", head.name.display()))
        })?;
    let copy = scratch.join(name);
    let write = |e| TrainError::Write { path: copy.display().to_string(), source: e };
    let mut target = match lacks {
        true => Some(File::create(&copy).map_err(write)?),
        false => None,
    };
    let mut left = head.bytes;
    while left > 0 {
        let mut piece = Vec::new();
        if let Some(source) = &mut source {
            piece.resize(left.min(PIECE as u64) as usize, 0);
            source.read_exact(&mut piece).map_err(read)?;
        }
        let piece = world.broadcast_bytes(0, piece)?;
        if let Some(target) = &mut target {
            target.write_all(&piece).map_err(write)?;
        }
        left = left.saturating_sub(piece.len().max(1) as u64);
    }
    Ok(lacks.then_some(copy))
}

#[derive(Serialize, Deserialize)]
struct Known {
    path: PathBuf,
    sha256: String,
    len: usize,
}

fn compare<F: ExampleFile>(world: &World, examples: &F) -> Result<(), TrainError> {
    if world.size() == 1 {
        return Ok(());
    }
    let (path, sha256) = (examples.path().to_owned(), examples.fingerprint().to_owned());
    let known = Known { path, sha256, len: examples.len() };
    let all = world.all_gather_bytes(serde_json::to_vec(&known).expect("plain JSON"))?;
    let all: Vec<Known> = all
        .iter()
        .map(|bytes| serde_json::from_slice(bytes))
        .collect::<Result<_, _>>()
        .map_err(|e| TrainError::Unusable(format!("a rank sent no fingerprint of its data: {e}")))?;
    if all.iter().all(|k| k.sha256 == all[0].sha256) {
        return Ok(());
    }
    // Only now every example is read: first blocks of them, then those of the first block that differs.
    let own = block_hashes(examples);
    let blocks = world.all_gather_bytes(own)?;
    let first_block = |b: &[u8]| first_difference(&blocks[0], b);
    let found = blocks.iter().enumerate().find_map(|(rank, b)| Some((rank, first_block(b)?)));
    let Some((rank, block)) = found else {
        if world.is_main() {
            tracing::warn!(
                "{}: the ranks' files differ in bytes, but no example does",
                examples.path().display()
            );
        }
        return Ok(());
    };
    let items = block * BLOCK..(block + 1).saturating_mul(BLOCK).min(examples.len());
    let hashes = items.clone().flat_map(|i| hash_of(examples, i).to_le_bytes()).collect();
    let hashes = world.all_gather_bytes(hashes)?;
    let item = block * BLOCK + first_difference(&hashes[0], &hashes[rank]).unwrap_or(0);
    let line = world.broadcast_bytes(
        0,
        match examples.line(item) {
            Some(line) => format!(" (line {line} there)").into_bytes(),
            None => Vec::new(),
        },
    )?;
    Err(differs(
        world,
        rank,
        format!(
            "{} ({} examples) is not rank 0's {} ({}): example {item}{} is the first that differs; give all ranks the same \
             file, or --broadcast_data and no file",
            all[rank].path.display(),
            all[rank].len,
            all[0].path.display(),
            all[0].len,
            String::from_utf8_lossy(&line)
        ),
    ))
}

/// Index of the first eight bytes that differ, also where one list is shorter.
fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let (a, b) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
    let differs = a.iter().zip(b).position(|(x, y)| x != y);
    differs.or((a.len() != b.len()).then(|| a.len().min(b.len())))
}

fn block_hashes(examples: &impl ExampleFile) -> Vec<u8> {
    let mut out = Vec::new();
    for start in (0..examples.len()).step_by(BLOCK) {
        let mut sum = Sha256::new();
        for i in start..(start + BLOCK).min(examples.len()) {
            sum.update(hash_of(examples, i).to_le_bytes());
        }
        out.extend_from_slice(&sum.finalize()[..8]);
    }
    out
}

/// Hash of an example's content, white space apart; of its error, where it is none.
fn hash_of(examples: &impl ExampleFile, i: usize) -> u64 {
    let text = examples.content(i).unwrap_or_else(|_| "not a question".into());
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    hash.write(text.as_bytes());
    hash.finish()
}

/// FNV-1a: the same on all hosts, unlike the standard library's.
struct Fnv(u64);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = (self.0 ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found() {
        let list = |values: &[u64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(first_difference(&list(&[1, 2, 3]), &list(&[1, 2, 3])), None);
        assert_eq!(first_difference(&list(&[1, 2, 3]), &list(&[1, 5, 4])), Some(1));
        assert_eq!(first_difference(&list(&[1, 2, 3]), &list(&[1, 2])), Some(2));
    }

    #[test]
    fn white_space_is_no_difference() {
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            open_among::<Questions>(&World::alone(), &path, None, true).unwrap()
        };
        let a = open("a.jsonl", "{\"question\": \"a\"}\n{\"question\": \"b\"}\n");
        let b = open("b.jsonl", "{\"question\":\"a\"}\n{\"question\":  \"b\"}\n");
        let c = open("c.jsonl", "{\"question\": \"a\"}\n{\"question\": \"c\"}\n");
        assert_ne!(a.fingerprint(), b.fingerprint());
        assert_eq!(block_hashes(&a), block_hashes(&b));
        assert_ne!(block_hashes(&a), block_hashes(&c));
        assert_eq!(hash_of(&a, 0), hash_of(&c, 0));
    }
}
