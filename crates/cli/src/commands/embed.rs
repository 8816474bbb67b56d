//! `tercio embed`: vectors of a collection of passages, or of questions, by all ranks; shards that are finished are not
//! computed again.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::template::TextTemplate;
use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, VectorsFolder};
use tercio_data::{Passages, Questions};
use tercio_engine::memory;
use tercio_models::embedding_model::TextKind;
use tercio_models::retriever::Pooling;
use tercio_train::embed::{
    EmbedProgress, EmbedReport, Embedder, EncodeTexts, TextEncoder, TextSource, Texts, VectorStore, WINDOW,
    embed_among, import_pickles,
};
use tercio_train::options::{DeviceOptions, PrecisionOptions};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::corpus::{ExampleFile, open_among};
use tercio_train::ranks::device::open_device;
use tercio_train::ranks::options::{LinkOptions, Requeue};
use tercio_train::ranks::requeue::requeue_among;
use tercio_train::ranks::start::same_among;
use tercio_train::run::progress::duration;
use tercio_train::run::{EXIT_SAVED_NOT_REQUEUED, Progress, Signals, StopReason};
use tercio_train::{TrainError, on_device};

use super::common::{self, line, within};

/// Tokens that are believed to be meant.
const MOST_TOKENS: usize = 1 << 20;
/// Texts of a window that are believed to be meant.
const MOST_WINDOW: usize = 1 << 20;
/// Passages of a shard that are believed to be meant.
const MOST_PER_SHARD: usize = 1 << 26;

/// Flags of `tercio embed`.
#[derive(Args)]
pub struct Embed {
    /// Model: a folder of a retriever (FiD's or Tercio's) or of an encoder (Hugging Face), a hub name, or a run's folder
    #[arg(long, visible_alias = "model", env = "TERCIO_MODEL_PATH", required_unless_present = "import")]
    pub(super) model_path: Option<String>,
    /// Folder of the tokenizer; default: the model's folder
    #[arg(long, env = "TERCIO_TOKENIZER")]
    pub(super) tokenizer: Option<PathBuf>,
    /// Passages: .tsv (id, text, title), .jsonl or .json, also .gz or .zst; .parquet in a build with that feature
    #[arg(long, env = "TERCIO_PASSAGES", required_unless_present_any = ["questions", "import"])]
    passages: Option<PathBuf>,
    /// Embed the questions of this file instead: FiD's .json or .jsonl, also .gz or .zst
    #[arg(long, conflicts_with = "passages")]
    pub(super) questions: Option<PathBuf>,
    /// Take over vectors that Fusion-in-Decoder or DPR pickled, these files in this order, instead of computing any
    #[arg(long, num_args = 1.., conflicts_with_all = ["passages", "questions", "model_path"])]
    import: Vec<PathBuf>,
    /// Folder for the vectors; what is finished in it stays
    #[arg(long, visible_alias = "output-path")]
    pub(super) output: PathBuf,
    /// Embed one of --num-shards parts only; the parts may go into the same folder, at the same time
    #[arg(long, default_value_t = 0)]
    shard_id: u64,
    /// Parts that the work is cut into
    #[arg(long, default_value_t = 1)]
    num_shards: u64,
    /// Vectors of one file
    #[arg(long, default_value_t = 50_000)]
    pub(super) passages_per_shard: usize,
    /// How numbers are stored: f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    pub(super) dtype: VectorDtype,
    /// Texts of a batch at most
    #[arg(long, env = "TERCIO_PER_GPU_BATCH_SIZE", default_value_t = 128)]
    pub(super) per_gpu_batch_size: usize,
    /// Tokens of a batch at most; a longer text is a batch by itself
    #[arg(long, default_value_t = 8192)]
    pub(super) batch_tokens: usize,
    /// Texts that one rank takes at a time and sorts by length into batches; their vectors are in memory together
    #[arg(long, default_value_t = WINDOW)]
    pub(super) window: usize,
    /// Tokens of a passage at most; default: as the model's configuration has it, or 200
    #[arg(long, env = "TERCIO_PASSAGE_MAXLENGTH")]
    pub(super) passage_maxlength: Option<usize>,
    /// Tokens of a question at most; default: as the model's configuration has it, or 40
    #[arg(long, env = "TERCIO_QUESTION_MAXLENGTH")]
    pub(super) question_maxlength: Option<usize>,
    /// Leave the titles out of the texts
    #[arg(long, env = "TERCIO_NO_TITLE", conflicts_with = "template")]
    pub(super) no_title: bool,
    /// Text that is made of each passage, with {title} and {text}, or of each question, with {question}; default: what the
    /// retriever's config.json says that it was trained with, else "title: {title} context: {text}" and "question: {question}", as
    /// Fusion-in-Decoder has them; for a folder of sentence-transformers and a plain encoder "{title} {text}" (without the space
    /// where there is no title) and "{question}", with the folder's prompts
    #[arg(long)]
    pub(super) template: Option<TextTemplate>,
    /// How the states of a plain encoder become one vector; retrievers and folders of sentence-transformers say it themselves
    #[arg(long, value_enum)]
    pooling: Option<Pool>,
    /// A vector for every token instead of one for every text, by a ColBERT model
    #[arg(long, conflicts_with_all = ["import", "pooling"])]
    multi_vector: bool,
    /// With --multi-vector: like tokens of a passage become one vector, so that so many times fewer are left
    #[arg(long, default_value_t = 1, requires = "multi_vector")]
    pub(super) pool_factor: usize,
    /// Tokens from the first on that keep their vectors when others are pooled
    #[arg(long, default_value_t = 1, requires = "multi_vector")]
    pub(super) protected_tokens: usize,
    /// Give pooled vectors unit length; PyLate leaves them means
    #[arg(long, requires = "multi_vector")]
    pub(super) normalize_pooled: bool,
    #[command(flatten)]
    pub(super) compute: PrecisionOptions,
    #[command(flatten)]
    pub(super) device: DeviceOptions,
    /// Threads; 0: all cores, shared out to the ranks of a host
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    threads: usize,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    link: LinkOptions,
    /// Under Slurm, after a signal: whether the job is queued again, to go on with the shards that are left
    #[arg(long, value_enum, env = "TERCIO_REQUEUE", default_value_t = Requeue::Auto)]
    requeue: Requeue,
    #[command(flatten)]
    unused: Unused,
    /// Print the figures as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Pool {
    /// The mean over all tokens, special ones too
    Mean,
    /// The first token: `[CLS]`
    First,
}

