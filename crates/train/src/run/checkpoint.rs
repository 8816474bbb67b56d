//! Checkpoints on disk: written beside, made durable, renamed to a new name. A checkpoint is complete or it is not there.
//!
//! `RUN/checkpoint/step-N` is the state after N optimizer updates. Where that name is taken by other content (a folder that lost
//! a file, an attempt on another processor) the next free of `step-N-2`, `step-N-3`, ... is used: nothing is ever replaced.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::error::{Context, RunError};
use super::files;
use super::lease::{Lease, process_lives};
use super::manifest::{FORMAT, MANIFEST_NAME, Manifest};

const WRITING: &str = ".writing-";
const REMOVING: &str = ".removing-";
const LATEST: &str = "latest";
const MODEL: &str = "model";
const BEST_DEV: &str = "best_dev";
const LINKS: [&str; 3] = [LATEST, BEST_DEV, MODEL];

/// After a day without a write the writer on another host, which we cannot ask, counts as dead.
const FOREIGN_WRITER_SECONDS: u64 = 86_400;

/// The checkpoints of one run.
#[derive(Debug, Clone)]
pub struct CheckpointStore {
    run_dir: PathBuf,
    dir: PathBuf,
}

/// A complete checkpoint: every listed file is there with its size.
#[derive(Debug, Clone)]
pub struct FoundCheckpoint {
    /// Optimizer updates done.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Its `training.json`.
    pub manifest: Manifest,
    /// The folder of the next older complete checkpoint.
    pub older: Option<PathBuf>,
}

impl FoundCheckpoint {
    /// Compares the SHA-256 of every file; call it before the files are used.
    ///
    /// # Errors
    /// [`RunError::Damaged`] names the file, and the folder to remove to fall back to the older checkpoint.
    pub fn verify_full(&self) -> Result<(), RunError> {
        let folder = self.path.display();
        let advice = match self.older.as_ref().and_then(|older| older.file_name()) {
            Some(older) => format!("remove the folder {folder} to fall back to {}", older.to_string_lossy()),
            None => format!("there is no older checkpoint; remove the folder {folder} to start over"),
        };
        self.manifest.verify_full(&self.path, &advice)
    }
}

/// The checkpoint folders of a run as they are found on disk.
#[derive(Debug, Default)]
pub struct Listing {
    /// Complete ones, oldest first.
    pub complete: Vec<FoundCheckpoint>,
    /// Folders named like checkpoints that are not complete, with the reason.
    pub incomplete: Vec<(PathBuf, String)>,
}

/// How a commit ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Optimizer updates done.
    pub step: u64,
    /// The checkpoint's folder.
    pub path: PathBuf,
    /// False where another attempt had already written the same bytes.
    pub is_new: bool,
}

