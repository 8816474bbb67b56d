//! What one host has to offer: its name, ports, interfaces, cores, memory.

use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::{Finding, Grade};
use crate::place::{PORTS, Place, Starter};
use crate::settings::Settings;

/// Where limits of this process are read; other folders in tests.
#[derive(Clone, Debug)]
pub struct Limits {
    /// `/proc`
    pub proc: std::path::PathBuf,
    /// `/sys`
    pub sys: std::path::PathBuf,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { proc: "/proc".into(), sys: "/sys".into() }
    }
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Looks at this host.
pub fn host_findings(place: &Place, settings: &Settings, limits: &Limits) -> Vec<Finding> {
    let mut all = vec![names(place)];
    all.push(ports(place));
    all.push(interfaces(settings));
    all.push(threads(place));
    all.push(memory(limits));
    all.push(huge_pages(limits));
    all.push(files(place));
    all.extend(shared_memory(place, Path::new("/dev/shm")));
    all
}

/// The host's own name, which other ranks may be told.
fn names(place: &Place) -> Finding {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let many = place.world_size > place.local_size;
    let advice = "add the name to DNS or /etc/hosts with the address that other hosts reach";
    match (name.as_str(), 0).to_socket_addrs() {
        Err(error) => {
            let grade = if many { Grade::Bad } else { Grade::Warn };
            Finding::new("names", grade, format!("the host's name {name} has no address: {error}"), advice)
        }
        Ok(found) => {
            let found: Vec<IpAddr> = found.map(|a| a.ip()).collect();
            let list = found.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
            let what = format!("the host's name {name} is {list}");
            match many && found.iter().all(IpAddr::is_loopback) {
                true => Finding::new("names", Grade::Warn, what, advice),
                false => Finding::ok("names", what),
            }
        }
    }
}

/// Where rank 0 would listen.
fn ports(place: &Place) -> Finding {
    let free = |port: u16| TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
    let advice = "end what listens there, or choose another (--main_port under srun and MPI, --rdzv-endpoint of tercio \
                  launch)";
    let meeting = place.meeting.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    match meeting {
        Some(port) if place.rank == 0 => match free(port) {
            Ok(_) => Finding::ok("ports", format!("port {port} is free for rank 0")),
            Err(error) => Finding::new(
                "ports",
                Grade::Bad,
                format!("port {port}, where rank 0 listens: {error}"),
                advice,
            ),
        },
        Some(_) => Finding::ok("ports", format!("the ranks meet at {}", place.meeting)),
        None => match PORTS.step_by(97).find(|&port| free(port).is_ok()) {
            Some(_) => {
                Finding::ok("ports", format!("ports from {} to {} can be used", PORTS.start(), PORTS.end()))
            }
            None => Finding::new(
                "ports",
                Grade::Bad,
                format!("no port from {} to {} can be used", PORTS.start(), PORTS.end()),
                advice,
            ),
        },
    }
}

fn interfaces(settings: &Settings) -> Finding {
    let found = match if_addrs::get_if_addrs() {
        Ok(found) => found,
        Err(error) => {
            let what = format!("cannot list them: {error}");
            return Finding::new("interfaces", Grade::Warn, what, "name an address by --interface");
        }
    };
    let list = found.iter().filter(|i| !i.is_loopback() && !i.is_link_local());
    let list = list.map(|i| format!("{} {}", i.name, i.ip())).collect::<Vec<_>>().join(", ");
    let list = if list.is_empty() { "only the loopback interface".into() } else { list };
    match &settings.interface {
        Some(name) if !found.iter().any(|i| i.name == *name || i.ip().to_string() == *name) => Finding::new(
            "interfaces",
            Grade::Bad,
            format!("--interface {name} is not there; there are: {list}"),
            "name one of them, or leave the flag out",
        ),
        Some(name) => Finding::ok("interfaces", format!("{name}, as asked; there are: {list}")),
        None => Finding::ok("interfaces", list),
    }
}

fn threads(place: &Place) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let ranks = place.local_size;
    let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let what = format!("{} for {} of this host", plural(cores, "core"), plural(ranks, "rank"));
    match place.starter {
        // These may have bound every rank to cores of its own.
        Starter::Slurm | Starter::Mpi if cores == 1 && ranks > 1 => Finding::new(
            "threads",
            Grade::Warn,
            format!("{what}, or 1 core for each"),
            "where each rank is bound to one core, give it more: --cpus-per-task (for srun too, which does not take it \
             from sbatch), mpirun --bind-to none",
        ),
        Starter::Slurm | Starter::Mpi => Finding::ok("threads", what),
        _ if ranks > cores => Finding::new(
            "threads",
            Grade::Warn,
            what,
            "start no more ranks on a host than it has cores: they wait for each other",
        ),
        _ => Finding::ok("threads", what),
    }
}