impl Pool {
    fn get(self) -> Pooling {
        match self {
            Pool::Mean => Pooling::Mean,
            Pool::First => Pooling::First,
        }
    }
}

/// Flags of FiD's script that have no bearing here.
#[derive(Args)]
struct Unused {
    #[arg(long, hide = true)]
    no_fp16: bool,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    local_rank: i64,
    #[arg(long, default_value_t = -1, hide = true, allow_negative_numbers = true)]
    main_port: i64,
}

/// What there is to embed, and where to.
pub(super) struct Work<'a> {
    pub encoder: &'a dyn EncodeTexts,
    pub texts: &'a Texts,
    pub settings: &'a VectorSettings,
    pub folder: Option<&'a dyn VectorStore>,
    /// Numbers of the model.
    pub parameters: usize,
    /// Vectors of a text at most.
    pub vectors: usize,
}

impl Embed {
    /// Embeds.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check().map_err(TrainError::Options)?;
        let place =
            common::place(Flags { local_rank: self.unused.local_rank, main_port: self.unused.main_port })?;
        let threads = common::threads_of_rank(self.threads)?;
        common::start_log(&place, self.quiet)?;
        if self.unused.no_fp16 {
            tracing::info!("--no_fp16 does nothing: numbers are stored as --dtype says, f32 without it");
        }
        let signals = Signals::install()?;
        if !self.import.is_empty() {
            let stop = || signals.requested().is_some();
            let report = import_pickles(
                &self.import,
                &self.output,
                self.dtype,
                self.passages_per_shard as u64,
                &stop,
            )?;
            return self.end(&World::alone(), &report, &signals);
        }
        let world = match common::join_with_signals(&place, &self.link, self.requeue, &signals)? {
            Ok(world) => world,
            Err(code) => return Ok(code),
        };
        let open = || open_device(&world, threads, self.compute.get(), &self.device);
        let embedded = open().and_then(|device| on_device!(&device, |d| self.embed(&world, d, &signals)));
        match common::end(&world, embedded)? {
            Ok(report) => self.end(&world, &report, &signals),
            Err(code) => Ok(code),
        }
    }

    /// Says what was done. A signal that ended the work, on whichever rank, asks for another start, as it does of a run.
    fn end(&self, world: &World, report: &EmbedReport, signals: &Signals) -> anyhow::Result<ExitCode> {
        if world.is_main() {
            line(&if self.json { serde_json::to_string(report)? } else { sentence(report) })?;
        }
        if !report.stopped {
            return Ok(ExitCode::SUCCESS);
        }
        let reason = signals.requested();
        let code = ExitCode::from(reason.map_or(EXIT_SAVED_NOT_REQUEUED, StopReason::exit_code));
        // Ctrl-C is somebody's wish, whichever rank it reached; where one is gone already, nobody asks Slurm.
        let interrupted = u8::from(reason == Some(StopReason::Interrupt));
        let again = world.all_gather_bytes(vec![interrupted]).is_ok_and(|all| !all.concat().contains(&1));
        let requeued = again && self.requeue == Requeue::Auto && requeue_among(world);
        Ok(if requeued { ExitCode::SUCCESS } else { code })
    }

    fn embed<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        signals: &Signals,
    ) -> Result<EmbedReport, TrainError> {
        if self.multi_vector {
            return self.embed_tokens(world, device, signals);
        }
        let name = self.model_path.as_deref().unwrap_or_default();
        let loaded = device
            .run(|| Embedder::open(name, self.tokenizer.as_deref(), self.pooling.map(Pool::get), device))?;
        let fingerprint = device.run(|| loaded.fingerprint(device));
        same_among(world, "--model_path", &fingerprint)?;
        let (kind, texts) = self.texts(world, &|kind| loaded.template(kind, self.no_title))?;
        let given = match kind {
            TextKind::Passage => self.passage_maxlength,
            TextKind::Question => self.question_maxlength,
        };
        let maxlength = given.unwrap_or_else(|| loaded.model.max_tokens(kind));
        if maxlength > loaded.model.encoder().max_tokens() {
            let most = loaded.model.encoder().max_tokens();
            return Err(TrainError::Options(format!(
                "{maxlength} tokens of a text: the model has positions for {most}"
            )));
        }
        let settings = VectorSettings {
            model_fingerprint: Some(fingerprint),
            dimension: loaded.model.dimension(),
            pooling: loaded.pooling().to_owned(),
            normalized: loaded.model.normalizes(),
            maxlength,
            ..self.settings(&texts)
        };
        let folder = match world.is_main() {
            true => Some(VectorsFolder::open(&self.output, settings.clone())?),
            false => None,
        };
        let encoder = TextEncoder {
            device,
            model: &loaded.model,
            tokenizer: &loaded.tokenizer,
            maxlength,
            padding: loaded.padding(kind),
            batch_tokens: self.batch_tokens,
            batch_texts: self.per_gpu_batch_size,
            window: self.window,
        };
        let work = Work {
            encoder: &encoder,
            texts: &texts,
            settings: &settings,
            folder: folder.as_ref().map(|f| f as _),
            parameters: loaded.model.layout().len(),
            vectors: 1,
        };
        device.run(|| self.among(world, work, signals))
    }

    /// What is the same of vectors of any kind; the rest is to be filled in.
    pub(super) fn settings(&self, texts: &Texts) -> VectorSettings {
        VectorSettings {
            format: FORMAT,
            model: self.model_path.clone().unwrap_or_default(),
            model_fingerprint: None,
            dimension: 0,
            dtype: self.dtype,
            precision: self.compute.get().name().to_owned(),
            pooling: String::new(),
            normalized: false,
            template: texts.template().to_string(),
            maxlength: 0,
            batch_tokens: self.batch_tokens,
            batch_texts: self.per_gpu_batch_size,
            window: self.window,
            source: texts.path().display().to_string(),
            source_fingerprint: Some(texts.fingerprint().to_owned()),
            count: texts.len() as u64,
            per_shard: self.passages_per_shard as u64,
        }
    }

    /// Embeds by all ranks, with a bar of progress.
    pub(super) fn among(
        &self,
        world: &World,
        work: Work<'_>,
        signals: &Signals,
    ) -> Result<EmbedReport, TrainError> {
        let Work { encoder, texts, settings, folder, parameters, vectors } = work;
        let all = settings.shards();
        let cut = |part: u64| (u128::from(all) * u128::from(part) / u128::from(self.num_shards)) as u64;
        let shards = cut(self.shard_id)..cut(self.shard_id + 1);
        if world.is_main() {
            tracing::info!("{}", plan(settings, &shards, parameters, vectors * world.size()));
        }
        let mut bar = None;
        let mut progress = |p: EmbedProgress| {
            let bar: &mut Progress = bar.get_or_insert_with(|| {
                Progress::start(0, p.total, world.is_main() && !self.quiet && !self.json)
            });
            bar.advance(p.done, "passages");
            if p.shard_finished {
                let rate = bar.steps_per_second().unwrap_or_default();
                let left = duration(bar.seconds_left().unwrap_or_default());
                tracing::info!(
                    "{} of {} passages, {} of {all} shards, {rate:.0} passages/s, {left} left",
                    p.done,
                    p.total,
                    p.shards
                );
            }
        };
        let stop = || signals.requested().is_some();
        embed_among(world, encoder, texts, settings, folder, shards, &stop, &mut progress)
    }

    /// The texts, on all ranks alike.
    pub(super) fn texts(
        &self,
        world: &World,
        default: &dyn Fn(TextKind) -> Result<TextTemplate, TrainError>,
    ) -> Result<(TextKind, Texts), TrainError> {
        let (cache, broadcast) = (self.cache_dir.as_deref(), self.link.broadcast_data);
        let kind = if self.questions.is_some() { TextKind::Question } else { TextKind::Passage };
        let template = match &self.template {
            Some(template) => template.clone(),
            None => default(kind)?,
        };
        if template.is_for_questions() != (kind == TextKind::Question) {
            let what = "--template: {question} is for --questions, {title} and {text} are for --passages";
            return Err(TrainError::Options(what.into()));
        }
        let texts = match (&self.questions, &self.passages) {
            (Some(path), _) => {
                Texts::of_questions(open_once::<Questions>(world, path, cache, broadcast)?, template)
            }
            (None, Some(path)) => {
                let passages = open_once::<Passages>(world, path, cache, broadcast)?;
                if world.is_main() && !passages.is_quoted() {
                    tracing::warn!("{}", common::not_quoted(&passages));
                }
                Texts::of_passages(passages, template)
            }
            (None, None) => {
                return Err(TrainError::Options("--passages or --questions: expected a file".into()));
            }
        };
        Ok((kind, texts))
    }

    fn check(&self) -> Result<(), String> {
        self.link.check()?;
        within(&[
            ("per_gpu_batch_size", self.per_gpu_batch_size, MOST_TOKENS),
            ("batch_tokens", self.batch_tokens, MOST_TOKENS),
            ("window", self.window, MOST_WINDOW),
            ("passages_per_shard", self.passages_per_shard, MOST_PER_SHARD),
            ("pool_factor", self.pool_factor, MOST_TOKENS),
            ("passage_maxlength", self.passage_maxlength.unwrap_or(3), MOST_TOKENS),
            ("question_maxlength", self.question_maxlength.unwrap_or(3), MOST_TOKENS),
        ])
        .map_err(|e| e.to_string())?;
        if self.num_shards == 0 || self.shard_id >= self.num_shards {
            return Err(format!(
                "--shard_id {} of --num_shards {}: expected a part from 0 to one less than their number",
                self.shard_id, self.num_shards
            ));
        }
        Ok(())
    }
}

