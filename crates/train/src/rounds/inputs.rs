//! What each stage is made of: settings, files, and results of other stages.

use std::collections::BTreeMap;
use std::path::Path;

use tercio_data::Tokenizer;

use super::settings::LoopSettings;
use super::stage::{Part, Stage, Step};
use super::state::{Done, Inputs, States, sum_of};
use super::work::files_of_model;
use crate::error::TrainError;
use crate::options::{Init, TaskOptions, TrainOptions, may_change};
use crate::setup;

/// Settings that a run may go on with though they change its result; a stage is done anew for them.
const COUNT: [&str; 4] = ["total_steps", "eval_freq", "early_stop", "eval_n_context"];

/// Stages that are up to date.
#[derive(Default)]
pub(super) struct Known(BTreeMap<Stage, Done>);

impl Known {
    pub fn has(&self, stage: Stage) -> bool {
        self.0.contains_key(&stage)
    }
    pub fn add(&mut self, stage: Stage, done: Done) {
        self.0.insert(stage, done);
    }
    pub fn get(&self, stage: Stage) -> Option<&Done> {
        self.0.get(&stage)
    }
}

/// The inputs of a stage whose needs are all known.
///
/// # Errors
/// A file that cannot be read; a model to start from that is not there.
pub(super) fn of(
    stage: Stage,
    settings: &LoopSettings,
    known: &Known,
    states: &mut States,
) -> Result<Inputs, TrainError> {
    let (all, search) = (&settings.all, &settings.search);
    let mut inputs = Inputs::new();
    for need in stage.needs(settings.shape()) {
        let results = known.get(need).map(|done| done.results.clone()).unwrap_or_default();
        // Names of files are those of the version of the stage; content decides.
        inputs.insert(need.to_string(), sum_of(results));
    }
    let mut add = |name: &str, value: String| drop(inputs.insert(name.to_owned(), value));
    // Those that ask words and vectors.
    let asks = matches!(stage.step, Step::Search | Step::Measure);
    if search.hybrid && asks && (stage.step, stage.round()) != (Step::Search, 1) {
        let words = search.words_weight;
        add("search.hybrid_method", format!("{:?}, words {words}", search.hybrid_method));
    }
    match stage.step {
        Step::Index if stage.part == Part::Bm25 => {
            add("passages", states.hash(&all.passages)?);
            add("search.k1", search.k1.to_string());
            add("search.b", search.b.to_string());
        }
        // A flat index leads to its vectors by their folder's name.
        Step::Index => {
            let vectors = states.folder(stage.sibling(Step::Vectors));
            add("folder", std::path::absolute(&vectors).unwrap_or(vectors).display().to_string());
        }
        Step::Search => {
            let needed = settings.scored().max(settings.reader.model.n_context);
            add("passages", states.hash(&all.passages)?);
            add("train_data", states.hash(&all.train_data)?);
            add("eval_data", states.hash(&all.eval_data)?);
            add("maxload", all.maxload.to_string());
            add("passages of a training question", needed.to_string());
            add("search.n_docs", search.n_docs.to_string());
        }
        Step::Reader => {
            add_training(&settings.reader, "reader", &mut add)?;
            if stage.round() == 1 || !settings.shape().reader_goes_on {
                add_start(&start_of_reader(settings), "reader", states, &mut add)?;
            }
        }
        Step::Scores => {
            add_reading(settings, &mut add);
            add("scores.n_context", settings.scored().to_string());
            add("retriever.loss contrasts", settings.retriever.model.contrasts().to_string());
        }
        Step::Initial => {
            let o = &settings.retriever;
            add_table(&table_of(&o.model)?, "retriever", &["n_context", "eval_n_context", "loss"], &mut add);
            add("retriever.seed", o.run.seed.to_string());
            add("retriever.dropout", format!("{:?}", o.optim.dropout));
            add_start(&start_of_retriever(settings), "retriever", states, &mut add)?;
        }
        Step::Retriever => add_training(&settings.retriever, "retriever", &mut add)?,
        Step::Vectors => {
            let o = &settings.embed;
            add("passages", states.hash(&all.passages)?);
            add("embed.dtype", o.dtype.name().to_owned());
            add("embed.passages_per_shard", o.passages_per_shard.to_string());
            add("embed.per_gpu_batch_size", o.per_gpu_batch_size.to_string());
            add("embed.batch_tokens", o.batch_tokens.to_string());
            add("embed.window", o.window.to_string());
            add("retriever.precision", settings.retriever.compute.get().name().to_owned());
        }
        Step::Measure => {
            add("passages", states.hash(&all.passages)?);
            add("eval_data", states.hash(&all.eval_data)?);
            add("search.n_docs", search.n_docs.to_string());
            add_reading(settings, &mut add);
        }
    }
    Ok(inputs)
}

