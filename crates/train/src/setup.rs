//! From settings to a run that is ready: folder, lease, configuration, model (from the newest checkpoint, or where the
//! settings say) and data. What a task has of its own is a file below `setup`.

pub mod classifier;
pub mod colbert;
pub mod reader;
pub mod retriever;

use std::path::{Path, PathBuf};

use serde_json::Map;
use tercio_comm::World;
use tercio_cuda::Cuda;
use tercio_engine::{Arena, Cpu, Device};
use tercio_models::folder::ModelFolder;

use crate::error::TrainError;
use crate::objective::Objective;
use crate::optimizer::{check_names, no_moments};
use crate::options::{Optim, TaskOptions, TrainOptions, may_change};
use crate::ranks::RankDevice;
use crate::ranks::corpus::ExampleFile;
use crate::run::{self, CheckpointStore, FoundCheckpoint, Lease, RunError, config, memory, metrics};
use crate::state::{Counters, StoredState, load_moments};
use crate::step::TrainState;
use crate::trainer::RunFolder;

pub use reader::{ReaderRun, encoding, of_size, open_model};

/// Key of the evaluation data's fingerprint.
const EVAL_DATA: &str = "eval_data";

/// A task that models are trained for: what opens from its settings.
pub trait Task<D: RankDevice>: TaskOptions {
    /// Model, tokenizer and whatever else is read from folders.
    type Model: TaskModel<D>;
    /// A file of its examples.
    type Data: ExampleFile;
    /// What is trained.
    type Objective: Objective<D> + Send;

