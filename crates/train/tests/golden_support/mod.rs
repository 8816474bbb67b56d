//! What the golden reader tests share: the cases of the folder that TERCIO_GOLDEN names, the tolerances of its page, and
//! a case opened through the flags of `tercio train reader`.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

#[path = "../../../../tests/golden_folder.rs"]
mod golden_folder;
pub mod on_host;

use std::path::{Path, PathBuf};

use clap::Parser;
use golden_folder::golden_folder;
use serde_json::Value;
use tempfile::TempDir;
use tercio_data::{PackedReaderBatch, Question, Questions};
use tercio_engine::{Arena, Device, Draw, Param, Span};
use tercio_models::t5::Targets;
use tercio_models::weights::WeightsReader;
use tercio_train::objective::Objective;
use tercio_train::options::{BatchPlan, ReaderOptions};
use tercio_train::predict::{padded_positions, question_spans};
use tercio_train::ranks::RankDevice;
use tercio_train::setup::{self, ReaderRun};
use tercio_train::step::Stepper;

/// One folder of stored values.
pub struct Case {
    pub dir: PathBuf,
    pub input: Value,
    pub expected: Value,
    pub tensors: WeightsReader,
}

fn json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All cases of a reader, by name.
pub fn cases() -> Vec<Case> {
    cases_with("encoder_eos")
}

/// All cases whose input has a setting of this name, by their own name.
pub fn cases_with(setting: &str) -> Vec<Case> {
    let golden = golden_folder();
    let entries = std::fs::read_dir(&golden).unwrap_or_else(|e| panic!("{}: {e}", golden.display()));
    let mut dirs: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    dirs.retain(|d| {
        d.join("model").is_dir()
            && d.join("expected.json").is_file()
            && d.join("input.json").is_file()
            && json(&d.join("input.json")).get(setting).is_some()
    });
    dirs.sort();
    assert!(!dirs.is_empty(), "{}: no cases with {setting}", golden.display());
    let open = |dir: PathBuf| Case {
        input: json(&dir.join("input.json")),
        expected: json(&dir.join("expected.json")),
        tensors: WeightsReader::open(&dir.join("expected.safetensors")).unwrap(),
        dir,
    };
    dirs.into_iter().map(open).collect()
}

/// Cases that have values for a reader with the old cross-attention bias table.
pub fn legacy_cases() -> Vec<Case> {
    let mut cases = cases();
    cases.retain(|c| c.expected.get("legacy").is_some());
    assert!(!cases.is_empty(), "no reader case with a `legacy` part");
    cases
}

pub fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

pub fn numbers(value: &Value) -> Vec<f64> {
    list(value).iter().map(number).collect()
}

pub fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("expected a list, found {value}"))
}

fn integer(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("expected an integer, found {value}"))
}

pub fn integers(value: &Value) -> Vec<i64> {
    list(value).iter().map(integer).collect()
}

/// Forward values, losses, gradients and norms: 1e-4 of the stored value, and 1e-5.
pub fn assert_close(found: f64, expected: f64, what: impl Fn() -> String) {
    let difference = (found - expected).abs();
    assert!(difference <= 1e-4 * expected.abs() + 1e-5, "{}: expected {expected}, found {found}", what());
}

/// Element by element, [`assert_close`].
pub fn assert_all_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert_close(f, e, || format!("{what}[{i}]"));
    }
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    options: ReaderOptions,
}

/// How a case is opened, beside what its files say.
#[derive(Clone, Copy, Default)]
pub struct Opening {
    /// End tokens on passages: the variant.
    pub eos: bool,
    /// The checkpoint in FiD's layout instead of the model folder.
    pub legacy: bool,
    /// Questions of a micro-batch; 0: all.
    pub micro: usize,
    /// Whether encoder layers are computed again.
    pub recompute: bool,
    /// Dropout instead of the case's.
    pub dropout: Option<f64>,
}

/// A case as a run that is ready to train.
pub struct Opened<D: Device> {
    pub device: D,
    pub run: ReaderRun<D>,
    pub options: ReaderOptions,
    pub plan: BatchPlan,
    _folder: TempDir,
}

