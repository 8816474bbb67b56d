//! A text classifier's run: an encoder or a classifier, its tokenizer, and the corpus, whose training part says which labels there are.
//!
//! Rank 0 alone decides on the labels: it reads the corpus before the model is made, and the others get the model's configuration from it
//! and compare the labels that they find themselves.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::corpus::{Corpus, Documents};
use tercio_data::{DataError, Labels, Tokenizer};
use tercio_engine::{Arena, Device};
use tercio_models::classifier::{
    Classifier, ClassifierConfig, ClassifierHeaders, HeadKind, LoadedClassifier,
};
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::Pooling;

use super::{Run, Task, TaskModel, model_folder, require_room};
use crate::classify::Faults;
use crate::error::TrainError;
use crate::objectives::classifier::ClassifierObjective;
use crate::objectives::classifier::loss::ClassificationLoss;
use crate::options::{
    ClassWeights, ClassifierHead, ClassifierModelOptions, ClassifierOptions, ClassifierPooling, Init,
    UseModel,
};
use crate::ranks::RankDevice;
use crate::ranks::setup::{from_rank_0, share_tokenizer, share_values};
use crate::run::write_atomic;
use crate::trainer::RunFolder;

/// Where a classifier begins that is told nothing.
const DEFAULT_MODEL: &str = "distilbert-base-uncased";
/// Tokens of a text at most where nobody says otherwise.
const DEFAULT_MAXLENGTH: usize = 512;
/// The figures of the test documents, in the run's folder.
pub const TEST_FIGURES: &str = "test.json";

/// A classifier's run, ready to train.
pub type ClassifierRun<D> = Run<D, ClassifierObjective>;

/// A classifier as it was read.
pub struct ClassifierModel<D: Device> {
    /// Model and values.
    pub loaded: LoadedClassifier<D>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The corpus, on rank 0, which needed its labels.
    pub corpus: Option<Corpus>,
}

impl<D: RankDevice> Task<D> for ClassifierModelOptions {
    type Model = ClassifierModel<D>;
    type Data = Documents;
    type Objective = ClassifierObjective;