/// Opens a file on all ranks. Where they share a folder for its index, one of each host makes the index, and the others find it.
fn open_once<F: ExampleFile>(
    world: &World,
    path: &Path,
    cache: Option<&Path>,
    broadcast: bool,
) -> Result<F, TrainError> {
    if let Some(cache) = cache.filter(|_| world.local_rank() == 0 && path.exists()) {
        F::open(path, cache)?;
    }
    world.barrier()?;
    open_among(world, path, cache, broadcast)
}

/// What will be done, and the memory that it takes with so many `vectors` of a text on all ranks.
fn plan(
    settings: &VectorSettings,
    shards: &std::ops::Range<u64>,
    parameters: usize,
    vectors: usize,
) -> String {
    let window = settings.window.saturating_mul(settings.dimension * 4).saturating_mul(vectors);
    let human = |bytes: usize| memory::human(bytes as u64);
    format!(
        "{} texts of {} as {} numbers of {} ({:?}, at most {} tokens), shards {} to {} of {}; memory: {} of parameters, {} of \
         vectors at a time, and a batch, whatever the number of texts",
        settings.count,
        settings.source,
        settings.dimension,
        settings.dtype.name(),
        settings.template,
        settings.maxlength,
        shards.start,
        shards.end.saturating_sub(1),
        settings.shards(),
        human(parameters * 4),
        human(window),
    )
}

fn sentence(r: &EmbedReport) -> String {
    let done = format!(
        "{} texts embedded in {} ({:.0} texts/s, {:.0} tokens/s) into {}",
        r.texts,
        duration(r.seconds),
        r.texts_per_second,
        r.tokens_per_second,
        r.output
    );
    let state = match (r.complete, r.stopped) {
        (true, _) => format!("all {} shards are finished", r.shards),
        (false, true) => {
            format!(
                "stopped by a signal: {} of {} shards are finished, the same command goes on",
                r.finished, r.shards
            )
        }
        (false, false) => format!("{} of {} shards are finished", r.finished, r.shards),
    };
    format!("{done}; {state}")
}
