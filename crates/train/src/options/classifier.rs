//! What is a text classifier's own among the settings of its training.

mod recipe;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tercio_data::corpus::{Columns, CorpusSettings, UnknownLabels};

use super::{DataOptions, Init, MOST_TEXT_TOKENS, TaskOptions, TrainOptions};
use crate::schedule::PlateauOptions;
use crate::trainer::LoopOptions;

pub use recipe::{Recipe, classifier_options, dashed, with_recipe};

/// All settings of `tercio train classifier`.
pub type ClassifierOptions = TrainOptions<ClassifierModelOptions>;

/// What follows a text's vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClassifierHead {
    /// That of the encoder's class in Hugging Face, which opens the model and computes the same.
    Family,
    /// flair's: one linear layer; Tercio alone opens it with its head.
    Linear,
}

/// How a text's states become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClassifierPooling {
    /// The first token.
    Cls,
    /// The mean of all tokens, special ones too.
    Mean,
}

/// What an update's loss is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// The mean over the update's texts: rate and clipping mean the same whatever its size.
    Mean,
    /// Their sum, as flair has it.
    Sum,
}

/// Which missing parts are cut from the training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingSplits {
    /// A tenth for test, then a tenth of the rest for dev.
    All,
    /// None.
    None,
    /// Dev.
    Dev,
    /// Test.
    Test,
}

/// What becomes of evaluation texts with labels that are in no training text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownLabelsOption {
    /// They are an error.
    Refuse,
    /// They count as missed.
    Count,
}

/// What a rate does beside its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Anneal {
    /// Nothing.
    None,
    /// It falls when --patience evaluations have brought no gain.
    Plateau,
}

/// Which checkpoint stands for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UseModel {
    /// The last one.
    Last,
    /// The one with the best score.
    Best,
}

/// Weights of labels in the loss.
#[derive(Clone, Debug, PartialEq)]
pub enum ClassWeights {
    /// All 1.
    Equal,
    /// Texts over labels times the label's texts (scikit-learn's "balanced").
    Balanced,
    /// These, and 1 for the others.
    Given(BTreeMap<String, f64>),
}

