//! The settings of a loop: `loop.toml`. The keys before its tables are [`LoopOptions`]; each stage has a table, whose keys are the
//! flags of the command that does the same by hand.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use tercio_data::vectors::VectorDtype;
use tercio_search::fusion::{Method, Normalisation, RRF_K};

use super::stage::Shape;
use super::tables::Tables;
use crate::embed::WINDOW;
use crate::error::TrainError;
use crate::options::{Init, PrecisionOptions, ReaderOptions, RetrieverOptions, TaskOptions, TrainOptions};
use crate::ranks::options::LinkOptions;

/// Rounds that are believed to be meant.
const MOST_ROUNDS: u32 = 100;
/// Passages of a question that are believed to be meant.
const MOST_DOCS: usize = 10_000;
/// The greatest weight that is believed to be meant.
const MOST_WEIGHT: f64 = 1e6;
/// Questions, texts or tokens of a batch that are believed to be meant.
const MOST: usize = 1 << 20;

/// The tables of `loop.toml`; `slurm` belongs to who sends jobs in.
pub const TABLES: [&str; 6] = ["search", "reader", "scores", "retriever", "embed", "slurm"];

/// The keys before all tables.
#[derive(Clone, Debug, Args)]
pub struct LoopOptions {
    /// The collection: .tsv (id, text, title), .jsonl or .json, also .gz or .zst
    #[arg(long)]
    pub passages: PathBuf,
    /// Questions with answers to train on; passages that they have are not used
    #[arg(long)]
    pub train_data: PathBuf,
    /// Held-out questions with answers
    #[arg(long)]
    pub eval_data: PathBuf,
    /// Folder of the loop
    #[arg(long, default_value = "loop")]
    pub output: PathBuf,
    /// Rounds
    #[arg(long, default_value_t = 2)]
    pub rounds: u32,
    /// Questions of --train-data to use, from its start; -1: all
    #[arg(long, default_value_t = -1, allow_negative_numbers = true)]
    pub maxload: i64,
    /// Seed of reader and retriever, where their tables have none
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Threads of every stage; 0: all cores, shared out to the ranks of a host
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// Every round's reader starts where the first one's does, instead of from the round before
    #[arg(long)]
    pub fresh_reader: bool,
    /// Every round's retriever starts where the first one's does, instead of from the round before
    #[arg(long)]
    pub fresh_retriever: bool,
    /// How products are computed.
    #[command(flatten)]
    pub compute: PrecisionOptions,
}

/// `[search]`: passages for the questions.
#[derive(Clone, Debug, Args)]
pub struct SearchOptions {
    /// Passages of each question
    #[arg(long, default_value_t = 100)]
    pub n_docs: usize,
    /// BM25: how soon more of the same word stops to count
    #[arg(long, default_value_t = 0.9)]
    pub k1: f64,
    /// BM25: how much long passages are marked down
    #[arg(long, default_value_t = 0.4)]
    pub b: f64,
    /// After the first round put what words and what vectors find together
    #[arg(long)]
    pub hybrid: bool,
    /// How: by reciprocal ranks, or by scores, each question's from 0 (the last of n_docs) to 1
    #[arg(long, value_enum, default_value_t = HybridOption::Rrf)]
    pub hybrid_method: HybridOption,
    /// How much what words find weighs there; what vectors find weighs 1
    #[arg(long, default_value_t = 1.0)]
    pub words_weight: f64,
}

/// How what words and what vectors find becomes one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HybridOption {
    /// Reciprocal rank fusion.
    Rrf,
    /// Sums of scores, each question's scaled from 0 to 1.
    Weighted,
}

impl HybridOption {
    /// The method of the same name.
    pub fn get(self) -> Method {
        match self {
            HybridOption::Rrf => Method::ReciprocalRank { k: RRF_K },
            HybridOption::Weighted => Method::Weighted { normalisation: Normalisation::MinMax },
        }
    }
}

/// `[scores]`: the reader at work.
#[derive(Clone, Debug, Args)]
pub struct ScoresOptions {
    /// Passages of each question that are read and scored; default: as many as the reader answers from
    #[arg(long)]
    pub n_context: Option<usize>,
    /// Questions at a time
    #[arg(long, default_value_t = 8)]
    pub per_gpu_batch_size: usize,
}