/// How the reader answers and scores.
fn add_reading(settings: &LoopSettings, add: &mut impl FnMut(&str, String)) {
    let (o, at_work) = (&settings.reader, &settings.scores);
    add("passages of an answer", settings.answered().to_string());
    add("scores.per_gpu_batch_size", at_work.per_gpu_batch_size.to_string());
    add("reader.text_maxlength", o.model.text_maxlength.to_string());
    add("reader.no_title", o.model.no_title.to_string());
    add("reader.passage_eos", o.model.passage_eos.to_string());
    add("reader.generation_max_length", o.model.generation_max_length.to_string());
    add("reader.precision", o.compute.get().name().to_owned());
}

fn add_training<T: TaskOptions>(
    options: &TrainOptions<T>,
    name: &str,
    add: &mut impl FnMut(&str, String),
) -> Result<(), TrainError> {
    let free: Vec<&str> = may_change::<T>().into_iter().filter(|key| !COUNT.contains(key)).collect();
    add_table(&setup::config_table(options)?, name, &free, add);
    Ok(())
}

fn table_of(value: &impl serde::Serialize) -> Result<toml::Table, TrainError> {
    toml::Table::try_from(value).map_err(|e| TrainError::Options(e.to_string()))
}

/// Where weights come from is told by [`add_start`].
const START: [&str; 5] = ["model_path", "model_config", "tokenizer", "init", "model_size"];

fn add_table(table: &toml::Table, name: &str, without: &[&str], add: &mut impl FnMut(&str, String)) {
    for (key, value) in table.iter().filter(|(key, _)| !without.contains(&key.as_str())) {
        if !START.contains(&key.as_str()) {
            add(&format!("{name}.{key}"), value.to_string());
        }
    }
}

/// Where weights come from: the name of a model, of its shape, the folder of a tokenizer.
struct Start<'a> {
    model: Option<String>,
    shape: Option<&'a Path>,
    size: Option<&'a str>,
    tokenizer: Option<&'a Path>,
}

fn start_of_reader(settings: &LoopSettings) -> Start<'_> {
    let o = &settings.reader.model;
    let size = (o.model_config.is_none() && o.init == Init::Random).then_some(o.model_size.as_str());
    let model = match (o.init, o.model_path.as_str()) {
        (Init::Random, _) => None,
        (Init::Pretrained, "none") => Some(format!("t5-{}", o.model_size)),
        (Init::Pretrained, path) => Some(path.to_owned()),
    };
    Start { model, shape: o.model_config.as_deref(), size, tokenizer: o.tokenizer.as_deref() }
}

fn start_of_retriever(settings: &LoopSettings) -> Start<'_> {
    let o = &settings.retriever.model;
    let model = match (o.init, o.model_path.as_str()) {
        (Init::Random, _) => None,
        (Init::Pretrained, "none") => Some(crate::setup::retriever::DEFAULT_MODEL.to_owned()),
        (Init::Pretrained, path) => Some(path.to_owned()),
    };
    Start { model, shape: o.model_config.as_deref(), size: None, tokenizer: o.tokenizer.as_deref() }
}

fn add_start(
    start: &Start<'_>,
    name: &str,
    states: &mut States,
    add: &mut impl FnMut(&str, String),
) -> Result<(), TrainError> {
    if let Some(model) = &start.model {
        let files = files_of_model(Path::new(model))?;
        let sums = files.iter().map(|path| {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((file, states.hash(path)?))
        });
        add(&format!("{name}.model_path"), sum_of(sums.collect::<Result<Vec<_>, TrainError>>()?));
    }
    if let Some(size) = start.size {
        add(&format!("{name}.model_size"), size.to_owned());
    }
    if let Some(shape) = start.shape {
        add(&format!("{name}.model_config"), states.hash(shape)?);
    }
    let tokenizer = match (start.tokenizer, start.shape) {
        (Some(given), _) => Some(given),
        (None, Some(shape)) => shape.parent(),
        (None, None) => None,
    };
    if let Some(folder) = tokenizer {
        let tokenizer = Tokenizer::load(folder)?;
        let files =
            tokenizer.files().map(|(file, bytes)| (file.to_owned(), super::state::sum_of_bytes(bytes)));
        add(&format!("{name}.tokenizer"), sum_of(files));
    }
    Ok(())
}
