//! What the ranks of a run make sure of before they begin: the same settings, and the best arithmetic that all have.

use tercio_comm::World;
use tercio_engine::cpu::Isa;
use tercio_engine::{Cpu, Device};

use crate::error::TrainError;
use crate::options::Precision;
use crate::run::config;

/// Settings that may differ between the ranks of a run: they reach no result, or are paths of a host.
const OWN: &[&str] =
    &["threads", "checkpoint_dir", "name", "model_path", "model_config", "tokenizer", "teacher", "interface"];

/// The error of a difference that all ranks have found.
pub(crate) fn differs(world: &World, rank: usize, what: String) -> TrainError {
    let host = world.hosts().get(rank).cloned().unwrap_or_default();
    TrainError::NotAlike(format!("rank {rank} on host {host}: {what}"))
}

/// Refuses ranks that were started with other settings than rank 0; says which.
///
/// # Errors
/// [`TrainError::NotAlike`] on all ranks; a rank was lost.
pub fn compare_settings(world: &World, settings: &toml::Table) -> Result<(), TrainError> {
    if world.size() == 1 {
        return Ok(());
    }
    // The files have paths of their own; whether there is one is no rank's own matter.
    let mut settings = settings.clone();
    for key in ["train_data", "eval_data", "test_data"] {
        if let Some(path) = settings.get_mut(key) {
            *path = "a file".into();
        }
    }
    let text = toml::to_string(&settings).unwrap_or_default();
    let all = world.all_gather_bytes(text.into_bytes())?;
    let tables: Vec<toml::Table> = all
        .iter()
        .map(|bytes| std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok()).unwrap_or_default())
        .collect();
    for (rank, table) in tables.iter().enumerate() {
        let Some(d) = config::compare(&tables[0], table, OWN).into_iter().next() else { continue };
        let show = |v: &Option<toml::Value>| v.as_ref().map_or("not set".to_owned(), |v| v.to_string());
        let (key, theirs, ours) = (&d.key, show(&d.wanted), show(&d.stored));
        let what =
            format!("--{key} is {theirs} there and {ours} on rank 0; start all ranks with the same settings");
        return Err(differs(world, rank, what));
    }
    Ok(())
}

/// Refuses ranks that have something else than rank 0 where `what` is to be the same; `own` stands for what this rank has.
///
/// # Errors
/// [`TrainError::NotAlike`] on all ranks; a rank was lost.
pub fn same_among(world: &World, what: &str, own: &str) -> Result<(), TrainError> {
    let all = world.all_gather_bytes(own.as_bytes().to_vec())?;
    match all.iter().position(|a| *a != all[0]) {
        None => Ok(()),
        Some(rank) => {
            let what = format!("{what} is not the same there as on rank 0; give all ranks the same");
            Err(differs(world, rank, what))
        }
    }
}

/// The CPU with the best instruction set that all ranks have (or were told to use by `TERCIO_ISA`). `threads` 0: the cores
/// that this process may use, shared with the ranks of its host that may use the same ones.
///
/// # Errors
/// What [`Cpu::new`] refuses; another `precision` on another rank; a rank was lost.
pub fn device_among(world: &World, threads: usize, precision: Precision) -> Result<Cpu, TrainError> {
    let threads = match threads {
        0 => own_cores(world)?,
        n => n,
    };
    if world.size() == 1 {
        return Ok(Cpu::new(threads)?.with_precision(precision.into()));
    }
    let all = world.all_gather_bytes(precision.name().into())?;
    if let Some(rank) = all.iter().position(|p| *p != all[0]) {
        let (theirs, ours) = (String::from_utf8_lossy(&all[rank]), String::from_utf8_lossy(&all[0]));
        let what =
            format!("--precision is {theirs} there and {ours} on rank 0; start all ranks with the same");
        return Err(differs(world, rank, what));
    }
    let own = Cpu::new(1)?.isa();
    let mine = Isa::ALL.into_iter().skip_while(|i| *i != own).filter(|i| i.available());
    let mine: Vec<&str> = mine.map(Isa::name).collect();
    let all = world.all_gather_bytes(mine.join(" ").into_bytes())?;
    let lists: Vec<Vec<&str>> =
        all.iter().map(|b| std::str::from_utf8(b).unwrap_or_default().split(' ').collect()).collect();
    let agreed = best_of_all(&lists).and_then(Isa::named).filter(|i| i.available()).ok_or_else(|| {
        TrainError::NotAlike(format!("the ranks have no instruction set in common: {lists:?}"))
    })?;
    if world.is_main()
        && let Some(rank) = lists.iter().position(|l| l.first() != Some(&agreed.name()))
    {
        let lacks = lists.iter().position(|l| l.first() == Some(&agreed.name())).unwrap_or(0);
        tracing::warn!(
            "rank {rank} computes with {} by itself, rank {lacks} on host {} with {}: all ranks use {}",
            lists[rank][0],
            world.hosts().get(lacks).cloned().unwrap_or_default(),
            lists[lacks][0],
            agreed.name()
        );
    }
    let device = Cpu::with_isa(threads, agreed)?.with_precision(precision.into());
    let all = world.all_gather_bytes(device.arithmetic().into_bytes())?;
    if let Some(rank) = all.iter().position(|a| *a != all[0])
        && world.is_main()
    {
        tracing::warn!(
            "rank {rank} computes with {}, rank 0 with {}: the same mathematics, but the same bits are not promised",
            String::from_utf8_lossy(&all[rank]),
            device.arithmetic()
        );
    }
    Ok(device)
}

/// Cores for this rank: schedulers give each rank its own, or all ranks of a host the same.
fn own_cores(world: &World) -> Result<usize, TrainError> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap_or_default();
    let all = world.all_gather_bytes(allowed.as_bytes().to_vec())?;
    let hosts = world.hosts();
    let same = |r: usize| all[r] == all[world.rank()] && hosts.get(r) == hosts.get(world.rank());
    let sharers = (0..all.len()).filter(|&r| same(r)).count();
    Ok((cores / sharers.max(1)).max(1))
}

/// The first of rank 0's names that all lists have.
fn best_of_all<'a>(lists: &[Vec<&'a str>]) -> Option<&'a str> {
    lists.first()?.iter().copied().find(|name| lists.iter().all(|l| l.contains(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_that_all_have() {
        let lists = [
            vec!["amx", "avx512", "avx2", "portable"],
            vec!["avx2", "portable"],
            vec!["avx512", "avx2", "portable"],
        ];
        assert_eq!(best_of_all(&lists), Some("avx2"));
        assert_eq!(best_of_all(&lists[..1]), Some("amx"));
        assert_eq!(best_of_all(&[vec!["a"], vec!["b"]]), None);
    }
}
