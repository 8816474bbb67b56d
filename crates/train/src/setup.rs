//! From a reader's settings to a run that is ready: folder, lease, configuration, model (from the newest checkpoint, or
//! where the settings say), tokenizer and data.

use std::path::{Path, PathBuf};

use serde_json::Map;
use tercio_data::{Questions, ReaderEncoding, Tokenizer};
use tercio_engine::{Arena, Device};
use tercio_models::folder::ModelFolder;
use tercio_models::t5::{Initialization, LoadedT5, T5Config};

use crate::error::TrainError;
use crate::objectives::reader::ReaderObjective;
use crate::optimizer::{check_names, no_moments};
use crate::options::{Init, Optim, ReaderModelOptions, ReaderOptions, may_change};
use crate::run::{self, CheckpointStore, FoundCheckpoint, Lease, RunError, config, memory, metrics};
use crate::state::{Counters, StoredState, load_moments};
use crate::step::TrainState;
use crate::trainer::RunFolder;

/// Key of the evaluation data's fingerprint.
const EVAL_DATA: &str = "eval_data";

/// A reader's run, ready to train.
pub struct ReaderRun<D: Device> {
    /// Data, model and measure.
    pub objective: ReaderObjective,
    /// Parameters and moments.
    pub state: TrainState<D>,
    /// The counters of the checkpoint that the run goes on from; `None` at step 0.
    pub counters: Option<Counters>,
}

/// The folder of a run.
pub fn run_dir(options: &ReaderOptions) -> PathBuf {
    options.run.checkpoint_dir.join(&options.run.name)
}

/// The settings as they are stored in `config.toml`, batch sizes translated.
pub fn config_table(options: &ReaderOptions) -> Result<toml::Table, TrainError> {
    let plan = options.data.batch_plan().map_err(TrainError::Options)?;
    let mut options = options.clone();
    options.data.global_batch_size = plan.global;
    options.data.micro_batch_size = plan.micro;
    options.data.bit_groups = plan.groups;
    options.compute = options.compute.settled();
    toml::Table::try_from(&options).map_err(|e| {
        TrainError::Options(format!("a setting has no form in TOML, whose largest number is 2^63 - 1: {e}"))
    })
}

/// Opens the run folder: takes the lease, compares the configuration with the stored one, or stores it.
/// With `--new-run` a folder that holds a run is moved aside first.
///
/// Where the folder's run has not logged a single update yet, nothing depends on its settings: the new ones replace them.
pub fn open_folder(options: &ReaderOptions) -> Result<RunFolder, TrainError> {
    let dir = run_dir(options);
    let wanted = config_table(options)?;
    if starts_anew(options) && dir.join("config.toml").exists() {
        let aside = move_aside(&dir)?;
        tracing::warn!("the earlier run of this name is now {}", aside.display());
    }
    let lease = Lease::acquire(&dir)?;
    let store = CheckpointStore::open(&dir)?;
    store.remove_stale(&lease)?;
    run::remove_temporary(&dir)?;
    settle_config(&dir, Some(&store), &wanted)?;
    if config::read_config(&dir)?.as_ref() != Some(&wanted) {
        config::write_config(&dir, &wanted)?;
    }
    Ok(RunFolder { dir, lease, store })
}

/// Whether `--new-run` was given, and this is not the same command started once more by its launcher or by Slurm: that one
/// goes on.
fn starts_anew(options: &ReaderOptions) -> bool {
    let restarts = tercio_comm::place::restarts(&|name| std::env::var(name).ok());
    if options.run.new_run && restarts > 0 {
        tracing::info!("--new-run was for the first start; restart {restarts} goes on with its run");
    }
    options.run.new_run && restarts == 0
}

/// Refuses settings that the run in the folder cannot go on with, and says which of the others changed.
fn settle_config(
    dir: &Path,
    store: Option<&CheckpointStore>,
    wanted: &toml::Table,
) -> Result<(), TrainError> {
    let listing = store.map(CheckpointStore::list).transpose()?.unwrap_or_default();
    let has_checkpoints = !(listing.complete.is_empty() && listing.incomplete.is_empty());
    let Some(mut stored) = config::read_config(dir)? else {
        if has_checkpoints {
            return Err(RunError::Malformed {
                path: dir.join("config.toml"),
                problem: "expected the settings of the run whose checkpoints are in this folder, found no such file; \
                          restore it, or start another run with --new-run or another --name"
                    .into(),
            }
            .into());
        }
        return Ok(());
    };
    let has_begun = has_checkpoints
        || (dir.join(metrics::METRICS_NAME).exists() && !metrics::read_series(dir, None, "loss")?.is_empty());
    if !has_begun {
        return Ok(());
    }
    for (key, default) in added_settings() {
        stored.entry(key).or_insert(default);
    }
    config::check(dir, &stored, wanted, &may_change())?;
    for d in config::compare(&stored, wanted, &[]) {
        let show = |v: &Option<toml::Value>| v.as_ref().map_or("not set".to_owned(), |v| v.to_string());
        let (key, before, now) = (&d.key, show(&d.stored), show(&d.wanted));
        tracing::info!("--{key} was {before}, from here on it is {now}");
        let scheduler = wanted.get("scheduler").and_then(|v| v.as_str()).unwrap_or("fixed");
        if key == "total_steps" && scheduler != "fixed" && !wanted.contains_key("scheduler_steps") {
            tracing::warn!(
                "the {scheduler} schedule ends at --total_steps: it changes its slope here, and the run is not the one that a \
                 start with {now} would have been; --scheduler_steps would keep the two apart"
            );
        }
    }
    Ok(())
}

