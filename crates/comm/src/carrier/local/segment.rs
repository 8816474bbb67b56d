//! The file in shared memory that the ranks of one host map: how it is made, found, checked, and taken away.
//!
//! It appears under its name whole or not at all (made without a name, locked, filled, then linked), and loses its name
//! as soon as every rank has mapped it; so a rank that is killed leaves nothing behind, and one that is killed before that
//! leaves a file without a lock, which the next run removes. Its name is that of one start: ranks of another one, dead or
//! alive, never come to it, so every rank that counts itself there is one of this start.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use sha2::{Digest, Sha256};

use crate::carrier::Alive;
use crate::error::CommError;
use crate::secret::hex;

/// Start of every file's name; what follows is a hash.
const PREFIX: &str = "tercio-ranks-";
/// Most ranks of one host: their table of rings grows with the square.
const MOST_RANKS: usize = 256;
/// Words that two processors write lie this far apart, so that neither takes the other's cache line (lines are fetched in pairs).
const APART: usize = 128;
const PAGE: usize = 4096;

/// The first bytes of the file.
#[repr(C)]
struct Head {
    digest: [u8; 32],
    ranks: AtomicU64,
    ring: AtomicU64,
    /// Ranks that are ready.
    attached: AtomicU32,
    /// 1 when a rank cannot go on.
    refused: AtomicU32,
}

/// How far one ring was written and read, in bytes since the start; each word has one writer.
#[repr(C)]
pub(super) struct Marks {
    /// Bytes written, by the sender.
    pub written: AtomicU64,
    _apart: [u8; APART - 8],
    /// Bytes read, by the receiver.
    pub read: AtomicU64,
    _apart_too: [u8; APART - 8],
}

/// Where things lie in the file, for a number of ranks and a size of rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    ranks: usize,
    ring: usize,
}

impl Layout {
    /// `ring` is a power of two, at least a page, at most 1 GiB: the sums below cannot overflow.
    fn new(ranks: usize, ring: usize) -> Result<Layout, CommError> {
        if ranks > MOST_RANKS {
            return Err(CommError::Rendezvous(format!(
                "{ranks} ranks on one host, expected at most {MOST_RANKS} for shared memory: choose --backend tcp"
            )));
        }
        assert!(ring.is_power_of_two() && (PAGE..=1 << 30).contains(&ring), "ring of {ring} bytes");
        Ok(Layout { ranks, ring })
    }
    fn bell(&self, slot: usize) -> usize {
        PAGE + slot * APART
    }
    fn marks(&self, from: usize, to: usize) -> usize {
        self.bell(self.ranks) + (from * self.ranks + to) * size_of::<Marks>()
    }
    /// Bytes before the rings: all that every rank maps, and that is really there from the start.
    fn front(&self) -> usize {
        self.marks(self.ranks, 0).next_multiple_of(PAGE)
    }
    fn data(&self, from: usize, to: usize) -> u64 {
        self.front() as u64 + (from * self.ranks + to) as u64 * self.ring as u64
    }
}

/// A piece of the file in this process's memory.
pub(super) struct Mapping {
    at: NonNull<c_void>,
    len: usize,
}

// SAFETY: the memory is shared with other processes anyway; nothing in it belongs to a thread.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(file: &OwnedFd, offset: u64, len: usize) -> rustix::io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the system's choice; the caller has reserved these bytes of the file, and
        // nobody shortens it, so touching them does not fault.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                offset,
            )?
        };
        Ok(Mapping { at: NonNull::new(at).ok_or(Errno::NOMEM)?, len })
    }
    /// Its first byte.
    pub fn bytes(&self) -> *mut u8 {
        self.at.as_ptr().cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped; references into it live no longer than this value.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.len) };
    }
}

/// Takes the file's name away, whatever happens.
struct Name(PathBuf);
impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The file as this rank sees it.
pub(super) struct Segment {
    layout: Layout,
    folder: PathBuf,
    file: OwnedFd,
    front: Mapping,
    /// The maker's, until all have met.
    name: Option<Name>,
}