/// The model, its inputs, its labels and its loss.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct ClassifierModelOptions {
    /// Settings that belong together, each of which can be overridden
    #[arg(long, value_enum, env = "TERCIO_RECIPE", default_value_t = Recipe::FineTune)]
    pub recipe: Recipe,
    /// Model to start from: a folder of an encoder or of a classifier (Hugging Face), a run's folder, or a hub name; none:
    /// distilbert-base-uncased. Step 0 of a run without checkpoints
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH", default_value = "none")]
    pub model_path: String,
    /// Initial weights
    #[arg(long, value_enum, env = "TERCIO_INIT", default_value_t = Init::Pretrained)]
    pub init: Init,
    /// config.json of the encoder's shape for --init random
    #[arg(long, env = "TERCIO_MODEL_CONFIG")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_config: Option<PathBuf>,
    /// Folder of the tokenizer (tokenizer.json or vocab.txt); default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// What follows a text's vector; default: what the classifier in --model_path has, family for an encoder
    #[arg(long, value_enum, env = "TERCIO_HEAD")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<ClassifierHead>,
    /// How a text's states become one vector; default: what the classifier in --model_path has, cls for an encoder
    #[arg(long, value_enum, visible_alias = "cls-pooling", env = "TERCIO_POOLING")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling: Option<ClassifierPooling>,
    /// With --head linear: layers whose pooled states are averaged, with commas between them (0 the embedding, -1 the last layer), or all;
    /// default: what the classifier in --model_path has, the last layer for an encoder
    #[arg(long, env = "TERCIO_LAYERS", allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// Tokens of a text at most, special ones counted; default: what the classifier in --model_path or the tokenizer has, at most 512
    #[arg(long, env = "TERCIO_TEXT_MAXLENGTH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_maxlength: Option<usize>,
    /// A text may have any number of labels
    #[arg(long, env = "TERCIO_MULTI_LABEL")]
    pub multi_label: bool,
    /// With --multi_label: a label above this probability is the text's
    #[arg(long, visible_alias = "multi-label-threshold", env = "TERCIO_THRESHOLD", default_value_t = 0.5)]
    pub threshold: f64,
    /// Weights of labels in the loss: none, balanced, or `label=weight,label=weight` (the others 1)
    #[arg(long, env = "TERCIO_CLASS_WEIGHTS", default_value = "none")]
    pub class_weights: String,
    /// What an update's loss is
    #[arg(long, value_enum, env = "TERCIO_REDUCTION", default_value_t = Reduction::Mean)]
    pub reduction: Reduction,
    /// Epochs of the run, where --total_steps is 0
    #[arg(long, visible_alias = "max-epochs", env = "TERCIO_EPOCHS", default_value_t = 10)]
    pub epochs: u64,
    /// Share of the updates that are warm-up, where --warmup_steps is 0
    #[arg(long, env = "TERCIO_WARMUP_FRACTION", default_value_t = 0.0)]
    pub warmup_fraction: f64,
    /// What the learning rate does beside its schedule
    #[arg(long, value_enum, env = "TERCIO_ANNEAL", default_value_t = Anneal::None)]
    pub anneal: Anneal,
    /// With --anneal plateau: what the learning rate is multiplied by
    #[arg(long, env = "TERCIO_ANNEAL_FACTOR", default_value_t = 0.5)]
    pub anneal_factor: f64,
    /// With --anneal plateau: evaluations without gain that are borne
    #[arg(long, env = "TERCIO_PATIENCE", default_value_t = 3)]
    pub patience: u64,
    /// With --anneal plateau: as many more before the first time
    #[arg(long, env = "TERCIO_INITIAL_EXTRA_PATIENCE", default_value_t = 0)]
    pub initial_extra_patience: u64,
    /// With --anneal plateau: the run ends when the learning rate falls below
    #[arg(long, env = "TERCIO_MIN_LEARNING_RATE", default_value_t = 1e-4)]
    pub min_learning_rate: f64,
    /// Which checkpoint stands for the run: the link `model` beside the checkpoints
    #[arg(long, value_enum, env = "TERCIO_USE_MODEL", default_value_t = UseModel::Last)]
    pub use_model: UseModel,
    /// Decay of a running average of the parameters, which is saved as the run's `average-model`; 0: none is kept
    #[arg(long, env = "TERCIO_AVERAGE_DECAY", default_value_t = 0.0)]
    pub average_decay: f64,
    /// Keep the training texts in the order of their file
    #[arg(long, env = "TERCIO_NO_SHUFFLE")]
    pub no_shuffle: bool,
    /// Texts to measure the run's model on at its end
    #[arg(long, env = "TERCIO_TEST_DATA")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_data: Option<PathBuf>,
    /// Which missing parts are cut from the training data, as flair does
    #[arg(long, value_enum, visible_alias = "sample-missing-splits", env = "TERCIO_MISSING_SPLITS", default_value_t = MissingSplits::All)]
    pub missing_splits: MissingSplits,
    /// Keep this share of the documents of every part, chosen at random
    #[arg(long, env = "TERCIO_DOWNSAMPLE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downsample: Option<f64>,
    /// Cut and downsample the same share of every label
    #[arg(long, env = "TERCIO_STRATIFIED")]
    pub stratified: bool,
    /// Leave faulty documents out, counted, instead of ending with the first
    #[arg(long, env = "TERCIO_SKIP_BAD")]
    pub skip_bad: bool,
    /// Evaluation texts with a label that no training text has
    #[arg(long, value_enum, env = "TERCIO_UNKNOWN_LABELS", default_value_t = UnknownLabelsOption::Refuse)]
    pub unknown_labels: UnknownLabelsOption,
    /// Tables and JSON: columns of the text, with commas between them
    #[arg(long, env = "TERCIO_TEXT_COLUMN", default_value = "text")]
    pub text_column: String,
    /// Tables and JSON: columns of the labels, with commas between them; default: label, labels or class, whichever is there
    #[arg(long, env = "TERCIO_LABEL_COLUMN", default_value = "")]
    pub label_column: String,
    /// Tables: the first row is a document; columns are numbers from 0
    #[arg(long, env = "TERCIO_NO_HEADER")]
    pub no_header: bool,
    /// Tables and JSON: a value of a label that stands for none
    #[arg(long, visible_alias = "no-class-label", env = "TERCIO_NO_LABEL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_label: Option<String>,
    /// Keep only each encoder layer's input for the backward pass and compute the rest again
    #[arg(long, visible_alias = "use-checkpoint", env = "TERCIO_RECOMPUTE")]
    pub recompute: bool,
}