/// `[embed]`: vectors of all passages.
#[derive(Clone, Debug, Args)]
pub struct EmbedOptions {
    /// How numbers are stored: f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    pub dtype: VectorDtype,
    /// Vectors of one file
    #[arg(long, default_value_t = 50_000)]
    pub passages_per_shard: usize,
    /// Texts of a batch at most
    #[arg(long, default_value_t = 128)]
    pub per_gpu_batch_size: usize,
    /// Tokens of a batch at most; a longer text is a batch by itself
    #[arg(long, default_value_t = 8192)]
    pub batch_tokens: usize,
    /// Texts that one rank takes at a time and sorts by length into batches
    #[arg(long, default_value_t = WINDOW)]
    pub window: usize,
}

/// All settings of a loop.
#[derive(Clone, Debug)]
pub struct LoopSettings {
    /// The file, for what else is in it.
    pub tables: Tables,
    /// The keys before all tables.
    pub all: LoopOptions,
    /// `[search]`.
    pub search: SearchOptions,
    /// `[reader]`, of the first round; what differs by round is [`LoopSettings::reader_of`]'s.
    pub reader: ReaderOptions,
    /// `[scores]`.
    pub scores: ScoresOptions,
    /// `[retriever]`, of the first round.
    pub retriever: RetrieverOptions,
    /// `[embed]`.
    pub embed: EmbedOptions,
}

/// Flags of a training that the loop gives itself.
const GIVEN: [&str; 5] = ["name", "checkpoint_dir", "train_data", "eval_data", "threads"];
/// Flags that make no sense in a stage.
const WITHHELD: [(&str, &str); 13] = [
    ("new_run", "a loop knows by itself what is out of date; leave it out"),
    ("dry_run", "give --dry-run to `tercio loop`"),
    ("local_rank", "give ranks to `tercio launch` or Slurm"),
    ("main_port", "give ranks to `tercio launch` or Slurm"),
    ("backend", "all stages share their ranks: give it to `tercio loop`"),
    ("join_timeout", "all stages share their ranks: give it to `tercio loop`"),
    ("lost_after", "all stages share their ranks: give it to `tercio loop`"),
    ("collective_timeout", "all stages share their ranks: give it to `tercio loop`"),
    ("interface", "all stages share their ranks: give it to `tercio loop`"),
    ("broadcast_data", "all stages share their ranks: give it to `tercio loop`"),
    ("requeue", "all stages share a job: give it to `tercio loop`"),
    ("teacher", "the loop's reader teaches, by its scores"),
    ("maxload", "write it before all tables: it is the loop's"),
];

impl LoopSettings {
    /// Reads `loop.toml`.
    ///
    /// # Errors
    /// What is missing, unknown or out of range, with its line.
    pub fn read(path: &Path) -> Result<LoopSettings, TrainError> {
        LoopSettings::of(Tables::read(path)?)
    }

    /// As [`LoopSettings::read`].
    ///
    /// # Errors
    /// Likewise.
    pub fn of(tables: Tables) -> Result<LoopSettings, TrainError> {
        tables.only(&TABLES)?;
        let all: LoopOptions = tables.options("", &[], &[])?;
        let reader = training(&tables, "reader", &all)?;
        let retriever = training(&tables, "retriever", &all)?;
        let settings = LoopSettings {
            search: tables.options("search", &[], &[])?,
            scores: tables.options("scores", &[], &[])?,
            embed: tables.options("embed", &[], &[])?,
            all,
            reader,
            retriever,
            tables,
        };
        settings.check()?;
        Ok(settings)
    }

