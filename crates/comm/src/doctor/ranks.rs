//! What lies between ranks: whether they meet, how fast bytes go, whether clocks agree and a folder is shared.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::host::size;
use super::{Finding, Grade, Limits, host_findings, merge, read, write};
use crate::error::CommError;
use crate::place::Place;
use crate::secret::random;
use crate::settings::Settings;
use crate::world::World;

/// Numbers of the all-reduce that is timed: 64 MB of f32.
const NUMBERS: usize = 16 << 20;
/// Rounds of the small exchange, and of the clocks.
const ROUNDS: usize = 50;
/// How long a file may need until another host sees it.
const SEEN_WITHIN: Duration = Duration::from_secs(20);

/// Looks at the hosts of all ranks and at what lies between them, by all ranks together. Rank 0 gets all findings, the
/// others none, but what kept them from meeting. `folder`: one that all hosts should share; `more`: what the caller has found of
/// this host.
pub fn examine(
    place: &Place,
    settings: &Settings,
    folder: Option<&Path>,
    more: Vec<Finding>,
) -> Vec<Finding> {
    let own = [host_findings(place, settings, &Limits::default()), more].concat();
    let start = Instant::now();
    let world = match World::join(place, settings) {
        Ok(world) => world,
        Err(error) => return [own, not_met(place, &error)].concat(),
    };
    let met = start.elapsed();
    match together(&world, place, own, met, folder) {
        Ok(findings) => findings,
        Err(error) => vec![Finding::new(
            "ranks",
            Grade::Bad,
            error.to_string(),
            "see what the lost or failed rank said last",
        )],
    }
}

/// Why a rank could not meet the others, as far as it can be seen from here.
fn not_met(place: &Place, error: &CommError) -> Vec<Finding> {
    let mut findings = vec![Finding::new(
        "meeting",
        Grade::Bad,
        format!("rank {} of {} did not meet the others: {error}", place.rank, place.world_size),
        "start all ranks within --join_timeout, with the same command and settings",
    )];
    if place.rank == 0 {
        return findings;
    }
    let at = &place.meeting;
    let found = match at.to_socket_addrs() {
        Ok(found) => found.collect::<Vec<_>>(),
        Err(error) => {
            findings.push(Finding::new(
                "meeting",
                Grade::Bad,
                format!("{at}: {error}"),
                "the host of rank 0 needs a name that all hosts know: add it to DNS or /etc/hosts, or set TERCIO_MEETING",
            ));
            return findings;
        }
    };
    for address in found {
        let what = match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(_) => Finding::ok("meeting", format!("{at} ({address}) can be reached")),
            Err(error) => Finding::new(
                "meeting",
                Grade::Bad,
                format!("{at} ({address}) cannot be reached: {error}"),
                "refused: rank 0 does not run, or listens on another interface; timed out: a firewall, or no route",
            ),
        };
        findings.push(what);
    }
    findings
}

fn together(
    world: &World,
    place: &Place,
    own: Vec<Finding>,
    met: Duration,
    folder: Option<&Path>,
) -> Result<Vec<Finding>, CommError> {
    // One rank speaks for its host.
    let own = if place.local_rank == 0 { write(&own) } else { Vec::new() };
    let own = world.gather_bytes(own)?;
    let hosts = world.hosts();
    let by_host = hosts.iter().cloned().zip(own.iter().map(|bytes| read(bytes))).collect();
    let mut findings = merge(by_host);
    findings.push(ranks(world, &hosts, place, met));
    if world.size() > 1 {
        findings.push(clocks(world, &hosts)?);
        findings.push(latency(world)?);
        findings.push(bandwidth(world)?);
    }
    if let Some(folder) = folder {
        findings.extend(shared(world, &hosts, folder)?);
    }
    world.barrier()?;
    Ok(if world.is_main() { findings } else { Vec::new() })
}

fn ranks(world: &World, hosts: &[String], place: &Place, met: Duration) -> Finding {
    let mut distinct: Vec<&String> = hosts.iter().collect();
    distinct.sort();
    distinct.dedup();
    if world.size() == 1 {
        return Finding::ok(
            "ranks",
            "this process is alone; for several: tercio launch --nproc-per-node N -- doctor, or srun tercio doctor",
        );
    }
    let what = format!(
        "{} ranks on {} {}, started by {}, met at {} within {:.1} s; backend {}",
        world.size(),
        distinct.len(),
        if distinct.len() == 1 { "host" } else { "hosts" },
        place.starter,
        place.meeting,
        met.as_secs_f64(),
        world.backend()
    );
    match world.size().is_power_of_two() {
        true => Finding::ok("ranks", what),
        false => Finding::new(
            "ranks",
            Grade::Warn,
            what,
            "the same bits as one rank are only promised for a power of two",
        ),
    }
}

/// Greatest difference of the clocks from rank 0's.
fn clocks(world: &World, hosts: &[String]) -> Result<Finding, CommError> {
    let mut least = vec![f64::INFINITY; world.size()];
    for _ in 0..ROUNDS {
        world.barrier()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        // A barrier ends at nearly the same time on all ranks; the least of many differences is nearest to the clocks'.
        let times = world.all_gather(&[now])?;
        for (least, time) in least.iter_mut().zip(&times) {
            let difference = time.first().copied().unwrap_or(f64::INFINITY) - times[0][0];
            if difference.abs() < least.abs() {
                *least = difference;
            }
        }
    }
    let farthest = (0..least.len()).max_by(|&a, &b| least[a].abs().total_cmp(&least[b].abs())).unwrap_or(0);
    let difference = least[farthest];
    let what = match difference.abs() < 0.01 {
        true => "all within 10 ms".to_owned(),
        false => format!("rank {farthest} on {} is {difference:+.3} s from rank 0", hosts[farthest]),
    };
    let advice = "let the hosts keep their time by chrony or ntpd: logs are hard to compare, and Slurm refuses a host that \
                  is minutes off";
    Ok(match difference.abs() {
        d if d > 60.0 => Finding::new("clocks", Grade::Bad, what, advice),
        d if d > 1.0 => Finding::new("clocks", Grade::Warn, what, advice),
        _ => Finding::ok("clocks", what),
    })
}

