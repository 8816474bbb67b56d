//! A reader's run on every rank: rank 0 reads model, checkpoint and tokenizer, and sends them to the others, which need no
//! folder in common; data is opened where each rank finds it, and compared.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::Tokenizer;
use tercio_engine::Arena;
use tercio_models::t5::{LoadedT5, T5, T5Config};

use super::RankDevice;
use super::corpus::open_among;
use super::options::Shard;
use super::parts::Parts;
use crate::error::TrainError;
use crate::optimizer::{moments, no_moments};
use crate::options::ReaderOptions;
use crate::scratch::ScratchFolder;
use crate::setup::{ReaderRun, model_of, open_model, reader_of, state_of};
use crate::state::Counters;
use crate::step::TrainState;
use crate::trainer::RunFolder;

/// A model without its values.
#[derive(Serialize, Deserialize)]
struct Shape {
    config: Map<String, Value>,
    json: Map<String, Value>,
    tied: bool,
    cross_attention_bias: bool,
    dropout_rate: f64,
    /// The configuration as rank 0 has it, to compare.
    shown: String,
    /// Names of the tokenizer's files, which follow.
    tokenizer: Vec<String>,
}

/// Where a run stands.
#[derive(Serialize, Deserialize)]
struct Standing {
    step: u64,
    counters: Option<Counters>,
}

/// Opens a run on all ranks of `world`; `folder` is rank 0's. As [`crate::setup::open_reader`] where there is one rank.
///
/// # Errors
/// As there; ranks whose data differ; a rank that was lost or failed.
pub fn open_reader_among<D: RankDevice>(
    world: &World,
    options: &ReaderOptions,
    folder: Option<&RunFolder>,
    device: &D,
) -> Result<(ReaderRun<D>, Parts), TrainError> {
    options.check().map_err(TrainError::Options)?;
    let split = options.run.ranks.shard == Shard::Optimizer;
    let found = folder.map(|f| f.store.latest_complete()).transpose()?.flatten();
    let own = match folder {
        Some(_) => Some(model_of(options, found.as_ref(), device)?),
        None => None,
    };
    let (loaded, tokenizer) = share_model(world, own, device)?;
    let cache = folder.map(|f| f.dir.join("data"));
    let open =
        |path: &PathBuf| open_among(world, path, cache.as_deref(), options.run.ranks.link.broadcast_data);
    let train = open(options.data.train_data.as_ref().expect("checked with the settings"))?;
    let eval = options.data.eval_data.as_ref().map(open).transpose()?;
    let (objective, parameters) = reader_of(options, loaded, tokenizer, train, eval)?;
    let parts = Parts::new::<D>(world, objective.model.layout(), split);
    let optim = options.optim.optim;
    let [first, second] = moments(optim, objective.model.layout()).map(|l| l.len());
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
                let layout = run.objective.model.layout();
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
        None => no_moments(device, optim, objective.model.layout(), Some(&parts)).map(Ok),
    };
    let (first, second) = (first?, second?);
    let state = TrainState { step: standing.step, parameters, first, second };
    Ok((ReaderRun { objective, state, counters: standing.counters }, parts))
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
    let own = if world.is_main() { Some(open_model(name, tokenizer, device)?) } else { None };
    let (mut loaded, tokenizer) = share_model(world, own, device)?;
    let parts = Parts::new::<D>(world, loaded.model.layout(), false);
    if world.size() > 1 {
        parts.broadcast(world, device, &mut loaded.parameters)?;
    }
    Ok((loaded, tokenizer))
}

/// Rank 0's model and tokenizer on every rank; the values of the others are zeros.
fn share_model<D: RankDevice>(
    world: &World,
    own: Option<(LoadedT5<D>, Tokenizer)>,
    device: &D,
) -> Result<(LoadedT5<D>, Tokenizer), TrainError> {
    if let Some((loaded, tokenizer)) = own {
        if world.size() > 1 {
            let config = &loaded.model.config;
            let files: Vec<_> = tokenizer.files().collect();
            let shape = Shape {
                config: config.to_json(&loaded.json),
                json: loaded.json.clone(),
                tied: config.tied,
                cross_attention_bias: config.cross_attention_bias,
                dropout_rate: config.dropout_rate,
                shown: format!("{config:?}"),
                tokenizer: files.iter().map(|(name, _)| (*name).to_owned()).collect(),
            };
            world.broadcast_bytes(0, serde_json::to_vec(&shape).expect("plain JSON"))?;
            for (_, bytes) in files {
                world.broadcast_bytes(0, bytes.to_vec())?;
            }
        }
        return Ok((loaded, tokenizer));
    }
    let shape: Shape = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
    let unlike =
        |what: &str| TrainError::Unusable(format!("rank 0 sent a model that is not understood here: {what}"));
    let mut config = T5Config::from_json(&shape.config).map_err(|e| unlike(&e.to_string()))?;
    config.tied = shape.tied;
    config.cross_attention_bias = shape.cross_attention_bias;
    config.dropout_rate = shape.dropout_rate;
    if format!("{config:?}") != shape.shown {
        return Err(unlike(&format!("{config:?} here, {} there", shape.shown)));
    }
    let scratch = ScratchFolder::new()?;
    for name in &shape.tokenizer {
        if name.contains('/') || name.starts_with('.') {
            return Err(unlike(&format!("a tokenizer's file named {name:?}")));
        }
        let bytes = world.broadcast_bytes(0, Vec::new())?;
        let path = scratch.path().join(name);
        std::fs::write(&path, bytes)
            .map_err(|source| TrainError::Write { path: path.display().to_string(), source })?;
    }
    let tokenizer = Tokenizer::load(scratch.path())?;
    let model = T5::new(config);
    let parameters = Arena::zeros(device, model.layout());
    Ok((LoadedT5 { model, parameters, json: shape.json }, tokenizer))
}

fn from_rank_0<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, TrainError> {
    serde_json::from_slice(bytes)
        .map_err(|e| TrainError::Unusable(format!("rank 0 sent what is not understood here: {e}")))
}