impl Case {
    pub fn name(&self) -> String {
        self.dir.file_name().unwrap().to_string_lossy().into_owned()
    }
    /// Names of the variants, and whether passages end with `</s>` in them.
    pub fn variants(&self) -> Vec<(String, bool)> {
        let all = self.input["encoder_eos"].as_object().unwrap();
        let variants = all.iter().map(|(k, v)| (k.clone(), v.as_bool().unwrap()));
        let variants: Vec<_> = variants.collect();
        assert!(variants.iter().any(|v| v.0 == "plain"), "{}: no variant `plain`", self.name());
        variants
    }
    /// The `plain` variant, which gradients, trajectory and legacy part belong to.
    pub fn plain(&self) -> Opening {
        let eos = self.input["encoder_eos"]["plain"].as_bool().unwrap();
        Opening { eos, ..Opening::default() }
    }
    pub fn tensor(&self, name: &str) -> Vec<f64> {
        let values = self.tensors.read(name).unwrap();
        values.into_iter().map(f64::from).collect()
    }

    fn flags(&self, opening: Opening, folder: &Path) -> Vec<String> {
        let input = &self.input;
        let optimizer = &input["optimizer"];
        // Tercio has no flags for these; a case with others needs them.
        assert_eq!(numbers(&optimizer["betas"]), [0.9, 0.999], "{}", self.name());
        assert_eq!(number(&optimizer["eps"]), 1e-8, "{}", self.name());
        let scheduler = match input["scheduler"]["name"].as_str() {
            Some("constant") => "fixed",
            Some(name) => name,
            None => panic!("{}: the scheduler has no name", self.name()),
        };
        let model = if opening.legacy { "model_fid_layout" } else { "model" };
        let path = |p: PathBuf| p.to_str().unwrap().to_owned();
        let all = list(&input["questions"]).len();
        let micro = if opening.micro == 0 { all } else { opening.micro };
        let dropout = opening.dropout.unwrap_or_else(|| number(&input["dropout"]));
        let mut flags = vec!["test".to_owned(), "--name=run".into()];
        let mut set = |flag: &str, value: String| flags.push(format!("--{flag}={value}"));
        set("checkpoint-dir", path(folder.to_owned()));
        set("train-data", path(folder.join("questions.json")));
        set("model-path", path(self.dir.join(model)));
        set("tokenizer", path(self.dir.join("model")));
        set("n-context", input["n_context"].to_string());
        set("text-maxlength", input["text_maxlength"].to_string());
        set("answer-maxlength", input["answer_maxlength"].to_string());
        set("generation-max-length", input["generate_max_length"].to_string());
        set("global-batch-size", all.to_string());
        set("micro-batch-size", micro.to_string());
        set("dropout", dropout.to_string());
        set("optim", optimizer["name"].as_str().unwrap().into());
        set("lr", optimizer["lr"].to_string());
        set("weight-decay", optimizer["weight_decay"].to_string());
        set("clip", optimizer["clip"].to_string());
        set("scheduler", scheduler.into());
        set("warmup-steps", input["scheduler"]["warmup_steps"].to_string());
        set("scheduler-steps", input["scheduler"]["total_steps"].to_string());
        set("total-steps", input["steps"].to_string());
        flags.extend(opening.eos.then(|| "--passage-eos".into()));
        flags.extend(opening.recompute.then(|| "--recompute".into()));
        flags
    }

    /// Opens the case as `tercio train reader` would.
    pub fn open<D: RankDevice>(&self, device: &D, opening: Opening) -> Opened<D> {
        let folder = tempfile::tempdir().unwrap();
        let questions = serde_json::to_vec(&self.input["questions"]).unwrap();
        std::fs::write(folder.path().join("questions.json"), questions).unwrap();
        let options = Flags::parse_from(self.flags(opening, folder.path())).options;
        options.check().unwrap();
        let plan = options.data.batch_plan().unwrap();
        let run_folder = setup::open_folder(&options).unwrap();
        let run = setup::open_run(&options, &run_folder, device).unwrap();
        Opened { device: device.clone(), run, options, plan, _folder: folder }
    }
}