impl Segment {
    /// Makes the file (the first of `ranks`) or finds it (the others). `session`: the run's secret, and what names this
    /// start of it.
    pub fn open(
        folder: &Path,
        session: [&str; 2],
        rank: usize,
        ranks: &[usize],
        ring: usize,
        until: Instant,
        alive: Alive<'_>,
    ) -> Result<Segment, CommError> {
        let layout = Layout::new(ranks.len(), ring)?;
        let digest = digest(session, ranks);
        let path = path(folder, &digest);
        if ranks.first() == Some(&rank) {
            sweep(folder);
            return Segment::create(folder, &path, layout, &digest);
        }
        loop {
            if let Some(segment) = Segment::find(&path, layout, &digest)? {
                return Ok(segment);
            }
            alive()?;
            if Instant::now() >= until {
                return Err(CommError::Rendezvous(format!(
                    "shared memory {}: ranks {ranks:?} of one host did not meet there in time; rank {} made no file (do they run in different containers?): choose --backend tcp",
                    folder.display(),
                    ranks[0]
                )));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Says that this rank is ready (or that it is not, and why), and returns when all are.
    pub fn meet(
        &mut self,
        ready: Result<(), CommError>,
        ranks: &[usize],
        until: Instant,
        alive: Alive<'_>,
    ) -> Result<(), CommError> {
        let _name = self.name.take(); // with this call the name goes, whatever comes
        let head = self.head();
        if ready.is_err() {
            head.refused.store(1, Ordering::Release);
            ready?;
        }
        head.attached.fetch_add(1, Ordering::AcqRel);
        let here = || head.attached.load(Ordering::Acquire) as usize;
        while here() < ranks.len() {
            alive()?;
            let (refused, late) = (head.refused.load(Ordering::Acquire) != 0, Instant::now() >= until);
            if refused || late {
                return Err(CommError::Rendezvous(format!(
                    "shared memory: {} of the ranks {ranks:?} met; {}: choose --backend tcp",
                    here(),
                    if refused { "another one could not use it" } else { "the others did not come in time" }
                )));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    fn create(folder: &Path, path: &Path, layout: Layout, digest: &[u8; 32]) -> Result<Segment, CommError> {
        let io = |what: &str, errno: Errno| refused(folder, what, errno);
        let file = rustix::fs::open(
            folder,
            OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )
        .map_err(|errno| io("cannot make a file", errno))?;
        // Held until the file has lost its name: a file without a lock has no living maker.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| io("cannot lock a file", errno))?;
        let whole = layout.data(layout.ranks, 0);
        rustix::fs::ftruncate(&file, whole).map_err(|errno| io("cannot set a file's length", errno))?;
        reserve(&file, 0, layout.front()).map_err(|errno| io("no room for the table of rings", errno))?;
        let front = Mapping::new(&file, 0, layout.front()).map_err(|errno| io("cannot map a file", errno))?;
        let mut segment = Segment { layout, folder: folder.to_path_buf(), file, front, name: None };
        // SAFETY: at the start of the mapping, which is aligned and long enough; nobody else has the file yet.
        unsafe { segment.front.at.cast::<Head>().as_mut() }.digest = *digest;
        segment.head().ranks.store(layout.ranks as u64, Ordering::Relaxed);
        segment.head().ring.store(layout.ring as u64, Ordering::Relaxed);
        let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&segment.file));
        rustix::fs::linkat(rustix::fs::CWD, own, rustix::fs::CWD, path, AtFlags::SYMLINK_FOLLOW)
            .map_err(|errno| io("cannot name a file", errno))?;
        segment.name = Some(Name(path.to_path_buf()));
        Ok(segment)
    }

    /// `None`: not there yet.
    fn find(path: &Path, layout: Layout, digest: &[u8; 32]) -> Result<Option<Segment>, CommError> {
        let io = |what: &str, errno: Errno| refused(path, what, errno);
        let file =
            match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()) {
                Ok(file) => file,
                Err(Errno::NOENT) => return Ok(None),
                Err(errno) => return Err(io("cannot open the ranks' file", errno)),
            };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
            return Ok(None); // its maker is dead; the lock ends with this file descriptor
        }
        let stat = rustix::fs::fstat(&file).map_err(|errno| io("cannot look at the ranks' file", errno))?;
        let stranger = || {
            CommError::Rendezvous(format!(
                "{}: not the file of these ranks (another user's, or another version of tercio): remove it, or choose --backend tcp",
                path.display()
            ))
        };
        if stat.st_uid != rustix::process::geteuid().as_raw()
            || stat.st_size as u64 != layout.data(layout.ranks, 0)
            || stat.st_blocks.cast_unsigned().saturating_mul(512) < layout.front() as u64
        {
            return Err(stranger());
        }
        let front = Mapping::new(&file, 0, layout.front())
            .map_err(|errno| io("cannot map the ranks' file", errno))?;
        let folder = path.parent().unwrap_or(path).to_path_buf();
        let segment = Segment { layout, folder, file, front, name: None };
        let head = segment.head();
        if head.digest != *digest
            || head.ranks.load(Ordering::Relaxed) != layout.ranks as u64
            || head.ring.load(Ordering::Relaxed) != layout.ring as u64
        {
            return Err(stranger());
        }
        Ok(Some(segment))
    }

    /// As a kill in the midst of the meeting does it: this rank is counted, and the file keeps its name.
    #[cfg(test)]
    pub fn die_counted(mut self) {
        self.head().attached.fetch_add(1, Ordering::AcqRel);
        std::mem::forget(self.name.take());
    }
    /// Bytes of one ring, a power of two.
    pub fn ring_size(&self) -> usize {
        self.layout.ring
    }
    fn head(&self) -> &Head {
        // SAFETY: at the start of the mapping, aligned; made before the file got a name, afterwards only atomics change.
        unsafe { self.front.at.cast().as_ref() }
    }
    /// The word on which the rank at `slot` sleeps: 1 while it sleeps, else 0.
    pub fn bell(&self, slot: usize) -> &AtomicU32 {
        assert!(slot < self.layout.ranks);
        // SAFETY: inside the front by the layout, aligned to `APART`; all access is atomic.
        unsafe { &*self.front.bytes().add(self.layout.bell(slot)).cast() }
    }
    /// The marks of the ring from slot to slot.
    pub fn marks(&self, from: usize, to: usize) -> &Marks {
        assert!(from < self.layout.ranks && to < self.layout.ranks);
        // SAFETY: inside the front by the layout, aligned to `APART`; all access is atomic.
        unsafe { &*self.front.bytes().add(self.layout.marks(from, to)).cast() }
    }
    /// Maps the bytes of a ring. The sender does it first, and takes the memory: a full file system is an error here instead
    /// of a bus error later.
    pub fn ring(&self, from: usize, to: usize, sender: bool) -> Result<Mapping, CommError> {
        let (offset, len) = (self.layout.data(from, to), self.layout.ring);
        if sender {
            reserve(&self.file, offset, len)
                .map_err(|errno| refused(&self.folder, &format!("no room for {len} bytes more"), errno))?;
        }
        Mapping::new(&self.file, offset, len)
            .map_err(|errno| refused(&self.folder, "cannot map a ring", errno))
    }
}

fn reserve(file: &OwnedFd, offset: u64, len: usize) -> rustix::io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len as u64) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

fn refused(path: &Path, what: &str, errno: Errno) -> CommError {
    CommError::Io {
        what: format!(
            "shared memory {}: {what} (give the container more, as docker --shm-size=1g, or choose --backend tcp)",
            path.display()
        ),
        source: errno.into(),
    }
}

/// What only the ranks of this start on this host can name.
fn digest(session: [&str; 2], ranks: &[usize]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"tercio shared memory 2\0");
    for text in session {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    for rank in ranks {
        hash.update((*rank as u64).to_le_bytes());
    }
    hash.finalize().into()
}

fn path(folder: &Path, digest: &[u8; 32]) -> PathBuf {
    folder.join(format!("{PREFIX}{}", hex(&digest[..16])))
}

/// Removes what dead runs of this user left: files of our name that nobody locks.
fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let user = rustix::process::geteuid().as_raw();
    for entry in
        entries.flatten().filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()))
    {
        let open =
            rustix::fs::open(entry.path(), OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty());
        let Ok(file) = open.map(File::from) else { continue };
        let own = rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_uid == user);
        if own && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