    /// Other rounds than the file has.
    ///
    /// # Errors
    /// A number out of range.
    pub fn with_rounds(mut self, rounds: Option<u32>) -> Result<LoopSettings, TrainError> {
        if let Some(rounds) = rounds {
            self.all.rounds = rounds;
        }
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), TrainError> {
        let within = |table: &str, key: &str, value: usize, most: usize| match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(self.error(table, key, &format!("{key} = {value}: expected 1 to {most}"))),
        };
        within("", "rounds", self.all.rounds as usize, MOST_ROUNDS as usize)?;
        within("search", "n_docs", self.search.n_docs, MOST_DOCS)?;
        let weight = self.search.words_weight;
        if !(weight > 0.0 && weight <= MOST_WEIGHT) {
            let what = format!("words_weight = {weight}: expected a number above 0, {MOST_WEIGHT} at most");
            return Err(self.error("search", "words_weight", &what));
        }
        if !self.search.hybrid {
            for key in ["hybrid_method", "words_weight"] {
                if self.tables.has_key("search", key) {
                    let what = format!("{key}: says how two searches become one; write hybrid = true too");
                    return Err(self.error("search", key, &what));
                }
            }
        }
        within("scores", "n_context", self.scores.n_context.unwrap_or(1), MOST_DOCS)?;
        within("scores", "per_gpu_batch_size", self.scores.per_gpu_batch_size, MOST)?;
        within("embed", "per_gpu_batch_size", self.embed.per_gpu_batch_size, MOST)?;
        within("embed", "batch_tokens", self.embed.batch_tokens, MOST)?;
        within("embed", "window", self.embed.window, MOST)?;
        within("embed", "passages_per_shard", self.embed.passages_per_shard, 1 << 26)?;
        if self.all.maxload < -1 || self.all.maxload == 0 {
            return Err(self.error("", "maxload", "maxload must be -1 (all) or at least 1"));
        }
        let read = self.scored();
        if read < 2 {
            let what = format!(
                "n_context = {read}: a retriever learns which of a question's passages help; let the reader score at least 2"
            );
            let table = if self.scores.n_context.is_some() { "scores" } else { "reader" };
            return Err(self.error(table, "n_context", &what));
        }
        let most =
            self.reader.model.n_context.max(self.answered()).max(read).max(self.retriever.model.n_context);
        if most > self.search.n_docs {
            let found = self.search.n_docs;
            let what =
                format!("n_docs = {found}: reader or retriever are to use {most} passages of each question");
            return Err(self.error("search", "n_docs", &what));
        }
        if self.retriever.model.n_context > read {
            let what = format!(
                "n_context = {}: the reader scores {read} passages of each question (n_context of [scores], or of [reader])",
                self.retriever.model.n_context
            );
            return Err(self.error("retriever", "n_context", &what));
        }
        if !self.retriever.model.distils() {
            let what = "loss: the loop's retriever learns from the reader's scores: expected kl or both";
            return Err(self.error("retriever", "loss", what));
        }
        for (table, checked) in [("reader", self.reader.check()), ("retriever", self.retriever.check())] {
            checked.map_err(|what| self.error("", table, &format!("[{table}]: {what}")))?;
        }
        Ok(())
    }

    fn error(&self, table: &str, key: &str, what: &str) -> TrainError {
        let at = [table, key];
        let at: &[&str] = match (table.is_empty(), self.tables.has_key(table, key)) {
            (true, _) => &at[1..],
            (false, true) => &at,
            (false, false) => &at[..1],
        };
        self.tables.error(at, what)
    }

    /// What decides which stages there are.
    pub fn shape(&self) -> Shape {
        Shape {
            rounds: self.all.rounds,
            hybrid: self.search.hybrid,
            reader_goes_on: !self.all.fresh_reader,
            retriever_goes_on: !self.all.fresh_retriever,
        }
    }

    /// Passages of each question that the reader scores.
    pub fn scored(&self) -> usize {
        self.scores.n_context.unwrap_or_else(|| self.answered())
    }

    /// Passages of each question that the reader answers from when it is measured.
    pub fn answered(&self) -> usize {
        match self.reader.model.eval_n_context {
            0 => self.reader.model.n_context,
            n => n,
        }
    }

    /// The settings of a reader in `dir`, on the questions of `search`; `start` is where it starts from, if not from where the file says.
    pub fn reader_of(
        &self,
        dir: &Path,
        search: &Path,
        start: Option<&Path>,
        link: &LinkOptions,
    ) -> ReaderOptions {
        let mut o = self.reader.clone();
        place(&mut o, dir, search, link);
        if let Some(start) = start {
            o.model.model_path = start.display().to_string();
            (o.model.init, o.model.model_config, o.model.tokenizer) = (Init::Pretrained, None, None);
        }
        o
    }

    /// As [`LoopSettings::reader_of`], of a retriever on the questions of `scores`.
    pub fn retriever_of(
        &self,
        dir: &Path,
        scores: &Path,
        start: Option<&Path>,
        link: &LinkOptions,
    ) -> RetrieverOptions {
        let mut o = self.retriever.clone();
        place(&mut o, dir, scores, link);
        if let Some(start) = start {
            o.model.model_path = start.display().to_string();
            (o.model.init, o.model.model_config, o.model.tokenizer) = (Init::Pretrained, None, None);
        }
        o
    }
}

fn place<T: TaskOptions>(o: &mut TrainOptions<T>, dir: &Path, data: &Path, link: &LinkOptions) {
    o.run.name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    o.run.checkpoint_dir = dir.parent().unwrap_or(Path::new("")).to_owned();
    o.data.train_data = Some(data.join("train.jsonl"));
    o.data.eval_data = Some(data.join("dev.jsonl"));
    o.run.ranks.link = link.clone();
}

