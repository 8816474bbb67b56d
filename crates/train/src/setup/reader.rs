//! A reader's run: T5, its tokenizer, and questions.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::{Questions, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Device};
use tercio_models::folder::ModelFolder;
use tercio_models::t5::{Initialization, LoadedT5, T5, T5Config};

use super::{Run, Task, TaskModel, model_folder, require_room, used};
use crate::error::TrainError;
use crate::objectives::reader::ReaderObjective;
use crate::options::{Init, ReaderModelOptions, ReaderOptions};
use crate::ranks::RankDevice;
use crate::ranks::setup::{from_rank_0, share_tokenizer};

/// A reader's run, ready to train.
pub type ReaderRun<D> = Run<D, ReaderObjective>;

/// A reader as it was read.
pub struct ReaderModel<D: Device> {
    /// Model and values.
    pub loaded: LoadedT5<D>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

impl<D: RankDevice> Task<D> for ReaderModelOptions {
    type Model = ReaderModel<D>;
    type Data = Questions;
    type Objective = ReaderObjective;

    fn open(
        options: &ReaderOptions,
        checkpoint: Option<&Path>,
        _: &Path,
        device: &D,
    ) -> Result<ReaderModel<D>, TrainError> {
        let mut model = match checkpoint {
            Some(path) => {
                let folder = ModelFolder::open(&path.to_string_lossy())?;
                ReaderModel { loaded: LoadedT5::open(&folder, device)?, tokenizer: Tokenizer::load(path)? }
            }
            None => initial_model(&options.model, options.run.seed, device)?,
        };
        if let Some(p) = options.optim.dropout {
            model.loaded.model.config.dropout_rate = p;
        }
        check_vocabulary(&model.tokenizer, &model.loaded.model.config)?;
        Ok(model)
    }
    fn objective(
        options: &ReaderOptions,
        model: ReaderModel<D>,
        train: Questions,
        eval: Option<Questions>,
        _: Option<Questions>,
        _: &D,
    ) -> Result<(ReaderObjective, Arena<D>), TrainError> {
        let plan = options.data.batch_plan().map_err(TrainError::Options)?;
        let ReaderModel { loaded: LoadedT5 { model, parameters, json }, tokenizer } = model;
        let objective = ReaderObjective {
            model,
            json,
            tokenizer,
            encoding: encoding(&options.model),
            used: used(options.data.maxload, train.len()),
            train,
            eval,
            seed: options.run.seed,
            label_smoothing: options.optim.label_smoothing,
            recompute: options.model.recompute,
            generation_max_length: options.model.generation_max_length,
            eval_n_context: match options.model.eval_n_context {
                0 => options.model.n_context,
                n => n,
            },
            eval_batch: plan.micro,
            eval_print_freq: options.data.eval_print_freq,
        };
        Ok((objective, parameters))
    }
    fn model_path(&self) -> &str {
        &self.model_path
    }
}

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
}

impl<D: RankDevice> TaskModel<D> for ReaderModel<D> {
    fn share(world: &World, own: Option<Self>, device: &D) -> Result<Self, TrainError> {
        if let Some(own) = own {
            if world.size() > 1 {
                let config = &own.loaded.model.config;
                let shape = Shape {
                    config: config.to_json(&own.loaded.json),
                    json: own.loaded.json.clone(),
                    tied: config.tied,
                    cross_attention_bias: config.cross_attention_bias,
                    dropout_rate: config.dropout_rate,
                    shown: format!("{config:?}"),
                };
                world.broadcast_bytes(0, serde_json::to_vec(&shape).expect("plain JSON"))?;
                share_tokenizer(world, Some(&own.tokenizer))?;
            }
            return Ok(own);
        }
        let shape: Shape = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
        let unlike = |what: &str| {
            TrainError::Unusable(format!("rank 0 sent a model that is not understood here: {what}"))
        };
        let mut config = T5Config::from_json(&shape.config).map_err(|e| unlike(&e.to_string()))?;
        config.tied = shape.tied;
        config.cross_attention_bias = shape.cross_attention_bias;
        config.dropout_rate = shape.dropout_rate;
        if format!("{config:?}") != shape.shown {
            return Err(unlike(&format!("{config:?} here, {} there", shape.shown)));
        }
        let tokenizer = share_tokenizer(world, None)?.ok_or_else(|| unlike("no tokenizer"))?;
        let model = T5::new(config);
        let parameters = Arena::zeros(device, model.layout());
        Ok(ReaderModel { loaded: LoadedT5 { model, parameters, json: shape.json }, tokenizer })
    }
}