/// Settings that came later than the first runs, and what those did before.
fn added_settings() -> [(&'static str, toml::Value); 7] {
    [
        ("precision", "f32".into()),
        ("no_decay", "".into()),
        ("scale_parameter", false.into()),
        ("relative_step", false.into()),
        ("clip_threshold", 1.0.into()),
        ("decay_rate", (-0.8).into()),
        ("label_smoothing", 0.0.into()),
    ]
}

/// The checkpoint that a run of these settings would go on from; looks only, and changes nothing in the run's folder.
pub fn look_for_checkpoint(options: &ReaderOptions) -> Result<Option<FoundCheckpoint>, TrainError> {
    let dir = run_dir(options);
    if starts_anew(options) || !dir.is_dir() {
        return Ok(None);
    }
    // Opening a store creates its folder.
    let store = match dir.join("checkpoint").is_dir() {
        true => Some(CheckpointStore::open(&dir)?),
        false => None,
    };
    settle_config(&dir, store.as_ref(), &config_table(options)?)?;
    Ok(store.map(|s| s.latest_complete()).transpose()?.flatten())
}

fn move_aside(dir: &Path) -> Result<PathBuf, TrainError> {
    // Nobody may be at work in it.
    drop(Lease::acquire(dir)?);
    let name = dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let free = (1u32..)
        .map(|i| dir.with_file_name(format!("{name}.before-{i}")))
        .find(|p| !p.exists())
        .expect("some number is free");
    std::fs::rename(dir, &free).map_err(|e| run::RunError::from_io("move aside", dir, None, e))?;
    Ok(free)
}

/// Opens data and model of a run. From the newest complete checkpoint of `folder` where there is one (whatever
/// `--model_path` says), else as the settings say, at step 0.
pub fn open_reader<D: Device>(
    options: &ReaderOptions,
    folder: &RunFolder,
    device: &D,
) -> Result<ReaderRun<D>, TrainError> {
    open_reader_from(options, folder.store.latest_complete()?, &folder.dir.join("data"), device)
}

/// As [`open_reader`], from the given checkpoint or else the start, with the data's index in the folder `cache`.
pub fn open_reader_from<D: Device>(
    options: &ReaderOptions,
    found: Option<FoundCheckpoint>,
    cache: &Path,
    device: &D,
) -> Result<ReaderRun<D>, TrainError> {
    options.check().map_err(TrainError::Options)?;
    let (loaded, tokenizer) = model_of(options, found.as_ref(), device)?;
    let path = options.data.train_data.as_ref().expect("checked with the settings");
    let train = Questions::open(path, cache)?;
    let eval = options.data.eval_data.as_ref().map(|p| Questions::open(p, cache)).transpose()?;
    let (objective, parameters) = reader_of(options, loaded, tokenizer, train, eval)?;
    state_of(options, found, objective, parameters, device)
}

/// Model and tokenizer of a checkpoint, or where the settings say.
pub(crate) fn model_of<D: Device>(
    options: &ReaderOptions,
    found: Option<&FoundCheckpoint>,
    device: &D,
) -> Result<(LoadedT5<D>, Tokenizer), TrainError> {
    let (mut loaded, tokenizer) = match found {
        Some(checkpoint) => {
            checkpoint.verify_full()?;
            let path = &checkpoint.path;
            let model = ModelFolder::open(&path.to_string_lossy())?;
            (LoadedT5::open(&model, device)?, Tokenizer::load(path)?)
        }
        None => initial_model(&options.model, options.run.seed, device)?,
    };
    if let Some(p) = options.optim.dropout {
        loaded.model.config.dropout_rate = p;
    }
    check_vocabulary(&tokenizer, &loaded.model.config)?;
    Ok((loaded, tokenizer))
}

/// The objective of model and data, and the values.
pub(crate) fn reader_of<D: Device>(
    options: &ReaderOptions,
    loaded: LoadedT5<D>,
    tokenizer: Tokenizer,
    train: Questions,
    eval: Option<Questions>,
) -> Result<(ReaderObjective, Arena<D>), TrainError> {
    let used = match options.data.maxload {
        n if n >= 0 => train.len().min(n as usize),
        _ => train.len(),
    };
    let plan = options.data.batch_plan().map_err(TrainError::Options)?;
    let LoadedT5 { model, parameters, json } = loaded;
    check_names(&options.optim, model.layout())?;
    let objective = ReaderObjective {
        model,
        json,
        tokenizer,
        encoding: encoding(&options.model),
        train,
        used,
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

/// The state of a checkpoint, or that of step 0.
pub(crate) fn state_of<D: Device>(
    options: &ReaderOptions,
    found: Option<FoundCheckpoint>,
    objective: ReaderObjective,
    parameters: Arena<D>,
    device: &D,
) -> Result<ReaderRun<D>, TrainError> {
    let Some(checkpoint) = found else {
        let [first, second] = no_moments(device, options.optim.optim, objective.model.layout(), None);
        let state = TrainState { step: 0, parameters, first, second };
        return Ok(ReaderRun { objective, state, counters: None });
    };
    let run = go_on(device, objective, options.optim.optim, parameters, &checkpoint)?;
    if options.model.model_path != "none" {
        tracing::info!(
            "--model_path {} was the start of this run: the weights are the checkpoint's",
            options.model.model_path
        );
    }
    Ok(run)
}

fn go_on<D: Device>(
    device: &D,
    objective: ReaderObjective,
    optim: Optim,
    parameters: Arena<D>,
    checkpoint: &FoundCheckpoint,
) -> Result<ReaderRun<D>, TrainError> {
    let path = checkpoint.path.display();
    let stored: StoredState = serde_json::from_value(checkpoint.manifest.state.clone())
        .map_err(|e| TrainError::Unusable(format!("{path}: training.json: {e}")))?;
    let now = crate::objective::Objective::<D>::fingerprint(&objective);
    // Other held-out questions change no bit, but the scores before and after are of two measures.
    let (mut trained, mut training) = (stored.data.clone(), now.clone());
    if trained.remove(EVAL_DATA) != training.remove(EVAL_DATA) && stored.counters.best.is_some() {
        tracing::warn!(
            "the evaluation data is not that of the checkpoint {path}: the best score so far was measured on other questions"
        );
    }
    if trained != training {
        let show = |m: &Map<_, _>| serde_json::to_string(m).unwrap_or_default();
        return Err(TrainError::Unusable(format!(
            "the training data is not that of the checkpoint {path}: it was {}, now it is {}; give the same file, or \
             --new-run to start over",
            show(&stored.data),
            show(&now)
        )));
    }
    if stored.arithmetic != device.arithmetic() {
        tracing::warn!(
            "the checkpoint was computed with {}, this device computes with {}: the run goes on with the same mathematics, \
             but not with the same bits",
            stored.arithmetic,
            device.arithmetic()
        );
    }
    let [first, second] = load_moments(device, optim, objective.model.layout(), &checkpoint.path)?;
    tracing::info!("going on from {path}: {} updates are done", checkpoint.step);
    let state = TrainState { step: checkpoint.step, parameters, first, second };
    Ok(ReaderRun { objective, state, counters: Some(stored.counters) })
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

/// The folder that a name of a model stands for; see [`open_model`].
///
/// # Errors
/// None is there.
pub fn model_folder(name: &str) -> Result<ModelFolder, TrainError> {
    let path = Path::new(name);
    if !path.join("config.json").is_file() {
        for link in ["best_dev", "latest"] {
            let checkpoint = path.join("checkpoint").join(link);
            if checkpoint.join("config.json").is_file() {
                return Ok(ModelFolder::open(&checkpoint.to_string_lossy())?);
            }
        }
    }
    Ok(ModelFolder::open(name)?)
}

fn initial_model<D: Device>(
    o: &ReaderModelOptions,
    seed: u64,
    device: &D,
) -> Result<(LoadedT5<D>, Tokenizer), TrainError> {
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
        return Ok((random_model(config, seed, device)?, tokenizer));
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
    Ok((LoadedT5::open(&folder, device)?, tokenizer))
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
    let bytes = u64::try_from(4 * config.parameters()).unwrap_or(u64::MAX);
    if let Some(room) = memory::available().filter(|&room| room < bytes) {
        return Err(TrainError::Unusable(format!(
            "the model's values take {}, this process can have {}; choose a smaller model",
            memory::human(bytes),
            memory::human(room)
        )));
    }
    Ok(LoadedT5::random(config, Initialization { seed }, device))
}