/// The settings of a training, with those that the loop has for all.
fn training<T: TaskOptions>(
    tables: &Tables,
    name: &str,
    all: &LoopOptions,
) -> Result<TrainOptions<T>, TrainError> {
    // Values of their own come with the round.
    let given =
        GIVEN.map(|flag| (flag, if flag == "threads" { all.threads.to_string() } else { "stage".into() }));
    let mut options: TrainOptions<T> = tables.options(name, &given, &WITHHELD)?;
    if !tables.has_key(name, "seed") {
        options.run.seed = all.seed;
    }
    if !["precision", "bf16"].iter().any(|key| tables.has_key(name, key)) {
        options.compute = all.compute;
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "passages = \"p.tsv\"\ntrain_data = \"t.jsonl\"\neval_data = \"d.jsonl\"\n";

    fn read(rest: &str) -> Result<LoopSettings, TrainError> {
        LoopSettings::of(Tables::parse(Path::new("loop.toml"), format!("{HEAD}{rest}"))?)
    }

    #[test]
    fn what_all_stages_share_is_said_once() {
        let s = read(
            "seed = 7\nprecision = \"bf16\"\n[reader]\nn_context = 4\n[retriever]\nseed = 8\nn_context = 3\n",
        )
        .unwrap();
        assert_eq!((s.reader.run.seed, s.retriever.run.seed), (7, 8));
        assert_eq!(s.reader.compute.get().name(), "bf16");
        assert_eq!((s.scored(), s.all.rounds, s.search.n_docs), (4, 2, 100));
        let link = s.reader.run.ranks.link.clone();
        let (dir, search) = (Path::new("l/round-2/reader"), Path::new("l/round-2/search"));
        let o = s.reader_of(dir, search, Some(Path::new("m")), &link);
        assert_eq!((o.run.name.as_str(), o.run.checkpoint_dir.as_path()), ("reader", Path::new("l/round-2")));
        assert_eq!((o.model.model_path.as_str(), o.model.init), ("m", Init::Pretrained));
        assert_eq!(o.data.eval_data.unwrap(), search.join("dev.jsonl"));
    }

    #[test]
    fn mistakes_are_said_with_their_lines() {
        let two = "[reader]\nn_context = 4\n[retriever]\nn_context = 3\n";
        let refused = |rest: &str, with: &str| {
            let error = read(rest).unwrap_err();
            assert!(matches!(error, TrainError::Options(_)));
            let error = error.to_string();
            assert!(error.starts_with("loop.toml, line ") && error.contains(with), "{error}");
        };
        refused("round = 2\n", "line 4: round: there is no such setting; did you mean rounds?");
        refused("[readers]\nx = 1\n", "line 4: there is no table [readers]");
        refused("rounds = 0\n", "line 4: rounds = 0: expected 1 to 100");
        refused(
            &format!("{two}[search]\nn_docs = 3\n"),
            "line 9: n_docs = 3: reader or retriever are to use 4",
        );
        refused(
            "[reader]\nn_context = 1\n[retriever]\nn_context = 1\n",
            "line 5: n_context = 1: a retriever learns",
        );
        refused(
            "[reader]\nn_context = 2\n[retriever]\nn_context = 3\n",
            "line 7: n_context = 3: the reader scores 2",
        );
        refused(&format!("{two}loss = \"contrastive\"\n"), "line 8: loss: the loop's retriever learns from");
        refused(
            &format!("{two}loss = \"kl\"\ntrain_data = \"x\"\n"),
            "line 9: train_data: the loop sets this one itself",
        );
        let hybrid = format!("{two}[search]\nhybrid = true\n");
        refused(
            &format!("{hybrid}words_weight = -1.0\n"),
            "line 10: words_weight = -1: expected a number above",
        );
        refused(
            &format!("{two}[search]\nwords_weight = 2.0\n"),
            "line 9: words_weight: says how two searches",
        );
        refused(&format!("{two}teacher = \"x\"\n"), "line 8: teacher: the loop's reader teaches");
        refused(
            "[reader]\nn_context = 2\neval_freq = 0\n[retriever]\nn_context = 2\n",
            "line 4: [reader]: --eval_freq must be",
        );
        let text = "train_data = \"t.jsonl\"\n".to_owned();
        let error =
            LoopSettings::of(Tables::parse(Path::new("loop.toml"), text).unwrap()).unwrap_err().to_string();
        assert!(error.contains("--passages") && error.contains("before its tables"), "{error}");
    }
}
