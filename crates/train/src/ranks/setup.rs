//! A run on every rank: rank 0 reads model, checkpoint and tokenizer, and sends them to the others, which need no
//! folder in common; data is opened where each rank finds it, and compared.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tercio_comm::World;
use tercio_data::Tokenizer;
use tercio_engine::{Arena, Layout};
use tercio_models::t5::LoadedT5;

use super::RankDevice;
use super::corpus::open_among;
use super::options::Shard;
use super::parts::Parts;
use crate::error::TrainError;
use crate::objective::Objective;
use crate::optimizer::{moments, no_moments};
use crate::options::TrainOptions;
use crate::scratch::ScratchFolder;
use crate::setup::reader::ReaderModel;
use crate::setup::{Run, Task, TaskModel, model_of, objective_of, open_model, state_of};
use crate::state::Counters;
use crate::step::TrainState;
use crate::trainer::RunFolder;

/// Where a run stands.
#[derive(Serialize, Deserialize)]
struct Standing {
    step: u64,
    counters: Option<Counters>,
}

/// Opens a run on all ranks of `world`; `folder` is rank 0's. As [`crate::setup::open_run`] where there is one rank.
///
/// # Errors
/// As there; ranks whose data differ; a rank that was lost or failed.
pub fn open_run_among<D: RankDevice, T: Task<D>>(
    world: &World,
    options: &TrainOptions<T>,
    folder: Option<&RunFolder>,
    device: &D,
) -> Result<(Run<D, T::Objective>, Parts), TrainError> {
    options.check().map_err(TrainError::Options)?;
    let split = options.run.ranks.shard == Shard::Optimizer;
    let found = folder.map(|f| f.store.latest_complete()).transpose()?.flatten();
    let own = match folder {
        Some(folder) => Some(model_of(options, found.as_ref(), &folder.dir.join("data"), device)?),
        None => None,
    };
    let model = T::Model::share(world, own, device)?;
    let cache = folder.map(|f| f.dir.join("data"));
    let broadcast = options.run.ranks.link.broadcast_data;
    let open = |path: &Path| open_among::<T::Data>(world, path, cache.as_deref(), broadcast);
    let train = open(options.data.train_data.as_deref().expect("checked with the settings"))?;
    let eval = options.data.eval_data.as_deref().map(open).transpose()?;
    let test = options.model.test_file().map(open).transpose()?;
    let (objective, parameters) = objective_of(options, model, train, eval, test, device)?;
    let parts = Parts::new::<D>(world, objective.layout(), split);
    let optim = options.optim.optim;
    let [first, second] = moments(optim, objective.layout()).map(|l| l.len());
    if folder.is_some() {
        let mut run = state_of(options, found, objective, parameters, device)?;
        if world.size() > 1 {
            let standing = Standing { step: run.state.step, counters: run.counters.clone() };
            let standing = serde_json::to_vec(&standing).expect("counters are plain JSON");
            world.broadcast_bytes(0, standing)?;
            parts.broadcast(world, device, &mut run.state.parameters)?;
            if run.counters.is_some() {
                run.state.first = parts.scatter(world, device, first, Some(run.state.first))?;
                run.state.second = parts.scatter(world, device, second, Some(run.state.second))?;
            } else if parts.is_split() {
                // At step 0 there are no moments to send.
                let layout = run.objective.layout();
                [run.state.first, run.state.second] = no_moments(device, optim, layout, Some(&parts));
            }
        }
        return Ok((run, parts));
    }
    let standing: Standing = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
    let mut parameters = parameters;
    parts.broadcast(world, device, &mut parameters)?;
    let [first, second] = match standing.counters {
        Some(_) => [first, second].map(|len| parts.scatter(world, device, len, None)),
        None => no_moments(device, optim, objective.layout(), Some(&parts)).map(Ok),
    };
    let (first, second) = (first?, second?);
    let state = TrainState { step: standing.step, parameters, first, second };
    Ok((Run { objective, state, counters: standing.counters }, parts))
}

/// A model to use on every rank; only rank 0 needs its folder. As [`crate::setup::open_model`].
///
/// # Errors
/// As there; a rank was lost or failed.
pub fn open_model_among<D: RankDevice>(
    world: &World,
    name: &str,
    tokenizer: Option<&Path>,
    device: &D,
) -> Result<(LoadedT5<D>, Tokenizer), TrainError> {
    let own = match world.is_main() {
        true => {
            let (loaded, tokenizer) = open_model(name, tokenizer, device)?;
            Some(ReaderModel { loaded, tokenizer })
        }
        false => None,
    };
    let ReaderModel { mut loaded, tokenizer } = ReaderModel::share(world, own, device)?;
    share_values(world, loaded.model.layout(), &mut loaded.parameters, device)?;
    Ok((loaded, tokenizer))
}

/// Rank 0's values on every rank.
///
/// # Errors
/// A rank was lost or failed.
pub(crate) fn share_values<D: RankDevice>(
    world: &World,
    layout: &Layout,
    values: &mut Arena<D>,
    device: &D,
) -> Result<(), TrainError> {
    if world.size() > 1 {
        Parts::new::<D>(world, layout, false).broadcast(world, device, values)?;
    }
    Ok(())
}

/// Rank 0's tokenizer (its `own`), by its files, on the others.
///
/// # Errors
/// Files that make no tokenizer; a rank was lost or failed.
pub(crate) fn share_tokenizer(
    world: &World,
    own: Option<&Tokenizer>,
) -> Result<Option<Tokenizer>, TrainError> {
    if let Some(own) = own {
        let files: Vec<_> = own.files().collect();
        let names: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
        world.broadcast_bytes(0, serde_json::to_vec(&names).expect("plain JSON"))?;
        for (_, bytes) in files {
            world.broadcast_bytes(0, bytes.to_vec())?;
        }
        return Ok(None);
    }
    let names: Vec<String> = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
    let scratch = ScratchFolder::new()?;
    for name in &names {
        if name.contains('/') || name.starts_with('.') {
            return Err(TrainError::Unusable(format!("rank 0 sent a tokenizer's file named {name:?}")));
        }
        let bytes = world.broadcast_bytes(0, Vec::new())?;
        let path = scratch.path().join(name);
        std::fs::write(&path, bytes)
            .map_err(|source| TrainError::Write { path: path.display().to_string(), source })?;
    }
    Ok(Some(Tokenizer::load(scratch.path())?))
}

/// What rank 0 has said, read.
///
/// # Errors
/// It is not understood.
pub(crate) fn from_rank_0<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, TrainError> {
    serde_json::from_slice(bytes)
        .map_err(|e| TrainError::Unusable(format!("rank 0 sent what is not understood here: {e}")))
}