/// Time of an all-reduce of one number: what every update waits at least.
fn latency(world: &World) -> Result<Finding, CommError> {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        world.barrier()?;
        let start = Instant::now();
        world.all_reduce(&mut [1f32])?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    let best = slowest(world, best)?;
    let what = format!("{:.0} us for the sum of one number over all ranks", best * 1e6);
    Ok(match best > 5e-3 {
        true => Finding::new(
            "latency",
            Grade::Warn,
            what,
            "ranks wait for a core or for a slow link: fewer threads or ranks on a host, another --interface",
        ),
        false => Finding::ok("latency", what),
    })
}

/// Time of an all-reduce of 64 MB.
fn bandwidth(world: &World) -> Result<Finding, CommError> {
    let mut numbers = vec![1f32; NUMBERS];
    let mut best = f64::INFINITY;
    let mut right = true;
    for round in 0..3 {
        numbers.fill((world.rank() + round) as f32);
        world.barrier()?;
        let start = Instant::now();
        world.all_reduce(&mut numbers)?;
        best = best.min(start.elapsed().as_secs_f64());
        let size = world.size();
        let want = (size * (size - 1) / 2 + round * size) as f32;
        right &= numbers.iter().step_by(4093).all(|&n| (n - want).abs() <= want * 1e-5);
    }
    let best = slowest(world, best)?;
    let bytes = (NUMBERS * 4) as f64;
    let what = format!("{:.3} s for the sum of 64 MB over all ranks, {:.2} GB/s", best, bytes / best / 1e9);
    if !right {
        return Ok(Finding::new(
            "bandwidth",
            Grade::Bad,
            "the sum over all ranks is wrong",
            "this is a fault of Tercio or of a machine's memory: run it again, and report it with this output",
        ));
    }
    Ok(match bytes / best < 1e8 {
        true => Finding::new(
            "bandwidth",
            Grade::Warn,
            what,
            "that is less than a 1 Gbit/s network gives: name a faster one by --interface, or let fewer ranks share it",
        ),
        false => Finding::ok("bandwidth", what),
    })
}

fn slowest(world: &World, own: f64) -> Result<f64, CommError> {
    Ok(world.all_gather(&[own])?.into_iter().flatten().fold(own, f64::max))
}

/// Whether all ranks see what rank 0 writes in a folder.
fn shared(world: &World, hosts: &[String], folder: &Path) -> Result<Vec<Finding>, CommError> {
    let token = random::<16>()?.iter().map(|b| b'a' + b % 26).collect();
    let token = world.broadcast_bytes(0, token)?;
    let file = folder.join(format!(".tercio-doctor-{}", String::from_utf8_lossy(&token)));
    let mut problem = None;
    if world.is_main() {
        problem = std::fs::write(&file, &token).err();
    }
    world.barrier()?;
    let start = Instant::now();
    let wrong_here = world.broadcast_bytes(0, vec![u8::from(problem.is_some())])? == [1];
    let mut seen = false;
    while !wrong_here && !seen && start.elapsed() < SEEN_WITHIN {
        seen = std::fs::read(&file).is_ok_and(|bytes| bytes == token);
        // Ranks of rank 0's host have it at once; a file of an NFS folder may come late.
        std::thread::sleep(Duration::from_millis(if seen { 0 } else { 100 }));
    }
    let all = world.all_gather_bytes(vec![u8::from(seen)])?;
    if !world.is_main() {
        return Ok(Vec::new());
    }
    let _ = std::fs::remove_file(&file);
    if let Some(error) = problem {
        return Ok(vec![Finding::new(
            "folder",
            Grade::Bad,
            format!("{}: rank 0 cannot write there: {error}", folder.display()),
            "name a folder that it may write, by --checkpoint_dir",
        )]);
    }
    let blind: Vec<usize> = (0..all.len()).filter(|&rank| all[rank] != [1]).collect();
    let mut findings = vec![match blind.first() {
        None => Finding::ok("folder", format!("{}: all ranks see what rank 0 writes", folder.display())),
        Some(&rank) => Finding::new(
            "folder",
            Grade::Warn,
            format!(
                "{}: {} of {} ranks do not see what rank 0 writes, rank {rank} on {} first",
                folder.display(),
                blind.len(),
                all.len(),
                hosts[rank]
            ),
            "runs need no shared folder, but every host needs the data files: copy them, or use --broadcast_data; after a \
             requeue rank 0 must find its checkpoints",
        ),
    }];
    if let Ok(fs) = rustix::fs::statvfs(folder) {
        let free = fs.f_bavail.saturating_mul(fs.f_frsize);
        let what = format!("{}: {} free", folder.display(), size(free));
        findings.push(match free < 5 << 30 {
            true => Finding::new(
                "folder",
                Grade::Warn,
                what,
                "a checkpoint of T5-base takes about 3 GB, and the old ones stay until the new one is complete",
            ),
            false => Finding::ok("folder", what),
        });
    }
    Ok(findings)
}
