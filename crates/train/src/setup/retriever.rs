//! A retriever's run: an encoder with its head, its tokenizer, examples, and a reader where one teaches on the fly.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::retrieval::ContrastiveChoice;
use tercio_data::{ReaderEncoding, RetrievalExamples, Tokenizer};
use tercio_engine::{Arena, Device};
use tercio_models::bert::BertConfig;
use tercio_models::embedding_model::TextKind;
use tercio_models::encoder::EncoderConfig;
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::{LoadedRetriever, Pooling, Retriever, RetrieverConfig, RetrieverHeaders};
use tercio_models::sentence::SentenceConfig;

use super::reader::ReaderModel;
use super::{Run, Task, TaskModel, model_folder, open_model, require_room, used};
use crate::embed::stored_template;
use crate::error::TrainError;
use crate::objectives::retriever::batch::{PassageChoice, RetrieverEncoding};
use crate::objectives::retriever::loss::Scale;
use crate::objectives::retriever::{RetrieverLosses, RetrieverObjective, Teacher};
use crate::options::{Init, RetrieverLoss, RetrieverModelOptions, RetrieverOptions, TextOptions};
use crate::ranks::RankDevice;
use crate::ranks::setup::{from_rank_0, share_tokenizer, share_values};

/// Where a retriever begins that is told nothing, as FiD's does.
pub(crate) const DEFAULT_MODEL: &str = "bert-base-uncased";

/// A retriever's run, ready to train.
pub type RetrieverRun<D> = Run<D, RetrieverObjective<D>>;

/// A retriever as it was read.
pub struct RetrieverModel<D: Device> {
    /// Model and values.
    pub loaded: LoadedRetriever<D>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// A reader that teaches.
    pub teacher: Option<ReaderModel<D>>,
}

impl<D: RankDevice> Task<D> for RetrieverModelOptions {
    type Model = RetrieverModel<D>;
    type Data = RetrievalExamples;
    type Objective = RetrieverObjective<D>;

    fn open(
        options: &RetrieverOptions,
        checkpoint: Option<&Path>,
        _: &Path,
        device: &D,
    ) -> Result<RetrieverModel<D>, TrainError> {
        let (loaded, tokenizer) = match checkpoint {
            Some(path) => {
                let headers = RetrieverHeaders::read(&ModelFolder::open(&path.to_string_lossy())?)?;
                (from_headers(options, headers, device)?, Tokenizer::load(path)?)
            }
            None => initial_model(options, device)?,
        };
        check_vocabulary(&tokenizer, &loaded.model.config)?;
        let teacher = match &options.model.teacher {
            Some(name) => {
                let (loaded, tokenizer) = open_model(name, None, device)?;
                Some(ReaderModel { loaded, tokenizer })
            }
            None => None,
        };
        Ok(RetrieverModel { loaded, tokenizer, teacher })
    }
    fn objective(
        options: &RetrieverOptions,
        model: RetrieverModel<D>,
        train: RetrievalExamples,
        eval: Option<RetrievalExamples>,
        _: Option<RetrievalExamples>,
        device: &D,
    ) -> Result<(RetrieverObjective<D>, Arena<D>), TrainError> {
        let (o, plan) = (&options.model, options.data.batch_plan().map_err(TrainError::Options)?);
        let RetrieverModel { loaded, tokenizer, teacher } = model;
        let LoadedRetriever { mut model, parameters, json, kept, .. } = loaded;
        let teacher = teacher.map(|ReaderModel { loaded, tokenizer }| {
            let encoding = ReaderEncoding {
                text_maxlength: o.teacher_text_maxlength,
                answer_maxlength: None,
                n_context: o.n_context,
                no_title: o.text.no_title,
                passage_eos: o.teacher_passage_eos,
            };
            Teacher::new(device, loaded.model, loaded.parameters, tokenizer, encoding)
        });
        if let Some(eval) = eval.as_ref().filter(|_| o.distils() && teacher.is_none()) {
            // Better now than at the first evaluation.
            eval.get(0)?.scored(1)?;
        }
        let both = o.loss == RetrieverLoss::Both;
        let weight = |of: f64, learned: bool| match (learned, both) {
            (false, _) => 0.0,
            (true, true) => of,
            (true, false) => 1.0,
        };
        // Lengths are settled in the model's configuration.
        let encoding = encoding(&model, &o.text, (None, None))?;
        tracing::info!(
            "questions are {:?} of at most {} tokens, passages {:?} of {}",
            encoding.question_template.to_string(),
            encoding.question_maxlength,
            encoding.passage_template.to_string(),
            encoding.passage_maxlength
        );
        // Saved with the model, so that whoever embeds with it makes the same texts.
        model.config.question_template = Some(encoding.question_template.to_string());
        model.config.passage_template = Some(encoding.passage_template.to_string());
        let objective = RetrieverObjective {
            encoding,
            choice: PassageChoice {
                scored: if o.distils() { o.n_context } else { 0 },
                live: teacher.is_some(),
                contrastive: o.contrasts().then_some(ContrastiveChoice {
                    hard_negatives: o.hard_negatives,
                    other_negatives: o.other_negatives,
                    draw_positive: o.draw_positive,
                    draw_negatives: o.draw_negatives,
                }),
            },
            losses: RetrieverLosses {
                kl: weight(o.kl_weight, o.distils()),
                kl_mean: o.kl_mean,
                contrastive: weight(o.contrastive_weight, o.contrasts()),
                label_smoothing: options.optim.label_smoothing,
                scale: Scale::new(model.score_divisor(), o.temperature, o.teacher_temperature),
            },
            model,
            json,
            kept,
            tokenizer,
            teacher,
            used: used(options.data.maxload, train.len()),
            train,
            eval,
            eval_n_context: match (o.eval_n_context, o.distils()) {
                (0, true) => o.n_context,
                (0, false) => usize::MAX,
                (n, _) => n,
            },
            eval_batch: plan.micro,
            eval_print_freq: options.data.eval_print_freq,
            seed: options.run.seed,
            recompute: o.recompute,
        };
        Ok((objective, parameters))
    }
    fn model_path(&self) -> &str {
        &self.model_path
    }
}

