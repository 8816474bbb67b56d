//! Worlds of several ranks within one test: a thread each.
#![allow(dead_code)] // every test binary uses a part
#![allow(clippy::single_range_in_vec_init)] // one bucket is a case of several

pub mod suite;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tercio_comm::place::Starter;
use tercio_comm::{Backend, CommError, Place, Settings, World};

/// A port that is free now. Not one of those that the system gives to outgoing connections: tests at the same time make
/// many, and one of them would have it before rank 0 does.
pub fn free_port(host: &str) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(2654435761) >> 8;
    (0..12_000)
        .map(|_| 20_001 + (start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000) as u16)
        .find(|port| TcpListener::bind((host, *port)).is_ok())
        .expect("no port is free")
}

/// The place of a rank.
pub fn place(rank: usize, size: usize, meeting: &str) -> Place {
    Place {
        rank,
        world_size: size,
        local_rank: rank,
        local_size: size,
        meeting: meeting.into(),
        secret: format!("the secret of {meeting}"),
        starter: Starter::Launch,
    }
}

/// Generous: a guard against a hang, no measure.
pub fn settings(backend: Backend) -> Settings {
    Settings {
        backend,
        join_timeout: Duration::from_secs(60),
        lost_after: Duration::from_secs(60),
        collective_timeout: Duration::from_secs(120),
        interface: None,
    }
}

/// Runs `work` as every rank of a world of `size` over `backend`; what each rank gives.
pub fn ranks<R: Send>(size: usize, backend: Backend, work: impl Fn(World) -> R + Sync) -> Vec<R> {
    let results = try_ranks(size, &settings(backend), |world| Ok(work(world)));
    results.into_iter().map(|result| result.unwrap()).collect()
}

/// The same with the settings and the errors.
pub fn try_ranks<R: Send>(
    size: usize,
    settings: &Settings,
    work: impl Fn(World) -> Result<R, CommError> + Sync,
) -> Vec<Result<R, CommError>> {
    let meeting = format!("127.0.0.1:{}", free_port("127.0.0.1"));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let place = place(rank, size, &meeting);
                let work = &work;
                scope.spawn(move || World::join(&place, settings).and_then(work))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The sum along the tree, nearest first: what every way of summing has to give, bit for bit. `None` adds nothing.
pub fn tree_sum<T: Copy + Default + std::ops::Add<Output = T>>(
    of_ranks: &[Option<Vec<T>>],
    len: usize,
) -> Vec<T> {
    let add = |a: Option<Vec<T>>, b: Option<Vec<T>>| match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(a, b)| *a + *b).collect()),
        (a, b) => a.or(b),
    };
    let power = 1 << of_ranks.len().ilog2();
    let mut level: Vec<Option<Vec<T>>> =
        (0..power).map(|r| add(of_ranks[r].clone(), of_ranks.get(r + power).cloned().flatten())).collect();
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| add(pair[0].clone(), pair[1].clone())).collect();
    }
    level.remove(0).unwrap_or_else(|| vec![T::default(); len])
}

/// Values of many sizes, so that another order of sums has other bits.
pub fn values(rank: usize, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(rank as u64 + 1);
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 * if state & 1 == 0 { 1.0 } else { -1e-3 }
        })
        .collect()
}

/// Bits, for comparison.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