impl CheckpointStore {
    /// Opens, or creates, `run_dir/checkpoint`.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub fn open(run_dir: &Path) -> Result<Self, RunError> {
        let dir = run_dir.join("checkpoint");
        fs::create_dir_all(&dir).context("create the folder", &dir)?;
        Ok(Self { run_dir: run_dir.to_path_buf(), dir })
    }

    /// Starts the checkpoint of `step` in a folder of its own, unseen by readers until it is committed.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub fn begin(&self, step: u64) -> Result<CheckpointWriter, RunError> {
        let (host, pid) = (files::host_name(), std::process::id());
        let path = self.dir.join(format!("{WRITING}step-{step}-{host}-{pid}-{}", files::random_hex(4)));
        fs::create_dir(&path).context("create the folder", &path)?;
        // The lock tells the living from the dead when leftovers are removed; where it cannot be had, the pid does.
        let lock = File::open(&path).ok();
        if let Some(lock) = &lock {
            let _ = rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive);
        }
        Ok(CheckpointWriter { dir: self.dir.clone(), path, step, _lock: lock, done: false })
    }

    /// All checkpoints, complete or not; says nothing of their checksums.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn list(&self) -> Result<Listing, RunError> {
        let mut listing = Listing::default();
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).context("list", &self.dir)? {
            let entry = entry.context("list", &self.dir)?;
            if let Some(name) = entry.file_name().to_str().and_then(parse_name) {
                found.push((name, entry.path()));
            }
        }
        found.sort();
        for ((step, _), path) in found {
            match complete(&path, step) {
                Ok(manifest) => {
                    let older = listing.complete.last().map(|older| older.path.clone());
                    listing.complete.push(FoundCheckpoint { step, path, manifest, older });
                }
                Err(reason) => listing.incomplete.push((path, reason)),
            }
        }
        Ok(listing)
    }

    /// The complete checkpoint with the greatest step, whatever the links say. Incomplete ones are skipped with a warning.
    ///
    /// # Errors
    /// When the folder cannot be listed, and when every checkpoint in it is incomplete: to start over would hide a loss. When
    /// the newest is of another version: to go on from an older one would undo its updates.
    pub fn latest_complete(&self) -> Result<Option<FoundCheckpoint>, RunError> {
        let mut listing = self.list()?;
        let newest = listing.complete.last().map_or(0, |found| found.step);
        for (path, _) in &listing.incomplete {
            let step = path.file_name().and_then(|name| name.to_str()).and_then(parse_name);
            if let (Some((step, _)), Some(format)) = (step, Manifest::foreign_format(path))
                && step > newest
            {
                let what = format!(
                    "expected checkpoint format {FORMAT}, found {format}: another version wrote it; go on with that version, or \
                     remove the folder to go on without it"
                );
                return Err(RunError::malformed(path, what));
            }
        }
        for (path, reason) in &listing.incomplete {
            tracing::warn!("checkpoint {} is not complete and is skipped: {reason}", path.display());
        }
        match (listing.complete.pop(), listing.incomplete.last()) {
            (None, Some((path, reason))) => Err(RunError::malformed(
                path,
                format!(
                    "no checkpoint of this run is complete: {reason}; restore the file, or remove the folder to start over"
                ),
            )),
            (newest, _) => Ok(newest),
        }
    }

    /// Points `latest` at a checkpoint. `Ok(false)` when the lease was lost: then a later attempt's links stay.
    ///
    /// # Errors
    /// When the link cannot be written.
    pub fn set_latest(&self, lease: &Lease, checkpoint: &Path) -> Result<bool, RunError> {
        self.set_link(lease, LATEST, checkpoint)
    }

    /// Points `best_dev` at a checkpoint, as [`CheckpointStore::set_latest`] does.
    ///
    /// # Errors
    /// When the link cannot be written.
    pub fn set_best_dev(&self, lease: &Lease, checkpoint: &Path) -> Result<bool, RunError> {
        self.set_link(lease, BEST_DEV, checkpoint)
    }

    /// Points `model` at the checkpoint that stands for the run: the best one where there is one, or the `last`. `Ok(false)` where there
    /// is none, or the lease was lost.
    ///
    /// # Errors
    /// When the link cannot be written.
    pub fn set_model(&self, lease: &Lease, last: bool) -> Result<bool, RunError> {
        let target = |link: &str| fs::read_link(self.dir.join(link)).ok();
        let chosen = if last { target(LATEST) } else { target(BEST_DEV).or_else(|| target(LATEST)) };
        chosen.map_or(Ok(false), |chosen| self.set_link(lease, MODEL, &self.dir.join(chosen)))
    }

    /// As [`CheckpointStore::set_model`], at a run's end: beside the folder of checkpoints, `best-model` and `final-model` name both.
    ///
    /// # Errors
    /// When a link cannot be written.
    pub fn link_model(&self, lease: &Lease, last: bool) -> Result<(), RunError> {
        if self.set_model(lease, last)?
            && let Some(run) = self.dir.parent()
            && let Some(own) = self.dir.file_name()
        {
            for (link, to) in [("best-model", BEST_DEV), ("final-model", LATEST)] {
                if self.dir.join(to).is_symlink() {
                    files::swap_link(&Path::new(own).join(to), &run.join(link))?;
                }
            }
        }
        Ok(())
    }

    fn set_link(&self, lease: &Lease, link: &str, checkpoint: &Path) -> Result<bool, RunError> {
        let Some(name) = checkpoint.file_name().filter(|_| checkpoint.parent() == Some(self.dir.as_path()))
        else {
            return Err(RunError::malformed(
                checkpoint,
                format!("expected a folder of {}", self.dir.display()),
            ));
        };
        if !self.may_change(lease) {
            return Ok(false);
        }
        files::swap_link(Path::new(name), &self.dir.join(link))?;
        Ok(true)
    }

    /// Removes complete checkpoints other than the newest `keep_last` (at least one), those of the steps `protect`, and those
    /// that `latest`, `best_dev` and `model` point at. Returns what was removed: nothing when the lease was lost.
    ///
    /// # Errors
    /// When a folder cannot be removed.
    pub fn prune(&self, lease: &Lease, keep_last: usize, protect: &[u64]) -> Result<Vec<PathBuf>, RunError> {
        if !self.may_change(lease) {
            return Ok(Vec::new());
        }
        let linked: Vec<_> =
            LINKS.iter().filter_map(|link| fs::read_link(self.dir.join(link)).ok()).collect();
        let complete = self.list()?.complete;
        let steps: BTreeSet<u64> = complete.iter().map(|found| found.step).collect();
        let kept: Vec<u64> = steps.into_iter().rev().take(keep_last.max(1)).collect();
        let mut removed = Vec::new();
        for found in complete {
            let is_linked = linked.iter().any(|link| link.file_name() == found.path.file_name());
            if is_linked || kept.contains(&found.step) || protect.contains(&found.step) {
                continue;
            }
            // Out of sight first: a removal that is cut short must not leave a half checkpoint under a checkpoint's name.
            let name = found.path.file_name().unwrap_or_default().to_string_lossy();
            let hidden = self.dir.join(format!("{REMOVING}{name}-{}", files::random_hex(4)));
            fs::rename(&found.path, &hidden).context("rename", &found.path)?;
            fs::remove_dir_all(&hidden).context("remove", &hidden)?;
            removed.push(found.path);
        }
        Ok(removed)
    }

    /// Removes what dead processes left: half-written folders, half-removed ones, links that were never moved into place.
    /// Returns what was removed: nothing when the lease was lost.
    ///
    /// # Errors
    /// When the folder cannot be listed or a leftover cannot be removed.
    pub fn remove_stale(&self, lease: &Lease) -> Result<Vec<PathBuf>, RunError> {
        if !self.may_change(lease) {
            return Ok(Vec::new());
        }
        let mut removed = Vec::new();
        for entry in fs::read_dir(&self.dir).context("list", &self.dir)? {
            let path = entry.context("list", &self.dir)?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let is_link = LINKS.iter().any(|link| name.starts_with(&format!(".{link}.")));
            if is_link && path.is_symlink() {
                fs::remove_file(&path).context("remove", &path)?;
            } else if name.starts_with(REMOVING) || (name.starts_with(WRITING) && is_abandoned(&path, name)) {
                fs::remove_dir_all(&path).context("remove", &path)?;
            } else {
                continue;
            }
            removed.push(path);
        }
        Ok(removed)
    }

    fn may_change(&self, lease: &Lease) -> bool {
        let may = lease.is_of(&self.run_dir) && lease.still_mine();
        if !may {
            tracing::warn!(
                "a later attempt holds the lease of {}: this one adds checkpoints, but moves no links and removes nothing",
                self.run_dir.display()
            );
        }
        may
    }
}