/// How inputs of a retriever are made; lengths and templates that are not given are those that it was trained with, where it says
/// them.
///
/// # Errors
/// Templates without their places, also stored ones; texts longer than the encoder takes.
pub fn encoding(
    model: &Retriever,
    text: &TextOptions,
    (question, passage): (Option<usize>, Option<usize>),
) -> Result<RetrieverEncoding, TrainError> {
    let config = &model.config;
    let (mut question_template, mut passage_template) = text.templates().map_err(TrainError::Options)?;
    if text.question_template.is_none() {
        question_template = stored_template(config, TextKind::Question)?.unwrap_or(question_template);
    }
    if text.passage_template.is_none() && !text.no_title {
        passage_template = stored_template(config, TextKind::Passage)?.unwrap_or(passage_template);
    }
    let encoding = RetrieverEncoding {
        question_maxlength: question.unwrap_or(config.question_maxlength),
        passage_maxlength: passage.unwrap_or(config.passage_maxlength),
        question_template,
        passage_template,
        pad_questions: !config.apply_question_mask,
        pad_passages: !config.apply_passage_mask,
    };
    let most = config.encoder.max_tokens();
    for (flag, n) in [
        ("question_maxlength", encoding.question_maxlength),
        ("passage_maxlength", encoding.passage_maxlength),
    ] {
        if n > most {
            return Err(TrainError::Options(format!(
                "--{flag} {n}: the encoder takes at most {most} tokens"
            )));
        }
    }
    Ok(encoding)
}

fn check_vocabulary(tokenizer: &Tokenizer, config: &RetrieverConfig) -> Result<(), TrainError> {
    let (ids, rows) = (tokenizer.vocab_size(), config.encoder.vocab_size());
    if ids > rows {
        return Err(TrainError::Vocabulary { tokenizer: ids, model: rows });
    }
    Ok(())
}

