//! Memory of this process and of the machine, in bytes, as Linux tells it (`None` where it does not), and the error of a
//! device that can get no more of it.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

/// Memory that a device asked for and could not get. Kernels have no error to return: it travels up the stack as a panic
/// that prints nothing, through the pool of threads too, to the next [`caught`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes that could be had; `None` where the system did not tell, and just refused.
    pub room: Option<u64>,
    /// Bytes that the device's buffers held; 0 where what was asked for is no buffer, and nobody counted.
    pub used: u64,
    /// The most that they ever held; 0 likewise.
    pub peak: u64,
}

impl OutOfMemory {
    /// Leaves the work for the next [`caught`] up the stack.
    pub fn raise(self) -> ! {
        resume_unwind(Box::new(self))
    }
}

/// Does work that a lack of memory may end. What it left half done must not be used again.
///
/// # Errors
/// The lack of memory. Any other panic goes on.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, OutOfMemory> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| match panic.downcast::<OutOfMemory>() {
        Ok(out) => *out,
        Err(other) => resume_unwind(other),
    })
}

/// Bytes of this process that lie in memory now (`VmRSS`).
pub fn resident() -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The most bytes of this process that ever lay in memory (`VmHWM`).
pub fn peak_resident() -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Forgets the peak so far, so that [`peak_resident`] tells the peak from now on; `false` where the system does not let us.
pub fn reset_peak() -> bool {
    // Source: the kernel's Documentation/filesystems/proc.rst, `clear_refs`.
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// Bytes that this process can still take: what the machine has to give, or less where a cgroup (Slurm, a container) or
/// `ulimit -v` sets a limit. Caches that the kernel would give up count as free.
pub fn available() -> Option<u64> {
    available_below(Path::new("/")).into_iter().chain(address_room()).min()
}

/// Bytes that can still be had by buffers of which `asked` bytes were asked for before, and perhaps not touched yet: those
/// are not taken so far, but will be. Free swap counts as memory here.
pub fn room_beside(asked: u64) -> Option<u64> {
    let swap = fs::read_to_string("/proc/meminfo").ok().and_then(|text| field(&text, "SwapFree:"));
    let machine = available_below(Path::new("/")).map(|room| room.saturating_add(swap.unwrap_or(0)));
    let promised = |room: u64| room.saturating_add(resident().unwrap_or(asked)).saturating_sub(asked);
    machine.map(|room| room.min(promised(room))).into_iter().chain(address_room()).min()
}

/// What `ulimit -v` leaves of this process's addresses.
#[cfg(target_os = "linux")]
fn address_room() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let taken = field(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(limit.saturating_sub(taken))
}
#[cfg(not(target_os = "linux"))]
fn address_room() -> Option<u64> {
    None
}

fn available_below(root: &Path) -> Option<u64> {
    let machine =
        fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| field(&text, "MemAvailable:"));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounted = root.join("sys/fs/cgroup");
    let limits = groups.lines().flat_map(|line| group_room(&mounted, line));
    machine.into_iter().chain(limits).min()
}

/// The room in each group from a line of `/proc/self/cgroup` (`ID:CONTROLLERS:PATH`) up to the root; inside a container the
/// path may not exist below the mount, whose own root then holds the limit.
fn group_room(mounted: &Path, line: &str) -> Vec<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
        return Vec::new();
    };
    let is_v2 = controllers.is_empty();
    let (base, limit, usage, cache) = if is_v2 {
        (mounted.to_path_buf(), "memory.max", "memory.current", ["inactive_file ", "active_file "])
    } else if controllers.split(',').any(|controller| controller == "memory") {
        let cache = ["total_inactive_file ", "total_active_file "];
        (mounted.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", cache)
    } else {
        return Vec::new();
    };
    let inside: PathBuf = Path::new(path.trim_start_matches('/')).to_path_buf();
    inside
        .ancestors()
        .filter_map(|group| {
            let group = base.join(group);
            let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
            let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            let of = |line: &str| {
                cache.iter().find_map(|name| line.strip_prefix(name)?.trim().parse::<u64>().ok())
            };
            let freeable: u64 = stat.lines().filter_map(of).sum();
            let used = number(usage).unwrap_or(0).saturating_sub(freeable);
            Some(number(limit)?.saturating_sub(used))
        })
        .collect()
}

/// The value of a line `NAME  N kB`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes as people read them: `512 B`, `1.5 KiB`, `14.9 GiB`.
pub fn human(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn own_memory_is_seen_to_grow() {
        let (Some(before), Some(_)) = (resident(), available()) else {
            return;
        };
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        let grown = resident().unwrap();
        assert!(grown >= before.saturating_sub(32 << 20) + (64 << 20), "{before} {grown} {}", block.len());
        assert!(peak_resident().unwrap() >= grown.saturating_sub(1 << 20));
    }

    #[test]
    fn a_lack_of_memory_is_caught_and_nothing_else() {
        let out = OutOfMemory { asked: 9, room: Some(1), used: 3, peak: 5 };
        assert_eq!(caught(|| -> u8 { out.raise() }), Err(out));
        assert_eq!(caught(|| 7), Ok(7));
        let other = std::panic::catch_unwind(|| caught(|| -> u8 { resume_unwind(Box::new("other")) }));
        assert_eq!(*other.unwrap_err().downcast::<&str>().unwrap(), "other");
    }

    #[test]
    fn what_was_asked_for_counts_before_it_is_touched() {
        let (Some(none), Some(much)) = (room_beside(0), room_beside(1 << 50)) else {
            return;
        };
        assert!(none > 0 && much == 0, "{none} {much}");
    }

    #[test]
    fn the_tightest_limit_counts() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");
        assert_eq!(available_below(root), Some(8000 * 1024));
        write(root, "proc/self/cgroup", "4:cpu,memory:/job/step\n0::/job/step\n");
        write(root, "sys/fs/cgroup/job/step/memory.max", "max\n");
        write(root, "sys/fs/cgroup/job/memory.max", "4096000\n");
        write(root, "sys/fs/cgroup/job/memory.current", "3000000\n");
        write(root, "sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 900000\nactive_file 100000\n");
        assert_eq!(available_below(root), Some(2_096_000));
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
        write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "4000\n");
        assert_eq!(available_below(root), Some(0), "more used than allowed is no room, not an overflow");
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(human(512), "512 B");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(16_000_000_000), "14.9 GiB");
        assert_eq!(human(u64::MAX), "16777216.0 TiB");
    }
}