/// The whole update of a case.
pub fn all_rows<D: Device>(opened: &Opened<D>) -> tercio_data::shuffle::UpdateExamples {
    let rows = (0..opened.run.objective.train.len()).collect();
    tercio_data::shuffle::UpdateExamples { epoch: 0, rows }
}

impl<D: RankDevice> Opened<D> {
    /// All questions as one packed batch.
    pub fn batch(&self) -> PackedReaderBatch {
        let rows = all_rows(self);
        let objective = &self.run.objective;
        let mut shards = Objective::<D>::shards(objective, &rows, rows.rows.len()).unwrap();
        assert_eq!(shards.len(), 1);
        shards.remove(0)
    }
    pub fn questions(&self) -> Vec<Question> {
        let train: &Questions = &self.run.objective.train;
        (0..train.len()).map(|i| train.get(i).unwrap()).collect()
    }
    /// Loss and gradient of the whole batch in one shard, its mean over target tokens.
    pub fn gradient(&self, draw: Draw) -> (f64, Arena<D>) {
        self.gradient_at(&self.run.state.parameters, draw)
    }
    /// [`Opened::gradient`] at other values of the parameters.
    pub fn gradient_at(&self, parameters: &Arena<D>, draw: Draw) -> (f64, Arena<D>) {
        let (batch, objective) = (self.batch(), &self.run.objective);
        let mut gradients = Arena::zeros(&self.device, objective.model.layout());
        let weight = 1.0 / batch.targets.len() as f64;
        let add = || objective.gradient(&self.device, parameters, &batch, draw, weight, &mut gradients);
        let outcome = self.device.run(add);
        (outcome.loss, gradients)
    }
    /// The stepper of the case's settings, as the loop makes it.
    pub fn stepper(&self) -> Stepper<'_, D, tercio_train::objectives::reader::ReaderObjective> {
        let seed = self.options.run.seed;
        Stepper::new(&self.device, &self.run.objective, self.plan, &self.options.optim, seed)
    }
}

/// A draw for passes whose dropout is 0, or the same in both of two passes.
pub const DRAW: Draw = Draw { seed: 5, update: 3, shard: 0 };

/// What [`Targets`] borrows.
pub struct TargetParts {
    inputs: Vec<u32>,
    spans: Vec<Span>,
    keys: Vec<Span>,
    positions: Option<Vec<u32>>,
}

impl TargetParts {
    pub fn new<D: Device>(opened: &Opened<D>, batch: &PackedReaderBatch) -> Self {
        let objective = &opened.run.objective;
        let positions = objective.model.needs_key_positions();
        TargetParts {
            inputs: batch.decoder_inputs(objective.model.config.decoder_start_token_id),
            spans: Span::from_offsets(&batch.target_offsets),
            keys: question_spans(batch),
            positions: positions.then(|| padded_positions(batch, objective.encoding.text_maxlength)),
        }
    }
    pub fn targets<'a>(&'a self, batch: &'a PackedReaderBatch) -> Targets<'a> {
        Targets {
            inputs: &self.inputs,
            labels: &batch.targets,
            spans: &self.spans,
            keys: &self.keys,
            key_positions: self.positions.clone(),
            weight: 1.0 / batch.targets.len() as f64,
            smoothing: 0.0,
        }
    }
}

/// Bits of an arena, as f32.
pub fn bits<D: Device>(device: &D, arena: &Arena<D>) -> Vec<u32> {
    device.host(arena.all()).iter().map(|v| v.to_bits()).collect()
}

/// Sum and sum of squares of a parameter, in 64 bits.
pub fn checksum<D: Device>(device: &D, arena: &Arena<D>, place: Param) -> (f64, f64) {
    let values = device.read_f64(arena.view(place));
    values.iter().fold((0.0, 0.0), |(s, q), v| (s + v, q + v * v))
}