fn initial_model<D: Device>(
    options: &RetrieverOptions,
    device: &D,
) -> Result<(LoadedRetriever<D>, Tokenizer), TrainError> {
    let o = &options.model;
    if o.init == Init::Random {
        if o.model_path != "none" {
            return Err(TrainError::Options("--init random and --model_path exclude each other".into()));
        }
        let (config, own, folder) = match &o.model_config {
            Some(path) => {
                let (config, own) = RetrieverConfig::read(path)?;
                (config, own, path.parent())
            }
            None => (RetrieverConfig::new(EncoderConfig::Bert(BertConfig::base())), false, None),
        };
        // The shape's own folder serves as the tokenizer's where it holds one.
        let tokenizer = match (&o.tokenizer, folder) {
            (Some(given), _) => Tokenizer::load(given)?,
            (None, Some(own)) => Tokenizer::load(own)
                .map_err(|e| TrainError::Unusable(format!("{e}; or give --tokenizer another folder")))?,
            (None, None) => {
                let what = "--init random needs --tokenizer: the folder of a tokenizer.json or vocab.txt";
                return Err(TrainError::Options(what.into()));
            }
        };
        let config = settle(options, config, own, "--model_config")?;
        require_room(config.encoder.parameters())?;
        return Ok((LoadedRetriever::random(config, options.run.seed, device), tokenizer));
    }
    if o.model_config.is_some() {
        return Err(TrainError::Options("--model_config gives a shape for --init random".into()));
    }
    let folder = match o.model_path.as_str() {
        "none" => ModelFolder::open(DEFAULT_MODEL)?,
        path => model_folder(path)?,
    };
    let tokenizer = Tokenizer::load(o.tokenizer.as_deref().unwrap_or(folder.path()))?;
    let loaded = from_headers(options, read_headers(&folder)?, device)?;
    if loaded.model.config.normalize && o.contrasts() && o.temperature == 1.0 {
        tracing::warn!("--temperature 1 leaves cosines almost no say in the contrastive loss: 0.05 is usual");
    }
    Ok((loaded, tokenizer))
}

/// A folder's configuration and headers, with what a folder of sentence-transformers says of the vectors of its encoder.
fn read_headers(folder: &ModelFolder) -> Result<RetrieverHeaders, TrainError> {
    let mut headers = RetrieverHeaders::read(folder)?;
    if headers.fid || !SentenceConfig::is_there(folder.path()) {
        return Ok(headers);
    }
    let modules = SentenceConfig::read(folder.path())?;
    if !modules.dense.is_empty() {
        return Err(TrainError::Unusable(format!(
            "{}: a retriever has no Dense layers, and this folder of sentence-transformers has {}: they would be lost; remove its \
             modules.json to start from the encoder alone",
            folder.path().display(),
            modules.dense.len()
        )));
    }
    if modules.lower_case || modules.default_prompt_name.is_some() {
        tracing::warn!(
            "{}: its prompts, and that it makes texts lower case, are left out; --question_template and --passage_template say what \
             stands before texts",
            folder.path().display()
        );
    }
    (headers.config.pooling, headers.config.normalize) = (modules.pooling, modules.normalize);
    let length = if modules.normalize { "of length one" } else { "as they are" };
    tracing::info!("modules.json: pooling {:?}, vectors {length}", modules.pooling);
    Ok(headers)
}

fn from_headers<D: Device>(
    options: &RetrieverOptions,
    headers: RetrieverHeaders,
    device: &D,
) -> Result<LoadedRetriever<D>, TrainError> {
    let (config, fid) = (headers.config.clone(), headers.fid);
    let config = settle(options, config, fid, "--model_path")?;
    require_room(config.encoder.parameters())?;
    let loaded = LoadedRetriever::with_config(headers, config, options.run.seed, device)?;
    if let Some(note) = &loaded.note {
        tracing::info!("{note}");
    }
    if loaded.random_head {
        tracing::info!("the projection is new: its values are drawn by --seed");
    }
    Ok(loaded)
}

/// The configuration that flags make of `found`: where it is a retriever's `own`, the flags only add to it; a plain
/// encoder's becomes FiD's defaults.
fn settle(
    options: &RetrieverOptions,
    found: RetrieverConfig,
    own: bool,
    source: &str,
) -> Result<RetrieverConfig, TrainError> {
    let o = &options.model;
    let mut config = match own {
        true => found,
        false => RetrieverConfig {
            pooling: found.pooling,
            normalize: found.normalize,
            ..RetrieverConfig::new(found.encoder)
        },
    };
    if let Some(n) = o.indexing_dimension {
        let has = config.indexing_dimension;
        if own && config.projection && !o.no_projection && n != has {
            return Err(TrainError::Unusable(format!(
                "--indexing_dimension {n}: the retriever of {source} has a projection to {has}, which would be lost; leave the \
                 flag out, or start from its encoder alone"
            )));
        }
        config.indexing_dimension = n;
    }
    config.projection &= !o.no_projection;
    if !config.projection {
        let width = config.encoder.width();
        if o.indexing_dimension.is_some_and(|n| n != width) {
            return Err(TrainError::Options(format!(
                "--no_projection: vectors are as wide as the encoder's states, {width}; leave --indexing_dimension out"
            )));
        }
        // As FiD writes it, which never reads it then.
        config.indexing_dimension = 768;
    }
    config.normalize |= o.normalize;
    if o.extract_cls {
        config.pooling = Pooling::First;
    }
    config.apply_question_mask &= !o.no_question_mask;
    config.apply_passage_mask &= !o.no_passage_mask;
    config.question_maxlength = o.question_maxlength.unwrap_or(config.question_maxlength);
    config.passage_maxlength = o.passage_maxlength.unwrap_or(config.passage_maxlength);
    if let Some(p) = options.optim.dropout {
        config.encoder.set_dropout(p);
    }
    Ok(config)
}