/// A checkpoint that is being written; dropped without a commit it leaves nothing behind.
#[derive(Debug)]
pub struct CheckpointWriter {
    dir: PathBuf,
    path: PathBuf,
    step: u64,
    _lock: Option<File>,
    done: bool,
}

impl CheckpointWriter {
    /// The folder to write files and subfolders into.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails before anything is written where fewer than `needed` bytes are free.
    ///
    /// # Errors
    /// [`RunError::DiskFull`] with the bytes needed and free.
    pub fn require_space(&self, needed: u64) -> Result<(), RunError> {
        match files::free_bytes(&self.path) {
            Some(free) if free < needed => {
                Err(RunError::DiskFull { path: self.path.clone(), needed: Some(needed), free: Some(free) })
            }
            _ => Ok(()),
        }
    }

    /// Lists and hashes the files, writes `training.json` with `state`, makes all durable and gives the folder its name.
    ///
    /// # Errors
    /// When a file cannot be read or synced, or the disk is full. The folder is then removed; older checkpoints are untouched.
    pub fn commit(mut self, state: serde_json::Value) -> Result<Committed, RunError> {
        let manifest = Manifest::of_folder(&self.path, self.step, state)?;
        self.write_manifest(&manifest)?;
        for attempt in 1u32.. {
            let name = match attempt {
                1 => format!("step-{}", self.step),
                _ => format!("step-{}-{attempt}", self.step),
            };
            let path = self.dir.join(name);
            if files::rename_new(&self.path, &path)? {
                self.done = true;
                files::sync_dir(&self.dir)?;
                if attempt > 1 {
                    tracing::warn!(
                        "a different checkpoint of this step exists; this one is {}",
                        path.display()
                    );
                }
                return Ok(Committed { step: self.step, path, is_new: true });
            }
            let same = complete(&path, self.step).is_ok_and(|found| found == manifest);
            if same && manifest.verify_full(&path, "").is_ok() {
                return Ok(Committed { step: self.step, path, is_new: false });
            }
        }
        Err(RunError::malformed(&self.path, "expected a free name for the checkpoint, found none"))
    }

