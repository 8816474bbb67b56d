//! A ColBERT model's run: an encoder with its projections, its tokenizer, examples, and a reader where one teaches on the fly.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::retrieval::ContrastiveChoice;
use tercio_data::{ReaderEncoding, RetrievalExamples};
use tercio_engine::{Arena, Device};
use tercio_models::colbert::{Colbert, ColbertConfig, ColbertHeaders, LoadedColbert};
use tercio_models::encoder::EncoderConfig;
use tercio_models::folder::ModelFolder;

use super::reader::ReaderModel;
use super::retriever::{DEFAULT_MODEL, share_teacher};
use super::{Run, Task, TaskModel, model_folder, open_model, used};
use crate::colbert::{ColbertModel, Collection};
use crate::error::TrainError;
use crate::objectives::colbert::batch::ColbertEncoding;
use crate::objectives::colbert::loss::Distillation;
use crate::objectives::colbert::{ColbertLoss, ColbertObjective};
use crate::objectives::retriever::Teacher;
use crate::objectives::retriever::batch::PassageChoice;
use crate::options::{ColbertModelOptions, ColbertOptions, ColbertTextOptions};
use crate::ranks::RankDevice;
use crate::ranks::setup::{from_rank_0, share_tokenizer, share_values};

/// A ColBERT model's run, ready to train.
pub type ColbertRun<D> = Run<D, ColbertObjective<D>>;

/// A ColBERT model as it was read, and who teaches it.
pub struct TaughtColbert<D: Device> {
    /// The model.
    pub model: ColbertModel<D>,
    /// A reader that teaches.
    pub teacher: Option<ReaderModel<D>>,
}

impl<D: RankDevice> Task<D> for ColbertModelOptions {
    type Model = TaughtColbert<D>;
    type Data = RetrievalExamples;
    type Objective = ColbertObjective<D>;