/// A model without its values.
#[derive(Serialize, Deserialize)]
struct Shape {
    config: Map<String, Value>,
    json: Map<String, Value>,
    /// The configuration as rank 0 has it, to compare.
    shown: String,
    teacher: bool,
}

impl<D: RankDevice> TaskModel<D> for RetrieverModel<D> {
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
            teacher: own.teacher.is_some(),
        };
        world.broadcast_bytes(0, serde_json::to_vec(&shape).expect("plain JSON"))?;
        share_tokenizer(world, Some(&own.tokenizer))?;
        let teacher = share_teacher(world, shape.teacher, own.teacher, device)?;
        Ok(RetrieverModel { teacher, ..own })
    }
}

fn from_the_first<D: RankDevice>(world: &World, device: &D) -> Result<RetrieverModel<D>, TrainError> {
    let unlike =
        |what: &str| TrainError::Unusable(format!("rank 0 sent a model that is not understood here: {what}"));
    let shape: Shape = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
    let config = RetrieverConfig::from_json(&shape.config).map_err(|what| unlike(&what))?;
    if format!("{config:?}") != shape.shown {
        return Err(unlike(&format!("{config:?} here, {} there", shape.shown)));
    }
    let tokenizer = share_tokenizer(world, None)?.ok_or_else(|| unlike("no tokenizer"))?;
    let model = Retriever::new(config);
    let parameters = Arena::zeros(device, model.layout());
    let teacher = share_teacher(world, shape.teacher, None, device)?;
    // What is kept beside the parameters is rank 0's, which saves.
    let (kept, note, random_head) = (Vec::new(), None, false);
    let loaded = LoadedRetriever { model, parameters, json: shape.json, kept, note, random_head };
    Ok(RetrieverModel { loaded, tokenizer, teacher })
}

/// Rank 0's teacher on every rank, with its values, where `there` is one.
///
/// # Errors
/// A rank was lost or failed.
pub(super) fn share_teacher<D: RankDevice>(
    world: &World,
    there: bool,
    own: Option<ReaderModel<D>>,
    device: &D,
) -> Result<Option<ReaderModel<D>>, TrainError> {
    if !there {
        return Ok(None);
    }
    let mut teacher = ReaderModel::share(world, own, device)?;
    share_values(world, teacher.loaded.model.layout(), &mut teacher.loaded.parameters, device)?;
    Ok(Some(teacher))
}

/// A retriever to use on every rank; only rank 0 needs its folder: a model's, or a run's, which stands for its best checkpoint.
///
/// # Errors
/// What is missing or does not fit; a rank was lost or failed.
pub fn open_retriever_among<D: RankDevice>(
    world: &World,
    name: &str,
    tokenizer: Option<&Path>,
    device: &D,
) -> Result<RetrieverModel<D>, TrainError> {
    let own = match world.is_main() {
        true => {
            let folder = model_folder(name)?;
            let tokenizer = Tokenizer::load(tokenizer.unwrap_or(folder.path()))?;
            let loaded = LoadedRetriever::of(read_headers(&folder)?, device)?;
            check_vocabulary(&tokenizer, &loaded.model.config)?;
            Some(RetrieverModel { loaded, tokenizer, teacher: None })
        }
        false => None,
    };
    let mut model = RetrieverModel::share(world, own, device)?;
    share_values(world, model.loaded.model.layout(), &mut model.loaded.parameters, device)?;
    Ok(model)
}