/// How a reader's inputs are made, from its flags.
pub fn encoding(o: &ReaderModelOptions) -> ReaderEncoding {
    ReaderEncoding {
        text_maxlength: o.text_maxlength,
        answer_maxlength: usize::try_from(o.answer_maxlength).ok().filter(|&n| n > 0),
        n_context: o.n_context,
        no_title: o.no_title,
        passage_eos: o.passage_eos,
    }
}

/// A model to use: `name` is a model folder, a hub name, or a run's folder, which stands for its best checkpoint (the
/// latest where none is marked best). The tokenizer is that of the folder, or the one in `tokenizer`.
///
/// # Errors
/// What is missing or does not fit; a tokenizer with more ids than the model has embeddings.
pub fn open_model<D: Device>(
    name: &str,
    tokenizer: Option<&Path>,
    device: &D,
) -> Result<(LoadedT5<D>, Tokenizer), TrainError> {
    let folder = model_folder(name)?;
    let tokenizer = Tokenizer::load(tokenizer.unwrap_or(folder.path()))?;
    let loaded = LoadedT5::open(&folder, device)?;
    check_vocabulary(&tokenizer, &loaded.model.config)?;
    Ok((loaded, tokenizer))
}

/// Refuses a tokenizer whose ids the model has no embeddings for.
pub(crate) fn check_vocabulary(tokenizer: &Tokenizer, model: &T5Config) -> Result<(), TrainError> {
    let (ids, rows) = (tokenizer.vocab_size(), model.vocab_size);
    if ids > rows {
        return Err(TrainError::Vocabulary { tokenizer: ids, model: rows });
    }
    Ok(())
}

fn initial_model<D: Device>(
    o: &ReaderModelOptions,
    seed: u64,
    device: &D,
) -> Result<ReaderModel<D>, TrainError> {
    if o.init == Init::Random {
        if o.model_path != "none" {
            return Err(TrainError::Options("--init random and --model_path exclude each other".into()));
        }
        let (config, folder) = match &o.model_config {
            Some(path) => (T5Config::read(path)?.0, path.parent()),
            None => (of_size(&o.model_size)?, None),
        };
        // The shape's own folder serves as the tokenizer's where it holds one, or names byT5's.
        let tokenizer = match (&o.tokenizer, folder) {
            (Some(given), _) => Tokenizer::load(given)?,
            (None, Some(own)) => Tokenizer::load(own)
                .map_err(|e| TrainError::Unusable(format!("{e}; or give --tokenizer another folder")))?,
            (None, None) => {
                let what = "--init random needs --tokenizer: the folder of a tokenizer.json or spiece.model";
                return Err(TrainError::Options(what.into()));
            }
        };
        let loaded = random_model(config, seed, device)?;
        return Ok(ReaderModel { loaded, tokenizer });
    }
    if o.model_config.is_some() {
        return Err(TrainError::Options("--model_config gives a shape for --init random".into()));
    }
    let name = match o.model_path.as_str() {
        "none" => {
            of_size(&o.model_size)?;
            format!("t5-{}", o.model_size)
        }
        path => path.to_owned(),
    };
    let folder = ModelFolder::open(&name)?;
    let tokenizer = Tokenizer::load(o.tokenizer.as_deref().unwrap_or(folder.path()))?;
    Ok(ReaderModel { loaded: LoadedT5::open(&folder, device)?, tokenizer })
}

/// The published shape of a size.
pub fn of_size(size: &str) -> Result<T5Config, TrainError> {
    T5Config::of_size(size).ok_or_else(|| {
        TrainError::Options(format!("model size {size}: expected small, base, large, 3b or 11b"))
    })
}

/// A model of random values, refused where the values alone would not fit into memory.
pub(crate) fn random_model<D: Device>(
    config: T5Config,
    seed: u64,
    device: &D,
) -> Result<LoadedT5<D>, TrainError> {
    require_room(config.parameters())?;
    Ok(LoadedT5::random(config, Initialization { seed }, device))
}