    fn open(
        options: &ColbertOptions,
        checkpoint: Option<&Path>,
        _: &Path,
        device: &D,
    ) -> Result<TaughtColbert<D>, TrainError> {
        let o = &options.model;
        let folder = match (checkpoint, o.model_path.as_str()) {
            (Some(path), _) => ModelFolder::open(&path.to_string_lossy())?,
            (None, "none") => ModelFolder::open(DEFAULT_MODEL)?,
            (None, path) => model_folder(path)?,
        };
        let headers = ColbertHeaders::read(&folder, o.embedding_size)?;
        // A checkpoint has its tokenizer with it.
        let tokenizer = o.tokenizer.as_deref().filter(|_| checkpoint.is_none());
        let settle = |config: &mut ColbertConfig| settle(o, config);
        let model =
            ColbertModel::read(headers, tokenizer, settle, options.optim.dropout, options.run.seed, device)?;
        let teacher = match &o.teacher {
            Some(name) => {
                let (loaded, tokenizer) = open_model(name, None, device)?;
                Some(ReaderModel { loaded, tokenizer })
            }
            None => None,
        };
        Ok(TaughtColbert { model, teacher })
    }
    fn objective(
        options: &ColbertOptions,
        model: TaughtColbert<D>,
        train: RetrievalExamples,
        eval: Option<RetrievalExamples>,
        _: Option<RetrievalExamples>,
        device: &D,
    ) -> Result<(ColbertObjective<D>, Arena<D>), TrainError> {
        let (o, plan) = (&options.model, options.data.batch_plan().map_err(TrainError::Options)?);
        let encoding = encoding(&model.model, &o.text)?;
        let TaughtColbert { model: ColbertModel { loaded, tokenizer }, teacher } = model;
        let teacher = teacher.map(|ReaderModel { loaded, tokenizer }| {
            let encoding = ReaderEncoding {
                text_maxlength: o.teacher_text_maxlength,
                answer_maxlength: None,
                n_context: o.n_context,
                no_title: false,
                passage_eos: o.teacher_passage_eos,
            };
            Teacher::new(device, loaded.model, loaded.parameters, tokenizer, encoding)
        });
        if let Some(eval) = eval.as_ref().filter(|_| o.distils() && teacher.is_none()) {
            // Better now than at the first evaluation.
            eval.get(0)?.scored(1)?;
        }
        let (query, document) = encoding.tokens.lengths();
        tracing::info!(
            "queries are {:?} of at most {query} tokens, documents {:?} of {document}",
            encoding.query_template.to_string(),
            encoding.document_template.to_string()
        );
        let LoadedColbert { model, parameters, json, kept, .. } = loaded;
        let loss = match o.distils() {
            true => ColbertLoss::Distillation(Distillation {
                normalize: !o.raw_scores,
                scale: 1.0 / o.temperature,
                gold: 1.0 / o.teacher_temperature,
            }),
            false => ColbertLoss::Contrastive {
                temperature: o.temperature,
                smoothing: options.optim.label_smoothing,
            },
        };
        let objective = ColbertObjective {
            device: device.clone(),
            choice: PassageChoice {
                scored: if o.distils() { o.n_context } else { 0 },
                live: teacher.is_some(),
                contrastive: (!o.distils()).then_some(ContrastiveChoice {
                    hard_negatives: o.hard_negatives,
                    other_negatives: o.other_negatives,
                    draw_positive: o.draw_positive,
                    draw_negatives: o.draw_negatives,
                }),
            },
            encoding,
            loss,
            retrieved: o.xtr_k,
            zero_floor: o.zero_floor,
            one_shard: plan.shards == 1,
            model,
            json,
            kept,
            tokenizer,
            teacher,
            used: used(options.data.maxload, train.len()),
            train,
            eval,
            collection: match &o.eval_beir {
                Some(dir) => Some(Collection::open(dir, &o.eval_beir_split)?),
                None => None,
            },
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

/// How the texts of a model become tokens.
///
/// # Errors
/// Templates without their places; texts longer than the encoder takes.
pub fn encoding<D: Device>(
    model: &ColbertModel<D>,
    text: &ColbertTextOptions,
) -> Result<ColbertEncoding, TrainError> {
    let (query_template, document_template) = text.templates().map_err(TrainError::Options)?;
    Ok(ColbertEncoding { query_template, document_template, tokens: model.tokens()? })
}

/// What flags change of a model's settings.
fn settle(o: &ColbertModelOptions, config: &mut ColbertConfig) {
    lengths(&o.text, config);
    for (given, prefix) in
        [(&o.query_prefix, &mut config.query_prefix), (&o.document_prefix, &mut config.document_prefix)]
    {
        if let Some(given) = given {
            *prefix = if given == "none" { String::new() } else { given.clone() };
        }
    }
    config.expansion &= !o.no_expansion;
    config.attend_to_expansion = config.expansion && (config.attend_to_expansion || o.attend_to_expansion);
    if o.no_skiplist {
        config.skiplist.clear();
    }
}

/// What flags change of a model's lengths.
fn lengths(text: &ColbertTextOptions, config: &mut ColbertConfig) {
    config.query_length = text.query_length.unwrap_or(config.query_length);
    config.document_length = text.document_length.unwrap_or(config.document_length);
}

/// A model without its values.
#[derive(Serialize, Deserialize)]
struct Shape {
    encoder: Map<String, Value>,
    json: Map<String, Value>,
    config: Value,
    /// The configurations as rank 0 has them, to compare.
    shown: String,
    teacher: bool,
}

impl<D: RankDevice> TaskModel<D> for TaughtColbert<D> {
    fn share(world: &World, own: Option<Self>, device: &D) -> Result<Self, TrainError> {
        let Some(own) = own else { return from_the_first(world, device) };
        if world.size() == 1 {
            return Ok(own);
        }
        let loaded = &own.model.loaded;
        let (encoder, config) = (loaded.model.encoder.config(), &loaded.model.config);
        let shape = Shape {
            encoder: encoder.to_json(&loaded.json),
            json: loaded.json.clone(),
            config: config.to_json(),
            shown: format!("{encoder:?} {config:?}"),
            teacher: own.teacher.is_some(),
        };
        world.broadcast_bytes(0, serde_json::to_vec(&shape).expect("plain JSON"))?;
        share_tokenizer(world, Some(&own.model.tokenizer))?;
        let teacher = share_teacher(world, shape.teacher, own.teacher, device)?;
        Ok(TaughtColbert { teacher, ..own })
    }
}

fn from_the_first<D: RankDevice>(world: &World, device: &D) -> Result<TaughtColbert<D>, TrainError> {
    let unlike =
        |what: &str| TrainError::Unusable(format!("rank 0 sent a model that is not understood here: {what}"));
    let shape: Shape = from_rank_0(&world.broadcast_bytes(0, Vec::new())?)?;
    let encoder = EncoderConfig::from_json(&shape.encoder).map_err(|what| unlike(&what))?;
    let config = ColbertConfig::from_json(&shape.config).map_err(|what| unlike(&what))?;
    let shown = format!("{encoder:?} {config:?}");
    if shown != shape.shown {
        return Err(unlike(&format!("{shown} here, {} there", shape.shown)));
    }
    let tokenizer = share_tokenizer(world, None)?.ok_or_else(|| unlike("no tokenizer"))?;
    let model = Colbert::new(encoder, config);
    let parameters = Arena::zeros(device, model.layout());
    let teacher = share_teacher(world, shape.teacher, None, device)?;
    // What is kept beside the parameters is rank 0's, which saves.
    let (kept, note, tokenizer_folder) = (Vec::new(), None, std::path::PathBuf::new());
    let loaded = LoadedColbert {
        model,
        parameters,
        json: shape.json,
        kept,
        note,
        tokenizer: tokenizer_folder,
        new_layers: 0,
    };
    Ok(TaughtColbert { model: ColbertModel { loaded, tokenizer }, teacher })
}

/// A ColBERT model to use on every rank; only rank 0 needs its folder: a model's, or a run's, which stands for its best checkpoint. Lengths
/// that `text` has stand in for the model's.
///
/// # Errors
/// What is missing or does not fit; an encoder whose projection would be new; a rank was lost or failed.
pub fn open_colbert_among<D: RankDevice>(
    world: &World,
    name: &str,
    tokenizer: Option<&Path>,
    text: &ColbertTextOptions,
    device: &D,
) -> Result<ColbertModel<D>, TrainError> {
    let own = match world.is_main() {
        true => {
            let headers = ColbertHeaders::read(&model_folder(name)?, None)?;
            let settle = |config: &mut ColbertConfig| lengths(text, config);
            let model = ColbertModel::read(headers, tokenizer, settle, None, 0, device)?.trained(name)?;
            Some(TaughtColbert { model, teacher: None })
        }
        false => None,
    };
    let TaughtColbert { mut model, .. } = TaughtColbert::share(world, own, device)?;
    share_values(world, model.loaded.model.layout(), &mut model.loaded.parameters, device)?;
    Ok(model)
}
