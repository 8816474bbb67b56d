//! Memory of this process and of the machine, in bytes, as Linux tells it; `None` where it does not.

use std::fs;
use std::path::{Path, PathBuf};

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

/// Bytes that this process can still take: what the machine has to give, or less where a cgroup (Slurm, a container) sets a
/// limit. Caches that the kernel would give up count as free.
pub fn available() -> Option<u64> {
    available_below(Path::new("/"))
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
        (mounted.to_path_buf(), "memory.max", "memory.current", "inactive_file")
    } else if controllers.split(',').any(|controller| controller == "memory") {
        (mounted.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
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
            let freeable = stat.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse::<u64>().ok());
            let used = number(usage).unwrap_or(0).saturating_sub(freeable.unwrap_or(0));
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
        let block = vec![1u8; 64 << 20];
        let grown = resident().unwrap();
        assert!(grown >= before.saturating_sub(32 << 20) + (64 << 20), "{before} {grown} {}", block.len());
        assert!(peak_resident().unwrap() >= grown.saturating_sub(1 << 20));
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
        write(root, "sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 1000000\n");
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