    /// The model of a checkpoint's folder, or where the settings say. What is read of the data for it has its index in the folder
    /// `cache`.
    ///
    /// # Errors
    /// What is missing or does not fit.
    fn open(
        options: &TrainOptions<Self>,
        checkpoint: Option<&Path>,
        cache: &Path,
        device: &D,
    ) -> Result<Self::Model, TrainError>;
    /// The objective of model and data, and the model's values; `test` is the file of [`Task::test_file`].
    ///
    /// # Errors
    /// Data that does not fit the settings.
    fn objective(
        options: &TrainOptions<Self>,
        model: Self::Model,
        train: Self::Data,
        eval: Option<Self::Data>,
        test: Option<Self::Data>,
        device: &D,
    ) -> Result<(Self::Objective, Arena<D>), TrainError>;
    /// What is done by all ranks when the last update is, and everything saved; `parameters` are the last ones, `folder` is rank 0's.
    ///
    /// # Errors
    /// What cannot be read or written; a rank was lost.
    fn conclude(
        _options: &TrainOptions<Self>,
        _world: &World,
        _device: &D,
        _objective: &Self::Objective,
        _parameters: &Arena<D>,
        _folder: Option<&RunFolder>,
        _interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TrainError> {
        Ok(())
    }
    /// A file of examples that are measured when the last update is done.
    fn test_file(&self) -> Option<&Path> {
        None
    }
    /// Where the weights of a run without checkpoints come from, as a flag would say it; `none`: not from a folder.
    fn model_path(&self) -> &str;
}

/// A task on every device.
pub trait AnyTask: Task<Cpu> + Task<Cuda> {}
impl<T: Task<Cpu> + Task<Cuda>> AnyTask for T {}

/// A model that rank 0 has read and the others get from it.
pub trait TaskModel<D: RankDevice>: Sized {
    /// Rank 0's model on every rank; the values to train are zeros on the others, for their owner to send later.
    ///
    /// # Errors
    /// A rank was lost or failed.
    fn share(world: &World, own: Option<Self>, device: &D) -> Result<Self, TrainError>;
}

/// A run, ready to train.
pub struct Run<D: Device, O> {
    /// Data, model and measure.
    pub objective: O,
    /// Parameters and moments.
    pub state: TrainState<D>,
    /// The counters of the checkpoint that the run goes on from; `None` at step 0.
    pub counters: Option<Counters>,
}

/// The folder of a run.
pub fn run_dir<T: TaskOptions>(options: &TrainOptions<T>) -> PathBuf {
    options.run.checkpoint_dir.join(&options.run.name)
}

/// The settings as they are stored in `config.toml`, batch sizes translated.
pub fn config_table<T: TaskOptions>(options: &TrainOptions<T>) -> Result<toml::Table, TrainError> {
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
pub fn open_folder<T: TaskOptions>(options: &TrainOptions<T>) -> Result<RunFolder, TrainError> {
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
    settle_config::<T>(&dir, Some(&store), &wanted)?;
    if config::read_config(&dir)?.as_ref() != Some(&wanted) {
        config::write_config(&dir, &wanted)?;
    }
    Ok(RunFolder { dir, lease, store })
}

/// Whether `--new-run` was given, and this is not the same command started once more by its launcher or by Slurm: that one
/// goes on.
fn starts_anew<T: TaskOptions>(options: &TrainOptions<T>) -> bool {
    let restarts = tercio_comm::place::restarts(&|name| std::env::var(name).ok());
    if options.run.new_run && restarts > 0 {
        tracing::info!("--new-run was for the first start; restart {restarts} goes on with its run");
    }
    options.run.new_run && restarts == 0
}

/// Refuses settings that the run in the folder cannot go on with, and says which of the others changed.
fn settle_config<T: TaskOptions>(
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
    for (key, default) in T::added() {
        stored.entry(key).or_insert(default);
    }
    config::check(dir, &stored, wanted, &may_change::<T>())?;
    for d in config::compare(&stored, wanted, &[]) {
        let show = |v: &Option<toml::Value>| v.as_ref().map_or("not set".to_owned(), |v| v.to_string());
        let (key, before, now) = (&d.key, show(&d.stored), show(&d.wanted));
        tracing::info!("--{key} was {before}, from here on it is {now}");
        let scheduler = wanted.get("scheduler").and_then(|v| v.as_str()).unwrap_or("fixed");
        if ["total_steps", "epochs"].contains(&key.as_str())
            && scheduler != "fixed"
            && !wanted.contains_key("scheduler_steps")
        {
            tracing::warn!(
                "the {scheduler} schedule ends at --{key}: it changes its slope here, and the run is not the one that a \
                 start with {now} would have been; --scheduler_steps would keep the two apart"
            );
        }
    }
    Ok(())
}

/// The checkpoint that a run of these settings would go on from; looks only, and changes nothing in the run's folder.
pub fn look_for_checkpoint<T: TaskOptions>(
    options: &TrainOptions<T>,
) -> Result<Option<FoundCheckpoint>, TrainError> {
    let dir = run_dir(options);
    if starts_anew(options) || !dir.is_dir() {
        return Ok(None);
    }
    // Opening a store creates its folder.
    let store = match dir.join("checkpoint").is_dir() {
        true => Some(CheckpointStore::open(&dir)?),
        false => None,
    };
    settle_config::<T>(&dir, store.as_ref(), &config_table(options)?)?;
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
///
/// # Errors
/// As [`open_run_from`].
pub fn open_run<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    folder: &RunFolder,
    device: &D,
) -> Result<Run<D, T::Objective>, TrainError> {
    open_run_from(options, folder.store.latest_complete()?, &folder.dir.join("data"), device)
}

/// As [`open_run`], from the given checkpoint or else the start, with the data's index in the folder `cache`.
///
/// # Errors
/// Settings, a model, a tokenizer or data that cannot be used; data that is not the checkpoint's.
pub fn open_run_from<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    found: Option<FoundCheckpoint>,
    cache: &Path,
    device: &D,
) -> Result<Run<D, T::Objective>, TrainError> {
    options.check().map_err(TrainError::Options)?;
    let model = model_of(options, found.as_ref(), cache, device)?;
    let path = options.data.train_data.as_ref().expect("checked with the settings");
    let train = T::Data::open(path, cache)?;
    let open = |path: &Path| T::Data::open(path, cache);
    let eval = options.data.eval_data.as_deref().map(open).transpose()?;
    let test = options.model.test_file().map(open).transpose()?;
    let (objective, parameters) = objective_of(options, model, train, eval, test, device)?;
    state_of(options, found, objective, parameters, device)
}

/// The model of a checkpoint, or where the settings say.
pub(crate) fn model_of<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    found: Option<&FoundCheckpoint>,
    cache: &Path,
    device: &D,
) -> Result<T::Model, TrainError> {
    if let Some(checkpoint) = found {
        checkpoint.verify_full()?;
    }
    T::open(options, found.map(|checkpoint| checkpoint.path.as_path()), cache, device)
}