    fn write_manifest(&self, manifest: &Manifest) -> Result<(), RunError> {
        let path = self.path.join(MANIFEST_NAME);
        let mut text = serde_json::to_string_pretty(manifest)
            .map_err(|error| RunError::malformed(&path, format!("cannot write the manifest: {error}")))?;
        text.push('\n');
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        written.map_err(|source| RunError::from_io("write", &path, Some(text.len() as u64), source))?;
        files::sync_dir(&self.path)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if !self.done
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!("cannot remove the unfinished checkpoint {}: {error}", self.path.display());
        }
    }
}

/// Step and attempt of a checkpoint's folder name: `step-N` or `step-N-K`, K at least 2.
fn parse_name(name: &str) -> Option<(u64, u64)> {
    let number = |text: &str| {
        let plain =
            text.bytes().all(|byte| byte.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
        text.parse::<u64>().ok().filter(|_| plain)
    };
    let rest = name.strip_prefix("step-")?;
    match rest.split_once('-') {
        None => Some((number(rest)?, 1)),
        Some((step, attempt)) => Some((number(step)?, number(attempt).filter(|&attempt| attempt > 1)?)),
    }
}

/// The manifest of a complete checkpoint, or why it is not one.
fn complete(path: &Path, step: u64) -> Result<Manifest, String> {
    let manifest = Manifest::read(path).map_err(|error| error.to_string())?;
    if manifest.step != step {
        return Err(format!("{MANIFEST_NAME} speaks of step {}", manifest.step));
    }
    manifest.missing(path).map_or(Ok(manifest), Err)
}

/// Whether the writer of `.writing-step-N-HOST-PID-RANDOM` is dead.
fn is_abandoned(path: &Path, name: &str) -> bool {
    let mut parts = name.strip_prefix(WRITING).unwrap_or(name).rsplitn(3, '-').skip(1);
    let pid = parts.next().and_then(|pid| pid.parse::<u32>().ok());
    let host = parts.next().and_then(|rest| rest.splitn(3, '-').nth(2));
    if host != Some(files::host_name().as_str()) {
        let modified = fs::metadata(path).and_then(|found| found.modified()).ok();
        let age = modified.and_then(|modified| modified.elapsed().ok());
        return age.is_some_and(|age| age.as_secs() > FOREIGN_WRITER_SECONDS);
    }
    let lock = File::open(path).map_err(|_| rustix::io::Errno::NOLCK);
    match lock.and_then(|lock| rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => true,
        Err(rustix::io::Errno::WOULDBLOCK) => false,
        Err(_) => !pid.is_some_and(process_lives),
    }
}