    fn open(
        options: &ClassifierOptions,
        checkpoint: Option<&Path>,
        cache: &Path,
        device: &D,
    ) -> Result<ClassifierModel<D>, TrainError> {
        // The model's folder first: a mistake in it should not cost a pass over the data.
        let source = Source::find(options, checkpoint)?;
        let open = |path: &Path| Documents::open(path, cache);
        let train = open(options.data.train_data.as_deref().expect("checked with the settings"))?;
        let eval = options.data.eval_data.as_deref().map(open).transpose()?;
        let test = options.model.test_data.as_deref().map(open).transpose()?;
        let corpus = corpus(options, train, eval, test, true)?;
        tracing::info!("{corpus}");
        let (loaded, tokenizer) = source.open(options, &corpus, checkpoint.is_some(), device)?;
        Ok(ClassifierModel { loaded, tokenizer, corpus: Some(corpus) })
    }
    fn objective(
        options: &ClassifierOptions,
        model: ClassifierModel<D>,
        train: Documents,
        eval: Option<Documents>,
        test: Option<Documents>,
        _: &D,
    ) -> Result<(ClassifierObjective, Arena<D>), TrainError> {
        let ClassifierModel { loaded, tokenizer, corpus: own } = model;
        let corpus = match own {
            Some(corpus) => corpus,
            None => corpus(options, train, eval, test, false)?,
        };
        let LoadedClassifier { model, parameters, json, kept, .. } = loaded;
        let labels = Labels::from_names(model.config.labels.clone())?;
        if let Some(label) = corpus.labels.names().iter().find(|name| labels.id(name).is_none()) {
            return Err(TrainError::Unusable(format!(
                "{}: the label {label:?} is none of the {} that the model has: the data is not what the model was made for; give the \
                 same file, or --new-run to start over",
                corpus.train.documents().path().display(),
                labels.len()
            )));
        }
        let maxlength = model.config.max_length.unwrap_or(DEFAULT_MAXLENGTH);
        let weights = weights(options, &labels, &corpus)?;
        let loss = ClassificationLoss {
            multi_label: model.config.multi_label,
            weights,
            smoothing: options.optim.label_smoothing,
        };
        let objective = ClassifierObjective {
            model,
            json,
            kept,
            tokenizer,
            corpus,
            labels,
            loss,
            reduction: options.model.reduction,
            maxlength,
            recompute: options.model.recompute,
        };
        Ok((objective, parameters))
    }
    fn conclude(
        options: &ClassifierOptions,
        world: &World,
        device: &D,
        objective: &ClassifierObjective,
        parameters: &Arena<D>,
        folder: Option<&RunFolder>,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TrainError> {
        let Some(test) = &objective.corpus.test else { return Ok(()) };
        let best = match options.model.use_model {
            UseModel::Last => None,
            UseModel::Best => Some(values_of_run(world, device, objective, folder)?),
        };
        let parameters = best.as_ref().unwrap_or(parameters);
        let found = objective.measure(world, device, parameters, test, interrupted)?;
        if let (Some(found), Some(folder)) = (found, folder) {
            tracing::info!("test, {} documents: {}", test.len(), found.text);
            let figures: Map<String, Value> =
                found.figures.iter().map(|(name, value)| (name.to_string(), (*value).into())).collect();
            let text = serde_json::to_string_pretty(&figures).expect("numbers") + "\n";
            write_atomic(&folder.dir.join(TEST_FIGURES), text.as_bytes())?;
        }
        // Nobody is done before rank 0 has written everything.
        Ok(world.barrier()?)
    }
    fn test_file(&self) -> Option<&Path> {
        self.test_data.as_deref()
    }
    fn model_path(&self) -> &str {
        &self.model_path
    }
}

/// The values of the model that stands for the run, which rank 0 reads.
fn values_of_run<D: RankDevice>(
    world: &World,
    device: &D,
    objective: &ClassifierObjective,
    folder: Option<&RunFolder>,
) -> Result<Arena<D>, TrainError> {
    let mut values = match folder {
        Some(folder) => {
            let found = model_folder(&folder.dir.to_string_lossy())?;
            let config = objective.model.config.clone();
            LoadedClassifier::with_config(ClassifierHeaders::read(&found)?, config, 0, device)?.parameters
        }
        None => Arena::zeros(device, objective.model.layout()),
    };
    share_values(world, objective.model.layout(), &mut values, device)?;
    Ok(values)
}

/// The corpus of open files; `says` where its faults are told.
fn corpus(
    options: &ClassifierOptions,
    train: Documents,
    eval: Option<Documents>,
    test: Option<Documents>,
    says: bool,
) -> Result<Corpus, TrainError> {
    let columns = options.model.columns();
    let named = |documents: Documents| documents.with_columns(columns.clone());
    let (eval, test) = (eval.map(named).transpose()?, test.map(named).transpose()?);
    let mut faults = Faults::default();
    let mut on_fault = |fault: &DataError| {
        if says {
            faults.say(fault);
        }
    };
    let settings = options.model.corpus(options.run.seed);
    let corpus = Corpus::new(named(train)?, eval, test, &settings, &mut on_fault)?;
    faults.sum_up();
    Ok(corpus)
}

/// The weights of the model's labels.
fn weights(
    options: &ClassifierOptions,
    labels: &Labels,
    corpus: &Corpus,
) -> Result<Option<Vec<f64>>, TrainError> {
    match options.model.weights().map_err(TrainError::Options)? {
        ClassWeights::Equal => Ok(None),
        ClassWeights::Balanced => {
            let (texts, count) = (corpus.train.len() as f64, corpus.labels.len() as f64);
            let of = |name: &String| {
                // A label that no training text has is no class to balance.
                let own = corpus.labels.id(name).map_or(0, |id| corpus.labels.counts()[id as usize]);
                if own == 0 { 1.0 } else { texts / (count * own as f64) }
            };
            Ok(Some(labels.names().iter().map(of).collect()))
        }
        ClassWeights::Given(given) => {
            if let Some(unknown) = given.keys().find(|name| labels.id(name).is_none()) {
                return Err(TrainError::Options(format!(
                    "--class_weights: {unknown:?} is no label; the labels are {}",
                    labels.names().iter().take(20).cloned().collect::<Vec<_>>().join(", ")
                )));
            }
            Ok(Some(labels.names().iter().map(|name| given.get(name).copied().unwrap_or(1.0)).collect()))
        }
    }
}

/// Where a model comes from; its configuration is read and its values are not.
enum Source {
    Folder(Box<ClassifierHeaders>, Tokenizer),
    /// A shape, and whether it is a classifier's own.
    Random(Box<ClassifierConfig>, bool, Tokenizer),
}

impl Source {
    fn find(options: &ClassifierOptions, checkpoint: Option<&Path>) -> Result<Source, TrainError> {
        let o = &options.model;
        if let Some(path) = checkpoint {
            let headers = ClassifierHeaders::read(&ModelFolder::open(&path.to_string_lossy())?)?;
            return Ok(Source::Folder(Box::new(headers), Tokenizer::load(path)?));
        }
        if o.init == Init::Pretrained {
            if o.model_config.is_some() {
                return Err(TrainError::Options("--model_config gives a shape for --init random".into()));
            }
            let folder = match o.model_path.as_str() {
                "none" => ModelFolder::open(DEFAULT_MODEL)?,
                path => model_folder(path)?,
            };
            let tokenizer = Tokenizer::load(o.tokenizer.as_deref().unwrap_or(folder.path()))?;
            return Ok(Source::Folder(Box::new(ClassifierHeaders::read(&folder)?), tokenizer));
        }
        if o.model_path != "none" {
            return Err(TrainError::Options("--init random and --model_path exclude each other".into()));
        }
        let Some(shape) = &o.model_config else {
            let what = "--init random needs --model_config: the config.json of an encoder";
            return Err(TrainError::Options(what.into()));
        };
        let (config, own) = ClassifierConfig::read(shape)?;
        let folder = o.tokenizer.as_deref().or(shape.parent()).unwrap_or(Path::new("."));
        let tokenizer = Tokenizer::load(folder)
            .map_err(|e| TrainError::Unusable(format!("{e}; or give --tokenizer another folder")))?;
        Ok(Source::Random(Box::new(config), own, tokenizer))
    }
    fn open<D: Device>(
        self,
        options: &ClassifierOptions,
        corpus: &Corpus,
        goes_on: bool,
        device: &D,
    ) -> Result<(LoadedClassifier<D>, Tokenizer), TrainError> {
        let (found, own, tokenizer) = match &self {
            Source::Folder(headers, tokenizer) => (&headers.config, headers.is_classifier, tokenizer),
            Source::Random(config, own, tokenizer) => (&**config, *own, tokenizer),
        };
        let config = settle(options, found.clone(), own, tokenizer, corpus, goes_on)?;
        let (ids, rows) = (tokenizer.vocab_size(), config.encoder.vocab_size());
        if ids > rows {
            return Err(TrainError::Vocabulary { tokenizer: ids, model: rows });
        }
        require_room(config.encoder.parameters())?;
        let seed = options.run.seed;
        let (loaded, tokenizer) = match self {
            Source::Folder(headers, tokenizer) => {
                (LoadedClassifier::with_config(*headers, config, seed, device)?, tokenizer)
            }
            Source::Random(_, _, tokenizer) => (LoadedClassifier::random(config, seed, device), tokenizer),
        };
        if let Some(note) = &loaded.note {
            tracing::info!("{note}");
        }
        if !loaded.drawn.is_empty() {
            tracing::info!("new values, drawn by --seed: {}", loaded.drawn.join(", "));
        }
        Ok((loaded, tokenizer))
    }
}

/// The configuration that flags and labels make of `found`, which is a classifier's `own` or Hugging Face's defaults over an encoder.
fn settle(
    options: &ClassifierOptions,
    found: ClassifierConfig,
    own: bool,
    tokenizer: &Tokenizer,
    corpus: &Corpus,
    goes_on: bool,
) -> Result<ClassifierConfig, TrainError> {
    let o = &options.model;
    let names = |labels: &[String]| labels.iter().cloned().collect::<BTreeSet<String>>();
    // A classifier of the same labels is trained on, in its order; else the corpus says what they are.
    let same = own && names(&found.labels) == names(corpus.labels.names());
    if own && !same && !goes_on {
        tracing::info!(
            "the model was trained for {} labels, the data has {} others: the layer of the logits is new",
            found.labels.len(),
            corpus.labels.len()
        );
    }
    let mut config = found;
    if !(same || goes_on) {
        config.labels = corpus.labels.names().to_vec();
    }
    if own && !goes_on {
        say_what_changes(options, &config);
    }
    (config.multi_label, config.threshold) = (o.multi_label, o.threshold);
    let head = match o.head {
        Some(ClassifierHead::Family) => HeadKind::Family,
        Some(ClassifierHead::Linear) => HeadKind::Linear,
        None => config.head,
    };
    if head != config.head {
        config.head = head;
        config.dropout = match head {
            // flair's default.
            HeadKind::Linear => 0.0,
            HeadKind::Family => ClassifierConfig::new(config.encoder.clone(), Vec::new()).dropout,
        };
    }
    match o.pooling {
        Some(ClassifierPooling::Cls) => config.pooling = Pooling::First,
        Some(ClassifierPooling::Mean) => config.pooling = Pooling::Mean,
        None => {}
    }
    if let Some(layers) = o.layer_list(config.encoder.layers()).map_err(TrainError::Options)? {
        config.layers = layers;
    }
    if let Some(p) = options.optim.dropout {
        config.encoder.set_dropout(p);
        config.dropout = p;
    }
    let most = config.encoder.max_tokens();
    let usual = tokenizer.max_length().unwrap_or(DEFAULT_MAXLENGTH).min(DEFAULT_MAXLENGTH).min(most);
    let maxlength = o.text_maxlength.or(config.max_length).unwrap_or(usual);
    if maxlength > most {
        return Err(TrainError::Options(format!(
            "--text_maxlength {maxlength}: the encoder takes at most {most} tokens"
        )));
    }
    config.max_length = Some(maxlength);
    config.check().map_err(|what| TrainError::Options(format!("--head, --pooling and --layers: {what}")))?;
    Ok(config)
}

/// Warns where a classifier is made to give its labels in another way than it was trained to: flags have the last word, their defaults too.
fn say_what_changes(options: &ClassifierOptions, found: &ClassifierConfig) {
    let o = &options.model;
    match (found.multi_label, o.multi_label) {
        (true, false) => tracing::warn!(
            "the model was trained to give a text several labels; without --multi_label it learns to give one"
        ),
        (false, true) => tracing::warn!(
            "the model was trained to give a text one label; with --multi_label it learns to give several"
        ),
        (true, true) if found.threshold != o.threshold => tracing::warn!(
            "the model's labels are those above {}; from here on those above --threshold {}",
            found.threshold,
            o.threshold
        ),
        _ => {}
    }
}

/// A model without its values.
#[derive(Serialize, Deserialize)]
struct Shape {
    config: Map<String, Value>,
    json: Map<String, Value>,
    /// The configuration as rank 0 has it, to compare.
    shown: String,
}

impl<D: RankDevice> TaskModel<D> for ClassifierModel<D> {
    fn share(world: &World, own: Option<Self>, device: &D) -> Result<Self, TrainError> {
        let Some(own) = own else { return from_the_first(world, device) };
        if world.size() == 1 {
            return Ok(own);
        }
        let config = &own.loaded.model.config;
        let shape = Shape {
            config: config.to_json(&own.loaded.json),
            json: own.loaded.json.clone(),
            shown: format!("{config:?}"),
        };
        world.broadcast_bytes(0, serde_json::to_vec(&shape).expect("plain JSON"))?;
        share_tokenizer(world, Some(&own.tokenizer))?;
        Ok(own)
    }
}

fn from_the_first<D: RankDevice>(world: &World, device: &D) -> Result<ClassifierModel<D>, TrainError> {
    let unlike =
        |what: &str| TrainError::Unusable(format!("rank 0 sent a model that is not understood here: {what}"));
    let shape: Shape = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
    let (config, _) = ClassifierConfig::from_json(&shape.config).map_err(|what| unlike(&what))?;
    if format!("{config:?}") != shape.shown {
        return Err(unlike(&format!("{config:?} here, {} there", shape.shown)));
    }
    let tokenizer = share_tokenizer(world, None)?.ok_or_else(|| unlike("no tokenizer"))?;
    let model = Classifier::new(config);
    let parameters = Arena::zeros(device, model.layout());
    // What is kept beside the parameters is rank 0's, which saves.
    let (kept, note, drawn) = (Vec::new(), None, Vec::new());
    let loaded = LoadedClassifier { model, parameters, json: shape.json, kept, note, drawn };
    Ok(ClassifierModel { loaded, tokenizer, corpus: None })
}
