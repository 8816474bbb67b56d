//! `tercio eval colbert`: how a ColBERT model orders the documents of queries, by exact scores: where it puts positive ones, and how near its
//! order is to a teacher's.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::RetrievalExamples;
use tercio_engine::{Cpu, Device};
use tercio_train::TrainError;
use tercio_train::colbert::collection::FIGURES;
use tercio_train::colbert::{Collection, CollectionSearch};
use tercio_train::objectives::colbert::ColbertLoss;
use tercio_train::objectives::colbert::evaluate::ColbertRanker;
use tercio_train::objectives::colbert::loss::Distillation;
use tercio_train::objectives::retriever::measure;
use tercio_train::options::{ColbertLossKind, ColbertTextOptions, MOST_PASSAGES, PrecisionOptions};
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::ranks::start;
use tercio_train::run::Signals;
use tercio_train::setup::colbert::{encoding, open_colbert_among};

use super::common::{self, MOST_QUESTIONS, line, within};

/// Flags of `tercio eval colbert`.
#[derive(Args)]
pub struct EvalColbert {
    /// Model: a folder as `tercio train colbert` takes it, or a run's folder, which stands for its best checkpoint
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH")]
    model_path: String,
    /// Folder of the tokenizer; default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    text: ColbertTextOptions,
    /// Examples: queries with documents that have scores, judgements (`hasanswer`, positive and negatives), or both
    #[arg(long, env = "TERCIO_EVAL_DATA", required_unless_present = "beir")]
    eval_data: Option<PathBuf>,
    /// Collections as BEIR lays them out (corpus.jsonl, queries.jsonl, qrels/): each is searched whole, by exact scores
    #[arg(long, num_args = 1.., conflicts_with = "eval_data")]
    beir: Vec<PathBuf>,
    /// Which of their judgements
    #[arg(long, default_value = "test", requires = "beir")]
    split: String,
    /// What the loss among the figures is: contrastive over a query's own documents, or the divergence from the file's scores
    #[arg(long, value_enum, default_value_t = ColbertLossKind::Contrastive)]
    loss: ColbertLossKind,
    /// Divisor of the model's scores in that loss
    #[arg(long, default_value_t = 1.0)]
    temperature: f64,
    /// With --loss kl: scores as they are, instead of brought to the range 0 to 1 before
    #[arg(long)]
    raw_scores: bool,
    /// A masked token of a document counts as a product of 0, as in PyLate
    #[arg(long)]
    zero_floor: bool,
    /// Documents of each query, in the order of the example; 0: all
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 0)]
    n_context: usize,
    /// Queries to use, from the start of the file; -1: all
    #[arg(long, env = "TERCIO_MAXLOAD", default_value_t = -1, allow_negative_numbers = true)]
    maxload: i64,
    /// Queries at a time
    #[arg(long, env = "TERCIO_PER_GPU_BATCH_SIZE", default_value_t = 8)]
    per_gpu_batch_size: usize,
    #[command(flatten)]
    compute: PrecisionOptions,
    /// Threads; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    threads: usize,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Batches between progress lines
    #[arg(long, env = "TERCIO_EVAL_PRINT_FREQ", default_value_t = 1000)]
    eval_print_freq: u64,
    #[command(flatten)]
    link: LinkOptions,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    local_rank: i64,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    main_port: i64,
    /// Print the figures as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