/// The columns that flags name, as training and everything after it read them: names with commas between them, of which spaces around
/// them and empty ones count for nothing. No name at all, as of a variable that is set to nothing, is as if the flag were not given.
pub fn columns_of(text: &str, labels: &str, no_header: bool, no_label: Option<&str>) -> Columns {
    let list = |names: &str| {
        names.split(',').map(str::trim).filter(|c| !c.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    let mut columns = Columns {
        text: list(text),
        labels: list(labels),
        header: !no_header,
        no_label: no_label.map(str::to_owned),
    };
    if columns.text.is_empty() {
        columns.text = Columns::default().text;
    }
    columns
}

impl ClassifierModelOptions {
    /// Where text and labels are in tables and JSON.
    pub fn columns(&self) -> Columns {
        columns_of(&self.text_column, &self.label_column, self.no_header, self.no_label.as_deref())
    }
    /// How the corpus is made of its files; `seed` is the run's.
    pub fn corpus(&self, seed: u64) -> CorpusSettings {
        CorpusSettings {
            multi_label: self.multi_label,
            skip_bad: self.skip_bad,
            unknown_labels: match self.unknown_labels {
                UnknownLabelsOption::Refuse => UnknownLabels::Refuse,
                UnknownLabelsOption::Count => UnknownLabels::Count,
            },
            seed,
            cut_dev: matches!(self.missing_splits, MissingSplits::All | MissingSplits::Dev),
            cut_test: matches!(self.missing_splits, MissingSplits::All | MissingSplits::Test),
            downsample: self.downsample,
            stratified: self.stratified,
            ..CorpusSettings::default()
        }
    }
    /// The layers that are averaged, of an encoder that has `count`; `None` where nothing is said.
    ///
    /// # Errors
    /// What is wrong with --layers.
    pub fn layer_list(&self, count: usize) -> Result<Option<Vec<i64>>, String> {
        match self.layers.as_deref() {
            None => Ok(None),
            Some("all") => Ok(Some((0..=count as i64).collect())),
            Some(list) => {
                let numbers: Result<Vec<i64>, _> = list.split(',').map(|n| n.trim().parse()).collect();
                let expected = "expected whole numbers with commas between them, or all";
                numbers.map(Some).map_err(|_| format!("--layers: {expected}, found {list:?}"))
            }
        }
    }
    /// The weights of labels.
    ///
    /// # Errors
    /// What is wrong with --class_weights.
    pub fn weights(&self) -> Result<ClassWeights, String> {
        match self.class_weights.as_str() {
            "none" => Ok(ClassWeights::Equal),
            "balanced" => Ok(ClassWeights::Balanced),
            list => {
                let mut weights = BTreeMap::new();
                for entry in list.split(',') {
                    let pair =
                        entry.rsplit_once('=').map(|(label, w)| (label.trim(), w.trim().parse::<f64>()));
                    let Some((label, Ok(weight))) = pair.filter(|(label, _)| !label.is_empty()) else {
                        return Err(format!(
                            "--class_weights: expected none, balanced or label=weight with commas between, found {entry:?}"
                        ));
                    };
                    if !(weight.is_finite() && weight >= 0.0) {
                        return Err(format!(
                            "--class_weights: expected a weight of at least 0, found {entry:?}"
                        ));
                    }
                    if weights.insert(label.to_owned(), weight).is_some() {
                        return Err(format!("--class_weights: found a second weight of {label:?}"));
                    }
                }
                Ok(ClassWeights::Given(weights))
            }
        }
    }
}

impl TaskOptions for ClassifierModelOptions {
    const NAME: &'static str = "classifier";
    const MAY_CHANGE: &'static [&'static str] =
        &["epochs", "model_path", "model_config", "tokenizer", "test_data", "use_model", "recipe"];
    const COUNTS_EPOCHS: bool = true;
    const TRAIN_DATA: &'static str = "documents with labels (.txt with __label__NAME, .csv, .tsv, .jsonl, also .gz or .zst, or a folder \
                                      for each label)";

    fn evaluates(&self, data: &DataOptions) -> bool {
        data.eval_data.is_some() || matches!(self.missing_splits, MissingSplits::All | MissingSplits::Dev)
    }
    fn settle(&self, settings: &mut LoopOptions, examples: usize) -> Result<(), String> {
        let epoch = settings.batches(examples).map_err(|e| e.to_string())?.updates_per_epoch();
        let o = &mut settings.optim;
        if o.total_steps == 0 {
            o.total_steps =
                self.epochs.checked_mul(epoch).filter(|&n| n > 0).ok_or_else(|| {
                    format!("--epochs {}: expected at least 1, and not that many", self.epochs)
                })?;
        }
        if o.warmup_steps == 0 {
            let end = o.scheduler_steps.unwrap_or(o.total_steps);
            o.warmup_steps = (end as f64 * self.warmup_fraction) as u64;
        }
        for frequency in [&mut settings.eval_freq, &mut settings.save_freq] {
            if *frequency == 0 {
                *frequency = epoch;
            }
        }
        tracing::info!(
            "{} updates of {} texts, {epoch} to an epoch; warm-up {}",
            settings.optim.total_steps,
            settings.batch.global,
            settings.optim.warmup_steps
        );
        (settings.shuffle, settings.loss_table) = (!self.no_shuffle, true);
        settings.average = (self.average_decay > 0.0).then_some(self.average_decay);
        settings.last_is_model = self.use_model == UseModel::Last;
        settings.plateau = (self.anneal == Anneal::Plateau).then_some(PlateauOptions {
            factor: self.anneal_factor,
            patience: self.patience,
            extra_patience: self.initial_extra_patience,
            min_lr: self.min_learning_rate,
        });
        Ok(())
    }
    fn notes(&self, all: &TrainOptions<Self>) -> Vec<String> {
        let Ok(plan) = all.data.batch_plan() else { return Vec::new() };
        vec![format!(
            "an update is {} texts on any number of ranks, so one device and several train the same model; where flair's --mini_batch_size \
             is of one of N devices, it is N times as large here",
            plan.global
        )]
    }
    fn added() -> Vec<(&'static str, toml::Value)> {
        Vec::new()
    }
    fn check(&self, all: &TrainOptions<Self>) -> Result<(), String> {
        if let Some(n) = self.text_maxlength.filter(|n| !(1..=MOST_TEXT_TOKENS).contains(n)) {
            return Err(format!("--text_maxlength {n}: expected 1 to {MOST_TEXT_TOKENS}"));
        }
        for (flag, value) in [
            ("threshold", self.threshold),
            ("warmup_fraction", self.warmup_fraction),
            ("average_decay", self.average_decay),
        ] {
            if !(0.0..1.0).contains(&value) {
                return Err(format!("--{flag} must be at least 0 and less than 1, is {value}"));
            }
        }
        if !(self.anneal_factor > 0.0 && self.anneal_factor < 1.0) {
            return Err(format!(
                "--anneal_factor must be above 0 and less than 1, is {}",
                self.anneal_factor
            ));
        }
        if !(self.min_learning_rate.is_finite() && self.min_learning_rate >= 0.0) {
            let found = self.min_learning_rate;
            return Err(format!("--min_learning_rate must be a number of at least 0, is {found}"));
        }
        if all.optim.total_steps == 0 && self.epochs == 0 {
            return Err("--epochs must be at least 1, or --total_steps".into());
        }
        if self.text_column.trim().is_empty() {
            return Err("--text_column: expected the name of a column, found none".into());
        }
        if self.use_model == UseModel::Best && !self.evaluates(&all.data) {
            return Err("--use_model best: without evaluation no model is the best; give --eval_data, let --missing_splits cut some of the \
                        training data, or --use_model last"
                .into());
        }
        if all.data.maxload >= 0 {
            return Err(
                "--maxload takes the first of a file; of a corpus --downsample takes a share at random"
                    .into(),
            );
        }
        self.layer_list(1)?;
        self.weights().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(flags: &str) -> Result<ClassifierOptions, String> {
        classifier_options(["--train-data", "x.txt"].into_iter().chain(flags.split_whitespace()))
    }

    #[test]
    fn epochs_become_updates() {
        let settled = |flags: &str, examples| {
            let o = options(flags).unwrap();
            let mut settings = LoopOptions::of(&o, false).unwrap();
            o.model.settle(&mut settings, examples).unwrap();
            settings
        };
        let s = settled("--epochs 3", 10);
        assert_eq!((s.optim.total_steps, s.optim.warmup_steps, s.eval_freq, s.save_freq), (9, 0, 3, 3));
        let s = settled("--epochs 20 --eval-freq 7", 10);
        assert_eq!((s.optim.total_steps, s.optim.warmup_steps, s.eval_freq, s.save_freq), (60, 6, 7, 3));
        let s = settled("--total-steps 50 --warmup-steps 2", 10);
        assert_eq!((s.optim.total_steps, s.optim.warmup_steps), (50, 2));
        assert!(s.last_is_model && s.loss_table && s.plateau.is_none());
    }

    #[test]
    fn weights_of_labels() {
        let weights =
            |text: &str| options(&format!("--class-weights {text}")).map(|o| o.model.weights().unwrap());
        let given = weights("a=2,b=c=0.5").unwrap();
        let want = BTreeMap::from([("a".to_owned(), 2.0), ("b=c".to_owned(), 0.5)]);
        assert_eq!(given, ClassWeights::Given(want));
        assert_eq!(weights("balanced"), Ok(ClassWeights::Balanced));
        for wrong in ["a", "a=x", "=1", "a=-1", "a=inf", "a=1,a=2"] {
            assert!(weights(wrong).unwrap_err().contains("--class_weights"), "{wrong}");
        }
    }

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        for (flags, word) in [
            ("--threshold 1", "--threshold"),
            ("--anneal-factor 1", "--anneal_factor"),
            ("--epochs 0", "--epochs"),
            ("--missing-splits none --use-model best", "--eval_data"),
            ("--missing-splits none --early-stop 2", "--early_stop"),
            ("--maxload 5", "--downsample"),
            ("--layers -1,x", "--layers"),
            ("--optim sgd --shard optimizer", "--shard optimizer"),
            ("--mini-batch-size 5 --mini-batch-chunk-size 2", "multiple"),
        ] {
            let said = options(flags).unwrap_err();
            assert!(said.contains(word), "{flags}: {said}");
        }
    }
}