/// The objective of model and data, and the values.
pub(crate) fn objective_of<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    model: T::Model,
    train: T::Data,
    eval: Option<T::Data>,
    test: Option<T::Data>,
    device: &D,
) -> Result<(T::Objective, Arena<D>), TrainError> {
    let (objective, parameters) = T::objective(options, model, train, eval, test, device)?;
    check_names(&options.optim, objective.layout())?;
    Ok((objective, parameters))
}

/// The state of a checkpoint, or that of step 0.
pub(crate) fn state_of<D: RankDevice, T: Task<D>>(
    options: &TrainOptions<T>,
    found: Option<FoundCheckpoint>,
    objective: T::Objective,
    parameters: Arena<D>,
    device: &D,
) -> Result<Run<D, T::Objective>, TrainError> {
    let Some(checkpoint) = found else {
        let [first, second] = no_moments(device, options.optim.optim, objective.layout(), None);
        let state = TrainState { step: 0, parameters, first, second };
        return Ok(Run { objective, state, counters: None });
    };
    let run = go_on(device, objective, options.optim.optim, parameters, &checkpoint)?;
    let start = options.model.model_path();
    if start != "none" {
        tracing::info!("--model_path {start} was the start of this run: the weights are the checkpoint's");
    }
    Ok(run)
}

fn go_on<D: Device, O: Objective<D>>(
    device: &D,
    objective: O,
    optim: Optim,
    parameters: Arena<D>,
    checkpoint: &FoundCheckpoint,
) -> Result<Run<D, O>, TrainError> {
    let path = checkpoint.path.display();
    let mut stored: StoredState = serde_json::from_value(checkpoint.manifest.state.clone())
        .map_err(|e| TrainError::Unusable(format!("{path}: training.json: {e}")))?;
    let now = objective.fingerprint();
    // The run may go on with other held-out data, but the scores before and after are of two measures.
    let (mut trained, mut training) = (stored.data.clone(), now.clone());
    if trained.remove(EVAL_DATA) != training.remove(EVAL_DATA) {
        if stored.counters.best.is_some() {
            tracing::warn!(
                "the evaluation data is not that of the checkpoint {path}: the best score so far was measured on other data and \
                 counts no more, the next evaluation is the first"
            );
        }
        stored.counters.forget_scores();
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
    let [first, second] = load_moments(device, optim, objective.layout(), &checkpoint.path)?;
    tracing::info!("going on from {path}: {} updates are done", checkpoint.step);
    let state = TrainState { step: checkpoint.step, parameters, first, second };
    Ok(Run { objective, state, counters: Some(stored.counters) })
}

/// The folder that a name of a model stands for; see [`open_model`].
///
/// # Errors
/// None is there.
pub fn model_folder(name: &str) -> Result<ModelFolder, TrainError> {
    let path = Path::new(name);
    if !path.join("config.json").is_file() {
        for link in ["model", "best_dev", "latest"] {
            let checkpoint = path.join("checkpoint").join(link);
            if checkpoint.join("config.json").is_file() {
                return Ok(ModelFolder::open(&checkpoint.to_string_lossy())?);
            }
        }
    }
    Ok(ModelFolder::open(name)?)
}

/// Refuses values that would not fit into memory, before they are made.
pub(crate) fn require_room(parameters: u128) -> Result<(), TrainError> {
    let bytes = u64::try_from(parameters.saturating_mul(4)).unwrap_or(u64::MAX);
    match memory::available().filter(|&room| room < bytes) {
        None => Ok(()),
        Some(room) => Err(TrainError::Unusable(format!(
            "the model's values take {}, this process can have {}; choose a smaller model",
            memory::human(bytes),
            memory::human(room)
        ))),
    }
}

/// How many examples of a file of `len` are used: `--maxload`.
pub(crate) fn used(maxload: i64, len: usize) -> usize {
    usize::try_from(maxload).map_or(len, |most| len.min(most))
}