impl EvalColbert {
    /// Evaluates.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let place = common::place(Flags { local_rank: self.local_rank, main_port: self.main_port })?;
        let threads = common::threads_of_rank(self.threads)?;
        common::start_log(&place, self.quiet)?;
        let signals = Signals::install()?;
        let world = common::join(&place, &self.link)?;
        let found = match common::end(&world, self.evaluate(&world, threads, &signals))? {
            Ok(found) if world.is_main() => found,
            Ok(_) => return Ok(ExitCode::SUCCESS),
            Err(code) => return Ok(code),
        };
        line(&match (found, self.json) {
            (Measured::Examples(figures), true) => object(&figures).to_string(),
            (Measured::Examples(figures), false) => measure::text(&figures),
            (Measured::Collections(found), true) => {
                let sets: Map<String, Value> =
                    found.iter().map(|(name, figures)| (name.clone(), object(figures))).collect();
                Value::from(sets).to_string()
            }
            (Measured::Collections(found), false) => table(&found),
        })?;
        Ok(ExitCode::SUCCESS)
    }

    fn check(&self) -> Result<(), TrainError> {
        self.link.check().map_err(TrainError::Options)?;
        self.text.check().map_err(TrainError::Options)?;
        within(&[("per_gpu_batch_size", self.per_gpu_batch_size, MOST_QUESTIONS)])?;
        let refuse = |what: String| Err(TrainError::Options(what));
        if self.n_context > MOST_PASSAGES {
            return refuse(format!("--n_context {}: expected at most {MOST_PASSAGES}", self.n_context));
        }
        if self.maxload < -1 || self.maxload == 0 {
            return refuse("--maxload must be -1 (all) or at least 1".into());
        }
        if self.eval_print_freq == 0 {
            return refuse("--eval_print_freq must be at least 1".into());
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return refuse(format!("--temperature must be a number above 0, is {}", self.temperature));
        }
        if self.raw_scores && self.loss != ColbertLossKind::Kl {
            return refuse(
                "--raw_scores is a setting of --loss kl; leave it out, or choose that loss".into(),
            );
        }
        Ok(())
    }

    fn evaluate(&self, world: &World, threads: usize, signals: &Signals) -> Result<Measured, TrainError> {
        let device: Cpu = start::device_among(world, threads, self.compute.get())?;
        let tokenizer = self.tokenizer.as_deref();
        let open = || open_colbert_among(world, &self.model_path, tokenizer, &self.text, &device);
        let opened = device.run(open)?;
        let encoding = encoding(&opened, &self.text)?;
        let stop = || signals.requested().is_some();
        let stopped = |e| if matches!(e, TrainError::Interrupted) { TrainError::Stopped } else { e };
        let Some(data) = &self.eval_data else {
            let search = CollectionSearch {
                device: &device,
                model: &opened.loaded.model,
                parameters: &opened.loaded.parameters,
                tokenizer: &opened.tokenizer,
                encoding: &encoding,
                zero_floor: self.zero_floor,
                batch: self.per_gpu_batch_size,
            };
            let measure = |(dir, name): (&PathBuf, String)| {
                let collection = Collection::open(dir, &self.split)?;
                let found =
                    device.run(|| search.measure_among(world, &collection, &stop)).map_err(stopped)?;
                Ok((name, FIGURES.iter().zip(found).map(|((name, ..), value)| (*name, value)).collect()))
            };
            let found =
                self.beir.iter().zip(names(&self.beir)).map(measure).collect::<Result<_, TrainError>>()?;
            world.barrier()?;
            return Ok(Measured::Collections(found));
        };
        let cache = self.cache_dir.as_deref();
        let examples: RetrievalExamples = open_among(world, data, cache, self.link.broadcast_data)?;
        let scale = 1.0 / self.temperature;
        let ranker = ColbertRanker {
            device: &device,
            model: &opened.loaded.model,
            parameters: &opened.loaded.parameters,
            tokenizer: &opened.tokenizer,
            encoding: &encoding,
            loss: match self.loss {
                ColbertLossKind::Contrastive => {
                    ColbertLoss::Contrastive { temperature: self.temperature, smoothing: 0.0 }
                }
                ColbertLossKind::Kl => {
                    ColbertLoss::Distillation(Distillation { normalize: !self.raw_scores, scale, gold: 1.0 })
                }
            },
            zero_floor: self.zero_floor,
            teacher: None,
            n_context: if self.n_context == 0 { usize::MAX } else { self.n_context },
            batch: self.per_gpu_batch_size,
            print_freq: self.eval_print_freq,
        };
        let limit = usize::try_from(self.maxload).unwrap_or(usize::MAX);
        let measured = device.run(|| ranker.measure_among(world, &examples, limit, &stop));
        let figures = measured.map_err(stopped)?.figures();
        // Nobody is done before rank 0 has seen everything.
        world.barrier()?;
        if world.is_main() && figures.is_empty() {
            return Err(TrainError::Unusable(format!(
                "{}: no example has scores of all its documents, or judged ones: nothing to measure",
                data.display()
            )));
        }
        Ok(Measured::Examples(figures))
    }
}

/// Figures by name.
type Figures = Vec<(&'static str, f64)>;

/// What was measured.
enum Measured {
    Examples(Figures),
    /// Each collection by its name, as [`names`] has it.
    Collections(Vec<(String, Figures)>),
}

/// What collections are called: by the names of their folders, those that share one by their whole paths.
fn names(folders: &[PathBuf]) -> Vec<String> {
    let last = |dir: &PathBuf| dir.file_name().map(|name| name.display().to_string());
    let lasts: Vec<Option<String>> = folders.iter().map(last).collect();
    let own = |(dir, name): (&PathBuf, &Option<String>)| match name {
        Some(own) if lasts.iter().filter(|other| *other == name).count() == 1 => own.clone(),
        _ => dir.display().to_string(),
    };
    folders.iter().zip(&lasts).map(own).collect()
}

fn object(figures: &Figures) -> Value {
    figures.iter().map(|(name, v)| ((*name).to_owned(), Value::from(*v))).collect::<Map<_, _>>().into()
}

/// A table in Markdown, in percent; with the mean of several collections.
fn table(found: &[(String, Figures)]) -> String {
    let names: Vec<&str> = FIGURES.iter().map(|(name, ..)| *name).collect();
    let mut lines = vec![
        format!("| collection | {} |", names.join(" | ")),
        format!("| --- |{}", " ---: |".repeat(names.len())),
    ];
    let row = |name: &str, values: Vec<f64>| {
        let shown: Vec<String> = values.iter().map(|v| format!("{:.2}", 100.0 * v)).collect();
        format!("| {name} | {} |", shown.join(" | "))
    };
    for (name, figures) in found {
        lines.push(row(name, figures.iter().map(|f| f.1).collect()));
    }
    if found.len() > 1 {
        let mean = |i: usize| found.iter().map(|(_, f)| f[i].1).sum::<f64>() / found.len() as f64;
        lines.push(row("mean", (0..names.len()).map(mean).collect()));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collections_of_one_name_are_told_apart() {
        let folders = ["a/beir", "b/beir/", "c/nq", ".."].map(PathBuf::from);
        assert_eq!(names(&folders), ["a/beir", "b/beir/", "nq", ".."]);
    }
}