fn memory(limits: &Limits) -> Finding {
    let text = std::fs::read_to_string(limits.proc.join("meminfo")).unwrap_or_default();
    let of = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let (Some(total), Some(free)) = (of("MemTotal"), of("MemAvailable")) else {
        return Finding::new("memory", Grade::Warn, "/proc/meminfo does not tell it", "mount /proc");
    };
    let group = std::fs::read_to_string(limits.sys.join("fs/cgroup/memory.max")).ok();
    let group = group.and_then(|t| t.trim().parse::<u64>().ok()).filter(|&max| max < total);
    let own = getrlimit(Resource::As).current;
    let mut what = format!("{} of {} free", size(free), size(total));
    if let Some(max) = group {
        what += &format!("; the control group allows {}", size(max));
    }
    if let Some(max) = own {
        what += &format!("; ulimit -v allows {}", size(max));
    }
    let room = [Some(free), group, own].into_iter().flatten().min().unwrap_or(free);
    match room < 2 * GIB {
        true => Finding::new(
            "memory",
            Grade::Warn,
            what,
            "a T5-small reader trains in about 2 GiB: free some, raise the limit (--mem of sbatch), or see `--dry-run`",
        ),
        false => Finding::ok("memory", what),
    }
}

fn huge_pages(limits: &Limits) -> Finding {
    let text = std::fs::read_to_string(limits.sys.join("kernel/mm/transparent_hugepage/enabled"));
    let now = text.as_deref().ok().and_then(|t| t.split_once('[')?.1.split_once(']')).map(|(now, _)| now);
    match now {
        Some("never") => Finding::new(
            "huge pages",
            Grade::Warn,
            "switched off",
            "large matrices are read faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(now) => Finding::ok("huge pages", now),
        None => Finding::ok("huge pages", "this system does not tell"),
    }
}

/// Rank 0 has a connection with everybody, and every rank has some with its partners.
fn files(place: &Place) -> Finding {
    let want = 256 + place.world_size as u64 * 2;
    match getrlimit(Resource::Nofile).current {
        Some(most) if most < want => Finding::new(
            "open files",
            if place.rank == 0 && most < want / 2 { Grade::Bad } else { Grade::Warn },
            format!("{most} allowed, about {want} wanted for {} ranks", place.world_size),
            "ulimit -n 65536",
        ),
        Some(most) => Finding::ok("open files", format!("{most} allowed")),
        None => Finding::ok("open files", "no limit"),
    }
}

/// Room for the rings between ranks of a host.
fn shared_memory(place: &Place, path: &Path) -> Option<Finding> {
    if place.local_size == 1 && place.world_size > 1 {
        return None;
    }
    let advice = "containers start with 64 MiB: docker run --shm-size=1g, or --ipc=host; without it ranks of a host talk \
                  by --backend tcp";
    Some(match rustix::fs::statvfs(path) {
        Err(error) => {
            Finding::new("shared memory", Grade::Warn, format!("{}: {error}", path.display()), advice)
        }
        Ok(fs) => {
            let free = fs.f_bavail.saturating_mul(fs.f_frsize);
            let what = format!("{} free in {}", size(free), path.display());
            // Rings of a few MiB to each of log2 partners.
            let want = place.local_size.max(2) as u64 * 32 * MIB;
            match free < want {
                true => Finding::new("shared memory", Grade::Warn, what, advice),
                false => Finding::ok("shared memory", what),
            }
        }
    })
}

/// A number of bytes for people.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..GIB => format!("{} MiB", bytes / MIB),
        _ => format!("{:.1} GiB", bytes as f64 / GIB as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_host_are_graded() {
        let folder = tempfile::tempdir().unwrap();
        let limits = Limits { proc: folder.path().join("proc"), sys: folder.path().join("sys") };
        let put = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(memory(&limits).grade, Grade::Warn);
        put("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n");
        let found = memory(&limits);
        assert!(found.what.starts_with("16.0 GiB of 32.0 GiB free"), "{found}");
        put("sys/fs/cgroup/memory.max", "1073741824\n");
        let found = memory(&limits);
        assert!(found.grade == Grade::Warn && found.what.contains("group allows 1.0 GiB"), "{found}");
        put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
        assert_eq!(huge_pages(&limits).grade, Grade::Warn);
        put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        assert_eq!(huge_pages(&limits), Finding::ok("huge pages", "madvise"));
    }

    #[test]
    fn what_a_place_needs_is_graded() {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let place = Place {
            world_size: 2,
            local_size: 2,
            meeting: format!("127.0.0.1:{port}"),
            starter: Starter::Launch,
            ..Place::alone()
        };
        let found = ports(&place);
        assert!(found.grade == Grade::Bad && found.what.contains(&port.to_string()), "{found}");
        assert_eq!(ports(&Place { rank: 1, ..place.clone() }).grade, Grade::Ok);
        let crowd = Place { world_size: 100_000, local_size: 100_000, ..place.clone() };
        assert_eq!(threads(&crowd).grade, Grade::Warn);
        let settings = Settings { interface: Some("no-such0".into()), ..Settings::default() };
        assert_eq!(interfaces(&settings).grade, Grade::Bad);
        let settings = Settings { interface: Some("127.0.0.1".into()), ..Settings::default() };
        assert_eq!(interfaces(&settings).grade, Grade::Ok);
        assert_eq!(shared_memory(&place, Path::new("/no/such")).unwrap().grade, Grade::Warn);
    }
}
